// Kernel (e): the chunks of linear.cu in float32, which the tensor cores do not multiply.
//
// As in kernel (b) a thread multiplies a column of r numbers by a row of c: r + c reads for r c products. But here it
// reads four numbers at a time, and its tiles are larger: 4 x COLUMNS / 32 numbers of the outputs, and FEATURES / 16 x
// COLUMNS / 16 of the state. As in pipelined.cu a block walks through a head, or a segment of one, and the next chunk
// comes meanwhile. Keys and values are read once more where heads are cut, queries and keys for each slab of columns.

#include "walk.h"

constexpr int THREADS = 256;
constexpr int PITCH = FEATURES + 4;  // of queries and keys: rows begin four banks apart
constexpr int TILE = CHUNK * PITCH, STAGE = 2 * TILE + CHUNK * COLUMNS;  // numbers: queries, keys, values
constexpr int ACROSS = COLUMNS / 32;                                     // a thread's columns of the outputs
constexpr int STATE_DOWN = FEATURES / 16, STATE_ACROSS = COLUMNS / 16;   // its tile of the state
constexpr int BLOCKS = FEATURES + COLUMNS > 128 ? 1 : 2;                 // on a multiprocessor at the same time
static_assert(CHUNK == 32, "its rows and columns are shared out among THREADS threads");
static_assert(FEATURES % 64 == 0 && FEATURES <= THREADS, "z has a thread for each number");
static_assert(COLUMNS == 64 || COLUMNS == 128, "load() takes two numbers or four");
static_assert(ONES || !NORMALIZE, "z is neither read nor added to without ONES");

__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
// A warp's threads: 4 rows and 8 columns of them. Next neighbors have the same row, those two apart the same column: then
// a load of 16 bytes, which they ask for at the same address, takes half of the passes that it would take otherwise.
__device__ __forceinline__ int lane_row() { return threadIdx.x / 2 % 2 + threadIdx.x / 16 % 2 * 2; }
__device__ __forceinline__ int lane_column() { return threadIdx.x % 2 + threadIdx.x / 4 % 4 * 2; }

__device__ __forceinline__ void load(float (&to)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
__device__ __forceinline__ void load(float (&to)[2], const float* from) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
}

// The thread's tile of a state (FEATURES, COLUMNS): fours of neighbors, 64 apart. What the warp's threads read together
// of keys or values is in different banks.
struct State {
    float numbers[STATE_DOWN][STATE_ACROSS];

    __device__ __forceinline__ int feature(int i) const { return i / 4 * 64 + warp() % 4 * 16 + lane_row() * 4 + i % 4; }
    __device__ __forceinline__ int column(int j) const { return j / 4 * 64 + warp() / 4 * 32 + lane_column() * 4 + j % 4; }

    // += keys^T values
    __device__ __forceinline__ void add(const float* keys, const float* values) {
#pragma unroll 16
        for (int t = 0; t < CHUNK; t++) {
            float k[STATE_DOWN / 4][4], v[STATE_ACROSS / 4][4];
#pragma unroll
            for (int i = 0; i < STATE_DOWN; i += 4) load(k[i / 4], keys + t * PITCH + feature(i));
#pragma unroll
            for (int j = 0; j < STATE_ACROSS; j += 4) load(v[j / 4], values + t * COLUMNS + column(j));
#pragma unroll
            for (int i = 0; i < STATE_DOWN; i++)
#pragma unroll
                for (int j = 0; j < STATE_ACROSS; j++) numbers[i][j] += k[i / 4][i % 4] * v[j / 4][j % 4];
        }
    }

    // To shared memory, where all can multiply by it.
    __device__ __forceinline__ void share(float* memory) const {
#pragma unroll
        for (int i = 0; i < STATE_DOWN; i++)
#pragma unroll
            for (int j = 0; j < STATE_ACROSS; j += 4) {
                const float4 four = {numbers[i][j], numbers[i][j + 1], numbers[i][j + 2], numbers[i][j + 3]};
                *reinterpret_cast<float4*>(memory + feature(i) * COLUMNS + column(j)) = four;
            }
    }

    // Reads the tile from an array (features, columns), 0 outside of it, or writes it there. With ONES its last column is z.
    template <bool READ, typename Memory>
    __device__ __forceinline__ void transfer(Memory* memory, float* z, int features, int width, int columns, int slab) {
#pragma unroll
        for (int i = 0; i < STATE_DOWN; i++)
#pragma unroll
            for (int j = 0; j < STATE_ACROSS; j++) {
                const int c = feature(i), m = slab * COLUMNS + column(j);
                const bool known = memory && c < features && m < width;
                if constexpr (READ) numbers[i][j] = known ? memory[(long long)c * columns + m] : 0.0f;
                else if (known) memory[(long long)c * columns + m] = numbers[i][j];
            }
        const int c = threadIdx.x;
        if (!ONES || c >= FEATURES) return;
        const bool known = memory && c < features;
        if constexpr (READ) z[c] = known ? memory[(long long)c * columns + width] : 0.0f;
        else if (known && slab == 0) memory[(long long)c * columns + width] = z[c];
    }
};

