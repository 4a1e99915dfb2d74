"""What `check_exercise` says: exercises found by name, answers called, compared and explained."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from lesson_code import checks
from lesson_code.checks import check_exercise
from lesson_code.exercises import Exercise
from lesson_code.exercises._functions import is_stub


def asks_for(right: object) -> Exercise:
    """An exercise that asks for one value, x."""
    own = Exercise("ex-own")
    own.value("x", right, "Sums")
    return own


def asks_to_write(reference, section="Sums", **options) -> Exercise:
    """An exercise that asks for one function; of two widths, N rows each, if nothing is said."""
    own = Exercise("ex-own")
    own.function(section, **options)(reference)
    return own


def refuses(exercise: Exercise | str, answer: object, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_exercise(exercise, answer)


# --- Names and parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ex-memory-cod", "memory-code", "Ex_Memory_Code"])
def test_unknown_names(name) -> None:
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise(name, len)
    with pytest.raises(ValueError, match="labels look like"):
        check_exercise("zzz", len)


def test_several_parts_go_by_name() -> None:
    with pytest.raises(ValueError, match="my_write=..., my_read=..., my_memory=..."):
        check_exercise("ex-memory-code", len)
    with pytest.raises(ValueError, match="asks for erase: call .*erase\\)"):
        check_exercise("ex-memory-erase", eraser=len)


def test_parts_may_come_one_by_one(capsys) -> None:
    check_exercise("ex-memory-hand", S_4=[[130, 160], [80, 100]], z_4=None)
    check_exercise(
        "ex-memory-hand", S_4=[[130, 160], [80, 100]], z_4=(3, 2), plain=[130, 160],
        normalized=[43.3, 53.3],
    )  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "ex-memory-hand: S_4 is right; still to come: z_4, plain and normalized.",
        "ex-memory-hand: S_4, z_4, plain and normalized are right.",
    ]


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    script = """
import sys
from lesson_code import checks
assert not [x for x in sys.modules if x.startswith(("lesson_code.exercises", "torch"))]
checks.check_exercise("ex-memory-erase", None)
assert "lesson_code.exercises.memory" in sys.modules
assert "lesson_code.exercises.recurrence" not in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- What is not written yet -------------------------------------------------------------------


def dots(q, k): ...


def passing(q, k):
    pass


def documented_dots(q, *, k=None):
    """What it will do."""
    ...


def closed(x=1):
    def inner(q):
        return x if False else None

    def stub(q): ...

    return inner, stub


def test_stubs() -> None:
    assert all(map(is_stub, (dots, passing, documented_dots, closed()[1])))
    written = closed, len, np.add, lambda q: q, lambda q: None
    assert not any(map(is_stub, written))


# --- Values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["a lot", [[1, 2], [3]], object(), True, len])
def test_what_is_no_number_is_refused(answer) -> None:
    with pytest.raises(AssertionError, match="S_4 must be two rows of two numbers"):
        check_exercise("ex-memory-hand", S_4=answer)


def test_the_form_of_numbers_is_free() -> None:
    """A column for a list, and what float32 leaves beside a whole number."""
    for answer in [[30], [0]], [[30, 0]], np.float32([30.000002, 1e-6]):
        check_exercise(asks_for([30.0, 0.0]), answer)
    for wrong in [30.001, 0], [30, 0.001], [31, 0], [[30, 0], [30, 0]], []:
        refuses(asks_for([30.0, 0.0]), wrong, "x is not right")
    for wrong in 1e9 + 1, 1e9 + 0.5, []:
        refuses(asks_for(1e9), wrong, "x is not right")


def test_two_digits_are_too_few() -> None:
    """Three are asked for; a right answer with two is not called wrong."""
    own = asks_for([-0.3863, 1.5])
    for right in [-0.386, 1.5], [-0.3863, 1.5]:
        check_exercise(own, right)
    refuses(own, [-0.39, 1.5], "x is right as far as it goes: give three digits[.]")
    for wrong in [-0.38, 1.5], [0.39, 1.5], [-0.39, 1.6]:
        refuses(own, wrong, "x is not right")
    refuses(asks_for(8451), 8500, "x is not right")


def test_infinite_mistakes_are_recognized() -> None:
    own = asks_for([0.25, -np.inf])
    own.parts[0].mistakes(
        ([-np.inf, 0.25], "The other way round.", "Order"),
        (lambda: [np.inf, np.inf], "Too large."),
    )
    check_exercise(own, [0.2501, -np.inf])
    refuses(own, [-np.inf, 0.25], 'The other way round. Look at "Order"')
    refuses(own, [np.inf] * 2, 'Too large. Look at "Sums"')
    refuses(own, [0.25, 1e9], "first at index 1; 1 of 2 entries are right")


