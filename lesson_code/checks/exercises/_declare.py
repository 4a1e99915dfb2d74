"""What an exercise is made of: parts to be written or computed, and typical mistakes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """A typical mistake, recognized by computing it.

    Parameters
    ----------
    what : object
        For a :class:`Function` the function that a reader with this misunderstanding writes, of the
        same arguments. For a :class:`Value` the wrong value, or a function without arguments that
        returns it.
    message : str
        What is wrong, in a sentence or two, without the answer.
    section : str
        The heading of the chapter to look at.
    """

    what: object
    message: str
    section: str


@dataclass(frozen=True)
class Further:
    """A check that holds beside agreement with the reference.

    Parameters
    ----------
    check : callable
        Such as ``check_causal``; called as ``check(fn, inputs=inputs, **options)``.
    section : str
        The heading of the chapter to look at when it objects.
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default.
    options : mapping
        Further keywords of the check, such as ``{"empty_pieces": False}`` of ``check_streaming``.
    """

    check: Callable
    section: str
    inputs: Callable | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that the reader writes.

    Parameters
    ----------
    signature : str
        Name and arguments, ``"my_memory(q, k, v)"``; the stub in the notebook has them.
    reference : callable
        What it must agree with, called with the same arguments.
    section : str
        The heading of the chapter that derives it.
    mistakes : sequence of Mistake
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v of
        :func:`~lesson_code.checks.random_qkv` by default. Where it takes ``leading``, ``D`` or
        ``M``, they are varied too.
    special : sequence of callables
        ``special(rng)`` returns arguments of a further case: large scores, a zero, equal keys.
    further : sequence of Further
    view : callable, optional
        Makes what is compared out of the function: ``view(fn)(*inputs)``. For what is written with
        freedom, such as the order of features, or is no function of arrays, such as a module.
    unit : str
        What N counts, for the line that says what was tried; empty if it counts nothing.
    """

    signature: str
    reference: Callable
    section: str
    mistakes: Sequence[Mistake] = ()
    inputs: Callable | None = None
    special: Sequence[Callable] = ()
    further: Sequence[Further] = ()
    view: Callable | None = None
    unit: str = "tokens"

    @property
    def name(self) -> str:
        return self.signature.removeprefix("class ").partition("(")[0]

    @property
    def stub(self) -> str:
        """What stands in the notebook of exercises until the reader has written it."""
        if self.signature.startswith("class "):
            return f"{self.signature}:\n    ...  # yours"
        return f"def {self.signature}:\n    ...  # yours"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number, an array or a word that the reader works out.

    Parameters
    ----------
    name : str
        The variable that holds it.
    reference : callable
        Computes it, without arguments; so that the number stands nowhere to be read by accident.
    section : str
        The heading of the chapter that it follows from.
    mistakes : sequence of Mistake
    form : str
        What the answer looks like, for the comment in the notebook: ``"2 rows of 2 numbers"``.
    tolerance : float, optional
        Relative to the value and to the largest one. By default whole numbers must be exact, and
        others right to half a percent, so that three digits are enough.
    """

    name: str
    reference: Callable
    section: str
    mistakes: Sequence[Mistake] = ()
    form: str = "a number"
    tolerance: float | None = None

    @property
    def stub(self) -> str:
        return f"{self.name} = None  # yours: {self.form}"


@dataclass(frozen=True)
class Exercise:
    """An exercise.

    Parameters
    ----------
    label : str
        Its label in the book, such as ``"ex-memory-code"``.
    parts : tuple of Function and Value
        In the order in which the reader comes to them.
    chapter : str
        The title of its chapter.
    """

    label: str
    parts: tuple[Function | Value, ...]
    chapter: str = ""

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


def truth(
    name: str, right: bool, *, section: str, message: str, form: str = "True or False"
) -> Value:
    """A part that is answered True or False; the message and the section are for the other one."""
    return Value(
        name=name,
        reference=lambda: right,
        section=section,
        form=form,
        mistakes=(Mistake(not right, message, section),),
    )


def chapter(title: str, *exercises: tuple) -> dict[str, Exercise]:
    """The exercises ``(label, part, part, ...)`` of a chapter, by label."""
    return {label: Exercise(label, tuple(parts), title) for label, *parts in exercises}
