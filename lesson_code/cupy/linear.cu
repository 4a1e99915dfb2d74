// Causal linear attention on a GPU: out_t = q_t^T S_t, where S_t = S_{t-1} + k_t v_t^T.
//
// Three ways to compute it, from the recurrence to the tensor cores; a macro of _launches.py
// chooses one. A state is an array (features, columns) of floats for every head; where the
// normalizer is wanted, v has one more column, of ones, and its sum of keys is z.
//
// The gradients need no kernel of their own: each is such a scan again, with the arrays in other
// places, and with time running backwards for those of k and v (linear.py, `backward`).
//
// A second number in __launch_bounds__ says for how many blocks at a time a multiprocessor must
// have the registers; without it the compiler guesses, and now and then spills to meet its guess.

// A tile of numbers on its way from memory, in registers, shared out among THREADS threads. Instructions
// start in order, and one that needs a number waits for it, and all behind it wait as well. So a
// kernel asks for all that a step needs before it stores the first number: one wait for them all. The
// barrier behind the last step stands between the two, where it keeps the compiler from mixing them.
template <int ROWS, int WIDTH, int THREADS> struct Tile {
    static constexpr int DOWN = THREADS < WIDTH ? 1 : THREADS / WIDTH;  // rows at a time
    static constexpr int ACROSS = (WIDTH + THREADS - 1) / THREADS;      // numbers of a thread in a row
    static constexpr int LOADS = (ROWS + DOWN - 1) / DOWN * ACROSS;
    float held[LOADS];

    __device__ __forceinline__ int row(int n) const { return threadIdx.x / WIDTH + n / ACROSS * DOWN; }
    __device__ __forceinline__ int column(int n) const { return threadIdx.x % WIDTH + n % ACROSS * THREADS; }
    __device__ __forceinline__ bool has(int n) const {
        return threadIdx.x < DOWN * WIDTH && row(n) < ROWS && column(n) < WIDTH;
    }
    // The rows from `first_row` on, those before `end`, and their columns from `first_column` on; 0 outside.
    template <typename T>
    __device__ __forceinline__ void ask(const Rows<T>& rows, int first_row, int end, int first_column) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const bool known = has(n) && first_row + row(n) < end;
            held[n] = known ? rows.number(first_row + row(n), first_column + column(n)) : 0.0f;
        }
    }
    template <int PITCH> __device__ __forceinline__ void store(float (&tile)[ROWS][PITCH]) const {
#pragma unroll
        for (int n = 0; n < LOADS; n++)
            if (has(n)) tile[row(n)][column(n)] = held[n];
    }
};

#ifdef RECURRENT
// (a) One thread for every column of the state, which it keeps in registers: the recurrence as it
// stands in the book. Wide columns are shared by PARTS neighbors. The tokens come one by one, so
// that the threads of one head take N steps whatever the GPU.

// Read together, so that they are one trip to memory. Where columns are shared, more would not fit the registers.
constexpr int TOKENS = PARTS == 1 ? 8 : 2;
constexpr int THREADS = ((COLUMNS + ONES) * PARTS + 31) / 32 * 32;
constexpr int OWN = FEATURES / PARTS;

