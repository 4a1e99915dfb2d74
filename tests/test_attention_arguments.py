"""What linear and softmax attention refuse beyond the contract, in NumPy and torch alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import lesson_code.numpy as ln
import lesson_code.torch as lt
from tests.arrays import in_dtype, normal, numbers

DTYPES = {ln: "float64", lt: torch.float64}
in_both = pytest.mark.parametrize("library", DTYPES, ids=["numpy", "torch"])
both_softmaxes = pytest.mark.parametrize("name", ["softmax_attention", "tiled_softmax_attention"])


def draw(library, *shapes):
    return [in_dtype(x, DTYPES[library]) for x in normal(*(shapes or [(7, 3), (7, 3), (7, 4)]))]


def whole_numbers(x):
    return x.long() if isinstance(x, torch.Tensor) else x.astype(int)


@in_both
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"form": "linear", "causal": True}, ValueError, "form must be None or one of 'masked', "),
        ({"form": "masked"}, ValueError, "form must be None or one of 'quadratic', 'linear' when"),
        ({"form": "parallel"}, ValueError, "form must be .* got 'parallel'"),
        ({"return_state": True}, ValueError, "return_state needs causal=True, got"),
        ({"feature_map": "elu"}, TypeError, "feature_map must be callable, got str"),
        ({"feature_map": "elu_plus_one", "causal": True, "form": "chunkwise"}, TypeError, "featu"),
    ],
)
def test_options_of_linear_attention(library, options, error, message):
    with pytest.raises(error, match="^" + message):
        library.linear_attention(*draw(library), **options)


@in_both
def test_what_needs_a_causal_call_or_its_width(library):
    state = library.LinearAttentionState(*draw(library, (3, 4), (3,)))
    with pytest.raises(ValueError, match="^initial_state needs causal=True, got"):
        library.linear_attention(*draw(library), initial_state=state)
    with pytest.raises(ValueError, match=r"^x must have shape \(\.\.\., 4\)"):
        library.linear_attention(*draw(library), feature_map=library.taylor(4))


@in_both
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.sum(-1),
        lambda x: x[..., :2, :],
        lambda x: x.T,
        lambda x: x[None],
        whole_numbers,
        lambda x: x > 0,
        lambda x: x.tolist(),
        lambda x: x.numpy() if isinstance(x, torch.Tensor) else torch.from_numpy(x.copy()),
        lambda x: None,
        lambda x: x[:, : 1 + int(x[0, 0] > 0)],  # another width for q than for k
    ],
)
def test_feature_maps_that_do_not_fit(library, wrong):
    q, k, v = draw(library)
    q[0, 0], k[0, 0] = 1, -1
    for causal in (False, True):
        with pytest.raises(ValueError, match="^feature_map must "):
            library.linear_attention(q, k, v, feature_map=wrong, causal=causal)


@in_both
@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k: k @ q.T,
        lambda q, k: whole_numbers(q @ k.T),
        lambda q, k: (q @ k.T).tolist(),
        lambda q, k: 1.0,
    ],
)
def test_similarities_that_do_not_fit(library, wrong):
    q, k, v = draw(library, (4, 3), (7, 3), (7, 4))
    with pytest.raises(ValueError, match=r"^similarity must return .* \(\.\.\., 4, 7\), got "):
        library.similarity_attention(q, k, v, wrong)


@in_both
def test_similarities_that_are_none_or_of_other_sequences(library):
    q, k, v, several = draw(library, (4, 3), (7, 3), (2, 7, 4), (3, 4, 7))
    with pytest.raises(TypeError, match="^similarity must be callable, got str"):
        library.similarity_attention(q, k, v, "exp")
    with pytest.raises(ValueError, match="leading dimensions of similarity and v must broadcast"):
        library.similarity_attention(q, k, v, lambda q, k: several)


@in_both
@both_softmaxes
def test_scale(library, name):
    attention, (q, k, v) = getattr(library, name), draw(library)
    for wrong, error in ((math.nan, ValueError), (-math.inf, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="^scale must be "):
            attention(q, k, v, scale=wrong)
    with pytest.raises(ValueError, match="^q must have a width D of at least 1 when scale is None"):
        attention(q[:, :0], k[:, :0], v)
    mean = numbers(attention(q[:, :0], k[:, :0], v, scale=1))
    np.testing.assert_allclose(mean, [numbers(v).mean(axis=0)] * 7)
    single = [in_dtype(numbers(x), {ln: "float32", lt: torch.float32}[library]) for x in (q, k, v)]
    assert attention(*single, scale=np.float64(0.5)).dtype == single[0].dtype


@in_both
def test_heads_that_do_not_fit(library):
    q, k, v = draw(library, (4, 6, 3), (3, 6, 3), (3, 6, 4))
    for wrong, message in (
        ((q, k, v), "^q must have a multiple of the 3 heads of k, got 4"),
        ((q, k, v[:1]), r"^v must have shape .*, \(\.\.\., 3, 6, 4\), got \(1, 6, 4\)"),
        ((q[0], k, v), r"^q must have shape \(\.\.\., Hq, Nq, D\), got \(6, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            library.grouped_query_attention(*wrong)
