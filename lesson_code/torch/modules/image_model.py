"""A model that draws images, pixel by pixel."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.logistics import draw_logistic_mixture, logistic_mixture
from lesson_code.torch.modules._parts import check_tokens
from lesson_code.torch.modules.blocks import make_blocks
from lesson_code.torch.modules.in_place import own


class ImageState(NamedTuple):
    """What an image model keeps of the pixels that it has read.

    Parameters
    ----------
    position : tensor of int64, shape ()
        The place of the pixel that is expected after the next one has been read.
    blocks : tuple
        The state of each block.
    """

    position: Tensor
    blocks: tuple


class ImageModel(nn.Module):
    r"""Embeddings of pixel and place, a block for each mixer, norm, and a linear map to a mixture.

    An image is a sequence of N pixels, each one of L levels 0 ... L - 1. What the model expects of
    a pixel is computed from the pixels before it: a mixture of K logistic distributions, which
    gives each level its probability (:func:`lesson_code.torch.logistic_mixture`).

    Parameters
    ----------
    num_pixels : int
        Number N of pixels of an image.
    levels : int
        Number L of levels of a pixel, at least 2.
    width : int
        Width F between the blocks.
    mixers : list
        A class, or a callable width -> module, for each block, as for :class:`LanguageModel`.
    num_heads : int
        Number of heads, for each mixer whose signature asks for `num_heads`.
    num_logistics : int
        Number K of logistic distributions in the mixture.

    Notes
    -----
    The parameters are ``value``, an embedding with one row more than there are levels, for what
    stands before the first pixel; ``position``, an embedding; ``blocks``, ``norm`` and ``head``.
    The means of the mixture begin spread over the levels; each mixer is initialized by its own
    class, and everything else as torch does. A pixel that is not in 0 ... L - 1, or beyond the last
    place, is a ValueError; on a GPU or compiled, torch reports it.

    `generate` calls `step` for each pixel. Whoever generates much may compile it, which pays where
    no shape changes from step to step: ``model.step = torch.compile(model.step)``.

    References
    ----------
    Katharopoulos et al. (2020), section 4.2, for images as sequences; Salimans et al. (2017),
    PixelCNN++, for the mixture.

    Examples
    --------
    >>> from lesson_code.torch.modules import LinearAttention
    >>> model = ImageModel(num_pixels=6, levels=17, width=8, mixers=2 * [LinearAttention])
    >>> images = torch.tensor([[0, 3, 16, 16, 3, 0]])
    >>> model.bits(images).shape                            # of each pixel
    torch.Size([1, 6])
    >>> model.generate(images[:, :3]).shape                 # the upper half is kept
    torch.Size([1, 6])
    """

    def __init__(
        self,
        num_pixels: int,
        levels: int,
        width: int,
        mixers: Sequence[Callable[..., nn.Module]],
        *,
        num_heads: int = 4,
        num_logistics: int = 10,
    ) -> None:
        super().__init__()
        self.num_pixels = _arguments.check_integer("num_pixels", num_pixels, minimum=1)
        self.levels = _arguments.check_integer("levels", levels, minimum=2)
        width = _arguments.check_integer("width", width, minimum=1)
        num_logistics = _arguments.check_integer("num_logistics", num_logistics, minimum=1)
        self.value = nn.Embedding(levels + 1, width)
        self.position = nn.Embedding(num_pixels, width)
        self.blocks = make_blocks(width, mixers, num_heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3 * num_logistics)
        with torch.no_grad():
            _, means, log_scales = self.head.bias.split(num_logistics)
            means.copy_(torch.linspace(-1, 1, num_logistics))
            log_scales.fill_(math.log(1 / num_logistics))

    def forward(self, images: Tensor) -> Tensor:
        """What the model expects of each pixel of images (B, N), from those before it.

        The result (B, N, 3K) has the parameters of the mixture of each pixel.
        """
        check_tokens("images", images, "B, N")
        if images.shape[1] != self.num_pixels:
            raise ValueError(
                f"images must have shape (B, {self.num_pixels}), got {tuple(images.shape)}."
            )
        return self._mixture(self.blocks(self._embed("images", images[:, :-1])))

    def bits(self, images: Tensor) -> Tensor:
        r"""Bits (B, N) that each pixel costs, given those before it: :math:`-\log_2 P`."""
        return -logistic_mixture(self(images), images, self.levels) / math.log(2)

    def read(self, known: Tensor) -> tuple[Tensor, ImageState]:
        """Read the first n < N pixels (B, n) of images in parallel, possibly none.

        Returned are what is expected of the next pixel (B, 3K), and the state for `step`.
        """
        check_tokens("known", known, "B, N")
        if known.shape[1] >= self.num_pixels:
            raise ValueError(
                f"known must have fewer than {self.num_pixels} pixels for each image, "
                f"got {tuple(known.shape)}."
            )
        x, state = self.blocks(self._embed("known", known), return_state=True)
        position = torch.tensor(known.shape[1] + 1, device=known.device)
        return self._mixture(x[:, -1]), ImageState(position, state)

    def step(self, pixel: Tensor, state: ImageState) -> tuple[Tensor, ImageState]:
        """Read one pixel (B,) of each image, after what `read` or the step before returned.

        Returned are what is expected of the next pixel (B, 3K), as `forward` says it, and the new
        state; the given one stays as it is.
        """
        check_tokens("pixel", pixel, "B")
        if not isinstance(state, ImageState):
            raise TypeError(f"state must be an ImageState, got {type(state).__name__}.")
        if _can_be_looked_at(state.position) and state.position >= self.num_pixels:
            raise ValueError(f"state must leave a pixel to expect, got all {self.num_pixels} read.")
        x, blocks = self.blocks.step(self._input("pixel", pixel, state.position), state.blocks)
        return self._mixture(x), ImageState(state.position + 1, blocks)

    @torch.no_grad()
    def generate(self, known: Tensor, *, seed: int = 0) -> Tensor:
        """Complete images: what is known is read in parallel, then each pixel drawn by itself.

        Parameters
        ----------
        known : tensor of integers, shape (B, n)
            The first pixels of each image; with n = 0 everything is new.
        seed : int
            The same seed gives the same images.

        Returns
        -------
        tensor of integers, shape (B, N)
            The known pixels and the others, in the dtype of `known`.
        """
        check_tokens("known", known, "B, N")
        n = known.shape[1]
        if n > self.num_pixels:
            raise ValueError(
                f"known must have at most {self.num_pixels} pixels for each image, "
                f"got {tuple(known.shape)}."
            )
        seed = _arguments.check_integer("seed", seed, minimum=0)
        generator = torch.Generator(known.device).manual_seed(seed)

        images = [known]
        if n < self.num_pixels:
            parameters, state = self.read(known)
            state = state._replace(blocks=own(state.blocks))
        for i in range(n, self.num_pixels):
            pixel = draw_logistic_mixture(parameters, self.levels, generator=generator)
            images.append(pixel[:, None].to(known.dtype))
            if i + 1 < self.num_pixels:
                parameters, state = self.step(pixel, state)
        return torch.cat(images, dim=1)

    def _embed(self, name, before):
        """The inputs (B, n + 1, F) of the first pixel and of those that follow `before` (B, n)."""
        start = before.new_full((len(before), 1), self.levels)
        position = torch.arange(before.shape[1] + 1, device=before.device)
        start = self.value(start) + self.position(position[:1])
        return torch.cat([start, self._input(name, before, position[1:])], dim=1)

    def _input(self, name, pixels, position):
        """What the blocks read: the pixels, each with the place of the one that follows it."""
        if (
            _can_be_looked_at(pixels)
            and pixels.numel()
            and not 0 <= pixels.min() <= pixels.max() < self.levels
        ):
            raise ValueError(f"{name} must be at least 0 and below levels, {self.levels}.")
        return self.value(pixels) + self.position(position)

    def _mixture(self, x):
        return self.head(self.norm(x))


def _can_be_looked_at(tensor):
    """Whether its values are known here, without waiting for a GPU or for a compiled program."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
