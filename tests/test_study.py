"""Studies: what a file may say, which runs there are and in what order, and that none is done twice or lost."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from here import Here
from safetensors.torch import load_file

from hf_minbert import MinBertError
from hf_minbert.data.selection import chosen_and_rest
from hf_minbert.run import study as study_module
from hf_minbert.run import workers
from hf_minbert.run.study import begin, run_study
from hf_minbert.run.train import train
from hf_minbert.run.workers import Progress
from hf_minbert.settings.recipe import read_recipe
from hf_minbert.settings.study import read_study, run_folder

ROOT = Path(__file__).parents[1]
LINES = """
output_dir: unused
tasks: {sst: null, sts: {head: mlp}}
max_steps: 3
per_device_train_batch_size: 4
hidden_dropout_prob: 0.1
learning_rate: 1e-3
save_steps: 1
eval_strategy: "no"
"""


@pytest.fixture
def recipe(tiny_bert, course_dir, tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model_name_or_path: {tiny_bert}\ndata_dir: {course_dir}\n{LINES}", encoding="utf-8")
    return path


@pytest.fixture
def write(recipe, tmp_path):
    """`write(text)` writes a study, in which RECIPE is the tests' recipe, and gives its path."""

    def make(text: str, name: str = "some.study.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text.replace("RECIPE", str(recipe)), encoding="utf-8")
        return path

    return make


TWO_ROWS = """
seeds: [1, 7]
rows:
  plain: {recipe: RECIPE}
  faster: {recipe: RECIPE, keys: {learning_rate: 1e-2}}
"""


# ---- The file


def test_a_row_is_its_recipe_with_the_keys_of_all_its_own_the_overrides_and_the_words(write, recipe, tmp_path):
    path = write(
        "keys: {learning_rate: 1, weight_decay: 1, warmup_steps: 1, tasks.sst.pooling: mean}\n"
        "rows:\n"
        "  a: {recipe: RECIPE, keys: {weight_decay: 2, warmup_steps: 2, tasks.sts.head: null}}\n"
        "  b: {recipe: RECIPE}\n"
    )
    overrides = write(
        "keys: {warmup_steps: 3, max_steps: null}\n"
        "recipes: {RECIPE: {adam_beta1: 0.5, adam_beta2: 0.5}}\n"
        "rows: {b: {adam_beta2: 0.25}}",
        "o.yaml",
    )
    study = read_study(path, overrides, ["max_grad_norm=4"])
    values = {key: value.value for key, value in study.recipe(study.row("a")).items()}
    assert [values[key] for key in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm")] == [1, 2, 3, 4]
    assert values["tasks"] == {"sst": {"pooling": "mean"}, "sts": {}}
    assert values["adam_beta1"] == 0.5 and "max_steps" not in values
    other = {key: value.value for key, value in study.recipe(study.row("b")).items()}
    assert (other["weight_decay"], other["adam_beta1"], other["adam_beta2"]) == (1, 0.5, 0.25)
    assert values["adam_beta2"] == 0.5
    assert study.reference == "a" and study.seeds == (1, 2, 3) and study.reduction == "best"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: {a: {recipe: RECIPE, seed: 1}}", r"row 'a': Unknown key 'seed'"),
        ("row: {a: {recipe: RECIPE}}", r"Unknown key 'row'. Did you mean 'rows'\?"),
        ("rows: {}", r"`rows` must name one row or more"),
        ("rows: {a: {keys: {max_steps: 1}}}", r"row 'a': `recipe` is missing"),
        ("rows: {1: {recipe: RECIPE}, '1': {recipe: RECIPE}}", r"`rows` has a name twice, as text. Found 1, '1'"),
        ("rows: {'': {recipe: RECIPE}}", r"row '': the name is used for a folder"),
        ("rows: {a/b: {recipe: RECIPE}}", r"row 'a/b': the name is used for a folder"),
        ("rows: {a: {recipe: RECIPE, keys: {seed: 3}}}", r"row 'a': `keys`: `seed` is given to each run by the study"),
        (
            "rows: {a: {recipe: RECIPE, reported: {overall: high}}}",
            r"`reported.overall` must be a number. Found 'h",
        ),
        ("seeds: 0\nrows: {a: {recipe: RECIPE}}", r"`seeds` must be how many, or a list like \[1, 2, 3\]. Found 0"),
        ("seeds: [1, 1]\nrows: {a: {recipe: RECIPE}}", r"`seeds` has a number twice"),
        ("reference: b\nrows: {a: {recipe: RECIPE}, b: {not_run: data}}", r"`reference`, a row that is run, 'b'"),
        (
            "rows: {a: {recipe: RECIPE, against: c}, b: {recipe: RECIPE}}",
            r"row 'a': Unknown `against`, another row, 'c'",
        ),
        (
            "rows: {a: {recipe: RECIPE, against: a}, b: {recipe: RECIPE}}",
            r"row 'a': Unknown `against`, another row, 'a'",
        ),
        (
            "rows: {a: {recipe: RECIPE, against: b}, b: {not_run: no data}}",
            r"row 'a': `against` must be a row that is run, as this one is. 'b' is not: no data.",
        ),
        (
            "rows: {a: {recipe: RECIPE}, b: {together: [a], keys: {max_steps: 1}}}",
            r"row 'b': `together` is of the runs of other rows. Leave out `recipe` and `keys`.",
        ),
        (
            "rows: {a: {recipe: RECIPE}, b: {together: [a, c]}, c: {together: [a]}}",
            r"row 'b': Unknown `together`, rows that are trained, 'c'",
        ),
        ("reduction: median\nrows: {a: {recipe: RECIPE}}", r"Unknown `reduction` 'median'.*best, last, mean"),
    ],
)
def test_what_a_study_cannot_say_is_refused_with_its_place(write, text, said):
    with pytest.raises(MinBertError, match=said):
        read_study(write(text))


