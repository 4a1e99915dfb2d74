// Linear attention whose memory fades by one decay for all channels, on the tensor cores, and its gradients. decay.cu
// says what is computed; the walks are those of pipelined.cu.
//
// A decay between two tokens of a chunk is a product of three, for a chunk has bands of 16 tokens:
//
//     from key j to the end of its band  x  over the bands between  x  from the start of its band to query i
//
// Each factor is e to a sum of logarithms that are all at most 0, and -inf is a factor of exactly 0. So the tiles below
// the diagonal need no exponentials of their own. For those on it a table has all pairs of a band.
//
// A product of tiles knows no decays. They are multiplied in where numbers are in registers: into the scores before they
// are rounded to 16 bits, into rows that have read the state, and into the keys that are on their way into it. Warps that
// have no tiles of scores to make prepare the decays of the next chunk meanwhile.
//
// Backward, a state cannot be taken back: what has faded is gone. So `fading_states` goes through keys and values first,
// and writes down, in 16 bits, the state before each chunk.

#include "tiles.h"
#include "walk.h"
#include "fading.h"

constexpr int TOKENS = CHUNK / 32;  // of a chunk, for each lane of a warp
#ifdef BACKWARD
constexpr int PREPARING = 1;  // warps; one more has other things to do
#else
constexpr int PREPARING = TOKENS;
#endif
constexpr int TABLE_PITCH = 24, TABLE = 16 * TABLE_PITCH + 16;  // so that neighbors meet different banks
constexpr float NOTHING = -1000.0f;  // the logarithm of a decay that is 0 in float32

// The sum of what the neighbors before this one have, or those after it, of COUNT; `own` becomes that of all.
template <int COUNT> __device__ __forceinline__ float sum_of_neighbors(float& own, bool after) {
    float sum = 0.0f;
    for (int lanes = 1; lanes < COUNT; lanes *= 2) {
        const float other = __shfl_xor_sync(~0u, own, lanes);
        if (bool(lane() & lanes) != after) sum += other;
        own += other;
    }
    return sum;
}

// The warp, if it is one of those that prepare the decays of a chunk, has tokens token_of(0), token_of(1), ... of it.
__device__ __forceinline__ bool prepares() { return warp() >= WARPS - PREPARING; }
__device__ __forceinline__ int token_of(int n) { return (n * PREPARING + warp() - (WARPS - PREPARING)) * 32 + lane(); }

// The decays of a chunk.
struct alignas(16) Decays {
    float logs[CHUNK];
    float from_band_start[CHUNK], to_band_end[CHUNK];  // to a token and from it, in its band
    float bands[4];                                    // over a band
    float table[BANDS][TABLE];  // from one token of a band (a column) to another (a row), 0 to those before it

    __device__ __forceinline__ float over(int band, int end) const {
        float product = 1.0f;
#pragma unroll
        for (int b = 0; b < BANDS; b++) product *= b >= band && b < end ? bands[b] : 1.0f;
        return product;
    }
    __device__ __forceinline__ float over_all() const { return over(0, BANDS); }

    template <bool WITH_TABLE> __device__ __forceinline__ void prepare(const float (&own)[TOKENS / PREPARING]) {
#pragma unroll
        for (int n = 0; n < TOKENS / PREPARING; n++) {
            const int t = token_of(n), band = t / 16;
            float all = own[n], same = own[n];
            const float until = sum_of_neighbors<16>(all, false) + own[n];
            logs[t] = own[n];
            from_band_start[t] = expf(until);
            to_band_end[t] = expf(sum_of_neighbors<16>(same, true));
            if (t % 16 == 15) bands[band] = expf(until);
            __syncwarp();
            float log = 0.0f;
#pragma unroll
            for (int i = 0; WITH_TABLE && i < 16; i += 4) {
                const float4 some = *reinterpret_cast<const float4*>(logs + band * 16 + i);
                const float four[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    log += i + x > t % 16 ? four[x] : 0.0f;
                    table[band][(i + x) * TABLE_PITCH + t % 16] = expf(i + x >= t % 16 ? log : NOTHING);
                }
            }
        }
    }

