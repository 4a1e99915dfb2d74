"""The checks of arguments: what they accept, what they refuse, and what they say."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lesson_code import _arguments


class Dtype:
    """A dtype as torch has it: no ``.name``, and a str with the library in front."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


class Tensor(SimpleNamespace):
    """An array of another library, as far as the checks can tell."""


def refuses(error, message):
    """The whole message, or its beginning."""
    return pytest.raises(error, match="^" + re.escape(message))


def test_dtypes_go_by_name():
    tensor = Tensor(dtype=Dtype("torch.bfloat16"), shape=(2,), ndim=1)
    assert _arguments.dtype_name(tensor) == "bfloat16"
    assert _arguments.dtype_name(np.zeros(1, ">f8")) == "float64"
    assert _arguments.accumulation_dtype(tensor) == "float32"
    for name, expected in (("f2", "float32"), ("f4", "float32"), ("f8", "float64")):
        assert _arguments.accumulation_dtype(np.zeros(1, name)) == expected


def test_arrays():
    half, single = np.zeros(1, "f2"), np.zeros(1, "f4")
    _arguments.check_arrays(np.ndarray, q=half, k=half)
    _arguments.check_arrays(Tensor, q=Tensor(dtype=Dtype("torch.float32")))
    with refuses(TypeError, "k must be a NumPy array, got list."):
        _arguments.check_arrays(np.ndarray, q=single, k=[1.0])
    with refuses(TypeError, "q must be a Tensor, got ndarray."):
        _arguments.check_arrays(Tensor, q=single)
    with refuses(TypeError, "v must have the dtype of q, float32, got float16."):
        _arguments.check_arrays(np.ndarray, q=single, k=single, v=half)


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128", "object", "uint8"])
def test_arrays_that_are_not_floating(dtype):
    with refuses(TypeError, "k must have a floating dtype (float16, bfloat16, float32, float64)"):
        _arguments.check_arrays(np.ndarray, q=np.zeros(1), k=np.zeros(1, dtype))


def test_axes():
    def shapes(q, k, v, u=(3,)):
        arrays = {"q": (q, "Nq D"), "k": (k, "N D"), "v": (v, "N M"), "u": (u, "(D)")}
        return _arguments.check_axes(**{x: (np.zeros(n), axes) for x, (n, axes) in arrays.items()})

    assert shapes((5, 3), (7, 3), (7, 2)) == ()
    assert shapes((2, 1, 5, 3), (4, 7, 3), (1, 7, 0)) == (2, 4)
    assert shapes((0, 5, 3), (0, 0, 3), (1, 0, 2)) == (0,)
    for wrong, message in (
        (((3,), (7, 3), (7, 2)), "q must have shape (..., Nq, D), got (3,)."),
        (((5, 3), (), (7, 2)), "k must have shape (..., N, D), got ()."),
        (((5, 3), (7, 3), (7,)), "v must have shape (..., N, M), got (7,)."),
        (((5, 3), (7, 4), (7, 2)), "k must have shape (..., N, D), (..., 7, 3), got (7, 4)."),
        (((5, 3), (7, 3), (5, 2)), "v must have shape (..., N, M), (..., 7, 2), got (5, 2)."),
        (((5, 3), (7, 3), (7, 2), (4,)), "u must have shape (D,), (3,), got (4,)."),
        (((5, 3), (7, 3), (7, 2), (1, 3)), "u must have shape (D,), (3,), got (1, 3)."),
        (
            ((2, 5, 3), (2, 7, 3), (3, 7, 2)),
            "the leading dimensions of q, k, v and u must broadcast, got (2,), (2,), (3,), ().",
        ),
    ):
        with refuses(ValueError, message):
            shapes(*wrong)


def test_leading_dimensions_broadcast():
    assert _arguments.check_leading(q=(2, 1), k=(3,), v=()) == (2, 3)
    assert _arguments.check_leading(q=(0,), k=(1,)) == (0,)


def test_form():
    _arguments.check_form(None, ("masked",))
    _arguments.check_form("masked", ("masked",))
    with refuses(
        ValueError, "form must be None or one of 'masked', 'scan' when causal=True, got 'linear'."
    ):
        _arguments.check_form("linear", ("masked", "scan"), " when causal=True")
    with refuses(ValueError, "form must be None or one of 'masked', got 3."):
        _arguments.check_form(3, ("masked",))


def test_integer():
    assert _arguments.check_integer("chunk_size", np.int32(4), minimum=1) == 4
    with refuses(ValueError, "chunk_size must be at least 1, got 0."):
        _arguments.check_integer("chunk_size", 0, minimum=1)
    for wrong in (True, np.True_, 2.0, "2", None):
        with refuses(TypeError, "chunk_size must be an integer, got "):
            _arguments.check_integer("chunk_size", wrong, minimum=1)


def test_number():
    for value in (2, 0.5, np.float32(0.5), -1.0):
        number = _arguments.check_number("scale", value)
        assert number == value and type(number) is float
    for wrong in (True, "1", 1j, np.ones(1)):
        with refuses(TypeError, "scale must be a real number, got "):
            _arguments.check_number("scale", wrong)
    for wrong in (np.inf, -np.inf, np.nan):
        with refuses(ValueError, "scale must be finite, got "):
            _arguments.check_number("scale", wrong)


def test_import_needs_numpy_alone():
    program = (
        "import sys; before = set(sys.modules); import lesson_code.numpy; import numpy\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    names = [name for name in done.stdout.split() if "cython" not in name]
    assert names == ["lesson_code", "numpy"], done.stderr


def test_every_public_name_is_exported():
    import lesson_code.numpy

    names = lesson_code.numpy.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(lesson_code.numpy, name).__doc__
        assert f"`{name}`" in lesson_code.numpy.__doc__, (
            "the docstring maps every name to a chapter"
        )


def test_arrays_that_only_look_like_arrays():
    for wrong in (
        np.ma.masked_array(np.zeros((2, 2)), mask=True),
        np.zeros((2, 2)).view(np.matrix),
    ):
        with refuses(TypeError, f"k must be a NumPy array, got {type(wrong).__name__}."):
            _arguments.check_arrays(np.ndarray, q=np.zeros(1), k=wrong)


def test_the_order_of_bytes_is_no_other_dtype():
    _arguments.check_arrays(np.ndarray, q=np.zeros(1), k=np.zeros(1, ">f8"))
