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
// The bands of a pair; the warp's quarter of the features and half of the columns of a state.
__device__ __forceinline__ int band(int pair, int d) { return d == 0 ? pair : BANDS - 1 - pair; }
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

// sums += left right, where a right side of 16 x (8 ACROSS) serves all left sides.
template <bool TRANSPOSED, int COUNT, int ACROSS>
__device__ __forceinline__ void multiply(float (&sums)[COUNT][ACROSS][4], const unsigned (&left)[COUNT][4],
                                         const TYPE* right, int pitch) {
#pragma unroll
    for (int n = 0; n < ACROSS; n += 2) {
        unsigned b[4];
        load_right<TRANSPOSED>(b, right + n * 8 * (TRANSPOSED ? pitch : 1), pitch);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            multiply_tiles<TYPE>(sums[i][n], left[i], b[0], b[1]);
            multiply_tiles<TYPE>(sums[i][n + 1], left[i], b[2], b[3]);
        }
    }
}

// A pair of bands, and 8 ACROSS columns from `first` on: sums += rows (tokens x WIDTH) times a state, or its transpose.
// Behind it, where there is one, the sum that each row makes of `totals`, a number for each of WIDTH.
template <bool TRANSPOSED, int WIDTH, int ACROSS>
__device__ __forceinline__ void read_state(float (&sums)[DOWN][ACROSS][4], float (*row_sums)[4], int pair, int first,
                                           const TYPE* rows, const TYPE* state, int pitch, const float* totals, float factor) {
#pragma unroll 4
    for (int k0 = 0; k0 < WIDTH; k0 += 16) {
        unsigned a[DOWN][4];
#pragma unroll
        for (int d = 0; d < DOWN; d++) load_left<false>(a[d], rows + band(pair, d) * 16 * (WIDTH + 8) + k0, WIDTH + 8);
        multiply<TRANSPOSED>(sums, a, TRANSPOSED ? state + first * pitch + k0 : state + k0 * pitch + first, pitch);
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
__device__ __forceinline__ void read_chunk(float (&sums)[DOWN][ACROSS][4], float (*row_sums)[4], int pair, int first,
                                           const TYPE* weights, const int* exponents, const TYPE* right, int pitch) {
    int common[DOWN];  // one exponent for all tiles of a band
    for (int d = 0; d < DOWN; d++) {
        common[d] = -60;
        for (int j = 0; SCALED && j < BANDS; j++)
            if (TRANSPOSED ? j >= band(pair, d) : j <= band(pair, d))
                common[d] = max(common[d], exponents[TRANSPOSED ? j * BANDS + band(pair, d) : band(pair, d) * BANDS + j]);
        if (SCALED) scale(sums[d], power_of_two(-common[d]));
        if (SCALED && row_sums)
            for (int e = 0; e < 4; e++) row_sums[d][e] *= power_of_two(-common[d]);
    }
    const auto read_tile = [&](int d, int j) {
        const int tile = TRANSPOSED ? j * BANDS + band(pair, d) : band(pair, d) * BANDS + j;
        unsigned a[1][4];
        load_left<TRANSPOSED>(a[0], weights + tile / BANDS * 16 * WEIGHT_PITCH + tile % BANDS * 16, WEIGHT_PITCH);
        for (int i = 0; SCALED && i < 4; i++)
            a[0][i] = scale_pair<TYPE>(a[0][i], power_of_two(exponents[tile] - common[d]));
        if (row_sums) {
            const unsigned ones = pack<TYPE>(1.0f, 1.0f);
            multiply_tiles<TYPE>(row_sums[d], a[0], ones, ones);
        }
        multiply<false>(reinterpret_cast<float (&)[1][ACROSS][4]>(sums[d]), a, right + j * 16 * pitch + first,
                        pitch);
    };
    if constexpr (DOWN == 1) {
        for (int j = TRANSPOSED ? pair : 0; j < (TRANSPOSED ? BANDS : pair + 1); j++) read_tile(0, j);
    } else {  // five tiles: three or four of one band, two or one of the other
        constexpr int most = TRANSPOSED ? 0 : 1, least = 1 - most;
        const int first_of_most = TRANSPOSED ? pair : 0, last_of_least = TRANSPOSED ? BANDS - 1 : pair;
#pragma unroll
        for (int n = 0; n < 3; n++) read_tile(most, first_of_most + n);
        if (pair == 0) read_tile(most, first_of_most + 3);
        else read_tile(least, last_of_least - 1);
        read_tile(least, last_of_least);
    }
    for (int d = 0; SCALED && d < DOWN; d++) {
        scale(sums[d], power_of_two(common[d]));
        if (row_sums)
            for (int e = 0; e < 4; e++) row_sums[d][e] *= power_of_two(common[d]);
    }
}

// Weights of the chunk, left right^T where the right token is not later, to shared memory: of band i the COUNT tiles
// from tile j on.
template <int WIDTH, int COUNT>
__device__ __forceinline__ void write_tiles(int i, int j, const TYPE* left, const TYPE* right, const float* more,
                                            TYPE* weights, int* exponents) {
    float scores[1][2 * COUNT][4] = {};
#pragma unroll
    for (int k0 = 0; k0 < WIDTH; k0 += 16) {
        unsigned a[1][4];
        load_left<false>(a[0], left + i * 16 * (WIDTH + 8) + k0, WIDTH + 8);
        multiply<true>(scores, a, right + j * 16 * (WIDTH + 8) + k0, WIDTH + 8);
    }
    for (int n = 0; n < 2 * COUNT; n++)
        for (int e = 0; e < 4; e++) {
            if (more) scores[0][n][e] += more[i * 16 + tile_row(e)];
            if ((j + n / 2) * 16 + n % 2 * 8 + tile_column(e) > i * 16 + tile_row(e)) scores[0][n][e] = 0.0f;
        }
    float factor = 1.0f;
    if (SCALED) {
        const int exponent = exponent_for(maximum_of_warp(largest_of(scores)));
        factor = power_of_two(-exponent);
        if (lane() < COUNT) exponents[i * BANDS + j + lane()] = exponent;
    }
    for (int n = 0; n < 2 * COUNT; n++)
        for (int e = 0; e < 4; e += 2)
            *reinterpret_cast<unsigned*>(weights + (i * 16 + tile_row(e)) * WEIGHT_PITCH + j * 16 + n * 8 + tile_column(e)) =
                pack<TYPE>(scores[0][n][e] * factor, scores[0][n][e + 1] * factor);
}

// The triangle in parts: first the two tiles side by side, then those left over in every other band.
constexpr int HALF = BANDS / 2, TWOS = HALF * HALF, PARTS = TWOS + HALF;

template <int WIDTH>
__device__ __forceinline__ void write_weights(int part, const TYPE* left, const TYPE* right, const float* more,
                                              TYPE* weights, int* exponents) {
    if (part < TWOS) {  // of bands 1, 2, 3, 3
        const int i = BANDS == 2 ? 1 : part + 1 - part / 3;
        write_tiles<WIDTH, 2>(i, part / 3 * 2, left, right, more, weights, exponents);
    } else {  // of bands 0, 2
        const int i = (part - TWOS) * 2;
        write_tiles<WIDTH, 1>(i, i, left, right, more, weights, exponents);
    }
}

// A right side whose first column is of ones.
struct Ones {
    __device__ __forceinline__ void operator()(int, unsigned& low, unsigned& high) const {
        low = high = lane() / 4 == 0 ? pack<TYPE>(1.0f, 1.0f) : 0;
    }
};

// ---- The state ------------------------------------------------------------------------------------------------

// The warp's part of a state (FEATURES, COLUMNS). The column of ones is in shared memory, where each number has one
// thread, in the warps of the first half.
struct State {
    float numbers[STATE_DOWN][STATE_ACROSS][4];
    float* totals;  // (FEATURES)

    __device__ __forceinline__ int feature(int b, int e) const { return (quarter() * STATE_DOWN + b) * 16 + tile_row(e); }
    __device__ __forceinline__ bool has_totals() const { return half() == 0 && lane() % 4 == 0; }

    // += keys^T values, or -=; `column` is the right side of the column of ones, whose first two columns count.
    template <bool MINUS, typename Column>
    __device__ __forceinline__ void add(const TYPE* keys, const TYPE* values, bool with_totals, Column column) {
        float sums[STATE_DOWN][4] = {};
#pragma unroll
        for (int t0 = 0; t0 < CHUNK; t0 += 16) {
            unsigned a[STATE_DOWN][4];
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++) {
                load_left<true>(a[b], keys + t0 * FEATURE_PITCH + (quarter() * STATE_DOWN + b) * 16, FEATURE_PITCH);
                for (int i = 0; MINUS && i < 4; i++) a[b][i] ^= 0x80008000u;
            }
            multiply<false>(numbers, a, values + t0 * COLUMN_PITCH + half() * STATE_ACROSS * 8, COLUMN_PITCH);
            if (!with_totals || half() > 0) continue;
            unsigned low, high;
            column(t0, low, high);
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++) multiply_tiles<TYPE>(sums[b], a[b], low, high);
        }
        for (int b = 0; with_totals && has_totals() && b < STATE_DOWN; b++)
            for (int e = 0; e < 4; e += 2) totals[feature(b, e)] += sums[b][e] + sums[b][e + 1];
    }

    __device__ __forceinline__ float largest(bool with_totals) const {
        float largest = largest_of(numbers);
        for (int b = 0; with_totals && has_totals() && b < STATE_DOWN; b++)
            for (int e = 0; e < 4; e += 2) largest = fmaxf(largest, fabsf(totals[feature(b, e)]));
        return maximum_of_warp(largest);
    }

    // As 16-bit numbers in shared memory, where all warps can multiply by it; the column of ones in float32.
    __device__ __forceinline__ void share(TYPE* memory, float* shared_totals, bool with_totals, float factor) const {
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int c = feature(b, e);
                TYPE* row = memory + c * COLUMN_PITCH + half() * STATE_ACROSS * 8 + tile_column(e);
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++)
                    *reinterpret_cast<unsigned*>(row + n * 8) =
                        pack<TYPE>(numbers[b][n][e] * factor, numbers[b][n][e + 1] * factor);
                if (with_totals && has_totals()) shared_totals[c] = totals[c];
            }
    }

    // From an array (features, columns) of floats, or there; what is not in it is 0.
    template <bool READ, typename Memory>
    __device__ __forceinline__ void transfer(Memory* memory, int features, int width, int columns, int slab) {
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = feature(b, e);
                Memory* row = memory + (long long)c * columns;
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++) {
                    const int m = slab * COLUMNS + (half() * STATE_ACROSS + n) * 8 + tile_column(e);
                    const bool known = memory && c < features && m < width;
                    if constexpr (READ) numbers[b][n][e] = known ? row[m] : 0.0f;
                    else if (known) row[m] = numbers[b][n][e];
                }
                if (!ONES || !has_totals()) continue;
                const bool known = memory && c < features && columns > width;
                if constexpr (READ) totals[c] = known ? row[width] : 0.0f;
                else if (known && slab == 0) row[width] = totals[c];
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
        const uint4 eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
        *reinterpret_cast<uint4*>(to) = eight;
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

