// Linear attention whose memory fades: o_t = q_t^T S_t, where S_t = diag(e^g_t) S_{t-1} + k_t v_t^T
// and g_t <= 0 is the logarithm of a decay: a number for each channel of the keys, or one for all.
// With a bonus u, a token reads before the memory fades and is written, and sees itself u times:
// o_t = q_t^T (S_{t-1} + diag(u) k_t v_t^T).
//
// Between two tokens of a chunk, and from a chunk's ends to a token in it, decays are e to the sum of
// the logarithms that lie between: each sum is made of its own terms. So no exponent is above 0, no
// decay is divided by another, and -inf, which empties a channel, is a factor of exactly 0.
//
// A block takes a segment of a head through its chunks of 16 tokens, with 16 x 16 threads. In each step
// a thread has a row (a token, a column or a channel) and, with its 15 neighbors, one of 16 parts of
// the sums that belong to it. Where heads are many a segment is the whole sequence. Else `walk` finds
// what each segment adds to the memory, and `segment_starts` the memory before each; then all segments
// are computed at the same time.
//
// No thread waits for another at a __syncwarp here: it is there because compilers move no load across
// one. Without them, and with all loops unrolled, they load so far ahead that registers are spilled.

#include "parts.h"

// A segment of a head. With time reversed the cuts lie where they lay: the first segment begins `pad`
// tokens before there are any, and those count as zeros.
struct Segment {
    long long number;  // of all
    int head, begin, end;
    bool is_last;
    __device__ __forceinline__ Segment(int segments, int length, int pad, int N) {
        const int own = blockIdx.x % segments;
        number = blockIdx.x, head = blockIdx.x / segments;
        begin = own * length - pad, end = min(begin + length, N), is_last = own == segments - 1;
    }
};

// How many tokens of the chunk have faded the memory when token t reads it.
__device__ __forceinline__ int read_after(int t) { return BONUS ? t : t + 1; }