// z += the keys of a chunk; each number of it has one thread.
__device__ __forceinline__ void add_keys(float* z, const float* keys) {
    if (!ONES || threadIdx.x >= FEATURES) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int t = 0; t < CHUNK; t++) sum += keys[t * PITCH + threadIdx.x];
    z[threadIdx.x] += sum;
}

// Begins to copy rows [start, start + CHUNK), those before `end`, and WIDTH columns from `first` on; 0 outside.
template <int WIDTH>
__device__ __forceinline__ void fetch(float* tile, int pitch, const Rows<const float>& rows, int start, int end, int first) {
    constexpr int FOURS = WIDTH / 4, ROWS = THREADS / FOURS;  // rows at a time
    const int row = threadIdx.x / FOURS, column = threadIdx.x % FOURS * 4;
    float* to = tile + row * pitch + column;
    if (ALIGNED && start + CHUNK <= end && first + WIDTH <= rows.width) {
        const float* from = rows.row(start + row) + first + column;
#pragma unroll
        for (int n = 0; n < CHUNK / ROWS; n++) copy_async(to + n * ROWS * pitch, from + n * ROWS * rows.token);
        return;
    }
#pragma unroll 1
    for (int t = start + row; t < start + CHUNK; t += ROWS, to += ROWS * pitch) {
        if (ALIGNED && t < end && first + column + 4 <= rows.width) {
            copy_async(to, rows.row(t) + first + column);
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < 4; j++) to[j] = t < end ? rows.number(t, first + column + j) : 0.0f;
    }
}

#ifdef FORWARD
// The thread's outputs: rows four apart of 16, and neighbors among the columns.
__device__ __forceinline__ int own_row(int i) { return warp() / 4 * 16 + lane_row() + 4 * i; }
__device__ __forceinline__ int own_column() { return (warp() % 4 * 8 + lane_column()) * ACROSS; }

// output += left right: the thread's rows of `left`, and its columns of the first `count` rows of `right`.
template <int UNROLL>
__device__ __forceinline__ void multiply(float (&output)[4][ACROSS], const float* left, const float* right, int count) {
#pragma unroll UNROLL
    for (int c = 0; c < count; c += 4) {
        float rows[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) load(rows[i], left + own_row(i) * PITCH + c);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float columns[ACROSS];
            load(columns, right + (c + e) * COLUMNS + own_column());
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++) output[i][j] += rows[i][e] * columns[j];
        }
    }
}

// Of the scores of a chunk, Q K^T, a thread has rows and columns y, y + 4 and x, x + 8.
constexpr int SIDE = 2;
__device__ __forceinline__ int score_row(int i) { return warp() / 2 * 8 + lane_row() + 4 * i; }
__device__ __forceinline__ int score_column(int j) { return warp() % 2 * 16 + lane_column() + 8 * j; }
__device__ __forceinline__ void make_scores(float (&scores)[SIDE][SIDE], const float* queries, const float* keys) {
#pragma unroll 16
    for (int c = 0; c < FEATURES; c += 4) {
        float q[SIDE][4], k[SIDE][4];
#pragma unroll
        for (int i = 0; i < SIDE; i++) load(q[i], queries + score_row(i) * PITCH + c);
#pragma unroll
        for (int j = 0; j < SIDE; j++) load(k[j], keys + score_column(j) * PITCH + c);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int i = 0; i < SIDE; i++)
#pragma unroll
                for (int j = 0; j < SIDE; j++) scores[i][j] += q[i][e] * k[j][e];
    }
}

// A token's normalizer has 8 threads, neighbors, and each of them every eighth term.
template <int COUNT> __device__ __forceinline__ float eighth_of_product(const float* row, const float* z) {
    float sum = 0.0f;
#pragma unroll
    for (int c = threadIdx.x % 8; c < COUNT; c += 8) sum += row[c] * (z ? z[c] : 1.0f);
    return sum;
}

