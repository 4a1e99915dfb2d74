r"""One recurrence, many models: each is a row of one table, and the table is what runs.

Every model of the book keeps a part of its state, adds what it writes, and reads (:eq:`eq-family`):

.. math::

    S_t &= \mathrm{transition}(S_{t-1}) + \mathrm{write}_t \\
    o_t &= \mathrm{read}(S_{t-1}, S_t)

A :class:`Model` has these three as functions of one token, each beside its formula, and `run` is
the loop. What has a normalizer keeps it as the last column of its state: in a read, S stands for
the other columns and z for the last one, and in a write :math:`[v_t^\top\; 1]` is a value with a
one appended. Where there is no fixed state, S is a list of tokens, and ``+`` appends.

This is the definition, for one sequence in float64: no chunks, no running maximum, one token after
the other. The functions of `lesson_code.numpy` compute the same, faster and safely.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesson_code.numpy.feature_maps import elu_plus_one

__all__ = ["COLUMNS", "MODELS", "Model", "Part", "run", "table"]

COLUMNS = ("transition", "write", "read", "normalizer", "state", "operations", "function", "source")


@dataclass(frozen=True)
class Part:
    """A formula, and the function that computes it.

    Parameters
    ----------
    tex : str
        The formula in LaTeX.
    compute : callable
        What a call of the part calls.

    Examples
    --------
    >>> Part("C M", lambda C, M: C * M)(64, 32)
    2048
    """

    tex: str
    compute: Callable

    def __call__(self, *arguments, **sizes):
        return self.compute(*arguments, **sizes)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One row of the table: a model as the parts of the one recurrence.

    One token, x below, is an object with the model's inputs at one position as attributes, such as
    ``x.k`` of shape (D,), and its constants as they are.

    Parameters
    ----------
    name : str
        Name of the model.
    paper : str
        Key of its paper in the bibliography.
    source : str
        The paper as the text writes it.
    function : str
        Name of the same model in `lesson_code.numpy` and `lesson_code.torch`, if it has
        one.
    options : mapping
        Arguments for which that function computes this row.
    tokens : sequence of str
        Names of the inputs that have the positions on their first axis.
    constants : mapping
        Inputs that are the same at all positions, with their default, which may be None.
    start : callable
        ``start(x)``: the state before the first token, for an x with the whole inputs.
    transition : Part
        ``transition(S, x)``: what the token leaves of the state before it.
    write : Part
        ``write(x)``: what it adds.
    read : Part
        ``read(before, S, x)``: the output, from the state before and after the token. Where there
        is a normalizer, the function returns it as a last column beside what it divides.
    normalizer : str
        Formula of what the read is divided by, if anything.
    state : Part
        Numbers in the state, for the sizes in the formula.
    operations : Part
        Operations of one token in `run`, for the same sizes. One operation is one multiplication
        with the addition that follows it, or one addition alone; feature maps, exponentials,
        sigmoids and divisions are not counted. The function counts all, the formula only those that
        grow as fast as the state.
    """

    name: str
    paper: str
    source: str
    function: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] = ("q", "k", "v")
    constants: Mapping[str, Any] = field(default_factory=dict)
    start: Callable
    transition: Part
    write: Part
    read: Part
    normalizer: str = ""
    state: Part
    operations: Part

    @property
    def reads(self) -> str:
        """Whether it reads "after" it has written its own token, or "before"."""
        return "before" if "t-1" in self.read.tex else "after"


