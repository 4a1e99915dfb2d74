r"""One recurrence, many models: each is a row of one table, and the table is what runs.

Every model of the book keeps a part of its state, adds what it writes, and reads (:eq:`eq-family`):

.. math::

    S_t &= \mathrm{transition}(S_{t-1}) + \mathrm{write}_t \\
    o_t &= \mathrm{read}(S_{t-1}, S_t)

A :class:`Model` has these three as functions of one token, each beside its formula, and `run` is
the loop. A state is an array; a tuple, of which each part is added to its own; or, where every
token is kept, a list of them, to which ``+`` appends. What has a normalizer keeps it as the last
column of its state: in a read, S stands for the other columns and z for the last one, and in a
write :math:`[v_t^\top\; 1]` is a value with a one appended.

This is the definition, for one sequence in float64: no chunks, no running maximum, one token after
the other. The functions of `lesson_code.numpy` compute the same, faster and safely.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesson_code.numpy.feature_maps import elu_plus_one

__all__ = ["COLUMNS", "KINDS", "MODELS", "Model", "Part", "run", "table"]

COLUMNS = ("transition", "write", "read", "normalizer", "state", "operations", "function", "source")
KINDS = ("cache", "sum", "decay", "correction", "fit")


@dataclass(frozen=True)
class Part:
    """A formula, and the function that computes it.

    Parameters
    ----------
    tex : str, or tuple of str
        The formula in LaTeX; one for each part where the state is a tuple.
    compute : callable
        What a call of the part calls.

    Examples
    --------
    >>> Part("C M", lambda C, M: C * M)(64, 32)
    2048
    """

    tex: str | tuple[str, ...]
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
    kind : str
        One of `KINDS`: what the model does with the tokens before. "cache" keeps them one by one,
        "sum" adds them up, "decay" lets the sum fade, "correction" replaces what it has at a key,
        and "fit" takes better steps towards the values than one correction for each token.
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
    kind: str = ""
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
        return "before" if "S_{t-1}" in self.read.tex else "after"


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
        What is remembered after the last token: an array, a tuple, or a list of tokens.

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
        S = _plus(model.transition(before, x), model.write(x))
        output = model.read(before, S, x)
        if model.normalizer:
            output = (output[..., :-1] / output[..., -1:]).ravel()
        outputs.append(output)
    return np.array(outputs), S


def _plus(kept, written):
    """The sum of two states: part by part for a tuple. Two lists are one after the other."""
    if isinstance(kept, tuple):
        return tuple(_plus(*parts) for parts in zip(kept, written, strict=True))
    return kept + written


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
    if column == "function":
        return f"`{text}`"
    return ", ".join(f"${part}$" for part in ([text] if isinstance(text, str) else text))


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


def _scores(q, k):
    """What a key weighs before weights are divided by their sum."""
    return np.exp(k @ (q / np.sqrt(len(k))))


def _biased_sum(S, bias):
    """What t tokens weigh, with the first t of a row's biases: (D, 2)."""
    return sum(np.exp(k + w)[:, None] * v for (k, v), w in zip(S, bias[: len(S)], strict=True))


def _gated(q, S):
    """sigmoid(q) times the sums of values, beside the sums of weights: (D, 2)."""
    return np.stack([_sigmoid(q) * S[:, 0], S[:, 1]], axis=-1)


def _corrected(S, x):
    """What a correction leaves of a state, before the new value is written."""
    return S - np.outer(x.beta * x.k, x.k @ S)


def _product_of_corrections(S, x):
    """The state after one decay and the corrections of all J keys, without what they write."""
    S = np.exp(x.log_decay) * S
    for k, beta in zip(x.k, x.beta, strict=True):
        S = S - np.outer(beta * k, k @ S)
    return S


def _product_of_writes(x):
    """What J values leave of themselves: each is written, and corrected by the keys after it."""
    S = np.outer(x.beta[0] * x.k[0], x.v[0])
    for k, v, beta in zip(x.k[1:], x.v[1:], x.beta[1:], strict=True):
        S = S - np.outer(beta * k, k @ S) + np.outer(beta * k, v)
    return S


def _rotated(S, angle):
    """The pairs of rows (2i, 2i + 1) of S, turned back by the angle i."""
    cos, sin, rotated = np.cos(angle)[:, None], np.sin(angle)[:, None], np.empty_like(S)
    rotated[0::2] = cos * S[0::2] + sin * S[1::2]
    rotated[1::2] = cos * S[1::2] - sin * S[0::2]
    return rotated


