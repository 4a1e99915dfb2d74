"""Feature maps: phi with phi(q)·phi(k) as the similarity of q and k."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.numpy.feature_maps import along_positions, check_directions, orthogonal_rows
from lesson_code.torch.precision import accumulate, full_precision


def elu_plus_one(x: Tensor) -> Tensor:
    r"""The map elu(x) + 1: x + 1 above zero, exp(x) below.

    Computes :eq:`eq-elu-plus-one`, as :func:`lesson_code.numpy.elu_plus_one` does. For x <= 0 it is
    exp(x) itself and never ``torch.nn.functional.elu(x) + 1``, which subtracts 1 and adds it again:
    that rounds to 0 below about -17 in float32, -8.3 in float16 and -6.25 in bfloat16. The gradient
    is finite everywhere.

    Examples
    --------
    >>> elu_plus_one(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    # exp sees no x above 0: it would overflow there, and 0 * inf make the gradient NaN.
    return _keep_dtype(lambda x: x.clamp(max=0).exp() + x.relu(), x)


def relu(x: Tensor) -> Tensor:
    r"""The map max(x, 0), as :func:`lesson_code.numpy.relu`.

    Where all features of a token are 0 its gradient is 0, too: such a token cannot learn.

    Examples
    --------
    >>> relu(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """
    return _keep_dtype(torch.relu, x)


def identity(x: Tensor) -> Tensor:
    r"""The map x, as :func:`lesson_code.numpy.identity`: x itself, not a copy.

    Examples
    --------
    >>> identity(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """
    _arguments.check_arrays(Tensor, x=x)
    return x


def exponential(x: Tensor) -> Tensor:
    r"""The map exp(x), elementwise, as :func:`lesson_code.numpy.exponential`.

    It overflows to inf above 88 in float32 and bfloat16, 709 in float64 and 11 in float16.

    Examples
    --------
    >>> exponential(torch.tensor([0.0, math.log(2)]))
    tensor([1., 2.])
    """
    return _keep_dtype(torch.exp, x)


def polynomial(degree: int, dim: int) -> Callable[[Tensor], Tensor]:
    r"""Make the map whose similarity is :math:`(1 + q \cdot k)^p`.

    Computes :eq:`eq-polynomial`, as :func:`lesson_code.numpy.polynomial` does.

    Examples
    --------
    >>> phi = polynomial(2, dim=2)
    >>> phi
    polynomial(degree=2, dim=2)
    >>> phi.num_features
    6
    >>> q, k = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])
    >>> phi(q) @ phi(k)                               # (1 + 5)**2
    tensor(36.)
    """
    degree = _arguments.check_integer("degree", degree, minimum=1)
    dim = _arguments.check_integer("dim", dim, minimum=1)
    monomials = list(itertools.combinations_with_replacement(range(dim + 1), degree))
    multinomial = [
        math.factorial(degree) / math.prod(math.factorial(letters.count(i)) for i in set(letters))
        for letters in monomials
    ]
    letters = torch.tensor(monomials, device="cpu").T  # (degree, C); letter 0 is the constant 1
    root = torch.tensor(multinomial, dtype=torch.float64, device="cpu").sqrt()  # (C,)

    def phi(x):
        x = torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)  # (..., D + 1)
        features = root.to(x)
        for factor in letters.to(x.device):
            features = features * x[..., factor]
        return features

    return _FeatureMap(f"polynomial(degree={degree}, dim={dim})", dim, len(monomials), phi)


def taylor(dim: int) -> Callable[[Tensor], Tensor]:
    r"""Make the map whose similarity is the second-order Taylor polynomial of exp.

    Computes :eq:`eq-taylor`, as :func:`lesson_code.numpy.taylor` does.

    Examples
    --------
    >>> phi = taylor(4)
    >>> phi.num_features
    15
    >>> q, k = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 5.0, 1.0])
    >>> phi(q) @ phi(k)                               # s = 4/2, so 1 + 2 + 2
    tensor(5.)
    """
    dim = _arguments.check_integer("dim", dim, minimum=1)
    pairs = torch.triu_indices(dim, dim, device="cpu")  # (2, D(D + 1)/2): all pairs i <= j
    weight = torch.ones(pairs.shape[1], dtype=torch.float64, device="cpu")
    weight[pairs[0] == pairs[1]] = math.sqrt(0.5)

    def phi(x):
        x = x * dim**-0.25
        i, j = pairs.to(x.device)
        products = weight.to(x) * x[..., i] * x[..., j]  # (..., D(D + 1)/2)
        return torch.cat([torch.ones_like(x[..., :1]), x, products], dim=-1)

    return _FeatureMap(f"taylor(dim={dim})", dim, 1 + dim + len(weight), phi)


