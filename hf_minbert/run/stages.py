"""A recipe in stages: runs that follow each other. Each starts from the final weights of the one before.

A stage is an ordinary run in its own folder, `<output_dir>/stages/<number>-<name>`, so it is resumed, read and
published like any other. After the last stage, its model and results are copied to `output_dir`, whose `metrics.json`
has the metrics of all stages.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..data.files import located
from ..data.leaks import guarded_tasks, scored_rows, usually_held_out
from ..errors import DivergedError, MinBertError, explain
from ..evaluation.metrics import has_diverged
from ..io import check_writable, write_json
from ..model.inference import length_of
from ..pretrained.loading import load_config
from ..settings.dotted import Value, as_value, stage_names
from ..settings.recipe import split_recipe, write_recipe
from ..settings.run import RunSettings
from ..settings.table import names
from ..settings.tasks import get_tasks
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import checkpoints, newest_complete_checkpoint
from .folder import RUN_FILES, RunFolder

logger = logging.getLogger(__name__)

FOLDER = "stages"
TEACHERS = "teachers"  # of the whole run, beside it
#: Keys that are of the whole recipe, and no stage's.
OF_ALL = (*names(scope="start"), "stages")
#: Fields of a task that say where its dev and test rows lie.
PLACES = ("files", "dataset", "dataset_config", "dataset_revision", "splits", "columns")

#: Carries out one run: from its recipe, further callbacks and whether it is behind another to what its `metrics.json`
#: holds.
Run = Callable[[Mapping[str, Value], Sequence[TrainerCallback], bool], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One of a recipe's stages.

    Args:
        name: its name, or its number.
        values: the recipe of its run, without `resume_from_checkpoint`.
        settings, given, args: these values, typed.
    """

    name: str
    values: dict[str, Value]
    settings: RunSettings
    given: dict[str, Any]
    args: MultiTaskTrainingArguments

    @property
    def folder(self) -> Path:
        return Path(self.settings.output_dir)

    def metrics(self) -> dict[str, Any] | None:
        """Its metrics; `None` if it has not finished."""
        path = self.folder / "metrics.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def goes_on(self, is_last: bool) -> bool:
        """Whether this finished stage has more steps in the current recipe, because the last stage may be made longer.

        Raises:
            MinBertError: the recipe has other values for it.
        """
        run = RunFolder(self.settings, self.given, self.args)
        try:
            run.check_same_run(finished=not is_last)
        except MinBertError as error:
            later = "" if is_last else " To change a later stage only, give stages.<name>.<key>."
            raise MinBertError(f"Stage {self.name!r} has finished. {error}{later}") from error
        return bool(run.changed)


def plan(values: Mapping[str, Value]) -> list[Stage]:
    """Returns the stages of a recipe from `read_recipe`; none if it has no `stages`.

    Raises:
        MinBertError: a stage is not a mapping, names a key that stages cannot have, or its recipe is wrong.
    """
    if "stages" not in values or values["stages"].value is None:  # so says the recipe of a run without
        return []
    given = values["stages"].value
    if not isinstance(given, list) or not given or not all(isinstance(stage, dict) and stage for stage in given):
        raise MinBertError(
            "`stages` must be a list of mappings, one per stage, like `- {name: heads, freeze: encoder}`. "
            f"Found {given!r}."
        )
    common = {key: value for key, value in values.items() if key not in OF_ALL}
    root, before, stages = Path(_text(values, "output_dir")), None, []
    chain: list[Stage] = []  # those that follow each other from one checkpoint
    for number, (name, stage) in enumerate(zip(stage_names(given), given, strict=True), 1):
        where = f"Stage {number} ({name})"
        _check_stage(where, name, stage, [earlier.name for earlier in stages])
        own = {key: as_value(value) for key, value in stage.items() if key != "name"}
        if before is None or "model_name_or_path" in own:
            chain = []
        else:
            own["model_name_or_path"] = as_value(str(before))
            own |= _said_again(chain, {**common, **own})
        before = root / FOLDER / f"{number}-{name}"
        try:
            stages.append(_typed(name, {**common, **own, "output_dir": as_value(str(before))}))
        except MinBertError as error:
            raise MinBertError(f"{where}: {error}") from error
        chain.append(stages[-1])
    return stages


