"""Exercises of the chapter on memory that learns."""

import numpy as np

from lesson_code.exercises import Exercise
from lesson_code.numpy import mesa
from lesson_code.numpy.mesa import conjugate_gradients

CHAPTER = "Memory that learns"
BASKETS = "Two baskets, three learners"
WHERE = "Where the gradient is taken"
TTT = "TTT-Linear"
MOMENTUM = "A step that goes on"
MESA = "No step at all"
CG = "Solving without the matrix"

# --- By hand: a third basket -------------------------------------------------------------------

HAND = Exercise("ex-learning-hand", CHAPTER)
KEYS, COSTS = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), np.array([10.0, 30.0, 26.0])


def solved(ridge=0.0, count=3):
    k, v = KEYS[:count], COSTS[:count]
    return np.linalg.solve(k.T @ k + ridge * np.eye(2), k.T @ v)


HAND.value("exact", solved(), MESA, "two numbers, the prices of an apple and a pear").mistakes(
    (KEYS.T @ COSTS, "That is G, the plain sum. H says how often each fruit was bought."),
    (solved(count=2), "Those are the prices of the first two baskets alone."),
    (np.array([10.0, 26.0]), "These prices miss the second basket by 6. No prices hit all three."),
)
HAND.value("delta", np.array([20.0, 26.0]), BASKETS, "two numbers").mistakes(
    (np.array([20.0, 10.0]), "Those are the prices before the third basket."),
    (np.array([20.0, 18.0]), "The third key has length 1, so β is 1, not 1/2."),
)
HAND.value("ridge", solved(1.0), MESA, "two numbers, with λ = 1 for both").mistakes(
    (solved(), "That is without the ridge, which adds 1 to both entries of the diagonal of H."),
    (solved() / 2, "A ridge does not scale all prices alike. It is added to H before H is solved."),
)

# --- By hand: momentum -------------------------------------------------------------------------

SWING = Exercise("ex-learning-momentum", CHAPTER)


def written(mu, beta=0.5, value=8.0, count=4):
    s, run, found = 0.0, 0.0, []
    for _ in range(count):
        run = mu * run + beta * (value - s)
        s += run
        found.append(s)
    return np.array(found)


SWING.value("momentum", written(0.5), MOMENTUM, "four numbers, S after each token").mistakes(
    (written(0.0), "That is the delta rule. With momentum, half of the last write comes again."),
    (
        np.array([4.0, 8.0, 12.0, 16.0]),
        "The error is taken anew at each token, from what the key finds by then.",
    ),
)
SWING.value("delta", written(0.0), BASKETS, "four numbers, S after each token").mistakes(
    (written(0.5), "That is with the momentum."),
    (np.array([4.0, 8.0, 8.0, 8.0]), "β is 1/2 each time: half of the error that is left."),
)
SWING.value("largest", 0.25, MOMENTUM, "a number, for μ = 1/4").mistakes(
    (0.5, "That is 1 − √μ. The condition is on the square of 1 + μ − β."),
    (
        0.75,
        "With β = 1 − μ all that is ever written of one error adds up to it. But errors of the "
        "tokens in between are written, too.",
    ),
    (2.25, "At that β the roots are real again, but negative: the error changes its sign."),
)

# --- Recursive least squares -------------------------------------------------------------------

RLS = Exercise("ex-learning-rls", CHAPTER)


def pairs(rng, N, *, D=5, M=3):
    q, k, v = (rng.standard_normal((N, width)) for width in (D, D, M))
    return q, k, v, rng.uniform(0.5, 2.0, D)


@RLS.function(MESA, inputs=pairs, unit="tokens")
def my_rls(q, k, v, ridge):
    ones = np.ones(len(k))
    return mesa(q, k, v, ones, 0 * ones, ridge)


def recursive(start=lambda ridge: 1 / ridge, gain=True, update=True, late=False):
    def wrong(q, k, v, ridge):
        R, S, out = np.diag(start(ridge)), np.zeros((k.shape[1], v.shape[1])), []
        for q_t, k_t, v_t in zip(q, k, v, strict=True):
            if late:
                out.append(S.T @ q_t)
            g = R @ k_t / (1 + k_t @ R @ k_t if gain else 1)
            if update:
                R = R - np.outer(g, R @ k_t)
            S = S + np.outer(g, v_t - S.T @ k_t)
            if not late:
                out.append(S.T @ q_t)
        return np.array(out)

    return wrong


