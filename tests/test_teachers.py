"""Teachers that a recipe trains: what they take from the student's recipe, that none is trained twice or lost, and
that their answers are computed once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_minbert import MinBertError, Predictor, get_tasks
from hf_minbert.pretrained.teachers import on_scale_of, teacher_logits
from hf_minbert.publishing.publish import prepare
from hf_minbert.reporting.runs import read_run
from hf_minbert.run.runs import split
from hf_minbert.run.search import search
from hf_minbert.run.search_methods import read_space
from hf_minbert.run.study import begin, run_study
from hf_minbert.run.teachers import Teachers, teacher_runs
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_lines, read_recipe, write_recipe
from hf_minbert.settings.study import read_study, run_folder
from hf_minbert.settings.table import names
from hf_minbert.settings.teachers import teachers_to_train

TEACHER = """
tasks: {sst: {pooling: mean}, sts: null}
max_steps: 2
per_device_train_batch_size: 4
learning_rate: 1e-3
save_strategy: steps
save_steps: 1
"""
STUDENT = """
model_name_or_path: BERT
data_dir: DATA
output_dir: ROOT/student
tasks: [sst, sts]
max_steps: 2
per_device_train_batch_size: 4
hidden_dropout_prob: 0.1
learning_rate: 1e-3
save_strategy: "no"
disable_tqdm: true
teachers:
  - {recipe: teacher.yaml, seeds: 2}
