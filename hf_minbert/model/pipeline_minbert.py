"""`pipeline("minbert-multitask")`: asks all tasks of a model about a sentence or a pair in one call.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import count, islice
from typing import Any

import numpy as np
from transformers import Pipeline, PreTrainedTokenizerBase

from .inference import (
    LONE_SURROGATE,
    AnsweringModel,
    answer,
    checked_length,
    encode_texts,
    encode_words,
    read_logits,
    read_words,
    shared_passes,
    tagged,
)
from .kinds import KINDS, above_threshold
from .spans import joined, split, with_entities, words_of

PIPELINE = "minbert-multitask"
#: What config.json says of it, so that the library finds it in a saved folder.
CUSTOM_PIPELINES = {
    PIPELINE: {
        "impl": "pipeline_minbert.MultiTaskPipeline",
        "pt": ["AutoModelForSequenceClassification"],
        "type": "text",
    }
}
CHUNK = 1000  # inputs that are sorted by length together


class MultiTaskPipeline(Pipeline):
    """Returns the predictions of all tasks of a model, or of the requested ones. A task reads only inputs that fit it.

    An input is a sentence, or a pair `(text, text_pair)` or `{"text": ..., "text_pair": ...}`. A list of inputs gives
    a list of answers. A generator or a dataset gives an iterator over answers. Both keep the order of the inputs.

    Example:
        >>> ask = pipeline("minbert-multitask", model="runs/baseline")
        >>> ask("A warm, funny film.")
        {'sst': {'label': 'very positive', 'score': 0.81, 'scores': {'very negative': 0.01, ...}}}
        >>> ask([("A boy eats.", "Someone eats."), ("A boy eats.", "It rains.")], tasks=["sts"])
        [{'sts': {'score': 3.9, 'range': [0, 5]}}, {'sts': {'score': 0.4, 'range': [0, 5]}}]
    """

    model: AnsweringModel
    tokenizer: PreTrainedTokenizerBase
    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __init__(self, *args, **kwargs):
        """Accepts the arguments of every pipeline, and those of a call as defaults for all calls."""
        super().__init__(*args, **kwargs)
        if self.model.config.model_type != "minbert" or not self.model.config.tasks:
            raise ValueError(
                f"The pipeline {PIPELINE!r} needs a MinBERT with tasks. Found a {type(self.model).__name__}. Give the "
                "folder or the id of a model that `minbert train` made."
            )

    def __call__(self, inputs: Any, *, batch_size: int | None = None, **kwargs) -> Any:
        """Predicts.

        Args:
            inputs: one input, or several; see the class.
            tasks: the names of the tasks, or one name. The default is all tasks that can read an input. A task that is
                named must be able to read every input.
            clip_scores: clip scores to their task's range.
            batch_size: the number of inputs of the model's full length in a batch; 32 by default. A batch of shorter
                inputs has more of them.
            max_length: the number of tokens that inputs are truncated to. The default is the length of the training
                (`config.max_input_length`).

        Returns:
            for each input, a dict from tasks to answers. Classes: `label`, `score`, the probability of the label, and
            `scores`, the probabilities of all labels; ordered classes also have `expected`, the mean class position.
            `kind: labels`: `labels`, the predicted labels, and `scores`. Scores: `score` and its `range`. Tags:
            `tokens`, `tags`, the `probabilities` of the tags and, if the labels mark entities, `entities`.

        Raises:
            ValueError: there is no such task; a sentence is empty (tasks with tags accept it); a named task or every
                task cannot read an input; or `max_length` is above the model's number of positions.
        """
        given = self._sanitize_parameters(**kwargs)
        defaults = (self._preprocess_params, self._forward_params, self._postprocess_params)
        params = [{**default, **own} for default, own in zip(defaults, given, strict=True)]
        size = next((size for size in (batch_size, self._batch_size) if size is not None), 32)
        params[1]["batch_size"] = _at_least_one(size)
        if isinstance(inputs, (str, tuple, Mapping)):
            return next(self._answers(iter([inputs]), *params))
        answers = self._answers(_each(inputs), *params)
        return list(answers) if isinstance(inputs, list) else answers

    def _answers(self, inputs: Iterator[Any], preprocess: dict, forward: dict, postprocess: dict) -> Iterator[dict]:
        for start in count(step=CHUNK):
            chunk = list(islice(inputs, CHUNK))
            if not chunk:
                return
            yield from self.run_single(chunk, {**preprocess, "start": start}, forward, postprocess)

    def _sanitize_parameters(
        self,
        tasks: str | Sequence[str] | None = None,
        clip_scores: bool | None = None,
        max_length: int | None = None,
    ):
        preprocess, postprocess = {}, {}
        if tasks is not None:
            preprocess["tasks"] = [tasks] if isinstance(tasks, str) else list(tasks)
            for name in preprocess["tasks"]:
                self.model.config.get_task(name)  # which raises if there is none
            if not preprocess["tasks"]:
                raise ValueError("`tasks` is empty. Name a task, or leave it out to ask all of them.")
        if max_length is not None:
            preprocess["max_length"] = checked_length(max_length, self.model.config, tokenizer=self.tokenizer)
        if clip_scores is not None:
            postprocess["clip_scores"] = clip_scores
        return preprocess, {}, postprocess

    def preprocess(
        self, inputs: list[Any], tasks: list[str] | None = None, start: int = 0, max_length: int | None = None
    ) -> dict[str, Any]:
        """Groups the tasks by passes through the encoder. Each group has its encoded inputs and their positions."""
        config = self.model.config
        encodings = {name: config.get_task(name)["pair_encoding"] for name in tasks or config.task_names}
        only_tags = all(KINDS[config.get_task(name)["kind"]].is_tags for name in encodings)
        texts = [_texts(value, f"Input {start + place}", only_tags) for place, value in enumerate(inputs)]
        self._check_readable(texts, encodings, start, named=tasks is not None)
        reads = {
            name: (
                encoding,
                checked_length(max_length, config, name, self.tokenizer),
                KINDS[config.get_task(name)["kind"]].is_tags,
            )
            for name, encoding in encodings.items()
        }
        passes = []
        for names in shared_passes(self.model, reads):
            encoding, length, by_word = reads[names[0]]
            places = [place for place, parts in enumerate(texts) if len(parts) == _arity(encoding)]
            if places:
                columns = [list(column) for column in zip(*(texts[place] for place in places), strict=True)]
                if by_word:
                    columns = [[joined([text[start:end] for start, end in words_of(text)]) for text in columns[0]]]
                    rows = encode_words(self.tokenizer, columns[0], length).read_by(config)
                else:
                    rows = encode_texts(self.tokenizer, columns, encoding == "bi", length).read_by(config)
                passes.append({"tasks": names, "places": places, "rows": rows, "texts": columns[0]})
        return {"passes": passes, "asked": list(encodings), "size": len(inputs)}

    def _check_readable(self, texts: list[tuple], encodings: Mapping[str, str], start: int, named: bool) -> None:
        """Raises `ValueError` if a named task, or without names every task, cannot read one of the inputs."""
        kinds = {1: "one sentence", 2: "a pair of sentences"}
        for arity, given in kinds.items():
            unable = [name for name, encoding in encodings.items() if _arity(encoding) != arity]
            place = next((place for place, parts in enumerate(texts) if len(parts) == arity), None)
            if place is not None and unable and (named or len(unable) == len(encodings)):
                raise ValueError(
                    f"Input {start + place} is {given}, which {' and '.join(unable)} cannot read: expected "
                    f"{kinds[3 - arity]}. Write a pair as (text, text_pair) or {{'text': ..., 'text_pair': ...}}."
                )

    def _forward(self, model_inputs: dict[str, Any], batch_size: int) -> dict[str, Any]:
        pad, found = self.tokenizer.pad_token_id, {}
        for group in model_inputs["passes"]:
            logits = answer(self.model, group["tasks"], group["rows"], pad, batch_size)
            found |= {name: (group["places"], outputs, group["texts"]) for name, outputs in logits.items()}
        asked = {name: found[name] for name in model_inputs["asked"] if name in found}
        return {"logits": asked, "size": model_inputs["size"]}

    def postprocess(self, model_outputs: dict[str, Any], clip_scores: bool = False) -> list[dict[str, Any]]:
        """Returns an answer for each input, task by task."""
        answers: list[dict[str, Any]] = [{} for _ in range(model_outputs["size"])]
        for name, (places, logits, texts) in model_outputs["logits"].items():
            task = self.model.config.get_task(name)
            is_tags = KINDS[task["kind"]].is_tags
            said = _tagged(task, logits, texts) if is_tags else _said(task, logits, clip_scores)
            for place, found in zip(places, said, strict=True):
                answers[place][name] = found
        return answers


def _said(task: Mapping[str, Any], logits: np.ndarray, clip_scores: bool) -> Iterator[dict[str, Any]]:
    """Converts a task's outputs [N, C] to an answer for each input."""
    decoded = read_logits(task["kind"], logits.astype(np.float64), task["temperature"], task["thresholds"])
    if decoded.probabilities is None:
        values = np.clip(decoded.values, *task["range"]) if clip_scores else decoded.values
        for value in values:
            yield {"score": float(value), "range": list(task["range"])}
        return
    if KINDS[task["kind"]].is_set:
        for row, said in zip(decoded.values, above_threshold(decoded.values, task["thresholds"]), strict=True):
            scores = dict(zip(task["labels"], map(float, row), strict=True))
            yield {"labels": [label for label, holds in zip(scores, said, strict=True) if holds], "scores": scores}
        return
    for place, (value, row) in enumerate(zip(decoded.values, decoded.probabilities, strict=True)):
        scores = dict(zip(task["labels"], map(float, row), strict=True))
        label = task["labels"][int(value)]
        expected = {} if decoded.expected is None else {"expected": float(decoded.expected[place])}
        yield {"label": label, "score": scores[label], "scores": scores, **expected}


