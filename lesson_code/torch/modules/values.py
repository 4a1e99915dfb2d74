"""Mixers of one stack that share values: each also sees those of the first of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.ragged import check_lengths, read_rows


class ValueMixer(Mixer):
    """A mixer that looks at the values of the first of its kind in the stack, and gives them on.

    A subclass writes ``mix_values(x, state, first_values) -> (y, state, first_values)``, where None
    stands for the first values of a mixer that is itself the first. They belong to the tokens of
    one call, so that no state has them.
    """

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        state: Any = None,
        return_state: bool = False,
        first_values: Tensor | None = None,
        return_first_values: bool = False,
    ) -> Any:
        """Read a sequence in parallel, as a :class:`Mixer` does.

        The first values (B, N, F) are those that the first layer returned for these tokens. They
        come last in what is returned.
        """
        self._check("x", x, "B, N")
        _arguments.check_flags(return_state=return_state, return_first_values=return_first_values)
        _check_first_values(first_values, x)
        if lengths is not None:
            lengths = check_lengths(lengths, x)

            def mix(state, x, first_values):
                y, state, first_values = self.mix_values(x, state, first_values)
                return state, y, first_values

            state, y, first_values = read_rows(mix, lengths, state, return_state, x, first_values)
        else:
            y, state, first_values = self.mix_values(x, state, first_values)
        asked = [state] * return_state + [first_values] * return_first_values
        return (y, *asked) if asked else y

    def step(
        self,
        x_t: Tensor,
        state: Any,
        *,
        first_values: Tensor | None = None,
        return_first_values: bool = False,
    ) -> Any:
        """Read one token, as a :class:`Mixer` does; its first values are (B, F)."""
        self._check_step(x_t, state)
        _arguments.check_flags(return_first_values=return_first_values)
        _check_first_values(first_values, x_t)
        if first_values is not None:
            first_values = first_values[:, None]
        y, state, first_values = self.mix_values(x_t[:, None], state, first_values)
        return (y[:, 0], state, first_values[:, 0]) if return_first_values else (y[:, 0], state)

    def mix(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.mix_values(x, state, None)[:2]

    def mix_values(
        self, x: Tensor, state: Any, first_values: Tensor | None
    ) -> tuple[Tensor, Any, Tensor]:
        raise NotImplementedError(
            f"{type(self).__name__} needs a method mix_values(x, state, first_values)."
        )


def _check_first_values(first_values, x):
    if first_values is None:
        return
    _arguments.check_arrays(Tensor, first_values=first_values)
    if first_values.shape != x.shape:
        raise ValueError(
            f"first_values must have shape {tuple(x.shape)}, got {tuple(first_values.shape)}."
        )
