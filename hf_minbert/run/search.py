"""A search over a recipe's keys. Every trial is an ordinary run in its own folder.

The state is read from the trials' folders, so that the same command continues an interrupted search:

    search.json           the recipe and the space; another one is refused
    teachers/             those that the recipe trains, each once for all trials; see `hf_minbert.run.teachers`
    trials/<n>/           a run's folder, with trial.json (its values); see `hf_minbert.run.workers`
    trials.csv, .json     the trials, the best first; trials.png where matplotlib is installed
    best.yaml             the recipe of the best
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import MinBertError, did_you_mean, explain
from ..io import check_writable, write_atomically, write_json
from ..settings.dotted import Value, as_value, stage_names
from ..settings.metrics import higher_is_better
from ..settings.recipe import split_recipe, write_recipe
from ..settings.table import names
from ..settings.tasks import get_tasks
from ..training.args import MultiTaskTrainingArguments
from .inputs import model_config
from .search_methods import (
    ENDING,
    OF_THE_SEARCH,
    Range,
    Space,
    Trial,
    best_of,
    keys_of,
    method_named,
    only_lists,
    own_values,
    with_values,
)
from .stages import plan
from .teachers import SharedTeachers, teacher_runs
from .train import check_stages
from .workers import FINISHED, RECIPE, Outcome, alone_in, carry_out, failure

logger = logging.getLogger(__name__)

TRIALS = "trials"
USUAL_TRIALS = 20  # of methods that do not end by themselves


def search(
    recipe: Mapping[str, Value],
    space: Space,
    *,
    method: str,
    output_dir: str | Path,
    trials: int | None = None,
    metric: str = "eval_overall",
    parallel: int = 1,
    seed: int = 42,
) -> list[Trial]:
    """Searches over a recipe's keys, or continues an interrupted search.

    Args:
        recipe: the result of `read_recipe`.
        space: the keys and their values; see `read_space`.
        method: a name in `METHODS`.
        output_dir: the search's folder.
        trials: the total number of trials, including existing ones. The default is 20. `grid` and `coordinate` end by
            themselves.
        metric: a key of `metrics.json`, such as `eval_sst_accuracy`. Higher is better.
        parallel: the number of trials at a time. They share the GPUs, one GPU each if there are enough.
        seed: the seed of `random` and `optuna`. The seed of a run is that of the recipe.

    Returns:
        the trials, the best first and failed ones last.

    Raises:
        MinBertError: a value, the method or the metric does not fit, the folder has another search, or no trial
            finished.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise MinBertError("A search starts its trials itself. Run it without a launcher, and with --parallel.")
    propose = method_named(method)
    if method in ENDING:
        only_lists(space, method)
    elif trials is None:
        trials = USUAL_TRIALS
    folder = SearchFolder(output_dir, recipe, space, metric)
    folder.check(method)
    own = own_values(recipe, space)
    folder.begin(method)

    teachers = SharedTeachers(folder.path)

    def next_run(running: Collection[Path]) -> Path | None:
        busy = {int(path.name) for path in running if path.parent == folder.path / TRIALS}
        while (number := _next(folder, busy, trials, lambda tried: propose(space, tried, own, seed))) is not None:
            place = folder.of_trial(number)
            start = teachers.start(place, folder.recipe_of(number), running)
            if start == place:
                logger.info("Trial %d: %s.", number, in_words(folder.trial(number).values))
                folder.write_run(number)
            if start is not None or folder.trial(number).state == "begun":  # it waits for its teachers
                return start
        return None

    def ended(path: Path, outcome: Outcome) -> None:
        if not teachers.ended(path, outcome):
            _say_how_it_ended(folder, int(path.name), outcome)

    with alone_in(folder.path):
        carry_out(next_run, ended, parallel)
    return folder.finish()


def _next(folder: SearchFolder, busy: Collection[int], limit: int | None, propose: Any) -> int | None:
    """Returns the trial to start: an interrupted one or a new one; `None` if there is none now."""
    tried = folder.trials()
    for trial in tried:
        if trial.state == "begun" and trial.number not in busy:
            return trial.number
    if limit is not None and len(tried) >= limit:
        return None
    values = propose(tried)
    if values is None:
        return None
    number = min(set(range(1, len(tried) + 2)) - {trial.number for trial in tried})
    write_json(folder.of_trial(number) / "trial.json", values)  # from here on it is a trial
    return number


def _say_how_it_ended(folder: SearchFolder, number: int, outcome: Outcome) -> None:
    trial, best = folder.trial(number), best_of(folder.trials())
    folder.write_results()
    if outcome.lost:
        logger.warning("Trial %d is not finished: %s The same command continues it.", number, outcome.error)
    elif trial.state == "failed":
        logger.warning("Trial %d failed: %s", number, trial.error)
    elif best is not None:
        logger.info(
            "Trial %d: %s %.4f. The best so far is trial %d with %.4f.",
            number, folder.metric, trial.score, best.number, best.score,
        )  # fmt: skip


