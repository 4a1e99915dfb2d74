// WKV, the memory of RWKV-4: in each channel a mean of the values, in which the past fades.
//
//     read     o_t = (a + e^(u + k_t) v_t) / (b + e^(u + k_t))
//     write      a = e^-w a + e^k_t v_t
//                b = e^-w b + e^k_t
//
// A thread takes one channel of one sequence through all tokens. Its memory is a few registers, and
// it needs nothing that another thread has: there is no shared memory and no barrier, and a block is
// a single warp. Neighbors have neighboring channels, so that what a warp loads or stores at a time
// lies side by side in memory.
//
// SCALAR is the type of k, v, the outputs and their gradients; all else is float. KEEP says whether
// a gradient will be asked for.

constexpr int THREADS = 32;
constexpr int AHEAD = 8;         // tokens that are on their way from memory at any time
constexpr float EMPTY = -1e38f;  // the exponent of nothing: below any key, and finite
constexpr bool ROUNDED = sizeof(SCALAR) < sizeof(float);

// The numbers of one channel, token by token. A load takes as long as the work on several tokens, so
// each number is asked for AHEAD tokens before it is needed, and waits in a register.
template <typename T> struct Stream {
    const T* next;   // the number to ask for
    long long step;  // from token to token
    T held[AHEAD];

    __device__ __forceinline__ Stream(const T* first, long long step, int N) : next(first), step(step) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) ask(i, i < N);
    }
    __device__ __forceinline__ void ask(int i, bool is_there) {
        if (is_there) {
            held[i] = *next;
            next += step;
        }
    }
    // The number in place i; the place is free then for the number AHEAD tokens later.
    __device__ __forceinline__ float take(int i, bool more) {
        const float number = to_float(held[i]);
        ask(i, more);
        return number;
    }
};

// Token after token. No branch depends on a condition while there are AHEAD tokens or more, so that
// the work on one can begin before that on the last is done.
template <typename Pass> __device__ __forceinline__ void sweep(Pass& pass, int N) {
    int t = 0;
    for (; t + AHEAD <= N; t += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) pass.token(i, t + i + AHEAD < N);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (t + i < N) pass.token(i, false);
}

// ---- Forward ------------------------------------------------------------------------------------

struct Forward {
    Stream<SCALAR> k, v;
    float w, u;                     // decay and bonus
    float a, b, mu;                 // the memory; the sums are a and b times e^mu
    SCALAR* out;
    float *mean, *log_denominator;  // for the gradient
    long long at, width;            // place of the token in these, and the way to the next

    __device__ __forceinline__ void token(int i, bool more) {
        const float k_t = k.take(i, more), v_t = v.take(i, more);

        float m = fmaxf(mu, u + k_t);  // read: the past, and the token with its bonus
        float past = expf(mu - m), own = expf(u + k_t - m);
        const float n = past * a + own * v_t;
        const float d = past * b + own;
        const float o = divide(n, d);
        out[at] = from_float<SCALAR>(o);
        if constexpr (KEEP) {
            const float log_d = m + logf(d);
            log_denominator[at] = d == 0.0f ? -EMPTY : log_d;  // no weight, no gradient
            if constexpr (ROUNDED) mean[at] = o;
        }
        at += width;

        m = fmaxf(mu - w, k_t);  // write: the past fades, the token enters as it is
        past = expf(mu - m - w), own = expf(k_t - m);
        a = past * a + own * v_t;
        b = past * b + own;
        mu = m;
    }
};

// A state is three rows for each sequence: a, b and mu.
extern "C" __global__ void __launch_bounds__(THREADS)
forward(Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const float> decay, Rows<const float> bonus,
        const float* state, float* last_state, SCALAR* out, float* mean, float* log_denominator,
        int N, int channels) {
    const int index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= channels) return;  // of all sequences together
    const int width = k.width, sequence = index / width, channel = index % width;
    const long long a = 3LL * sequence * width + channel, b = a + width, mu = b + width;

    Forward pass = {{k.of_head(sequence).data + channel, k.token, N},
                    {v.of_head(sequence).data + channel, v.token, N},
                    decay.of_head(sequence).data[channel], bonus.of_head(sequence).data[channel],
                    state[a], state[b], state[mu],
                    out, mean, log_denominator,
                    1LL * sequence * N * width + channel, width};
    sweep(pass, N);
    last_state[a] = pass.a, last_state[b] = pass.b, last_state[mu] = pass.mu;
}

