"""Reads the rows of a file to predict in parts, so that the file may be larger than memory."""

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
    """The result of reading all rows once.

    Args:
        rows: the number of rows.
        digest: SHA-256 of their ids and texts.
        repeated: the number of rows whose id occurred before.
        repeated_ids: some of these ids, in the order of the file.
    """

    rows: int
    digest: str
    repeated: int
    repeated_ids: list[str]


class RowStream:
    """The rows of a file as `hf_minbert.data.files.read_rows` returns them without labels.

    The file is read anew each time. Formats that cannot be read in parts, such as a `.json` list, are read as a whole.

    Attributes:
        chunk_limits: the maximum numbers of rows and of characters in a chunk. Both matter: short texts need many rows
            to fill large batches of similar length, and long texts must not need more than about 100 MB for their
            tokens.
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
        """Yields the rows in lists. The end of a list depends only on the rows before it."""
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
        """Reads and checks all rows. Needs 8 bytes of memory for each row, for a hash of its id.

        Among n ids, two different ids have the same hash with a probability below n^2 / 2^65, 3e-6 for ten million. In
        that case `repeated` is one too high. `repeated_ids` are compared as texts.

        Args:
            progress: called with the number of rows in each part that was read.

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
        """Returns the first repeated ids, among those with one of the smallest repeated hashes."""
        wanted, counts = {value.tobytes() for value in np.unique(hashes)[:LOOKED_FOR]}, Counter[str]()
        for row in self:
            id_ = str(row[ID_COLUMN])
            if _hash(id_) in wanted:
                counts[id_] += 1
        return [id_ for id_, count in counts.items() if count > 1][:SHOWN]


def _hash(id_: object) -> bytes:
    return hashlib.blake2b(str(id_).encode(), digest_size=8).digest()
