"""Which exponentials a function takes."""

import contextlib
from unittest import mock

import torch


def largest_exponent(run) -> float:
    """The largest number whose exponential is taken while something runs."""
    largest = []

    def watched(exp):
        def note(x):
            largest.append(x.max().item())
            return exp(x)

        return note

    with contextlib.ExitStack() as patches:
        for name in ("exp", "exp_"):
            method = watched(getattr(torch.Tensor, name))
            patches.enter_context(mock.patch.object(torch.Tensor, name, method))
        patches.enter_context(mock.patch("torch.exp", watched(torch.exp)))
        run()
    return max(largest)
