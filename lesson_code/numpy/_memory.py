"""What the models with a memory share: the state that they begin with."""

import numpy as np

from lesson_code import _arguments


def initial_memory(initial_state, like_name, like, sizes, **arrays):
    """The state before the first token: a fresh array of `sizes`, zeros where None is given.

    It has the accumulation dtype of `like`, and the leading dimensions that it shares with
    `arrays`, each given as name=leading shape. `sizes` names the axes: {"C": 4, "M": 3}.
    """
    dtype = _arguments.accumulation_dtype(like)
    if initial_state is None:
        initial_state = np.zeros(tuple(sizes.values()), dtype)
    _arguments.check_initial_state(np.ndarray, initial_state, like_name, like, **sizes)
    leading = initial_state.shape[: -len(sizes)]
    leading = _arguments.check_leading(**arrays, initial_state=leading)
    return np.array(np.broadcast_to(initial_state, (*leading, *sizes.values())), dtype)
