// The gated delta rule: a token fades the memory, looks up what its key finds there, and writes the error
// that is left. With the logarithm g_t <= 0 of a decay, for each channel of the keys or one for all,
//
//     u_t = v_t - (diag(e^g_t) S_{t-1})^T k_t
//     S_t = diag(e^g_t) S_{t-1} + b_t u_t^T,   b_t = beta_t k_t        o_t = S_t^T q_t
//
// In a chunk that begins with the memory S, with e^(j to i) for the decays that token i has applied to
// what token j wrote, what keys find of the chunk's own tokens makes a unit lower triangular system:
//
//     u_i + sum of (k_i^T diag(e^(j to i)) b_j) u_j over j < i  =  v_i - (k_i e^(start to i))^T S
//     o_i = (q_i e^(start to i))^T S + sum of (q_i^T diag(e^(j to i)) b_j) u_j over j <= i
//     S   = e^(all) S + sum of (e^(j to the end) b_j) u_j^T over all j
//
// Decays are e to sums of logarithms, each made of its own terms, as in decay.cu: no exponent is above 0,
// no decay is divided by another, and -inf is a factor of exactly 0.
//
// A block takes a head through its chunks of 16 tokens, with 16 x 16 threads. In each step a thread has a
// row (a token, a column or a channel) and, with its 15 neighbors, one of 16 parts of the sums that belong
// to it.

#include "parts.h"

// What neighbor number t has.
__device__ __forceinline__ float of_neighbor(float x, int t) { return __shfl_sync(~0u, x, (threadIdx.x & PARTS) + t); }

// What is left of what token j wrote into one channel when each token of the chunk reads: 0 before j.
// Returns what is left at the end of the chunk.
template <int PITCH>
__device__ __forceinline__ float fade(float (&left)[LENGTH], const float (*logs)[PITCH], int channel, int j) {
    float log = 0.0f;
#pragma unroll
    for (int t = 0; t < LENGTH; t++) {
        const float g = logs[t][PER_CHANNEL ? channel : 0];
        log += t > j ? g : 0.0f;
        left[t] = t >= j ? expf(log) : 0.0f;
    }
    return expf(log);
}

// ---- Over columns -------------------------------------------------------------------------------
//
// The columns of the values share nothing but queries, keys and decays. So a block has a head and COLUMNS
// columns, and its threads have the numbers of that state; the system, which is the same for all columns, is
// made by each block anew.

constexpr int OWN = FEATURES / PARTS;   // a thread has channels part, part + 16, ...
constexpr int WIDE = COLUMNS / LENGTH;  // and columns row, row + 16, ... of the state
constexpr int BLOCKS = FEATURES <= 64 && !PER_CHANNEL ? 2 : 1;  // on a multiprocessor at the same time

struct Tiles {
    float queries[LENGTH][pitch(FEATURES)], keys[LENGTH][pitch(FEATURES)], logs[LENGTH][DECAYS];
    float values[LENGTH][COLUMNS + 2], results[LENGTH][COLUMNS + 2], betas[LENGTH][1];
    float found[LENGTH][LENGTH + 2], scores[LENGTH][LENGTH + 2], totals[FEATURES];
};

struct Chunk {
    Tile<FEATURES> queries, keys;
    Tile<DECAYS> logs;
    Tile<COLUMNS> values;
    Tile<1> betas;

    template <bool QUERIES> __device__ __forceinline__ void store(Tiles& at) const {
        if (QUERIES) queries.store(at.queries);
        keys.store(at.keys);
        logs.store(at.logs);
        values.store(at.values);
        betas.store(at.betas);
    }
};

// The thread's numbers of an array (features, columns), whose first column is `first`.
template <typename Do> __device__ __forceinline__ void each_own(int first, int features, int columns, Do act) {
#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int x = 0; x < WIDE; x++) {
            const int c = n * PARTS + threadIdx.x % PARTS, m = first + x * LENGTH + threadIdx.x / PARTS;
            act(n, x, c, m, c < features && m < columns);
        }
}

