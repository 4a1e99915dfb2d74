"""Feature maps: phi with phi(q)·phi(k) as the similarity of q and k."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.numpy.feature_maps import _orthogonal_rows
from lesson_code.torch.precision import accumulate, full_precision


def elu_plus_one(x: Tensor) -> Tensor:
    r"""The map elu(x) + 1: x + 1 above zero, exp(x) below.

    Computes :eq:`eq-elu-plus-one` elementwise, so that C = D. It is positive everywhere, and unlike
    :func:`relu` it has a slope everywhere.

    Parameters
    ----------
    x : tensor, shape (..., D)
        Queries or keys.

    Returns
    -------
    tensor, shape (..., D)
        Features in the dtype of `x`; half precision is computed in float32.

    Raises
    ------
    TypeError
        If `x` is no torch tensor of floats.

    Notes
    -----
    For x <= 0 it is exp(x) itself and never ``torch.nn.functional.elu(x) + 1``, which subtracts 1
    and adds it again: that rounds to 0 below about -17 in float32, -8.3 in float16 and -6.25 in
    bfloat16. The gradient is finite everywhere. NaN stays NaN.

    References
    ----------
    Katharopoulos et al. (2020), equation 7.

    Examples
    --------
    >>> elu_plus_one(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    # exp sees no x above 0: it would overflow there, and 0 * inf make the gradient NaN.
    return _keep_dtype(lambda x: x.clamp(max=0).exp() + x.relu(), x)


def relu(x: Tensor) -> Tensor:
    r"""The map max(x, 0).

    Its features are zero, and so is their slope, wherever x is negative: a token whose features are
    all zero is neither written nor read, and cannot learn to be.

    Parameters
    ----------
    x : tensor, shape (..., D)
        Queries or keys.

    Returns
    -------
    tensor, shape (..., D)
        Features in the dtype of `x`.

    Raises
    ------
    TypeError
        If `x` is no torch tensor of floats.

    Notes
    -----
    NaN stays NaN.

    References
    ----------
    Katharopoulos et al. (2020), section 3.2.1, on why elu and not relu.

    Examples
    --------
    >>> relu(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """
    return _keep_dtype(torch.relu, x)


def identity(x: Tensor) -> Tensor:
    r"""The map x: the similarity is q·k itself.

    The Gram matrix is positive semi-definite, yet single similarities can be negative, so that the
    normalized output is no mean: use it with ``normalize=False``.

    Parameters
    ----------
    x : tensor, shape (..., D)
        Queries or keys.

    Returns
    -------
    tensor, shape (..., D)
        `x` itself, not a copy.

    Raises
    ------
    TypeError
        If `x` is no torch tensor of floats.

    Notes
    -----
    NaN stays NaN.

    References
    ----------
    Schlag et al. (2021), section 2: fast weights without a feature map.

    Examples
    --------
    >>> identity(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """
    _arguments.check_arrays(Tensor, x=x)
    return x


def exponential(x: Tensor) -> Tensor:
    r"""The map exp(x), elementwise.

    Its similarity is :math:`\sum_c e^{q_c + k_c}`, a sum of exponentials: not the exponential of
    q·k.

    Parameters
    ----------
    x : tensor, shape (..., D)
        Queries or keys.

    Returns
    -------
    tensor, shape (..., D)
        Features in the dtype of `x`; half precision is computed in float32.

    Raises
    ------
    TypeError
        If `x` is no torch tensor of floats.

    Notes
    -----
    It overflows to inf above 88 in float32 and bfloat16, 709 in float64 and 11 in float16. NaN
    stays NaN.

    References
    ----------
    Zhang et al. (2024), The Hedgehog and the Porcupine, section 3.

    Examples
    --------
    >>> exponential(torch.tensor([0.0, math.log(2)]))
    tensor([1., 2.])
    """
    return _keep_dtype(torch.exp, x)


def polynomial(degree: int, dim: int) -> Callable[[Tensor], Tensor]:
    r"""Make the map whose similarity is :math:`(1 + q \cdot k)^p`.

    Its features are all monomials of the D + 1 letters :math:`1, x_1, \dots, x_D` that have p
    letters, each times the square root of its multinomial coefficient (:eq:`eq-polynomial`).

    Parameters
    ----------
    degree : int
        Degree p, at least 1.
    dim : int
        Width D of queries and keys.

    Returns
    -------
    callable
        Feature map (..., D) -> (..., C), attribute ``num_features`` = C = binomial(D + p, p).

    Raises
    ------
    TypeError
        If an argument is no integer. The map: if x is no torch tensor of floats.
    ValueError
        If an argument is below 1. The map: if the width of x is not `dim`.

    Notes
    -----
    The letters are combined in the order of ``itertools.combinations_with_replacement``: for p = 2
    and D = 2 the features are 1, √2 x₁, √2 x₂, x₁², √2 x₁x₂, x₂². The map keeps the dtype of x and
    computes half precision in float32. NaN reaches the features that contain its letter. With an
    odd degree the similarity can be negative.

    References
    ----------
    Katharopoulos et al. (2020), section 3.2.1, on polynomial kernels.

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

    With :math:`s = q \cdot k / \sqrt{D}` the similarity is :math:`1 + s + s^2/2`, which is at least
    1/2 (:eq:`eq-taylor`). The features are 1, the :math:`x_i`, and the products :math:`x_i x_j`
    with i <= j, of x scaled by :math:`D^{-1/4}`.

    Parameters
    ----------
    dim : int
        Width D of queries and keys.

    Returns
    -------
    callable
        Feature map (..., D) -> (..., C), attribute ``num_features`` = C = 1 + D + D(D + 1)/2.

    Raises
    ------
    TypeError
        If `dim` is no integer. The map: if x is no torch tensor of floats.
    ValueError
        If `dim` is below 1. The map: if the width of x is not `dim`.

    Notes
    -----
    :math:`s^2/2` sums :math:`x_i x_j y_i y_j / 2` over all i and j. Each pair i < j stands for two
    equal terms, so its product is √2 times as heavy as a square: x₁²/√2, x₁x₂, ..., x₁x_D, x₂²/√2,
    and so on. The map keeps the dtype of x and computes half precision in float32. NaN reaches the
    features that contain it.

    References
    ----------
    Arora et al. (2024), Simple linear attention language models balance the recall-throughput
    tradeoff.

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


def positive_random_features(
    num_features: int, dim: int, *, orthogonal: bool = True, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    r"""Make a random map whose similarity is :math:`e^{q \cdot k / \sqrt{D}}` on average.

    With m random rows w and :math:`x' = D^{-1/4} x` the features are
    :math:`m^{-1/2} \exp(w \cdot x' - |x'|^2 / 2)` (:eq:`eq-positive-random-features`). They are
    positive, and the mean of phi(q)·phi(k) over the draws is exact.

    Parameters
    ----------
    num_features : int
        Number m of random rows; C = m.
    dim : int
        Width D of queries and keys.
    orthogonal : bool
        Draw rows in blocks of D orthogonal ones, which lowers the variance; otherwise independent
        Gaussian rows. The last block is cut off where D does not divide m.
    seed : int
        Seed of the draw; the same seed gives the same features, here and in
        :func:`lesson_code.numpy.positive_random_features`.

    Returns
    -------
    callable
        Feature map (..., D) -> (..., C), attribute ``num_features`` = C.

    Raises
    ------
    TypeError
        If `num_features`, `dim` or `seed` is no integer. The map: if x is no torch tensor of
        floats.
    ValueError
        If `num_features` or `dim` is below 1 or `seed` below 0. The map: if the width of x is not
        `dim`.

    Notes
    -----
    The rows are drawn by NumPy, whose version says how and why no maximum is subtracted. They are
    constants in float64, brought to the device and dtype of x at each call. exp can overflow (its
    argument is at most :math:`|w|^2/2`, about D/2) and, for long x, underflow to features that are
    all 0. The map keeps the dtype of x and computes half precision in float32, but float16 holds
    nothing above 65,504. NaN in a vector makes all of its features NaN.

    References
    ----------
    Choromanski et al. (2021), lemma 1 and section 2.4.

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
    drawn = _orthogonal_rows(rng, m, dim) if orthogonal else rng.standard_normal((m, dim))
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
