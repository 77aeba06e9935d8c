"""The folder of a run: checks whether a run may begin or resume there, and writes its records.

A finished folder has the tokenizer and the model or, with `peft`, the adapter. `recipe.yaml`, `environment.json`
(versions, seed, training data), `log.jsonl` (all logged values) and `predictions/<task>-dev.csv` are records of the
run. With `proximal_evaluate`, `averaged` has the model of averaged weights. `metrics.json` is written last: if it
exists, the run has finished. Its `timeline` describes the process that finished the run. `minbert report` adds
`report`.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import logging
import shutil
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..errors import MinBertError, explain
from ..io import check_writable, json_line, write_atomically, write_json
from ..model.configuration_minbert import AVERAGED, MinBertConfig
from ..model.inference import length_of
from ..model.library import meaning_of
from ..pretrained.data import READ_FROM
from ..pretrained.loading import load_config
from ..publishing.environment import environment
from ..settings import plugins
from ..settings.complete import differing_parts, same_value
from ..settings.keys import default_of
from ..settings.recipe import read_recipe, split_recipe, with_teachers_read, write_recipe
from ..settings.run import RunSettings
from ..settings.table import names, traits_of
from ..settings.tasks import get_tasks, revisions, with_revisions
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import checkpoints, incomplete, newest_complete_checkpoint

logger = logging.getLogger(__name__)

RUN_FILES = (
    "metrics.json", "recipe.yaml", "environment.json", "log.jsonl", "model.safetensors",
    "adapter_model.safetensors", "adapter_config.json", "predictions", AVERAGED, "report",
)  # fmt: skip
#: Keys of a recipe that stand for what the model has where they are left out.
MODELS = ("max_length", "hidden_dropout_prob", "attention_probs_dropout_prob", "private_layers")
#: Fields of a model's config that they set, or that follow from its tasks.
ARRANGED = (*MODELS, "max_input_length", "sep_token_id", "tasks", "active_task", "private_owner", "plugins")


class RunFolder(TrainerCallback):
    """A run's folder. As a callback, it claims the folder for the run at the first step, and then writes the log.

    Before the first step, errors are usually mistakes in the recipe, and the folder is not changed.

    Args:
        settings: the settings of the run; `pin` and `overwrite` change the copy kept here.
        given: the training arguments in the recipe.
        args: all training arguments.
    """

    def __init__(self, settings: RunSettings, given: Mapping[str, Any], args: MultiTaskTrainingArguments):
        self.path = Path(str(args.output_dir))
        self.settings, self.given, self.args = settings, given, args
        self.training_rows: dict[str, str] = {}
        self.changed: dict[str, tuple[Any, Any]] = {}  # old and new value of what a resumed run has otherwise
        self.begun = False

    # ---- Before the run --------------------------------------------------------------------------------------

    def holds_run(self) -> bool:
        return bool(checkpoints(self.path)) or any((self.path / name).exists() for name in RUN_FILES)

    def check(self) -> None:
        """Refuses a folder that cannot be written, whose run would be lost, or whose run cannot be continued."""
        if self.path.exists() and not self.path.is_dir():
            raise MinBertError(f"`output_dir` {self.path} is a file. Give the path of a folder.")
        check_writable(self.path / "metrics.json")
        if self.args.resume_from_checkpoint:
            if self.settings.overwrite:
                raise MinBertError("`overwrite` and `resume_from_checkpoint` cannot be used together. Leave one out.")
            self._check_checkpoint()
            if self.origin.resolve() != self.path.resolve() and self.holds_run():
                raise MinBertError(
                    f"`output_dir` {self.path} holds a run already, and not that of {self.checkpoint}. Give "
                    f"{self.origin}, or a folder without a run."
                )
            self.check_same_run()
        elif self.holds_run() and not self.settings.overwrite:
            raise MinBertError(
                f"`output_dir` {self.path} holds a run already. Continue it with resume_from_checkpoint=true, delete "
                "it with overwrite=true, or give another output_dir."
            )

    @property
    def origin(self) -> Path:
        """The folder of the run that is continued. It is another folder if a checkpoint of another run is named."""
        checkpoint = self.args.resume_from_checkpoint
        return Path(checkpoint).resolve().parent if isinstance(checkpoint, str) else self.path

    @cached_property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the run resumes from."""
        if isinstance(self.args.resume_from_checkpoint, str):
            return Path(self.args.resume_from_checkpoint)
        newest = newest_complete_checkpoint(self.path, self.args.world_size)
        return None if newest is None else Path(newest)

    def _check_checkpoint(self) -> None:
        remedy = "Leave `resume_from_checkpoint` out to start again. overwrite=true deletes what is left of a run."
        if self.checkpoint is None:
            raise MinBertError(f"There is no complete checkpoint in {self.path} to resume from. {remedy}")
        if self.args.resume_from_checkpoint is True:
            return
        found = self.checkpoint.is_dir()
        problem = incomplete(self.checkpoint, self.args.world_size) if found else "there is no such folder"
        if problem is not None:
            raise MinBertError(f"`resume_from_checkpoint` {self.checkpoint}: {problem}. {remedy}")

    def check_same_run(self, finished: bool = False) -> None:
        """Refuses to continue a run that began with other values of keys that decide a step.

        Args:
            finished: the run has finished, and the next stage continues from it.
        """
        begun = self.begun_with()
        if begun is None:
            raise MinBertError(
                f"{self.origin} lacks recipe.yaml or environment.json, which say how its run was started. Restore "
                f"them, or start a new run from the weights with model_name_or_path={self.checkpoint or self.path}."
            )
        (old_settings, old_given), environment = begun
        self._check_plugins(environment["plugins"])
        old, new = all_values(old_settings, old_given), all_values(self.settings, self.given)
        self._complete_by_models(old, new)
        keys = names(among=new, scope=("run", "seed"), objectives=("any", new["objective"]))
        if environment["processes"] != self.args.world_size:
            self._check_rows_of_steps(old, new, environment["processes"])
            keys = names(among=keys, per_process=False)
        differing = [key for key in keys if not same_value(key, old, new)]
        # The order of what is drawn depends on how long the run is.
        drawn = (new["objective"] == "mlm" and new["mlm_order"] == "sequence") or new["mixing"] == "annealed"
        kept = names(among=differing, resume="fixed")
        if old_settings.model_name_or_path != self.settings.model_name_or_path and not _same_weights(
            Path(old_settings.model_name_or_path), Path(self.settings.model_name_or_path)
        ):
            kept += ("model_name_or_path",)
        if finished or drawn:
            kept += names(among=differing, resume="length")
        if finished:
            kept += names(among=differing, resume=("free", "after"))
        for key in kept:
            of_model = key != "model_name_or_path" and vars(self.settings).get(key, new[key]) != new[key]
            part, then, now = differing_parts(key, old[key], new[key])[0]
            raise MinBertError(
                f"The run in {self.origin} was started with {part} = {plain(then)} and cannot be resumed with "
                f"{plain(now)}{f', that of {self.settings.model_name_or_path}' * of_model}. Keep the old value, or "
                "start again."
            )
        self.changed = {
            key: (old[key], new[key]) for key in names(among=differing, resume=("free", "after", "length"))
        }
        if self.checkpoint is not None:
            self._check_what_is_left(json.loads((self.checkpoint / "trainer_state.json").read_text(encoding="utf-8")))

    def _check_plugins(self, old: Mapping[str, str]) -> None:
        """Refuses to continue with other plugins, or with the same ones after their files have changed."""
        if {*old} - {*self.plugins()}:
            plugins.find_more((), "")  # it may be of an entry point, which is imported once a name is asked for
        new, named = self.plugins(), {*map(plugins.module_of, self.settings.plugins)}
        for name in {**old, **dict.fromkeys(sorted(named))}:
            if old.get(name) != new.get(name):
                then, now = (f"with digest {of[name]}" if name in of else "without it" for of in (old, new))
                raise MinBertError(
                    f"The run in {self.path} cannot be resumed, because the plugin {name!r} has changed: the run was "
                    f"started {then}, and would continue {now}. Restore the plugin, or start again."
                )

    def plugins(self) -> dict[str, str]:
        """The plugins of the run, with digests of their files."""
        return plugins.load(self.settings.plugins) | plugins.installed()

    def _complete_by_models(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Completes keys that both recipes leave to the model, from the checkpoint's model and the one that is named
        now.

        Raises:
            MinBertError: the models have another kind or shape.
        """
        name, saved = self.settings.model_name_or_path, self.checkpoint or self.path
        config = begun = load_config(name, self.settings.model_revision)
        if (saved / "config.json").is_file():
            begun = load_config(str(saved))
        for key in MinBertConfig.__annotations__:
            if key not in ARRANGED and _compared(begun, key) != _compared(config, key):
                raise MinBertError(
                    f"`model_name_or_path` {name} has {key} = {getattr(config, key)}, and {saved} has "
                    f"{getattr(begun, key)}. Resume with the model that the run was started with, or start again."
                )
        for values, of in ((old, begun), (new, config)):
            # Pre-training is not for a task, and so takes no model's length.
            length = of.max_position_embeddings if values["objective"] == "mlm" else length_of(of)
            own = {key: length if key == "max_length" else getattr(of, key) for key in MODELS}
            values |= {key: value for key, value in own.items() if values[key] is None}

    def _check_what_is_left(self, state: Mapping[str, Any]) -> None:
        """Refuses changes that would take effect only in steps that the run does not have.

        Args:
            state: the state of the checkpoint.
        """
        done, args, longer = state["global_step"], self.args, names(among=self.changed, resume="length")
        left = state["max_steps"] - done
        if longer:
            left = args.max_steps - done if args.max_steps > 0 else args.num_train_epochs - state["epoch"]
        where, patience = f"The run in {self.origin}", args.early_stopping_patience
        if longer and left < 0:
            said = " and ".join(f"{key} = {self.changed[key][1]}" for key in longer)
            raise MinBertError(
                f"{where} is at step {done} in epoch {state['epoch']:.4g}, which is after its end with {said}. Give a "
                "later end, or start again."
            )
        stopping = state["stateful_callbacks"].get("EarlyStoppingCallback")
        stopped = patience is not None and args.restore_callback_states_from_checkpoint and stopping is not None
        stopped = stopped and stopping["attributes"]["early_stopping_patience_counter"] >= patience
        if not stopped and left > 0:
            return
        for key in names(among=self.changed, resume=("free", "length") if stopped else "free"):
            how = f"was stopped early by early_stopping_patience = {patience}" if stopped else "has ended"
            more = "a larger early_stopping_patience" if stopped else "a larger max_steps or num_train_epochs"
            old, new = map(plain, self.changed[key])
            raise MinBertError(
                f"{where} {how} with step {done}, so {key} = {new} would have no effect. Keep {old}, or give {more} "
                "too."
            )

    def _check_rows_of_steps(self, old: Mapping[str, Any], new: Mapping[str, Any], processes: int) -> None:
        """Refuses another number of processes, unless their batches together are as large as they were."""
        now = self.args.world_size
        sizes = names(per_process=True)
        wanted = {key: _rescaled(old[key], processes, now) for key in sizes}
        needed = [wanted[key] for key in sizes if old[key] is not None]
        where = f"The run in {self.origin} was started with {_counted(processes)}, and {_counted(now)} cannot"
        if None in needed or any(wanted[key] != new[key] for key in sizes):
            words = " ".join(f"{key}={value}" for key, value in wanted.items() if value is not None)
            raise MinBertError(
                f"{where} resume it with these batches: steps would see other rows. Resume it with "
                f"{_counted(processes) if None in needed else words}, or start again."
            )

    def begun_with(self) -> tuple[tuple[RunSettings, dict[str, Any]], dict[str, Any]] | None:
        """The recipe and environment with which the continued run began; `None` if they are not recorded."""
        recipe, environment = self.origin / "recipe.yaml", self.origin / "environment.json"
        if not (recipe.is_file() and environment.is_file()):
            return None
        values = with_teachers_read(read_recipe(recipe))
        split = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
        with explain(f"Reading {environment}", "Restore the file, or start again with overwrite=true."):
            begun = json.loads(environment.read_text(encoding="utf-8"))
            kept = {key: begun[key] for key in ("processes", "datasets", "training_rows")}
            return split, {**kept, "plugins": begun.get("plugins", {})}  # runs of before there were plugins

    def commits(self) -> dict[str, str]:
        """Returns the commits of the Hub's datasets at the beginning of the run, for a run that resumes."""
        begun = self.begun_with() if self.args.resume_from_checkpoint else None
        return {} if begun is None else begun[1]["datasets"]

    def pin(self, commits: Mapping[str, str]) -> None:
        """Records the commits of the Hub's datasets, so that the recipe loads the same data again."""
        self.settings = replace(self.settings, tasks=with_revisions(self.settings.tasks, commits))

    def check_rows(self, train: Mapping[str, Any]) -> None:
        """Refuses to resume on other training rows.

        It compares the rows and not their path, because a data folder may move.
        """
        self.training_rows = _digests(train)
        begun = self.begun_with() if self.args.resume_from_checkpoint else None
        for name, digest in self.training_rows.items():
            if begun is not None and begun[1]["training_rows"].get(name) != digest:
                raise MinBertError(
                    f"The training rows of {name!r} are not those that the run in {self.origin} was started with, so "
                    f"it cannot be resumed. Give the same data, or start again."
                )

    # ---- On several processes --------------------------------------------------------------------------------

    def shared_recipe(self) -> dict[str, Any]:
        """The recipe without the keys that may differ between processes."""
        keys = {**vars(self.settings), **self.given}
        return {key: value for key, value in keys.items() if traits_of(key).scope not in ("machine", "secret")}

    def digests(self, data: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Returns digests of the plugins and of the training rows, with descriptions for messages."""
        of_plugins = {f"the plugin {name!r} with digest": digest for name, digest in self.plugins().items()}
        words = {"train": "a digest of the training rows", "dev": "a digest of the dev rows"}
        of_rows = {f"{words[s]} of {name!r}": digest for s in words for name, digest in _digests(data[s]).items()}
        return of_plugins | of_rows

    # ---- During the run --------------------------------------------------------------------------------------

    def on_step_begin(self, args, state, control, **kwargs):
        self._begin(state)

    def on_train_end(self, args, state, control, **kwargs):
        self._begin(state)  # a run that was cut off behind its last step has no other

    def _begin(self, state):
        if self.begun:
            return
        self.begun = True
        if state.is_world_process_zero:
            self._tell_of_changes(state)
            self._take()
            # up to the checkpoint, if the run resumes
            write_atomically(self.path / "log.jsonl", "".join(map(json_line, state.log_history)))

    def _tell_of_changes(self, state) -> None:
        """Says which keys a run that resumes has with other values, and from which step on."""
        if self.changed:
            said = ", ".join(f"{key} = {plain(new)} (was {plain(old)})" for key, (old, new) in self.changed.items())
            logger.info("From step %d on: %s.", state.global_step, said)
        if names(among=self.changed, resume="length"):
            logger.info(
                "The schedule %s now ends at step %d: the learning rate continues from its value there at step %d.",
                plain(self.args.lr_scheduler_type), state.max_steps, state.global_step,
            )  # fmt: skip

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.begun and state.is_world_process_zero and state.log_history:
            with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json_line(state.log_history[-1]))

    def _take(self) -> None:
        """Claims the folder for this run: deletes the files of an older run, unless this run continues it."""
        # First: it says that the run finished, and the rest may be cut off.
        (self.path / "metrics.json").unlink(missing_ok=True)
        if not self.args.resume_from_checkpoint:
            for path in [*checkpoints(self.path), *(self.path / name for name in RUN_FILES)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        # A token is nobody's but its owner's: the folder may be published.
        left_out = {"resume_from_checkpoint", *names(scope="secret")}
        kept = {key: value for key, value in self.given.items() if key not in left_out}
        # the recipe of a run never deletes a run
        write_recipe(self.path / "recipe.yaml", replace(self.settings, overwrite=False), kept)
        write_json(self.path / "environment.json", self._environment())

    def _environment(self) -> dict[str, Any]:
        return {
            **environment(self.args),
            READ_FROM: str(Path.cwd()),
            "datasets": revisions(get_tasks(self.settings.tasks)),
            "training_rows": self.training_rows,
            "plugins": self.plugins(),
        }


def all_values(settings: RunSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of all keys of a recipe, including defaults."""
    return {**{f.name: default_of(f) for f in fields(MultiTaskTrainingArguments)}, **vars(settings), **given}


def plain(value: Any) -> Any:
    """Returns a value as a recipe writes it."""
    return value.value if isinstance(value, Enum) else value


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two models have the same files of weights. One that has moved, or is on the Hub, cannot be compared."""
    if not (one.is_dir() and other.is_dir()) or one.samefile(other):
        return True
    files = [{f.name for p in ("*model*.safetensors", "pytorch_model*.bin") for f in x.glob(p)} for x in (one, other)]
    return files[0] == files[1] and not any(filecmp.cmpfiles(one, other, files[0], shallow=False)[1:])


def _counted(processes: int) -> str:
    return f"{processes} process{'es'[: 2 * (processes > 1)]}"


def _rescaled(size: Any, processes: int, now: int) -> Any:
    """Returns the batch size, or sizes by task, with which `now` processes have the total of `processes`, if any."""
    if isinstance(size, Mapping):
        sizes = {task: _rescaled(own, processes, now) for task, own in size.items()}
        return None if None in sizes.values() else sizes
    whole = isinstance(size, int) and size * processes % now == 0
    return size * processes // now if whole else None


def _compared(config: MinBertConfig, key: str) -> Any:
    """Returns a field of a model's config in a form that is equal for compatible models."""
    return meaning_of(config.encoder_config) if key == "encoder_config" else getattr(config, key)


def _digests(rows_by_task: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest(rows) for name, rows in rows_by_task.items()}


def _digest(rows: Any) -> str:
    digest, columns = hashlib.sha256(), rows[:]  # as lists: a column by itself is read row by row
    for column in sorted(rows.column_names):
        digest.update("\0".join(map(str, [column, *columns[column]])).encode())
    return digest.hexdigest()[:16]
