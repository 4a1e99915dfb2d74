"""Equations of the book that no function computes: bounds, laws and steps of derivations.

Each is checked with numbers: an identity on random ones, a mean over many.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import lesson_code.numpy as ln
from lesson_code import checks, costs

torch = pytest.importorskip("torch", reason="PyTorch is missing: install torch")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def same(found, expected, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# --- From softmax to a state -------------------------------------------------------------------


def test_weights_of_linear_attention_have_a_ceiling() -> None:
    """A row of weights is a mean of the columns of features, each divided by its sum."""
    q, k = (ln.elu_plus_one(normal(9, 4, seed=seed)) for seed in (0, 1))
    A = q @ k.T / (q @ k.sum(axis=0))[:, None]
    z = k.sum(axis=0)
    p = q * z / (q @ z)[:, None]
    same(p.sum(axis=1), 1)
    same(A, p @ (k / z).T)
    assert (A <= (k / z).max(axis=1) + 1e-12).all()


def test_a_read_is_signal_and_crosstalk() -> None:
    k, v = normal(5, 3), normal(5, 2, seed=1)
    state = ln.LinearAttentionState.zeros(3, 2)
    for key, value in zip(k, v, strict=True):
        state = state.write(key, value)
    others = [j for j in range(5) if j != 2]
    crosstalk = sum((k[2] @ k[j]) * v[j] for j in others)
    same(state.read(k[2], normalize=False), v[2] * (k[2] @ k[2]) + crosstalk)


@pytest.mark.parametrize(("n", "D"), [(4, 16), (40, 8)])
def test_the_power_of_crosstalk(n: int, D: int) -> None:
    k, v = unit(normal(4000, n, D)), normal(4000, n, 4, seed=1)
    out = ln.linear_attention(k, k, v, feature_map=ln.identity, normalize=False)
    ratio = np.mean((out - v) ** 2) / np.mean(v**2)
    assert abs(ratio / ((n - 1) / D) - 1) < 0.05


def test_one_term_is_a_number_or_a_matrix() -> None:
    q, k, v = normal(3), normal(3, seed=1), normal(2, seed=2)
    same((q @ k) * v, q @ np.outer(k, v))


def test_a_linear_network_is_unrolled() -> None:
    f, W = normal(6, 3), normal(3, 3, seed=1)
    h = np.zeros(3)
    for t in range(6):
        h = W @ h + f[t]
        same(h, sum(np.linalg.matrix_power(W, t - j) @ f[j] for j in range(t + 1)))


def join(first: tuple, second: tuple) -> tuple:
    """Two steps h a + b, one after the other."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def test_steps_join_to_a_step() -> None:
    h, *parts = normal(7)
    steps = list(zip(parts[::2], parts[1::2], strict=True))
    one_by_one = h
    for a, b in steps:
        one_by_one = one_by_one * a + b
    a, b = join(join(steps[0], steps[1]), steps[2])
    same(h * a + b, one_by_one)


def test_the_joining_of_steps_is_associative() -> None:
    a, B = normal(3), normal(3, 4, 2, seed=1)
    p = list(zip(a, B, strict=True))
    left, right = join(join(p[0], p[1]), p[2]), join(p[0], join(p[1], p[2]))
    whole = a[0] * a[1] * a[2], a[2] * a[1] * B[0] + a[2] * B[1] + B[2]
    for one, other, expected in zip(left, right, whole, strict=True):
        same(one, expected)
        same(other, expected)


def test_the_mean_of_an_exponential() -> None:
    w = np.linspace(-12, 12, 200_001)
    for y in (-1.5, 0.0, 0.3, 2.0):
        density = np.exp(w * y - w**2 / 2) / math.sqrt(2 * math.pi)
        same(density.sum() * (w[1] - w[0]), math.exp(y**2 / 2), 1e-8)


def test_the_error_of_random_features() -> None:
    D, m = 4, 16
    q, k = unit(normal(2, D)) * 0.5
    estimates = [
        ln.positive_random_features(m, D, orthogonal=False, seed=seed)(np.stack([q, k]))
        .prod(axis=0)
        .sum()
        for seed in range(6000)
    ]
    exact = math.exp(q @ k / math.sqrt(D))
    length = np.linalg.norm(q + k) / D**0.25
    law = math.sqrt((math.exp(length**2) - 1) / m)
    assert abs(np.std(estimates) / exact / law - 1) < 0.1


