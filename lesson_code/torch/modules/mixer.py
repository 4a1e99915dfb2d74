"""What every module of the book has in common: a whole sequence, or one token at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.modules.ragged import check_lengths, read_rows


class Mixer(nn.Module):
    """A causal module that reads a sequence in parallel or step by step, with the same weights.

    A subclass writes one method, ``mix(x, state) -> (y, state)`` for x (B, N, F), where a state of
    None is the start. `forward`, `step` and `initial_state` follow from it. Where one token can be
    had for less than a sequence of length 1, it also writes ``mix_one(x_t, state)`` for (B, F).

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.

    Attributes
    ----------
    is_block : bool
        Whether the module is a whole block with its own residual and feed-forward sublayer, which
        :class:`LanguageModel` takes as it is. False unless a class sets it.

    Notes
    -----
    This holds for all modules. `num_heads` is the number H of heads; it divides the width. Linear
    maps have no bias and are initialized as torch does, unless the module says otherwise.

    A state is a tensor or a tuple of tensors, in which a memory is kept in float32 at least. What
    is read from it is rounded to the dtype of the parameters only after a norm, as it may be too
    large for half precision. Neither `forward` nor `step` changes a state in place: whoever holds
    it can continue from it again. It carries gradients, unless it was made under
    ``torch.no_grad``; ``type(state)(*(x.detach() for x in state))`` cuts them off.

    Rows of a batch may end at different places, padded at the end: `lengths` says where. What
    stands at the padding then counts for nothing, not even for gradients.

    An argument of another type, inputs of another dtype than the parameters', or a state of another
    kind than the module's raise TypeError; sizes and shapes that do not fit raise ValueError.

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
    >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
    >>> module(x).flatten().tolist()
    [1.0, 3.0, 6.0]
    >>> y, state = module(x[:, :2], return_state=True)      # the first two tokens in parallel
    >>> y_t, state = module.step(x[:, 2], state)            # and one more
    >>> y_t.item()
    6.0
    """

    is_block = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = _arguments.check_integer("width", width, minimum=1)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """Read a sequence in parallel.

        Parameters
        ----------
        x : tensor, shape (B, N, F)
            Inputs in the dtype of the parameters.
        lengths : tensor of integers, shape (B,), optional
            How many tokens of each row are real, from 0 to N; the rest is padding. Each row has the
            outputs and the state that it would have alone, and 0 where there is padding.
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
        """
        self._check("x", x, "B, N")
        _arguments.check_flags(return_state=return_state)
        if lengths is None:
            y, state = self.mix(x, state)
        else:
            lengths = check_lengths(lengths, x)
            state, y = read_rows(
                lambda state, x: self.mix(x, state)[::-1], lengths, state, return_state, x
            )
        return (y, state) if return_state else y

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
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
        """
        self._check_step(x_t, state)
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
        """
        batch_size = _arguments.check_integer("batch_size", batch_size, minimum=0)
        nothing = next(self.parameters()).new_zeros(batch_size, 0, self.width)
        with torch.no_grad():
            return self.mix(nothing, None)[1]

    def mix(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method mix(x, state).")

    def mix_one(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mix(x_t[:, None], state)
        return y[:, 0], state

    def _check_step(self, x_t, state):
        self._check("x_t", x_t, "B")
        if state is None:
            raise TypeError("state must be what initial_state or the last step returned, got None.")

    def _check(self, name, x, leading):
        _arguments.check_arrays(Tensor, **{name: x})
        if x.ndim != len(leading.split(", ")) + 1 or x.shape[-1] != self.width:
            raise ValueError(
                f"{name} must have shape ({leading}, {self.width}), got {tuple(x.shape)}."
            )
        own = next((p.dtype for p in self.parameters()), x.dtype)
        if x.dtype != own and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} must have the dtype of the parameters, {own}, got {x.dtype}.")