extern "C" __global__ void __launch_bounds__(THREADS)
recurrent(Rows<const Q_TYPE> q, Rows<const K_TYPE> k, Rows<const V_TYPE> v, Rows<OUT_TYPE> out,
          const float* initial, float* last, float* denominators, int N, int features) {
    __shared__ float queries[TOKENS][FEATURES], keys[TOKENS][FEATURES], normalizers[TOKENS];
    const long long head = blockIdx.x;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int part = threadIdx.x % PARTS, place = threadIdx.x / PARTS;
    // Every block has its own column of ones, behind its columns of values.
    const bool is_ones = ONES && place == COLUMNS;
    const int column = is_ones ? v.width : blockIdx.y * COLUMNS + place;
    const bool is_value = place < COLUMNS && column < v.width;
    const int columns = v.width + v.ones;

    float state[OWN];
    for (int j = 0; j < OWN; j++) {
        const int c = j * PARTS + part;
        const bool known = initial && (is_value || is_ones) && c < features;
        state[j] = known ? initial[(head * features + c) * columns + column] : 0.0f;
    }

    for (int start = 0; start < N; start += TOKENS) {
        const int count = min(TOKENS, N - start);
        Tile<TOKENS, FEATURES, THREADS> some_queries, some_keys;
        float values[TOKENS];
        some_queries.ask(q, start, N, 0);
        some_keys.ask(k, start, N, 0);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            values[t] = is_ones ? 1.0f : 0.0f;
            if (is_value && t < count) values[t] = to_float(v.row(start + t)[column]);
        }
        __syncthreads();
        some_queries.store(queries);
        some_keys.store(keys);
        __syncthreads();

        float output[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                state[j] += keys[t][j * PARTS + part] * values[t];  // write
                sum += queries[t][j * PARTS + part] * state[j];     // read
            }
            for (int lanes = 1; lanes < PARTS; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            output[t] = sum;
            if (is_ones && part == 0) normalizers[t] = sum;
        }
        if (ONES) __syncthreads();

#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (part != 0 || t >= count) continue;
            if (is_value) {
                const float result = NORMALIZE ? divide(output[t], normalizers[t]) : output[t];
                out.row(start + t)[column] = from_float<OUT_TYPE>(result);
            }
            if (is_ones && denominators && blockIdx.y == 0) denominators[head * N + start + t] = output[t];
        }
    }

    if (last && (is_value || is_ones && blockIdx.y == 0))
        for (int j = 0; j < OWN; j++) {
            const int c = j * PARTS + part;
            if (c < features) last[(head * features + c) * columns + column] = state[j];
        }
}
#endif

#ifdef CHUNKED
// (b) Chunks of 64 tokens, in shared memory, in two passes. The first walks through the chunks and
// writes down the state before each of them; then all chunks can be computed at the same time, by a
// masked product inside the chunk and the state for everything before it.

constexpr int CHUNK = 64;
constexpr int SLICE = 16;  // of tokens or of features, in shared memory at one time
constexpr int STEP = STATE_COLUMNS / 4;  // between the columns of a thread, which has 4 x 4 numbers of a state
constexpr int STATE_THREADS = FEATURES / 4 * STEP;

extern "C" __global__ void __launch_bounds__(STATE_THREADS, 2)
chunk_states(Rows<const K_TYPE> k, Rows<const V_TYPE> v, const float* initial, float* states, float* last, int N,
             int features) {
    __shared__ float keys[SLICE][FEATURES], values[SLICE][STATE_COLUMNS];
    const long long head = blockIdx.x;
    k = k.of_head(head), v = v.of_head(head);
    const int first_column = blockIdx.y * STATE_COLUMNS;
    const int columns = v.width + v.ones;
    const int chunks = (N + CHUNK - 1) / CHUNK;
    // The thread's numbers: features own_c, own_c + 1, ... and columns own_m, own_m + STEP, ...
    const int own_c = threadIdx.x / STEP * 4, own_m = threadIdx.x % STEP;

    float state[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int c = own_c + i, m = first_column + own_m + j * STEP;
            const bool known = initial && c < features && m < columns;
            state[i][j] = known ? initial[(head * features + c) * columns + m] : 0.0f;
        }

    for (int chunk = 0; chunk <= chunks; chunk++) {
        float* target = chunk < chunks ? states + (head * chunks + chunk) * features * columns
                                       : last ? last + head * features * columns : nullptr;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                const int c = own_c + i, m = first_column + own_m + j * STEP;
                if (target && c < features && m < columns) target[c * columns + m] = state[i][j];
            }

        for (int start = chunk * CHUNK; start < min(N, (chunk + 1) * CHUNK); start += SLICE) {
            Tile<SLICE, FEATURES, STATE_THREADS> some_keys;
            Tile<SLICE, STATE_COLUMNS, STATE_THREADS> some_values;
            some_keys.ask(k, start, N, 0);
            some_values.ask(v, start, N, first_column);
            __syncthreads();
            some_keys.store(keys);
            some_values.store(values);
            __syncthreads();
            for (int t = 0; t < SLICE; t++)
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++)
                        state[i][j] += keys[t][own_c + i] * values[t][own_m + j * STEP];
        }
    }
}

constexpr int COLUMNS = 64;           // of the outputs, a block
constexpr int WEIGHT_PITCH = CHUNK + 16;  // the two rows that a warp writes lie 16 banks apart

