"""A recipe: flat `key: value` lines of YAML, overridden by `key=value` words, turned into typed settings.

It needs neither the Trainer nor a model, so that a misspelt line is answered at once. The keys are those of
`RunSettings` below and the fields of `MultiTaskTrainingArguments`, each under its own name.
"""

from __future__ import annotations

import enum
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import MinBertError, unknown_name

#: Settings that the model's config keeps.
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
Objective = Literal["tasks", "mlm"]
TextOrder = Literal["mixed", "sequence"]


@dataclass
class RunSettings:
    """What a run needs beside its training arguments: the model, the tasks and their data.

    Args:
        model_name_or_path: a BERT checkpoint or a model saved by this package: a folder or a Hub id.
        output_dir: the run's folder.
        data_dir: the folder with the tasks' files; or `sample` for the sample that comes with the package, or `hub`
            for the tasks' datasets on the Hub. Tasks that name their data need none.
        tasks: the tasks the model has, in this order. Each gets a head. A list of names, or a mapping of name to
            fields of `Task` (see `hf_minbert.tasks.get_tasks`), such as where its data lies.
        max_length: longest input in tokens; longer ones are cut. Unless given, the length that the model was trained
            for; of a plain BERT, all its positions. The saved model carries it, and what reads text with it cuts there
            too. With `objective: mlm` it is for that run alone.
        hidden_dropout_prob: overrides the checkpoint's dropout on hidden states and before the heads.
        attention_probs_dropout_prob: overrides the checkpoint's dropout on attention weights.
        private_layers: how many of the encoder's last layers each task has for itself, a copy of the checkpoint's to
            begin with; the layers below are shared.
        attn_implementation: `sdpa` or `eager`, or another of transformers' attention functions.
        model_revision: branch, tag or commit of a Hub checkpoint.
        peft: train an adapter and the heads, and leave the rest as it is: `{peft_type: LORA, r: 8, lora_alpha: 16,
            target_modules: [query, value]}`, options of the library peft under its names. `peft_type` is `LORA` (with
            `use_dora`, `use_rslora`), `LOHA`, `LOKR`, `OFT` or `IA3`; `target_modules` are names of the encoder's
            layers, or `all-linear`. The run saves adapter and trained heads alone, beside the name of the model under
            them. Trained on without `peft`, that becomes one model with it; with the same `peft`, it goes on.
        cache_dir: where tokenized rows are kept, so that the next run with the same texts, tokenizer and `max_length`
            starts sooner. Nothing is kept unless given.
        strict_data: a blank label or text in training or dev data is an error instead of a dropped row.
        held_out: tasks, written as in `tasks`, whose dev and test rows are kept out of borrowed rows (see `sources` of
            a task) and of the texts of `objective: mlm`, beside those of `tasks`. Unless given, the package's tasks
            whose files lie in `data_dir`. The tasks of later stages are held out in any case.
        drop_shared_sentences: also drop a borrowed row of which a single sentence stands in a dev or test row. They
            are only counted otherwise; a row that stands there whole is always dropped.
        overwrite: train into a folder that holds a run already, which deletes that run.
        stages: runs that follow each other, a list with a mapping for each: its `name`, and the keys in which it
            differs from the rest of the recipe. Each begins with the model that the one before ended with (its best
            one, with `load_best_model_at_end`), and has its own folder in `output_dir`, where the last one's results
            end up too.
        objective: what is trained: `tasks`; or `mlm`, masked language modelling, which pre-trains the encoder further
            without heads, and is scored by its perplexity on the texts of the dev splits, before and after, of all and
            of each task. Texts that are also in dev or test rows are left out. The folder is a checkpoint, from which
            the next run or stage takes encoder and pooler. Start from one with BERT's language modelling head, such as
            google-bert/bert-base-uncased; without it, as in all-MiniLM, the head starts from random numbers. Keys
            about several tasks, such as `aggregator`, have no effect.
        mlm_texts: the texts of `objective: mlm`, a list: `tasks` for those of the training splits, or the path of a
            file with a text a line, looked for in `data_dir` and in the working directory. Each text is taken once.
        mlm_probability: the share of tokens, or of words, that the model is asked for.
        mlm_whole_words: ask for whole words, not for pieces of them.
        mlm_order: `mixed`; or `sequence`, all epochs of the first task's texts, then those of the next task or file.
    """

    model_name_or_path: str
    output_dir: str
    data_dir: str | None = None
    tasks: list[str] | dict[str, Any] = field(default_factory=lambda: ["sst", "para", "sts"])
    max_length: int | None = None
    hidden_dropout_prob: float | None = None
    attention_probs_dropout_prob: float | None = None
    private_layers: int | None = None
    attn_implementation: str = "sdpa"
    model_revision: str | None = None
    peft: dict[str, Any] | None = None
    cache_dir: str | None = None
    strict_data: bool = False
    held_out: list[str] | dict[str, Any] | None = None
    drop_shared_sentences: bool = False
    overwrite: bool = False
    stages: list[dict[str, Any]] | None = None
    objective: Objective = "tasks"
    mlm_texts: list[str] = field(default_factory=lambda: ["tasks"])
    mlm_probability: float = 0.15
    mlm_whole_words: bool = False
    mlm_order: TextOrder = "mixed"

    def __post_init__(self):
        for name, value in self.dropouts.items():
            if not 0 <= value < 1:
                raise MinBertError(f"`{name}` must be at least 0 and less than 1. Found {value}.")
        if not 0 < self.mlm_probability < 1:
            raise MinBertError(f"`mlm_probability` must be more than 0 and less than 1. Found {self.mlm_probability}.")
        if not self.mlm_texts:
            raise MinBertError("`mlm_texts` is empty. Give `tasks`, the path of a text file, or both.")

    @property
    def dropouts(self) -> dict[str, float]:
        """The changes to the dropout in the checkpoint's config."""
        return {name: value for name in DROPOUTS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Value:
    """A value as read, and the characters it was read from (`None` for lists and mappings)."""

    value: Any
    text: str | None


# ---- Reading YAML ----------------------------------------------------------------------------------------


class _Yaml12Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2: `3e-5` is a number, `no` a word, `012` twelve, `1:30` a word."""

    yaml_implicit_resolvers: dict = {}

    def construct_yaml_int(self, node):
        text = self.construct_scalar(node).lower()
        return int(text, 0) if text.startswith(("0x", "0o")) else int(text)

    def construct_yaml_float(self, node):
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_mapping(self, node, deep=False):
        pairs = [(self.construct_object(key, deep=True), key) for key, _ in node.value]
        for position, (key, key_node) in enumerate(pairs):
            if any(key == earlier for earlier, _ in pairs[:position]):
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands twice; delete one", problem_mark=key_node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
):  # fmt: skip
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _Yaml12Loader.construct_yaml_int)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:float", _Yaml12Loader.construct_yaml_float)
_Yaml12Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_undefined)  # none in YAML 1.2


class _Yaml12Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would take for something else, so that both read it as it was."""

    yaml_implicit_resolvers = {
        first: [*older, *_Yaml12Loader.yaml_implicit_resolvers.get(first, [])]
        for first, older in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _read_yaml(text: str, where: str) -> Any:
    """`text` as a `Value`, or as a dict of them where it is a mapping. Errors name `where` and the line."""
    loader = None
    try:
        loader = _Yaml12Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            loader.construct_mapping(node, deep=True)  # refuses a key that stands twice, at any depth
            return {loader.construct_object(key): _value(loader, value) for key, value in node.value}
        return Value(None, "") if node is None else _value(loader, node)
    except (yaml.YAMLError, ValueError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        said = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or " ".join(str(error).split())
        line = f", line {mark.line + 1}" if mark and where.startswith("Recipe") else ""
        hint = " Each line is `key: value`; the fault may stand in the line above." if line else ""
        raise MinBertError(f"{where}{line}: not readable as YAML: {said}.{hint}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _value(loader: yaml.SafeLoader, node: yaml.Node) -> Value:
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    return Value(loader.construct_object(node, deep=True), text)


def recipes_folder() -> Path:
    """The folder with the package's recipes: inside it once installed, beside it in a clone."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name: the path in their folder without `.yaml`."""
    folder = recipes_folder()
    names = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    # no recipes, those: settings of accelerate, and what `minbert search` tries
    return {n: path for n, path in names.items() if not n.startswith("accelerate/") and not n.endswith(".space")}


def find_recipe(path: str | Path) -> Path:
    """The file at `path` or, where there is none, the package's recipe of that name, such as `cs224n/baseline`.

    Raises:
        MinBertError: there is neither.
    """
    path, packaged = Path(path), packaged_recipes()
    if path.is_file():
        return path
    if path.as_posix() in packaged:
        return packaged[path.as_posix()]
    near = get_close_matches(path.with_suffix("").as_posix(), packaged, n=1)
    raise MinBertError(
        f"Recipe {path}: there is no such file. Give the path of a .yaml file, or the name of a recipe that comes "
        f"with the package, such as {(near or ['quickstart'])[0]}."
    )


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Value]:
    """Reads a recipe and the `key=value` words that override it.

    Args:
        path: a file, or the name of a recipe that comes with the package; see `find_recipe`.
        overrides: the words. They hold for all of the recipe's stages, also where one has a line of that key; one like
            `stages.heads.max_steps=2` is for the stage `heads` alone, and goes before those for all.

    Raises:
        MinBertError: the file is missing or not YAML, a key stands twice, a word has no `=` or its stage is not there.
    """
    path = find_recipe(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise MinBertError(f"Recipe {path}: cannot be read as UTF-8 text: {error}.") from error
    values = _read_yaml(text, f"Recipe {path}")
    if not isinstance(values, dict):
        raise MinBertError(f"Recipe {path}: expected lines of `key: value`. Found {values.value!r}.")
    given: set[str] = set()
    of_stages: dict[str, Any] = {}
    for word in overrides:
        key, equals, written = word.partition("=")
        if not equals or not key:
            raise MinBertError(f"{word!r} is not `key=value`. Write for example learning_rate=1e-4.")
        if key in given:
            raise MinBertError(f"{key!r} is given twice after the recipe. Give it once.")
        given.add(key)
        value = read_value(written, f"`{word}`")
        if key.startswith("stages."):
            of_stages[key] = value.value
        else:
            values[key] = value
    stages = values["stages"].value if "stages" in values else None
    if "stages" not in given and isinstance(stages, list):
        for stage in stages:
            for key in given & stage.keys() if isinstance(stage, dict) else ():
                del stage[key]
    for key, value in of_stages.items():
        _, name, own = [*key.split(".", 2), ""][:3]
        if not own:
            raise MinBertError(f"{key!r} names no key of a stage. Write for example stages.{name}.max_steps=2.")
        stages[stage_place(stages, name, f"{key!r}")][own] = value
    return values


def stage_names(stages: Sequence[Any]) -> list[str]:
    """What the stages of a recipe are called: by their `name`, or by their number from 1."""
    given = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    return [str(number if name is None else name) for number, name in enumerate(given, 1)]


def stage_place(stages: Any, name: str, where: str) -> int:
    """The place from 0 of a stage in a recipe's `stages`. Raises `MinBertError`, which begins with `where`."""
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise MinBertError(f"{where}: the recipe has no list of `stages`. Leave `stages.{name}.` out.")
    names = stage_names(stages)
    if name not in names:
        raise MinBertError(f"{where}: {unknown_name('stage', name, names)}")
    return names.index(name)


def read_value(written: str, where: str) -> Value:
    """A word of the command line as YAML. Raises `MinBertError`, which begins with `where`, if it is none."""
    parsed = _read_yaml(written, where)
    if isinstance(parsed, dict):
        return Value({name: inner.value for name, inner in parsed.items()}, None)
    return parsed


# ---- From values to settings -----------------------------------------------------------------------------


def settings_types() -> dict[str, Any]:
    """Our own keys and their types."""
    return typing.get_type_hints(RunSettings)


def split_recipe(values: Mapping[str, Value], training_types: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """Typed settings out of a recipe's values.

    Args:
        values: what `read_recipe` gave.
        training_types: name to type hint of every training argument.

    Returns:
        the run's settings, and the training arguments that the recipe names.

    Raises:
        MinBertError: a key is unknown or missing, or its value does not fit its type.
    """
    types_ = {**training_types, **settings_types()}
    for key in values:
        if key not in types_:
            raise _unknown_key(key, types_)
    required = [f.name for f in fields(RunSettings) if f.default is f.default_factory]  # both are MISSING
    for name in required:
        if name not in values or values[name].value in (None, ""):
            raise MinBertError(f"`{name}` is missing. Add a line `{name}: ...` to the recipe, or {name}=... after it.")
    typed = {key: cast(key, value, types_[key]) for key, value in values.items()}
    ours = {f.name for f in fields(RunSettings)}
    settings = RunSettings(**{key: value for key, value in typed.items() if key in ours})
    training = {key: value for key, value in typed.items() if key not in ours}
    return settings, {"output_dir": settings.output_dir, **training}


#: Names that people know from elsewhere, and from older versions of TrainingArguments.
ELSEWHERE = {
    "batch_size": "per_device_train_batch_size", "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size", "epochs": "num_train_epochs", "num_epochs": "num_train_epochs",
    "lr": "learning_rate", "model": "model_name_or_path", "model_name": "model_name_or_path", "steps": "max_steps",
    "max_seq_length": "max_length", "dropout": "hidden_dropout_prob", "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps", "overwrite_output_dir": "overwrite", "resume": "resume_from_checkpoint",
}  # fmt: skip


def _unknown_key(key: object, known: Iterable[str]) -> MinBertError:
    error = unknown_name("key", key, known)
    near = re.search(r"Did you mean .*?\?", str(error))
    meant = f"Did you mean {ELSEWHERE[key]!r}?" if key in ELSEWHERE else near[0] if near else ""
    return MinBertError(
        f"Unknown key {key!r}. {meant}".rstrip()
        + " Keys are those listed by `minbert train --help` and the fields of TrainingArguments."
    )


def cast(key: str, value: Value, hint: Any) -> Any:
    """`value` as the type `hint` asks for. Raises `MinBertError` where it does not fit."""
    options = _options(hint)
    if type(value.value) is float and float in options:  # where whole numbers are taken too, 1.0 is not 1
        return value.value
    for option in options:
        fits, result = _fit(value, option)
        if fits:
            return result
    found = repr(value.value) if value.text is None else value.text or "nothing"
    raise MinBertError(f"`{key}` must be {type_in_words(hint)}. Found {found}.")


def type_in_words(hint: Any) -> str:
    """What a key with this type hint takes, in plain words."""
    words = dict.fromkeys(_words(option) for option in _options(hint))
    return " or ".join(sorted(words, key=lambda word: word == "null"))  # null last


def _options(hint: Any) -> list[Any]:
    """The members of a union, the narrow before the wide: text takes every scalar, and a list one word too."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = list(typing.get_args(hint)) if union else [hint]
    if any(isinstance(member, type) and issubclass(member, enum.Enum) for member in members):
        members = [
            member for member in members if member is not str
        ]  # TrainingArguments writes `SomeEnum | str`, and means the enum's values
    return sorted(members, key=lambda member: (typing.get_origin(member) is list, member is str, member is float))


def _fit(value: Value, option: Any) -> tuple[bool, Any]:
    raw, origin = value.value, typing.get_origin(option)
    if option is Any:
        return True, raw
    if option is type(None):
        return raw is None, None
    if option is bool:
        return isinstance(raw, bool), raw
    if option is int:
        whole = isinstance(raw, int) or (isinstance(raw, float) and raw.is_integer())
        return (True, int(raw)) if whole and not isinstance(raw, bool) else (False, None)
    if option is float:
        return (True, float(raw)) if isinstance(raw, int | float) and not isinstance(raw, bool) else (False, None)
    if option is str:  # `run_name: 2024` means the characters, not the number
        return (True, value.text) if value.text is not None and raw is not None else (isinstance(raw, str), raw)
    if isinstance(option, type) and issubclass(option, enum.Enum):
        found = raw in [member.value for member in option]
        return (True, option(raw)) if found else (False, None)
    if origin is typing.Literal:
        return raw in typing.get_args(option), raw
    if origin is list:
        items = [raw] if isinstance(raw, str) else raw  # one word stands for a list of one
        return _fit_all(items, typing.get_args(option)[0]) if isinstance(items, list) else (False, None)
    if option is dict or origin is dict:
        if not isinstance(raw, dict):
            return False, None
        inner = typing.get_args(option)[1] if origin is dict else Any
        fits, items = _fit_all(list(raw.values()), inner)
        return fits, dict(zip(map(str, raw), items, strict=True)) if fits else None
    return isinstance(option, type) and isinstance(raw, option), raw


def _fit_all(items: list[Any], hint: Any) -> tuple[bool, list[Any] | None]:
    try:
        return True, [cast("item", Value(item, None), hint) for item in items]
    except MinBertError:
        return False, None


def _words(option: Any) -> str:
    origin, args = typing.get_origin(option), typing.get_args(option)
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in option)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is list:
        return f"a list of {_words(args[0])} like [a, b]"
    if origin is dict:
        return f"a mapping to {type_in_words(args[1])} like {{sts: ...}}"
    plain = {
        bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping",
        type(None): "null", Any: "anything",
    }  # fmt: skip
    return plain.get(option, str(option))


def write_recipe(path: str | Path, settings: RunSettings, training: Mapping[str, Any]) -> None:
    """Writes a recipe that `read_recipe` and `split_recipe` turn into the same settings again."""
    from .io import write_atomically

    lines = {**vars(settings), **training}
    lines = {key: value.value if isinstance(value, enum.Enum) else value for key, value in lines.items()}
    write_atomically(path, recipe_text(lines))


def recipe_text(lines: Mapping[str, Any]) -> str:
    """Keys and plain values as YAML that `read_recipe` reads as they were."""
    return yaml.dump(dict(lines), Dumper=_Yaml12Dumper, sort_keys=False, allow_unicode=True)