// The first of two numbers to the lower one of two lanes, the second to the higher: from both, as their first and second.
__device__ __forceinline__ void swap_halves(unsigned& first, unsigned& second, bool is_higher, int distance) {
    const unsigned low = first, high = second;
    const unsigned other = __shfl_xor_sync(~0u, is_higher ? low : high, distance);
    first = is_higher ? other : low, second = is_higher ? high : other;
}

// Writes 16 rows of the warp's columns. A lane has two neighbors of a row in each tile. Lanes swap, those next to each
// other and then those two apart, until each has all that its quad has of one tile of two, or of four.
template <int ACROSS>
__device__ __forceinline__ void store_rows(const float (&sums)[ACROSS][4], Rows<TYPE> out, int first_row, int end,
                                           int first_column) {
    constexpr int TILES = ACROSS % 4 == 0 ? 4 : 2;
    const bool odd = lane() % 2, upper = lane() % 4 / 2;
#pragma unroll
    for (int e = 0; e < 4; e += 2)
#pragma unroll
        for (int n = 0; n < ACROSS; n += TILES) {
            unsigned own[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) own[i] = pack<TYPE>(sums[n + i][e], sums[n + i][e + 1]);
#pragma unroll
            for (int i = 0; i < TILES; i += 2)  // tile i to the even lanes, i + 1 to the odd ones
                swap_halves(own[i], own[i + 1], odd, 1);
            if constexpr (TILES == 4)  // tiles 0 and 1 to the lower lanes, 2 and 3 to the upper ones
#pragma unroll
                for (int i = 0; i < 2; i++) swap_halves(own[i], own[i + 2], upper, 2);
            const int tile = TILES == 4 ? n + lane() % 4 : n + odd, place = TILES == 4 ? 0 : upper * 4;
            const int t = first_row + tile_row(e), column = first_column + tile * 8 + place;
            if (t >= end) continue;
            TYPE* to = out.row(t) + column;
            if (ALIGNED && column + 2 * TILES <= out.width) {
                if constexpr (TILES == 4) {
                    const uint4 eight = {own[0], own[1], own[2], own[3]};
                    *reinterpret_cast<uint4*>(to) = eight;
                } else {
                    const uint2 four = {own[0], own[1]};
                    *reinterpret_cast<uint2*>(to) = four;
                }
                continue;
            }
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++)
                if (column + j < out.width) to[j].bits = (unsigned short)(own[j / 2] >> j % 2 * 16);
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
    float* const maxima = totals + 2 * FEATURES;
    int* const exponents = reinterpret_cast<int*>(maxima + WARPS);

    const long long head = blockIdx.x / segments;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), from = alone ? 0 : first;
    const int slab = blockIdx.y, columns = v.width + v.ones, intervals = (N + interval - 1) / interval;
    const long long size = (long long)features * columns;
    State state;
    state.totals = totals + FEATURES;
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
            if (warp() < PARTS) write_weights<FEATURES>(warp(), queries, keys, nullptr, weights, exponents);
            __syncthreads();
            float output[DOWN][COLUMNS_ACROSS][4] = {}, normalizers[DOWN][4] = {};
            float (*const row_sums)[4] = NORMALIZE ? normalizers : nullptr;
            const int pair = warp() / 4, own_columns = quarter() * COLUMNS_ACROSS * 8;
            read_state<false, FEATURES>(output, row_sums, pair, own_columns, queries, memory, COLUMN_PITCH, totals,
                                        power_of_two(-exponent));
            for (int d = 0; SCALED && d < DOWN; d++) {
                scale(output[d], power_of_two(exponent));
                for (int e = 0; e < 4; e++) normalizers[d][e] *= power_of_two(exponent);
            }
            read_chunk<false>(output, row_sums, pair, own_columns, weights, exponents, values, COLUMN_PITCH);
