"""Exports the encoder in its own transformers class, alone or as a sentence-transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, PreTrainedModel

from ..errors import MinBertError, unknown_name
from ..io import write_atomically, write_json
from ..model.families import FAMILIES, published_config
from ..model.heads import CosineHead
from ..model.inference import tells_segments
from ..model.library import LibraryEncoder, parts_of
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..pretrained.prediction import Predictor
from ..settings.tasks import Task

TOLERANCE = 1e-5
#: Poolings by what sentence-transformers calls them. BERT's pooler is a layer on the first token there.
POOLING_MODES = {"cls": "cls_token", "pooler": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
#: In the words of the library's first versions, which all of them read, and text-embeddings-inference too.
ALL_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
FIRST_NAMES = "sentence_transformers.models"


class ToEncoder:
    """Writes the encoder in its own class, such as `BertModel`: config, weights, tokenizer. Heads are left out.

    Args:
        task: the task whose encoder is written. It is required if tasks have separate layers or encoders.
    """

    def __init__(self, name: str, config: MinBertConfig, tasks: Mapping[str, Task], *, task: str | None = None):
        apart = {one: one for one in tasks} if _encoders_differ(config) else dict.fromkeys(tasks, "")
        self.task = choose_task(tasks, task, apart, "have an encoder of their own")
        self.notes = [f"The heads are not exported ({', '.join(tasks)}): a plain encoder has none."]
        pooled = [one.name for one in tasks.values() if one.pooling == "pooler"]
        if pooled and not _has_pooler(config):
            self.notes.append(
                f"The pooler, which {', '.join(pooled)} read, is not exported: {config.family} has none."
            )
        for one in tasks.values():
            if one.layers == "mix" or one.pooling in ("attention", "bigru"):
                reads = "a learned mix of all layers" if one.layers == "mix" else f"{one.pooling} pooling"
                self.notes.append(f"{one.name} reads the token states by {reads}, which belongs to its head.")

    def write(self, predictor: Predictor, folder: Path) -> dict[str, Any]:
        """Fills the folder. Raises `MinBertError` if the hidden states of the export differ from the model's."""
        difference = write_encoder(predictor, self.task, folder)
        notes = "\n".join(f"- {note}" for note in self.notes)
        length = predictor.lengths[self.task]
        write_atomically(folder / "README.md", PLAIN.format(task=self.task, max_length=length, notes=notes))
        return {"task": self.task, "largest_difference": difference, "notes": self.notes}


