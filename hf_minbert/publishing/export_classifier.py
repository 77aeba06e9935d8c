"""Exports one task as the transformers classifier of sequences or, with tags, of tokens:
`BertForSequenceClassification`.

Letters in shapes: H hidden size, N size of the layer before the last, C outputs of the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SEQUENCE_CLASSIFIERS,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as TOKEN_CLASSIFIERS

from ..errors import MinBertError
from ..io import write_atomically, write_json
from ..model.families import FAMILIES, published_config
from ..model.heads import HEADS, LinearHead, MLPHead
from ..model.losses import options_of
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..model.spans import mark_entities
from ..pretrained.prediction import Predictor
from ..settings.tasks import Task
from .export_encoder import (
    TOLERANCE,
    check_difference,
    choose_task,
    encoder_weights,
    largest,
    published_sample,
    save_tokenizer,
)

#: A linear layer's weight and bias.
Layer = tuple[Tensor, Tensor]

IDENTITY = "torch.nn.modules.linear.Identity"
#: What the outputs mean, to the loss and to the stock pipeline, which puts softmax, sigmoid or nothing on them.
PROBLEMS = {
    "classes": "single_label_classification",
    "two logits": "single_label_classification",
    "one logit": "multi_label_classification",
    "labels": "multi_label_classification",
    "score": "regression",
    "tags": None,  # a token classifier looks at no such word
}


class ToClassifier:
    """Writes a transformers classifier with the answers of one task: config, weights, tokenizer.

    All classes for sequences apply a linear layer, an activation and a linear layer to the first token. The activation
    is tanh in most classes, ReLU in DistilBERT's and GELU in ELECTRA's. Classes for tokens apply one linear layer to
    each token. Tasks with other heads are refused.

    Args:
        task: the task. It is required if there are several.
        logits: the number of outputs for a binary task with the logit z. With 2, the default, they are (0, z), whose
            softmax is the sigmoid of z. Both labels then have an output. With 1, the output is z.
    """

    def __init__(
        self,
        name: str,
        config: MinBertConfig,
        tasks: Mapping[str, Task],
        *,
        task: str | None = None,
        logits: int | None = None,
    ):
        self.task = tasks[choose_task(tasks, task, {one: one for one in tasks}, "have a head each")]
        if logits is not None and self.task.kind != "binary":
            raise MinBertError(
                f"--logits is for binary tasks, and {self.task.name!r} is of kind {self.task.kind!r}. Leave it out."
            )
        if logits not in (None, 1, 2):
            raise MinBertError(f"--logits must be 1 or 2. Found {logits}.")
        if config.encoder_config is not None:
            raise MinBertError(
                f"`--to classifier` is for the hand-written encoders ({', '.join(FAMILIES)}). Found "
                f"{config.encoder_config.model_type!r}. Export to encoder or to onnx."
            )
        of_tags = self.task.traits.is_tags
        self.auto = AutoModelForTokenClassification if of_tags else AutoModelForSequenceClassification
        names = TOKEN_CLASSIFIERS if of_tags else SEQUENCE_CLASSIFIERS
        self.kind = names[config.family]
        if (obstacle := _obstacle(self.task, config)) is not None:
            raise MinBertError(
                f"Task {self.task.name!r} has {obstacle}, which a {self.kind} cannot compute. Train it with "
                f"{_remedy(self.task, config)}, or export to onnx."
            )
        self.form = self.task.kind
        if self.task.kind == "binary":
            self.form = "one logit" if logits == 1 else "two logits"
        self.notes = self._meaning()
        if len(tasks) > 1:
            others = ", ".join(other for other in tasks if other != self.task.name)
            self.notes.append(f"The other tasks are not exported ({others}): a {self.kind} has one head.")

    def write(self, predictor: Predictor, folder: Path) -> dict[str, Any]:
        """Fills the folder. Raises `MinBertError` if the answers of the export differ from the model's."""
        model, name, length = predictor.model, self.task.name, predictor.lengths[self.task.name]
        plain = self.auto.from_config(self._config(model.config))
        weights = {f"{plain.base_model_prefix}.{key}": value for key, value in encoder_weights(model, name).items()}
        linear = [key for key, module in plain.named_modules() if isinstance(module, nn.Linear)]
        own = [key for key in linear if f"{key}.weight" not in weights]  # what is not of the encoder
        for key, (weight, bias) in zip(own, self._folded(model), strict=True):
            weights |= {f"{key}.weight": weight, f"{key}.bias": bias}
        plain.load_state_dict(weights)
        plain.save_pretrained(folder)
        save_tokenizer(predictor, name, folder)
        if not self.task.traits.is_tags:  # servers look for the length here, and else take the number of positions
            write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
        write_atomically(folder / "README.md", self._readme(length))
        difference = self._compare(model, folder)
        said = {"task": name, "class": self.kind, "outputs": len(self._labels())}
        return {**said, "largest_difference": difference, "notes": self.notes}

    def _labels(self) -> list[str]:
        """A name for each output."""
        if self.form == "one logit":
            return [self.task.labels[1]]
        return [self.task.name] if self.form == "score" else list(self.task.labels)

    def _config(self, config: MinBertConfig) -> PreTrainedConfig:
        labels, plain = self._labels(), published_config(config)
        plain.update({"id2label": dict(enumerate(labels)), "problem_type": PROBLEMS[self.form]})
        plain.update({"label2id": {label: number for number, label in enumerate(labels)}})
        if self.form == "score":  # a CrossEncoder takes the sigmoid of one output unless it reads this
            plain.update({"sentence_transformers": {"activation_fn": IDENTITY}})
            plain.update({"sbert_ce_default_activation_function": IDENTITY})  # its name before version 4
        return plain

    def _folded(self, model: MinBertForMultiTask) -> tuple[Layer, ...]:
        """The two layers of the written class, [H, H] and [H], [C, H] and [C]; the last one alone of tags."""
        if self.task.traits.is_tags:
            return (_last_layer(model, self.task),)
        (first, first_bias), (last, last_bias) = _two_layers(model, self.task)
        last, last_bias = last / self.task.temperature, last_bias / self.task.temperature
        if self.form == "two logits":  # above z, a row for 0
            last, last_bias = F.pad(last, (0, 0, 1, 0)), F.pad(last_bias, (1, 0))
        rest = model.config.hidden_size - len(first)  # units that nothing reads
        return (F.pad(first, (0, 0, 0, rest)), F.pad(first_bias, (0, rest))), (F.pad(last, (0, rest)), last_bias)

    def _compare(self, model: MinBertForMultiTask, folder: Path) -> float:
        written = self.auto.from_pretrained(folder, dtype=torch.float32).eval()
        longest, worst = model.config.max_position_embeddings, 0.0
        for rows, length in ((1, 1), (2, longest), (5, min(17, longest))):
            inputs = published_sample(model.config, rows, length)
            with torch.inference_mode():
                ours, theirs = model(**inputs, task=self.task.name).logits, written(**inputs).logits
            ours = ours / self.task.temperature
            if self.form == "two logits":
                ours = F.pad(ours, (1, 0))
            if self.task.traits.is_tags:
                seen = inputs["attention_mask"].bool()
                ours, theirs = ours[seen], theirs[seen]
            worst = max(worst, largest(ours, theirs))
            check_difference(self.kind, worst, TOLERANCE)
        return worst

    def _meaning(self) -> list[str]:
        """What the outputs are, and what to ask of servers."""
        return [*self._outputs(), *(THRESHOLD.format(*each) for each in self.task.own_thresholds.items())]

    def _outputs(self) -> list[str]:
        if self.form == "tags":
            return [
                f"It has {len(self.task.labels)} outputs for each token, whose softmax gives the tags' probabilities.",
                "It was trained on the first token of each word: if a word has several tokens, use the tag of the "
                "first.",
            ]
        if self.form == "classes":
            return [f"It has {len(self.task.labels)} outputs, whose softmax gives the labels' probabilities."]
        if self.form == "labels":
            return [
                f"It has {len(self.task.labels)} outputs, whose sigmoids are the labels' probabilities.",
                "text-embeddings-inference applies a softmax to them. Request `raw_scores: true`, and apply a "
                "sigmoid.",
            ]
        if self.form == "two logits":
            return [
                "It has two outputs, 0 and z, whose softmax gives both labels' probabilities.",
                "To rerank (/rerank, /score), servers need a single output: export with --logits 1.",
            ]
        if self.form == "one logit":
            return [f"It has one output z, whose sigmoid is the probability of {self.task.labels[1]!r}."]
        assert self.task.range is not None
        low, high = self.task.range
        return [
            f"It has one output, the score itself, trained from {low:g} to {high:g}.",
            "text-embeddings-inference applies a sigmoid to it unless the request has `raw_scores: true`.",
        ]

    def _readme(self, max_length: int) -> str:
        pair = self.task.is_pair
        if self.task.traits.is_tags:
            meaning = "\n".join(f"- {meaning}" for meaning in self._meaning())
            strategy = "simple" if mark_entities(self.task.labels) else "first"
            return TAGGER.format(
                task=self.task.name, kind=self.kind, max_length=max_length, meaning=meaning, strategy=strategy
            )
        return README.format(
            task=self.task.name,
            kind=self.kind,
            max_length=max_length,
            meaning="\n".join(f"- {meaning}" for meaning in self._meaning()),
            text='{"text": "A cat sleeps.", "text_pair": "A cat is asleep."}' if pair else '"A cat sleeps."',
            cross_encoder=CROSS_ENCODER if pair else "",
            inputs='[["A cat sleeps.", "A cat is asleep."]]' if pair else '[["A cat sleeps."]]',
            raw=', "raw_scores": true' if self.form in ("score", "labels") else "",
        )