// ---- Backward -----------------------------------------------------------------------------------
//
// With n_t and d_t for what is divided in o_t, and g_t for the gradient of o_t,
//
//     dn_t = g_t / d_t     dd_t = -o_t g_t / d_t
//
// The sum a that token t leaves is read by token t + 1 as it is, and by each token after that once
// more faded. So its gradient, too, is a sum that fades, but from the last token to the first:
//
//     dk_t = e^(u + k_t) (v_t dn_t + dd_t) + e^k_t (v_t da + db)
//     dv_t = e^(u + k_t) dn_t              + e^k_t da
//       da = e^-w da + dn_t
//       db = e^-w db + dd_t
//
// du is the sum of the first parts of dk_t. For dw, a term of da has the factor e^-w as often as it
// has faded. Its derivative after w is the term times this number, its age, with a minus.

struct Backward {
    Stream<SCALAR> g, k, v;
    Stream<float> mean, log_denominator;
    float w, u;
    float da, db, nu;          // the gradients are da and db times e^nu
    float aged_da, aged_db;    // the same sums with each term times its age
    float dw, du;
    SCALAR *dk, *dv;
    long long at, width;

    __device__ __forceinline__ void token(int i, bool more) {
        const float g_t = g.take(i, more), k_t = k.take(i, more), v_t = v.take(i, more);
        const float o = mean.take(i, more), log_d = log_denominator.take(i, more);

        const float own = expf(u + k_t - log_d);  // the token's share in its own mean,
        const float later = expf(k_t + nu);       // and the largest in a later one: at most 1
        const float bonus = own * g_t * (v_t - o);
        dk[at] = from_float<SCALAR>(bonus + later * (v_t * da + db));
        dv[at] = from_float<SCALAR>(own * g_t + later * da);
        du += bonus;
        dw -= later * (v_t * aged_da + aged_db);
        at -= width;

        const float m = fmaxf(nu - w, -log_d);
        const float past = expf(nu - m - w), now = expf(-log_d - m);
        aged_da = past * (aged_da + da);
        aged_db = past * (aged_db + db);
        da = past * da + now * g_t;
        db = past * db - now * g_t * o;
        nu = m;
    }
};

// All rows come with their last token first. No gradient goes through the mu of a state.
extern "C" __global__ void __launch_bounds__(THREADS)
backward(Rows<const SCALAR> grad_out, Rows<const SCALAR> k, Rows<const SCALAR> v, Rows<const float> mean,
         Rows<const float> log_denominator, Rows<const float> decay, Rows<const float> bonus,
         const float* state, const float* last_state, const float* grad_last, float* grad_state,
         SCALAR* dk, SCALAR* dv, float* dw, float* du, int N, int channels) {
    const int index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= channels) return;
    const int width = k.width, sequence = index / width, channel = index % width;
    const long long a = 3LL * sequence * width + channel, b = a + width, mu = b + width;

    Backward pass = {{grad_out.of_head(sequence).data + channel, grad_out.token, N},
                     {k.of_head(sequence).data + channel, k.token, N},
                     {v.of_head(sequence).data + channel, v.token, N},
                     {mean.of_head(sequence).data + channel, mean.token, N},
                     {log_denominator.of_head(sequence).data + channel, log_denominator.token, N},
                     decay.of_head(sequence).data[channel], bonus.of_head(sequence).data[channel],
                     grad_last[a], grad_last[b], -last_state[mu],
                     0.0f, 0.0f,
                     0.0f, 0.0f,
                     dk, dv,
                     (1LL * sequence * N + N - 1) * width + channel, width};
    sweep(pass, N);
    const float later = expf(state[mu] + pass.nu);  // the state before the first token is a token, too
    grad_state[a] = later * pass.da, grad_state[b] = later * pass.db, grad_state[mu] = 0.0f;
    dw[index] = pass.dw - later * (state[a] * pass.aged_da + state[b] * pass.aged_db);
    du[index] = pass.du;
}