    // Calls `work` for each entry of COUNT tiles from tile j of band i on, with what is left of the key of its column
    // when the query of its row reads: 0 where that comes before.
    template <int COUNT, typename Work> __device__ __forceinline__ void each(int i, int j, Work work) const {
#pragma unroll
        for (int n = 0; n < 2 * COUNT; n++) {
            const int tile = j + n / 2, column = n % 2 * 8 + tile_column(0);
            const float passed = over(tile + 1, i);
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int row = tile_row(e);
                const float* keys = tile == i ? table[i] + row * TABLE_PITCH : to_band_end + tile * 16;
                const float query = tile == i ? 1.0f : passed * from_band_start[i * 16 + row];
                const float2 pair = *reinterpret_cast<const float2*>(keys + column);
                const bool first = tile == i && column > row, second = tile == i && column + 1 > row;
                work(n, e, first, query * pair.x), work(n, e + 1, second, query * pair.y);
            }
        }
    }
};

// The logarithms of a chunk, asked for while the one before is prepared.
struct Logs {
    float own[TOKENS / PREPARING];
    __device__ __forceinline__ void ask(const Rows<const LOG>& log_decay, int start, int first, int end) {
#pragma unroll
        for (int n = 0; n < TOKENS / PREPARING; n++) {
            const int t = start + token_of(n);
            own[n] = t >= first && t < end ? log_decay.number(t, 0) : 0.0f;
        }
    }
};

// Keys of 16 tokens on their way into a state, each times what is left of it at the end of the chunk; or queries into
// the gradient of one, by what they see of its start.
template <bool TO_END> struct Faded {
    const Decays& decays;
    float factor;
    __device__ __forceinline__ void operator()(unsigned (&a)[4], int t0) const {
        const float* own = (TO_END ? decays.to_band_end : decays.from_band_start) + t0 + lane() % 4 * 2;
        const float others = (TO_END ? decays.over(t0 / 16 + 1, BANDS) : decays.over(0, t0 / 16)) * factor;
#pragma unroll
        for (int i = 0; i < 4; i++) {  // two tokens of two features
            const float2 pair = *reinterpret_cast<const float2*>(own + i / 2 * 8), keys = to_floats(a[i]);
            a[i] = pack<TYPE>(keys.x * (others * pair.x), keys.y * (others * pair.y));
        }
    }
};

// The memory after a chunk. Of its last key all is left; but the first query may see next to nothing, and what it sees
// would vanish in float16. So queries are taken times a power of two, near the decay of the first token, less.
template <bool TO_END>
__device__ __forceinline__ void pass(State& state, const TYPE* keys, const TYPE* values, const Decays& decays) {
    const int exponent = int(__float_as_uint(decays.from_band_start[0]) >> 23) - 127;
    const bool is_scaled = SCALED && !TO_END && exponent > -127;
    const float less = is_scaled ? power_of_two(-exponent) : 1.0f;
#pragma unroll
    for (int b = 0; b < STATE_DOWN; b++) scale(state.numbers[b], decays.over_all() * less);
    state.add(keys, values, Faded<TO_END>{decays, less}, false, Ones());
#pragma unroll
    for (int b = 0; SCALED && !TO_END && b < STATE_DOWN; b++) scale(state.numbers[b], is_scaled ? power_of_two(exponent) : 1.0f);
}

// Rows of a pair of bands, each times what is left at its token of the chunk's start; or of it at the chunk's end.
template <bool TO_END, int ACROSS>
__device__ __forceinline__ void fade_rows(float (&sums)[DOWN][ACROSS][4], int pair, const Decays& decays, float factor) {
#pragma unroll
    for (int d = 0; d < DOWN; d++) {
        const int i = band(pair, d);
        const float others = (TO_END ? decays.over(i + 1, BANDS) : decays.over(0, i)) * factor;
        for (int e = 0; e < 4; e += 2) {
            const float own = others * (TO_END ? decays.to_band_end : decays.from_band_start)[i * 16 + tile_row(e)];
#pragma unroll
            for (int n = 0; n < ACROSS; n++) sums[d][n][e] *= own, sums[d][n][e + 1] *= own;
        }
    }
}

