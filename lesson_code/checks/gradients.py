"""Gradients agree with finite differences."""

from collections.abc import Callable

import numpy as np

from lesson_code._arguments import dtype_name
from lesson_code.checks._agreement import EPSILONS, close, first
from lesson_code.checks._calling import cases, describe, is_float, like, output_of, run, to_numpy
from lesson_code.checks._causes import cause_of_gradient


def check_gradients(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` unless its gradients agree with central differences.

    With NumPy ``fn(*inputs)`` returns ``(out, pullback)``; ``pullback(grad_out)`` takes an array of
    the shape of ``out``, the gradient of some loss with respect to it, and returns a tuple with the
    gradient of that loss with respect to each input. With torch ``fn(*inputs)`` returns a tensor
    (or a tuple that begins with one), and autograd supplies the pullback.

    At N = 6, 1 and, with leading dimensions, 3 every coordinate of every input is tried; at N = 131
    a few random directions. The inputs should be float64: then the differences are good to 5e-6.
    Those that are not of floating point have no gradient; the pullback may return None in their
    places.

    Examples
    --------
    >>> def product(q, k, v):
    ...     return q * k, lambda grad_out: (grad_out * k, grad_out * q, 0 * v)
    >>> check_gradients(product)
    >>> def wrong(q, k, v):
    ...     return q * k, lambda grad_out: (grad_out * k, grad_out * k, 0 * v)
    >>> check_gradients(wrong)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: With q (6, 5), ... the gradient of k is wrong, first at index (0, 0)...
    """
    for N, shape in (6, {}), (1, {}), (3, {"leading": (2, 4)}), (131, {}):
        for names, args in cases(fn, inputs, seed, (N, shape)):
            _check_pullback(fn, names, args, np.random.default_rng([seed, 2]), every=N < 100)


def _check_pullback(fn, names, args, rng, every):
    where = f"With {describe(names, args)}"
    out, pullback = _pullback(fn, names, args)
    grad_out = rng.normal(size=out.shape)
    gradients = run(pullback, ["grad_out"], [grad_out])
    if not isinstance(gradients, tuple | list) or len(gradients) != len(args):
        raise AssertionError(
            f"{where} the pullback must return a tuple of {len(args)} gradients, one for each "
            "input."
        )
    floats = [i for i, x in enumerate(args) if is_float(x)]
    if not floats:
        raise ValueError("inputs must return at least one array of floating point, none is.")
    epsilon = max(EPSILONS[dtype_name(args[i])] for i in floats)
    tolerance = epsilon ** (1 / 3)  # also the step at which central differences err least
    noise = 100 * epsilon / tolerance * np.abs(grad_out * out).sum()

    def slope(i, direction):
        """Derivative of the sum of grad_out * out when input i moves along a direction."""
        losses = []
        for step in (tolerance, -tolerance):
            moved = list(args)
            moved[i] = like(to_numpy(args[i]) + step * direction, args[i])
            losses.append((output_of(run(fn, names, moved)).astype(np.float64) * grad_out).sum())
        return (losses[0] - losses[1]) / (2 * tolerance)

    def problem(i):
        """What is wrong with the gradient of input i, or ''."""
        shape = tuple(args[i].shape)
        if gradients[i] is None:
            return "is None."
        gradient = to_numpy(gradients[i]).astype(np.float64)
        if gradient.shape != shape:
            return (
                f"has shape {gradient.shape}, {names[i]} itself {shape}. Sum over the axes along "
                "which it was broadcast."
            )
        if every:
            slopes = np.array([slope(i, unit) for unit in _units(shape)]).reshape(shape)
            wrong = ~close(gradient, slopes, tolerance) & ~(np.abs(gradient - slopes) < noise)
            if not wrong.any():
                return ""
            index = first(wrong)
            with np.errstate(all="ignore"):
                why = cause_of_gradient(gradient, slopes, tolerance)
            return (
                f"is wrong, first at index {index}: finite differences give {slopes[index]:.5g}, "
                f"your function {gradient[index]:.5g}. {why}".rstrip()
            )
        for _ in range(3):
            direction = rng.normal(size=shape)
            a, b = (gradient * direction).sum(), slope(i, direction)
            if not abs(a - b) <= tolerance * np.linalg.norm(gradient) + noise:
                return (
                    f"is wrong: along a random direction finite differences give {b:.5g}, your "
                    f"function {a:.5g}. Shorter sequences came out right: is something wrong from "
                    "one chunk to the next?"
                )
        return ""

    problems = {names[i]: problem(i) for i in floats}
    wrong = [name for name in problems if problems[name]]
    right = [name for name in problems if not problems[name]]
    if wrong:
        raise AssertionError(
            f"{where} the gradient of {wrong[0]} {problems[wrong[0]]}"
            + (f" Wrong as well: {', '.join(wrong[1:])}." if wrong[1:] else "")
            + (f" The gradient of {' and of '.join(right)} agrees." if right else "")
            + (" With a normalizer, k has a second path, through it." if wrong == ["k"] else "")
        )


def _pullback(fn, names, args):
    """The output, and the function that takes its gradient to the gradients of the inputs."""
    result = run(fn, names, args)
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
        out, given = result
        return to_numpy(out), lambda grad_out: given(like(grad_out, out))
    if not hasattr(result[0] if isinstance(result, tuple) else result, "detach"):
        raise AssertionError(
            "Your function must return the pair (out, pullback), where pullback(grad_out) returns "
            "one gradient for each input."
        )
    import torch

    if not all(hasattr(x, "detach") for x in args if is_float(x)):
        raise AssertionError(
            "Your function returned a tensor for NumPy inputs, from which autograd finds no way "
            "back to them: let inputs return tensors."
        )
    args = [x.detach().clone().requires_grad_() if is_float(x) else x for x in args]
    result = fn(*args)
    out = result[0] if isinstance(result, tuple) else result
    if not out.requires_grad:
        raise AssertionError(
            "Your output does not require a gradient: .detach(), .numpy(), .item() or "
            "torch.tensor(...) inside the function cuts it off."
        )

    def pullback(grad_out):
        floats = [x for x in args if is_float(x)]
        found = torch.autograd.grad(out, floats, like(grad_out, out), materialize_grads=True)
        in_order = iter(found)
        return [next(in_order) if is_float(x) else None for x in args]

    return to_numpy(out), pullback


def _units(shape):
    """Every unit vector of a shape, in order."""
    for i in range(np.prod(shape, dtype=int)):
        unit = np.zeros(shape)
        unit.flat[i] = 1
        yield unit
