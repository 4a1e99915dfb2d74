"""What the ranks of :mod:`lesson_code.torch.distributed` tell each other, forward and backward.

Two collectives, all-gathers both, make an exchange: a header of fixed size, in which the ranks
see that they agree, and the states, which are of one size then. A rank that does not fit is thus
an error on all ranks rather than a wrong sum, or a wait without end.
:func:`lesson_code.costs.state_exchange_bytes` counts what is sent.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lesson_code import _arguments
from lesson_code._custom_ops import once_differentiable

FUNCTIONS = ("linear_attention", "gated_linear_attention", "gated_delta_rule")
OFF, UNUSED, NEEDED = range(3)  # gradients: not recorded, not needed, needed
AXES = 8  # leading dimensions that a header has room for


def number_of_ranks(function: str, group) -> int:
    """How many ranks the group has; an error where there is none, or this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{function} across ranks needs a process group: call "
            "torch.distributed.init_process_group first, in a program that torchrun has started."
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must have this process among its ranks, got one without it.")
    if not isinstance(group, dist.ProcessGroup | None):
        raise TypeError(f"group must be a ProcessGroup or None, got {type(group).__name__}.")
    return dist.get_world_size(group)


class Header(NamedTuple):
    """What must agree. Each field is an integer, or a shape of up to 8 axes."""

    refused: int = 0  # this rank's arguments
    function: int = 0
    backward: int = 0
    call: int = 0
    gradients: int = OFF
    dtype: int = 0
    C: int = 0
    M: int = 0
    causal: int = 1
    normalize: int = 0
    return_state: int = 0
    queries: tuple[int, ...] = ()  # leading dimensions
    keys: tuple[int, ...] = ()
    state: tuple[int, ...] = ()

    def encode(self) -> list[int]:
        numbers = [int(x) for x in self[:-3]]
        for shape in self[-3:]:
            numbers += [*shape, *[-1] * (AXES - len(shape))]
        return numbers

    @classmethod
    def decode(cls, numbers: list[int]) -> "Header":
        plain = len(cls._fields) - 3
        ends = range(plain, plain + 3 * AXES, AXES)
        shapes = (tuple(x for x in numbers[i : i + AXES] if x >= 0) for i in ends)
        fields: list[Any] = [*numbers[:plain], *shapes]
        return cls(*fields)

    @property
    def step(self) -> str:
        function = FUNCTIONS[self.function]
        if self.backward:
            return f"the backward pass of {function}, call {self.call},"
        return f"a call of {function}"

    def show(self, field: str):
        value = getattr(self, field)
        if field == "dtype":
            return _arguments.FLOATS[value]
        return bool(value) if field in ("causal", "normalize", "return_state") else value


# The arguments that are compared, and what an error calls them.
COMPARED = {
    "dtype": "the dtype",
    "causal": "causal",
    "normalize": "normalize",
    "return_state": "return_state",
    "C": "the width of the keys, after the feature map,",
    "M": "the width M of the values",
    "queries": "the leading dimensions of q",
    "keys": "the leading dimensions of k and v",
}


