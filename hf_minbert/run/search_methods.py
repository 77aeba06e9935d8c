"""The search space, and the methods that choose its next point.

A method is a function of the existing trials and keeps no state. An interrupted search therefore continues as if
nothing had happened, even if trials were deleted so that they run again.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MinBertError, unknown_name
from ..settings.dotted import Value, set_key, value_of
from ..settings.recipe import find_packaged, read_value
from ..settings.table import names

SPACE_FILE = ".space.yaml"  # ending of the spaces that come with the package
#: Keys of a run's folder, which the search gives its trials itself.
OF_THE_SEARCH = names(scope="start")


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, including both.

    Args:
        low, high: the ends. If both are whole numbers, all values are.
        log: draw uniformly in the logarithm: as many values between 1e-6 and 1e-5 as between 1e-5 and 1e-4.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: random.Random) -> float:
        if self.log:
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
            drawn = round(drawn) if self.whole else rounded(drawn)
        else:
            drawn = (
                generator.randint(int(self.low), int(self.high))
                if self.whole
                else rounded(generator.uniform(self.low, self.high))
            )
        return min(max(drawn, self.low), self.high)  # rounding may step over an end


def rounded(value: float) -> float:
    """Rounds to six digits, so that a table shows exactly the values that were used."""
    return float(f"{value:.6g}")


#: A key, or several with commas between that always have one value, to what it may be.
Space = dict[str, list[Any] | Range]


@dataclass(frozen=True)
class Trial:
    """One run of a search.

    Args:
        number: the name of its folder.
        values: the value of each key of the space.
        state: `begun` is also the state of an interrupted trial that will be continued.
        score: the metric of the search, if it finished.
        error: the reason, if it failed.
        metrics: the contents of its `metrics.json`, if it finished.
    """

    number: int
    values: Mapping[str, Any]
    state: str = "begun"  # or finished, failed
    score: float | None = None
    error: str | None = None
    metrics: Mapping[str, Any] | None = None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial with the highest score, the first of equal ones; `None` if none has finished."""
    finished = [trial for trial in trials if trial.state == "finished"]
    return max(finished, key=lambda trial: trial.score or 0.0, default=None)


# ---- The space ---------------------------------------------------------------------------------------------------


def read_space(given: str) -> Space:
    """Reads a space from a YAML file, from the name of one in the package, or from YAML on the command line.

    Raises:
        MinBertError: it is none of these, or an entry is neither a list of values nor a range.
    """
    path = find_packaged(given, SPACE_FILE)
    text = given if path is None else path.read_text(encoding="utf-8-sig")
    where = "`--space`" if path is None else f"`--space` {path}"
    read = read_value(text, where).value
    if not isinstance(read, dict) or not read:
        raise MinBertError(
            f"{where} must be a file or a mapping of keys to values, like '{{learning_rate: [1e-5, 1e-4]}}'. Found "
            f"{read!r}, which is no file either."
            if path is None
            else f"{where} must hold lines of `key: [value, value]`. Found {read!r}."
        )
    space = {
        ", ".join(keys_of(str(entry))): _choices(f"{where}: `{entry}`", choices) for entry, choices in read.items()
    }
    keys = [key for entry in space for key in keys_of(entry)]
    for key in keys:
        if key in OF_THE_SEARCH:
            raise MinBertError(f"{where}: `{key}` is set for each trial by the search. Leave it out of the space.")
        if keys.count(key) > 1:
            raise MinBertError(f"{where}: the key `{key}` is given twice. Keep one.")
    return space


def keys_of(entry: str) -> list[str]:
    """Returns the recipe's keys that an entry of the space sets."""
    return [key.strip() for key in entry.split(",")]


