"""A report: what stands in it, and what it does where something is missing, broken or large."""

import html
import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from hf_minbert.errors import MinBertError  # noqa: E402
from hf_minbert.evaluation import analysis, significance  # noqa: E402
from hf_minbert.evaluation.decoding import Decoded  # noqa: E402
from hf_minbert.io import json_line, write_json  # noqa: E402
from hf_minbert.reporting import plots, report  # noqa: E402
from hf_minbert.reporting.builder import Builder  # noqa: E402
from hf_minbert.reporting.document import Document, Example, Examples, Picture, Section, Table, Text, escaped  # noqa: E402
from hf_minbert.reporting.runs import read_predictions, read_run  # noqa: E402
from hf_minbert.settings.tasks import Task, get_tasks  # noqa: E402

PICTURES = [
    *(f"curve-{task}-{what}" for task in ("sst", "para", "sts") for what in ("loss", "score")), "curve-overall",
    *(f"{task}-{what}" for task in ("sst", "para")
      for what in ("confusion", "distribution", "calibration", "length", "words")),
    *(f"sts-{what}" for what in ("scatter", "distribution", "calibration", "residuals", "length", "words")),
    "gradients-cosine", "gradients-conflict",
]  # fmt: skip
SECTIONS = [
    "scores", "curves", "sst", "sst-classes", "sst-neighbours", "sst-distribution", "sst-calibration", "sst-length",
    "sst-words", "sst-errors", "para", "para-classes", "para-distribution", "para-calibration", "para-length",
    "para-words", "para-errors", "sts", "sts-scatter", "sts-distribution", "sts-calibration", "sts-length",
    "sts-words", "sts-errors", "gradients", "seeds", "costs",
]  # fmt: skip