@pytest.mark.parametrize(
    "answer, kind",
    [
        (1 + 0j, "complex"),
        (b"1", "bytes"),
        ({1}, "set"),
        (np.ma.masked_array([1.0], mask=[True]), "MaskedArray"),
        ([1, "1"], "list of int and str"),
    ],
)
def test_what_only_looks_like_a_number(answer, kind) -> None:
    refuses(asks_for(1.0), answer, f"x must be a number, it is of type {kind}[.]")
    for right in 1, Fraction(1), np.float32(1), np.ma.masked_array([1.0], mask=[False]):
        check_exercise(asks_for(1.0), right)


def test_true_or_false() -> None:
    own = Exercise("ex-own")
    own.truth("causal", False, "Masks", "What enters the sum?")
    assert own.parts[0].stub == "causal = None  # yours: True or False"
    for right in False, np.False_, [False]:
        check_exercise(own, right)
    refuses(own, True, 'right. What enters the sum[?] Look at "Masks"')
    refuses(own, 0, "must be True or False, it is of type int")


# --- Functions ---------------------------------------------------------------------------------

TWICE = Exercise("ex-twice")


@TWICE.function(
    "Twice", inputs=lambda rng, N: rng.normal(size=N), special=[lambda rng: np.full(3, 1e3)]
)
def double(x):
    return 2 * x


double.mistakes((lambda x: x**2, "Squared.", "Powers"))


@double.mistake("Large ones stay.")
def small_only(x):
    return np.where(np.abs(x) > 100, x, 2 * x)


def test_an_exercise_of_ones_own(capsys) -> None:
    check_exercise(TWICE, lambda x: x + x)
    assert capsys.readouterr().out == "ex-twice: right, on 7 inputs of 1 to 131 tokens.\n"
    refuses(TWICE, lambda x: x * x, '^ex-twice: Squared. Look at "Powers"')
    refuses(TWICE, lambda x: 2 * x if x.max() < 100 else x, 'Large ones stay. Look at "Twice"')


def test_what_is_special_is_said() -> None:
    special = "Ordinary inputs came out right. In these something"
    refuses(TWICE, lambda x: np.minimum(2 * x, 100), special)
    refuses(TWICE, lambda x: 2 * x[:7], "is a length or a chunk size")


def test_a_mistake_that_does_not_explain_all_is_not_named() -> None:
    """Squared where it is short, and something else where it is long."""
    refuses(TWICE, lambda x: x**2 if len(x) == 1 else x + 1, '^(?!.*Squared).*Look at "Twice"')


def test_a_mistake_is_known_however_it_is_written() -> None:
    """One token after the other, for all leading dimensions, and with other library calls."""

    def loop(read):
        def memory(q, k, v):
            S, out = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])), np.empty_like(v)
            for t in range(k.shape[-2]):
                before, S = S, S + np.einsum("...d,...m->...dm", k[..., t, :], v[..., t, :])
                out[..., t, :] = read(before, S, q[..., t, :])
            return out

        return memory

    def wrong(read, words):
        with pytest.raises(AssertionError, match=words):
            check_exercise("ex-memory-code", my_memory=loop(read))

    wrong(lambda before, S, q: np.einsum("...dm,...d->...m", before, q), "before its own token")
    wrong(lambda before, S, q: np.matmul(S, q[..., None])[..., 0], "from the wrong side")
    check_exercise("ex-memory-code", my_memory=loop(lambda _, S, q: np.einsum("...dm,...d", S, q)))


def test_leading_dimensions_are_said_to_be_missing() -> None:
    def memory(q, k, v):
        return np.tril(q @ k.T) @ v

    with pytest.raises(AssertionError, match="One sequence alone came out right"):
        check_exercise("ex-memory-code", my_memory=memory)


def test_what_is_no_usable_function_is_refused() -> None:
    refuses(TWICE, np.zeros(3), "double must be a function, it is of type ndarray")
    refuses(TWICE, lambda x: None, "returned None: is its return missing")