// What is left of the key of token j in one channel when each token of the chunk reads: 0 before j,
// and for j itself the bonus, or 1. Returns what is left at the end of the chunk.
template <int PITCH>
__device__ __forceinline__ float fade(float (&left)[LENGTH], const float (*logs)[PITCH], int channel, int j, float own) {
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

// One block for each segment and COLUMNS columns of the values; `initial` has a memory for each segment.
// With `lag` 1 a token fades the memory by the decay of the token before it.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const LOG> log_decay,
        Rows<SCALAR> out, const float* bonus, const float* initial, float* last, int N, int lag, int segments,
        int length, int pad) {
    constexpr int OWN = FEATURES / PARTS, WIDE = COLUMNS / LENGTH;
    constexpr int TOGETHER = WIDE % 2 ? 1 : 2;  // columns whose sums a thread has at a time
    dynamic_shared_memory(shared);
    ForwardTiles& at = *reinterpret_cast<ForwardTiles*>(shared);
    const Segment segment(segments, length, pad, N);
    const long long head = segment.head;
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
            state[n][x] = known ? initial[(segment.number * features + c) * columns + m] : 0.0f;
        }

    // What a token sees of itself.
    for (int c = threadIdx.x; c < FEATURES; c += THREADS)
        at.own[c] = BONUS ? c < features ? bonus[head * features + c] : 0.0f : 1.0f;

    Tile<FEATURES> some_queries, some_keys;
    Tile<DECAYS> some_logs;
    Tile<COLUMNS> some_values;
    const auto ask = [&](int start) {
        some_queries.ask(q, start, segment.end, 0);
        some_keys.ask(k, start, segment.end, 0);
        some_logs.ask(log_decay, start - lag, segment.end - lag, 0);
        some_values.ask(v, start, segment.end, first);
    };
    ask(segment.begin);
    for (int start = segment.begin; start < segment.end; start += LENGTH) {
        some_queries.store(at.queries);
        some_keys.store(at.keys);
        some_logs.store(at.logs);
        some_values.store(at.values);
        __syncthreads();

        // How much each token sees of the key of token `row`; and that key, faded until the chunk's end.
        float sums[LENGTH] = {}, left[LENGTH], to_end = 0.0f;
#pragma unroll 1
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
#pragma unroll
        for (int x = 0; x < WIDE; x += TOGETHER) {
            float outputs[TOGETHER][LENGTH];
#pragma unroll
            for (int y = 0; y < TOGETHER; y++)
#pragma unroll
                for (int i = 0; i < LENGTH; i++)
                    outputs[y][i] = part <= i ? at.scores[i][part] * at.values[part][(x + y) * LENGTH + row] : 0.0f;
#pragma unroll
            for (int n = 0; n < OWN; n++)
#pragma unroll
                for (int i = 0; i < LENGTH; i++) {
                    const float query = at.queries[i][n * PARTS + part];
#pragma unroll
                    for (int y = 0; y < TOGETHER; y++) outputs[y][i] += query * state[n][x + y];
                }
#pragma unroll
            for (int y = 0; y < TOGETHER; y++) at.results[part][(x + y) * LENGTH + row] = sum_of_parts(outputs[y]);
            __syncwarp();
        }

        ask(start + LENGTH);
#pragma unroll
        for (int n = 0; n < OWN; n++)
#pragma unroll
            for (int x = 0; x < WIDE; x++) state[n][x] *= at.totals[n * PARTS + part];
#pragma unroll 1
        for (int t = 0; t < LENGTH; t++) {
            float some[WIDE];
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

        if (start + row >= 0 && start + row < segment.end)
#pragma unroll
            for (int x = 0; x < WIDE; x++) {
                const int m = x * LENGTH + part;
                if (first + m < columns) out.row(start + row)[first + m] = from_float<SCALAR>(at.results[row][m]);
            }
    }

#pragma unroll
    for (int n = 0; n < OWN; n++)
#pragma unroll
        for (int x = 0; x < WIDE; x++) {
            const int c = n * PARTS + part, m = first + x * LENGTH + row;
            if (segment.is_last && c < features && m < columns) last[(head * features + c) * columns + m] = state[n][x];
        }
}

// ---- Backward ------------------------------------------------------------------------------------
//
// The gradient G of the memory is a memory that fades as well, from the last token to the first:
//
//     G_t  = q_t do_t^T + diag(e^g_{t+1}) G_{t+1}        dv_t = G_t^T k_t
//     dq_t = S_t do_t        dk_t = G_t v_t              dg_t = sum of e^g_t S_{t-1} G_t over the columns
//
// so dv is a forward pass with time reversed, q in the place of k, and do in that of v; there a decay
// lies one token later, unless a bonus has it read early. The others need sums over columns: a block
// has CHANNELS channels, and all columns. It walks back with G, and needs the memory before each chunk
// as well. `walk` writes that down before each span of SPAN tokens; from there the block walks
// through the span's chunks once more, and keeps the memory before each in shared memory.
//
// dg_t is a sum of all that has faded by e^g_t: what the tokens from t on have read of those before
// it. Token i has read S from the start of the chunk, or token j of it, or a later chunk has read
// either. Each term is added up by itself: q_t dq_t - k_t dk_t would say the same, and lose digits.

constexpr int DEEP = CHANNELS / LENGTH, OWN_COLUMNS = VALUES / PARTS;
constexpr int LOGS = PER_CHANNEL ? CHANNELS : 1;

// A memory in the registers of a block: the thread has channels row, row + 16, ... and columns part, part + 16, ...
struct Memory {
    float of[DEEP][OWN_COLUMNS];

