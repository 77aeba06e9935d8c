"""Rows of a file to predict, a part at a time: the file may be larger than memory."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..settings.tasks import DataFile, Task
from .files import ID_COLUMN, Row, read_records
from .tables import read_parts, read_table

PART = 1024  # rows of a file that are held as cells
SHOWN = 10  # ids in a message
LOOKED_FOR = 1000  # hashes that stand twice and whose ids are looked for


@dataclass(frozen=True)
class Survey:
    """What reading all rows once told.

    Args:
        rows: how many there are.
        digest: SHA-256 of their ids and texts.
        repeated: rows whose id stood in the file before; 0 if every id stands once.
        repeated_ids: some of these ids, in their order in the file.
    """

    rows: int
    digest: str
    repeated: int
    repeated_ids: list[str]


class RowStream:
    """The rows of a file as `hf_minbert.data.files.read_rows` gives them without labels, read anew each time.

    Formats without parts, such as a `.json` list, are read as a whole.

    Attributes:
        chunk_limits: rows and characters. A chunk ends at the first of the two: short texts fill large batches of
            about equal length, and of long ones the tokens stay within some 100 MB.
    """

    chunk_limits = 2**14, 2**22

    def __init__(self, file: DataFile, task: Task, columns: Mapping[str, str] | None = None):
        self.name, self.file = file.path, file
        self.task = replace(task, columns={**task.columns, **(columns or {})})
        path = Path(file.path)
        is_pipe = path.exists() and not path.is_file() and not path.is_dir()  # and can be read once
        self.tables = [read_table(file)] if is_pipe else None

    def __iter__(self) -> Iterator[Row]:
        for table in self.tables or read_parts(self.file, PART):
            yield from (record.row for record in read_records(table, self.task, None, table.first))

    def chunks(self) -> Iterator[list[Row]]:
        """The rows in lists. Where one ends depends on the rows before it alone."""
        most_rows, most_characters = self.chunk_limits
        chunk: list[Row] = []
        characters = 0
        for row in self:
            chunk.append(row)
            characters += sum(len(str(row[name])) for name in self.task.text_columns)
            if len(chunk) == most_rows or characters >= most_characters:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def survey(self, progress: Callable[[int], object] | None = None) -> Survey:
        """Reads and checks all rows. Needs 8 bytes a row, for a hash of its id.

        Among n ids two have the same hash with a chance below n^2 / 2^65, 3e-6 for ten million: then `repeated` counts
        one too many. `repeated_ids` are compared themselves.

        Args:
            progress: called with the rows of each part that was read.

        Raises:
            MinBertError: as `hf_minbert.data.files.read_rows`.
        """
        digest, hashes, rows = hashlib.sha256(), bytearray(), 0
        for chunk in self.chunks():
            digest.update(json.dumps([list(row.values()) for row in chunk])[1:-1].encode() + b", ")
            hashes += b"".join(_hash(row[ID_COLUMN]) for row in chunk)
            rows += len(chunk)
            if progress is not None:
                progress(len(chunk))
        found = np.frombuffer(hashes, np.uint64)
        found.sort()
        again = found[1:][found[1:] == found[:-1]]
        return Survey(rows, digest.hexdigest(), len(again), self._repeated(again) if len(again) else [])

    def _repeated(self, hashes: np.ndarray) -> list[str]:
        """The first ids that stand twice, among those with one of the smallest of these hashes."""
        wanted, counts = {value.tobytes() for value in np.unique(hashes)[:LOOKED_FOR]}, Counter[str]()
        for row in self:
            id_ = str(row[ID_COLUMN])
            if _hash(id_) in wanted:
                counts[id_] += 1
        return [id_ for id_, count in counts.items() if count > 1][:SHOWN]


def _hash(id_: object) -> bytes:
    return hashlib.blake2b(str(id_).encode(), digest_size=8).digest()