my_rls.mistakes(
    (
        recursive(start=lambda ridge: ridge),
        "R begins as the ridge itself. It is the inverse, so it begins as 1 over the ridge.",
    ),
    (
        recursive(gain=False),
        "The step is R k with the R of before this key. Divide by 1 + kᵀ R k.",
    ),
    (recursive(update=False), "R stays as it began, so steps never get shorter."),
    (recursive(late=True), "A token reads before it has written. Here it reads afterwards."),
)

# --- The dual form -----------------------------------------------------------------------------

DUAL = Exercise("ex-learning-dual", CHAPTER)


def batch(rng, N, *, D=5, M=3):
    Q, K, V = (rng.standard_normal((N, width)) for width in (D, D, M))
    eta, gamma = rng.uniform(0, 1, (2, N, 1))
    return Q, K, V, eta, gamma, rng.standard_normal((D, M))


@DUAL.function(TTT, inputs=batch, unit="tokens")
def my_batch(Q, K, V, eta, gamma, S):
    E = eta * (V - K @ S)
    return Q @ S + gamma * (np.tril(Q @ K.T) @ E), S + gamma[-1] * (K.T @ E)


def dual(reads, kept):
    def wrong(Q, K, V, eta, gamma, S):
        A, E = np.tril(Q @ K.T), V - K @ S
        return Q @ S + reads(A, E, eta, gamma), S + kept(K, E, eta, gamma)

    return wrong


def right_end(K, E, eta, gamma):
    return gamma[-1] * (K.T @ (eta * E))


def right_reads(A, E, eta, gamma):
    return gamma * (A @ (eta * E))


my_batch.mistakes(
    (
        dual(lambda A, E, eta, gamma: gamma * ((eta * A) @ E), right_end),
        "The rate η scales rows of the triangle, so each token reads with its own rate. It belongs "
        "to the token that is written: scale the rows of E.",
    ),
    (
        dual(
            lambda A, E, eta, gamma: gamma * ((eta * A) @ E),
            lambda K, E, eta, gamma: gamma[-1] * eta[-1] * (K.T @ E),
        ),
        "η stands on the rows of the triangle, and the last one of them on the whole update. This "
        "is the mistake of the box: each token is written with its own rate.",
    ),
    (
        dual(lambda A, E, eta, gamma: A @ (gamma * eta * E), right_end),
        "The share γ scales rows of E. It belongs to the token that reads.",
    ),
    (
        dual(lambda A, E, eta, gamma: gamma * (np.tril(A, -1) @ (eta * E)), right_end),
        "A token reads what itself has written, too: the diagonal belongs to the triangle.",
    ),
    (
        dual(right_reads, lambda K, E, eta, gamma: K.T @ (eta * E)),
        "The outputs are right. The memory that is handed on is the one that the last token reads, "
        "with its share γ.",
    ),
)

# --- Conjugate gradients -----------------------------------------------------------------------

SAFE = Exercise("ex-learning-cg", CHAPTER)


def systems(rng, N, *, size=1.0):
    D = min(N, 12)
    A = rng.standard_normal((D, D))
    return A @ A.T / D + np.eye(D), size * rng.standard_normal(D)


def small(rng):
    return systems(rng, 8, size=1e-4)


def nothing(rng):
    return systems(rng, 6, size=0.0)


@SAFE.function(CG, inputs=systems, special=(small, nothing))
def my_solve(H, q):
    return conjugate_gradients(lambda p: p @ H, q[None], 30)[0]


def padded(epsilon, steps=30):
    def wrong(H, q):
        x, r, p = np.zeros_like(q), q, q
        for _ in range(steps):
            Hp = H @ p
            a = (r @ r) / (p @ Hp + epsilon)
            x, new = x + a * p, r - a * Hp
            r, p = new, new + (new @ new) / (r @ r + epsilon) * p
        return x

    return wrong


def stopped(limit):
    def wrong(H, q):
        x, r, p = np.zeros_like(q), q, q
        for _ in range(30):
            if r @ r < limit:
                break
            a = (r @ r) / (p @ (H @ p))
            x, new = x + a * p, r - a * (H @ p)
            r, p = new, new + (new @ new) / (r @ r) * p
        return x

    return wrong


my_solve.mistakes(
    (
        padded(1e-5),
        "1e-5 is added to denominators that are squares of what is left. They get as small as the "
        "squared error does, so steps become too short long before the system is solved.",
    ),
    (
        stopped(1e-5),
        "It stops where the square of the residual is below 1e-5. That is a small number for a "
        "large q, and for a q of 0.0001 it is larger than q itself.",
    ),
)
