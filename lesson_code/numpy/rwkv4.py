"""The two sublayers of RWKV-4, and the token shift that both begin with."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy.elementwise import sigmoid
from lesson_code.numpy.precision import accumulate
from lesson_code.numpy.wkv import WKVState, _begin, wkv

Array = NDArray[np.floating]


def token_shift(x: Array, mix: Array, last: Array | None = None) -> Array:
    r"""Mix each token with the one before, channel by channel.

    Computes :eq:`eq-token-shift`, :math:`\mu \odot x_t + (1 - \mu) \odot x_{t-1}`: a causal
    convolution of each channel with two taps.

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix : array, shape (F,)
        The share of the current token, :math:`\mu`. It may be any number.
    last : array, shape (..., F), optional
        The input before the first, :math:`x_{-1}`; zeros by default. To continue a sequence, pass
        the last input of the piece before, ``x[..., -1, :]``.

    Returns
    -------
    array, shape (..., N, F)
        Mixed inputs in their dtype, with the leading dimensions of x and last, broadcast. float16
        is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or their dtypes differ.
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    NaN reaches its own position and the next one.

    References
    ----------
    Peng et al. (2023), token shift.

    Examples
    --------
    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> token_shift(x, np.array([0.75]))
    array([[6. ],
           [5. ],
           [2.5]])
    """
    _check(last, {"x": (x, "N, F"), "mix": (mix, "F")})
    dtype, (x, mix) = x.dtype, accumulate(x, mix)
    return _shifted(x, last, mix).astype(dtype, copy=False)


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

    With :math:`k_t` and :math:`r_t` the inputs mixed by `mix_k` and `mix_r` (:func:`token_shift`),
    it computes :eq:`eq-channel-mix`,

    .. math:: y_t = \sigma(r_t W_r) \odot \bigl(\max(k_t W_k, 0)^2\, W_v\bigr)

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix_k, mix_r : array, shape (F,)
        Share of the current token.
    W_k : array, shape (F, C)
        To the hidden channels; C is 4 F in the paper.
    W_v : array, shape (C, F)
        Back from them.
    W_r : array, shape (F, F)
        To the gate, the receptance before its sigmoid.
    last : array, shape (..., F), optional
        The input before the first; zeros by default.

    Returns
    -------
    array, shape (..., N, F)
        Outputs in the dtype of the input. float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or their dtypes differ.
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    NaN reaches its own position and the next one.

    References
    ----------
    Peng et al. (2023), channel mixing; So et al. (2021) for the squared ReLU.

    Examples
    --------
    >>> x, one = np.array([[1.0], [-2.0], [3.0]]), np.array([1.0])
    >>> channel_mix(x, one, one, np.eye(1), np.eye(1), np.zeros((1, 1)))  # a gate of 1/2
    array([[0.5],
           [0. ],
           [4.5]])
    """
    arrays = {"x": (x, "N, F"), "mix_k": (mix_k, "F"), "mix_r": (mix_r, "F")}
    _check(last, arrays | {"W_k": (W_k, "F, C"), "W_v": (W_v, "C, F"), "W_r": (W_r, "F, F")})
    dtype = x.dtype
    x, mix_k, mix_r, W_k, W_v, W_r = accumulate(x, mix_k, mix_r, W_k, W_v, W_r)
    x_k, x_r = _shifted(x, last, mix_k), _shifted(x, last, mix_r)
    hidden = np.maximum(x_k @ W_k, 0) ** 2  # (..., N, C)
    return (sigmoid(x_r @ W_r) * (hidden @ W_v)).astype(dtype, copy=False)


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

    With :math:`k_t`, :math:`v_t` and :math:`r_t` the inputs mixed by `mix_k`, `mix_v` and `mix_r`
    (:func:`token_shift`), it computes :eq:`eq-time-mix`,

    .. math::

        o &= \mathrm{wkv}(k W_k, v W_v) \\
        y_t &= \left(\sigma(r_t W_r) \odot o_t\right) W_o

    Parameters
    ----------
    x : array, shape (..., N, F)
        Inputs.
    mix_k, mix_v, mix_r : array, shape (F,)
        Share of the current token.
    W_k, W_v, W_r : array, shape (F, D)
        To keys, values and receptance.
    W_o : array, shape (D, F)
        To the output.
    decay, bonus : array, shape (D,)
        As in :func:`wkv`.
    last : array, shape (..., F), optional
        The input before the first; zeros by default.
    initial_state : WKVState, optional
        State of the memory before the first token. It does not hold `last`: to continue a sequence,
        pass both.
    return_state : bool
        Return the state of the memory after the last token as well.

    Returns
    -------
    array, shape (..., N, F)
        Outputs in the dtype of the input. float16 is computed in float32.
    WKVState
        With ``return_state=True``: three arrays (..., D) in the accumulation dtype.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, their dtypes differ, or `initial_state` is no
        WKVState of a fitting dtype.
    ValueError
        If the shapes do not fit together, or `decay` is not positive and finite.

    Notes
    -----
    NaN reaches the outputs from its own position on, in its own sequence.

    References
    ----------
    Peng et al. (2023), time mixing.

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
    _arguments.check_flags(return_state=return_state)
    arrays = {"x": (x, "N, F")}
    arrays |= {"mix_k": (mix_k, "F"), "mix_v": (mix_v, "F"), "mix_r": (mix_r, "F")}
    arrays |= {"W_k": (W_k, "F, D"), "W_v": (W_v, "F, D"), "W_r": (W_r, "F, D")}
    arrays |= {"W_o": (W_o, "D, F"), "decay": (decay, "D"), "bonus": (bonus, "D")}
    _check(last, arrays)
    state = _begin(initial_state, "x", x, W_k.shape[-1], x=x.shape[:-2])
    dtype, accumulated = x.dtype, accumulate(*(array for array, _ in arrays.values()))
    x, mix_k, mix_v, mix_r, W_k, W_v, W_r, W_o, decay, bonus = accumulated
    x_k, x_v, x_r = (_shifted(x, last, mix) for mix in (mix_k, mix_v, mix_r))
    k, v = x_k @ W_k, x_v @ W_v
    read, state = wkv(k, v, decay, bonus, initial_state=state, return_state=True)
    out = ((sigmoid(x_r @ W_r) * read) @ W_o).astype(dtype, copy=False)
    return (out, state) if return_state else out


def _shifted(x, last, mix):
    """mix * x_t + (1 - mix) * x_{t-1}, where x_{-1} is last, or 0."""
    last = np.zeros(x.shape[-1], x.dtype) if last is None else last.astype(x.dtype, copy=False)
    leading = np.broadcast_shapes(x.shape[:-2], last.shape[:-1])
    x = np.broadcast_to(x, (*leading, *x.shape[-2:]))
    last = np.broadcast_to(last, (*leading, x.shape[-1]))
    previous = np.concatenate([last[..., None, :], x[..., :-1, :]], axis=-2)
    return mix * x + (1 - mix) * previous[..., : x.shape[-2], :]  # without last where N is 0


def _check(last, arrays):
    """Refuse all but arrays of floats that fit, each as (array, axes); only x has others."""
    if last is not None:
        arrays = arrays | {"last": (last, "F")}
    _arguments.check_arrays(np.ndarray, **{name: array for name, (array, _) in arrays.items()})
    _arguments.check_axes(**arrays)
    for name, (array, axes) in arrays.items():
        if name not in ("x", "last"):
            _arguments.check_alone(name, array, axes)