def _faded_and_turned(state, x):
    """Mamba-3: the last pair is written for the second time, then everything fades and turns."""
    S, B, last = state
    late = S + np.outer((1 - x.trapezoid) * x.delta * B, last)
    return np.exp(x.log_decay) * _rotated(late, x.angle), 0, 0


def _with_momentum(state, x):
    """What is left of the memory and of its last change; the change enters the memory, too."""
    S, M = state
    M = x.momentum * M - np.outer(x.beta * x.k, x.k @ S)
    return np.exp(x.log_decay) * S + M, M


def _keys_beside_values(x):
    """start(x) for Mesa: H of its keys beside G of keys and values, a matrix (D, D + M)."""
    D, M = x.k.shape[-1], x.v.shape[-1]
    return np.zeros((D, D + M))


def _solved(S, x):
    """Mesa's read: G of the x that solves (H + diag(ridge)) x = q."""
    H, G = np.split(S, [len(S)], axis=1)
    return G.T @ _solve(H + np.diag(x.ridge), x.q)


def _solve(A, b):
    """The x of A x = b for a positive definite A, by elimination."""
    A, x = A.copy(), b.copy()
    for i in range(len(x)):
        factor = A[i + 1 :, i] / A[i, i]
        A[i + 1 :, i + 1 :] -= np.outer(factor, A[i, i + 1 :])
        x[i + 1 :] -= factor * x[i]
    for i in reversed(range(len(x))):
        x[i] = x[i] / A[i, i]
        x[:i] -= A[:i, i] * x[i]
    return x


def _nothing_learned(x):
    """start(x) for TTT-Linear: memory and bias, the same of the gradients, the tokens so far."""
    D = x.k.shape[-1]
    return np.zeros((D, D)), np.zeros(D), np.zeros((D, D)), np.zeros(D), 0


def _gradient_step(state, x):
    """TTT-Linear: a token's gradient joins those of its batch; the last one ends the batch."""
    W, b, dW, db, t = state
    z, deviation = _normed(x.k @ W + b)
    g = x.norm_weight * (x.norm_weight * z + x.norm_bias - (x.v - x.k))
    g = x.eta * (g - g.mean() - (g * z).mean() * z) / deviation
    dW, db = dW + np.outer(x.k, g), db + g
    if (t + 1) % x.batch_size:
        return W, b, dW, db, t
    return W - x.share * dW, b - x.share * db, np.zeros_like(dW), np.zeros_like(db), t


def _learned(before, after, x):
    """What TTT-Linear reads: that of a batch in progress is W - share dW."""
    W, b, dW, db, t = after
    if t % x.batch_size:
        W, b = W - x.share * dW, b - x.share * db
    return x.q + x.norm_weight * _normed(x.q @ W + b)[0] + x.norm_bias


def _normed(z):
    """z without its mean, over its deviation; and the deviation."""
    z = z - z.mean()
    deviation = np.sqrt((z * z).mean() + 1e-6)
    return z / deviation, deviation


def _no_levels(x):
    """start(x) for log-linear attention: a memory for each level, and the tokens so far."""
    return np.zeros((x.level_weights.shape[-1], x.k.shape[-1], x.v.shape[-1])), 0


def _carried(state, x):
    """All levels fade; then those below the lowest bit of t, counted from 0, become one above."""
    S, t = state
    S = np.exp(x.log_decay) * S
    level = (t & -t).bit_length()  # as in a binary counter: 0111 + 1 = 1000
    S[level] = S[level] + S[:level].sum(axis=0)
    S[:level] = 0
    return S, t


def _lowest_level(x):
    """The token alone, on level 0."""
    S = np.zeros((x.level_weights.shape[-1], len(x.k), len(x.v)), x.k.dtype)
    S[0] = np.outer(x.k, x.v)
    return S, 1


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


# What several rows have in common.
_KEY_VALUE = Part(r"k_t v_t^\top", lambda x: np.outer(x.k, x.v))
_CORRECT = Part(r"\beta_t k_t v_t^\top", lambda x: np.outer(x.beta * x.k, x.v))
_QUERY = Part(r"S_t^\top q_t", lambda _, S, x: S.T @ x.q)
_SCORED = Part(
    r"\sum_{j \le t} e^{q_t^\top k_j / \sqrt{D}} v_j",
    lambda _, S, x: sum(_scores(x.q, k) * v for k, v in S),
)
_CACHED = Part(r"\text{append } (k_t, v_t)", lambda x: [(x.k, _with_one(x.v))])

