"""A study: the recipes and seeds of one table, and what that table shows.

    title: Gradient surgery
    reference: sum                        # the row that others are compared with; the first unless given
    seeds: 3                              # 1, 2 and 3; or a list of numbers
    keys: {data_dir: data}                # of every row, as `key=value` after its recipe; `null` unsets
    rows:
      sum: {recipe: cs224n/baseline}
      pcgrad: {recipe: cs224n/baseline, keys: {aggregator: pcgrad, tasks.sst.head: mlp}, reported: {overall: .744}}
      smart: {recipe: cs224n/baseline, keys: {aggregator: pcgrad, regularizer: smart}, against: pcgrad}
      nli: {recipe: reports/003/baseline, not_run: needs MultiNLI}
    claims:
      - {says: Surgery helps on average (section 4)., row: pcgrad, metrics: [overall]}

A file of overrides has `keys` for every row, `recipes` (keys by the name of a recipe) and `rows` (keys by the name of
a row).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError, unknown_name
from .dotted import Value, as_value
from .recipe import beside, find_packaged, override, read_recipe, read_value, recipes_folder
from .table import names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STUDY_FILE = ".study.yaml"  # endings of those that come with the package
OVERRIDES_FILE = ".overrides.yaml"
#: What a run's score is: of its best evaluation, of the last one, or the mean of all.
REDUCTIONS = ("best", "last", "mean")
#: What a claim may find of a row, beside the one that it is compared with.
DIRECTIONS = ("higher", "lower")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: its name, which is also the name of its runs' folder.
        recipe: a path or a name of a packaged recipe.
        keys: the keys of the recipe that it changes.
        reported: scores that others report for it, by the names in `Study.metrics`.
        against: the row that it is compared with. The default is the study's reference.
        note: a sentence for the table.
        not_run: the reason why the row is listed and not run.
        together: instead of a recipe, rows with different tasks. Their runs with the same seed are scored as one run.
        place: where the recipe was found, beside the study's file or by its name.
    """

    name: str
    recipe: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    reported: Mapping[str, float] = field(default_factory=dict)
    against: str = ""
    note: str = ""
    not_run: str = ""
    together: tuple[str, ...] = ()
    place: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether it has runs of its own."""
        return not (self.not_run or self.together)


@dataclass(frozen=True)
class Claim:
    """A claim of others about a row, compared with the row's reference.

    Without `finds` and `within`, the claim is the difference between the scores reported for the two rows.

    Args:
        says: a sentence, with the place where it is claimed.
        row: the name of the row.
        metrics: the metrics in which it is claimed.
        finds: `higher` or `lower`, if no scores are reported.
        within: the largest difference, if the claim is that there is none.
    """

    says: str
    row: str
    metrics: tuple[str, ...]
    finds: str = ""
    within: float | None = None


@dataclass(frozen=True)
class Study:
    """The contents of a study's file. The fields are the keys of the file.

    Args:
        rows: the rows in the order of the table.
        reference: the row that the others are compared with, unless they name another row.
        seeds: the seeds of each row's runs.
        keys: keys for every row. They are applied before the row's own.
        title, source: the title of the table, and the source of the reported scores.
        reduction: one of `REDUCTIONS`.
        metrics: the columns, such as `sst_accuracy`. The default is the tasks' main metrics and `overall`.
        claims: claims of others in words.
        overrides: the contents of a file of overrides: keys for every row, by recipe and by row. They are applied
            after the row's own.
        words: `key=value` arguments of the command line, which are applied last.
    """

    rows: tuple[Row, ...]
    reference: str
    seeds: tuple[int, ...] = (1, 2, 3)
    keys: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    source: str = ""
    reduction: str = "best"
    metrics: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    words: Mapping[str, Value] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def against(self) -> dict[str, str]:
        """Returns the row that each row is compared with. A reference is not compared with itself."""
        found = {row.name: row.against or self.reference for row in self.rows}
        return {name: other for name, other in found.items() if name != other}

    def changes(self, row: Row) -> list[Mapping[str, Any]]:
        """Returns the keys of its recipe that a row changes, in the order of setting them, without the arguments."""
        by_recipe = self.overrides.get("recipes", {}).get(row.recipe, {})
        by_row = self.overrides.get("rows", {}).get(row.name, {})
        return [self.keys, row.keys, self.overrides.get("keys", {}), by_recipe, by_row]

    def recipe(self, row: Row) -> dict[str, Value]:
        """Returns a row's recipe with all changes of the study. Raises the errors of `read_recipe`."""
        values = read_recipe(row.place)
        for keys in self.changes(row):
            override(values, {key: as_value(raw) for key, raw in keys.items()}, absent=True)
        override(values, self.words, absent=True)
        return {key: value for key, value in values.items() if value.value is not None}


def packaged_studies() -> dict[str, Path]:
    """Returns the studies of the package by name: the path in the folder of recipes without its ending."""
    folder = recipes_folder()
    found = sorted(folder.rglob(f"*{STUDY_FILE}"))
    return {path.relative_to(folder).as_posix().removesuffix(STUDY_FILE): path for path in found}


