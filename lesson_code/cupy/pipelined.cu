// Kernel (c) of linear.cu made fast: causal linear attention on the tensor cores, and its gradients.
//
// A block walks through a whole head with the state in its registers, so that every number is read once. While it
// multiplies one chunk, copies of the next ones are on their way to other stages of shared memory. All eight warps do
// the same work: of the lower triangle of scores each has the bands of tokens r and 3 - r, five tiles together.
//
// One walk backwards makes all three gradients. It needs the state before each chunk, and has it without reading what
// came before: the state runs backwards, too, S_before = S_after - K^T V. So that rounding does not pile up, it
// begins anew from a state that the forward walk has written down, every `interval` tokens.

#include "tiles.h"
#include "walk.h"

// Weights of the chunk, left right^T where the right token is not later, to shared memory. `more` is added to a row.
template <int WIDTH>
__device__ __forceinline__ void write_weights(int part, const TYPE* left, const TYPE* right, const float* more,
                                              TYPE* weights, int* exponents) {
    with_part(part, [&](auto count, int i, int j) {
        constexpr int COUNT = decltype(count)::value;
        float scores[1][2 * COUNT][4] = {};
        make_scores<WIDTH, COUNT>(scores, i, j, left, right);
        for (int n = 0; n < 2 * COUNT; n++)
            for (int e = 0; e < 4; e++) {
                if (more) scores[0][n][e] += more[score_row(i, e)];
                if (score_column(j, n, e) > score_row(i, e)) scores[0][n][e] = 0.0f;
            }
        write_tiles<COUNT>(scores, i, j, weights, exponents);
    });
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
        state.add(keys, values, Same(), ONES, Ones());
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
            past.add(keys, values, Same(), NORMALIZE, Ones());
            return;
        }
        if (i >= before_own + behind_own) {
            if (!alone && (stop % interval == 0 || stop == N))
                past.transfer<true>(after + (head * intervals + (stop - 1) / interval) * features * columns, features,
                                    v.width, columns, 0);
            if (!alone || i > before_own + behind_own) past.add(keys, values, Negative(), NORMALIZE, Ones());
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
        future.add(queries, gradients, Same(), NORMALIZE, Split{own});
    });
    if (!first_behind || first > 0) return;
    future.transfer<false>(first_behind + head * size, features, v.width, v.width + ONES, 0);
}
#endif

#ifdef SUMS
#include "segments.h"

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
            state.add(keys, keys + CHUNK * FEATURE_PITCH, Same(), ONES, Split{own});
        } else state.add(keys, keys + CHUNK * FEATURE_PITCH, Same(), TOTALS, Ones());
    });
    state.transfer<false>(sums + (long long)blockIdx.x * features * columns, features, v.width, columns, slab);
}
#endif
