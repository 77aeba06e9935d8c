"""Tokenizes text: makes the rows that a collator turns into batches."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ..errors import MinBertError
from ..model.inference import LONE_SURROGATE, TokenRows, checked_length, tells_segments, tokenize, tokenize_words
from ..model.losses import IGNORED
from ..settings.tasks import Task
from .cache import EncodedCache
from .labels import check_tags, class_values, label_value, no_words, sentence_of, tag_values
from .rows import EncodedRows, tag_rows

if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BATCH = 1000
#: The share of unknown tokens from which it is a warning: text in the vocabulary's own language has below 1 %.
MANY_UNKNOWN = 0.05


def check_max_length(
    max_length: int | None, config: Any, task: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """Does the same as `inference.checked_length`, but raises a `MinBertError`."""
    try:
        return checked_length(max_length, config, task, tokenizer)
    except ValueError as error:
        raise MinBertError(str(error)) from None


def encode(
    dataset: datasets.Dataset | torch.utils.data.Dataset | Sequence[Mapping[str, Any]],
    task: Task,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    cache_dir: str | Path | None = None,
    config: Any = None,
    labels: bool = True,
) -> EncodedRows:
    """Tokenizes a task's rows: `input_ids`, `token_type_ids` and, where the rows have a label, `labels`.

    A pair becomes one input. If it is too long, tokens of the longer sentence are removed one at a time. With
    `pair_encoding: bi`, a pair becomes two inputs that are truncated separately, and the columns have a list of two
    lists. Segment ids are those of the tokenizer, or 0 if the model has a single segment. The number of truncated rows
    is logged. The label is read from the column `labels`, `label` or the task's own label column. Rows that already
    have `input_ids` are checked and passed on, without the tokens that their `attention_mask` hides.

    Args:
        dataset: a `datasets.Dataset`, or any map-style dataset whose rows are dicts.
        tokenizer: may be `None` if the rows have `input_ids`.
        max_length: in tokens, including special tokens; see `check_max_length`.
        cache_dir: the folder where the encoded rows of a `datasets.Dataset` are kept for the next run. By default they
            are not kept.
        config: the config of the model. With it, ids of rows that are already encoded must be in the model's
            vocabulary, and segment ids are those that the model uses.
        labels: whether labels are read.

    Returns:
        the rows in memory, without padding.

    Raises:
        MinBertError: there are no rows, a column is missing, a text is not a string, a token id is not in the
            vocabulary, or a label is not one of the task's labels.
    """
    rows, cut = encode_and_count(dataset, task, tokenizer, max_length, cache_dir, config, labels)
    warn_of_cut(task.name, cut, len(rows), max_length)
    warn_of_unread(task.name, rows.unread, rows.total_words)
    return rows


def warn_of_cut(task: str, cut: int, rows: int, max_length: int) -> None:
    if cut:
        logger.warning("%s: %s of %s inputs were cut to %d tokens.", task, f"{cut:,}", f"{rows:,}", max_length)


def warn_of_unread(task: str, unread: int, words: int) -> None:
    if unread:
        logger.warning(
            "%s: %s of %s words are not read: they are beyond the maximum length, or the tokenizer drops "
            "them.", task, f"{unread:,}", f"{words:,}",
        )  # fmt: skip


def encode_and_count(
    dataset: Any,
    task: Task,
    tokenizer: Any,
    max_length: int,
    cache_dir: str | Path | None = None,
    config: Any = None,
    labels: bool = True,
) -> tuple[EncodedRows, int]:
    """Does the same as `encode`, and returns the number of truncated rows instead of logging it."""
    size, form = _size(dataset, task), (task.traits.dtype, task.pair_encoding == "bi")
    if not _is_hf_dataset(dataset):
        encoder = _Encoder(task, tokenizer, max_length, list(_row(dataset, 0, task)), config, labels)
        # Batch by batch: a token takes 5 bytes in an array, and 40 in a list.
        rows = EncodedRows.joined([EncodedRows.of(part, *form) for part in _batches(dataset, size, task, encoder)])
        return rows.read_by(config), encoder.cut
    encoder = _Encoder(task, tokenizer, max_length, dataset.column_names, config, labels)
    dataset = _with_own_ids(dataset, task, encoder.label_column)
    if cache_dir is None or tokenizer is None or encoder.is_encoded:
        encoded, cut = _map(dataset, encoder), encoder.cut
    else:
        cache = EncodedCache(cache_dir, dataset, encoder.columns, task, tokenizer, max_length)
        kept = cache.read()
        if kept is None:
            kept = _map(dataset, encoder), encoder.cut
            cache.write(*kept)
        encoded, cut = kept
    return EncodedRows.of(encoded, *form).read_by(config), cut  # not before: what is kept is any model's


def label_column_in(columns: Iterable[str], task: Task) -> str | None:
    """Returns the name of the column with a task's labels, or `None`."""
    columns = {*columns}
    return next((name for name in ("labels", "label", task.label_column) if name in columns), None)


