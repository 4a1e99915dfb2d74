// Linear attention whose memory fades by a decay for each channel, on the tensor cores. decay.cu says what is computed;
// the walks are those of pipelined.cu.
//
// Where one decay serves all channels, it is multiplied into the score of a query and a key (decay_pipelined.cu). Here a
// score is a sum over channels that fade at their own rates, so decays must be in queries and keys beforehand. Between
// token j and a later one i lies some x, and then
//
//     sum of q_ic e^(j to i)_c k_jc over c = sum of (q_ic e^(x to i)_c) (k_jc e^(j to x)_c) over c
//
// with no exponent above 0. Which x? Written in binary, the places of i and j in their chunk have a first digit in which
// they differ: i has a 1 there and j a 0. If h is what this digit is worth, the chunk falls into blocks of h tokens, that
// of i follows that of j, and x is where the two meet. So for each h = 1, 2, 4, ... there is one tile: in every other
// block it has queries, decayed since the block's start, and in the blocks between keys, decayed until the block's end.
// Its product with its own transpose has the scores of all pairs of this h. A token and itself are the only pair left.
//
// Decays are products of numbers of at most 1, one exponential for each token and channel: -inf is a factor of exactly 0.
// Blocks of h tokens become blocks of 2h: where there were two, what the first one leaves is multiplied into the second.

#include "tiles.h"
#include "walk.h"
#include "fading.h"

constexpr int EIGHTS = CHUNK / 8;            // of tokens
constexpr int TILE = CHUNK * FEATURE_PITCH;  // numbers
constexpr int SLABS = FEATURES / 64;         // of channels
static_assert(EIGHTS * SLABS <= WARPS, "");

// To prepare a chunk a warp has eight tokens and 64 channels, and a thread two of these, next to each other.
__device__ __forceinline__ bool prepares() { return EIGHTS * SLABS == WARPS || warp() < EIGHTS * SLABS; }
__device__ __forceinline__ int own_eight() { return warp() % EIGHTS; }
__device__ __forceinline__ int own_slab() { return warp() / EIGHTS; }
__device__ __forceinline__ int own_channel() { return own_slab() * 64 + lane() * 2; }

__device__ __forceinline__ float2 times(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }

// One of the thread's tokens of a tile.
__device__ __forceinline__ float2 load_one(const TYPE* tile, int t) {
    return to_floats(tile + (own_eight() * 8 + t) * FEATURE_PITCH + own_channel());
}
__device__ __forceinline__ void store_one(TYPE* tile, int t, float2 own) {
    *reinterpret_cast<unsigned*>(tile + (own_eight() * 8 + t) * FEATURE_PITCH + own_channel()) = pack<TYPE>(own.x, own.y);
}

// What all warps know of the decays of a chunk.
struct alignas(16) Decays {
    float2 over[EIGHTS][FEATURES / 2];  // eight tokens
    float2 over_all[FEATURES / 2];      // the chunk
    float2 first[FEATURES / 2];         // its first token
    float2 factors[FEATURES / 2];       // powers of two: see `factor_for`
};

// What a chunk's first query sees of its start may be next to nothing, and would vanish in float16 on its way into the
// gradient of a memory. So there queries are taken times a power of two for each channel, near the first decay, less.
__device__ __forceinline__ float factor_for(float first) {
    const int exponent = int(__float_as_uint(first) >> 23) - 127;
    return SCALED && exponent > -127 ? power_of_two(-exponent) : 1.0f;
}
__device__ __forceinline__ float2 factors_for(float2 first) { return {factor_for(first.x), factor_for(first.y)}; }
__device__ __forceinline__ float inverse(float factor) { return __uint_as_float((254u << 23) - __float_as_uint(factor)); }

// Two neighboring logarithms, as they are in memory.
template <typename T> struct Two {
    unsigned both;
    __device__ __forceinline__ static Two of(float x, float y) { return {pack<T>(x, y)}; }
};
template <> struct Two<float> {
    float2 both;
    __device__ __forceinline__ static Two of(float x, float y) { return {{x, y}}; }
};
__device__ __forceinline__ float2 to_floats(float2 both) { return both; }

// The thread's decays of a chunk. They are made while the chunk before is worked on; logarithms are asked for before.
struct Own {
    Two<LOG> logs[8];
    float2 decays[8];