extern "C" __global__ void __launch_bounds__(256, 2)
chunk_outputs(Rows<const Q_TYPE> q, Rows<const K_TYPE> k, Rows<const V_TYPE> v, Rows<OUT_TYPE> out,
              const float* states, float* denominators, int N, int features) {
    __shared__ float queries[CHUNK][SLICE + 1], keys[CHUNK][SLICE + 1], normalizer[SLICE];
    __shared__ float right[SLICE][COLUMNS];  // rows of the state, later rows of values
    __shared__ float weights[CHUNK][WEIGHT_PITCH];
    const int chunks = (N + CHUNK - 1) / CHUNK;
    const long long head = blockIdx.x / chunks;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int start = blockIdx.x % chunks * CHUNK, first_column = blockIdx.y * COLUMNS;
    const int columns = v.width + v.ones;
    const Rows<const float> state = {states + (long long)blockIdx.x * features * columns, 0, 0, columns, 1, v.width, 0, 0};
    // The thread's numbers of a 64 x 64 tile: rows y, y + 16, ... and columns x, x + 16, ...
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;

    // Feature by feature: the scores Q K^T, and Q S, what the tokens before the chunk have written.
    float scores[4][4] = {}, output[4][4] = {}, denominator[4] = {};
    for (int c0 = 0; c0 < FEATURES; c0 += SLICE) {
        Tile<CHUNK, SLICE, 256> some_queries, some_keys;
        Tile<SLICE, COLUMNS, 256> some_states;
        some_queries.ask(q, start, N, c0);
        some_keys.ask(k, start, N, c0);
        some_states.ask(state, c0, features, first_column);
        const int own_c = c0 + threadIdx.x;
        const float own = ONES && threadIdx.x < SLICE && own_c < features ? state.row(own_c)[v.width] : 0.0f;
        __syncthreads();
        some_queries.store(queries);
        some_keys.store(keys);
        some_states.store(right);
        if (ONES && threadIdx.x < SLICE) normalizer[threadIdx.x] = own;
        __syncthreads();
        for (int c = 0; c < SLICE; c++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) {
                    scores[i][j] += queries[y + 16 * i][c] * keys[x + 16 * j][c];
                    output[i][j] += queries[y + 16 * i][c] * right[c][x + 16 * j];
                }
        for (int i = 0; ONES && i < 4; i++) denominator[i] += queries[y + 16 * i][x] * normalizer[x];
    }

    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            const float weight = x + 16 * j <= y + 16 * i ? scores[i][j] : 0.0f;
            weights[y + 16 * i][x + 16 * j] = weight;
            denominator[i] += weight;
        }
        // 16 neighbors hold the terms of one row.
        for (int lanes = 1; lanes < 16; lanes *= 2)
            denominator[i] += __shfl_xor_sync(~0u, denominator[i], lanes);
    }

    // Token by token: what those of the chunk have written.
    for (int t0 = 0; t0 < CHUNK; t0 += SLICE) {
        Tile<SLICE, COLUMNS, 256> some_values;
        some_values.ask(v, start + t0, N, first_column);
        __syncthreads();
        some_values.store(right);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < SLICE; t++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    output[i][j] += weights[y + 16 * i][t0 + t] * right[t][x + 16 * j];
    }

    for (int i = 0; i < 4; i++) {
        const int t = start + y + 16 * i;
        if (t >= N) continue;
        for (int j = 0; j < 4; j++) {
            const int m = first_column + x + 16 * j;
            if (m >= v.width) continue;
            const float result = NORMALIZE ? divide(output[i][j], denominator[i]) : output[i][j];
            out.row(t)[m] = from_float<OUT_TYPE>(result);
        }
        if (denominators && blockIdx.y == 0 && x == 0) denominators[head * N + t] = denominator[i];
    }
}
#endif

#ifdef TENSOR_CORE
// (c) The same chunks on the tensor cores. A block walks through a segment of the sequence with the
// state in its registers, so that the states between chunks are never written; a sequence is cut
// into as many segments as it takes to fill the GPU. With several segments there are three passes:
// the sum of k v^T over each segment, the states before the segments, and the outputs.
//
// Four warps share a chunk of 64 tokens: each computes the outputs of 16 of them, and keeps every
// fourth band of 16 features of the state.

