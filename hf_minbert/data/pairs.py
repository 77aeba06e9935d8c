"""New pairs of a task's own sentences, to be labelled by teachers (Augmented SBERT, arXiv:2010.08240, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np
import torch

from .leaks import Key, key_of

Pair = tuple[str, str]
#: From texts to their vectors, float32 [texts, D].
Vectors = Callable[[list[str]], np.ndarray]

NEIGHBOURS = 3  # most that one sentence has among the new pairs
BESIDE = 3  # more that are looked for, as the nearest may be the sentence itself or its partner in a known pair
CHUNK = 256  # sentences whose neighbours are looked for at a time
TRIES = 20  # draws for each random pair that is wanted


def new_pairs(pairs: Sequence[Pair], count: int, known: Container[Key], vectors: Vectors, seed: int) -> list[Pair]:
    """Makes pairs of the first and second sentences in `pairs` that are not in `pairs` or `known`.

    One half pairs each first sentence with its nearest second sentences, by the cosine of their vectors. The nearest
    second sentence of each comes before the second nearest of any. The other half is drawn at random. No pair repeats
    another, in either order and after `leaks.plain`, and no sentence is paired with itself.

    Args:
        pairs: the training rows.
        count: the number of new pairs. Fewer are returned if there are no more.
        known: keys of pairs to exclude, made by `leaks.key_of`.
        vectors: a function from sentences to vectors. It is called once for the first sentences and once for the
            second.
        seed: the seed of every draw. Equal arguments give equal pairs.
    """
    taken = {key_of(pair) for pair in pairs}
    firsts, seconds = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    draws = np.random.default_rng([seed, len(pairs)])
    found: list[Pair] = []

    def take(candidates: Iterator[Pair], wanted: int) -> None:
        for pair in candidates if wanted > len(found) else ():
            key = key_of(pair)
            if key is not None and key not in taken and key not in known and key[0] != key[1]:
                taken.add(key)
                found.append(pair)
            if len(found) == wanted:
                return

    near = -(-count // 2)
    order = draws.permutation(len(firsts))[: 2 * near]  # twice as many as are wanted: some have known pairs alone
    take(_nearest([firsts[place] for place in order], seconds, vectors), near)
    take(_random(firsts, seconds, TRIES * count, draws), count)
    return found


def _nearest(firsts: list[str], seconds: list[str], vectors: Vectors) -> Iterator[Pair]:
    """Each first sentence with its nearest second one, then each with the next one, and so on."""
    if not firsts:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, theirs = (
        torch.nn.functional.normalize(torch.from_numpy(vectors(texts)).to(device), dim=1)
        for texts in (firsts, seconds)
    )
    most = min(NEIGHBOURS + BESIDE, len(seconds))
    places = torch.cat([(chunk @ theirs.T).topk(most).indices.cpu() for chunk in ours.split(CHUNK)]).tolist()
    for rank in range(most):
        for first, near in zip(firsts, places, strict=True):
            yield first, seconds[near[rank]]


def _random(firsts: list[str], seconds: list[str], tries: int, draws: np.random.Generator) -> Iterator[Pair]:
    for _ in range(tries):
        yield firsts[draws.integers(len(firsts))], seconds[draws.integers(len(seconds))]
