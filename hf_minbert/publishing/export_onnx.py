"""Exports the whole model as ONNX graphs, checked against onnxruntime, with an optional int8 variant.

There is one graph for each input format: `model.onnx` for tasks with one input per example, a text or a joined pair,
and `model_bi.onnx` for tasks that encode the sentences of a pair separately. A single graph would require both inputs
in every call.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from scipy.special import logit
from torch import Tensor, nn

from ..errors import MinBertError
from ..io import write_atomically, write_json
from ..model.configuration_minbert import TASK_DEFAULTS
from ..model.modeling_minbert import MinBertConfig, MinBertForMultiTask
from ..pretrained.data import RunData
from ..pretrained.prediction import Predictor, score
from ..settings.tasks import Task
from .export_encoder import check_difference, largest, sample

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
QUANTIZED = "_quantized"  # behind the name of a graph, as the Hub's tools have it


class ToOnnx:
    """Writes ONNX graphs of all heads for batches of any size and length, with an output for each task under its name.

    The folder also has the tokenizer, `tasks.json` with labels and ranges, and a README with example code.

    Args:
        quantize: add a variant with int8 matrices (onnxruntime's dynamic quantization). Both variants are evaluated on
            the dev rows of the run's recipe.
        data_dir: with `quantize`, the folder with the tasks' files, or sample, or hub. It replaces that of the recipe.
    """

    def __init__(
        self,
        name: str,
        config: MinBertConfig,
        tasks: Mapping[str, Task],
        *,
        quantize: bool = False,
        data_dir: str | None = None,
    ):
        if data_dir is not None and not quantize:
            raise MinBertError("--data-dir scores the quantized variant beside the full one: add --quantize.")
        for library in ("onnx", "onnxscript", "onnxruntime"):
            if find_spec(library) is None:
                raise MinBertError(f"`onnx` needs the library {library}. Run: pip install 'hf_minbert[export]'")
        for one in tasks:
            if one in INPUTS:
                raise MinBertError(f"A task called {one!r} cannot have an output of its name: an input has it.")
        self.tasks, self.quantize = tasks, quantize
        self.rows = _dev_rows(name, tasks, data_dir) if quantize else {}

    def write(self, predictor: Predictor, folder: Path) -> dict[str, Any]:
        """Fills the folder. Raises `MinBertError` if the answers of a graph differ from the model's."""
        model, differences = predictor.model, {}
        for name, tasks in self._graphs().items():
            write_graph(model, tasks, folder / f"{name}.onnx")
            differences[f"{name}.onnx"] = compare(model, tasks, folder / f"{name}.onnx")
            if self.quantize:
                quantize_graph(folder / f"{name}.onnx", folder / f"{name}{QUANTIZED}.onnx")
        predictor.tokenizer.save_pretrained(folder)
        described = self._describe(predictor.lengths)
        write_json(folder / "tasks.json", described)
        scores = self._scores(predictor, folder) if self.rows else None
        write_atomically(folder / "README.md", _readme(described, scores, self.quantize))
        bytes_ = {path.name: path.stat().st_size for path in sorted(folder.glob("*.onnx*"))}
        said = {"largest_difference": max(differences.values()), "differences": differences, "bytes": bytes_}
        notes = [f"{name}.onnx answers {', '.join(tasks)}." for name, tasks in self._graphs().items()]
        unscored = [name for name in self.tasks if self.quantize and name not in self.rows]
        if unscored:
            why = "there are no rows of them" if self.rows else "give --data-dir for the scores of both variants"
            notes.append(f"What int8 costs was not measured for {', '.join(unscored)}: {why}.")
        return {**said, "scores": scores, "notes": notes}

    def _graphs(self) -> dict[str, list[str]]:
        """The name of each graph, and its tasks."""
        graphs: dict[str, list[str]] = {}
        for task in self.tasks.values():
            graphs.setdefault(graph_of(task), []).append(task.name)
        return graphs

    def _describe(self, lengths: Mapping[str, int]) -> dict[str, Any]:
        """Returns the content of `tasks.json`."""
        tasks = {}
        for name, task in self.tasks.items():
            files = {"file": f"{graph_of(task)}.onnx"}
            if self.quantize:
                files["quantized_file"] = f"{graph_of(task)}{QUANTIZED}.onnx"
            what = {"kind": task.kind, "labels": task.labels, "range": task.range, "pair_encoding": task.pair_encoding}
            if task.own_thresholds or task.traits.is_set:
                what["thresholds"] = task.thresholds
            tasks[name] = {**files, "output": name, **what, "max_length": lengths[name]}
        return {"max_length": max(lengths.values()), "tasks": tasks}

    def _scores(self, predictor: Predictor, folder: Path) -> dict[str, dict[str, Any]]:
        """Each task's dev score by both variants."""
        found = {}
        for variant in ("", QUANTIZED):
            graphs = OnnxModel(predictor.model.config, folder, variant)
            found[variant], _ = score(Predictor(graphs, predictor.tokenizer), self.rows, progress=True)
        scores = {}
        for name in self.rows:
            metric = self.tasks[name].metric
            full, quantized = (found[variant][f"{name}_{metric}"] for variant in ("", QUANTIZED))
            scores[name] = {"metric": metric, "full": full, "quantized": quantized, "difference": quantized - full}
        return scores


def graph_of(task: Task) -> str:
    """Returns the name of the graph that answers a task."""
    return "model_bi" if task.pair_encoding == "bi" else "model"


class Answers(nn.Module):
    """The answers of tasks with the same input format, as a graph returns them: one after the other, without names.

    Tasks with the same layers share a pass. Outputs are divided by the task's temperature.
    """

    def __init__(self, model: MinBertForMultiTask, tasks: Sequence[str]):
        super().__init__()
        self.model, self.tasks = model, tasks
        self.temperatures = {name: model.config.get_task(name)["temperature"] for name in tasks}
        self.passes: dict[tuple[int, ...], list[str]] = {}
        for name in tasks:
            self.passes.setdefault(tuple(map(id, model.encoder_path(name))), []).append(name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, ...]:
        found: dict[str, Tensor] = {}
        for names in self.passes.values():
            found |= self.model.logits_of(names, input_ids, attention_mask, token_type_ids)
        return tuple(self._tempered(name, found[name]) for name in self.tasks)

    def _tempered(self, name: str, logits: Tensor) -> Tensor:
        temperature = self.temperatures[name]
        return logits if temperature == 1 else logits / temperature


def write_graph(model: MinBertForMultiTask, tasks: Sequence[str], path: Path) -> None:
    """Writes the graph for these tasks.

    Its inputs are `INPUTS` [B, T], or [B, 2, T], and it has an output [B, C] for each task.

    Raises:
        MinBertError: torch cannot export the model, or wrote a graph for inputs of a fixed length.
    """
    inputs = sample(model.config, 2, min(9, model.config.max_position_embeddings), _sentences(model, tasks))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=model.config.max_position_embeddings)
    last = inputs["input_ids"].dim() - 1
    with torch.no_grad(), _quiet(), _one_line(model.config.family):
        program = torch.onnx.export(
            Answers(model, tasks).eval(),
            kwargs=inputs,
            input_names=INPUTS,
            dynamic_shapes={name: {0: batch, last: length} for name in INPUTS},
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # with `dynamo` there is one
    shape = program.model.graph.inputs[0].shape
    if shape is not None and isinstance(shape[last], int):
        recurrent = [name for name in tasks if model.config.get_task(name)["pooling"] == "bigru"]
        raise MinBertError(
            f"torch {torch.__version__} writes a graph that takes inputs of one length only, for the tasks "
            f"{', '.join(recurrent or tasks)}. Torch 2.11 does so for `pooling: bigru`. Use torch 2.13 or newer."
        )
    _name_outputs(program.model.graph, tasks)
    for graph in (program.model.graph, *program.model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.clear()  # where in which file of this machine each came from
    program.save(path)


@contextmanager
def _one_line(family: str) -> Generator[None]:
    """Returns the line with the reason from torch's error, which has pages of text and the graph so far."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        why = str(error.__cause__ or error).strip().splitlines()[0].rstrip(".:")
        raise MinBertError(
            f"torch {torch.__version__} cannot export a {family} to ONNX: {why}. Export it to `encoder` or "
            "`sentence-transformers`."
        ) from error


def _name_outputs(graph: Any, tasks: Sequence[str]) -> None:
    """Names only the graph's outputs after the tasks. The exporter itself names inner values such as `cat`."""
    inner = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in inner:
        if value.name in tasks:
            value.name = f"{value.name}.inner"
    for value, name in zip(graph.outputs, tasks, strict=True):
        value.name = name


def compare(model: MinBertForMultiTask, tasks: Sequence[str], path: Path) -> float:
    """Returns the largest difference between the answers of graph and model, on padded batches of several shapes.

    Raises:
        MinBertError: it is above `TOLERANCE`.
    """
    session, answers = open_graph(path), Answers(model, tasks)
    longest, worst = model.config.max_position_embeddings, 0.0
    for rows, length in ((1, 1), (1, longest), (3, min(7, longest)), (5, min(33, longest))):
        inputs = sample(model.config, rows, length, _sentences(model, tasks))
        with torch.inference_mode():
            ours = answers(**inputs)
        theirs = session.run(list(tasks), {name: value.numpy() for name, value in inputs.items()})
        for name, mine, found in zip(tasks, ours, theirs, strict=True):
            difference = largest(mine, torch.from_numpy(found))
            check_difference(f"output {name} of {path.name}", difference, TOLERANCE)
            worst = max(worst, difference)
    return worst


def quantize_graph(source: Path, target: Path) -> None:
    """Writes a graph with int8 weight matrices. Activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    external = source.with_name(f"{source.name}.data").exists()  # above 2 GB
    with _quiet():
        quantize_dynamic(source, target, weight_type=QuantType.QInt8, use_external_data_format=external)


def open_graph(path: Path) -> Any:
    """Opens a graph as an `onnxruntime.InferenceSession` on the CPU."""
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


class OnnxModel(nn.Module):
    """An export with the interface of the original model, for `Predictor`.

    Args:
        variant: the suffix of the names of its graphs.
    """

    def __init__(self, config: MinBertConfig, folder: Path, variant: str = ""):
        super().__init__()
        self.config, self.device = deepcopy(config), torch.device("cpu")
        for task in self.config.tasks or ():
            task["temperature"] = TASK_DEFAULTS["temperature"]  # the graph's outputs are divided by it already
        graphs = {name: graph_of(Task.from_config(config.get_task(name))) for name in config.task_names}
        sessions = {graph: open_graph(folder / f"{graph}{variant}.onnx") for graph in set(graphs.values())}
        self.sessions = {name: sessions[graph] for name, graph in graphs.items()}

    def encoder_path(self, task: str) -> list[Any]:
        return [self.sessions[task]]

    def logits_of(
        self,
        tasks: Sequence[str],
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        packing: dict[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """Does the same as `MinBertForMultiTask.logits_of`.

        `packing` repeats the information of the mask and is not used.
        """
        given = dict(zip(INPUTS, (input_ids, attention_mask, token_type_ids), strict=True))
        found = self.sessions[tasks[0]].run(list(tasks), {name: value.numpy() for name, value in given.items()})
        return dict(zip(tasks, map(torch.from_numpy, found), strict=True))


def _sentences(model: MinBertForMultiTask, tasks: Sequence[str]) -> int:
    return 2 if model.config.get_task(tasks[0])["pair_encoding"] == "bi" else 1


def _dev_rows(name: str, tasks: Mapping[str, Task], data_dir: str | None) -> dict[str, Any]:
    """Returns the dev rows of the tasks whose data is known.

    Raises:
        MinBertError: rows of `data_dir` cannot be read. If rows of the recipe cannot be read, they are left out with a
            message.
    """
    data, found = RunData.of(name, data_dir), {}
    if data_dir is None and data.recipe is None:
        return found
    known = [one for one in data.scored(tasks) if data.knows(one)]
    if not known:
        raise MinBertError(
            f"None of the model's tasks ({', '.join(tasks)}) is the package's, and its folder has no recipe.yaml that "
            f"says where their data lies. Leave --data-dir out."
        )
    for one in known:
        try:
            found[one] = data.rows(tasks[one], "dev")
        except MinBertError as error:
            if data_dir is not None:
                raise
            logger.warning("What int8 costs is not measured for %s: %s", one, error)
    return found


@contextmanager
def _quiet() -> Generator[None]:
    """Hides messages of the libraries for their developers. The graph is checked afterwards."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # at the root: torch traces its own work in detail where a handler listens
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # where torch prints what it had traced
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# ---- The folder's README ----------------------------------------------------------------------------------------

README = """# ONNX export of a MinBERT model

{graphs}

Inputs are `input_ids`, `attention_mask` and `token_type_ids`, int64, cut to {max_length} tokens. Each task has an
output of its name, float32 `[batch, outputs]`; its labels or range are in `tasks.json`. Of `classes` the largest
output is the answer, and the softmax gives probabilities; a `binary` task has one output z, and 1 / (1 + exp(-z)) is
the probability of its second label, which is the answer above 1/2, or above the task's `thresholds`; of an `ordinal`
one output k is the logit of a label after k where it is none before; of `labels` each output is the logit of a label;
a `score` is the answer itself. A task with `tags` has `[batch, length, outputs]`, and the answer for a word is that at
its first token.

In this folder, with `pip install onnxruntime transformers` (no torch is needed):
{code}{scores}"""

ONE = "`model.onnx` reads one input per example, `[batch, length]`: a text, or a pair joined into one. It answers {}."
TWO = "`model_bi.onnx` reads the two sentences of a pair apart, `[batch, 2, length]`. It answers {}."

CODE = """
```python
import json
import onnxruntime
from transformers import AutoTokenizer

task = json.load(open("tasks.json"))["tasks"]["{task}"]
tokenizer = AutoTokenizer.from_pretrained(".")
texts = {texts}
inputs = tokenizer(*texts, padding=True, truncation=True, max_length=task["max_length"], return_tensors="np")
{apart}session = onnxruntime.InferenceSession(task["file"])
(output,) = session.run([task["output"]], dict(inputs))
{ready}print({answer})
```
"""
#: Two examples, by how they are read. Apart, all first sentences stand before all second ones.
TEXTS = {
    "single": '[["A tender film, and very funny too.", "Two hours I will not get back."]]',
    "cross": '[["A cat sleeps.", "It rained."], ["A cat is asleep.", "He can swim."]]',
    "bi": '[["A cat sleeps.", "It rained.", "A cat is asleep.", "He can swim."]]',
}
APART = "inputs = {name: ids.reshape(2, -1, ids.shape[1]).swapaxes(0, 1) for name, ids in inputs.items()}\n"
ANSWERS = {
    "classes": '[task["labels"][place] for place in output.argmax(axis=1)]',
    "ordinal": '[task["labels"][place] for place in probabilities.argmax(axis=1)]',
    "labels": '[[name for name, yes in zip(task["labels"], row) if yes] for row in said]',
    "binary": '[task["labels"][int(z > 0)] for z in output[:, 0]]',
    "score": "output[:, 0]",
    "tags": '[[task["labels"][place] for place in tokens] for tokens in output.argmax(axis=-1)]',
}


#: Lines before that.
READY = {
    "ordinal": """import numpy as np

above = (1 / (1 + np.exp(-output))).cumprod(axis=1)  # of each label but the last, the probability of a later one
probabilities = -np.diff(above, axis=1, prepend=1, append=0)
""",
    "labels": """import numpy as np

said = 1 / (1 + np.exp(-output)) > task["thresholds"]
""",
}


def _answer(task: Mapping[str, Any]) -> str:
    """The code that reads a task's output."""
    if task["kind"] != "binary" or "thresholds" not in task:
        return ANSWERS[task["kind"]]
    cut = float(logit(task["thresholds"]))
    return ANSWERS[task["kind"]].replace("z > 0", f"z > {cut:.6f}")  # the logit of the threshold


def _readme(described: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]] | None, quantized: bool) -> str:
    tasks, graphs, code = described["tasks"], [], []
    for file, text in (("model.onnx", ONE), ("model_bi.onnx", TWO)):
        names = [name for name, task in tasks.items() if task["file"] == file]
        if not names:
            continue
        graphs.append(text.format(", ".join(names)))
        task = tasks[names[0]]
        code.append(
            CODE.format(
                task=names[0],
                texts=TEXTS[task["pair_encoding"]],
                apart=APART if task["pair_encoding"] == "bi" else "",
                ready=READY.get(task["kind"], ""),
                answer=_answer(task),
            )
        )
    if quantized:
        graphs.append(f"Files with `{QUANTIZED}` have int8 weights: smaller and, on many processors, faster.")
    table = "" if scores is None else "\nOn the dev rows:\n\n" + score_table(scores)
    return README.format(
        graphs="\n\n".join(graphs), max_length=described["max_length"], code="".join(code), scores=table
    )


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the scores of both variants, in Markdown."""
    lines = ["| task | metric | full | quantized | difference |", "|---|---|---|---|---|"]
    for name, of in scores.items():
        numbers = f"{of['full']:.4f} | {of['quantized']:.4f} | {of['difference']:+.4f}"
        lines.append(f"| {name} | {of['metric']} | {numbers} |")
    return "\n".join(lines) + "\n"
