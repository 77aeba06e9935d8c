"""The table of a study: what stands in it is what the runs' folders hold, finished or not."""

import csv
import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from scipy import stats

from hf_minbert import MinBertError
from hf_minbert.data.selection import chosen_and_rest
from hf_minbert.evaluation.effects import HIGHER, OPEN, Sample, difference, holm
from hf_minbert.io import json_line, write_json
from hf_minbert.reporting import plots
from hf_minbert.reporting.comparison import seeds
from hf_minbert.reporting.differences import NOT_RUN, SAME, Cell, compare, judged, score, table, weights
from hf_minbert.reporting.document import Document, Section, Table
from hf_minbert.reporting.runs import read_run
from hf_minbert.reporting.study import lines, records, summarize, write
from hf_minbert.reporting.together import as_one
from hf_minbert.settings.study import Claim, Row, Study, run_folder
from hf_minbert.settings.tasks import get_tasks

SIZE = 300
SUM = {"better": "sum"}


@pytest.fixture(scope="module")
def root(make_data, make_run, answer, tmp_path_factory):
    """Runs of rows `sum`, `alike` and `better`, three seeds each, and one of `single`. Not to be changed."""
    root = tmp_path_factory.mktemp("study")
    data = make_data(root / "data", SIZE)
    for row, strength, number in (("sum", 1, 3), ("alike", 1.03, 3), ("better", 2, 3), ("single", 1.5, 1)):
        for seed in range(1, number + 1):
            changed = {task: answer(task, strength, [seed, len(row)]) for task in ("sst", "para", "sts")}
            make_run(run_folder(root, row, seed), data, SIZE, seed, **changed)
    return root


def study(*rows, **options):
    reported = {"sum": {"overall": 0.5}, "better": {"overall": 0.6}, "planned": {"overall": 0.7}}
    names = rows or ("sum", "alike", "better", "single", "planned", "waiting")
    made = [
        Row(n, "cs224n/baseline", {"learning_rate": 1}, reported.get(n, {}), options.get("against", {}).get(n, ""),
            note=n * (n == "alike"), not_run="no data" * (n == "planned"))
        for n in names
    ]  # fmt: skip
    options.pop("against", None)
    return Study(tuple(made), options.pop("reference", "sum"), title="A study", source="somebody", **options)


@pytest.fixture(scope="module")
def made(root):
    return summarize(study(), root, {("single", 2): "CUDA out of memory"})


def metrics_of(root, row, key):
    folders = sorted((root / "runs" / row).iterdir())
    return [json.loads((folder / "metrics.json").read_text())[f"eval_{key}"] for folder in folders]


def test_scores_are_those_of_the_runs(root, made):
    assert list(made.metrics) == ["sst_accuracy", "para_accuracy", "sts_pearson", "overall"]
    for metric, cells in made.metrics.items():
        for row in ("sum", "alike", "better"):
            scores = metrics_of(root, row, metric)
            assert [score for _, score in cells[row].scores] == scores and len(scores) == 3
            assert (cells[row].mean, cells[row].sd) == pytest.approx((np.mean(scores), np.std(scores, ddof=1)))
        assert cells["single"].sd is None and cells["waiting"].mean is None


def test_the_difference_of_an_accuracy_is_that_by_hand(root, made):
    """The estimate as it stands in the module of the effects, on right and wrong themselves."""
    right = []
    for row in ("sum", "better"):
        answers = [read_run(run_folder(root, row, seed)).answers["sst"] for seed in (1, 2, 3)]
        right.append(np.array([of.values == of.labels for of in answers], float))
    one, other = right
    means = (other.mean(0) - one.mean(0)).var(ddof=1) / SIZE
    over_seeds = sum(x.mean(1).var(ddof=1) / 3 for x in right)
    rest = [x - x.mean(0) - x.mean(1, keepdims=True) + x.mean() for x in right]
    shared = sum((x**2).sum() / (2 * (SIZE - 1)) / 3 / SIZE for x in rest)
    effect = made.metrics["sst_accuracy"]["better"].effect
    assert effect.difference == pytest.approx(other.mean() - one.mean())
    assert effect.over_rows[0] == pytest.approx(max(means - shared, 0)) and sum(
        effect.over_seeds
    ) / 3 == pytest.approx(over_seeds)
    reach = (effect.high - effect.low) / 2 / math.sqrt(over_seeds + max(means - shared, 0))
    assert stats.t.ppf(0.975, SIZE) < reach < stats.t.ppf(0.975, 2)