constexpr int WARPS = CHUNK / 16, THREADS = 32 * WARPS;
constexpr int LOADS = 4;  // of a thread, for each tile, that are on their way from memory at the same time
constexpr int WIDEST = FEATURES > SLAB ? FEATURES : SLAB;
constexpr int COLUMNS = SLAB + 16 * ONES;  // a tile of ones behind the values; only its first column counts
constexpr int BANDS = (FEATURES / 16 + WARPS - 1) / WARPS;
// Rows are 16 bytes longer than they must be: then 8 of them begin in different banks.
constexpr int FEATURE_PITCH = WIDEST + 8, COLUMN_PITCH = COLUMNS + 8;

// float16 ends at 65504: what is multiplied in it is scaled by a power of two first.
template <typename T> constexpr bool is_narrow = false;
template <> constexpr bool is_narrow<float16> = true;
constexpr bool SCALED = is_narrow<TYPE>;

struct Tiles {
    TYPE *queries, *keys;    // (CHUNK, FEATURE_PITCH)
    TYPE *values, *memory;   // (CHUNK, COLUMN_PITCH), (FEATURES, COLUMN_PITCH)
    float* maxima;           // (WARPS)
};

__device__ __forceinline__ Tiles divide_memory(uint4* shared) {
    Tiles tiles;
    tiles.queries = reinterpret_cast<TYPE*>(shared);
    tiles.keys = tiles.queries + CHUNK * FEATURE_PITCH;
    tiles.values = tiles.keys + CHUNK * FEATURE_PITCH;
    tiles.memory = tiles.values + CHUNK * COLUMN_PITCH;
    tiles.maxima = reinterpret_cast<float*>(tiles.memory + FEATURES * COLUMN_PITCH);
    return tiles;
}

// Part of a tile on its way from memory: LOADS times eight numbers for each thread, i0 of the tile first. The tile has
// tokens [start, start + CHUNK), up to `end`, and `count` columns from `first` on; 0 outside.
struct Eights {
    uint4 held[LOADS];

    __device__ __forceinline__ void ask(const Rows<const TYPE>& rows, int i0, int start, int end, int first, int count) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = i0 + n * THREADS, t = start + i / (count / 8), column = first + i % (count / 8) * 8;
            held[n] = {0, 0, 0, 0};
            if (i >= CHUNK * (count / 8) || t >= end) continue;
            if (ALIGNED && column + 8 <= rows.width) {
                held[n] = *reinterpret_cast<const uint4*>(rows.row(t) + column);
            } else {
                unsigned* pairs = reinterpret_cast<unsigned*>(&held[n]);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    pairs[j] = pack<TYPE>(rows.number(t, column + 2 * j), rows.number(t, column + 2 * j + 1));
            }
        }
    }
    __device__ __forceinline__ void store(TYPE* tile, int pitch, int i0, int count) const {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = i0 + n * THREADS;
            if (i >= CHUNK * (count / 8)) continue;
            *reinterpret_cast<uint4*>(tile + i / (count / 8) * pitch + i % (count / 8) * 8) = held[n];
        }
    }
};

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// The e for which 2^-e times the number is near 2^14: as large as float16 can take without a risk.
// What is smaller than 2^-31 is left small, so that what it is added to can be scaled as well.
__device__ __forceinline__ int exponent_for(float largest) {
    return min(max(int(__float_as_uint(largest) >> 23) - 127 - 14, -45), 60);
}

