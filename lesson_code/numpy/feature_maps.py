"""Feature maps: phi with phi(q)·phi(k) as the similarity of q and k."""

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments

Array = NDArray[np.floating]


def elu_plus_one(x: Array) -> Array:
    r"""The map elu(x) + 1: x + 1 above zero, exp(x) below.

    Computes :eq:`eq-elu-plus-one` elementwise, so that C = D. It is positive everywhere, and unlike
    :func:`relu` it has a slope everywhere.

    Parameters
    ----------
    x : array, shape (..., D)
        Queries or keys.

    Returns
    -------
    array, shape (..., D)
        Features in the dtype of `x`; float16 is computed in float32.

    Notes
    -----
    For x <= 0 it is exp(x) itself and never ``elu(x) + 1``, which subtracts 1 and adds it again: in
    float32 that rounds to 0 below about -17. Here x = -80 still gives 1.8e-35. NaN stays NaN.

    References
    ----------
    Katharopoulos et al. (2020), equation 7.

    Examples
    --------
    >>> elu_plus_one(np.array([-1.0, 0.0, 2.0])).round(3)
    array([0.368, 1.   , 3.   ])
    """
    return _keep_dtype(lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), x)


def relu(x: Array) -> Array:
    r"""The map max(x, 0).

    Its features are zero, and so is their slope, wherever x is negative: a token whose features are
    all zero is neither written nor read, and cannot learn to be.

    Parameters
    ----------
    x : array, shape (..., D)
        Queries or keys.

    Returns
    -------
    array, shape (..., D)
        Features in the dtype of `x`.

    Notes
    -----
    NaN stays NaN.

    References
    ----------
    Katharopoulos et al. (2020), section 3.2.1, on why elu and not relu.

    Examples
    --------
    >>> relu(np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 2.])
    """
    return _keep_dtype(lambda x: np.maximum(x, 0), x)


def identity(x: Array) -> Array:
    r"""The map x: the similarity is q·k itself.

    The Gram matrix is positive semi-definite, yet single similarities can be negative, so that the
    normalized output is no mean: use it with ``normalize=False``.

    Parameters
    ----------
    x : array, shape (..., D)
        Queries or keys.

    Returns
    -------
    array, shape (..., D)
        `x` itself, not a copy.

    Notes
    -----
    NaN stays NaN.

    References
    ----------
    Schlag et al. (2021), section 2: fast weights without a feature map.

    Examples
    --------
    >>> identity(np.array([-1.0, 2.0]))
    array([-1.,  2.])
    """
    return _keep_dtype(lambda x: x, x)


def exponential(x: Array) -> Array:
    r"""The map exp(x), elementwise.

    Its similarity is :math:`\sum_c e^{q_c + k_c}`, a sum of exponentials: not the exponential of
    q·k.

    Parameters
    ----------
    x : array, shape (..., D)
        Queries or keys.

    Returns
    -------
    array, shape (..., D)
        Features in the dtype of `x`; float16 is computed in float32.

    Notes
    -----
    It overflows to inf, with NumPy's warning, above 88 in float32, 709 in float64 and 11 in
    float16. NaN stays NaN.

    References
    ----------
    Zhang et al. (2024), The Hedgehog and the Porcupine, section 3.

    Examples
    --------
    >>> exponential(np.array([0.0, np.log(2)]))
    array([1., 2.])
    """
    return _keep_dtype(np.exp, x)


