"""NEFTune: uniform noise on word embeddings in training (Jain et al. 2023, arXiv:2310.05914, algorithm 1)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MinBertError
from ..model.packing import Packing
from .noise import noise_of_words, uniform_noise
from .terms.base import AnyNoiseKey, packing_of


class WordNoise:
    """Adds noise of at most alpha / sqrt(L * H) to the word embeddings of a sentence with L tokens.

    The stock hook reads L from the shape of the embeddings. This is the padded length, the number of tokens in a
    packed batch, or the 2 of a pair's two sentences. Here L is the sentence's own length, as in the paper, so the
    noise depends neither on the rest of the batch nor on its form. All passes of a batch have the same noise, because
    adversarial searches over the input need that.

    Args:
        alpha: `neftune_noise_alpha`.
        words: the modules with word embeddings. They have a hook until `remove` is called.
    """

    def __init__(self, alpha: float, words: Iterable[nn.Module]):
        self.alpha = alpha
        self._hooks = [module.register_forward_hook(self._add) for module in dict.fromkeys(words)]
        self._noise: Tensor | None = None
        self._packing: Packing | None = None

    def draw(self, batch: Mapping[str, Any], size: int, key: AnyNoiseKey) -> Tensor:
        """Draws noise for a batch [B, T] or [B, 2, T], as [N, T, H]. H is `size`, and `key` belongs to the batch."""
        mask = batch["attention_mask"].flatten(0, -2)
        bounds = self.alpha / (mask.sum(dim=-1).clamp(min=1) * size).sqrt()  # [N]
        # Of other bits than a term's noise on the same words.
        noise = noise_of_words(batch, size, key, uniform_noise, f"{batch['task']} neftune")
        packing = packing_of(batch)
        return (noise.flatten(0, -3) if packing is None else packing.unpack(noise)) * bounds[:, None, None]

    @contextmanager
    def added(self, batch: Mapping[str, Any], noise: Tensor) -> Generator[None]:
        """Within this context, passes in training mode add the noise that `draw` returned for the batch."""
        self._noise, self._packing = noise, packing_of(batch)
        try:
            yield
        finally:
            self._noise = self._packing = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        noise, packing = self._noise, self._packing
        if noise is None or not module.training:
            return None
        found, along = list(output.shape) if isinstance(output, Tensor) else [type(output).__name__], 0
        if packing is not None and found[:-1] in ([1, len(packing.tokens)], [1, 2 * len(packing.tokens)]):
            noise, along = packing.pack(noise), 1
        if found[along : along + 1] == [2 * noise.shape[along]]:  # both passes of `terms.base.twice`
            noise = torch.cat([noise, noise], dim=along)
        if len(found) == 3 and found[0] == len(noise) and found[1] > noise.shape[1]:  # Longformer pads to its windows
            noise = nn.functional.pad(noise, (0, 0, 0, found[1] - noise.shape[1]))
        if found[-2:] != [*noise.shape[-2:]] or output.numel() != noise.numel():
            raise MinBertError(
                "`neftune_noise_alpha` needs a model that embeds all words of a batch at once, of the shape "
                f"{list(noise.shape)}. Found {found}. Leave it out."
            )
        return output + noise.view_as(output).to(output.dtype)
