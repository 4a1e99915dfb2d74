"""What the exercises of several chapters compute with."""

import numpy as np

# The three tokens of the book. Their queries are their keys.
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


def transpose(x):
    return np.swapaxes(x, -1, -2)


def outer(k, v):
    """What a token writes."""
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    return (q[..., None, :] @ S)[..., 0, :]


def over_tokens(step, q, k, v, *more):
    """What ``S, out = step(S, q_t, k_t, v_t, ...)`` puts out for one sequence, from S = 0."""
    S, outputs = np.zeros((k.shape[1], v.shape[1])), np.zeros_like(v)
    for t, token in enumerate(zip(q, k, v, *more, strict=True)):
        S, outputs[t] = step(S, *token)
    return outputs