#ifdef FORWARD
constexpr int STAGE = CHUNK * (2 * FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values

// Outputs of [first, first + length) of a head, from the state before; the last segment writes the state behind it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fading_walk(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<const LOG> log_decay, Rows<TYPE> out,
             const float* before, float* last, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE* const weights = stages + STAGES * STAGE;
    TYPE* const memory = weights + CHUNK * WEIGHT_PITCH;
    Decays* const decays = reinterpret_cast<Decays*>(memory + FEATURES * COLUMN_PITCH);
    float* const maxima = reinterpret_cast<float*>(decays + 2);
    int* const exponents = reinterpret_cast<int*>(maxima + WARPS);

    const long long head = blockIdx.x / segments, size = (long long)features * v.width;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    log_decay = log_decay.of_head(head);
    const int segment = blockIdx.x % segments, first = segment * length, end = min(N, first + length);
    State state;
    state.transfer<true>(before + blockIdx.x * size, features, v.width, v.width, 0);
    note_largest(state, maxima);
    Logs logs;
    if (prepares()) {
        logs.ask(log_decay, first, first, end);
        decays[0].prepare<true>(logs.own);
        logs.ask(log_decay, first + CHUNK, first, end);
    }

    walk((end - first + CHUNK - 1) / CHUNK, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        const int start = first + i * CHUNK;
        fetch<FEATURES>(tiles, q, start, end, 0);
        fetch<FEATURES>(tiles + CHUNK * FEATURE_PITCH, k, start, end, 0);
        fetch<COLUMNS>(tiles + 2 * CHUNK * FEATURE_PITCH, v, start, end, 0);
    }, [&](int i, int stage) {
        const TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        const TYPE* values = keys + CHUNK * FEATURE_PITCH;
        const int start = first + i * CHUNK;
        const Decays& own = decays[i % 2];
        const int exponent = exponent_of_all(maxima);
        state.share(memory, nullptr, false, power_of_two(-exponent));
        if (warp() < PARTS)
            with_part(warp(), [&](auto count, int band, int j) {
                constexpr int COUNT = decltype(count)::value;
                float scores[1][2 * COUNT][4] = {};
                make_scores<FEATURES, COUNT>(scores, band, j, queries, keys);
                own.each<COUNT>(band, j, [&](int n, int e, bool is_before, float left) {
                    scores[0][n][e] = is_before ? 0.0f : scores[0][n][e] * left;
                });
                write_tiles<COUNT>(scores, band, j, weights, exponents);
            });
        else if (prepares()) {
            decays[(i + 1) % 2].prepare<true>(logs.own);
            logs.ask(log_decay, start + 2 * CHUNK, first, end);
        }
        __syncthreads();

        float output[DOWN][COLUMNS_ACROSS][4] = {};
        const int pair = warp() / 4, column = quarter() * COLUMNS_ACROSS * 8;
        read_state<false, FEATURES>(output, nullptr, pair, column, queries, memory, COLUMN_PITCH, nullptr, 1.0f);
        fade_rows<false>(output, pair, own, power_of_two(exponent));
        read_chunk<false>(output, nullptr, pair, column, weights, exponents, values, COLUMN_PITCH);
#pragma unroll
        for (int d = 0; d < DOWN; d++) store_rows(output[d], out, start + band(pair, d) * 16, end, column);
        pass<true>(state, keys, values, own);
        note_largest(state, maxima);
    });
    if (segment == segments - 1) state.transfer<false>(last + head * size, features, v.width, v.width, 0);
}
#endif

#ifdef STATES
constexpr int STAGE = CHUNK * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: keys, values

