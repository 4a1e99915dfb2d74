"""NumPy arrays, CuPy arrays and torch tensors, behind the few operations that the kernels need.

A kernel takes addresses, so nothing is converted: it reads the caller's memory through the strides
that the array has, and writes into arrays of the caller's own library.
"""

import sys
from typing import NamedTuple

import numpy as np

from lesson_code import _arguments

DTYPES = ("float32", "float16", "bfloat16")

# What a kernel is told about an array (..., N, width): struct Rows in the .cu files.
ROWS = np.dtype(
    [
        ("data", np.uintp),  # the address of the first number of token 0
        ("outer", np.int64),  # distances, in numbers: from head to head ...
        ("inner", np.int64),
        ("token", np.int64),  # ... and from token to token, negative where time runs backwards
        ("inner_count", np.int32),
        ("width", np.int32),
        ("ones", np.int32),  # columns of ones that are thought behind the others
        ("padding", np.int32),
    ]
)


def library(array) -> str:
    """ "numpy", "torch" or "cupy"; the name of the package of any other type."""
    return type(array).__module__.split(".")[0]


def device(array) -> str:
    """ "cuda" or "cpu"."""
    kind = library(array)
    return array.device.type if kind == "torch" else "cuda" if kind == "cupy" else "cpu"


def states(array):
    """The package whose states go with an array.

    This is all that is imported of ``lesson_code.torch`` here, which itself is built on this
    package: a caller with tensors, and no state yet, is given one of its states.
    """
    if library(array) == "torch":
        from lesson_code import torch

        return torch
    from lesson_code import numpy

    return numpy


def c_type(array) -> str:
    """The dtype as the .cu files call it."""
    name = _arguments.dtype_name(array)
    return "float" if name == "float32" else name


def check_arrays(on: str, **arrays) -> None:
    """Refuse what is no array of floats on this device, of the kind and dtype of the first."""
    if on not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {on!r}.")
    first, like = next(iter(arrays.items()))
    for name, array in arrays.items():
        _check_kind(on, name, array, first, like)
        dtype, expected = _arguments.dtype_name(array), _arguments.dtype_name(like)
        if dtype != expected:
            raise TypeError(f"{name} must have the dtype of {first}, {expected}, got {dtype}.")
        _arguments.check_device(name, array, first, like)


def check_state(on: str, name: str, array, like_name: str, like, sizes: dict) -> None:
    """Refuse what cannot be part of a state beside `like`: float32 or its dtype, (..., *sizes)."""
    _check_kind(on, name, array, like_name, like)
    _arguments.check_beside(name, array, like_name, like)
    if tuple(array.shape[-len(sizes) :]) != tuple(sizes.values()):
        axes, shown = ", ".join(sizes), ", ".join(map(str, sizes.values()))
        raise ValueError(
            f"{name} must have shape (..., {axes}), (..., {shown}), got {tuple(array.shape)}."
        )


def _check_kind(on, name, array, like_name, like) -> None:
    is_array = library(array) in ("numpy", "torch", "cupy") and hasattr(array, "__dlpack__")
    is_tensor = is_array and library(array) == "torch"
    if is_tensor and (str(array.layout) != "torch.strided" or array.is_nested):
        raise TypeError(f"{name} must be a dense tensor, got one of layout {array.layout}.")
    if not is_array or device(array) != on or isinstance(array, _arguments.NOT_PLAIN):
        got = f"a tensor on {array.device}" if is_tensor else _kind(array)
        if on == "cpu":
            expected = "a NumPy array or a torch CPU tensor with device='cpu'"
            hint = ""
        else:
            expected = "a CuPy array or a CUDA torch tensor"
            here = is_array and device(array) == "cpu"
            hint = "; device='cpu' runs the kernels on it without a GPU" if here else ""
        error = ValueError if is_tensor else TypeError
        raise error(f"{name} must be {expected}, got {got}{hint}.")
    if library(array) != library(like):
        raise TypeError(f"{name} must be a {_kind(like)}, as {like_name} is, got {_kind(array)}.")
    dtype = _arguments.dtype_name(array)
    if dtype not in DTYPES:
        raise TypeError(f"{name} must have dtype float32, float16 or bfloat16, got {dtype}.")


