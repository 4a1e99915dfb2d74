"""The language model: how it is put together, what it writes, and that it learns."""

import functools
import inspect
import math

import pytest
import torch

from lesson_code.torch import modules
from lesson_code.torch.modules import (
    LanguageModel,
    LinearAttention,
    LinearTransformerLayer,
    SoftmaxAttention,
)
from tests.torch.modules.family import KINDS, every_kind

HYBRID = [LinearAttention, SoftmaxAttention, LinearTransformerLayer]
every_stack = pytest.mark.parametrize(
    "mixers", [[SoftmaxAttention], [LinearAttention], [LinearTransformerLayer], HYBRID, []]
)


def make(mixers=HYBRID, vocab_size=11):
    torch.manual_seed(0)
    model = LanguageModel(vocab_size, 8, mixers, num_heads=2).double()
    tokens = torch.randint(vocab_size, (3, 7))
    return model, tokens


# How it is put together.


def test_a_mixer_is_a_class_or_a_callable():
    model = LanguageModel(
        11,
        12,
        [
            LinearAttention,
            lambda width: LinearAttention(width, 2, normalize=False),
            functools.partial(SoftmaxAttention, rotary=False),
            functools.partial(SoftmaxAttention, num_heads=6),
            LinearTransformerLayer,
        ],
    )
    mixers = [getattr(block, "mixer", block) for block in model.blocks]
    assert [mixer.num_heads for mixer in mixers] == [4, 2, 4, 6, 4]
    assert [mixer.width for mixer in mixers] == [12] * 5
    assert not mixers[1].normalize and not mixers[2].rotary and mixers[3].rotary
    assert model.blocks[4] is mixers[4] and all(model.blocks[i] is not mixers[i] for i in range(4))


def test_num_heads_goes_to_the_classes_that_take_it():
    class OneHead(LinearAttention):
        def __init__(self, width, num_heads=1):
            super().__init__(width, num_heads)

    def one_head(width, num_heads=1):
        return LinearAttention(width, num_heads)

    model = LanguageModel(11, 12, [LinearAttention, OneHead, one_head], num_heads=3)
    assert [block.mixer.num_heads for block in model.blocks] == [3, 3, 1]


def test_a_class_that_asks_is_told_its_place():
    class Placed(LinearAttention):
        def __init__(self, width, num_heads, *, layer=0, num_layers=1):
            super().__init__(width, num_heads)
            self.place = layer, num_layers

    fixed = functools.partial(Placed, num_heads=1, layer=5, num_layers=9)
    model = LanguageModel(11, 8, [Placed, LinearAttention, fixed, Placed], num_heads=2)
    places = [getattr(block.mixer, "place", None) for block in model.blocks]
    assert places == [(0, 4), None, (5, 9), (3, 4)]
    # So that blocks of RWKV-4 begin with different decays, as in the paper.
    blocks = LanguageModel(11, 8, [modules.RWKV4Block] * 2).blocks
    alone = modules.RWKV4Block(8, layer=1, num_layers=2)
    names = [name for name, _ in alone.named_parameters() if "rate" in name]
    assert names
    for name in names:
        first, second = (block.get_parameter(name) for block in blocks)
        assert torch.equal(second, alone.get_parameter(name)) and not torch.equal(first, second)


def test_a_block_is_two_sublayers_with_residuals():
    model, tokens = make([SoftmaxAttention])
    (block,) = model.blocks
    x = model.embedding(tokens)
    x = x + block.mixer(block.norm_1(x))
    x = x + block.feed_forward(block.norm_2(x))
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)), rtol=0, atol=1e-12)


def test_a_whole_block_is_taken_as_it_is():
    model, tokens = make([LinearTransformerLayer] * 2)
    x = model.blocks[1](model.blocks[0](model.embedding(tokens)))
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)), rtol=0, atol=1e-12)


def test_a_mixer_need_not_be_one_of_ours():
    class Previous(torch.nn.Module):
        """The input at the previous position; it takes no heads."""

        def __init__(self, width):
            super().__init__()
            self.width = width

        def forward(self, x, *, state=None, return_state=False):
            state = x.new_zeros(len(x), self.width) if state is None else state
            x = torch.cat([state[:, None], x], dim=1)
            return (x[:, :-1], x[:, -1]) if return_state else x[:, :-1]

        def step(self, x_t, state):
            return state, x_t

        def initial_state(self, batch_size):
            return torch.zeros(batch_size, self.width, dtype=torch.float64)

    model, tokens = make([Previous, LinearAttention])
    y = model(tokens)
    state = model.initial_state(3)
    assert state[0].shape == (3, 8)
    for t in range(7):
        y_t, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(y_t, y[:, t], rtol=0, atol=1e-12)
    text = model.generate(tokens, 5, temperature=0)
    assert torch.equal(text[:, 7:], model(text)[:, 6:-1].argmax(dim=-1))


