"""The book's exercises, each with typical mistakes that are recognized when a reader makes them.

One module for each chapter, loaded when an exercise of the chapter is checked, declares what is
asked for, how inputs are drawn, and functions that make the typical mistakes. An answer that is
wrong is compared with what these give for the same inputs: a mistake is recognized by computing it.
:func:`lesson_code.checks.check_exercise` does that.
"""

from lesson_code.exercises._declare import Exercise, Function, Mistake, Value
from lesson_code.exercises._find import exercises_of, find_exercise

__all__ = ["Exercise", "Function", "Mistake", "Value", "exercises_of", "find_exercise"]
