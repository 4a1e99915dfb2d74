// Linear attention whose memory fades: o_t = q_t^T S_t, where S_t = diag(e^g_t) S_{t-1} + k_t v_t^T
// and g_t <= 0 is the logarithm of a decay: a number for each channel of the keys, or one for all.
// With a bonus u, a token reads before the memory fades and is written, and sees itself u times:
// o_t = q_t^T (S_{t-1} + diag(u) k_t v_t^T).
//
// Between two tokens of a chunk, and from a chunk's ends to a token in it, decays are e to the sum of
// the logarithms that lie between: each sum is made of its own terms. So no exponent is above 0, no
// decay is divided by another, and -inf, which empties a channel, is a factor of exactly 0.
//
// A block takes a head through its chunks of 16 tokens, with 16 x 16 threads. In each step a thread
// has a row (a token, a column or a channel) and, with its 15 neighbors, one of 16 parts of the sums
// that belong to it.

constexpr int LENGTH = 16;     // tokens of a chunk
constexpr int PARTS = LENGTH;  // of a sum; see sum_of_parts
constexpr int THREADS = LENGTH * PARTS;
constexpr int DECAYS = PER_CHANNEL ? FEATURES : 1;

// The two halves of a warp have neighboring rows r. Where they read 16 numbers each of rows r, these
// lie in different banks; and so they do in tiles that are 2 wider than 16, for columns r of 16 rows.
constexpr int pitch(int width) { return width % 32 ? width : width + 16; }

// LENGTH rows on their way from memory, in registers. They are asked for one chunk ahead, so that
// they arrive while that chunk is computed.
template <int WIDTH> struct Tile {
    static constexpr int LOADS = (LENGTH * WIDTH + THREADS - 1) / THREADS;
    float held[LOADS];

    // The rows from `start` on, those before `end`, and their columns from `first` on; 0 outside.
    template <typename T> __device__ __forceinline__ void ask(const Rows<T>& rows, int start, int end, int first) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = threadIdx.x + n * THREADS, t = start + i / WIDTH;
            const bool known = i < LENGTH * WIDTH && t >= 0 && t < end;
            held[n] = known ? rows.number(t, first + i % WIDTH) : 0.0f;
        }
    }
    template <int PITCH> __device__ __forceinline__ void store(float (&tile)[LENGTH][PITCH]) const {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const int i = threadIdx.x + n * THREADS;
            if (i < LENGTH * WIDTH) tile[i / WIDTH][i % WIDTH] = held[n];
        }
    }
};

// Adds up sums[t], for each t, over 16 neighbors; number t of them receives that of t. In each of
// four steps neighbors give each other the half of their sums that the other one will keep.
template <int HALF = PARTS / 2> __device__ __forceinline__ float sum_of_parts(float (&sums)[LENGTH]) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int t = 0; t < HALF; t++) {
        const float keep = upper ? sums[t + HALF] : sums[t], give = upper ? sums[t] : sums[t + HALF];
        sums[t] = keep + __shfl_xor_sync(~0u, give, HALF);
    }
    if constexpr (HALF > 1) return sum_of_parts<HALF / 2>(sums);
    return sums[0];
}

// The decay over the tokens [first, end) of the chunk, in one channel.
template <int PITCH> __device__ __forceinline__ float decay(const float (&logs)[LENGTH][PITCH], int channel, int first, int end) {
    float log = 0.0f;
    for (int t = first; t < end; t++) log += logs[t][PER_CHANNEL ? channel : 0];
    return expf(log);
}

// How many tokens of the chunk have faded the memory when token t reads it.
__device__ __forceinline__ int read_after(int t) { return BONUS ? t : t + 1; }