    // Tokens in [first, end). All others fade nothing.
    __device__ __forceinline__ void ask(const Rows<const LOG>& log_decay, int start, int first, int end) {
#pragma unroll
        for (int t = 0; t < 8; t++) {
            const int at = start + own_eight() * 8 + t, c = own_channel();
            const bool known = at >= first && at < end;
            logs[t] = Two<LOG>::of(0.0f, 0.0f);
            if (ALIGNED && known && c + 2 <= log_decay.width)
                logs[t] = *reinterpret_cast<const Two<LOG>*>(log_decay.row(at) + c);
            else if (known)
                logs[t] = Two<LOG>::of(log_decay.number(at, c), log_decay.number(at, c + 1));
        }
    }
    __device__ __forceinline__ void prepare(Decays& shared) {
        float2 over = {1.0f, 1.0f};
#pragma unroll
        for (int t = 0; t < 8; t++) {
            const float2 both = to_floats(logs[t].both);
            decays[t] = {expf(both.x), expf(both.y)};
            over = times(over, decays[t]);
        }
        shared.over[own_eight()][own_channel() / 2] = over;
        if (own_eight() == 0) shared.first[own_channel() / 2] = decays[0];
    }
};

// Blocks of 1, 2, 4 and 8 tokens, which a thread has alone.
struct Blocks {
    float2 since[8], until[8];  // from a block's start to a token, and from a token to its block's end

    __device__ __forceinline__ explicit Blocks(const Own& own) {
#pragma unroll
        for (int t = 0; t < 8; t++) since[t] = own.decays[t], until[t] = {1.0f, 1.0f};
    }
    // Of h tokens before, of 2h then. The last of a block's tokens has all of its decays in `since`.
    __device__ __forceinline__ void join(int h) {
#pragma unroll
        for (int t = 0; t < 8; t++)
            if (t / h % 2 == 0) until[t] = times(until[t], since[t / h * h + 2 * h - 1]);
#pragma unroll
        for (int t = 0; t < 8; t++)
            if (t / h % 2 == 1) since[t] = times(since[t], since[t / h * h - 1]);
    }
    __device__ __forceinline__ void join_all() {
#pragma unroll
        for (int h = 1; h < 8; h *= 2) join(h);
    }
};

// The eights that are in the same block as the thread's: what those before it leave, and those after it.
struct Others {
    float2 before = {1.0f, 1.0f}, after = {1.0f, 1.0f};

    __device__ __forceinline__ static bool is_later(int eights) { return own_eight() / eights % 2; }
    __device__ __forceinline__ void join(int eights, const Decays& decays) {
        float2 others = {1.0f, 1.0f};
#pragma unroll
        for (int n = 0; n < eights; n++)
            others = times(others, decays.over[(own_eight() / eights ^ 1) * eights + n][own_channel() / 2]);
        if (is_later(eights)) before = times(before, others);
        else after = times(after, others);
    }
};

// From one end of a chunk to the other: the memory fades, and what is there is added; or queries into its gradient.
template <bool ARE_QUERIES>
__device__ __forceinline__ void pass(State& state, const TYPE* keys, const TYPE* values, const Decays& decays) {
    const auto each = [&](auto factor_of) {
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
            for (int e = 0; e < 4; e += 2) {
                const float factor = factor_of(state.feature(b, e));
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++)
                    state.numbers[b][n][e] *= factor, state.numbers[b][n][e + 1] *= factor;
            }
    };
    const float *over_all = &decays.over_all[0].x, *factors = &decays.factors[0].x;
    each([&](int c) { return ARE_QUERIES && SCALED ? over_all[c] * factors[c] : over_all[c]; });
    state.add(keys, values, Same(), false, Ones());
    if (ARE_QUERIES && SCALED) each([&](int c) { return inverse(factors[c]); });
}

#ifndef STATES
constexpr int LEVELS = CHUNK == 64 ? 6 : 5;  // how often a chunk can be halved

// Sums over the warp: a lane receives that of number lane / 4.
__device__ __forceinline__ float sum_of_eight(float (&sums)[8]) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = lane() & half * 4;
#pragma unroll
        for (int t = 0; t < half; t++) {
            const float keep = upper ? sums[t + half] : sums[t], give = upper ? sums[t] : sums[t + half];
            sums[t] = keep + __shfl_xor_sync(~0u, give, half * 4);
        }
    }
    for (int lanes = 1; lanes < 4; lanes *= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], lanes);
    return sums[0];
}

