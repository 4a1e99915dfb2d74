"""What `check_exercise` says: found by name, called, compared, explained."""

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

# --- check_exercise ----------------------------------------------------------------------------


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("ex-memory-cod", len)
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("memory-code", len)
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("Ex_Memory_Code", len)
    with pytest.raises(ValueError, match="labels look like"):
        check_exercise("zzz", len)


def test_several_parts_go_by_name() -> None:
    with pytest.raises(ValueError, match="my_write=..., my_read=..., my_memory=..."):
        check_exercise("ex-memory-code", len)
    with pytest.raises(ValueError, match="asks for erase: call .*erase\\)"):
        check_exercise("ex-memory-erase", eraser=len)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(AssertionError, match="erase must be a function, it is of type ndarray"):
        check_exercise("ex-memory-erase", np.zeros(3))


@pytest.mark.parametrize("answer", ["a lot", [[1, 2], [3]], object(), True, len])
def test_what_is_no_number_is_refused(answer) -> None:
    with pytest.raises(AssertionError, match="S_4 must be two rows of two numbers"):
        check_exercise("ex-memory-hand", S_4=answer)


def test_the_form_of_numbers_is_free() -> None:
    """A column for a list, and what float32 leaves beside a whole number."""
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [30.0, 0.0], section="Sums"),))
    for answer in [[30], [0]], [[30, 0]], np.float32([30.000002, 1e-6]):
        check_exercise(own, answer)
    for wrong in [30.001, 0], [30, 0.001], [31, 0], [[30, 0], [30, 0]], []:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(own, wrong)
    large = Exercise("ex-own", (Value(name="x", reference=lambda: 1e9, section="Sums"),))
    for wrong in 1e9 + 1, 1e9 + 0.5, []:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(large, wrong)


def test_a_list_is_described_by_what_it_holds() -> None:
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [True, False], section="Sums"),))
    with pytest.raises(AssertionError, match="it is of type list of str"):
        check_exercise(own, ["True", "False"])


def test_two_digits_are_too_few() -> None:
    """Three are asked for; a right answer with two is not called wrong."""
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [-0.3863, 1.5], section="Sums"),))
    for right in [-0.386, 1.5], [-0.3863, 1.5]:
        check_exercise(own, right)
    with pytest.raises(AssertionError, match="x is right as far as it goes: give three digits[.]"):
        check_exercise(own, [-0.39, 1.5])
    for wrong in [-0.38, 1.5], [0.39, 1.5], [-0.39, 1.6]:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(own, wrong)
    whole = Exercise("ex-own", (Value(name="x", reference=lambda: 8451, section="Sums"),))
    with pytest.raises(AssertionError, match="x is not right"):
        check_exercise(whole, 8500)


def test_infinite_mistakes_are_recognized() -> None:
    value = Value(
        name="scores",
        reference=lambda: [0.25, -np.inf],
        section="Sums",
        mistakes=(
            Mistake([-np.inf, 0.25], "The other way round.", "Order"),
            Mistake(lambda: [np.inf, np.inf], "Too large.", "Size"),
        ),
    )
    own = Exercise("ex-own", (value,))
    check_exercise(own, [0.2501, -np.inf])
    for wrong, words in ([-np.inf, 0.25], "other way round"), ([np.inf] * 2, "Too large"):
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)
    with pytest.raises(AssertionError, match="first at index 1; 1 of 2 entries are right"):
        check_exercise(own, [0.25, 1e9])


@pytest.mark.parametrize(
    "answer, kind",
    [
        (1 + 0j, "complex"),
        (b"1", "bytes"),
        ("1", "str"),
        ({1}, "set"),
        (np.ma.masked_array([1.0], mask=[True]), "MaskedArray"),
        ([1, "1"], "list of int and str"),
    ],
)
def test_what_only_looks_like_a_number(answer, kind) -> None:
    own = Exercise("ex-own", (Value(name="x", reference=lambda: 1.0, section="Sums"),))
    with pytest.raises(AssertionError, match=f"x must be a number, it is of type {kind}[.]"):
        check_exercise(own, answer)
    for right in 1, Fraction(1), np.float32(1), np.ma.masked_array([1.0], mask=[False]):
        check_exercise(own, right)


def test_true_or_false() -> None:
    own = Exercise(
        "ex-own", (truth("causal", False, section="Masks", message="What enters the sum?"),)
    )
    assert own.parts[0].stub == "causal = None  # yours: True or False"
    for right in False, np.False_, [False]:
        check_exercise(own, right)
    with pytest.raises(AssertionError, match='right. What enters the sum[?] Look at "Masks"'):
        check_exercise(own, True)
    with pytest.raises(AssertionError, match="must be True or False, it is of type int"):
        check_exercise(own, 0)


