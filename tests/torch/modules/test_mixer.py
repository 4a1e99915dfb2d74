"""What holds for every module: a sequence in parallel is the sequence in steps, from any split.

A new module needs a line in `MODULES` of family.py and nothing else here.
"""

import copy
import functools
import inspect
import io
import pickle

import numpy as np
import pytest
import torch

from lesson_code.checks import check_causal, check_streaming
from lesson_code.torch.mamba3 import Mamba3State
from lesson_code.torch.modules import (
    AFTSimple,
    ForgettingAttention,
    LanguageModel,
    MesaLayer,
    Mixer,
    RWKV4ChannelMix,
    RWKV4TimeMix,
    RWKV7ChannelMix,
    RWKV7TimeMix,
    SlidingWindowAttention,
    SoftmaxAttention,
)
from lesson_code.torch.modules.in_place import OwnMemory, RoomyCache, own
from lesson_code.torch.ttt import TTTState
from tests.torch.modules.family import (
    HEADS,
    MODULES,
    WIDTH,
    assert_close,
    assert_same_state,
    draw,
    every_kind,
    every_module,
    in_steps,
    leaves,
    make,
    refuses,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MEMORIES = {"S", "z", "h", "numerator", "denominator", "maximum", "position", "H", "G", "fade"}


# Parallel = step by step.


@functools.cache  # two tests need the same steps
@torch.no_grad
def stepped(name, dtype):
    """Inputs for more than a chunk, and for longer than a cache's first room."""
    x = draw(make(name, dtype), 75)
    return x, *in_steps(make(name, dtype), x)


@every_module
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_forward_is_step_by_step(name, dtype):
    module = make(name, dtype)
    x, y_steps, state_steps = stepped(name, dtype)
    y, state = module(x, return_state=True)
    assert_close(y_steps, y, TOLERANCE[dtype])
    assert_same_state(state_steps, state, TOLERANCE[dtype])
    assert_close(module(x), y, 1e-15)


# No output depends on what is later, as the first piece has never seen it. What comes after a chunk
# is the same code in float32, so that few cuts show its rounding.
@every_module
@pytest.mark.parametrize(
    ("dtype", "N", "cuts"),
    [
        (torch.float64, 7, range(8)),
        (torch.float64, 130, (0, 1, 63, 64, 65, 129, 130)),
        (torch.float32, 130, (1, 65)),
    ],
)
def test_two_pieces_from_any_split(name, dtype, N, cuts):
    module = make(name, dtype)
    x = draw(module, N)
    y, state = module(x, return_state=True)
    for cut in cuts:
        first, between = module(x[:, :cut], return_state=True)
        second, after = module(x[:, cut:], state=between, return_state=True)
        assert_close(torch.cat([first, second], dim=1), y, TOLERANCE[dtype])
        assert_same_state(after, state, TOLERANCE[dtype])


@every_module
def test_sequences_and_steps_take_turns(name):
    module = make(name)
    x = draw(module, 20)
    first, state = module(x[:, :5], return_state=True)
    second, state = in_steps(module, x[:, 5:9], state)
    third, state = module(x[:, 9:], state=state, return_state=True)
    y, expected = module(x, return_state=True)
    assert_close(torch.cat([first, second, third], dim=1), y, 1e-10)
    assert_same_state(state, expected)


# One state of each kind: a cache, a tuple, one for each block. That no module looks ahead, or
# forgets what it has read, is shown by the two pieces above.
@pytest.mark.parametrize("name", ["softmax", "linear", "language model"])
def test_streaming_and_causality_as_the_exercises_check_them(name):
    module = make(name)

    def inputs(rng, N):
        return (draw(module, N, seed=int(rng.integers(2**31))),)

    def run(x, *, initial_state=None, return_state=False):
        return module(x, state=initial_state, return_state=return_state)

    with torch.no_grad():
        check_causal(run, inputs=inputs)
        check_streaming(run, inputs=inputs)


@every_module
def test_batch_elements_are_independent(name):
    module = make(name)
    x = draw(module, 9, B=3)
    y = module(x)
    for i in range(3):
        assert_close(module(x[i : i + 1]), y[i : i + 1], 1e-12)
    if x.is_floating_point():
        x[1, 4] = torch.nan
        found = module(x)
        assert_close(found[[0, 2]], y[[0, 2]], 1e-12)
        short = RWKV4ChannelMix | RWKV7ChannelMix | SlidingWindowAttention  # 2 tokens at least
        spoiled = np.s_[4:6] if isinstance(module, short) else np.s_[4:]
        assert found[1, spoiled].isnan().all()


@every_module
def test_lengths_and_batches_of_none_and_one(name):
    module = make(name)
    for B, N in ((0, 3), (2, 0), (0, 0), (1, 1)):
        x = draw(module, N, B)
        y, state = module(x, return_state=True)
        assert y.shape[:2] == (B, N) and y.isfinite().all()
        assert_same_state(module(x[:, :0], state=state, return_state=True)[1], state, 0)
    y_t, _ = module.step(x[:, 0], module.initial_state(1))
    assert_close(y_t, y[:, 0], 1e-12)
    _, state = module(draw(module, 0), return_state=True)
    assert_same_state(state, module.initial_state(2), 0)


# States.


@every_module
def test_a_given_state_stays_as_it_is(name):
    module = make(name)
    x = draw(module, 6)
    _, state = module(x[:, :3], return_state=True)
    before = pickle.loads(pickle.dumps(state))
    first = module.step(x[:, 3], state)
    piece = module(x[:, 3:], state=state, return_state=True)
    assert_same_state(state, before, 0)
    # And so a second continuation from it gives the same.
    assert_close(module.step(x[:, 3], state)[0], first[0], 0)
    assert_same_state(module(x[:, 3:], state=state, return_state=True)[1], piece[1], 0)


@every_module
def test_a_step_that_owns_its_state_gives_the_same(name):
    """What `generate` does."""
    module = make(name)
    x, expected, _ = stepped(name, torch.float64)
    with torch.no_grad():
        _, state = module(x[:, :2], return_state=True)
        if isinstance(module, LanguageModel):
            found, _ = in_steps(module, x[:, 2:], own(state))
        else:
            found, _ = in_steps(module, x[:, 2:], *own((state,)))
    assert_close(found, expected[:, 2:], 1e-12)


@pytest.mark.parametrize("name", ["linear", "layer", "linear, C is not D", "softmax"])
def test_what_is_owned_is_overwritten(name):
    module = make(name)
    x = draw(module, 4)
    with torch.no_grad():
        _, state = module(x[:, :2], return_state=True)
        (state,) = own((state,))
        if isinstance(state, RoomyCache):
            _, state = module.step(x[:, 2], state)  # which makes room
        _, after = module.step(x[:, 3], state)
    assert type(after) is type(state) and isinstance(state, OwnMemory | RoomyCache)
    for x, y in zip(leaves(state), leaves(after), strict=True):
        assert x.data_ptr() == y.data_ptr()


@every_module
def test_only_a_cache_grows(name):
    module, per_token = make(name), 0
    for m in module.modules():  # keys and values of two sequences, and what has faded
        per_token += 2 * 2 * WIDTH * isinstance(m, SoftmaxAttention | ForgettingAttention)
        per_token += 2 * HEADS * isinstance(m, ForgettingAttention)
    _, state = module(draw(module, 5), return_state=True)
    size = sum(x.numel() for x in leaves(state)) - 5 * per_token
    if not isinstance(module, SlidingWindowAttention):
        assert size == sum(x.numel() for x in leaves(module.initial_state(2)))
    for N in (5, 6, 7):
        assert sum(x.numel() for x in leaves(state)) == size + N * per_token
        _, state = module.step(draw(module, 1)[:, 0], state)


@every_module
def test_dtypes(name):
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.01)):
        module = make(name, dtype)
        x = draw(module, 9)
        y, state = module(x, return_state=True)
        y_steps, _ = in_steps(module, x)
        exact = copy.deepcopy(module).double()
        expected = exact(x.double() if x.is_floating_point() else x)
        assert y.dtype == y_steps.dtype == dtype
        assert_close(y.double(), expected, tolerance)
        assert_close(y_steps.double(), expected, tolerance)
        for a, b in zip(leaves(state), leaves(module.initial_state(2)), strict=True):
            assert a.dtype == b.dtype
        for field, x in getattr(state, "_asdict", dict)().items():
            memory = field in MEMORIES or isinstance(state, Mamba3State | TTTState)
            if x.is_floating_point():
                assert x.dtype == (torch.float32 if memory else dtype), field
    y, state = make(name)(draw(make(name), 3), return_state=True)
    assert {x.dtype for x in [y, *leaves(state)]} <= {torch.float64, torch.int64}


