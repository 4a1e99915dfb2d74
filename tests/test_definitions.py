"""Every form of an operator is its definition, in NumPy and in torch.

Lengths, widths, leading dimensions, chunks and precision are drawn, and with them the values that
forms treat alike only with care: gates that are closed or open, steps of zero, keys of length 1.
"""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lesson_code.numpy as ln
import lesson_code.torch as lt
from lesson_code.torch.engines import selective
from tests.arrays import TOLERANCE, assert_close, in_dtype, kept, name_of, numbers
from tests.operators import (
    CONTRACTS,
    NAMES,
    SIZES,
    draw,
    draw_state,
    leaves,
    options_of,
    pieces_of,
    special,
)
from tests.oracles import ORACLES

# What may be left out, and is zero then.
OPTIONAL = {"selective_scan": "D", "token_shift": "last", "channel_mix": "last", "time_mix": "last"}


# Options that are part of what is computed, not of how.
MEANT = {"window", "batch_size", "normalize"}


def sums_of(state):
    """The numbers that a state stands for: those of WKV are kept with a common factor."""
    if isinstance(state, (ln.WKVState, lt.WKVState)):
        scale = np.exp(numbers(state.maximum))
        return [numbers(state.numerator) * scale, numbers(state.denominator) * scale]
    if isinstance(state, (ln.Mamba3State, lt.Mamba3State)):
        angle = numbers(state.angle)
        return [*map(numbers, state[:3]), np.cos(angle), np.sin(angle)]
    if isinstance(state, (ln.LogLinearState, lt.LogLinearState)):
        return [numbers(state.S), np.full(state.S.shape[:-3], numbers(state.position))]
    if isinstance(state, (ln.TTTState, lt.TTTState)):
        return [*map(numbers, state[:4]), np.full(state.b.shape[:-1], numbers(state.position))]
    return [numbers(x) for x in (state if isinstance(state, tuple) else [state])]


@contextlib.contextmanager
def pieces(size):
    """Torch's scan and its AFT go through their work in pieces: here in small ones."""
    with (
        mock.patch.multiple(selective, SEGMENT=60 * size, FEWEST=size),
        mock.patch.object(sys.modules["lesson_code.torch.aft"], "TILE", 10 * size),
    ):
        yield


LIBRARIES = {"numpy": ln, "torch": lt}
DTYPES = {
    "numpy": ["float64", "float32", "float16", "float64"],
    "torch": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=20, deadline=None)
@given(
    N=st.integers(0, 16),
    size=st.integers(1, 18),
    leading=st.sampled_from([(), (2,), (3, 2), (2, 1, 3), (0,)]),
    with_state=st.booleans(),
    dtype=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
@example(13, 5, (2, 3), True, 0, 0)
@example(14, 4, (2, 3), True, 0, 1)
@example(0, 4, (2, 3), True, 0, 2)
@example(1, 4, (), False, 1, 3)
@example(9, 18, (2, 1, 3), True, 3, 4)  # less than a chunk
@example(14, 1, (2,), False, 2, 2)  # rwkv7 leaves the range of float16
def test_every_form_is_the_definition(name, library, N, size, leading, with_state, dtype, seed):
    rng, contract, module = np.random.default_rng(seed), CONTRACTS[name], LIBRARIES[library]
    dtype, tolerance = DTYPES[library][dtype], None
    if name == "ttt_linear":  # to norm two channels that are nearly the same loses digits
        dtype, tolerance = DTYPES[library][0], 1e-7

    def part():
        """Some of the leading dimensions, which broadcast to all of them."""
        return tuple(1 if rng.random() < 0.3 else n for n in leading[rng.integers(3) :])

    sizes = {x: int(rng.integers(x != "M", 5)) for x in SIZES} | {"levels": SIZES["levels"]}
    arrays = draw(name, N, {x: part() for x in contract.axes}, seed, sizes=sizes)
    arrays = {x: in_dtype(y, dtype) for x, y in special(name, arrays, rng).items()}
    exact, given = {x: numbers(y) for x, y in arrays.items()}, {}
    if name in OPTIONAL and not with_state:
        width = arrays.pop(OPTIONAL[name]).shape[-1]
        exact[OPTIONAL[name]] = np.zeros(width)
    exact = list(exact.values())
    if contract.state is not None:
        given = {"return_state": True}
        state = draw_state(name, part() if with_state else (), seed, sizes=sizes)
        given_dtype = dtype if rng.random() < 0.3 else kept(dtype)
        parts = state if isinstance(state, tuple) else [state]
        parts = [x if isinstance(x, int) else in_dtype(x, given_dtype) for x in parts]
        state = getattr(module, type(state).__name__)(*parts) if len(parts) > 1 else parts[0]
        exact += [x * with_state for x in sums_of(state)]
        given |= {"initial_state": state} if with_state else {}
    for options in options_of(name):
        options = options | dict.fromkeys(pieces_of(name), size) | given
        asked = {x: y for x, y in options.items() if x in MEANT or (x == "causal" and y)}
        expected, *sums = ORACLES[name](*exact, **asked)
        with pieces(size), np.errstate(over="ignore"):  # see the last example
            found = getattr(module, name)(**arrays, **options)
        out, state = found if given else (found, ())
        assert_close(out, expected, dtype, tolerance)
        assert {name_of(x.dtype) for x in leaves(state) if not isinstance(x, int)} <= {
            name_of(kept(dtype))
        }
        for x, y in zip(sums_of(state) if given else [], sums, strict=True):
            assert_close(x, y, tolerance=tolerance or TOLERANCE[name_of(kept(dtype))])


def test_every_operator_has_a_definition():
    """Softmax and linear attention have theirs in their own tests, with scales and feature maps."""
    elsewhere = {name for name in NAMES if name.endswith("attention")} - set(ORACLES)
    assert set(NAMES) - set(ORACLES) == elsewhere | {"attention_weights"}
    assert {"gated_linear_attention", "kimi_delta_attention"}.isdisjoint(elsewhere)