def _kind(array) -> str:
    return f"{library(array)}.{type(array).__name__}"


# ---- What the libraries call by different names. -------------------------------------------------


def empty(shape, dtype: str, like):
    """An array without values, of the library and on the device of `like`."""
    package = sys.modules[library(like)]
    if library(like) == "torch":
        return package.empty(shape, dtype=getattr(package, dtype), device=like.device)
    # bfloat16 is a dtype of NumPy's only as that of an array that has it.
    is_same = dtype == _arguments.dtype_name(like)
    return package.empty(shape, like.dtype.newbyteorder("=") if is_same else dtype)


def broadcast(array, shape):
    """The array with leading dimensions repeated, without a copy."""
    return sys.modules[library(array)].broadcast_to(array, shape)


def floats(array):
    """The array in float32."""
    return array.float() if library(array) == "torch" else array.astype("float32")


def cast(array, like):
    """The array in the dtype of `like`."""
    return array.to(like.dtype) if library(array) == "torch" else array.astype(like.dtype)


def exp(array):
    return sys.modules[library(array)].exp(array)


def join(arrays, axis: int = -1):
    """One array of float32 of all of them, side by side along an axis."""
    package = sys.modules[library(arrays[0])]
    return package.concatenate([floats(array) for array in arrays], axis=axis)


def contiguous(array):
    """The array itself if its numbers lie one after the other, else a copy."""
    if library(array) == "torch":
        return array.contiguous()
    return sys.modules[library(array)].ascontiguousarray(array, array.dtype.newbyteorder("="))


def address(array) -> int:
    """Where the first number lies in memory."""
    match library(array):
        case "torch":
            return array.data_ptr()
        case "cupy":
            return array.data.ptr
        case _:
            return array.__array_interface__["data"][0]


def itemsize(array) -> int:
    """Bytes of one number."""
    return array.element_size() if library(array) == "torch" else array.itemsize


def strides(array) -> tuple:
    """Distances along each axis, in numbers; fractions where the array is a view of wider items."""
    if library(array) == "torch":
        return tuple(array.stride())
    return tuple(stride / array.itemsize for stride in array.strides)


def extent(array) -> tuple[int, int]:
    """The bytes that the array spans: (first address, count)."""
    reach = [(n - 1) * int(stride) for n, stride in zip(array.shape, strides(array), strict=True)]
    if 0 in array.shape:
        return address(array), 0
    start = sum(d for d in reach if d < 0) * itemsize(array)
    return address(array) + start, (sum(map(abs, reach)) + 1) * itemsize(array)


class Rows(NamedTuple):
    """An array and what a kernel is told of it."""

    array: object
    struct: np.ndarray


def rows(array, leading: tuple, *, reverse: bool = False, ones: int = 0) -> Rows:
    """An array (..., N, width) as a kernel sees it.

    The leading dimensions are broadcast to `leading` and must then be two strides at most, as those
    of (B, H, N, width) are however it was transposed; the numbers of a row must lie side by side.
    What is not so is copied. `reverse` lets the last token come first.
    """
    N, width = array.shape[-2:]
    array = broadcast(array, (*leading, N, width))
    layout = _layout(array)
    if layout is None:
        array = contiguous(array)
        layout = _layout(array)
    (_, outer), (inner_count, inner), token = layout
    start = address(array)
    if reverse and N:
        start, token = start + (N - 1) * token * itemsize(array), -token
    values = (start, outer, inner, token, inner_count, width, ones, 0)
    return Rows(array, np.array(values, ROWS))


def _layout(array):
    """((outer count, stride), (inner count, stride), token stride), or None where a copy is due."""
    if 0 in array.shape:
        return (1, 0), (1, 0), 0
    *leading, token, last = strides(array)
    if array.shape[-1] > 1 and last != 1 or any(stride % 1 for stride in (*leading, token)):
        return None
    if library(array) == "numpy" and not array.dtype.isnative:
        return None
    axes: list[tuple[int, int]] = []
    for size, stride in zip(array.shape[:-2], leading, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    if len(axes) > 2:
        return None
    axes = [(1, 0)] * (2 - len(axes)) + axes
    return *((size, int(stride)) for size, stride in axes), int(token)