#pragma unroll
            for (int d = 0; d < DOWN; d++) {
                const int row0 = start + band(pair, d) * 16;
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
                store_rows(output[d], out, row0, end, slab * COLUMNS + own_columns);
            }
        }
        state.add<false>(keys, values, ONES, Ones());
        if (SCALED) {
            const float largest = state.largest(ONES);
            if (lane() == 0) maxima[warp()] = largest;
        }
        const int stop = min(N, start + CHUNK);
        if (after && start >= first && (stop % interval == 0 || stop == N))
            state.transfer<false>(after + (head * intervals + (stop - 1) / interval) * size, features, v.width, columns, slab);
    });
}
#endif

#if defined(BACKWARD) || defined(SUMS)
// The right side of what stands in the column of ones behind the gradients: for each token a sum of two numbers, the
// first of them in the first column of the tile, the second in the second.
struct Split {
    const float* numbers;
    __device__ __forceinline__ unsigned pair(int t) const {
        float own[2];
        for (int i = 0; i < 2; i++) {
            const float number = numbers[t + i], high = to_float(from_float<TYPE>(number));
            own[i] = lane() / 4 == 0 ? high : lane() / 4 == 1 ? number - high : 0.0f;
        }
        return pack<TYPE>(own[0], own[1]);
    }
    __device__ __forceinline__ void operator()(int t0, unsigned& low, unsigned& high) const {
        low = pair(t0 + lane() % 4 * 2), high = pair(t0 + 8 + lane() % 4 * 2);
    }
};

