"""Mesa: a memory that is solved for, not stepped towards."""

from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code._arguments import check_integer
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator


class MesaState(NamedTuple):
    """What Mesa remembers: both sides of its normal equations.

    As :class:`lesson_code.numpy.MesaState`.

    Parameters
    ----------
    H : tensor, shape (..., D, D)
        Weighted sum of the outer products of the keys with themselves.
    G : tensor, shape (..., D, M)
        Weighted sum of the outer products of keys and values.
    """

    H: Tensor
    G: Tensor


@operator(
    "N D, N D, N M, N, N, D -> N M",
    state=MesaState._make(("D D", "D M")),
    reads="q ridge",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
    ridge="positive and finite",
)
def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    iterations: int = 30,
    initial_state: MesaState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, MesaState]:
    r"""The Mesa layer: at each token the least-squares memory of all pairs so far.

    As :func:`lesson_code.numpy.mesa`. In "chunkwise" a product with :math:`H_t` is a read of a
    memory that stores keys under keys, so each iteration is one linear attention; autograd keeps
    what each of them has read.

    Examples
    --------
    Keys that overlap find their values, but for the ridge:

    >>> k, v = torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[10.0], [20.0]])
    >>> ones, ridge = torch.ones(2), torch.full((2,), 1e-6)
    >>> mesa(k, k, v, ones, 0 * ones, ridge).round(decimals=3)
    tensor([[10.],
            [20.]])
    """
    iterations = check_integer("iterations", iterations, minimum=1)
    H, G = initial_state
    beta, g, ridge = beta[..., None], log_decay[..., None], ridge[..., None, :]
    k_beta = beta * k
    if form == "chunkwise":

        def system(p):  # row t: (H_t + Λ) p_t
            return additive(form, p, k_beta, k, g, H, chunk_size=chunk_size)[0] + ridge * p

        x = _conjugate_gradients(system, q, iterations)
        out, G = additive(form, x, k_beta, v, g, G, chunk_size=chunk_size)
        return out, MesaState(additive(form, k, k_beta, k, g, H, chunk_size=chunk_size)[1], G)
    out = []
    rows = (x.unbind(-2) for x in (q, k, k_beta, v, g.exp()))
    for q_t, k_t, k_beta_t, v_t, alpha_t in zip(*rows, strict=True):
        alpha_t, written = alpha_t[..., None], k_beta_t[..., None]
        H = alpha_t * H + written * k_t[..., None, :]
        G = alpha_t * G + written * v_t[..., None, :]
        x_t = torch.linalg.solve(H + torch.diag_embed(ridge[..., 0, :]), q_t[..., None])
        out.append(x_t.mT @ G)
    return torch.cat(out, dim=-2), MesaState(H, G)


def _conjugate_gradients(system, q, iterations):
    """The rows x of system(x) = q, for a product with a symmetric positive matrix for each row."""
    x, r = torch.zeros_like(q), q
    p, size = r, r.square().sum(dim=-1, keepdim=True)
    for _ in range(iterations):
        Hp = system(p)
        step = divide(size, (p * Hp).sum(dim=-1, keepdim=True))  # 0 where nothing is left
        x, r = x + step * p, r - step * Hp
        size, previous = r.square().sum(dim=-1, keepdim=True), size
        p = r + divide(size, previous) * p
    return x