__device__ __forceinline__ float maximum_of_warp(float x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

typedef float State[BANDS][COLUMNS / 8][4];

// Where entry e of a warp's 16 x 8 tile lies in the tile: see the PTX manual, mma.m16n8k16.
__device__ __forceinline__ int tile_row(int e) { return threadIdx.x % 32 / 4 + e / 2 * 8; }
__device__ __forceinline__ int tile_column(int e) { return threadIdx.x % 4 * 2 + e % 2; }

// Reads the state from an array (features, columns) of floats, or writes it there.
template <bool READ, typename Memory>
__device__ __forceinline__ void transfer_state(State& state, Memory* memory, int features, int width, int ones, int slab) {
#pragma unroll
    for (int b = 0; b < BANDS; b++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int c = (threadIdx.x / 32 + b * WARPS) * 16 + tile_row(e);
                const int place = n * 8 + tile_column(e);
                const bool is_ones = ONES && place == SLAB;
                const int column = is_ones ? width : slab * SLAB + place;
                const bool known = c < features && (is_ones || place < SLAB && column < width);
                const long long index = (long long)c * (width + ones) + column;
                if constexpr (READ) state[b][n][e] = known && memory ? memory[index] : 0.0f;
                else if (known && (!is_ones || slab == 0)) memory[index] = state[b][n][e];
            }
}

// The state as 16-bit numbers in shared memory, where all warps can multiply by it. Returns the
// exponent by which float16 was scaled.
__device__ __forceinline__ int share_state(const State& state, Tiles tiles) {
    int exponent = 0;
    if (SCALED) {
        float largest = 0.0f;
#pragma unroll
        for (int b = 0; b < BANDS; b++)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                for (int e = 0; e < 4; e++) largest = fmaxf(largest, fabsf(state[b][n][e]));
        largest = maximum_of_warp(largest);
        if (threadIdx.x % 32 == 0) tiles.maxima[threadIdx.x / 32] = largest;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, tiles.maxima[w]);
        exponent = exponent_for(largest);
    }
    const float scale = power_of_two(-exponent);
#pragma unroll
    for (int b = 0; b < BANDS; b++) {
        const int c0 = (threadIdx.x / 32 + b * WARPS) * 16;
        if (c0 >= FEATURES) break;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int e = 0; e < 4; e += 2)
                *reinterpret_cast<unsigned*>(tiles.memory + (c0 + tile_row(e)) * COLUMN_PITCH + n * 8 + tile_column(e)) =
                    pack<TYPE>(state[b][n][e] * scale, state[b][n][e + 1] * scale);
    }
    return exponent;
}

// accumulators (16 x COLUMNS) += a (16 x 16) right (16 x COLUMNS), where right lies in shared memory
__device__ __forceinline__ void multiply_row(float (&sums)[COLUMNS / 8][4], const unsigned (&a)[4], const TYPE* right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n += 2) {
        unsigned b[4];
        load_matrices_transposed(b, right + lane % 16 * COLUMN_PITCH
                                        + n * 8 + lane / 16 * 8);
        multiply_tiles<TYPE>(sums[n], a, b[0], b[1]);
        multiply_tiles<TYPE>(sums[n + 1], a, b[2], b[3]);
    }
}

// S += K^T V over the chunk.
__device__ __forceinline__ void update_state(State& state, Tiles tiles) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < BANDS; b++) {
        const int c0 = (threadIdx.x / 32 + b * WARPS) * 16;
        if (c0 >= FEATURES) break;
        for (int t0 = 0; t0 < CHUNK; t0 += 16) {
            unsigned a[4];  // of K^T: the transposed load turns rows of tokens into rows of features
            load_matrices_transposed(a, tiles.keys + (t0 + lane / 16 * 8 + lane % 8) * FEATURE_PITCH
                                            + c0 + lane / 8 % 2 * 8);
            multiply_row(state[b], a, tiles.values + t0 * COLUMN_PITCH);
        }
    }
}

__device__ __forceinline__ void scale_outputs(float (&output)[COLUMNS / 8][4], int exponent) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
        for (int e = 0; e < 4; e++) output[n][e] *= power_of_two(exponent);
}

