"""Teachers that a recipe trains before the student. `hf_minbert.settings.teachers` reads them.

    teachers/<name>/seed-<n>/   a teacher's run, in the student's folder; see `hf_minbert.run.workers`
    teachers/answers/           what teachers answered, unless there is a `cache_dir`

In the folder of a study or a search, each teacher is trained once, in `teachers/<name>/seed-<n>-<digest>/`, and every
run with this teacher gets a copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MinBertError
from ..io import write_json
from ..pretrained.teachers import check_tasks, saved_tasks
from ..settings.dotted import Value, as_value, stage_recipes
from ..settings.tasks import Task, get_tasks
from ..settings.teachers import Teacher, read_teachers, teachers_to_train
from ..settings.wording import counted
from ..training.checkpoints import checkpoints
from .folder import RunFolder
from .runs import Run, split
from .stages import FOLDER, TEACHERS, held_out_with, linked
from .workers import FAILED, FINISHED, LOG, Outcome, alone_in, carry_out, failure

logger = logging.getLogger(__name__)

ANSWERS = "answers"


def teacher_runs(values: Mapping[str, Value], folder: Path) -> list[Run]:
    """Returns the runs of a recipe's teachers. They hold out the student's dev and test rows besides their own.

    Args:
        values: the complete recipe of the student.
        folder: the folder of its teachers.

    Raises:
        MinBertError: a teacher's recipe is wrong.
    """
    found = []
    for name, (teacher, recipe) in teachers_to_train(values).items():
        students = [split(own)[0] for _, own in stage_recipes(values)] or [split(values)[0]]
        recipe = {**recipe, "output_dir": as_value(str(folder / name))}
        try:
            held_out = held_out_with(split(recipe)[0], students)
        except MinBertError as error:
            raise MinBertError(f"Teacher {name!r}: {error}") from error
        more = {} if held_out is None else {"held_out": as_value(held_out)}
        for seed in teacher.seeds:
            place = folder / name / f"seed-{seed}"
            own = {"output_dir": str(place), "seed": seed, "disable_tqdm": True}
            found.append(Run(name, seed, place, {**recipe, **more, **{key: as_value(own[key]) for key in own}}))
    return found


class Teachers:
    """The teachers of one run.

    Args:
        values: its complete recipe.
        jobs: the number of teachers that are trained at a time.

    Raises:
        MinBertError: `jobs` is above 1 and the recipe trains no teachers; or as `teacher_runs`.
    """

    def __init__(self, values: Mapping[str, Value], jobs: int = 1):
        self.folder = Path(split(values)[0].output_dir) / TEACHERS
        self.runs, self.jobs = teacher_runs(values, self.folder), jobs
        if jobs > 1 and not self.runs:
            raise MinBertError(
                f"--jobs {jobs} trains several teachers at a time, and this recipe trains no teachers. Leave out "
                "--jobs. To train one model on several GPUs, use accelerate launch scripts/train.py RECIPE."
            )
        self.overwrites = "overwrite" in values and bool(values["overwrite"].value)

    def folders(self, entries: Sequence[Any]) -> list[str]:
        """Returns the folders of all models in the entries of `teachers`: saved models and trained ones."""
        found: list[str] = []
        for entry in read_teachers(entries):
            found += [str(run.folder) for run in self._of(entry)] if isinstance(entry, Teacher) else [entry]
        return found

    def _of(self, teacher: Teacher) -> list[Run]:
        return [run for run in self.runs if run.row == teacher.name]

    def _named(self, entries: Sequence[Any]) -> list[Run]:
        return [run for entry in read_teachers(entries) if isinstance(entry, Teacher) for run in self._of(entry)]

    def check(self, entries: Sequence[Any], tasks: Mapping[str, Task], processes: int) -> None:
        """Raises `MinBertError` for errors that would otherwise appear only after the teachers are trained.

        Args:
            entries: the entries of `teachers`.
            tasks: the trained tasks, by name.
            processes: the number of processes of the run.
        """
        taught: set[str] = set()
        runs = self._named(entries)
        for saved in (entry for entry in read_teachers(entries) if isinstance(entry, str)):
            taught.update(check_tasks(saved, saved_tasks(saved), tasks))
        for run in runs:
            last = [own for _, own in stage_recipes(run.values)][-1:] or [run.values]
            theirs = {task.name: task for task in get_tasks(split(last[0])[0].tasks)}
            taught.update(check_tasks(repr(run.row), theirs, tasks))
            if not self.overwrites:
                self._check_same(run)
        if missing := [name for name in tasks if name not in taught]:
            raise MinBertError(
                f"No model or recipe of `teachers` has the task {missing[0]!r}, and each task in training needs one. "
                "Add one that has it."
            )
        if processes > 1 and not all(_has_finished(run.folder) for run in runs):
            raise MinBertError(
                "`teachers` that are recipes are trained in processes of their own. Run the command without a "
                "launcher until the student trains. Then it can be continued with a launcher."
            )

    def times(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns name, seed and training time in seconds of each teacher that was trained for the run."""
        found = []
        for run in self._named(entries):
            metrics = json.loads((run.folder / FINISHED).read_text(encoding="utf-8"))
            stages = metrics["stages"].values() if "stages" in metrics else [metrics]
            found.append({"name": run.row, "seed": run.seed, "train_runtime": sum(s["train_runtime"] for s in stages)})
        return found

    def were_interrupted(self, student: RunFolder) -> bool:
        """Whether the command to resume had begun to train teachers, and not the student yet."""
        return self.folder.is_dir() and student.checkpoint is None and not student.holds_run()

    def _check_same(self, run: Run) -> None:
        remedy = "Delete this folder, give the teacher another `name`, or train all again with overwrite=true."
        run.check_same(f"Teacher {run.row!r}", remedy)

    def train(self, entries: Sequence[Any]) -> None:
        """Trains the teachers that have not finished, or continues them.

        Raises:
            MinBertError: one failed. The other teachers continue with the next command.
        """
        runs = self._named(entries)
        for run in runs:
            try:
                self._check_same(run)
            except MinBertError:
                if not self.overwrites:
                    raise
                shutil.rmtree(run.folder)
        waiting = {run.folder: run for run in runs if not _has_finished(run.folder)}
        if not waiting:
            return
        there = len(runs) - len(waiting)
        logger.info("%s: %d have been trained, %d are left.", counted(len(runs), "teacher"), there, len(waiting))
        begun: dict[Path, float] = {}

        def next_run(running: Collection[Path]) -> Path | None:
            folder = next((folder for folder in waiting if folder not in running and folder not in begun), None)
            if folder is not None:
                begun[folder] = time.monotonic()
                waiting[folder].write_recipe()
                logger.info("Teacher %s: in %s.", waiting[folder].name, folder)
            return folder

        def ended(folder: Path, outcome: Outcome) -> None:
            check_end(folder, waiting[folder].name, outcome)
            logger.info("Teacher %s: %.1f s.", waiting[folder].name, time.monotonic() - begun[folder])

        with alone_in(self.folder):
            for folder in waiting:
                (folder / FAILED).unlink(missing_ok=True)  # the same command tries it again
            carry_out(next_run, ended, min(self.jobs, len(waiting)))