def _shapes(config: MinBertConfig) -> list[tuple[str, str]]:
    """Pooling and head of the tasks that the library's classifier can compute, the usual ones first."""
    # The pooler is a layer and tanh. ReLU and GELU let any number x through, as f(x) - f(-x): see `_two_layers`.
    usual = "pooler" if FAMILIES[config.family].classifier_act == "tanh" else "cls"
    return [(usual, "linear"), ("cls", "mlp")]


def _obstacle(task: Task, config: MinBertConfig) -> str | None:
    """The setting of a task that the library's classifier cannot compute."""
    shapes, act, size = _shapes(config), FAMILIES[config.family].classifier_act, config.hidden_size
    if task.kind not in ("binary", *PROBLEMS):  # whose probabilities are no softmax or sigmoid of a linear layer
        return f"`kind: {task.kind}`"
    if task.pair_encoding == "bi" or task.layers == "mix":
        return "`pair_encoding: bi`" if task.pair_encoding == "bi" else "`layers: mix`"
    if task.traits.is_tags:
        return None if task.head == "linear" else f"`head: {task.head}`"
    if task.pooling not in [pooling for pooling, _ in shapes]:
        return f"`pooling: {task.pooling}`"
    if (task.pooling, task.head) not in shapes:
        return f"`head: {task.head}` on `pooling: {task.pooling}`"
    options = {**options_of(HEADS[task.head]), **task.head_options}
    if task.head == "mlp":
        sizes = options["hidden_sizes"] or [size]
        if options["activation"] != act:
            return f"`head_options: {{activation: {options['activation']}}}`"
        return f"`head_options: {{hidden_sizes: {list(sizes)}}}`" if len(sizes) > 1 or sizes[0] > size else None
    if _too_many(task, config):
        return f"{task.num_outputs} labels with `head: linear`, more than half of `hidden_size: {size}`"
    return None