    // `in` is a memory of the head and `first` the block's first channel; 0 where there is none.
    __device__ __forceinline__ void load(const float* in, int first, int features, int columns) {
        const int c = first + threadIdx.x / PARTS, m = threadIdx.x % PARTS;
#pragma unroll
        for (int d = 0; d < DEEP; d++)
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) {
                const bool known = in && c + d * LENGTH < features && m + n * PARTS < columns;
                of[d][n] = known ? in[(c + d * LENGTH) * columns + m + n * PARTS] : 0.0f;
            }
    }
    __device__ __forceinline__ void store(float* out, int first, int features, int columns) const {
        const int c = first + threadIdx.x / PARTS, m = threadIdx.x % PARTS;
#pragma unroll
        for (int d = 0; d < DEEP; d++)
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++)
                if (c + d * LENGTH < features && m + n * PARTS < columns)
                    out[(c + d * LENGTH) * columns + m + n * PARTS] = of[d][n];
    }

    // For the thread itself, in shared memory.
    using Slots = float[DEEP][OWN_COLUMNS][THREADS];
    __device__ __forceinline__ void keep(Slots& slots) const {
#pragma unroll
        for (int d = 0; d < DEEP; d++)
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) slots[d][n][threadIdx.x] = of[d][n];
    }
    __device__ __forceinline__ void take(const Slots& slots) {
#pragma unroll
        for (int d = 0; d < DEEP; d++)
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) of[d][n] = slots[d][n][threadIdx.x];
    }

    // From one end of a chunk to the other: what was there fades, and each token adds key x value, faded.
    template <int KEYS, int LOG_PITCH, int FADES, int COLUMN_PITCH>
    __device__ __forceinline__ void pass(const float (*keys)[KEYS], const float (*logs)[LOG_PITCH],
                                         const float (&fades)[LENGTH][FADES], const float (*values)[COLUMN_PITCH]) {
        const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const float total = decay(logs, d * LENGTH + row, 0, LENGTH);
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) of[d][n] *= total;
        }
#pragma unroll 1
        for (int t = 0; t < LENGTH; t++)
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const float key = keys[t][d * LENGTH + row] * fades[t][d * LENGTH + row];
#pragma unroll
                for (int n = 0; n < OWN_COLUMNS; n++) of[d][n] += key * values[t][n * PARTS + part];
            }
    }

    // Of channel `d` of the thread and row `part` of the tile, the sum over all columns.
    template <int COLUMN_PITCH>
    __device__ __forceinline__ float read(int d, const float (*rows)[COLUMN_PITCH]) const {
        float sums[LENGTH] = {};
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS; n++)
#pragma unroll
            for (int t = 0; t < LENGTH; t++) sums[t] += of[d][n] * rows[t][n * PARTS + threadIdx.x % PARTS];
        return sum_of_parts(sums);
    }
};

// What each token's decays leave of it, until one end of its chunk or from the other, in the block's channels.
template <int PITCH, int WIDTH>
__device__ __forceinline__ void fades_to_end(float (&fades)[LENGTH][PITCH], const float (*logs)[WIDTH]) {
    const int row = threadIdx.x / PARTS;
    for (int c = threadIdx.x % PARTS; c < CHANNELS; c += PARTS) fades[row][c] = decay(logs, c, row + 1, LENGTH);
}

