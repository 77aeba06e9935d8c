"""Predicts with a saved model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.encoding import (
    MANY_UNKNOWN,
    check_max_length,
    encode_and_count,
    unknown_in_words,
    unknown_share,
    warn_of_cut,
    warn_of_unread,
)
from ..data.labels import sentence_of
from ..data.rows import tag_rows
from ..errors import MinBertError, unknown_name
from ..evaluation.decoding import Decoded, clip, decode, names_of
from ..evaluation.metrics import NONFINITE, overall, task_metrics
from ..model.inference import Progress, TokenRows, answer, shared_passes, tagged
from ..model.modeling_minbert import MinBertForMultiTask
from ..model.spans import split, with_entities, words_of
from ..settings.tasks import Task
from .loading import load_config, load_tokenizer, load_weights, tasks_of

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Predictor:
    """A model and its tokenizer, ready to predict.

    Example:
        >>> predictor = Predictor.from_pretrained("runs/baseline")
        >>> predictor("sst", ["A warm, funny film."])
        [{'prediction': 4, 'label': 'very positive', 'probabilities': {...}}]
        >>> predictor("sts", ["A boy eats an apple."], ["Someone eats."])
        [{'prediction': 3.9}]
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 32,
        dtype: str = "float32",
        max_length: int | None = None,
    ):
        """Uses a model without changing or moving it.

        Args:
            batch_size: the number of rows of the model's full length in a batch. A batch of shorter rows has more of
                them, as many as fill the same space. On a CPU, a batch is not larger than the fastest size.
            dtype: the dtype of the computation: `float32`, or `bfloat16` or `float16` under autocast. These are faster
                on a GPU and have two or three digits.
            max_length: the number of tokens that inputs are truncated to. The default is each task's length in
                training, or the model's number of positions if that is unknown.

        Raises:
            MinBertError: there is no such `dtype`, `batch_size` is below 1, `max_length` is above the model's number
                of positions, or the model has no tasks.
        """
        if batch_size < 1:
            raise MinBertError(f"`batch_size` must be at least 1. Found {batch_size}.")
        if dtype not in DTYPES:
            raise unknown_name("`dtype`", dtype, DTYPES)
        # Or what answers like one: a wrapper of peft, or an export.
        self.model = cast(MinBertForMultiTask, model.eval())
        self.tokenizer = tokenizer
        self.batch_size, self.dtype = batch_size, dtype
        self.tasks = tasks_of(self.model.config, type(model).__name__)
        self.lengths = {name: check_max_length(max_length, self.model.config, name, tokenizer) for name in self.tasks}
        self.warned_of_unknown: set[str] = set()

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        *,
        batch_size: int = 32,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_length: int | None = None,
    ) -> Predictor:
        """Loads a model saved by this package, onto a GPU if there is one. `device` selects another device.

        Raises:
            MinBertError: there is no model, it has no tasks (a plain encoder), or `max_length` does not fit it.
        """
        name = str(model_name_or_path)
        config = load_config(name)
        check_max_length(max_length, config)
        tasks_of(config, name)
        tokenizer = load_tokenizer(name, config)
        model, missing = load_weights(name, config)
        if missing:
            raise MinBertError(
                f"The model {name!r} lacks {len(missing)} of its weights, among them {missing[0]}: it would answer at "
                f"random. Give the folder of a finished run, or train it with `minbert train`."
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.to(device), tokenizer, batch_size, dtype, max_length)

    def task(self, name: str) -> Task:
        """Returns the model's task with this name. The `MinBertError` for an unknown name lists the valid names."""
        if name not in self.tasks:
            raise unknown_name("task", name, self.tasks)
        return self.tasks[name]

    def __call__(
        self, task: str, texts: Iterable[str], text_pairs: Iterable[str] | None = None, *, clip_scores: bool = False
    ) -> list[dict[str, Any]]:
        """Predicts with one task.

        Args:
            task: a task of the model.
            texts: the sentences, in any iterable. For tags, a sentence may be a list of words; a text is split into
                words and punctuation marks.
            text_pairs: the second sentences, for a task with pairs.
            clip_scores: clip scores to the task's range.

        Returns:
            a dict for each sentence. Scores: `prediction`. Classes: `prediction` (the class id), `label` and
            `probabilities` by label; ordered classes also have `expected`, the mean class position. `kind: labels`:
            `labels`, the predicted labels, and `probabilities`. Tags: `tokens`, `tags` and `probabilities`, one item
            for each word, and, if the labels mark entities, `entities`; see `inference.tagged`.
        """
        spec = self.task(task)
        columns = [_sentences("texts", texts)]
        if text_pairs is not None:
            columns.append(_sentences("text_pairs", text_pairs))
        if len(columns) != len(spec.text_columns):
            need = "needs" if spec.is_pair else "takes no"
            raise MinBertError(f"Task {task!r} {need} `text_pairs`.")
        if len({len(column) for column in columns}) > 1:
            found = "Found " + " and ".join(str(len(column)) for column in columns)
            raise MinBertError(f"`texts` and `text_pairs` must be equally long. {found}.")
        if spec.traits.is_tags:
            columns = [[_sentence(spec, text, number) for number, text in enumerate(columns[0])]]
        rows = [dict(zip(spec.text_columns, cells, strict=True)) for cells in zip(*columns, strict=True)]
        decoded = self.decode(task, rows) if rows else None
        if decoded and spec.traits.is_tags:
            return self._tagged(spec, columns[0], decoded)
        return self._answers(spec, decoded, clip_scores) if decoded else []

    def decode(self, task: str, rows: Any, progress: Progress | None = None) -> Decoded:
        """Returns class ids, scores or label probabilities for rows with the task's text columns, in their order."""
        return decode(self.task(task), self.logits(task, rows, progress))

    def logits(self, task: str, rows: Any, progress: Progress | None = None) -> np.ndarray:
        """Returns the head's outputs `[rows, outputs]` in the order of `rows`, a dataset or a list of dicts.

        `progress` is called after each batch with the number of finished rows and the total. A GPU may not have
        finished yet.
        """
        return self.logits_of([task], rows, progress)[task]

    def logits_of(
        self,
        tasks: Sequence[str],
        rows: Any,
        progress: Progress | None = None,
        count: Callable[[str, dict[str, int]], object] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the outputs of several tasks' heads for the same rows, in the form of `logits`.

        Tasks share one pass through the encoder if they read the same columns in the same way, with the same length
        and the same layers. `progress` counts a row once for each pass. The numbers of truncated inputs (`cut`) and of
        words without an answer (`unread`) are logged. With `count`, they are passed to this function instead, with the
        name of the pass's first task.
        """
        rows = list(rows)  # a list has no bar of its own
        specs = {name: self.task(name) for name in tasks}
        passes = shared_passes(
            self.model,
            {
                name: (task.text_columns, task.pair_encoding, task.traits.is_tags, self.lengths[name])
                for name, task in specs.items()
            },
        )
        found = {}
        for number, names in enumerate(passes):
            told = progress and (lambda done, total, n=number: progress(n * total + done, len(passes) * total))
            length = self.lengths[names[0]]
            encoded, cut = encode_and_count(rows, specs[names[0]], self.tokenizer, length, config=self.model.config)
            if count is None:
                warn_of_cut(names[0], cut, len(rows), length)
                warn_of_unread(names[0], encoded.unread, encoded.total_words)
            else:
                count(names[0], {"cut": cut, "unread": encoded.unread, "words": encoded.total_words})
            self._tell_of_unknown(names, encoded)
            pad, dtype = self.tokenizer.pad_token_id, DTYPES[self.dtype]
            found |= answer(self.model, names, encoded, pad, self.batch_size, dtype, told)
        return {name: found[name] for name in tasks}

    def _tell_of_unknown(self, tasks: Sequence[str], rows: TokenRows) -> None:
        """Warns, once for each task, of text that the vocabulary does not know."""
        share = unknown_share(rows, self.tokenizer)
        new = [name for name in tasks if name not in self.warned_of_unknown] if share >= MANY_UNKNOWN else []
        for name in new:
            logger.warning(unknown_in_words(name, share, "the rows to answer"))
        self.warned_of_unknown.update(new)

    @staticmethod
    def _tagged(task: Task, texts: list[str], decoded: Decoded) -> list[dict[str, Any]]:
        assert decoded.probabilities is not None
        return [
            with_entities(task.labels, tagged(task.labels, split(text), values, probabilities))
            for text, values, probabilities in zip(texts, decoded.values, decoded.probabilities, strict=True)
        ]

    @staticmethod
    def _answers(task: Task, decoded: Decoded, clip_scores: bool) -> list[dict[str, Any]]:
        if decoded.probabilities is None:
            values = clip(task, decoded.values) if clip_scores else decoded.values
            return [{"prediction": float(value)} for value in values]
        if task.traits.is_set:
            return [
                {"labels": names, "probabilities": dict(zip(task.labels, map(float, row), strict=True))}
                for names, row in zip(names_of(task, decoded.values), decoded.values, strict=True)
            ]
        answers: list[dict[str, Any]] = [
            {
                "prediction": int(value),
                "label": task.labels[int(value)],
                "probabilities": dict(zip(task.labels, map(float, row), strict=True)),
            }
            for value, row in zip(decoded.values, decoded.probabilities, strict=True)
        ]
        for found, expected in zip(answers, [] if decoded.expected is None else decoded.expected, strict=False):
            found["expected"] = float(expected)
        return answers


def _sentence(task: Task, text: Any, number: int) -> str:
    """Returns the words of a sentence, joined. The sentence is a list of words or a text."""
    words = [text[start:end] for start, end in words_of(text)] if isinstance(text, str) else text
    return sentence_of(task, words, f"Sentence {number}")


def _sentences(name: str, given: Iterable[str]) -> list[str]:
    if isinstance(given, str):
        raise MinBertError(f"`{name}` must be a list of sentences. Write one sentence as [sentence].")
    # Neither of the two says which answer is whose.
    shaped = getattr(given, "ndim", 1) != 1  # a data frame gives its columns' names, and a scalar nothing
    if not isinstance(given, Iterable) or isinstance(given, Mapping | Set) or shaped:
        raise MinBertError(f"`{name}` must be a list of sentences. Found a {type(given).__name__}.")
    return list(given)


def score(
    predictor: Predictor, datasets: Mapping[str, Any], progress: bool = False
) -> tuple[dict[str, float], dict[str, Decoded]]:
    """Evaluates a model on labelled rows of its tasks.

    Returns:
        `<task>_<metric>` for each task, `overall` and, with sst, para and sts, `leaderboard`; and the predictions of
        each task whose outputs are finite.
    """
    metrics, scores, decoded = {}, {}, {}
    for name, rows in datasets.items():
        task = predictor.task(name)
        with progress_bar(name, len(rows), progress) as advance:
            logits = predictor.logits(name, rows, advance)
        labels = rows["label"][:]
        scores[name] = task_metrics(task, logits, tag_rows(labels) if task.traits.is_tags else np.asarray(labels))
        if NONFINITE not in scores[name]:
            decoded[name] = decode(task, logits)
        metrics.update({f"{name}_{metric}": value for metric, value in scores[name].items()})
    metrics.update(overall([predictor.task(name) for name in datasets], scores))
    return metrics, decoded


@contextmanager
def progress_bar(name: str, total: int, shown: bool = True, done: int = 0) -> Generator[Progress]:
    """Shows a bar on stderr for a `progress` argument. An earlier run had finished `done` rows."""
    with tqdm(total=total, initial=done, desc=name, unit="row", disable=not shown, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