@every_module
def test_initial_state(name):
    module = make(name)
    for x in leaves(module.initial_state(4)):
        assert x.shape[0] == 4 and not x.requires_grad
        assert not x[x > -1e37].any()  # the maximum of nothing is -1e38 in WKV
    with refuses(ValueError, "batch_size must be at least 0, got -1."):
        module.initial_state(-1)
    with refuses(TypeError, "batch_size must be an integer, got 2.0."):
        module.initial_state(2.0)


# Gradients.


@every_module
def test_gradients_of_steps_are_those_of_forward(name):
    module = make(name)
    x = draw(module, 8)
    inputs = [x.requires_grad_()] if x.is_floating_point() else []
    wanted = [*module.parameters(), *inputs]
    expected = torch.autograd.grad(module(x).square().sum(), wanted)
    found = torch.autograd.grad(in_steps(module, x)[0].square().sum(), wanted)
    # Through the state, too: the two pieces are one sequence.
    first, state = module(x[:, :5], return_state=True)
    second = module(x[:, 5:], state=state)
    pieces = torch.autograd.grad(first.square().sum() + second.square().sum(), wanted)
    for a, b, c in zip(expected, found, pieces, strict=True):
        assert a.isfinite().all() and a.any()
        assert_close(b, a, 1e-10)
        assert_close(c, a, 1e-10)