@pytest.mark.parametrize("mixer", [SoftmaxAttention, lambda width: SoftmaxAttention(width, 2)])
def test_softmax_layers_know_the_order_of_tokens(mixer):
    model, tokens = make([mixer])
    tokens = torch.arange(7)[None]
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_the_state_has_an_entry_for_each_block():
    model, tokens = make()
    _, state = model(tokens, return_state=True)
    assert type(state) is tuple
    assert [type(s).__name__ for s in state] == [
        "LinearAttentionState",
        "KVCache",
        "LinearAttentionState",
    ]


# Every mixer of the family, in one stack.


def test_the_family_is_complete():
    """Every module that mixes tokens is in the list of what is tested."""
    kinds = {name: getattr(modules, name) for name in modules.__all__}
    mixers = [n for n, kind in kinds.items() if issubclass(kind, modules.Mixer)]
    assert sorted(mixers) == sorted([*KINDS, "Mixer"])


@every_kind
def test_every_mixer_goes_into_a_model(kind):
    """Alone: as a class, with heads where it has them, and as a block if it is none."""
    model, tokens = make([kind])
    (block,) = model.blocks
    module = getattr(block, "mixer", block)
    assert type(module) is kind and (block is module) == kind.is_block
    heads = inspect.signature(kind).parameters.get("num_heads")
    assert heads is None or module.num_heads == 2
    if heads is not None:
        with pytest.raises(ValueError, match="num_heads"):
            LanguageModel(11, 8, [kind], num_heads=3)
    assert model(tokens).shape == (3, 7, 11)


def test_one_model_of_the_whole_family():
    model, tokens = make(list(KINDS.values()))
    logits = model(tokens)
    state = model.initial_state(3)
    for t in range(7):
        logits_t, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits_t, logits[:, t], rtol=0, atol=1e-10)
    # A prompt in parallel, the rest from its state.
    first, state = model(tokens[:, :4], return_state=True)
    second, _ = model(tokens[:, 4:], state=state, return_state=True)
    both = torch.cat([first, second], dim=1)
    torch.testing.assert_close(both, logits, rtol=0, atol=1e-10)
    text = model.generate(tokens, 5, temperature=0)
    assert torch.equal(text[:, 7:], model(text)[:, 6:-1].argmax(dim=-1))
    model(tokens).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# What it writes.


@every_stack
def test_the_likeliest_text_is_that_of_forward(mixers):
    model, prompt = make(mixers)
    text = model.generate(prompt, 12, temperature=0)
    assert text.shape == (3, 19) and text.dtype == prompt.dtype
    assert torch.equal(text[:, :7], prompt)
    logits = model(text)[:, 6:-1]
    top = logits.topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > 1e-9  # no tie
    assert torch.equal(text[:, 7:], logits.argmax(dim=-1))


@every_stack
def test_the_same_seed_gives_the_same_text(mixers):
    model, prompt = make(mixers)
    text = model.generate(prompt, 20, seed=5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(text, model.generate(prompt, 20, seed=5))
    assert torch.equal(state, torch.get_rng_state())  # and draws nothing from the global generator
    assert not torch.equal(text, model.generate(prompt, 20, seed=6))
    assert torch.equal(model.generate(prompt, 20), model.generate(prompt, 20, seed=0))
    assert torch.equal(text[:, :7], prompt)
    assert text.min() >= 0 and text.max() < 11


def test_tokens_are_drawn_with_their_probabilities():
    model, _ = make([LinearAttention])
    prompt = torch.full((20_000, 1), 3)
    with torch.no_grad():
        model.head.weight *= 3
        logits = model(prompt[:1])[0, -1]
    for temperature in (0.7, 1.0, 2.5):
        drawn = model.generate(prompt, 1, temperature=temperature)[:, 1]
        found = drawn.bincount(minlength=11) / len(drawn)
        expected = (logits / temperature).softmax(dim=-1)
        assert expected.max() > 0.15  # unlike each other
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.015)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_temperatures_come_close_to_the_likeliest_text(dtype):
    model, prompt = make()
    model.to(dtype)
    likeliest = model.generate(prompt, 10, temperature=0)
    for temperature in (1e-9, 1e-300):
        assert torch.equal(model.generate(prompt, 10, temperature=temperature), likeliest)


def test_prompts_of_one_token_and_texts_of_none():
    model, prompt = make()
    assert model.generate(prompt[:, :1], 4).shape == (3, 5)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt, 0) is not prompt
    assert model.generate(prompt[:0], 4).shape == (0, 11)
    text = model.generate(prompt.int(), 4, temperature=0)
    assert text.dtype == torch.int32 and torch.equal(text, model.generate(prompt, 4, temperature=0))


def test_a_text_can_be_trained_on():
    model, prompt = make()
    text = model.generate(prompt, 3)
    model(text).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# That it learns.


def two_tokens_a_text(generator):
    """Texts of 24 tokens, each of only two of 16 tokens, in any order."""
    pairs = torch.rand(32, 16, generator=generator).topk(2).indices
    return pairs.gather(1, torch.randint(2, (32, 24), generator=generator))