class Exchange:
    """One call, which all ranks make.

    `announce` sends this rank's header. `send` compares those of all ranks and sends the state that
    this part writes, and its transition; `receive` waits for the others'. In the backward pass
    `receive` sends, and `send` waits: whatever is computed between the two runs while the states
    travel, both times. How states follow from each other is said by a subclass, in `fold`,
    `fold_back` and `transition_gradient`.
    """

    fold: Callable
    fold_back: Callable
    transition_gradient: Callable
    calls = 0  # of this process; all ranks of a call agree on the largest of their numbers

    def __init__(self, function: str, group, q) -> None:
        self.name, self.group = function, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if isinstance(q, Tensor):
            self.device = q.device
        else:  # an error, of which the other ranks are told
            self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self.header = Header(function=FUNCTIONS.index(function))

    @contextlib.contextmanager
    def telling_of_errors(self) -> Iterator[None]:
        """A context in which an error here becomes one on the other ranks, who would else wait."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the error at hand says more
                self._start(self._numbers(refused=1))()
            raise

    def announce(self, inputs: tuple, S: Tensor, *, dtype: torch.dtype, **fields: Any) -> None:
        """Send this rank's header: what must agree of q, k, ..., the first state, and the rest."""
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(f"{self.name} across ranks does not run under torch.func.")
        q, *others = inputs
        leading = {
            "queries": q.shape[:-2],
            "keys": torch.broadcast_shapes(*(x.shape[:-2] for x in others)),
            "state": S.shape[:-2],
        }
        for name, shape in zip(("q", "k", "initial_state"), leading.values(), strict=True):
            if len(shape) > AXES:
                raise ValueError(
                    f"{name} must have at most {AXES} leading dimensions across ranks, "
                    f"got {len(shape)}."
                )
        gradients = OFF
        if torch.is_grad_enabled():
            gradients = NEEDED if any(x.requires_grad for x in (*inputs, S)) else UNUSED
        self.header = self.header._replace(
            call=Exchange.calls,
            gradients=gradients,
            dtype=_arguments.FLOATS.index(str(dtype).removeprefix("torch.")),
            C=S.shape[-2],
            **leading,
            **fields,
        )
        self.headers = self._start(self._numbers())

    def send(self, state: Tensor, transition: Tensor | None = None) -> Tensor:
        """Send the state (..., C, M) that this part leaves, and its transition (..., C, ·).

        The result stands for what is on its way, in the graph of gradients.
        """
        headers = self._agree(self.headers)
        call = max(header.call for header in headers)
        Exchange.calls = call + 1
        self.header = self.header._replace(call=call)
        self.width, self.has_transition = state.shape[-1], transition is not None

        shape = headers[0].state  # the first rank's initial state may have more leading dimensions
        columns = [x.expand(*shape, -1, -1) for x in (state, transition) if x is not None]
        needed = any(header.gradients == NEEDED for header in headers)
        anchor = state.new_zeros((), requires_grad=needed and torch.is_grad_enabled())
        return _Send.apply(self, torch.cat(columns, dim=-1), anchor)

    def receive(self, sent: Tensor) -> tuple[Any, Any]:
        """The state before this part where causal, and the one after the last where it is used.

        None stands for the one that is not.
        """
        return _Receive.apply(self, sent)

    @property
    def wants_last(self) -> bool:
        return bool(self.header.return_state or not self.header.causal)

    def _agree(self, gather) -> list[Header]:
        """The headers of all ranks; the same error on every rank where they do not fit together."""
        headers = [Header.decode(numbers) for numbers in gather().tolist()]
        refused = [rank for rank, header in enumerate(headers) if header.refused]
        if refused:
            raise RuntimeError(f"{self.name}: rank {refused[0]} has refused its arguments.")
        first = headers[0]
        for rank, header in enumerate(headers):
            both = first.function, first.backward, header.function, header.backward
            if both[:2] != both[2:] or (header.backward and header.call != first.call):
                raise RuntimeError(
                    "every rank must make the same calls in the same order, "
                    f"got {first.step} on rank 0 and {header.step} on rank {rank}."
                )
        for field, what in COMPARED.items():
            for rank, header in enumerate(headers):
                if getattr(header, field) != getattr(first, field):
                    raise ValueError(
                        f"{what} must be the same on every rank, got {first.show(field)} on rank 0 "
                        f"and {header.show(field)} on rank {rank}."
                    )
        gradients = [header.gradients for header in headers]
        if NEEDED in gradients and OFF in gradients:
            raise ValueError(
                "gradients must be recorded on every rank when one needs them, got torch.no_grad "
                f"on rank {gradients.index(OFF)} and inputs that need gradients on rank "
                f"{gradients.index(NEEDED)}."
            )
        return headers

    def _numbers(self, **changes):
        numbers = self.header._replace(**changes).encode()
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _start(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather x of every rank; the result waits for it: (ranks, *x.shape)."""
        x = x.detach().contiguous()
        gathered = x.new_empty(self.ranks * x.numel())
        # The newer of two names.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = None
        if x.numel():
            with self._reaching():
                work = all_gather(gathered, x.view(-1), group=self.group, async_op=True)

        def finish():
            if work is not None:
                with self._reaching():
                    work.wait()
            return gathered.view(self.ranks, *x.shape)

        return finish

    @contextlib.contextmanager
    def _reaching(self):
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}: the exchange with the other ranks has failed. A rank died, or "
                "did not take part within the timeout of the group."
            ) from error


class _Send(torch.autograd.Function):
    """Start to send a state; backward, wait for the gradients of what the ranks received."""

    @staticmethod
    def forward(ctx, exchange, message, anchor):
        ctx.exchange = exchange
        ctx.save_for_backward(message)
        exchange.arriving = exchange._start(message)
        return message.new_zeros(())

    @staticmethod
    def backward(ctx, received):
        exchange = ctx.exchange
        gather, transitions, before = exchange.arriving_back
        exchange.arriving_back = None
        with torch.no_grad():
            grads = gather().unbind(1)  # each (ranks, ..., C, M)
            befores = grads[0] if exchange.header.causal else [0] * exchange.ranks
            last = grads[-1].sum(0) if exchange.wants_last else torch.zeros_like(grads[0][0])
            backwards = exchange.fold_back(transitions, befores, last)  # the last rank's first
            grad = next(itertools.islice(backwards, exchange.ranks - 1 - exchange.rank, None))
            if exchange.has_transition:
                grad = torch.cat([grad, exchange.transition_gradient(grad, before)], dim=-1)
        return None, _once(grad, received, *ctx.saved_tensors), None


class _Receive(torch.autograd.Function):
    """Wait for the states; backward, start to send the gradients of those that are used here."""

    @staticmethod
    def forward(ctx, exchange, sent):
        ctx.exchange = exchange
        messages = exchange.arriving()  # (ranks, ..., C, M and the transition's columns)
        exchange.arriving = None
        writes, transitions = messages.tensor_split([exchange.width], dim=-1)
        if not exchange.has_transition:
            transitions = [1] * exchange.ranks
        wanted = exchange.ranks if exchange.wants_last else exchange.rank
        states = itertools.islice(exchange.fold(transitions, writes), wanted + 1)
        for rank, last in enumerate(states):
            if rank == exchange.rank:
                before = last
        if exchange.has_transition:  # a copy, so that what was gathered can go
            ctx.save_for_backward(transitions.clone(), before)
        else:
            ctx.save_for_backward(sent)  # so that a second backward pass is an error here
        return before if exchange.header.causal else None, last if exchange.wants_last else None

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # an error, before anything is sent, if they have been freed
        exchange = ctx.exchange
        exchange._agree(exchange._start(exchange._numbers(backward=1)))
        used = [grad for grad in grads if grad is not None]
        states = torch.stack([grad.detach() for grad in used])
        transitions, before = saved if exchange.has_transition else ([1] * exchange.ranks, None)
        exchange.arriving_back = exchange._start(states), transitions, before
        return None, _once(states.new_zeros(()), *used)


# The first argument, for a graph of gradients: it depends on all the others in ways that no rank
# could differentiate alone, so its derivative is an error.
_once = once_differentiable(
    lambda x, *_: x.clone(), "attention across ranks can be differentiated once, in reverse mode."
)