_ROWS = (
    Model(
        name="Softmax attention",
        kind="cache",
        paper="vaswani2017",
        source="Vaswani et al. (2017)",
        function="softmax_attention",
        options={"causal": True},
        start=lambda x: [],
        transition=Part(r"S_{t-1}", lambda S, x: S),
        write=_CACHED,
        read=_SCORED,
        normalizer=r"\sum_{j \le t} e^{q_t^\top k_j / \sqrt{D}}",
        state=Part(r"(D + M)\, t", lambda D, M, t: (D + M) * t),
        operations=Part(r"(D + M)\, t", lambda D, M, t: (D + M + 1) * t),
    ),
    Model(
        name="Sliding window",
        kind="cache",
        paper="beltagy2020",
        source="Beltagy et al. (2020)",
        function="sliding_window_attention",
        constants={"window": None},
        start=lambda x: [],
        transition=Part(
            r"S_{t-1} \text{ but } (k_{t-w}, v_{t-w})",
            lambda S, x: S[max(len(S) + 1 - x.window, 0) :],
        ),
        write=_CACHED,
        read=Part(r"\sum_{t-w < j \le t} e^{q_t^\top k_j / \sqrt{D}} v_j", _SCORED.compute),
        normalizer=r"\sum_{t-w < j \le t} e^{q_t^\top k_j / \sqrt{D}}",
        state=Part(r"(D + M)\, w", lambda D, M, w: (D + M) * w),
        operations=Part(r"(D + M)\, w", lambda D, M, w: (D + M + 1) * w),
    ),
    Model(
        name="Forgetting attention",
        kind="cache",
        paper="lin2025",
        source="Lin et al. (2025)",
        function="forgetting_attention",
        tokens=("q", "k", "v", "log_decay"),
        start=lambda x: [],
        transition=Part(
            r"c_j \leftarrow \alpha_t c_j",
            lambda S, x: [(k, v, np.exp(x.log_decay) * c) for k, v, c in S],
        ),
        write=Part(r"\text{append } (k_t, v_t, c_t = 1)", lambda x: [(x.k, _with_one(x.v), 1.0)]),
        read=Part(
            r"\sum_{j \le t} c_j e^{q_t^\top k_j / \sqrt{D}} v_j",
            lambda _, S, x: sum(c * _scores(x.q, k) * v for k, v, c in S),
        ),
        normalizer=r"\sum_{j \le t} c_j e^{q_t^\top k_j / \sqrt{D}}",
        state=Part(r"(D + M + 1)\, t", lambda D, M, t: (D + M + 1) * t),
        operations=Part(r"(D + M)\, t", lambda D, M, t: (D + M + 3) * t - 1),
    ),
    Model(
        name="Log-linear attention",
        kind="cache",
        paper="guo2025",
        source="Guo et al. (2025)",
        function="log_linear_attention",
        tokens=("q", "k", "v", "log_decay", "level_weights"),
        start=_no_levels,
        transition=Part((r"\alpha_t S_{t-1}^{(l)} \text{, merged}", "t"), _carried),
        write=Part((r"k_t v_t^\top \text{ at } l = 0", "1"), _lowest_level),
        read=Part(
            r"\sum_l \lambda_{tl} S_t^{(l)\top} q_t",
            lambda _, S, x: x.level_weights @ (x.q @ S[0]),
        ),
        state=Part(r"(1 + \log_2 N)\, C M", lambda C, M, N: (1 + math.ceil(math.log2(N))) * C * M),
        operations=Part(  # of a token with an odd t, which merges nothing; one more sum on average
            r"(3 + 2 \log_2 N)\, C M",
            lambda C, M, N: (
                (3 + 2 * math.ceil(math.log2(N))) * C * M + (1 + math.ceil(math.log2(N))) * M
            ),
        ),
    ),
    Model(
        name="AFT-full",
        kind="cache",
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
        name="Linear attention",
        kind="sum",
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
        kind="sum",
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
        name="AFT-simple",
        kind="sum",
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
        kind="decay",
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
        kind="decay",
        paper="sun2023",
        source="Sun et al. (2023)",
        function="retention",
        constants={"decay": None},
        start=_zeros("k", "v"),
        transition=Part(r"\gamma S_{t-1}", lambda S, x: x.decay * S),
        write=_KEY_VALUE,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M),
    ),
    Model(
        name="GLA",
        kind="decay",
        paper="yang2024",
        source="Yang et al. (2024)",
        function="gated_linear_attention",
        tokens=("q", "k", "v", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"\operatorname{diag}(\alpha_t) S_{t-1}", lambda S, x: np.exp(x.log_decay)[:, None] * S
        ),
        write=_KEY_VALUE,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M),
    ),
    Model(
        name="RWKV-5, RWKV-6",
        kind="decay",
        paper="peng2024",
        source="Peng et al. (2024)",
        function="rwkv6",
        tokens=("r", "k", "v", "log_decay"),
        constants={"bonus": None},
        start=_zeros("k", "v"),
        transition=Part(
            r"\operatorname{diag}(\alpha_t) S_{t-1}", lambda S, x: np.exp(x.log_decay)[:, None] * S
        ),
        write=_KEY_VALUE,
        read=Part(
            r"(S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top r_t",
            lambda before, _, x: before.T @ x.r + (x.r @ (x.bonus * x.k)) * x.v,
        ),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"3 C M", lambda C, M: 3 * C * M + 2 * C + M),
    ),
    Model(
        name="Mamba",
        kind="decay",
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
        kind="decay",
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
        name="Mamba-3",
        kind="decay",
        paper="lahoti2026",
        source="Lahoti et al. (2026)",
        function="mamba3",
        tokens=("x", "delta", "log_decay", "trapezoid", "angle", "B", "C"),
        start=lambda x: (
            np.zeros((x.B.shape[-1], x.x.shape[-1])),
            np.zeros(x.B.shape[-1]),
            np.zeros(x.x.shape[-1]),
        ),
        transition=Part(
            (
                r"\alpha_t R_t (S_{t-1} + (1 - \lambda_t) \Delta_t B_{t-1} x_{t-1}^\top)",
                "0",
                "0",
            ),
            _faded_and_turned,
        ),
        write=Part(
            (r"\lambda_t \Delta_t B_t x_t^\top", "B_t", "x_t"),
            lambda x: (np.outer(x.trapezoid * x.delta * x.B, x.x), x.B, x.x),
        ),
        read=Part(r"S_t^\top C_t", lambda _, S, x: S[0].T @ x.C),
        state=Part("K P + K + P", lambda K, P: K * P + K + P),
        operations=Part("6 K P", lambda K, P: 6 * K * P + 2 * K + 3),
    ),
    Model(
        name="DeltaNet",
        kind="correction",
        paper="yang2024delta",
        source="Yang et al. (2024b)",
        function="delta_rule",
        tokens=("q", "k", "v", "beta"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(I - \beta_t k_t k_t^\top) S_{t-1}",
            lambda S, x: _corrected(S, x),
        ),
        write=_CORRECT,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"4 C M", lambda C, M: 4 * C * M + 2 * C),
    ),
    Model(
        name="Gated DeltaNet",
        kind="correction",
        paper="yang2025",
        source="Yang et al. (2025)",
        function="gated_delta_rule",
        tokens=("q", "k", "v", "beta", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"\alpha_t (I - \beta_t k_t k_t^\top) S_{t-1}",
            lambda S, x: np.exp(x.log_decay) * _corrected(S, x),
        ),
        write=_CORRECT,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + 2 * C),
    ),
    Model(
        name="Kimi delta attention",
        kind="correction",
        paper="kimi2025",
        source="Kimi Team (2025)",
        function="kimi_delta_attention",
        tokens=("q", "k", "v", "beta", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(I - \beta_t k_t k_t^\top) \operatorname{diag}(\alpha_t) S_{t-1}",
            lambda S, x: _corrected(np.exp(x.log_decay)[:, None] * S, x),
        ),
        write=_CORRECT,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + 2 * C),
    ),
    Model(
        name="RWKV-7",
        kind="correction",
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
        write=_KEY_VALUE,
        read=Part(r"S_t^\top r_t", lambda _, S, x: S.T @ x.r),
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M + C),
    ),
    Model(
        name="Generalized delta rule",
        kind="correction",
        paper="peng2025",
        source="Peng et al. (2025)",
        function="generalized_delta_rule",
        tokens=("q", "k", "v", "a", "b", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"(\operatorname{diag}(\alpha_t) + b_t a_t^\top) S_{t-1}",
            lambda S, x: np.exp(x.log_decay)[:, None] * S + np.outer(x.b, x.a @ S),
        ),
        write=_KEY_VALUE,
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(r"5 C M", lambda C, M: 5 * C * M),
    ),
    Model(
        name="Gated DeltaProduct",
        kind="correction",
        paper="siems2025",
        source="Siems et al. (2025)",
        function="gated_delta_product",
        tokens=("q", "k", "v", "beta", "log_decay"),
        start=_zeros("k", "v"),
        transition=Part(
            r"\prod_j (I - \beta_{tj} k_{tj} k_{tj}^\top)\, \alpha_t S_{t-1}",
            _product_of_corrections,
        ),
        write=Part(
            r"\sum_j \prod_{i > j} (I - \beta_{ti} k_{ti} k_{ti}^\top)"
            r"\, \beta_{tj} k_{tj} v_{tj}^\top",
            _product_of_writes,
        ),
        read=_QUERY,
        state=Part(r"C M", lambda C, M: C * M),
        operations=Part(  # for J = 1, where the write is one product, C M less
            r"(5 J + 1)\, C M", lambda C, M, J: (5 * J + 1) * C * M + (3 * J - 1) * C
        ),
    ),
    Model(
        name="Delta rule with momentum",
        kind="fit",
        paper="behrouz2025",
        source="Behrouz et al. (2025)",
        function="momentum_delta_rule",
        tokens=("q", "k", "v", "beta", "log_decay", "momentum"),
        start=lambda x: (_zeros("k", "v")(x), _zeros("k", "v")(x)),
        transition=Part(
            (
                r"\alpha_t S_{t-1} + \mu_t \Delta_{t-1} - \beta_t k_t k_t^\top S_{t-1}",
                r"\mu_t \Delta_{t-1} - \beta_t k_t k_t^\top S_{t-1}",
            ),
            _with_momentum,
        ),
        write=Part((r"\beta_t k_t v_t^\top",) * 2, lambda x: (_CORRECT(x),) * 2),
        read=Part(_QUERY.tex, lambda _, S, x: S[0].T @ x.q),
        state=Part(r"2 C M", lambda C, M: 2 * C * M),
        operations=Part(r"6 C M", lambda C, M: 6 * C * M + 2 * C),
    ),
    Model(
        name="TTT-Linear",
        kind="fit",
        paper="sun2024",
        source="Sun et al. (2024)",
        function="ttt_linear",
        tokens=("q", "k", "v", "eta", "share"),
        constants={"norm_weight": None, "norm_bias": None, "batch_size": 16},
        start=_nothing_learned,
        # The norm stands between the memory and its gradient, so this transition is not linear, and
        # what a token writes cannot be told from what it leaves.
        transition=Part(r"S_{t-1} \text{ and a gradient step}", _gradient_step),
        write=Part(r"\text{in the step}", lambda x: (0, 0, 0, 0, 1)),
        read=Part(
            r"q_t + w \odot \operatorname{norm}(W_t^\top q_t + b_t) + c",
            _learned,
        ),
        state=Part(r"2 D (D + 1)", lambda D: 2 * D * (D + 1)),
        operations=Part(r"4 D^2", lambda D: 4 * D * D + 19 * D),
    ),
    Model(
        name="Mesa",
        kind="fit",
        paper="vonoswald2025",
        source="von Oswald et al. (2025)",
        function="mesa",
        tokens=("q", "k", "v", "beta", "log_decay"),
        constants={"ridge": None},
        start=_keys_beside_values,
        transition=Part(r"\alpha_t S_{t-1}", lambda S, x: np.exp(x.log_decay) * S),
        write=Part(
            r"\beta_t k_t [k_t^\top\; v_t^\top]",
            lambda x: np.outer(x.beta * x.k, np.append(x.k, x.v)),
        ),
        read=Part(
            r"G_t^\top (H_t + \operatorname{diag}(\lambda))^{-1} q_t",
            lambda _, S, x: _solved(S, x),
        ),
        state=Part(r"C (C + M)", lambda C, M: C * (C + M)),
        operations=Part(
            r"C^3 / 3 + 5 C^2 / 2 + 3 C M",
            lambda C, M: (C - 1) * C * (2 * C - 1) // 6 + C * (C - 1) + C * (2 * C + 3 * M + 2),
        ),
    ),
)


MODELS = {model.name: model for model in _ROWS}