def test_parts_may_come_one_by_one(capsys) -> None:
    check_exercise("ex-memory-hand", S_4=[[130, 160], [80, 100]], z_4=None)
    assert capsys.readouterr().out == (
        "ex-memory-hand: S_4 is right; still to come: z_4, plain and normalized.\n"
    )


def dots(q, k): ...


def passing(q, k):
    pass


def documented(q, k):
    """What it will do."""


def documented_dots(q, *, k=None):
    """What it will do."""
    ...


def closed(x=1):
    def inner(q):
        return x if False else None

    def stub(q): ...

    return inner, stub


class Unwritten:
    def __init__(self, width):
        self.width = width

    def forward(self, x): ...


class Written(Unwritten):
    def forward(self, x):
        return x


@pytest.mark.parametrize("fn", [dots, passing, documented, documented_dots, closed()[1], Unwritten])
def test_stubs(fn) -> None:
    assert is_stub(fn)


@pytest.mark.parametrize("fn", [closed, len, np.add, lambda q: q, lambda q: None, Written])
def test_what_is_no_stub(fn) -> None:
    assert not is_stub(fn)


def test_a_function_that_returns_nothing_is_refused() -> None:
    def fn(S, k):
        S - np.outer(k, k @ S)

    with pytest.raises(AssertionError, match="returned None: is its return missing"):
        check_exercise("ex-memory-erase", fn)


def double(x):
    return 2 * x


OWN = Exercise(
    "ex-own-double",
    (
        Function(
            signature="my_double(x)",
            reference=double,
            section="Twice",
            inputs=lambda rng, N: rng.normal(size=N),
            special=(lambda rng: np.full(3, 1e3),),
            mistakes=(
                Mistake(lambda x: x**2, "Squared.", "Powers"),
                Mistake(lambda x: np.where(x > 100, x, 2 * x), "Large ones stay.", "Size"),
            ),
        ),
    ),
)


def test_an_exercise_of_ones_own(capsys) -> None:
    check_exercise(OWN, double)
    assert capsys.readouterr().out == "ex-own-double: right, on 7 inputs of 1 to 131 tokens.\n"
    with pytest.raises(AssertionError, match='^ex-own-double: Squared. Look at "Powers"'):
        check_exercise(OWN, lambda x: x * x)
    with pytest.raises(AssertionError, match='Large ones stay. Look at "Size"'):
        check_exercise(OWN, lambda x: double(x) if x.max() < 100 else x)


def test_what_is_special_is_said() -> None:
    with pytest.raises(AssertionError, match="Ordinary inputs came out right. In these something"):
        check_exercise(OWN, lambda x: np.minimum(2 * x, 100))
    with pytest.raises(AssertionError, match="is a length or a chunk size fixed"):
        check_exercise(OWN, lambda x: 2 * x[:7])


def test_the_library_is_that_of_the_exercise() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(AssertionError, match="output is a torch tensor, a NumPy array is expected"):
        check_exercise(OWN, lambda x: torch.tensor(2 * x))
    with pytest.raises(AssertionError, match='Squared. Look at "Powers".* is a torch tensor'):
        check_exercise(OWN, lambda x: torch.tensor(x * x))
    with pytest.raises(AssertionError, match="output is a MaskedArray, a NumPy array is expected"):
        check_exercise(OWN, lambda x: np.ma.masked_less(2 * x, 0))
    part = Function(
        signature="halves(x)",
        reference=lambda x: (x / 2, x.sum()),
        section="Halves",
        inputs=lambda rng, N: torch.tensor(rng.normal(size=N)),
    )
    own = Exercise("ex-own", (part,))
    check_exercise(own, lambda x: (0.5 * x, float(x.sum())))
    words = r"output\[0\] is a NumPy array, a torch tensor is expected"
    with pytest.raises(AssertionError, match=words):
        check_exercise(own, lambda x: (x.numpy() / 2, x.sum()))


def test_a_function_of_other_arguments_is_refused() -> None:
    def power(x, n):
        return x**n

    part = Function(
        signature="power(x, n, *, chunk=2)",
        reference=power,
        section="Powers",
        inputs=lambda rng, N: (rng.normal(size=N), 2),
    )
    own = Exercise("ex-own", (part,))
    for wrong, why in (
        (lambda x: x**2, "too many positional arguments"),
        (lambda x, n, m: x**n, "missing a required argument: 'm'"),
        (lambda *, x, n: x**n, "too many positional arguments"),
    ):
        words = rf"power is called as power\(x, n, \*, chunk=2\), yours .*: {why}[.]"
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)
    with pytest.raises(AssertionError, match="gets x, n in this order, yours takes n, x. With n"):
        check_exercise(own, lambda n, x: x**n)
    for right in power, lambda *args: power(*args), partial(power), np.power:
        check_exercise(own, right)
    check_exercise(own, lambda n, x: n**x)  # called otherwise, and right all the same


