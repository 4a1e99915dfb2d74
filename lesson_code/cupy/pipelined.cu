// Kernel (c) of linear.cu made fast: causal linear attention on the tensor cores, and its gradients.
//
// A block walks through a whole head with the state in its registers, so that every number is read once. While it
// multiplies one chunk, copies of the next ones are on their way to other stages of shared memory. All eight warps do
// the same work: of the lower triangle of scores each has the bands of tokens r and 3 - r, five tiles together.
//
// One walk backwards makes all three gradients. It needs the state before each chunk, and has it without reading what
// came before: the state runs backwards, too, S_before = S_after - K^T V. So that rounding does not pile up, it
// begins anew from a state that the forward walk has written down, every `interval` tokens.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int BANDS = CHUNK / 16;  // of 16 tokens
constexpr int DOWN = BANDS / 2;    // bands of a warp, whose columns are shared by four warps
constexpr int FEATURE_PITCH = FEATURES + 8, COLUMN_PITCH = COLUMNS + 8, WEIGHT_PITCH = CHUNK + 8;
constexpr int FEATURES_ACROSS = FEATURES / 32, COLUMNS_ACROSS = COLUMNS / 32;  // eights of columns, a warp
constexpr int STATE_DOWN = FEATURES / 64, STATE_ACROSS = COLUMNS / 16;         // of its part of the state

// float16 ends at 65504: what is multiplied in it is scaled by a power of two first.
template <typename T> constexpr bool is_narrow = false;
template <> constexpr bool is_narrow<float16> = true;
constexpr bool SCALED = is_narrow<TYPE>;

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
// The warp's bands of tokens, its quarter of their columns; its quarter of the features and half of the columns of a state.
__device__ __forceinline__ int band(int d) { return d == 0 ? warp() / 4 : BANDS - 1 - warp() / 4; }
__device__ __forceinline__ int quarter() { return warp() % 4; }
__device__ __forceinline__ int half() { return warp() / 4; }
// Where entry e of a warp's 16 x 8 tile lies in the tile.
__device__ __forceinline__ int tile_row(int e) { return lane() / 4 + e / 2 * 8; }
__device__ __forceinline__ int tile_column(int e) { return lane() % 4 * 2 + e % 2; }

// ---- Scales ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// The e for which 2^-e times the number is near 2^14.
__device__ __forceinline__ int exponent_for(float largest) {
    return min(max(int(__float_as_uint(largest) >> 23) - 127 - 14, -45), 60);
}
__device__ __forceinline__ float maximum_of_warp(float x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}
template <int COUNT, int ACROSS>
__device__ __forceinline__ float largest_of(const float (&sums)[COUNT][ACROSS][4]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int n = 0; n < ACROSS; n++)
            for (int e = 0; e < 4; e++) largest = fmaxf(largest, fabsf(sums[i][n][e]));
    return largest;
}
template <int ACROSS> __device__ __forceinline__ void scale(float (&sums)[ACROSS][4], float factor) {
#pragma unroll
    for (int n = 0; n < ACROSS; n++)
        for (int e = 0; e < 4; e++) sums[n][e] *= factor;
}

// ---- Products of what lies in shared memory -------------------------------------------------------------------

// A left side of 16 x 16, and a right side of 16 x 16; TRANSPOSED, of the matrix whose transpose lies there.
template <bool TRANSPOSED> __device__ __forceinline__ void load_left(unsigned (&a)[4], const TYPE* at, int pitch) {
    if (TRANSPOSED) load_matrices_transposed(a, at + (lane() / 16 * 8 + lane() % 8) * pitch + lane() / 8 % 2 * 8);
    else load_matrices(a, at + lane() % 16 * pitch + lane() / 16 * 8);
}
template <bool TRANSPOSED> __device__ __forceinline__ void load_right(unsigned (&b)[4], const TYPE* at, int pitch) {
    if (TRANSPOSED) load_matrices(b, at + (lane() / 16 * 8 + lane() % 8) * pitch + lane() / 8 % 2 * 8);
    else load_matrices_transposed(b, at + lane() % 16 * pitch + lane() / 16 * 8);
}