def read_study(path: str | Path, overrides: str | Path | None = None, words: Iterable[str] = ()) -> Study:
    """Reads a study, by its path or its name in the package, with a file of overrides and `key=value` arguments.

    Raises:
        MinBertError: there is no such file, or its contents are invalid.
    """
    found = find_packaged(path, STUDY_FILE)
    if found is None:
        raise MinBertError(f"Study {path}: there is no such file. Give the path of a .yaml file with `rows`.")
    where, read = f"Study {path}", _read(found)
    check_keys(where, read, Study, without=("overrides", "words"))
    rows = read_mapping(f"{where}: `rows`", read.get("rows"))
    if len({*map(str, rows)}) < len(rows):
        raise MinBertError(f"{where}: `rows` has a name twice, as text. Found {', '.join(map(repr, rows))}.")
    if not rows:
        raise MinBertError(f"{where}: `rows` must name one row or more, like `sum: {{recipe: cs224n/baseline}}`.")
    given = {key: value for key, value in read.items() if key in ("title", "source")}
    given["keys"] = read_keys(f"{where}: `keys`", read.get("keys"))
    given["rows"] = tuple(_row(f"{where}: row {name!r}", str(name), row, found) for name, row in rows.items())
    given["seeds"] = read_seeds(where, read.get("seeds", 3))
    given["metrics"] = tuple(_list(f"{where}: `metrics`", read.get("metrics")))
    given["reduction"] = read.get("reduction", "best")
    if given["reduction"] not in REDUCTIONS:
        raise MinBertError(f"{where}: {unknown_name('`reduction`', given['reduction'], REDUCTIONS)}")
    run = [row.name for row in given["rows"] if not row.not_run]
    given["reference"] = str(read.get("reference", next(iter(run), given["rows"][0].name)))
    if run and given["reference"] not in run:
        raise MinBertError(f"{where}: {unknown_name('`reference`, a row that is run,', given['reference'], run)}")
    by_name = {row.name: row for row in given["rows"]}
    for row in by_name.values():
        _check_against(f"{where}: row {row.name!r}", row, by_name)
        trained = [name for name, other in by_name.items() if other.is_trained]
        for name in row.together:
            if name not in trained:
                said = unknown_name("`together`, rows that are trained,", name, trained)
                raise MinBertError(f"{where}: row {row.name!r}: {said}")
    given["claims"] = tuple(
        _claim(f"{where}: claim {number}", claim, by_name, given["reference"])
        for number, claim in enumerate(_list(f"{where}: `claims`", read.get("claims")), 1)
    )
    return Study(**given, overrides={} if overrides is None else _overrides(overrides), words=read_words(words))


def read_words(words: Iterable[str]) -> dict[str, Value]:
    """Reads `key=value` arguments for every row.

    Raises `MinBertError` if one is invalid or sets a key that it may not.
    """
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise MinBertError(f"{word!r} is not `key=value`. Write for example learning_rate=1e-4.")
        found[key] = read_value(text, f"`{key}`")
    read_keys("On the command line", found)
    return found


def _overrides(given: str | Path) -> dict[str, dict[str, Any]]:
    found = find_packaged(given, OVERRIDES_FILE)
    if found is None:
        raise MinBertError(f"`--overrides` {given}: there is no such file. Give the path of a .yaml file.")
    where, read = f"Overrides {given}", _read(found)
    for key in read:
        if key not in ("keys", "recipes", "rows"):
            raise MinBertError(f"{where}: {unknown_name('key', key, ('keys', 'recipes', 'rows'))}")
    by_name = {
        part: {
            str(name): read_keys(f"{where}: `{part}.{name}`", keys)
            for name, keys in read_mapping(f"{where}: `{part}`", read.get(part)).items()
        }
        for part in ("recipes", "rows")
    }
    return {"keys": read_keys(f"{where}: `keys`", read.get("keys")), **by_name}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise MinBertError(f"{path}: cannot be read as UTF-8 text: {error}.") from error
    return read_mapping(str(path), read_value(text, str(path)).value)


def _row(where: str, name: str, given: Any, path: Path) -> Row:
    check_name(where, name)
    read = read_mapping(where, given)
    check_keys(where, read, Row, without=("name", "place"))
    together = tuple(map(str, _list(f"{where}: `together`", read.get("together"))))
    if together and (read.get("recipe") or read.get("keys")):
        raise MinBertError(f"{where}: `together` is of the runs of other rows. Leave out `recipe` and `keys`.")
    if not (read.get("recipe") or read.get("not_run") or together):
        raise MinBertError(f"{where}: `recipe` is missing. Give a recipe, `together`, or `not_run` with the reason.")
    recipe = str(read.get("recipe", ""))
    reported = read_mapping(f"{where}: `reported`", read.get("reported"))
    for metric, score in reported.items():
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise MinBertError(f"{where}: `reported.{metric}` must be a number. Found {score!r}.")
    return Row(
        name, recipe, read_keys(f"{where}: `keys`", read.get("keys")), reported, str(read.get("against", "")),
        str(read.get("note", "")), str(read.get("not_run", "")), together,
        beside(recipe, path.parent),
    )  # fmt: skip


