"""Mistakes in the exercises of the chapter on the layer."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

torch = pytest.importorskip("torch")

EQUATIONS = "The layer, one equation at a time"
MODULE = "The module has the same four lines"
WIDTHS = "Widths have to fit"
ORDERS = "One set of weights, two orders"
NORM = "Heads, a norm, a projection"
LEAK = "A norm that looks ahead"


@pytest.mark.parametrize(
    ("part", "answer", "words"),
    [
        ("S_4", [[90, 80], [150, 100]], "transposed"),
        ("S_4", [[40, 80], [0, 0]], "what token 4 alone writes"),
        ("S_4", [[90, 200], [70, 100]], "W_V stands at its right"),
        ("S_4", [[54, 80], [70, 100]], "It has to write its value"),
        ("S_4", [[90, 120], [110, 140]], "single number"),
        ("z_4", [2, 2], "Token 4 is missing"),
        ("z_4", [2, 0], "token 4 alone"),
        ("z_4", np.array([100.0, 160.0]), "not the values"),
        ("o_4", torch.tensor([180.0, 320.0]), "not divided"),
        ("o_4", [25, 40], "before token 4"),
        ("o_4", [45, 80], "number of tokens"),
        ("o_4", [22.5, 17.5], "wrong side"),
        ("o_4", [30, 53.3], "sum of z"),
        ("o_4", [45, 160], "a single number"),
        ("y_4", [52.5, 70], "The residual is missing"),
        ("y_4", [54.5, 70], "added after f"),
        ("y_4", [31, 31], "maximum with 0"),
        ("y_4", [0, 15.5], "the hidden layer"),
        ("y_4", [24.5, 40], "still to be applied"),
    ],
)
def test_by_hand(refused, part, answer, words) -> None:
    refused("ex-layer-hand", words, EQUATIONS, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-layer-hand",
        S_4=torch.tensor([[90.0, 160.0], [70.0, 100.0]]),
        z_4=[4, 2],
        o_4=(22.5, 40.0),
        y_4=[46.5, 62],
    )


# --- The layer ---------------------------------------------------------------------------------


def phi(x):
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def blocks(x, h):
    return x[:, 4 * h : 4 * h + 4]


class Layer:
    """Head by head and token by token, with one place for each mistake."""

    def __init__(self, **mistakes):
        self.mistakes = mistakes

    def __call__(self, layer, x, *, initial_state=None, return_state=False):
        option = self.mistakes.get
        weights = [m.weight for m in (layer.query, layer.key, layer.value)]
        q, k, v = (x @ (w if option("untransposed") else w.T) for w in weights)
        map_, take = option("map", phi), option("take", blocks)
        S, z = initial_state or (x.new_zeros(len(x), 2, 4, 4), x.new_zeros(len(x), 2, 4))
        outputs = []
        for t in range(x.shape[1]):
            S, z, reads = S.clone(), z.clone(), []
            for h in range(2):
                query, key = map_(take(q[:, t], h)), map_(take(k[:, t], h))
                S[:, h] += key[:, :, None] * take(v[:, t], h)[:, None, :]
                z[:, h] += key
                read = (query[:, :, None] * S[:, h]).sum(dim=1)
                if not option("plain"):
                    read = read / (query * z[:, h]).sum(dim=1)[:, None]
                reads.append(read)
            outputs.append(option("end", self.end)(layer, torch.cat(reads, dim=1), x[:, t]))
        y = torch.stack(outputs, dim=1) if outputs else x
        return (y, (S, z)) if return_state else y

    @staticmethod
    def end(layer, o, x):
        u = layer.norm_1(x + o)
        return layer.norm_2(layer.feed_forward(u) + u)


def one_norm(layer, o, x):
    return layer.norm_2(o + x + layer.feed_forward(o + x))


def no_second_residual(layer, o, x):
    return layer.norm_2(layer.feed_forward(layer.norm_1(x + o)))


@pytest.mark.parametrize(
    ("mistakes", "words", "section"),
    [
        ({"untransposed": True}, "torch stores", MODULE),
        ({"map": lambda x: x}, "The feature map is missing", MODULE),
        ({"plain": True}, "not divided", EQUATIONS),
        ({"take": lambda x, h: x[:, h::2]}, "in turn", WIDTHS),
        ({"end": lambda layer, o, x: Layer.end(layer, o, 0 * x)}, "The residual", EQUATIONS),
        ({"end": one_norm}, "The first norm is missing", MODULE),
        ({"end": no_second_residual}, "The second residual is missing", MODULE),
    ],
)
def test_layer(refused, mistakes, words, section) -> None:
    refused("ex-layer-code", words, section, my_layer=Layer(**mistakes).__call__)


def test_heads_by_reshape(refused) -> None:
    def fn(layer, x, join=True):
        B, N, _ = x.shape
        q, k, v = (m(x).view(B, N, 2, 4).permute(0, 2, 1, 3) for m in maps(layer))
        A = torch.einsum("bhnc,bhlc->bhnl", phi(q), phi(k)) * torch.ones(N, N).tril()
        o = (A / A.sum(dim=-1)[..., None]) @ v
        o = o.permute(0, 2, 1, 3).reshape(B, N, 8) if join else o.reshape(B, N, 8)
        return Layer.end(layer, o, x)

    def maps(layer):
        return layer.query, layer.key, layer.value

    def split(layer, x):
        B, N, _ = x.shape
        q, k, v = (m(x).contiguous().view(B, 2, N, 4) for m in maps(layer))
        A = torch.tril(phi(q) @ phi(k).mT)
        o = (A @ v / A.sum(dim=-1)[..., None]).transpose(1, 2).flatten(2)
        return Layer.end(layer, o, x)

    label = "ex-layer-code"
    refused(label, "Positions and heads are mixed up", WIDTHS, my_layer=split)
    refused(
        label, "not put side by side", WIDTHS, my_layer=lambda layer, x: fn(layer, x, join=False)
    )
    refused(label, "TypeError", ORDERS, my_layer=fn)  # right, but without a state


def test_right_layer() -> None:
    check_exercise("ex-layer-code", Layer().__call__)


def test_the_state_of_the_layer_is_used(refused) -> None:
    def fn(layer, x, *, initial_state=None, return_state=False):
        return Layer()(layer, x, return_state=return_state)

    refused("ex-layer-code", "is initial_state used?", ORDERS, my_layer=fn)


# --- The others --------------------------------------------------------------------------------


def test_decoders(refused) -> None:
    label = "ex-layer-mistakes"
    refused(label, "not in the future", LEAK, late_refused=3)
    refused(label, "the first token of a piece", ORDERS, late_refused=1)
    refused(label, "What is z after the cut", ORDERS, lost_refused=0)
    refused(label, "hands no state on", ORDERS, lost_refused=3)
    check_exercise(label, late_refused=2, lost_refused=1)


def norm(
    o, seen=lambda t, N: slice(0, t + 1), mean=None, root=torch.sqrt, outside=False, epsilon=1e-5
):
    """Position by position; ``mean`` is of the squares (B, t, F) that are seen."""
    mean = mean or (lambda x: x.mean(dim=(1, 2))[:, None])
    out = torch.empty_like(o)
    for t in range(o.shape[1]):
        square = mean(o[:, seen(t, o.shape[1])] ** 2)
        out[:, t] = o[:, t] / (root(square) + epsilon if outside else root(square + epsilon))
    return out


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"seen": lambda t, N: slice(0, N)}, "the later ones too", LEAK),
        ({"seen": lambda t, N: slice(t, t + 1)}, "the own position alone", LEAK),
        ({"mean": lambda x: x.sum(dim=(1, 2))[:, None] / 8}, "summed over positions", LEAK),
        ({"mean": lambda x: x.mean(dim=2).sum(dim=1)[:, None] / (x.shape[1] - 1)}, "one too", LEAK),
        ({"mean": lambda x: x.sum(dim=2).mean(dim=1)[:, None]}, "over the channels", NORM),
        ({"mean": lambda x: x.mean(dim=(0, 1, 2))}, "sequences of the batch", LEAK),
        ({"mean": lambda x: x.mean(dim=1)}, "Every channel has a mean of its own", NORM),
        ({"root": lambda x: x}, "The root is missing", NORM),
        ({"outside": True}, "after the root", NORM),
        ({"seen": lambda t, N: slice(t, t + 1), "epsilon": 0}, "the own position alone", LEAK),
    ],
)
def test_norm(refused, options, words, section) -> None:
    refused("ex-layer-past", words, section, past_norm=lambda o: norm(o, **options))


def streaming_norm(o, *, initial_state=None, return_state=False, restart=False):
    n, total = initial_state or (0, 0.0)
    n, outputs = 0 if restart else n, []
    for t in range(o.shape[1]):
        n, total = n + 1, total + (o[:, t] ** 2).sum(dim=-1, keepdim=True)
        outputs.append(o[:, t] / torch.sqrt(total / (8 * n) + 1e-5))
    out = torch.stack(outputs, dim=1) if outputs else o
    return (out, (n, total)) if return_state else out


def test_streaming_norm(refused) -> None:
    check_exercise("ex-layer-past", streaming_norm)

    def restarts(o, *, initial_state=None, return_state=False):
        return streaming_norm(
            o, initial_state=initial_state, return_state=return_state, restart=True
        )

    refused("ex-layer-past", "Split at", ORDERS, past_norm=restarts)
