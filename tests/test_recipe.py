"""Recipes: YAML 1.2 scalars, keys with the nearest right one, and values cast by type hints."""

from __future__ import annotations

import enum
import math
import types
import typing
from dataclasses import MISSING, fields, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from hf_minbert import MinBertError, MultiTaskTrainingArguments, get_tasks
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.keys import default_of
from hf_minbert.settings.recipe import cast, read_recipe, settings_types, split_recipe, write_recipe
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.stock import REFUSED as REFUSED_ARGUMENTS
from hf_minbert.settings.table import OURS, names
from hf_minbert.settings.tasks import TASKS

RECIPES = Path(__file__).parents[1] / "recipes"
TRAINING_TYPES = typing.get_type_hints(MultiTaskTrainingArguments)
REQUIRED = {"model_name_or_path": "m", "output_dir": "o"}


@pytest.fixture
def read(tmp_path):
    """`read(text, *words)` is what `read_recipe` makes of a file with that text."""

    def read(text: str, *words: str) -> dict[str, Value]:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return read_recipe(path, words)

    return read


@pytest.fixture
def split(read):
    """`split(line, ...)` is `(settings, training)` of a recipe with the required keys and these lines."""

    def split(*lines: str, words: tuple[str, ...] = ()) -> tuple[RunSettings, dict[str, Any]]:
        required = [f"{key}: {value}" for key, value in REQUIRED.items()]
        return split_recipe(read("\n".join([*required, *lines]), *words), TRAINING_TYPES)

    return split


# ---- YAML 1.2


SCALARS = [
    ("3e-5", 3e-5), ("1e5", 1e5), ("1E+3", 1e3), ("2.0e-5", 2e-5), (".5", 0.5), ("5.", 5.0), ("-1.5", -1.5),
    ("7", 7), ("-2", -2), ("+3", 3), ("012", 12), ("0x1F", 31), ("0o17", 15),
    (".inf", math.inf), ("-.INF", -math.inf),
    ("true", True), ("True", True), ("FALSE", False), ("null", None), ("~", None), ("", None), ("Null", None),
    ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("NO", "NO"), ("y", "y"),
    ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("0b11", "0b11"), ("0o8", "0o8"), ("1e", "1e"),
    ("e5", "e5"), ("inf", "inf"), ("nan", "nan"), ("tRue", "tRue"), ("'no'", "no"),
    ('"3e-5"', "3e-5"), ("'null'", "null"),
    ("[1, no, 3e-5, 012]", [1, "no", 3e-5, 12]), ("{a: no, b: 1:30}", {"a": "no", "b": "1:30"}),
    ("[]", []), ("{}", {}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "value"), SCALARS)
def test_scalars_are_those_of_yaml_1_2_in_the_file_and_after_it(read, written, value):
    for values in (read(f"x: {written}\n"), read("y: 1\n", f"x={written}"), read("x: [other]\n", f"x={written}")):
        assert values["x"].value == value
        assert type(values["x"].value) is type(value)


def test_not_a_number_is_read(read):
    assert math.isnan(read("x: .nan")["x"].value)


def test_words_after_the_recipe_replace_its_lines_and_keep_the_others(read):
    values = read("a: 1\nb: 2\n", "b=3", "c=4")
    assert {key: value.value for key, value in values.items()} == {"a": 1, "b": 3, "c": 4}


def test_a_word_is_split_at_its_first_equals_sign(read):
    assert read("a: 1", "run_name=x=y")["run_name"].value == "x=y"


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path, read):
    path = tmp_path / "windows.yaml"
    path.write_bytes("a: no\r\nb: [1, 2]\r\n".encode("utf-8-sig"))
    assert read_recipe(path) == read("a: no\nb: [1, 2]\n")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a'"),
        ("a: 1\nb:\n  sst: 1\n  sst: 2\n", 4, "'sst'"),
        ("b: {sst: 1, sts: 2, sst: 3}\n", 1, "'sst'"),
        ("a:\n  - x: 1\n    y: {z: 1, z: 1}\n", 3, "'z'"),
        ("a: 1\n'a': 1\n", 2, "'a'"),
        ("a: {1: x, 01: y}\n", 1, "1"),
    ],
)
def test_a_key_that_stands_twice_is_refused_at_any_depth(read, text, line, key):
    with pytest.raises(MinBertError, match=rf"line {line}: .*the key {key} occurs twice"):
        read(text)