// What is left of the key of token j in one channel when each token of the chunk reads: 0 before j,
// and for j itself the bonus, or 1. Returns what is left at the end of the chunk.
template <int PITCH>
__device__ __forceinline__ float fade(float (&left)[LENGTH], const float (&logs)[LENGTH][PITCH], int channel, int j, float own) {
    float log = 0.0f;
#pragma unroll
    for (int t = 0; t < LENGTH; t++) {
        const float any = logs[t][PER_CHANNEL ? channel : 0], g = t > j ? any : 0.0f;
        if (!BONUS) log += g;
        left[t] = t > j ? expf(log) : t == j ? own : 0.0f;
        if (BONUS) log += g;
    }
    return expf(log);
}

// ---- Forward ------------------------------------------------------------------------------------
//
// In a chunk that begins with the memory S, with the decays e^(...) as above,
//
//     o_i = (q_i e^(start to i))^T S + sum of (q_i^T diag(e^(j to i)) k_j) v_j over j <= i
//     S   = e^(all) S + sum of (e^(j to the end) k_j) v_j^T over all j

struct ForwardTiles {
    float queries[LENGTH][pitch(FEATURES)], keys[LENGTH][pitch(FEATURES)], logs[LENGTH][DECAYS];
    float values[LENGTH][COLUMNS + 2], results[LENGTH][COLUMNS + 2];
    float scores[LENGTH][LENGTH + 2], totals[FEATURES], own[FEATURES];
};

// One block for each head and COLUMNS columns of the values. With `lag` 1 a token fades the memory by the
// decay of the token before it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const LOG> log_decay,
        Rows<SCALAR> out, const float* bonus, const float* initial, float* last, int N, int lag) {
    constexpr int OWN = FEATURES / PARTS, WIDE = COLUMNS / LENGTH;
    dynamic_shared_memory(shared);
    ForwardTiles& at = *reinterpret_cast<ForwardTiles*>(shared);
    const long long head = blockIdx.x;
    const int first = blockIdx.y * COLUMNS, features = k.width, columns = v.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    q = q.of_head(head), k = k.of_head(head), v = v.of_head(head), out = out.of_head(head);
    log_decay = log_decay.of_head(head);

    // The thread's numbers of the state: channels part, part + 16, ... and columns row, row + 16, ...
    float state[OWN][WIDE];
#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int x = 0; x < WIDE; x++) {
            const int c = n * PARTS + part, m = first + x * LENGTH + row;
            const bool known = c < features && m < columns;
            state[n][x] = known ? initial[(head * features + c) * columns + m] : 0.0f;
        }

    // What a token sees of itself.
    for (int c = threadIdx.x; c < FEATURES; c += THREADS)
        at.own[c] = BONUS ? c < features ? bonus[head * features + c] : 0.0f : 1.0f;

    Tile<FEATURES> some_queries, some_keys;
    Tile<DECAYS> some_logs;
    Tile<COLUMNS> some_values;
    const auto ask = [&](int start) {
        some_queries.ask(q, start, N, 0);
        some_keys.ask(k, start, N, 0);
        some_logs.ask(log_decay, start - lag, N - lag, 0);
        some_values.ask(v, start, N, first);
    };
    ask(0);
    for (int start = 0; start < N; start += LENGTH) {
        some_queries.store(at.queries);
        some_keys.store(at.keys);
        some_logs.store(at.logs);
        some_values.store(at.values);
        __syncthreads();

        // How much each token sees of the key of token `row`; and that key, faded until the chunk's end.
        float sums[LENGTH] = {}, left[LENGTH], to_end = 0.0f;
        for (int c = part; c < FEATURES; c += PARTS) {
            if (PER_CHANNEL || BONUS || c == part) to_end = fade(left, at.logs, c, row, at.own[c]);
            const float key = at.keys[row][c];
#pragma unroll
            for (int i = 0; i < LENGTH; i++) sums[i] += at.queries[i][c] * key * left[i];
            at.keys[row][c] = key * to_end;
        }
        at.scores[part][row] = sum_of_parts(sums);
        __syncthreads();

        // The query of token `row` sees of the chunk's first memory what has faded until it reads.
        float since_start = 0.0f;
        for (int c = part; c < FEATURES; c += PARTS) {
            if (PER_CHANNEL || c == part) since_start = decay(at.logs, c, 0, read_after(row));
            at.queries[row][c] *= since_start;
            if (row == 0) at.totals[c] = decay(at.logs, c, 0, LENGTH);
        }
        __syncthreads();

        // The outputs of column `row`, `row` + 16, ...: what is seen of token `part`, and of the state.
        float outputs[WIDE][LENGTH], some[WIDE];
#pragma unroll
        for (int x = 0; x < WIDE; x++) some[x] = at.values[part][x * LENGTH + row];
#pragma unroll
        for (int i = 0; i < LENGTH; i++) {
            const float score = at.scores[i][part];
#pragma unroll
            for (int x = 0; x < WIDE; x++) outputs[x][i] = part <= i ? score * some[x] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < OWN; n++)
#pragma unroll
            for (int i = 0; i < LENGTH; i++) {
                const float query = at.queries[i][n * PARTS + part];
#pragma unroll
                for (int x = 0; x < WIDE; x++) outputs[x][i] += query * state[n][x];
            }
#pragma unroll
        for (int x = 0; x < WIDE; x++) at.results[part][x * LENGTH + row] = sum_of_parts(outputs[x]);

        ask(start + LENGTH);
#pragma unroll
        for (int n = 0; n < OWN; n++)
#pragma unroll
            for (int x = 0; x < WIDE; x++) state[n][x] *= at.totals[n * PARTS + part];
        for (int t = 0; t < LENGTH; t++) {
#pragma unroll
            for (int x = 0; x < WIDE; x++) some[x] = at.values[t][x * LENGTH + row];
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                const float key = at.keys[t][n * PARTS + part];
#pragma unroll
                for (int x = 0; x < WIDE; x++) state[n][x] += key * some[x];
            }
        }
        __syncthreads();

        for (int i = threadIdx.x; i < LENGTH * COLUMNS; i += THREADS) {
            const int t = i / COLUMNS, m = i % COLUMNS;
            if (start + t < N && first + m < columns) out.row(start + t)[first + m] = from_float<SCALAR>(at.results[t][m]);
        }
    }