def hedgehog(
    dim: int, *, weight: Tensor | None = None, bias: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    r"""Make the map of exponentials of learned directions, each with its mirror image.

    Computes :eq:`eq-hedgehog`, as :func:`lesson_code.numpy.hedgehog` does. `weight` and `bias` may
    be parameters: gradients reach them. They must be on the device of x.

    Examples
    --------
    >>> phi = hedgehog(2, weight=torch.tensor([[1.0, -1.0]], requires_grad=True))
    >>> phi.num_features
    2
    >>> phi(torch.tensor([3.0, 3.0]))
    tensor([1., 1.], grad_fn=<ExpBackward0>)
    """
    dim, m, description = check_directions(Tensor, dim, weight, bias)

    def phi(x):
        if weight is not None:
            x = x @ weight.to(x.dtype).mT  # (..., m)
        if bias is not None:
            x = x + along_positions(bias.to(x.dtype))
        return torch.cat([x, -x], dim=-1).exp()

    return _FeatureMap(description, dim, 2 * m, phi)


def positive_random_features(
    num_features: int, dim: int, *, orthogonal: bool = True, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    r"""Make a random map whose similarity is :math:`e^{q \cdot k / \sqrt{D}}` on average.

    Computes :eq:`eq-positive-random-features`, as
    :func:`lesson_code.numpy.positive_random_features` does, with the same features for the same
    seed. The rows are constants in float64, brought to the device and dtype of x at each call.

    Examples
    --------
    >>> phi = positive_random_features(4096, dim=2)
    >>> phi
    positive_random_features(num_features=4096, dim=2, orthogonal=True, seed=0)
    >>> q, k = torch.tensor([1.0, 0.0]), torch.tensor([0.5, -0.5])
    >>> estimate, exact = phi(q) @ phi(k), math.exp(0.5 / math.sqrt(2))
    >>> bool(abs(estimate - exact) < 0.1)
    True
    """
    m = _arguments.check_integer("num_features", num_features, minimum=1)
    dim = _arguments.check_integer("dim", dim, minimum=1)
    seed = _arguments.check_integer("seed", seed, minimum=0)
    _arguments.check_flags(orthogonal=orthogonal)
    rng = np.random.default_rng(seed)
    drawn = orthogonal_rows(rng, m, dim) if orthogonal else rng.standard_normal((m, dim))
    rows = torch.from_numpy(drawn)  # (m, D)

    def phi(x):
        x = x * dim**-0.25
        half_square = (x * x).sum(dim=-1, keepdim=True) / 2
        return torch.exp(x @ rows.T.to(x) - half_square) * m**-0.5

    description = (
        f"positive_random_features(num_features={m}, dim={dim}, "
        f"orthogonal={bool(orthogonal)}, seed={seed})"
    )
    return _FeatureMap(description, dim, m, phi)


class _FeatureMap:
    """A feature map of fixed widths D and C, which checks and keeps the dtype of its input."""

    def __init__(self, description, dim, num_features, phi):
        self.num_features = num_features
        self._description = description
        self._dim = dim
        self._phi = phi

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.shape[-1:] != (self._dim,):
            raise ValueError(
                f"x must have shape (..., {self._dim}) for {self}, got {tuple(x.shape)}."
            )
        return _keep_dtype(self._phi, x)

    def __repr__(self):
        return self._description


def _keep_dtype(phi, x):
    """phi(x), computed in the accumulation dtype, in the dtype of x."""
    _arguments.check_arrays(Tensor, x=x)
    with full_precision(x):
        return phi(*accumulate(x)).to(x.dtype)
