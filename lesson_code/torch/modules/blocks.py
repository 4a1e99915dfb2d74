"""Blocks of mixers, one on top of the other: the body of every model."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.modules._parts import feed_forward
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.values import ValueMixer


class Block(Mixer):
    """A mixer and a feed-forward sublayer, each after a norm and with a residual around it."""

    is_block = True
    mixer: Any  # a Mixer, or a module with its methods

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__(width)
        self.norm_1 = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = feed_forward(width)

    def mix(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.norm_1(x), state=state, return_state=True)
        return self._after_mixer(x + y), state

    def mix_one(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        y_t, state = self.mixer.step(self.norm_1(x_t), state)
        return self._after_mixer(x_t + y_t), state

    def initial_state(self, batch_size: int) -> Any:
        return self.mixer.initial_state(batch_size)

    def _after_mixer(self, x):
        return x + self.feed_forward(self.norm_2(x))


class ValueBlock(ValueMixer, Block):
    """A block of a mixer that takes the first values and gives them on."""

    def mix_values(
        self, x: Tensor, state: Any, first_values: Tensor | None
    ) -> tuple[Tensor, Any, Tensor]:
        y, state, first_values = self.mixer(
            self.norm_1(x),
            state=state,
            return_state=True,
            first_values=first_values,
            return_first_values=True,
        )
        return self._after_mixer(x + y), state, first_values


class Blocks(nn.ModuleList):
    """Modules like :class:`Mixer`, used as if they were one; the state is a tuple of theirs.

    The values of the first :class:`ValueMixer` go to all others, past what stands between them.
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...

    def forward(
        self, x: Tensor, *, state: tuple | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, tuple]:
        """Read a sequence (B, N, F) in parallel."""
        before = [None] * len(self) if state is None else self._check_state(state)
        after, first_values = [], None
        for block, state in zip(self, before, strict=True):
            if isinstance(block, ValueMixer):
                x, state, first_values = block(
                    x,
                    state=state,
                    return_state=True,
                    first_values=first_values,
                    return_first_values=True,
                )
            else:
                x, state = block(x, state=state, return_state=True)
            if return_state:
                after.append(state)
        return (x, tuple(after)) if return_state else x

    def step(self, x_t: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        """Read one token (B, F)."""
        after, first_values = [], None
        for block, before in zip(self, self._check_state(state), strict=True):
            if isinstance(block, ValueMixer):
                x_t, new, first_values = block.step(
                    x_t, before, first_values=first_values, return_first_values=True
                )
            else:
                x_t, new = block.step(x_t, before)
            after.append(new)
        return x_t, tuple(after)

    def initial_state(self, batch_size: int) -> tuple:
        """The state before the first token."""
        return tuple(block.initial_state(batch_size) for block in self)

    def _check_state(self, state):
        if not isinstance(state, tuple):
            raise TypeError(f"state must be a tuple, got {type(state).__name__}.")
        _arguments.check_size("state", len(state), "one state for each block", len(self))
        return state


def make_blocks(width: int, mixers: Sequence[Callable[..., nn.Module]], num_heads: int) -> Blocks:
    """A block for each mixer, as :class:`LanguageModel` describes it."""
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    if not isinstance(mixers, list | tuple):
        raise TypeError(f"mixers must be a list, got {type(mixers).__name__}.")
    return Blocks(
        _make_block(
            f"mixers[{i}]", mixer, width, num_heads=num_heads, layer=i, num_layers=len(mixers)
        )
        for i, mixer in enumerate(mixers)
    )


def _make_block(name, mixer, width, **settings):
    """The block of one entry of `mixers`, with those of the settings that it asks for."""
    if isinstance(mixer, nn.Module) or not callable(mixer):
        raise TypeError(
            f"{name} must be a class or a callable width -> module, got {type(mixer).__name__}."
        )
    asked = inspect.signature(mixer).parameters
    given = {
        key: value
        for key, value in settings.items()
        if key in asked
        and (isinstance(mixer, type) or asked[key].default is inspect.Parameter.empty)
    }
    module = mixer(width, **given)
    methods = "forward", "step", "initial_state"
    if not all(callable(getattr(module, method, None)) for method in methods):
        raise TypeError(
            f"{name} must make a module with {', '.join(methods)}, got {type(module).__name__}."
        )
    if getattr(module, "is_block", False):
        return module
    return (ValueBlock if isinstance(module, ValueMixer) else Block)(width, module)
