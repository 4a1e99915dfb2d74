// What the walks of memories that fade have in common, for one decay and for a decay of each channel.

// Two neighbors of 16 bits.
__device__ __forceinline__ float2 to_floats(unsigned both) {
    const TYPE low = {static_cast<unsigned short>(both)}, high = {static_cast<unsigned short>(both >> 16)};
    return {to_float(low), to_float(high)};
}
__device__ __forceinline__ float2 to_floats(const TYPE* at) { return to_floats(*reinterpret_cast<const unsigned*>(at)); }

// A state is shared in 16 bits, divided by the power of two that the largest of it asks for.
__device__ __forceinline__ void note_largest(const State& state, float* maxima) {
    if (!SCALED) return;
    const float largest = state.largest(false);
    if (lane() == 0) maxima[warp()] = largest;
}
__device__ __forceinline__ int exponent_of_all(const float* maxima) {
    float largest = 0.0f;
    for (int w = 0; SCALED && w < WARPS; w++) largest = fmaxf(largest, maxima[w]);
    return SCALED ? exponent_for(largest) : 0;
}

// The same, to memory: what the backward walk multiplies by.
__device__ __forceinline__ void write_image(const State& state, TYPE* image, int exponent) {
    const Rows<TYPE> rows = {image, 0, 0, COLUMNS, 1, COLUMNS, 0, 0};
#pragma unroll
    for (int b = 0; b < STATE_DOWN; b++) {
        float numbers[STATE_ACROSS][4];
        for (int n = 0; n < STATE_ACROSS; n++)
            for (int e = 0; e < 4; e++) numbers[n][e] = state.numbers[b][n][e] * power_of_two(-exponent);
        store_rows(numbers, rows, (quarter() * STATE_DOWN + b) * 16, FEATURES, half() * STATE_ACROSS * 8);
    }
}

// An image on its way from memory, in registers.
struct Image {
    static constexpr int LOADS = FEATURES * COLUMNS / 8 / THREADS;
    uint4 held[LOADS];
    int exponent;

    __device__ __forceinline__ void ask(const TYPE* images, const int* exponents, long long chunk) {
        const uint4* from = reinterpret_cast<const uint4*>(images + chunk * FEATURES * COLUMNS) + threadIdx.x;
#pragma unroll
        for (int n = 0; n < LOADS; n++) held[n] = from[n * THREADS];
        exponent = SCALED ? exponents[chunk] : 0;
    }
    __device__ __forceinline__ void store(TYPE* memory) const {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int at = (n * THREADS + threadIdx.x) * 8;
            *reinterpret_cast<uint4*>(memory + at / COLUMNS * COLUMN_PITCH + at % COLUMNS) = held[n];
        }
    }
};

#ifdef STATES
// The memory before each segment in the place of what the segment adds; backwards, that behind it. A thread has one
// number of it. What a segment leaves is one number for each `together` numbers of a memory: for all of it, or a channel.
extern "C" __global__ void __launch_bounds__(THREADS)
fading_segments(float* states, const float* totals, const float* initial, int segments, int size, int together,
                int backwards, long long count) {
    const long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (i >= count) return;
    float state = initial[i];
    for (int s = 0; s < segments; s++) {
        const long long number = i / size * segments + (backwards ? segments - 1 - s : s);
        float& own = states[number * size + i % size];
        const float added = own;
        own = state;
        state = totals[(number * size + i % size) / together] * state + added;
    }
}
#endif