def _tagged(task: Mapping[str, Any], logits: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Converts a task's outputs for words to an answer for each text."""
    decoded = read_words(task["kind"], logits)
    assert decoded.probabilities is not None
    for text, values, probabilities in zip(texts, decoded.values, decoded.probabilities, strict=True):
        yield with_entities(task["labels"], tagged(task["labels"], split(text), values, probabilities))


def _arity(pair_encoding: str) -> int:
    return 1 if pair_encoding == "single" else 2


def _each(inputs: Any) -> Iterator[Any]:
    """The inputs of a list, a generator or a dataset, one after the other."""
    if isinstance(inputs, Iterable):
        return iter(inputs)
    if isinstance(inputs, Sized):  # a map-style dataset of torch
        return (inputs[index] for index in range(len(inputs)))
    raise ValueError(f"Expected a sentence, a pair, or several in a list or dataset. Found a {type(inputs).__name__}.")


def _texts(value: Any, where: str, may_be_empty: bool) -> tuple[str, ...]:
    """Returns the one or two sentences of an input.

    Raises `ValueError` if it is invalid, or a sentence is empty and may not be.
    """
    if isinstance(value, Mapping):
        if "text" not in value or not value.keys() <= {"text", "text_pair"}:
            raise ValueError(f"{where}: a dict must hold `text` and perhaps `text_pair`. Found {value!r:.100}.")
        parts = (value["text"],) if value.get("text_pair") is None else (value["text"], value["text_pair"])
    else:
        parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or len(parts) not in (1, 2) or not all(isinstance(p, str) for p in parts):
        raise ValueError(f"{where}: expected a sentence, or a pair as (text, text_pair). Found {value!r:.100}.")
    if any(LONE_SURROGATE.search(part) for part in parts):
        raise ValueError(f"{where}: a text holds half a character (a lone surrogate). Found {ascii(value):.100}.")
    if not may_be_empty and not all(part.strip() for part in parts):
        raise ValueError(f"{where}: the sentence is empty. Found {value!r:.100}. Give at least one word.")
    return tuple(parts)


def _at_least_one(batch_size: int) -> int:
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1. Found {batch_size}.")
    return batch_size