def test_rows_that_are_not_run_may_be_against_each_other(write):
    study = read_study(write("rows: {a: {recipe: RECIPE}, b: {not_run: x}, c: {not_run: x, against: b}}"))
    assert study.against == {"b": "a", "c": "b"}


CLAIMED = """
rows:
  a: {recipe: RECIPE, reported: {overall: 0.5, sst_accuracy: 0.5}}
  b: {recipe: RECIPE, reported: {overall: 0.6, sst_accuracy: 0.5}}
claims: [CLAIM]
"""


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("{row: b, metrics: [overall]}", r"claim 1: `says` must be a sentence that ends with a full stop. Found None"),
        ("{says: So., row: c, metrics: [overall]}", r"claim 1: Unknown `row` 'c'"),
        ("{says: So., row: a, metrics: [overall]}", r"`row` 'a' is the reference, and compared with no row"),
        ("{says: So., row: b}", r"`metrics` must name one metric or more"),
        ("{says: So., row: b, metrics: [overall], against: a}", r"Unknown key 'against'"),
        ("{says: So., row: b, metrics: [para_accuracy]}", r"one of .*reported None and None"),
        ("{says: So., row: b, metrics: [sst_accuracy]}", r"one of .*reported 0.5 and 0.5"),
        ("{says: So., row: b, metrics: [overall], finds: higher}", r"one of .*finds = 'higher'"),
        ("{says: So., row: b, metrics: [para_accuracy], finds: more}", r"Unknown `finds` 'more'.*higher, lower"),
        ("{says: So., row: b, metrics: [overall], within: 0}", r"`within` must be a number above 0. Found 0"),
    ],
)
def test_a_claim_that_nothing_can_judge_is_refused(write, claim, said):
    with pytest.raises(MinBertError, match=said):
        read_study(write(CLAIMED.replace("CLAIM", claim)))


def test_a_claim_is_of_reported_scores_of_a_direction_or_of_a_margin(write):
    text = "{says: So., row: b, metrics: METRICS}"
    given = {"[overall]": "", "[para_accuracy], finds: lower": "lower", "[sst_accuracy, overall], within: 0.1": ""}
    for metrics, finds in given.items():
        (claim,) = read_study(write(CLAIMED.replace("CLAIM", text.replace("METRICS", metrics)))).claims
        assert claim.finds == finds and (claim.within is not None) == ("within" in metrics)


@pytest.mark.parametrize(
    ("word", "said"),
    [("learning_rate", "'learning_rate' is not `key=value`"), ("seed=9", "`seed` is given to each run by the study")],
)
def test_words_that_are_no_keys_of_a_row_are_refused(write, word, said):
    with pytest.raises(MinBertError, match=said):
        read_study(write(TWO_ROWS), words=[word])