def test_what_can_be_told_is_told_and_holms_rows_are_those_of_which_it_can(made):
    cells = made.metrics["overall"]
    assert cells["better"].verdict == HIGHER and cells["better"].claim == "holds"
    assert cells["alike"].verdict == OPEN and cells["alike"].seeds_to_tell > 3
    assert cells["single"].p is None and cells["single"].said == "one seed: says nothing of others"
    assert cells["single"].effect.over_seeds is None
    assert cells["planned"].claim == NOT_RUN and cells["planned"].claimed == pytest.approx(0.2)
    assert cells["better"].p == pytest.approx(min(1, 2 * cells["better"].effect.p))  # of two rows


def test_of_two_seeds_nothing_is_said_of_how_many_would_tell():
    random = np.random.default_rng(0)
    for ours, theirs in ((2, 2), (2, 5), (5, 2), (3, 3)):
        rows = random.normal(size=(1, 200))
        one, two = (Sample(random.normal(0.5, 0.01, n), [rows + random.normal(size=(n, 200))]) for n in (ours, theirs))
        cell = judged({"a": Cell([*enumerate(one.scores)], "b", effect=difference(one, two))})["a"]
        assert cell.verdict == OPEN
        assert (cell.seeds_said == "3 or more are needed to say") == (min(ours, theirs) < 3)


def test_what_is_missing_is_listed_with_its_reason(made):
    missing = {row.row.name: list(row.missing) for row in made.rows}
    assert missing["single"] == ["seed 2: CUDA out of memory", "seed 3: not finished"]
    assert missing["planned"] == ["not run: no data"]
    assert missing["waiting"] == ["seeds 1, 2 and 3: not finished"] and missing["sum"] == []
    said = "\n".join(lines(made))
    assert "planned: not run: no data" in said and "± 0." in said
    assert [line for line in lines(made) if line.startswith("better")][0].endswith(" +")


def test_all_files_hold_the_table(made, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "DPI", 40)
    write(made, tmp_path)
    drawn = {"study.png"} if "matplotlib" in sys.modules else set()
    assert {path.name for path in tmp_path.iterdir()} == {"study.md", "study.csv", "study.json", "study.html"} | drawn
    with (tmp_path / "study.csv").open(newline="") as file:
        records = {(line["row"], line["metric"]): line for line in csv.DictReader(file)}
    assert len(records) == 6 * 4
    cell = made.metrics["overall"]["better"]
    found = json.loads((tmp_path / "study.json").read_text())
    same = next(line for line in found["differences"] if (line["row"], line["metric"]) == ("better", "overall"))
    for line in (records["better", "overall"], same):
        assert float(line["low"]) == cell.effect.low and line["verdict"] == "higher"  # written as they are
    assert found["scores"]["overall"]["single"] == [{"seed": 1, "score": cell_of(made, "single").scores[0][1]}]
    for name in ("study.md", "study.html"):
        text = (tmp_path / name).read_text()
        assert text.count(made.selection[0]) == 1 + len(made.metrics) and "Holm" in text and "somebody" in text
        assert f"{cell.effect.difference:+.3f}" in text and "one seed: says nothing of others" in text


def cell_of(made, row):
    return made.metrics["overall"][row]


