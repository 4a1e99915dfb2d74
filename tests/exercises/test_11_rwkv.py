"""Mistakes in the exercises of the chapter on AFT and RWKV-4."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lesson_code.checks import check_exercise

WEIGHTS = "Weights without queries"
BIAS = "A bias for each pair of tokens"
WKV = "WKV: the past fades"
RANGE = "Keeping the exponentials in range"


@pytest.mark.parametrize(
    ("part", "answer", "words"),
    [
        ("slipped", [10, 20, 36.67], "the right outputs"),
        ("slipped", [10, 23.33, 38.57], "a decay of ln 2"),
        ("slipped", [10, 26, 45.56], "faded twice"),
        ("bonus", 4, "That is the weight"),
        ("bonus", -1.386, "The sign is wrong"),
        ("bonus", 0, "gives the right outputs"),
        ("loaded", 2.386, "makes it worse"),
        ("loaded", 1, "outputs of that code are wrong"),
        ("loaded", -1.386, "has to be added to the bonus"),
    ],
)
def test_the_slip(refused, part, answer, words) -> None:
    message = refused("ex-rwkv-slip", words, WKV, **{part: answer})
    assert "44.2" not in message and "-0.38" not in message


def test_the_slip_by_hand(capsys) -> None:
    check_exercise("ex-rwkv-slip", slipped=(10, 26, 44.29), bonus=1.386, loaded=-0.386)
    assert "right" in capsys.readouterr().out


# --- A mean that is none -----------------------------------------------------------------------


def gate(q):
    return 1 / (1 + np.exp(-q))


def mean(
    q, k, v, *, inside=False, last=False, count=False, divided=True, logarithm=True, when="after"
):
    """Causal AFT-simple with two sums, a loop over tokens."""
    weight = np.exp(k) if logarithm else k
    above = below = np.zeros_like(k[..., 0, :])
    whole, out = weight.sum(axis=-2), np.zeros_like(v)
    for t in range(k.shape[-2]):
        w, v_t, g = weight[..., t, :], v[..., t, :], gate(q[..., t, :])
        below = below + w
        term = w * v_t * (g if when == "before" else 1)
        above = above + (term / below if inside else term)
        divisor = 1 if inside or not divided else whole if last else t + 1 if count else below
        factor = {"after": g, "open": q[..., t, :]}.get(when, 1)
        out[..., t, :] = above / divisor * factor
    return out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inside": True}, "divided inside the sum"),
        ({"last": True}, "later ones too"),
        ({"count": True}, "the number of tokens"),
        ({"logarithm": False}, "logarithm of a weight"),
        ({"divided": False}, "is not divided"),
        ({"when": "open"}, "The gate is its sigmoid"),
        ({"when": "before"}, "gate of its own token"),
        ({"when": "never"}, "The gate is missing"),
    ],
)
def test_a_mean_that_is_none(refused, options, words) -> None:
    refused("ex-rwkv-inside", words, WEIGHTS, mended=lambda q, k, v: mean(q, k, v, **options))


def test_all_tokens_in_the_mean(refused) -> None:
    def fn(q, k, v):
        return gate(q) * np.average(v, axis=-2, weights=np.exp(k))[..., None, :]

    refused("ex-rwkv-inside", "run over all tokens", WEIGHTS, mended=fn)


def test_channels_in_the_mean(refused) -> None:
    def fn(q, k, v):
        out = np.zeros_like(v)
        for d in range(v.shape[-1]):
            w = np.exp(k[..., : d + 1])
            out[..., d] = gate(q[..., d]) * (w * v[..., : d + 1]).sum(-1) / w.sum(-1)
        return out

    refused("ex-rwkv-inside", "run over the channels", WEIGHTS, mended=fn)


def test_right_mean(refused) -> None:
    refused("ex-rwkv-inside", "contain a later key", WEIGHTS, found_by="check_causal")
    check_exercise("ex-rwkv-inside", mended=mean, found_by="check_same")


# --- One maximum -------------------------------------------------------------------------------


def safe(k, v, w, u, *, store=0.0, read=0.0, fade=1.0, rescale=True, keep=True):
    """With the one maximum; each option is a slip."""
    N, D = k.shape
    out = np.zeros((N, D))
    for d in range(D):
        a, b, mu = 0.0, 0.0, -1e38
        for t in range(N):
            m = max(mu, u[d] + k[t, d])
            past = math.exp(mu - m - read * w[d])
            own = math.exp(u[d] + k[t, d] - m)
            out[t, d] = (past * a + own * v[t, d]) / (past * b + own)
            past = math.exp((mu - m) * rescale - fade * w[d])
            own = math.exp(k[t, d] + store * u[d] - m)
            a, b = past * a + own * v[t, d], past * b + own
            mu = m if keep else mu
    return out


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"store": 1.0}, "The bonus has no effect", WKV),
        ({"read": 1.0}, "The sums are read decayed", WKV),
        ({"fade": 0.0}, "Nothing fades", WKV),
        ({"fade": -1.0}, "the wrong sign", WKV),
        ({"rescale": False}, "divided by the old one still", RANGE),
        ({"keep": False}, "not kept for the next token", RANGE),
    ],
)
def test_one_maximum(refused, options, words, section) -> None:
    refused("ex-rwkv-maximum", words, section, one_maximum=lambda *args: safe(*args, **options))


def test_right_maximum(refused) -> None:
    refused("ex-rwkv-maximum", "by the same number", RANGE, wrong=True)
    refused("ex-rwkv-maximum", "very first token", RANGE, harm=False)
    check_exercise("ex-rwkv-maximum", one_maximum=safe, wrong=False, harm=True)


# --- Two decays --------------------------------------------------------------------------------


def two(q, k, v, weight=lambda n: math.exp(-0.05 * n) + math.exp(-n), own=1.0, gated=True):
    """The double sum."""
    out = []
    for t in range(len(q)):
        w = [weight(t - 1 - i) * math.exp(k[i, 0]) for i in range(t)] + [own * math.exp(k[t, 0])]
        found = sum(w_i * v_i for w_i, v_i in zip(w, v[: t + 1, 0], strict=True)) / sum(w)
        out.append([found * (gate(q[t, 0]) if gated else 1)])
    return np.array(out)


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"weight": lambda n: math.exp(-0.05 * (n + 1)) + math.exp(-n - 1)}, "once more", WKV),
        ({"weight": lambda n: math.exp(-1.05 * n)}, "faded by both", BIAS),
        ({"weight": lambda n: math.exp(-0.525 * n)}, "with the mean of the decays", BIAS),
        (
            {"weight": lambda n: (math.exp(-0.05 * n) + math.exp(-n)) / 2},
            "the current token counts twice",
            BIAS,
        ),
        ({"own": 2.0}, "the current token counts twice", BIAS),
        (
            {"weight": lambda n: math.exp(-0.05 * (n + 1)) + math.exp(-n - 1), "own": 2.0},
            "Read first, then write",
            WKV,
        ),
        ({"gated": False}, "The gate is missing", WEIGHTS),
    ],
)
def test_two_decays(refused, options, words, section) -> None:
    refused("ex-rwkv-rank", words, section, two_decays=lambda *args: two(*args, **options))


def test_mean_of_two_means(refused) -> None:
    def fn(q, k, v):
        fast, slow = (two(q, k, v, weight=lambda n, w=w: math.exp(-w * n)) for w in (1, 0.05))
        return (fast + slow) / 2

    refused("ex-rwkv-rank", "mean of two means", BIAS, two_decays=fn)


def test_ranks(refused) -> None:
    refused("ex-rwkv-rank", "with one decay", BIAS, rank=1)
    refused("ex-rwkv-rank", "a number of t times a number of i", BIAS, rank=3)
    refused("ex-rwkv-rank", "a numerator and a denominator", BIAS, carried=2)
    check_exercise("ex-rwkv-rank", rank=2, carried=4, two_decays=two)