// What a segment adds to the memory, and in `totals` what it leaves of it; or, from the memory `before`, that before
// each chunk, as the backward walk multiplies by it. Backwards, k and v are queries and gradients, and the memory is
// the gradient of the other one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fading_states(Rows<const TYPE> k, Rows<const TYPE> v, Rows<const LOG> log_decay, const float* before, float* sums,
            float* totals, TYPE* images, int* exponents, int N, int features, int segments, int length, int backwards) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    Decays* const decays = reinterpret_cast<Decays*>(stages + STAGES * STAGE);
    float* const maxima = reinterpret_cast<float*>(decays + 2);

    const long long head = blockIdx.x / segments, size = (long long)features * v.width;
    k = k.of_head(head), v = v.of_head(head), log_decay = log_decay.of_head(head);
    const int first = blockIdx.x % segments * length, end = min(N, first + length), count = (end - first + CHUNK - 1) / CHUNK;
    const auto start_of = [&](int i) { return first + (backwards ? count - 1 - i : i) * CHUNK; };
    State state;
    state.transfer<true>(before ? before + blockIdx.x * size : nullptr, features, v.width, v.width, 0);
    note_largest(state, maxima);
    Logs logs;
    if (prepares()) {
        logs.ask(log_decay, start_of(0), first, end);
        decays[0].prepare<false>(logs.own);
        logs.ask(log_decay, start_of(1), first, end);
    }
    float left = 1.0f;

    walk(count, [&](int i, int stage) {
        TYPE* tiles = stages + stage * STAGE;
        fetch<FEATURES>(tiles, k, start_of(i), end, 0);
        fetch<COLUMNS>(tiles + CHUNK * FEATURE_PITCH, v, start_of(i), end, 0);
    }, [&](int i, int stage) {
        const TYPE *keys = stages + stage * STAGE, *values = keys + CHUNK * FEATURE_PITCH;
        const Decays& own = decays[i % 2];
        if (images) {
            const int exponent = exponent_of_all(maxima);
            const long long chunk = head * ((N + CHUNK - 1) / CHUNK) + start_of(i) / CHUNK;
            write_image(state, images + chunk * FEATURES * COLUMNS, exponent);
            if (SCALED && threadIdx.x == 0) exponents[chunk] = exponent;
        }
        if (prepares()) {
            decays[(i + 1) % 2].prepare<false>(logs.own);
            logs.ask(log_decay, start_of(i + 2), first, end);
        }
        left *= own.over_all();
        if (backwards) pass<false>(state, keys, values, own);
        else pass<true>(state, keys, values, own);
        if (SCALED && images) {
            // The maxima are read.
            __syncthreads();
            note_largest(state, maxima);
        }
    });
    if (sums) state.transfer<false>(sums + blockIdx.x * size, features, v.width, v.width, 0);
    if (totals && threadIdx.x == 0) totals[blockIdx.x] = left;
}
#endif

#ifdef BACKWARD
// The gradient G of the memory fades as well, from the last token to the first. With S before a chunk and G behind it,
// and what is left at the end of it, or since its start, of all that was there,
//
//     dq_i = start to i (S do_i) + sum of (j to i) (do_i^T v_j) k_j over j <= i
//     dk_j = j to end (G v_j)    + sum of (j to i) (do_i^T v_j) q_i over i >= j
//     dv_j = j to end (G^T k_j)  + sum of (j to i) (q_i^T k_j) do_i over i >= j
//     G    = all G + sum of (start to i) q_i do_i^T
//
// dg_t is the sum of all that has faded by e^g_t, that is, of what the tokens from t on have read of those before it.
// Each term is added up by itself. q_t dq_t - k_t dk_t, added up from the end, would say the same, and lose digits.

constexpr int STAGE = CHUNK * 2 * (FEATURE_PITCH + COLUMN_PITCH);  // numbers: queries, keys, values, gradients
constexpr int WEIGHTS = CHUNK * WEIGHT_PITCH;

// What tokens of a chunk have read of each other, by tiles of 16 x 16: for queries and keys of two bands the sums of
// rows and of columns, and of all; where both are of one band, for each token what has crossed it.
struct Readings {
    float rows[BANDS][BANDS][16], columns[BANDS][BANDS][16], all[BANDS][BANDS];

