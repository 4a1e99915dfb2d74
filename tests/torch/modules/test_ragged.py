"""Batches whose rows end at different places: each row is what it would be alone."""

import pytest
import torch

from lesson_code.torch.modules import KVCache, LanguageModel, RaggedCache, SoftmaxAttention
from tests.torch.modules.family import (
    HEADS,
    VOCABULARY,
    WIDTH,
    assert_close,
    draw,
    every_module,
    in_steps,
    leaves,
    make,
    refuses,
)

LENGTHS = [5, 0, 9, 1, 5, 9]
N = 9


def spoiled(x, lengths):
    """The same with something at the padding that must not be looked at."""
    x = x.clone()
    for row, n in zip(x, lengths, strict=True):
        row[n:] = torch.nan if x.is_floating_point() else VOCABULARY + 7
    return x


def alone(module, x, **options):
    """What each row is by itself, without its padding."""
    return [module(row[None, :n], **options) for row, n in zip(x, LENGTHS, strict=True)]


@every_module
def test_outputs_are_those_of_each_row_alone(name):
    module = make(name)
    x = draw(module, N, B=len(LENGTHS))
    for options in ({}, {"return_state": True}):
        y = module(spoiled(x, LENGTHS), lengths=LENGTHS, **options)
        y = y[0] if options else y
        for row, expected, n in zip(y, alone(module, x), LENGTHS, strict=True):
            assert_close(row[:n], expected[0], 1e-11)
            assert not row[n:].any()


@every_module
def test_states_go_on_as_those_of_each_row_alone(name):
    module = make(name)
    x, more = draw(module, N, B=len(LENGTHS)), draw(module, 4, B=len(LENGTHS), seed=2)
    _, state = module(spoiled(x, LENGTHS), lengths=torch.tensor(LENGTHS), return_state=True)
    in_parallel = module(more, state=state)
    step_by_step, last = in_steps(module, more, state)
    ragged, again = module(more, state=state, lengths=[4, 2, 0, 4, 1, 3], return_state=True)
    then = module(more[:, :2], state=again)
    for i, (_, own) in enumerate(alone(module, x, return_state=True)):
        expected, own_last = module(more[i : i + 1], state=own, return_state=True)
        assert_close(in_parallel[i : i + 1], expected, 1e-10)
        assert_close(step_by_step[i : i + 1], expected, 1e-10)
        n = [4, 2, 0, 4, 1, 3][i]
        y, own = module(more[i : i + 1, :n], state=own, return_state=True)
        assert_close(ragged[i : i + 1, :n], y, 1e-10)
        assert_close(then[i : i + 1], module(more[i : i + 1, :2], state=own), 1e-10)
        for a, b in zip(leaves(last), leaves(own_last), strict=False):
            if a.shape[1:] == b.shape[1:] and not isinstance(last, RaggedCache):
                assert_close(a[i : i + 1], b, 1e-10)


@every_module
def test_gradients_are_those_of_each_row_alone(name):
    module = make(name)
    x = draw(module, N, B=len(LENGTHS))
    parameters = list(module.parameters())
    expected = torch.autograd.grad(sum(y.square().sum() for y in alone(module, x)), parameters)
    for state in (False, True):
        y = module(spoiled(x, LENGTHS), lengths=LENGTHS, return_state=state)
        y = y[0] if state else y
        found = torch.autograd.grad(y.square().sum(), parameters)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, 1e-10)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generate_writes_into_the_last_columns(temperature):
    model = make("language model")
    lengths = torch.tensor([4, 1, 6])
    prompt = draw(model, 6, B=3)
    text = model.generate(spoiled(prompt, lengths), 70, lengths=lengths, temperature=temperature)
    assert text.shape == (3, 76)
    if temperature == 0:
        for row, own, n in zip(text, prompt, lengths, strict=True):
            expected = model.generate(own[None, :n], 70, temperature=0)
            assert torch.equal(row[6:], expected[0, n:])


def test_a_cache_says_how_long_each_row_is():
    module = make("softmax")
    x = draw(module, 5, B=3)
    _, cache = module(x, lengths=[2, 5, 0], return_state=True)
    assert cache.lengths.tolist() == [2, 5, 0] and cache.k.shape[-2] == 5
    _, cache = module.step(x[:, 0], cache)
    assert cache.lengths.tolist() == [3, 6, 1]
    _, cache = module(x, return_state=True)
    assert isinstance(cache, KVCache) and cache.lengths.tolist() == [5, 5, 5]


def test_a_batch_of_equal_lengths_is_one_piece(monkeypatch):
    module = make("gated")
    x, read = draw(module, 4, B=3), []
    mix = type(module).mix
    monkeypatch.setattr(type(module), "mix", lambda *args: read.append(args) or mix(*args))
    module(x, lengths=[4, 4, 4], return_state=True)
    assert len(read) == 1


@pytest.mark.parametrize("module", [SoftmaxAttention(WIDTH, HEADS), LanguageModel(11, WIDTH, [])])
def test_lengths_that_are_refused(module):
    x = (
        torch.zeros(2, 3, WIDTH)
        if isinstance(module, SoftmaxAttention)
        else torch.zeros(2, 3).int()
    )
    with refuses(ValueError, "lengths must be between 0 and 3, got 4."):
        module(x, lengths=torch.tensor([4, 0]))
    with refuses(ValueError, "lengths must be at least 0, got -1."):
        module(x, lengths=[-1, 0])
    with refuses(ValueError, "lengths must have shape (2,), got (3,)."):
        module(x, lengths=[1, 2, 3])
    with refuses(TypeError, "lengths must have dtype int64 or int32, got torch.float32."):
        module(x, lengths=torch.ones(2))
    with refuses(TypeError, "lengths must be a tensor of integers, got int."):
        module(x, lengths=3)
    with refuses(TypeError, "lengths must be an integer, got 1.5."):
        module(x, lengths=[1.5, 2])
    if isinstance(module, LanguageModel):
        with refuses(ValueError, "lengths must be between 1 and 3, got 0."):
            module.generate(x, 1, lengths=torch.tensor([3, 0]))
