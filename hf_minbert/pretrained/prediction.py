"""A saved model over sentences: load it once, ask any of its tasks."""

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
    """A model and its tokenizer, ready to answer.

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
        """Takes a model as it is, where it is.

        Args:
            batch_size: how many rows of the model's full length go through it at once. Of shorter rows more do, as
                many as fill the same space; on a CPU no more than it is fastest with.
            dtype: what to compute in: `float32`; or `bfloat16` or `float16`, under autocast, faster on a GPU and with
                some two or three digits.
            max_length: tokens that inputs are cut to. Unless given, those that the model was trained for, task by
                task; of a model that does not say, its number of positions.

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
        """Loads a model saved by this package, onto the GPU where there is one unless `device` says otherwise.

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
        """The model's task of this name. Raises `MinBertError` with the right names."""
        if name not in self.tasks:
            raise unknown_name("task", name, self.tasks)
        return self.tasks[name]

    def __call__(
        self, task: str, texts: Iterable[str], text_pairs: Iterable[str] | None = None, *, clip_scores: bool = False
    ) -> list[dict[str, Any]]:
        """Answers one task.

        Args:
            task: a task of the model.
            texts: the sentences, in anything that gives them in their order: a list, a column, an iterator. For tags a
                sentence may be a list of its words; a text is split into words and punctuation marks.
            text_pairs: their second sentences, for a task of pairs.
            clip_scores: force scores into the task's range.

        Returns:
            a dict per sentence: `prediction` (class id or score) and, where there are classes, the `label` and
            the `probabilities` by label; of classes in order the `expected` place too, their mean. Of kind `labels`
            the `labels` that are answered, and the `probabilities`. For tags `tokens`, `tags` and `probabilities`, an
            item each per word, and, where tags mark them, `entities`; see `inference.tagged`.
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
        """Class ids, scores or probabilities of labels for rows with the task's text columns, in their order."""
        return decode(self.task(task), self.logits(task, rows, progress))

    def logits(self, task: str, rows: Any, progress: Progress | None = None) -> np.ndarray:
        """The head's outputs `[rows, outputs]` in the order of `rows`, a dataset or a list of dicts.

        `progress` is called with the rows done and the rows in all, after each batch; a GPU may lag behind it.
        """
        return self.logits_of([task], rows, progress)[task]

    def logits_of(
        self,
        tasks: Sequence[str],
        rows: Any,
        progress: Progress | None = None,
        count: Callable[[str, dict[str, int]], object] | None = None,
    ) -> dict[str, np.ndarray]:
        """The outputs of several tasks' heads for the same rows, each as `logits` gives them.

        Tasks that read the same columns in the same way, to the same length and through the same layers share one pass
        through the encoder. `progress` counts a row once for each pass. How many inputs were `cut` to the task's
        length and how many of its `words` were `unread` is logged or, with `count`, told it: the first task of a pass
        and these numbers.
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
    """The words of a sentence, joined: those of a list, or of a text."""
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
    """Scores a model on labelled rows of its tasks.

    Returns:
        `<task>_<metric>` of each task, `overall` and, with sst, para and sts, `leaderboard`; and the predictions of
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
    """A bar on stderr for a `progress` argument; `done` rows were done by an earlier run."""
    with tqdm(total=total, initial=done, desc=name, unit="row", disable=not shown, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
