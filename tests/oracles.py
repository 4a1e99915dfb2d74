"""The definition of each operator for one sequence: the sum it stands for, with plain loops.

What has no chunks, no scan and no cumulative sum cannot share their mistakes. NumPy and torch are
compared with the same definitions, in float64.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.arrays import numbers

ORACLES = {}


def every_sequence(one, arrays, axes, **options):
    """The results of `one` for each sequence of the leading dimensions, which broadcast."""
    own = [x.shape[x.ndim - n :] for x, n in zip(arrays, axes, strict=True)]
    leading = np.broadcast_shapes(
        *(x.shape[: x.ndim - n] for x, n in zip(arrays, axes, strict=True))
    )
    wide = [np.broadcast_to(x, leading + s) for x, s in zip(arrays, own, strict=True)]
    results = [one(*(x[at] for x in wide), **options) for at in np.ndindex(leading)]
    shapes = [x.shape for x in (results or [one(*map(np.zeros, own), **options)])[0]]
    return [
        np.array([result[i] for result in results]).reshape(leading + shape)
        for i, shape in enumerate(shapes)
    ]


def oracle(*axes: int, reads: tuple[int, ...] = ()):
    """Makes a definition for one sequence, of arrays with so many axes, one for many sequences.

    It returns the outputs and what is remembered; the arguments whose places are in `reads` are
    not, and neither are their leading dimensions.
    """

    def decorate(one):
        @functools.wraps(one)
        def many(*arrays, **options):
            arrays = [numbers(x) for x in arrays]
            out = every_sequence(one, arrays, axes, **options)[0]
            silent = [
                np.zeros(x.shape[x.ndim - n :]) if i in reads else x
                for i, (x, n) in enumerate(zip(arrays, axes, strict=True))
            ]
            return [out, *every_sequence(one, silent, axes, **options)[1:]]

        ORACLES[one.__name__] = many
        return many

    return decorate


@oracle(2, 2, 2, 2, 2, reads=(0,))
def gated_linear_attention(q, k, v, log_decay, S):
    """o_t = Σ_{j<=t} Σ_d q_td k_jd Π_{j<i<=t} alpha_id v_j, and what is left of S."""
    alpha, out = np.exp(log_decay), np.zeros(v.shape)
    for t in range(len(k)):
        out[t] = (q[t] * np.prod(alpha[: t + 1], axis=0)) @ S
        for j in range(t + 1):
            out[t] += (q[t] * k[j] * np.prod(alpha[j + 1 : t + 1], axis=0)).sum() * v[j]
    return out, decayed_sum(alpha, k, v, S)


def decayed_sum(alpha, k, v, S):
    """What is remembered at the end: each pair with the decays that come after it."""
    last = np.prod(alpha, axis=0)[:, None] * S
    for j in range(len(k)):
        last = last + np.prod(alpha[j + 1 :], axis=0)[:, None] * np.outer(k[j], v[j])
    return last


@oracle(2, 2, 2, 2, 1, 2, reads=(0, 4))
def rwkv6(r, k, v, log_decay, bonus, S):
    """o_t = Σ_{j<t} Σ_d r_td k_jd Π_{j<i<t} alpha_id v_j, and the own token bonus times."""
    alpha, out = np.exp(log_decay), np.zeros(v.shape)
    for t in range(len(k)):
        out[t] = (r[t] * np.prod(alpha[:t], axis=0)) @ S + (r[t] * bonus * k[t]).sum() * v[t]
        for j in range(t):
            out[t] += (r[t] * k[j] * np.prod(alpha[j + 1 : t], axis=0)).sum() * v[j]
    return out, decayed_sum(alpha, k, v, S)


@oracle(2, 2, 2, 0, 2, reads=(0,))
def retention(q, k, v, decay, S):
    """What is n - m tokens old weighs decay^(n - m)."""
    N, out, last = len(k), np.zeros(v.shape), decay ** len(k) * S
    for n in range(N):
        out[n] = decay ** (n + 1) * (q[n] @ S)
        for m in range(n + 1):
            out[n] += decay ** (n - m) * (q[n] @ k[m]) * v[m]
        last = last + decay ** (N - 1 - n) * np.outer(k[n], v[n])
    return out, last


@oracle(2, 2, 2, 1, 1, 2, reads=(0,))
def gated_delta_rule(q, k, v, beta, log_decay, S):
    """S_t = a_t (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t': the transition is a matrix."""
    out = np.zeros(v.shape)
    for t in range(len(k)):
        transition = np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])
        S = math.exp(log_decay[t]) * transition @ S + beta[t] * np.outer(k[t], v[t])
        out[t] = q[t] @ S
    return out, S