def _remedy(task: Task, config: MinBertConfig) -> str:
    """Settings that it can be trained with instead."""
    act, (pooling, _) = FAMILIES[config.family].classifier_act, _shapes(config)[0]
    either = "`kind: classes`, " if task.kind not in ("binary", *PROBLEMS) else ""
    either += "`pair_encoding: cross`, " if task.pair_encoding == "bi" else ""
    either += "`layers: last`, " if task.layers == "mix" else ""
    if task.traits.is_tags:
        return f"{either}`head: linear`"
    mlp = f"{either}`pooling: cls`, `head: mlp` and `head_options: {{activation: {act}}}`"
    return mlp if _too_many(task, config) else f"{either}`pooling: {pooling}` and `head: linear`, or with {mlp}"


def _too_many(task: Task, config: MinBertConfig) -> bool:
    """Whether `_two_layers` lacks units to let the outputs of a linear head through, two for each."""
    return _shapes(config)[0] == ("cls", "linear") and 2 * task.num_outputs > config.hidden_size


def _two_layers(model: MinBertForMultiTask, task: Task) -> tuple[Layer, Layer]:
    """The task's layers before and after the activation, [N, H] and [N], [C, N] and [C]."""
    head = model.heads.get(task.name)
    if isinstance(head, MLPHead):
        first, last = (module for module in head.layers if isinstance(module, nn.Linear))
        return (first.weight.detach(), first.bias.detach()), (last.weight.detach(), last.bias.detach())
    weight, bias = _last_layer(model, task)
    if task.pooling == "pooler":
        dense = model.encoder_of(task.name).get_submodule("pooler.dense")
        assert isinstance(dense, nn.Linear)
        return (dense.weight.detach(), dense.bias.detach()), (weight, bias)
    # f(x) - f(-x) = x for ReLU, and for GELU, which is x times the normal distribution: P(x) + P(-x) = 1.
    both = torch.cat([weight, -weight])
    identity = torch.eye(len(weight))
    return (both, torch.zeros(len(both))), (torch.cat([identity, -identity], dim=1), bias)


