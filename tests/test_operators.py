"""What holds for every operator, in NumPy and in torch: their contract.

The operators and their arguments come from `operators`, where a new one stands by itself.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import lesson_code.numpy as ln
import lesson_code.torch as lt
from tests.operators import (
    CALLS,
    CONTRACTS,
    NAMES,
    OUT_OF_RANGE,
    WITH_STATE,
    draw,
    draw_state,
    each,
    is_causal,
    label,
    leaves,
    options_of,
    to_torch,
)

BACKENDS = {"numpy": ln, "torch": lt}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_call = pytest.mark.parametrize("call", CALLS, ids=label)
every_operator = pytest.mark.parametrize("name", NAMES)
with_state = pytest.mark.parametrize("name", WITH_STATE)
CALLS_WITH_STATE = [(name, x) for name, x in CALLS if name in WITH_STATE and is_causal(name, x)]
every_call_with_state = pytest.mark.parametrize("call", CALLS_WITH_STATE, ids=label)


def run(backend, name, arrays, **options):
    """The result in NumPy, whichever backend computes it."""
    if backend == "numpy":
        return getattr(ln, name)(**arrays, **options)
    result = getattr(lt, name)(**to_torch(arrays), **to_torch(options))
    return tuple(map(numpy_of, result)) if type(result) is tuple else numpy_of(result)


def numpy_of(x):
    if isinstance(x, tuple):
        return each(numpy_of, x)
    return x.detach().float().numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()


def assert_close(found, expected, tolerance=1e-9):
    found, expected = leaves(found), leaves(expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert np.isfinite(y).all(), "the test compares nothing"
        scale = abs(y).max(initial=1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def assert_equal(found, expected):
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


# --- The same function -----------------------------------------------------------------------


@every_call
def test_torch_computes_what_numpy_does(call):
    name, options = call
    arrays = draw(name, leading=(2,))
    if name in WITH_STATE and is_causal(name, options):
        options = options | {"return_state": True, "initial_state": draw_state(name, (2,))}
    assert_close(run("torch", name, arrays, **options), run("numpy", name, arrays, **options))


@every_backend
@pytest.mark.parametrize("N", [1, 2, 6, 13])
@with_state
def test_all_forms_agree(name, N, backend):
    arrays, calls = draw(name, N), [x for x in options_of(name) if is_causal(name, x)]
    calls = [x for x in calls if x.get("normalize", True)]
    first, *others = [run(backend, name, arrays, **x, return_state=True) for x in calls]
    for other in others:
        assert_close(other, first)


@every_backend
@every_call_with_state
def test_split_anywhere(call, backend):
    """Any form continues from the state of any other."""
    name, options = call
    arrays = draw(name, 7, leading=(2,))
    options = options | {"initial_state": draw_state(name, (2,)), "return_state": True}
    whole, last = run(backend, name, arrays, **options)

    def piece(rows, **changes):
        cut = {argument: rows_of(name, argument, x, rows) for argument, x in arrays.items()}
        if name == "time_mix" and rows.start:
            cut["last"] = arrays["x"][..., rows.start - 1, :]
        return run(backend, name, cut, **options | changes)

    for t in (0, 1, 3, 7):
        out, state = piece(slice(0, t))
        for form in {x.get("form") for x in options_of(name) if is_causal(name, x)}:
            change = {"form": form} if "form" in options else {}
            rest, end = piece(slice(t, 7), initial_state=state, **change)
            assert_close((np.concatenate([out, rest], axis=-2), end), (whole, last))


def rows_of(name, argument, x, rows):
    """Some positions of an argument, if it has positions."""
    axes = CONTRACTS[name].axes[argument].replace("Nq", "N").split()
    if "N" not in axes:
        return x
    return x[(..., rows, *[slice(None)] * (len(axes) - 1 - axes.index("N")))]


# --- Arrays ----------------------------------------------------------------------------------


@every_backend
@every_call
def test_leading_dimensions_broadcast(call, backend):
    name, options = call
    contract = CONTRACTS[name]
    several = [argument for argument, axes in contract.axes.items() if not axes.startswith("(")]
    stateful = name in WITH_STATE and is_causal(name, options)
    if stateful:
        options = options | {"return_state": True}
    for one in several:
        leading = {argument: (3,) for argument in several} | {one: (2, 1)}
        arrays = draw(name, 5, leading)
        state = {"initial_state": draw_state(name, (3,))} if stateful else {}
        found = run(backend, name, arrays, **options, **state)
        full = {
            x: np.broadcast_to(y, (2, 3, *y.shape[len(leading[x]) :])) if x in several else y
            for x, y in arrays.items()
        }
        expected = run(backend, name, full, **options, **state)
        if stateful and one in contract.reads:  # what only reads is not remembered
            out, last = expected
            expected = out, each(lambda x: x[0], last)
        assert_close(found, expected)


def parts_of(state):
    return state if isinstance(state, tuple) else (state,)


def type_of(state):
    return type(state) if isinstance(state, tuple) else lambda x: x


@every_backend
@every_call
def test_strides_do_not_matter(call, backend):
    name, options = call
    arrays = draw(name, 5, leading=(2,))
    expected = run(backend, name, arrays, **options)
    views = {x: np.stack([y, y], axis=-1)[..., 0] for x, y in arrays.items()}
    assert not any(x.flags.c_contiguous for x in views.values() if x.size > 1)
    if backend == "torch":
        strided = {x: torch.from_numpy(y) for x, y in views.items()}
        assert_close(numpy_of(getattr(lt, name)(**strided, **options)), expected)
    else:
        assert_close(run(backend, name, views, **options), expected)


@every_backend
@every_call
def test_without_tokens(call, backend):
    name, options = call
    arrays = draw(name, 0, leading=(2,))
    if not (name in WITH_STATE and is_causal(name, options)):
        out = run(backend, name, arrays, **options)
        assert out.size == 0 and out.shape[:1] == (2,)
        return
    state = draw_state(name, (3, 1))
    out, last = run(backend, name, arrays, **options, initial_state=state, return_state=True)
    assert out.shape[:2] == (3, 2) and out.shape[-2] == 0
    for x, y in zip(leaves(last), leaves(state), strict=True):
        assert_equal(x, np.broadcast_to(y, x.shape))


@every_backend
@every_call
def test_inputs_stay_as_they_are(call, backend):
    name, options = call
    arrays = draw(name, 5)
    stateful = name in WITH_STATE and is_causal(name, options)
    given = {"initial_state": draw_state(name), "return_state": True} if stateful else {}
    library = BACKENDS[backend]
    arguments, given = (
        (arrays, given) if backend == "numpy" else (to_torch(arrays), to_torch(given))
    )
    every = (*arguments.values(), given.get("initial_state", ()))
    before = [np.array(numpy_of(x)) if backend == "torch" else x.copy() for x in leaves(every)]
    for x in leaves(getattr(library, name)(**arguments, **options, **given)):
        x[...] = 7  # a fresh array: neither an argument nor the state is seen through it
    for x, y in zip(leaves(every), before, strict=True):
        np.testing.assert_array_equal(numpy_of(x) if backend == "torch" else x, y)


# --- Precision -------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@every_call
def test_the_dtype_is_kept_and_sums_are_float32(call, dtype, backend):
    name, options = call
    arrays = draw(name, 5, dtype=dtype)
    wide = {x: y.astype("float32") for x, y in arrays.items()}
    if name in WITH_STATE and is_causal(name, options):
        options = options | {"return_state": True}
        out, state = run(backend, name, arrays, **options)
        expected, last = run(backend, name, wide, **options)
        assert all(x.dtype == "float32" for x in leaves(state))
        assert_close(state, last, 1e-6)
    else:
        out, expected = run(backend, name, arrays, **options), run(backend, name, wide, **options)
    assert_close(out, expected.astype(dtype), 2e-3 if dtype == "float16" else 1e-6)
    exact = run(backend, name, {x: y.astype("float64") for x, y in arrays.items()}, **options)
    exact = exact[0] if type(exact) is tuple else exact
    assert abs(expected - exact).max() <= 2e-5 * max(1, abs(exact).max())


@with_state
def test_bfloat16_and_autocast(name):
    arrays = to_torch(draw(name, 5, dtype="float32"))
    options = options_of(name)[0] | {"return_state": True}
    operator = getattr(lt, name)
    half = {x: y.bfloat16() for x, y in arrays.items()}
    out, state = operator(**half, **options)
    wide, last = operator(**{x: y.float() for x, y in half.items()}, **options)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_state = operator(**arrays, **options)
    plain, plain_state = operator(**arrays, **options)
    assert_equal(numpy_of(cast), numpy_of(plain))
    assert_equal(numpy_of(cast_state), numpy_of(plain_state))


@every_backend
@with_state
def test_a_state_has_the_dtype_of_the_input_or_of_the_sums(name, backend):
    arrays, options = draw(name, 3, dtype="float16"), options_of(name)[0]
    wide = draw_state(name, dtype="float32")
    for dtype in ("float32", "float16"):
        state = cast(wide, dtype)
        run(backend, name, arrays, **options, initial_state=state)
    with pytest.raises(TypeError, match="initial_state must have dtype float16 or float32"):
        run(backend, name, arrays, **options, initial_state=cast(wide, "float64"))


def cast(state, dtype):
    return each(lambda x: x.astype(dtype), state)


# --- Who sees what ---------------------------------------------------------------------------


CAUSAL_CALLS = [(name, x) for name, x in CALLS if is_causal(name, x)]


@every_backend
@pytest.mark.parametrize("call", CAUSAL_CALLS, ids=label)
def test_the_future_does_not_reach_the_past(call, backend):
    name, options = call
    arrays = draw(name, 7)
    out = run(backend, name, arrays, **options)
    for argument, axes in CONTRACTS[name].axes.items():
        if axes.startswith("N") and axes != "Nq N":
            changed = arrays[argument].copy()
            changed[4:] = draw(name, 7, seed=5)[argument][4:]
            now = run(backend, name, arrays | {argument: changed}, **options)
            past, future = np.s_[..., :4, :], np.s_[..., 4:, :]
            np.testing.assert_allclose(now[past], out[past], rtol=1e-9, atol=1e-12)
            assert not np.allclose(now[future], out[future])


@every_backend
@every_call
def test_nan_stays_in_its_sequence(call, backend):
    name, options = call
    arrays = draw(name, 5, leading=(3,))
    out = run(backend, name, arrays, **options)
    for argument, axes in CONTRACTS[name].axes.items():
        if axes.startswith("("):
            continue
        changed = arrays[argument].copy()
        (changed[1:2, 3] if axes.startswith("N") else changed[1:2]).flat[-1] = np.nan
        now = run(backend, name, arrays | {argument: changed}, **options)
        np.testing.assert_allclose(now[[0, 2]], out[[0, 2]], rtol=1e-12, atol=1e-15)
        assert np.isnan(now[1]).any()
        if options.get("form") == "recurrent" and axes.startswith("N"):
            np.testing.assert_allclose(now[1, :3], out[1, :3], rtol=1e-12, atol=1e-15)


# --- Refusals --------------------------------------------------------------------------------


def refused(backend, name, arrays, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        run(backend, name, arrays, **options)


@every_backend
@every_operator
def test_arrays_that_are_refused(name, backend):
    options, contract = options_of(name)[0], CONTRACTS[name]
    arrays = draw(name, 5, leading=(2,))
    kind = "NumPy array" if backend == "numpy" else "torch tensor"
    for i, (argument, axes) in enumerate(contract.axes.items()):
        x = arrays[argument]

        def refuse(wrong, error, words, argument=argument):
            refused(backend, name, arrays | {argument: wrong}, options, error, words)

        refuse(x.astype("int64"), TypeError, f"{argument} must have a floating dtype")
        if axes == "...":
            refuse("0.5", TypeError, f"{argument} must be a real number, got '0.5'")
            refuse(x.astype("float32"), TypeError, f"{argument} must have dtype float64")
            continue
        refuse(x.tolist(), TypeError, f"{argument} must be a {kind}, got list")
        if i:
            first = next(iter(contract.axes))
            refuse(x.astype("float32"), TypeError, f"{argument} must have the dtype of {first}")
        known = letters_before(contract, argument)
        for axis, letter in enumerate(reversed(axes.strip("()").split()), 1):
            if letter in known:
                wrong = np.concatenate([x, x], axis=-axis)
                refuse(wrong, ValueError, f"{argument} must have shape")
        if axes.startswith("("):
            refuse(x[None], ValueError, f"{argument} must have shape")
        elif sum(not a.startswith("(") for a in contract.axes.values()) > 1:
            wrong = np.stack([x[0]] * 3)
            refuse(wrong, ValueError, "the leading dimensions of")


def letters_before(contract, argument):
    """Letters whose sizes the arrays before an argument fix."""
    known = set()
    for name, axes in contract.axes.items():
        if name == argument:
            return known
        known |= set(axes.strip("()").split())
    return known


@every_backend
@every_operator
def test_values_that_are_refused(name, backend):
    for argument, kind in CONTRACTS[name].ranges.items():
        arrays = draw(name, 5)
        arrays[argument].flat[-1] = OUT_OF_RANGE[kind]
        words = f"{argument} must be {kind}, got {OUT_OF_RANGE[kind]}."
        refused(backend, name, arrays, options_of(name)[0], ValueError, words)
        if arrays[argument].size > 1:
            arrays[argument].flat[0] = np.nan  # which is right, and hides nothing
            refused(backend, name, arrays, options_of(name)[0], ValueError, words)


@every_backend
@every_operator
def test_options_that_are_refused(name, backend):
    contract, arrays, options = CONTRACTS[name], draw(name, 5), options_of(name)[0]
    for flag in contract.flags:
        for wrong in (1, "no", None):
            words = f"{flag} must be True or False, got {wrong!r}."
            refused(backend, name, arrays, options | {flag: wrong}, TypeError, words)
    for count in contract.counts:
        for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
            words = f"{count} must be "
            refused(backend, name, arrays, options | {count: wrong}, error, words)
    if "form" in contract.names:
        for wrong in ("fast", 1):
            words = "form must be None or one of '"
            refused(backend, name, arrays, options | {"form": wrong}, ValueError, words)


@every_backend
@pytest.mark.parametrize("name", ["linear_attention", "aft_simple", "aft_full"])
def test_causal_sums_have_a_query_for_each_key(name, backend):
    """Softmax attention takes fewer: its queries are the last ones."""
    arrays = draw(name, 5)
    arrays["q"] = arrays["q"][1:]
    if name == "aft_full":
        arrays["position_bias"] = arrays["position_bias"][1:]
    words = "q must have the length of k when causal=True, 5, got 4."
    refused(backend, name, arrays, {"causal": True}, ValueError, words)


@every_backend
@with_state
def test_states_that_are_refused(name, backend):
    arrays, options = draw(name, 5, leading=(2,)), options_of(name)[0]
    state = draw_state(name)

    def refuse(wrong, error, words):
        refused(backend, name, arrays, options | {"initial_state": wrong}, error, words)

    kind = type(state).__name__ if isinstance(state, tuple) else ""
    refuse([1.0], TypeError, f"initial_state must be a {kind}")
    refuse(cast(state, "int64"), TypeError, "initial_state must have a floating dtype")
    refuse(cast(state, "float32"), TypeError, "initial_state must have dtype float64")
    for i, part in enumerate(parts_of(state)):
        parts = list(parts_of(state))
        if isinstance(part, int):
            parts[i] = -1
            refuse(type(state)(*parts), ValueError, "initial_state must be at least 0, got -1")
            parts[i] = 1.5
            refuse(type(state)(*parts), TypeError, "initial_state must be an integer, got 1.5")
            continue
        parts[i] = np.concatenate([part, part], axis=-1)
        refuse(type_of(state)(*parts), ValueError, "initial_state must have shape")
    words = "initial_state must broadcast, got"
    refuse(type_of(state)(*(np.stack([x] * 3) for x in parts_of(state))), ValueError, words)


@every_backend
@every_operator
def test_calls_that_are_no_calls(name, backend):
    operator, arrays, options = getattr(BACKENDS[backend], name), draw(name), options_of(name)[0]
    first = next(iter(arrays))
    with pytest.raises(TypeError, match=f"missing a required argument: '{first}'"):
        operator()
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        operator(**arrays, **options, colour=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        operator(*arrays.values(), *[None] * 20)
    with pytest.raises(TypeError, match=f"multiple values for argument '{first}'"):
        operator(*arrays.values(), **{first: 1})


# --- In torch --------------------------------------------------------------------------------


def differentiable(name, options, N=4):
    """Tensors that need gradients, and the function of them."""
    tensors = to_torch(draw(name, N))
    stateful = name in WITH_STATE and is_causal(name, options)
    state = to_torch(draw_state(name)) if stateful else ()
    inputs = [x.requires_grad_() for x in (*tensors.values(), *leaves(state))]

    def function(*inputs):
        given = dict(zip(tensors, inputs, strict=False))
        rest = inputs[len(tensors) :]
        parts = iter(rest)
        given_state = each(lambda _: next(parts), state)
        extra = {"initial_state": given_state, "return_state": True} if rest else {}
        result = getattr(lt, name)(**given, **options, **extra)
        if rest and isinstance(state, lt.WKVState):  # the maximum is a shift: without it
            out, (a, b, maximum) = result
            result = out, a * maximum.exp(), b * maximum.exp()
        return tuple(leaves(result))

    return function, inputs


@every_call
def test_gradients(call):
    name, options = call
    function, inputs = differentiable(name, options)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@every_call
def test_gradients_of_inputs_that_broadcast(call):
    """An input that several sequences share has the sum of their gradients."""
    name, options = call
    axes = CONTRACTS[name].axes
    several = [x for x, own in axes.items() if not own.startswith("(")]
    leading = {x: (2,) if i % 2 else (3, 1) for i, x in enumerate(several)}
    shared = to_torch(draw(name, 5, leading))
    full = {
        x: y.expand(3, 2, *y.shape[len(leading[x]) :]).clone() if x in several else y
        for x, y in shared.items()
    }
    shared_gradients, gradients = (
        torch.autograd.grad(getattr(lt, name)(**inputs, **options).sin().sum(), inputs.values())
        for inputs in (shared, full)
        if [x.requires_grad_() for x in inputs.values()]
    )
    for x, y in zip(shared_gradients, gradients, strict=True):
        assert_close(numpy_of(x), numpy_of(y.sum_to_size(x.shape)))


@every_call_with_state
def test_gradients_without_tokens_reach_everything(call):
    name, options = call
    function, inputs = differentiable(name, options, N=0)
    out = function(*inputs)[0]
    gradients = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    assert all(gradient is not None for gradient in gradients[: len(CONTRACTS[name].axes)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
@every_operator
def test_compile_traces_the_whole(name):
    options = options_of(name)[-1]
    if name == "mesa":
        options = options | {"iterations": 2}  # each is traced anew, and they are alike
    function, inputs = differentiable(name, options)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), function(*inputs)
    assert_close(tuple(map(numpy_of, found)), tuple(map(numpy_of, expected)))
    found[0].sum().backward()


@every_operator
def test_vmap_and_func(name):
    options = options_of(name)[0]
    function, inputs = differentiable(name, options)
    inputs = [x.detach() for x in inputs]
    batched = [torch.stack([x, x * 0.9, x * 0.8]) for x in inputs]
    found = torch.vmap(function)(*batched)
    for i in range(3):
        expected = function(*(x[i] for x in batched))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[i], y)
    gradient = torch.func.grad(lambda x: function(x, *inputs[1:])[0].sum())(inputs[0])
    x = inputs[0].clone().requires_grad_()
    function(x, *inputs[1:])[0].sum().backward()
    torch.testing.assert_close(gradient, x.grad)
