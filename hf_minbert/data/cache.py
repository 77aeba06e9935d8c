"""Encoded rows kept on disk between runs.

The name of a stored folder is a hash of everything that decides the encoding: the texts and labels, the task, the
tokenizer's content, the maximum length and the version of the tokenizers library. If one of them changes, the name
changes. Rows of another tokenizer or length are therefore never reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError, explain
from ..io import write_json
from ..settings.tasks import Task

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 4  # to be raised when `hf_minbert.data.encoding` gives other rows for the same input
KEPT = "kept.json"  # how many inputs were cut, and the hash of each other file
#: Settings of a tokenizer that say where it came from, what its length is, which is in a key by itself, or what a call
#: of the one that was saved had left behind. Of these the side is read from the tokenizer.
NO_CONTENT = (
    "name_or_path", "model_max_length", "max_length", "stride", "truncation_strategy", "truncation_side",
)  # fmt: skip


class EncodedCache:
    """The encoded rows of one task in `cache_dir`."""

    def __init__(
        self,
        cache_dir: str | Path,
        dataset: datasets.Dataset,
        columns: list[str],
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
    ):
        import tokenizers

        parts = [FORMAT, tokenizers.__version__, task.to_config(), max_length, tokenizer_content(tokenizer), columns]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        for batch in dataset.with_format(None).select_columns(columns).iter(batch_size=1000):
            key.update(json.dumps([batch[name] for name in columns], default=str).encode())
        self.folder = Path(cache_dir) / f"{task.name}-{key.hexdigest()[:32]}"

    def read(self) -> tuple[datasets.Dataset, int] | None:
        """Returns the rows in memory and the number of truncated inputs, or `None` if the cache does not have them."""
        import datasets

        if not self.folder.is_dir():
            return None
        with explain(f"Reading encoded rows from {self.folder}", "Delete this folder; it is made anew."):
            kept = json.loads((self.folder / KEPT).read_text(encoding="utf-8"))
            # The library reads a file that ends early without a word where it was cut between two thousands of rows.
            changed = [name for name, found in _hashes(self.folder).items() if kept["sha256"].get(name) != found]
            if changed:
                raise ValueError(f"{' and '.join(changed)} changed since it was written")
            return datasets.Dataset.load_from_disk(self.folder, keep_in_memory=True), kept["cut"]

    def write(self, rows: datasets.Dataset, cut: int) -> None:
        """Stores the rows. The folder gets its final name only when it is complete."""
        part = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(4)}.part")
        try:
            part.mkdir(parents=True)
            try:
                rows.save_to_disk(part)
                write_json(part / KEPT, {"cut": cut, "sha256": _hashes(part)})
                if not self.folder.exists():  # another process may have been faster
                    os.replace(part, self.folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            if not self.folder.is_dir():
                raise MinBertError(
                    f"`cache_dir`: cannot write {self.folder}: {error.strerror}. Give a folder that can be written."
                ) from error


def _hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder but `KEPT`, by name."""
    files = [path for path in sorted(folder.iterdir()) if path.name != KEPT]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def model_content(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of a model's weights, config and tokenizer. Their location does not matter."""
    import torch

    settings = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    content = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    content.update(json.dumps(tokenizer_content(tokenizer), sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return content.hexdigest()


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns what a tokenizer saves, without the state that calling it leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files: dict[str, Any] = {
            path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())
        }
    if "tokenizer.json" in files:
        state = json.loads(files["tokenizer.json"])
        files["tokenizer.json"] = {key: value for key, value in state.items() if key not in ("truncation", "padding")}
    if "tokenizer_config.json" in files:
        settings = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = {key: value for key, value in settings.items() if key not in NO_CONTENT}
    return {"class": type(tokenizer).__name__, "truncation_side": tokenizer.truncation_side, **files}