// The tiles of all levels; and queries decayed since the chunk's start, and keys decayed until its end.
template <bool FOR_GRADIENTS>
__device__ __forceinline__ void prepare_tiles(const TYPE* queries, const TYPE* keys, TYPE* levels, TYPE* since_start,
                                              TYPE* until_end, float* itself, const Own& own, Decays& decays) {
    float2 q[8], k[8];
    float sums[8];
#pragma unroll
    for (int t = 0; t < 8; t++) q[t] = load_one(queries, t), k[t] = load_one(keys, t);
#pragma unroll
    for (int t = 0; t < 8; t++) sums[t] = q[t].x * k[t].x + q[t].y * k[t].y;
    const float sum = sum_of_eight(sums);
    if (lane() % 4 == 0) itself[own_slab() * CHUNK + own_eight() * 8 + lane() / 4] = sum;

    Blocks blocks(own);
#pragma unroll
    for (int h = 1; h < 8; h *= 2, levels += TILE) {
#pragma unroll
        for (int t = 0; t < 8; t++)
            store_one(levels, t, t / h % 2 ? times(q[t], blocks.since[t]) : times(k[t], blocks.until[t]));
        blocks.join(h);
    }
#pragma unroll
    for (int t = 0; t < 8; t++) q[t] = times(q[t], blocks.since[t]), k[t] = times(k[t], blocks.until[t]);
    Others others;
#pragma unroll
    for (int eights = 1; eights < EIGHTS; eights *= 2, levels += TILE) {
        if (others.is_later(eights))
#pragma unroll
            for (int t = 0; t < 8; t++) store_one(levels, t, times(q[t], others.before));
        else
#pragma unroll
            for (int t = 0; t < 8; t++) store_one(levels, t, times(k[t], others.after));
        others.join(eights, decays);
    }
    if (own_eight() == 0) decays.over_all[own_channel() / 2] = times(blocks.since[7], others.after);
    if (FOR_GRADIENTS && SCALED) {
        const float2 factors = factors_for(decays.first[own_channel() / 2]);
        others.before = times(others.before, factors);
        if (own_eight() == 0) decays.factors[own_channel() / 2] = factors;
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
        store_one(since_start, t, times(q[t], others.before));
        store_one(until_end, t, times(k[t], others.after));
    }
}

// The weights of a chunk. A warp has a tile on the diagonal, with pairs of several levels, or one or two below it.
__device__ __forceinline__ void make_weights(const TYPE* levels, const float* itself, TYPE* weights, int* exponents) {
    const int other = warp() - BANDS;
    if (other < 0) {
        const int band = warp();
        float scores[1][2][4] = {};
#pragma unroll
        for (int level = 0; level < 4; level++) {
            float some[1][2][4] = {};
            make_scores<FEATURES, 1>(some, band, band, levels + level * TILE, levels + level * TILE);
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 4; e++) {
                    const int row = tile_row(e), column = n * 8 + tile_column(e);
                    if (row > column && (row ^ column) >> level == 1) scores[0][n][e] = some[0][n][e];
                }
        }
        for (int n = 0; n < 2; n++)
            for (int e = 0; e < 4; e++) {
                const int row = tile_row(e);
                if (row != n * 8 + tile_column(e)) continue;
                for (int slab = 0; slab < SLABS; slab++) scores[0][n][e] += itself[slab * CHUNK + band * 16 + row];
            }
        write_tiles<1>(scores, band, band, weights, exponents);
    } else if (other < BANDS / 2) {
        float scores[1][2][4] = {};
        make_scores<FEATURES, 1>(scores, 2 * other + 1, 2 * other, levels + 4 * TILE, levels + 4 * TILE);
        write_tiles<1>(scores, 2 * other + 1, 2 * other, weights, exponents);
    } else if (BANDS == 4) {  // bands 2 and 3 with 0 and 1
        float scores[1][4][4] = {};
        make_scores<FEATURES, 2>(scores, other, 0, levels + 5 * TILE, levels + 5 * TILE);
        write_tiles<2>(scores, other, 0, weights, exponents);
    }
}

#endif

#ifdef FORWARD
constexpr int STAGE = CHUNK * (2 * FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values

// Outputs of [first, first + length) of a head, from the state before; the last segment writes the state behind it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_walk(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<const LOG> log_decay, Rows<TYPE> out,
             const float* before, float* last, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE* const levels = stages + STAGES * STAGE;
    TYPE* const weights = levels + LEVELS * TILE;
    TYPE* const memory = weights + CHUNK * WEIGHT_PITCH;
    Decays& decays = *reinterpret_cast<Decays*>(memory + FEATURES * COLUMN_PITCH);
    float* const itself = reinterpret_cast<float*>(&decays + 1);  // scores of tokens with themselves
    float* const maxima = itself + SLABS * CHUNK;
    int* const exponents = reinterpret_cast<int*>(maxima + WARPS);

    const long long head = blockIdx.x / segments, size = (long long)features * v.width;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    log_decay = log_decay.of_head(head);
    const int segment = blockIdx.x % segments, first = segment * length, end = min(N, first + length);
    State state;
    state.transfer<true>(before + blockIdx.x * size, features, v.width, v.width, 0);
    note_largest(state, maxima);
    Own own;
    if (prepares()) {
        own.ask(log_decay, first, first, end);
        own.prepare(decays);
        own.ask(log_decay, first + CHUNK, first, end);
    }

    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        const int start = first + i * CHUNK;
        fetch<FEATURES>(tiles, q, start, end, 0);
        fetch<FEATURES>(tiles + TILE, k, start, end, 0);
        fetch<COLUMNS>(tiles + 2 * TILE, v, start, end, 0);
    }, [&](int i, int stage) {
        TYPE *queries = stages + stage * STAGE, *keys = queries + TILE, *values = keys + TILE;
        const int start = first + i * CHUNK, exponent = exponent_of_all(maxima);
        state.share(memory, nullptr, false, power_of_two(-exponent));
        if (prepares()) prepare_tiles<false>(queries, keys, levels, queries, keys, itself, own, decays);
        __syncthreads();
        make_weights(levels, itself, weights, exponents);
        __syncthreads();

        float output[DOWN][COLUMNS_ACROSS][4] = {};
        const int pair = warp() / 4, column = quarter() * COLUMNS_ACROSS * 8;
        read_state<false, FEATURES>(output, nullptr, pair, column, queries, memory, COLUMN_PITCH, nullptr, 1.0f);
#pragma unroll
        for (int d = 0; SCALED && d < DOWN; d++) scale(output[d], power_of_two(exponent));
        read_chunk<false>(output, nullptr, pair, column, weights, exponents, values, COLUMN_PITCH);
#pragma unroll
        for (int d = 0; d < DOWN; d++) store_rows(output[d], out, start + band(pair, d) * 16, end, column);
        pass<false>(state, keys, values, decays);
        note_largest(state, maxima);
        if (prepares()) {
            own.prepare(decays);
            own.ask(log_decay, start + 2 * CHUNK, first, end);
        }
    });
    if (segment == segments - 1) state.transfer<false>(last + head * size, features, v.width, v.width, 0);
}
#endif

