"""Checks for exercises: each takes your function, tries it on many inputs and explains a failure.

A check returns None when the function is right, and raises AssertionError with a sentence that says
what is wrong, where, and what is likely to be the cause:

``check_same``
    the same output as a reference function
``check_causal``
    no output depends on later positions
``check_streaming``
    a sequence that is split anywhere gives the same outputs, through the state
``check_padding``
    padding at the end of a row changes nothing of it, nor of its state
``check_linear_cost``
    peak memory grows with N, not with N²
``check_gradients``
    gradients agree with finite differences

All are called as ``check_x(fn, *, inputs=None, seed=0)``, and what runs is ``fn(*inputs(rng, N))``.
Here ``inputs`` is a function of a random generator and a length that returns the arguments; the
checks choose the lengths, and ``seed`` makes the generator. Whatever axes get longer with N are
taken for time. Without ``inputs`` the arguments are q, k and v from :func:`random_qkv` in float64,
as one sequence and with leading dimensions, for every function of the book takes ``(..., N, D)``.
For a function of one sequence alone write ``inputs=random_qkv``.

The functions may return NumPy arrays or torch tensors; for tensors, let ``inputs`` return tensors.
Two results agree when half the digits of their dtype do (1.5e-8 in float64, 3.5e-4 in float32,
relative to the value and to the largest one), so that rounding is never an error.

:func:`check_exercise` knows the book's exercises by their labels, and what readers often get wrong
in them; it says where in the chapter to look.

Every check also refuses a function that raises, returns None, or changes its inputs in place.
"""

from lesson_code.checks._calling import random_qkv
from lesson_code.checks.causal import check_causal
from lesson_code.checks.exercise import check_exercise
from lesson_code.checks.gradients import check_gradients
from lesson_code.checks.linear_cost import check_linear_cost
from lesson_code.checks.padding import check_padding
from lesson_code.checks.same import check_same
from lesson_code.checks.streaming import check_streaming

__all__ = [
    "check_causal",
    "check_exercise",
    "check_gradients",
    "check_linear_cost",
    "check_padding",
    "check_same",
    "check_streaming",
    "random_qkv",
]