def test_the_library_is_that_of_the_exercise() -> None:
    torch = pytest.importorskip("torch")
    refuses(TWICE, lambda x: torch.tensor(2 * x), "is a torch tensor, a NumPy array is expected")
    refuses(TWICE, lambda x: torch.tensor(x * x), 'Squared. Look at "Powers".* is a torch tensor')
    refuses(TWICE, lambda x: np.ma.masked_less(2 * x, 0), "is a MaskedArray, a NumPy array is")

    def halves(x):
        return x / 2, x.sum()

    own = asks_to_write(halves, inputs=lambda rng, N: torch.tensor(rng.normal(size=N)))
    check_exercise(own, lambda x: (0.5 * x, float(x.sum())))
    words = r"output\[0\] is a NumPy array, a torch tensor is expected"
    refuses(own, lambda x: (x.numpy() / 2, x.sum()), words)


def test_a_function_of_other_arguments_is_refused() -> None:
    def power(x, n, *, chunk=2):
        return x**n

    own = asks_to_write(power, inputs=lambda rng, N: (rng.normal(size=N), 2))
    for wrong, why in (
        (lambda x: x**2, "too many positional arguments"),
        (lambda x, n, m: x**n, "missing a required argument: 'm'"),
        (lambda *, x, n: x**n, "too many positional arguments"),
    ):
        words = rf"power is called as power\(x, n, \*, chunk=2\), yours .*: {why}[.]"
        refuses(own, wrong, words)
    refuses(own, lambda n, x: x**n, "gets x, n in this order, yours takes n, x. With n")
    for right in power, lambda *args: power(*args), partial(power), np.power:
        check_exercise(own, right)
    check_exercise(own, lambda n, x: n**x)  # called otherwise, and right all the same


def test_what_a_view_cannot_use_is_not_the_function_s_own_error() -> None:
    def view(fn):
        return lambda q, k: fn(q) @ fn(k).T

    def features(x):
        return x

    def own_error(x):
        raise NotImplementedError

    def generator(x):
        yield x

    own = asks_to_write(features, inputs=lambda rng, N: (*rng.normal(size=(2, N, 3)),), view=view)
    check_exercise(own, lambda x: -x)
    cannot = "from which the check cannot go on: "
    for wrong, words in (
        (lambda x: None, "returned None: is its return missing"),
        (own_error, "your function raised NotImplementedError[.]"),
        (lambda x: list(x), f"returned a list of [0-9]+, {cannot}AttributeError"),
        (generator, f"returned a generator, {cannot}AttributeError"),
        (lambda x: x[..., None], f"returned one array, {cannot}ValueError"),
    ):
        refuses(own, wrong, f'{words}.*Look at "Sums"')


def test_further_checks_name_their_section_and_have_options() -> None:
    def sums(q, k, v, *, initial_state=None, return_state=False):
        return np.cumsum(v, axis=-2)

    def stacked(q, k, v, *, initial_state=None, return_state=False):
        out, total = [], 0 if initial_state is None else initial_state
        for t in range(v.shape[-2]):
            total = total + v[..., t, :]
            out.append(total)
        return (np.stack(out, axis=-2), total) if return_state else np.stack(out, axis=-2)

    own = asks_to_write(sums)
    own.parts[0].passes(checks.check_streaming, "Pieces")
    refuses(own, lambda q, k, v: sums(q, k, v), 'TypeError.* Look at "Pieces"')
    refuses(own, stacked, 'An empty piece .* Look at "Pieces"')
    own = asks_to_write(sums)
    own.parts[0].passes(checks.check_streaming, "Pieces", empty_pieces=False)
    check_exercise(own, stacked)


def test_a_number_is_not_a_multiple_and_text_is_no_number() -> None:
    def count(x):
        return float(x)

    own = asks_to_write(count, inputs=lambda rng, N: (N,), unit="")
    refuses(own, lambda x: x**2 + 1.0, "^(?!.*everywhere)")
    for right in int, np.float64, np.asarray, Fraction:  # numbers, whatever they are called
        check_exercise(own, lambda x, right=right: right(x))
    for wrong, words in (
        (lambda x: f"{x}", "is text, '7', where numbers are expected"),
        (lambda x: [x], "returns a list of 1 where one number is expected"),
        (lambda x: (y for y in [x]), "is of type generator, where numbers are expected"),
        (lambda x: {x}, "is of type set, where numbers are expected"),
        (lambda x: lambda: x, "is of type function, where numbers are expected"),
        (lambda x: complex(x), "has dtype complex128, float64 is expected[.]"),
        (lambda x: x if x == 7 else 0.5, "With 7 it came out right[.]"),
    ):
        refuses(own, wrong, words)