def polynomial(degree: int, dim: int) -> Callable[[Array], Array]:
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

    Notes
    -----
    The letters are combined in the order of ``itertools.combinations_with_replacement``: for p = 2
    and D = 2 the features are 1, √2 x₁, √2 x₂, x₁², √2 x₁x₂, x₂². The map keeps the dtype of x and
    computes float16 in float32. NaN reaches the features that contain its letter. With an odd
    degree the similarity can be negative.

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
    >>> q, k = np.array([1.0, 2.0]), np.array([3.0, 1.0])
    >>> round(float(phi(q) @ phi(k)), 9)              # (1 + 5)**2
    36.0
    """
    degree = _arguments.check_integer("degree", degree, minimum=1)
    dim = _arguments.check_integer("dim", dim, minimum=1)
    monomials = list(itertools.combinations_with_replacement(range(dim + 1), degree))
    multinomial = [
        math.factorial(degree) / math.prod(math.factorial(letters.count(i)) for i in set(letters))
        for letters in monomials
    ]
    letters = np.array(monomials)  # (C, degree); letter 0 is the constant 1
    root = np.sqrt(multinomial)  # (C,)

    def phi(x):
        x = np.concatenate([np.ones_like(x[..., :1]), x], axis=-1)  # (..., D + 1)
        features = root.astype(x.dtype)
        for factor in range(degree):
            features = features * x[..., letters[:, factor]]
        return features

    return _FeatureMap(f"polynomial(degree={degree}, dim={dim})", dim, len(monomials), phi)


def taylor(dim: int) -> Callable[[Array], Array]:
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

    Notes
    -----
    :math:`s^2/2` sums :math:`x_i x_j y_i y_j / 2` over all i and j. Each pair i < j stands for two
    equal terms, so its product is √2 times as heavy as a square: x₁²/√2, x₁x₂, ..., x₁x_D, x₂²/√2,
    and so on. The map keeps the dtype of x and computes float16 in float32. NaN reaches the
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
    >>> q, k = np.array([1.0, 2.0, 0.0, 1.0]), np.array([1.0, 1.0, 5.0, 1.0])
    >>> round(float(phi(q) @ phi(k)), 9)              # s = 4/2, so 1 + 2 + 2
    5.0
    """
    dim = _arguments.check_integer("dim", dim, minimum=1)
    i, j = np.triu_indices(dim)  # all pairs i <= j
    weight = np.where(i == j, math.sqrt(0.5), 1.0)

    def phi(x):
        x = x * dim**-0.25
        products = weight.astype(x.dtype) * x[..., i] * x[..., j]  # (..., D(D + 1)/2)
        return np.concatenate([np.ones_like(x[..., :1]), x, products], axis=-1)

    return _FeatureMap(f"taylor(dim={dim})", dim, 1 + dim + len(i), phi)


def hedgehog(
    dim: int, *, weight: Array | None = None, bias: Array | None = None
) -> Callable[[Array], Array]:
    r"""Make the map of exponentials of learned directions, each with its mirror image.

    Computes :eq:`eq-hedgehog`: the features are :math:`e^{Wx + b}` and :math:`e^{-Wx - b}`, and the
    similarity of q and k is :math:`2 \sum_c \cosh(w_c \cdot (q + k) + 2 b_c)`, which is positive.
    W and b are trained so that the weights of each query come close to those of softmax.

    Parameters
    ----------
    dim : int
        Width D of queries and keys.
    weight : array, shape (..., C/2, D), optional
        The directions w_c as rows. Its leading dimensions, one matrix for each head for instance,
        broadcast with those of x before its positions. Left out, it is the identity, from which
        training begins.
    bias : array, shape (..., C/2), optional
        The numbers b_c; 0 if left out.

    Returns
    -------
    callable
        Feature map (..., D) -> (..., C), attribute ``num_features`` = C: twice the rows of W.

    Notes
    -----
    The paper's programs divide the features of a token by their sum. For a query that changes
    nothing, as the factor cancels from normalized attention; for a key it makes another function.
    Here nothing is divided: features overflow to inf, with NumPy's warning, where an exponent is
    above 88 in float32 or 11 in float16. W and b are taken in the dtype in which the map computes,
    which is that of x, or float32 for float16. With a matrix of its own for each head x needs an
    axis of positions. NaN in a vector makes all features NaN whose row meets it.

    References
    ----------
    Zhang et al. (2024), The Hedgehog and the Porcupine, section 4.

    Examples
    --------
    >>> phi = hedgehog(2)
    >>> phi
    hedgehog(dim=2)
    >>> phi(np.array([0.0, np.log(2)]))
    array([1. , 2. , 1. , 0.5])
    >>> phi = hedgehog(2, weight=np.array([[1.0, -1.0]]))
    >>> phi.num_features
    2
    >>> phi(np.array([3.0, 3.0]))
    array([1., 1.])
    """
    dim, m, description = check_directions(np.ndarray, dim, weight, bias)

    def phi(x):
        if weight is not None:
            x = x @ weight.astype(x.dtype).swapaxes(-1, -2)  # (..., m)
        if bias is not None:
            x = x + along_positions(bias.astype(x.dtype))
        return np.exp(np.concatenate([x, -x], axis=-1))

    return _FeatureMap(description, dim, 2 * m, phi)


