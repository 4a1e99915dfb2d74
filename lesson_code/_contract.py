"""What an operator declares of itself, and how a call is held to it, whatever the array library.

An operator names the axes of its arrays in the order of its signature:

    N D      an array (..., N, D): a letter is one size wherever it stands, leading axes broadcast
    (D)      an array (D,), the same for all sequences
    ...      a number, or an array with one for each sequence

The rest follows from the signature: a default of True or False makes a flag, an integer default a
number of tokens, which is at least 1, and an array whose default is None may be left out.
"""

import inspect
from typing import Any, NamedTuple

from lesson_code import _arguments

# Which values are wrong where they are restricted. NaN never is: it reaches what depends on it.
OUTSIDE = {
    "at most 0": lambda x: x > 0,
    "at least 0": lambda x: x < 0,
    "negative": lambda x: x >= 0,
    "in (0, 1]": lambda x: (x <= 0) | (x > 1),
    "positive and finite": lambda x: (x <= 0) | (x == float("inf")),
}


class Call(NamedTuple):
    """A call whose arguments fit together."""

    values: dict[str, Any]  # all arguments by name
    arrays: dict[str, Any]  # those of them that are arrays, or numbers in the place of one
    dtype: Any  # of the arrays, and so of the output
    accumulation: str  # name of the dtype in which sums are kept
    sizes: dict[str, int]  # of each letter
    leading: tuple[int, ...]  # axes before those of the output
    memory_leading: tuple[int, ...]  # axes before those of the memory


class Contract:
    """The declaration of an operator, as the decorators of the backends take it."""

    def __init__(self, function, axes, state, reads, forms, ranges):
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.names = tuple(p.name for p in parameters)
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.flags = [name for name, x in self.defaults.items() if isinstance(x, bool)]
        self.counts = [name for name, x in self.defaults.items() if type(x) is int]
        inputs, self.output = axes.split(" -> ")
        self.axes = dict(zip(self.names, inputs.split(", "), strict=False))
        self.state, self.reads, self.forms, self.ranges = state, reads.split(), forms, ranges

    def hold(self, array_type: type, args: tuple, kwargs: dict) -> Call:
        """The call, after checks of all but the values of arrays."""
        values = self._by_name(args, kwargs)
        arrays = self._arrays(array_type, values)
        _arguments.check_flags(**{name: values[name] for name in self.flags})
        for name in self.counts:
            values[name] = _arguments.check_integer(name, values[name], minimum=1)
        if self.forms:
            _arguments.check_form(values["form"], self.forms)
        first = next(iter(arrays.values()))
        sizes, leading, memory_leading = self._fit(array_type, arrays, values.get("initial_state"))
        accumulation = _arguments.accumulation_dtype(first)
        return Call(values, arrays, first.dtype, accumulation, sizes, leading, memory_leading)

    def check_values(self, arrays: dict[str, Any]) -> None:
        """Refuse arrays with values out of their range."""
        for name, kind in self.ranges.items():
            if hasattr(arrays[name], "shape"):  # a number was looked at when it came
                _arguments.check_values(name, arrays[name], kind, OUTSIDE[kind](arrays[name]))

    def sizes_of(self, axes: str, sizes: dict[str, int]) -> tuple[int, ...] | None:
        """The sizes of some axes, or None where one of them is not known."""
        known = tuple(sizes.get(letter) for letter in _arguments.letters_of(axes))
        return None if None in known else known  # type: ignore[return-value]

    def has_no_token(self, sizes: dict[str, int]) -> bool:
        """Whether there is nothing to write and, of as many outputs as tokens, nothing to read."""
        return self.output.startswith("N ") and sizes["N"] == 0

    def _by_name(self, args, kwargs):
        values = self.defaults | dict(zip(self.names, args, strict=False)) | kwargs
        twice = any(name in kwargs for name in self.names[: len(args)])
        missing = any(name not in values for name in self.names)
        if len(args) > self.positional or twice or missing or len(values) > len(self.names):
            self.signature.bind(*args, **kwargs)  # says what is wrong
        return values

    def _arrays(self, array_type, values):
        left_out = [name for name in self.axes if name in self.defaults and values[name] is None]
        arrays = {name: values[name] for name in self.axes if name not in left_out}
        one_each = [name for name in arrays if self.axes[name] == "..."]
        whole = {name: array for name, array in arrays.items() if name not in one_each}
        _arguments.check_arrays(array_type, **whole)
        like = next(iter(whole))
        for name in one_each:
            if isinstance(arrays[name], array_type):
                _arguments.check_arrays(array_type, **{name: arrays[name]})
                _arguments.check_beside(name, arrays[name], like, whole[like])
            else:
                number = arrays[name] = _arguments.check_number(name, arrays[name])
                if (kind := self.ranges.get(name)) and OUTSIDE[kind](number):
                    raise ValueError(f"{name} must be {kind}, got {number}.")
        return arrays

    def _fit(self, array_type, arrays, initial_state):
        """Sizes of the letters, leading axes of the output and of the memory."""
        described = {name: (array, self.axes[name]) for name, array in arrays.items()}
        sizes: dict[str, int] = {}
        leading = {}
        for name, (array, axes) in (
            described | self._parts(array_type, arrays, initial_state)
        ).items():
            if axes == "...":
                leading[name] = tuple(getattr(array, "shape", ()))
            else:
                before = _arguments.check_shape(name, array, axes, sizes)
                leading[name] = before
        written = {name: before for name, before in leading.items() if name not in self.reads}
        return sizes, _arguments.check_leading(**leading), _arguments.check_leading(**written)

    def _parts(self, array_type, arrays, state):
        """The parts of an initial state and their axes, under the names that errors give them."""
        if state is None or self.state is None:
            return {}
        if isinstance(self.state, str):
            parts = {"initial_state": (state, self.state)}
        elif isinstance(state, type(self.state)):
            fields = zip(state._fields, state, self.state, strict=True)
            parts = {f"{field} of initial_state": (part, axes) for field, part, axes in fields}
        else:
            expected = type(self.state).__name__
            raise TypeError(f"initial_state must be a {expected}, got {type(state).__name__}.")
        like, first = next(iter(arrays.items()))
        _arguments.check_arrays(array_type, **{name: part for name, (part, _) in parts.items()})
        for name, (part, _) in parts.items():
            _arguments.check_beside(name, part, like, first)
        return parts