def known_metrics(recipe: Mapping[str, Value], whole: bool = False) -> list[str]:
    """Returns the metrics of a finished run with this recipe.

    Args:
        whole: also check the data of the stages.

    Raises:
        MinBertError: the recipe is wrong, or cannot be one of several runs.
    """
    settings, given = split_recipe(recipe, typing.get_type_hints(MultiTaskTrainingArguments))
    stages = plan(recipe)
    with explain("Reading the training arguments", "Correct the recipe."):
        args = stages[-1].args if stages else MultiTaskTrainingArguments(**given)
    if args.push_to_hub:
        raise MinBertError("`push_to_hub` would send every run to one place. Leave it out.")
    last = stages[-1].settings if stages else settings
    if last.objective == "mlm":
        raise MinBertError(
            "`objective: mlm` has a perplexity and no scores of tasks to compare. Add a stage after it that trains "
            "tasks."
        )
    tasks = get_tasks(last.tasks)
    by_name = {task.name: task for task in tasks}
    args.check_tasks(by_name)
    if not stages:
        model_config(settings, tasks)
    elif whole:
        check_stages(stages)
    known = args.metrics_of(by_name[name] for name in args.chosen_tasks("eval_tasks", by_name))
    # A finished run is scored without losses, and the highest score is looked for.
    return [name for name in known if higher_is_better(name)]


def in_words(values: Mapping[str, Any]) -> str:
    """`learning_rate=1e-05; tasks.sst.head=mlp`."""
    return "; ".join(f"{key}={cell(value)}" for key, value in values.items())


