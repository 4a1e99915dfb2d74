"""Mistakes in the exercises of the chapter on PyTorch."""

from __future__ import annotations

import pytest
import torch

from lesson_code.checks import check_exercise

CROSSING = "Where the lines cross on your device"
DOUBLING = "Why time doubles when N doubles"
FLOOR = "The floor"
PADDING = "Batches of unequal length"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("times", [40, 80], "in proportion to N", DOUBLING),
        ("times", [160, 320], "with the square of N", DOUBLING),
        ("times", [40, 40], "for twice the tokens", DOUBLING),
        ("times", (80, 160), "exchanged", DOUBLING),
        ("meet", 1333, "on ordinary axes", CROSSING),
        ("meet", 2500, "half way", CROSSING),
        ("meet", 500, "the wrong sign", CROSSING),
        ("reads", [10, 20], "The padding has no weight here", PADDING),
        ("reads", [40, 80], "not divided", PADDING),
        ("reads", [3.33, 6.67], "the same weight", PADDING),
        ("should_read", [4, 8], "with the padding", PADDING),
        ("should_read", [40, 80], "not divided", PADDING),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-torch-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-torch-hand",
        times=[160, 80],
        meet=2000,
        reads=[4, 8],
        should_read=torch.tensor([10, 20]),
    )


# --- Prompts, one text after the other ---------------------------------------------------------


def phi(x):
    return torch.nn.functional.elu(x) + 1


def prompt(written, answered, before_map=False):
    """written(t, n) and answered(t, n): whether position t of a text of n tokens is."""

    def fn(q, k, v, lengths):
        B, N, D = k.shape
        out = torch.zeros_like(v)
        S, z = k.new_zeros(B, D, v.shape[-1]), k.new_zeros(B, D)
        for b in range(B):
            n = int(lengths[b])
            for t in range(N):
                kept = written(t, n)
                f, value = phi(k[b, t]), v[b, t]
                if before_map:
                    f, value, kept = phi(k[b, t] * kept), value * kept, True
                if kept:
                    S[b] = S[b] + torch.outer(f, value)
                    z[b] = z[b] + f
                if answered(t, n):
                    out[b, t] = phi(q[b, t]) @ S[b] / (phi(q[b, t]) @ z[b])
        return out, S, z

    return fn


def real(t, n):
    return t < n


def always(t, n):
    return True


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (prompt(always, real), "written to S and z"),
        (prompt(always, always), "The lengths are not used"),
        (prompt(real, real, before_map=True), "before the feature map"),
        (prompt(lambda t, n: t <= n, lambda t, n: t <= n), "one token too many"),
        (prompt(lambda t, n: t < n - 1, lambda t, n: t < n - 1), "lacks its last token"),
        (lambda q, k, v, n: prompt(real, real)(q, k, v, n)[0], "The state is not returned"),
        (
            lambda q, k, v, n: prompt(real, real)(q, k, v, k.shape[1] - n),
            "lengths of the paddings",
        ),
    ],
)
def test_prefill(refused, fn, words) -> None:
    refused("ex-torch-prefill", words, PADDING, prefill=fn)


def test_outputs_in_the_padding(refused) -> None:
    def fn(q, k, v, lengths):
        seen = torch.arange(k.shape[1]) < lengths[:, None]
        features = torch.where(seen[..., None], phi(k), torch.zeros_like(k))
        weights = torch.tril(phi(q) @ features.mT)
        out = torch.nan_to_num(weights @ v / weights.sum(dim=-1, keepdim=True))
        return out, features.mT @ v, features.sum(dim=1)

    refused("ex-torch-prefill", "The outputs in the padding", PADDING, prefill=fn)


def in_matrices(lower=True, divided=True, keys=True):
    def fn(q, k, v, lengths):
        seen = (torch.arange(k.shape[1]) < lengths[:, None])[..., None]
        f, v = phi(k) * seen if keys else phi(k), v * seen
        weights = phi(q) @ f.mT
        weights = torch.tril(weights) if lower else weights
        out = weights @ v
        out = out / weights.sum(dim=-1, keepdim=True) if divided else out
        return torch.where(seen, out, 0), f.mT @ v, f.sum(dim=1)

    return fn


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (in_matrices(keys=False), "its features are not"),
        (in_matrices(divided=False), "not divided by the normalizer"),
        (in_matrices(lower=False), "not causal"),
    ],
)
def test_prefill_in_matrices(refused, fn, words) -> None:
    refused("ex-torch-prefill", words, PADDING, prefill=fn)


def test_right_prefill() -> None:
    check_exercise("ex-torch-prefill", in_matrices())
    check_exercise("ex-torch-prefill", prompt(real, real))


# --- The others --------------------------------------------------------------------------------


def test_the_mask_in_the_wrong_place(refused) -> None:
    label = "ex-torch-mask"
    refused(label, "from the Taylor map", PADDING, passes=[True, False, True])
    refused(label, "below it", PADDING, passes=(True, True, True))
    refused(label, "the other way round", PADDING, passes=[False, True, False])
    refused(label, "the other way round", PADDING, passes=[False, True, True])
    refused(label, "elu + 1 of a zero key", PADDING, passes=[True, True, False])
    refused(label, "tested this with relu", PADDING, passes=[False, False, False])
    check_exercise(label, passes=torch.tensor([True, False, False]))


def test_floors(refused) -> None:
    label = "ex-torch-device"
    refused(label, "skips half of its work", FLOOR, floors=[97, 129, 193])
    refused(label, "L stays at 64", FLOOR, floors=[130, 258, 514])
    refused(label, "inside the chunks are missing", FLOOR, floors=[66, 130, 258])
    refused(label, "without a mask", FLOOR, floors=[33, 65, 129])
    refused(label, "one more column", FLOOR, floors=[192, 256, 384])
    check_exercise(label, [194, 258, 386])