def delta_rule(q, k, v, beta, S):
    return gated_delta_rule(q, k, v, beta, np.zeros(np.shape(k)[-2]), S)


ORACLES["delta_rule"] = delta_rule


@oracle(2, 2, 2, 1, 2, 2, reads=(0,))
def kimi_delta_attention(q, k, v, beta, log_decay, S):
    """S_t = (I - beta_t k_t k_t') diag(a_t) S_{t-1} + beta_t k_t v_t'."""
    out = np.zeros(v.shape)
    for t in range(len(k)):
        transition = np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])
        S = transition @ np.diag(np.exp(log_decay[t])) @ S + beta[t] * np.outer(k[t], v[t])
        out[t] = q[t] @ S
    return out, S


@oracle(2, 2, 2, 2, 2, 2, 2, reads=(0,))
def generalized_delta_rule(q, k, v, a, b, log_decay, S):
    """S_t = (diag(w_t) + b_t a_t') S_{t-1} + k_t v_t'."""
    out = np.zeros(v.shape)
    for t in range(len(k)):
        transition = np.diag(np.exp(log_decay[t])) + np.outer(b[t], a[t])
        S = transition @ S + np.outer(k[t], v[t])
        out[t] = q[t] @ S
    return out, S


@oracle(2, 2, 2, 2, 2, 2, 2, reads=(0,))
def rwkv7(r, k, v, log_decay, removal_key, learning_rate, S):
    """S_t = (diag(w_t) - (a_t kappa_t) kappa_t') S_{t-1} + k_t v_t', entry by entry."""
    out, (D, M) = np.zeros(v.shape), S.shape
    for t in range(len(k)):
        found = [sum(removal_key[t, d] * S[d, m] for d in range(D)) for m in range(M)]
        new = np.zeros((D, M))
        for d, m in np.ndindex(D, M):
            removed = learning_rate[t, d] * removal_key[t, d] * found[m]
            new[d, m] = math.exp(log_decay[t, d]) * S[d, m] - removed + k[t, d] * v[t, m]
        S = new
        out[t] = r[t] @ S
    return out, S


@oracle(2, 3, 3, 2, 1, 2, reads=(0,))
def gated_delta_product(q, k, v, beta, log_decay, S):
    """A token's transition is a product of matrices, and what it writes passes the later ones."""
    N, J, D = k.shape
    out = np.zeros((N, v.shape[-1]))
    for t in range(N):
        transition, written = math.exp(log_decay[t]) * np.eye(D), np.zeros(S.shape)
        for j in range(J):
            step = np.eye(D) - beta[t, j] * np.outer(k[t, j], k[t, j])
            transition = step @ transition
            written = step @ written + beta[t, j] * np.outer(k[t, j], v[t, j])
        S = transition @ S + written
        out[t] = q[t] @ S
    return out, S


@oracle(2, 2, 2, 2, 2, 1, 2, reads=(4, 5))
def selective_scan(x, delta, A, B, C, D, h):
    """The state after t tokens as a sum over what was written, each with one exp."""
    N, out = len(x), np.zeros(x.shape)
    for t in range(N + 1):
        state = np.exp(A * delta[:t].sum(axis=0)[:, None]) * h
        for j in range(t):
            since = delta[j + 1 : t].sum(axis=0)[:, None]
            state = state + np.exp(A * since) * np.outer(delta[j] * x[j], B[j])
        if t:
            out[t - 1] = state @ C[t - 1] + D * x[t - 1]
    return out, state


@oracle(2, 1, 2, 2, 2, reads=(3,))
def state_space_dual(x, log_decay, B, C, S):
    """y_t = Σ_j (C_t·B_j) exp(g_{j+1} + ... + g_t) x_j, and what the first state adds."""
    N, out, last = len(x), np.zeros(x.shape), np.exp(log_decay.sum()) * S
    for t in range(N):
        out[t] = np.exp(log_decay[: t + 1].sum()) * C[t] @ S
        for j in range(t + 1):
            out[t] += (C[t] @ B[j]) * np.exp(log_decay[j + 1 : t + 1].sum()) * x[j]
        last = last + np.exp(log_decay[t + 1 :].sum()) * np.outer(B[t], x[t])
    return out, last