#ifdef STATES
constexpr int STAGE = CHUNK * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: keys, values

// What a segment adds to the memory, and in `totals` what it leaves of each channel; or, from the memory `before`, that
// before each chunk, as the backward walk multiplies by it. Backwards, k and v are queries and gradients, and the memory
// is the gradient of the other one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_states(Rows<const TYPE> k, Rows<const TYPE> v, Rows<const LOG> log_decay, const float* before, float* sums,
               float* totals, TYPE* images, int* exponents, int N, int features, int segments, int length, int backwards) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    Decays& decays = *reinterpret_cast<Decays*>(stages + STAGES * STAGE);
    float* const maxima = reinterpret_cast<float*>(&decays + 1);

    const long long head = blockIdx.x / segments, size = (long long)features * v.width;
    k = k.of_head(head), v = v.of_head(head), log_decay = log_decay.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), count = (end - first + CHUNK - 1) / CHUNK;
    const auto start_of = [&](int i) { return first + (backwards ? count - 1 - i : i) * CHUNK; };
    State state;
    state.transfer<true>(before ? before + blockIdx.x * size : nullptr, features, v.width, v.width, 0);
    note_largest(state, maxima);
    Own own;
    if (prepares()) {
        own.ask(log_decay, start_of(0), first, end);
        own.prepare(decays);
        own.ask(log_decay, start_of(1), first, end);
    }
    float left = 1.0f;  // of channel `threadIdx.x`

    walk(count, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        fetch<FEATURES>(tiles, k, start_of(i), end, 0);
        fetch<COLUMNS>(tiles + TILE, v, start_of(i), end, 0);
    }, [&](int i, int stage) {
        TYPE *keys = stages + stage * STAGE, *values = keys + TILE;
        if (images) {
            const int exponent = exponent_of_all(maxima);
            const long long chunk = head * ((N + CHUNK - 1) / CHUNK) + start_of(i) / CHUNK;
            write_image(state, images + chunk * FEATURES * COLUMNS, exponent);
            if (SCALED && threadIdx.x == 0) exponents[chunk] = exponent;
        }
        if (prepares()) {
            Blocks blocks(own);
            blocks.join_all();
            Others others;
#pragma unroll
            for (int eights = 1; eights < EIGHTS; eights *= 2) others.join(eights, decays);
            const float2 factors = factors_for(decays.first[own_channel() / 2]), before = times(others.before, factors);
#pragma unroll
            for (int t = 0; t < 8; t++)
                store_one(keys, t, times(load_one(keys, t), backwards ? times(blocks.since[t], before)
                                                                      : times(blocks.until[t], others.after)));
            if (own_eight() == 0) {
                decays.over_all[own_channel() / 2] = times(blocks.since[7], others.after);
                decays.factors[own_channel() / 2] = factors;
            }
        }
        __syncthreads();
        if (threadIdx.x < FEATURES) left *= (&decays.over_all[0].x)[threadIdx.x];
        if (backwards) pass<true>(state, keys, values, decays);
        else pass<false>(state, keys, values, decays);
        note_largest(state, maxima);
        if (prepares()) {
            own.prepare(decays);
            own.ask(log_decay, start_of(i + 2), first, end);
        }
    });
    if (sums) state.transfer<false>(sums + blockIdx.x * size, features, v.width, v.width, 0);
    if (totals && threadIdx.x < features) totals[blockIdx.x * (long long)features + threadIdx.x] = left;
}
#endif