// The memory after each segment that began without any, and how much would have been left of one; or,
// from `initial`, the memory before each span of SPAN tokens. One block for each segment and CHANNELS channels.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
walk(Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const LOG> log_decay, const float* initial, float* starts,
     float* sums, float* totals, int N, int lag, int segments, int length, int pad) {
    __shared__ float keys[LENGTH][CHANNELS + 2], logs[LENGTH][LOGS], values[LENGTH][pitch(VALUES)];
    __shared__ float to_end[LENGTH][CHANNELS + 2];
    const Segment segment(segments, length, pad, N);
    const int first = blockIdx.y * CHANNELS, features = k.width, columns = v.width;
    const int spans = (N + SPAN - 1) / SPAN;
    const long long size = (long long)features * columns;
    k = k.of_head(segment.head), v = v.of_head(segment.head), log_decay = log_decay.of_head(segment.head);

    Memory state;
    state.load(initial ? initial + segment.number * size : nullptr, first, features, columns);
    float left = 1.0f;  // of channel `threadIdx.x`

    Tile<CHANNELS> some_keys;
    Tile<LOGS> some_logs;
    Tile<VALUES> some_values;
    const auto ask = [&](int start) {
        some_keys.ask(k, start, segment.end, first);
        some_logs.ask(log_decay, start - lag, segment.end - lag, PER_CHANNEL ? first : 0);
        some_values.ask(v, start, segment.end, 0);
    };
    ask(segment.begin);
    for (int start = segment.begin; start < segment.end; start += LENGTH) {
        if (starts && start % SPAN == 0)
            state.store(starts + ((long long)segment.head * spans + start / SPAN) * size, first, features, columns);
        some_keys.store(keys);
        some_logs.store(logs);
        some_values.store(values);
        __syncthreads();
        ask(start + LENGTH);
        fades_to_end(to_end, logs);
        if (totals && threadIdx.x < CHANNELS) left *= decay(logs, threadIdx.x, 0, LENGTH);
        __syncthreads();
        state.pass(keys, logs, to_end, values);
        __syncthreads();
    }
    if (sums) state.store(sums + segment.number * size, first, features, columns);
    if (totals && threadIdx.x < CHANNELS && first + threadIdx.x < features)
        totals[segment.number * features + first + threadIdx.x] = left;
}

// The memory before each segment in the place of what the segment adds. A thread has one number of it.
extern "C" __global__ void __launch_bounds__(THREADS)
segment_starts(float* states, const float* totals, const float* initial, int segments, int features, int columns,
               long long count) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x, size = (long long)features * columns;
    if (i >= count) return;
    const long long head = i / size, own = i % size;
    float state = initial[i];
    for (int s = 0; s < segments; s++) {
        const long long number = head * segments + s;
        const float added = states[number * size + own];
        states[number * size + own] = state;
        state = totals[number * features + own / columns] * state + added;
    }
}

// The sum of what the neighbors before this one have; or those after it.
__device__ __forceinline__ float sum_of_neighbors(float own, bool after) {
    float sum = 0.0f;
    for (int lanes = 1; lanes < PARTS; lanes *= 2) {
        const float other = __shfl_xor_sync(~0u, own, lanes);
        if (bool(threadIdx.x & lanes) != after) sum += other;
        own += other;
    }
    return sum;
}

__device__ __forceinline__ float sum_of_all(float own) {
    for (int lanes = 1; lanes < PARTS; lanes *= 2) own += __shfl_xor_sync(~0u, own, lanes);
    return own;
}

constexpr int CHUNKS = SPAN / LENGTH;

struct BackwardTiles {
    float keys[SPAN][CHANNELS + 2], logs[SPAN][LOGS], values[SPAN][pitch(VALUES)];
    float queries[LENGTH][CHANNELS + 2], grads[LENGTH][pitch(VALUES)], pairs[LENGTH][LENGTH + 2];
    float since_start[LENGTH][CHANNELS + 2], to_end[LENGTH][CHANNELS + 2], results[3][LENGTH][CHANNELS + 2];
    float own[CHANNELS], own_gradients[LENGTH][CHANNELS + 2];  // what a token sees of itself
    Memory::Slots kept[CHUNKS - 1 ? CHUNKS - 1 : 1];  // the memory before each chunk of a span but the last
};