def test_what_a_view_cannot_use_is_not_the_function_s_own_error() -> None:
    def view(fn):
        return lambda q, k: fn(q) @ fn(k).T

    def own_error(x):
        raise NotImplementedError

    def generator(x):
        yield x

    part = Function(
        signature="features(x)",
        reference=lambda x: x,
        section="Features",
        inputs=lambda rng, N: tuple(rng.normal(size=(2, N, 3))),
        view=view,
    )
    own = Exercise("ex-own", (part,))
    check_exercise(own, lambda x: -x)
    cannot = "from which the check cannot go on: "
    for wrong, words in (
        (lambda x: None, "returned None: is its return missing"),
        (own_error, "your function raised NotImplementedError[.]"),
        (lambda x: list(x), f"returned a list of [0-9]+, {cannot}AttributeError"),
        (generator, f"returned a generator, {cannot}AttributeError"),
        (lambda x: x[..., None], f"returned one array, {cannot}ValueError"),
    ):
        with pytest.raises(AssertionError, match=f'{words}.*Look at "Features"'):
            check_exercise(own, wrong)


def test_a_mistake_that_does_not_explain_all_is_not_named() -> None:
    """Squared where it is short, and something else where it is long."""
    with pytest.raises(AssertionError) as refusal:
        check_exercise(OWN, lambda x: x**2 if len(x) == 1 else x + 1)
    assert "Squared" not in str(refusal.value)
    assert 'Look at "Twice"' in str(refusal.value)


def test_further_checks_name_their_section() -> None:
    part = Function(
        signature="attend(q, k, v)",
        reference=lambda q, k, v: np.cumsum(v, axis=-2),
        section="Sums",
        further=(Further(checks.check_streaming, "Pieces"),),
    )
    with pytest.raises(AssertionError, match='TypeError.* Look at "Pieces"'):
        check_exercise(Exercise("ex-own", (part,)), lambda q, k, v: np.cumsum(v, axis=-2))


def test_further_checks_have_options() -> None:
    def stacked(q, k, v, *, initial_state=None, return_state=False):
        out, total = [], 0 if initial_state is None else initial_state
        for t in range(v.shape[-2]):
            total = total + v[..., t, :]
            out.append(total)
        return (np.stack(out, axis=-2), total) if return_state else np.stack(out, axis=-2)

    for options in {"empty_pieces": False}, {}:
        part = Function(
            signature="attend(q, k, v, *, initial_state=None, return_state=False)",
            reference=lambda q, k, v: np.cumsum(v, axis=-2),
            section="Sums",
            further=(Further(checks.check_streaming, "Pieces", options=options),),
        )
        own = Exercise("ex-own", (part,))
        if options:
            check_exercise(own, stacked)
        else:
            with pytest.raises(AssertionError, match='An empty piece .* Look at "Pieces"'):
                check_exercise(own, stacked)


def test_a_number_is_not_a_multiple_and_text_is_no_number() -> None:
    part = Function(
        signature="count(x)",
        reference=lambda x: float(x),
        section="Counts",
        inputs=lambda rng, N: (N,),
        unit="",
    )
    own = Exercise("ex-own", (part,))
    with pytest.raises(AssertionError) as refusal:
        check_exercise(own, lambda x: x**2 + 1.0)
    assert "everywhere" not in str(refusal.value)
    with pytest.raises(AssertionError, match="is text, '7', where numbers are expected"):
        check_exercise(own, lambda x: f"{x}")
    for right in int, np.float64, np.asarray, Fraction:  # numbers, whatever they are called
        check_exercise(own, lambda x, right=right: right(x))
    for wrong, words in (
        (lambda x: [x], "returns a list of 1 where one number is expected"),
        (lambda x: (y for y in [x]), "is of type generator, where numbers are expected"),
        (lambda x: {x}, "is of type set, where numbers are expected"),
        (lambda x: lambda: x, "is of type function, where numbers are expected"),
        (lambda x: complex(x), "has dtype complex128, float64 is expected[.]"),
        (lambda x: x if x == 7 else 0.5, "With 7 it came out right[.]"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    script = """
import sys
from lesson_code import checks
before = set(sys.modules)
assert not [x for x in before if x.startswith("lesson_code.exercises.") and "._" not in x]
checks.check_exercise("ex-memory-erase", None)
assert "lesson_code.exercises.memory" in sys.modules
assert "lesson_code.exercises.recurrence" not in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
