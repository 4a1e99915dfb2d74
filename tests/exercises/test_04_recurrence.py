"""Mistakes in the exercises of the chapter on the recurrent and the parallel form."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

GLOBAL = "The global bracket sees the future"
RECURRENCE = "From attention to a recurrence"
MASKED = "The masked form"
MEAN = "A running mean from a running sum"
UNROLLED = "And back: an RNN that unrolls to attention"
STEPS = "Linear steps make a linear step"
HINGE = "Train in parallel, run as a recurrence"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("row", [2, 1, 3], "not masked", MASKED),
        ("row", [2, 0, 0], "own token is masked", MASKED),
        ("row", [0.667, 0.333, 0], "normalized", MASKED),
        ("plain", [200, 260], "last state", GLOBAL),
        ("plain", [20, 40], "before token 2 is written", RECURRENCE),
        ("plain", [40, 100], "wrong side", RECURRENCE),
        ("normalized", [8.33, 13.33], "The divisor counts token 3", MEAN),
        ("normalized", [33.3, 43.3], "all three tokens", GLOBAL),
        ("normalized", [25, 40], "Divided by the number of tokens", MEAN),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-recurrence-hand", words, section, **{part: answer})


# --- The recurrent form ------------------------------------------------------------------------


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def loop(q, k, v, step, phi_q=phi, phi_k=phi):
    """step(S, z, q_t, k_t, v_t, t) -> S, z, output, with leading dimensions."""
    q, k = phi_q(q), phi_k(k)
    S = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    z = np.zeros((*k.shape[:-2], k.shape[-1]))
    out = np.zeros_like(v)
    for t in range(k.shape[-2]):
        S, z, out[..., t, :] = step(S, z, q[..., t, :], k[..., t, :], v[..., t, :], t)
    return out


def write(S, k, v):
    return S + np.einsum("...c,...m->...cm", k, v)


def read(S, q):
    return np.einsum("...c,...cm->...m", q, S)


def dot(q, z):
    return np.einsum("...c,...c->...", q, z)[..., None]


def right(S, z, q, k, v, t):
    S, z = write(S, k, v), z + k
    return S, z, read(S, q) / dot(q, z)


def reads_first(S, z, q, k, v, t):
    return write(S, k, v), z + k, read(S, q) / dot(q, z)


def half_late(S, z, q, k, v, t):
    z = z + k
    return write(S, k, v), z, read(S, q) / dot(q, z)


def no_normalizer(S, z, q, k, v, t):
    S = write(S, k, v)
    return S, z, read(S, q)


def forgetful_normalizer(S, z, q, k, v, t):
    S, z = write(S, k, v), k
    return S, z, read(S, q) / dot(q, z)


def counts(S, z, q, k, v, t):
    S = write(S, k, v)
    return S, z, read(S, q) / (t + 1)


def sums_z(S, z, q, k, v, t):
    S, z = write(S, k, v), z + k
    return S, z, read(S, q) / z.sum(axis=-1)[..., None]


def wrong_side(S, z, q, k, v, t):
    S, z = write(S, k, v), z + k
    return S, z, np.einsum("...cm,...m->...c", S, q) / dot(q, z)


@pytest.mark.parametrize(
    ("step", "words", "section"),
    [
        (reads_first, "The read comes before the write", RECURRENCE),
        (half_late, "S is read before the token is written", RECURRENCE),
        (no_normalizer, "The normalizer is missing", MEAN),
        (forgetful_normalizer, "The divisor has the own key alone", RECURRENCE),
        (counts, "divided by the number of tokens", MEAN),
        (sums_z, "The divisor is the sum of z", RECURRENCE),
        (wrong_side, "from the wrong side", RECURRENCE),
    ],
)
def test_the_recurrent_form(refused, step, words, section) -> None:
    def fn(q, k, v, *, initial_state=None, return_state=False):
        return loop(q, k, v, step)

    refused("ex-recurrence-code", words, section, my_attention=fn)


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        ((lambda x: x, phi), "not to the queries"),
        ((phi, lambda x: x), "not to the keys"),
        ((lambda x: x, lambda x: x), "The feature map is missing"),
    ],
)
def test_where_the_feature_map_goes(refused, maps, words) -> None:
    refused(
        "ex-recurrence-code",
        words,
        RECURRENCE,
        my_attention=lambda q, k, v: loop(q, k, v, right, *maps),
    )


def test_the_future(refused) -> None:
    def fn(q, k, v):
        weights = np.einsum("...nc,...lc->...nl", phi(q), phi(k))
        return weights @ v / weights.sum(axis=-1)[..., None]

    refused("ex-recurrence-code", "Every query reads the last state", GLOBAL, my_attention=fn)


def streaming(in_place=False, ignore=False, lose_z=False):
    def fn(q, k, v, *, initial_state=None, return_state=False):
        q, k = phi(q), phi(k)
        S = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
        z = np.zeros((*k.shape[:-2], k.shape[-1]))
        if initial_state is not None and not ignore:
            S, z = initial_state if not lose_z else (initial_state[0], z)
        out = np.zeros_like(v)
        for t in range(k.shape[-2]):
            if in_place:
                S += np.einsum("...c,...m->...cm", k[..., t, :], v[..., t, :])
                z += k[..., t, :]
            else:
                S, z = write(S, k[..., t, :], v[..., t, :]), z + k[..., t, :]
            out[..., t, :] = read(S, q[..., t, :]) / dot(q[..., t, :], z)
        return (out, (S, z)) if return_state else out

    return fn


def test_the_state_that_is_handed_on(refused) -> None:
    label = "ex-recurrence-code"
    check_exercise(label, streaming())
    refused(label, "changed in place the state", HINGE, my_attention=streaming(in_place=True))
    refused(label, "is initial_state used?", HINGE, my_attention=streaming(ignore=True))
    refused(label, "not the normalizer z", HINGE, my_attention=streaming(lose_z=True))


# --- The others --------------------------------------------------------------------------------


def test_one_position_off(refused) -> None:
    label = "ex-recurrence-shift"
    refused(label, "leaves its own token out", GLOBAL, first_refused=2)
    refused(label, "which tokens position 0 sees", MASKED, second_refused=1)
    check_exercise(label, first_refused=1, second_refused=2)


def matrix(entry):
    """The matrix of entry(a, t, j), by two loops."""

    def fn(a, N):
        return np.array([[float(entry(a, t, j)) for j in range(N)] for t in range(N)])

    return fn


@pytest.mark.parametrize(
    ("entry", "words", "section"),
    [
        (lambda a, t, j: a ** abs(t - j), "above the diagonal", MASKED),
        (lambda a, t, j: a ** (j - t) if j >= t else 0, "transpose", MASKED),
        (lambda a, t, j: a ** (t - j + 1) if j <= t else 0, "once too often", UNROLLED),
        (lambda a, t, j: a ** (t - j) if j < t else 0, "The diagonal is missing", UNROLLED),
        (lambda a, t, j: a**t if j <= t else 0, "t - j, not t", UNROLLED),
        (lambda a, t, j: a if j <= t else 0, "whatever the distance", UNROLLED),
        (lambda a, t, j: a ** max(t - j, 0), "the entries there are 1", MASKED),
        (lambda a, t, j: a ** (j - t) if j <= t else 0, "The sign of the exponent", UNROLLED),
    ],
)
def test_powers_of_a(refused, entry, words, section) -> None:
    refused("ex-recurrence-decay", words, section, decay_matrix=matrix(entry))


def test_right_powers() -> None:
    right = matrix(lambda a, t, j: a ** (t - j) if j <= t else 0)
    check_exercise("ex-recurrence-decay", right)


def test_another_arithmetic(refused) -> None:
    label = "ex-recurrence-max"

    def reverse(first, second):
        a, b = np.array(first), np.array(second)
        return (a + b)[0], max(b[1] + a[0], a[1])

    refused(label, "The order is reversed", STEPS, then_max=reverse)
    refused(
        label,
        "has something to pass through",
        STEPS,
        then_max=lambda p, r: (p[0] + r[0], r[1] if r[1] > p[1] else p[1]),
    )
    refused(
        label,
        "The b of the second step comes last",
        STEPS,
        then_max=lambda p, r: (p[0] + r[0], r[0] + (r[1] if r[1] > p[1] else p[1])),
    )
    refused(
        label,
        "rule for linear steps",
        STEPS,
        then_max=lambda p, r: (p[0] * r[0], r[0] * p[1] + r[1]),
    )
    check_exercise(label, lambda p, r: (p[0] + r[0], np.fmax(r[0] + p[1], r[1])))