    __device__ __forceinline__ void write(int i, int j, const float (*read)[4]) {
        float row_sums[2] = {}, total = 0.0f;
        if (i == j) {  // of each column the sums from a row on, if the token of that row is behind the column's
            float below[2] = {};
            for (int upper = 1; upper >= 0; upper--)
                for (int n = 0; n < 2; n++)
                    for (int x = 0; x < 2; x++) {
                        if (n > upper) continue;
                        float own = read[n][upper * 2 + x], sum = own;
                        for (int lanes = 4; lanes < 32; lanes *= 2) {
                            const float other = __shfl_xor_sync(~0u, own, lanes);
                            if (!(lane() & lanes)) sum += other;
                            own += other;
                        }
                        if (n == 0 && upper == 0) sum += below[x];
                        if (n == 0 && upper == 1) below[x] = own;
                        if (n * 8 + tile_column(x) < upper * 8 + lane() / 4) row_sums[upper] += sum;
                    }
        } else {
            for (int n = 0; n < 2; n++)
                for (int x = 0; x < 2; x++) {
                    float sum = read[n][x] + read[n][x + 2];
                    for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
                    if (lane() < 4) columns[i][j][n * 8 + tile_column(x)] = sum;
                    row_sums[0] += read[n][x], row_sums[1] += read[n][x + 2];
                }
        }
        for (int h = 0; h < 2; h++) {
            for (int lanes = 1; lanes < 4; lanes *= 2) row_sums[h] += __shfl_xor_sync(~0u, row_sums[h], lanes);
            if (lane() % 4 == 0) rows[i][j][h * 8 + lane() / 4] = row_sums[h];
            total += row_sums[h];
        }
        for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
        if (lane() == 0) all[i][j] = total;
    }
};

// What tokens of a chunk have read of the memory before it, by quarters of the features, and later ones of them; and by
// warps, what these have read of the memory before it.
struct Crossings {
    float past[4][CHUNK], future[4][CHUNK], through[WARPS];
};

// A row's share of q^T dq or k^T dk, before what is inside the chunk is added.
template <int ACROSS>
__device__ __forceinline__ void note_products(const float (&sums)[DOWN][ACROSS][4], int pair, int column, const TYPE* rows,
                                              float (&products)[4][CHUNK]) {
#pragma unroll
    for (int d = 0; d < DOWN; d++)
        for (int e = 0; e < 4; e += 2) {
            const int t = band(pair, d) * 16 + tile_row(e);
            float product = 0.0f;
#pragma unroll
            for (int n = 0; n < ACROSS; n++) {
                const float2 own = to_floats(rows + t * FEATURE_PITCH + column + n * 8 + tile_column(e));
                product += sums[d][n][e] * own.x + sums[d][n][e + 1] * own.y;
            }
            for (int lanes = 1; lanes < 4; lanes *= 2) product += __shfl_xor_sync(~0u, product, lanes);
            if (lane() % 4 == 0) products[quarter()][t] = product;
        }
}

// The gradients of a chunk's logarithms, by one warp.
__device__ __forceinline__ void write_log_gradients(float* d_log, int start, int end, const Readings& inside,
                                                    const Crossings& outside) {
    float behind = 0.0f, before = 0.0f, through = 0.0f, sums[TOKENS];
    for (int w = 0; w < WARPS; w++) through += outside.through[w];
#pragma unroll
    for (int n = TOKENS - 1; n >= 0; n--) {  // what is read of the memory before the chunk, from a token on
        float own = 0.0f;
        for (int w = 0; w < 4; w++) own += outside.past[w][n * 32 + lane()];
        float all = own;
        sums[n] = through + (sum_of_neighbors<32>(all, true) + own) + behind;
        behind += all;
    }
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
        const int t = n * 32 + lane(), i = t / 16;
        float own = 0.0f, row = 0.0f, column = 0.0f;
        for (int w = 0; w < 4; w++) own += outside.future[w][t];
        sums[n] += sum_of_neighbors<32>(own, false) + before;
        before += own;
        for (int j = 0; j < i; j++) row += inside.rows[i][j][t % 16];
        for (int j = i + 1; j < BANDS; j++) column += inside.columns[j][i][t % 16];
        for (int j = 0; j < i; j++)
            for (int later = i + 1; later < BANDS; later++) sums[n] += inside.all[later][j];
        float all = row;
        sums[n] += sum_of_neighbors<16>(all, true) + row + inside.rows[i][i][t % 16];
        sums[n] += sum_of_neighbors<16>(column, false);
        if (start + t < end) d_log[start + t] = sums[n];
    }
}