def mean_square_of_wide(y: float, D: int, b: float) -> float:
    """Mean square of e^{q·k}'s estimate by one roll, over e^{2 q·k}."""
    return (b**2 / math.sqrt(2 * b**2 - 1)) ** D * math.exp(y**2 / (2 * b**2 - 1))


def test_rolls_thrown_wide_count_less() -> None:
    w = np.linspace(-14, 14, 200_001)
    density = np.exp(-(w**2) / 2) / math.sqrt(2 * math.pi) * (w[1] - w[0])
    for q, k, b in ((0.5, 1.0, 1.0), (0.5, 1.0, 1.6), (-1.5, 0.7, 2.0), (1.0, 1.0, 0.9)):
        room = [math.sqrt(b) * np.exp(b * w * x - x**2 / 2 - (b**2 - 1) * w**2 / 4) for x in (q, k)]
        estimate = room[0] * room[1] / math.exp(q * k)
        same((density * estimate).sum(), 1.0, 1e-8)
        same((density * estimate**2).sum(), mean_square_of_wide(q + k, 1, b), 1e-8)


def test_the_best_width_of_a_throw() -> None:
    for y, D in ((0.0, 4), (1.0, 1), (3.0, 16), (math.sqrt(42), 16)):
        h = 3 / 2 + y * y / D
        b = math.sqrt((h + math.sqrt(h * h - 2)) / 2)
        best = mean_square_of_wide(y, D, b)
        assert all(best <= mean_square_of_wide(y, D, r * b) for r in (0.9, 0.99, 1.01, 1.1))
    same(b, 2.0, 1e-12)


# --- On real machines --------------------------------------------------------------------------


def test_blocks_before_a_chunk_are_a_state() -> None:
    Q, K, V = normal(4, 3), normal(6, 3, seed=1), normal(6, 2, seed=2)
    blocks = [slice(0, 2), slice(2, 4), slice(4, 6)]
    same(sum((Q @ K[b].T) @ V[b] for b in blocks), Q @ sum(K[b].T @ V[b] for b in blocks))