// sums += left right, where a right side of 16 x (8 ACROSS) serves all left sides that take part.
template <bool TRANSPOSED, int COUNT, int ACROSS>
__device__ __forceinline__ void multiply(float (&sums)[COUNT][ACROSS][4], const unsigned (&left)[COUNT][4],
                                         const bool (&takes_part)[COUNT], const TYPE* right, int pitch) {
#pragma unroll
    for (int n = 0; n < ACROSS; n += 2) {
        unsigned b[4];
        load_right<TRANSPOSED>(b, right + n * 8 * (TRANSPOSED ? pitch : 1), pitch);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (!takes_part[i]) continue;
            multiply_tiles<TYPE>(sums[i][n], left[i], b[0], b[1]);
            multiply_tiles<TYPE>(sums[i][n + 1], left[i], b[2], b[3]);
        }
    }
}

// The warp's bands and its quarter of the columns: sums += rows (tokens x WIDTH) times a state, or its transpose.
// Behind it, where there is one, the sum that each row makes of `totals`, a number for each of WIDTH.
template <bool TRANSPOSED, int WIDTH, int ACROSS>
__device__ __forceinline__ void read_state(float (&sums)[DOWN][ACROSS][4], float (*row_sums)[4], const TYPE* rows,
                                           const TYPE* state, int pitch, const float* totals, float factor) {
    bool all[DOWN];
    for (int d = 0; d < DOWN; d++) all[d] = true;
#pragma unroll
    for (int k0 = 0; k0 < WIDTH; k0 += 16) {
        unsigned a[DOWN][4];
#pragma unroll
        for (int d = 0; d < DOWN; d++) load_left<false>(a[d], rows + band(d) * 16 * (WIDTH + 8) + k0, WIDTH + 8);
        const int first = quarter() * ACROSS * 8;
        multiply<TRANSPOSED>(sums, a, all, TRANSPOSED ? state + first * pitch + k0 : state + k0 * pitch + first, pitch);
        if (!row_sums) continue;
        const float* own = totals + k0 + lane() % 4 * 2;  // a right side with the same number in all columns
        const unsigned low = pack<TYPE>(own[0] * factor, own[1] * factor);
        const unsigned high = pack<TYPE>(own[8] * factor, own[9] * factor);
#pragma unroll
        for (int d = 0; d < DOWN; d++) multiply_tiles<TYPE>(row_sums[d], a[d], low, high);
    }
}

// The same with the weights inside the chunk: those of the past, or TRANSPOSED, of the future.
template <bool TRANSPOSED, int ACROSS>
__device__ __forceinline__ void read_chunk(float (&sums)[DOWN][ACROSS][4], float (*row_sums)[4], const TYPE* weights,
                                           const int* exponents, const TYPE* right, int pitch) {
    int common[DOWN];  // one exponent for all tiles of a band
    for (int d = 0; d < DOWN; d++) {
        common[d] = -60;
        for (int j = 0; SCALED && j < BANDS; j++)
            if (TRANSPOSED ? j >= band(d) : j <= band(d))
                common[d] = max(common[d], exponents[TRANSPOSED ? j * BANDS + band(d) : band(d) * BANDS + j]);
        if (SCALED) scale(sums[d], power_of_two(-common[d]));
        if (SCALED && row_sums)
            for (int e = 0; e < 4; e++) row_sums[d][e] *= power_of_two(-common[d]);
    }
#pragma unroll
    for (int j = 0; j < BANDS; j++) {
        bool takes_part[DOWN], any = false;
        unsigned a[DOWN][4];
        for (int d = 0; d < DOWN; d++) any |= takes_part[d] = TRANSPOSED ? j >= band(d) : j <= band(d);
        if (!any) continue;
#pragma unroll
        for (int d = 0; d < DOWN; d++) {
            if (!takes_part[d]) continue;
            const int tile = TRANSPOSED ? j * BANDS + band(d) : band(d) * BANDS + j;
            load_left<TRANSPOSED>(a[d], weights + tile / BANDS * 16 * WEIGHT_PITCH + tile % BANDS * 16, WEIGHT_PITCH);
            if (SCALED)
                for (int i = 0; i < 4; i++) a[d][i] = scale_pair<TYPE>(a[d][i], power_of_two(exponents[tile] - common[d]));
            if (row_sums) {
                const unsigned ones = pack<TYPE>(1.0f, 1.0f);
                multiply_tiles<TYPE>(row_sums[d], a[d], ones, ones);
            }
        }
        multiply<false>(sums, a, takes_part, right + j * 16 * pitch + quarter() * ACROSS * 8, pitch);
    }
    for (int d = 0; SCALED && d < DOWN; d++) {
        scale(sums[d], power_of_two(common[d]));
        if (row_sums)
            for (int e = 0; e < 4; e++) row_sums[d][e] *= power_of_two(common[d]);
    }
}

