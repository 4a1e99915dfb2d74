"""The figures of the book. Needs matplotlib.

`curves` and `matrix_equation` serve every chapter; what only one chapter draws is in the module of
that chapter's subject. Every function returns a figure, which a notebook shows as its last
expression.
"""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lesson_code.plots needs matplotlib: pip install matplotlib"
    ) from error

from lesson_code.plots import (
    bracket,
    delta,
    devices,
    family,
    feature_maps,
    gates,
    kernels,
    layer,
    mamba,
    memory,
    numerics,
    recurrence,
    retnet,
    rwkv,
    scans,
    softmax,
)
from lesson_code.plots.style import curves, matrix_equation

__all__ = [
    "bracket",
    "curves",
    "delta",
    "devices",
    "family",
    "feature_maps",
    "gates",
    "kernels",
    "layer",
    "mamba",
    "matrix_equation",
    "memory",
    "numerics",
    "recurrence",
    "retnet",
    "rwkv",
    "scans",
    "softmax",
]