// The 16 rows of the warp: Q S for the tokens before the chunk, and (Q K^T, masked) V for those in it.
__device__ __forceinline__ void compute_outputs(float (&output)[COLUMNS / 8][4], Tiles tiles, int exponent) {
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    const TYPE* own_queries = tiles.queries + (row0 + lane % 16) * FEATURE_PITCH + lane / 16 * 8;
    unsigned a[4], b[4];
    for (int c0 = 0; c0 < FEATURES; c0 += 16) {
        load_matrices(a, own_queries + c0);
        multiply_row(output, a, tiles.memory + c0 * COLUMN_PITCH);
    }
    if (SCALED) scale_outputs(output, exponent);
    for (int j0 = 0; j0 <= row0; j0 += 16) {  // later tokens are in the future
        float scores[2][4] = {};
#pragma unroll 4
        for (int c0 = 0; c0 < FEATURES; c0 += 16) {
            load_matrices(a, own_queries + c0);
            load_matrices(b, tiles.keys + (j0 + lane / 16 * 8 + lane % 8) * FEATURE_PITCH
                                 + c0 + lane / 8 % 2 * 8);
            multiply_tiles<TYPE>(scores[0], a, b[0], b[1]);
            multiply_tiles<TYPE>(scores[1], a, b[2], b[3]);
        }
        float largest = 0.0f;
        for (int n = 0; n < 2; n++)
            for (int e = 0; e < 4; e++) {
                if (j0 == row0 && n * 8 + tile_column(e) > tile_row(e)) scores[n][e] = 0.0f;
                largest = fmaxf(largest, fabsf(scores[n][e]));
            }
        float scale = 1.0f;
        if (SCALED) {
            // The scores have an exponent of their own, that of the largest so far.
            const int own = exponent_for(maximum_of_warp(largest)), before = j0 == 0 ? 0 : exponent;
            exponent = j0 == 0 ? own : max(exponent, own);
            scale_outputs(output, before - exponent);
            scale = power_of_two(-exponent);
        }
        // The sums of one product are, in the same lanes, the left side of the next.
        a[0] = pack<TYPE>(scores[0][0] * scale, scores[0][1] * scale);
        a[1] = pack<TYPE>(scores[0][2] * scale, scores[0][3] * scale);
        a[2] = pack<TYPE>(scores[1][0] * scale, scores[1][1] * scale);
        a[3] = pack<TYPE>(scores[1][2] * scale, scores[1][3] * scale);
        multiply_row(output, a, tiles.values + j0 * COLUMN_PITCH);
    }
    if (SCALED) scale_outputs(output, exponent);
}

// Divides by the normalizer and writes the warp's rows; by way of its own, used up, rows of queries,
// as a lane holds two neighbors of a row and the memory wants eight.
__device__ __forceinline__ void store_outputs(float (&output)[COLUMNS / 8][4], Tiles tiles, Rows<TYPE> out,
                                              float* denominators, long long head, int start, int N, int slab) {
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    TYPE* rows = tiles.queries + row0 * FEATURE_PITCH;
    __syncwarp();
    for (int e = 0; e < 4; e += 2) {
        float normalizer = 1.0f;
        const int t = start + row0 + tile_row(e);
        if (ONES) {  // lane 4 g holds it for row g
            normalizer = __shfl_sync(~0u, output[SLAB / 8 * ONES][e], lane / 4 * 4);
            if (denominators && slab == 0 && lane % 4 == 0 && t < N) denominators[head * N + t] = normalizer;
        }
        for (int n = 0; n < SLAB / 8; n++) {
            const float low = NORMALIZE ? divide(output[n][e], normalizer) : output[n][e];
            const float high = NORMALIZE ? divide(output[n][e + 1], normalizer) : output[n][e + 1];
            *reinterpret_cast<unsigned*>(rows + tile_row(e) * FEATURE_PITCH + n * 8 + tile_column(e)) = pack<TYPE>(low, high);
        }
    }
    __syncwarp();
    for (int i = lane; i < 16 * (SLAB / 8); i += 32) {
        const int row = i / (SLAB / 8), c = i % (SLAB / 8) * 8, column = slab * SLAB + c;
        if (start + row0 + row >= N) continue;
        const TYPE* from = rows + row * FEATURE_PITCH + c;
        TYPE* to = out.row(start + row0 + row) + column;
        if (ALIGNED && column + 8 <= out.width) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        else for (int j = 0; j < min(8, out.width - column); j++) to[j] = from[j];
    }
}