// The weights of the chunk, left right^T where the right token is not later, to shared memory; tile `number` of them.
template <int WIDTH>
__device__ __forceinline__ void write_weights(int number, const TYPE* left, const TYPE* right, const float* more,
                                              TYPE* weights, int* exponents) {
    int i = 0, j = number;
    while (j > i) j -= ++i;  // row and column of the triangle
    float scores[1][2][4] = {};
    const bool all[1] = {true};
#pragma unroll
    for (int k0 = 0; k0 < WIDTH; k0 += 16) {
        unsigned a[1][4];
        load_left<false>(a[0], left + i * 16 * (WIDTH + 8) + k0, WIDTH + 8);
        multiply<true>(scores, a, all, right + j * 16 * (WIDTH + 8) + k0, WIDTH + 8);
    }
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e++) {
            if (more) scores[0][n][e] += more[i * 16 + tile_row(e)];
            if (j == i && n * 8 + tile_column(e) > tile_row(e)) scores[0][n][e] = 0.0f;
        }
    float factor = 1.0f;
    if (SCALED) {
        const int exponent = exponent_for(maximum_of_warp(largest_of(scores)));
        factor = power_of_two(-exponent);
        if (lane() == 0) exponents[i * BANDS + j] = exponent;
    }
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e += 2)
            *reinterpret_cast<unsigned*>(weights + (i * 16 + tile_row(e)) * WEIGHT_PITCH + j * 16 + n * 8 + tile_column(e)) =
                pack<TYPE>(scores[0][n][e] * factor, scores[0][n][e + 1] * factor);
}
constexpr int TRIANGLE = BANDS * (BANDS + 1) / 2;

// A right side of ones.
struct Alike {
    __device__ __forceinline__ void operator()(int, unsigned& low, unsigned& high) const {
        low = high = pack<TYPE>(1.0f, 1.0f);
    }
};

// ---- The state ------------------------------------------------------------------------------------------------

// The warp's part of a state (FEATURES, COLUMNS), and, in the warps of the first half, of its column of ones. All
// columns of that one's tile are alike.
struct State {
    float numbers[STATE_DOWN][STATE_ACROSS][4];
    float totals[STATE_DOWN][4];

    // += keys^T values, or -=; `ones` is the right side of the column of ones for 16 tokens.
    template <bool MINUS, typename Ones>
    __device__ __forceinline__ void add(const TYPE* keys, const TYPE* values, bool with_totals, Ones ones) {
        bool all[STATE_DOWN];
        for (int b = 0; b < STATE_DOWN; b++) all[b] = true;
#pragma unroll
        for (int t0 = 0; t0 < CHUNK; t0 += 16) {
            unsigned a[STATE_DOWN][4];
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++) {
                load_left<true>(a[b], keys + t0 * FEATURE_PITCH + (quarter() * STATE_DOWN + b) * 16, FEATURE_PITCH);
                for (int i = 0; MINUS && i < 4; i++) a[b][i] ^= 0x80008000u;
            }
            multiply<false>(numbers, a, all, values + t0 * COLUMN_PITCH + half() * STATE_ACROSS * 8, COLUMN_PITCH);
            if (!with_totals || half() > 0) continue;
            unsigned low, high;
            ones(t0, low, high);
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++) multiply_tiles<TYPE>(totals[b], a[b], low, high);
        }
    }

    __device__ __forceinline__ float largest(bool with_totals) const {
        float largest = largest_of(numbers);
        for (int b = 0; with_totals && half() == 0 && b < STATE_DOWN; b++)
            for (int e = 0; e < 4; e += 2) largest = fmaxf(largest, fabsf(totals[b][e]));
        return maximum_of_warp(largest);
    }

    // As 16-bit numbers in shared memory, where all warps can multiply by it; the column of ones in float32.
    __device__ __forceinline__ void share(TYPE* memory, float* shared_totals, bool with_totals, float factor) const {
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int c = (quarter() * STATE_DOWN + b) * 16 + tile_row(e);
                TYPE* row = memory + c * COLUMN_PITCH + half() * STATE_ACROSS * 8 + tile_column(e);
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++)
                    *reinterpret_cast<unsigned*>(row + n * 8) =
                        pack<TYPE>(numbers[b][n][e] * factor, numbers[b][n][e + 1] * factor);
                if (with_totals && half() == 0 && lane() % 4 == 0) shared_totals[c] = totals[b][e];
            }
    }

    // From an array (features, columns) of floats, or there; what is not in it is 0.
    template <bool READ, typename Memory>
    __device__ __forceinline__ void transfer(Memory* memory, int features, int width, int columns, int slab) {
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = (quarter() * STATE_DOWN + b) * 16 + tile_row(e);
                Memory* row = memory + (long long)c * columns;
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++) {
                    const int m = slab * COLUMNS + (half() * STATE_ACROSS + n) * 8 + tile_column(e);
                    const bool known = memory && c < features && m < width;
                    if constexpr (READ) numbers[b][n][e] = known ? row[m] : 0.0f;
                    else if (known) row[m] = numbers[b][n][e];
                }
                const bool known = memory && c < features && columns > width && half() == 0;
                if constexpr (READ) totals[b][e] = known ? row[width] : 0.0f;
                else if (known && slab == 0 && e % 2 == 0 && lane() % 4 == 0) row[width] = totals[b][e];
            }
    }
};