// The outputs of one segment and one slab of a head, from the state `before` it, or from 0. The last segment writes `last`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tiled_walk(Rows<const float> q, Rows<const float> k, Rows<const float> v, Rows<float> out, const float* before, float* last,
           float* denominators, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    float* const stages = reinterpret_cast<float*>(shared);
    float *const memory = stages + STAGES * STAGE, *const z = memory + FEATURES * COLUMNS, *const normalizers = z + FEATURES;
    const long long head = blockIdx.x / segments;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + v.ones;
    const long long size = (long long)features * columns;
    State state;
    state.transfer<true>(before ? before + blockIdx.x * size : nullptr, z, features, v.width, columns, slab);

    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        float *queries = stages + stage * STAGE, *keys = queries + TILE, *values = keys + TILE;
        const int start = first + i * CHUNK;
        fetch<FEATURES>(queries, PITCH, q, start, end, 0);
        fetch<FEATURES>(keys, PITCH, k, start, end, 0);
        fetch<COLUMNS>(values, COLUMNS, v, start, end, slab * COLUMNS);
    }, [&](int i, int stage) {
        float* const queries = stages + stage * STAGE;
        const float *keys = queries + TILE, *values = keys + TILE;
        const int start = first + i * CHUNK, token = threadIdx.x / 8;
        state.share(memory);
        float scores[SIDE][SIDE] = {};
        make_scores(scores, queries, keys);
        float normalizer = NORMALIZE ? eighth_of_product<FEATURES>(queries + token * PITCH, z) : 0.0f;
        __syncthreads();
        float output[4][ACROSS] = {};
        multiply<16>(output, queries, memory, FEATURES);
        __syncthreads();

        // The weights take the place of the queries, in their first CHUNK columns.
        float* const weights = queries;
        for (int a = 0; a < SIDE; a++)
            for (int b = 0; b < SIDE; b++) {
                const int t = score_row(a), j = score_column(b);
                weights[t * PITCH + j] = j <= t ? scores[a][b] : 0.0f;
            }
        __syncthreads();
        if (NORMALIZE) {
            normalizer += eighth_of_product<CHUNK>(weights + token * PITCH, nullptr);
            for (int lanes = 1; lanes < 8; lanes *= 2) normalizer += __shfl_xor_sync(~0u, normalizer, lanes);
            if (threadIdx.x % 8 == 0) {
                normalizers[token] = normalizer;
                if (slab == 0 && start + token < end) denominators[head * N + start + token] = normalizer;
            }
        }
        multiply<4>(output, weights, values, (warp() / 4 + 1) * 16);  // of the upper rows only the first half
        state.add(keys, values);
        add_keys(z, keys);
        if (NORMALIZE) __syncthreads();
        const int m = slab * COLUMNS + own_column();
        float* to = out.row(start + own_row(0)) + m;
#pragma unroll
        for (int a = 0; a < 4; a++, to += 4 * out.token) {
            if (start + own_row(a) >= end) break;
            for (int j = 0; NORMALIZE && j < ACROSS; j++) output[a][j] = divide(output[a][j], normalizers[own_row(a)]);
            if (!ALIGNED || m + ACROSS > out.width) {
                for (int j = 0; j < ACROSS; j++)
                    if (m + j < out.width) to[j] = output[a][j];
            } else if constexpr (ACROSS == 4) {
                const float4 four = {output[a][0], output[a][1], output[a][2], output[a][3]};
                *reinterpret_cast<float4*>(to) = four;
            } else {
                const float2 two = {output[a][0], output[a][1]};
                *reinterpret_cast<float2*>(to) = two;
            }
        }
    });
    if (last && end == N) state.transfer<false>(last + head * size, z, features, v.width, columns, slab);
}
#endif

#ifdef SUMS
#include "segments.h"

// The sum of k v^T over each segment, and behind the columns of v that of k.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tiled_sums(Rows<const float> k, Rows<const float> v, float* sums, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    float* const stages = reinterpret_cast<float*>(shared);
    float* const z = stages + STAGES * STAGE;
    const long long head = blockIdx.x / segments;
    k = k.of_head(head), v = v.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + v.ones;
    State state;
    state.transfer<true>((const float*)nullptr, z, features, v.width, columns, slab);
    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        float *keys = stages + stage * STAGE, *values = keys + TILE;
        fetch<FEATURES>(keys, PITCH, k, first + i * CHUNK, end, 0);
        fetch<COLUMNS>(values, COLUMNS, v, first + i * CHUNK, end, slab * COLUMNS);
    }, [&](int i, int stage) {
        const float* keys = stages + stage * STAGE;
        state.add(keys, keys + TILE);
        add_keys(z, keys);
    });
    state.transfer<false>(sums + (long long)blockIdx.x * features * columns, z, features, v.width, columns, slab);
}
#endif
