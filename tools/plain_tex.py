"""Formulas as plain text, where no formula can be set: in descriptions and in search results."""

from __future__ import annotations

import re

from docutils import nodes

NAMES = """
alpha α beta β gamma γ delta δ lambda λ mu μ pi π sigma σ phi φ ell ℓ epsilon ε
Delta Δ Lambda Λ Gamma Γ Phi Φ
""".split()
OTHERS = """
times × cdot · le ≤ ge ≥ approx ≈ top ᵀ infty ∞ odot ⊙ in ∈ otimes ⊗ pm ± sqrt √ sum Σ
ldots … dots … cdots … to → mapsto ↦ lfloor ⌊ rfloor ⌋ simil sim
""".split()
LETTERS = dict(zip(NAMES[::2], NAMES[1::2], strict=True))
SIGNS = LETTERS | dict(zip(OTHERS[::2], OTHERS[1::2], strict=True)) | {"quad": " "}


def plain(tex: str) -> str:
    """A short formula as text: `\\phi(q_t)^\\top S` becomes `φ(q_t)ᵀ S`."""
    text = re.sub(r"\\(?:operatorname|text|mathrm|mathbf|mathbb)\{([^{}]*)\}", r"\1", tex)
    text = re.sub(r"\\[tfd]*frac\s*(\d)\s*(\d)", r"\1/\2", text)
    text = re.sub(r"\\[td]?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", text)
    text = re.sub(r"\\(?:left|right|[bB]ig+[lr]?)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[,;:! ]", " ", text)
    text = re.sub(r"\^\{?\\top\}?", "ᵀ", text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda m: SIGNS.get(m[1], m[1]), text)
    text = text.replace(r"\{", "(").replace(r"\}", ")")
    text = re.sub(r"[{}\\]", "", text)
    return " ".join(text.split())


def text_of(node: nodes.Node) -> str:
    """The text of a node, with its formulas as plain text."""
    if isinstance(node, nodes.math):
        return plain(node.astext())
    if isinstance(node, nodes.Text):
        return node.astext()
    return "".join(text_of(child) for child in node.children)