// How much of what token `row` wrote each token's key finds, and its query: found[i][row] for i > row and
// scores[i][row] for i >= row. And what is left of b_row at the end, in the thread's channels.
template <bool QUERIES> __device__ __forceinline__ void compare(Tiles& at, float (&written)[OWN]) {
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    float by_keys[LENGTH] = {}, by_queries[LENGTH] = {}, left[LENGTH], to_end = 0.0f;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int c = n * PARTS + part;
        if (PER_CHANNEL || n == 0) to_end = fade(left, at.logs, c, row);
        const float b = at.betas[row][0] * at.keys[row][c];
#pragma unroll
        for (int i = 0; i < LENGTH; i++) {
            const float seen = b * left[i];
            by_keys[i] += at.keys[i][c] * seen;
            if (QUERIES) by_queries[i] += at.queries[i][c] * seen;
        }
        written[n] = b * to_end;
    }
    at.found[part][row] = sum_of_parts(by_keys);
    if (QUERIES) at.scores[part][row] = sum_of_parts(by_queries);
}

// Adds what each of 16 rows finds in the thread's part of the state: sums[x][i] over all parts are S^T row_i.
template <int PITCH>
__device__ __forceinline__ void look_up(float (&sums)[WIDE][LENGTH], const float (&rows)[LENGTH][PITCH], const float (&state)[OWN][WIDE]) {
#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int i = 0; i < LENGTH; i++) {
            const float number = rows[i][n * PARTS + threadIdx.x % PARTS];
#pragma unroll
            for (int x = 0; x < WIDE; x++) sums[x][i] += number * state[n][x];
        }
}

// Multiplies the state by the decays of a whole chunk.
__device__ __forceinline__ void fade_state(float (&state)[OWN][WIDE], const Tiles& at) {
#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int x = 0; x < WIDE; x++) state[n][x] *= at.totals[n * PARTS + threadIdx.x % PARTS];
}

// Writes into the state: for each token the row of a key, or a query, times a row of values.
template <int PITCH>
__device__ __forceinline__ void write(float (&state)[OWN][WIDE], const float (&rows)[LENGTH][PITCH],
                                      const float (&values)[LENGTH][COLUMNS + 2], float sign = 1.0f) {
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    for (int t = 0; t < LENGTH; t++) {
        float some[WIDE];
#pragma unroll
        for (int x = 0; x < WIDE; x++) some[x] = sign * values[t][x * LENGTH + row];
#pragma unroll
        for (int n = 0; n < OWN; n++)
#pragma unroll
            for (int x = 0; x < WIDE; x++) state[n][x] += rows[t][n * PARTS + part] * some[x];
    }
}

// Puts a tile of the chunk that begins at `start` into memory.
template <typename T>
__device__ __forceinline__ void put(const Rows<T>& out, const float (&tile)[LENGTH][COLUMNS + 2], int start, int N, int first) {
    for (int i = threadIdx.x; i < LENGTH * COLUMNS; i += THREADS) {
        const int t = i / COLUMNS, m = i % COLUMNS;
        if (start + t < N && first + m < out.width) out.row(start + t)[first + m] = from_float<T>(tile[t][m]);
    }
}