#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int x = 0; x < WIDE; x++) {
            const int c = n * PARTS + part, m = first + x * LENGTH + row;
            if (c < features && m < columns) last[(head * features + c) * columns + m] = state[n][x];
        }
}

// ---- Backward -----------------------------------------------------------------------------------
//
// The gradient G of the memory is a memory that fades as well, from the last token to the first:
//
//     G_t  = q_t do_t^T + diag(e^g_{t+1}) G_{t+1}        dv_t = G_t^T k_t
//     dq_t = S_t do_t        dk_t = G_t v_t              dg_t = sum of e^g_t S_{t-1} G_t over the columns
//
// so dv is a forward pass with time reversed, q in the place of k, and do in that of v; there a decay
// lies one token later, unless a bonus has it read early. The others need sums over columns: a block
// has 16 channels, and all columns. It needs the memory before each chunk, which chunk_starts writes
// down, and walks back with G.
//
// dg_t is a sum of all that has faded by e^g_t: what the tokens from t on have read of those before
// it. Token i has read S from the start of the chunk, or token j of it, or a later chunk has read
// either. Each term is added up by itself: q_t dq_t - k_t dk_t would say the same, and lose digits.

constexpr int CHANNELS = 16, OWN_COLUMNS = VALUES / PARTS;
constexpr int LOGS = PER_CHANNEL ? CHANNELS : 1;

