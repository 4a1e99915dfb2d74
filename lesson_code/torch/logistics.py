r"""The distribution of a pixel: a mixture of logistic distributions, cut into bins.

A pixel has one of a few levels 0 ... L - 1, which are ordered: 7 is near 8 and far from 0. Each
level is a bin of the line from -1 to 1, its middle at :math:`c_j = 2j/(L - 1) - 1`, and its
probability is the share of the distribution that falls into the bin. The first and the last bin
reach to infinity.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate

__all__ = ["draw_logistic_mixture", "logistic_mixture"]


def logistic_mixture(parameters: Tensor, pixels: Tensor, levels: int) -> Tensor:
    r"""Log probability of each pixel's level under its mixture of logistics.

    With K components of weight :math:`\pi_k`, mean :math:`\mu_k` and scale :math:`s_k`, and bins
    of half-width :math:`h = 1/(L - 1)`,

    .. math::

        P(j) = \sum_{k=1}^{K} \pi_k \left[\sigma\!\left(\frac{c_j + h - \mu_k}{s_k}\right)
        - \sigma\!\left(\frac{c_j - h - \mu_k}{s_k}\right)\right]

    where the first :math:`\sigma` is 1 for the last level and the second 0 for the first.

    Parameters
    ----------
    parameters : tensor, shape (..., 3K)
        K logits of the weights, K means, K logarithms of the scales.
    pixels : tensor of integers, shape (...)
        Levels, 0 to L - 1. The leading dimensions broadcast with those of `parameters`.
    levels : int
        Number L of levels, at least 2.

    Returns
    -------
    tensor, shape (...)
        Natural logarithms of probabilities, in the dtype of `parameters`, never -inf for finite
        parameters that do not overflow.

    Notes
    -----
    A difference of two sigmoids loses all digits far from the mean. As a product, it has a
    logarithm that is a sum: :math:`\sigma(a) - \sigma(b) = \sigma(a)\,\sigma(-b)\,(1 - e^{b - a})`.
    That `pixels` are in their range is not checked.

    References
    ----------
    Salimans et al. (2017), PixelCNN++, equation 2.

    Examples
    --------
    >>> parameters = torch.tensor([0.0, 0.0, 0.0])          # one component around the middle
    >>> logistic_mixture(parameters, torch.arange(3), 3).exp()
    tensor([0.3775, 0.2449, 0.3775])
    """
    _arguments.check_arrays(Tensor, parameters=parameters)
    K = _components(parameters)
    if not isinstance(pixels, Tensor):
        raise TypeError(f"pixels must be a torch tensor, got {type(pixels).__name__}.")
    if pixels.is_floating_point() or pixels.is_complex() or pixels.dtype == torch.bool:
        raise TypeError(f"pixels must have an integer dtype, got {pixels.dtype}.")
    levels = _arguments.check_integer("levels", levels, minimum=2)
    _arguments.check_leading(parameters=parameters.shape[:-1], pixels=pixels.shape)

    dtype, (parameters,) = parameters.dtype, accumulate(parameters)
    logits, means, log_scales = parameters.split(K, dim=-1)
    pixels = pixels.long()[..., None]  # in uint8, 256 would be 0
    middle = pixels.to(parameters.dtype) * (2 / (levels - 1)) - 1
    half = 1 / (levels - 1)
    upper = (middle + half - means) * torch.exp(-log_scales)
    lower = (middle - half - means) * torch.exp(-log_scales)
    log_width = torch.log(-torch.expm1(-2 * half * torch.exp(-log_scales)))
    first, last = pixels == 0, pixels == levels - 1
    zero = torch.zeros_like(upper)
    log_bin = (
        torch.where(last, zero, logsigmoid(upper))
        + torch.where(first, zero, logsigmoid(-lower))
        + torch.where(first | last, zero, log_width)
    )
    return torch.logsumexp(torch.log_softmax(logits, dim=-1) + log_bin, dim=-1).to(dtype)


def draw_logistic_mixture(
    parameters: Tensor, levels: int, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Draw a level from each mixture of logistics.

    A component is drawn by its weight, then a number from its logistic distribution,
    :math:`\mu_k + s_k \ln(u / (1 - u))` for u uniform in (0, 1); the level is the bin that holds
    it. The levels have the probabilities of :func:`logistic_mixture`.

    Parameters
    ----------
    parameters : tensor, shape (..., 3K)
        K logits of the weights, K means, K logarithms of the scales.
    levels : int
        Number L of levels, at least 2.
    generator : torch.Generator, optional
        Source of the random numbers, on the device of `parameters`.

    Returns
    -------
    tensor of int64, shape (...)
        Levels, 0 to L - 1.

    Notes
    -----
    Where a parameter is NaN, the level means nothing, but it is one.

    References
    ----------
    Salimans et al. (2017), PixelCNN++, section 2.1.

    Examples
    --------
    >>> parameters = torch.tensor([0.0, 1.0, -20.0])        # all of it near 1, the last level
    >>> draw_logistic_mixture(parameters, 17)
    tensor(16)
    """
    _arguments.check_arrays(Tensor, parameters=parameters)
    K = _components(parameters)
    levels = _arguments.check_integer("levels", levels, minimum=2)
    (parameters,) = accumulate(parameters)
    noise = torch.rand(
        *parameters.shape[:-1],
        K + 1,
        generator=generator,
        dtype=parameters.dtype,
        device=parameters.device,
    ).clamp(min=torch.finfo(parameters.dtype).tiny)
    logits, means, log_scales = parameters.split(K, dim=-1)
    # The largest of logits plus Gumbel noise is a draw by the weights.
    k = (logits - torch.log(-torch.log(noise[..., :K]))).argmax(dim=-1, keepdim=True)
    mean, log_scale = means.gather(-1, k), log_scales.gather(-1, k)
    x = mean + torch.exp(log_scale) * torch.logit(noise[..., K:])
    level = ((x[..., 0] + 1) * ((levels - 1) / 2)).round()
    return level.nan_to_num(0).clamp(0, levels - 1).long()


def _components(parameters):
    """The number K of components, from the last dimension."""
    if parameters.ndim == 0 or parameters.shape[-1] % 3 or parameters.shape[-1] == 0:
        raise ValueError(
            "parameters must have shape (..., 3K) for K components, at least one, "
            f"got {tuple(parameters.shape)}."
        )
    return parameters.shape[-1] // 3
