"""Mistakes in the exercises of the chapter on causal scans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lesson_code.checks import check_exercise

CHUNKS = "Chunks"
BACKWARD = "The backward pass"
FIRST_VALUE = "Who has read the first value?"
TWO_SCANS = "Three gradients, two scans"
NORMALIZER = "The normalizer's path"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("dn_3", [4, 0], "the gradient of the output", NORMALIZER),
        ("dd_3", 35, "larger divisor", NORMALIZER),
        ("dd_3", -140, "One factor d too many", NORMALIZER),
        ("dd_3", -8.75, "once too often", NORMALIZER),
        ("dq_3", [60, 80], "taken for a constant", NORMALIZER),
        ("dq_3", [130, 150], "are subtracted", NORMALIZER),
        ("dq_3", [25, 45], "the sum of all keys so far", NORMALIZER),
        ("dk", [[10, 10], [30, 30], [50, 50]], "taken for a constant", NORMALIZER),
        ("dk", [[0, 0], [0, 0], [15, 15]], "backward in time", FIRST_VALUE),
        ("dk", [[-5, -35], [35, -35], [75, -35]], "used transposed", TWO_SCANS),
        ("dk", [[-100, -100], [-20, -20], [60, 60]], "not that of the numerator", NORMALIZER),
        ("dv", [[0, 0], [0, 0], [2, 0]], "backward in time", FIRST_VALUE),
        ("dv", [[1, 1], [0, 0], [1, 1]], "used transposed", TWO_SCANS),
        ("dv", [[4, 0], [4, 0], [8, 0]], "not that of the numerator", NORMALIZER),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-scans-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-scans-hand", dn_3=[1, 0], dd_3=-35, dq_3=[-10, 10],
        dk=[[-25, -25], [-5, -5], [15, 15]], dv=[[1, 0], [1, 0], [2, 0]],
    )  # fmt: skip


def test_three_mistakes(refused) -> None:
    label = "ex-scans-mistakes"
    refused(label, "sees less than it may", CHUNKS, first=[True, True, False])
    refused(label, "of the same function", BACKWARD, first=[True, False, True])
    refused(label, "once it is updated", CHUNKS, second=[True, False, False])
    refused(label, "in the backward pass", NORMALIZER, third=[True, False, True])
    check_exercise(
        label,
        first=[True, False, False],
        second=np.array([True, True, False]),
        third=(False, False, True),
    )


def phi(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def chunks(q, k, v, step, state=None, L=16, feature_map=phi, cut=False):
    """step(S, z, q_i, k_i, v_i, own) -> S, z, output of a chunk."""
    q, k = feature_map(q), feature_map(k)
    S, z = state or (k.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]),
                     k.new_zeros(*k.shape[:-2], k.shape[-1], 1))  # fmt: skip
    N = k.shape[-2] // L * L if cut else k.shape[-2]
    pieces = [v[..., :0, :]]
    for a in range(0, N, L):
        q_i, k_i, v_i = (x[..., a : a + L, :] for x in (q, k, v))
        S, z, out = step(S, z, q_i, k_i, v_i, torch.tril(q_i @ k_i.mT))
        pieces.append(out)
    out = torch.cat(pieces, dim=-2)
    return out, (S, z)


def right(S, z, q, k, v, own):
    out = (own @ v + q @ S) / (own.sum(-1, keepdim=True) + q @ z)
    return S + k.mT @ v, z + k.sum(-2)[..., None], out


def no_mask(S, z, q, k, v, own):
    return right(S, z, q, k, v, q @ k.mT)


def updates_first(S, z, q, k, v, own):
    S, z = S + k.mT @ v, z + k.sum(-2)[..., None]
    return S, z, (own @ v + q @ S) / (own.sum(-1, keepdim=True) + q @ z)


def divisor_first(S, z, q, k, v, own):
    z = z + k.sum(-2)[..., None]
    return S + k.mT @ v, z, (own @ v + q @ S) / (q @ z)


def no_diagonal(S, z, q, k, v, own):
    return right(S, z, q, k, v, torch.tril(own, -1))


def no_state(S, z, q, k, v, own):
    return S, z, own @ v / own.sum(-1, keepdim=True)


def replaces(S, z, q, k, v, own):
    S, z, out = right(S, z, q, k, v, own)
    return k.mT @ v, k.sum(-2)[..., None], out


def only_state(S, z, q, k, v, own):
    return right(S, z, q, k, v, 0 * own)


def plain(S, z, q, k, v, own):
    return S + k.mT @ v, z, own @ v + q @ S


def own_divisor(S, z, q, k, v, own):
    return S + k.mT @ v, z, (own @ v + q @ S) / own.sum(-1, keepdim=True)


def each_part(S, z, q, k, v, own):
    read = torch.where(q @ z > 0, q @ S / (q @ z), 0.0)
    S, z = S + k.mT @ v, z + k.sum(-2)[..., None]
    return S, z, own @ v / own.sum(-1, keepdim=True) + read


@pytest.mark.parametrize(
    ("step", "words", "section"),
    [
        (no_mask, "own block is not masked", CHUNKS),
        (updates_first, "updated before the chunk reads it", CHUNKS),
        (divisor_first, "z is updated before", CHUNKS),
        (no_diagonal, "The diagonal", CHUNKS),
        (no_state, "Every chunk sees itself alone", CHUNKS),
        (replaces, "The state has the last chunk alone", CHUNKS),
        (only_state, "leaves out its own block", CHUNKS),
        (plain, "The normalizer is missing", NORMALIZER),
        (own_divisor, "a chunk's own keys alone", CHUNKS),
        (each_part, "divided each by itself", CHUNKS),
    ],
)
def test_chunkwise(refused, step, words, section) -> None:
    refused("ex-scans-chunkwise", words, section, my_chunkwise=lambda q, k, v: chunks(
        q, k, v, step)[0])  # fmt: skip


def test_lost_tokens_and_feature_maps(refused) -> None:
    label = "ex-scans-chunkwise"
    lost = "The last tokens are lost"
    refused(label, lost, CHUNKS, my_chunkwise=lambda q, k, v: chunks(q, k, v, right, cut=True)[0])
    refused(
        label,
        "The feature map is missing",
        NORMALIZER,
        my_chunkwise=lambda q, k, v: chunks(q, k, v, right, feature_map=lambda x: x)[0],
    )


def streaming(fn):
    def my_chunkwise(q, k, v, *, initial_state=None, return_state=False, L=16):
        out, state = fn(q, k, v, initial_state)
        return (out, state) if return_state else out

    return my_chunkwise


def test_chunks_of_another_length_are_right() -> None:
    check_exercise(
        "ex-scans-chunkwise", streaming(lambda q, k, v, state: chunks(q, k, v, right, state, L=8))
    )


def test_no_piece_is_empty() -> None:
    """The exercise asks for N >= 1, and torch.cat wants at least one chunk."""

    def from_a_list(q, k, v, state):
        assert k.shape[-2] > 0
        return chunks(q, k, v, right, state)

    check_exercise("ex-scans-chunkwise", streaming(from_a_list))


def test_the_state_and_the_memory(refused) -> None:
    label = "ex-scans-chunkwise"
    forgetful = streaming(lambda q, k, v, state: chunks(q, k, v, right))
    refused(label, "is initial_state used?", CHUNKS, my_chunkwise=forgetful)

    def one_chunk(q, k, v, state):
        return chunks(q, k, v, right, state, L=max(1, k.shape[-2]))

    refused(label, "Memory grows with N²", CHUNKS, my_chunkwise=streaming(one_chunk))


def test_the_film_run_backward(refused) -> None:
    label = "ex-scans-reverse"
    refused(label, "exact arithmetic", TWO_SCANS, dq_1=1.0)
    refused(label, "That is S_2", TWO_SCANS, dq_1=2**25)
    refused(label, "fades forward", TWO_SCANS, growth=4.97e-19)
    refused(label, "it is a power", TWO_SCANS, growth=444.4)
    check_exercise(label, dq_1=0.0, growth=2.0e18)