// One block for each head and each 16 channels: the state before each chunk.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
chunk_starts(Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const LOG> log_decay, const float* initial,
             float* starts, int N) {
    __shared__ float keys[LENGTH][CHANNELS + 2], logs[LENGTH][LOGS], values[LENGTH][pitch(VALUES)];
    const long long head = blockIdx.x;
    const int first = blockIdx.y * CHANNELS, features = k.width, columns = v.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, channel = first + row;
    const int chunks = (N + LENGTH - 1) / LENGTH;
    k = k.of_head(head), v = v.of_head(head), log_decay = log_decay.of_head(head);

    float state[OWN_COLUMNS];  // of one channel; columns part, part + 16, ...
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
        const int m = n * PARTS + part;
        state[n] = channel < features && m < columns ? initial[(head * features + channel) * columns + m] : 0.0f;
    }

    Tile<CHANNELS> some_keys;
    Tile<LOGS> some_logs;
    Tile<VALUES> some_values;
    const auto ask = [&](int start) {
        some_keys.ask(k, start, N, first);
        some_logs.ask(log_decay, start, N, PER_CHANNEL ? first : 0);
        some_values.ask(v, start, N, 0);
    };
    ask(0);
    for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) {
            const int m = n * PARTS + part;
            if (channel < features && m < columns)
                starts[((head * chunks + chunk) * features + channel) * columns + m] = state[n];
        }
        some_keys.store(keys);
        some_logs.store(logs);
        some_values.store(values);
        __syncthreads();
        ask((chunk + 1) * LENGTH);
        keys[row][part] *= decay(logs, part, row + 1, LENGTH);
        __syncthreads();
        const float total = decay(logs, row, 0, LENGTH);
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) state[n] *= total;
        for (int t = 0; t < LENGTH; t++)
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) state[n] += keys[t][row] * values[t][n * PARTS + part];
        __syncthreads();
    }
}

// One block for each head and each 16 channels. The gradient of one decay for all channels is a sum over
// channels: grad_log has then one number for each block and token.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(Rows<const SCALAR> grad, Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v,
         Rows<const LOG> log_decay, const float* bonus, const float* starts, const float* grad_last, SCALAR* grad_q,
         SCALAR* grad_k, GRAD_LOG* grad_log, float* grad_bonus, float* grad_initial, int N) {
    __shared__ float queries[LENGTH][CHANNELS + 2], keys[LENGTH][CHANNELS + 2], logs[LENGTH][LOGS];
    __shared__ float values[LENGTH][pitch(VALUES)], grads[LENGTH][pitch(VALUES)];
    __shared__ float since_start[LENGTH][CHANNELS + 2], to_end[LENGTH][CHANNELS + 2], pairs[LENGTH][LENGTH + 2];
    __shared__ float results[3][LENGTH][CHANNELS + 2];
    const long long head = blockIdx.x;
    const int first = blockIdx.y * CHANNELS, features = k.width, columns = v.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, channel = first + row;
    const int chunks = (N + LENGTH - 1) / LENGTH;
    grad = grad.of_head(head), q = q.of_head(head), k = k.of_head(head), v = v.of_head(head);
    log_decay = log_decay.of_head(head);

    float later[OWN_COLUMNS];  // G, as the state in chunk_starts
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
        const int m = n * PARTS + part;
        later[n] = channel < features && m < columns ? grad_last[(head * features + channel) * columns + m] : 0.0f;
    }
    const float own = BONUS ? channel < features ? bonus[head * features + channel] : 0.0f : 1.0f;
    float own_gradient = 0.0f;

    Tile<CHANNELS> some_queries, some_keys;
    Tile<LOGS> some_logs;
    Tile<VALUES> some_values, some_grads;
    const auto ask = [&](int chunk) {
        const int start = chunk * LENGTH, end = chunk < 0 ? 0 : N;
        some_queries.ask(q, start, end, first);
        some_keys.ask(k, start, end, first);
        some_logs.ask(log_decay, start, end, PER_CHANNEL ? first : 0);
        some_values.ask(v, start, end, 0);
        some_grads.ask(grad, start, end, 0);
    };
    ask(chunks - 1);
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        some_queries.store(queries);
        some_keys.store(keys);
        some_logs.store(logs);
        some_values.store(values);
        some_grads.store(grads);
        __syncthreads();
        float state[OWN_COLUMNS];  // before the chunk
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) {
            const int m = n * PARTS + part;
            const bool known = channel < features && m < columns;
            state[n] = known ? starts[((head * chunks + chunk) * features + channel) * columns + m] : 0.0f;
        }

        // The row is a token: do_i^T v_row for all tokens i, and the decays of channel `part`.
        float sums[LENGTH] = {};
        for (int m = part; m < VALUES; m += PARTS)