// One block for each segment and CHANNELS channels; `starts` has the memory before each span, and grad_last
// the gradient G behind each segment, from the last to the first. The gradient of one decay for all channels
// is a sum over channels: grad_log has then one number for each block and token.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(Rows<const SCALAR> grad, Rows<const SCALAR> q, Rows<const SCALAR> k, Rows<const SCALAR> v,
         Rows<const LOG> log_decay, const float* bonus, const float* starts, const float* grad_last, SCALAR* grad_q,
         SCALAR* grad_k, GRAD_LOG* grad_log, float* grad_bonus, float* grad_initial, int N, int segments, int length) {
    dynamic_shared_memory(shared);
    BackwardTiles& at = *reinterpret_cast<BackwardTiles*>(shared);
    const Segment segment(segments, length, 0, N);
    const long long head = segment.head;
    const int first = blockIdx.y * CHANNELS, features = k.width, columns = v.width;
    const int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, spans = (N + SPAN - 1) / SPAN;
    const long long size = (long long)features * columns;
    grad = grad.of_head(head), q = q.of_head(head), k = k.of_head(head), v = v.of_head(head);
    log_decay = log_decay.of_head(head);

    Memory state, later;  // S before a chunk, and G behind it
    const long long reversed = head * segments + segments - 1 - segment.number % segments;
    later.load(grad_last + reversed * size, first, features, columns);
    for (int c = row; c < CHANNELS; c += LENGTH) {
        at.own_gradients[part][c] = 0.0f;
        if (part == 0) at.own[c] = BONUS ? first + c < features ? bonus[head * features + first + c] : 0.0f : 1.0f;
    }
    // With time reversed, and without a bonus, the first token of the next segment has not faded G yet.
    if (!BONUS && !segment.is_last)
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const float next = expf(log_decay.number(segment.end, PER_CHANNEL ? first + d * LENGTH + row : 0));
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS; n++) later.of[d][n] *= next;
        }

    Tile<CHANNELS> some_keys, some_queries;
    Tile<LOGS> some_logs;
    Tile<VALUES> some_values, some_grads;
    const auto ask_for_keys = [&](int start) {
        some_keys.ask(k, start, segment.end, first);
        some_logs.ask(log_decay, start, segment.end, PER_CHANNEL ? first : 0);
        some_values.ask(v, start, segment.end, 0);
    };
    const auto ask_for_queries = [&](int start) {
        some_queries.ask(q, start, segment.end, first);
        some_grads.ask(grad, start, segment.end, 0);
    };
    for (int span = (segment.end + SPAN - 1) / SPAN - 1; span * SPAN >= segment.begin; span--) {
        const int chunks = min(CHUNKS, (segment.end - span * SPAN + LENGTH - 1) / LENGTH);
        ask_for_keys(span * SPAN);
        state.load(starts + (head * spans + span) * size, first, features, columns);
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int from = chunk * LENGTH;
            some_keys.store(at.keys + from);
            some_logs.store(at.logs + from);
            some_values.store(at.values + from);
            __syncthreads();
            if (chunk == chunks - 1) break;
            ask_for_keys(span * SPAN + from + LENGTH);
            fades_to_end(at.to_end, at.logs + from);
            __syncthreads();
            state.keep(at.kept[chunk]);
            state.pass(at.keys + from, at.logs + from, at.to_end, at.values + from);
        }
        ask_for_queries(span * SPAN + (chunks - 1) * LENGTH);
        for (int chunk = chunks - 1; chunk >= 0; chunk--) {
            const int start = span * SPAN + chunk * LENGTH;
            const auto keys = at.keys + chunk * LENGTH;
            const auto logs = at.logs + chunk * LENGTH;
            const auto values = at.values + chunk * LENGTH;
            some_queries.store(at.queries);
            some_grads.store(at.grads);
            __syncthreads();

            // The row is a token: do_i^T v_row for all tokens i, and the decays of all channels.
            float sums[LENGTH] = {};
#pragma unroll 1
            for (int m = part; m < VALUES; m += PARTS)
#pragma unroll
                for (int i = 0; i < LENGTH; i++) sums[i] += at.grads[i][m] * values[row][m];
            at.pairs[part][row] = sum_of_parts(sums);
            fades_to_end(at.to_end, logs);
            for (int c = part; c < CHANNELS; c += PARTS) at.since_start[row][c] = decay(logs, c, 0, read_after(row));
            __syncthreads();

            if (chunk < chunks - 1) state.take(at.kept[chunk]);

            // From here on the row is a channel, and what is summed up comes out for token `part`: what later
            // chunks read of it, and what it reads of the memory before the chunk. Its decay is in what they
            // read of the tokens before it, in what it reads and those behind it, and in what later chunks
            // read of the memory before this one.
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const int c = d * LENGTH + row;
                const float dk = later.read(d, values) * at.to_end[part][c];
                const float dq = state.read(d, at.grads) * at.since_start[part][c];
                float through = 0.0f;
#pragma unroll
                for (int n = 0; n < OWN_COLUMNS; n++) through += state.of[d][n] * later.of[d][n];
                through = sum_of_all(through) * decay(logs, c, 0, LENGTH);
                const float read = at.queries[part][c] * dq, later_reads = keys[part][c] * dk;
                at.results[0][part][c] = dk;
                at.results[1][part][c] = dq;
                at.results[2][part][c] = through + sum_of_neighbors(later_reads, false) + sum_of_neighbors(read, true)
                                       + (BONUS ? 0.0f : read);
                __syncwarp();
            }

            // What the chunk's tokens read of token `part`, the last first.
