"""What the kernels of decay.cu and delta.cu have in common: chunks of 16 tokens, and decays."""

from lesson_code.cupy import _arrays

LENGTH = 16  # tokens of a chunk, as in the kernels
THREADS = LENGTH * LENGTH


def check_shape(device, log_decay, q, N: int, D: int) -> None:
    """Logarithms of decays, for each channel (..., N, D) or one for all (..., N, 1)."""
    is_shared = tuple(getattr(log_decay, "shape", ()))[-1:] == (1,)
    sizes = {"N": N, "1": 1} if is_shared else {"N": N, "D": D}
    _arrays.check_state(device, "log_decay", log_decay, "q", q, sizes)


def own_state(last, leading):
    """The last state without the repetitions along axes that it does not have itself."""
    missing = (0,) * (last.ndim - 2 - len(leading))
    return last[*missing, *(slice(size) for size in leading)]


def zeros(shape, like):
    """In float32."""
    array = _arrays.empty(shape, "float32", like)
    array[:] = 0
    return array


def floats(array, shape):
    """In float32, one number after the other, for every head; None for no array."""
    if array is None:
        return None
    return _arrays.contiguous(_arrays.broadcast(_arrays.floats(array), shape))


def pitch(width: int) -> int:
    """As in the kernels."""
    return width if width % 32 else width + 16
