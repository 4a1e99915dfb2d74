"""The way to the GPU: a stand-in for CuPy, as strict as it, that runs kernels in the emulator."""

import contextlib
import sys
import types

import numpy as np
import pytest

import lesson_code.numpy as reference
from lesson_code.cupy import _kernels, causal_scan, decaying_scan, delta_scan, emulator, wkv


class Device(contextlib.nullcontext):
    """A T4."""

    compute_capability = "75"
    attributes = {"MultiProcessorCount": 40}


class ndarray(np.ndarray):
    """A NumPy array that passes for one of CuPy's."""

    __module__ = "cupy"
    device = Device()

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0])


class RawModule:
    def __init__(self, *, code, options):
        header = _kernels.text("gpu.h")
        assert code.startswith(header)
        assert isinstance(options, tuple) and "--std=c++17" in options
        macros = dict(option[2:].split("=", 1) for option in options if option.startswith("-D"))
        self.module = emulator.load(code.removeprefix(header), macros)

    def get_function(self, name):
        return RawKernel(self.module, name)


class RawKernel:
    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, grid, block, args, *, shared_mem=0):
        assert all(isinstance(x, tuple) for x in (grid, block, args))
        assert all(isinstance(size, int) for size in (*grid, *block))
        assert shared_mem <= self.max_dynamic_shared_size_bytes <= 64 * 1024
        for argument in args:  # what CuPy passes by value
            assert type(argument) is np.ndarray and argument.size == 1
        self.module.launch(self.name, grid, block, args, shared_mem)


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    def empty(shape, dtype):
        return np.empty(shape, dtype).view(ndarray)

    def broadcast_to(array, shape):
        return np.broadcast_to(array, shape, subok=True)

    def ascontiguousarray(array, dtype):
        return np.ascontiguousarray(array, dtype).view(ndarray)

    def concatenate(arrays, axis):
        return np.concatenate(arrays, axis).view(ndarray)

    functions = (empty, broadcast_to, ascontiguousarray, concatenate, RawModule)
    names = {function.__name__: function for function in functions}
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray, **names))
    _kernels.load.cache_clear()
    yield
    _kernels.load.cache_clear()


def arrays(*shapes, dtype):
    rng = np.random.default_rng(0)
    return [(rng.random(shape) + 0.1).astype(dtype).view(ndarray) for shape in shapes]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("recurrent", "float32"), ("chunked", "float32"), ("tensor_core", "float16")],
)
@pytest.mark.parametrize(("N", "C", "M"), [(70, 250, 250), (600, 16, 24)])
def test_the_scan(kernel, dtype, N, C, M):
    q, k, v = arrays((2, N, C), (1, N, C), (N, M), dtype=dtype)
    S, z = arrays((1, C, M), (C,), dtype=np.float32)
    state = reference.LinearAttentionState(S, z)
    out, last = causal_scan(
        q, k, v, normalize=True, initial_state=state, return_state=True, kernel=kernel
    )
    right, end = reference.linear_attention(
        *(np.asarray(x, float) for x in (q, k, v)), feature_map=reference.identity, causal=True,
        initial_state=state._replace(S=np.asarray(S, float), z=np.asarray(z, float)),
        return_state=True,
    )  # fmt: skip
    for mine, theirs in zip((out, *last), (right, *end), strict=True):
        assert isinstance(mine, ndarray) and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=2e-3 if mine is out else 1e-5)


def test_wkv():
    k, v = arrays((3, 50, 7), (3, 50, 7), dtype=np.float32)
    w, u = arrays((7,), (7,), dtype=np.float32)
    out, state = wkv(k, v, w, u, return_state=True)
    again, _ = wkv(k[:, 20:], v[:, 20:], w, u, initial_state=wkv(
        k[:, :20], v[:, :20], w, u, return_state=True)[1], return_state=True)  # fmt: skip
    right = reference.wkv(*(np.asarray(x, float) for x in (k, v, w, u)))
    assert all(isinstance(x, ndarray) for x in (out, *state))
    np.testing.assert_allclose(out, right, rtol=1e-5)
    np.testing.assert_allclose(again, right[:, 20:], rtol=1e-5)


def test_decay():
    q, k, v, g = arrays((2, 40, 250), (1, 40, 250), (40, 7), (2, 40, 250), dtype=np.float32)
    out, state = decaying_scan(q, k, v, -g, return_state=True)
    right, end = reference.gated_linear_attention(
        *(np.asarray(x, float) for x in (q, k, v, -g)), return_state=True
    )
    assert isinstance(out, ndarray) and isinstance(state, ndarray)
    np.testing.assert_allclose(out, right, rtol=1e-5)
    np.testing.assert_allclose(state, end, rtol=1e-5)


def test_delta():
    q, k, v, g = arrays((2, 40, 5), (1, 40, 5), (40, 3), (2, 40, 1), dtype=np.float32)
    k, beta = k / 3, arrays((2, 40), dtype=np.float32)[0]
    out, state = delta_scan(q, k, v, beta, -g, return_state=True)
    right, end = reference.gated_delta_rule(
        *(np.asarray(x, float) for x in (q, k, v, beta, -g[..., 0])), return_state=True
    )
    assert isinstance(out, ndarray) and isinstance(state, ndarray)
    np.testing.assert_allclose(out, right, rtol=1e-5)
    np.testing.assert_allclose(state, end, rtol=1e-5)


def test_what_is_refused():
    x = arrays((20, 4), dtype=np.float16)[0]
    with pytest.raises(TypeError, match="q must be a NumPy array or a torch CPU tensor"):
        causal_scan(x, x, x, device="cpu")
    with pytest.raises(TypeError, match="k must be a CuPy array.*got numpy.ndarray"):
        causal_scan(x, np.asarray(x), x)
    other = x.view(type("ndarray", (ndarray,), {"__module__": "cupy", "device": Device()}))
    with pytest.raises(ValueError, match="v must be on the device of q"):
        causal_scan(x, x, other)
    wide = arrays((20, 4), dtype=np.float32)[0]
    with pytest.raises(ValueError, match="'tensor_core' needs float16 or bfloat16, got float32"):
        causal_scan(wide, wide, wide, kernel="tensor_core")