// One block for each head and COLUMNS columns. Either the outputs and the last state, or what the backward pass
// wants to know: the errors, and the state before each chunk, as (columns, features).
template <bool OUTPUTS>
__device__ __forceinline__ void walk(Tiles& at, Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v,
                                     Rows<const BETA> beta, Rows<const LOG> log_decay, const float* initial,
                                     Rows<SCALAR> out, float* last, Rows<float> errors, float* starts, int N) {
    const long long head = blockIdx.x;
    const int first = blockIdx.y * COLUMNS, features = k.width, columns = v.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, chunks = (N + LENGTH - 1) / LENGTH;
    k = k.of_head(head), v = v.of_head(head), beta = beta.of_head(head), log_decay = log_decay.of_head(head);
    if (OUTPUTS) q = q.of_head(head), out = out.of_head(head);
    else errors = errors.of_head(head);

    float state[OWN][WIDE];
    each_own(first, features, columns, [&](int n, int x, int c, int m, bool known) {
        state[n][x] = known ? initial[(head * features + c) * columns + m] : 0.0f;
    });

    Chunk next;
    const auto ask = [&](int chunk) {
        const int start = chunk * LENGTH;
        if (OUTPUTS) next.queries.ask(q, start, N, 0);
        next.keys.ask(k, start, N, 0);
        next.logs.ask(log_decay, start, N, 0);
        next.betas.ask(beta, start, N, 0);
        next.values.ask(v, start, N, first);
    };
    ask(0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        next.store<OUTPUTS>(at);
        __syncthreads();
        if (!OUTPUTS)
            each_own(first, features, columns, [&](int n, int x, int c, int m, bool known) {
                if (known) starts[((head * chunks + chunk) * columns + m) * features + c] = state[n][x];
            });
        float written[OWN];  // waits in registers until nobody needs the keys
        compare<OUTPUTS>(at, written);
        __syncthreads();

        // The key and the query of token `row` find of the chunk's first memory what has faded until then.
        float since_start = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int c = n * PARTS + part;
            if (PER_CHANNEL || n == 0) since_start = decay(at.logs, c, 0, row + 1);
            at.keys[row][c] *= since_start;
            if (OUTPUTS) at.queries[row][c] *= since_start;
            if (row == 0) at.totals[c] = decay(at.logs, c, 0, LENGTH);
        }
        __syncthreads();

        // The system, in columns `row`, `row` + 16, ...: the thread has the error of token `part`, from which it
        // takes what has been found of the tokens before, as soon as their errors are known.
        float sums[WIDE][LENGTH] = {}, error[WIDE];
        look_up(sums, at.keys, state);
#pragma unroll
        for (int x = 0; x < WIDE; x++) error[x] = at.values[part][x * LENGTH + row] - sum_of_parts(sums[x]);
        for (int t = 0; t < LENGTH - 1; t++) {
            const float found = at.found[part][t];
#pragma unroll
            for (int x = 0; x < WIDE; x++) {
                const float before = of_neighbor(error[x], t);
                error[x] -= t < part ? found * before : 0.0f;
            }
        }
#pragma unroll
        for (int x = 0; x < WIDE; x++) at.values[part][x * LENGTH + row] = error[x];

        if (OUTPUTS) {
#pragma unroll
            for (int i = 0; i < LENGTH; i++) {
                const float score = at.scores[i][part];
#pragma unroll
                for (int x = 0; x < WIDE; x++) sums[x][i] = part <= i ? score * error[x] : 0.0f;
            }
            look_up(sums, at.queries, state);
#pragma unroll
            for (int x = 0; x < WIDE; x++) at.results[part][x * LENGTH + row] = sum_of_parts(sums[x]);
        }
        __syncthreads();

        ask(chunk + 1);
#pragma unroll
        for (int n = 0; n < OWN; n++) at.keys[row][n * PARTS + part] = written[n];
        if (OUTPUTS) put(out, at.results, chunk * LENGTH, N, first);
        else put(errors, at.values, chunk * LENGTH, N, first);
        __syncthreads();
        fade_state(state, at);
        write(state, at.keys, at.values);
        __syncthreads();
    }

    if (OUTPUTS)
        each_own(first, features, columns, [&](int n, int x, int c, int m, bool known) {
            if (known) last[(head * features + c) * columns + m] = state[n][x];
        });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