def _said_again(chain: Sequence[Stage], values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the first checkpoint's dropout and length, for a stage that does not set them after stages that did.

    A stage's settings apply to that stage only, but its saved model would pass on its dropout and length.
    """
    said = {name for stage in chain for name in names(travels=True) if getattr(stage.settings, name) is not None}
    missing = [name for name in said if name not in values or values[name].value is None]
    if not missing:
        return {}
    first = chain[0].settings
    config = load_config(first.model_name_or_path, first.model_revision)
    return {name: as_value(length_of(config) if name == "max_length" else getattr(config, name)) for name in missing}


def with_later_held_out(stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages, each with the tasks of later stages in its `held_out`, unless they are held out anyway.

    A later stage must not be evaluated on rows that an earlier stage was trained on.
    """
    found = []
    for place, stage in enumerate(stages):
        held_out = held_out_with(stage.settings, [later.settings for later in stages[place + 1 :]])
        values = stage.values if held_out is None else {**stage.values, "held_out": Value(held_out, None)}
        found.append(_typed(stage.name, values))
    return found


def held_out_with(settings: RunSettings, later: Sequence[RunSettings]) -> dict[str, Any] | None:
    """Returns the `held_out` that a run needs because of later runs; `None` if it need not change."""
    known = guarded_tasks(get_tasks(settings.tasks), settings.held_out, settings.data_dir)
    there = [scored_rows(task) for task in known]
    more: dict[str, Any] = {}
    for other in later:
        for name, entry in _entries(other.tasks).items():
            task = get_tasks({name: entry})[0]
            if other.data_dir != settings.data_dir:
                task = located(task, other.data_dir)
                entry = {**(entry or {}), **{key: value for key in PLACES if (value := getattr(task, key))}}
            if scored_rows(task) not in there:
                more[name] = entry
    given = usually_held_out(settings.data_dir) if settings.held_out is None else settings.held_out
    return {**_entries(given), **more} if more else None


def _entries(tasks: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Tasks as a recipe names them, always as a mapping."""
    return dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)


def _check_stage(where: str, name: str, stage: Mapping[str, Any], earlier: Sequence[str]) -> None:
    if not re.fullmatch(r"[\w-]+", name):
        raise MinBertError(
            f"{where}: `name` is also the name of a folder, so it must have letters, digits, `-` and "
            f"`_` only. Found {name!r}."
        )
    if name in earlier:
        raise MinBertError(f"{where}: another stage has that name already. Give each a name of its own.")
    for key in (*OF_ALL, "plugins"):
        if key in stage:
            raise MinBertError(f"{where}: `{key}` is for the whole recipe. Write it outside `stages`.")


def _typed(name: str, values: dict[str, Value]) -> Stage:
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    with explain("Reading the training arguments", "Correct the recipe."):
        return Stage(name, values, settings, given, MultiTaskTrainingArguments(**given))


def _text(values: Mapping[str, Value], key: str) -> str:
    text = values[key].text if key in values else None
    if not text:
        raise MinBertError(f"`{key}` is missing. Add a line `{key}: ...` to the recipe, or {key}=... after it.")
    return text


def carry_out(values: Mapping[str, Value], stages: Sequence[Stage], run: Run) -> dict[str, Any]:
    """Carries out the stages that have not finished, one after the other.

    Returns:
        the contents of the final `metrics.json`; on processes other than the first, an empty dict.

    Raises:
        MinBertError: contents of the folder would be lost, or the recipe has other values for a finished stage.
    """
    root = stages[0].folder.parents[1]
    resumes, overwrites = (
        bool(key in values and values[key].value) for key in ("resume_from_checkpoint", "overwrite")
    )
    _check_folder(root, values, stages, resumes, overwrites)
    # Decided before anything runs, so that all processes decide alike. Behind a stage that has not finished none has:
    # what may stand there is of an older run.
    finished: dict[str, dict[str, Any]] = {}
    for stage in stages if resumes else ():
        metrics = stage.metrics()
        if metrics is None:
            break
        if has_diverged(metrics):
            raise DivergedError(
                f"Stage {stage.name!r} has ended, and its model in {stage.folder} has diverged, so no stage can "
                "continue from it. Start again with a lower `learning_rate` and overwrite=true."
            )
        finished[stage.name] = metrics
    goes_on = [stage.name for stage in stages[: len(finished)] if stage.goes_on(stage is stages[-1])]
    for number, stage in enumerate(stages, 1):
        where = f"Stage {number} of {len(stages)}, {stage.name}"
        if stage.name in finished and stage.name not in goes_on:
            logger.info("%s: finished earlier, in %s.", where, stage.folder)
            continue
        logger.info("%s: in %s.", where, stage.folder)
        forget_accelerator()
        again = stage.name in goes_on or (
            resumes and newest_complete_checkpoint(stage.folder, stage.args.world_size) is not None
        )
        how = "resume_from_checkpoint" if again else "overwrite"
        finished[stage.name] = run({**stage.values, how: as_value(True)}, [_Begun(root, stages[:number])], number > 1)
    if not stages[0].args.should_save:
        return {}
    return _collect(root, values, stages, finished)


def _check_folder(
    root: Path, values: Mapping[str, Value], stages: Sequence[Stage], resumes: bool, overwrites: bool
) -> None:
    if resumes and values["resume_from_checkpoint"].value is not True:
        raise MinBertError(
            "With `stages`, `resume_from_checkpoint` must be true: the run continues in the stage where it stopped. "
            "Found "
            f"{values['resume_from_checkpoint'].value!r}."
        )
    if resumes and overwrites:
        raise MinBertError("`overwrite` and `resume_from_checkpoint` cannot be used together. Leave one out.")
    if root.exists() and not root.is_dir():
        raise MinBertError(f"`output_dir` {root} is a file. Give the path of a folder.")
    check_writable(root / "metrics.json")
    holds = [name for name in (FOLDER, *RUN_FILES) if (root / name).exists()]
    if resumes and not (root / FOLDER).exists() and not (root / TEACHERS).exists():
        raise MinBertError(
            f"There is no stage in {root} to resume. Leave `resume_from_checkpoint` out to start again."
        )
    for path in sorted(root.glob(f"{FOLDER}/*")) if resumes else ():
        if path not in [stage.folder for stage in stages]:
            raise MinBertError(
                f"{root} has a stage {path.name}, and the recipe has none of that number and name. Resume with the "
                "recipe that it was started with, or start again with overwrite=true."
            )
    if holds and not resumes and not overwrites:
        raise MinBertError(
            f"`output_dir` {root} holds a run already. Continue it with resume_from_checkpoint=true, delete it with "
            "overwrite=true, or give another output_dir."
        )


class _Begun(TrainerCallback):
    """At a stage's first step, deletes the later stages and the final results of an older run.

    This happens before the stage's own folder is cleared, so that no later stage outlives the stage that it began
    with. Before the first step, errors are usually mistakes in the recipe, and the folder is not changed.
    """

    def __init__(self, root: Path, kept: Sequence[Stage]):
        self.root, self.kept, self.begun = root, [stage.folder for stage in kept], False

    def on_step_begin(self, args, state, control, **kwargs):
        if self.begun or not state.is_world_process_zero:
            return
        self.begun = True
        older = [path for path in self.root.glob(f"{FOLDER}/*") if path not in self.kept]
        for folder in (self.root, *older):  # first what says that a run finished: this may be cut off
            (folder / "metrics.json").unlink(missing_ok=True)
        for path in (*older, *(self.root / name for name in RUN_FILES)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def forget_accelerator() -> None:
    """Resets the state of accelerate, because it has one mixed precision and each stage may have its own."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def _collect(
    root: Path, values: Mapping[str, Value], stages: Sequence[Stage], metrics: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Makes of `output_dir` a run's folder: the last stage's, with the whole recipe and all stages' metrics."""
    last = stages[-1]
    for path in {*last.folder.iterdir()} - {*checkpoints(last.folder)}:
        if path.name in ("metrics.json", "recipe.yaml"):
            continue
        if path.is_dir():
            shutil.copytree(path, root / path.name, dirs_exist_ok=True, copy_function=linked)
        else:
            linked(path, root / path.name)
    settings, given = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    kept = {key: given[key] for key in given if key not in ("resume_from_checkpoint", "hub_token")}
    settings.overwrite = False  # the recipe of a run never deletes a run
    write_recipe(root / "recipe.yaml", settings, kept)
    whole = {**metrics[last.name], "stages": {stage.name: metrics[stage.name] for stage in stages}}
    write_json(root / "metrics.json", whole)
    return whole


def linked(source: Path | str, target: Path | str) -> None:
    """Copies a file. Weights are hard-linked if the disk allows it, so that they need no further space."""
    Path(target).unlink(missing_ok=True)
    if Path(source).suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:  # another disk, or one without links
            pass
    shutil.copy2(source, target)
