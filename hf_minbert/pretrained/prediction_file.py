"""Predicts a file of any size into a file, chunk by chunk. An interrupted run can be continued.

Until all rows are predicted, the output is in `OUTPUT.partial`. The first line of `OUTPUT.partial.jsonl` describes the
input, the model and the options. Each further line describes a chunk: its number of rows and bytes, and its checksum.
Rows that share a batch can change the last bits of a prediction. A run is therefore continued at the end of a chunk,
and what follows the last complete chunk is written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import tokenizers
import torch
import transformers
from tqdm.auto import tqdm

from .. import __version__
from ..data.cache import tokenizer_content
from ..data.encoding import warn_of_cut, warn_of_unread
from ..data.stream import RowStream, Survey
from ..errors import MinBertError
from ..evaluation.decoding import clip, decode
from ..evaluation.submission import Form
from ..io import json_line, write_atomically
from .prediction import Predictor, progress_bar

logger = logging.getLogger(__name__)

DIGESTS = ("input", "model")  # of which a message shows no value


def survey(rows: RowStream) -> Survey:
    """Reads and checks all rows with a progress bar, and warns of repeated ids."""
    with tqdm(desc=f"Reading {Path(rows.name).name}", unit="row", leave=False, delay=1) as bar:
        found = rows.survey(bar.update)
    if found.repeated_ids:  # else hashes alone were the same
        some = ", ".join(map(repr, found.repeated_ids))
        logger.warning(
            "%s: %s of %s rows repeat the id of an earlier row: %s%s. Each row gets a prediction, in the file's "
            "order.",
            rows.name, f"{found.repeated:,}", f"{found.rows:,}", some, " ..." if found.repeated > len(some) else "",
        )  # fmt: skip
    return found


def predict_file(
    predictor: Predictor,
    rows: RowStream,
    found: Survey,
    outputs: Mapping[str, Path],
    form: Form,
    clip_scores: bool = False,
) -> None:
    """Writes the predictions of each task for all rows. Continues an interrupted run with the same arguments.

    Args:
        found: the survey of the rows.
        outputs: the file of each task. It gets its name when it is complete.
        clip_scores: clip scores to the task's range.

    Raises:
        MinBertError: the interrupted run had another input, model or options, or a file cannot be written.
        DivergedError: the model's outputs are not finite.
    """
    names = list(outputs)
    identity = {
        "input": found.digest, "model": model_digest(predictor), "tasks": names, "format": form.name,
        "clip": clip_scores, "batch_size": predictor.batch_size, "dtype": predictor.dtype,
        "max_length": [predictor.lengths[name] for name in names], "device": predictor.model.device.type,
        "chunk": list(rows.chunk_limits), "hf_minbert": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
    }  # fmt: skip
    files = {name: PartialFile(path, {"task": name, **identity}) for name, path in outputs.items()}
    whole = min(len(file.chunks) for file in files.values())
    for file in files.values():
        file.begin(whole)
    last = [*files.values()][-1]  # to which a chunk is added when the others have it
    if last.rows:
        logger.info("Continuing from row %s of %s, where %s ends.", f"{last.rows:,}", f"{found.rows:,}", last.part)
    with _told([*files.values()], found.rows), progress_bar(", ".join(names), found.rows, done=last.rows) as advance:
        for chunk in islice(rows.chunks(), whole, None):
            done, size, counts = last.rows, len(chunk), {name: Counter[str]() for name in names}
            logits = predictor.logits_of(
                names, chunk, lambda part, of, done=done, size=size: advance(done + part * size // of, found.rows),
                lambda name, found, counts=counts: counts[name].update(found),
            )  # fmt: skip
            for name, file in files.items():
                task, decoded = predictor.task(name), decode(predictor.task(name), logits[name])
                if clip_scores:
                    decoded = replace(decoded, values=clip(task, decoded.values))
                texts = [str(row[task.text_columns[0]]) for row in chunk]
                text = form.lines(task, [str(row["id"]) for row in chunk], decoded, texts)
                file.add(text if file.chunks else form.header(task) + text, size, counts[name])
        if last.rows != found.rows:
            raise MinBertError(
                f"{rows.name} changed while it was read: {found.rows:,} rows at first, {last.rows:,} then. "
                f"Predict it again when no process writes to it."
            )
        for name, file in files.items():
            file.finish()
            warn_of_cut(name, sum(chunk.cut for chunk in file.chunks), file.rows, predictor.lengths[name])
            warn_of_unread(name, sum(chunk.unread for chunk in file.chunks), sum(chunk.words for chunk in file.chunks))


@contextmanager
def _told(files: Sequence[PartialFile], rows: int) -> Generator[None]:
    """If the block is stopped, logs how to continue. If nothing was predicted yet, the files are removed."""
    try:
        yield
    except BaseException:
        file = files[-1]
        if not file.chunks:
            for each in files:
                each.remove()
        else:
            logger.warning(
                "Stopped. %s of %s rows are predicted, in %s. The same command continues from there. To start "
                "over, delete that file.",
                f"{file.rows:,}", f"{rows:,}", file.part,
            )  # fmt: skip
        raise


def model_digest(predictor: Predictor) -> str:
    """Returns the SHA-256 of everything that decides an answer: config, tokenizer and weights.

    Their location does not matter.
    """
    config = predictor.model.config.to_dict() | {"_name_or_path": None, "transformers_version": None}
    parts = [config, tokenizer_content(predictor.tokenizer)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in predictor.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class Chunk:
    """A chunk of a file.

    Args:
        size: its bytes.
        checksum: the CRC-32 of these bytes.
        cut: the number of truncated inputs.
        unread, words: for tags, the numbers of words without an answer and of all words.
    """

    rows: int
    size: int
    checksum: int
    cut: int
    unread: int
    words: int


class PartialFile:
    """A file that is written in chunks under a temporary name.

    Args:
        path: its final name.
        identity: what is predicted and how, in plain values.

    Attributes:
        chunks: the chunks that are written.

    Raises:
        MinBertError: there is a temporary file with another identity, or a file that is not of this kind.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path.resolve()
        self.part, self.record = (self.path.with_name(self.path.name + end) for end in (".partial", ".partial.jsonl"))
        self.identity = identity
        self.chunks = self._found() if self.part.exists() else []

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(chunk.size for chunk in self.chunks)

    def begin(self, chunks: int) -> None:
        """Removes everything after the first `chunks` chunks."""
        self.chunks = self.chunks[:chunks]
        write_atomically(self.record, "".join(map(json_line, [self.identity, *map(asdict, self.chunks)])))
        with self._writing(), self.part.open("ab") as file:
            file.truncate(self.size)

    def add(self, text: str, rows: int, counts: Counter[str]) -> None:
        """Appends a chunk and then its line in the record.

        If the process stops in between, the chunk counts as not written.
        """
        data = text.encode()
        with self._writing():
            with self.part.open("ab") as file:
                self._check_end(file.tell())
                file.write(data)
            chunk = Chunk(rows, len(data), crc32(data), counts["cut"], counts["unread"], counts["words"])
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json_line(asdict(chunk)))
        self.chunks.append(chunk)

    def finish(self) -> None:
        """Renames the file to its final name."""
        with self._writing():
            with self.part.open("rb+") as file:
                self._check_end(file.seek(0, os.SEEK_END))
                os.fsync(file.fileno())
            os.replace(self.part, self.path)
            self.record.unlink()

    def remove(self) -> None:
        self.part.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)

    def _found(self) -> list[Chunk]:
        """The whole chunks that a stopped run left."""
        before, *recorded = self._recorded()
        chunks = []
        with self.part.open("rb") as file:
            for chunk in (Chunk(**line) for line in recorded):
                data = file.read(chunk.size)
                if len(data) < chunk.size or crc32(data) != chunk.checksum:
                    break
                chunks.append(chunk)
        changed = [key for key in {**before, **self.identity} if before.get(key) != self.identity.get(key)]
        if chunks and changed:
            what = f"with another {changed[0]}"
            if changed[0] not in DIGESTS:
                what = f"with `{changed[0]}` {before.get(changed[0])}, which is {self.identity.get(changed[0])} now"
            raise MinBertError(
                f"{self.part} holds {sum(chunk.rows for chunk in chunks):,} predictions of an interrupted run "
                f"{what}. Repeat its command to continue, or delete the file to start over."
            )
        return chunks

    def _recorded(self) -> list[dict[str, Any]]:
        """The lines of the record, without one at the end that was not written to its end."""
        lines = []
        try:
            for line in self.record.read_bytes().splitlines():
                lines.append(json.loads(line))
        except (OSError, ValueError):
            pass
        ours = {f.name for f in fields(Chunk)}
        if not lines or "input" not in lines[0] or any({*line} != ours for line in lines[1:]):
            raise MinBertError(
                f"{self.part} cannot be continued: its record {self.record.name} is missing or damaged. Delete "
                f"the file, or give another --output."
            )
        return lines

    def _check_end(self, end: int) -> None:
        if end != self.size:
            raise MinBertError(
                f"{self.part} has {end:,} bytes and not the {self.size:,} that were written: another process "
                f"writes to it too. Stop one of them."
            )

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise MinBertError(
                f"Cannot write {self.part}: {error.strerror}. Give a path that can be written."
            ) from error
