"""RWKV-4's two sublayers, as functions of their weights."""

import numpy as np

from lesson_code.numpy.elementwise import sigmoid
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.wkv import EMPTY, WKVState, wkv


@operator("N F, (F), F -> N F")
def token_shift(x: Array, mix: Array, last: Array | None = None) -> Array:
    r"""Mix each token with the one before, channel by channel.

    Computes :eq:`eq-token-shift` (Peng et al., 2023), :math:`\lambda \odot x_t + (1 - \lambda)
    \odot x_{t-1}`: a causal convolution of each channel with two taps.

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix : array, shape (F,)
        The share of the current token, :math:`\lambda`. It may be any number.
    last : array, shape (..., F), optional
        The input before the first; zeros by default. To continue a sequence, pass ``x[..., -1, :]``
        of the piece before.

    Returns
    -------
    array, shape (..., N, F)
        Mixed inputs.

    Examples
    --------
    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> token_shift(x, np.array([0.75]))
    array([[6. ],
           [5. ],
           [2.5]])
    """
    last = np.zeros_like(x[..., :1, :].sum(axis=-2)) if last is None else last
    leading = np.broadcast_shapes(x.shape[:-2], last.shape[:-1])
    x = np.broadcast_to(x, (*leading, *x.shape[-2:]))
    last = np.broadcast_to(last, (*leading, x.shape[-1]))
    previous = np.concatenate([last[..., None, :], x[..., :-1, :]], axis=-2)
    return mix * x + (1 - mix) * previous[..., : x.shape[-2], :]  # without last where N is 0


@operator("N F, (F), (F), (F C), (C F), (F F), F -> N F")
def channel_mix(
    x: Array,
    mix_k: Array,
    mix_r: Array,
    W_k: Array,
    W_v: Array,
    W_r: Array,
    *,
    last: Array | None = None,
) -> Array:
    r"""The channel mix of RWKV-4: a feed-forward sublayer with a gate.

    Computes :eq:`eq-channel-mix` (Peng et al., 2023; the squared ReLU is that of So et al., 2021),
    with :math:`k_t` and :math:`r_t` the inputs mixed by `mix_k` and `mix_r` (:func:`token_shift`):

    .. math:: y_t = \sigma(r_t W_r) \odot \bigl(\max(k_t W_k, 0)^2\, W_v\bigr)

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix_k, mix_r : array, shape (F,)
        Share of the current token.
    W_k, W_v, W_r : array, shape (F, C), (C, F), (F, F)
        To the hidden channels, back from them, and to the gate; C is 4 F in the paper.
    last : array, shape (..., F), optional
        The input before the first; zeros by default.

    Returns
    -------
    array, shape (..., N, F)
        Outputs.

    Examples
    --------
    >>> x, one = np.array([[1.0], [-2.0], [3.0]]), np.array([1.0])
    >>> channel_mix(x, one, one, np.eye(1), np.eye(1), np.zeros((1, 1)))  # a gate of 1/2
    array([[0.5],
           [0. ],
           [4.5]])
    """
    x_k, x_r = token_shift(x, mix_k, last), token_shift(x, mix_r, last)
    hidden = np.maximum(x_k @ W_k, 0) ** 2  # (..., N, C)
    return sigmoid(x_r @ W_r) * (hidden @ W_v)


@operator(
    "N F, (F), (F), (F), (F D), (F D), (F D), (D F), (D), (D), F -> N F",
    state=WKVState._make(("D", "D", "D")),
    empty=WKVState._make((0, 0, EMPTY)),
    decay="positive and finite",
)
def time_mix(
    x: Array,
    mix_k: Array,
    mix_v: Array,
    mix_r: Array,
    W_k: Array,
    W_v: Array,
    W_r: Array,
    W_o: Array,
    decay: Array,
    bonus: Array,
    *,
    last: Array | None = None,
    initial_state: WKVState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, WKVState]:
    r"""The time mix of RWKV-4: WKV with a gate, the sublayer in the place of attention.

    Computes :eq:`eq-time-mix` (Peng et al., 2023), with :math:`k_t`, :math:`v_t` and :math:`r_t`
    the inputs mixed by `mix_k`, `mix_v` and `mix_r` (:func:`token_shift`):

    .. math::

        o &= \mathrm{wkv}(k W_k, v W_v) \\
        y_t &= \left(\sigma(r_t W_r) \odot o_t\right) W_o

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix_k, mix_v, mix_r : array, shape (F,)
        Share of the current token.
    W_k, W_v, W_r, W_o : array, shape (F, D), (F, D), (F, D), (D, F)
        To keys, values and receptance, and to the output.
    decay, bonus : array, shape (D,)
        As in :func:`wkv`.
    last : array, shape (..., F), optional
        The input before the first; zeros by default. The state does not hold it: to continue a
        sequence, pass both.
    initial_state, return_state
        As in :func:`wkv`.

    Returns
    -------
    array, shape (..., N, F)
        Outputs, and a WKVState with ``return_state=True``.

    Examples
    --------
    >>> x, one, zero = np.array([[10.0], [30.0], [50.0]]), np.array([1.0]), np.zeros((1, 1))
    >>> decay, bonus = np.array([np.log(2)]), np.array([0.0])
    >>> y = time_mix(x, one, one, one, zero, np.eye(1), zero, np.eye(1), decay, bonus)
    >>> y.round(9)  # half of what WKV gives, as the gate is 1/2
    array([[ 5.],
           [10.],
           [17.]])
    """
    x_k, x_v, x_r = (token_shift(x, mix, last) for mix in (mix_k, mix_v, mix_r))
    o, state = wkv(
        x_k @ W_k, x_v @ W_v, decay, bonus, initial_state=initial_state, return_state=True
    )
    return (sigmoid(x_r @ W_r) * o) @ W_o, state