forward(Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const BETA> beta, Rows<const LOG> log_decay,
        const float* initial, Rows<SCALAR> out, float* last, int N) {
    dynamic_shared_memory(shared);
    Tiles& at = *reinterpret_cast<Tiles*>(shared);
    walk<true>(at, q, k, v, beta, log_decay, initial, out, last, {}, nullptr, N);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
chunk_starts(Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const BETA> beta, Rows<const LOG> log_decay,
             const float* initial, Rows<float> errors, float* starts, int N) {
    dynamic_shared_memory(shared);
    Tiles& at = *reinterpret_cast<Tiles*>(shared);
    walk<false>(at, {}, k, v, beta, log_decay, initial, {}, nullptr, errors, starts, N);
}

// ---- Backward -----------------------------------------------------------------------------------
//
// G_t is the gradient of S_t, and w_t that of the error u_t, which is that of v_t:
//
//     G_t = q_t do_t^T + diag(e^g_{t+1}) (G_{t+1} - k_{t+1} w_{t+1}^T)        w_t = G_t^T b_t
//
// It is a memory that fades, from the last token to the first, and what a token writes into it depends on
// what it finds. In a chunk at whose end G comes from later chunks this is the system of the forward
// pass, transposed:
//
//     w_j + sum of (k_i^T diag(e^(j to i)) b_j) w_i over i > j
//         = (b_j e^(j to the end))^T G + sum of (q_i^T diag(e^(j to i)) b_j) do_i over i >= j
//
// so values_backward is over columns too. The others are sums over columns:
//
//     dq_t = S_t do_t        db_t = G_t u_t        dk_t = beta_t db_t - diag(e^g_t) S_{t-1} w_t
//     dbeta_t = k_t^T db_t   dg_t = sum of e^g_t S_{t-1} (G_t - k_t w_t^T) over the columns

// One block for each head and COLUMNS columns: the gradients of the values.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
values_backward(Rows<const SCALAR> grad, Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const BETA> beta,
                Rows<const LOG> log_decay, const float* grad_last, Rows<float> grad_v, int N) {
    dynamic_shared_memory(shared);
    Tiles& at = *reinterpret_cast<Tiles*>(shared);
    const long long head = blockIdx.x;
    const int first = blockIdx.y * COLUMNS, features = k.width, columns = grad.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, chunks = (N + LENGTH - 1) / LENGTH;
    grad = grad.of_head(head), q = q.of_head(head), k = k.of_head(head), beta = beta.of_head(head);
    log_decay = log_decay.of_head(head), grad_v = grad_v.of_head(head);

    float later[OWN][WIDE];  // G
    each_own(first, features, columns, [&](int n, int x, int c, int m, bool known) {
        later[n][x] = known ? grad_last[(head * features + c) * columns + m] : 0.0f;
    });

    Chunk next;
    const auto ask = [&](int chunk) {
        const int start = chunk * LENGTH;
        next.queries.ask(q, start, N, 0);
        next.keys.ask(k, start, N, 0);
        next.logs.ask(log_decay, start, N, 0);
        next.betas.ask(beta, start, N, 0);
        next.values.ask(grad, start, N, first);
    };
    ask(chunks - 1);
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        next.store<true>(at);
        __syncthreads();
        float written[OWN], reading[OWN], since_start = 0.0f;
        compare<true>(at, written);
        __syncthreads();

        // The state is read by what token `row` writes, and written by its key, which waits in registers.
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int c = n * PARTS + part;
            if (PER_CHANNEL || n == 0) since_start = decay(at.logs, c, 0, row + 1);
            reading[n] = at.keys[row][c] * since_start;
            at.keys[row][c] = written[n];
            at.queries[row][c] *= since_start;
            if (row == 0) at.totals[c] = decay(at.logs, c, 0, LENGTH);
        }
        __syncthreads();

        // The thread gives what token `part` has read to all before it, and then has the gradient of its error.
        float sums[WIDE][LENGTH], error[WIDE];
#pragma unroll
        for (int j = 0; j < LENGTH; j++) {
            const float score = at.scores[part][j];
#pragma unroll
            for (int x = 0; x < WIDE; x++) sums[x][j] = j <= part ? score * at.values[part][x * LENGTH + row] : 0.0f;
        }
        look_up(sums, at.keys, later);
#pragma unroll
        for (int x = 0; x < WIDE; x++) error[x] = sum_of_parts(sums[x]);
        for (int t = LENGTH - 1; t > 0; t--) {
            const float found = at.found[t][part];
#pragma unroll
            for (int x = 0; x < WIDE; x++) {
                const float after = of_neighbor(error[x], t);
                error[x] -= t > part ? found * after : 0.0f;
            }
        }
#pragma unroll
        for (int x = 0; x < WIDE; x++) at.results[part][x * LENGTH + row] = error[x];
        __syncthreads();

        ask(chunk - 1);
#pragma unroll
        for (int n = 0; n < OWN; n++) at.keys[row][n * PARTS + part] = reading[n];
        put(grad_v, at.results, chunk * LENGTH, N, first);
        __syncthreads();
        fade_state(later, at);
        write(later, at.queries, at.values);
        write(later, at.keys, at.results, -1.0f);
        __syncthreads();
    }
}

// What the others need are sums over columns: a block has 16 channels, and all columns, and walks back with G.
//
// Queries and keys both read, with gradients do and -w of what they have read. dg_t is a sum of all that has
// faded by e^g_t: what the tokens from t on have read of those before it. Token i has read S from the start of
// the chunk, or token j of it, or a later chunk has read either. Each term is added up by itself.

constexpr int CHANNELS = 16, OWN_COLUMNS = VALUES / PARTS;
constexpr int LOGS = PER_CHANNEL ? CHANNELS : 1;

