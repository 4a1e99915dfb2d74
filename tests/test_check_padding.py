"""The check of padding passes what leaves it out, and refuses what libraries have done with it."""

import re

import numpy as np
import pytest
import torch

import lesson_code.torch as lt
from lesson_code.checks import check_padding


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def memory(features=True, outputs=True, mean=False, **wrong):
    """Normalized linear attention over rows with lengths, with one thing wrong."""

    def attention(q, k, v, *, lengths, initial_state=None, return_state=False):
        real = (np.arange(k.shape[1]) < lengths[:, None])[..., None]
        S, z = initial_state or (
            np.zeros((len(k), k.shape[-1], v.shape[-1])),
            np.zeros((len(k), 5)),
        )
        if mean:
            k = k - k.mean(axis=1, keepdims=True)
        keys = np.where(real, phi(k), 0) if features else phi(np.where(real, k, 0))
        v = np.where(real, v, 0)
        out, decay = np.zeros(v.shape), wrong.get("decay", 1.0)
        for t in range(k.shape[1]):
            S = decay * S + keys[:, t, :, None] * v[:, t, None, :]
            z = decay * z + keys[:, t]
            read = phi(q[:, t])[:, None]
            out[:, t] = ((read @ S) / (read @ z[..., None]))[:, 0]
        out = np.where(real, out, 0) if outputs else np.nan_to_num(out)
        return out, (S, z)

    return attention


def convolution(tail):
    """The last input and this one: the state is the last real input, or that of the last column."""

    def shift(q, k, v, *, lengths, initial_state=None, return_state=False):
        before = np.zeros((len(v), 1, 3)) if initial_state is None else initial_state
        real = (np.arange(v.shape[1]) < lengths[:, None])[..., None]
        all_of = np.concatenate([before, np.where(real, v, 0)], axis=1)
        out = np.where(real, all_of[:, :-1] + all_of[:, 1:], 0)
        at = lengths if tail == "real" else np.full(len(v), v.shape[1])
        return out, all_of[np.arange(len(v)), at][:, None]

    return shift


def test_right_answers():
    with np.errstate(all="ignore"):
        check_padding(memory())
    check_padding(convolution("real"))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            memory(features=False),
            "goes on wrongly.*there is something does",
        ),  # a zero key's feature
        (memory(decay=0.5), "goes on wrongly.*a decay goes on"),
        (memory(outputs=False), "has outputs other than 0 at its padding"),
        (memory(mean=True), "wrong at position .*Does a real token look at padding"),
        (convolution("column"), "goes on wrongly.*takes padding for its last inputs"),
        (lambda q, k, v, **_: v, "must return the pair"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_wrong_answers(fn, words, seed):
    with pytest.raises(AssertionError, match=words) as caught:
        check_padding(fn, seed=seed)
    assert re.fullmatch(r"[^\n]*[.?]", str(caught.value)) and "  " not in str(caught.value)


def test_what_is_written_at_padding_is_named():
    def unmasked(q, k, v, *, lengths, initial_state=None, return_state=False):
        real = (np.arange(k.shape[1]) < lengths[:, None])[..., None]
        before = 0 if initial_state is None else initial_state
        total = np.cumsum(v, axis=1) + before
        last = total[:, -1:] if v.shape[1] else np.zeros((len(v), 1, 3)) + before
        return np.where(real, total, 0), last

    with pytest.raises(AssertionError, match="comes in through v: it must not be written"):
        check_padding(unmasked)


def test_modules_and_their_inputs():
    module = lt.Retention(8, 2).double()

    def run(x, *, lengths, initial_state=None, return_state=False):
        return module(x, lengths=lengths, state=initial_state, return_state=return_state)

    def inputs(rng, N):
        return (torch.from_numpy(rng.normal(size=(6, N, 8))),)

    check_padding(run, inputs=inputs)
    with pytest.raises(AssertionError, match="a decay goes on"):
        check_padding(
            lambda x, *, lengths, initial_state=None, return_state=False: (
                module(x, lengths=lengths, state=initial_state),
                module(
                    torch.where(torch.arange(x.shape[1])[:, None] < lengths[:, None, None], x, 0),
                    state=initial_state,
                    return_state=True,
                )[1],
            ),
            inputs=inputs,
        )
    with pytest.raises(ValueError, match="at least 5 rows, got"):
        check_padding(run, inputs=lambda rng, N: (torch.zeros(3, N, 8),))
