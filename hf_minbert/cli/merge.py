"""`minbert average` and `minbert ensemble`"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MinBertError, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..modeling_minbert import MinBertForMultiTask

Models = Annotated[list[str], typer.Argument(help="Folders of finished runs, or Hub ids.", show_default=False)]
OutputDir = Annotated[Path, typer.Option(help="Where the new model goes.", show_default=False)]
DataDir = Annotated[
    str | None,
    typer.Option(help="The tasks' files, or sample: scores members and result on dev rows.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what stands in the output folder.")]


class Method(str, Enum):
    """How models are averaged."""

    uniform = "uniform"
    weighted = "weighted"
    greedy = "greedy"


def average(
    models: Models,
    output_dir: OutputDir,
    method: Annotated[
        Method, typer.Option(help="greedy keeps those models that do not make the average worse on --data-dir.")
    ] = Method.uniform,
    weights: Annotated[
        str | None, typer.Option(help="With weighted: a number per model, such as 2,1,1.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of models that were trained from one start (a "model soup"); heads per task."""
    if (method is Method.weighted) != (weights is not None):
        raise MinBertError("--method weighted and --weights 2,1,1 go together: give both or neither.")
    if method is Method.greedy and data_dir is None:
        raise MinBertError("--method greedy scores models: give --data-dir too.")
    shares = None if weights is None else _numbers(weights)
    from .. import merging

    members = Members(models, output_dir, data_dir, overwrite)
    record: dict[str, Any] = {"method": method.value, "models": models}
    if method is Method.greedy:
        merged, kept = merging.greedy_soup(members.loaded, lambda model: members.scores(model)["overall"])
        record["kept"] = [models[place] for place in kept]
        typer.echo(f"Kept {len(kept)} of {len(models)}: {', '.join(record['kept'])}.")
    else:
        merged = merging.average(members.loaded, shares)
        record["weights"] = shares
    members.write(merged, record)


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
    """Serve single-task models as one multitask model, in which each task keeps its own encoder."""
    places = {}
    for choice in take or ():
        task, _, model = choice.partition("=")
        if model not in models:
            raise MinBertError(f"--take must be TASK=MODEL, with one of the models given. Found {choice!r}.")
        places[task] = models.index(model)
    from .. import merging

    members = Members(models, output_dir, data_dir, overwrite)
    members.write(merging.ensemble(members.loaded, places), {"method": "ensemble", "models": models, "take": take})


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise MinBertError(f"--weights must be numbers with commas, such as 2,1,1. Found {text!r}.") from None


@dataclass
class Members:
    """The models that are merged, as the command names them, and what comes of it."""

    names: Sequence[str]
    output_dir: Path
    data_dir: str | None
    overwrite: bool

    def __post_init__(self):
        from ..data.files import load_split
        from ..loading import load_config, tasks_of
        from ..tasks import TASKS

        if len(self.names) < 2:
            raise MinBertError("Give two models or more.")
        if self.output_dir.exists() and (not self.output_dir.is_dir() or any(self.output_dir.iterdir())):
            if not self.overwrite or not self.output_dir.is_dir():
                raise MinBertError(f"{self.output_dir} is not empty. Choose another --output-dir, or add --overwrite.")
            if any(Path(name).resolve() == self.output_dir.resolve() for name in self.names):
                raise MinBertError(f"{self.output_dir} is one of the models. Choose another --output-dir.")
        tasks = {task for name in self.names for task in tasks_of(load_config(name), name)}
        if self.data_dir is not None:
            for task in sorted(tasks):
                if task not in TASKS:
                    raise MinBertError(f"--data-dir has the package's tasks only. {unknown_name('task', task, TASKS)}")
        self.loaded, self.tokenizer = self._load()
        self.rows = {
            task: load_split(TASKS[task], self.data_dir, "dev", labelled=True)
            for task in (sorted(tasks) if self.data_dir is not None else ())
        }

    def _load(self) -> tuple[list[MinBertForMultiTask], PreTrainedTokenizerBase]:
        from ..prediction import Predictor

        predictors = [Predictor.from_pretrained(name, device="cpu") for name in self.names]
        first = predictors[0].tokenizer
        for name, predictor in zip(self.names, predictors, strict=True):
            if predictor.tokenizer.get_vocab() != first.get_vocab():
                raise MinBertError(
                    f"{self.names[0]} and {name} have tokenizers with different words, so they do not go together."
                )
        return [predictor.model for predictor in predictors], first

    def scores(self, model: MinBertForMultiTask) -> Mapping[str, float]:
        """The model's dev scores: each of its tasks by its main metric, and their mean as `overall`."""
        import torch

        from ..prediction import Predictor, score

        device = "cuda" if torch.cuda.is_available() else "cpu"
        predictor = Predictor(model.to(device), self.tokenizer)
        rows = {task: self.rows[task] for task in model.config.task_names}
        metrics, _ = score(predictor, rows)
        model.to("cpu")
        main = {task: metrics[f"{task}_{predictor.task(task).metric}"] for task in rows}
        return {**main, "overall": metrics["overall"]}

    def write(self, merged: MinBertForMultiTask, record: Mapping[str, Any]) -> None:
        """Saves the result, and says what merging cost."""
        from ..io import write_json

        report = self._report(merged) if self.rows else None
        if self.output_dir.exists():
            shutil.rmtree(self.output_dir)
        merged.save_pretrained(self.output_dir)
        self.tokenizer.save_pretrained(self.output_dir)
        write_json(self.output_dir / "merge.json", record)
        if report is not None:
            write_json(self.output_dir / "metrics.json", report)
            _print_report(report, typer.echo)
        else:
            typer.echo("Give --data-dir to see what each task scores in the members and in the result.")
        typer.echo(f"The model is in {self.output_dir}.")

    def _report(self, merged: MinBertForMultiTask) -> dict[str, Any]:
        members = [self.scores(model) for model in self.loaded]
        result = self.scores(merged)
        tasks = {
            task: {
                "members": {name: of[task] for name, of in zip(self.names, members, strict=True) if task in of},
                "result": result[task],
            }
            for task in merged.config.task_names
        }
        for of in tasks.values():
            of["difference"] = of["result"] - max(of["members"].values())
        return {"eval_overall": result["overall"], "tasks": tasks}


def _print_report(report: Mapping[str, Any], say: Callable[[str], None]) -> None:
    say(f"{'task':10} {'best member':>12} {'result':>10} {'difference':>11}")
    for task, of in report["tasks"].items():
        say(f"{task:10} {max(of['members'].values()):12.4f} {of['result']:10.4f} {of['difference']:+11.4f}")
