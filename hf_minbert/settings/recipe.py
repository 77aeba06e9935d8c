"""A recipe: `key: value` lines of YAML, overridden by `key=value` arguments, converted to typed settings.

It needs neither the Trainer nor a model, so that a misspelt line is reported at once. The keys are those of
`RunSettings` and the fields of `MultiTaskTrainingArguments`.
"""

from __future__ import annotations

import copy
import enum
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from ..errors import MinBertError, unknown_name
from . import plugins
from .dotted import Value, in_order, set_for_all, set_key
from .run import RunSettings
from .stock import stock_hints
from .table import names
from .training import TrainingKeys

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
                raise ConstructorError(
                    problem=f"the key {key!r} occurs twice; delete one", problem_mark=key_node.start_mark
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
    """Quotes a text that YAML 1.1 or 1.2 would read as something else, so that both read the same text."""

    yaml_implicit_resolvers = {
        first: [*older, *_Yaml12Loader.yaml_implicit_resolvers.get(first, [])]
        for first, older in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _read_yaml(text: str, where: str) -> Any:
    """Reads `text` as a `Value`, or as a dict of them if it is a mapping. Errors name `where` and the line."""
    loader = None
    try:
        loader = _Yaml12Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            for _, value in node.value:
                _keep_characters(value)
            loader.construct_mapping(node, deep=True)  # refuses a key that stands twice, at any depth
            return {loader.construct_object(key): _value(loader, value) for key, value in node.value}
        if node is None:
            return Value(None, "")
        _keep_characters(node)
        return _value(loader, node)
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
    return Value(_apart(loader.construct_object(node, deep=True)), text)


def _apart(tree: Any) -> Any:
    """As it is, but what an anchor names twice is there twice: a dotted key changes one of the two."""
    if isinstance(tree, dict):
        return {key: _apart(value) for key, value in tree.items()}
    return [*map(_apart, tree)] if isinstance(tree, list) else tree


def _keep_characters(node: yaml.Node) -> None:
    """Converts a number to text if the key of a stage takes text, as outside stages: `run_name: 007`."""
    for stage in node.value if isinstance(node, yaml.SequenceNode) else ():
        for key, value in stage.value if isinstance(stage, yaml.MappingNode) else ():
            if value.tag.endswith((":int", ":float")) and _takes_text(key.value):
                value.tag = "tag:yaml.org,2002:str"


def recipes_folder() -> Path:
    """Returns the folder with the package's recipes: inside the package if it is installed, beside it in a clone."""
    installed = Path(__file__).parents[1] / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """Returns the recipes of the package by name: the path in their folder without `.yaml`."""
    folder = recipes_folder()
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    # no recipes, those: settings of accelerate, and files such as `search.space.yaml`, whose second ending says what
    return {n: path for n, path in found.items() if not n.startswith("accelerate/") and not Path(n).suffix}


def find_packaged(given: str | Path, ending: str) -> Path | None:
    """Returns the file with this path, or with this name in the package without its ending, or `None`."""
    places = (given, recipes_folder() / f"{given}{ending}")
    return next((Path(place) for place in places if os.path.isfile(place)), None)  # also of a text that is no path


def find_recipe(path: str | Path) -> Path:
    """Returns the file at `path` or, if there is none, the package's recipe with that name, such as `cs224n/baseline`.

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
    """Reads a recipe and the `key=value` arguments that override it.

    Args:
        path: a file, or the name of a recipe of the package; see `find_recipe`.
        overrides: the arguments. A key with dots sets a part of a line, `tasks.sst.head=mlp`; see `set_key`. An
            argument applies to the recipe and to all stages with a line of that key. One with dots applies only to
            lines that have that part. `stages.heads.max_steps=2` is for the stage `heads` only. It takes precedence
            over arguments for all stages. If the stage does not have the key, it starts from the recipe's value.

    Plugins in the recipe's folder or the working directory get their folder in front of the name. They are not
    imported. Recipes of `teachers` in the recipe's folder get it too.

    Raises:
        MinBertError: the file is missing or not YAML, a key is repeated, an argument has no `=`, or its stage does not
            exist.
    """
    path = find_recipe(path)
    values = read_lines(path)
    words: dict[str, Value] = {}
    for word in overrides:
        key, equals, written = word.partition("=")
        if not equals or not key:
            raise MinBertError(f"{word!r} is not `key=value`. Write for example learning_rate=1e-4.")
        if key in words:
            raise MinBertError(f"{key!r} is given twice after the recipe. Give it once.")
        words[key] = read_value(written, f"`{word}`")
    override(values, words)
    if "plugins" in values:
        values["plugins"] = Value(plugins.located(values["plugins"].value, path.parent), None)
    for entry in _teachers(values, str):
        entry["recipe"] = beside(entry["recipe"], path.parent)
    return values


def read_lines(path: Path) -> dict[str, Value]:
    """Returns the lines of a recipe's file without changes. Raises the errors of `read_recipe`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise MinBertError(f"Recipe {path}: cannot be read as UTF-8 text: {error}.") from error
    values = _read_yaml(text, f"Recipe {path}")
    if not isinstance(values, dict):
        raise MinBertError(f"Recipe {path}: expected lines of `key: value`. Found {values.value!r}.")
    return values


def beside(recipe: str, folder: Path) -> str:
    """Returns the path of a recipe that a file names: in the file's folder if it is there, otherwise unchanged."""
    return str(folder / recipe) if recipe and (folder / recipe).is_file() else recipe


def _teachers(lines: Mapping[str, Any], kind: type) -> Iterator[dict[str, Any]]:
    """Returns the entries of `teachers`, also in stages, whose recipe has this type.

    Errors in them are reported later.
    """
    for of in (lines, *_stages(lines)):
        line = of.get("teachers")
        entries = line.value if isinstance(line, Value) else line
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("recipe"), kind):
                yield entry


def teacher_recipes(lines: Mapping[str, Any]) -> list[str]:
    """Returns the names of the recipes in the entries of `teachers`, each once."""
    return [*dict.fromkeys(entry["recipe"] for entry in _teachers(lines, str))]


def with_teachers_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy in which the entries of `teachers` have the lines of their recipes instead of paths.

    It does not depend on the files any more. Recipes of the package are kept as names.
    """
    values = {**values, **{key: copy.deepcopy(values[key]) for key in ("teachers", "stages") if key in values}}
    for entry in _teachers(values, str):
        path = Path(entry["recipe"])
        if not os.path.isfile(path):
            continue
        try:
            lines = {key: _plain(key, value) for key, value in read_recipe(path).items()}
        except MinBertError:  # said where teachers are trained, with the entry's name
            continue
        entry |= {"recipe": lines, "name": str(entry.get("name", path.stem))}
    return values


def override(values: dict[str, Value], words: Mapping[str, Value], absent: bool = False) -> None:
    """Sets keys for the whole recipe, in place, by the rules of `read_recipe`.

    Args:
        absent: a part that `None` removes may be missing.
    """
    for stage in _stages(values):
        for key in words.keys() & stage.keys():
            del stage[key]
    values |= {key: value for key, value in words.items() if "." not in key}
    dotted = {key: _raw(key, value) for key, value in words.items() if "." in key}
    for key in in_order(dotted):
        of_one = key.startswith("stages.") or "stages" in words
        (set_key if of_one else set_for_all)(values, key, dotted[key], repr(key), absent=absent)


def _stages(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    line = values.get("stages")
    stages = line.value if isinstance(line, Value) else line
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def _raw(key: str, value: Value) -> Any:
    """The value of a key with dots. That of a stage's line, `stages.all.run_name=007`, may be text."""
    line = key.split(".", 2)[2:] if key.startswith("stages.") else []
    return _plain(line[0], value) if line else value.value


def _plain(key: str, value: Value) -> Any:
    """Returns the value of a line; for a key that takes text, such as `run_name: 007`, the characters."""
    return value.text if type(value.value) in (int, float) and _takes_text(key) else value.value


def _takes_text(key: Any) -> bool:
    if key == "name":  # of the stage
        return True
    hints = {**stock_hints(), **typing.get_type_hints(TrainingKeys), **settings_types()}
    try:
        return isinstance(cast("", Value(7, "007"), hints.get(str(key))), str)
    except MinBertError:
        return False


def read_value(written: str, where: str) -> Value:
    """Reads an argument of the command line as YAML. A `MinBertError` for an invalid one begins with `where`."""
    parsed = _read_yaml(written, where)
    if isinstance(parsed, dict):
        return Value({name: inner.value for name, inner in parsed.items()}, None)
    return parsed


# ---- From values to settings -----------------------------------------------------------------------------


def settings_types() -> dict[str, Any]:
    """Returns our own keys and their types."""
    return typing.get_type_hints(RunSettings)


def split_recipe(values: Mapping[str, Value], training_types: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """Converts a recipe's values to typed settings.

    Args:
        values: the result of `read_recipe`.
        training_types: the type hint of every training argument, by name.

    Returns:
        the run's settings, and the training arguments in the recipe.

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


def _unknown_key(key: str, known: Iterable[str]) -> MinBertError:
    error = unknown_name("key", key, known)
    near = re.search(r"Did you mean .*?\?", str(error))
    meant = f"Did you mean {ELSEWHERE[key]!r}?" if key in ELSEWHERE else near[0] if near else ""
    return MinBertError(
        f"Unknown key {key!r}. {meant}".rstrip()
        + " Keys are those listed by `minbert train --help` and the fields of TrainingArguments."
    )


def cast(key: str, value: Value, hint: Any) -> Any:
    """Converts `value` to the type `hint`. Raises `MinBertError` if it does not fit."""
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
    """Describes the values of a key with this type hint, in plain words."""
    words = dict.fromkeys(_words(option) for option in _options(hint))
    return " or ".join(sorted(words, key=lambda word: word == "null"))  # null last


def _options(hint: Any) -> list[Any]:
    """Returns the members of a union, the narrow ones first. Text accepts every scalar, a list accepts a word."""
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


def _fit_all(items: list[Any], hint: Any) -> tuple[bool, list[Any]]:
    try:
        return True, [cast("item", Value(item, None), hint) for item in items]
    except MinBertError:
        return False, []


def _words(option: Any) -> str:
    origin, args = typing.get_origin(option), typing.get_args(option)
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in option)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is list:
        of_mappings = dict in (args[0], typing.get_origin(args[0]))
        return "a list of mappings" if of_mappings else f"a list of {type_in_words(args[0])} like [a, b]"
    if origin is dict:
        return f"a mapping{'' if args[1] is Any else f' to {type_in_words(args[1])}'} like {{sts: ...}}"
    plain = {
        bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping",
        type(None): "null", Any: "anything",
    }  # fmt: skip
    return plain.get(option, str(option))


def write_recipe(path: str | Path, settings: RunSettings, training: Mapping[str, Any]) -> None:
    """Writes a recipe that `read_recipe` and `split_recipe` convert to the same settings again.

    Recipes of `teachers` are written as `teachers/<name>.yaml` beside it, so that all can be moved together.
    """
    from ..io import write_atomically

    lines = {**vars(settings), **training}
    lines = {key: value.value if isinstance(value, enum.Enum) else value for key, value in lines.items()}
    lines = with_teachers_read(lines)
    for entry in _teachers(lines, dict):
        own = {key: value for key, value in entry["recipe"].items() if key not in names(scope="secret")}
        entry["recipe"] = f"teachers/{entry['name']}.yaml"
        write_atomically(Path(path).parent / entry["recipe"], recipe_text(own))
    write_atomically(path, recipe_text(lines))


def recipe_text(lines: Mapping[str, Any]) -> str:
    """Returns keys and plain values as YAML from which `read_recipe` reads the same values."""
    return yaml.dump(dict(lines), Dumper=_Yaml12Dumper, sort_keys=False, allow_unicode=True)
