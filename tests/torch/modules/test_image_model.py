"""The image model: each pixel from those before it, in parallel and step by step."""

import numpy as np
import pytest
import torch

from lesson_code.torch import logistic_mixture
from lesson_code.torch.modules import (
    DeltaNet,
    ImageModel,
    LinearAttention,
    LinearTransformerLayer,
    SoftmaxAttention,
)
from lesson_code.torch.modules.in_place import own
from tests.torch.modules.family import disturb

N, LEVELS, WIDTH, K = 9, 5, 12, 3
MIXERS = {
    "linear": [LinearAttention, LinearAttention],
    "softmax": [SoftmaxAttention, SoftmaxAttention],
    "mixed": [LinearTransformerLayer, SoftmaxAttention, DeltaNet],
}


def make(name="mixed"):
    torch.manual_seed(0)
    return disturb(ImageModel(N, LEVELS, WIDTH, MIXERS[name], num_heads=3, num_logistics=K))


def draw(B=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LEVELS, (B, N), generator=generator)


def copies(state):
    return [x.clone() for x in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize("name", MIXERS)
def test_a_pixel_is_expected_from_those_before_it(name: str) -> None:
    model, images = make(name), draw()
    expected = model(images)
    assert expected.shape == (2, N, 3 * K)
    for i in range(N):
        changed = images.clone()
        changed[:, i] = (changed[:, i] + 1) % LEVELS
        found = model(changed)
        torch.testing.assert_close(found[:, : i + 1], expected[:, : i + 1], rtol=0, atol=1e-12)
        if i + 1 < N:
            assert (found[:, i + 1 :] - expected[:, i + 1 :]).abs().amax() > 1e-4


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("n", [0, 1, 4, N - 1])
def test_steps_are_the_parallel_form(name: str, n: int) -> None:
    model, images = make(name), draw()
    expected = model(images)
    with torch.no_grad():
        parameters, state = model.read(images[:, :n])
        for i in range(n, N):
            torch.testing.assert_close(parameters, expected[:, i], rtol=1e-10, atol=1e-10)
            if i + 1 < N:
                parameters, state = model.step(images[:, i], state)


@pytest.mark.parametrize("name", MIXERS)
def test_step_leaves_its_state_alone(name: str) -> None:
    model, images = make(name), draw()
    _, state = model.read(images[:, :3])
    before = copies(state)
    first, _ = model.step(images[:, 3], state)
    second, _ = model.step(images[:, 3], state)
    assert all(torch.equal(a, b) for a, b in zip(copies(state), before, strict=True))
    assert torch.equal(first, second)


def test_all_of_it_compiles() -> None:
    model, images = make("linear"), draw()
    with torch.no_grad():
        _, state = model.read(images[:, :3])
        calls = [
            (model.bits, images),
            (model.read, images[:, :3]),
            (model.step, images[:, 3], state),
        ]
        for function, *inputs in calls:
            found = torch.compile(function, fullgraph=True, backend="eager")(*inputs)
            torch.testing.assert_close(found, function(*inputs))
        # And as in generating, where it overwrites a state of its own.
        expected, _ = model.step(images[:, 3], state)
        step = torch.compile(model.step, fullgraph=True, backend="eager")
        found, after = step(images[:, 3], state._replace(blocks=own(state.blocks)))
    torch.testing.assert_close(found, expected)
    assert [x.data_ptr() for x in after.blocks[0]] == [x.data_ptr() for x in state.blocks[0]]


def test_bits_are_those_of_the_mixture_and_sum_to_one() -> None:
    model, images = make(), draw()
    expected = -logistic_mixture(model(images), images, LEVELS) / np.log(2)
    torch.testing.assert_close(model.bits(images), expected)
    # Over all images of a few pixels, the probabilities sum to 1.
    small = ImageModel(3, 2, 4, [LinearAttention], num_heads=1).double()
    every = torch.tensor([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
    assert (2 ** -small.bits(every).sum(dim=1)).sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", MIXERS)
def test_generate(name: str) -> None:
    model, images = make(name), draw(B=3)
    for n in (0, 4, N):
        found = model.generate(images[:, :n].int(), seed=2)
        assert found.shape == (3, N) and found.dtype == torch.int32
        assert torch.equal(found[:, :n], images[:, :n].int())
        assert found.min() >= 0 and found.max() < LEVELS
        assert torch.equal(found, model.generate(images[:, :n].int(), seed=2))
    assert not torch.equal(model.generate(images[:, :0]), model.generate(images[:, :0], seed=1))


def test_generated_images_are_as_likely_as_the_model_says() -> None:
    torch.manual_seed(3)
    model = ImageModel(2, 3, 8, [LinearAttention], num_heads=2).double()
    with torch.no_grad():
        model.head.weight.mul_(3)
        every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        expected = 2 ** -model.bits(every).sum(dim=1).numpy()
    n = 40_000
    drawn = model.generate(torch.zeros(n, 0, dtype=torch.int64))
    found = np.bincount((3 * drawn[:, 0] + drawn[:, 1]).numpy(), minlength=9) / n
    assert (abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / n)).all()


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = ImageModel(N, LEVELS, WIDTH, MIXERS["linear"], num_heads=3)
    images = draw(B=1).expand(8, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = model.bits(images).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    assert (model.generate(images[:, :0]) == images).float().mean() > 0.8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(draw()[:, :4]), ValueError, r"images must have shape \(B, 9\), got \(2, 4\)"),
        (lambda m: m(draw()[0]), ValueError, r"images must have shape \(B, N\), got \(9,\)"),
        (lambda m: m(draw().float()), TypeError, "images must have dtype int64 or int32"),
        (lambda m: m(draw().numpy()), TypeError, "images must be a torch tensor, got ndarray"),
        (lambda m: m(draw() + 3), ValueError, "images must be at least 0 and below levels, 5"),
        (lambda m: m(draw() - 1), ValueError, "images must be at least 0"),
        (lambda m: m.read(draw()), ValueError, "known must have fewer than 9 pixels"),
        (lambda m: m.generate(torch.zeros(1, 10).long()), ValueError, "at most 9 pixels"),
        (lambda m: m.generate(draw()[:, :2] + 9), ValueError, "known must be at least 0"),
        (lambda m: m.generate(draw()[:, :2], seed=-1), ValueError, "seed must be at least 0"),
        (lambda m: m.step(draw()[:, :1], m.read(draw()[:, :1])[1]), ValueError, r"shape \(B,\)"),
        (lambda m: m.step(draw()[:, 0], ()), TypeError, "state must be an ImageState, got tuple"),
        (lambda m: m.step(draw()[:, 0] + 7, m.read(draw()[:, :1])[1]), ValueError, "pixel must"),
        (lambda m: m.step(draw()[:, 8], m.read(draw()[:, :8])[1]), ValueError, "all 9 read"),
        (lambda m: ImageModel(0, 2, 4, []), ValueError, "num_pixels must be at least 1"),
        (lambda m: ImageModel(2, 1, 4, []), ValueError, "levels must be at least 2"),
        (lambda m: ImageModel(2, 2, 4, [], num_logistics=0), ValueError, "num_logistics must"),
        (lambda m: ImageModel(2, 2, 4, LinearAttention), TypeError, "mixers must be a list"),
        (lambda m: ImageModel(2, 2, 5, [LinearAttention]), ValueError, "width must be a multiple"),
    ],
)
def test_refusals(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(make("linear"))


def test_no_image_at_all() -> None:
    model = make()
    assert model(torch.zeros(0, N, dtype=torch.int64)).shape == (0, N, 3 * K)
    assert model.generate(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, N)
