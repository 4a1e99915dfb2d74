"""What fades inside a chunk: products of rows and columns of which the columns fade in between.

With g_t ≤ 0, the logarithm of a decay, row x_t and column y_j of a chunk meet as

    P_tj = Σ_d x_td y_jd exp(g_{j+1,d} + ... + g_{t,d})        j ≤ t

A row that looks at the memory before its own token fades it (``early``) lacks the last term, and
has no product with its own column. What was there before the chunk has faded until a row by
`before` or `through`, a column fades until the chunk's end by `to_end`, the whole chunk by `total`.

No exponent is above 0, and -inf is exact: only sums of g over a stretch are formed, never the
difference of two, and products of their exponentials. Gradients go the same way back, as gradients
of the logarithms of these factors, which are 0 where a factor is 0; `gradients` notes its own.

All is (..., L, D), with g (..., L, 1) for one decay for all channels, or (..., L, D). None of it is
seen by autograd.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 8  # positions whose products by channel are formed one by one


def decays(g: Tensor) -> "Shared | PerChannel":
    """The decays of chunks."""
    return Shared(g) if g.shape[-1] == 1 else PerChannel(g)


class Shared:
    """One decay for all channels: a product of a row and a column fades as a whole."""

    def __init__(self, g: Tensor):
        L = g.shape[-2]
        # Row i of column j is g_i if i > j, and their sum down to row t is that of j + 1 to t.
        self.between = g.expand(*g.shape[:-1], L).tril(-1).cumsum_(dim=-2).exp_().tril_()
        self.through = sums_through(g).exp_()  # (..., L, 1)
        self.before = pad(self.through[..., :-1, :], (0, 0, 1, 0), value=1)
        self.to_end = self.between[..., -1, :, None]
        self.total = self.through[..., -1:, :]
        self.d_between = torch.zeros_like(self.between)  # of its logarithm

    def products(self, x: Tensor, y: Tensor, early: bool) -> Tensor:
        return self._fade(x @ y.mT, early)

    def gradients(
        self, dP: Tensor, P: Tensor, x: Tensor, y: Tensor, early: bool
    ) -> tuple[Tensor, Tensor]:
        """Those of x and y, from those of their products P."""
        noted = dP * P
        if early:
            self.d_between[..., :-1, :] += noted[..., 1:, :]
        else:
            self.d_between += noted
        dP = self._fade(dP.clone(), early)
        return dP @ y, dP.mT @ x

    def log_gradient(
        self, before: Tensor, through: Tensor, to_end: Tensor, total: Tensor
    ) -> Tensor:
        """That of g, from those of the logarithms of the factors, by channel."""
        before, through, to_end, total = (
            x.sum(dim=-1, keepdim=True) for x in (before, through, to_end, total)
        )
        through = through + pad(before[..., 1:, :], (0, 0, 0, 1))
        through[..., -1:, :] += total
        self.d_between[..., -1, :] += to_end[..., 0]
        between = _sums_from(self.d_between).tril_(-1).sum(dim=-1, keepdim=True)
        return between + _sums_from(through)

    def _fade(self, P, early):
        if not early:
            return P.mul_(self.between)
        P[..., 1:, :].mul_(self.between[..., :-1, :])
        P[..., 0, :] = 0
        return P


class PerChannel:
    """A decay for each channel.

    Within blocks of a few positions the products of each distance are formed by themselves. Then
    blocks are joined in pairs, the pairs in pairs, and so on: the rows of the later half, decayed
    since its start, meet the columns of the earlier one, decayed until its end.
    """

    def __init__(self, g: Tensor):
        self.L, self.block = g.shape[-2], min(BLOCK, g.shape[-2])
        self.size = self.block
        while self.size < self.L:
            self.size *= 2
        self.alpha = g.exp()
        self.d_g = torch.zeros_like(self._padded(g))
        blocks = self._blocks(g)  # (..., n, block, D)
        alpha = self._blocks(self.alpha, value=1)
        fade = torch.ones_like(alpha[..., 1:, :])
        self.near = [fade]  # of each distance: what fades between the two
        for d in range(2, self.block):
            fade = fade[..., :-1, :] * alpha[..., d - 1 : -1, :]
            self.near.append(fade)
        before, to_end = sums_before(blocks).exp_(), sums_after(blocks).exp_()
        total = blocks.sum(dim=-2, keepdim=True).exp_()
        self.far = []  # of the halves that meet: what fades rows, and what fades columns
        while before.shape[-3] > 1:
            (early, before), (to_end, late), (first, second) = (
                x.unflatten(-3, (-1, 2)).unbind(-3) for x in (before, to_end, total)
            )
            self.far.append((before, to_end))
            before = torch.cat([early, before * first], dim=-2)
            to_end = torch.cat([to_end * second, late], dim=-2)
            total = first * second
        self.d_far = [[torch.zeros_like(x) for x in fades] for fades in self.far]
        self.before = before[..., 0, : self.L, :]
        self.to_end = to_end[..., 0, : self.L, :]
        self.total = total[..., 0, :, :]
        self.through = self.before * self.alpha

    def products(self, x: Tensor, y: Tensor, early: bool) -> Tensor:
        own = None if early else (x * y).sum(dim=-1)
        x, y = self._padded(x if early else x * self.alpha), self._padded(y)
        P = x.new_zeros(*x.shape[:-1], self.size)
        near_blocks, xs, ys = _diagonal_blocks(P, self.block), self._blocks(x), self._blocks(y)
        for d, fade in enumerate(self.near, 1):
            near = (xs[..., d:, :] * ys[..., :-d, :]).mul_(fade).sum(dim=-1)
            near_blocks.diagonal(-d, -2, -1).copy_(near)
        for row_fade, column_fade in self.far:
            half = row_fade.shape[-2]
            rows, columns = _half(x, half, 1) * row_fade, _half(y, half, 0) * column_fade
            _diagonal_blocks(P, 2 * half)[..., half:, :half].copy_(rows @ columns.mT)
        P = P[..., : self.L, : self.L]
        if own is not None:
            P.diagonal(dim1=-2, dim2=-1).copy_(own)
        return P

    def gradients(
        self, dP: Tensor, P: Tensor, x: Tensor, y: Tensor, early: bool
    ) -> tuple[Tensor, Tensor]:
        """Those of x and y, from those of their products P."""
        own = None if early else dP.diagonal(dim1=-2, dim2=-1)[..., None]
        x_faded, y_all = self._padded(x if early else x * self.alpha), self._padded(y)
        missing = self.size - self.L
        dP = pad(dP, (0, missing, 0, missing)) if missing else dP
        dx, dy = torch.zeros_like(x_faded), torch.zeros_like(y_all)
        xs, ys, dxs, dys, d_gs = (self._blocks(z) for z in (x_faded, y_all, dx, dy, self.d_g))
        near_blocks, noted = _diagonal_blocks(dP, self.block), None
        for d in range(len(self.near), 0, -1):  # what a distance fades, the next one fades as well
            x_d, y_d = xs[..., d:, :], ys[..., :-d, :]
            near = near_blocks.diagonal(-d, -2, -1)[..., None] * self.near[d - 1]
            dys[..., :-d, :].addcmul_(near, x_d)
            near_y = near * y_d
            dxs[..., d:, :].add_(near_y)
            if d > 1:
                own_noted = near_y * x_d
                if noted is not None:
                    own_noted[..., :-1, :] += noted
                noted = own_noted
                d_gs[..., d - 1 : -1, :].add_(noted)
        for (row_fade, column_fade), d_far in zip(self.far, self.d_far, strict=True):
            half = row_fade.shape[-2]
            far = _diagonal_blocks(dP, 2 * half)[..., half:, :half]
            rows, columns = _half(x_faded, half, 1) * row_fade, _half(y_all, half, 0) * column_fade
            d_rows, d_columns = far @ columns, far.mT @ rows
            _half(dx, half, 1).addcmul_(row_fade, d_rows)
            _half(dy, half, 0).addcmul_(column_fade, d_columns)
            d_far[0].addcmul_(rows, d_rows)
            d_far[1].addcmul_(columns, d_columns)
        dx, dy = dx[..., : self.L, :], dy[..., : self.L, :]
        if own is not None:
            self.d_g[..., : self.L, :] += x_faded[..., : self.L, :] * dx
            dx, dy = (dx * self.alpha).addcmul_(own, y), dy + own * x
        return dx, dy

    def log_gradient(
        self, before: Tensor, through: Tensor, to_end: Tensor, total: Tensor
    ) -> Tensor:
        """That of g, from those of the logarithms of the factors."""
        self.d_g[..., : self.L, :] += through
        before, to_end = (self._padded(x)[..., None, :, :] for x in (before + through, to_end))
        total = total[..., None, :, :]
        for d_rows, d_columns in reversed(self.d_far):
            half = d_rows.shape[-2]
            (early, before), (to_end, late) = (x.split(half, dim=-2) for x in (before, to_end))
            first = total + before.sum(dim=-2, keepdim=True)
            second = total + to_end.sum(dim=-2, keepdim=True)
            before, to_end, total = (
                torch.stack(pair, dim=-3).flatten(-4, -3)
                for pair in (
                    (early, before + d_rows),
                    (to_end + d_columns, late),
                    (first, second),
                )
            )
        d_g = self._blocks(self.d_g)
        d_g += total + _sums_from(before) - before + sums_before(to_end)
        return self.d_g[..., : self.L, :]

    def _padded(self, x, value=0.0):
        missing = self.size - x.shape[-2]
        return pad(x, (0, 0, 0, missing), value=value) if missing else x

    def _blocks(self, x, value=0.0):
        return self._padded(x, value).unflatten(-2, (-1, self.block))


def sums_through(g: Tensor) -> Tensor:
    """Row t is g_1 + ... + g_t: (..., L, C) -> (..., L, C)."""
    return g.cumsum(dim=-2)


def sums_before(g: Tensor) -> Tensor:
    """Row t is g_1 + ... + g_{t-1}."""
    return pad(g[..., :-1, :], (0, 0, 1, 0)).cumsum(dim=-2)


def sums_after(g: Tensor) -> Tensor:
    """Row j is g_{j+1} + ... + g_L."""
    return sums_before(g.flip(-2)).flip(-2)


def _sums_from(x):
    """Row t is x_t + ... + x_L."""
    return x.flip(-2).cumsum(dim=-2).flip(-2)


def _half(x, half, which):
    """The earlier (0) or later (1) halves of the pairs of blocks: (..., n, half, D)."""
    return x.unflatten(-2, (-1, 2, half)).select(-3, which)


def _diagonal_blocks(P, block):
    """The blocks on the diagonal of (..., L, L): (..., n, block, block)."""
    blocks = P.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))  # (..., n, block, n, block)
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)
