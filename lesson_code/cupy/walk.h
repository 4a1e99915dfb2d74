// A walk of `count` steps. While one is worked on, copies for the next ones are on their way, in other stages.
template <typename Fetch, typename Work>
__device__ __forceinline__ void walk(int count, Fetch fetch_step, Work work) {
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) fetch_step(i, i);
        end_group();
    }
    for (int i = 0, stage = 0, free = STAGES - 1; i < count; i++) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // the copies of all threads are there, and nobody reads the stage that is free
        if (i + STAGES - 1 < count) fetch_step(i + STAGES - 1, free);
        end_group();
        work(i, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        free = free + 1 == STAGES ? 0 : free + 1;
    }
}
