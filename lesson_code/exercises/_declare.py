"""What an exercise is made of: parts to be written or computed, and the mistakes in them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self


@dataclass(frozen=True)
class Mistake:
    """A typical mistake, recognized by computing it.

    Parameters
    ----------
    wrong : object
        The function that a reader with this misunderstanding writes, of the same arguments. Or the
        wrong value, or a function without arguments that returns it.
    sentence : str
        What is wrong, without the answer.
    section : str
        The heading of the chapter to look at.
    """

    wrong: Any
    sentence: str
    section: str


class Further(NamedTuple):
    """A check that a function must pass beside agreeing with its reference."""

    check: Callable
    section: str
    options: Mapping[str, object]


@dataclass(eq=False)
class _Part:
    name: str
    reference: Any
    section: str
    known: list[Mistake] = field(default_factory=list, init=False)

    def mistakes(self, *rows: tuple) -> Self:
        """Recognize mistakes, rows ``(wrong, sentence)`` or ``(wrong, sentence, section)``.

        Without a section it is the part's own.
        """
        for wrong, sentence, *section in rows:
            self.known.append(Mistake(wrong, sentence, *(section or [self.section])))
        return self

    def mistake(self, sentence: str, section: str | None = None) -> Callable:
        """Recognize the mistake that the decorated function makes."""

        def add(wrong: Callable) -> Callable:
            self.mistakes((wrong, sentence, section or self.section))
            return wrong

        return add


@dataclass(eq=False)
class Function(_Part):
    """A function that the reader writes; declared by :meth:`Exercise.function`."""

    inputs: Callable | None = None
    special: Sequence[Callable] = ()
    view: Callable | None = None
    unit: str = "tokens"
    further: list[Further] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.signature = f"{self.name}{inspect.signature(self.reference)}"

    def passes(self, check: Callable, section: str, **options: object) -> Self:
        """Ask for a check too, such as ``check_causal``; options are keywords of the check.

        Its inputs are those of the part, unless the options say otherwise.
        """
        self.further.append(Further(check, section, {"inputs": self.inputs} | options))
        return self

    @property
    def stub(self) -> str:
        """What stands in the notebook of exercises until the reader has written it."""
        return f"def {self.signature}:\n    ...  # yours"


@dataclass(eq=False)
class Value(_Part):
    """A number, an array or a word that the reader works out; see :meth:`Exercise.value`."""

    form: str = "a number"
    tolerance: float | None = None

    @property
    def stub(self) -> str:
        """What stands in the notebook of exercises until the reader has replaced it."""
        return f"{self.name} = None  # yours: {self.form}"


@dataclass(eq=False)
class Exercise:
    """An exercise, whose parts are declared in the order in which the reader comes to them.

    Parameters
    ----------
    label : str
        Its label in the book, such as ``"ex-memory-code"``.
    chapter : str
        The title of its chapter.

    Examples
    --------
    >>> twice = Exercise("ex-twice")
    >>> @twice.function("Sums", inputs=lambda rng, N: rng.normal(size=N))
    ... def double(x):
    ...     return x + x
    >>> @double.mistake("This is the square.", "Powers")
    ... def square(x):
    ...     return x * x
    >>> twice.value("four", 2 + 2, "Sums").mistakes((5, "Count again."))  # doctest: +ELLIPSIS
    Value(...)
    >>> from lesson_code.checks import check_exercise
    >>> check_exercise(twice, four=4)
    ex-twice: four is right; still to come: double.
    """

    label: str
    chapter: str = ""
    parts: list[Function | Value] = field(default_factory=list, init=False)

    def function(
        self,
        section: str,
        *,
        inputs: Callable | None = None,
        special: Sequence[Callable] = (),
        view: Callable | None = None,
        unit: str = "tokens",
    ) -> Callable[[Callable], Function]:
        """Ask for a function; the decorated one is the reference, whose signature is the stub's.

        Parameters
        ----------
        section : str
            The heading of the chapter that derives it.
        inputs : callable, optional
            ``inputs(rng, N)`` returns the arguments; q, k and v of
            :func:`~lesson_code.checks.random_qkv` by default. Where it takes ``leading``, ``D`` or
            ``M``, they are varied too.
        special : sequence of callables
            ``special(rng)`` returns arguments of a further case: large scores, a zero, equal keys.
        view : callable, optional
            Makes what is compared out of the function: ``view(fn)(*inputs)``. For what is written
            with freedom, such as the order of features.
        unit : str
            What N counts, for the line that says what was tried; empty if it counts nothing.
        """

        def declare(reference: Callable) -> Function:
            part = Function(reference.__name__, reference, section, inputs, special, view, unit)
            self.parts.append(part)
            return part

        return declare

    def value(
        self,
        name: str,
        reference: object,
        section: str,
        form: str = "a number",
        *,
        tolerance: float | None = None,
    ) -> Value:
        """Ask for a number, an array or a word.

        Parameters
        ----------
        name : str
            The variable that holds it.
        reference : object
            The right value, or a function without arguments that returns it. It is computed, so
            that the answer stands nowhere to be read by accident.
        section : str
            The heading of the chapter that it follows from.
        form : str
            What the answer looks like, for the comment in the notebook: ``"2 rows of 2 numbers"``.
        tolerance : float, optional
            Relative to the value and to the largest one. By default whole numbers must be exact,
            and others right to half a percent, so that three digits are enough.
        """
        part = Value(name, reference, section, form, tolerance)
        self.parts.append(part)
        return part

    def truth(
        self, name: str, right: bool, section: str, sentence: str, form: str = "True or False"
    ) -> Value:
        """Ask whether something is so; the sentence is for the other answer."""
        return self.value(name, right, section, form).mistakes((not right, sentence))

    @property
    def call(self) -> str:
        """The call that checks it, with the names of its parts."""
        names = [part.name for part in self.parts]
        given = names if len(names) == 1 else [f"{name}={name}" for name in names]
        items = ", ".join([f'"{self.label}"', *given])
        line = f"checks.check_exercise({items})"
        if len(line) <= 60:
            return line
        indent = " " * 4
        wrapped = textwrap.fill(items, 60, initial_indent=indent, subsequent_indent=indent)
        return f"checks.check_exercise(\n{wrapped})"

    def look_at(self, section: str) -> str:
        """The sentence that sends the reader to a section."""
        return f'Look at "{section}"' + f' in "{self.chapter}"' * bool(self.chapter) + "."
