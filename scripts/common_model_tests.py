"""Runs the library's common model tests on every hand-written encoder.

    python scripts/common_model_tests.py [words for pytest, such as -k roberta]

These tests are only in the library's source distribution. pip downloads it for the installed version. Test classes
that are missing there are replaced by empty ones. Needs `pip install parameterized pytest`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin: ...",
    "generation/test_utils.py": "class GenerationTesterMixin: ...",
}
TESTS = """
import copy
import unittest

import torch
from transformers import CONFIG_MAPPING
from transformers.testing_utils import torch_device

from hf_minbert import MinBertConfig, MinBertForMaskedLM, MinBertForMultiTask, MinBertModel, get_tasks
from hf_minbert.model.families import FAMILIES, settings_of

from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

ROWS, TOKENS = 13, 7
BERTS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
OWN = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
    "electra": {**BERTS, "embedding_size": 24},
    **dict.fromkeys(("roberta", "xlm-roberta"), {**BERTS, "type_vocab_size": 1}),
}


class Tester:
    is_training, batch_size, seq_length, encoder_seq_length, key_length = True, ROWS, TOKENS, TOKENS, TOKENS
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99

    def __init__(self, family):
        self.family = family

    def get_config(self):
        sizes = {"vocab_size": 99, "max_position_embeddings": 64, **OWN.get(self.family, BERTS)}
        theirs = CONFIG_MAPPING[self.family](**sizes).to_dict()
        common = ("transformers_version", "id2label", "label2id")
        settings = {key: value for key, value in settings_of(theirs, MinBertConfig).items() if key not in common}
        return MinBertConfig(**settings, tasks=get_tasks(["sst"]))

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([ROWS, TOKENS], 99).clamp(min=3)  # no padding but what the mask says
        return self.get_config(), {"input_ids": ids, "attention_mask": random_attention_mask([ROWS, TOKENS])}


class Common(ModelTesterMixin):
    all_model_classes = (MinBertModel, MinBertForMaskedLM, MinBertForMultiTask)
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = Tester(self.family)
        if "training" in self._testMethodName:  # which passes by an encoder without a loss if the library lists it
            self.all_model_classes = (MinBertForMaskedLM, MinBertForMultiTask)

    def _prepare_for_class(self, inputs, kind, return_labels=False):
        inputs = copy.deepcopy(inputs)
        if return_labels and kind is not MinBertModel:
            shape = ROWS if kind is MinBertForMultiTask else (ROWS, TOKENS)
            inputs["labels"] = torch.zeros(shape, dtype=torch.long, device=torch_device)
        return inputs


for family in FAMILIES:
    name = f"Test_{family.replace('-', '_')}"
    globals()[name] = type(name, (Common, unittest.TestCase), {"family": family})
del Common
"""


def main() -> int:
    importlib.import_module("parameterized")  # which the tests need
    with tempfile.TemporaryDirectory() as folder:
        version = f"transformers=={transformers.__version__}"
        words = ["download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", "transformers", "-d", folder]
        subprocess.run([sys.executable, "-m", "pip", *words, version], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        root = Path(folder, archive.name.removesuffix(".tar.gz"))
        for name, text in {**ABSENT, "models/minbert/test_modeling_minbert.py": TESTS}.items():
            path = root / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            for place in (path.parent, *path.parents):
                if place == root:
                    break
                (place / "__init__.py").touch()
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/models/minbert", *sys.argv[1:]],
            cwd=root,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