def run(model: Model, *, initial_state: Any = None, **inputs: Any) -> tuple[NDArray, Any]:
    """Run any model of the family: one loop over the tokens.

    Computes :eq:`eq-family`.

    Parameters
    ----------
    model : Model
        A row of `MODELS`, or one of your own.
    initial_state : optional
        The state that another call returned; the model's own start where it is None.
    inputs
        Arrays by name: those in ``model.tokens`` with the positions on their first axis, and
        ``model.constants``. A single sequence, without leading dimensions.

    Returns
    -------
    array, shape (N, M)
        The outputs.
    state
        What is remembered after the last token: an array, or a list of tokens.

    Raises
    ------
    TypeError
        If `model` is no Model, or an input is missing or is none of the model's.
    ValueError
        If the tokens' inputs do not have the same number of positions.

    Notes
    -----
    Nothing else is checked. NaN reaches the outputs from its token on.

    Examples
    --------
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, S = run(MODELS["RetNet"], q=q, k=k, v=v, decay=0.5)
    >>> out
    array([[ 10. ,  20. ],
           [ 30. ,  40. ],
           [117.5, 145. ]])
    >>> S
    array([[52.5, 65. ],
           [65. , 80. ]])
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, such as a row of MODELS, got {model!r}.")
    known = (*model.tokens, *model.constants)
    inputs = {name: x for name, x in model.constants.items() if x is not None} | inputs
    wrong = sorted(set(known) ^ set(inputs))
    if wrong:
        raise TypeError(
            f"{model.name} takes {', '.join(known)}; missing or unknown: {', '.join(wrong)}."
        )
    lengths = {name: len(inputs[name]) for name in model.tokens}
    N = lengths[model.tokens[0]]
    if set(lengths.values()) != {N}:
        raise ValueError(f"{model.name} takes tokens of one length, got {lengths}.")
    S = model.start(SimpleNamespace(**inputs)) if initial_state is None else initial_state
    outputs = []
    for t in range(N):
        x = SimpleNamespace(**inputs | {name: inputs[name][t] for name in model.tokens})
        before = S
        S = model.transition(before, x) + model.write(x)
        output = model.read(before, S, x)
        if model.normalizer:
            output = (output[..., :-1] / output[..., -1:]).ravel()
        outputs.append(output)
    return np.array(outputs), S


def table(*columns: str, models: Sequence[Model] | None = None) -> str:
    """The table of the family, or some of its columns, in Markdown.

    Parameters
    ----------
    columns : str
        Of `COLUMNS`; all of them by default. The name of the model stands in front.
    models : sequence of Model, optional
        The rows; those of `MODELS` by default.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If a column is unknown.

    Examples
    --------
    >>> print(table("write", "state", models=[MODELS["RetNet"]]))
    | model | write | state |
    | --- | --- | --- |
    | RetNet | $k_t v_t^\\top$ | $C M$ |
    """
    for column in columns:
        if column not in COLUMNS:
            raise ValueError(f"a column must be one of {', '.join(COLUMNS)}, got {column!r}.")
    columns = columns or COLUMNS
    rows = [["model", *columns], ["---"] * (len(columns) + 1)]
    for model in MODELS.values() if models is None else models:
        rows.append([model.name, *(_cell(model, column) for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(model, column):
    value = getattr(model, column)
    text = value.tex if isinstance(value, Part) else value
    if not text or column == "source":
        return text or "none"
    return f"`{text}`" if column == "function" else f"${text}$"


# What the rows are made of. Every state is (..., rows, columns) as the formulas have it.


def _zeros(keys, values, normalizer=False):
    """start(x) for a matrix with a row for each channel of the keys, a column for each of v."""

    def start(x):
        rows, columns = (np.shape(getattr(x, name))[-1] for name in (keys, values))
        return np.zeros((rows, columns + normalizer))

    return start


def _per_channel(x):
    """start(x) for two numbers per channel: the sum of weighted values, and that of the weights."""
    return np.zeros((x.k.shape[-1], 2))


def _with_one(v):
    """(M,) -> (M + 1,), so that the last column of what is written is the normalizer's."""
    return np.append(v, 1)


def _beside_one(v):
    """(D,) -> (D, 2), for models in which each channel is a memory of its own."""
    return np.stack([v, np.ones_like(v)], axis=-1)


def _biased_sum(S, bias):
    """What t tokens weigh, with the first t of a row's biases: (D, 2)."""
    return sum(np.exp(k + w)[:, None] * v for (k, v), w in zip(S, bias[: len(S)], strict=True))


def _gated(q, S):
    """sigmoid(q) times the sums of values, beside the sums of weights: (D, 2)."""
    return np.stack([_sigmoid(q) * S[:, 0], S[:, 1]], axis=-1)