#pragma unroll 1
            for (int c = row; c < CHANNELS; c += LENGTH) {
                const float key = keys[part][c];
                float left[LENGTH], dqs[LENGTH], dgs[LENGTH], dk = 0.0f, so_far = 0.0f;
                fade(left, logs, c, part, at.own[c]);
#pragma unroll
                for (int t = LENGTH - 1; t >= 0; t--) {
                    const float weight = t >= part ? at.pairs[t][part] * left[t] : 0.0f;
                    const float seen = weight * at.queries[t][c];
                    if (BONUS) dgs[t] = t > part ? so_far : 0.0f;
                    dqs[t] = weight * key;
                    dk += seen;
                    so_far += seen * key;
                    if (!BONUS) dgs[t] = t > part ? so_far : 0.0f;
                }
                if (BONUS) at.own_gradients[part][c] += at.queries[part][c] * key * at.pairs[part][part];
                at.results[0][part][c] += dk;
                at.results[1][part][c] += sum_of_parts(dqs);
                at.results[2][part][c] += sum_of_parts(dgs);
            }
            __syncwarp();
            if (chunk) ask_for_queries(start - LENGTH);
            later.pass(at.queries, logs, at.since_start, at.grads);
            __syncthreads();

            // The row is a token again, so that neighbors write neighboring channels.
            const bool known = start + row < segment.end;
            const long long token = head * N + start + row;
            float d_log = 0.0f;
            for (int c = part; c < CHANNELS; c += PARTS) {
                d_log += at.results[2][row][c];
                if (!known || first + c >= features) continue;
                const long long i = token * features + first + c;
                grad_k[i] = from_float<SCALAR>(at.results[0][row][c]);
                grad_q[i] = from_float<SCALAR>(at.results[1][row][c]);
                if (PER_CHANNEL) grad_log[i] = from_float<GRAD_LOG>(at.results[2][row][c]);
            }
            if (!PER_CHANNEL) {
                d_log = sum_of_all(d_log);
                if (known && part == 0) grad_log[token * gridDim.y + blockIdx.y] = from_float<GRAD_LOG>(d_log);
            }
        }
    }

    if (segment.begin == 0) later.store(grad_initial + head * size, first, features, columns);
    if (BONUS)
        for (int c = row; c < CHANNELS; c += LENGTH) {
            const float sum = sum_of_all(at.own_gradients[part][c]);
            if (first + c < features && part == 0) grad_bonus[segment.number * features + first + c] = sum;
        }
}