@oracle(2, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, reads=(6,))
def mamba3(x, delta, log_decay, trapezoid, angle, B, C, S, k_last, x_last, cos, sin):
    """The state turns and B and C do not: pairs of rows are complex numbers."""
    theta = np.arctan2(sin + 0.0, cos + 0.0)  # of -0.0 it would be π

    def turned(y, by):
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * by)
        return np.stack([z.real, z.imag], axis=-1).reshape(y.shape)

    S, k_last = turned(S.T, -theta).T, turned(k_last, -theta)  # in the frame of the last token
    out = np.zeros(x.shape)
    for t in range(len(x)):
        step = delta[t] * (1 - trapezoid[t])
        S = math.exp(log_decay[t]) * (S + step * np.outer(k_last, x_last))
        S = turned(S.T, -angle[t]).T + delta[t] * trapezoid[t] * np.outer(B[t], x[t])
        out[t] = C[t] @ S
        k_last, x_last, theta = B[t], x[t], theta + angle[t]
    return out, turned(S.T, theta).T, turned(k_last, theta), x_last, np.cos(theta), np.sin(theta)


@oracle(2, 2, 2, 1, 1, 1, 2, 2, reads=(0,))
def momentum_delta_rule(q, k, v, beta, log_decay, momentum, S, M):
    """S and M are one state, which a matrix carries on."""
    out, D = np.zeros(v.shape), k.shape[1]
    both = np.concatenate([S, M])
    for t in range(len(k)):
        keep, step = momentum[t] * np.eye(D), beta[t] * np.outer(k[t], k[t])
        rows = [[math.exp(log_decay[t]) * np.eye(D) - step, keep], [-step, keep]]
        both = np.block(rows) @ both + np.tile(beta[t] * np.outer(k[t], v[t]), (2, 1))
        out[t] = q[t] @ both[:D]
    return out, both[:D], both[D:]


@oracle(2, 2, 2, 1, 1, 1, 2, 2, reads=(0, 5))
def mesa(q, k, v, beta, log_decay, ridge, H, G):
    """Each pair with its weight at the end, and the inverse of what they sum to."""
    out = np.zeros(v.shape)
    for t in range(len(k) + 1):
        weights = [beta[j] * math.exp(log_decay[j + 1 : t].sum()) for j in range(t)]
        first = math.exp(log_decay[:t].sum())
        H_t, G_t = first * H, first * G
        for j in range(t):
            H_t = H_t + weights[j] * np.outer(k[j], k[j])
            G_t = G_t + weights[j] * np.outer(k[j], v[j])
        if t:
            out[t - 1] = q[t - 1] @ np.linalg.pinv(H_t + np.diag(ridge)) @ G_t
    return out, H_t, G_t


@oracle(2, 2, 2, 1, 1, 1, 1, 2, 1, 2, 1, 0, reads=(0,))
def ttt_linear(
    q, k, v, eta, share, weight, bias, W, b, dW, db, position, *, batch_size, normalize=True
):
    """Each token's memory as a sum over its batch, each gradient with a Jacobian."""
    N, D, first = *k.shape, int(position)
    out, start = np.zeros(v.shape), 0

    def normed(z):
        """The norm, and its Jacobian."""
        if not normalize or not D:
            return z, np.eye(D)
        z = z - z.mean()
        deviation = math.sqrt(z.var() + 1e-6)
        x = z / deviation
        return x, (np.eye(D) - (np.ones((D, D)) + np.outer(x, x)) / D) / deviation

    while start < N:
        stop = min(N, start + batch_size - (first + start) % batch_size)
        pairs = []
        for s in range(start, stop):
            x, jacobian = normed(k[s] @ W + b)
            pairs.append((eta[s] * k[s], jacobian.T @ (weight * (weight * x + bias - v[s] + k[s]))))
        for t in range(start, stop):
            seen = pairs[: t - start + 1]
            sum_W = dW + sum(np.outer(x, g) for x, g in seen)
            sum_b = db + sum(eta[start + s] * g for s, (_, g) in enumerate(seen))
            W_t, b_t = W - share[t] * sum_W, b - share[t] * sum_b
            out[t] = q[t] + weight * normed(q[t] @ W_t + b_t)[0] + bias
        dW, db, start = sum_W, sum_b, stop
        if (first + stop) % batch_size == 0:
            W, b, dW, db = W_t, b_t, 0 * dW, 0 * db
    return out, W, b, dW, db, np.array(first + N)