__device__ __forceinline__ void share_split(float* numbers, const Rows<const TYPE>& split, int start, int end) {
    for (int t = threadIdx.x; t < CHUNK; t += THREADS)
        numbers[t] = start + t < end ? split.number(start + t, 0) + split.number(start + t, 1) : 0.0f;
}
#endif

#ifdef BACKWARD
constexpr int STAGE = CHUNK * 2 * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values, gradients
constexpr bool TEAMS = FEATURES == 64;  // wider tiles would not fit the registers
constexpr int WEIGHTS = CHUNK * WEIGHT_PITCH, MEMORY = FEATURES * COLUMN_PITCH;

// Gradients for [first, first + length) of a head, from its last chunk to its first. `after` are the states that the
// forward walk has left behind; `behind` is the sum of q g^T over all tokens behind, or where `alone` over those behind
// the sequence, when both states are made from the tokens themselves. The second column of `split`, if normalized, adds
// to the first: the gradient of a normalizer.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward_walk(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<const TYPE> g, Rows<const TYPE> split,
              TYPE* dq, TYPE* dk, TYPE* dv, const float* initial, const float* after, const float* behind, float* first_behind,
              int N, int features, int columns, int segments, int alone, int interval, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE *const weights = stages + STAGES * STAGE, *const other_weights = weights + WEIGHTS;
    TYPE *const past_memory = other_weights + WEIGHTS, *const future_memory = past_memory + MEMORY;
    float* const past_totals = reinterpret_cast<float*>(future_memory + MEMORY);
    float *const future_totals = past_totals + 2 * FEATURES, *const maxima = future_totals + 2 * FEATURES;
    float* const denominators = maxima + 2 * WARPS;  // their gradients, of this chunk or the next
    int *const exponents = reinterpret_cast<int*>(denominators + 2 * CHUNK), *const other_exponents = exponents + BANDS * BANDS;

    const long long head = blockIdx.x / segments;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), g = g.of_head(head), split = split.of_head(head);
    dq += head * N * features, dk += head * N * features, dv += head * N * v.width;
    const int first = blockIdx.x % segments * length, end = min(N, first + length);
    const int intervals = (N + interval - 1) / interval, chunks = (N + CHUNK - 1) / CHUNK;
    const int own_chunks = (end - first + CHUNK - 1) / CHUNK, last_chunk = first / CHUNK + own_chunks - 1;
    const int before_own = alone ? last_chunk : 0, behind_own = alone ? chunks - 1 - last_chunk : 0;
    // Chunks before the own ones for one state, those behind for the other, and the own ones from the last on.
    const auto chunk_of = [&](int i) {
        return i < before_own ? i : i < before_own + behind_own ? last_chunk + 1 + i - before_own
                                                                : last_chunk - (i - before_own - behind_own);
    };
    const long long size = (long long)features * (v.width + ONES);
    State past, future;
    past.totals = past_totals + FEATURES, future.totals = future_totals + FEATURES;
    past.transfer<true>(alone && initial ? initial + head * features * columns : nullptr, features, v.width, columns, 0);
    future.transfer<true>(behind ? behind + (alone ? head : blockIdx.x) * size : nullptr, features, v.width, v.width + ONES, 0);

    walk(before_own + behind_own + own_chunks, [&](int i, int stage) {
        TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        TYPE *values = keys + CHUNK * FEATURE_PITCH, *gradients = values + CHUNK * COLUMN_PITCH;
        const int start = chunk_of(i) * CHUNK;
        if (i < before_own || i >= before_own + behind_own) {
            fetch<FEATURES>(keys, k, start, N, 0);
            fetch<COLUMNS>(values, v, start, N, 0);
        }
        if (i >= before_own) {
            fetch<FEATURES>(queries, q, start, N, 0);
            fetch<COLUMNS>(gradients, g, start, N, 0);
        }
    }, [&](int i, int stage) {
        const TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        const TYPE *values = keys + CHUNK * FEATURE_PITCH, *gradients = values + CHUNK * COLUMN_PITCH;
        const int start = chunk_of(i) * CHUNK, stop = min(N, start + CHUNK);
        float* const own = denominators + i % 2 * CHUNK;
        if (NORMALIZE && i >= before_own) {
            share_split(own, split, start, N);
            __syncthreads();
        }
        if (i < before_own) {
            past.add<false>(keys, values, NORMALIZE, Ones());
            return;
        }
        if (i >= before_own + behind_own) {
            if (!alone && (stop % interval == 0 || stop == N))
                past.transfer<true>(after + (head * intervals + (stop - 1) / interval) * features * columns, features,
                                    v.width, columns, 0);
            if (!alone || i > before_own + behind_own) past.add<true>(keys, values, NORMALIZE, Ones());
            int past_exponent = 0, future_exponent = 0;
            if (SCALED) {
                const float largest[2] = {past.largest(false), future.largest(false)};
                for (int s = 0; s < 2; s++)
                    if (lane() == 0) maxima[s * WARPS + warp()] = largest[s];
                __syncthreads();
                float of_all[2] = {};
                for (int s = 0; s < 2; s++)
                    for (int w = 0; w < WARPS; w++) of_all[s] = fmaxf(of_all[s], maxima[s * WARPS + w]);
                past_exponent = exponent_for(of_all[0]), future_exponent = exponent_for(of_all[1]);
            }
            past.share(past_memory, past_totals, NORMALIZE, power_of_two(-past_exponent));
            future.share(future_memory, future_totals, ONES, power_of_two(-future_exponent));
            // Those of two tiles first, one for each warp.
            for (int n = warp(); n < 2 * PARTS; n += WARPS) {
                const bool of_values = n < 2 * TWOS ? n >= TWOS : n >= TWOS + PARTS;
                const int part = n < 2 * TWOS ? n % TWOS : TWOS + (n - 2 * TWOS) % HALF;
                if (!of_values) write_weights<FEATURES>(part, queries, keys, nullptr, weights, exponents);
                else write_weights<COLUMNS>(part, gradients, values, NORMALIZE ? own : nullptr, other_weights, other_exponents);
            }
            __syncthreads();

            const auto write = [&](auto& sums, TYPE* gradient, int width, int pair, int first_column) {
                const Rows<TYPE> rows = {gradient, 0, 0, width, 1, width, 0, 0};
#pragma unroll
                for (int d = 0; d < DOWN; d++) store_rows(sums[d], rows, start + band(pair, d) * 16, stop, first_column);
            };
            const auto scale_all = [&](auto& sums, int exponent) {
                for (int d = 0; SCALED && d < DOWN; d++) scale(sums[d], power_of_two(exponent));
            };
            const auto make_dq = [&](auto& sums, int pair, int column) {
                read_state<true, COLUMNS>(sums, nullptr, pair, column, gradients, past_memory, COLUMN_PITCH, nullptr, 1.0f);
                scale_all(sums, past_exponent);
                for (int d = 0; NORMALIZE && d < DOWN; d++)
                    for (int n = 0; n < int(sizeof sums[d] / sizeof sums[d][0]); n++)
                        for (int e = 0; e < 4; e++)
                            sums[d][n][e] += own[band(pair, d) * 16 + tile_row(e)] * past_totals[column + n * 8 + tile_column(e)];
                read_chunk<false>(sums, nullptr, pair, column, other_weights, other_exponents, keys, FEATURE_PITCH);
                write(sums, dq, features, pair, column);
            };
            const auto make_dk = [&](auto& sums, int pair, int column) {
                read_state<true, COLUMNS>(sums, nullptr, pair, column, values, future_memory, COLUMN_PITCH, nullptr, 1.0f);
                scale_all(sums, future_exponent);
                for (int d = 0; ONES && d < DOWN; d++)
                    for (int n = 0; n < int(sizeof sums[d] / sizeof sums[d][0]); n++)
                        for (int e = 0; e < 4; e++) sums[d][n][e] += future_totals[column + n * 8 + tile_column(e)];
                read_chunk<true>(sums, nullptr, pair, column, other_weights, other_exponents, queries, FEATURE_PITCH);
                write(sums, dk, features, pair, column);
            };
            if constexpr (TEAMS) {  // half of the warps for each: their tiles are twice as wide, and share more loads
                float sums[DOWN][2 * FEATURES_ACROSS][4] = {};
                const int pair = warp() % 4 / 2, column = warp() % 2 * FEATURES_ACROSS * 16;
                if (warp() < WARPS / 2) make_dq(sums, pair, column);
                else make_dk(sums, pair, column);
            } else {
                const int pair = warp() / 4, column = quarter() * FEATURES_ACROSS * 8;
                {
                    float sums[DOWN][FEATURES_ACROSS][4] = {};
                    make_dq(sums, pair, column);
                }
                float sums[DOWN][FEATURES_ACROSS][4] = {};
                make_dk(sums, pair, column);
            }
            const int pair = warp() / 4, column = quarter() * COLUMNS_ACROSS * 8;
            float sums[DOWN][COLUMNS_ACROSS][4] = {};
            read_state<false, FEATURES>(sums, nullptr, pair, column, keys, future_memory, COLUMN_PITCH, nullptr, 1.0f);
            scale_all(sums, future_exponent);
            read_chunk<true>(sums, nullptr, pair, column, weights, exponents, gradients, COLUMN_PITCH);
            write(sums, dv, v.width, pair, column);
        }
        future.add<false>(queries, gradients, NORMALIZE, Split{own});
    });
    if (!first_behind || first > 0) return;
    future.transfer<false>(first_behind + head * size, features, v.width, v.width + ONES, 0);
}
#endif

