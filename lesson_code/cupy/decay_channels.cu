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
#include "fading.h"

constexpr int EIGHTS = CHUNK / 8;               // of tokens
constexpr int TILE = CHUNK * FEATURE_PITCH;     // numbers
constexpr int SLABS = FEATURES / 64;
static_assert(EIGHTS * SLABS <= WARPS, "");

// To prepare a chunk a warp has eight tokens and 64 channels, and a thread two of these, next to each other.
__device__ __forceinline__ bool prepares() { return warp() < EIGHTS * SLABS; }
__device__ __forceinline__ int own_eight() { return warp() % EIGHTS; }
__device__ __forceinline__ int own_slab() { return warp() / EIGHTS; }
__device__ __forceinline__ int own_channel() { return own_slab() * 64 + lane() * 2; }

__device__ __forceinline__ float2 times(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }

// The thread's tokens of a tile.
__device__ __forceinline__ void load_eight(float2 (&own)[8], const TYPE* tile) {
#pragma unroll
    for (int t = 0; t < 8; t++) own[t] = to_floats(tile + (own_eight() * 8 + t) * FEATURE_PITCH + own_channel());
}
__device__ __forceinline__ void store_one(TYPE* tile, int t, float2 own) {
    *reinterpret_cast<unsigned*>(tile + (own_eight() * 8 + t) * FEATURE_PITCH + own_channel()) = pack<TYPE>(own.x, own.y);
}

// What all warps know of the decays of a chunk.
struct alignas(16) Decays {
    float2 over[EIGHTS][FEATURES / 2];  // eight tokens
    float2 over_all[FEATURES / 2];      // the chunk
    __device__ __forceinline__ float over_chunk(int c) const { return reinterpret_cast<const float*>(over_all)[c]; }
};

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

// What a chunk leaves of the memory.
__device__ __forceinline__ void fade(State& state, const Decays& decays) {
#pragma unroll
    for (int b = 0; b < STATE_DOWN; b++)
        for (int e = 0; e < 4; e++) {
            const float left = decays.over_chunk(state.feature(b, e));
#pragma unroll
            for (int n = 0; n < STATE_ACROSS; n++) state.numbers[b][n][e] *= left;
        }
}

#ifdef FORWARD
constexpr int LEVELS = CHUNK == 64 ? 6 : 5;  // how often a chunk can be halved
constexpr int STAGE = CHUNK * (2 * FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values

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

// The tiles of all levels; and in the place of queries and keys those decayed since the chunk's start, and until its end.
__device__ __forceinline__ void prepare_tiles(TYPE* queries, TYPE* keys, TYPE* levels, float* itself, const Own& own,
                                              Decays& decays) {
    float2 q[8], k[8];
    load_eight(q, queries);
    load_eight(k, keys);
    float sums[8];
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
#pragma unroll
    for (int t = 0; t < 8; t++) {
        store_one(queries, t, times(q[t], others.before));
        store_one(keys, t, times(k[t], others.after));
    }
    if (own_eight() == 0) decays.over_all[own_channel() / 2] = times(blocks.since[7], others.after);
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
        if (prepares()) prepare_tiles(queries, keys, levels, itself, own, decays);
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
        fade(state, decays);
        state.add(keys, values, Same(), false, Ones());
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
            float2 some[8];
            load_eight(some, keys);
            Blocks blocks(own);
            blocks.join_all();
            Others others;
#pragma unroll
            for (int eights = 1; eights < EIGHTS; eights *= 2) others.join(eights, decays);
#pragma unroll
            for (int t = 0; t < 8; t++)
                store_one(keys, t, backwards ? times(some[t], times(blocks.since[t], others.before))
                                             : times(some[t], times(blocks.until[t], others.after)));
            if (own_eight() == 0) decays.over_all[own_channel() / 2] = times(blocks.since[7], others.after);
        }
        __syncthreads();
        if (threadIdx.x < FEATURES) left *= decays.over_chunk(threadIdx.x);
        fade(state, decays);
        state.add(keys, values, Same(), false, Ones());
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
