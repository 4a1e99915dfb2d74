"""Mistakes in the exercises of the chapter on the bracket trick."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

PRODUCT = "A similarity that is a product"
SOFTMAX = "Why softmax holds on to its matrix"
LINEAR = "Linear attention"
OPERATIONS = "Counting operations"
CROSSING = "Where the lines cross"
MEMORY = "Counting memory"
LIMITS = "Where the trick does not help"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("similarities", [8, 7, 10], "under elu + 1", PRODUCT),
        ("similarities", [1.41, 0.707, 2.12], "no scale", PRODUCT),
        ("output_4", [200, 260], "not divided", LINEAR),
        ("output_4", [66.7, 86.7], "the number of tokens", LINEAR),
        ("output_4", [50, 65], "sum of z", LINEAR),
        ("output_4", [38.45, 48.45], "weights of softmax", LINEAR),
        ("with_scores", 6, "Only one of the two", OPERATIONS),
        ("with_scores", 36, "all three queries", OPERATIONS),
        ("with_scores", 24, "is one operation", OPERATIONS),
        ("with_state", 4, "the query and z is missing", OPERATIONS),
        ("with_state", 24, "The writes are counted", OPERATIONS),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-bracket-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-bracket-hand",
        similarities=[2, 1, 3],
        output_4=[33.3, 43.3],
        with_scores=12,
        with_state=6,
    )


# --- Linear attention --------------------------------------------------------------------------


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def attention(q, k, v, divisor="...nc,...lc->...n", map_q=phi, map_k=phi):
    """The state as a sum over tokens, and a divisor of q and k as an einsum."""
    q, k = map_q(q), map_k(k)
    S = sum(k[..., j, :, None] * v[..., j, None, :] for j in range(k.shape[-2]))
    out = np.einsum("...nc,...cm->...nm", q, S)
    return out / np.einsum(divisor, q, k)[..., None] if divisor else out


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def same(x):
    return x


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"divisor": None}, "The normalizer is missing", LINEAR),
        ({"map_q": same, "map_k": same}, "The feature map is missing", PRODUCT),
        ({"map_q": same}, "not to the queries", PRODUCT),
        ({"map_k": same}, "not to the keys", PRODUCT),
        ({"map_q": elu, "map_k": elu}, "elu without the 1", PRODUCT),
    ],
)
def test_attention(refused, options, words, section) -> None:
    refused(
        "ex-bracket-code",
        words,
        section,
        my_attention=lambda q, k, v: attention(q, k, v, **options),
    )


def divided(by):
    def fn(q, k, v):
        return attention(q, k, v, divisor=None) / by(phi(q), phi(k))

    return fn


def softmax(q, k, v):
    e = np.exp(np.einsum("...nd,...ld->...nl", q, k) / np.sqrt(q.shape[-1]))
    return e / e.sum(axis=-1)[..., None] @ v


def causal(q, k, v):
    k, out = phi(k), []
    S, z = np.cumsum(k[..., None] * v[..., None, :], axis=-3), np.cumsum(k, axis=-2)
    for t in range(k.shape[-2]):
        x = phi(q[..., t, :])[..., None]
        out.append(
            (x * S[..., t, :, :]).sum(axis=-2) / (x[..., 0] * z[..., t, :]).sum(-1)[..., None]
        )
    return np.stack(out, axis=-2)


def mean_rows(q, k, v):
    k = phi(k)
    S = np.stack([np.einsum("...n,...nm->...m", x, v) for x in np.moveaxis(k, -1, 0)], axis=-2)
    return phi(q) @ (S / np.einsum("...nc->...c", k)[..., None])


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (divided(lambda q, k: np.einsum("...nc->...n", k)[..., None]), "each key", LINEAR),
        (divided(lambda q, k: np.einsum("...nc->...", k)[..., None, None]), "sum of z", LINEAR),
        (divided(lambda q, k: np.einsum("...nc->...n", q)[..., None]), "query's features", LINEAR),
        (divided(lambda q, k: len(np.moveaxis(k, -2, 0))), "by the number of tokens", LINEAR),
        (mean_rows, "before the query is there", LINEAR),
        (softmax, "softmax attention", SOFTMAX),
        (causal, "This one is causal", LIMITS),
    ],
)
def test_normalizers(refused, fn, words, section) -> None:
    refused("ex-bracket-code", words, section, my_attention=fn)


def test_a_row_for_a_column(refused) -> None:
    def fn(q, k, v):
        q, k = phi(q), phi(k)
        return np.matmul(q, k.swapaxes(-1, -2) @ v) / np.einsum("...nc,...lc->...n", q, k)

    refused("ex-bracket-code", "a row where a column", LINEAR, my_attention=fn)


def test_right_attention() -> None:
    check_exercise("ex-bracket-code", my_attention=attention)


def test_the_matrix_is_not_formed(refused) -> None:
    def fn(q, k, v):
        weights = np.einsum("...nc,...lc->...nl", phi(q), phi(k))
        return weights @ v / weights.sum(axis=-1)[..., None]

    refused("ex-bracket-code", "N²", MEMORY, my_attention=fn)


def test_operations(refused) -> None:
    label = "ex-bracket-code"
    wrong = {
        "the quadratic order": lambda N, C, M: N**2 * C + N**2 * M,
        "the linear order": lambda N, C, M: N * C * M + N * M * C,
        "two indices that run over tokens": lambda N, C, M: C * M * N,
        "is one operation": lambda N, C, M: N * M * N * C * 2,
    }
    for words, fn in wrong.items():
        refused(label, words, OPERATIONS, einsum_operations=fn)

    def counted(N, C, M):
        return sum(C * M for _ in range(N) for _ in range(N))

    check_exercise(label, einsum_operations=counted)


# --- The others --------------------------------------------------------------------------------


def test_two_normalizers(refused) -> None:
    label = "ex-bracket-normalizer"
    right, first = [[30, 40], [40, 50], [35, 45]], [[60, 80], [80, 100], [70, 90]]
    second = [[30, 40], [40, 50], [70, 90]]
    refused(label, "does not sum over the keys", LINEAR, first_output=right)
    refused(label, "what the second function", LINEAR, first_output=second)
    refused(label, "Divide the rows of S first", LINEAR, second_output=right)
    refused(label, "what the first function", LINEAR, second_output=first)
    check_exercise(label, first_output=first, second_output=second)
    q, k, v = (phi(np.array(x, dtype=float)) for x in ([[1, 0], [0, 1], [1, 1]],) * 3)
    v = np.array([[10, 20], [30, 40], [50, 60]])
    state = k.T @ v
    as_given = q @ state / k.sum(axis=1, keepdims=True)
    refused(label, "elu + 1 is still applied", LINEAR, first_output=as_given)
    as_given = q @ (state / k.sum(axis=0)[:, None])
    refused(label, "elu + 1 is still applied", LINEAR, second_output=as_given)


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("narrow_gain", 129, "At this N", CROSSING),
        ("narrow_gain", 259, "two products with N²", OPERATIONS),
        ("narrow_gain", 65, "written and read", OPERATIONS),
        ("taylor_gain", 8450, "At this N", CROSSING),
        ("taylor_gain", 8386, "The normalizer is missing", OPERATIONS),
        ("taylor_gain", 16643, "counted twice", CROSSING),
        ("narrow_cache", 128, "keys and values", MEMORY),
        ("narrow_cache", 65, "z is counted", MEMORY),
        ("taylor_cache", 4192, "a little less room", MEMORY),
        ("taylor_cache", 8451, "where the operations cross", MEMORY),
    ],
)
def test_gains(refused, part, answer, words, section) -> None:
    refused("ex-bracket-gain", words, section, **{part: answer})


def test_right_gains() -> None:
    check_exercise(
        "ex-bracket-gain", narrow_gain=130, taylor_gain=8451, narrow_cache=64, taylor_cache=4193
    )