"""


@pytest.fixture
def student(tiny_bert, course_dir, tmp_path):
    """`student(text, *words)`: the recipe STUDENT with further lines, beside that of the teacher."""

    def make(more: str = "", *words: str, teacher: str = TEACHER) -> dict:
        (tmp_path / "teacher.yaml").write_text(teacher, encoding="utf-8")
        text = STUDENT.replace("BERT", str(tiny_bert)).replace("DATA", str(course_dir))
        path = tmp_path / "student.yaml"
        path.write_text(text.replace("ROOT", str(tmp_path)) + more, encoding="utf-8")
        return read_recipe(path, words)

    return make


def plain(values: dict) -> dict:
    return {key: value.value for key, value in values.items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    # the same steps on the same processor
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- What an entry says


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{seeds: 2}", "an entry must be a saved model or have a `recipe`"),
        ("{recipe: teacher.yaml, seed: 2}", r"Teacher 'teacher': Unknown key 'seed'. Did you mean 'seeds'\?"),
        ("{recipe: teacher.yaml, seeds: 0}", "Teacher 'teacher': `seeds` must be how many"),
        ("{recipe: teacher.yaml, keys: {seed: 1}}", "`seed` is given to each run by `seeds` and `name`"),
        ("{recipe: teacher.yaml, name: a/b}", "the name is used for a folder"),
        ("{recipe: techer.yaml}", "Teacher 'techer': Recipe .*techer.yaml: there is no such file"),
        ("{recipe: teacher.yaml, keys: {lerning_rate: 1}}", "Teacher 'teacher': Unknown key 'lerning_rate'"),
        ("{recipe: teacher.yaml}, {recipe: teacher.yaml}", "two recipes called 'teacher'"),
        ("teacher.yaml", r"names the recipe .*teacher.yaml. Write it as {recipe: .*teacher.yaml}"),
        ("nowhere/model", "A model of `teachers` cannot be loaded: There is no folder nowhere/model here"),
        ("{recipe: student.yaml}", "Teacher 'student': its recipe trains teachers of its own"),
        ("{recipe: teacher.yaml, keys: {tasks: [para]}}", "'teacher' has none of the tasks in training: it has para"),
        ("{recipe: teacher.yaml, keys: {tasks: [sst]}}", "`teachers` has the task 'sts', and each task"),
        ("{recipe: teacher.yaml, keys: {tasks.sts.range: [0, 1]}}", "'teacher' cannot teach 'sts': `range`"),
    ],
)
def test_what_no_teacher_can_be_is_refused_before_anything_is_trained(student, here, tmp_path, entry, said):
    worker = here()
    with pytest.raises(MinBertError, match=said):
        train(student("", f"teachers=[{entry}]".replace("teacher.yaml", str(tmp_path / "teacher.yaml")).replace(
            "student.yaml", str(tmp_path / "student.yaml"))))  # fmt: skip
    assert not worker.trained


def test_mistakes_in_a_teachers_recipe_are_answered_by_the_words_alone(student, minbert, tmp_path):
    student(teacher=TEACHER + "aggregator: pcgard\n")
    ended = minbert("train", tmp_path / "student.yaml")
    assert ended.status == 2 and "Teacher 'teacher': Unknown aggregator 'pcgard'. Did you mean 'pcgrad'" in ended.err


def test_a_teacher_has_its_own_lines_the_students_place_and_machine_and_the_entrys_keys_before_both(student, tmp_path):
    teacher = TEACHER + "model_name_or_path: theirs\nbf16: false\nselect_on: 0.25\ntasks: {sst: {pooling: mean}}\n"
    teacher = teacher.replace("tasks: {sst: {pooling: mean}, sts: null}\n", "", 1)
    more = "packing: true\nbf16: true\nweight_decay: 0.5\nselect_on: 0.5\nrun_name: ours\nheld_out: [para]\n"
    values = student(
        more,
        "tasks={sst: {files: {train: mine.csv}, pooling: max}, sts: {sources: [{task: para}]}}",
        "teachers.0.keys={learning_rate: 0.25, packing: false}",
    )
    (tmp_path / "teacher.yaml").write_text(teacher, encoding="utf-8")
    found, ours = plain(teachers_to_train(values)["teacher"][1]), plain(values)
    assert (found["learning_rate"], found["packing"], found["max_steps"]) == (0.25, False, 2)
    assert "weight_decay" not in found and "run_name" not in found and "output_dir" not in found
    handed_on = {*names(among=ours, of_teachers=True)} - {"packing", "run_name"}
    assert {"model_name_or_path", "data_dir", "bf16", "select_on", "held_out", "disable_tqdm"} <= handed_on
    assert {key: found[key] for key in handed_on} == {key: ours[key] for key in handed_on}
    assert found["tasks"] == {"sst": {"pooling": "mean", "files": {"train": "mine.csv"}}}


def test_the_students_rows_to_be_scored_are_held_out_of_what_a_teacher_borrows(student, course_dir, tmp_path):
    own = f"{{kind: score, text_columns: [a, b], range: [0, 1], files: {{dev: {course_dir}/sts-dev.csv}}}}"
    runs = teacher_runs(student("", f"tasks.mine={own}"), tmp_path / "teachers")
    assert "mine" in runs[0].values["held_out"].value
    assert "held_out" not in teacher_runs(student(), tmp_path / "teachers")[0].values


# ---- One student


def test_teachers_are_trained_first_and_once_and_teach_as_saved_models_do(student, here, tmp_path):
    worker, root = here(), tmp_path / "student"
    metrics = train(student())
    assert worker.trained == [("teacher", "seed-1", False), ("teacher", "seed-2", False)]
    assert metrics["global_step"] == 2
    for seed in (1, 2):
        folder = root / "teachers" / "teacher" / f"seed-{seed}"
        assert json.loads((folder / "metrics.json").read_text())["seed"] == seed
        assert not [*folder.glob("checkpoint-*")]
    train(student("", f"output_dir={tmp_path / 'other'}", f"teachers=[{root}/teachers/teacher/seed-1, {folder}]"))
    assert_same(root, tmp_path / "other")
    train(student("", "overwrite=true", "max_steps=1"))
    assert len(worker.trained) == 2


def elsewhere(folder: Path, place: Path) -> Path:
    """Copies of a folder's recipe and of its teachers' recipes, in another place."""
    for path in (folder / "recipe.yaml", *folder.glob("teachers/*.yaml")):
        copy = place / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return place / "recipe.yaml"


def test_the_recipe_of_a_run_trains_the_same_model_again_elsewhere_and_after_a_change(student, here, tmp_path):
    worker, root = here(), tmp_path / "student"
    entries = "[{recipe: TEACHER, name: large, keys: {learning_rate: 1e-2}}, {recipe: TEACHER}]"
    word = "teachers=" + entries.replace("TEACHER", str(tmp_path / "teacher.yaml"))
    train(student("run_name: 007\n", word, teacher=TEACHER + "run_name: 007\n"))
    copy = elsewhere(root, tmp_path / "elsewhere")
    (tmp_path / "teacher.yaml").unlink()
    named = read_lines(copy)["teachers"].value
    assert [entry["recipe"] for entry in named] == ["teachers/large.yaml", "teachers/teacher.yaml"]
    assert read_lines(copy.parent / named[0]["recipe"])["run_name"].value == "007"
    train(read_recipe(copy, [f"output_dir={tmp_path / 'again'}"]))
    assert len(worker.trained) == 2 + 2
    assert_same(root, tmp_path / "again")
    assert plain(read_lines(tmp_path / "again" / "recipe.yaml"))["teachers"] == named


def test_names_of_the_packages_recipes_stay_and_no_token_is_written(student, tmp_path):
    entries = "teachers=[{recipe: cs224n/baseline}, me/saved, {recipe: PLACE/teacher.yaml}]"
    values = student("", entries.replace("PLACE", str(tmp_path)), teacher=TEACHER + "hub_token: hf_x\n")
    write_recipe(tmp_path / "run" / "recipe.yaml", *split(values))
    written = read_lines(tmp_path / "run" / "recipe.yaml")["teachers"].value
    assert written[:2] == [{"recipe": "cs224n/baseline"}, "me/saved"]
    assert "hub_token" not in read_lines(tmp_path / "run" / written[2]["recipe"])


def test_a_teachers_recipe_is_kept_as_it_was_when_the_command_began(student, here, tmp_path, monkeypatch):
    here()
    teach = Teachers.train

    def changed_meanwhile(self, entries):
        teach(self, entries)
        (tmp_path / "teacher.yaml").write_text("learning_rate: 7\n")

    monkeypatch.setattr(Teachers, "train", changed_meanwhile)
    train(student("stages: [{name: a}, {name: b}]\n"))
    for folder in (tmp_path / "student", tmp_path / "student" / "stages" / "2-b"):
        assert read_lines(folder / "teachers" / "teacher.yaml")["learning_rate"].value == 1e-3


def test_a_run_is_resumed_by_the_recipe_of_its_teacher_wherever_that_lies(student, here, tmp_path):
    worker = here()
    saves = ["save_strategy=steps", "save_steps=1"]
    train(student("", *saves))
    (tmp_path / "student" / "metrics.json").unlink()
    (tmp_path / "moved").mkdir()
    for name in ("teacher.yaml", "student.yaml"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    words = [*saves, "resume_from_checkpoint=true"]
    train(read_recipe(tmp_path / "moved" / "student.yaml", [*words, "max_steps=3"]))
    assert len(worker.trained) == 2
    (tmp_path / "moved" / "teacher.yaml").write_text(TEACHER.replace("1e-3", "1e-4"))
    shutil.rmtree(tmp_path / "student" / "teachers" / "teacher")
    with pytest.raises(
        MinBertError, match=r"started with teachers\.0\.recipe\.learning_rate = 0.001 and .* with 0.0001"
    ):
        train(read_recipe(tmp_path / "moved" / "student.yaml", [*words, "max_steps=4"]))


def test_a_command_that_was_stopped_between_teachers_ends_with_the_same_student(student, here, tmp_path):
    here()
    train(student("", f"output_dir={tmp_path / 'whole'}"))
    for word in ("disable_tqdm=true", "resume_from_checkpoint=true"):  # the same command, and one that says it
        place = f"output_dir={tmp_path / word}"
        here(stop_after=1)
        with pytest.raises(KeyboardInterrupt):
            train(student("", place))
        worker = here()
        train(student("", place, word))
        assert worker.trained == [("teacher", "seed-2", False)]
        assert_same(tmp_path / word, tmp_path / "whole")


def test_a_teacher_that_was_cut_off_goes_on_from_its_checkpoint(student, here, tmp_path, monkeypatch):
    here()
    monkeypatch.setattr("hf_minbert.run.teachers.check_end", lambda *ended: None)  # leaves the checkpoints
    train(student())
    folder = tmp_path / "student" / "teachers" / "teacher" / "seed-1"
    whole = weights(folder)
    (folder / "metrics.json").unlink()
    (folder / "model.safetensors").unlink()
    worker = here()
    train(student("", "overwrite=true"))
    assert worker.trained == [("teacher", "seed-1", True)]
    again = weights(folder)
    assert all(torch.equal(whole[name], again[name]) for name in whole)  # its last step was saved


def test_a_teacher_that_fails_stops_the_command_with_its_reason_and_is_tried_again(student, here, tmp_path):
    here(breaks=("teacher",))
    with pytest.raises(MinBertError, match=r"Teacher teacher, seed 1 failed: It broke. See .*run.log"):
        train(student())
    assert not (tmp_path / "student" / "recipe.yaml").exists()
    worker = here()
    train(student())
    assert len(worker.trained) == 2


def test_a_teacher_of_another_recipe_is_trained_anew_only_if_asked(student, here):
    worker = here()
    train(student())
    changed = "teachers.0.keys={learning_rate: 1e-4}"
    with pytest.raises(MinBertError, match="Teacher 'teacher' has learning_rate = 0.0001, and .* begun with 0.001"):
        train(student("", changed, "output_dir=" + plain(student())["output_dir"], "resume_from_checkpoint=true"))
    assert len(worker.trained) == 2
    train(student("", changed, "overwrite=true"))
    assert len(worker.trained) == 4


def test_stages_have_the_teachers_of_the_whole_recipe(student, here, tmp_path):
    worker = here()
    train(student("logging_steps: 1\nstages: [{name: a, freeze: encoder}, {name: b}]\n"))
    assert worker.trained == [("teacher", "seed-1", False), ("teacher", "seed-2", False)]
    assert {path.name for path in (tmp_path / "student" / "teachers" / "teacher").iterdir()} == {"seed-1", "seed-2"}
    for stage in ("1-a", "2-b"):
        log = (tmp_path / "student" / "stages" / stage / "log.jsonl").read_text()
        assert "distill_sst" in log


def test_several_processes_take_teachers_that_are_there(student, here):
    values = student()
    tasks = {task.name: task for task in get_tasks(["sst", "sts"])}
    entries = plain(values)["teachers"]
    with pytest.raises(MinBertError, match="Run the command without a launcher"):
        Teachers(values).check(entries, tasks, processes=2)
    here()
    train(values)
    Teachers(values).check(entries, tasks, processes=2)


def test_jobs_are_refused_without_teachers_to_train(student):
    with pytest.raises(MinBertError, match="--jobs 2 trains several teachers at a time, and this recipe trains no"):
        train(student("", "teachers=[]"), jobs=2)


# ---- Several students


STUDY = """
seeds: 1
rows:
  plain: {recipe: student.yaml}
  softer: {recipe: student.yaml, keys: {distill_temperature: 2.0}}
  other: {recipe: student.yaml, keys: {teachers: [{recipe: PLACE/teacher.yaml, keys: {learning_rate: 1e-2}}]}}