def test_without_matplotlib_there_is_no_picture(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(made, tmp_path)
    assert not list(tmp_path.glob("*.png")) and "study.png" not in (tmp_path / "study.md").read_text()


def test_nothing_has_finished(tmp_path):
    made = summarize(study("sum", "planned"), tmp_path, {})
    write(made, tmp_path)
    assert made.metrics == {} and "No run has finished" in (tmp_path / "study.md").read_text()
    assert "sum: seeds 1, 2 and 3: not finished" in lines(made)
    named = summarize(study("sum", "planned", metrics=("overall",)), tmp_path, {})
    write(named, tmp_path)
    assert named.metrics["overall"]["planned"].reported == 0.7


def test_the_reference_has_not_finished(root, tmp_path):
    made = summarize(study("better", "waiting", reference="waiting"), root, {})
    write(made, tmp_path)
    assert made.metrics["overall"]["better"].effect is None and made.metrics["overall"]["better"].mean


# ---- Rows with a reference of their own, claims in words


def test_a_row_with_its_own_reference_is_compared_with_that_and_all_tables_say_so(root, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "DPI", 40)
    alone, chain = (
        summarize(study("sum", "alike", "better", against=of), root, {}) for of in ({}, {"better": "alike"})
    )
    other = summarize(study("better", "alike", reference="alike"), root, {})
    for metric, cells in chain.metrics.items():
        assert (
            cells["better"].effect == other.metrics[metric]["better"].effect != alone.metrics[metric]["better"].effect
        )
        assert cells["alike"].effect == alone.metrics[metric]["alike"].effect
    assert chain.metrics["overall"]["better"].claimed is None  # nothing is reported of `alike`
    ps = [chain.metrics["overall"][row].effect.p for row in ("alike", "better")]
    assert [chain.metrics["overall"][row].p for row in ("alike", "better")] == pytest.approx(holm(ps))
    assert {line["row"]: line["against"] for line in records(chain)} == {"sum": "", "alike": "sum", "better": "alike"}
    assert {line["against"] for line in records(alone)} == {"", "sum"}
    heads = [table("overall", of.metrics["overall"]) for of in (alone, chain)]
    assert "less sum" in heads[0].header and "against" not in heads[0].header
    column = heads[1].header.index("against")
    assert heads[1].header[column + 1] == "difference" and [row[column] for row in heads[1].rows] == [
        "",
        "sum",
        "alike",
    ]
    words = lines(chain)
    assert words[0].endswith("against") and [line for line in words if line.startswith("better")][0].endswith("alike")
    assert "+ higher than the row that it is compared with" in "\n".join(words) and "against" not in lines(alone)[0]
    write(chain, tmp_path)
    with (tmp_path / "study.csv").open(newline="") as file:
        assert {line["against"] for line in csv.DictReader(file)} == {"", "sum", "alike"}
    for name in ("study.md", "study.html"):
        text = (tmp_path / name).read_text()
        assert "; against sum" not in text and ("matplotlib" not in sys.modules or "is compared with" in text)


def test_a_reference_may_have_a_reference_of_its_own(root):
    made = summarize(study("sum", "better", against={"sum": "better"}), root, {})
    one, other = (made.metrics["overall"][row].effect for row in ("sum", "better"))
    assert one.difference == pytest.approx(-other.difference) and (one.low, one.high) == pytest.approx(
        (-other.high, -other.low)
    )


def test_claims_in_words_are_judged_by_their_rows_cells(root, tmp_path):
    claims = (
        Claim("Better is better.", "better", ("overall",)),
        Claim("It is so in each.", "better", ("sst_accuracy", "para_accuracy"), finds="higher"),
        Claim("It is not.", "better", ("sst_accuracy",), finds="lower"),
        Claim("The two are alike.", "alike", ("overall",), within=0.5),
        Claim("The two are alike.", "better", ("overall",), within=0.01),
        Claim("It would be better.", "planned", ("overall",)),
    )
    made = summarize(study(claims=claims), root, {})
    write(made, tmp_path)
    found = json.loads((tmp_path / "study.json").read_text())["claims"]
    judged = [(line["metric"], line["claim"]) for line in found]
    assert judged == [
        ("overall", "holds"), ("sst_accuracy", "holds"), ("para_accuracy", "holds"), ("sst_accuracy", "opposite"),
        ("overall", "holds"), ("overall", "opposite"), ("overall", NOT_RUN),
    ]  # fmt: skip
    cell = made.metrics["overall"]["better"]
    assert found[0]["difference"] == cell.effect.difference and found[0]["against"] == "sum"
    assert found[0]["reported_difference"] == pytest.approx(0.1) and found[0]["n"] == 3
    for name in ("study.md", "study.html"):
        text = (tmp_path / name).read_text()
        assert "Claims" in text and "It would be better." in text and "none, within 0.5" in text


def test_rows_that_are_the_same_training_have_no_difference_to_tell(root, tmp_path):
    claims = (Claim("Better is better.", "better", ("overall",)),)
    made = summarize(study("sum", "better", "alike", claims=claims), root, {}, {"better": "sum"})
    cells = made.metrics["overall"]
    assert cells["better"].effect is None and cells["better"].said == cells["better"].claim == SAME
    assert cells["alike"].p == cells["alike"].effect.p  # Holm's rows are without it
    assert made.rows[1].note == "With these keys the same training as sum, so it was run once."
    assert "better: the same training as sum" in lines(made)
    write(made, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["claims"][0]["claim"] == SAME


def test_columns_of_words_are_left_and_those_of_numbers_right():
    rows = [
        ["1", "+0.1", "reference", "holds", "< 0.001", "3", ""],
        ["2", "-0.1 to 0.2", "+0.2", "cannot be told", "0.2", "over 1,000", ""],
        ["3", "", "-0.3", "", "", "no number", ""],
    ]
    made = Table(["row", "a", "b", "c", "d", "e", "f"], rows)
    assert made.numeric == [False, True, True, False, True, False, False]
    page = Document("T", "s", [], [Section("s", "S", [made])])
    assert "| --- | ---: | ---: | --- | ---: | --- | --- |" in page.markdown()
    assert '<td class="words">holds</td>' in page.html() and "<td>&lt; 0.001</td>" in page.html()
    assert Table(["row", "a"], []).numeric == [False, False]


# ---- What a run's score is


def test_reductions_are_of_the_log_without_the_evaluation_before_the_first_step(root):
    run = read_run(run_folder(root, "sum", 1))
    best = run.metrics["eval_sst_accuracy"]
    run.stages[-1].log.insert(0, {"eval_sst_accuracy": 9.0, "step": 0})
    assert score(run, "sst_accuracy") == best
    assert score(run, "sst_accuracy", "last") == pytest.approx(best)  # scores of the log: a third, two thirds, all
    assert score(run, "sst_accuracy", "mean") == pytest.approx(best * 2 / 3)
    assert score(run, "nothing") is None and score(run, "nothing", "mean") is None
    run.metrics["eval_sst_accuracy"] = None  # as JSON has what is not finite
    assert score(run, "sst_accuracy") is None


def test_the_variance_over_rows_is_that_of_the_predictions_whatever_the_reduction(root):
    found = [
        summarize(study("sum", "better", reduction=name), root, {}).metrics["sst_accuracy"]["better"].effect
        for name in ("best", "mean")
    ]
    assert found[0].over_rows == pytest.approx(found[1].over_rows)
    assert found[1].difference == pytest.approx(found[0].difference * 2 / 3)


def test_what_was_chosen_on_what_is_said(make_run, root, tmp_path):
    said = []
    for number, recipe in enumerate(
        ["", "load_best_model_at_end: true\n", "load_best_model_at_end: true\nselect_on: 0.5\n"]
    ):
        folder = make_run(run_folder(tmp_path, f"row {number}", 1), root / "data", SIZE)
        with (folder / "recipe.yaml").open("a") as file:
            file.write(recipe)
        write_json(folder / "metrics.json", json.loads((folder / "metrics.json").read_text())
                   | {"metric_for_best_model": "eval_overall" if recipe else None})  # fmt: skip
        rows = study(f"row {number}", reference=f"row {number}", seeds=(1,))
        said += summarize(rows, tmp_path, {}).selection
        said += summarize(rows.__class__(**{**vars(rows), "reduction": "last"}), tmp_path, {}).selection
    assert said[0] == "Scores are of the last weights. Nothing was chosen on the dev rows."
    assert "best overall on the dev rows was kept, and scores are of the same rows" in said[2]
    assert "on 50% of the dev rows was kept. Scores are of the other dev rows" in said[4]
    assert all("none was chosen" in each for each in said[1::2])
    several = study("row 0", "row 1", reference="row 0", seeds=(1,))
    assert [each.split(":")[0] for each in summarize(several, tmp_path, {}).selection] == ["row 0", "row 1"]
    for number in (3, 4):
        shutil.copytree(tmp_path / "runs" / "row 1", tmp_path / "runs" / f"row {number}")
    many = study("row 0", "row 1", "row 3", "row 4", reference="row 0", seeds=(1,))
    said = summarize(many, tmp_path, {}).selection
    assert [each.split(": ")[0] for each in said] == ["row 0", "All other rows"] and "best overall" in said[1]


def test_of_held_out_dev_rows_those_that_are_scored_have_labels(make_run, root, tmp_path):
    folder = make_run(tmp_path / "run", root / "data", SIZE)
    file = folder / "predictions" / "sst-dev.csv"
    header, *rows = file.read_text().splitlines(keepends=True)
    whole = read_run(run_folder(root, "sum", 1)).answers["sst"]
    dev = Dataset.from_dict({"id": whole.ids, "place": range(len(whole.ids))})
    kept = chosen_and_rest(dev, 0.5, "sst")[1]["place"]
    file.write_text("".join([header, *(rows[place] for place in kept)]))
    assert read_run(folder).answers["sst"].missing
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write("select_on: 0.5\n")
    half = read_run(folder).answers["sst"]
    assert half.ids == [whole.ids[place] for place in kept] and (half.labels == whole.labels[[*kept]]).all()
    assert half.texts == [whole.texts[place] for place in kept]


def test_time_memory_and_conflicts_are_those_that_were_logged(make_run, root, tmp_path):
    for seed, logged in ((1, 0.25), (2, 0.75)):
        folder = make_run(run_folder(tmp_path, "sum", seed), root / "data", SIZE, seed)
        found = json.loads((folder / "metrics.json").read_text())
        found |= {
            "train_conflict_sst_para": logged,
            "train_conflict_sst_para/3": 1.0,
            "train_peak_memory_gb": 4 * logged,
        }
        write_json(folder / "metrics.json", found)
        with (folder / "log.jsonl").open("a") as file:
            file.write(json_line({"train_runtime": 100.0 * seed, "step": 31}))
    (row,) = summarize(study("sum", seeds=(1, 2)), tmp_path, {}).rows
    assert row.conflicts == {"sst_para": 0.5} and row.memory_gb == 3.0
    assert row.seconds == pytest.approx(75 + 150)  # in two parts, of which the first is 75


# ---- Rows of runs


def test_metrics_are_sums_of_tasks():
    tasks = {task.name: task for task in get_tasks(["sst", "para", "sts"])}
    third = pytest.approx(1 / 3)
    parts = {("sst", "accuracy"): third, ("para", "accuracy"): third}
    assert weights("overall", tasks) == {**parts, ("sts", "pearson"): third}
    assert weights("leaderboard", tasks) == {**parts, ("sts", "pearson"): pytest.approx(1 / 6)}
    assert weights("sst_macro_f1", tasks) == {("sst", "macro_f1"): 1.0}
    assert weights("train_sst_accuracy", tasks) == weights("perplexity", {}) == {}


def test_without_predictions_the_interval_is_of_the_seeds_alone(root, tmp_path):
    groups = {row: [read_run(run_folder(root, row, seed)) for seed in (1, 2, 3)] for row in ("sum", "better")}
    del groups["better"][1].answers["sst"]
    cell = compare(groups, SUM, "sst_accuracy")["better"]
    theirs = stats.ttest_ind(
        metrics_of(root, "better", "sst_accuracy"), metrics_of(root, "sum", "sst_accuracy"), equal_var=False
    )
    assert (cell.effect.low, cell.effect.high) == pytest.approx(theirs.confidence_interval())
    assert cell.verdict == "" and cell.without_rows == "there are no predictions of sst in better/seed-2"
    assert compare(groups, SUM, "para_accuracy")["better"].verdict == HIGHER
    groups["better"][0].answers["para"].ids[0] = "other"
    assert "other dev rows" in compare(groups, SUM, "para_accuracy")["better"].without_rows


def test_tasks_may_come_in_another_order(root):
    groups = {row: [read_run(run_folder(root, row, seed)) for seed in (1, 2, 3)] for row in ("sum", "better")}
    before = compare(groups, SUM, "overall")["better"].effect
    for run in groups["better"]:
        run.tasks = dict(reversed(run.tasks.items()))
    after = compare(groups, SUM, "overall")["better"].effect
    assert (after.low, after.high) == pytest.approx((before.low, before.high))


def test_a_model_that_diverged_scores_nought_and_has_no_rows_of_its_own(root):
    groups = {row: [read_run(run_folder(root, row, seed)) for seed in (1, 2, 3)] for row in ("sum", "better")}
    groups["better"][0].answers["sts"].values[3] = np.nan
    groups["better"][0].metrics["eval_sts_pearson"] = 0.0
    effect = compare(groups, SUM, "sts_pearson")["better"].effect
    assert math.isfinite(effect.low) and effect.over_seeds[0] > 0.05


def test_a_report_sums_up_the_seeds_of_several_recipes_by_the_same_functions(root, make_run, tmp_path, answer):
    groups = {}
    for row, strength in (("one", 1), ("two", 2)):
        for seed in (1, 2):
            changed = {task: answer(task, strength, [seed]) for task in ("sst", "para", "sts")}
            folder = make_run(tmp_path / f"{row}-{seed}", root / "data", SIZE, seed, **changed)
            with (folder / "recipe.yaml").open("a") as file:
                file.write(f"learning_rate: {strength}\n")
            groups.setdefault(f"{row}-1", []).append(read_run(folder))
    blocks = seeds([run for runs in groups.values() for run in runs])
    assert "two-1 differs in learning_rate." in [block.text for block in blocks if block.kind == "text"]
    tables = {block.header[0]: block for block in blocks if block.kind == "table"}
    cells = compare(groups, {"two-1": "one-1"}, "overall")
    assert tables["overall"] == table("overall", cells) and cells["two-1"].verdict == HIGHER


def test_models_of_one_task_each_score_together_as_one_model_with_their_answers(root):
    whole = read_run(run_folder(root, "sum", 2))
    parts = [
        replace(whole, tasks={name: task}, answers={name: whole.answers[name]}) for name, task in whole.tasks.items()
    ]
    together = as_one(parts)
    assert list(together.tasks) == list(whole.tasks) and together.seed == 2
    for metric in ("sst_accuracy", "para_f1", "overall", "leaderboard"):
        assert together.metrics[f"eval_{metric}"] == pytest.approx(whole.metrics[f"eval_{metric}"])
    cells = compare({"a": [together, whole], "b": [whole, together]}, {"b": "a"}, "overall")
    assert cells["b"].effect.difference == pytest.approx(0, abs=1e-12) and not cells["b"].without_rows
    with pytest.raises(MinBertError, match=r"`together` needs rows of different tasks. Found 'sst' in 'sum'"):
        as_one([whole, parts[0]])


def test_a_row_of_other_rows_has_the_seeds_that_all_of_them_have(root):
    rows = (Row("sum", "cs224n/baseline"), Row("single", "cs224n/baseline"), Row("both", together=("sum", "single")))
    with pytest.raises(MinBertError, match="different tasks"):
        summarize(Study(rows, "sum"), root, {})  # both have the three tasks, and one seed in common
    waiting = (Row("sum", "cs224n/baseline"), Row("new", "cs224n/baseline"), Row("both", together=("sum", "new")))
    made = summarize(Study(waiting, "sum"), root, {})
    assert made.rows[2].seeds == [] and made.rows[2].missing == ["new: seeds 1, 2 and 3: not finished"]