@oracle(2, 2, 2, 1, 2, 3, 0, reads=(0, 4))
def log_linear_attention(q, k, v, log_decay, level_weights, S, position):
    """Blocks are cut off the past from the left, the longest first, as bits are set in t."""
    N, levels, first = len(k), len(S), int(position)
    out, last = np.zeros(v.shape), np.zeros(S.shape)

    def level(t, j):
        """Of token j at token t: the lengths of the blocks are the powers of two that make t."""
        start = 0
        for power in reversed(range(levels)):
            if t & 2**power:
                start += 2**power
                if j < start:
                    return power + 1
        return 0

    for t in range(N):
        now = np.zeros(S.shape)
        for m in range(levels):  # any token of the level stands for all of them
            of_level = [j for j in range(first) if level(first - 1, j) == m] or [max(first - 1, 0)]
            to = max(m, level(first + t, of_level[0])) if first else max(m, level(t, 0))
            now[to] += math.exp(log_decay[: t + 1].sum()) * S[m]
        for j in range(t + 1):
            fade = math.exp(log_decay[j + 1 : t + 1].sum())
            now[level(first + t, first + j)] += fade * np.outer(k[j], v[j])
        out[t] = sum(level_weights[t, m] * q[t] @ now[m] for m in range(levels))
        last = now
    return out, last if N else S, np.array(first + N)


@oracle(2, 2, 2, 1)
def forgetting_attention(q, k, v, log_decay):
    """A weighted mean, each weight with the gates that came after its token."""
    N, out = len(k), np.zeros(v.shape)
    for t in range(N):
        scores = [q[t] @ k[j] / math.sqrt(max(k.shape[1], 1)) for j in range(t + 1)]
        gates = [np.exp(log_decay[j + 1 : t + 1].sum()) for j in range(t + 1)]
        weights = np.exp(scores) * gates
        out[t] = sum(weights[j] * v[j] for j in range(t + 1)) / weights.sum()
    return (out,)


@oracle(2, 2, 2)
def sliding_window_attention(q, k, v, *, window):
    out = np.zeros(v.shape)
    for t in range(len(k)):
        seen = range(max(0, t - window + 1), t + 1)
        weights = [math.exp(q[t] @ k[j] / math.sqrt(max(k.shape[1], 1))) for j in seen]
        out[t] = sum(w * v[j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
    return (out,)


@oracle(2, 2, 1, 1, 1, 1)
def wkv(k, v, decay, bonus, a, b):
    """Outputs, and the sums of weighted values and of weights for the token after the last."""
    out = np.zeros(v.shape)
    for t in range(len(k) + 1):
        numerator, denominator = a * np.exp(-t * decay), b * np.exp(-t * decay)
        for i in range(t):
            weight = np.exp(k[i] - (t - 1 - i) * decay)
            numerator, denominator = numerator + weight * v[i], denominator + weight
        if t < len(k):
            own = np.exp(bonus + k[t])
            out[t] = (numerator + own * v[t]) / (denominator + own)
    return out, numerator, denominator


@oracle(2, 2, 2, 2)
def aft_full(q, k, v, position_bias, *, causal=False):
    """A mean of values with the weights exp(k + bias), behind the gate of the query."""
    out = np.zeros(q.shape)
    for t in range(len(q)):
        seen = range(t + 1) if causal else range(len(k))
        weights = {i: np.exp(k[i] + position_bias[t, i]) for i in seen}
        if weights:
            mean = sum(weights[i] * v[i] for i in seen) / sum(weights.values())
            out[t] = mean * sigmoid(q[t])
    return (out,)


def aft_simple(q, k, v, *, causal=False):
    bias = np.zeros((np.shape(q)[-2], np.shape(k)[-2]))
    return aft_full(q, k, v, bias, causal=causal)


ORACLES["aft_simple"] = aft_simple


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@oracle(2, 1, 1)
def token_shift(x, mix, last):
    rows = [last, *x]
    mixed = [mix * rows[t + 1] + (1 - mix) * rows[t] for t in range(len(x))]
    return (np.array(mixed).reshape(x.shape),)


@oracle(2, 1, 1, 2, 2, 2, 1)
def channel_mix(x, mix_k, mix_r, W_k, W_v, W_r, last):
    (k,), (r,) = (token_shift(x, mix, last) for mix in (mix_k, mix_r))
    return (sigmoid(r @ W_r) * (np.maximum(k @ W_k, 0) ** 2 @ W_v),)


@oracle(2, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1)
def time_mix(x, mix_k, mix_v, mix_r, W_k, W_v, W_r, W_o, decay, bonus, last, a, b):
    (k,), (v,), (r,) = (token_shift(x, mix, last) for mix in (mix_k, mix_v, mix_r))
    mean, *sums = wkv(k @ W_k, v @ W_v, decay, bonus, a, b)
    return (sigmoid(r @ W_r) * mean) @ W_o, *sums
