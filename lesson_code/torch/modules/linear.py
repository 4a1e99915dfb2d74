"""Linear attention as a module, and the layer that makes a transformer an RNN."""

from collections.abc import Callable

from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.feature_maps import elu_plus_one
from lesson_code.torch.linear import features, linear_attention
from lesson_code.torch.memory import LinearAttentionState
from lesson_code.torch.modules._parts import check_heads, check_state, feed_forward, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision

FeatureMap = Callable[[Tensor], Tensor]


class _LinearMemory(Mixer):
    """Queries, keys and values of H heads, and what they read; each subclass says what follows."""

    def __init__(self, width, num_heads, feature_map, normalize):
        super().__init__(width)
        _arguments.check_flags(normalize=normalize)
        if not callable(feature_map):
            raise TypeError(f"feature_map must be callable, got {type(feature_map).__name__}.")
        self.num_heads = check_heads(width, num_heads)
        self.feature_map = feature_map
        self.normalize = normalize
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def mix(
        self, x: Tensor, state: LinearAttentionState | None
    ) -> tuple[Tensor, LinearAttentionState]:
        self._check_state(state, len(x))
        maps = self.query, self.key, self.value
        q, k, v = accumulate(*(split_heads(f(x), self.num_heads) for f in maps))  # (B, H, N, D)
        options = {"feature_map": self.feature_map, "normalize": self.normalize}
        read, state = linear_attention(
            q, k, v, causal=True, initial_state=state, return_state=True, **options
        )
        return self._after_read(read.transpose(1, 2), x), state

    def mix_one(
        self, x_t: Tensor, state: LinearAttentionState
    ) -> tuple[Tensor, LinearAttentionState]:
        self._check_state(state, len(x_t))
        maps = self.query, self.key, self.value
        q, k, v = accumulate(*(f(x_t).unflatten(-1, (self.num_heads, -1)) for f in maps))
        with full_precision(q):
            state = state.write(features(self.feature_map, k), v)
            read = state.read(features(self.feature_map, q), normalize=self.normalize)
        return self._after_read(read, x_t), state

    def _check_state(self, state, B):
        H, M = self.num_heads, self.width // self.num_heads
        check_state(state, LinearAttentionState, (B, H, "C", M), (B, H, "C"))

    def _after_read(self, read, x):
        """The output for x (..., F) and what its heads have read (..., H, M), not yet rounded."""
        raise NotImplementedError


class LinearAttention(_LinearMemory):
    r"""Causal multi-head linear attention, with a norm after the read.

    Computes :eq:`eq-causal-linear-attention` in each head of width D = M = F/H, with q, k and v
    linear in x, and

    .. math:: y_t = W_O^\top \mathrm{norm}(o_t)

    for all heads, side by side. The state is a :class:`LinearAttentionState` with S (B, H, C, M)
    and z (B, H, C).

    Parameters
    ----------
    feature_map : callable
        The map phi, (..., D) -> (..., C), applied to queries and keys. One that is an ``nn.Module``
        becomes part of this one.
    normalize : bool
        Divide by :math:`\phi(q)^\top z`.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F, ``norm`` an
    ``nn.RMSNorm`` over the M channels of one token and head. It undoes any positive factor: with a
    positive map, only its epsilon of 1e-5 tells whether `normalize` was True.

    References
    ----------
    Katharopoulos et al. (2020), equations 8 to 12 and 16 to 20; Sun et al. (2023), equation 8, for
    the norm of each head.

    Examples
    --------
    >>> LinearAttention(width=8, num_heads=2).initial_state(1).S.shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = elu_plus_one,
        normalize: bool = True,
    ) -> None:
        super().__init__(width, num_heads, feature_map, normalize)
        self.norm = nn.RMSNorm(width // self.num_heads, eps=1e-5)
        self.output = nn.Linear(width, width, bias=False)

    def _after_read(self, read, x):
        weight = self.norm.weight
        read = nn.functional.rms_norm(read, weight.shape, eps=self.norm.eps).to(weight.dtype)
        return self.output((weight * read).flatten(-2))


class LinearTransformerLayer(_LinearMemory):
    r"""A transformer layer with linear attention: an RNN whose state is S and z.

    In each head of width M = F/H, with a feature map phi of width C,

    .. math::

        S_t &= S_{t-1} + \phi(W_K^\top x_t) (W_V^\top x_t)^\top \\
        z_t &= z_{t-1} + \phi(W_K^\top x_t) \\
        y_t &= f_l\left(\frac{\phi(W_Q^\top x_t)^\top S_t}{\phi(W_Q^\top x_t)^\top z_t} + x_t\right)

    (:eq:`eq-layer-state` to :eq:`eq-layer-output`). The heads stand side by side, so that what they
    read has the width F of x and can be added to it. The sublayer
    :math:`f_l(u) = \mathrm{norm}_2(u' + \mathrm{FFN}(u'))`, with
    :math:`u' = \mathrm{norm}_1(u)`, sees each position by itself. The layer is a whole block; its
    state is a :class:`LinearAttentionState` with S (B, H, C, M) and z (B, H, C).

    Parameters
    ----------
    feature_map : callable
        As in :class:`LinearAttention`.

    Notes
    -----
    ``query``, ``key`` and ``value`` are ``nn.Linear`` of F×F, ``norm_1`` and ``norm_2``
    ``nn.LayerNorm``, and ``feed_forward`` two ``nn.Linear`` with bias, with a GELU and the width
    4 F in between.

    References
    ----------
    Katharopoulos et al. (2020), equations 1 and 16 to 20; Vaswani et al. (2017), section 3.1, for
    the order of sum and norm.

    Examples
    --------
    >>> import torch
    >>> layer = LinearTransformerLayer(width=8, num_heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> state = layer.initial_state(1)
    >>> for x_t in x.unbind(dim=1):
    ...     y_t, state = layer.step(x_t, state)             # as an RNN
    >>> torch.allclose(y_t, layer(x)[:, 4], atol=1e-5)      # as a transformer
    True
    """

    is_block = True

    def __init__(
        self, width: int, num_heads: int, *, feature_map: FeatureMap = elu_plus_one
    ) -> None:
        super().__init__(width, num_heads, feature_map, normalize=True)
        self.norm_1 = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width)
        self.norm_2 = nn.LayerNorm(width)

    def _after_read(self, read, x):
        u = self.norm_1(read.flatten(-2).to(x.dtype) + x)
        return self.norm_2(u + self.feed_forward(u))
