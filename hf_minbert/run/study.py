"""Runs a study: every row of its table with every seed, each as an ordinary run in its own folder.

    runs/<row>/seed-<n>/  a run's folder; see `hf_minbert.run.workers`
    teachers/             those that recipes train, each once for all runs; see `hf_minbert.run.teachers`
    cache/                tokenized rows and answers of teachers, which the runs share

The state is read from the runs' folders. The same command therefore continues an interrupted study, and runs what was
added to its file. `hf_minbert.reporting.study` makes the table.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import MinBertError, unknown_name
from ..io import check_writable
from ..settings.dotted import as_value
from ..settings.recipe import read_recipe, with_teachers_read, write_recipe
from ..settings.study import Study, run_folder
from ..settings.wording import counted
from ..training.checkpoints import checkpoints
from .runs import Run, said, split
from .search import known_metrics
from .stages import Stage, linked, plan, with_later_held_out
from .teachers import SharedTeachers, teacher_runs
from .workers import FAILED, FINISHED, LOG, Outcome, Progress, carry_out, failure

logger = logging.getLogger(__name__)

SURE_ABOVE = 3600.0  # seconds of all GPUs together, above which a study asks
STEPS_TO_TELL = 100  # of a run, before its time is estimated


def runs_of(study: Study, root: Path) -> list[Run]:
    """Returns the runs of a study, all rows with one seed before those with the next.

    Raises the errors of `Study.recipe`.
    """
    recipes = {row.name: with_teachers_read(study.recipe(row)) for row in study.rows if row.is_trained}
    found = []
    for seed in study.seeds:
        for row, recipe in recipes.items():
            folder = run_folder(root, row, seed)
            own = {"output_dir": str(folder), "seed": seed, "disable_tqdm": True}
            values = {"cache_dir": as_value(str(root / "cache"))} | recipe
            found.append(Run(row, seed, folder, values | {key: as_value(value) for key, value in own.items()}))
    return found


def begin(study: Study, root: Path, retry: bool = False) -> list[Run]:
    """Returns the runs of a study, after all checks of the runs and of the folder.

    Args:
        root: the study's folder.
        retry: run failed runs again, from their checkpoints if they have some.

    Raises:
        MinBertError: a row's recipe or a metric is wrong, or a run in the folder has another recipe.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise MinBertError("A study starts its runs itself. Run it without a launcher, and with --jobs.")
    runs = runs_of(study, root)
    known: dict[str, None] = {}
    for run in runs[: len({run.row for run in runs})]:  # those of one seed
        try:
            known |= dict.fromkeys(known_metrics(run.values))
            teacher_runs(run.values, run.folder)
        except MinBertError as error:
            raise MinBertError(f"Row {run.row!r}: {error}") from error
    names_of = {name.replace("eval_", end, 1): None for name in known for end in ("", "train_")}
    reported = [name for row in study.rows if not row.not_run for name in row.reported]
    for metric in [*study.metrics, *reported, *(name for claim in study.claims for name in claim.metrics)]:
        if runs and metric not in names_of:
            raise unknown_name("metric", metric, names_of)
    check_writable(root / "study.json")
    if retry:
        SharedTeachers(root).retry()
    for run in runs:
        run.check_same(
            f"Row {run.row!r}", "Delete this folder, give the row another name, or give another --output-dir."
        )
        if retry:
            (run.folder / FAILED).unlink(missing_ok=True)
    return runs