def with_labels(rows: EncodedRows, dataset: Any, task: Task) -> EncodedRows:
    """Adds the labels of a task to encoded rows. A label may be `None`; its place gets a value that is ignored.

    Args:
        rows: the encoded rows of `dataset`, without labels.

    Raises:
        MinBertError: there are no labels, or a label is not one of the task's labels.
    """
    if _is_hf_dataset(dataset):
        column = label_column_in(dataset.column_names, task)
        dataset = _with_own_ids(dataset, task, column)
    else:
        names = chain.from_iterable(_row(dataset, number, task) for number in range(len(dataset)))
        column = label_column_in(names, task)
    cells = [] if column is None else column_of(dataset, column) or []
    labelled = np.array([cell is not None for cell in cells], dtype=bool)
    if not labelled.any():
        raise MinBertError(f"The rows of {task.name!r} have no labels. Add a column `label`.")
    labels = []
    for number, cell in enumerate(cells):
        words = 0 if rows.num_words is None else int(rows.num_words[number])
        if task.traits.is_tags and not words:
            raise no_words(task, f"Row {number}")
        labels.append(_ignored(task, words) if cell is None else _label(task, cell, words, number))
    column = tag_rows(labels) if task.traits.is_tags else np.array(labels, dtype=task.traits.dtype)
    return replace(rows, labels=column, labelled=None if labelled.all() else labelled)


def lacks_labels(dataset: Any, task: Task) -> bool:
    """Whether the label column of rows that are not encoded yet has empty cells."""
    if not len(dataset):
        return False
    column = label_column_in(dataset.column_names if _is_hf_dataset(dataset) else _row(dataset, 0, task), task)
    return column is not None and None in (column_of(dataset, column) or ())


def _label(task: Task, value: Any, words: int, number: int) -> Any:
    """The label of a row of so many words."""
    if not task.traits.is_tags:
        return label_value(task, value, f"Row {number}")
    tags = tag_values(task, value, lambda word: f"Row {number}, word {word}")
    check_tags(task, len(tags), words, f"Row {number}")
    return tags


def _ignored(task: Task, words: int) -> Any:
    """A label that the task allows."""
    if task.traits.is_score:
        return task.bounds[0]
    return [0] * words if task.traits.is_tags else [0.0] * len(task.labels) if task.traits.is_set else 0


def column_of(dataset: Any, name: str) -> list[Any] | None:
    """Returns a column of rows, or `None` if there is no such column. A cell that a dict lacks is `None`."""
    if _is_hf_dataset(dataset):
        return dataset.with_format(None)[name][:] if name in dataset.column_names else None
    cells = [dataset[number].get(name) for number in range(len(dataset))]
    return None if all(cell is None for cell in cells) else cells


def unknown_share(rows: TokenRows, tokenizer: PreTrainedTokenizerBase) -> float:
    """Returns the share of unknown tokens among all tokens but special ones.

    Tokenizers of bytes have no unknown tokens.
    """
    unknown = tokenizer.unk_token_id
    special = [id for id in tokenizer.all_special_ids if id != unknown]
    of_text = rows.ids[~np.isin(rows.ids, special)]
    return 0.0 if unknown is None or not len(of_text) else float((of_text == unknown).mean())


def unknown_in_words(task: str, share: float, where: str) -> str:
    """Returns a sentence about unknown tokens for a log, a report or a card. `where` names the rows."""
    found = f"{share:.1%}" if share >= 0.0005 else "under 0.1%"
    said = f"{task}: {found} of the tokens in {where} are unknown to the model's vocabulary"
    return f"{said}, which does not fit this text." if share >= MANY_UNKNOWN else f"{said}."