class ToSentenceTransformers:
    """Writes a sentence-transformers model: the encoder, the pooling of the task's training, and the layers after it.

    The files are not written by the library, because its newest version writes names that older versions and other
    servers do not know.

    Args:
        task: the task whose vectors are written. It is required if the tasks' encoders or pooling methods differ.
    """

    def __init__(self, name: str, config: MinBertConfig, tasks: Mapping[str, Task], *, task: str | None = None):
        differ = _encoders_differ(config)
        readings = {
            one.name: (one.layers, one.pooling, one.name if differ or _has_own_vectors(one) else "")
            for one in tasks.values()
        }
        self.task = tasks[choose_task(tasks, task, readings, "do not make a sentence's vector in one way")]
        if self.task.traits.is_tags:
            raise MinBertError(
                f"Task {self.task.name!r} tags words and makes no vector of a sentence. Name another with --task, or "
                "export to classifier or to onnx."
            )
        if self.task.layers == "mix" or self.task.pooling not in POOLING_MODES:
            reads = "a learned mix of layers" if self.task.layers == "mix" else f"`pooling: {self.task.pooling}`"
            raise MinBertError(
                f"Task {self.task.name!r} pools by {reads}, which sentence-transformers does not have. Choose a task "
                f"with one of {', '.join(POOLING_MODES)} on the last layer, or export to onnx."
            )
        if self.task.pooling == "pooler" and config.encoder_config is not None and _has_pooler(config):
            raise MinBertError(
                f"Task {self.task.name!r} pools by the pooler of a {config.family}, which sentence-transformers does "
                "not have. Choose a task with cls, mean or max, or export to onnx."
            )
        self.readers = [one for one in tasks.values() if readings[one.name] == readings[self.task.name]]

    def write(self, predictor: Predictor, folder: Path) -> dict[str, Any]:
        """Fills the folder. Raises `MinBertError` if the hidden states of the export differ from the model's."""
        model = predictor.model
        difference = write_encoder(predictor, self.task.name, folder)
        length = predictor.lengths[self.task.name]
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
        write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
        pooling = {f"pooling_mode_{mode}": mode == POOLING_MODES[self.task.pooling] for mode in ALL_MODES}
        layers = self._layers(model)
        places = ["", "1_Pooling", *(f"{number}_Dense" for number in range(2, 2 + len(layers)))]
        kinds = ["Transformer", "Pooling", *("Dense" for _ in layers)]
        write_json(
            folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.hidden_size, **pooling}
        )
        for place, (linear, activation) in zip(places[2:], layers, strict=True):
            _write_dense(folder / place, linear, activation)
        modules = [
            {"idx": number, "name": str(number), "path": place, "type": f"{FIRST_NAMES}.{kind}"}
            for number, (place, kind) in enumerate(zip(places, kinds, strict=True))
        ]
        write_json(folder / "modules.json", modules)
        notes = self._notes(model)
        write_atomically(folder / "README.md", self._readme(length, notes))
        return {"task": self.task.name, "largest_difference": difference, "notes": notes}

    def _layers(self, model: MinBertForMultiTask) -> list[tuple[nn.Linear, type[nn.Module]]]:
        """Returns the layers after the pooling."""
        layers: list[tuple[nn.Linear, type[nn.Module]]] = []
        pooler: Any = model.encoder_of(self.task.name).pooler
        if self.task.pooling == "pooler" and pooler is not None:
            layers.append((pooler.dense, nn.Tanh))
        head = model.heads.get(self.task.name)
        if isinstance(head, CosineHead) and head.projection is not None:
            layers.append((head.projection, nn.Identity))
        return layers

    def _notes(self, model: MinBertForMultiTask) -> list[str]:
        """Returns the meaning of a cosine for each task that uses these vectors."""
        heads = {task.name: model.heads.get(task.name) for task in self.readers}
        notes = [
            f"{name}: {_meaning(name, head, model)}" for name, head in heads.items() if isinstance(head, CosineHead)
        ]
        rest = [name for name, head in heads.items() if not isinstance(head, CosineHead)]
        if rest:
            notes.append(
                f"{', '.join(rest)}: trained with another head than a cosine, which is not exported. The cosine of "
                "two vectors was not trained to measure similarity, so test it first."
            )
        return notes

    def _readme(self, max_length: int, notes: list[str]) -> str:
        return README.format(
            task=self.task.name,
            pooling=self.task.pooling,
            max_length=max_length,
            notes="\n".join(f"- {note}" for note in notes),
        )


PLAIN = """---
library_name: transformers
pipeline_tag: feature-extraction
---

# Encoder of a MinBERT model

As it encodes for the task `{task}`, in transformers' own class. Inputs were cut to {max_length} tokens in training.

```python
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModel.from_pretrained("path/to/this/folder").eval()
inputs = tokenizer(["A cat sleeps."], truncation=True, max_length={max_length}, return_tensors="pt")
print(model(**inputs).last_hidden_state.shape)  # [texts, tokens, hidden size]
```

{notes}
"""
README = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- feature-extraction
- sentence-similarity
---

# Sentence vectors of the task `{task}`