"""


def go(tmp_path: Path, retry: bool = False):
    path = tmp_path / "some.study.yaml"
    path.write_text(STUDY.replace("PLACE", str(tmp_path)), encoding="utf-8")
    read, root = read_study(path), tmp_path / "study"
    runs = begin(read, root, retry)
    run_study(read, runs, root, agree=lambda said: True)
    return runs


def test_rows_of_a_study_share_teachers_and_their_answers(student, here, tmp_path, monkeypatch):
    student()
    worker, asked = here(), []
    answer = Predictor.logits
    monkeypatch.setattr(Predictor, "logits", lambda self, *given: asked.append(given[0]) or answer(self, *given))
    runs = go(tmp_path)
    names_ = [name for name, *_ in worker.trained]
    assert names_.count("teacher") == 3 and len(names_) == 3 + 3
    assert names_.index("plain") == 2  # of the row, the two teachers come first
    assert not any(run.has_failed for run in runs)
    copies = [elsewhere(run.folder, tmp_path / f"elsewhere-{number}") for number, run in enumerate(runs)]
    for copy in copies:
        ((teacher, values),) = teachers_to_train(read_recipe(copy)).values()
        assert teacher.name == "teacher" and plain(values)["max_steps"] == 2
        assert read_lines(copy)["teachers"].value[0]["recipe"] == "teachers/teacher.yaml"
    plain_, softer, other = (read_run(run.folder) for run in runs)
    assert softer.differences(plain_) == ["distill_temperature"]  # whose copies of the recipe say the same
    assert sorted(other.differences(plain_)) == ["teachers.0.keys", "teachers.0.seeds"]
    # Each run is scored on its tasks' dev rows; beside that three teachers answer once for each of two tasks.
    assert len(asked) == 2 * len(names_) + 3 * 2
    train(student("", f"cache_dir={tmp_path / 'study' / 'cache'}", "seed=1"))
    assert_same(run_folder(tmp_path / "study", "plain", 1), tmp_path / "student")
    assert len(asked) == 2 * len(names_) + 3 * 2 + 2 * 3  # two more teachers and the student are scored


def test_a_row_whose_teacher_fails_says_so_and_runs_again_with_it(student, here, tmp_path):
    student()
    here(breaks=("teacher",))
    runs = go(tmp_path)
    assert all(run.has_failed for run in runs)
    error = json.loads((runs[0].folder / "failed.json").read_text())["error"]
    assert error == "Its teacher teacher, seed 1 failed: It broke."
    worker = here()
    assert not any(run.has_failed for run in go(tmp_path, retry=True))
    assert len(worker.trained) == 3 + 3


def test_trials_of_a_search_share_teachers(student, here, tmp_path):
    worker, values = here(), student()
    found = search(
        values, read_space("{distill_weight: [0.25, 0.75]}"), method="grid", output_dir=tmp_path / "search",
        metric="eval_sst_accuracy",
    )  # fmt: skip
    assert [trial.state for trial in found] == ["finished"] * 2
    assert [name for name, *_ in worker.trained] == ["teacher", "teacher", "trials", "trials"]
    for recipe in (tmp_path / "search" / "best.yaml", tmp_path / "search" / "trials" / "1" / "recipe.yaml"):
        assert read_lines(recipe)["teachers"].value == [
            {"recipe": "teachers/teacher.yaml", "seeds": 2, "name": "teacher"}
        ]
        assert (recipe.parent / "teachers" / "teacher.yaml").is_file()


# ---- The card


@pytest.fixture
def distilled(student, here, course_dir, tmp_path) -> Path:
    """The run of a student of a saved model and of a recipe's teachers, with rows without labels."""
    here()
    train(student())
    saved = tmp_path / "student" / "teachers" / "teacher" / "seed-1"
    dev = (course_dir / "sts-dev.csv").read_text().splitlines()[1].split("\t")
    rows = [["a cat sat", "a dog ran"], ["it rains", "the sun is out"], dev[-3:-1]]
    (tmp_path / "more.tsv").write_text("".join("\t".join(row) + "\n" for row in [["sentence1", "sentence2"], *rows]))
    entries = f"[{saved}, {{recipe: {tmp_path}/teacher.yaml, keys: {{learning_rate: 1e-2}}, seeds: [3, 5]}}]"
    more = f"unlabelled: {tmp_path}/more.tsv, unlabelled_pairs: 0.5"
    train(student("", f"output_dir={tmp_path}/run", f"teachers={entries}", f"tasks={{sst: null, sts: {{{more}}}}}"))
    return tmp_path / "run"


