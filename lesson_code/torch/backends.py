"""Which code runs an operator: torch, or the CUDA kernels of this package."""

from torch import Tensor


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