The encoder of a MinBERT model, with the pooling that the task was trained with (`{pooling}`). Inputs are cut to
{max_length} tokens.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A cat sleeps.", "A cat is asleep.", "Rain fell all night."])
print(model.similarity(vectors, vectors))  # cosines
```

What a cosine says:

{notes}
"""


def write_encoder(predictor: Predictor, task: str, folder: Path) -> float:
    """Saves the encoder of a task in its transformers class, with its tokenizer, loads it again and compares it.

    Returns:
        the largest difference in hidden states at real tokens, and in the pooler's output if the class has a pooler.

    Raises:
        MinBertError: it is above `TOLERANCE`.
    """
    model = predictor.model
    encoder = model.encoder_of(task)
    plain = encoder.model if isinstance(encoder, LibraryEncoder) else _published(model, task)
    plain.save_pretrained(folder)
    save_tokenizer(predictor, task, folder)
    written = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = published_sample(model.config, 3, min(17, model.config.max_position_embeddings))
    with torch.inference_mode():
        ours, theirs = encoder(**inputs, task=task), written(**inputs)
    seen = inputs["attention_mask"].bool()
    difference = largest(ours.last_hidden_state[seen], theirs.last_hidden_state[seen])
    if _has_pooler(model.config):
        difference = max(difference, largest(ours.pooler_output, theirs.pooler_output))
    check_difference(type(plain).__name__, difference, TOLERANCE)
    return difference


def encoder_weights(model: MinBertForMultiTask, task: str) -> dict[str, torch.Tensor]:
    """Returns the weights of a task's encoder without its pooler, by their names in the transformers class."""
    encoder, family = model.encoder_of(task), FAMILIES[model.config.family]
    layers = {f"encoder.layer.{n}": layer for n, layer in enumerate(encoder.layers_of(task))}
    parts: dict[str, nn.Module] = {"embeddings": encoder.embeddings, **layers}
    weights = {f"{part}.{name}": value for part, of in parts.items() for name, value in of.state_dict().items()}
    return {family.published(name): value for name, value in weights.items()}


def save_tokenizer(predictor: Predictor, task: str, folder: Path) -> None:
    """Saves the tokenizer.

    It truncates to the task's length. For an encoder with one segment it returns no segments.
    """
    tokenizer = predictor.tokenizer
    tokenizer.model_max_length = predictor.lengths[task]
    if not tells_segments(predictor.model.config):
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the latter is saved
    tokenizer.save_pretrained(folder)


def published_sample(config: MinBertConfig, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Does the same as `sample`, without segments if there are fewer than two."""
    inputs = sample(config, rows, length)
    if config.type_vocab_size < 2:  # some take no segments, and others have one
        del inputs["token_type_ids"]
    return inputs


def _published(model: MinBertForMultiTask, task: str) -> PreTrainedModel:
    """The hand-written encoder of a task in the library's class of it."""
    plain = AutoModel.from_config(published_config(model.config))
    pooler = model.encoder_of(task).get_submodule("pooler") if FAMILIES[model.config.family].pooler else nn.Module()
    plain.load_state_dict({**encoder_weights(model, task), **pooler.state_dict(prefix="pooler.")})
    return plain


def _has_pooler(config: MinBertConfig) -> bool:
    """Whether the library's class of the encoder has one."""
    encoder = config.encoder_config
    return FAMILIES[config.family].pooler if encoder is None else parts_of(encoder).pools


def sample(config: MinBertConfig, rows: int, length: int, sentences: int = 1) -> dict[str, torch.Tensor]:
    """Returns random inputs to compare two models on, [rows, length] or [rows, 2, length], with varying padding."""
    draw = torch.Generator().manual_seed(rows * length)
    shape = (rows, length) if sentences == 1 else (rows, sentences, length)
    ids = torch.randint(config.vocab_size, shape, generator=draw)
    lengths = torch.randint(1, length + 1, (*shape[:-1], 1), generator=draw)
    mask = (torch.arange(length) < lengths).long()
    segments = torch.randint(config.type_vocab_size or 1, shape, generator=draw)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the largest difference. For numbers above 1 it is relative."""
    return ((ours - theirs).abs() / ours.abs().clamp(min=1)).max().item()


def check_difference(what: str, difference: float, limit: float) -> None:
    """Raises `MinBertError` if two models differ by more than `limit`, or by NaN."""
    if not difference <= limit:
        raise MinBertError(
            f"The {what} that was written differs from the model by {difference:.2g}, and more than {limit:g} is too "
            "much; nothing is left of it. Check that the model's weights are numbers, or try another version of torch."
        )


def _encoders_differ(config: MinBertConfig) -> bool:
    return bool(config.copying_tasks) and (config.private_layers > 0 or config.private_encoders)


def _has_own_vectors(task: Task) -> bool:
    return task.head == "cosine" and task.head_options.get("projection_size") is not None


def choose_task(tasks: Mapping[str, Task], wanted: str | None, readings: Mapping[str, Any], why: str) -> str:
    """Returns the named task, or any task if all are read in the same way."""
    if wanted is not None and wanted not in tasks:
        raise unknown_name("task", wanted, tasks)
    if wanted is None and len(set(readings.values())) > 1:
        raise MinBertError(f"The tasks of this model {why}. Name one with --task: {', '.join(tasks)}.")
    return wanted or next(iter(tasks))


def _meaning(name: str, head: CosineHead, model: MinBertForMultiTask) -> str:
    """How a cosine becomes the answer of this head, in words."""
    if head.logit is not None:
        weight, bias, label = (
            head.logit.weight.item(),
            head.logit.bias.item(),
            model.config.get_task(name)["labels"][1],
        )
        return f"the probability of {label!r} is 1 / (1 + exp(-({weight:.6g} * cosine + {bias:.6g})))."
    low, high = head.range
    share = {"raw": None, "shifted": "(cosine + 1) / 2", "relu": "max(cosine, 0)"}[head.mapping]
    return "the score is the cosine itself." if share is None else f"the score is {low:g} + {high - low:g} * {share}."


def _write_dense(folder: Path, linear: nn.Linear, activation: type[nn.Module]) -> None:
    folder.mkdir()
    config = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": True}
    path = f"{activation.__module__}.{activation.__name__}"
    write_json(folder / "config.json", {**config, "activation_function": path})
    weights = {f"linear.{key}": value.detach().contiguous() for key, value in linear.named_parameters()}
    save_file(weights, folder / "model.safetensors")