def test_the_card_names_the_teachers_and_counts_the_rows_without_labels(distilled, tmp_path):
    metrics = json.loads((distilled / "metrics.json").read_text())
    found = metrics["rows"]["unlabelled"]["sts"]
    assert (found["own"], found["files"]) == (0, 2) and found["pairs"] > 0
    assert metrics["leaks"]["unlabelled"]["sts"]["dropped"] == 1
    published = prepare(distilled, "me/m")
    card, uploads = published.card, {upload.path: upload.read().decode() for upload in published.uploads[:-1]
                                     if upload.path.endswith(".yaml")}  # fmt: skip
    counts = [line.strip("| ").split(" | ") for line in card.split("## Data")[1].splitlines()]
    (row,) = [cells for cells in counts if cells[0] == "`sts`"]
    train_rows, dev = metrics["rows"]["train"]["sts"], metrics["rows"]["dev"]["sts"]
    assert row == ["`sts`", str(train_rows), "none", "2", str(found["pairs"]), str(dev)]
    for said in (
        "| sts, without labels | files of its own `more.tsv` |", "also on the answers of teachers (distillation)",
        "- 1 row without labels was left out for sts, because dev or test rows contain it.",
        "Teachers, whose answers have the weight 0.5 in the loss:", "- The saved model `seed-1`.",
        "- `teacher`, trained by the recipe [`teachers/teacher.yaml`](teachers/teacher.yaml), with other values of "
        "`learning_rate`; seeds 3, 5.",
        "s of training, with evaluations, without that of the teachers |", "| time of the teachers | ",
    ):  # fmt: skip
        assert said in card, said
    theirs = [json.loads((distilled / f"teachers/teacher/seed-{seed}/metrics.json").read_text()) for seed in (3, 5)]
    assert [each["train_runtime"] for each in metrics["teachers"]] == [each["train_runtime"] for each in theirs]
    assert uploads.keys() == {"recipe.yaml", "teachers/teacher.yaml"}
    assert not [text for text in uploads.values() if str(tmp_path) in text]
    (distilled / "teachers" / "old.yaml").write_text("seed: 1")  # of a run before, which no recipe names
    assert "teachers/old.yaml" not in [upload.path for upload in prepare(distilled, "me/m").uploads]


