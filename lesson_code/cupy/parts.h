// What the kernels with chunks of 16 tokens have in common: sums in 16 parts, and rows on their way from memory.

constexpr int LENGTH = 16;     // tokens of a chunk
constexpr int PARTS = LENGTH;  // of a sum; see sum_of_parts
constexpr int THREADS = LENGTH * PARTS;
constexpr int DECAYS = PER_CHANNEL ? FEATURES : 1;

// The two halves of a warp have neighboring rows r. Where they read 16 numbers each of rows r, these
// lie in different banks; and so they do in tiles that are 2 wider than 16, for columns r of 16 rows.
constexpr int pitch(int width) { return width % 32 ? width : width + 16; }

// LENGTH rows on their way from memory, in registers. They are asked for one chunk ahead, so that
// they arrive while that chunk is computed. A thread has columns part, part + 16, ... of its row, and
// so one address for all.
template <int WIDTH> struct Tile {
    static constexpr int LOADS = (WIDTH + PARTS - 1) / PARTS;
    float held[LOADS];

    // The rows from `start` on, those before `end`, and their columns from `first` on; 0 outside.
    template <typename T> __device__ __forceinline__ void ask(const Rows<T>& rows, int start, int end, int first) {
        const int t = start + threadIdx.x / PARTS, part = threadIdx.x % PARTS;
        const int count = t >= 0 && t < end && part < WIDTH ? rows.width - first - part : 0;
        const T* own = rows.row(t) + first + part;
#pragma unroll
        for (int n = 0; n < LOADS; n++) held[n] = n * PARTS < count ? to_float(own[n * PARTS]) : 0.0f;
    }
    template <int PITCH> __device__ __forceinline__ void store(float (*tile)[PITCH]) const {
        const int part = threadIdx.x % PARTS;
#pragma unroll
        for (int n = 0; n < LOADS; n++)
            if (part < WIDTH) tile[threadIdx.x / PARTS][part + n * PARTS] = held[n];
    }
};

// Adds up sums[t], for each t, over 16 neighbors; number t of them receives that of t. In each of
// four steps neighbors give each other the half of their sums that the other one will keep.
template <int HALF = PARTS / 2> __device__ __forceinline__ float sum_of_parts(float (&sums)[LENGTH]) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int t = 0; t < HALF; t++) {
        const float keep = upper ? sums[t + HALF] : sums[t], give = upper ? sums[t] : sums[t + HALF];
        sums[t] = keep + __shfl_xor_sync(~0u, give, HALF);
    }
    if constexpr (HALF > 1) return sum_of_parts<HALF / 2>(sums);
    return sums[0];
}

// The decay over the tokens [first, end) of the chunk, in one channel.
template <int PITCH> __device__ __forceinline__ float decay(const float (*logs)[PITCH], int channel, int first, int end) {
    float log = 0.0f;
    for (int t = first; t < end; t++) log += logs[t][PER_CHANNEL ? channel : 0];
    return expf(log);
}
