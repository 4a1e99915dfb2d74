"""The notation page says what the code does: names, shapes, and the functions it mentions."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import lesson_code.numpy as lc
import lesson_code.torch as lt

PAGE = (Path(__file__).resolve().parent.parent / "book" / "notation.md").read_text("utf-8")
SIZES = {"N": 7, "D": 5, "M": 3, "C": 21, "H": 2, "R": 4}  # C is that of polynomial(2, 5)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SHAPES = {
    name.strip("`"): re.findall(r"`(\(.*?\))`", shape)
    for _, name, shape, _ in rows("Arrays and functions")
}


OF_ONE_MODEL = {
    (function, name): re.search(r"`(\(.*?\))`", shape).group(1)
    for functions, names, shape, _ in rows("Arguments of single models")
    for function in re.findall(r"`(\w+)`", functions)
    for name in re.findall(r"`(\w+)`", names)
}


def shape_of(text: str) -> tuple[int, ...]:
    """`(..., N, D)` as numbers, the leading dimensions left out."""
    return tuple(SIZES[size] for size in re.findall(r"[A-Z]", text))


def arrays() -> dict[str, np.ndarray]:
    """Real arrays under the page's names, for one sequence (latent attention: H heads)."""
    rng = np.random.default_rng(0)
    q, k, v, latent, up_k, up_v = (
        rng.standard_normal(shape_of(SHAPES[name][0]))
        for name in ("q", "k", "v", "latent", "up_k", "up_v")
    )
    feature_map = lc.polynomial(2, SIZES["D"])
    out, (S, z) = lc.linear_attention(
        q, k, v, feature_map=feature_map, causal=True, return_state=True
    )
    heads = lc.latent_attention(np.stack([q, q]), latent, up_k, up_v)
    assert heads.shape == (SIZES["H"], *out.shape)
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "attention_weights": lc.attention_weights(q, k),
        "similarity": feature_map(q) @ feature_map(k).T,
        "feature_map": feature_map(q[0]),
        "S": S,
        "z": z,
        "latent": latent,
        "up_k": up_k,
        "up_v": up_v,
    }


def test_the_page_and_the_code_name_the_same_arrays() -> None:
    assert arrays().keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_real_arrays(name: str) -> None:
    assert arrays()[name].shape == shape_of(SHAPES[name][-1])


OPERATORS = {name: f for name, f in vars(lc).items() if hasattr(f, "contract")}


def written(axes: str) -> str:
    """A declaration of axes as docstrings and pages write it: "N D" is (..., N, D)."""
    if axes == "...":
        return "(...)"
    letters = axes.strip("()").replace("Nq", "N").split()
    if not axes.startswith("("):
        return f"({', '.join(['...', *letters])})"
    return f"({', '.join(letters)}{',' * (len(letters) == 1)})"


def documented(function) -> dict[str, str]:
    """The shapes of arguments in a docstring: one for several names, or one for each."""
    found = {}
    for names, shapes in re.findall(
        r"^([\w, ]+) : (?:number or )?array, shape (\(.*\))(?:, optional)?$",
        inspect.getdoc(function).partition("\nReturns\n")[0],
        flags=re.M,
    ):
        each = re.findall(r"\(.*?\)", shapes)
        names = names.split(", ")
        found |= dict(zip(names, each * len(names) if len(each) == 1 else each, strict=False))
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_docstrings_write_the_shapes_that_are_declared(name: str) -> None:
    function = OPERATORS[name]
    declared = {name: written(axes) for name, axes in function.contract.axes.items()}
    found = documented(function)
    assert found == {name: declared[name] for name in found}
    assert found or "As in :func:`" in function.__doc__


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_declares_what_numpy_does(name: str) -> None:
    ours, theirs = OPERATORS[name].contract, getattr(lt, name).contract
    for part in ("axes", "output", "state", "reads", "forms", "ranges"):
        assert getattr(ours, part) == getattr(theirs, part), part


@pytest.mark.parametrize("name", OPERATORS)
def test_the_page_writes_the_shapes_that_are_declared(name: str) -> None:
    for argument, axes in OPERATORS[name].contract.axes.items():
        shape = written(axes)
        if (name, argument) in OF_ONE_MODEL:
            assert shape == OF_ONE_MODEL[name, argument]
        elif argument in SHAPES:
            assert re.sub(r"\bH(q|kv)?, (?=N)", "", shape) == SHAPES[argument][0]


def test_every_argument_of_a_single_model_is_one() -> None:
    declared = {(name, x) for name, f in OPERATORS.items() for x in f.contract.axes}
    states = {(name, part) for name in OPERATORS for part in lc.WKVState._fields}
    for name, argument in OF_ONE_MODEL.keys() - declared - states:
        assert argument == "initial_state"
        assert OF_ONE_MODEL[name, argument] == written(OPERATORS[name].contract.state)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(LinearAttentionState\.\w+)`", PAGE))))
def test_functions_on_the_page_exist(name: str) -> None:
    assert callable(getattr(lc.LinearAttentionState, name.split(".")[1]))


def test_sizes_in_code_are_arguments_or_letters_of_shapes() -> None:
    arguments = {
        argument
        for name in lc.__all__
        if callable(getattr(lc, name))
        for argument in inspect.signature(getattr(lc, name)).parameters
    }
    letters = set("".join(shape for shapes in SHAPES.values() for shape in shapes))
    later = {"width", "t", "i", "j"}  # the modules' argument; positions
    for _, code, _ in rows("Sizes"):
        for name in re.findall(r"`(\w+)`", code):
            assert name in arguments | letters | later
