"""The table of encoders in docs/encoders.md, computed by hand: every cell."""

import pytest
import torch
from encoder_cells import CELLS, make_cell, without_package
from transformers import CONFIG_MAPPING, AutoModel

from hf_minbert.model.families import FAMILIES

pytestmark = pytest.mark.slow
SIZES = {"vocab_size": 60, "max_position_embeddings": 40, "initializer_range": 0.2}
BERTS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
OWN = {
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48},
    "electra": {**BERTS, "embedding_size": 16},
}
#: One of each kind: the others of the table have another name and the same computation.
KINDS = [*{repr((f.fixed, f.counted, f.settings)): name for name, f in reversed(FAMILIES.items())}.values()]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """By family and cell."""
    found = {}
    for family in KINDS:
        torch.manual_seed(0)
        encoder = tmp_path_factory.mktemp(family)
        AutoModel.from_config(CONFIG_MAPPING[family](**SIZES, **OWN.get(family, BERTS))).save_pretrained(encoder)
        found |= {(family, cell): make_cell(encoder, tmp_path_factory.mktemp("cell"), cell) for cell in CELLS}
    return found


@pytest.fixture(scope="module")
def without(cells, tmp_path_factory):
    """What a process without the package answers, by folder."""
    return without_package([made.folder for made in cells.values()], tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", KINDS)
def test_each_cell_trains_and_answers_the_same_without_the_package(cells, without, family, cell):
    made = cells[family, cell]
    made.check(cell, without[str(made.folder)], adapted={"query", "value"})


@pytest.mark.parametrize("family", KINDS)
def test_what_is_private_differs_after_training(cells, family):
    for cell, prefix in (("private layers", "bert.encoder.private.sts.2."), ("private encoders", "private.sts.")):
        after = cells[family, cell].after
        own = {name: value for name, value in after.items() if name.startswith(prefix)}
        twin = "bert.encoder.layer.2." if cell == "private layers" else "bert."
        assert own and any(not torch.equal(value, after[twin + name[len(prefix) :]]) for name, value in own.items())
