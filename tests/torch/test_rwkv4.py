"""The sublayers of RWKV-4 in torch: against NumPy in float64, and under all that torch adds."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.torch import WKVState, channel_mix, time_mix, token_shift

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
}


def draw(seed=0, N=7, F=3, D=4, leading=((), ()), dtype=torch.float64):
    """x, last, and what time_mix and channel_mix take after x."""
    rng = np.random.default_rng(seed)
    x, last = rng.normal(size=(*leading[0], N, F)), rng.normal(size=(*leading[1], F))
    mixes = rng.uniform(-0.2, 1.2, size=(5, F))
    matrices = [rng.normal(size=s) for s in [(F, D)] * 3 + [(D, F)]]
    time = [*mixes[:3], *matrices, rng.uniform(0.1, 3, size=D), rng.normal(size=D)]
    hidden = 2 * D + 1
    matrices = [rng.normal(size=s) / F for s in ((F, hidden), (hidden, F), (F, F))]
    channel = [*mixes[3:], *matrices]
    x, last, *rest = (torch.from_numpy(a).to(dtype) for a in (x, last, *time, *channel))
    return x, last, rest[: len(time)], rest[len(time) :]


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def assert_close(found, expected, tolerance=1e-12, dtype=None):
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3, min_side=0),
    N=st.integers(0, 9),
    F=st.integers(1, 4),
    D=st.integers(1, 4),
    with_last=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 1), (3,)), ()), 7, 3, 4, True, torch.float64, 0)
@example(BroadcastableShapes(((), (3,)), ()), 0, 3, 4, True, torch.float64, 0)
def test_they_are_numpys(shapes, N, F, D, with_last, dtype, seed):
    x, last, time, channel = draw(seed, N, F, D, shapes.input_shapes, dtype)
    last, array = (last, arrays(last)[0]) if with_last else (None, None)
    tolerance = TOLERANCE[dtype]
    expected = reference.token_shift(*arrays(x, time[0]), array)
    assert_close(token_shift(x, time[0], last), expected, tolerance, dtype)
    expected = reference.channel_mix(*arrays(x, *channel), last=array)
    assert_close(channel_mix(x, *channel, last=last), expected, tolerance, dtype)
    expected, states = reference.time_mix(*arrays(x, *time), last=array, return_state=True)
    found, state = time_mix(x, *time, last=last, return_state=True)
    assert_close(found, expected, tolerance, dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(state, WKVState)
    for a, b in zip(state, states, strict=True):
        assert_close(a, b, max(TOLERANCE[kept], 1e-11), kept)


def test_token_shift_is_a_causal_depthwise_convolution_of_two_taps():
    x, last, (mix, *_), _ = draw(1, N=9, leading=((2,), (2,)))
    taps = torch.stack([1 - mix, mix], dim=-1)[:, None]  # (F, 1, 2): the last tap is x_t's
    with_last = torch.cat([last[:, None], x], dim=1).mT  # (B, F, 1 + N)
    expected = torch.nn.functional.conv1d(with_last, taps, groups=3).mT
    assert_close(token_shift(x, mix, last), expected)


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_split_carries_the_last_input_and_the_memory(cut):
    x, last, time, channel = draw(2, leading=((2,), (2,)))
    head, tail = x[:, :cut], x[:, cut:]
    between = x[:, cut - 1] if cut else last
    pieces = [channel_mix(head, *channel, last=last), channel_mix(tail, *channel, last=between)]
    assert_close(torch.cat(pieces, dim=1), channel_mix(x, *channel, last=last))
    first, state = time_mix(head, *time, last=last, return_state=True)
    second = time_mix(tail, *time, last=between, initial_state=state)
    assert_close(torch.cat([first, second], dim=1), time_mix(x, *time, last=last))
