"""What every module of the book has in common: a whole sequence, or one token at a time."""

from typing import Any

import torch
from torch import nn

from lesson_code import _arguments


class Mixer(nn.Module):
    """A causal module that reads a sequence in parallel or step by step, with the same weights.

    A subclass writes one method, ``mix(x, state) -> (y, state)`` for x (B, N, F), where a state of
    None is the start. `forward`, `step` and `initial_state` follow from it. Where one token can be
    had for less than a sequence of length 1, it also writes ``mix_one(x_t, state)`` for (B, F), and
    where for less still if the old state need not be kept, ``mix_one_(x_t, state)``, which
    generating calls.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.

    Attributes
    ----------
    is_block : bool
        Whether the module is a whole block with its own residual and feed-forward sublayer, which
        :class:`LanguageModel` takes as it is. False unless a class sets it.

    Raises
    ------
    TypeError
        If `width` is no integer.
    ValueError
        If `width` is below 1.

    Notes
    -----
    A state is a tensor or a tuple of tensors, and neither `forward` nor `step` changes one in
    place: whoever holds it can continue from it again. It carries gradients, unless it was made
    under ``torch.no_grad``; ``type(state)(*(x.detach() for x in state))`` cuts them off. All
    sequences of a batch are equally long.

    Examples
    --------
    >>> class RunningSum(Mixer):
    ...     def __init__(self, width):
    ...         super().__init__(width)
    ...         self.scale = nn.Parameter(torch.ones(width))
    ...     def mix(self, x, state):
    ...         x = self.scale * x
    ...         if state is None:
    ...             state = x.new_zeros(len(x), self.width)
    ...         return state[:, None] + x.cumsum(dim=1), state + x.sum(dim=1)
    >>> module = RunningSum(width=1)
    >>> module(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist()
    [1.0, 3.0, 6.0]
    >>> state = module.initial_state(1)
    >>> y_t, state = module.step(torch.tensor([[1.0]]), state)
    >>> y_t, state = module.step(torch.tensor([[2.0]]), state)
    >>> y_t.item()
    3.0
    """

    is_block = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = _arguments.check_integer("width", width, minimum=1)

    def forward(
        self, x: torch.Tensor, *, state: Any = None, return_state: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Read a sequence in parallel.

        Parameters
        ----------
        x : tensor, shape (B, N, F)
            Inputs in the dtype of the parameters.
        state : optional
            What `initial_state`, `step` or an earlier call returned: x continues from there.
        return_state : bool
            Return the state after the last token as well.

        Returns
        -------
        tensor, shape (B, N, F)
            Outputs; each depends on the inputs up to its own position.
        state
            With ``return_state=True``.

        Raises
        ------
        TypeError
            If `x` is no tensor of the parameters' dtype, or `state` not of this module's kind.
        ValueError
            If `x` is not (B, N, F), or `state` does not fit it.
        """
        self._check("x", x, "B, N")
        _arguments.check_flags(return_state=return_state)
        y, state = self.mix(x, state)
        return (y, state) if return_state else y

    def step(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Read one token.

        Parameters
        ----------
        x_t : tensor, shape (B, F)
            Input in the dtype of the parameters.
        state
            What `initial_state`, `forward` or the step before returned. It stays as it is.

        Returns
        -------
        tensor, shape (B, F)
            Output, the same as `forward` gives at this position.
        state
            The new state.

        Raises
        ------
        TypeError
            If `x_t` is no tensor of the parameters' dtype, or `state` not of this module's kind.
        ValueError
            If `x_t` is not (B, F), or `state` does not fit it.
        """
        self._check("x_t", x_t, "B")
        if state is None:
            raise TypeError("state must be what initial_state or the last step returned, got None.")
        return self.mix_one(x_t, state)

    def initial_state(self, batch_size: int) -> Any:
        """The state before the first token: what is left after reading nothing.

        Parameters
        ----------
        batch_size : int
            Number B of sequences.

        Returns
        -------
        state
            On the device of the parameters, in the dtype that belongs to theirs.

        Raises
        ------
        TypeError
            If `batch_size` is no integer.
        ValueError
            If `batch_size` is negative.
        """
        batch_size = _arguments.check_integer("batch_size", batch_size, minimum=0)
        nothing = next(self.parameters()).new_zeros(batch_size, 0, self.width)
        with torch.no_grad():
            return self.mix(nothing, None)[1]

    def mix(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method mix(x, state).")

    def mix_one(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        y, state = self.mix(x_t[:, None], state)
        return y[:, 0], state

    def mix_one_(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return self.step(x_t, state)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # Who mixes in another way than the parent does not inherit its way in place.
        if {"mix", "mix_one", "step"} & vars(cls).keys() and "mix_one_" not in vars(cls):
            cls.mix_one_ = Mixer.mix_one_  # type: ignore[method-assign]

    def _check(self, name, x, leading):
        _arguments.check_arrays(torch.Tensor, **{name: x})
        if x.ndim != len(leading.split(", ")) + 1 or x.shape[-1] != self.width:
            raise ValueError(
                f"{name} must have shape ({leading}, {self.width}), got {tuple(x.shape)}."
            )
        own = next((p.dtype for p in self.parameters()), x.dtype)
        if x.dtype != own and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} must have the dtype of the parameters, {own}, got {x.dtype}.")