def _corrected(S, x):
    """What a correction leaves of a state, before the new value is written."""
    return S - np.outer(x.beta * x.k, x.k @ S)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_ROWS = (
    Model(
        name="Softmax attention",
        paper="vaswani2017",
        source="Vaswani et al. (2017)",
        function="softmax_attention",
        options={"causal": True},
        start=lambda x: [],
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=Part(r"\text{append } (k_t, v_t)", lambda x: [(x.k, _with_one(x.v))]),
        read=Part(
            r"\sum_{j \le t} e^{q_t^\top k_j / \sqrt{D}} v_j",
            lambda _, S, x: sum(np.exp(k @ (x.q / np.sqrt(len(k)))) * v for k, v in S),
        ),
        normalizer=r"\sum_{j \le t} e^{q_t^\top k_j / \sqrt{D}}",
        state=Part(r"(D + M)\, t", lambda D, M, t: (D + M) * t),
        operations=Part(r"(D + M)\, t", lambda D, M, t: (D + M + 1) * t),
    ),
    Model(
        name="Linear attention",
        paper="katharopoulos2020",
        source="Katharopoulos et al. (2020)",
        function="linear_attention",
        options={"causal": True, "normalize": False},
        constants={"feature_map": elu_plus_one},
        start=lambda x: np.zeros((x.feature_map(x.k).shape[-1], x.v.shape[-1])),
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=Part(r"\phi(k_t) v_t^\top", lambda x: np.outer(x.feature_map(x.k), x.v)),
        read=Part(r"S_t^\top \phi(q_t)", lambda _, S, x: S.T @ x.feature_map(x.q)),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"2 C M", lambda C, M: 2 * C * M),
    ),
    Model(
        name="Linear attention, normalized",
        paper="katharopoulos2020",
        source="Katharopoulos et al. (2020)",
        function="linear_attention",
        options={"causal": True, "normalize": True},
        constants={"feature_map": elu_plus_one},
        start=lambda x: np.zeros((x.feature_map(x.k).shape[-1], x.v.shape[-1] + 1)),
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=Part(
            r"\phi(k_t) [v_t^\top\; 1]",
            lambda x: np.outer(x.feature_map(x.k), _with_one(x.v)),
        ),
        read=Part(r"S_t^\top \phi(q_t)", lambda _, S, x: S.T @ x.feature_map(x.q)),
        normalizer=r"z_t^\top \phi(q_t)",
        state=Part(r"C (M + 1)", lambda C, M: C * (M + 1)),
        operations=Part(r"2 C (M + 1)", lambda C, M: 2 * C * (M + 1)),
    ),
    Model(
        name="AFT-full",
        paper="zhai2021",
        source="Zhai et al. (2021)",
        function="aft_full",
        options={"causal": True},
        tokens=("q", "k", "v", "position_bias"),
        start=lambda x: [],
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=Part(r"\text{append } (k_t, v_t)", lambda x: [(x.k, _beside_one(x.v))]),
        read=Part(
            r"\sigma(q_t) \odot \sum_{j \le t} e^{k_j + b_{tj}} \odot v_j",
            lambda _, S, x: _gated(x.q, _biased_sum(S, x.position_bias)),
        ),
        normalizer=r"\sum_{j \le t} e^{k_j + b_{tj}}",
        state=Part(r"2 D\, t", lambda D, t: 2 * D * t),
        operations=Part(r"3 D\, t", lambda D, t: 3 * D * t + D),
    ),
    Model(
        name="AFT-simple",
        paper="zhai2021",
        source="Zhai et al. (2021)",
        function="aft_simple",
        options={"causal": True},
        start=_per_channel,
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=Part(r"e^{k_t} \odot [v_t\; 1]", lambda x: np.exp(x.k)[:, None] * _beside_one(x.v)),
        read=Part(r"\sigma(q_t) \odot S_t", lambda _, S, x: _gated(x.q, S)),
        normalizer=r"z_t",
        state=Part(r"2 D", lambda D: 2 * D),
        operations=Part(r"3 D", lambda D: 3 * D),
    ),
    Model(
        name="RWKV-4",
        paper="peng2023",
        source="Peng et al. (2023)",
        function="wkv",
        tokens=("k", "v"),
        constants={"decay": None, "bonus": None},
        start=_per_channel,
        transition=Part(r"e^{-w} \odot S_{t-1}", lambda S, x: np.exp(-x.decay)[:, None] * S),
        write=Part(r"e^{k_t} \odot [v_t\; 1]", lambda x: np.exp(x.k)[:, None] * _beside_one(x.v)),
        read=Part(
            r"S_{t-1} + e^{u + k_t} \odot v_t",
            lambda before, _, x: before + np.exp(x.bonus + x.k)[:, None] * _beside_one(x.v),
        ),
        normalizer=r"z_{t-1} + e^{u + k_t}",
        state=Part(r"2 D", lambda D: 2 * D),
        operations=Part(r"7 D", lambda D: 7 * D),
    ),
    Model(
        name="RetNet",
        paper="sun2023",
        source="Sun et al. (2023)",
        function="retention",
        constants={"decay": None},
        start=_zeros("k", "v"),
        transition=Part(r"\gamma S_{t-1}", lambda S, x: x.decay * S),
        write=Part(r"k_t v_t^\top", lambda x: np.outer(x.k, x.v)),
        read=Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M),
    ),
    Model(
        name="GLA",
        paper="yang2024",
        source="Yang et al. (2024)",
        function="gated_linear_attention",
        tokens=("q", "k", "v", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"\operatorname{diag}(\alpha_t) S_{t-1}", lambda S, x: np.exp(x.log_decay)[:, None] * S
        ),
        write=Part(r"k_t v_t^\top", lambda x: np.outer(x.k, x.v)),
        read=Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M),
    ),
    Model(
        name="RWKV-5, RWKV-6",
        paper="peng2024",
        source="Peng et al. (2024)",
        function="rwkv6",
        tokens=("r", "k", "v", "log_decay"),
        constants={"bonus": None},
        start=_zeros("k", "v"),
        transition=Part(
            r"\operatorname{diag}(\alpha_t) S_{t-1}", lambda S, x: np.exp(x.log_decay)[:, None] * S
        ),
        write=Part(r"k_t v_t^\top", lambda x: np.outer(x.k, x.v)),
        read=Part(
            r"(S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top r_t",
            lambda before, _, x: before.T @ x.r + (x.r @ (x.bonus * x.k)) * x.v,
        ),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M + 2 * C + M),
    ),
    Model(
        name="Mamba",
        paper="gu2024",
        source="Gu and Dao (2024)",
        function="selective_scan",
        tokens=("x", "delta", "B", "C"),
        constants={"A": None, "D": 0.0},
        start=_zeros("x", "B"),
        transition=Part(
            r"e^{\operatorname{diag}(\Delta_t) A} \odot S_{t-1}",
            lambda S, x: np.exp(x.delta[:, None] * x.A) * S,
        ),
        write=Part(r"(\Delta_t \odot x_t) B_t^\top", lambda x: np.outer(x.delta * x.x, x.B)),
        read=Part(r"S_t C_t + D \odot x_t", lambda _, S, x: S @ x.C + x.D * x.x),
        state=Part(r"E K", lambda E, K: E * K),
        operations=Part(r"4 E K", lambda E, K: 4 * E * K + 2 * E),
    ),
    Model(
        name="Mamba-2",
        paper="dao2024",
        source="Dao and Gu (2024)",
        function="state_space_dual",
        tokens=("x", "log_decay", "B", "C"),
        start=_zeros("B", "x"),
        transition=Part(r"\alpha_t S_{t-1}", lambda S, x: np.exp(x.log_decay) * S),
        write=Part(r"B_t x_t^\top", lambda x: np.outer(x.B, x.x)),
        read=Part(r"S_t^\top C_t", lambda _, S, x: S.T @ x.C),
        state=Part(r"K P", lambda K, P: K * P),
        operations=Part(r"3 K P", lambda K, P: 3 * K * P),
    ),
    Model(
        name="DeltaNet",
        paper="yang2024delta",
        source="Yang et al. (2024b)",
        function="delta_rule",
        tokens=("q", "k", "v", "beta"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(I - \beta_t k_t k_t^\top) S_{t-1}",
            lambda S, x: _corrected(S, x),
        ),
        write=Part(r"\beta_t k_t v_t^\top", lambda x: np.outer(x.beta * x.k, x.v)),
        read=Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"4 C M", lambda C, M: 4 * C * M + 2 * C),
    ),
    Model(
        name="Gated DeltaNet",
        paper="yang2025",
        source="Yang et al. (2025)",
        function="gated_delta_rule",
        tokens=("q", "k", "v", "beta", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"\alpha_t (I - \beta_t k_t k_t^\top) S_{t-1}",
            lambda S, x: np.exp(x.log_decay) * _corrected(S, x),
        ),
        write=Part(r"\beta_t k_t v_t^\top", lambda x: np.outer(x.beta * x.k, x.v)),
        read=Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + 2 * C),
    ),
    Model(
        name="Kimi delta attention",
        paper="kimi2025",
        source="Kimi Team (2025)",
        function="kimi_delta_attention",
        tokens=("q", "k", "v", "beta", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(I - \beta_t k_t k_t^\top) \operatorname{diag}(\alpha_t) S_{t-1}",
            lambda S, x: _corrected(np.exp(x.log_decay)[:, None] * S, x),
        ),
        write=Part(r"\beta_t k_t v_t^\top", lambda x: np.outer(x.beta * x.k, x.v)),
        read=Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + 2 * C),
    ),
    Model(
        name="RWKV-7",
        paper="peng2025",
        source="Peng et al. (2025)",
        function="rwkv7",
        tokens=("r", "k", "v", "log_decay", "removal_key", "learning_rate"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(\operatorname{diag}(\alpha_t) - (\eta_t \odot \kappa_t) \kappa_t^\top) S_{t-1}",
            lambda S, x: (
                np.exp(x.log_decay)[:, None] * S
                - np.outer(x.learning_rate * x.removal_key, x.removal_key @ S)
            ),
        ),
        write=Part(r"k_t v_t^\top", lambda x: np.outer(x.k, x.v)),
        read=Part(r"S_t^\top r_t", lambda _, S, x: S.T @ x.r),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + C),
    ),
)


MODELS = {model.name: model for model in _ROWS}