# All but those that see no further than the token before.
LEARNERS = {name: [kind] for name, kind in KINDS.items() if "ChannelMix" not in name}
LEARNERS["hybrid"] = HYBRID


@pytest.mark.parametrize("mixers", LEARNERS.values(), ids=LEARNERS)
def test_it_learns_what_a_text_is_made_of(mixers, monkeypatch):
    """A unigram model has a loss of ln 16 = 2.77 there, and one that sees the last token 2.05."""
    monkeypatch.setattr(modules.MesaLayer, "iterations", 8)  # as many as a head has channels
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = LanguageModel(16, 32, mixers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        texts = two_tokens_a_text(generator)
        logits = model(texts[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(16)) < 0.5  # an untrained model prefers nothing
    last_token = 0.5 * math.log(2) + 0.5 * math.log(2 * 15)
    assert sum(losses[-10:]) / 10 < 1.5 < last_token < math.log(16)
    # As an RNN it writes what it was trained on in parallel: more of the same two tokens.
    prompt = two_tokens_a_text(generator)
    written = model.generate(prompt, 8, temperature=0)[:, 24:]
    assert (written[..., None] == prompt[:, None]).any(dim=-1).float().mean() > 0.9


# Errors.


def test_mixers_are_refused():
    for wrong, came in (
        (LinearAttention(8, 2), "LinearAttention"),
        ("linear", "str"),
        (None, "None"),
    ):
        message = rf"^mixers\[1\] must be a class or a callable width -> module, got {came}"
        with pytest.raises(TypeError, match=message):
            LanguageModel(11, 8, [LinearAttention, wrong])
    message = r"^mixers\[0\] must make a module with forward, step, initial_state, got Linear"
    with pytest.raises(TypeError, match=message):
        LanguageModel(11, 8, [lambda width: torch.nn.Linear(width, width)])
    with pytest.raises(ValueError, match="^width must be a multiple of num_heads, 4, got 10"):
        LanguageModel(11, 10, [LinearAttention])
    with pytest.raises(TypeError, match="^mixers must be a list, got type"):
        LanguageModel(10, 16, LinearAttention)


def test_sizes_are_refused():
    for sizes, name in (((0, 8), "vocab_size"), ((11, 0), "width")):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
            LanguageModel(*sizes, [])
    with pytest.raises(ValueError, match="^num_heads must be at least 1, got 0"):
        LanguageModel(11, 8, [], num_heads=0)
    with pytest.raises(TypeError, match="^vocab_size must be an integer, got 11.0"):
        LanguageModel(11.0, 8, [])


def test_tokens_are_refused():
    model, tokens = make()
    message = "must be at least 0 and below vocab_size, 11"
    for wrong in (tokens + 11, tokens - 11):
        with pytest.raises(ValueError, match=f"^tokens {message}"):
            model(wrong)
        with pytest.raises(ValueError, match=f"^token {message}"):
            model.step(wrong[:, 0], model.initial_state(3))
    with pytest.raises(
        TypeError, match="^tokens must have dtype int64 or int32, got torch.float32"
    ):
        model(tokens.float())


def test_states_are_one_for_each_block():
    model, tokens = make()
    state = model.initial_state(3)
    for call in (lambda s: model(tokens, state=s), lambda s: model.step(tokens[:, 0], s)):
        with pytest.raises(ValueError, match="^state must have one state for each block, 3, got 2"):
            call(state[:2])
        with pytest.raises(TypeError, match="^state must be a LinearAttentionState, got KVCache"):
            call(state[::-1][1:] + state[:1])


def test_what_generate_refuses():
    model, prompt = make()
    for arguments, options, error, message in (
        ((prompt[:, :0], 3), {}, ValueError, "prompt must have at least one token"),
        ((prompt[0], 3), {}, ValueError, r"prompt must have shape \(B, N\), got \(7,\)"),
        ((prompt.tolist(), 3), {}, TypeError, "prompt must be a torch tensor, got list"),
        ((prompt, -1), {}, ValueError, "steps must be at least 0, got -1"),
        ((prompt, 2.5), {}, TypeError, "steps must be an integer, got 2.5"),
        (
            (prompt, 3),
            {"temperature": -0.5},
            ValueError,
            "temperature must be at least 0, got -0.5",
        ),
        ((prompt, 3), {"temperature": math.inf}, ValueError, "temperature must be finite, got inf"),
        (
            (prompt, 3),
            {"temperature": "1"},
            TypeError,
            "temperature must be a real number, got '1'",
        ),
        ((prompt, 3), {"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ((prompt, 3), {"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ):
        with pytest.raises(error, match="^" + message):
            model.generate(*arguments, **options)


def test_a_state_goes_into_autocast():
    model = LanguageModel(10, 16, mixers=[LinearAttention, SoftmaxAttention])
    tokens = torch.randint(10, (2, 5))
    _, state = model(tokens, return_state=True)
    expected, _ = model.step(tokens[:, 0], state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = model.step(tokens[:, 0], state)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.1)
