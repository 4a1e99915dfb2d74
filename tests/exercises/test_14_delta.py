"""Mistakes in the exercises of the chapter on the delta rule."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

TWICE = "The same key, written twice"
STEP = "One step of least squares"
TOKENS = "Three tokens by hand"
PARALLEL = "Linear in $S$, but not a sum"
SYSTEM = "A chunk is a triangular system"
GATED = "Forget first, then correct"
LAYER = "The layer"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("S_2", [22, 16], "added as they are", TWICE),
        ("S_2", [24, 14], "to both numbers alike", TOKENS),
        ("S_2", [8.4, 11.2], "what token 2 writes", TWICE),
        ("S_2", [1.6, -11.2], "sign of the error", TWICE),
        ("S_2", [16, 8], "does not find the whole value", TOKENS),
        ("S_3", [28.4, 11.2], "third value was added as it is", TWICE),
        ("S_3", [32, 16], "added as they are", TWICE),
        ("S_3", [18.4, 11.2], "third token does change something", TOKENS),
        ("S_3", [10, 2.8], "to both numbers alike", TOKENS),
        ("S_3", (10, 0), "memory after token 1", STEP),
        ("found", [10, 20], "values that were written", TOKENS),
        ("found", [18.4, 20], "after token 2", TOKENS),
        ("found", [10, 11.2], "memory itself", TWICE),
        ("both", [10, 25], "also finds a part", TOKENS),
        ("both", [10, 20], "These are the values", TOKENS),
        ("both", [18.4, 11.2], "only the second key", TOKENS),
        ("factor", 0.6, "factor of one write", TOKENS),
        ("factor", 0.3126, "what the first round does", TOKENS),
        ("factor", 0.64, "Which share of the distance stays", TOKENS),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-delta-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-delta-hand", S_2=(18.4, 11.2), S_3=[10, 11.2], found=[10, 14.96],
        both=[10, 17.5], factor=0.36,
    )  # fmt: skip


# --- The gated rule ----------------------------------------------------------------------------


def loop(step):
    """step(S, q, k, v, beta, alpha) -> S, output; arrays (..., D), (..., M) and (..., 1)."""

    def fn(q, k, v, beta, g, *, initial_state=None, return_state=False):
        S = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
        if initial_state is not None:
            S = initial_state
        out = np.zeros_like(v)
        for t in range(k.shape[-2]):
            token = [x[..., t, :] for x in (q, k, v, beta, np.exp(g))]
            S, out[..., t, :] = step(S, *token)
        return (out, S) if return_state else out

    return fn


def read(S, q):
    return np.einsum("...d,...dm->...m", q, S)


def outer(k, u):
    return np.einsum("...d,...m->...dm", k, u)


def right(S, q, k, v, beta, a):
    erased = S - outer(beta * k, read(S, k))
    S = a[..., None] * erased + outer(beta * k, v)
    return S, read(S, q)


def error_too_early(S, q, k, v, beta, a):
    S = a[..., None] * S + outer(k, beta * (v - read(S, k)))
    return S, read(S, q)


def decays_the_write(S, q, k, v, beta, a):
    S = a[..., None] * (S + outer(k, beta * (v - read(S, k))))
    return S, read(S, q)


def no_gate(S, q, k, v, beta, a):
    S = S + outer(k, beta * (v - read(S, k)))
    return S, read(S, q)


def logarithm(S, q, k, v, beta, a):
    S = np.log(a)[..., None] * S
    S = S + outer(k, beta * (v - read(S, k)))
    return S, read(S, q)


def grows(S, q, k, v, beta, a):
    return right(S, q, k, v, beta, 1 / a)


def unit_keys(S, q, k, v, beta, a):
    return right(S, q, k / np.sqrt((k * k).sum(-1, keepdims=True)), v, beta, a)


def no_error(S, q, k, v, beta, a):
    S = a[..., None] * S + beta[..., None] * outer(k, v)
    return S, read(S, q)


def no_beta(S, q, k, v, beta, a):
    return right(S, q, k, v, np.ones_like(beta), a)


def asks_with_the_query(S, q, k, v, beta, a):
    S = a[..., None] * S
    S = S + outer(k, beta * (v - read(S, q)))
    return S, read(S, q)


def reads_first(S, q, k, v, beta, a):
    return right(S, q, k, v, beta, a)[0], read(S, q)


@pytest.mark.parametrize(
    ("step", "words", "section"),
    [
        (error_too_early, "before its decay", GATED),
        (decays_the_write, "decay comes last", GATED),
        (no_gate, "decay is missing", GATED),
        (logarithm, "g is the logarithm", GATED),
        (grows, "The memory grows", GATED),
        (unit_keys, "brought to length 1", LAYER),
        (no_error, "The value itself is written", TWICE),
        (no_beta, "step size is missing", TWICE),
        (asks_with_the_query, "asked with the query", TWICE),
        (reads_first, "read before the token is written", TWICE),
    ],
)
def test_the_gated_rule(refused, step, words, section) -> None:
    refused("ex-delta-code", words, section, my_delta=loop(step))


def test_right_as_a_transition() -> None:
    check_exercise("ex-delta-code", loop(right))


def test_the_state_is_handed_on(refused) -> None:
    def forgets(q, k, v, beta, g, *, initial_state=None, return_state=False):
        return loop(right)(q, k, v, beta, g, return_state=return_state)

    refused("ex-delta-code", "is initial_state used?", GATED, my_delta=forgets)


# --- The others --------------------------------------------------------------------------------


def test_which_checks_object(refused) -> None:
    label = "ex-delta-naive"
    refused(label, "know of the first", PARALLEL, same_objects=False)
    refused(label, "is not to look ahead", PARALLEL, causal_objects=True)
    refused(label, "where a chunk begins", PARALLEL, streaming_objects=False)
    check_exercise(label, same_objects=True, causal_objects=False, streaming_objects=True)


def choice(one, zero, value=0.0, start=1.0):
    """Step sizes for ones and zeros, the value, and the memory at the start."""

    def choose(bits):
        column = np.zeros((len(bits), 1))
        beta = np.array([one if bit else zero for bit in bits], dtype=float)
        return column + 1, column + value, beta, np.array([[start]])

    return choose


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (choice(1, 0), "0 has no sign to turn. Which step size"),
        (choice(0, 2), "turns at each zero"),
        (choice(2, 2), "turns at every bit"),
        (choice(2, 0, start=0.0), "begins with 0"),
        (choice(2, 0, start=-1.0), "All signs are turned"),
        (choice(2, 0, value=1.0), "nothing ever happens"),
        (choice(1, 0, value=-1.0), "turn the sign back"),
    ],
)
def test_parity(refused, choose, words) -> None:
    refused("ex-delta-parity", words, STEP, choose=choose)


def test_who_counts_needs_no_memory(refused) -> None:
    def counted(bits):
        values = [[(-1.0) ** sum(bits[: t + 1])] for t in range(len(bits))]
        return np.ones((len(bits), 1)), np.array(values), np.ones(len(bits)), np.ones((1, 1))

    label = "ex-delta-parity"
    refused(label, "v[1] is not made from bits[1] alone", STEP, choose=counted)
    refused(label, "must return four arrays", STEP, choose=lambda bits: counted(bits)[:3])


def test_another_way_to_parity(refused) -> None:
    def longer_keys(bits):
        """With keys of length 2 the same steps are four times as small."""
        keys, values, beta, start = choice(0.5, 0)(bits)
        return -2 * keys, values, beta, start

    check_exercise("ex-delta-parity", choose=longer_keys)
    check_exercise("ex-delta-parity", choose=lambda bits: choice(2, 0)(list(bits)))
    refused("ex-delta-parity", "More heads", LAYER, option="num_heads")
    with_value = "allow_negative_eigenvalues=True"
    refused("ex-delta-parity", "the name alone", LAYER, option=with_value)


def factors(A, signs, exponents):
    out = np.identity(len(A))
    for sign, exponent in zip(signs, exponents, strict=True):
        power = np.identity(len(A))
        for _ in range(exponent):
            power = power.dot(A)
        out = out.dot(np.identity(len(A)) + sign * power)
    return out


def powers(A):
    """1, 2, 4 and so on, below the number of rows."""
    found = [1]
    while 2 * found[-1] < len(A):
        found.append(2 * found[-1])
    return found


def test_doubling(refused) -> None:
    label = "ex-delta-series"
    check_exercise(label, lambda A: factors(A, [-1] + [1] * (len(powers(A)) - 1), powers(A)))
    wrong = {
        "the inverse of I − A": lambda A: factors(A, [1] * len(powers(A)), powers(A)),
        "All factors have a minus": lambda A: factors(A, [-1] * len(powers(A)), powers(A)),
        "The exponents run through all": lambda A: factors(
            A, [-1] + [1] * max(len(A) - 2, 0), range(1, max(len(A), 2))
        ),
        "the first factor alone": lambda A: factors(A, [-1], [1]),
        "entry by entry": lambda A: np.linalg.multi_dot(
            [np.identity(len(A))] * 2
            + [np.identity(len(A)) + (A**e if e > 1 else -A) for e in powers(A)]
        ),
        "The last factor is missing": lambda A: factors(
            A, ([-1] + [1] * (len(powers(A)) - 1))[: max(len(powers(A)) - 1, 1)],
            powers(A)[: max(len(powers(A)) - 1, 1)],
        ),
    }  # fmt: skip
    for words, fn in wrong.items():
        refused(label, words, SYSTEM, by_doubling=fn)
