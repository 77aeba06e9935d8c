"""The configuration of MinBERT: the sizes of its encoder, its tasks, and the task that stock tools use.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .families import FAMILIES, settings_of
from .kinds import KINDS

#: What trained a saved model, in the folder of its run.
RECIPE = "recipe.yaml"
AVERAGED = "averaged"  # in such a folder, the model of averaged weights

#: What of an encoder of the library's stands in our config too, where heads, poolings and lengths ask for it.
OF_ENCODER = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "classifier_dropout",
)  # fmt: skip
TASK_KEYS = ("name", "kind", "labels", "head")
#: What the constructor checks or derives other fields from.
SHARING = ("private_layers", "private_encoders", "private_owner")
SET_BEFORE = ("tasks", "active_task", "max_input_length", *SHARING)
#: The library's words for the labels of a model with one task. The first is derived from the second.
LABELS = ("num_labels", "id2label", "label2id", "problem_type")
PAIR_ENCODINGS = ("single", "cross", "bi")
#: What an entry of `tasks` is taken to say where it is silent. `hf_minbert.settings.tasks.Task` explains the keys.
TASK_DEFAULTS: dict[str, Any] = {
    "range": None, "pair_encoding": "single", "pooling": "pooler", "pooling_options": {}, "layers": "last",
    "sentence_dropout": 0.0, "join": "", "head_options": {}, "loss": "", "loss_options": {}, "temperature": 1.0,
    "thresholds": 0.5,
}  # fmt: skip


@strict
class MinBertConfig(PreTrainedConfig):
    """The encoder's settings under BERT's names, and the tasks.

    `MinBertConfig.from_pretrained` also reads the config of any encoder in `model.families`, and of any other encoder
    of the transformers library. The latter is kept unchanged in `encoder_config`.

    Args:
        encoder_config: the config of an encoder that transformers computes, by its `AutoModel`; `None` for the
            hand-written encoder. The other settings are taken from it. Changing them later changes it too.
        family: the `model_type` of the published encoder that this one computes. Exports use its names.
        max_position_embeddings: the maximum number of tokens in an input.
        position_offset: the number of unused rows at the start of the position table. If it is above 0, positions
            count the tokens that are not padding, and padding has the last of these rows (RoBERTa).
        type_vocab_size: the number of segments; 0 if tokens have none (DistilBERT).
        embedding_size: the size of word, position and segment embeddings, which are then projected to `hidden_size`
            (ELECTRA). The default is `hidden_size`.
        attention_output_dropout: whether there is dropout after the attention's projection (not in DistilBERT).
        word_head_act: the activation of the head that predicts words. The default is `hidden_act`.
        tasks: one dict for each task, as `Task.to_config` returns it. A `Task` is converted to its dict. It is a list
            because config.json sorts keys, and the order of the tasks must be kept.
        active_task: the name of the task that tools for a single task use. `num_labels`, `id2label`, `label2id` and
            `problem_type` are those of this task. With a single task it is always that task.
        classifier_dropout: the dropout before every head; `None` uses `hidden_dropout_prob`.
        private_layers: how many of the encoder's last layers are separate for each task.
        private_encoders: whether each task has its own encoder (`minbert ensemble` makes such models).
        private_owner: the task that uses the encoder's own layers as its private layers or encoder; every other task
            has copies. The default is the first task. It is saved, so that the weights keep their meaning if the tasks
            change.
        max_input_length: the number of tokens that inputs are truncated to, which is the length of the training; or a
            mapping from tasks to lengths. `None` allows all positions. For folders saved before this setting existed,
            `from_pretrained` reads the length from `recipe.yaml`.
        sep_token_id: the id of the tokenizer's separator. With `pair_encoding: bi`, joined pairs without segment ids
            are split there. Training sets it. It is `None` in older folders, which need segment ids.
        plugins: the modules with the code of the tasks' heads, pooling methods, joins and losses. It is set when a
            model is saved.

    Values of `num_labels`, `id2label`, `label2id` and `problem_type` that contradict the active task are refused when
    a model is made from the config. With `ignore_mismatched_sizes=True` the active task gets these labels, and a new
    head if their number differs.

    Raises:
        ValueError: a task has no name, an unknown kind or a repeated name; the active task or the owner is not in
            `tasks`; there are more private layers than layers; a length is above the number of positions; or
            `encoder_config` does not belong to an encoder of one text, or lacks one of the given settings.
    """

    model_type = "minbert"
    #: Pipelines that this process has without a saved folder's code. A package that registers them names them here.
    pipelines_at_hand = frozenset()
    #: The library sets attention and precision there too.
    sub_configs = {"encoder_config": PreTrainedConfig}

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sep_token_id: int | None = None
    classifier_dropout: float | int | None = None
    family: str = "bert"
    position_offset: int = 0
    embedding_size: int | None = None
    attention_output_dropout: bool = True
    word_head_act: str | None = None
    tie_word_embeddings: bool = True
    tasks: list | None = None
    active_task: str | None = None
    private_layers: int = 0
    private_encoders: bool = False
    private_owner: str | None = None
    max_input_length: int | dict[str, int] | None = None
    plugins: list[str] | None = None
    encoder_config: Any = None

    def __post_init__(self, **kwargs):
        if isinstance(self.encoder_config, dict):
            self.encoder_config = _encoder_of(self.encoder_config)
        if self.encoder_config is not None:
            self._take_from_encoder()
        super().__post_init__(**kwargs)
        self.check_tasks()

    def _take_from_encoder(self) -> None:
        """Copies the settings of the encoder's own config to this config."""
        # Imported where it is needed: this module is read while the library's own is, on which that one builds.
        from .library import settings_in

        try:
            taken = settings_in(self.encoder_config, {key: getattr(self, key) for key in OF_ENCODER})
        except ValueError as error:
            raise ValueError(f"`encoder_config`: `model_type` {self.encoder_config.model_type!r}, {error}.") from error
        vars(self).update(taken, family=self.encoder_config.model_type)
        self._taken = taken

    def _settle_encoder(self) -> None:
        """Copies settings that were changed here to the encoder's own config.

        Raises `ValueError` if it lacks such a setting.
        """
        from .library import change

        taken = vars(self)["_taken"]
        for key in OF_ENCODER:
            if getattr(self, key) != taken[key]:
                change(self.encoder_config, key, getattr(self, key))
        self._take_from_encoder()

    def check_tasks(self) -> None:
        """Checks tasks, labels, sharing and length together, and sets the labels and the owner that follow from them.

        Raises:
            ValueError: as the constructor; or the labels contradict the active task.
        """
        if self.encoder_config is not None:
            self._settle_encoder()
            if self.private_layers:
                raise ValueError(
                    f"`private_layers` must be 0 with an encoder of the library's ({self.family}), whose layers all "
                    f"tasks share. Found {self.private_layers}. Leave it out; `minbert ensemble` gives each task an "
                    "encoder of its own."
                )
        self.settle_labels()
        if not 0 <= self.private_layers <= self.num_hidden_layers:
            raise ValueError(
                f"`private_layers` must be from 0 to {self.num_hidden_layers}, the model's number of layers. "
                f"Found {self.private_layers}."
            )
        if self.private_layers and self.private_encoders:
            raise ValueError("`private_encoders` leaves no layer to share. Set `private_layers` to 0.")
        names = self.task_names
        if self.private_owner is None and (self.private_layers or self.private_encoders) and len(names) > 1:
            self.private_owner = names[0]
        if self.private_owner is not None and self.private_owner not in names:
            raise ValueError(
                f"`tasks` must keep {self.private_owner!r}, whose private layers are the encoder's own. Found "
                f"{', '.join(names) or 'none'}. Name it too; tasks that are not to be trained stay as they are."
            )
        self._check_length()

    def _check_length(self) -> None:
        given = self.max_input_length
        found = [] if given is None else [*given.values()] if isinstance(given, dict) else [given]
        for length in found:
            _check_tokens("max_input_length", length, self.max_position_embeddings)
        if isinstance(given, dict):  # one number where tasks agree; a task that is new has the longest
            lengths = {name: given.get(name, max(found, default=0)) for name in self.task_names}
            self.max_input_length = (
                lengths if len({*lengths.values()}) > 1 else next(iter(lengths.values()), 0) or None
            )

    @property
    def copying_tasks(self) -> list[str]:
        """The tasks that have copies of the private layers or encoder: all tasks but the owner."""
        return [name for name in self.task_names if self.private_owner not in (None, name)]

    def rearrange(self, **changes: Any) -> None:
        """Changes the tasks or the sharing of a saved model's config. The meaning of the weights does not change.

        Args:
            changes: new values of `tasks`, `active_task`, `max_input_length`, `private_layers` or `private_encoders`.

        Raises:
            ValueError: the result is not valid, or a task would lose layers that were trained for it alone.
        """
        if self.private_owner is not None:
            layers = changes.get("private_layers", self.private_layers)
            if layers < self.private_layers:
                raise ValueError(
                    f"`private_layers` must be at least {self.private_layers}: so many layers of this model were "
                    f"trained for each task alone. Found {layers}. Leave it out, or start from a plain encoder."
                )
            if changes.get("private_encoders", self.private_encoders) != self.private_encoders:
                raise ValueError(
                    f"`private_encoders` must stay {self.private_encoders}, as this model was trained. Leave it out, "
                    f"or start from a plain encoder."
                )
            if changes.get("private_owner", self.private_owner) != self.private_owner:
                raise ValueError(f"`private_owner` must stay {self.private_owner!r}, whose layers they are.")
        if "tasks" in changes:
            changes.setdefault("active_task", None)  # the saved one may name a task that is no longer there
        for key, value in changes.items():
            setattr(self, key, value)
        self.check_tasks()

    @property
    def word_size(self) -> int:
        """The size of word embeddings, which `inputs_embeds` has."""
        return self.embedding_size or self.hidden_size

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks, in their order."""
        return [task["name"] for task in self.tasks or ()]

    def get_task(self, name: str) -> dict[str, Any]:
        """Returns the task with this name.

        Raises:
            ValueError: there is none. The message lists the tasks.
        """
        for task in self.tasks or ():
            if task["name"] == name:
                return task
        raise ValueError(f"Unknown task {name!r}. This model has: {', '.join(self.task_names) or 'no tasks'}.")

    def set_active_task(self, name: str | None) -> None:
        """Makes `name` the task that stock tools use, and sets the label fields to match. `None` clears it.

        Entries of `tasks` that are not plain dicts yet are converted to dicts and checked first. Without tasks the
        label fields do not change, because they may describe the file that the encoder came from.

        Raises:
            ValueError: `tasks` or `name` is not valid.
        """
        if self.tasks is not None:
            self.tasks = _plain_tasks(self.tasks)
        if name is None and len(self.task_names) == 1:
            name = self.task_names[0]
        task = None if name is None else self.get_task(name)
        self.active_task = name
        if not self.tasks:
            vars(self).pop("_derived", None)
            return
        self._derived = _labels_of(task)
        vars(self).update(deepcopy(self._derived))

    def settle_labels(self, new_head: bool = False) -> None:
        """Compares the labels in the config with those of the active task, if somebody set others.

        Args:
            new_head: whether the active task gets the labels that were set.

        Raises:
            ValueError: they contradict the active task, or are of a kind that no task has.
        """
        derived = vars(self).get("_derived", {})
        found = {
            name: _by_id(value) if name == "id2label" else value for name in derived if (value := getattr(self, name))
        }
        said = {name: value for name, value in found.items() if value != derived[name]}
        self.set_active_task(self.active_task)
        other = {name: value for name, value in said.items() if value != getattr(self, name)}
        if not other:
            return
        if new_head and self.active_task is not None:
            task = _relabelled(self.get_task(self.active_task), said)
            if said.items() <= _labels_of(task).items():
                self.tasks = [task if of["name"] == self.active_task else of for of in self.tasks or ()]
                return self.set_active_task(self.active_task)
        name, value, shown = *next(iter(other.items())), self._derived
        if name == "id2label" and len(value) != len(shown[name]):
            name, value, shown = "num_labels", len(value), {"num_labels": len(shown[name])}
        vars(self).update(said)  # a second try is refused too
        if self.active_task is None:
            raise ValueError(
                f"`{name}={value!r}` is of one task, and none is active. Leave it out, and choose a task by "
                f"`active_task=`: {', '.join(self.task_names)}."
            )
        raise ValueError(
            f"`{name}={value!r}` contradicts the active task {self.active_task!r}, which has {shown[name]!r}. Leave "
            "it out, or choose another task by `active_task=`; for other labels of two or more classes add "
            "`ignore_mismatched_sizes=True`."
        )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Does the same as the library's method, but checks the caller's tasks and sharing against the saved ones.

        Labels are checked here if `ignore_mismatched_sizes` requests a new head; otherwise they are checked when a
        model is made. The folder's code of a registered pipeline is not downloaded.
        """
        saved = config_dict.get("custom_pipelines", {})
        theirs = {name: code for name, code in saved.items() if name not in cls.pipelines_at_hand}
        config_dict = {key: value for key, value in config_dict.items() if key != "custom_pipelines"}
        config_dict |= {"custom_pipelines": theirs} if theirs else {}
        if "name_or_path" in kwargs:  # the Auto classes pass `get_config_dict` by
            config_dict = _with_length(config_dict, str(kwargs["name_or_path"]))
        # The library would set keyword arguments after __post_init__ has derived the labels.
        said = {key: kwargs.pop(key) for key in SET_BEFORE if key in kwargs}
        new_head = kwargs.pop("new_head", kwargs.get("ignore_mismatched_sizes", False))
        has_tasks = said.get("tasks", config_dict.get("tasks"))
        labels = {key: kwargs.pop(key) for key in LABELS if key in kwargs} if has_tasks else {}
        made = super().from_dict(config_dict, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config.rearrange(**said)
        for name, value in _agreeing(labels).items():
            setattr(config, name, value)
        if new_head:
            config.settle_labels(new_head=True)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Does the same as the library's method, without the attributes that only this object needs."""
        return {key: value for key, value in super().to_dict().items() if key not in ("_derived", "_taken")}

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Does the same as the library's method. Raises `ValueError` if a length was set that no model can have."""
        self._check_length()
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Does the same as the library's method, and converts the config of a published encoder to one of MinBERT.

        Raises:
            ValueError: the checkpoint is of another kind, whose weights would load with another meaning; or the recipe
                with the length of an older folder cannot be read.
        """
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") != cls.model_type:
            config_dict = _from_published(config_dict, str(pretrained_model_name_or_path))
        return _with_length(config_dict, str(pretrained_model_name_or_path)), kwargs


def recipe_of(folder: Path) -> Path | None:
    """Returns the recipe that trained the model in a folder.

    For checkpoints and averaged weights, this is the recipe of their run.
    """
    within = re.fullmatch(rf"{AVERAGED}|checkpoint-\d+", folder.resolve().name)
    places = [folder, folder.resolve().parent] if within else [folder]
    return next((place / RECIPE for place in places if (place / RECIPE).is_file()), None)


def _with_length(config_dict: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the saved config of a model with tasks. A missing length is taken from the recipe in its folder."""
    recipe = recipe_of(Path(name)) if Path(name).is_dir() else None
    if recipe is None or not config_dict.get("tasks") or config_dict.get("max_input_length") is not None:
        return config_dict
    return {**config_dict, "max_input_length": _length_in(recipe, config_dict["max_position_embeddings"])}


def _length_in(recipe: Path, positions: int) -> int | None:
    """The `max_length` of a recipe, of one in stages that of the last; `None` for all positions."""
    try:
        lines = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        length = (lines | (lines.get("stages") or [{}])[-1]).get("max_length")
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{recipe}, which says the length of the model beside it, is no recipe: {error}") from error
    if length is not None:
        _check_tokens(f"max_length` of `{recipe}", length, positions)
    return length


def _check_tokens(name: str, length: Any, positions: int) -> None:
    if type(length) is not int or not 1 <= length <= positions:
        raise ValueError(
            f"`{name}` must be a whole number of tokens from 1 to {positions}, the model's number of position "
            f"embeddings. Found {length!r}."
        )


def _from_published(config: dict[str, Any], path: str) -> dict[str, Any]:
    model_type = config.get("model_type", "bert")
    try:
        if model_type in FAMILIES:
            return {**settings_of(config, MinBertConfig), "model_type": MinBertConfig.model_type}
        encoder = _encoder_of(config)
    except ValueError as error:
        raise ValueError(
            f"MinBERT cannot load {path}: its config has {error}. Choose an encoder's checkpoint."
        ) from error
    precision = {key: value for key, value in config.items() if key in ("dtype", "torch_dtype")}
    return {"encoder_config": encoder.to_dict(), "model_type": MinBertConfig.model_type, **precision}


def _encoder_of(config: dict[str, Any]) -> PreTrainedConfig:
    """Returns the library's config of an encoder. Raises `ValueError` if it is not a config."""
    from .library import encoder_config, parts_of

    try:
        encoder = encoder_config(config)
        parts_of(encoder)
    except ValueError as error:
        raise ValueError(f"`model_type` {config.get('model_type')!r}, {error}") from error
    return encoder


def _agreeing(labels: dict[str, Any]) -> dict[str, Any]:
    """Returns the labels that a caller gives, without `None`, and without their number if they have names.

    Raises:
        ValueError: they contradict each other.
    """
    said = {name: labels[name] for name in LABELS if labels.get(name) is not None}
    if "id2label" in said:
        said["id2label"] = _by_id(said["id2label"])
    inverse = {id: label for label, id in said.get("label2id", {}).items()}
    by_id = said.get("id2label", inverse)
    if "label2id" in said and by_id != inverse:
        raise ValueError(
            f"`id2label={by_id!r}` and `label2id={said['label2id']!r}` contradict each other. Leave one of them out."
        )
    if by_id and (number := said.pop("num_labels", len(by_id))) != len(by_id):
        raise ValueError(
            f"`num_labels={number!r}` contradicts the {len(by_id)} labels that are given with it, "
            f"{', '.join(map(repr, by_id.values()))}. Leave it out."
        )
    return said


def _labels_of(task: dict[str, Any] | None) -> dict[str, Any]:
    """What a config shows of a task's labels, and without a task: of `LABELS` all but the first."""
    if task is None:
        names, problem = ["LABEL_0", "LABEL_1"], None  # the library's defaults
    else:
        kind = KINDS[task["kind"]]
        names, problem = [task["name"]] if kind.is_score else task["labels"], kind.problem_type
    labels = dict(enumerate(names))
    return {"id2label": labels, "label2id": {name: id for id, name in labels.items()}, "problem_type": problem}


def _relabelled(task: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Returns the task with the labels of `id2label` or `label2id`. With fewer than two labels it is not changed."""
    by_id = said.get("id2label") or {id: label for label, id in said.get("label2id", {}).items()}
    labels = [by_id[id] for id in sorted(by_id)]
    if len(labels) < 2:
        return task
    kind = task["kind"] if KINDS[task["kind"]].allows(len(labels)) else "classes"
    new = {**task, "kind": kind, "labels": labels, "range": None}
    if (kind, len(labels)) != (task["kind"], len(task["labels"])):
        new.update(loss="", loss_options={})  # which may weigh labels that are gone
        new.update({key: TASK_DEFAULTS[key] for key in ("temperature", "thresholds")})
    if kind != task["kind"]:
        new.pop("metric", None)
    return new


def _by_id(id2label: dict[Any, str]) -> dict[int, str]:
    return {int(id): label for id, label in id2label.items()}  # JSON's keys are text


def _plain_tasks(tasks: list) -> list[dict[str, Any]]:
    if not isinstance(tasks, list | tuple) or any(isinstance(task, str) for task in tasks):
        raise ValueError(
            "`tasks` must be a list of tasks, as `hf_minbert.get_tasks` gives it for names of the package's. Found "
            f"{tasks!r:.100}."
        )
    plain = [_plain_task(task) for task in tasks]
    names = [task["name"] for task in plain]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"`tasks` names {name!r} twice. Give each task a name of its own.")
    return plain


def _plain_task(task: Any) -> dict[str, Any]:
    given = task if isinstance(task, dict) else task.to_config()
    for key in TASK_KEYS:
        if key not in given:
            raise ValueError(f"`tasks`: an entry lacks {key!r}; it needs {', '.join(TASK_KEYS)}. Found {given!r}.")
    if given["kind"] not in KINDS:
        raise ValueError(f"Task {given['name']!r}: `kind` must be one of {', '.join(KINDS)}. Found {given['kind']!r}.")
    is_score = KINDS[given["kind"]].is_score
    if is_score and len(given.get("range") or ()) != 2:
        raise ValueError(f"Task {given['name']!r}: a score needs `range` as [lowest, highest]. Found {given!r}.")
    if not is_score and given.get("range") is not None:
        raise ValueError(
            f"Task {given['name']!r}: `range` is for a score, and `kind` is {given['kind']}. Found "
            f"{given['range']!r}. Leave it out."
        )
    silent = {**TASK_DEFAULTS, "pooling": ""} if KINDS[given["kind"]].is_tags else TASK_DEFAULTS
    task = {**silent, **given}
    for key in ("pooling", "layers", "join", "head", "loss"):
        if not isinstance(task[key], str):
            raise ValueError(f"Task {task['name']!r}: `{key}` must be text. Found {task[key]!r}.")
    if task["pair_encoding"] not in PAIR_ENCODINGS:
        found = f"Found {task['pair_encoding']!r}"
        raise ValueError(
            f"Task {task['name']!r}: `pair_encoding` must be one of {', '.join(PAIR_ENCODINGS)}. {found}."
        )
    for key in ("pooling_options", "head_options", "loss_options"):
        if not isinstance(task[key], dict):
            raise ValueError(f"Task {task['name']!r}: `{key}` must be a dict of options. Found {task[key]!r}.")
        task[key] = dict(task[key])  # the model's own: what is counted for `auto` is written here
    # JSON knows lists only: a tuple would come back as another value than it went.
    return {key: list(value) if isinstance(value, tuple) else value for key, value in task.items()}


MinBertConfig.register_for_auto_class()
