"""`minbert average`, `minbert ensemble` and `minbert merge`"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import typer

from ..errors import MinBertError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from ..model.modeling_minbert import MinBertForMultiTask
    from ..settings.tasks import Task

Models = Annotated[list[str], typer.Argument(help="Folders of finished runs, or Hub ids.", show_default=False)]
OutputDir = Annotated[Path, typer.Option(help="The folder of the new model.", show_default=False)]
DataDir = Annotated[
    str | None,
    typer.Option(
        help="Score the models and the result on these dev rows: a folder with the tasks' files, sample or hub.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the result of an earlier merge.")]


class Method(StrEnum):
    """How the weights of several models are combined."""

    uniform = "uniform"
    weighted = "weighted"
    greedy = "greedy"
    task_arithmetic = "task_arithmetic"
    ties = "ties"
    dare = "dare"


def average(
    models: Models,
    output_dir: OutputDir,
    method: Annotated[
        Method,
        typer.Option(
            help="greedy keeps the models that do not make the average worse on --data-dir. The last three add to the "
            "base what each model learned on its own tasks."
        ),
    ] = Method.uniform,
    weights: Annotated[
        str | None, typer.Option(help="With weighted: a number per model, such as 2,1,1.", show_default=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="With the last three: the checkpoint that the models were trained from. Default: the one in their "
            "recipes.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="With the last three: how much of the merged change is added. Default: 0.4; for ties 1.",
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            help="With ties and dare: the share of each model's change that is kept. Default: 0.2; for dare 0.5.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With dare: the random seed. Default: 0.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Average models fine-tuned from one checkpoint (a "model soup"), or add what each of them learned."""
    if (method is Method.weighted) != (weights is not None):
        raise MinBertError("--method weighted and --weights 2,1,1 go together: give both or neither.")
    if method is Method.greedy and data_dir is None:
        raise MinBertError("--method greedy scores models: give --data-dir too.")
    shares = None if weights is None else _numbers(weights)
    from ..pretrained import merging

    numbers = _vector_numbers(method, base=base, scale=scale, density=density, seed=seed)
    check_output(output_dir, models, overwrite)
    members = Members(models, data_dir)
    merging.averaged_tasks(members.configs, shares)
    record: dict[str, Any] = {"method": method.value, "models": models}
    if numbers is not None:
        merged, made_by = _from_base(members, base, numbers)
        record |= made_by
    elif method is Method.greedy:
        merging.check_same_tasks(members.configs)
        merged, kept = merging.greedy_soup(members.load(), members.rank)
        record["kept"] = [models[place] for place in kept]
        typer.echo(f"Kept {len(kept)} of {len(models)}: {', '.join(record['kept'])}.")
    else:
        merged = merging.average(members.load(), shares)
        record["weights"] = shares
    members.write(merged, output_dir, record)


def _vector_numbers(method: Method, base: str | None, **numbers: Any) -> dict[str, Any] | None:
    """Returns the options of `add_task_vectors`; `None` for a method that averages, which has no such options."""
    from ..pretrained import merging

    if method in merging.VECTOR_METHODS:
        return merging.vector_settings(method.value, **numbers)
    for name, value in {"base": base, **numbers}.items():
        if value is not None:
            raise MinBertError(
                f"--{name} is for --method task_arithmetic, ties or dare. Give one of them, or leave --{name} out."
            )
    return None


def _from_base(
    members: Members, base: str | None, numbers: Mapping[str, Any]
) -> tuple[MinBertForMultiTask, dict[str, Any]]:
    """Returns the base plus what the members learned, and a record of how it was made."""
    from ..pretrained import merging
    from ..pretrained.data import common_base

    name, revision = common_base(members.names) if base is None else (base, None)
    start = merging.load_base(name, members.configs, revision)
    merged = merging.add_task_vectors(members.load(), start, **numbers)
    return merged, {"base": name, "base_revision": revision, **numbers}