def run_study(
    study: Study, runs: Sequence[Run], root: Path, *, parallel: int = 1, agree: Callable[[str], bool]
) -> None:
    """Carries out the runs that have not ended. Failed runs are recorded, and the others continue.

    Args:
        runs: the result of `begin`.
        root: the study's folder, where the teachers of the runs are trained.
        parallel: the number of runs at a time. They share the GPUs.
        agree: asks whether to continue. It gets a sentence with the expected time, and is called if this is above an
            hour.

    Raises:
        MinBertError: `agree` returned false.
    """
    by_folder = {run.folder: run for run in runs}
    waiting = [run for run in runs if not run.has_ended]
    ended_before = len(runs) - len(waiting)
    logger.info("%s: %d have ended, %d are left.", counted(len(runs), "run"), ended_before, len(waiting))
    if not waiting:
        return
    shared, teachers = SharedStages(runs), SharedTeachers(root)
    to_teach = teachers.to_come({run.folder: run.values for run in waiting})
    clock = _Clock(shared.trainings(waiting) + to_teach, parallel, agree)

    def next_run(running: Collection[Path]) -> Path | None:
        for run in waiting:
            if run.has_ended or run.folder in running or shared.waits_for(run, running) or shared.take_whole(run):
                continue
            folder = teachers.start(run.folder, run.values, running)
            if folder is None:
                continue
            if folder == run.folder:
                shared.take(run)
                run.write_recipe()
            clock.begin(folder)
            return folder
        return None

    def ended(folder: Path, outcome: Outcome) -> None:
        clock.end(folder, outcome)
        if teachers.ended(folder, outcome):
            return
        left, name = sum(not run.has_ended for run in waiting), by_folder[folder].name
        if outcome.lost:
            logger.warning("%s is not finished: %s The same command continues it.", name, outcome.error)
        elif (error := failure(folder)) is not None:
            logger.warning("%s failed: %s See %s.", name, error, folder / LOG)
        logger.info("%s: %.1f s; %d of %d left.", name, clock.took[folder], left, len(waiting))

    carry_out(next_run, ended, parallel, clock.watch)
    clock.tell()


def failures(study: Study, root: Path) -> dict[tuple[str, int], str]:
    """Returns the reasons of failed runs, by row and seed."""
    every = {(row.name, seed): failure(run_folder(root, row.name, seed)) for row in study.rows for seed in study.seeds}
    return {run: error for run, error in every.items() if error is not None}


def same_trainings(runs: Sequence[Run]) -> dict[str, str]:
    """Returns, for each row that is the same training as an earlier row, that row. Names do not matter."""
    first: dict[str, str] = {}
    rows = {run.row: first.setdefault(run.whole, run.row) for run in runs if run.seed == runs[0].seed}
    return {row: other for row, other in rows.items() if row != other}


# ---- Trainings that rows share -----------------------------------------------------------------------------------


