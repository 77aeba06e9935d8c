"""The table of encoders in docs/encoders.md, computed by transformers: every cell of every kind."""

from __future__ import annotations

import gc

import pytest
from encoder_cells import CELLS, make_cell, without_package
from small_encoders import TAKEN, saved, small

from hf_minbert import MinBertError
from hf_minbert.model.library import parts_of

pytestmark = pytest.mark.slow
#: Of the hand-written encoder alone; refused for any other before weights are read, whatever its kind.
BY_HAND = ("packing", "private layers")
#: What a kind refuses, and the words.
REFUSED = {
    ("ibert", "SMART"): "`regularizer: smart` needs a model whose `forward` takes `inputs_embeds`",
    ("ibert", "FGM"): "`regularizer: fgm` needs a model whose `forward` takes `inputs_embeds`",
    ("albert", "freezing"): "`freeze` is 2 layers, and the model has 1",
    ("ibert", "LoRA"): "`peft` needs `target_modules`",  # its linear layers are quantized
    ("squeezebert", "LoRA"): "`peft` needs `target_modules`",  # its layers are convolutions
    ("ibert", "NEFTune"): "needs a model that embeds all words of a batch at once",
    ("xlnet", "NEFTune"): "needs a model that embeds all words of a batch at once",
}
#: Whose attention has no linear layers by themselves: another of its layers is adapted in their place.
TARGETS = {"xlnet": ["layer_1", "layer_2"]}
COLUMNS = [cell for cell in CELLS if cell not in BY_HAND]
TABLE = [(name, cell) for name in TAKEN for cell in COLUMNS]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """By kind and cell, without those that are refused."""
    found, encoders = {}, {name: saved(name, tmp_path_factory.mktemp(name)) for name in TAKEN}
    gc.collect()
    gc.freeze()  # as conftest does, but their classes have been imported since
    for name, encoder in encoders.items():
        for cell in COLUMNS:
            options = {"target_modules": TARGETS[name]} if name in TARGETS else {}
            try:
                made = make_cell(encoder, tmp_path_factory.mktemp("cell"), cell, options)
            except MinBertError as error:
                assert REFUSED[name, cell] in str(error)
            else:
                assert (name, cell) not in REFUSED
                found[name, cell] = made
    return found


@pytest.fixture(scope="module")
def without(cells, tmp_path_factory):
    """What a process without the package answers, by folder."""
    return without_package([made.folder for made in cells.values()], tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize(("name", "cell"), TABLE)
def test_each_cell_trains_and_answers_the_same_without_the_package(cells, without, name, cell):
    if (name, cell) in REFUSED:
        assert (name, cell) not in cells
        return
    made = cells[name, cell]
    targets = TARGETS.get(name) or parts_of(small(name)).projections
    made.check(cell, without[str(made.folder)], adapted=targets)