def cell(value: Any) -> str:
    """Returns a value as a table shows it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- The folder --------------------------------------------------------------------------------------------------


class SearchFolder:
    """The contents of a search's folder.

    Args:
        path: the folder.
        recipe, space, metric: the recipe, space and metric of the search.
    """

    def __init__(self, path: str | Path, recipe: Mapping[str, Value], space: Space, metric: str):
        self.path, self.space, self.metric = Path(path), space, metric
        self.recipe = {key: value for key, value in recipe.items() if key not in OF_THE_SEARCH}
        for key in {*OF_THE_SEARCH} - {"output_dir"}:
            if key in recipe and recipe[key].value:
                raise MinBertError(f"`{key}` is for a single run. Leave it out: the same command continues a search.")

    def check(self, method: str) -> None:
        """Checks the folder, and the recipe with each value of the space. For a range, its ends are checked.

        Raises:
            MinBertError: the folder cannot be written or has another search, or a value or the metric does not fit.
        """
        check_writable(self.path / "search.json")
        stages = self.recipe["stages"].value if "stages" in self.recipe else None
        for key in (key for entry in self.space for key in keys_of(entry)):
            if stages and all(key.split(".")[0] in stage for stage in stages):
                one = f"stages.{stage_names(stages)[0]}.{key}"
                raise MinBertError(f"`--space`: each stage has a line `{key}` of its own. Write {one}.")
        if (self.path / "search.json").is_file():
            self._check_same(method)
        points = [
            {key: value}
            for key, choices in self.space.items()
            for value in ([choices.low, choices.high] if isinstance(choices, Range) else choices)
        ]
        for values in points:
            try:
                recipe = self._of_trial(values, self.path)
                known = known_metrics(recipe, whole=True)
                teacher_runs(recipe, self.path)
            except MinBertError as error:
                raise MinBertError(f"`--space`, {in_words(values)}: {error}") from error
            if self.metric not in known:
                near = did_you_mean(self.metric, known)
                raise MinBertError(f"Unknown metric {self.metric!r}.{near} Choose from: {', '.join(known)}.")

    def _check_same(self, method: str) -> None:
        begun = json.loads((self.path / "search.json").read_text(encoding="utf-8"))
        for name, now in self._identity(method).items():
            if begun[name] == now:
                continue
            old = begun[name]
            if name == "recipe":
                key = next(key for key in {**old, **now} if old.get(key) != now.get(key))
                name, old, now = f"the recipe's `{key}`", old.get(key), now.get(key)
            raise MinBertError(
                f"The search in {self.path} was started with another {name.removeprefix('the ')}: {cell(old)}, now "
                f"{cell(now)}. Its trials would not be comparable: keep the old one, or give another --output-dir."
            )

    def _identity(self, method: str) -> dict[str, Any]:
        """Returns what defines a search, in the form that JSON returns."""
        space = {key: asdict(c) if isinstance(c, Range) else c for key, c in self.space.items()}
        recipe = {key: value.value for key, value in self.recipe.items() if key not in names(scope="secret")}
        return json.loads(json.dumps({"method": method, "space": space, "recipe": recipe}))

    def begin(self, method: str) -> None:
        write_json(self.path / "search.json", self._identity(method))

    # ---- Trials ----------------------------------------------------------------------------------------------

    def of_trial(self, number: int) -> Path:
        return self.path / TRIALS / str(number)

    def _of_trial(self, values: Mapping[str, Any], output_dir: Path) -> dict[str, Value]:
        """The recipe with these values and that folder."""
        return {**with_values(self.recipe, values), "output_dir": Value(str(output_dir), str(output_dir))}

    def _write_recipe(self, path: Path, recipe: Mapping[str, Value]) -> None:
        settings, given = split_recipe(recipe, typing.get_type_hints(MultiTaskTrainingArguments))
        write_recipe(path, settings, {key: value for key, value in given.items() if key not in names(scope="secret")})

    def recipe_of(self, number: int) -> dict[str, Value]:
        """Returns the recipe of a trial's run."""
        folder, values = self.of_trial(number), self.trial(number).values
        own = {"disable_tqdm": as_value(True)}
        if "teachers" in self.recipe:  # whose answers the trials share
            own["cache_dir"] = as_value(str(self.path / "cache"))
        return own | self._of_trial(values, folder)

    def write_run(self, number: int) -> None:
        """Writes the recipe that a trial's process reads."""
        self._write_recipe(self.of_trial(number) / RECIPE, self.recipe_of(number))

    def trial(self, number: int) -> Trial:
        folder = self.of_trial(number)
        values = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
        if (error := failure(folder)) is not None:
            return Trial(number, values, "failed", error=error)
        if not (folder / FINISHED).is_file():
            return Trial(number, values)
        metrics = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
        if metrics.get(self.metric) is None:
            return Trial(number, values, "failed", error=f"it has no {self.metric}", metrics=metrics)
        return Trial(number, values, "finished", metrics[self.metric], metrics=metrics)

    def trials(self) -> list[Trial]:
        """Returns the existing trials, by number."""
        found = (self.path / TRIALS).glob("*/trial.json")
        return [self.trial(number) for number in sorted(int(path.parent.name) for path in found)]

    # ---- Results ---------------------------------------------------------------------------------------------

    def ranked(self) -> list[Trial]:
        """Returns the trials, best first and those without a score last. Equal ones are ordered by number."""
        return sorted(self.trials(), key=lambda trial: (trial.score is None, -(trial.score or 0.0)))

    def write_results(self) -> None:
        """Writes trials.csv, trials.json and best.yaml for the trials that have ended."""
        trials = self.ranked()
        write_json(self.path / "trials.json", [asdict(trial) for trial in trials])
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["trial", "state", self.metric, *self.space, "error"])
        for trial in trials:
            values = [cell(trial.values[key]) if key in trial.values else "" for key in self.space]
            table.writerow([trial.number, trial.state, trial.score, *values, trial.error])
        write_atomically(self.path / "trials.csv", text.getvalue())
        if (best := best_of(trials)) is not None:
            self._write_recipe(self.path / "best.yaml", self._of_trial(best.values, self.path / "best"))

    def finish(self) -> list[Trial]:
        """Writes the results and the plot, and returns the ranked trials."""
        self.write_results()
        trials = self.ranked()
        if best_of(trials) is None:
            said = f" Trial {trials[0].number}: {trials[0].error}" if trials else ""
            raise MinBertError(
                f"No trial in {self.path} finished.{said} The error of each is in its run.log. Delete a trial's "
                "folder to run it again."
            )
        plot(self.path / "trials.png", self.space, trials, self.metric)
        return trials


def plot(path: Path, space: Space, trials: Sequence[Trial], metric: str) -> None:
    """Plots the score by trial with the best so far, and by the values of each key. Logs if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # without pyplot, which would look for a screen
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        logger.info("No plot: matplotlib is not installed. For one: pip install 'hf_minbert[search]'")
        return
    finished = sorted((trial for trial in trials if trial.state == "finished"), key=lambda trial: trial.number)
    numbers, scores = [trial.number for trial in finished], [trial.score or 0.0 for trial in finished]
    figure = Figure(figsize=(4 * (1 + len(space)), 3.2), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(space), sharey=True, squeeze=False)[0]
    first.plot(numbers, scores, "o")
    first.step(numbers, [max(scores[: place + 1]) for place in range(len(scores))], where="post")
    first.set(xlabel="trial", ylabel=metric)
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes, (key, choices) in zip(others, space.items(), strict=True):
        shown = [(trial.values[key], trial.score) for trial in finished if key in trial.values]
        if isinstance(choices, list):  # one place each, in the order of the space
            places = {cell(value): place for place, value in enumerate(choices)}
            shown = [(places.setdefault(cell(value), len(places)), score) for value, score in shown]
            axes.set_xticks([*places.values()], [*places])
            axes.set_xlim(-0.5, len(places) - 0.5)
        elif choices.log:
            axes.set_xscale("log")
        axes.plot([value for value, _ in shown], [score for _, score in shown], "o")
        axes.set_xlabel(key.replace(", ", "\n"))
    figure.savefig(path, dpi=120)