class SharedStages:
    """First stages that several runs share. One run trains them, and the others copy them.

    Args:
        runs: all runs of the study.
    """

    def __init__(self, runs: Iterable[Run]):
        self.runs = {run.folder: run for run in runs}
        self._whole = {folder: run.whole for folder, run in self.runs.items()}
        self._stages = {folder: self._plan(run) for folder, run in self.runs.items()}
        self._keys = {folder: self._prefixes(folder, stages) for folder, stages in self._stages.items()}

    @staticmethod
    def _plan(run: Run) -> list[Stage]:
        try:
            return with_later_held_out(plan(run.values))
        except MinBertError:  # said by the run itself, which fails
            return []

    @staticmethod
    def _prefixes(folder: Path, stages: list[Stage]) -> list[str]:
        """What each stage is with all before it, however the runs' folders are called."""
        found = []
        for stage in stages:
            before = found[-1] if found else ""
            found.append(before + said(folder, stage.settings, stage.given))
        return found

    def _twins(self, run: Run) -> list[Path]:
        """The runs that are the same training."""
        return [folder for folder, whole in self._whole.items() if folder != run.folder and whole == self._own(run)]

    def _own(self, run: Run) -> str:
        return self._whole[run.folder]

    def trainings(self, runs: Iterable[Run]) -> int:
        """Returns how many runs must be trained.

        Runs that are the same training count once, and not if one has finished.
        """
        finished = {whole for folder, whole in self._whole.items() if (folder / FINISHED).is_file()}
        return len({*map(self._own, runs)} - finished)

    def _others(self, run: Run, number: int) -> list[Path]:
        """The runs with the same stages up to this one."""
        own = self._keys[run.folder][number]
        return [folder for folder, keys in self._keys.items() if folder != run.folder and own in keys[: number + 1]]

    def waits_for(self, run: Run, running: Collection[Path]) -> bool:
        """Whether an active run trains all of this run, or a stage that this run needs too."""
        if any(folder in running for folder in self._twins(run)):
            return True
        for number, stage in enumerate(self._stages[run.folder]):
            if (stage.folder / FINISHED).is_file():
                continue
            others = self._others(run, number)
            if not any((self._stages[folder][number].folder / FINISHED).is_file() for folder in others):
                return any(folder in running for folder in others)
        return False

    def take_whole(self, run: Run) -> bool:
        """Fills the folder of a run from a finished run that is the same training. Returns whether there is one."""
        source = next((folder for folder in self._twins(run) if (folder / FINISHED).is_file()), None)
        if source is None or run.folder.exists():
            return False
        part = run.folder.with_name(f".{run.folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, copy_function=linked, ignore=_left_out)
        run.write_recipe(part)
        values = read_recipe(part / "recipe.yaml") | {"output_dir": as_value(str(run.folder))}
        write_recipe(part / "recipe.yaml", *split(values))
        part.rename(run.folder)
        logger.info("%s is the same training as %s, so that run is used.", run.name, self.runs[source].name)
        return True

    def take(self, run: Run) -> None:
        """Copies the stages that another run has finished to the folder of this run, which continues from there."""
        for number, stage in enumerate(self._stages[run.folder][:-1]):
            if (stage.folder / FINISHED).is_file():
                continue
            done = (self._stages[folder][number].folder for folder in self._others(run, number))
            source = next((folder for folder in done if (folder / FINISHED).is_file()), None)
            if source is None or stage.folder.exists():
                return
            part = stage.folder.with_name(f".{stage.folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source, part, copy_function=linked, ignore=_left_out)
            part.rename(stage.folder)
            logger.info("%s reuses its stage %s from %s.", run.name, stage.name, source)


def _left_out(folder: str, names: Iterable[str]) -> list[str]:
    return [LOG, *(path.name for path in checkpoints(folder))]


# ---- Time --------------------------------------------------------------------------------------------------------


class _Clock:
    """Estimates how long runs take."""

    def __init__(self, runs: int, parallel: int, agree: Callable[[str], bool]):
        self.runs, self.parallel, self.agree = runs, min(parallel, runs), agree
        self.begun = time.monotonic()
        self.took: dict[Path, float] = {}
        self.starts: list[float] = []
        self._begun: dict[Path, float] = {}
        self._expected: dict[Path, float] = {}
        self._asked = runs == 1

    def begin(self, folder: Path) -> None:
        self._begun[folder] = time.monotonic()

    def end(self, folder: Path, outcome: Outcome) -> None:
        self.took[folder] = time.monotonic() - self._begun[folder]
        if outcome.first_step is not None:
            self.starts.append(outcome.first_step - self._begun[folder])

    def watch(self, progress: Mapping[Path, Progress]) -> None:
        """Says how long the whole will take, once as many runs tell as run at a time, and asks if that is long."""
        if self._asked:
            return
        for folder, run in progress.items():
            if run.step >= min(STEPS_TO_TELL, run.steps):
                self._expected[folder] = run.steps * run.seconds
        if len(self._expected) < self.parallel:
            return
        self._asked = True
        mean = statistics.fmean(self._expected.values())
        whole = mean * self.runs / self.parallel
        said = (
            f"About {in_words(whole)} in all: {counted(self.runs, 'run')}, {self.parallel} at a time, if each takes "
            f"{in_words(mean)}, as the first ({len(self._expected)}) do"
        )
        logger.info("%s.", said)
        if whole > SURE_ABOVE and not self.agree(said):
            raise MinBertError(f"{said}. Add --yes to continue; started runs continue from their last checkpoint.")

    def tell(self) -> None:
        whole = time.monotonic() - self.begun
        first, later = (
            f"{statistics.median(of):.1f} s" if of else "not measured"
            for of in (self.starts[: self.parallel], self.starts[self.parallel :])
        )
        logger.info(
            "%s in %s, %.2f a minute. Start-up until the first step: %s for the first run of a process, %s for later "
            "ones (medians).",
            counted(self.runs, "run"), in_words(whole), self.runs / whole * 60, first, later,
        )  # fmt: skip


def in_words(seconds: float) -> str:
    """`45 s`, `12 min` or `3.2 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
