// One thread for each number of a state: from the sums of the segments to the states before them or, where time runs
// backwards, behind them.
extern "C" __global__ void __launch_bounds__(256)
states_of_segments(float* sums, const float* initial, int size, int segments, int backwards, long long total) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= total) return;
    const int step = backwards ? -size : size;
    float* sum = sums + i / size * segments * size + i % size + (backwards ? (segments - 1) * (long long)size : 0);
    float state = initial ? initial[i] : 0.0f;
    for (int s = 0; s < segments; s++, sum += step) {
        const float own = *sum;
        *sum = state;
        state += own;
    }
}