def positive_random_features(
    num_features: int, dim: int, *, orthogonal: bool = True, seed: int = 0
) -> Callable[[Array], Array]:
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
        Seed of the draw; the same seed gives the same features.

    Returns
    -------
    callable
        Feature map (..., D) -> (..., C), attribute ``num_features`` = C.

    Notes
    -----
    An orthogonal row alone must be distributed as a Gaussian one. Its direction is uniform only if
    the columns of QR's Q are multiplied by the signs of R's diagonal, as LAPACK fixes the signs of
    Q; its length is drawn anew from the chi distribution with D degrees of freedom.

    No maximum is subtracted: it would depend on the data. So exp can overflow (its argument is at
    most :math:`|w|^2/2`, about D/2) and, for long x, underflow to features that are all 0. The
    variance grows quickly with :math:`|q + k|`. The similarity is estimated without bias, the
    normalized output is not: it is a ratio of two estimates.

    The map keeps the dtype of x and computes float16 in float32. NaN in a vector makes all of its
    features NaN.

    References
    ----------
    Choromanski et al. (2021), lemma 1 and section 2.4.

    Examples
    --------
    >>> phi = positive_random_features(4096, dim=2)
    >>> phi
    positive_random_features(num_features=4096, dim=2, orthogonal=True, seed=0)
    >>> q, k = np.array([1.0, 0.0]), np.array([0.5, -0.5])
    >>> estimate, exact = phi(q) @ phi(k), np.exp(0.5 / np.sqrt(2))
    >>> bool(abs(estimate - exact) < 0.1)
    True
    """
    m = _arguments.check_integer("num_features", num_features, minimum=1)
    dim = _arguments.check_integer("dim", dim, minimum=1)
    seed = _arguments.check_integer("seed", seed, minimum=0)
    _arguments.check_flags(orthogonal=orthogonal)
    rng = np.random.default_rng(seed)
    rows = orthogonal_rows(rng, m, dim) if orthogonal else rng.standard_normal((m, dim))

    def phi(x):
        x = x * dim**-0.25
        half_square = (x * x).sum(axis=-1, keepdims=True) / 2
        return np.exp(x @ rows.T.astype(x.dtype) - half_square) * m**-0.5

    description = (
        f"positive_random_features(num_features={m}, dim={dim}, "
        f"orthogonal={bool(orthogonal)}, seed={seed})"
    )
    return _FeatureMap(description, dim, m, phi)


def orthogonal_rows(rng, m, dim):
    """m rows, each distributed as a Gaussian one, orthogonal within blocks of dim."""
    blocks = -(-m // dim)
    Q, R = np.linalg.qr(rng.standard_normal((blocks, dim, dim)))
    Q = Q * np.sign(np.diagonal(R, axis1=-2, axis2=-1))[:, None, :]  # the sign of each column
    directions = Q.swapaxes(-1, -2).reshape(-1, dim)[:m]
    lengths = np.sqrt(rng.chisquare(dim, size=(m, 1)))
    return lengths * directions


def check_directions(kind, dim, weight, bias):
    """Refuse what does not fit together; the width, how many directions, and the map in words."""
    dim = _arguments.check_integer("dim", dim, minimum=1)
    given = {"weight": (weight, "m D"), "bias": (bias, "m")}
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    for name, (array, _) in given.items():
        _arguments.check_arrays(kind, **{name: array})
    if weight is not None:
        _arguments.check_size("weight", weight.shape[-1] if weight.ndim else 0, "the width D", dim)
    if given:
        _arguments.check_axes(**given)
    m = dim if weight is None else weight.shape[-2]
    if bias is not None:
        _arguments.check_size("bias", bias.shape[-1], "one number for each row of weight", m)
    shapes = "".join(f", {name} {tuple(array.shape)}" for name, (array, _) in given.items())
    return dim, m, f"hedgehog(dim={dim}{shapes})"


def along_positions(bias):
    """A bias (..., m) beside x (..., N, m); one of (m,) beside a vector, too."""
    return bias if bias.ndim == 1 else bias[..., None, :]


class _FeatureMap:
    """A feature map of fixed widths D and C, which checks and keeps the dtype of its input."""

    def __init__(self, description, dim, num_features, phi):
        self.num_features = num_features
        self._description = description
        self._dim = dim
        self._phi = phi

    def __call__(self, x: Array) -> Array:
        if isinstance(x, np.ndarray) and x.shape[-1:] != (self._dim,):
            raise ValueError(f"x must have shape (..., {self._dim}) for {self}, got {x.shape}.")
        return _keep_dtype(self._phi, x)

    def __repr__(self):
        return self._description


def _keep_dtype(phi, x):
    """phi(x), computed in the accumulation dtype, in the dtype of x."""
    _arguments.check_arrays(np.ndarray, x=x)
    return phi(x.astype(_arguments.accumulation_dtype(x), copy=False)).astype(x.dtype, copy=False)