def test_overrides_by_recipe_hold_for_a_recipe_beside_the_study_in_any_folder(write, tmp_path, monkeypatch):
    path = write("rows: {a: {recipe: recipe.yaml}}")
    overrides = write("recipes: {recipe.yaml: {adam_beta1: 0.5}}", "o.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    study = read_study(path, overrides)
    assert study.recipe(study.row("a"))["adam_beta1"].value == 0.5


@pytest.mark.parametrize(
    "lines",
    [
        "metrics: [sst_acuracy]",
        "rows: {a: {recipe: RECIPE, reported: {sst_acuracy: 1}}}",
        "rows: {a: {recipe: RECIPE}, b: {recipe: RECIPE}}\n"
        "claims: [{says: So., row: b, metrics: [sst_acuracy], finds: lower}]",
    ],
)
def test_a_metric_that_no_run_has_is_refused_before_anything_runs(write, tmp_path, lines):
    text = lines if "rows" in lines else f"{lines}\nrows: {{a: {{recipe: RECIPE}}}}"
    with pytest.raises(MinBertError, match="Unknown metric 'sst_acuracy'. Did you mean 'sst_accuracy'"):
        begin(read_study(write(text)), tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_arguments_that_do_not_go_together_are_refused_before_anything_runs(write, tmp_path):
    text = TWO_ROWS.replace("learning_rate: 1e-2", "load_best_model_at_end: true")
    with pytest.raises(MinBertError, match="Row 'faster': .*load_best_model_at_end"):
        begin(read_study(write(text)), tmp_path / "study")


def test_mistakes_in_a_rows_recipe_are_answered_before_anything_runs(write, minbert, tmp_path):
    path = write("rows: {a: {recipe: RECIPE}, b: {recipe: RECIPE, keys: {lerning_rate: 1}}}")
    ended = minbert("study", path, "--output-dir", tmp_path / "study")
    assert ended.status == 2 and "Row 'b': Unknown key 'lerning_rate'. Did you mean 'learning_rate'?" in ended.err
    assert not (tmp_path / "study").exists()


# ---- Which runs there are; trained in this process


def agree(said: str) -> bool:
    raise AssertionError(said)


def go(path: Path, root: Path, words=(), retry=False, **given) -> None:
    study = read_study(path, words=words)
    run_study(study, begin(study, root, retry), root, **{"agree": agree, **given})


def test_all_rows_have_one_seed_before_the_next_and_a_finished_study_runs_nothing(write, here, tmp_path):
    path, worker = write(TWO_ROWS), here()
    go(path, tmp_path / "study")
    order = [("plain", "seed-1"), ("faster", "seed-1"), ("plain", "seed-7"), ("faster", "seed-7")]
    assert worker.trained == [(*run, False) for run in order]
    found = {
        run: json.loads((tmp_path / "study" / "runs" / run[0] / run[1] / "metrics.json").read_text()) for run in order
    }
    assert [found[run]["seed"] for run in order] == [1, 1, 7, 7]
    assert found[order[0]]["train_loss"] != found[order[1]]["train_loss"]
    go(path, tmp_path / "study")
    assert len(worker.trained) == 4


def test_a_study_goes_on_where_it_stopped_and_a_new_row_runs_alone(write, here, tmp_path):
    path, root = write(TWO_ROWS), tmp_path / "study"
    here(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        go(path, root)
    worker = here()
    go(path, root)
    assert worker.trained == [("plain", "seed-7", False), ("faster", "seed-7", False)]
    go(write(TWO_ROWS + "  slower: {recipe: RECIPE, keys: {learning_rate: 1e-4}}\n"), root)
    assert worker.trained[2:] == [("slower", "seed-1", False), ("slower", "seed-7", False)]


def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(write, here, tmp_path):
    path, root = write(TWO_ROWS), tmp_path / "study"
    go_on = run_folder(root, "plain", 1)
    here()
    go(path, root)
    weights = load_file(go_on / "model.safetensors")
    (go_on / "metrics.json").unlink()
    shutil.rmtree(go_on / "checkpoint-3")
    (go_on / "model.safetensors").unlink()
    worker = here()
    go(path, root)
    assert worker.trained == [("plain", "seed-1", True)]
    again = load_file(go_on / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)  # the same steps in the same process


def test_a_run_that_fails_is_noted_and_the_others_go_on(write, here, tmp_path, caplog):
    path, root = write(TWO_ROWS), tmp_path / "study"
    worker = here(breaks=("faster",))
    go(path, root)
    assert [run[0] for run in worker.trained] == ["plain", "faster", "plain", "faster"]
    assert workers.failure(run_folder(root, "faster", 7)) == "It broke."
    assert "faster, seed 1 failed: It broke." in caplog.text
    shutil.rmtree(run_folder(root, "faster", 7))
    worker = here()
    go(path, root)
    assert worker.trained == [("faster", "seed-7", False)]  # the other failure stays noted
    go(path, root, retry=True)
    assert worker.trained[1:] == [("faster", "seed-1", False)]


def test_a_run_that_failed_begins_anew_with_a_corrected_recipe(write, here, tmp_path):
    root = tmp_path / "study"
    here(breaks=("faster",))
    go(write(TWO_ROWS), root)
    worker = here()
    go(write(TWO_ROWS.replace("1e-2", "2e-2")), root)
    assert worker.trained == [("faster", "seed-1", False), ("faster", "seed-7", False)]


def test_a_command_tells_of_failures_by_its_status_and_a_refusal_leaves_the_table(write, here, minbert, tmp_path):
    path, root = write(TWO_ROWS), tmp_path / "study"
    here(breaks=("faster",))
    ended = minbert("study", path, "--output-dir", root)
    assert ended.status == 1 and "2 runs failed. Add --retry to run failed runs again." in ended.err
    here()
    assert minbert("study", path, "--output-dir", root, "--retry", "--yes").status == 0
    table = (root / "study.md").read_text()
    assert minbert("study", path, "weight_decay=0.5", "--output-dir", root).status == 2
    assert (root / "study.md").read_text() == table


def test_the_table_says_all_keys_but_those_of_a_machine(write, here, minbert, course_dir, tmp_path):
    here()
    words = ["weight_decay=0.25", f"data_dir={course_dir}", f"logging_dir={tmp_path / 'place'}"]
    assert minbert("study", write(TWO_ROWS), *words[:2], "--output-dir", tmp_path / "study").status == 0
    table = (tmp_path / "study" / "study.md").read_text()
    assert "weight\\_decay: 0.25" in table and str(course_dir) not in table


def test_two_commands_do_not_work_in_one_folder(write, here, minbert, tmp_path):
    here()
    with workers.alone_in(tmp_path / "study"):
        ended = minbert("study", write(TWO_ROWS), "--output-dir", tmp_path / "study")
    assert ended.status == 2 and f"Another process works in {tmp_path / 'study'}" in ended.err


def test_a_changed_row_is_refused_and_of_a_machine_anything_may_change(write, here, course_dir, tmp_path):
    path, root = write(TWO_ROWS), tmp_path / "study"
    here()
    go(path, root)
    with pytest.raises(
        MinBertError, match=r"Row 'plain' has weight_decay = 0.5, and .*seed-1 was begun with None. Del"
    ):
        go(path, root, words=["weight_decay=0.5"])
    go(path, root, words=[f"data_dir={course_dir}/."])


def test_a_key_that_changes_neither_model_nor_scores_may_change(write, here, tmp_path):
    path, root = write(TWO_ROWS), tmp_path / "study"
    worker = here()
    go(path, root)
    go(path, root, words=["logging_steps=7", "save_total_limit=1", "hub_strategy=end"])
    assert len(worker.trained) == 4
    with pytest.raises(MinBertError, match="has eval_strategy = epoch"):  # it may choose another checkpoint
        go(path, root, words=["eval_strategy=epoch"])


TWINS = """
seeds: [1, 7]
rows:
  plain: {recipe: RECIPE}
  faster: {recipe: RECIPE, keys: {learning_rate: 1e-2}, against: again}
  again: {recipe: RECIPE, keys: {learning_rate: 1e-3, weight_decay: 0.0}}
"""


def test_a_training_that_two_rows_have_is_done_once(write, here, minbert, tmp_path):
    root, worker = tmp_path / "study", here()
    path = write(TWINS)
    ended = minbert("study", path, "weight_decay=0.0", "--output-dir", root)
    assert ended.status == 0, ended.err
    order = [("plain", "seed-1"), ("faster", "seed-1"), ("plain", "seed-7"), ("faster", "seed-7")]
    assert worker.trained == [(*run, False) for run in order]
    assert "again, seed 7 is the same training as plain, seed 7, so that run is used." in ended.err
    first, again = (run_folder(root, row, 7) for row in ("plain", "again"))
    weights = [folder / "model.safetensors" for folder in (first, again)]
    assert weights[0].samefile(weights[1]) and not [*again.glob("checkpoint-*")] and [*first.glob("checkpoint-*")]
    assert (again / "metrics.json").read_text() == (first / "metrics.json").read_text()
    values = [read_recipe(folder / "recipe.yaml")["output_dir"].value for folder in (first, again)]
    assert values == [str(first), str(again)]
    assert "again: the same training as plain" in ended.out
    table = json.loads((root / "study.json").read_text())
    assert table["rows"][2]["note"] == "With these keys the same training as plain, so it was run once."
    said = {
        line["row"]: (line["against"], line["verdict"]) for line in table["differences"] if line["metric"] == "overall"
    }
    assert said["again"] == ("plain", "the same training") and said["faster"][0] == "again" and said["faster"][1]
    assert minbert("study", path, "weight_decay=0.0", "--output-dir", root).status == 0
    assert len(worker.trained) == 4
    shutil.rmtree(first)
    assert minbert("study", path, "weight_decay=0.0", "--output-dir", root).status == 0
    assert len(worker.trained) == 4 and weights[0].samefile(weights[1])  # and the other way round


def test_a_run_waits_for_another_that_is_the_same_training(write, tmp_path):
    runs = study_module.runs_of(read_study(write(TWINS), words=["weight_decay=0.0"]), tmp_path)
    shared = study_module.SharedStages(runs)
    plain, faster, again = (run.folder for run in runs[:3])
    assert shared.waits_for(runs[2], [plain]) and not shared.waits_for(runs[2], [faster])
    assert not shared.take_whole(runs[2]) and shared.trainings(runs) == 4
    plain.mkdir(parents=True)
    (plain / "metrics.json").write_text("{}")
    assert shared.trainings(runs) == 3


STAGES = """
seeds: [1]
keys:
  stages: [{name: heads, freeze: encoder, max_steps: 2}, {name: all, max_steps: 2}]
rows:
  a: {recipe: RECIPE}
  b: {recipe: RECIPE, keys: {stages.all.learning_rate: 1e-2}}
  c: {recipe: RECIPE, keys: {stages.heads.learning_rate: 1e-2}}
"""


def test_stages_that_rows_share_are_run_once_and_change_no_weights(write, here, tmp_path):
    path, root = write(STAGES), tmp_path / "study"
    worker = here()
    go(path, root)
    assert worker.trained == [("a", "seed-1", False), ("b", "seed-1", True), ("c", "seed-1", False)]
    first = [run_folder(root, row, 1) / "stages" / "1-heads" for row in "abc"]
    assert (first[0] / "metrics.json").read_text() == (first[1] / "metrics.json").read_text()
    assert (first[0] / "metrics.json").read_text() != (first[2] / "metrics.json").read_text()
    alone = tmp_path / "alone"
    train(read_recipe(run_folder(root, "b", 1) / "run.yaml", [f"output_dir={alone}"]))
    shared, own = (load_file(folder / "model.safetensors") for folder in (run_folder(root, "b", 1), alone))
    assert all(torch.equal(shared[name], own[name]) for name in own)  # the same steps in the same process


def test_a_run_waits_for_another_that_does_its_stage(write, tmp_path):
    runs = study_module.runs_of(read_study(write(STAGES)), tmp_path)
    shared = study_module.SharedStages(runs)
    a, b, c = (run.folder for run in runs)
    assert shared.waits_for(runs[1], [a]) and not shared.waits_for(runs[1], [c])
    assert not shared.waits_for(runs[1], []) and not shared.waits_for(runs[2], [a, b])
    done = a / "stages" / "1-heads"
    done.mkdir(parents=True)
    (done / "metrics.json").write_text("{}")
    assert not shared.waits_for(runs[1], [a])


def test_one_row_may_be_trained_alone_and_the_others_later(write, here, minbert, tmp_path):
    worker, path, root = here(), write(TWO_ROWS), tmp_path / "study"
    ended = minbert("study", path, "--output-dir", root, "--row", "faster")
    assert ended.status == 0 and {row for row, *_ in worker.trained} == {"faster"}
    assert "plain: seeds 1 and 7: not finished" in ended.out
    assert minbert("study", path, "--output-dir", root, "--row", "quicker").status == 2
    assert minbert("study", path, "--output-dir", root).status == 0 and len(worker.trained) == 4


# ---- Time


@pytest.mark.parametrize(("seconds", "asked"), [(1.0, 0), (400.0, 1)])
def test_a_long_study_is_agreed_to_after_its_first_rounds(write, tmp_path, monkeypatch, caplog, seconds, asked):
    class Slow(Here):
        polls = 0
        progress = Progress(step=30, steps=30, seconds=seconds / 30)

        def poll(self):
            self.polls += 1
            return None if self.polls % 2 else self.outcome

    worker, questions = Slow(), []
    caplog.set_level("INFO")
    monkeypatch.setattr(workers, "Worker", worker)
    monkeypatch.setattr(workers, "POLL", 0.0)
    refuse = lambda said: questions.append(said)  # noqa: E731
    text = TWO_ROWS.replace("[1, 7]", "10")
    if asked:
        with pytest.raises(MinBertError, match=r"About 2.2 h in all: 20 runs, 1 at a time, .* Add --yes"):
            go(write(text), tmp_path / "study", agree=refuse)
        assert len(worker.trained) == 1
    else:
        go(write(text), tmp_path / "study", agree=refuse)
        assert len(worker.trained) == 20
    assert len(questions) == asked
    assert caplog.text.count("20 runs, 1 at a time") == 1


def test_a_study_is_estimated_by_as_many_runs_as_go_on_at_a_time(caplog):
    """Rows differ: the first to tell may be the shortest."""
    clock = study_module._Clock(runs=8, parallel=2, agree=lambda said: True)
    short, long = Progress(step=100, steps=200, seconds=0.1), Progress(step=99, steps=400, seconds=0.1)
    with caplog.at_level("INFO"):
        clock.watch({Path("a"): short, Path("b"): long})
        assert not caplog.messages
        clock.watch({Path("b"): replace(long, step=100), Path("c"): replace(short, step=0)})  # a has ended since
        clock.watch({Path("b"): replace(long, step=300)})
    assert caplog.messages == ["About 2 min in all: 8 runs, 2 at a time, if each takes 30 s, as the first (2) do."]


# ---- Tasks alone and together


def test_affinity_trains_each_group_once_measures_conflicts_once_and_goes_on(recipe, here, tmp_path, minbert):
    worker, root = here(), tmp_path / "affinity"
    words = ["affinity", recipe, "--output-dir", root, "--steps", 2]
    ended = minbert(*words, "--seeds", 1)
    assert ended.status == 0, ended.err
    assert worker.trained == [(row, "seed-1", False) for row in ("sst", "sts", "sst+sts")]
    assert ended.out.splitlines()[-2] == "sst and sts: one seed: says nothing of others."
    found = json.loads((root / "affinity.json").read_text())
    for row, seed in (("sst", 1), ("sst+sts", 1)):
        metrics = json.loads((run_folder(root, row, seed) / "metrics.json").read_text())
        assert metrics["global_step"] == 2 and ("eval_sts_pearson" in metrics) == ("sts" in row)
    conflicts = json.loads((root / "conflicts.json").read_text())["measured"]
    assert conflicts["steps"] == 2
    pair = next(line for line in found["gains"] if not line["task"])
    assert (pair["conflict"], pair["cosine"]) == (conflicts["conflict_sst_sts"], conflicts["cosine_sst_sts"])
    before = (root / "conflicts.json").stat().st_mtime_ns
    ended = minbert(*words, "--seeds", 2)
    assert ended.status == 0, ended.err
    assert [seed for _, seed, _ in worker.trained[3:]] == ["seed-2"] * 3
    assert (root / "conflicts.json").stat().st_mtime_ns == before
    assert all(line["p_holm"] is not None for line in json.loads((root / "affinity.json").read_text())["gains"])
    refused = minbert("affinity", recipe, "--output-dir", root, "--steps", 3)
    assert refused.status == 2 and "Row 'sst' has max_steps = 3" in refused.err


def test_affinity_takes_the_conflicts_that_runs_log_and_says_what_failed(recipe, here, tmp_path, minbert):
    here()
    root = tmp_path / "surgery"
    ended = minbert("affinity", recipe, "aggregator=pcgrad", "--output-dir", root, "--steps", 2, "--seeds", 1)
    assert ended.status == 0, ended.err
    metrics = json.loads((run_folder(root, "sst+sts", 1) / "metrics.json").read_text())
    pair = next(line for line in json.loads((root / "affinity.json").read_text())["gains"] if not line["task"])
    assert pair["conflict"] == metrics["train_conflict_sst_sts"] and not (root / "conflicts.json").exists()
    here(breaks=("sst+sts",))
    ended = minbert("affinity", recipe, "--output-dir", tmp_path / "broken", "--steps", 2, "--seeds", 1)
    assert ended.status == 1 and "1 run failed. Add --retry to run failed runs again." in ended.err
    assert "sst+sts: seed 1: It broke." in ended.out


def test_models_of_affinity_are_merged_and_compared(recipe, here, tmp_path, minbert, monkeypatch, capfd):
    here()
    root = tmp_path / "affinity"
    assert minbert("affinity", recipe, "--output-dir", root, "--steps", 2, "--seeds", 2).status == 0
    monkeypatch.setattr(sys, "argv", ["merging.py", str(root)])
    capfd.readouterr()
    runpy.run_path(str(ROOT / "scripts" / "merging.py"), run_name="__main__")
    found = json.loads((root / "merging.json").read_text())
    ways = ["trained together", "ensemble", "task_arithmetic", "ties", "dare", "soup of 2 trained together"]
    assert [*found] == ways and [len(of) for of in found.values()] == [2] * 5 + [1]
    metrics = {"sst": "eval_sst_accuracy", "sts": "eval_sts_pearson"}
    for place, seed in enumerate((1, 2)):
        for name, rows in (("ensemble", ("sst", "sts")), ("trained together", ("sst+sts", "sst+sts"))):
            for task, row in zip(metrics, rows, strict=True):
                scores = json.loads((run_folder(root, row, seed) / "metrics.json").read_text())
                assert found[name][place][task] == pytest.approx(scores[metrics[task]], abs=1e-6)
    assert "| trained together | 2 | " in (root / "merging.md").read_text()
    assert (root / "merging.md").read_text() in capfd.readouterr().out


# ---- Processes


def test_workers_divide_the_threads_and_share_a_gpu_by_mps(monkeypatch, tmp_path):
    said = tmp_path / "said"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\necho "$@ $(test -z "$1" && cat)" >> {said}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with workers.environments_of(2) as given:
        assert given == [{"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": gpu} for gpu in "23"]
    assert not said.exists()
    with workers.environments_of(5) as given:
        # The daemon was started with two GPUs, 2 and 3, which are 0 and 1 to its clients.
        assert [each["CUDA_VISIBLE_DEVICES"] for each in given] == ["0", "1", "0", "1", "0"]
        assert {each["OMP_NUM_THREADS"] for each in given} == {"3"}
        assert len({each["CUDA_MPS_PIPE_DIRECTORY"] for each in given}) == 1
        assert said.read_text() == "-d \n"
    assert said.read_text() == "-d \n quit\n"


def test_workers_end_before_mps_which_waits_for_them(write, here, tmp_path, monkeypatch):
    happened, worker = [], here()
    monkeypatch.setattr(Here, "close", lambda self: happened.append("worker"))

    @contextmanager
    def environments(parallel):
        yield [{}] * parallel
        happened.append("mps")

    monkeypatch.setattr(workers, "environments_of", environments)
    go(write("seeds: 1\nrows: {a: {recipe: RECIPE}}"), tmp_path / "study")
    assert len(worker.trained) == 1 and happened == ["worker", "mps"]


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_weights_of_plain_runs(write, recipe, tmp_path):
    """With real processes: the study is killed once its first run has ended, and so is a worker later on."""
    root, path = tmp_path / "study", write(TWO_ROWS)
    command = [sys.executable, "-m", "hf_minbert", "study", str(path), "--output-dir", str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "plain, seed 1:" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    first = (run_folder(root, "plain", 1) / "metrics.json").stat().st_mtime_ns
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    assert "4 runs: 1 have ended, 3 are left." in ended.stderr and "0 of 3 left" in ended.stderr
    assert (run_folder(root, "plain", 1) / "metrics.json").stat().st_mtime_ns == first
    alone = tmp_path / "alone"
    words = [f"output_dir={alone}", "seed=7", "learning_rate=1e-2"]
    subprocess.run(
        [sys.executable, "-m", "hf_minbert", "train", str(recipe), *words], env=environment, check=True,
        capture_output=True,
    )  # fmt: skip
    own, other = (load_file(folder / "model.safetensors") for folder in (alone, run_folder(root, "faster", 7)))
    assert all(torch.equal(own[name], other[name]) for name in own)  # one thread each, on one machine


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_cut_off_and_the_next_has_a_new_process(write, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    killed = []

    class Killed(workers.Worker):
        def start(self, folder, resume):
            super().start(folder, resume)
            if not killed:
                killed.append(self._process.pid)
                self._process.kill()

    monkeypatch.setattr(workers, "Worker", Killed)
    root, path = (
        tmp_path / "study",
        write("seeds: 1\nrows: {a: {recipe: RECIPE}, b: {recipe: RECIPE, keys: {learning_rate: 1e-2}}}"),
    )
    go(path, root)
    assert "a, seed 1 is not finished: Its process was killed by signal 9. The same command continues" in caplog.text
    finished = [(run_folder(root, row, 1) / "metrics.json").is_file() for row in "ab"]
    assert finished == [False, True] and workers.failure(run_folder(root, "a", 1)) is None
    go(path, root)
    assert (run_folder(root, "a", 1) / "metrics.json").is_file()


# ---- Dev rows that choose, and dev rows that are scored


def test_the_parts_of_dev_are_disjoint_whole_in_order_and_of_the_ids_alone():
    from datasets import Dataset

    rows = Dataset.from_dict({"id": [f"row {n}" for n in range(101)], "n": range(101)})
    chosen, rest = chosen_and_rest(rows, 0.3, "sst")
    assert (len(chosen), len(rest)) == (30, 71)
    assert sorted([*chosen["n"], *rest["n"]]) == [*range(101)]
    assert [*chosen["n"]] == sorted(chosen["n"]) and [*rest["n"]] == sorted(rest["n"])
    shuffled = rows.select([*range(100, -1, -1)])
    assert {*chosen_and_rest(shuffled, 0.3, "sst")[0]["n"]} == {*chosen["n"]}
    assert chosen_and_rest(rows, None, "sst") == (rows, rows)
    with pytest.raises(MinBertError, match=r"`select_on: 0.001` leaves 0 of the 101 dev rows of 'sst'"):
        chosen_and_rest(rows, 0.001, "sst")


def test_a_run_is_scored_on_the_rows_that_did_not_choose_its_model(recipe, tmp_path, minbert, course_dir):
    folder = tmp_path / "run"
    words = ["select_on=0.5", "eval_strategy=steps", "eval_steps=1", "load_best_model_at_end=true", "tasks=[sts]"]
    train(read_recipe(recipe, [*words, f"output_dir={folder}"]))
    metrics = json.loads((folder / "metrics.json").read_text())
    from hf_minbert.pretrained.data import RunData
    from hf_minbert.settings.tasks import TASKS

    rest = RunData.of(folder).rows(TASKS["sts"], "dev")
    predicted = (folder / "predictions" / "sts-dev.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in predicted] == [*rest["id"]]
    ended = minbert("evaluate", folder, "--output", tmp_path / "found.json")
    assert ended.status == 0, ended.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["eval_sts_pearson"] == pytest.approx(metrics["eval_sts_pearson"], abs=1e-6)
    best = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert metrics["best_metric"] == max(line["eval_overall"] for line in best if "eval_overall" in line)
    with pytest.raises(MinBertError, match=r"`select_on` must be more than 0 and less than 1. Found 1.0"):
        train(read_recipe(recipe, ["select_on=1.0", f"output_dir={folder}-2"]))
