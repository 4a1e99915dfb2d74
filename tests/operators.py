"""All operators of the package, with arguments drawn from what they declare.

A new operator stands here by itself: its contract says which arrays it takes, of which axes and
values. Only what a contract cannot say is written down: sizes of letters, values of a range, a
callable, steps of a harmless size, states that must be positive.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

import lesson_code.numpy as ln
import lesson_code.torch as lt
from lesson_code._arguments import letters_of
from lesson_code.numpy.linear import CAUSAL, GLOBAL
from tests.arrays import in_dtype

SIZES = {
    "D": 4,
    "M": 3,
    "J": 2,
    "E": 4,
    "K": 3,
    "P": 5,
    "F": 4,
    "C": 6,
    "H": 2,
    "R": 3,
    "Hq": 4,
    "Hkv": 2,
    "levels": 6,  # for 32 tokens
}


def size_of(letter: str, sizes: dict, N: int | None = None) -> int:
    """The size of an axis; "2R" is twice "R"."""
    if letter[0].isdigit():
        return int(letter[0]) * sizes[letter[1:]]
    return sizes[letter] if N is None else sizes.get(letter, N)


NAMES = sorted(name for name, f in vars(ln).items() if hasattr(f, "contract"))
CONTRACTS = {name: getattr(ln, name).contract for name in NAMES}
WITH_STATE = [name for name in NAMES if CONTRACTS[name].state is not None]

RANGES = {
    "at most 0": lambda x: -abs(x),
    "at least 0": abs,
    "negative": lambda x: -abs(x) - 0.1,
    "in (0, 1]": lambda x: 1 / (1 + x * x),
    "in [0, 1]": lambda x: 1 / (1 + x * x),
    "positive and finite": lambda x: abs(x) + 0.1,
}
OUT_OF_RANGE = {
    "at most 0": 0.5,
    "at least 0": -0.5,
    "negative": 0.0,
    "in (0, 1]": 1.5,
    "in [0, 1]": -0.5,
    "positive and finite": 0.0,
}


def similarity(q, k):
    return (q @ k.swapaxes(-1, -2)) ** 2


def options_of(name: str) -> list[dict]:
    """Every way to call an operator that the contract of all of them must hold for."""
    contract, extra = CONTRACTS[name], {}
    if name == "similarity_attention":
        extra = {"similarity": similarity}
    if name == "linear_attention":
        causal = [{"causal": True, "form": form} for form in (None, *CAUSAL)]
        return [*causal, *({"form": form} for form in GLOBAL), {"causal": True, "normalize": False}]
    if name == "sliding_window_attention":
        extra = {"window": 3}
    if name == "mesa":
        extra = {"iterations": 12}  # exact in as many as there are channels, but for rounding
    small = {x: 3 for x in pieces_of(name)}  # several chunks, and one that is not full
    forms = [{"form": form} for form in (None, *contract.forms)] if contract.forms else [{}]
    flags = [flag for flag in contract.flags if flag != "return_state"]
    chosen = itertools.product([False, True], repeat=len(flags))
    return [
        extra | small | form | dict(zip(flags, x, strict=True)) for x in chosen for form in forms
    ]


def pieces_of(name: str) -> list[str]:
    """The options that say how long the pieces are in which a text is worked through."""
    return [x for x in CONTRACTS[name].counts if x.endswith("_size")]


def is_causal(name: str, options: dict) -> bool:
    return options.get("causal", "causal" not in CONTRACTS[name].flags)


CALLS = [(name, options) for name in NAMES for options in options_of(name)]


def label(call) -> str:
    name, options = call
    shown = [str(x) for key, x in options.items() if key == "form"]
    return "-".join([name, *shown, *(key for key, x in options.items() if x is True)])


def draw(name: str, N: int = 7, leading=(), seed: int = 0, dtype="float64", sizes=SIZES) -> dict:
    """NumPy arguments of an operator; `leading` is for all arrays, or a dict by name."""
    rng = np.random.default_rng(seed)
    contract = CONTRACTS[name]
    arrays = {}
    for argument, axes in contract.axes.items():
        own = [size_of(letter, sizes, N) for letter in letters_of(axes.replace("...", ""))]
        before = leading.get(argument, ()) if isinstance(leading, dict) else leading
        x = rng.normal(size=own if axes.startswith("(") else (*before, *own))
        if argument in contract.ranges:
            x = RANGES[contract.ranges[argument]](x)
        if argument in ("beta", "eta", "share"):  # a bounded memory
            x = 0.3 / (1 + x * x)
        arrays[argument] = np.asarray(x, dtype)
    return arrays


def special(name, arrays, rng):
    """Values at the ends of their ranges."""
    for argument, kind in CONTRACTS[name].ranges.items():
        x = arrays[argument]
        if kind == "at most 0":
            x = x * rng.choice([0.3, 1, 30], size=x.shape)
            x = np.where(rng.random(x.shape) < 0.1, -np.inf, x)
            x = np.where(rng.random(x.shape) < 0.1, 0, x)
        elif kind == "at least 0":
            x = x * rng.choice([0, 1, 30], size=x.shape)
        elif kind == "in [0, 1]":
            x = np.where(rng.random(x.shape) < 0.2, rng.integers(2, size=x.shape), x)
        arrays[argument] = x
    if "beta" in arrays:
        arrays["beta"] = rng.uniform(0, 2, size=arrays["beta"].shape)
        arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    return arrays


def draw_all(name: str, N: int = 7, seed: int = 0, dtype="float64", leading=()) -> list:
    """Arguments in their order, with special values, and then an array of state."""
    arrays = special(name, draw(name, N, leading, seed), np.random.default_rng(seed + 1))
    state = [draw_state(name, seed=seed)] if name in WITH_STATE else []
    return [in_dtype(x, dtype) for x in (*arrays.values(), *state)]


def draw_state(name: str, leading=(), seed: int = 1, dtype="float64", sizes=SIZES):
    """A state of an operator that another piece of text could have left."""
    rng = np.random.default_rng(seed)
    state = CONTRACTS[name].state

    def part(axes):
        if axes == "count":
            return 5
        return rng.normal(
            size=(*leading, *(size_of(x, sizes) for x in letters(name, axes)))
        ).astype(dtype)

    if isinstance(state, str):
        return part(state)
    parts = type(state)(*map(part, state))
    if name == "linear_attention":  # of features, which are positive
        return parts._replace(z=abs(parts.z) + 1)
    if name == "mesa":  # a sum of squares
        return parts._replace(H=parts.H @ parts.H.swapaxes(-1, -2))
    if name in ("wkv", "time_mix"):
        parts = parts._replace(denominator=abs(parts.denominator) + 1)
    return parts


def letters(name, axes):
    """C of linear attention is D, as its default map keeps the width."""
    return ["D" if (name, x) == ("linear_attention", "C") else x for x in letters_of(axes)]


def to_torch(x):
    """Arrays as tensors, in any nesting of dicts, tuples and states."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x))
    if isinstance(x, dict):
        return {name: to_torch(value) for name, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return getattr(lt, type(x).__name__)(*map(to_torch, x))
    return x


def leaves(result) -> list:
    """The arrays of a result: outputs, and those of the state, without counts of tokens."""
    if isinstance(result, tuple):
        return [x for part in result for x in leaves(part)]
    return [] if isinstance(result, int) else [result]


def each(function, state):
    """A state of what a function makes of its arrays; counts of tokens stay."""
    if not isinstance(state, tuple):
        return function(state)
    return type(state)(*(x if isinstance(x, int) else function(x) for x in state))
