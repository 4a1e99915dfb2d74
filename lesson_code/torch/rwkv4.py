"""The two sublayers of RWKV-4, and the token shift that both begin with."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.wkv import WKVState, begin, wkv


def token_shift(x: Tensor, mix: Tensor, last: Tensor | None = None) -> Tensor:
    r"""Mix each token with the one before, channel by channel.

    Computes :eq:`eq-token-shift`, :math:`\mu \odot x_t + (1 - \mu) \odot x_{t-1}`: a causal
    convolution of each channel with two taps.

    Parameters
    ----------
    x : tensor, shape (..., N, F)
        Inputs.
    mix : tensor, shape (F,)
        The share of the current token, :math:`\mu`. It may be any number.
    last : tensor, shape (..., F), optional
        The input before the first, :math:`x_{-1}`; zeros by default. To continue a sequence, pass
        the last input of the piece before, ``x[..., -1, :]``.

    Returns
    -------
    tensor, shape (..., N, F)
        Mixed inputs in their dtype, with the leading dimensions of x and last, broadcast. float16
        is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or their dtypes differ.
    ValueError
        If the shapes or devices do not fit together.

    Notes
    -----
    NaN reaches its own position and the next one.

    References
    ----------
    Peng et al. (2023), token shift.

    Examples
    --------
    >>> x = torch.tensor([[8.0], [4.0], [2.0]])
    >>> token_shift(x, torch.tensor([0.75]))
    tensor([[6.0000],
            [5.0000],
            [2.5000]])
    """
    _check(last, {"x": (x, "N, F"), "mix": (mix, "F")})
    dtype, (x, mix) = x.dtype, accumulate(x, mix)
    with full_precision(x):
        return shifted(x, last, mix).to(dtype)


def channel_mix(
    x: Tensor,
    mix_k: Tensor,
    mix_r: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    W_r: Tensor,
    *,
    last: Tensor | None = None,
) -> Tensor:
    r"""The channel mix of RWKV-4: a feed-forward sublayer with a gate.

    With :math:`k_t` and :math:`r_t` the inputs mixed by `mix_k` and `mix_r` (:func:`token_shift`),
    it computes :eq:`eq-channel-mix`,

    .. math:: y_t = \sigma(r_t W_r) \odot \bigl(\max(k_t W_k, 0)^2\, W_v\bigr)

    Parameters
    ----------
    x : tensor, shape (..., N, F)
        Inputs.
    mix_k, mix_r : tensor, shape (F,)
        Share of the current token.
    W_k : tensor, shape (F, C)
        To the hidden channels; C is 4 F in the paper.
    W_v : tensor, shape (C, F)
        Back from them.
    W_r : tensor, shape (F, F)
        To the gate, the receptance before its sigmoid.
    last : tensor, shape (..., F), optional
        The input before the first; zeros by default.

    Returns
    -------
    tensor, shape (..., N, F)
        Outputs in the dtype of the input. Half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or their dtypes differ.
    ValueError
        If the shapes or devices do not fit together.

    Notes
    -----
    NaN reaches its own position and the next one.

    References
    ----------
    Peng et al. (2023), channel mixing; So et al. (2021) for the squared ReLU.

    Examples
    --------
    >>> x, one = torch.tensor([[1.0], [-2.0], [3.0]]), torch.tensor([1.0])
    >>> # a gate of 1/2
    >>> channel_mix(x, one, one, torch.eye(1), torch.eye(1), torch.zeros(1, 1))
    tensor([[0.5000],
            [0.0000],
            [4.5000]])
    """
    tensors = {"x": (x, "N, F"), "mix_k": (mix_k, "F"), "mix_r": (mix_r, "F")}
    _check(last, tensors | {"W_k": (W_k, "F, C"), "W_v": (W_v, "C, F"), "W_r": (W_r, "F, F")})
    dtype = x.dtype
    x, mix_k, mix_r, W_k, W_v, W_r = accumulate(x, mix_k, mix_r, W_k, W_v, W_r)
    with full_precision(x):
        x_k, x_r = shifted(x, last, mix_k), shifted(x, last, mix_r)
        hidden = (x_k @ W_k).relu().square()  # (..., N, C)
        return ((x_r @ W_r).sigmoid() * (hidden @ W_v)).to(dtype)


def time_mix(
    x: Tensor,
    mix_k: Tensor,
    mix_v: Tensor,
    mix_r: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    W_r: Tensor,
    W_o: Tensor,
    decay: Tensor,
    bonus: Tensor,
    *,
    last: Tensor | None = None,
    initial_state: WKVState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, WKVState]:
    r"""The time mix of RWKV-4: WKV with a gate, the sublayer in the place of attention.

    With :math:`k_t`, :math:`v_t` and :math:`r_t` the inputs mixed by `mix_k`, `mix_v` and `mix_r`
    (:func:`token_shift`), it computes :eq:`eq-time-mix`,

    .. math::

        o &= \mathrm{wkv}(k W_k, v W_v) \\
        y_t &= \left(\sigma(r_t W_r) \odot o_t\right) W_o

    Parameters
    ----------
    x : tensor, shape (..., N, F)
        Inputs.
    mix_k, mix_v, mix_r : tensor, shape (F,)
        Share of the current token.
    W_k, W_v, W_r : tensor, shape (F, D)
        To keys, values and receptance.
    W_o : tensor, shape (D, F)
        To the output.
    decay, bonus : tensor, shape (D,)
        As in :func:`wkv`.
    last : tensor, shape (..., F), optional
        The input before the first; zeros by default.
    initial_state : WKVState, optional
        State of the memory before the first token. It does not hold `last`: to continue a sequence,
        pass both.
    return_state : bool
        Return the state of the memory after the last token as well.

    Returns
    -------
    tensor, shape (..., N, F)
        Outputs in the dtype of the input. Half precision is computed in float32.
    WKVState
        With ``return_state=True``: three tensors (..., D) in the accumulation dtype.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, their dtypes differ, or `initial_state` is no
        WKVState of a fitting dtype.
    ValueError
        If the shapes or devices do not fit together, or `decay` is not positive and finite.

    Notes
    -----
    NaN reaches the outputs from its own position on, in its own sequence.

    References
    ----------
    Peng et al. (2023), time mixing.

    Examples
    --------
    >>> x, one, unit = torch.tensor([[10.0], [30.0], [50.0]]), torch.tensor([1.0]), torch.eye(1)
    >>> decay, bonus = torch.tensor([2.0]).log(), torch.tensor([0.0])
    >>> # half of what WKV gives, as the gate is 1/2
    >>> time_mix(x, one, one, one, 0 * unit, unit, 0 * unit, unit, decay, bonus)
    tensor([[ 5.],
            [10.],
            [17.]])
    """
    _arguments.check_flags(return_state=return_state)
    tensors = {"x": (x, "N, F")}
    tensors |= {"mix_k": (mix_k, "F"), "mix_v": (mix_v, "F"), "mix_r": (mix_r, "F")}
    tensors |= {"W_k": (W_k, "F, D"), "W_v": (W_v, "F, D"), "W_r": (W_r, "F, D")}
    tensors |= {"W_o": (W_o, "D, F"), "decay": (decay, "D"), "bonus": (bonus, "D")}
    _check(last, tensors)
    state = begin(initial_state, "x", x, W_k.shape[-1], x=x.shape[:-2])
    dtype, accumulated = x.dtype, accumulate(*(tensor for tensor, _ in tensors.values()))
    x, mix_k, mix_v, mix_r, W_k, W_v, W_r, W_o, decay, bonus = accumulated
    with full_precision(x):
        x_k, x_v, x_r = (shifted(x, last, mix) for mix in (mix_k, mix_v, mix_r))
        k, v = x_k @ W_k, x_v @ W_v
        read, state = wkv(k, v, decay, bonus, initial_state=state, return_state=True)
        out = (((x_r @ W_r).sigmoid() * read) @ W_o).to(dtype)
    return (out, state) if return_state else out


def shifted(x, last, mix):
    """mix * x_t + (1 - mix) * x_{t-1}, where x_{-1} is last, or 0."""
    last = x.new_zeros(x.shape[-1]) if last is None else last.to(x.dtype)
    leading = torch.broadcast_shapes(x.shape[:-2], last.shape[:-1])
    x = x.expand(*leading, *x.shape[-2:])
    previous = torch.cat([last.expand(*leading, -1)[..., None, :], x[..., :-1, :]], dim=-2)
    return mix * x + (1 - mix) * previous[..., : x.shape[-2], :]  # without last where N is 0


def _check(last, tensors):
    """Refuse all but tensors of floats that fit, each as (tensor, axes); only x has others."""
    if last is not None:
        tensors = tensors | {"last": (last, "F")}
    _arguments.check_arrays(Tensor, **{name: tensor for name, (tensor, _) in tensors.items()})
    _arguments.check_axes(**tensors)
    for name, (tensor, axes) in tensors.items():
        if name not in ("x", "last"):
            _arguments.check_alone(name, tensor, axes)