# One set of weights, wherever it goes.


@every_module
def test_copies(name):
    module = make(name)
    x = draw(module, 5)
    y, state = module(x, return_state=True)
    fresh = MODULES[name]().double()
    fresh.load_state_dict(module.state_dict())
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    loaded = MODULES[name]().double()
    loaded.load_state_dict(torch.load(stored))
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh, loaded]
    for other in copies:
        assert_close(other(x), y, 0)
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    for other in (pickle.loads(pickle.dumps(state)), torch.load(stored)):
        assert_same_state(other, state, 0)


@every_module
def test_functional_call(name):
    modules = [make(name), MODULES[name]().double()]
    x = draw(modules[0], 5)
    parameters = [dict(module.named_parameters()) for module in modules]
    y = torch.func.functional_call(modules[0], parameters[1], (x,))
    assert_close(y, modules[1](x), 0)
    stacked = torch.func.stack_module_state(modules)
    both = torch.func.vmap(lambda p: torch.func.functional_call(modules[0], p, (x,)))(stacked[0])
    for module, found in zip(modules, both, strict=True):
        assert_close(found, module(x), 1e-12)


# One of each kind: the settings change no code, and the operators are tested on all lengths. What a
# whole is made of is compiled with it: AFT in a language model, RWKV-4 and RWKV-7 in their blocks.
WHOLES = {type(make()): name for name, make in reversed(MODULES.items())}
for part in (AFTSimple, RWKV4ChannelMix, RWKV4TimeMix, RWKV7ChannelMix, RWKV7TimeMix):
    del WHOLES[part]


@pytest.mark.parametrize("name", WHOLES.values())
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compile(name):
    torch.compiler.reset()
    module = make(name, torch.float32)
    if isinstance(module, MesaLayer):
        module.iterations = 2  # each is traced anew, and they are alike
    forward = torch.compile(module, fullgraph=True, backend="eager")  # traces, in seconds
    step = torch.compile(module.step, fullgraph=True, backend="eager")
    x = draw(module, 7)
    y, state = forward(x[:, :5], return_state=True)
    assert_close(y, module(x[:, :5]), 1e-5)
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    state = torch.utils._pytree.tree_map(torch.Tensor.detach, state)
    with torch.no_grad():
        for t in range(5, 7):
            expected, _ = module.step(x[:, t], state)
            y_t, state = step(x[:, t], state)
            assert_close(y_t, expected, 1e-5)


