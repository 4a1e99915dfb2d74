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
    between,
    bracket,
    conversion,
    decoding,
    delta,
    devices,
    family,
    feature_maps,
    gated_delta,
    gates,
    images,
    kernels,
    layer,
    learning,
    machines,
    mamba,
    memory,
    numerics,
    random_features,
    real_models,
    recall,
    recurrence,
    retnet,
    rwkv,
    scans,
    softmax,
    tracking,
    worth,
)
from lesson_code.plots.lines import curves
from lesson_code.plots.matrices import matrix_equation

__all__ = [
    "between",
    "bracket",
    "conversion",
    "curves",
    "decoding",
    "delta",
    "devices",
    "family",
    "feature_maps",
    "gated_delta",
    "gates",
    "images",
    "kernels",
    "layer",
    "learning",
    "machines",
    "mamba",
    "matrix_equation",
    "memory",
    "numerics",
    "random_features",
    "real_models",
    "recall",
    "recurrence",
    "retnet",
    "rwkv",
    "scans",
    "softmax",
    "tracking",
    "worth",
]