// ---- Memory ---------------------------------------------------------------------------------------------------

// Begins to copy rows [start, start + CHUNK), those before `end`, and WIDTH columns from `first` on; 0 outside.
template <int WIDTH>
__device__ __forceinline__ void fetch(TYPE* tile, const Rows<const TYPE>& rows, int start, int end, int first) {
    constexpr int EIGHTS = WIDTH / 8, ROWS = THREADS / EIGHTS;  // rows at a time
    const int row = threadIdx.x / EIGHTS, column = threadIdx.x % EIGHTS * 8;
    TYPE* to = tile + row * (WIDTH + 8) + column;
    if (ALIGNED && start + CHUNK <= end && first + WIDTH <= rows.width) {
        const TYPE* from = rows.row(start + row) + first + column;
#pragma unroll
        for (int n = 0; n < CHUNK / ROWS; n++)
            copy_async(to + n * ROWS * (WIDTH + 8), from + n * ROWS * rows.token);
        return;
    }
#pragma unroll 1
    for (int t = start + row; t < start + CHUNK; t += ROWS, to += ROWS * (WIDTH + 8)) {
        if (ALIGNED && t < end && first + column + 8 <= rows.width) {
            copy_async(to, rows.row(t) + first + column);
            continue;
        }
        unsigned pairs[4] = {};
        for (int j = 0; t < end && j < 4; j++)
            pairs[j] = pack<TYPE>(rows.number(t, first + column + 2 * j), rows.number(t, first + column + 2 * j + 1));
        *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
}

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

// Writes 16 rows of the warp's columns. Neighbors swap halves, so that each has four numbers of a row.
template <int ACROSS>
__device__ __forceinline__ void store_rows(const float (&sums)[ACROSS][4], Rows<TYPE> out, int first_row, int end,
                                           int first_column) {
    const bool odd = lane() % 2;
#pragma unroll
    for (int e = 0; e < 4; e += 2)
#pragma unroll
        for (int n = 0; n < ACROSS; n += 2) {
            const unsigned even_tile = pack<TYPE>(sums[n][e], sums[n][e + 1]);
            const unsigned odd_tile = pack<TYPE>(sums[n + 1][e], sums[n + 1][e + 1]);
            const unsigned other = __shfl_xor_sync(~0u, odd ? even_tile : odd_tile, 1);
            const uint2 four = {odd ? other : even_tile, odd ? odd_tile : other};
            const int t = first_row + tile_row(e), column = first_column + (n + odd) * 8 + lane() % 4 / 2 * 4;
            if (t >= end) continue;
            TYPE* to = out.row(t) + column;
            if (ALIGNED && column + 4 <= out.width) {
                *reinterpret_cast<uint2*>(to) = four;
                continue;
            }
            for (int j = 0; j < 4 && column + j < out.width; j++)
                to[j].bits = (unsigned short)((j < 2 ? four.x : four.y) >> j % 2 * 16);
        }
}

#ifdef FORWARD
constexpr int STAGE = CHUNK * (2 * FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values

// Outputs of [first, first + length) of a head, whose state before is given or, where `alone`, is made from all
// tokens before. Writes the state after every `interval` tokens to `after`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_walk(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<TYPE> out, const float* before, float* after,
             float* denominators, int N, int features, int segments, int alone, int interval, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE* const weights = stages + STAGES * STAGE;
    TYPE* const memory = weights + CHUNK * WEIGHT_PITCH;
    float* const totals = reinterpret_cast<float*>(memory + FEATURES * COLUMN_PITCH);
    float* const maxima = totals + FEATURES;
    int* const exponents = reinterpret_cast<int*>(maxima + WARPS);

    const long long head = blockIdx.x / segments;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), from = alone ? 0 : first;
    const int slab = blockIdx.y, columns = v.width + v.ones, intervals = (N + interval - 1) / interval;
    const long long size = (long long)features * columns;
    State state;
    state.transfer<true>(before ? before + (alone ? head : blockIdx.x) * size : nullptr, features, v.width, columns, slab);
    if (SCALED) {
        const float largest = state.largest(ONES);
        if (lane() == 0) maxima[warp()] = largest;
    }

    walk((end - from + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        const int start = from + i * CHUNK;
        fetch<FEATURES>(tiles + CHUNK * FEATURE_PITCH, k, start, end, 0);
        fetch<COLUMNS>(tiles + 2 * CHUNK * FEATURE_PITCH, v, start, end, slab * COLUMNS);
        if (start >= first) fetch<FEATURES>(tiles, q, start, end, 0);
    }, [&](int i, int stage) {
        const TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        const TYPE* values = keys + CHUNK * FEATURE_PITCH;
        const int start = from + i * CHUNK;
        if (start >= first) {
            int exponent = 0;
            if (SCALED) {
                float largest = 0.0f;
                for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, maxima[w]);
                exponent = exponent_for(largest);
            }
            state.share(memory, totals, ONES, power_of_two(-exponent));
            for (int number = warp(); number < TRIANGLE; number += WARPS)
                write_weights<FEATURES>(number, queries, keys, nullptr, weights, exponents);
            __syncthreads();
            float output[DOWN][COLUMNS_ACROSS][4] = {}, normalizers[DOWN][4] = {};
            float (*const row_sums)[4] = NORMALIZE ? normalizers : nullptr;
            read_state<false, FEATURES>(output, row_sums, queries, memory, COLUMN_PITCH, totals, power_of_two(-exponent));
            for (int d = 0; SCALED && d < DOWN; d++) {
                scale(output[d], power_of_two(exponent));
                for (int e = 0; e < 4; e++) normalizers[d][e] *= power_of_two(exponent);
            }
            read_chunk<false>(output, row_sums, weights, exponents, values, COLUMN_PITCH);
#pragma unroll
            for (int d = 0; d < DOWN; d++) {
                const int row0 = start + band(d) * 16;
                for (int e = 0; NORMALIZE && e < 4; e += 2) {
#pragma unroll
                    for (int n = 0; n < COLUMNS_ACROSS; n++) {
                        output[d][n][e] = divide(output[d][n][e], normalizers[d][e]);
                        output[d][n][e + 1] = divide(output[d][n][e + 1], normalizers[d][e]);
                    }
                    const int t = row0 + tile_row(e);
                    if (slab == 0 && quarter() == 0 && lane() % 4 == 0 && t < end)
                        denominators[head * N + t] = normalizers[d][e];
                }
                store_rows(output[d], out, row0, end, slab * COLUMNS + quarter() * COLUMNS_ACROSS * 8);
            }
        }
        state.add<false>(keys, values, ONES, Alike());
        if (SCALED) {
            const float largest = state.largest(ONES);
            __syncthreads();
            if (lane() == 0) maxima[warp()] = largest;
        }
        const int stop = min(N, start + CHUNK);
        if (after && start >= first && (stop % interval == 0 || stop == N))
            state.transfer<false>(after + (head * intervals + (stop - 1) / interval) * size, features, v.width, columns, slab);
    });
}
#endif

#ifdef SUMS
constexpr int STAGE = CHUNK * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: keys, values

// The sum of k v^T over each segment.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sums_of_segments(Rows<const TYPE> k, Rows<const TYPE> v, float* sums, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    const long long head = blockIdx.x / segments;
    k = k.of_head(head), v = v.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + v.ones;
    State state = {};
    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        fetch<FEATURES>(tiles, k, first + i * CHUNK, end, 0);
        fetch<COLUMNS>(tiles + CHUNK * FEATURE_PITCH, v, first + i * CHUNK, end, slab * COLUMNS);
    }, [&](int, int stage) {
        const TYPE* keys = stages + stage * STAGE;
        state.add<false>(keys, keys + CHUNK * FEATURE_PITCH, ONES, Alike());
    });
    state.transfer<false>(sums + (long long)blockIdx.x * features * columns, features, v.width, columns, slab);
}

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
#endif
