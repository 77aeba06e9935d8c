"""A search: which points each method tries, what goes on after a stop or a failure, and what a wrong space is told."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hf_minbert import MinBertError
from hf_minbert.run import workers
from hf_minbert.run.search import search
from hf_minbert.run.search_methods import METHODS, Range, Trial, own_values, read_space, with_values
from hf_minbert.run.workers import Outcome
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.recipe import packaged_recipes, read_recipe

ROOT = Path(__file__).parents[1]
RATES = "learning_rate: [1e-4, 1e-5, 1e-6]"
DROPOUT = "tasks.sst.head_options.dropout"


def tried(method: str, space: dict, score, *, own=None, seed: int = 0, limit: int = 100) -> list[dict]:
    """The points that a method tries one after the other, where `score(values)` says what comes of them."""
    trials: list[Trial] = []
    while len(trials) < limit and (values := METHODS[method](space, trials, own or {}, seed)) is not None:
        found = score(values)
        state = "failed" if found is None else "finished"
        trials.append(Trial(len(trials) + 1, values, state, found))
    return [dict(trial.values) for trial in trials]


# ---- The methods


def test_grid_tries_every_combination_the_last_key_fastest():
    points = tried("grid", {"a": [1, 2], "b": ["x", "y", "z"]}, lambda values: 0.0)
    assert [(p["a"], p["b"]) for p in points] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]


def test_random_draws_are_of_the_seed_and_no_combination_comes_twice():
    space = {"a": [1, 2, 3], "b": [True, False]}
    points = tried("random", space, lambda values: 0.0, seed=1)
    assert sorted((p["a"], p["b"]) for p in points) == sorted((a, b) for a in (1, 2, 3) for b in (True, False))
    assert tried("random", space, lambda values: 1.0, seed=1) == points
    assert tried("random", space, lambda values: 0.0, seed=2) != points


def test_random_draws_of_ranges_stay_inside_and_are_even_in_the_logarithm():
    space = {
        "log": Range(1e-6, 1e-2, log=True),
        "even": Range(0.0, 1.0),
        "whole": Range(1, 4),
        "both": Range(1, 100, True),
    }
    points = tried("random", space, lambda values: 0.0, limit=400)
    for key, choices in space.items():
        values = [point[key] for point in points]
        assert choices.low <= min(values) and max(values) <= choices.high
        middle = (choices.low * choices.high) ** 0.5 if choices.log else (choices.low + choices.high) / 2
        assert 0.4 < sum(value < middle for value in values) / len(values) < 0.6, key
    assert {point["whole"] for point in points} == {1, 2, 3, 4}
    assert {type(point["both"]) for point in points} == {int}


def test_coordinate_fixes_the_best_of_each_key_before_the_next():
    scores = {
        (1e-4, None): 0.5,
        (1e-5, None): 0.7,
        (1e-6, None): 0.6,
        (1e-5, 0.2): 0.6,
        (1e-5, 0.3): 0.8,
        (1e-5, 0.4): 0.7,
    }
    space = {"rate": [1e-4, 1e-5, 1e-6], "dropout": [0.2, 0.3, 0.4], "last": [1, 2]}
    points = tried("coordinate", space, lambda p: scores[p["rate"], p.get("dropout")] - p.get("last", 0))
    keys = ("rate", "dropout", "last")
    assert [tuple(p.get(key) for key in keys) for p in points] == [
        *(key + (None,) for key in scores), (1e-5, 0.3, 1), (1e-5, 0.3, 2),
    ]  # fmt: skip


def test_coordinate_shares_the_point_that_is_the_recipes_own():
    space = {"rate": [1e-4, 1e-5], "dropout": [0.2, 0.3]}
    points = tried("coordinate", space, lambda p: -p["rate"], own={"rate": 3e-5, "dropout": 0.3})
    assert [(p["rate"], p["dropout"]) for p in points] == [(1e-4, 0.3), (1e-5, 0.3), (1e-5, 0.2)]


def test_coordinate_leaves_out_what_failed_and_ends_where_all_did():
    space = {"rate": [1, 2, 3], "other": [4, 5], "last": [6]}
    points = tried("coordinate", space, lambda p: None if p["rate"] == 3 or "other" in p else p["rate"])
    assert points == [{"rate": 1}, {"rate": 2}, {"rate": 3}, {"rate": 2, "other": 4}, {"rate": 2, "other": 5}]


def test_coordinate_waits_for_trials_that_are_running():
    space = {"a": [1, 2], "b": [3]}
    running = [Trial(1, {"a": 1}, "finished", 0.5), Trial(2, {"a": 2})]
    assert METHODS["coordinate"](space, running, {}, 0) is None
    ended = [running[0], Trial(2, {"a": 2}, "finished", 0.6)]
    assert METHODS["coordinate"](space, ended, {}, 0) == {"a": 2, "b": 3}


def test_optuna_finds_a_maximum_sooner_than_random_draws_and_repeats_itself():
    pytest.importorskip("optuna", reason="needs optuna: pip install 'hf_minbert[search]'")
    space = {"x": Range(-1.0, 1.0), "rate": Range(1e-6, 1e-2, log=True), "kind": ["a", ["b"], None]}

    def score(p):
        return -abs(p["x"] - 0.3) - abs(math.log10(p["rate"]) + 4) - (p["kind"] != ["b"])

    found, drawn = (
        [max(map(score, tried(method, space, score, seed=seed, limit=30))) for seed in range(5)]
        for method in ("optuna", "random")
    )
    assert sum(found) > sum(drawn)
    assert tried("optuna", space, score, limit=12) == tried("optuna", space, score, limit=12)


def test_optuna_ends_where_every_combination_was_tried():
    pytest.importorskip("optuna", reason="needs optuna: pip install 'hf_minbert[search]'")
    points = tried("optuna", {"a": [1, 2], "b": [3, 4]}, lambda p: p["a"] + p["b"])
    assert sorted((p["a"], p["b"]) for p in points) == [(1, 3), (1, 4), (2, 3), (2, 4)]


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_a_range_of_whole_numbers_comes_to_an_end_too(method):
    if method == "optuna":
        pytest.importorskip("optuna", reason="needs optuna: pip install 'hf_minbert[search]'")
    points = tried(method, {"a": Range(1, 3), "b": [True, False]}, lambda p: p["a"])
    assert sorted((p["a"], p["b"]) for p in points) == [(a, b) for a in (1, 2, 3) for b in (False, True)]


def test_optuna_that_is_not_installed_is_named_with_the_remedy(monkeypatch, minbert, recipe):
    monkeypatch.setitem(sys.modules, "optuna", None)
    ended = minbert("search", recipe, "--space", f"{{{RATES}}}", "--method", "optuna", "--output-dir", "there")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == (
        "minbert: error: `--method optuna` needs the library optuna. Run: pip install 'hf_minbert[search]'\n"
    )


# ---- The space


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.yaml", r"must be a file or a mapping.*Found 'nowhere.yaml', which is no file either"),
        ("{}", r"must be a file or a mapping"),
        ("{learning_rate: [1e-5", r"`--space`: not readable as YAML"),
        ("{learning_rate: 1e-5}", r"`learning_rate` must be a list of values .*, or a range like .* Found 1e-05\."),
        ("{learning_rate: []}", r"`learning_rate` must be a list"),
        ("{learning_rate: [1e-5, 0.00001]}", r"`learning_rate` has 1e-05 twice"),
        ("{learning_rate: {low: 1, hihg: 2}}", r"`learning_rate` must be a list of values like"),
        ("{learning_rate: {low: 2, high: 1}}", r"a range is \{low: a number, high: a higher one.*Found \{'low': 2"),
        ("{learning_rate: {low: a, high: 1}}", r"a range is \{low: a number"),
        ("{learning_rate: {low: 0, high: 1, log: true}}", r"with `log: true`, `low` must be above 0. Found 0"),
        ("{output_dir: [a, b]}", r"`output_dir` is set for each trial by the search"),
        ("{seed: [1, 2], 'seed, data_seed': [1, 2]}", r"the key `seed` is given twice"),
    ],
)  # fmt: skip
def test_a_space_that_is_wrong_is_answered_in_a_sentence(given, said):
    with pytest.raises(MinBertError, match=said):
        read_space(given)


def test_a_space_comes_from_a_file_or_a_word(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("seed,data_seed: [1, 2]\nlearning_rate: {low: 1e-6, high: 1e-4, log: true}\n")
    space = {"seed, data_seed": [1, 2], "learning_rate": Range(1e-6, 1e-4, log=True)}
    assert read_space(str(path)) == space
    assert read_space("{'seed,data_seed': [1, 2], learning_rate: {low: 1e-6, high: 1e-4, log: true}}") == space


def test_a_key_may_lie_inside_a_task_a_stage_or_several_places():
    stages = [{"name": "a"}, {"seed": 5}]
    recipe = {"tasks": Value(["sst", "sts"], None), "seed": Value(1, "1"), "stages": Value(stages, None)}
    values = {DROPOUT: 0.2, "stages.2.seed": 7, "task_weights.sts": 2.0, "seed, data_seed": 3}
    changed = {key: value.value for key, value in with_values(recipe, values).items()}
    assert changed == {
        "tasks": {"sst": {"head_options": {"dropout": 0.2}}, "sts": None}, "stages": [{"name": "a"}, {"seed": 7}],
        "task_weights": {"sts": 2.0}, "seed": 3, "data_seed": 3,
    }  # fmt: skip
    assert recipe["stages"].value[1] == {"seed": 5}
    assert own_values(recipe, dict.fromkeys([*values, "stages.a.seed"], [0])) == {"stages.2.seed": 5}
    for key in ("aggregator_options.reduction", "stages.a.task_weights.sst"):  # of [null, 2.0], the first
        assert {**with_values(recipe, {key: None}), "stages": None} == {**recipe, "stages": None}
    with pytest.raises(MinBertError, match=r"`seed.low` asks for 'low' in 1, which has no such part"):
        with_values(recipe, {"seed.low": 1})


def test_the_search_of_report_004_has_five_points_of_which_its_own_is_one():
    space = read_space("reports/004/search")
    recipe = read_recipe("reports/004/modified_cosine_surgery")
    own = own_values(recipe, space)
    assert list(own.values()) == [1e-5, 0.3]  # section 6.1
    points = tried("coordinate", space, lambda p: -abs(p["learning_rate"] - 1e-5), own=own)
    assert [tuple(p.values()) for p in points] == [(1e-4, 0.3), (1e-5, 0.3), (1e-6, 0.3), (1e-5, 0.2), (1e-5, 0.4)]
    tasks = with_values(recipe, points[3])["tasks"].value
    assert (tasks["sst"]["head_options"]["dropout"], tasks["para"]["sentence_dropout"]) == (0.2, 0.2)
    assert "reports/004/search.space" not in packaged_recipes()


# ---- Trials, with a training that is made up


@dataclass
class FakeTraining:
    """Stands for the worker of trials, which end at once with the score of their recipe."""

    score: object
    started: list[tuple[int, bool]] = field(default_factory=list)
    stop_after: int | None = None
    is_alive, progress = True, None

    def __call__(self, environment: dict[str, str]) -> FakeTraining:
        return self

    def start(self, folder: Path, resume: bool) -> None:
        if len(self.started) == self.stop_after:
            raise KeyboardInterrupt
        self.started.append((int(folder.name), resume))
        found = self.score({key: value.value for key, value in read_recipe(folder / "run.yaml").items()})
        self.outcome = Outcome(found if isinstance(found, str) else "")
        if not isinstance(found, str):
            metrics = found if isinstance(found, dict) else {"eval_overall": found}
            (folder / "metrics.json").write_text(json.dumps(metrics))

    def poll(self) -> Outcome:
        return self.outcome

    def close(self) -> None:
        pass


@pytest.fixture
def recipe(tmp_path, tiny_bert, course_dir) -> Path:
    path = tmp_path / "recipe.yaml"
    lines = {
        "model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": "unused", "learning_rate": 1e-5,
        "tasks": "[sst, sts]", "max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": '"no"',
    }  # fmt: skip
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path


@pytest.fixture
def training(monkeypatch):
    """`training(score)`: trials are made up from now on."""

    def arrange(score, **given):
        fake = FakeTraining(score, **given)
        monkeypatch.setattr(workers, "Worker", fake)
        monkeypatch.setattr(workers, "POLL", 0.0)
        return fake

    return arrange


def of_rate(values: dict) -> float:
    return {1e-4: 0.5, 1e-5: 0.7, 1e-6: 0.6}[values["learning_rate"]]


def test_a_search_ends_with_its_table_its_plot_and_the_best_recipe(recipe, training, tmp_path, minbert):
    fake = training(of_rate)
    folder = tmp_path / "search"
    ended = minbert("search", recipe, "weight_decay=0.5", "--space", f"{{{RATES}}}", "--output-dir", folder)
    assert ended.status == 0
    assert fake.started == [(1, False), (2, False), (3, False)]
    assert [line.split() for line in ended.out.splitlines()[:4]] == [
        ["trial", "eval_overall", "learning_rate"],
        ["2", "0.7000", "1e-05"], ["3", "0.6000", "1e-06"], ["1", "0.5000", "0.0001"],
    ]  # fmt: skip
    assert ended.out.endswith(f"The best recipe: minbert train {folder / 'best.yaml'}\n")
    with (folder / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["state"], float(row["eval_overall"])) for row in rows] == [
        ("2", "finished", 0.7), ("3", "finished", 0.6), ("1", "finished", 0.5),
    ]  # fmt: skip
    listed = json.loads((folder / "trials.json").read_text())
    assert listed[0]["values"] == {"learning_rate": 1e-5} and listed[0]["metrics"] == {"eval_overall": 0.7}
    best = {key: value.value for key, value in read_recipe(folder / "best.yaml").items()}
    assert (best["learning_rate"], best["weight_decay"], best["output_dir"]) == (1e-5, 0.5, str(folder / "best"))
    assert (folder / "trials.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)
    assert not best["overwrite"] and "disable_tqdm" not in best


def test_a_search_that_was_stopped_goes_on_and_runs_nothing_again(recipe, training, tmp_path):
    given = {"method": "random", "trials": 5, "output_dir": tmp_path / "cut", "seed": 3}
    space = {"learning_rate": Range(1e-6, 1e-4, log=True)}
    training(lambda values: values["learning_rate"], stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        search(read_recipe(recipe), space, **given)
    assert (tmp_path / "cut" / "trials" / "3" / "trial.json").is_file()  # begun, not run
    fake = training(lambda values: values["learning_rate"])
    found = search(read_recipe(recipe), space, **given)
    assert [number for number, _ in fake.started] == [3, 4, 5]
    whole = search(read_recipe(recipe), space, **{**given, "output_dir": tmp_path / "whole"})
    assert [(trial.number, trial.values) for trial in found] == [(trial.number, trial.values) for trial in whole]
    assert len(search(read_recipe(recipe), space, **{**given, "trials": 6})) == 6
    assert [number for number, _ in fake.started[8:]] == [6]


def test_a_trial_that_was_cut_off_goes_on_from_its_checkpoint(recipe, training, tmp_path, monkeypatch):
    training(of_rate, stop_after=0)
    with pytest.raises(KeyboardInterrupt):
        search(read_recipe(recipe), read_space(f"{{{RATES}}}"), method="grid", output_dir=tmp_path / "cut")
    monkeypatch.setattr(workers, "newest_complete_checkpoint", lambda folder: folder / "checkpoint-1")
    fake = training(of_rate)
    search(read_recipe(recipe), read_space(f"{{{RATES}}}"), method="grid", output_dir=tmp_path / "cut", trials=1)
    assert fake.started == [(1, True)]


def test_a_failed_trial_is_recorded_the_search_goes_on_and_a_deleted_one_runs_again(recipe, training, tmp_path):
    def score(values):
        return "The film tore." if values["learning_rate"] == 1e-5 else of_rate(values)

    folder, space = tmp_path / "search", read_space(f"{{{RATES}}}")
    training(score)
    found = search(read_recipe(recipe), space, method="grid", output_dir=folder)
    assert [(t.number, t.state, t.error) for t in found] == [
        (3, "finished", None), (1, "finished", None), (2, "failed", "The film tore."),
    ]  # fmt: skip
    assert "2,failed,,1e-05,The film tore." in (folder / "trials.csv").read_text()
    fake = training(of_rate)
    search(read_recipe(recipe), space, method="grid", output_dir=folder)
    assert fake.started == []
    for path in (folder / "trials" / "2").iterdir():
        path.unlink()
    (folder / "trials" / "2").rmdir()
    assert search(read_recipe(recipe), space, method="grid", output_dir=folder)[0].number == 2
    assert fake.started == [(2, False)]


def test_a_trial_that_diverged_is_not_the_best(recipe, training, tmp_path):
    """Its correlation, that of nothing finite, stands at 0 and is above that of the others."""
    found = {
        1e-4: {"eval_sts_pearson": -0.6},
        1e-5: {"eval_sts_pearson": 0.0, "eval_sts_nonfinite_predictions": 1.0, "diverged": True},
        1e-6: {"eval_sts_pearson": 0.0, "eval_sts_nonfinite_predictions": 1.0},
    }
    training(lambda values: found[values["learning_rate"]])
    given = {"method": "grid", "output_dir": tmp_path / "search", "metric": "eval_sts_pearson"}
    trials = search(read_recipe(recipe), read_space(f"{{{RATES}}}"), **given)
    assert [(trial.number, trial.state, trial.score) for trial in trials] == [
        (1, "finished", -0.6), (2, "failed", None), (3, "failed", None)
    ]  # fmt: skip
    assert trials[1].error == trials[2].error == "Training diverged."
    assert read_recipe(tmp_path / "search" / "best.yaml")["learning_rate"].value == 1e-4


def test_a_search_without_a_finished_trial_says_why(recipe, training, tmp_path):
    training(lambda values: "The film tore.")
    with pytest.raises(MinBertError, match=r"No trial in .* finished. Trial 1: The film tore\. The error of each"):
        search(read_recipe(recipe), read_space(f"{{{RATES}}}"), method="coordinate", output_dir=tmp_path / "search")


def test_parallel_trials_are_started_together_and_on_their_own_gpus(recipe, monkeypatch, tmp_path):
    running, most, gpus = [], [], []

    class Slow:
        is_alive, progress = True, None

        def __init__(self, environment):
            gpus.append(environment["CUDA_VISIBLE_DEVICES"])

        def start(self, folder, resume):
            self.folder, self.polls = folder, 0
            running.append(self)
            most.append(len(running))

        def poll(self):
            self.polls += 1
            if self.polls < 3:
                return None
            running.remove(self)
            (self.folder / "metrics.json").write_text('{"eval_overall": 0.5}')
            return Outcome("")

        def close(self):
            pass

    monkeypatch.setattr(workers, "Worker", Slow)
    monkeypatch.setattr(workers, "POLL", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    space = read_space("{learning_rate: [1e-4, 1e-5, 1e-6], weight_decay: [0.0, 0.1]}")
    found = search(read_recipe(recipe), space, method="grid", output_dir=tmp_path / "search", parallel=3)
    assert sorted(trial.number for trial in found) == [1, 2, 3, 4, 5, 6]
    assert max(most) == 3
    assert gpus == ["4", "6", "4"]


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["seed=1"], {}, r"started with another recipe's `seed`: null, now 1\..*give another --output-dir"),
        ([], {"space": "{learning_rate: [1e-4]}"}, r"started with another space: \{.*\[0.0001, 1e-05, 1e-06\]\}, now"),
        ([], {"method": "random"}, r'started with another method: grid, now random'),
    ],
)  # fmt: skip
def test_an_old_folder_refuses_another_search(recipe, training, tmp_path, words, options, said):
    fake = training(of_rate)
    given = {"space": f"{{{RATES}}}", "method": "grid"}
    search(read_recipe(recipe), read_space(given["space"]), method="grid", output_dir=tmp_path / "search")
    given |= options
    with pytest.raises(MinBertError, match=said):
        search(read_recipe(recipe, words), read_space(given["space"]), method=given["method"],
               output_dir=tmp_path / "search")  # fmt: skip
    assert len(fake.started) == 3


@pytest.mark.parametrize(
    ("space", "given", "said"),
    [
        ("{lerning_rate: [1e-5]}", {}, r"`--space`, lerning_rate=1e-05: Unknown key 'lerning_rate'. Did you mean"),
        ("{learning_rate: [1e-5, high]}", {}, r"`--space`, learning_rate=high: `learning_rate` must be a number"),
        ("{tasks.sst.head_options.dropuot: [0.1]}", {}, r"dropuot=0.1: .*dropuot"),
        ("{hidden_dropout_prob: {low: 0.1, high: 1.5}}", {"method": "random"}, r"_prob=1.5: .*less than 1"),
        ("{learning_rate: {low: 1e-6, high: 1e-4}}", {}, r"`--method grid` tries every value, and `learning_rate`"),
        ("{seed: [1]}", {"metric": "eval_overal"}, r"^Unknown metric 'eval_overal'. Did you mean 'eval_overall'\?"),
        ("{seed: [1]}", {"method": "gird"}, r"Unknown method 'gird'. Did you mean 'grid'\?"),
        ("{objective: [mlm]}", {}, r"objective=mlm: `objective: mlm` has a perplexity and no scores"),
        ("{push_to_hub: [true]}", {}, r"`push_to_hub` would send every run to one place"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_recipe_is_answered_before_any_trial(recipe, training, tmp_path, space, given, said):
    fake = training(of_rate)
    with pytest.raises(MinBertError, match=said):
        search(read_recipe(recipe), read_space(space), output_dir=tmp_path / "search", **{"method": "grid", **given})
    assert fake.started == [] and not (tmp_path / "search").exists()


def test_a_recipe_that_resumes_or_overwrites_is_refused(recipe, tmp_path):
    with pytest.raises(
        MinBertError, match=r"`overwrite` is for a single run. Leave it out: the same command continues"
    ):
        search(read_recipe(recipe, ["overwrite=true"]), {"seed": [1]}, method="grid", output_dir=tmp_path / "search")


def test_a_search_over_a_line_of_a_stage(recipe, training, tmp_path):
    recipe, seen = read_recipe(recipe), []
    recipe["stages"] = Value([{"objective": "mlm"}, {"name": "tasks", "weight_decay": 0.5}], None)
    training(lambda values: seen.append(values["stages"]) or len(seen) / 10)
    search(recipe, {"stages.tasks.weight_decay": [0.1, 0.2]}, method="grid", output_dir=tmp_path / "search")
    assert seen == [[{"objective": "mlm"}, {"name": "tasks", "weight_decay": decay}] for decay in (0.1, 0.2)]
    best = read_recipe(tmp_path / "search" / "best.yaml")
    assert best["stages"].value[1]["weight_decay"] == 0.2


def test_a_line_that_each_stage_has_itself_is_no_key_to_search(recipe, tmp_path):
    recipe = read_recipe(recipe)
    recipe["stages"] = Value([{"seed": 1}, {"name": "b", "seed": 2}], None)
    with pytest.raises(MinBertError, match=r"each stage has a line `seed` of its own. Write stages.1.seed"):
        search(recipe, {"seed": [1]}, method="grid", output_dir=tmp_path / "search")


# ---- Trials as they are


@pytest.mark.slow
def test_a_search_that_was_cut_off_ends_its_trial_and_goes_on_to_a_trained_model(recipe, tmp_path, monkeypatch):
    """With real processes. What ends the first is that its search lets go of it, as it does where it is killed."""
    given = {"space": {"learning_rate": [1e-3]}, "method": "grid", "output_dir": tmp_path / "search"}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    made = []

    class Stopped(workers.Worker):
        def start(self, folder, resume):
            super().start(folder, resume)
            made.append(self._process)

    def stop(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers, "Worker", Stopped)
        patch.setattr(workers.time, "sleep", stop)
        with pytest.raises(KeyboardInterrupt):
            search(read_recipe(recipe), **given)
    trial = tmp_path / "search" / "trials" / "1"
    assert made[0].returncode == 1 and not (trial / "metrics.json").exists()

    (found,) = search(read_recipe(recipe), **given)
    assert (found.state, found.metrics["global_step"]) == ("finished", 1), (trial / "run.log").read_text()
    assert found.score == found.metrics["eval_overall"]
    assert read_recipe(trial / "recipe.yaml")["learning_rate"].value == 1e-3
    assert (trial / "model.safetensors").is_file()