#ifdef BACKWARD
// With S before a chunk and G behind it, with the decays F since a block's start and E until its end, for each channel by
// itself, and with w_ij = do_i^T v_j,
//
//     dq_i = F_i (S do_i) + sum over levels of F_i (sum of w_ij (E_j k_j) over the j that are a level's pairs of i)
//     dk_j = E_j (G v_j)  + sum over levels of E_j (sum of w_ij (F_i q_i) over the i that are a level's pairs of j)
//     dv_j = G^T (E_j k_j) + sum of (the weight of i and j) do_i
//     G    = all G + sum of (F_i q_i) do_i^T
//
// where at the first terms the block is the chunk. So a level's tile is multiplied by the w of its pairs, and gives dq in
// the rows where it has queries and dk in those of keys, but for F and E. It comes to lie where the tile was.
//
// dg_t is the sum of all that has faded by e^g_t: of what the tokens from t on have read of those before it. In a later
// block these are the tokens from t to the block's end, each with all that it reads of the earlier block; in an earlier
// one those from its start to t, with all that is read of them. Each term is added up by itself: q_t dq_t - k_t dk_t, added
// up from the end, would say the same, and lose digits.

constexpr int STAGE = CHUNK * 2 * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values, gradients
constexpr int WEIGHTS = CHUNK * WEIGHT_PITCH;
constexpr int GROUPS = FEATURES / 32;     // of columns of a tile of gradients
constexpr int SUMS = LEVELS - 2;  // of eights: of the levels from 4 on, and of the chunk's two ends

// Of a tile of gradients a warp makes a band and 32 columns.
__device__ __forceinline__ bool has_part() { return BANDS * GROUPS == WARPS || warp() < BANDS * GROUPS; }
__device__ __forceinline__ int own_band() { return warp() % BANDS; }
__device__ __forceinline__ int own_group() { return warp() / BANDS; }
using Part = float[1][4][4];

// += the w of the warp's band and another one, times that of a tile.
__device__ __forceinline__ void add_band(Part& sums, const unsigned (&pairs)[1][4], const TYPE* tile, int other) {
    multiply<false>(sums, pairs, tile + other * 16 * FEATURE_PITCH + own_group() * 32, FEATURE_PITCH);
}
// += rows of the warp's band (tokens x columns) times a state's transpose.
__device__ __forceinline__ void read_part(Part& sums, const TYPE* rows, const TYPE* memory) {
#pragma unroll 4
    for (int k0 = 0; k0 < COLUMNS; k0 += 16) {
        unsigned a[1][4];
        load_left<false>(a[0], rows + own_band() * 16 * COLUMN_PITCH + k0, COLUMN_PITCH);
        multiply<true>(sums, a, memory + own_group() * 32 * COLUMN_PITCH + k0, COLUMN_PITCH);
    }
}
__device__ __forceinline__ void store_part(Part& sums, int from_exponent, TYPE* tile, int* exponents) {
    float factor = 1.0f;
    if (SCALED) {
        scale(sums[0], power_of_two(from_exponent));
        const int exponent = exponent_for(maximum_of_warp(largest_of(sums)));
        factor = power_of_two(-exponent);
        if (lane() == 0) exponents[own_band() * GROUPS + own_group()] = exponent;
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        for (int e = 0; e < 4; e += 2)
            *reinterpret_cast<unsigned*>(tile + (own_band() * 16 + tile_row(e)) * FEATURE_PITCH + own_group() * 32 + n * 8
                                         + tile_column(e)) = pack<TYPE>(sums[0][n][e] * factor, sums[0][n][e + 1] * factor);
}

// w of pairs: of the warp's band and another one, from below the diagonal of all w.
__device__ __forceinline__ void load_pairs(unsigned (&pairs)[4], const TYPE* w, int other) {
    const int own = own_band(), row = max(own, other), column = min(own, other);
    const TYPE* tile = w + row * 16 * WEIGHT_PITCH + column * 16;
    if (own > other) load_left<false>(pairs, tile, WEIGHT_PITCH);
    else load_left<true>(pairs, tile, WEIGHT_PITCH);
}
__device__ __forceinline__ int exponent_of(const int* exponents, int other) {
    return SCALED ? exponents[max(own_band(), other) * BANDS + min(own_band(), other)] : 0;
}

// Levels whose pairs are in one band: tiles are read and written by the same warp.
__device__ __forceinline__ void read_near(TYPE* levels, const TYPE* w, const int* exponents, int* part_exponents) {
    unsigned below[4], above[4];
    load_left<false>(below, w + own_band() * 16 * (WEIGHT_PITCH + 1), WEIGHT_PITCH);
    load_left<true>(above, w + own_band() * 16 * (WEIGHT_PITCH + 1), WEIGHT_PITCH);
#pragma unroll
    for (int level = 0; level < 4; level++) {
        unsigned pairs[1][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {  // where one of the two is not 0 it is the right one
            const int row = lane() / 4 + i % 2 * 8, column = lane() % 4 * 2 + i / 2 * 8;
            const unsigned first = (row ^ column) >> level == 1 ? 0xffffu : 0,
                           second = (row ^ (column + 1)) >> level == 1 ? 0xffff0000u : 0;
            pairs[0][i] = (below[i] | above[i]) & (first | second);
        }
        Part sums = {};
        add_band(sums, pairs, levels + level * TILE, own_band());
        __syncwarp();
        store_part(sums, exponent_of(exponents, own_band()), levels + level * TILE, part_exponents + level * BANDS * GROUPS);
    }
}

// The thread's gradients: of eight tokens and two channels.
struct Gradients {
    float2 q[8], k[8], logs[8];

    __device__ __forceinline__ static void add(float2& to, float2 x) { to.x += x.x, to.y += x.y; }

    // What tokens of a block of h have read of the block before, or what that behind has read of them: each counts for
    // the decays that lie between.
    __device__ __forceinline__ void note_from(const float2 (&read)[8], int first, int h) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int t = h - 1; t >= 0; t--) add(sum, read[first + t]), add(logs[first + t], sum);
    }
    __device__ __forceinline__ void note_until(const float2 (&read)[8], int first, int h) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < h; t++) add(logs[first + t], sum), add(sum, read[first + t]);
    }
    __device__ __forceinline__ static float2 sum_of(const float2 (&read)[8]) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < 8; t++) add(sum, read[t]);
        return sum;
    }
};