def _is_apart(ids: Sequence) -> bool:
    return len(ids) == 2 and isinstance(ids[0], Sequence | np.ndarray)


def _map(dataset: datasets.Dataset, encoder: _Encoder) -> datasets.Dataset:
    return dataset.with_format(None).map(
        encoder,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=encoder.features(),
        keep_in_memory=True,
        load_from_cache_file=False,
        # The library's own, a hash of the tokenizer, takes as long as 1,000 rows.
        new_fingerprint=secrets.token_hex(8),
        desc=f"Tokenizing {encoder.task.name}",
    )


def _with_own_ids(dataset: datasets.Dataset, task: Task, column: str | None) -> datasets.Dataset:
    """Returns the dataset with the task's class ids, if its label column has its own class ids."""
    import datasets

    kind = dataset.features[column] if column else None
    kind = kind.feature if isinstance(kind, datasets.List) else kind
    is_set = task.traits.is_set
    if column is None or not isinstance(kind, datasets.ClassLabel) or (kind.names == [*task.labels] and not is_set):
        return dataset
    of_class: Sequence[Any] = class_values(task, kind.names, f"Column {column!r}")
    if is_set:  # a list of names is never ambiguous
        of_class = [task.labels[int(id_)] for id_ in of_class]

    def own(ids: Any) -> Any:
        if isinstance(ids, list):
            return [*map(own, ids)]
        return of_class[ids] if ids is not None and 0 <= ids < len(of_class) else ids

    values = own(dataset.with_format(None)[column][:])
    return dataset.remove_columns(column).add_column(column, values)