def gradients(normalize: bool, q, k, v, do):
    """Those of causal linear attention by autograd, through the masked form."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
    weights = (q @ k.T).tril()
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = weights @ v
    found = torch.autograd.grad((out * torch.from_numpy(do)).sum(), (q, k, v))
    return out.detach().numpy(), [x.numpy() for x in found]


def test_gradients_are_states_that_run_backward() -> None:
    q, k, v, do = (normal(7, size, seed=size) for size in (3, 3, 2, 2))
    _, (dq, dk, dv) = gradients(False, q, k, v, do)
    S, dS = np.zeros((3, 2)), np.zeros((3, 2))
    for t in range(7):
        S = S + np.outer(k[t], v[t])
        same(dq[t], S @ do[t])
    for t in reversed(range(7)):
        dS = dS + np.outer(q[t], do[t])
        same(dS.T @ k[t], sum(do[s] * (q[s] @ k[t]) for s in range(t, 7)))
        same(dk[t], dS @ v[t])
        same(dv[t], dS.T @ k[t])


def test_gradients_with_the_normalizer() -> None:
    q, k = (ln.elu_plus_one(normal(7, 3, seed=seed)) for seed in (0, 1))
    v, do = normal(7, 2, seed=2), normal(7, 2, seed=3)
    out, (dq, dk, dv) = gradients(True, q, k, v, do)
    z = np.cumsum(k, axis=0)
    S = np.cumsum(k[:, :, None] * v[:, None, :], axis=0)
    d = (q * z).sum(axis=1)
    dn = do / d[:, None]
    dd = -(dn * out).sum(axis=1)
    dS, dz = np.zeros((3, 2)), np.zeros(3)
    for t in reversed(range(7)):
        dS, dz = dS + np.outer(q[t], dn[t]), dz + q[t] * dd[t]
        same(dq[t], S[t] @ dn[t] + z[t] * dd[t])
        same(dk[t], dS @ v[t] + dz)
        same(dv[t], dS.T @ k[t])


def test_gradients_chunk_by_chunk() -> None:
    L = 3
    q, k, v, do = (normal(9, size, seed=size) for size in (4, 4, 2, 2))
    _, expected = gradients(False, q, k, v, do)
    chunks = [slice(start, start + L) for start in range(0, 9, L)]
    before = [k[: c.start].T @ v[: c.start] for c in chunks]
    dS, found = np.zeros((4, 2)), [np.zeros_like(x) for x in (q, k, v)]
    for c, S in reversed(list(zip(chunks, before, strict=True))):
        A, dA = np.tril(q[c] @ k[c].T), np.tril(do[c] @ v[c].T)
        found[0][c] = dA @ k[c] + do[c] @ S.T
        found[1][c] = dA.T @ q[c] + v[c] @ dS.T
        found[2][c] = A.T @ do[c] + k[c] @ dS
        dS = dS + q[c].T @ do[c]
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def test_lines_in_a_plot_of_logarithms_cross() -> None:
    """Times a N^p and b N^r are equal where the lines through their points meet."""
    a, p, b, r = 3e-9, 2.0, 4e-7, 1.0
    N_0, N_1 = 10.0, 1000.0
    g_0, g_1 = (math.log(a * N**p / (b * N**r)) for N in (N_0, N_1))
    N = N_0 * (N_1 / N_0) ** (g_0 / (g_0 - g_1))
    same(a * N**p, b * N**r)
    same(a * (2 * N) ** p / (a * N**p), 2**p)


@pytest.mark.parametrize(("L", "C", "D", "M"), [(64, 64, 64, 64), (16, 21, 5, 3)])
def test_floors_cross(L: int, C: int, D: int, M: int) -> None:
    fast, slow = 7e9, 2e9  # the rates of the two
    for f in (1, 1 / 2):  # the share of the square that softmax computes
        N = (L * (C + M) + 2 * C * (M + 1)) / (f * (D + M))
        same(f * N**2 * (D + M), N * L * (C + M) + 2 * N * C * (M + 1))
        N_star = N * fast / slow
        linear = N_star * L * (C + M) + 2 * N_star * C * (M + 1)
        same(f * N_star**2 * (D + M) / fast, linear / slow)
    whole = 100 * L  # every chunk is full
    counted = costs.chunkwise_cost(whole, C, M, L).work
    assert counted == whole * L * (C + M) + 2 * whole * C * (M + 1)


def test_a_masked_key_writes_nothing() -> None:
    q, k, v = (normal(6, 3, seed=seed) for seed in range(3))
    real = np.array([True, False, True, True, False, True])
    phi_q, phi_k = ln.elu_plus_one(q), ln.elu_plus_one(k) * real[:, None]
    out = ln.linear_attention(phi_q, phi_k, v, feature_map=ln.identity)
    same(out, ln.linear_attention(q, k[real], v[real]))


# --- Numbers in a computer ---------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "p"), [("float16", 11), ("float32", 24), ("float64", 53)])
def test_the_spacing_of_floats(dtype: str, p: int) -> None:
    x = np.array([1, 1.5, 2, 3.99, 1000, 0.01], dtype)
    law = 2.0 ** (np.floor(np.log2(np.abs(x.astype(float)))) - p + 1)
    np.testing.assert_array_equal(np.spacing(x).astype(float), law)
    a, b = (normal(1000, seed=seed).astype(dtype) for seed in (0, 1))
    exact = a.astype("longdouble") + b.astype("longdouble")
    assert (abs((a + b).astype("longdouble") / exact - 1) <= 2.0**-p * (1 + 1e-6)).all()


def test_the_error_of_a_sum() -> None:
    p, N = 11, 512
    for seed in range(50):
        x = np.random.default_rng(seed).uniform(size=N).astype("float16")
        exact, X = x.astype(float).sum(), abs(x).astype(float).sum()
        one_by_one, pairs = np.float16(0), x
        for value in x:
            one_by_one = np.float16(one_by_one + value)
        while len(pairs) > 1:
            pairs = pairs[0::2] + pairs[1::2]
        assert abs(one_by_one - exact) <= 2.0**-p * (N - 1) * X
        assert abs(pairs[0] - exact) <= 2.0**-p * math.log2(N) * X * 1.01  # and order 2^(-2p)


def test_how_states_grow() -> None:
    """Plain and decaying sums of terms with a mean of 0.5 and a variance of 4."""
    t, mu, sigma, gamma = 40, 0.5, 2.0, 0.9
    terms = mu + sigma * normal(200_000, t)
    plain = np.mean(terms.sum(axis=1) ** 2)
    assert abs(plain / (mu**2 * t**2 + sigma**2 * t) - 1) < 0.02
    decaying = np.mean((terms @ gamma ** np.arange(t)[::-1]) ** 2)
    law = mu**2 * ((1 - gamma**t) / (1 - gamma)) ** 2
    law += sigma**2 * (1 - gamma ** (2 * t)) / (1 - gamma**2)
    assert abs(decaying / law - 1) < 0.02


def test_a_decay_makes_room() -> None:
    """What others add to a token of age n, for random unit keys, and the best decay for its age."""
    N, D, n = 40, 8, np.arange(40)
    k, v = normal(2_000, N, D), normal(2_000, N, 4, seed=1)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)

    def law(gamma, n):
        return ((gamma ** (2.0 * np.arange(N))).sum() / gamma ** (2 * n) - 1) / D

    for gamma in (1.0, 0.9):
        _, S = ln.retention(k, k, v, gamma, return_state=True)
        read = (k @ S)[:, ::-1] / gamma ** n[:, None]
        noise = ((read - v[:, ::-1]) ** 2).mean(axis=(0, 2))
        assert np.abs(noise / law(gamma, n) - 1).max() < 0.1
    best = math.sqrt(1 - 1 / 5)
    assert law(best, 4) < min(law(best + 0.02, 4), law(best - 0.02, 4))


def test_the_largest_term_is_taken_out_of_an_exponential_sum() -> None:
    a = normal(9) * 5
    same(math.log(np.exp(a).sum()), a.max() + math.log(np.exp(a - a.max()).sum()))
    a = a + 1000  # where the left side overflows
    assert math.isfinite(a.max() + math.log(np.exp(a - a.max()).sum()))


def test_a_running_maximum_changes_nothing_but_the_range() -> None:
    b, v, a = normal(8, 3) * 4, normal(8, 2, seed=1), normal(8, 3, seed=2)
    expected = ln.linear_attention(a, b, v, feature_map=ln.exponential, causal=True)
    mu, S, z = np.full(3, -np.inf), np.zeros((3, 2)), np.zeros(3)
    for t in range(8):
        new = np.maximum(mu, b[t])
        S = np.exp(mu - new)[:, None] * S + np.exp(b[t] - new)[:, None] * v[t]
        z, mu = np.exp(mu - new) * z + np.exp(b[t] - new), new
        read = np.exp(a[t] + mu)
        same(read @ S / (read @ z), expected[t])


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_gradients_through_time(gamma: float) -> None:
    steps = 5
    q, k, v = (normal(steps, 2, seed=seed) for seed in range(3))

    def last(S):
        return ln.retention(q, k, v, gamma, initial_state=S, return_state=True)[1]

    S = normal(2, 2, seed=3)
    for change in np.eye(4).reshape(4, 2, 2):
        same(last(S + change) - last(S), gamma**steps * change)


@pytest.mark.parametrize("off", [0.99, 1.01])
def test_what_counts_as_the_same(off: float) -> None:
    """An entry may miss by half of the digits, of itself and of the largest one."""
    tau = math.sqrt(np.finfo(float).eps)

    def reference(x):
        return 3 * x

    def missed(x):
        out = reference(x)
        index = np.unravel_index(np.abs(out).argmin(), out.shape)
        out[index] += off * tau * (abs(out[index]) + np.abs(out).max())
        return out

    def inputs(rng, N):
        return rng.normal(size=(N, 2))

    if off < 1:
        checks.check_same(missed, reference, inputs=inputs)
    else:
        with pytest.raises(AssertionError, match="expected"):
            checks.check_same(missed, reference, inputs=inputs)


# --- The family --------------------------------------------------------------------------------


def test_what_a_bias_of_aft_full_asks_for() -> None:
    """Without structure in b, the past of a later position is another sum for each of them."""
    k, v, b = normal(6, 1), normal(6, 1, seed=1), normal(6, 6, seed=2)
    full = ln.aft_full(np.full((6, 1), 50.0), k, v, b, causal=True)  # its gate is open
    for t in range(3, 6):
        past = sum(math.exp(b[t, i]) * np.exp(k[i]) * v[i] for i in range(3))
        rest = sum(math.exp(b[t, i]) * np.exp(k[i]) * v[i] for i in range(3, t + 1))
        weights = sum(math.exp(b[t, i]) * np.exp(k[i]) for i in range(t + 1))
        same(full[t], (past + rest) / weights)


def test_rotations_count_the_distance() -> None:
    angle = 0.3
    R = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    q, k = normal(2), normal(2, seed=1)

    def turned(times: int) -> np.ndarray:
        return np.linalg.matrix_power(R, times)

    for t, j in ((5, 2), (9, 9), (7, 0)):
        same((turned(t) @ q) @ (turned(j) @ k), q @ np.linalg.inv(turned(t - j)) @ k)


def test_a_chunk_of_retention_is_unrolled() -> None:
    q, k, v, S = normal(4, 3), normal(4, 3, seed=1), normal(4, 2, seed=2), normal(3, 2, seed=3)
    gamma, L = 0.7, 4
    out, after = ln.retention(q, k, v, gamma, initial_state=S, return_state=True)
    for r in range(1, L + 1):
        inside = sum(gamma ** (r - s) * (q[r - 1] @ k[s - 1]) * v[s - 1] for s in range(1, r + 1))
        same(out[r - 1], gamma**r * q[r - 1] @ S + inside)
    written = sum(gamma ** (L - s) * np.outer(k[s - 1], v[s - 1]) for s in range(1, L + 1))
    same(after, gamma**L * S + written)


def test_a_step_of_a_continuous_system() -> None:
    """With a constant input, many small steps come to the step of the discretization."""
    A, B, x, delta, h = -0.7, 1.3, 0.9, 0.5, 0.4
    expected = math.exp(delta * A) * h + (math.exp(delta * A) - 1) / A * B * x
    steps = 200_000
    for _ in range(steps):
        h += delta / steps * (A * h + B * x)
    same(h, expected, 1e-5)


def test_the_error_written_is_a_transition() -> None:
    q, k, v = normal(5, 3), unit(normal(5, 3, seed=1)), normal(5, 2, seed=2)
    beta = np.random.default_rng(3).uniform(size=5)
    S = np.zeros((3, 2))
    for t in range(5):
        before = S
        transition = np.eye(3) - beta[t] * np.outer(k[t], k[t])
        S = transition @ S + beta[t] * np.outer(k[t], v[t])
        same(S, before + np.outer(k[t], beta[t] * (v[t] - before.T @ k[t])))
    same(S, ln.delta_rule(q, k, v, beta, return_state=True)[1])


def test_what_the_delta_rule_keeps_of_an_old_value() -> None:
    D, n, m = 8, 64, 12
    k, v = unit(normal(600, n, D)), normal(600, n, 2, seed=1)
    _, S = ln.delta_rule(k, k, v, np.ones((600, n)), return_state=True)
    key, value = k[:, n - 1 - m], v[:, n - 1 - m]
    error = np.einsum("bd,bdm->bm", key, S) - value
    assert abs(np.mean(error**2) / np.mean(v**2) / (2 - 2 * (1 - 1 / D) ** m) - 1) < 0.08


def test_on_the_axes_a_gate_is_the_delta_rule() -> None:
    k, q, v = np.eye(4)[[1, 3, 1, 0, 3]], normal(5, 4), normal(5, 2, seed=1)
    same(np.eye(4) - np.outer(k[0], k[0]), np.diag([1, 0, 1, 1]))
    with np.errstate(divide="ignore"):
        gated = ln.gated_linear_attention(q, k, v, np.log(1 - k**2))
    same(gated, ln.delta_rule(q, k, v, np.ones(5)))
    # On other keys it is not.
    k = unit(normal(5, 4, seed=2))
    gated = ln.gated_linear_attention(q, k, v, np.log(1 - k**2))
    assert np.abs(gated - ln.delta_rule(q, k, v, np.ones(5))).max() > 0.1


def test_errors_of_a_chunk_solve_a_system() -> None:
    k, v, S = unit(normal(5, 3)), normal(5, 2, seed=1), normal(3, 2, seed=2)
    beta = np.random.default_rng(3).uniform(size=5)
    u, memory = [], S
    for t in range(5):
        same(memory, S + sum((np.outer(k[j], u[j]) for j in range(t)), np.zeros((3, 2))))
        u.append(beta[t] * (v[t] - memory.T @ k[t]))
        memory = memory + np.outer(k[t], u[t])
    A = np.tril(beta[:, None] * (k @ k.T), -1)
    same((np.eye(5) + A) @ np.array(u), beta[:, None] * (v - k @ S))


# --- What it can do ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["linear", "gated", "delta"])
def test_the_rank_of_what_crosses_a_cut(rule: str) -> None:
    """Weights of earlier tokens for later ones, as what outputs answer to unit values."""
    N, C = 10, 3
    q, k, v = normal(N, C), unit(normal(N, C, seed=1)), np.eye(N)
    if rule == "linear":
        A = ln.linear_attention(q, k, v, feature_map=ln.identity, normalize=False, causal=True)
    elif rule == "gated":
        A = ln.gated_linear_attention(q, k, v, -np.abs(normal(N, C, seed=2)))
    else:
        A = ln.delta_rule(q, k, v, np.full(N, 0.8))
    assert np.linalg.matrix_rank(A[5:, :5]) == C
    assert np.linalg.matrix_rank(A) == N


def test_no_memory_is_closer_than_its_rank() -> None:
    n, C = 12, 5
    for seed in range(20):
        A = normal(n, C, seed=seed) @ normal(C, n, seed=100 + seed)
        assert np.sum((A - np.eye(n)) ** 2) / n >= 1 - C / n
    projection = np.diag([1.0] * C + [0.0] * (n - C))
    same(np.sum((projection - np.eye(n)) ** 2) / n, 1 - C / n)


def test_a_needle_among_whispers() -> None:
    D, M, N, strength = 16, 400, 200, 0.3
    k, v = unit(normal(60, N, D)), normal(60, N, M, seed=1)
    write = np.where(np.arange(N) == 0, 1.0, strength)[:, None]
    S = np.swapaxes(k, 1, 2) @ (write * v)
    read = np.einsum("bd,bdm->bm", k[:, 0], S)
    cosine = np.sum(unit(read) * unit(v[:, 0]), axis=-1)
    law = 1 / math.sqrt(1 + strength**2 * (N - 1) / D)
    assert abs(np.mean(cosine) / law - 1) < 0.05


def test_one_step_of_learning_from_examples() -> None:
    D, i, trials = 6, 9, 100_000
    w, x, new = normal(trials, D), normal(trials, i, D, seed=1), normal(trials, D, seed=2)
    y = np.einsum("bd,bid->bi", w, x)
    learned = np.einsum("bi,bid->bd", y, x) / (i + D + 1)
    error = np.einsum("bd,bd->b", new, learned - w)
    assert abs(np.mean(error**2) / D / ((D + 1) / (i + D + 1)) - 1) < 0.03
    # The step is that of gradient descent on the squared error, from zero.
    u = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    loss = (torch.from_numpy(y[0]) - torch.from_numpy(x[0]) @ u).square().sum() / 2
    loss.backward()
    same(-u.grad.numpy() / (i + D + 1), learned[0])
    # And its answer is the read of a memory that the examples have written.
    answer = ln.linear_attention(
        new[:1], x[0], y[0, :, None], feature_map=ln.identity, normalize=False
    )
    same(answer[0, 0] / (i + D + 1), new[0] @ learned[0])


def test_logarithms_of_a_difference_of_sigmoids() -> None:
    def sigma(x):
        return 1 / (1 + np.exp(-x))

    a, b = np.sort(normal(2, 50), axis=0)
    parts = np.log(sigma(b)) + np.log(sigma(-a)) + np.log1p(-np.exp(a - b))
    same(np.log(sigma(b) - sigma(a)), parts, 1e-8)


@pytest.mark.parametrize(("N", "F", "H"), [(784, 256, 8), (3072, 256, 8), (3072, 512, 4)])
def test_how_much_faster_an_rnn_draws(N: int, F: int, H: int) -> None:
    rnn = costs.recurrent_generation_operations(N, F, 16, heads=H).total
    again = costs.recomputed_generation_operations(N, F, 16).total
    cached = costs.cached_generation_operations(N, F, 16).total
    share = 1 + 1 / (6 * H)
    assert abs(again / rnn / (N / 2 * (1 + N / (9 * F)) / share) - 1) < 0.05
    assert abs(cached / rnn / ((1 + N / (12 * F)) / share) - 1) < 0.05


def test_the_share_of_a_needle() -> None:
    """A plain state: 1 / (1 + t / D); a block of log-linear attention: its length for t."""
    rng, D = np.random.default_rng(0), 16
    for t in (7, 31):  # all levels are there, and the oldest block has (t + 1) / 2 tokens
        k = rng.normal(size=(20_000, t + 1, D))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        power = np.einsum("nd,nid->ni", k[:, 0], k) ** 2  # the needle is token 0
        assert power[:, 0] == pytest.approx(1)
        assert power.sum(axis=1).mean() == pytest.approx(1 + t / D, rel=0.01)
        block = power[:, : (t + 1) // 2].sum(axis=1).mean()
        assert block == pytest.approx(1 + ((t + 1) // 2 - 1) / D, rel=0.01)


def test_a_model_of_two_kinds_of_layers() -> None:
    layers, softmax, F, H, N = 8, 1, 64, 4, 1000
    caches = softmax * costs.kv_cache_entries(N, F, F)
    states = (layers - softmax) * H * costs.state_entries(F // H, F // H)
    assert caches + states == softmax * 2 * F * N + (layers - softmax) * F**2 // H
