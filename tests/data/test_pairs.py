"""New pairs of a task's own sentences: which there are, and that none is known."""

from __future__ import annotations

import numpy as np
import pytest

from hf_minbert.data.leaks import key_of
from hf_minbert.data.pairs import NEIGHBOURS, new_pairs

#: The number at a text's end says where it lies: first sentences are even, second ones odd.
PAIRS = [(f"first {2 * n}", f"second {2 * n + 1}") for n in range(40)]


def on_a_circle(texts: list[str]) -> np.ndarray:
    """Texts with numbers near each other are near each other; the last ones are near the first."""
    angles = np.array([int(text.split()[1]) for text in texts]) * (2 * np.pi / 80)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def distance(pair: tuple[str, str]) -> int:
    one, other = (int(text.split()[1]) for text in pair)
    return min((one - other) % 80, (other - one) % 80)


@pytest.mark.parametrize("count", [1, 7, 40, 100])
def test_half_are_the_nearest_that_are_new_and_half_are_drawn(count):
    found = new_pairs(PAIRS, count, set(), on_a_circle, seed=0)
    near = -(-count // 2)
    assert len(found) == count
    # The own partner is at distance 1, and so is the other neighbour; then come those at 3.
    assert all(distance(pair) <= (1 if near <= 40 else 5) for pair in found[:near])
    if count > 40:
        assert max(map(distance, found[near:])) > 10
    sentences = [pair[0] for pair in found[:near]]
    assert max(map(sentences.count, sentences)) <= NEIGHBOURS


def test_none_is_known_doubled_or_of_a_sentence_with_itself():
    pairs = [("a b", "c"), ("c", "a b!"), ("d", "d"), ("e", "C."), ("f", "g")]
    known = {key_of(("f", "c")), key_of(("d", "g"))}
    found = new_pairs(pairs, 100, known, lambda texts: np.ones((len(texts), 2), dtype=np.float32), seed=0)
    keys = [key_of(pair) for pair in found]
    assert len({*keys}) == len(keys) < 100
    assert not {*keys} & ({*map(key_of, pairs)} | known)
    assert all(key is not None and key[0] != key[1] for key in keys)
    # First sentences a b, c, d, e and f with second ones a b, c, d and g: all that is new, and no more.
    firsts, seconds = ["a b", "c", "d", "e", "f"], ["c", "a b", "d", "g"]
    every = {key_of((one, other)) for one in firsts for other in seconds if one != other}
    assert {*keys} == every - {*map(key_of, pairs)} - known


def test_they_depend_on_the_seed_alone():
    first, again, other = (new_pairs(PAIRS, 20, set(), on_a_circle, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
