// What walks on the tensor cores have in common, with and without a decay: products of tiles in shared memory, a state
// in registers, and copies that go on meanwhile. The idea of it stands in pipelined.cu.

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

// Scores of the chunk, left right^T: of band i the COUNT tiles from tile j on.
template <int WIDTH, int COUNT>
__device__ __forceinline__ void make_scores(float (&scores)[1][2 * COUNT][4], int i, int j, const TYPE* left,
                                            const TYPE* right) {
#pragma unroll
    for (int k0 = 0; k0 < WIDTH; k0 += 16) {
        unsigned a[1][4];
        load_left<false>(a[0], left + i * 16 * (WIDTH + 8) + k0, WIDTH + 8);
        multiply<true>(scores, a, right + j * 16 * (WIDTH + 8) + k0, WIDTH + 8);
    }
}
// Which tokens entry e of tile n of them belongs to.
__device__ __forceinline__ int score_row(int i, int e) { return i * 16 + tile_row(e); }
__device__ __forceinline__ int score_column(int j, int n, int e) { return j * 16 + n * 8 + tile_column(e); }

// The same as weights, in 16 bits, to shared memory.
template <int COUNT>
__device__ __forceinline__ void write_tiles(const float (&scores)[1][2 * COUNT][4], int i, int j, TYPE* weights, int* exponents) {
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

template <int NUMBER> struct Count { static constexpr int value = NUMBER; };

// Calls `work` with how many tiles of which band, and from which tile on, are a part.
template <typename Work> __device__ __forceinline__ void with_part(int part, Work work) {
    if (part < TWOS) work(Count<2>(), BANDS == 2 ? 1 : part + 1 - part / 3, part / 3 * 2);  // of bands 1, 2, 3, 3
    else work(Count<1>(), (part - TWOS) * 2, (part - TWOS) * 2);                           // of bands 0, 2
}

// Keys as they are, or negative.
struct Same {
    __device__ __forceinline__ void operator()(unsigned (&)[4], int) const {}
};
struct Negative {
    __device__ __forceinline__ void operator()(unsigned (&a)[4], int) const {
        for (int i = 0; i < 4; i++) a[i] ^= 0x80008000u;
    }
};

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

    // += keys^T values, after `change` of the keys of 16 tokens; `column` is the right side of the column of ones,
    // whose first two columns count.
    template <typename Change, typename Column>
    __device__ __forceinline__ void add(const TYPE* keys, const TYPE* values, Change change, bool with_totals, Column column) {
        float sums[STATE_DOWN][4] = {};
#pragma unroll
        for (int t0 = 0; t0 < CHUNK; t0 += 16) {
            unsigned a[STATE_DOWN][4];
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++) {
                load_left<true>(a[b], keys + t0 * FEATURE_PITCH + (quarter() * STATE_DOWN + b) * 16, FEATURE_PITCH);
                change(a[b], t0);
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