def test_a_key_that_stands_twice_in_a_word_is_refused(read):
    with pytest.raises(MinBertError, match=r"`task_batch_sizes=\{sst: 1, sst: 2\}`: .*'sst' occurs twice"):
        read("a: 1", "task_batch_sizes={sst: 1, sst: 2}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2\n", "line 2"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("- a\n- b\n", "expected lines of `key: value`. Found ['a', 'b']"),
        ("a word", "Found 'a word'"),
        ("", "Found None"),
        ("a: \0", "#x0000"),
        ("a: !!python/object:os.system x", "line 1"),
        ("a: !!timestamp x", "line 1"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: *b\n", "undefined alias"),
        ("? [a]\n: 1\n", "line 1"),
    ],
)
def test_what_is_not_a_recipe_is_said_with_file_and_line(read, tmp_path, text, said):
    with pytest.raises(MinBertError) as refusal:
        read(text)
    assert str(refusal.value).startswith(f"Recipe {tmp_path / 'recipe.yaml'}")
    assert said in str(refusal.value)


# ---- Keys


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("model_name", "model_name_or_path"),
        ("data_dri", "data_dir"),
        ("task", "tasks"),
        ("train_task", "train_tasks"),
        ("task_batch_size", "task_batch_sizes"),
        ("learning_rat", "learning_rate"),
        ("evaluation_strategy", "eval_strategy"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("agregator", "aggregator"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(split, key, right):
    for refused in (lambda: split(f"{key}: 1"), lambda: split(words=(f"{key}=1",))):
        with pytest.raises(MinBertError, match=rf"Unknown key '{key}'. Did you mean '{right}'\?"):
            refused()


def test_an_unknown_key_without_a_near_one_says_where_keys_are_listed(split):
    with pytest.raises(MinBertError, match="Unknown key 'zzz'. Keys are those listed by `minbert train --help`"):
        split("zzz: 1")


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("line", ["", "{key}:", "{key}: ''", "{key}: null"])
def test_a_required_key_must_be_there_and_hold_something(read, key, line):
    others = [f"{name}: {value}" for name, value in REQUIRED.items() if name != key]
    with pytest.raises(MinBertError, match=f"`{key}` is missing. Add a line `{key}: ...`"):
        split_recipe(read("\n".join([*others, line.format(key=key)])), TRAINING_TYPES)


def test_ours_go_to_the_settings_and_the_rest_to_the_trainer(split):
    settings, training = split("tasks: sst", "max_length: 64", "learning_rate: 1e-4", "seed: 3")
    assert settings == RunSettings(**REQUIRED, tasks=["sst"], max_length=64)
    assert training == {"output_dir": "o", "learning_rate": 1e-4, "seed": 3}


# ---- Values


TEXTS = ["2024", "012", "1e3", "3.10", "no", "true", "1:30", "0x10", "a b", "über", "1_0", "C:\\runs"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_keeps_its_characters(split, text):
    settings, training = split(f"run_name: {text}", words=(f"output_dir={text}", f"model_revision={text}"))
    assert (settings.output_dir, settings.model_revision, training["run_name"]) == (text, text, text)
    assert training["output_dir"] == text


@pytest.mark.parametrize(("written", "text"), [('"007"', "007"), ("'null'", "null"), ('"a # b"', "a # b")])
def test_quotes_are_not_part_of_a_text(split, written, text):
    assert split(f"run_name: {written}")[1]["run_name"] == text
    assert split(words=(f"run_name={written}",))[1]["run_name"] == text


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


FITTING = [
    (int, "3", 3), (int, "1e3", 1000), (int, "2.0", 2), (float, "3", 3.0), (float, "3e-5", 3e-5), (bool, "true", True),
    (int | None, "null", None), (int | None, "3", 3), (str | None, "", None), (str | None, "2024", "2024"),
    (bool | str | None, "true", True), (bool | str | None, "'true'", "true"), (bool | str | None, "runs/a", "runs/a"),
    (int | float, "3", 3), (int | float, "3.5", 3.5), (float | int, "3", 3),
    (Colour, "red", Colour.RED), (Colour | str, "green", Colour.GREEN), (Literal["a", "b"], "b", "b"),
    (list[str], "[a, b]", ["a", "b"]), (list[str], "a", ["a"]), (list[str] | None, "null", None),
    (list[str], "[]", []),
    (list[float], "[1, 3e-5]", [1.0, 3e-5]), (str | list[str], "a", "a"), (str | list[str], "[a]", ["a"]),
    (dict[str, int], "{sts: 4}", {"sts": 4}), (dict[str, float] | None, "{sts: 2}", {"sts": 2.0}),
    (dict, "{a: {b: no}}", {"a": {"b": "no"}}), (dict | str | None, "{a: 1}", {"a": 1}), (dict | str | None, "a", "a"),
    (typing.Optional[int], "3", 3), (typing.Union[dict, str], "x", "x"),  # noqa: UP007, UP045
    (Any, "[1]", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "written", "value"), FITTING)
def test_a_value_is_cast_by_its_hint(read, hint, written, value):
    found = cast("x", read(f"x: {written}")["x"], hint)
    assert found == value
    assert type(found) is type(value)
    assert cast("x", read("y: 1", f"x={written}")["x"], hint) == value


REFUSED = [
    (int, "ten", "a whole number. Found ten"), (int, "1.5", "a whole number. Found 1.5"), (int, "true", "Found true"),
    (int, ".inf", "Found .inf"), (float, "fast", "a number. Found fast"), (float, "true", "Found true"),
    (float, "'3'", "Found 3"), (bool, "no", "true or false. Found no"), (bool, "1", "Found 1"),
    (int, "", "Found nothing"),
    (str, "null", "text. Found null"), (str, "[a]", "text. Found ['a']"),
    (Colour | str, "blue", "one of red, green. Found blue"),
    (Literal["a", "b"], "c", "one of a, b"), (list[str], "[1]", "a list of text like [a, b]. Found [1]"),
    (list[str], "{a: 1}", "a list of text"), (dict[str, int], "[a]", "a mapping to a whole number"),
    (dict[str, int], "{sts: many}", "Found {'sts': 'many'}"), (int | None, "x", "a whole number or null. Found x"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "written", "said"), REFUSED)
def test_a_value_that_does_not_fit_is_refused_with_what_was_expected_and_found(read, hint, written, said):
    with pytest.raises(MinBertError) as refusal:
        cast("some_key", read(f"x: {written}")["x"], hint)
    assert str(refusal.value).startswith("`some_key` must be ")
    assert said in str(refusal.value)


def options(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]


def sample(option: Any) -> tuple[Any, Any]:
    """A value as YAML gives it, and what it must become. A kind of hint that is not here fails the test."""
    if isinstance(option, type) and issubclass(option, enum.Enum):
        member = list(option)[-1]
        return member.value, member
    origin = typing.get_origin(option)
    if origin is Literal:
        return (typing.get_args(option)[0],) * 2
    if origin is list:
        samples = [sample(inner) for inner in options(typing.get_args(option)[0])] * 2
        return tuple([pair[side] for pair in samples] for side in (0, 1))
    if origin is dict:
        samples = [sample(inner) for inner in options(typing.get_args(option)[1])]
        return tuple({str(number): pair[side] for number, pair in enumerate(samples)} for side in (0, 1))
    plain = {bool: True, int: 3, float: 0.5, str: "word", dict: {"a": 1}, type(None): None, Any: [1]}
    return plain[option], plain[option]


@pytest.mark.parametrize("name", sorted({**TRAINING_TYPES, **settings_types()}))
def test_every_key_takes_every_kind_of_value_that_its_hint_names(name):
    hint = {**TRAINING_TYPES, **settings_types()}[name]
    if name == "parallelism_config":
        assert name in REFUSED_ARGUMENTS  # YAML cannot write its type, and needs not
        return
    has_enum = any(isinstance(option, type) and issubclass(option, enum.Enum) for option in options(hint))
    for option in options(hint):
        if option is str and has_enum:  # the text of such a field is the enum's
            continue
        given, wanted = sample(option)
        found = cast(name, Value(given, given if isinstance(given, str) else None), hint)
        assert (found, type(found)) == (wanted, type(wanted))


DEFAULTS = [f for f in fields(MultiTaskTrainingArguments) if f.init and f.name != "output_dir"]


@pytest.mark.parametrize("field", DEFAULTS, ids=lambda field: field.name)
def test_every_default_of_the_training_arguments_survives_a_recipe(tmp_path, field):
    default = field.default if field.default is not MISSING else field.default_factory()
    write_recipe(tmp_path / "recipe.yaml", RunSettings(**REQUIRED), {field.name: default})
    _, training = split_recipe(read_recipe(tmp_path / "recipe.yaml"), TRAINING_TYPES)
    assert training[field.name] == default


# ---- Writing


@pytest.mark.parametrize(
    "text", [*TEXTS, "null", "~", " x ", "a: b", "# a", "'", '"', "- a", "[a", "", "é\n\tü", "0o7"]
)
def test_a_written_recipe_gives_the_same_text_again(tmp_path, text):
    settings, training = RunSettings(**{**REQUIRED, "model_name_or_path": text or "m"}), {"run_name": text}
    write_recipe(tmp_path / "recipe.yaml", settings, training)
    again = split_recipe(read_recipe(tmp_path / "recipe.yaml"), TRAINING_TYPES)
    assert again == (settings, {"output_dir": "o", **training})


def random_value(random: Random, depth: int = 0) -> Any:
    """Any value that YAML has, with many texts that look like something else."""
    kind = random.choice(["text", "number-like", "word", "leaf", *(["list", "dict"] if depth < 3 else [])])
    if kind == "list":
        return [random_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == "dict":
        return {random_text(random): random_value(random, depth + 1) for _ in range(random.randrange(4))}
    if kind == "leaf":
        numbers = [random.randrange(-(10**9), 10**9), random.uniform(-10, 10), 10.0 ** random.randrange(-300, 300)]
        return random.choice([None, True, False, math.inf, -math.inf, *numbers])
    return random_text(random)


def random_text(random: Random) -> str:
    words = ["no", "on", "y", "null", "~", "true", "1:30", "012", "0o7", "1e5", "<<", "=", "---", "2024-01-01", ".inf"]
    some = random.choice(["0123456789.eE+-:_xo~", " \t\n'\"#:,[]{}&*!|>%@`abc", "aä\u4f60\U0001f600 \ufeff"])
    return random.choice([random.choice(words), "".join(random.choices(some, k=random.randrange(120)))])


@pytest.mark.parametrize("seed", range(100))
def test_a_written_recipe_gives_the_same_values_again(tmp_path, seed):
    random = Random(seed)
    mapping = {random_text(random): random_value(random) for _ in range(3)}
    training = {"lr_scheduler_kwargs": mapping, "learning_rate": 10.0 ** random.randrange(-20, 20)}
    write_recipe(tmp_path / "recipe.yaml", RunSettings(**REQUIRED), training)
    again = split_recipe(read_recipe(tmp_path / "recipe.yaml"), TRAINING_TYPES)[1]
    assert again == {"output_dir": "o", **training}


def test_enums_lists_and_mappings_are_written_as_what_they_stand_for(split, tmp_path):
    lines = ["eval_strategy: no", "lr_scheduler_type: cosine", "task_batch_sizes: {sts: 4}", "train_tasks: [sst, sts]"]
    ours, training = split(*lines, "tasks: [sts, sst]", "overwrite: true", "warmup_steps: 0.1")
    write_recipe(tmp_path / "again.yaml", ours, training)
    assert split_recipe(read_recipe(tmp_path / "again.yaml"), TRAINING_TYPES) == (ours, training)
    assert "!!" not in (tmp_path / "again.yaml").read_text(encoding="utf-8")


# ---- The recipes of this project


def recipe_files() -> list[Path]:
    """Neither accelerate's files nor spaces, studies and overrides, whose names have two endings, are recipes."""
    files = [path for path in sorted(RECIPES.rglob("*.yaml")) if "accelerate" not in path.relative_to(RECIPES).parts]
    return [path for path in files if path.suffixes == [".yaml"]]


def test_there_are_recipes():
    assert RECIPES / "cs224n" / "baseline.yaml" in recipe_files()


@pytest.mark.parametrize("path", recipe_files(), ids=lambda path: str(path.relative_to(RECIPES)))
def test_a_recipe_of_this_project_is_valid(path):
    ours, training = split_recipe(read_recipe(path), TRAINING_TYPES)
    tasks = {task.name: task for task in get_tasks(ours.tasks)}
    args = MultiTaskTrainingArguments(**{**training, "use_cpu": True})
    args.check_tasks(tasks)
    assert args.output_dir == ours.output_dir


# ---- Keys with dots


DOTTED = """
tasks:
  sst: {pooling: mean, head_options: {dropout: 0.2, hidden_sizes: [8]}}
  sts: {sources: [{task: para, rows: 10}]}
stages:
  - {name: heads, freeze: encoder, tasks: {sst: {pooling: max}}}
  - {name: all}
"""


def dotted(tmp_path, *words):
    path = tmp_path / "dotted.yaml"
    path.write_text(DOTTED, encoding="utf-8")
    return {key: value.value for key, value in read_recipe(path, words).items()}


def test_a_key_with_dots_changes_one_part_and_keeps_the_rest(tmp_path):
    tasks = dotted(tmp_path, "tasks.sst.head_options.dropout=0.3", "tasks.sts.sources.0.rows=5")["tasks"]
    assert tasks["sst"] == {"pooling": "mean", "head_options": {"dropout": 0.3, "hidden_sizes": [8]}}
    assert tasks["sts"] == {"sources": [{"task": "para", "rows": 5}]}


def test_a_mapping_is_merged_and_null_unsets(tmp_path):
    tasks = dotted(tmp_path, "tasks.sst={head: mlp}", "tasks.sst.pooling=null", "tasks.sts=null", "tasks.para={}")[
        "tasks"
    ]
    assert tasks == {"sst": {"head": "mlp", "head_options": {"dropout": 0.2, "hidden_sizes": [8]}}, "para": {}}


def test_a_key_with_dots_makes_the_mapping_that_is_not_there(tmp_path):
    assert dotted(tmp_path, "task_batch_sizes.sts=4")["task_batch_sizes"] == {"sts": 4}
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 1", encoding="utf-8")
    assert read_recipe(path, ["tasks.sst.head=mlp"])["tasks"].value == {
        "sst": {"head": "mlp"},
        "para": None,
        "sts": None,
    }


def test_a_dotted_key_changes_one_of_two_that_an_anchor_names(read):
    tasks = "{a: {files: &f {train: [x.csv]}, columns: &c {label: l}}, b: {files: *f, columns: *c}}"
    found = read(f"tasks: {tasks}", "tasks.a.files.train=y.csv", "tasks.b.columns.label=m")["tasks"].value
    assert found == {
        "a": {"files": {"train": "y.csv"}, "columns": {"label": "l"}},
        "b": {"files": {"train": ["x.csv"]}, "columns": {"label": "m"}},
    }


def test_a_key_with_dots_holds_for_stages_with_a_line_of_their_own(tmp_path):
    found = dotted(tmp_path, "tasks.sst.pooling=cls", "stages.all.tasks.sst.pooling=max")
    assert found["tasks"]["sst"]["pooling"] == "cls"
    assert found["stages"][0]["tasks"] == {"sst": {"pooling": "cls"}}
    expected = {**found["tasks"], "sst": {**found["tasks"]["sst"], "pooling": "max"}}
    assert found["stages"][1] == {"name": "all", "tasks": expected}


def words_on(read):
    """`lines(text, *words)`: the recipe's plain values after the words."""
    return lambda text, *words: {key: value.value for key, value in read(text, *words).items()}


IN_STAGES = """
tasks: {sst: {pooling: mean}, para: , sts: }
task_weights: {para: 3}
train_tasks: [sst, para]
stages: [{name: a, tasks: [para]}, {name: b}]
"""


@pytest.mark.parametrize(
    ("word", "line", "expected"),
    [
        (
            "stages.b.tasks.sst.head=mlp",
            "tasks",
            {"sst": {"pooling": "mean", "head": "mlp"}, "para": None, "sts": None},
        ),
        ("stages.b.tasks.sst.pooling=null", "tasks", {"sst": {}, "para": None, "sts": None}),
        ("stages.b.tasks.para=null", "tasks", {"sst": {"pooling": "mean"}, "sts": None}),
        ("stages.b.task_weights.sst=5", "task_weights", {"para": 3, "sst": 5}),
        ("stages.b.learning_rates.heads=0.1", "learning_rates", {"heads": 0.1}),
        ("stages.b.train_tasks.0=sts", "train_tasks", ["sts", "para"]),
        ("stages.b.proximal_momentum.0=0.5", "proximal_momentum", [0.5, 0.999]),
        ("stages.b.task_weights=null", "task_weights", None),
    ],
)
def test_a_key_of_a_stage_without_that_line_begins_with_the_recipe_s(read, word, line, expected):
    values, before = words_on(read)(IN_STAGES, word), words_on(read)(IN_STAGES)
    assert values["stages"] == [before["stages"][0], {"name": "b", line: expected}]
    assert {**values, "stages": None} == {**before, "stages": None}


def test_a_list_of_tasks_in_a_stage_is_the_mapping_that_it_stands_for(read):
    values = words_on(read)(IN_STAGES, "stages.a.tasks.para.head=mlp")
    assert values["stages"][0] == {"name": "a", "tasks": {"para": {"head": "mlp"}}}


@pytest.mark.parametrize("word", ["tasks.sst.head=linear", "tasks.sst.pooling=null", "tasks.sst=null", "tasks.nli={}"])
def test_a_word_for_all_stages_adds_nothing_to_a_stage_s_own_line(read, word):
    assert words_on(read)(IN_STAGES, word)["stages"] == [{"name": "a", "tasks": ["para"]}, {"name": "b"}]


def test_a_word_for_all_stages_changes_the_part_that_a_stage_has(read):
    text = IN_STAGES.replace("tasks: [para]", "tasks: {sst: {pooling: max}}, task_weights: {sts: 2}")
    words = "tasks.sst.head=mlp", "task_weights.para=4", "task_weights.sts=null"
    values = words_on(read)(text, *words[:2])
    assert values["stages"][0] == {
        "name": "a", "tasks": {"sst": {"pooling": "max", "head": "mlp"}}, "task_weights": {"sts": 2},
    }  # fmt: skip
    assert words_on(read)(text, words[2])["stages"][0]["task_weights"] == {}
    with pytest.raises(MinBertError, match=r"each stage has a line `tasks` of its own.* stages.a.tasks.sst.head"):
        words_on(read)("stages: [{name: a, tasks: [para]}]", "tasks.sst.head=mlp")


def test_keys_are_compared_by_their_characters(read):
    text = "unfreeze: {1: 1, 2: none}"
    assert words_on(read)(text, "unfreeze.2=null") == {"unfreeze": {1: 1}}
    assert words_on(read)(text, "unfreeze.2=0", "unfreeze.3=none") == {"unfreeze": {1: 1, 2: 0, "3": "none"}}
    assert words_on(read)("a: {b: {true: 1, 7: 2}}", 'a.b={"true": 3, "7": 4}') == {"a": {"b": {True: 3, 7: 4}}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train_tasks.0=null"], ["b", "c"]),
        (["train_tasks.0=null", "train_tasks.1=null"], ["c"]),
        (["train_tasks.2=null", "train_tasks.0=null", "train_tasks.1=d"], ["d"]),
    ],
)
def test_null_takes_entries_out_of_a_list_by_their_places_before(read, words, expected):
    assert words_on(read)("train_tasks: [a, b, c]", *words) == {"train_tasks": expected}
    many = words_on(read)(f"train_tasks: {[*range(12)]}", "train_tasks.2=null", "train_tasks.10=null")
    assert many["train_tasks"] == [0, 1, 3, 4, 5, 6, 7, 8, 9, 11]


def test_a_path_becomes_a_mapping_where_an_option_of_the_file_is_set(read):
    text = "tasks: {q: {files: {train: a.tsv, dev: [b.tsv, c.tsv]}}, sts: {sources: [{files: d.tsv}]}}"
    words = [f"tasks.{key}.quotes=false" for key in ("q.files.train", "q.files.dev.1", "sts.sources.0.files")]
    tasks = words_on(read)(text, *words)["tasks"]
    assert tasks["q"]["files"]["train"] == {"path": "a.tsv", "quotes": False}
    assert tasks["q"]["files"]["dev"] == ["b.tsv", {"path": "c.tsv", "quotes": False}]
    assert tasks["sts"]["sources"] == [{"files": {"path": "d.tsv", "quotes": False}}]


def test_what_the_recipe_has_no_line_of_begins_with_its_default(read):
    assert words_on(read)("seed: 1", "proximal_momentum.1=0.9")["proximal_momentum"] == [0.99, 0.9]
    tasks = words_on(read)("seed: 1", "tasks.sst.files.train=own.csv")["tasks"]
    own = get_tasks(tasks)[0]
    assert own == replace(TASKS["sst"], files={**TASKS["sst"].files, "train": "own.csv"})
    assert [*tasks] == default_of(OURS["tasks"])


@pytest.mark.parametrize("where", ["file", "word", "dotted"])
def test_text_keeps_its_characters_in_a_stage(read, where):
    stage = "{name: 01, run_name: 007, max_steps: 007}"
    if where == "dotted":
        values = words_on(read)("stages: [{name: a}]", "stages.a.run_name=007", "stages.a.max_steps=007")
    elif where == "word":
        values = words_on(read)("seed: 1", f"stages=[{stage}]")
    else:
        values = words_on(read)(f"stages: [{stage}]")
    assert values["stages"][0].items() >= {"run_name": "007", "max_steps": 7}.items()
    assert values["stages"][0]["name"] in ("a", "01")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tasks.sst.pooling.size=3", "'tasks.sst.pooling.size' asks for 'size' in 'max', which has no such part"),
        ("tasks.sts.sources.1.rows=3", "'tasks.sts.sources.1.rows' asks for '1' in"),
        ("stages.al.seed=3", "'stages.al.seed': Unknown stage 'al'. Did you mean 'all'"),
        ("tasks.ssst=null", "'tasks.ssst': Unknown part 'ssst'. Did you mean 'sst'"),
        ("tasks.sst.haed=null", "'tasks.sst.haed': Unknown part 'haed'. Did you mean 'head'"),
        ("tasks.sts.sources.0.rowz=null", "Unknown part 'rowz'. Did you mean 'rows'"),
        ("tasks.sts.sources.3=null", "Unknown part '3'. Choose from: 0."),
        ("tasks.sst.head_options.dropuot=null", "Did you mean 'dropout'"),
        ("stages.all.tasks.sst.haed=null", "Did you mean 'head'"),
        ("task_weights.sst=null", "Unknown part 'sst'"),
        ("held_out.nli=null", "the recipe has no line `held_out`, whose default depends on the files in `data_dir`"),
        ("held_out.nli={}", "Write it whole"),
    ],
)
def test_a_key_with_dots_that_leads_nowhere_is_refused(tmp_path, word, said):
    with pytest.raises(MinBertError) as refusal:
        dotted(tmp_path, word)
    assert said in str(refusal.value)


def test_a_field_that_is_not_set_may_be_unset(tmp_path):
    assert dotted(tmp_path, "tasks.sst.loss=null", "tasks.sts.sources.0.fraction=null") == dotted(tmp_path)


def test_a_key_that_only_a_newer_transformers_has_is_fixed_on_resume():
    assert names(among=["brand_new", "packing", "seed"], resume="fixed") == ("brand_new", "seed")