#ifdef SUMS
constexpr int STAGE = CHUNK * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: keys, values

// The sum of k v^T over each segment; behind the columns of v that of k, or, of the gradients of normalizers, of theirs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sums_of_segments(Rows<const TYPE> k, Rows<const TYPE> v, Rows<const TYPE> split, float* sums, int N, int features, int segments,
                 int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    float* const totals = reinterpret_cast<float*>(stages + STAGES * STAGE);
    float* const denominators = totals + FEATURES;
    const long long head = blockIdx.x / segments;
    k = k.of_head(head), v = v.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), slab = blockIdx.y;
    const int columns = v.width + ONES;
    split = split.of_head(head);
    State state;
    state.totals = totals;
    state.transfer<true>((const float*)nullptr, features, v.width, columns, slab);
    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        fetch<FEATURES>(tiles, k, first + i * CHUNK, end, 0);
        fetch<COLUMNS>(tiles + CHUNK * FEATURE_PITCH, v, first + i * CHUNK, end, slab * COLUMNS);
    }, [&](int i, int stage) {
        const TYPE* keys = stages + stage * STAGE;
        if (NORMALIZE) {
            float* const own = denominators + i % 2 * CHUNK;
            share_split(own, split, first + i * CHUNK, end);
            __syncthreads();
            state.add<false>(keys, keys + CHUNK * FEATURE_PITCH, ONES, Split{own});
        } else state.add<false>(keys, keys + CHUNK * FEATURE_PITCH, TOTALS, Ones());
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
