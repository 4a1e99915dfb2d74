"""Checks of arguments, shared by every backend.

An array is anything with ``.shape``, ``.ndim`` and ``.dtype``; a dtype is known by its name alone,
so that nothing here imports an array library but for the arithmetic of shapes. Each error is one
sentence: the argument, what was expected, what came.
"""

import math
import numbers
import operator
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
NOT_PLAIN = (np.ma.MaskedArray, np.matrix)


def dtype_name(array) -> str:
    """Name of an array's dtype: ``"float32"`` for ``numpy.float32`` and for ``torch.float32``."""
    return getattr(array.dtype, "name", None) or str(array.dtype).removeprefix("torch.")


def accumulation_dtype(array) -> str:
    """Name of the dtype in which sums over this array are kept: float32 at least."""
    return "float64" if dtype_name(array) == "float64" else "float32"


def check_arrays(array_type: type[Any], **arrays: Any) -> None:
    """Refuse what is not an array of floats, or not of the first array's dtype and device.

    A masked array is refused too, as its mask would be ignored, and a matrix, whose ``*`` is ``@``.
    """
    kind = {"numpy": "NumPy array", "torch": "torch tensor"}.get(
        array_type.__module__, array_type.__name__
    )
    like_name, like = next(iter(arrays.items()))
    for name, array in arrays.items():
        if not isinstance(array, array_type) or isinstance(array, NOT_PLAIN):
            raise TypeError(f"{name} must be a {kind}, got {type(array).__name__}.")
        if array is like or array.dtype != like.dtype:
            _check_dtype(name, array, like_name, like)
        check_device(name, array, like_name, like)


def _check_dtype(name, array, like_name, like):
    if dtype_name(array) not in FLOATS:
        raise TypeError(
            f"{name} must have a floating dtype ({', '.join(FLOATS)}), got {array.dtype}."
        )
    if dtype_name(array) != dtype_name(like):  # whatever the order of their bytes
        raise TypeError(
            f"{name} must have the dtype of {like_name}, {dtype_name(like)}, "
            f"got {dtype_name(array)}."
        )


def check_device(name: str, array, other_name: str, other) -> None:
    """Refuse an array that is on another device than another argument."""
    device, other_device = getattr(array, "device", None), getattr(other, "device", None)
    if device != other_device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other_device}, got {device}."
        )


class Axes(NamedTuple):
    """The last axes of an array by their letters; `alone` where there may be none before them."""

    letters: tuple[str, ...]
    alone: bool

    @classmethod
    def parse(cls, text: str) -> "Axes":
        """The axes of "N D", and those of "(N D)", which stand alone."""
        return cls(tuple(letters_of(text)), text.startswith("("))

    def __str__(self) -> str:
        if self.letters == ("...",):
            return "(...)"
        return _shape([*self.letters] if self.alone else ["...", *self.letters])


def letters_of(axes: str) -> list[str]:
    """["N", "D"] of "N D" and of "(N D)"."""
    return axes.strip("()").split()


def check_axes(**arrays: tuple) -> tuple[int, ...]:
    """Refuse arrays that do not fit together, each given as name=(array, "N D") or "(N D)".

    A letter stands for one size, wherever it occurs. The axes before them broadcast to those that
    are returned.
    """
    sizes: dict[str, int] = {}
    leading = {
        name: check_shape(name, array, Axes.parse(text), sizes)
        for name, (array, text) in arrays.items()
    }
    return check_leading(**leading)


def check_shape(name: str, array, axes: Axes, sizes: dict[str, int]) -> tuple[int, ...]:
    """Refuse an array that does not have some axes, and return those before them.

    `sizes` has what is known of each letter, and learns the others; "2R" is twice as many as "R",
    which has been seen before.
    """
    letters, alone = axes
    for letter in letters:
        if letter[0].isdigit():
            sizes[letter] = int(letter[0]) * sizes[letter[1:]]
    shape = tuple(array.shape)
    before = len(shape) - len(letters)
    fits = before == 0 or (before > 0 and not alone)
    if before >= 0:
        for letter, size in zip(letters, shape[before:], strict=True):
            fits = sizes.setdefault(letter, size) == size and fits
    if not fits:
        start = [] if alone else ["..."]
        expected = _shape([*start, *letters])
        if all(letter in sizes for letter in letters):
            expected += ", " + _shape([*start, *(sizes[letter] for letter in letters)])
        raise ValueError(f"{name} must have shape {expected}, got {shape}.")
    return shape[:before]