def test_what_is_uploaded_trains_teachers_again_and_the_cards_command_none(distilled, here, course_dir, tmp_path):
    worker, published, place = here(), prepare(distilled, "me/m"), tmp_path / "sent"
    for upload in published.uploads:
        if upload.path.endswith(".yaml"):
            (place / upload.path).parent.mkdir(parents=True, exist_ok=True)
            (place / upload.path).write_bytes(upload.read())
    (teacher,) = teachers_to_train(read_recipe(place / "recipe.yaml"))
    assert teacher == "teacher"
    lines = published.card.replace("\\\n", "").splitlines()
    commands = [line.split(" recipe.yaml ")[1].split() for line in lines if " train recipe.yaml " in line]
    assert len(commands) == 2 and commands[0] == commands[1]  # on one GPU, and on several
    words = [
        word.replace("me/m", str(distilled)).replace("FOLDER", str(course_dir)).replace("runs/", f"{tmp_path}/")
        for word in commands[0]
    ]
    metrics = train(read_recipe(place / "recipe.yaml", words))
    assert not worker.trained and "teachers" not in metrics and "unlabelled" not in metrics["rows"]


# ---- Answers


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path):
    """`saved(seed)`: a model of sst and sts in a folder."""

    def save(seed: int) -> str:
        tiny_model(["sst", "sts"], seed=seed).save_pretrained(tmp_path / f"model-{seed}")
        tiny_tokenizer.save_pretrained(tmp_path / f"model-{seed}")
        return str(tmp_path / f"model-{seed}")

    return save