struct BackwardTiles {
    float queries[LENGTH][CHANNELS + 2], keys[LENGTH][CHANNELS + 2], logs[LENGTH][LOGS], betas[LENGTH][1];
    float errors[LENGTH][pitch(VALUES)], grads[LENGTH][pitch(VALUES)], error_grads[LENGTH][pitch(VALUES)];
    float since_start[LENGTH][CHANNELS + 2], to_end[LENGTH][CHANNELS + 2];
    float by_queries[LENGTH][LENGTH + 2], by_keys[LENGTH][LENGTH + 2], results[4][LENGTH][CHANNELS + 2];
};

// What the backward pass has of one channel: its state before the chunk, in columns part, part + 16, ..., what
// token `part` has written, and what is left of that. Sums are the thread's part, or belong to token `part`.
struct Channel {
    float state[OWN_COLUMNS], written, left[LENGTH];
    float grad_logs[LENGTH], grad_written;
};

// The gradient of reader number `part`, with all that its 16 readers mean for the channel. `pairs` are products
// of the readers' gradients and the errors, 0 for what a reader does not see; `sign` is that of the gradients.
__device__ __forceinline__ float read_backward(Channel& of, const BackwardTiles& at, const float (&readers)[LENGTH][CHANNELS + 2],
                                               const float (&grads)[LENGTH][pitch(VALUES)],
                                               const float (&pairs)[LENGTH][LENGTH + 2], float sign) {
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    float sums[LENGTH] = {}, of_start = 0.0f, of_part = 0.0f;
#pragma unroll
    for (int t = LENGTH - 1; t >= 0; t--) {  // the last token first: dg_t has the reads from t on
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) sums[t] += of.state[n] * grads[t][n * PARTS + part];
        sums[t] *= sign * at.since_start[t][row];
        const float reader = readers[t][row], weight = pairs[t][part] * of.left[t];
        of_start += reader * sums[t];
        of_part += reader * weight * of.written;
        of.grad_logs[t] += of_start + (t > part ? of_part : 0.0f);
        of.grad_written += weight * reader;
        sums[t] += weight * of.written;
    }
    return sum_of_parts(sums);
}