def check_name(where: str, name: str) -> None:
    """Raises `MinBertError` unless a name can be the name of a folder."""
    if not name or Path(name).name != name or name.startswith("."):
        raise MinBertError(f"{where}: the name is used for a folder. Use letters, digits, `-`, `_`, `+` and spaces.")


def _check_against(where: str, row: Row, rows: Mapping[str, Row]) -> None:
    if not row.against:
        return
    others = [name for name in rows if name != row.name]
    if row.against not in others:
        raise MinBertError(f"{where}: {unknown_name('`against`, another row,', row.against, others)}")
    if rows[row.against].not_run and not row.not_run:
        raise MinBertError(
            f"{where}: `against` must be a row that is run, as this one is. {row.against!r} is not: "
            f"{rows[row.against].not_run.rstrip('.')}."
        )


def _claim(where: str, given: Any, rows: Mapping[str, Row], reference: str) -> Claim:
    read = read_mapping(where, given)
    check_keys(where, read, Claim, without=())
    said = read.get("says")
    if not isinstance(said, str) or not said.endswith("."):
        raise MinBertError(f"{where}: `says` must be a sentence that ends with a full stop. Found {said!r}.")
    name, metrics = str(read.get("row", "")), tuple(_list(f"{where}: `metrics`", read.get("metrics")))
    finds, within = read.get("finds", ""), read.get("within")
    if name not in rows:
        raise MinBertError(f"{where}: {unknown_name('`row`', name, rows)}")
    other = rows[name].against or reference
    if name == other:
        raise MinBertError(f"{where}: `row` {name!r} is the reference, and compared with no row. Give it `against`.")
    if not metrics:
        raise MinBertError(f"{where}: `metrics` must name one metric or more, like [overall].")
    if finds and finds not in DIRECTIONS:
        raise MinBertError(f"{where}: {unknown_name('`finds`', finds, DIRECTIONS)}")
    if within is not None and (isinstance(within, bool) or not isinstance(within, int | float) or within <= 0):
        raise MinBertError(f"{where}: `within` must be a number above 0. Found {within!r}.")
    for metric in metrics:
        ours, theirs = (rows[of].reported.get(metric) for of in (name, other))
        stated = None not in (ours, theirs) and ours != theirs
        if (bool(finds) + (within is not None) + (stated and within is None)) != 1:
            raise MinBertError(
                f"{where}: it takes one of `finds`, `within` and different reported scores of {name!r} and {other!r} "
                f"in {metric}. Found finds = {finds!r}, within = {within!r}, reported {ours} and {theirs}."
            )
    return Claim(said, name, metrics, finds, within)


def read_seeds(where: str, given: Any) -> tuple[int, ...]:
    """Reads seeds: a number of seeds (1, 2 and so on), or a list. Raises `MinBertError` otherwise."""
    seeds = [*range(1, given + 1)] if type(given) is int else given
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise MinBertError(f"{where}: `seeds` must be how many, or a list like [1, 2, 3]. Found {given!r}.")
    if len({*seeds}) < len(seeds):
        raise MinBertError(f"{where}: `seeds` has a number twice. Found {given!r}.")
    return tuple(seeds)


def read_keys(where: str, given: Any, by: str = "the study") -> dict[str, Any]:
    """Reads the keys that a row, or a similar entry, changes. Raises `MinBertError` for a key that it may not change.

    Args:
        where: the beginning of an error.
        by: what sets the folder and the seed of each run.
    """
    keys = read_mapping(where, given)
    for key in keys:
        if key in (*names(scope="start"), "seed"):
            raise MinBertError(f"{where}: `{key}` is given to each run by {by}. Leave it out.")
    return keys


def read_mapping(where: str, given: Any) -> dict[str, Any]:
    if not (given is None or isinstance(given, dict)):
        raise MinBertError(f"{where} must be a mapping, `key: value`. Found {given!r}.")
    return given or {}


def _list(where: str, given: Any) -> list[str]:
    if not (given is None or isinstance(given, list)):
        raise MinBertError(f"{where} must be a list. Found {given!r}.")
    return given or []


def check_keys(where: str, read: Mapping[str, Any], kind: type[DataclassInstance], without: Iterable[str]) -> None:
    """Raises `MinBertError` for a key that is not a field of `kind`, or is one of `without`."""
    known = [f.name for f in fields(kind) if f.name not in without]
    for key in read:
        if key not in known:
            raise MinBertError(f"{where}: {unknown_name('key', key, known)}")


def run_folder(root: str | Path, row: str, seed: int) -> Path:
    """Returns the folder of a run of a study."""
    return Path(root) / "runs" / row / f"seed-{seed}"