@every_module
def test_autocast(name):
    module = make(name, torch.float32)
    x = draw(module, 9)
    y, expected = module(x), in_steps(module, x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, state = module(x, return_state=True)
        found_steps, _ = in_steps(module, x)
        module.step(x[:, 0], state)
    assert_close(found.float(), y, 0.1)
    assert_close(found_steps.float(), expected, 0.1)


@every_module
def test_inputs_that_are_not_contiguous(name):
    module = make(name)
    x = draw(module, 6)
    y, state = module(x, return_state=True)
    strided = torch.stack([x, x], dim=2)[:, :, 1]
    assert not strided.is_contiguous()
    assert_close(module(strided), y, 1e-12)
    expanded = x[:1].expand(2, *x.shape[1:])
    assert_close(module(expanded), y[:1].expand(2, *y.shape[1:]), 1e-12)
    spread = torch.utils._pytree.tree_map(lambda a: torch.stack([a, a], -1)[..., 0], state)
    assert_close(module(x, state=spread), module(x, state=state), 1e-12)


# Errors.


@every_module
def test_arguments_are_refused(name):
    module = make(name)
    x, state = draw(module, 4), module.initial_state(2)
    sequence, one = ("tokens", "token") if isinstance(module, LanguageModel) else ("x", "x_t")
    kind = "dtype int64" if isinstance(module, LanguageModel) else "a floating dtype"
    for call, wrong, argument in (
        (module, x, sequence),
        (lambda x: module.step(x, state), x[:, 0], one),
    ):
        with refuses(TypeError, f"{argument} must be a torch tensor, got ndarray."):
            call(np.zeros(wrong.shape))
        with refuses(TypeError, f"{argument} must have {kind}"):
            call(wrong > 0)
        with refuses(ValueError, f"{argument} must have shape (B"):
            call(wrong[0])
        with refuses(ValueError, f"{argument} must have shape (B"):
            call(wrong[None])
    if x.is_floating_point():
        with refuses(ValueError, "x must have shape (B, N, 12), got (2, 4, 11)."):
            module(x[..., :-1])
        with refuses(ValueError, "x_t must have shape (B, 12), got (2, 11)."):
            module.step(x[:, 0, :-1], state)
        with refuses(TypeError, "x must have the dtype of the parameters, torch.float64, got"):
            module(x.float())
        with refuses(TypeError, "x_t must have the dtype of the parameters, torch.float64, got"):
            module.step(x[:, 0].float(), state)
    with refuses(TypeError, "return_state must be True or False, got 'no'."):
        module(x, return_state="no")
    with refuses(TypeError, "state must be "):
        module.step(x[:, 0], None)


@every_module
def test_states_are_refused(name):
    """Of another kind; and each tensor of another batch, another width, or with an axis more."""
    module = make(name)
    x = draw(module, 4)
    _, state = module(x, return_state=True)
    kind = "torch tensor" if isinstance(state, torch.Tensor) else type(state).__name__
    wrong = [3, {"S": 0}, [state], *([tuple(state)] if hasattr(state, "_fields") else [])]
    for call in (lambda s: module(x, state=s), lambda s: module.step(x[:, 0], s)):
        for other in wrong:
            with refuses(TypeError, f"state must be a {kind}, got {type(other).__name__}."):
                call(other)
        pieces, spec = torch.utils._pytree.tree_flatten(state)
        for i, piece in enumerate(pieces):
            for spoilt in (piece[:1], piece[..., None], piece[..., :-1]):
                changed = [*pieces[:i], spoilt, *pieces[i + 1 :]]
                with pytest.raises(ValueError, match="state"):
                    call(torch.utils._pytree.tree_unflatten(changed, spec))


@every_kind
def test_sizes_are_refused(kind):
    heads = {"num_heads": HEADS} if "num_heads" in inspect.signature(kind).parameters else {}
    with refuses(ValueError, "width must be at least 1, got 0."):
        kind(0, **heads)
    with refuses(TypeError, "width must be an integer, got 8.0."):
        kind(8.0, **heads)
    if heads:
        with refuses(ValueError, "width must be a multiple of num_heads, 3, got 8."):
            kind(8, num_heads=3)
        with refuses(ValueError, "num_heads must be at least 1, got 0."):
            kind(8, num_heads=0)
        with refuses(TypeError, "num_heads must be an integer, got True."):
            kind(8, num_heads=True)


# The base class by itself.


def test_a_mixer_of_ones_own_needs_one_method():
    class Mean(Mixer):
        def mix(self, x, state):
            count, total = state or (x.new_zeros(()), x.new_zeros(x.shape[0], self.width))
            totals = total[:, None] + x.cumsum(dim=1)
            counts = count + torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
            return totals / counts[:, None], (count + x.shape[1], total + x.sum(dim=1))

    module, x = Mean(3), torch.randn(2, 5, 3)
    y, state = module(x, return_state=True)
    y_t, _ = module.step(x[:, 0], state)
    assert_close(y_t, (x.sum(dim=1) + x[:, 0]) / 6, 1e-6)
    assert not module.is_block


def test_a_mixer_without_its_method():
    with refuses(NotImplementedError, "Mixer needs a method mix(x, state)."):
        Mixer(2)(torch.zeros(1, 1, 2))