ROWS = {
    "sst": [{"sentence": text} for text in ("a good film", "very bad", "why")],
    "sts": [{"sentence1": "a good film", "sentence2": "bad"}, {"sentence1": "why", "sentence2": "why is it"}],
}


def test_answers_that_are_kept_are_those_that_are_computed_for_the_same_question(saved, tmp_path, monkeypatch):
    kept, tasks, asked = tmp_path / "kept", get_tasks(["sst", "sts"]), []
    teachers = [saved(0), saved(1)]
    computed = teacher_logits(teachers, tasks, ROWS)
    answer = Predictor.logits
    monkeypatch.setattr(Predictor, "logits", lambda self, *given: asked.append(given[0]) or answer(self, *given))
    for _ in range(2):
        found = teacher_logits(teachers, tasks, ROWS, kept)
        for name in ROWS:
            np.testing.assert_array_equal(found[name], computed[name])  # the same computation, or what it gave
    assert len(asked) == 4  # two teachers, two tasks, once
    renamed = tmp_path / "renamed"
    Path(teachers[0]).rename(renamed)
    teacher_logits([str(renamed)], tasks, ROWS, kept)
    assert len(asked) == 4  # a model is what it holds, wherever it lies
    teacher_logits([str(renamed)], tasks, {"sst": ROWS["sst"][:2]}, kept)
    assert len(asked) == 5
    model = Predictor.from_pretrained(renamed).model
    with torch.no_grad():
        next(model.heads.parameters()).add_(1.0)
    model.save_pretrained(renamed)
    teacher_logits([str(renamed)], tasks, ROWS, kept)
    assert len(asked) == 7


