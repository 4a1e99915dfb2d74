"""What an operator declares of itself, and how a call is held to it, whatever the array library.

An operator names the axes of its arrays in the order of its signature:

    N D      an array (..., N, D): a letter is one size wherever it stands, leading axes broadcast
    N 2R     a size that is twice another one
    (D)      an array (D,), the same for all sequences
    ...      a number, or an array with one for each sequence
    count    of a memory alone: how many tokens it has seen, an integer or one for each sequence

The rest follows from the signature: a default of True or False makes a flag, an integer default a
number of tokens, which is at least 1, and an array whose default is None may be left out.
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from lesson_code import _arguments
from lesson_code._arguments import Axes

COUNT = Axes((), alone=False)  # a part of a memory that is no array of floats


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

    def __init__(self, function, axes, state, empty, reads, forms, ranges):
        self.name, self.signature = function.__name__, inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.names = tuple(p.name for p in parameters)
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.flags = [name for name, x in self.defaults.items() if isinstance(x, bool)]
        self.counts = [name for name, x in self.defaults.items() if type(x) is int]
        inputs, self.output = axes.split(" -> ")
        self.axes = dict(zip(self.names, inputs.split(", "), strict=False))
        self.state, self.empty, self.reads = state, empty, reads.split()
        self.forms, self.ranges = forms, ranges
        # What a call would have to read again and again.
        self._axes = {name: Axes.parse(text) for name, text in self.axes.items()}
        self._one_each = [name for name, text in self.axes.items() if text == "..."]
        self._optional = [name for name in self.axes if name in self.defaults]
        self._output = Axes.parse(self.output).letters
        self.parts = _parts(state)  # of the memory

    def documented(self, docstring: str, shapes: bool) -> str:
        """A docstring with what the declaration says, before its examples."""
        told = []
        if shapes:
            listed = [
                f"{name} {axes} {self.ranges.get(name, '')}".strip()
                for name, axes in self._axes.items()
            ]
            told.append(f"Shapes and ranges: {', '.join(listed)}.".replace("Nq", "N"))
        if isinstance(self.state, str):
            told.append(f"The state is {Axes.parse(self.state)}.")
        told.append("All else is :ref:`common to all functions <contract>`.")
        indent = " " * 4
        notes = textwrap.fill(" ".join(told), 100, initial_indent=indent, subsequent_indent=indent)
        before, heading, after = docstring.partition(f"{indent}Examples\n")
        return f"{before}{indent}Notes\n{indent}-----\n{notes}\n\n{heading}{after}"

    def hold(self, array_type: type, args: tuple, kwargs: dict) -> Call:
        """The call, after checks of all but the values of arrays."""
        values = self.by_name(args, kwargs)
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

    def by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """All arguments of a call by their names, with the defaults of those that it leaves out."""
        values = self.defaults | dict(zip(self.names, args, strict=False)) | kwargs
        twice = any(name in kwargs for name in self.names[: len(args)])
        missing = any(name not in values for name in self.names)
        if len(args) > self.positional or twice or missing or len(values) > len(self.names):
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}: {error}.") from None
        return values

    def check_values(self, arrays: dict[str, Any]) -> None:
        """Refuse arrays with values out of their range."""
        for name, kind in self.ranges.items():
            if hasattr(arrays[name], "shape"):  # a number was looked at when it came
                _arguments.check_values(name, arrays[name], kind)

    def output_shape(self, call: Call) -> tuple[int, ...]:
        """The shape of the outputs, where the arrays fix the size of each of its axes."""
        return (*call.leading, *(call.sizes[letter] for letter in self._output))

    def first_memory(self, call: Call, make: Callable) -> Any:
        """The memory before the first token, None while a size is not known.

        ``make(shape, x)`` is an array of some shape from an initial state, or from a number.
        """
        sizes, given = call.sizes, call.values["initial_state"]
        if not all(letter in sizes for axes in self.parts.values() for letter in axes.letters):
            return None
        single = isinstance(self.state, str)
        parts = self.empty if given is None else given
        if single or not isinstance(parts, tuple):
            parts = [parts] * len(self.parts)
        made = [
            make((*call.memory_leading, *(sizes[letter] for letter in axes.letters)), part)
            if axes is not COUNT
            else part
            for axes, part in zip(self.parts.values(), parts, strict=True)
        ]
        return made[0] if single else type(self.state)(*made)

    def has_no_token(self, call: Call) -> bool:
        """Whether the sequence is empty, for an operator with one output for each token."""
        return self._output[0] == "N" and call.sizes["N"] == 0

    def _arrays(self, array_type, values):
        arrays = {name: values[name] for name in self.axes}
        for name in self._optional:
            if values[name] is None:
                del arrays[name]
        one_each = {name: arrays.pop(name) for name in self._one_each}
        _arguments.check_arrays(array_type, **arrays)
        like_name, like = next(iter(arrays.items()))
        for name, x in one_each.items():
            if isinstance(x, array_type):
                _arguments.check_arrays(array_type, **{name: x})
                _arguments.check_beside(name, x, like_name, like)
            else:
                number = one_each[name] = _arguments.check_number(name, x)
                if (kind := self.ranges.get(name)) and _arguments.OUTSIDE[kind](number):
                    raise ValueError(f"{name} must be {kind}, got {number}.")
        return arrays | one_each

    def _fit(self, array_type, arrays, initial_state):
        """Sizes of the letters, leading axes of the output and of the memory."""
        sizes: dict[str, int] = {}
        leading = {
            name: tuple(getattr(x, "shape", ()))
            if name in self._one_each
            else _arguments.check_shape(name, x, self._axes[name], sizes)
            for name, x in arrays.items()
        }
        if initial_state is not None:
            parts = self._parts_of(array_type, initial_state, arrays)
            for (name, axes), x in zip(self.parts.items(), parts, strict=True):
                if axes is COUNT:
                    leading[name] = _arguments.check_counts(name, x)
                else:
                    leading[name] = _arguments.check_shape(name, x, axes, sizes)
        of_all = _arguments.check_leading(**leading)
        for name in self.reads:
            leading.pop(name, None)
        return sizes, of_all, _arguments.check_leading(**leading)

    def _parts_of(self, array_type, state, arrays):
        """The parts of an initial state, arrays that may stand beside the others."""
        if isinstance(self.state, str):
            state = (state,)
        elif not isinstance(state, type(self.state)):
            expected = type(self.state).__name__
            raise TypeError(f"initial_state must be a {expected}, got {type(state).__name__}.")
        like_name, like = next(iter(arrays.items()))
        parts = dict(zip(self.parts, state, strict=True))
        parts = {name: x for name, x in parts.items() if self.parts[name] is not COUNT}
        _arguments.check_arrays(array_type, **parts)
        for name, part in parts.items():
            _arguments.check_beside(name, part, like_name, like)
        return state


def _parts(state) -> dict[str, Axes]:
    """The axes of each part of a memory, under the name that errors give it."""
    if state is None:
        return {}
    if isinstance(state, str):
        return {"initial_state": Axes.parse(state)}
    fields = zip(state._fields, state, strict=True)
    return {
        f"{field} of initial_state": COUNT if axes == "count" else Axes.parse(axes)
        for field, axes in fields
    }
