"""A language model of any modules, which trains in parallel and writes step by step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.modules._parts import check_tokens
from lesson_code.torch.modules.blocks import make_blocks
from lesson_code.torch.modules.in_place import own
from lesson_code.torch.modules.ragged import check_lengths, read_rows


class LanguageModel(nn.Module):
    """Embedding, a block for each mixer, norm, and a linear map to logits.

    The mixers may be of different kinds (hybrids). A mixer that is no whole block by itself is put
    into one: x + mixer(norm(x)), then x + feed_forward(norm(x)).

    Parameters
    ----------
    vocab_size : int
        Number of tokens; they are 0 ... vocab_size - 1.
    width : int
        Width F between the blocks.
    mixers : list
        For each block a class such as :class:`LinearAttention`, or a callable width -> module for
        one with other settings, such as ``lambda width: LinearAttention(width, 2)``. The module has
        `forward`, `step` and `initial_state` as in :class:`Mixer`; one whose attribute ``is_block``
        is true is taken as it is.
    num_heads : int
        Number of heads, for each mixer whose signature asks for `num_heads`. One that asks for
        `layer` and `num_layers`, such as :class:`RWKV4Block`, is told its place in the stack. The
        values of the first mixer of RWKV-7 reach the later ones.

    Notes
    -----
    Nothing is added for positions: :class:`SoftmaxAttention` rotates its queries and keys. A single
    layer of linear attention does not see in which order the earlier tokens came, as S and z are
    sums; two causal layers can tell.

    The parameters are ``embedding``, ``blocks``, ``norm`` and ``head``. Each mixer is initialized
    by its own class and everything else as torch does. A token that is not in the vocabulary is a
    ValueError; on a GPU or compiled, torch reports it.

    References
    ----------
    Xiong et al. (2020) for the order of norm, sublayer and sum; Su et al. (2021) for rotated
    queries and keys.

    Examples
    --------
    >>> from lesson_code.torch.modules import LinearAttention, SoftmaxAttention
    >>> model = LanguageModel(10, 16, mixers=[LinearAttention, SoftmaxAttention])
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> model(tokens).shape
    torch.Size([1, 5, 10])
    >>> model.generate(tokens, 3).shape
    torch.Size([1, 8])
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        mixers: Sequence[Callable[..., nn.Module]],
        *,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.vocab_size = _arguments.check_integer("vocab_size", vocab_size, minimum=1)
        width = _arguments.check_integer("width", width, minimum=1)
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = make_blocks(width, mixers, num_heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        state: tuple | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, tuple]:
        """Read texts (B, N) in parallel, as a :class:`Mixer` does.

        The outputs (B, N, vocab_size) are, at each position, the logits of the token that comes
        next; the state is a tuple with that of each block. With `lengths` (B,) only the first
        tokens of each text are real, and whatever stands after them counts for nothing.
        """
        check_tokens("tokens", tokens, "B, N")
        _arguments.check_flags(return_state=return_state)
        if lengths is not None:
            lengths = check_lengths(lengths, tokens)

            def logits_of(state, tokens):
                return self(tokens, state=state, return_state=True)[::-1]

            state, logits = read_rows(logits_of, lengths, state, return_state, tokens)
            return (logits, state) if return_state else logits
        read = self.blocks(self._embed("tokens", tokens), state=state, return_state=return_state)
        if not return_state:
            return self._logits(read)
        x, state = read
        return self._logits(x), state

    def step(self, token: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        """Read one token (B,) of each text: the logits (B, vocab_size) of the next, and the state.

        They are those that `forward` gives at this position.
        """
        check_tokens("token", token, "B")
        x, state = self.blocks.step(self._embed("token", token), state)
        return self._logits(x), state

    def initial_state(self, batch_size: int) -> tuple:
        """The state before the first token of a number of texts: one for each block."""
        return self.blocks.initial_state(batch_size)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        steps: int,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Tensor:
        """Continue a text: the prompt is read in parallel, then each new token by itself.

        Parameters
        ----------
        prompt : tensor of integers, shape (B, N)
            At least one token for each text.
        steps : int
            Number of tokens to add.
        lengths : tensor of integers, shape (B,), optional
            How many tokens of each prompt are real, at least 1; the rest is padding.
        temperature : float
            Logits are divided by it before a token is drawn; 0 takes the most likely token.
        seed : int
            The same seed gives the same text.

        Returns
        -------
        tensor of integers, shape (B, N + steps)
            Each prompt, its padding and its continuation, which has the last columns.
        """
        check_tokens("prompt", prompt, "B, N")
        if prompt.shape[1] == 0:
            raise ValueError("prompt must have at least one token for each text, got N = 0.")
        steps = _arguments.check_integer("steps", steps, minimum=0)
        temperature = _arguments.check_number("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}.")
        seed = _arguments.check_integer("seed", seed, minimum=0)
        generator = torch.Generator(prompt.device).manual_seed(seed)

        text = [prompt]
        if lengths is None:
            logits, state = self(prompt, return_state=True)
            logits = logits[:, -1]
        else:
            lengths = check_lengths(lengths, prompt, minimum=1)
            logits, state = self(prompt, lengths=lengths, return_state=True)
            logits = logits[torch.arange(len(prompt), device=prompt.device), lengths.long() - 1]
        state = own(state)
        for i in range(steps):
            if i > 0:
                logits, state = self.step(text[-1][:, 0], state)
            text.append(_choose(logits, temperature, generator).to(prompt.dtype))
        return torch.cat(text, dim=1)

    def _embed(self, name, tokens):
        try:
            return self.embedding(tokens)
        except IndexError:
            raise ValueError(
                f"{name} must be at least 0 and below vocab_size, {self.vocab_size}."
            ) from None

    def _logits(self, x):
        return self.head(self.norm(x))


def _choose(logits, temperature, generator):
    """One token for each row of the logits (B, V): (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
