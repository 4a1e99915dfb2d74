"""Mistakes in the exercises of the chapter on softmax attention."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from lesson_code.checks import check_exercise

HAND = "Three tokens by hand"
FORMULA = "The formula"
SCALE = "Why the scores are divided by √D"
LARGEST = "Why the largest score is subtracted"
MASK = "Looking back only: the causal mask"
TILES = "Never holding the matrix: tiles"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("scores_4", [1.414, 0, 1.414], "divided by √D already", HAND),
        ("scores_4", [7.39, 1, 7.39], "exponentials of the scores", HAND),
        ("weights_4", [0.5, 0, 0.5], "A score of 0 does not make a weight of 0", HAND),
        ("weights_4", [0.446, 0.108, 0.446], "the scale 1/√2", HAND),
        ("weights_4", [7.39, 1, 7.39], "do not sum to one", HAND),
        ("factor", 2, "difference of the scores", FORMULA),
        ("scaled_factor", 5.22, "The factor itself was divided", HAND),
        ("scaled_factor", 2.72, "divided by D", SCALE),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-softmax-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    e = math.exp(2)
    check_exercise(
        "ex-softmax-hand",
        scores_4=[2, 0, 2],
        weights_4=[e / (1 + 2 * e), 1 / (1 + 2 * e), 0.468],
        factor=7.39,
        scaled_factor=4.11,
    )


# --- Attention ---------------------------------------------------------------------------------


def loop(q, k, v, seen=lambda i, j: j <= i, scale=None, shift=max, hidden=None, divide=True):
    """Row by row and head by head, with Python's lists; ``hidden`` is a hidden key's score."""
    heads = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    out = np.zeros_like(heads[2])
    scale = math.sqrt(q.shape[-1]) if scale is None else scale(q, k)
    for b, (qs, ks, vs) in enumerate(zip(*heads, strict=True)):
        for i in range(len(qs)):
            js = [j for j in range(len(ks)) if seen(i, j) or hidden is not None]
            scores = [qs[i] @ ks[j] / scale if seen(i, j) else hidden for j in js]
            e = np.exp(np.array(scores) - shift(scores))
            total = e.sum() if divide else 1.0
            out[b, i] = sum(e[n] * vs[j] for n, j in enumerate(js)) / total
    return out.reshape(v.shape)


def test_right_attention() -> None:
    check_exercise("ex-softmax-code", loop)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"scale": lambda q, k: 1.0}, "The scale is missing", SCALE),
        ({"scale": lambda q, k: k.shape[-1]}, "divided by D", SCALE),
        ({"scale": lambda q, k: math.sqrt(q.shape[-2])}, "number of keys", SCALE),
        ({"seen": lambda i, j: True}, "There is no mask", MASK),
        ({"seen": lambda i, j: j >= i}, "The wrong half is masked", MASK),
        ({"seen": lambda i, j: j <= i + 1}, "one diagonal off", MASK),
        ({"seen": lambda i, j: j < i, "hidden": -math.inf}, "No token sees itself", MASK),
        ({"seen": lambda i, j: j < i, "hidden": -1e9}, "No token sees itself", MASK),
        ({"hidden": 0.0}, "The masked scores are 0", MASK),
        ({"divide": False}, "sum of the row is missing", FORMULA),
        ({"shift": lambda scores: 0.0}, "Their exponential is infinite", LARGEST),
    ],
)
def test_attention(refused, options, words, section) -> None:
    refused(
        "ex-softmax-code", words, section, my_attention=lambda q, k, v: loop(q, k, v, **options)
    )


def test_a_score_may_be_zero(refused) -> None:
    def by_value(q, k, v):
        s = np.einsum("...nd,...ld->...nl", q, k) / k.shape[-1] ** 0.5 * np.tri(q.shape[-2])
        s[s == 0] = -np.inf
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True) @ v

    refused("ex-softmax-code", "is 0 by itself", MASK, my_attention=by_value)


def weights(q, k, axis=-1):
    s = np.einsum("...nd,...ld->...nl", q, k) / k.shape[-1] ** 0.5
    s = s + np.log(np.tri(q.shape[-2]))
    e = np.exp(s - s.max(axis=axis)[..., None]) if axis == -1 else np.exp(s)
    return e / np.expand_dims(e.sum(axis=axis), axis)


def test_a_masked_score_must_be_below_all_others(refused) -> None:
    def filled(q, k, v, *, with_):
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, with_)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    refused("ex-softmax-code", "very large", MASK, my_attention=partial(filled, with_=-100.0))
    check_exercise("ex-softmax-code", partial(filled, with_=-1e9))


def test_keepdims(refused) -> None:
    def fn(q, k, v):
        s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + np.log(np.tri(k.shape[-2]))
        e = np.exp(s - np.max(s, axis=-1)[..., None])
        return (e / np.sum(e, axis=-1)) @ v

    refused("ex-softmax-code", "keepdims=True", FORMULA, my_attention=fn)
    refused("ex-softmax-mask", "keepdims=True", FORMULA, repair=lambda a: rows(a) / rows(a).sum(-1))


def test_axes(refused) -> None:
    label = "ex-softmax-code"
    check_exercise(label, lambda q, k, v: weights(q, k) @ v)

    def columns(q, k, v):  # large scores overflow, too
        return weights(q, k, axis=-2) @ v

    def rows_then_columns(q, k, v):
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(k.shape[-1]) + np.log(np.tri(k.shape[-2]))
        e = np.exp(s - np.amax(s, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-2, keepdims=True) @ v

    refused(label, "The columns sum to one", FORMULA, my_attention=columns)
    refused(label, "The columns sum to one", FORMULA, my_attention=rows_then_columns)
    refused(label, "exchanged", FORMULA, my_attention=lambda q, k, v: weights(k, q) @ v)


# --- The mask in the wrong place ---------------------------------------------------------------


def test_mask(refused) -> None:
    label = "ex-softmax-mask"
    refused(label, "if the mask came before", MASK, row_sums=[1, 1, 1])
    refused(label, "sums of the columns", FORMULA, row_sums=[0.848, 0.649, 0.503])
    refused(label, "whose keys are in it", MASK, causal=True)
    check_exercise(label, row_sums=[0.401, 0.599, 1], causal=np.bool_(False))


def rows(a, step=1, per=None):
    """Keep the entries up to the own one, or from it on, and divide by ``per`` of them."""
    N = a.shape[-1]
    kept = a * [[float(j <= i if step > 0 else j >= i) for j in range(N)] for i in range(N)]
    return kept / per(kept) if per else kept


def sums(a):
    return np.einsum("...nl->...n", a)[..., None]


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (lambda a: rows(a), "what the colleague has", MASK),
        (lambda a: rows(a, step=-1, per=sums), "The wrong half is kept", MASK),
        (
            lambda a: rows(a, per=lambda x: np.einsum("...nl->...l", x)[..., None, :]),
            "Each column",
            FORMULA,
        ),
        (
            lambda a: rows(np.exp(a), per=sums),
            "a second time",
            FORMULA,
        ),
    ],
)
def test_repair(refused, fn, words, section) -> None:
    refused("ex-softmax-mask", words, section, repair=fn)


def test_right_repair() -> None:
    check_exercise("ex-softmax-mask", repair=lambda a: rows(a, per=sums))


# --- Merging -----------------------------------------------------------------------------------


def merged(
    a, b, scale_total=True, scale_mixed=True, sign=1.0, smaller=False, only=None, one_key=False
):
    (mu, total, mixed), (mu_b, total_b, mixed_b) = a, b
    new = np.minimum(mu, mu_b) if smaller else np.maximum(mu, mu_b)
    x, y = (math.e ** (sign * np.array([mu, mu_b]) - sign * new)).tolist()
    if only is not None:
        x, y = (x, 1.0) if only == 0 else (1.0, y)
    if one_key:
        total_b = 1.0
    total = x * total + y * total_b if scale_total else total + total_b
    mixed = x * mixed + y * mixed_b if scale_mixed else mixed + mixed_b
    return new, total, mixed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale_total": False, "scale_mixed": False}, "scaled differently"),
        ({"scale_total": False}, "the sums ℓ are not"),
        ({"scale_mixed": False}, "the mixed values u are not"),
        ({"sign": -1.0}, "upside down"),
        ({"smaller": True}, "The smaller maximum"),
        ({"only": 0}, "Only one of the parts"),
        ({"only": 1}, "Only one of the parts"),
        ({"one_key": True}, "treated as one key"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_merge(refused, options, words) -> None:
    refused("ex-softmax-merge", words, TILES, merge=lambda a, b: merged(a, b, **options))


def test_right_merge(refused) -> None:
    check_exercise("ex-softmax-merge", merge=merged, order_matters=False)
    refused("ex-softmax-merge", "Exchange a and b", TILES, order_matters=True)
