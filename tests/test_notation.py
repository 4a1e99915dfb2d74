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


def documented() -> list[tuple[str, str, str]]:
    """(function, argument, shape) for every array in the docstrings of the public functions."""
    names = [name for name in lc.__all__ if callable(getattr(lc, name))]
    public = [getattr(package, name) for package in (lc, lt) for name in names]
    for state in (lc.LinearAttentionState, lt.LinearAttentionState):
        public += [state.write, state.read]
    return [
        (function.__qualname__, *found)
        for function in public
        for found in re.findall(
            r"^\s*(\w+) : (?:number or )?(?:array|tensor), shape (\(.*?\))(?:, optional)?$",
            inspect.getdoc(function),
            flags=re.M,
        )
    ]


@pytest.mark.parametrize(("function", "name", "shape"), documented())
def test_docstrings_write_shapes_as_the_page_does(function: str, name: str, shape: str) -> None:
    if function.startswith("LinearAttentionState."):  # one token, feature-mapped
        assert shape in ("(..., C)", "(..., M)")
    elif (function.replace("WKVState", "wkv"), name) in OF_ONE_MODEL:
        assert shape == OF_ONE_MODEL[function.replace("WKVState", "wkv"), name]
    elif name == "x":  # what a feature map is given: a query or a key
        assert shape == "(..., D)"
    else:
        heads = re.sub(r"\bH(q|kv)?, (?=N)", "", shape)  # heads are leading dimensions
        assert heads == SHAPES[name][0]


def test_docstrings_were_found() -> None:
    assert len(documented()) > 150


def test_every_argument_of_a_single_model_is_one() -> None:
    found = {(function.replace("WKVState", "wkv"), name) for function, name, _ in documented()}
    assert OF_ONE_MODEL.keys() <= found


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