#pragma unroll
            for (int i = 0; i < LENGTH; i++) sums[i] += grads[i][m] * values[row][m];
        pairs[part][row] = sum_of_parts(sums);
        since_start[row][part] = decay(logs, part, 0, read_after(row));
        to_end[row][part] = decay(logs, part, row + 1, LENGTH);
        __syncthreads();

        // From here on the row is a channel. What later chunks read of its tokens:
        float dk[LENGTH] = {}, dq[LENGTH] = {}, dg[LENGTH], until = 0.0f;
#pragma unroll
        for (int t = 0; t < LENGTH; t++) {
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) dk[t] += later[n] * values[t][n * PARTS + part];
            dk[t] *= to_end[t][row];
            dg[t] = until;
            until += keys[t][row] * dk[t];
        }
        results[0][part][row] = sum_of_parts(dk);

        // What its tokens, and those of later chunks, read of what was before, and of token `part`; the
        // last token first, as dg_t has the reads from t on.
        const float total = decay(logs, row, 0, LENGTH);
        float of_start = 0.0f, of_part = 0.0f, near_dk = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) of_start += total * state[n] * later[n];
        float left[LENGTH];
        fade(left, logs, row, part, own);
        const float key = keys[part][row];
#pragma unroll
        for (int t = LENGTH - 1; t >= 0; t--) {
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) dq[t] += state[n] * grads[t][n * PARTS + part];
            dq[t] *= since_start[t][row];
            const float query = queries[t][row], weight = t >= part ? pairs[t][part] * left[t] : 0.0f;
            if (BONUS) dg[t] += of_start + (t > part ? of_part : 0.0f);
            of_start += query * dq[t];
            of_part += query * weight * key;
            if (!BONUS) dg[t] += of_start + (t > part ? of_part : 0.0f);
            dq[t] += weight * key;
            near_dk += weight * query;
        }
        results[0][part][row] += near_dk;
        results[1][part][row] = sum_of_parts(dq);
        results[2][part][row] = sum_of_parts(dg);
        if (BONUS) own_gradient += queries[part][row] * key * pairs[part][part];

        ask(chunk - 1);
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++) later[n] *= total;
        for (int t = 0; t < LENGTH; t++) {
            const float query = queries[t][row] * since_start[t][row];
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) later[n] += query * grads[t][n * PARTS + part];
        }
        __syncthreads();

        // The row is a token again, so that neighbors write neighboring channels.
        const int t = chunk * LENGTH + row, c = first + part;
        const long long token = head * N + t;
        if (t < N && c < features) {
            grad_k[token * features + c] = from_float<SCALAR>(results[0][row][part]);
            grad_q[token * features + c] = from_float<SCALAR>(results[1][row][part]);
            if (PER_CHANNEL) grad_log[token * features + c] = from_float<GRAD_LOG>(results[2][row][part]);
        }
        if (!PER_CHANNEL) {
            float sum = results[2][row][part];
            for (int lanes = 1; lanes < PARTS; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (t < N && part == 0) grad_log[token * gridDim.y + blockIdx.y] = from_float<GRAD_LOG>(sum);
        }
    }

#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
        const int m = n * PARTS + part;
        if (channel < features && m < columns) grad_initial[(head * features + channel) * columns + m] = later[n];
    }
    if (BONUS) {
        for (int lanes = 1; lanes < PARTS; lanes *= 2) own_gradient += __shfl_xor_sync(~0u, own_gradient, lanes);
        if (channel < features && part == 0) grad_bonus[head * features + channel] = own_gradient;
    }
}