// Gradients for [first, first + length) of a head, from its last chunk to its first, from G behind it. The same part of
// shared memory has first S, for dq, and then G.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fading_backward(Rows<const TYPE> q, Rows<const TYPE> k, Rows<const TYPE> v, Rows<const TYPE> g, Rows<const LOG> log_decay,
              TYPE* dq, TYPE* dk, TYPE* dv, float* d_log, const TYPE* images, const int* image_exponents,
              const float* behind, float* d_initial, int N, int features, int segments, int length) {
    dynamic_shared_memory(shared);
    TYPE* const stages = reinterpret_cast<TYPE*>(shared);
    TYPE *const weights = stages + STAGES * STAGE, *const other_weights = weights + WEIGHTS;
    TYPE* const memory = other_weights + WEIGHTS;
    Decays* const decays = reinterpret_cast<Decays*>(memory + FEATURES * COLUMN_PITCH);
    Readings* const readings = reinterpret_cast<Readings*>(decays + 2);
    Crossings& crossings = *reinterpret_cast<Crossings*>(readings + 2);
    float* const maxima = reinterpret_cast<float*>(&crossings + 1);
    int *const exponents = reinterpret_cast<int*>(maxima + WARPS), *const other_exponents = exponents + BANDS * BANDS;

    const long long head = blockIdx.x / segments, size = (long long)features * v.width, chunks = (N + CHUNK - 1) / CHUNK;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), g = g.of_head(head);
    log_decay = log_decay.of_head(head);
    dq += head * N * features, dk += head * N * features, dv += head * N * v.width, d_log += head * N;
    const int first = blockIdx.x % segments * length, end = min(N, first + length), count = (end - first + CHUNK - 1) / CHUNK;
    const auto start_of = [&](int i) { return first + (count - 1 - i) * CHUNK; };
    State future;
    future.transfer<true>(behind + blockIdx.x * size, features, v.width, v.width, 0);
    note_largest(future, maxima);
    Logs logs;
    if (prepares()) {
        logs.ask(log_decay, start_of(0), first, end);
        decays[0].prepare<true>(logs.own);
        logs.ask(log_decay, start_of(1), first, end);
    }

    walk(count, [&](int i, int stage) {
        TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        TYPE *values = keys + CHUNK * FEATURE_PITCH, *gradients = values + CHUNK * COLUMN_PITCH;
        fetch<FEATURES>(queries, q, start_of(i), end, 0);
        fetch<FEATURES>(keys, k, start_of(i), end, 0);
        fetch<COLUMNS>(values, v, start_of(i), end, 0);
        fetch<COLUMNS>(gradients, g, start_of(i), end, 0);
    }, [&](int i, int stage) {
        const TYPE *queries = stages + stage * STAGE, *keys = queries + CHUNK * FEATURE_PITCH;
        const TYPE *values = keys + CHUNK * FEATURE_PITCH, *gradients = values + CHUNK * COLUMN_PITCH;
        const int start = start_of(i), stop = min(end, start + CHUNK);
        const Decays& own = decays[i % 2];
        Image image;  // it arrives while the weights are made
        image.ask(images, image_exponents, head * chunks + start / CHUNK);
        const int past_exponent = image.exponent, future_exponent = exponent_of_all(maxima);
        if (warp() < PARTS)
            with_part(warp(), [&](auto count, int band, int j) {
                constexpr int COUNT = decltype(count)::value;
                float scores[1][2 * COUNT][4] = {}, others[1][2 * COUNT][4] = {};
                make_scores<FEATURES, COUNT>(scores, band, j, queries, keys);
                make_scores<COLUMNS, COUNT>(others, band, j, gradients, values);
                __syncwarp();  // no load is moved across it: all at once would not fit the registers
                float read[2 * COUNT][4];
                own.each<COUNT>(band, j, [&](int n, int e, bool is_before, float left) {
                    float &score = scores[0][n][e], &other = others[0][n][e];
                    other = is_before ? 0.0f : other * left;
                    read[n][e] = is_before ? 0.0f : score * other;
                    score = is_before ? 0.0f : score * left;
                });
#pragma unroll
                for (int tile = 0; tile < COUNT; tile++) readings[i % 2].write(band, j + tile, read + 2 * tile);
                write_tiles<COUNT>(scores, band, j, weights, exponents);
                write_tiles<COUNT>(others, band, j, other_weights, other_exponents);
            });
        else if (prepares()) {
            decays[(i + 1) % 2].prepare<true>(logs.own);
            logs.ask(log_decay, start_of(i + 2), first, end);
        } else if (warp() == WARPS - 2 && i > 0)
            write_log_gradients(d_log, start + CHUNK, end, readings[(i + 1) % 2], crossings);
        image.store(memory);
        __syncthreads();

        const auto write = [&](auto& sums, TYPE* gradient, int width, int pair, int column) {
            const Rows<TYPE> rows = {gradient, 0, 0, width, 1, width, 0, 0};
#pragma unroll
            for (int d = 0; d < DOWN; d++) store_rows(sums[d], rows, start + band(pair, d) * 16, stop, column);
        };
        const int pair = warp() / 4;
        {
            float through = 0.0f;
#pragma unroll
            for (int b = 0; b < STATE_DOWN; b++)
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    const TYPE* row = memory + future.feature(b, e) * COLUMN_PITCH + half() * STATE_ACROSS * 8 + tile_column(e);
#pragma unroll
                    for (int n = 0; n < STATE_ACROSS; n++) {
                        const float2 pair = to_floats(row + n * 8);
                        through += pair.x * future.numbers[b][n][e] + pair.y * future.numbers[b][n][e + 1];
                    }
                    __syncwarp();  // as above
                }
            for (int lanes = 1; lanes < 32; lanes *= 2) through += __shfl_xor_sync(~0u, through, lanes);
            if (lane() == 0) crossings.through[warp()] = through * own.over_all() * power_of_two(past_exponent);
            float sums[DOWN][FEATURES_ACROSS][4] = {};
            const int column = quarter() * FEATURES_ACROSS * 8;
            read_state<true, COLUMNS>(sums, nullptr, pair, column, gradients, memory, COLUMN_PITCH, nullptr, 1.0f);
            fade_rows<false>(sums, pair, own, power_of_two(past_exponent));
            note_products(sums, pair, column, queries, crossings.past);
            read_chunk<false>(sums, nullptr, pair, column, other_weights, other_exponents, keys, FEATURE_PITCH);
            write(sums, dq, features, pair, column);
        }
        __syncthreads();
        future.share(memory, nullptr, false, power_of_two(-future_exponent));
        __syncthreads();
        {
            float sums[DOWN][FEATURES_ACROSS][4] = {};
            const int column = quarter() * FEATURES_ACROSS * 8;
            read_state<true, COLUMNS>(sums, nullptr, pair, column, values, memory, COLUMN_PITCH, nullptr, 1.0f);
            fade_rows<true>(sums, pair, own, power_of_two(future_exponent));
            note_products(sums, pair, column, keys, crossings.future);
            read_chunk<true>(sums, nullptr, pair, column, other_weights, other_exponents, queries, FEATURE_PITCH);
            write(sums, dk, features, pair, column);
        }
        float sums[DOWN][COLUMNS_ACROSS][4] = {};
        const int column = quarter() * COLUMNS_ACROSS * 8;
        read_state<false, FEATURES>(sums, nullptr, pair, column, keys, memory, COLUMN_PITCH, nullptr, 1.0f);
        fade_rows<true>(sums, pair, own, power_of_two(future_exponent));
        read_chunk<true>(sums, nullptr, pair, column, weights, exponents, gradients, COLUMN_PITCH);
        write(sums, dv, v.width, pair, column);
        pass<false>(future, queries, gradients, own);
        note_largest(future, maxima);
    });
    __syncthreads();
    if (warp() == WARPS - 2 && count)
        write_log_gradients(d_log, first, end, readings[(count + 1) % 2], crossings);
    if (first == 0) future.transfer<false>(d_initial + head * size, features, v.width, v.width, 0);
}
#endif
