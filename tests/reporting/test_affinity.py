"""Which tasks train well together: the matrix, and what is said of it, from runs whose answers are known."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hf_minbert.errors import MinBertError
from hf_minbert.evaluation.effects import HIGHER, LOWER, OPEN, holm
from hf_minbert.reporting.affinity import lines, matrix, records, summarize, verdict, whole_verdict, write
from hf_minbert.run.affinity import study_of
from hf_minbert.settings.study import run_folder
from hf_minbert.settings.tasks import get_tasks

SIZE = 300
#: How often a task is right: sst and para help each other, sts harms para, and all else is chance.
STRENGTH = {
    "sst": {"sst": 1.0}, "para": {"para": 1.0}, "sts": {"sts": 1.0},
    "sst+para": {"sst": 2.0, "para": 2.0}, "sst+sts": {"sst": 1.02, "sts": 1.02},
    "para+sts": {"para": 0.2, "sts": 1.02}, "sst+para+sts": {"sst": 1.6, "para": 1.6, "sts": 1.6},
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "three.yaml"
    path.write_text("model_name_or_path: bert\ntasks: [sst, para, sts]\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def study(recipe):
    return study_of(recipe, ["learning_rate=1e-4"], steps=300, seeds=3)


@pytest.fixture(scope="module")
def root(make_data, make_run, answer, tmp_path_factory):
    """Three runs of each row. Not to be changed."""
    root = tmp_path_factory.mktemp("affinity")
    data = make_data(root / "data", SIZE)
    for row, strengths in STRENGTH.items():
        for seed in (1, 2, 3):
            changed = {task: answer(task, strengths[task], (seed, len(row))) for task in strengths}
            make_run(run_folder(root, row, seed), data, SIZE, seed, get_tasks([*strengths]), **changed)
    return root


@pytest.fixture(scope="module")
def made(study, root):
    return summarize(study, root, {}, {"conflict_sst_para": 0.25, "cosine_sst_para": 0.5, "steps": 100})


def group(made, *tasks):
    return next(each for each in made.groups if each.tasks == tasks)


def metrics_of(root, row, seed=None):
    folders = [run_folder(root, row, each) for each in ((1, 2, 3) if seed is None else (seed,))]
    return [json.loads((folder / "metrics.json").read_text()) for folder in folders]


# ---- The study


def test_the_rows_are_each_task_each_pair_and_all_and_every_run_trains_and_scores_its_tasks_alone(study):
    assert [row.name for row in study.rows] == [*STRENGTH]
    assert study.seeds == (1, 2, 3) and study.metrics == ("sst_accuracy", "para_accuracy", "sts_pearson")
    for row in study.rows:
        values = {key: value.value for key, value in study.recipe(row).items()}
        assert values["train_tasks"] == values["eval_tasks"] == row.name.split("+")
        assert values["max_steps"] == 300 and values["learning_rate"] == 1e-4
        assert values["tasks"] == ["sst", "para", "sts"]  # heads of all: the same random numbers in every row


def test_two_tasks_are_a_pair_and_no_more_and_train_tasks_chooses_them(recipe):
    two = study_of(recipe, ["train_tasks=[sts, sst]"], steps=5, seeds=1)
    assert [row.name for row in two.rows] == ["sts", "sst", "sts+sst"] and "train_tasks" not in two.words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train_tasks=[sst]"], r"needs two tasks or more. Found sst."),
        (["max_steps=7"], r"`max_steps` is given to each run by `minbert affinity`. Leave it out; see --steps."),
        (["eval_tasks=[sst]"], r"`eval_tasks` is given to each run"),
        (["seed=1"], r"`seed` is given to each run by the study"),
        (["mixing=proportional"], r"Found `mixing: proportional`. Add `mixing=cycle` or `mixing=shortest` to"),
        (["task_batch_sizes=proportional"], r"Give numbers, as task_batch_sizes=\{sts: 16\}"),
        (["stages=[{name: a, max_steps: 1}]"], r"no recipe with `stages`. Give it the recipe of the stage"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_remedy(recipe, words, said):
    with pytest.raises(MinBertError, match=said):
        study_of(recipe, words, steps=5, seeds=1)


# ---- The matrix


def test_a_gain_is_the_score_in_company_less_the_score_alone(made, root):
    for row, strengths in STRENGTH.items():
        for task in strengths if len(strengths) > 1 else ():
            metric = f"eval_{made.metrics[task]}"
            together, alone = (np.mean([of[metric] for of in metrics_of(root, name)]) for name in (row, task))
            effect = group(made, *row.split("+")).gains[task].effect
            assert effect.difference == pytest.approx(together - alone)
            assert effect.low < effect.difference < effect.high


def test_a_group_is_judged_by_the_mean_of_its_tasks_against_a_model_for_each(made, root):
    together = np.mean([of["eval_overall"] for of in metrics_of(root, "sst+sts")])
    alone = np.mean([[of["eval_overall"] for of in metrics_of(root, task)] for task in ("sst", "sts")])
    effect = group(made, "sst", "sts").together.effect
    assert effect.difference == pytest.approx(together - alone)
    per_seed = [np.mean([metrics_of(root, t, s)[0]["eval_overall"] for t in ("sst", "sts")]) for s in (1, 2, 3)]
    assert effect.over_seeds[1] == pytest.approx(np.var(per_seed, ddof=1))
    assert effect.over_rows[0] > 0  # of the dev rows of both tasks


def test_p_is_corrected_over_the_groups_and_over_those_of_a_task(made):
    cells = [each.together for each in made.groups]
    assert [cell.p for cell in cells] == pytest.approx(holm([cell.effect.p for cell in cells]))
    of_sts = [each.gains["sts"] for each in made.groups if "sts" in each.tasks]
    assert len(of_sts) == 3 and [cell.p for cell in of_sts] == pytest.approx(holm([c.effect.p for c in of_sts]))


def test_the_known_answer_is_found(made):
    verdicts = {each.tasks: each.together.verdict for each in made.groups}
    assert verdicts["sst", "para"] == HIGHER and verdicts["para", "sts"] == LOWER
    assert verdicts["sst", "sts"] == OPEN and verdicts["sst", "para", "sts"] == HIGHER
    assert {task: cell.verdict for task, cell in group(made, "para", "sts").gains.items()} == {
        "para": LOWER, "sts": OPEN,
    }  # fmt: skip


def test_a_verdict_is_a_sentence_with_its_numbers(made):
    both = group(made, "sst", "para")
    said, effect = verdict(both), both.together.effect
    assert said.startswith(f"sst and para: train them together ({effect.difference:+.3f} in the mean of the tasks, ")
    assert "sst and para gain by" in said
    assert "para and sts: train them apart" in verdict(group(made, "para", "sts"))
    assert "; para loses by 0." in verdict(group(made, "para", "sts"))
    open_ = group(made, "sst", "sts")
    assert f"cannot be told ({open_.together.effect.difference:+.3f}" in verdict(open_)
    assert "would tell" in verdict(open_) and "lose" not in verdict(open_)
    whole = whole_verdict(made)
    assert whole.startswith("All: sst, para and sts: train them together")
    assert whole.endswith("Of the pairs: together sst and para; apart para and sts.")


def test_of_two_seeds_no_number_of_seeds_is_said(recipe, root):
    two = summarize(study_of(recipe, ["learning_rate=1e-4"], steps=300, seeds=2), root, {}, {})
    open_ = [each for each in two.groups if each.together.verdict == OPEN]
    assert open_
    for each in open_:
        assert "3 seeds or more are needed to say how many would tell" in verdict(each)
    assert {row["seeds_that_would_tell"] for row in records(two) if row["verdict"] == OPEN} == {
        "3 or more are needed to say"
    }


def test_the_matrix_has_a_task_a_row_and_is_empty_where_a_task_meets_itself(made):
    shown = matrix(made)
    assert shown.header == ["task", "metric", "alone", "with sst", "with para", "with sts", "with all"]
    assert [row[:2] for row in shown.rows] == [["sst", "accuracy"], ["para", "accuracy"], ["sts", "pearson"]]
    assert [row[3 + place] for place, row in enumerate(shown.rows)] == ["", "", ""]
    assert shown.rows[1][5].endswith("), lower") and shown.rows[0][4].endswith("), higher")
    text = lines(made)
    assert text[2].startswith("para") and " - " in text[2] and text[-1] == whole_verdict(made)


def test_the_files_hold_the_matrix_and_the_conflicts(made, tmp_path):
    write(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"affinity.{end}" for end in ("md", "html", "csv", "json")}
    with (tmp_path / "affinity.csv").open(newline="") as file:
        flat = {(line["tasks"], line["task"]): line for line in csv.DictReader(file)}
    assert len(flat) == 3 * 3 + 4 == len([*records(made)])
    effect = group(made, "sst", "para").gains["para"].effect
    assert float(flat["sst+para", "para"]["gain"]) == effect.difference  # written as it is
    assert flat["sst+para", ""]["conflict"] == "0.25" and flat["para+sts", ""]["conflict"] == ""
    found = json.loads((tmp_path / "affinity.json").read_text())
    assert found["verdict"] == whole_verdict(made) and found["verdicts"]["sst+para"] == verdict(made.groups[0])
    text = (tmp_path / "affinity.md").read_text()
    assert "25.0%" in text and "average over the first 100 steps" in text and "1905.07553" in text


def test_without_runs_or_seeds_nothing_is_told(study, root, tmp_path, recipe):
    nothing = summarize(study, tmp_path, {})
    assert verdict(nothing.groups[0]) == "sst and para: no result, because its runs have not finished."
    assert "sst: seeds 1, 2 and 3: not finished" in nothing.missing
    write(nothing, tmp_path)
    one = summarize(study_of(recipe, (), steps=300, seeds=1), root, {})
    assert verdict(one.groups[0]) == "sst and para: one seed: says nothing of others."
    assert whole_verdict(one).endswith("Of the pairs: nothing can be told.")
