"""Mesa: a memory that is solved for, not stepped towards."""

from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code._arguments import check_integer
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator
from lesson_code.torch.precision import full_precision


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
    memory that stores keys under keys, so each iteration is one linear attention. Its gradient is
    that of the solution, which needs as many iterations again and nothing of the first ones; it can
    be differentiated once.

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
        x = _Solution.apply(q, k, k_beta, g, H, ridge, chunk_size, iterations)
        out, G = additive(form, x, k_beta, v, g, G, chunk_size=chunk_size)
        return out, MesaState(additive(form, k, k_beta, k, g, H, chunk_size=chunk_size)[1], G)
    outputs = []
    rows = (x.unbind(-2) for x in (q, k, k_beta, v, g.exp()))
    for q_t, k_t, k_beta_t, v_t, alpha_t in zip(*rows, strict=True):
        alpha_t, written = alpha_t[..., None], k_beta_t[..., None]
        H = alpha_t * H + written * k_t[..., None, :]
        G = alpha_t * G + written * v_t[..., None, :]
        x_t = torch.linalg.solve(H + torch.diag_embed(ridge[..., 0, :]), q_t[..., None])
        outputs.append(x_t.mT @ G)
    return torch.cat(outputs, dim=-2), MesaState(H, G)


class _Solution(torch.autograd.Function):
    """The rows x with (H_t + Λ) x_t = q_t; its gradient solves the same systems."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, k_beta, g, H, ridge, chunk_size, iterations):
        return _conjugate_gradients((k, k_beta, g, H, ridge), q, chunk_size, iterations)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *system, ctx.chunk_size, ctx.iterations = inputs
        ctx.save_for_backward(output, *system)

    @staticmethod
    def backward(ctx, gradient):
        x, *system = ctx.saved_tensors

        def product(*system):
            return _product(system, x, ctx.chunk_size)

        with full_precision(gradient):
            d_q = _conjugate_gradients(system, gradient, ctx.chunk_size, ctx.iterations)
            d_system = torch.func.vjp(product, *system)[1](-d_q)
        return d_q, *d_system, None, None


def _product(system, p, chunk_size):
    """Row t is (H_t + Λ) p_t."""
    k, k_beta, g, H, ridge = system
    return additive("chunkwise", p, k_beta, k, g, H.mT, chunk_size=chunk_size)[0] + ridge * p


def _conjugate_gradients(system, q, chunk_size, iterations):
    """The rows x whose products with symmetric positive matrices, one for each row, are q."""
    x, r = torch.zeros_like(q), q
    p, size = r, r.square().sum(dim=-1, keepdim=True)
    for _ in range(iterations):
        Hp = _product(system, p, chunk_size)
        step = divide(size, (p * Hp).sum(dim=-1, keepdim=True))  # 0 where nothing is left
        x, r = x + step * p, r - step * Hp
        size, previous = r.square().sum(dim=-1, keepdim=True), size
        p = r + divide(size, previous) * p
    return x
