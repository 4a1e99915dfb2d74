"""Which code runs an operator: torch, or the CUDA kernels of this package."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lesson_code import measure
from lesson_code._arguments import check_integer
from lesson_code._contract import Contract

_faster: dict[tuple, str] = {}  # "torch" or "cupy", by what `_key` says of a call


def compare_backends(
    operator: Callable[..., Any], *args: Any, repeats: int = 5, **options: Any
) -> dict[str, float]:
    """Time an operator by torch and by the CUDA kernels, and let ``backend=None`` take the faster.

    Which of the two is faster depends on the GPU, the dtype and the sizes, so a clock has to say
    it: that of the machine at hand. What it says holds until the process ends, for calls with
    tensors of the same shapes and dtypes on the same device, and with the same options. Calls that
    have not been timed take torch. Where tensors need a gradient, the backward pass is in the time.

    Parameters
    ----------
    operator : callable
        A function of this package that has a `backend`.
    args, options
        What it is called with; neither `backend` nor `form`.
    repeats : int
        How often each is timed, in turn.

    Returns
    -------
    dict
        The least seconds of "torch" and of "cupy".

    Raises
    ------
    ValueError
        If the operator has no `backend`, if `repeats` is less than 1, or where the kernels do not
        serve.
    ImportError, RuntimeError
        As with ``backend="cupy"``.

    Examples
    --------
    >>> from lesson_code.torch import retention
    >>> q = k = v = torch.rand(2, 70, 8)  # on a CPU, where kernels are emulated
    >>> times = compare_backends(retention, q, k, v, 0.5, repeats=1)
    >>> times["torch"] < times["cupy"]
    True
    """
    contract = getattr(operator, "contract", None)
    if contract is None or "backend" not in contract.defaults:
        raise ValueError(f"operator must be one that has a backend, got {operator!r}.")
    if wrong := {"backend", "form"} & options.keys():
        raise ValueError(f"{wrong.pop()} must be left out, as each backend chooses its form.")
    repeats = check_integer("repeats", repeats, minimum=1)
    values = contract.by_name(args, options)
    tensors = [values[name] for name in contract.axes if isinstance(values[name], Tensor)]
    leaves = [x for x in tensors if _needs_gradient(x)]

    def call(backend: str) -> None:
        out = operator(*args, **options, backend=backend)
        out = out[0] if isinstance(out, tuple) else out
        if leaves:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    times = measure.seconds(
        {backend: functools.partial(call, backend) for backend in ("torch", "cupy")},
        repeats=repeats,
        device=tensors[0].device.type,
    )
    _faster[_key(contract, values)] = min(times, key=lambda backend: times[backend])
    return times


def faster(contract: Contract, args: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, with the backend that is known to be the faster, if one is."""
    if not _faster or options.get("backend") is not None or options.get("form") is not None:
        return options
    try:
        found = _faster.get(_key(contract, contract.by_name(args, options)))
    except TypeError:  # no such call was timed, and what is wrong with it is said by its operator
        return options
    return options if found is None else options | {"backend": found}


def _key(contract: Contract, values: dict[str, Any]) -> tuple:
    """What the time of a call depends on."""
    told: list[Any] = [contract.name]
    for name, x in values.items():
        if isinstance(x, Tensor) and name in contract.axes:
            told.append((x.shape, x.dtype, x.device, _needs_gradient(x)))
        elif name not in (*contract.axes, "backend", "form", "initial_state", "return_state"):
            told.append(x)
    return tuple(told)


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def on_kernels(backend: str | None, form: str | None) -> bool:
    """Whether the CUDA kernels are asked for; an error where they cannot serve."""
    if backend not in (None, "torch", "cupy"):
        raise ValueError(f"backend must be None, 'torch' or 'cupy', got {backend!r}.")
    if backend == "cupy" and form is not None:
        raise ValueError(f"form must be None when backend='cupy', got {form!r}.")
    return backend == "cupy"


def decaying_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state by :func:`lesson_code.cupy.decaying_scan`."""
    from lesson_code.cupy import decaying_scan

    return decaying_scan(
        q, k, v, log_decay, bonus,
        initial_state=initial_state, return_state=True, device=q.device.type,
    )  # fmt: skip


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state by :func:`lesson_code.cupy.delta_scan`."""
    from lesson_code.cupy import delta_scan

    return delta_scan(
        q, k, v, beta, log_decay,
        initial_state=initial_state, return_state=True, device=q.device.type,
    )  # fmt: skip
