"""What fades inside a chunk: products of rows and columns of which the columns fade in between.

With g_t ≤ 0, the logarithm of a decay, row x_t and column y_j of a chunk meet as

    P_tj = Σ_d x_td y_jd exp(g_{j+1,d} + ... + g_{t,d})        j ≤ t, and 0 for j > t

A row that looks at the memory before its own token fades it (``early``) lacks the last term, and
has no product with its own column. What was there before the chunk has faded until a row by
`before` or `through`, a column fades until the chunk's end by `to_end`, a whole chunk fades by
`total`.

No exponent is above 0, and -inf is exact: decays over a stretch are sums of g or products of their
exponentials, never a difference or a quotient of two. Gradients go the same way back, as gradients
of the logarithms of these factors, which are 0 where a factor is 0; `add_gradients` notes its own.

`meet` gives the products of all rows with all columns, rows (x, early) as they see what was there
before the chunk, columns as they are seen after it, and the total.

All is (..., L, D), with g (..., L, 1) for one decay for all channels, or (..., L, D). None of it is
seen by autograd.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from lesson_code.torch.engines.segments import add_product

Rows = list[tuple[Tensor, bool]]
Met = tuple[list[list[Tensor]], list[Tensor], list[Tensor], Tensor]

BLOCK = 4  # positions whose products by channel are formed one by one


def decays(g: Tensor, kept: Tensor | None = None) -> "Shared | PerChannel":
    """The decays of chunks; what is ``kept`` of an earlier one of the same g is not made again."""
    return Shared(g, kept) if g.shape[-1] == 1 else PerChannel(g)


class Shared:
    """One decay for all channels: a product of a row and a column fades as a whole."""

    def __init__(self, g: Tensor, kept: Tensor | None):
        if kept is None:
            # Row i of column j is g_i if i > j, and their sum down to row t is that of j + 1 to t.
            kept = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1).cumsum_(dim=-2).exp_().tril_()
        self.between = self.kept = kept  # (..., L, L)
        self.through = sums_through(g).exp_()  # (..., L, 1)
        self.d_between: Tensor | None = None  # the gradient of its logarithm

    def meet(self, rows: Rows, columns: list[Tensor]) -> Met:
        before, through, to_end, total = self.factors()
        P = [[self._fade(x @ y.mT, early) for y in columns] for x, early in rows]
        xs = [x * (before if early else through) for x, early in rows]
        return P, xs, [y * to_end for y in columns], total

    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """before, through, to_end and total; `add_gradients` comes after it."""
        before = _before(self.through)
        to_end, total = self.between[..., -1, :, None], self.through[..., -1:, :]
        return before, self.through, to_end, total

    def add_gradients(
        self, dP: Tensor, P: Tensor, x: Tensor, y: Tensor, early: bool, dx: Tensor, dy: Tensor
    ) -> None:
        """Adds to dx and dy what dP, of their products P, adds; above its diagonal it counts 0."""
        if self.d_between is None:
            self.d_between = torch.zeros_like(self.between)
        if early:
            self.d_between[..., :-1, :].addcmul_(dP[..., 1:, :], P[..., 1:, :])
        else:
            self.d_between.addcmul_(dP, P)
        dP = self._fade(dP, early)
        add_product(dx, dP, y)
        add_product(dy, dP.mT, x)

    def log_gradient(self, rows: Rows, to_end: Tensor, total: Tensor) -> Tensor:
        """That of g, from those of the logarithms of what fades rows, columns and the chunk."""
        through = pad(total.sum(dim=-1, keepdim=True), (0, 0, self.through.shape[-2] - 1, 0))
        for x, early in rows:
            x = x.sum(dim=-1, keepdim=True)
            through += pad(x[..., 1:, :], (0, 0, 0, 1)) if early else x
        # A decay is between all rows from its own on and all columns before it.
        self.d_between[..., -1, :].add_(to_end.sum(dim=-1))
        between = self.d_between.cumsum_(dim=-1).tril_(-1).sum(dim=-2)[..., None]
        return _sums_from(through) + pad(between[..., :-1, :], (0, 0, 1, 0))

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
        self.kept = g.new_empty(0)  # all of it would be as large as a few sequences
        self.d_g: Tensor | None = None

    def meet(self, rows: Rows, columns: list[Tensor]) -> Met:
        block, alpha = self.block, self._blocks(self.alpha, value=1)  # (..., n, block, D)
        xs, ys = [self._blocks(x) for x, _ in rows], [self._blocks(y) for y in columns]
        size = *self.alpha.shape[:-2], self.size, self.size
        P = [[self.alpha.new_zeros(size) for _ in ys] for _ in xs]
        pairs = [(i, j) for i in range(len(xs)) for j in range(len(ys))]
        to_end = [torch.empty_like(y) for y in ys]
        for d in range(block):  # a column and the row d behind it, until which it fades
            before = [y[..., : block - d, :] for y in ys]
            ys = [y * alpha[..., d:, :] for y in before] if d else ys
            for i, j in pairs:
                if d or not rows[i][1]:
                    near = (xs[i][..., d:, :] * (before if rows[i][1] else ys)[j]).sum(dim=-1)
                    diagonal_blocks(P[i][j], block).diagonal(-d, -2, -1).copy_(near)
            for y, end in zip(ys, to_end, strict=True):
                end[..., -d - 1, :] = y[..., -1, :]
        # From here on rows are decayed since their block's start, and columns until its end.
        through = _through(alpha)
        for i, (_, early) in enumerate(rows):
            xs[i] = xs[i] * (_before(through) if early else through)
        xs, ys = ([z.flatten(-3, -2) for z in zs] for zs in (xs, to_end))
        half, total = block, through[..., -1:, :]
        while half < self.size:
            late_xs = [_half(x, half, 1) for x in xs]
            early_ys = [_half(y, half, 0) for y in ys]
            for i, j in pairs:
                far = diagonal_blocks(P[i][j], 2 * half)[..., half:, :half]
                far.copy_(late_xs[i] @ early_ys[j].mT)
            first, second = total.unflatten(-3, (-1, 2)).unbind(-3)
            for x in late_xs:
                x.mul_(first)
            for y in early_ys:
                y.mul_(second)
            half, total = 2 * half, first * second
        L = self.L
        P = [[product[..., :L, :L].contiguous() for product in row] for row in P]
        return P, [x[..., :L, :] for x in xs], [y[..., :L, :] for y in ys], total[..., 0, :, :]

    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        alpha = self._blocks(self.alpha, value=1)
        fade = torch.ones_like(alpha[..., 1:, :])
        self.near = [fade]  # of each distance in a block: what fades between the two
        for d in range(2, self.block):
            fade = fade[..., :-1, :] * alpha[..., d - 1 : -1, :]
            self.near.append(fade)
        through, to_end = _through(alpha), torch.ones_like(alpha)
        for t in range(1, self.block):
            torch.mul(to_end[..., -t, :], alpha[..., -t, :], out=to_end[..., -t - 1, :])
        before, total = _before(through), through[..., -1:, :]
        self.far = []  # of the halves that meet: what fades rows, and what fades columns
        while before.shape[-3] > 1:
            (early, before), (to_end, late), (first, second) = (
                x.unflatten(-3, (-1, 2)).unbind(-3) for x in (before, to_end, total)
            )
            self.far.append((before, to_end))
            before = torch.cat([early, before * first], dim=-2)
            to_end = torch.cat([to_end * second, late], dim=-2)
            total = first * second
        self.d_g = torch.zeros_like(self._padded(self.alpha))
        self.d_far = [[torch.zeros_like(x) for x in fades] for fades in self.far]
        before, to_end = (x[..., 0, : self.L, :] for x in (before, to_end))
        return before, before * self.alpha, to_end, total[..., 0, :, :]

    def add_gradients(
        self, dP: Tensor, P: Tensor, x: Tensor, y: Tensor, early: bool, dx: Tensor, dy: Tensor
    ) -> None:
        """Adds to dx and dy what dP, of their products P, adds."""
        all_dx, all_dy = dx, dy
        own = None if early else dP.diagonal(dim1=-2, dim2=-1)[..., None]
        x_faded, y_all = self._padded(x if early else x * self.alpha), self._padded(y)
        missing = self.size - self.L
        dP = pad(dP, (0, missing, 0, missing)) if missing else dP
        dx, dy = torch.zeros_like(x_faded), torch.zeros_like(y_all)
        xs, ys, dxs, dys, d_gs = (self._blocks(z) for z in (x_faded, y_all, dx, dy, self.d_g))
        near_blocks, noted = diagonal_blocks(dP, self.block), None
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
            far = diagonal_blocks(dP, 2 * half)[..., half:, :half]
            rows, columns = _half(x_faded, half, 1) * row_fade, _half(y_all, half, 0) * column_fade
            d_rows, d_columns = far @ columns, far.mT @ rows
            _half(dx, half, 1).addcmul_(row_fade, d_rows)
            _half(dy, half, 0).addcmul_(column_fade, d_columns)
            d_far[0].addcmul_(rows, d_rows)
            d_far[1].addcmul_(columns, d_columns)
        dx, dy = dx[..., : self.L, :], dy[..., : self.L, :]
        all_dy.add_(dy)
        if early:
            all_dx.add_(dx)
        else:
            self.d_g[..., : self.L, :].addcmul_(x_faded[..., : self.L, :], dx)
            all_dx.addcmul_(dx, self.alpha).addcmul_(own, y)
            all_dy.addcmul_(own, x)

    def log_gradient(self, rows: Rows, to_end: Tensor, total: Tensor) -> Tensor:
        """That of g, from those of the logarithms of what fades rows, columns and the chunk."""
        for x, early in rows:
            if not early:
                self.d_g[..., : self.L, :] += x
        before = functools.reduce(torch.add, (x for x, _ in rows))
        before, to_end = (self._padded(x)[..., None, :, :] for x in (before, to_end))
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


def _sums_from(x):
    """Row t is x_t + ... + x_L."""
    return x.flip(-2).cumsum(dim=-2).flip(-2)


def _through(alpha):
    """Row t is alpha_1 ... alpha_t."""
    through = alpha.clone()
    for t in range(1, alpha.shape[-2]):
        through[..., t, :] *= through[..., t - 1, :]
    return through


def _before(through):
    """Row t is alpha_1 ... alpha_{t-1}."""
    return pad(through[..., :-1, :], (0, 0, 1, 0), value=1)


def _half(x, half, which):
    """The earlier (0) or later (1) halves of the pairs of blocks: (..., n, half, D)."""
    return x.unflatten(-2, (-1, 2, half)).select(-3, which)


def diagonal_blocks(P, block):
    """The blocks on the diagonal of (..., L, L): (..., n, block, block)."""
    blocks = P.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))  # (..., n, block, n, block)
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)
