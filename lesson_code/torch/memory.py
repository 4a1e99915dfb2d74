"""The memory of linear attention: what one token writes, and what one query reads."""

from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.elementwise import divide
from lesson_code.torch.precision import accumulate, full_precision


class LinearAttentionState(NamedTuple):
    r"""What linear attention remembers: the memory S and the normalizer z.

    As :class:`lesson_code.numpy.LinearAttentionState`: S is (..., C, M), z is (..., C).

    Examples
    --------
    >>> state = LinearAttentionState.zeros(2, 2)
    >>> state = state.write(torch.tensor([1.0, 0.0]), torch.tensor([10.0, 20.0]))
    >>> state = state.write(torch.tensor([0.0, 1.0]), torch.tensor([30.0, 40.0]))
    >>> state.S
    tensor([[10., 20.],
            [30., 40.]])
    >>> state.read(torch.tensor([0.5, 0.5]))
    tensor([20., 30.])
    """

    S: Tensor
    z: Tensor

    @classmethod
    def zeros(
        cls,
        C: int,
        M: int,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearAttentionState":
        """The empty state, from which every sequence starts, as in NumPy.

        Its dtype is float32 by default; float64 is what float64 input needs.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 3, batch_shape=(5,)).S.shape
        torch.Size([5, 2, 3])
        """
        C = _arguments.check_integer("C", C, minimum=0)
        M = _arguments.check_integer("M", M, minimum=0)
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"batch_shape must be a tuple of integers, got {batch_shape!r}.")
        S = torch.zeros((*batch_shape, C, M), dtype=dtype, device=device)
        z = torch.zeros((*batch_shape, C), dtype=dtype, device=device)
        _arguments.check_arrays(Tensor, dtype=z)
        return cls(S, z)

    def write(self, k: Tensor, v: Tensor) -> "LinearAttentionState":
        r"""Write one token: add :math:`\phi(k) v^\top` to S and :math:`\phi(k)` to z.

        Computes :eq:`eq-write`, as :meth:`lesson_code.numpy.LinearAttentionState.write` does.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 1).write(torch.tensor([1.0, 2.0]), torch.tensor([3.0])).S
        tensor([[3.],
                [6.]])
        """
        leading = self._check_one_token(k=(k, "C"), v=(v, "M"))
        k, v, S, z = accumulate(k, v, *self)
        S = S.expand(*leading, -1, -1) + k[..., :, None] * v[..., None, :]  # (..., C, M)
        z = z.expand(*leading, -1) + k  # (..., C)
        return LinearAttentionState(S, z)

    def read(self, q: Tensor, *, normalize: bool = True) -> Tensor:
        r"""Read with one query: :math:`\phi(q)^\top S`, over :math:`\phi(q)^\top z`.

        Computes :eq:`eq-normalized-read`, or :eq:`eq-read` with ``normalize=False``, as
        :meth:`lesson_code.numpy.LinearAttentionState.read` does.

        Examples
        --------
        >>> S = torch.tensor([[60.0, 80.0], [80.0, 100.0]])
        >>> state = LinearAttentionState(S, torch.tensor([2.0, 2.0]))
        >>> state.read(torch.tensor([1.0, 1.0]))
        tensor([35., 45.])
        >>> state.read(torch.tensor([1.0, 1.0]), normalize=False)
        tensor([140., 180.])
        """
        self._check_one_token(q=(q, "C"))
        _arguments.check_flags(normalize=normalize)
        dtype, (q, S, z) = q.dtype, accumulate(q, *self)
        with full_precision(q):
            out = (q[..., None, :] @ S)[..., 0, :]  # (..., M)
            if normalize:
                out = divide(out, (q * z).sum(dim=-1, keepdim=True))
        return out.to(dtype)

    def _check_one_token(self, **tensors):
        """Refuse what this state cannot be written with or read by; all leading dimensions."""
        _arguments.check_arrays(Tensor, **{name: tensor for name, (tensor, _) in tensors.items()})
        like_name, (like, _) = next(iter(tensors.items()))
        parts = {"S of the state": (self.S, "C M"), "z of the state": (self.z, "C")}
        for name, (part, _) in parts.items():
            _arguments.check_arrays(Tensor, **{name: part})
            _arguments.check_beside(name, part, like_name, like)
        return _arguments.check_axes(**tensors, **parts)