def _choices(where: str, given: Any) -> list[Any] | Range:
    if isinstance(given, list) and given:
        for value in given:
            if given.count(value) > 1:
                raise MinBertError(f"{where} has {value!r} twice. Keep one.")
        return given
    if isinstance(given, dict) and {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
        low, high, log = given["low"], given["high"], given.get("log", False)
        numbers = all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
        if not numbers or low >= high or type(log) is not bool:
            raise MinBertError(
                f"{where}: a range is {{low: a number, high: a higher one, log: true or false}}. Found {given}."
            )
        if log and low <= 0:
            raise MinBertError(f"{where}: with `log: true`, `low` must be above 0. Found {low}.")
        return Range(low, high, log)
    raise MinBertError(
        f"{where} must be a list of values like [1e-5, 1e-4], or a range like {{low: 1e-6, high: 1e-4, log: true}}. "
        f"Found {given!r}."
    )


def only_lists(space: Space, method: str) -> dict[str, list[Any]]:
    """Returns the space if it has no range. Raises `MinBertError` otherwise."""
    lists = {}
    for entry, choices in space.items():
        if isinstance(choices, Range):
            raise MinBertError(
                f"`--method {method}` tries every value, and `{entry}` is a range. Give a list of values, or use "
                "--method random or optuna."
            )
        lists[entry] = choices
    return lists


def with_values(recipe: Mapping[str, Value], values: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the recipe with a point of the space. Raises the errors of `set_key`."""
    changed = dict(recipe)
    for entry, raw in values.items():
        for key in keys_of(entry):
            set_key(changed, key, raw, f"`--space`: `{key}`", absent=True)
    return changed


def own_values(recipe: Mapping[str, Value], space: Space) -> dict[str, Any]:
    """Returns the recipe's own values of the space's keys. Keys that it does not set are left out."""
    found = {}
    for entry in space:
        said = [value_of(recipe, key, f"`--space`: `{key}`") for key in keys_of(entry)]
        if None not in said and all(value == said[0] for value in said):
            found[entry] = said[0]
    return found


# ---- The methods -------------------------------------------------------------------------------------------------

#: From the space, the trials so far, the recipe's own values of the space's keys, and a seed to the next trial's
#: values; `None` where there is none, or none before a trial that is running has ended.
Method = Callable[[Space, Sequence[Trial], Mapping[str, Any], int], dict[str, Any] | None]


def grid(space: Space, trials: Sequence[Trial], own: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """Every combination. The values of the last key change fastest."""
    for combination in itertools.product(*only_lists(space, "grid").values()):
        values = dict(zip(space, combination, strict=True))
        if _of(values, trials) is None:
            return values
    return None


def draw(space: Space, trials: Sequence[Trial], own: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """Random values for each key, independent of the others. A combination that was tried is drawn again."""
    if _exhausted(space, trials):
        return None
    generator = random.Random(f"{seed} {len(trials)}")  # a text: numbers near each other seed alike
    while True:
        values = {
            key: choices.draw(generator) if isinstance(choices, Range) else generator.choice(choices)
            for key, choices in space.items()
        }
        if _of(values, trials) is None:
            return values


def coordinate(space: Space, trials: Sequence[Trial], own: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """One key after the other, each with the best values of the keys before it.

    Later keys have the values of the recipe. If the recipe sets them, a point that two keys share is one trial.
    """
    fixed = dict(own)
    for key, choices in only_lists(space, "coordinate").items():
        found = []
        for value in choices:
            trial = _of({**fixed, key: value}, trials)
            if trial is None:
                return {**fixed, key: value}
            found.append(trial)
        best = None if any(trial.state == "begun" for trial in found) else best_of(found)
        if best is None:  # one is running, or all have failed
            return None
        fixed = dict(best.values)
    return None


def optuna(space: Space, trials: Sequence[Trial], own: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """The proposals of optuna's tree-structured Parzen estimator, based on the finished trials."""
    library = import_optuna()
    if _exhausted(space, trials):
        return None
    library.logging.set_verbosity(library.logging.WARNING)
    distributions = {key: _distribution(library, choices) for key, choices in space.items()}
    for attempt in range(20):
        sampler = library.samplers.TPESampler(seed=random.Random(f"{seed} {len(trials)} {attempt}").getrandbits(32))
        study = library.create_study(direction="maximize", sampler=sampler)
        for trial in trials:
            if trial.state == "finished":
                params = {key: _to_optuna(space[key], value) for key, value in trial.values.items()}
                told = library.trial.create_trial(params=params, distributions=distributions, value=trial.score)
                study.add_trial(told)
        params = study.ask(distributions).params
        values = {key: _from_optuna(choices, params[key]) for key, choices in space.items()}
        if _of(values, trials) is None:
            return values
    return draw(space, trials, own, seed)  # it insists on what was tried, which would come out the same again


def import_optuna() -> Any:
    """Imports the library. Raises `MinBertError` if it is not installed."""
    try:
        import optuna as library
    except ModuleNotFoundError as error:
        raise MinBertError(
            "`--method optuna` needs the library optuna. Run: pip install 'hf_minbert[search]'"
        ) from error
    return library


def _distribution(library: Any, choices: list[Any] | Range) -> Any:
    if isinstance(choices, list):  # by place: its values are to be plain, and ours may be lists
        return library.distributions.CategoricalDistribution(range(len(choices)))
    kinds = library.distributions.IntDistribution, library.distributions.FloatDistribution
    return kinds[0 if choices.whole else 1](choices.low, choices.high, log=choices.log)


def _to_optuna(choices: list[Any] | Range, value: Any) -> Any:
    return choices.index(value) if isinstance(choices, list) else value


def _from_optuna(choices: list[Any] | Range, found: Any) -> Any:
    if isinstance(choices, list):
        return choices[found]
    return found if choices.whole else min(max(rounded(found), choices.low), choices.high)


def _of(values: Mapping[str, Any], trials: Sequence[Trial]) -> Trial | None:
    """The trial with these values."""
    return next((trial for trial in trials if trial.values == values), None)


def _exhausted(space: Space, trials: Sequence[Trial]) -> bool:
    """Whether every combination was tried. Those of a range of fractions have no end."""
    if any(isinstance(choices, Range) and not choices.whole for choices in space.values()):
        return False
    sizes = (int(c.high - c.low) + 1 if isinstance(c, Range) else len(c) for c in space.values())
    return len(trials) >= math.prod(sizes)


METHODS: dict[str, Method] = {"grid": grid, "random": draw, "coordinate": coordinate, "optuna": optuna}
#: Those that end by themselves.
ENDING = ("grid", "coordinate")


def method_named(name: str) -> Method:
    """Returns a method. Raises `MinBertError` if it is unknown, or its library is not installed."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    if name == "optuna":
        import_optuna()
    return METHODS[name]