def ensemble(
    models: Models,
    output_dir: OutputDir,
    take: Annotated[
        list[str] | None,
        typer.Option(help="TASK=MODEL, where several models have a task; may be repeated.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Combine single-task models into one multitask model in which each task keeps its own encoder."""
    places = {}
    for choice in take or ():
        task, _, model = choice.partition("=")
        if model not in models:
            raise MinBertError(f"--take must be TASK=MODEL, with one of the models given. Found {choice!r}.")
        if places.setdefault(task, models.index(model)) != models.index(model):
            raise MinBertError(f"--take names two models for {task!r}. Give one.")
    from ..pretrained import merging

    check_output(output_dir, models, overwrite)
    members = Members(models, data_dir)
    owners = merging.task_owners(members.configs, places, models)
    merged = merging.ensemble(members.load(), places)
    record = {"method": "ensemble", "models": models, "tasks": {name: models[at] for name, at in owners.items()}}
    members.write(merged, output_dir, record)


def merge(
    adapter: Annotated[
        str, typer.Argument(help="The folder of a finished run with peft, or its Hub id.", show_default=False)
    ],
    output_dir: OutputDir,
    overwrite: Overwrite = False,
) -> None:
    """Merge an adapter into its base model."""
    from ..io import write_json
    from ..pretrained.data import MERGED, RunData, merged_data
    from ..pretrained.loading import is_adapter, load_config
    from ..pretrained.prediction import Predictor

    check_output(output_dir, [adapter], overwrite)
    load_config(adapter)
    if not is_adapter(adapter):
        raise MinBertError(f"{adapter} is not an adapter: it is a whole model already.")
    merged = Predictor.from_pretrained(adapter, device="cpu")
    data = merged_data([RunData.of(adapter)], merged.tasks)
    write_json(output_dir / MERGED, {"method": "merge", "models": [adapter], "data": data})  # as in `Members.write`
    merged.model.save_pretrained(output_dir)
    merged.tokenizer.save_pretrained(output_dir)
    typer.echo(f"The model is in {output_dir}.")


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise MinBertError(f"--weights must be numbers with commas, such as 2,1,1. Found {text!r}.") from None


def check_output(folder: Path, models: Sequence[str], overwrite: bool) -> None:
    """Refuses a model that is named twice, and a folder that cannot be written or has contents that would be lost."""
    from ..io import check_writable
    from ..pretrained.data import MERGED

    places = [Path(name).resolve() if Path(name).exists() else name for name in models]
    for name, place in zip(models, places, strict=True):
        if places.count(place) > 1:
            raise MinBertError(
                f"{name} is named twice. Name each model once; --method weighted gives one more weight."
            )
    check_writable(folder / MERGED)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if any(Path(name).resolve() == folder.resolve() for name in models):
        raise MinBertError(f"{folder} is one of the models. Choose another --output-dir.")
    if not overwrite:
        raise MinBertError(f"{folder} is not empty. Choose another --output-dir, or add --overwrite.")
    if not (folder / MERGED).is_file():
        raise MinBertError(
            f"--overwrite replaces only the result of an earlier merge, and {folder} has no {MERGED}. Choose "
            f"another --output-dir."
        )


class Members:
    """The models to be merged: their configs, tokenizers and dev rows, and the result.

    Configs and tokenizers are compared first, so that models that do not fit are refused at once. Rows and weights are
    loaded last, by `load`.

    Args:
        names: folders or Hub ids.
        data_dir: the folder of the rows to evaluate on; `None` evaluates nothing.

    Raises:
        MinBertError: there are fewer than two models, one is not a model with tasks, or their tokenizers differ.
    """

    def __init__(self, names: Sequence[str], data_dir: str | None):
        from ..pretrained.data import RunData
        from ..pretrained.loading import load_config, load_tokenizer, tasks_of

        if len(names) < 2:
            raise MinBertError("Give two models or more.")
        self.names, self.data_dir = names, data_dir
        self.configs = [load_config(name) for name in names]
        self._tasks = [tasks_of(config, name) for config, name in zip(self.configs, names, strict=True)]
        tokenizers = [load_tokenizer(name, config) for config, name in zip(self.configs, names, strict=True)]
        for name, tokenizer in zip(names[1:], tokenizers[1:], strict=True):
            _check_same_words(names[0], tokenizers[0], name, tokenizer)
        self.tokenizer = tokenizers[0]
        self._data = [RunData.of(name, data_dir) for name in names]
        self._read: dict[Any, datasets.Dataset] = {}
        self._scored: MutableMapping[MinBertForMultiTask, dict[str, float]] = WeakKeyDictionary()

    def load(self) -> list[MinBertForMultiTask]:
        """Loads the models on the CPU, because together they may not fit on a GPU.

        Raises:
            MinBertError: the rows of a task or the weights of a model cannot be read.
        """
        from ..pretrained.prediction import Predictor

        if self.data_dir is not None:
            for task in (task for tasks in self._tasks for task in tasks.values()):
                self._rows(task)
        self.loaded = [Predictor.from_pretrained(name, device="cpu").model for name in self.names]
        return self.loaded

    def _rows(self, task: Task) -> datasets.Dataset:
        """Returns the dev rows of the first member's recipe, with the label ids of the model's own task."""
        key = (task.name, task.text_columns, task.label_column, task.labels, task.range)
        if key not in self._read:
            data = next((data for data in self._data if task.name in data.tasks), self._data[0])
            self._read[key] = data.rows(task, "dev")
        return self._read[key]

    def scores(self, model: MinBertForMultiTask) -> dict[str, float]:
        """Returns the model's metrics on the dev rows of its tasks; see `hf_minbert.pretrained.prediction.score`."""
        import torch

        from ..pretrained.prediction import Predictor, score

        if model not in self._scored:
            predictor = Predictor(model.to("cuda" if torch.cuda.is_available() else "cpu"), self.tokenizer)
            rows = {name: self._rows(task) for name, task in predictor.tasks.items()}
            self._scored[model], _ = score(predictor, rows, progress=True)
            model.to("cpu")
        return self._scored[model]

    def rank(self, model: MinBertForMultiTask) -> float:
        """Returns a sort key: higher is better, and a diverged model ranks below all others."""
        from ..evaluation.metrics import has_diverged

        scores = self.scores(model)
        return -math.inf if has_diverged(scores) else scores["overall"]

    def write(self, merged: MinBertForMultiTask, folder: Path, record: Mapping[str, Any]) -> None:
        """Saves the result, and prints how much the merge changed the scores."""
        from ..io import write_json
        from ..model.inference import length_of
        from ..pretrained.data import MERGED, merged_data

        self.tokenizer.model_max_length = length_of(merged.config)
        if len({length_of(config, task) for config in self.configs for task in config.task_names}) > 1:
            lengths = ", ".join(f"{task} {length_of(merged.config, task)}" for task in merged.config.task_names)
            typer.echo(
                f"The models were trained for inputs of different lengths. The result cuts inputs to these numbers "
                f"of tokens: {lengths}."
            )
        scores = None if self.data_dir is None else self._report(merged)
        data = merged_data(self._data, merged.config.task_names)
        write_json(
            folder / MERGED, {**record, "data": data}
        )  # first: if this is cut off, --overwrite is allowed to replace it
        (folder / "metrics.json").unlink(missing_ok=True)
        merged.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if scores is None:
            typer.echo("Give --data-dir to see what each task scores in the models and in the result.")
        else:
            of_result = {f"eval_{name}": value for name, value in self.scores(merged).items()}
            write_json(folder / "metrics.json", {**of_result, "tasks": scores})
            _print_scores(scores)
        typer.echo(f"The model is in {folder}.")

    def _report(self, merged: MinBertForMultiTask) -> dict[str, dict[str, Any]]:
        """Prints, for each task, the scores of the models and of the result, and the result minus the best of the
        models.
        """
        from ..pretrained.loading import tasks_of

        report = {}
        for name, task in tasks_of(merged.config, "the result").items():
            key = f"{name}_{task.metric}"
            members = {
                path: self.scores(model)[key]
                for path, model in zip(self.names, self.loaded, strict=True)
                if key in self.scores(model)
            }
            result = self.scores(merged)[key]
            difference = result - max(members.values())
            report[name] = {"metric": task.metric, "members": members, "result": result, "difference": difference}
        return report


def _check_same_words(first: str, ours: PreTrainedTokenizerBase, other: str, theirs: PreTrainedTokenizerBase) -> None:
    words = [sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) for tokenizer in (ours, theirs)]
    if words[0] == words[1]:
        return
    together = f"{first} and {other} do not go together: their tokenizers"
    remedy = "Give models that were trained from one checkpoint."
    for (word, number), (another, _) in zip(*words, strict=False):
        if word != another:
            raise MinBertError(f"{together} differ, first in word {number}, {word!r} and {another!r}. {remedy}")
    raise MinBertError(f"{together} have {len(words[0]):,} and {len(words[1]):,} words. {remedy}")


def _print_scores(report: Mapping[str, Mapping[str, Any]]) -> None:
    width = max(len("result"), *(len(name) for of in report.values() for name in of["members"]))
    for task, of in report.items():
        typer.echo(f"{task} ({of['metric']})")
        for name, value in of["members"].items():
            typer.echo(f"  {name:<{width}}  {value:7.4f}  the result: {of['result'] - value:+.4f}")
        typer.echo(f"  {'result':<{width}}  {of['result']:7.4f}")