class Page(HTMLParser):
    """What is in a page: ids, what it asks for from elsewhere, tags and text."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.asked, self.tags, self.text, self.raw = [], [], set(), "", text
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.asked += [found[name] for name in ("src", "href") if found.get(name)]

    def handle_data(self, data):
        self.text += data


class Undrawn(Builder):
    """Draws nothing, which takes longest."""

    def picture(self, name, alt, draw, *arguments, **options):
        return Picture(name, alt, b"")


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(significance, "RESAMPLES", 200)
        patch.setattr(plots, "DPI", 40)
        yield


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(report, "Builder", Undrawn)


def built(*paths, **options) -> dict[str, Section]:
    """The sections of a report without its drawings, by key; none may have failed."""
    build = Undrawn(**options)
    report._sections(build, report._named([read_run(path) for path in paths]))
    assert not build.failures
    return {section.key: section for section in build.sections}


@pytest.fixture(scope="module")
def sections(run):
    return built(run)


@pytest.fixture(scope="module")
def answers(run):
    return read_run(run).answers


# ---- What stands in it


def test_page_markdown_and_pictures_are_written_and_the_page_needs_nothing_else(run, tmp_path):
    page, failures = report.report(run, output_dir=tmp_path / "out")
    assert page == tmp_path / "out" / "report.html" and not failures
    found = Page(page.read_text(encoding="utf-8"))
    assert found.ids == SECTIONS
    assert all(asked.startswith(("data:", "#")) for asked in found.asked) and "script" not in found.tags
    assert not re.search(r"url\(|@import", found.raw)
    assert sorted(path.stem for path in (tmp_path / "out" / "pictures").iterdir()) == sorted(PICTURES)
    assert sum(asked.startswith("data:image/png") for asked in found.asked) == len(PICTURES)
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((pictures/[^)]+)\)", markdown)
    assert sorted(linked) == sorted(f"pictures/{name}.png" for name in PICTURES)
    assert not re.search(r"\b(nan|NaN|None|inf)\b", found.text + markdown)


def test_scores_are_those_of_metrics_json_and_baselines_stand_beside_them(run, sections, answers, table):
    metrics = json.loads((run / "metrics.json").read_text())
    found = table(sections, "scores")
    for task, name in (("sst", "macro_f1"), ("para", "f1"), ("sts", "spearman"), ("sts", "pearson")):
        assert found[f"{task}, {name}"][:2] == ["60", f"{metrics[f'eval_{task}_{name}']:.3f}"]
    assert found["overall (mean of the tasks)"][1] == f"{metrics['eval_overall']:.3f}"
    most = np.bincount(answers["sst"].labels).max() / 60
    assert found["sst, accuracy"][3] == f"{most:.3f}"
    for task, name in (("para", "f1"), ("sts", "pearson")):  # the same number as the other tables have
        best = analysis.constant_answer(answers[task].task, answers[task].labels)[1][name]
        assert found[f"{task}, {name}"][3] == f"{best:.3f}"
    assert found["sts, pearson"][3] == "0.000"
    low, high = map(float, found["sst, accuracy"][2].split(" to "))
    assert low < metrics["eval_sst_accuracy"] < high


def test_class_table_is_that_of_scikit_learn(sections, answers, table):
    for name in ("sst", "para"):
        of = answers[name]
        theirs = sk.precision_recall_fscore_support(of.labels, of.values, labels=range(len(of.task.labels)))
        for label, row in enumerate(table(sections, f"{name}-classes").values()):
            expected = [*(f"{x[label]:.3f}" for x in theirs[:3]), str(theirs[3][label])]
            assert row[:4] == expected


def test_labelled_scores_are_the_decimals_of_the_file(data, answers):
    header, *lines = (data / "sts-dev.csv").read_text().splitlines()
    assert answers["sts"].labels.tolist() == [float(line.split("\t")[-1]) for line in lines]


def test_residuals_and_distances_are_those_of_scipy_and_scikit_learn(sections, answers, table):
    of = answers["sts"]
    theirs = stats.binned_statistic(of.labels, of.values - of.labels, bins=np.linspace(0, 5, 11)).statistic
    assert [row[1] for row in table(sections, "sts-calibration").values()] == [f"{x:+.3f}" for x in theirs]
    far = sk.mean_absolute_error(of.labels, of.values)
    assert f"Mean absolute error {far:.3f};" in sections["sts-scatter"].blocks[0].text
    assert table(sections, "scores", 1)["sts: share of words in common"]


def test_errors_show_the_texts_of_rows_that_are_wrong(sections, answers):
    of = answers["sst"]
    shown = [row for block in sections["sst-errors"].blocks for row in block.rows]
    wrong = {of.ids[row]: of.texts[row] for row in np.flatnonzero(of.values != of.labels)}
    assert len(shown) == sum(min(3, int((of.labels[of.values != of.labels] == label).sum())) for label in range(5))
    for row in shown:
        assert wrong[row.remark.split("id ")[1]] == row.texts


def test_conflicts_are_the_means_of_the_log(run, sections, table):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    cosines = [entry["cosine_sst_para"] for entry in log if "cosine_sst_para" in entry]
    assert table(sections, "gradients")["sst, para"][1] == f"{np.mean(cosines):+.4f}"
    assert table(sections, "costs")["training"] == ["1 min 15 s"]
    parts = {"imports": ["8.0 s"], "first step": ["4.0 s"], "steps": ["1 min 18 s"], "in all": ["1 min 30 s"]}
    assert table(sections, "costs", 1) == parts


def test_text_is_escaped_in_the_page_and_in_markdown():
    evil = "<script>alert('x')</script> & | *b* [a](javascript:x) `c` $x$"
    blocks = [Text(evil), Table([evil, "b"], [[evil, "1"]]), Examples(evil, [Example((evil, "- # 1."), evil)])]
    document = Document(evil, evil, [evil], [Section("key", evil, blocks)])
    page = Page(document.html())
    assert "script" not in page.tags and page.text.count("<script>") == 12
    markdown = document.markdown()
    assert not re.search(r"(?<!\\)[<>`$*\[\]]", re.sub(r"(?m)^>|^\*\*|\*\*$", "", markdown))
    assert all(line.count("|") - line.count("\\|") == 3 for line in markdown.splitlines() if line.startswith("|"))


def test_markdown_shows_text_as_it_is_and_numbers_without_a_backslash():
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    markdown = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for text in (
        "1. a",
        "2) a",
        "- a",
        "+ a",
        "---",
        "===",
        "-",
        "1.",
        "# a",
        "> a",
        "a_b_ *c* ~~d~~",
        "[a](b) & &lt;",
    ):
        assert Page(markdown.render(f"before\n{escaped(text)}", {})).text.strip() == f"before\n{text}"
        assert markdown.render(escaped(text)) == f"<p>{html.escape(text)}</p>\n"
    for text in ("0.459", "-0.029", "+0.1 to -0.2", "1.5 s", "label: positive (0.74)"):
        assert escaped(text) == text


# ---- Several runs


def test_seeds_of_one_recipe_are_summed_up_and_another_recipe_is_not(run, make_run, data, tmp_path, table):
    second = make_run(tmp_path / "second", data, 60, seed=2)
    other = make_run(tmp_path / "other", data, 60, seed=3)
    with (other / "recipe.yaml").open("a") as file:
        file.write("learning_rate: 1.0\n")
    found = table(built(run, second, other), "seeds")
    assert list(found) == ["run, seed 1", "second, seed 2", "mean", "standard deviation", "highest − lowest"]
    scores = [json.loads((folder / "metrics.json").read_text())["eval_sst_accuracy"] for folder in (run, second)]
    assert found["mean"][0] == f"{np.mean(scores):.3f}"
    assert found["standard deviation"][0] == f"{np.std(scores, ddof=1):.3f}"
    assert "One run" in built(run, other)["seeds"].blocks[0].text


def test_a_comparison_tests_the_difference_and_shows_what_changed(run, make_run, data, tmp_path, table, answers):
    def perfect(labels):
        return Decoded(labels, np.eye(5)[labels])

    other = make_run(tmp_path / "other", data, 60, sst=perfect)  # para and sts as in the first
    sections = built(run, other)
    found, of = table(sections, "compare-1"), answers["sst"]
    wrong = int((of.values != of.labels).sum())
    first, second, difference, bounds, p = found["sst, accuracy"]
    assert (second, difference) == ("1.000", f"{wrong / 60:+.3f}") and first == f"{1 - wrong / 60:.3f}"
    assert p == "< 0.001" and stats.binomtest(0, wrong).pvalue < 0.001
    assert found["sts, pearson"][2:] == ["+0.000", "+0.000 to +0.000", "1.000"]
    texts = [block.text for block in sections["compare-1"].blocks if block.kind == "text"]
    assert any(text.startswith(f"sst: {wrong} rows turn right and 0 wrong") for text in texts)
    (better,) = [block for block in sections["compare-1"].blocks if block.kind == "examples"]
    assert len(better.rows) == 6 and "before: " in better.rows[0].remark


def test_changes_that_do_not_show_are_not_in_the_list(run, make_run, data, tmp_path, answers):
    def nudged(labels):
        values = answers["sts"].values.copy()
        values += np.where(labels > values, 1e-4, -1e-4)  # a little nearer, each of them
        values[3] = labels[3] + 10
        return Decoded(values, None)

    blocks = built(run, make_run(tmp_path / "other", data, 60, sts=nudged))["compare-1"].blocks
    shown = [row.remark for block in blocks if block.kind == "examples" for row in block.rows]
    pairs = [re.search(r"before: (.+?); now: (.+?); id", remark).groups() for remark in shown]
    assert all(before != now for before, now in pairs)
    worse = [block for block in blocks if block.kind == "examples" and "worse" in block.title]
    assert len(worse) == 1 and len(worse[0].rows) == 1


def test_rows_that_an_epoch_takes_are_said(make_run, data, tmp_path):
    path = make_run(tmp_path / "few", data, 60)
    with (path / "recipe.yaml").open("a") as recipe:
        recipe.write("rows_per_epoch: {sst: 0.26, para: 7}\n")
    found = built(path)
    said = {task: found[f"{task}-words"].blocks[0].text for task in ("sst", "para", "sts")}
    assert said["sst"].endswith("do not occur in the task's 60 training rows, of which an epoch took 16.")
    assert said["para"].endswith("do not occur in the task's 60 training rows, of which an epoch took 7.")
    assert said["sts"].endswith("do not occur in the task's 60 training rows.")


def test_runs_on_other_rows_or_without_predictions_are_not_compared(
    run, make_run, make_data, tmp_path, forget_metrics
):
    short = make_run(tmp_path / "short", make_data(tmp_path / "data", 20), 20)
    without = make_run(tmp_path / "without", tmp_path / "data", 20)
    forget_metrics(without)
    sections = built(run, short, without)
    said = {key: " ".join(block.text for block in sections[key].blocks) for key in ("compare-1", "compare-2")}
    assert "the two have predicted other rows" in said["compare-1"]
    assert "without has no predictions of it" in said["compare-2"]


def test_runs_of_one_folder_name_are_told_apart_and_one_run_is_not_compared_with_itself(run, make_run, data, tmp_path):
    twin = make_run(tmp_path / "run", data, 60, seed=2)
    names = [found.name for found in report._named([read_run(run), read_run(twin)])]
    assert len({*names}) == 2 and all(name.endswith("/run") for name in names)
    with pytest.raises(MinBertError, match="A run is given twice"):
        report.report(run, [run])


# ---- What is missing, odd or broken


def test_log_values_that_are_not_finite_are_named_and_lines_that_are_no_entries_left_out(run, tmp_path):
    bad = shutil.copytree(run, tmp_path / "bad")
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for entry in entries:
        entry |= {key: np.nan for key in entry if key.startswith(("cosine", "conflict"))}
    entries[-2]["loss_sst"] = np.inf
    lines = [*map(json.dumps, entries), "[1]", "7", "null", ""]
    (bad / "log.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(bad)
    assert found.broken()["loss_sst"] == entries[-2]["step"] and found.broken()["cosine_sst_para"] == 5
    assert [note.split(" of ")[0] for note in found.notes] == [f"Line {len(entries) + n}" for n in (1, 2, 3, 4)]
    sections = built(bad)
    said = sections["curves"].blocks[1].text
    assert "not finite were logged from step 5 on" in said and "cosine_sst_para" in said and said.endswith("1 more.")
    assert "the model has diverged" in sections["gradients"].blocks[0].text


def test_a_task_may_be_called_as_a_section_or_as_the_beginning_of_another(make_run, make_data, tmp_path, table):
    texts = ["yes, sure", "no | never", "<b>ünï</b>"]
    tasks = [
        Task(name=name, kind="classes", text_columns=("sentence",), label_column="label", labels=texts,
             files={split: f"{name}-{split}.csv" for split in ("train", "dev")})
        for name in ("scores", "scores_2", "overall")
    ]  # fmt: skip
    data = make_data(tmp_path / "data", 5, tasks)
    folder = make_run(tmp_path / "run", data, 5, tasks=tasks)
    entries = {
        of.name: {"kind": "classes", "text_columns": ["sentence"], "labels": texts, "files": of.files} for of in tasks
    }
    (folder / "recipe.yaml").write_text(json.dumps({"tasks": entries, "data_dir": str(data)}))
    sections = built(folder)
    assert {"scores", "scores-2", "scores_2", "scores-classes", "scores_2-classes", "overall"} <= set(sections)
    assert sections["scores-2"].blocks[0].text.startswith("One of “yes, sure”, no | never and <b>ünï</b>, on 5 dev")
    assert list(table(sections, "scores_2-classes")) == texts
    pictures = [block.name for of in sections.values() for block in of.blocks if block.kind == "picture"]
    assert len(pictures) == len({*pictures}) and {"curve-overall", "curve-overall-score"} <= {*pictures}
    for split in data.iterdir():
        split.unlink()  # and without labels, each task has its own recorded scores
    shown = table(built(folder), "scores")
    assert [name for name in shown if name.startswith("scores")] == [
        "scores_accuracy", "scores_macro_f1", "scores_matthews", "scores_2_accuracy", "scores_2_macro_f1",
        "scores_2_matthews",
    ]  # fmt: skip


def test_without_the_data_a_sentence_and_the_sections_that_need_none(run, tmp_path, table):
    moved = shutil.copytree(run, tmp_path / "moved")
    (moved / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("data\n", "gone\n"))
    found = read_run(moved)
    assert [note for note in found.notes if "Without labels and texts of sst" in note and "--data-dir" in note]
    sections = built(moved)
    assert {"scores", "curves", "sst", "gradients", "costs"} <= set(sections) and "sst-classes" not in sections
    assert table(sections, "scores")["sst_accuracy"][2] == "no labels here"
    back = read_run(moved, str(run.parent / "data"))
    assert not back.notes and back.answers["sst"].texts


def test_other_dev_rows_are_noticed(run, make_data, tmp_path):
    found = read_run(run, str(make_data(tmp_path / "data", 61)))
    assert "the 61 dev rows found are not the 60 that were predicted" in found.answers["sst"].missing


def test_the_mean_of_tasks_is_left_out_of_one_task_and_recorded_where_predictions_are_missing(
    run, make_run, make_data, tmp_path, table
):
    tasks = get_tasks(["sst"])
    alone = make_run(tmp_path / "alone", make_data(tmp_path / "data", 5, tasks), 5, tasks=tasks)
    assert list(table(built(alone), "scores")) == ["sst, accuracy", "sst, macro_f1", "sst, matthews"]
    less = shutil.copytree(run, tmp_path / "less")
    (less / "predictions" / "sts-dev.csv").unlink()
    recorded = json.loads((run / "metrics.json").read_text())["eval_overall"]
    assert table(built(less), "scores")["overall"] == ["", f"{recorded:.3f}", "as recorded", ""]


def test_predictions_without_the_names_of_classes_are_those_of_older_runs(run, tmp_path):
    (sst,) = get_tasks(["sst"])
    path = run / "predictions" / "sst-dev.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows[0][2] == "label" and {row[2] for row in rows[1:]} <= set(sst.labels)
    rows[0][3:] = [f"probability_{number}" for number in range(5)]  # by class id
    (tmp_path / "older.csv").write_text("".join(",".join(row[:2] + row[3:]) + "\n" for row in rows))
    now, older = read_predictions(path, sst), read_predictions(tmp_path / "older.csv", sst)
    assert (now.ids, now.values.tolist()) == (older.ids, older.values.tolist())
    assert now.probabilities.tolist() == older.probabilities.tolist() and now.probabilities.shape[1] == 5


def test_labels_that_have_changed_are_noticed(run, data, tmp_path):
    copied = shutil.copytree(data, tmp_path / "data")
    dev = copied / "ids-sst-dev.csv"
    header, *lines = dev.read_text().splitlines()
    dev.write_text("\n".join([header, *(line[:-1] + "0" for line in lines)]) + "\n")
    build = Undrawn()
    report._sections(build, [read_run(run, str(copied))])
    said = [block.text for block in build.sections[0].blocks if block.kind == "trouble"]
    assert len(said) == 1 and "metrics.json has" in said[0] and "accuracy of sst" in said[0]


def test_a_run_that_has_not_finished(run, tmp_path, forget_metrics, undrawn):
    cut = shutil.copytree(run, tmp_path / "cut")
    forget_metrics(cut)
    with (cut / "log.jsonl").open("a") as file:
        file.write('{"loss_sst": 0.')
    page, failures = report.report(cut)
    assert page == cut / "report" / "report.html" and not failures
    found = Page(page.read_text(encoding="utf-8"))
    for said in ("The run has not finished", "not readable", "no predictions on dev rows of sst, para, sts"):
        assert said in found.text
    assert "curves" in found.ids and "the last evaluation in the log" in found.text


def test_a_checkpoint_alone_has_a_log(run, tmp_path):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    write_json(tmp_path / "cut" / "checkpoint-30" / "trainer_state.json", {"log_history": log})
    found = read_run(tmp_path / "cut")
    assert found.series("loss_sst")[0] == [5, 10, 15, 20, 25, 30]
    assert any("the log is that of checkpoint-30" in note for note in found.notes)


def test_a_merged_model_without_a_log(run, tmp_path):
    merged = tmp_path / "merged"
    tasks = [task.to_config() for task in read_run(run).tasks.values()]
    write_json(merged / "config.json", {"model_type": "minbert", "tasks": tasks})
    write_json(merged / "metrics.json", {"eval_sst_accuracy": 0.5, "eval_overall": 0.5})
    sections = built(merged)
    assert any("There is no log" in note for note in read_run(merged).notes)
    (shown,) = [block for block in sections["scores"].blocks if block.kind == "table"]
    assert shown.rows == [["sst_accuracy", "0.500"], ["overall", "0.500"]]
    shutil.copytree(run / "predictions", merged / "predictions")
    assert read_run(merged, str(run.parent / "data")).answers["sts"].usable


def test_stages_follow_each_other_on_one_axis(run, tmp_path):
    root = tmp_path / "staged"
    for number, name in ((1, "heads"), (2, "all"), (10, "polish")):
        shutil.copytree(run, root / "stages" / f"{number}-{name}")
    shutil.copytree(run, root, dirs_exist_ok=True)
    found = read_run(root)
    assert [(stage.name, stage.start) for stage in found.stages] == [("heads", 0), ("all", 30), ("polish", 60)]
    assert found.series("eval_overall")[0] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert "a stage begins: all, polish" in built(root)["curves"].blocks[0].text


def test_weights_that_follow_the_losses_have_a_curve(run, tmp_path):
    shutil.copytree(run, tmp_path / "weighted")
    with (tmp_path / "weighted" / "log.jsonl").open("a") as log:
        log.writelines(json_line({"weight_sst": 1.0 / step, "step": step}) for step in (1, 2, 3))
    pictures = [block.name for block in built(tmp_path / "weighted")["curves"].blocks if block.kind == "picture"]
    assert pictures[:3] == ["curve-sst-loss", "curve-sst-weight", "curve-sst-score"]
    assert "curve-para-weight" not in pictures


def test_pretraining_has_a_curve_and_a_score(tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("objective: mlm\ntasks: [sst]\noutput_dir: x\n")
    entries = [{"loss": 3.0, "step": 1}, {"eval_perplexity": 20.0, "eval_sst_perplexity": 20.0, "step": 2}]
    (folder / "log.jsonl").write_text("".join(map(json_line, entries)))
    write_json(folder / "metrics.json", {"eval_perplexity": 20.0})
    sections = built(folder)
    assert [block.name for block in sections["curves"].blocks if block.kind == "picture"] == ["curve-perplexity"]
    assert sections["scores"].blocks[1].rows == [["perplexity", "20.000"]]


@pytest.mark.parametrize("values", [lambda labels: np.full(60, 2.5), lambda labels: np.full(60, np.nan)])
def test_constant_scores_and_a_model_that_diverged_are_said_in_words(values, make_run, data, tmp_path):
    tasks = get_tasks(["sts"])
    folder = make_run(tmp_path / "run", data, 60, tasks=tasks, sts=lambda labels: Decoded(values(labels), None))
    page, failures = report.report(folder)
    found = Page(page.read_text(encoding="utf-8"))
    assert not failures and not re.search(r"\b(nan|None|inf)\b", found.text)
    broken = np.isnan(values(None)).any()
    said = "60 of 60 predictions are not finite" if broken else "0.000 (not defined: constant predictions)"
    assert said in found.text and ("sts-scatter" in found.ids) != broken


def test_classes_that_never_occur_and_one_row(make_run, make_data, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "curves", lambda *arguments, **options: b"png")  # are the same for any rows
    tasks = get_tasks(["sst", "sts"])
    data = make_data(tmp_path / "data", 1, tasks)
    page, failures = report.report(make_run(tmp_path / "run", data, 1, tasks=tasks))
    found = Page(page.read_text(encoding="utf-8"))
    assert not failures and "neither occurs nor is predicted" in found.text and "one row" in found.text
    assert not re.search(r"\b(nan|None|inf)\b", found.text)


def test_a_failing_picture_or_section_never_loses_the_rest(run, tmp_path, monkeypatch, minbert):
    def broken(*arguments, **options):
        raise ZeroDivisionError("no such colour")

    for name in ("curves", "bins", "scatter", "class_counts", "score_counts"):
        monkeypatch.setattr(plots, name, lambda *arguments, **options: b"png")
    monkeypatch.setattr(plots, "confusion", broken)
    monkeypatch.setattr("hf_minbert.reporting.by_task.neighbours", broken)
    ended = minbert("report", run, "--output-dir", tmp_path)
    assert ended.status == 1 and "3 parts of the report failed" in ended.err
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found.ids == SECTIONS
    assert "The picture 'sst-confusion' could not be made: ZeroDivisionError: no such colour" in found.text
    names = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert {*PICTURES} - names == {"sst-confusion", "para-confusion"}


def test_it_needs_no_screen_and_heeds_no_settings(tmp_path):
    (tmp_path / "matplotlibrc").write_text("backend: TkAgg\ntext.usetex: True\naxes.facecolor: black\n")
    draw = "plots.curves({'a': ([1, 2], [3.0, 4.0])}, 'optimizer step', 'loss')"
    code = f"import sys; from hf_minbert.reporting import plots; plots.DPI = 40; sys.stdout.buffer.write({draw})"
    environment = {"MPLBACKEND": "TkAgg", "MATPLOTLIBRC": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert ended.returncode == 0 and ended.stderr == b"", ended.stderr
    assert ended.stdout == plots.curves({"a": ([1, 2], [3.0, 4.0])}, "optimizer step", "loss")


def test_twenty_thousand_rows_take_no_minutes(make_data, make_run, tmp_path, monkeypatch):
    (sts,) = get_tasks(["sts"])  # scores take the longest
    data = make_data(tmp_path / "data", 20_000, [sts])
    folder = make_run(tmp_path / "run", data, 20_000, tasks=[sts])
    monkeypatch.setattr(significance, "RESAMPLES", 1000)
    monkeypatch.setattr(plots, "DPI", 160)
    for name in ("curves", "bins", "score_counts"):  # draw as much for any number of rows, a second or two in all
        monkeypatch.setattr(plots, name, lambda *arguments, **options: b"png")
    start = time.process_time()  # of this process alone: others may be at work
    page, failures = report.report(folder)
    assert not failures and time.process_time() - start < 60  # a fifth of it is usual; the square of the rows is more
    assert page.stat().st_size < 4e6


def test_the_same_seed_writes_the_same_report(run, tmp_path, undrawn):
    pages = [report.report(run, output_dir=tmp_path / name)[0].read_bytes() for name in "ab"]
    assert pages[0] == pages[1]