class _Encoder:
    """Encodes batches of columns, and counts the inputs that were cut."""

    def __init__(
        self, task: Task, tokenizer: Any, max_length: int, columns: list[str], config: Any, labels: bool = True
    ):
        self.task, self.tokenizer, self.max_length, self.cut = task, tokenizer, max_length, 0
        sizes = {"input_ids": "vocab_size"}
        if tells_segments(config):  # others get zeros
            sizes["token_type_ids"] = "type_vocab_size"
        # Models of other packages may not say them.
        self.sizes = {name: (size, getattr(config, size)) for name, size in sizes.items() if hasattr(config, size)}
        self.is_encoded = "input_ids" in columns
        needed = self.is_encoded and task.traits.is_tags  # they say where words are
        self.label_column = label_column_in(columns, task) if labels or needed else None
        self.has_segments = "token_type_ids" in columns
        self.has_mask = "attention_mask" in columns
        self.apart = task.pair_encoding == "bi"
        if self.is_encoded:
            optional = {"token_type_ids": self.has_segments, "attention_mask": self.has_mask}
            self.columns = ["input_ids", *(name for name, there in optional.items() if there)]
        else:
            self.columns = list(task.text_columns)
            missing = [name for name in self.columns if name not in columns]
            if missing:
                raise MinBertError(
                    f"Task {task.name!r}: the dataset has no column {' and no '.join(map(repr, missing))}. "
                    f"Columns found: {', '.join(columns)}. Rename its columns, or give rows with `input_ids`."
                )
            if tokenizer is None:
                raise MinBertError(f"Task {task.name!r}: the rows are text and there is no tokenizer. Give one.")
        if self.label_column:
            self.columns.append(self.label_column)

    def __call__(self, batch: Mapping[str, list], numbers: Sequence[int]) -> dict[str, list]:
        encoded = self._check_encoded(batch, numbers) if self.is_encoded else self._tokenize(batch, numbers)
        if self.label_column and self.task.traits.is_tags:
            encoded["labels"] = self._tags(encoded, batch[self.label_column], numbers)
        elif self.label_column:
            pairs = zip(batch[self.label_column], numbers, strict=True)
            encoded["labels"] = [_label(self.task, value, 0, number) for value, number in pairs]
        return encoded

    def _tags(self, encoded: dict[str, list], column: list, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the class ids of each row's words. Rows that are already encoded have a label for each token."""
        if self.is_encoded:
            column = [[label for label in labels if label != IGNORED] for labels in column]
        rows = zip(column, encoded["num_words"], numbers, strict=True)
        return [_label(self.task, tags, words, number) for tags, words, number in rows]

    def features(self) -> datasets.Features:
        import datasets

        features: dict[str, Any] = {"input_ids": [datasets.Value("int32")], "token_type_ids": [datasets.Value("int8")]}
        if self.apart:
            features = {name: [ids] for name, ids in features.items()}
        if self.label_column:
            label = datasets.Value(self.task.traits.dtype)
            one_a_row = not (self.task.traits.is_set or self.task.traits.is_tags)
            features["labels"] = label if one_a_row else [label]
        if self.task.traits.is_tags:
            features |= {"words": [datasets.Value("int32")], "num_words": datasets.Value("int64")}
        return datasets.Features(features)

    def _tokenize(self, batch: Mapping[str, list], numbers: Sequence[int]) -> dict[str, list]:
        texts = [batch[name] for name in self.task.text_columns]
        if self.task.traits.is_tags:
            (cells,) = texts
            pairs = zip(cells, numbers, strict=True)
            texts = [[sentence_of(self.task, cell, f"Row {number}") for cell, number in pairs]]
            if self.label_column and "" in texts[0]:  # without labels every row gets an answer
                raise no_words(self.task, f"Row {numbers[texts[0].index('')]}")
        for name, column in zip(self.task.text_columns, texts, strict=True):
            for number, text in zip(numbers, column, strict=True):
                if isinstance(text, str) and not LONE_SURROGATE.search(text):
                    continue
                wrong = "holds half a character (a lone surrogate)" if isinstance(text, str) else "must be text"
                raise MinBertError(
                    f"Task {self.task.name!r}, row {number}: {name!r} {wrong}. Found {ascii(text):.100}."
                )
        if not self.apart:
            encoded, cut = self._inputs(*texts)
        else:
            sides, cuts = zip(*map(self._inputs, texts), strict=True)
            encoded = {name: list(zip(*(side[name] for side in sides), strict=True)) for name in sides[0]}
            cut = set.union(*cuts)
        self.cut += len(cut)
        return encoded

    def _inputs(self, *texts: list[str]) -> tuple[dict[str, list], set[int]]:
        """Returns one input for each row of one or two columns, and the positions of truncated inputs."""
        if self.task.traits.is_tags:
            return self._words(*texts)
        encoded = tokenize(self.tokenizer, texts, self.max_length)
        # Only an input of full length can have been cut, so only those are tokenized again to see.
        full = [place for place, ids in enumerate(encoded["input_ids"]) if len(ids) == self.max_length]
        cut = set()
        if full:
            whole = tokenize(self.tokenizer, [[column[place] for place in full] for column in texts])
            cut = {place for place, ids in zip(full, whole["input_ids"], strict=True) if len(ids) > self.max_length}
        return {name: encoded[name] for name in ("input_ids", "token_type_ids")}, cut

    def _words(self, texts: list[str]) -> tuple[dict[str, list], set[int]]:
        """Does the same as `_inputs`.

        Also returns the words that tokens begin and their number. Inputs with unread words count as truncated.
        """
        try:
            encoded = tokenize_words(self.tokenizer, texts, self.max_length)
        except ValueError as error:
            raise MinBertError(f"Task {self.task.name!r}: {error}") from None
        full = [len(ids) == self.max_length for ids in encoded["input_ids"]]
        lacking = [
            there < of for there, of in zip((max(w) + 1 for w in encoded["words"]), encoded["num_words"], strict=True)
        ]
        return encoded, {place for place, both in enumerate(zip(full, lacking, strict=True)) if all(both)}

    def _check_encoded(self, batch: Mapping[str, list], numbers: Sequence[int]) -> dict[str, list]:
        columns = ("input_ids", "token_type_ids")
        checked: dict[str, list] = {name: [] for name in columns}
        for place, number in enumerate(numbers):
            ids = batch["input_ids"][place]
            if self.apart != _is_apart(ids):
                raise MinBertError(
                    f"Task {self.task.name!r}, row {number}: with `pair_encoding: {self.task.pair_encoding}`, "
                    f"`input_ids` must be {'two lists' if self.apart else 'one list'} of ids. Found {ids!r:.60}."
                )
            row = {name: batch[name][place] for name in self.columns if name != self.label_column}
            inputs = [self._input(number, row, side) for side in ((0, 1) if self.apart else (None,))]
            for name, values in zip(columns, zip(*inputs, strict=True), strict=True):
                checked[name].append(list(values) if self.apart else values[0])
        if self.task.traits.is_tags:
            if self.label_column is None:
                raise MinBertError(
                    f"Task {self.task.name!r}: rows that are already encoded need `labels`, with {IGNORED} for "
                    f"all tokens but the first of each word. Add them, or give rows with words."
                )
            masks = batch.get("attention_mask") or [[1] * len(labels) for labels in batch[self.label_column]]
            firsts = [
                [label != IGNORED for label in compress(labels, mask)]
                for labels, mask in zip(batch[self.label_column], masks, strict=True)
            ]
            checked["words"] = [np.where(first, np.cumsum(first) - 1, -1).tolist() for first in firsts]
            checked["num_words"] = [*map(sum, firsts)]
        return checked

    def _input(self, number: int, row: Mapping[str, Any], side: int | None) -> tuple[list[int], list[int]]:
        """Returns the ids and segments of one input that is already encoded, without its padding."""
        given = {name: list(values if side is None else values[side]) for name, values in row.items()}
        ids = given["input_ids"]
        segments, mask = given.get("token_type_ids", [0] * len(ids)), given.get("attention_mask", [1] * len(ids))
        if not len(ids) == len(segments) == len(mask) or not 0 < sum(map(bool, mask)) <= self.max_length:
            raise MinBertError(
                f"Task {self.task.name!r}, row {number}: `input_ids` must hold 1 to {self.max_length} ids, and "
                f"`token_type_ids` and `attention_mask` as many. Found {len(ids)}, {len(segments)} and {len(mask)}."
            )
        found = {"input_ids": list(compress(ids, mask)), "token_type_ids": list(compress(segments, mask))}
        for name, values in found.items():
            if np.asarray(values, dtype=object).ndim != 1 or np.asarray(values).dtype.kind not in "iu":
                raise MinBertError(
                    f"Task {self.task.name!r}, row {number}: `{name}` must hold whole numbers. Found {values!r:.60}."
                )
        for name, (size, highest) in self.sizes.items():  # torch would fail at an index, and name no row
            if not 0 <= min(found[name]) <= max(found[name]) < highest:
                raise MinBertError(
                    f"Task {self.task.name!r}, row {number}: `{name}` must be from 0 to {highest - 1}, as the model's "
                    f"`{size}` is {highest}. Found {min(found[name])} to {max(found[name])}. Encode the rows with the "
                    f"model's own tokenizer."
                )
        return found["input_ids"], found["token_type_ids"]


def _is_hf_dataset(dataset: object) -> TypeGuard[datasets.Dataset]:
    library = sys.modules.get("datasets")  # an instance exists only where the library has been imported
    return library is not None and isinstance(dataset, library.Dataset)


def _size(dataset: Any, task: Task) -> int:
    if isinstance(dataset, Mapping):
        raise MinBertError(
            f"Task {task.name!r}: expected one dataset. Found a dict with the keys {', '.join(map(str, dataset))}. "
            "Give one of its values, such as its train split."
        )
    try:
        size = len(dataset)
    except TypeError:
        raise MinBertError(
            f"Task {task.name!r}: a {type(dataset).__name__} has no length. Give a map-style dataset, "
            "with `len(dataset)` and `dataset[i]`."
        ) from None
    if not size:
        raise MinBertError(f"Task {task.name!r}: the dataset is empty. Give at least one row.")
    return size


def _row(dataset: Any, number: int, task: Task) -> Mapping[str, Any]:
    try:
        row = dataset[number]
    except KeyError as error:
        raise MinBertError(
            f"Task {task.name!r}: a {type(dataset).__name__} has no `dataset[{number}]`. Give a list of dicts or a "
            "`datasets.Dataset`. For a pandas table, use `Dataset.from_pandas(table)`."
        ) from error
    if not isinstance(row, Mapping):
        found = type(row).__name__
        raise MinBertError(f"Task {task.name!r}, row {number}: a row must be a dict of columns. Found a {found}.")
    return row


def _batches(dataset: Any, size: int, task: Task, encoder: _Encoder) -> Iterator[list[dict[str, Any]]]:
    numbers = iter(range(size))
    while batch := list(islice(numbers, BATCH)):
        columns: dict[str, list] = {name: [] for name in encoder.columns}
        for number in batch:
            row = _row(dataset, number, task)
            for name, values in columns.items():
                if name not in row:
                    raise MinBertError(f"Task {task.name!r}, row {number}: no {name!r}, which row 0 has.")
                values.append(row[name])
        encoded = encoder(columns, batch)
        yield [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]