def _shape(axes: list) -> str:
    return f"({', '.join(map(str, axes))}{',' * (len(axes) == 1)})"


def check_size(name: str, size: int, what: str, expected: int) -> None:
    """Refuse a size that differs from the one that another argument has fixed."""
    if size != expected:
        raise ValueError(f"{name} must have {what}, {expected}, got {size}.")


def check_leading(**shapes: tuple) -> tuple:
    """Return the shape to which leading dimensions broadcast, as in ``matmul``."""
    first, *others = shapes.values()
    if all(shape == first for shape in others):
        return tuple(first)
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        *names, last = shapes
        listed = ", ".join(str(tuple(shape)) for shape in shapes.values())
        raise ValueError(
            f"the leading dimensions of {', '.join(names)} and {last} must broadcast, got {listed}."
        ) from None


def check_beside(name: str, array, like_name: str, like) -> None:
    """Refuse an array that has neither the dtype of another nor its accumulation dtype."""
    dtypes = dtype_name(like), accumulation_dtype(like)
    if dtype_name(array) not in dtypes:
        expected = " or ".join(dict.fromkeys(dtypes))
        raise TypeError(f"{name} must have dtype {expected}, got {dtype_name(array)}.")
    check_device(name, array, like_name, like)


# Which values are wrong where they are restricted. NaN never is: it reaches what depends on it.
OUTSIDE = {
    "at most 0": lambda x: x > 0,
    "at least 0": lambda x: x < 0,
    "negative": lambda x: x >= 0,
    "in (0, 1]": lambda x: (x <= 0) | (x > 1),
    "in [0, 1]": lambda x: (x < 0) | (x > 1),
    "positive and finite": lambda x: (x <= 0) | (x == float("inf")),
}


def check_values(name: str, array, kind: str) -> None:
    """Refuse an array with a value out of its range."""
    wrong = OUTSIDE[kind](array)
    if wrong.any():
        raise ValueError(f"{name} must be {kind}, got {float(array[wrong][0])}.")


def check_form(form, forms: tuple, condition: str = "") -> None:
    """Refuse a form that is neither None nor one of ``forms``."""
    if form is not None and form not in forms:
        listed = ", ".join(repr(name) for name in forms)
        raise ValueError(f"form must be None or one of {listed}{condition}, got {form!r}.")


def check_integer(name: str, value, minimum: int) -> int:
    """Return an integer argument as an int; refuse booleans, fractions and what is too small."""
    try:
        integer = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None:
        raise TypeError(f"{name} must be an integer, got {_shown(value)}.")
    if integer < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {integer}.")
    return integer


def check_counts(name: str, value) -> tuple[int, ...]:
    """Refuse what is neither a count nor an integer array of counts, and return its shape."""
    shape = tuple(getattr(value, "shape", ()))
    if not shape:
        check_integer(name, value, minimum=0)
    elif "int" not in dtype_name(value):
        raise TypeError(f"{name} must be integers, got {value.dtype}.")
    return shape


def check_flags(**flags) -> None:
    """Refuse what is neither True nor False, such as "no", which would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {_shown(value)}.")


def check_number(name: str, value) -> float:
    """Return a real, finite argument as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {_shown(value)}.")
    if not -math.inf < float(value) < math.inf:  # math.isfinite does not trace under torch.compile
        raise ValueError(f"{name} must be finite, got {value}.")
    return float(value)


def resolve_scale(scale, width: int) -> float:
    """The factor of the scores, 1/sqrt(D) where it is None."""
    if scale is not None:
        return check_number("scale", scale)
    if width == 0:
        raise ValueError("q must have a width D of at least 1 when scale is None, got 0.")
    return 1 / math.sqrt(width)


def _shown(value) -> str:
    """A value as an error shows it: as Python writes it, or its type where that would be long."""
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else type(value).__name__