def _last_layer(model: MinBertForMultiTask, task: Task) -> Layer:
    """That of a linear head, with its factor in it."""
    head = model.heads.get(task.name)
    assert isinstance(head, LinearHead)  # by `_obstacle`
    return head.scale * head.linear.weight.detach(), head.scale * head.linear.bias.detach()


THRESHOLD = "The threshold of {!r} is a probability of {:.4f}. Tools that use 0.5 give other answers."


README = """---
library_name: transformers
pipeline_tag: text-classification
---

# The task `{task}` as a `{kind}`

One task of a MinBERT model in a class of transformers. It needs no code of hf_minbert. It was trained on inputs of at
most {max_length} tokens.

{meaning}

```python
from transformers import pipeline

classify = pipeline("text-classification", model="path/to/this/folder")
print(classify({text}, truncation=True, top_k=None))
```
{cross_encoder}
In this folder, with text-embeddings-inference:

```bash
docker run -d -p 8080:80 -v "$PWD":/model ghcr.io/huggingface/text-embeddings-inference:cpu-1.7.1 --model-id /model
curl localhost:8080/predict -H 'Content-Type: application/json' -d '{{"inputs": {inputs}{raw}}}'
```
"""

TAGGER = """---
library_name: transformers
pipeline_tag: token-classification
---

# The task `{task}` as a `{kind}`

One task of a MinBERT model in a class of transformers. It needs no code of hf_minbert. It was trained on inputs of at
most {max_length} tokens.

{meaning}

```python
from transformers import pipeline

tag = pipeline("token-classification", model="path/to/this/folder", aggregation_strategy="{strategy}")
print(tag("Ada Lovelace was born in London."))
```
"""

CROSS_ENCODER = """
```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
print(model.predict([("A cat sleeps.", "A cat is asleep.")]))
```
"""