__device__ __forceinline__ void fill_ones(Tiles tiles) {
    for (int i = threadIdx.x; ONES && i < CHUNK * 16; i += THREADS)
        tiles.values[i / 16 * COLUMN_PITCH + SLAB + i % 16] = from_float<TYPE>(i % 16 == 0 ? 1.0f : 0.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
segment_sums(Rows<const TYPE> k, Rows<const TYPE> v, float* sums, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    const Tiles tiles = divide_memory(shared);
    const long long head = blockIdx.x / segments;
    k = k.of_head(head), v = v.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + v.ones;
    State state = {};
    fill_ones(tiles);
    for (int start = first; start < end; start += CHUNK) {
        for (int i0 = threadIdx.x; i0 < CHUNK * (WIDEST / 8); i0 += THREADS * LOADS) {
            Eights some_keys, some_values;
            some_keys.ask(k, i0, start, end, 0, FEATURES);
            some_values.ask(v, i0, start, end, slab * SLAB, SLAB);
            some_keys.store(tiles.keys, FEATURE_PITCH, i0, FEATURES);
            some_values.store(tiles.values, COLUMN_PITCH, i0, SLAB);
        }
        __syncthreads();
        update_state(state, tiles);
        __syncthreads();
    }
    transfer_state<false>(state, sums + (long long)blockIdx.x * features * columns, features, v.width, v.ones, slab);
}

// One thread for each number of a state: from the sums of the segments to the states before them.
extern "C" __global__ void __launch_bounds__(256)
segment_states(float* sums, const float* initial, float* last, int size, int segments, long long total) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= total) return;
    float* sum = sums + i / size * segments * size + i % size;
    float state = initial ? initial[i] : 0.0f;
    for (int s = 0; s < segments; s++, sum += size) {
        const float own = *sum;
        *sum = state;
        state += own;
    }
    if (last) last[i] = state;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
segment_outputs(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<TYPE> out, const float* states,
                float* last, float* denominators, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    const Tiles tiles = divide_memory(shared);
    const long long head = blockIdx.x / segments;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + v.ones;
    const long long own = (long long)blockIdx.x * features * columns;
    State state;
    transfer_state<true>(state, states ? states + own : nullptr, features, v.width, v.ones, slab);
    fill_ones(tiles);
    for (int start = first; start < end; start += CHUNK) {
        // All three tiles are asked for before the first is stored.
        for (int i0 = threadIdx.x; i0 < CHUNK * (WIDEST / 8); i0 += THREADS * LOADS) {
            Eights some_queries, some_keys, some_values;
            some_queries.ask(q, i0, start, end, 0, FEATURES);
            some_keys.ask(k, i0, start, end, 0, FEATURES);
            some_values.ask(v, i0, start, end, slab * SLAB, SLAB);
            some_queries.store(tiles.queries, FEATURE_PITCH, i0, FEATURES);
            some_keys.store(tiles.keys, FEATURE_PITCH, i0, FEATURES);
            some_values.store(tiles.values, COLUMN_PITCH, i0, SLAB);
        }
        const int exponent = share_state(state, tiles);
        __syncthreads();
        float output[COLUMNS / 8][4] = {};
        compute_outputs(output, tiles, exponent);
        store_outputs(output, tiles, out, denominators, head, start, N, slab);
        update_state(state, tiles);
        __syncthreads();
    }
    if (last) transfer_state<false>(state, last + own, features, v.width, v.ones, slab);
}
#endif

#ifdef GRADIENT
// The gradient of a normalized output, out = numerator / denominator, as gradients of both:
// d numerator = grad / denominator and d denominator = -out . d numerator. A row of `both` holds the
// former and behind it the latter, in two numbers whose sum is exact to twice the digits: its terms
// cancel against those of the values. One warp for each token.
extern "C" __global__ void __launch_bounds__(128, 4)
split_gradient(Rows<const OUT_TYPE> grad, Rows<const OUT_TYPE> out, const float* denominators, Rows<BOTH_TYPE> both, int N,
               long long tokens) {
    const long long token = blockIdx.x * 4ll + threadIdx.x / 32;
    if (token >= tokens) return;
    const long long head = token / N;
    const int t = token % N, lane = threadIdx.x % 32;
    const float factor = divide(1.0f, denominators[token]);
    const OUT_TYPE *gradients = grad.of_head(head).row(t), *outputs = out.of_head(head).row(t);
    BOTH_TYPE* row = both.of_head(head).row(t);
    float sum = 0.0f;
    for (int m = lane; m < out.width; m += 32) {
        row[m] = from_float<BOTH_TYPE>(to_float(gradients[m]) * factor);
        sum -= to_float(outputs[m]) * to_float(row[m]);
    }
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const BOTH_TYPE high = from_float<BOTH_TYPE>(sum);
    if (lane == 0) row[out.width] = high;
    if (lane == 1) row[out.width + 1] = from_float<BOTH_TYPE>(sum - to_float(high));
}
#endif