// To the thread's tokens and channels of an array (N, features), of the tokens before `stop`.
template <typename T>
__device__ __forceinline__ void store_eight(T* array, int start, int stop, int features, const float2 (&own)[8]) {
    const int c = own_channel(), count = stop - (start + own_eight() * 8);
    T* row = array + (long long)(start + own_eight() * 8) * features + c;
#pragma unroll
    for (int t = 0; t < 8; t++, row += features) {
        if (t >= count || c >= features) continue;
        if (ALIGNED) {  // and so no width is odd
            *reinterpret_cast<Two<T>*>(row) = Two<T>::of(own[t].x, own[t].y);
        } else {
            row[0] = from_float<T>(own[t].x);
            if (c + 1 < features) row[1] = from_float<T>(own[t].y);
        }
    }
}

// Gradients for [first, first + length) of a head, from its last chunk to its first, from G behind it. The same part of
// shared memory has first S, and then G.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_backward(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<const TYPE> g, Rows<const LOG> log_decay,
                 TYPE* dq, TYPE* dk, TYPE* dv, LOG* d_log, const TYPE* images, const int* image_exponents,
                 const float* behind, float* d_initial, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE* const levels = stages + STAGES * STAGE;
    TYPE *const since_start = levels + LEVELS * TILE, *const until_end = since_start + TILE;
    TYPE *const weights = until_end + TILE, *const w = weights + WEIGHTS, *const memory = w + WEIGHTS;
    Decays& decays = *reinterpret_cast<Decays*>(memory + FEATURES * COLUMN_PITCH);
    float2* const sums_of_eights = reinterpret_cast<float2*>(&decays + 1);
    float* const through = reinterpret_cast<float*>(sums_of_eights + SUMS * EIGHTS * FEATURES / 2);
    float *const itself = through + 2 * FEATURES, *const maxima = itself + SLABS * CHUNK;
    int *const exponents = reinterpret_cast<int*>(maxima + WARPS), *const w_exponents = exponents + BANDS * BANDS;
    int* const part_exponents = w_exponents + BANDS * BANDS;

    const long long head = blockIdx.x / segments, size = (long long)features * v.width, chunks = (N + CHUNK - 1) / CHUNK;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), g = g.of_head(head);
    log_decay = log_decay.of_head(head);
    dq += head * N * features, dk += head * N * features, dv += head * N * v.width, d_log += head * N * features;
    const int first = blockIdx.x % segments * length, end = min(N, first + length), count = (end - first + CHUNK - 1) / CHUNK;
    const auto start_of = [&](int i) { return first + (count - 1 - i) * CHUNK; };
    State future;
    future.transfer<true>(behind + blockIdx.x * size, features, v.width, v.width, 0);
    note_largest(future, maxima);
    Own own;
    if (prepares()) {
        own.ask(log_decay, start_of(0), first, end);
        own.prepare(decays);
        own.ask(log_decay, start_of(1), first, end);
    }

    walk(count, [&](int i, int stage) {
        TYPE *queries = stages + stage * STAGE, *keys = queries + TILE, *values = keys + TILE;
        fetch<FEATURES>(queries, q, start_of(i), end, 0);
        fetch<FEATURES>(keys, k, start_of(i), end, 0);
        fetch<COLUMNS>(values, v, start_of(i), end, 0);
        fetch<COLUMNS>(values + CHUNK * COLUMN_PITCH, g, start_of(i), end, 0);
    }, [&](int i, int stage) {
        const TYPE *queries = stages + stage * STAGE, *keys = queries + TILE, *values = keys + TILE;
        const TYPE* gradients = values + CHUNK * COLUMN_PITCH;
        const int start = start_of(i), stop = min(end, start + CHUNK);
        Image image;  // it arrives while the tiles are made
        image.ask(images, image_exponents, head * chunks + start / CHUNK);
        if (prepares()) prepare_tiles<true>(queries, keys, levels, since_start, until_end, itself, own, decays);
        image.store(memory);
        const int past_exponent = image.exponent, future_exponent = exponent_of_all(maxima);
        __syncthreads();

        make_weights(levels, itself, weights, exponents);
        if (warp() < PARTS)
            with_part(warp(), [&](auto count, int band, int j) {
                constexpr int COUNT = decltype(count)::value;
                float scores[1][2 * COUNT][4] = {};
                make_scores<COLUMNS, COUNT>(scores, band, j, gradients, values);
#pragma unroll
                for (int n = 0; n < 2 * COUNT; n++)
                    for (int e = 0; e < 4; e++)
                        if (score_column(j, n, e) > score_row(band, e)) scores[0][n][e] = 0.0f;
                write_tiles<COUNT>(scores, band, j, w, w_exponents);
            });
        Part of_past = {}, level4 = {}, level5 = {};
        if (has_part()) read_part(of_past, gradients, memory);
#pragma unroll
        for (int b = 0; b < STATE_DOWN; b++)
            for (int e = 0; e < 4; e += 2) {
                const int c = future.feature(b, e);
                const TYPE* row = memory + c * COLUMN_PITCH + half() * STATE_ACROSS * 8 + tile_column(e);
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < STATE_ACROSS; n++) {
                    const float2 pair = to_floats(row + n * 8);
                    sum += pair.x * future.numbers[b][n][e] + pair.y * future.numbers[b][n][e + 1];
                }
                for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
                if (lane() % 4 == 0) through[half() * FEATURES + c] = sum * power_of_two(past_exponent);
            }
        __syncthreads();

        future.share(memory, nullptr, false, power_of_two(-future_exponent));
        int level5_exponent = 0;
        if (has_part()) {
            read_near(levels, w, w_exponents, part_exponents);
            unsigned pairs[1][4];
            load_pairs(pairs[0], w, own_band() ^ 1);
            add_band(level4, pairs, levels + 4 * TILE, own_band() ^ 1);
            if (BANDS == 4) {
                const int other = own_band() < 2 ? 2 : 0;
                const int some = exponent_of(w_exponents, other), more = exponent_of(w_exponents, other + 1);
                level5_exponent = max(some, more);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    load_pairs(pairs[0], w, other + n);
                    for (int x = 0; SCALED && x < 4; x++)
                        pairs[0][x] = scale_pair<TYPE>(pairs[0][x], power_of_two((n ? more : some) - level5_exponent));
                    add_band(level5, pairs, levels + 5 * TILE, other + n);
                }
            }
        }
        __syncthreads();

        if (has_part()) {
            const int size = BANDS * GROUPS;
            store_part(level4, exponent_of(w_exponents, own_band() ^ 1), levels + 4 * TILE, part_exponents + 4 * size);
            if (BANDS == 4) store_part(level5, level5_exponent, levels + 5 * TILE, part_exponents + 5 * size);
        }
        {
            float sums[DOWN][COLUMNS_ACROSS][4] = {};
            const int pair = warp() / 4, column = quarter() * COLUMNS_ACROSS * 8;
            read_state<false, FEATURES>(sums, nullptr, pair, column, until_end, memory, COLUMN_PITCH, nullptr, 1.0f);
#pragma unroll
            for (int d = 0; SCALED && d < DOWN; d++) scale(sums[d], power_of_two(future_exponent));
            read_chunk<true>(sums, nullptr, pair, column, weights, exponents, gradients, COLUMN_PITCH);
            const Rows<TYPE> rows = {dv, 0, 0, v.width, 1, v.width, 0, 0};
#pragma unroll
            for (int d = 0; d < DOWN; d++) store_rows(sums[d], rows, start + band(pair, d) * 16, stop, column);
        }
        pass<true>(future, since_start, gradients, decays);
        note_largest(future, maxima);
        __syncthreads();

        if (has_part()) {
            const int size = BANDS * GROUPS;
            Part of_future = {};
            read_part(of_future, values, memory);
            store_part(of_past, past_exponent, since_start, part_exponents + LEVELS * size);
            store_part(of_future, future_exponent, until_end, part_exponents + (LEVELS + 1) * size);
        }
        __syncthreads();

        Gradients own_gradients;
        if (prepares()) {
            const int band = own_eight() / 2, group = own_channel() / 32, c = own_channel() / 2;
            const auto note_sum = [&](int n, const float2 (&read)[8]) {
                sums_of_eights[(n * EIGHTS + own_eight()) * FEATURES / 2 + c] = Gradients::sum_of(read);
            };
            // A token of a tile of gradients, times its decay, is a part of the gradient of the query, or of the key, that
            // had its place there. Their product is what has been read by this query, or of this key.
            float2 read[8];
            const auto take = [&](int t, const TYPE* tile, int level, float2 decay, float2& gradient, const TYPE* factors) {
                const float left = SCALED ? power_of_two(part_exponents[(level * BANDS + band) * GROUPS + group]) : 1.0f;
                const float2 both = load_one(tile, t), own = times(decay, {both.x * left, both.y * left});
                Gradients::add(gradient, own);
                read[t] = times(own, load_one(factors, t));
            };
            Gradients& to = own_gradients;
            const float factor = SCALED ? power_of_two(w_exponents[band * (BANDS + 1)]) : 1.0f;
#pragma unroll
            for (int t = 0; t < 8; t++) {  // a token and itself
                const float own = to_float(w[(own_eight() * 8 + t) * (WEIGHT_PITCH + 1)]) * factor;
                to.q[t] = times(load_one(keys, t), {own, own}), to.k[t] = times(load_one(queries, t), {own, own});
                to.logs[t] = {0.0f, 0.0f};
            }
            Blocks blocks(own);
            const TYPE* tile = levels;
#pragma unroll
            for (int h = 1, level = 0; h < 8; h *= 2, level++, tile += TILE) {
#pragma unroll
                for (int t = 0; t < 8; t++)
                    if (t / h % 2) take(t, tile, level, blocks.since[t], to.q[t], queries);
                    else take(t, tile, level, blocks.until[t], to.k[t], keys);
#pragma unroll
                for (int t = 0; t < 8; t += 2 * h) to.note_until(read, t, h), to.note_from(read, t + h, h);
                blocks.join(h);
                __syncwarp();  // no load is moved across it: all at once would not fit the registers
            }
            Others others;
#pragma unroll
            for (int eights = 1, level = 3; eights < EIGHTS; eights *= 2, level++, tile += TILE) {
                if (others.is_later(eights)) {
#pragma unroll
                    for (int t = 0; t < 8; t++)
                        take(t, tile, level, times(blocks.since[t], others.before), to.q[t], queries);
                    to.note_from(read, 0, 8);
                } else {
#pragma unroll
                    for (int t = 0; t < 8; t++)
                        take(t, tile, level, times(blocks.until[t], others.after), to.k[t], keys);
                    to.note_until(read, 0, 8);
                }
                if (level > 3) note_sum(level - 4, read);
                others.join(eights, decays);
                __syncwarp();  // as above
            }
#pragma unroll
            for (int t = 0; t < 8; t++)
                take(t, since_start, LEVELS, times(blocks.since[t], others.before), to.q[t], queries);
            to.note_from(read, 0, 8);
            note_sum(SUMS - 2, read);
            store_eight(dq, start, stop, features, to.q);
            __syncwarp();  // as above
#pragma unroll
            for (int t = 0; t < 8; t++)
                take(t, until_end, LEVELS + 1, times(blocks.until[t], others.after), to.k[t], keys);
            to.note_until(read, 0, 8);
            note_sum(SUMS - 1, read);
            store_eight(dk, start, stop, features, to.k);
        }
        __syncthreads();

        if (prepares()) {
            const int c = own_channel(), eight = own_eight();
            float2 more = times(decays.over_all[c / 2],
                                {through[c] + through[FEATURES + c], through[c + 1] + through[FEATURES + c + 1]});
            // Of the other eights in a block: of those behind the thread's own, or before it.
            const auto add_eights = [&](int n, int eights, bool behind) {
#pragma unroll
                for (int x = 0; x < eights; x++) {
                    const int other = eight / eights * eights + x;
                    const float2 sum = sums_of_eights[(n * EIGHTS + other) * FEATURES / 2 + c / 2];
                    if (behind ? other > eight : other < eight) Gradients::add(more, sum);
                }
                __syncwarp();  // as above
            };
#pragma unroll
            for (int eights = 2, n = 0; eights < EIGHTS; eights *= 2, n++) add_eights(n, eights, Others::is_later(eights));
            add_eights(SUMS - 2, EIGHTS, true);
            add_eights(SUMS - 1, EIGHTS, false);
#pragma unroll
            for (int t = 0; t < 8; t++) Gradients::add(own_gradients.logs[t], more);
            store_eight(d_log, start, stop, features, own_gradients.logs);
            own.prepare(decays);
            own.ask(log_decay, start_of(i + 2), first, end);
        }
    });
    if (first == 0) future.transfer<false>(d_initial + head * size, features, v.width, v.width, 0);
}
#endif