def check_end(folder: Path, name: str, outcome: Outcome) -> None:
    """Deletes files that a finished teacher no longer needs. Raises `MinBertError` if it has not finished."""
    if outcome.lost:
        raise MinBertError(f"Teacher {name} is not finished: {outcome.error} The same command continues it.")
    if (error := failure(folder)) is not None:
        raise MinBertError(f"Teacher {name} failed: {error} See {folder / LOG}.")
    for path in (*checkpoints(folder), folder / FOLDER):  # a teacher has only to answer
        shutil.rmtree(path, ignore_errors=True)


def _has_finished(folder: Path) -> bool:
    return (folder / FINISHED).is_file() and failure(folder) is None


class SharedTeachers:
    """Teachers that several runs share. They are trained once, in a common folder, and copied to each run.

    Args:
        root: the folder of the study or search.
    """

    def __init__(self, root: Path):
        self.root = root / TEACHERS
        self._shared: dict[Path, list[tuple[Run, Path]]] = {}
        self._names: dict[Path, str] = {}

    def of(self, folder: Path, values: Mapping[str, Value]) -> list[tuple[Run, Path]]:
        """Returns the teachers of a run, each with its common folder. Raises the errors of `teacher_runs`."""
        if folder not in self._shared:
            runs = teacher_runs(values, folder / TEACHERS)
            self._shared[folder] = [(run, self._place(run)) for run in runs]
            self._names |= {place: run.name for run, place in self._shared[folder]}
        return self._shared[folder]

    def _place(self, run: Run) -> Path:
        """Named by what the teacher is: another recipe is another teacher."""
        return self.root / run.row / f"seed-{run.seed}-{hashlib.sha256(run.whole.encode()).hexdigest()[:12]}"

    def to_come(self, runs: Mapping[Path, Mapping[str, Value]]) -> int:
        """Returns how many teachers of these runs still have to be trained."""
        places = {place for folder, values in runs.items() for _, place in self.of(folder, values)}
        return sum(not _has_finished(place) for place in places)

    def retry(self) -> None:
        """Resets failed teachers, so that they run again."""
        for path in self.root.glob(f"*/*/{FAILED}"):
            path.unlink()

    def ended(self, folder: Path, outcome: Outcome) -> bool:
        """Records how a teacher ended, and deletes files that it no longer needs.

        Returns whether the folder belongs to a teacher.
        """
        if folder not in self._names:
            return False
        try:
            check_end(folder, self._names[folder], outcome)
        except MinBertError as error:
            logger.warning("%s", error)
        else:
            logger.info("Teacher %s is trained, in %s.", self._names[folder], folder)
        return True

    def start(self, folder: Path, values: Mapping[str, Value], running: Collection[Path]) -> Path | None:
        """Returns the folder to start for a run: a teacher's, the run's own if all teachers are finished, or `None`.

        The run gets copies of finished teachers. If a teacher failed, the run is recorded as failed too.

        Args:
            folder: the folder of the run.
            values: its recipe.
            running: the folders of active or lost runs.
        """
        waits = False
        for run, place in self.of(folder, values):
            if (run.folder / FINISHED).is_file():
                continue
            if (error := failure(place)) is not None:
                write_json(folder / FAILED, {"error": f"Its teacher {run.name} failed: {error}"})
                return None
            if (place / FINISHED).is_file():
                _take(place, run)
            elif place in running:
                waits = True
            else:
                there = {**run.values, "output_dir": as_value(str(place))}
                Run(run.row, run.seed, place, there).write_recipe()
                return place
        return None if waits else folder


def _take(place: Path, run: Run) -> None:
    part = run.folder.with_name(f".{run.folder.name}.part")
    for path in (part, run.folder):  # one that has begun there is not needed
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(place, part, copy_function=linked)
    run.write_recipe(part)
    part.rename(run.folder)