// One block for each head and each 16 channels. The gradients of the betas, and of one decay for all channels, are
// sums over channels: grad_beta and grad_log have then one number for each block and token.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(Rows<const SCALAR> grad, Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const BETA> beta,
         Rows<const LOG> log_decay, Rows<const float> errors, Rows<const float> grad_v, const float* starts,
         const float* grad_last, SCALAR* grad_q, SCALAR* grad_k, float* grad_beta, float* grad_log,
         float* grad_initial, int N) {
    dynamic_shared_memory(shared);
    BackwardTiles& at = *reinterpret_cast<BackwardTiles*>(shared);
    const long long head = blockIdx.x;
    const int first = blockIdx.y * CHANNELS, features = k.width, columns = grad.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, channel = first + row;
    const int chunks = (N + LENGTH - 1) / LENGTH;
    grad = grad.of_head(head), q = q.of_head(head), k = k.of_head(head), beta = beta.of_head(head);
    log_decay = log_decay.of_head(head), errors = errors.of_head(head), grad_v = grad_v.of_head(head);

    float later[OWN_COLUMNS];  // G, of one channel; columns part, part + 16, ...
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
        const int m = n * PARTS + part;
        later[n] = channel < features && m < columns ? grad_last[(head * features + channel) * columns + m] : 0.0f;
    }

    Tile<CHANNELS> some_queries, some_keys;
    Tile<LOGS> some_logs;
    Tile<1> some_betas;
    Tile<VALUES> some_errors, some_grads, some_error_grads;
    const auto ask = [&](int chunk) {
        const int start = chunk * LENGTH;
        some_queries.ask(q, start, N, first);
        some_keys.ask(k, start, N, first);
        some_logs.ask(log_decay, start, N, PER_CHANNEL ? first : 0);
        some_betas.ask(beta, start, N, 0);
        some_errors.ask(errors, start, N, 0);
        some_grads.ask(grad, start, N, 0);
        some_error_grads.ask(grad_v, start, N, 0);
    };
    ask(chunks - 1);
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        some_queries.store(at.queries);
        some_keys.store(at.keys);
        some_logs.store(at.logs);
        some_betas.store(at.betas);
        some_errors.store(at.errors);
        some_grads.store(at.grads);
        some_error_grads.store(at.error_grads);
        __syncthreads();
        Channel of = {};
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) {
            const int m = n * PARTS + part;
            const bool known = channel < features && m < columns;
            of.state[n] = known ? starts[((head * chunks + chunk) * columns + m) * features + channel] : 0.0f;
        }

        // The row is a token: do_i^T u_row and -w_i^T u_row for all tokens i, and the decays of channel `part`.
        float by_queries[LENGTH] = {}, by_keys[LENGTH] = {};
        for (int m = part; m < VALUES; m += PARTS) {
            const float error = at.errors[row][m];
#pragma unroll
            for (int i = 0; i < LENGTH; i++) {
                by_queries[i] += at.grads[i][m] * error;
                by_keys[i] -= at.error_grads[i][m] * error;
            }
        }
        const float of_query = sum_of_parts(by_queries), of_key = sum_of_parts(by_keys);
        at.by_queries[part][row] = part >= row ? of_query : 0.0f;
        at.by_keys[part][row] = part > row ? of_key : 0.0f;
        at.since_start[row][part] = decay(at.logs, part, 0, row + 1);
        at.to_end[row][part] = decay(at.logs, part, row + 1, LENGTH);
        __syncthreads();

        // From here on the row is a channel. What later chunks read of its start, and of its tokens:
        const float total = decay(at.logs, row, 0, LENGTH), key = at.keys[part][row], beta_of_part = at.betas[part][0];
        float until = 0.0f, sums[LENGTH] = {};
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) until += total * of.state[n] * later[n];
#pragma unroll
        for (int t = 0; t < LENGTH; t++) {
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) sums[t] += later[n] * at.errors[t][n * PARTS + part];
            sums[t] *= at.to_end[t][row];
            of.grad_logs[t] = until;
            until += at.betas[t][0] * at.keys[t][row] * sums[t];
        }
        fade(of.left, at.logs, row, part);
        of.written = beta_of_part * key;
        const float grad_written = sum_of_parts(sums);

        // What its tokens read of what was before, and of token `part`.
        const float grad_query = read_backward(of, at, at.queries, at.grads, at.by_queries, 1.0f);
        const float grad_reader = read_backward(of, at, at.keys, at.error_grads, at.by_keys, -1.0f);
        const float grad_b = grad_written + of.grad_written;
        at.results[0][part][row] = grad_query;
        at.results[1][part][row] = grad_reader + beta_of_part * grad_b;
        at.results[2][part][row] = key * grad_b;
        at.results[3][part][row] = sum_of_parts(of.grad_logs);
        __syncthreads();

        ask(chunk - 1);
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) later[n] *= total;
        for (int t = 0; t < LENGTH; t++) {
            const float query = at.queries[t][row] * at.since_start[t][row];
            const float reader = at.keys[t][row] * at.since_start[t][row];
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) {
                const int m = n * PARTS + part;
                later[n] += query * at.grads[t][m] - reader * at.error_grads[t][m];
            }
        }

        // The row is a token again, so that neighbors write neighboring channels.
        const int t = chunk * LENGTH + row, c = first + part;
        const long long token = head * N + t;
        if (t < N && c < features) {
            grad_q[token * features + c] = from_float<SCALAR>(at.results[0][row][part]);
            grad_k[token * features + c] = from_float<SCALAR>(at.results[1][row][part]);
            if (PER_CHANNEL) grad_log[token * features + c] = at.results[3][row][part];
        }
        float of_beta = at.results[2][row][part], of_log = at.results[3][row][part];
        for (int lanes = 1; lanes < PARTS; lanes *= 2) {
            of_beta += __shfl_xor_sync(~0u, of_beta, lanes);
            if (!PER_CHANNEL) of_log += __shfl_xor_sync(~0u, of_log, lanes);
        }
        if (t < N && part == 0) {
            grad_beta[token * gridDim.y + blockIdx.y] = of_beta;
            if (!PER_CHANNEL) grad_log[token * gridDim.y + blockIdx.y] = of_log;
        }
        __syncthreads();
    }

#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
        const int m = n * PARTS + part;
        if (channel < features && m < columns) grad_initial[(head * features + channel) * columns + m] = later[n];
    }
}