def test_answers_that_cannot_be_read_are_refused_with_the_remedy(saved, tmp_path):
    kept, tasks = tmp_path / "kept", get_tasks(["sst"])
    teacher_logits([saved(0)], tasks, {"sst": ROWS["sst"]}, kept)
    (file,) = kept.iterdir()
    np.save(file, np.zeros((1, 5), dtype=np.float32))
    with pytest.raises(MinBertError, match=r"Reading the answers in .*\.npy failed: they are \[1, 5\]. Delete this"):
        teacher_logits([saved(0)], tasks, {"sst": ROWS["sst"]}, kept)


def test_scores_trained_for_their_order_alone_are_brought_to_the_scale_of_the_labels(
    tiny_model, tiny_tokenizer, tmp_path
):
    """A mean with scores on a scale of their own would be no score. Rows without a label have the same line."""
    labels = np.array([0.0, 1.5, None, 4.0, 5.0])
    for seed, loss in ((0, "cosent"), (1, "mse")):
        tiny_model({"sts": {"loss": loss}}, seed=seed).save_pretrained(tmp_path / loss)
        tiny_tokenizer.save_pretrained(tmp_path / loss)
    texts = ("a good film", "very bad", "why", "why not", "a bad film")
    rows = {
        "sts": [
            {"sentence1": texts[0], "sentence2": text, "label": label}
            for text, label in zip(texts, labels, strict=True)
        ]
    }
    (task,) = get_tasks(["sts"])
    pairs = [{name: row[name] for name in task.text_columns} for row in rows["sts"]]
    raw = {loss: Predictor.from_pretrained(tmp_path / loss).logits("sts", pairs) for loss in ("cosent", "mse")}
    alone = teacher_logits([str(tmp_path / "cosent")], [task], rows)["sts"]
    known = labels != None  # noqa: E711 - element by element
    line = np.polyfit(raw["cosent"][known, 0], labels[known].astype(float), 1)
    expected = np.polyval(line, raw["cosent"]) if line[0] > 0 else raw["cosent"]
    np.testing.assert_allclose(alone, expected, rtol=1e-4)
    both = teacher_logits([str(tmp_path / loss) for loss in raw], [task], rows)["sts"]
    np.testing.assert_allclose(both, (expected + raw["mse"]) / 2, rtol=1e-4)


def test_a_line_keeps_the_order_of_scores():
    scores, labels = np.array([[1.0], [1.1], [1.2], [1.3]]), [0.0, None, 2.0, 3.0]
    np.testing.assert_allclose(on_scale_of(scores, labels)[:, 0], [0.0, 1.0, 2.0, 3.0], atol=0.15)
    for kept in ([3.0, None, 2.0, 0.0], [None] * 4, [1.0, None, None, None]):  # another order, nothing, one label
        np.testing.assert_array_equal(on_scale_of(scores, kept), scores)
