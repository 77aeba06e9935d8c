"""What goes up and what does not, paths that stay here, and the card's words and metadata."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from hf_minbert import MinBertError, Task, get_tasks
from hf_minbert.data.hub import HUB
from hf_minbert.publishing.files import portable
from hf_minbert.publishing.publish import prepare
from hf_minbert.publishing.saved import SavedModel
from hf_minbert.settings.recipe import read_recipe


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of a finished run, without its checkpoints."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    return copy


def paths_of(folder: Path, **given) -> set[str]:
    return {upload.path for upload in prepare(folder, "me/model", **given).uploads}


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


def model_with(tiny_model, tiny_tokenizer, folder: Path, recipe: str, **given) -> Path:
    tiny_model(**given).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(f"output_dir: runs/x\n{recipe}", encoding="utf-8")
    return folder


# ---- Which files


def test_files_of_other_names_stay(run):
    for name in ("notes.txt", "secrets.py", "optimizer.pt", "model.bin", ".env"):
        (run / name).write_text("mine")
    (run / "report" / "pictures").mkdir(parents=True)
    (run / "report" / "pictures" / "sst-confusion.png").write_bytes(b"png")
    (run / "report" / "report.html").write_text("/home/ann")
    found = prepare(run, "me/model")
    sent = {upload.path for upload in found.uploads}
    assert {"report/pictures/sst-confusion.png", "config.json", "recipe.yaml", "README.md", "heads.py"} <= sent
    assert not sent & {"notes.txt", "secrets.py", "optimizer.pt", "model.bin", ".env", "report/report.html"}
    assert {"notes.txt", "secrets.py", "predictions", "training_args.bin"} <= set(found.left)
    assert "![sst confusion](report/pictures/sst-confusion.png)" in found.card


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("/home/ann/data", "data"), ("~/data/", "data"), ("../other/data", "data"), (r"C:\Users\ann\data", "data"),
        ("a run in /home/ann/x, and ~/y", "a run in x, and y"), ("file:///home/ann/data", "data"),
        ("owner/name", "owner/name"), ("data/a.csv", "data/a.csv"), ("cs224n/baseline", "cs224n/baseline"),
        ("https://example.org/a/b", "https://example.org/a/b"), ("yes and/or no", "yes and/or no"), (3e-5, 3e-5),
        (["/home/ann/a.csv", None], ["a.csv", None]), ({"hub_token": "hf_x", "seed": 1}, {"seed": 1}),
        ({"/a/run": 1, "/b/run": 2}, {"run": 1, "run (2)": 2}), ("at file:///home/ann/x", "at x"),
        ("a.csv, /home/ann lee/b.csv", "a.csv, b.csv"), (r"(?:heads|bert\.pooler)\..*",) * 2, (r"a \n b",) * 2,
        ("/", "/"), ({"labels": ["/pos/", "~/x"]},) * 2,
    ],
)  # fmt: skip
def test_local_paths_are_cut_to_their_last_part(value, short):
    assert portable(value) == short


def test_a_recipe_without_paths_still_reads(run):
    recipe = next(upload for upload in prepare(run, "me/model").uploads if upload.path == "recipe.yaml")
    sent = run / "sent.yaml"
    sent.write_bytes(recipe.content)
    before, after = read_recipe(run / "recipe.yaml"), read_recipe(sent)
    assert before.keys() == after.keys()
    changed = {key for key in before if before[key].value != after[key].value}
    assert changed == {"model_name_or_path", "data_dir", "output_dir"}


def test_all_code_that_the_model_needs_goes_up_and_no_other(run):
    code = {path for path in paths_of(run) if path.endswith(".py")}
    assert {"modeling_minbert.py", "configuration_minbert.py", "heads.py", "packing.py"} <= code
    assert code == {path.name for path in run.glob("*.py")}  # `save_pretrained` writes what is needed
    (run / "packing.py").unlink()
    with pytest.raises(MinBertError, match="packing.py, which is not there"):
        prepare(run, "me/model")


def test_what_is_not_whole_is_refused(run, tmp_path):
    weights = run / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(MinBertError, match="ends too early"):
        prepare(run, "me/model")
    weights.unlink()
    with pytest.raises(MinBertError, match="no weights"):
        prepare(run, "me/model")
    weights.write_bytes(whole)
    (run / "tokenizer.json").unlink()
    with pytest.raises(MinBertError, match="no tokenizer"):
        prepare(run, "me/model")
    with pytest.raises(MinBertError, match="holds no model"):
        prepare(tmp_path, "me/model")
    with pytest.raises(MinBertError, match="no folder"):
        prepare(tmp_path / "none", "me/model")


def test_a_model_of_another_kind_is_refused(tiny_bert):
    with pytest.raises(MinBertError, match="not one of this package.*'bert'"):
        prepare(tiny_bert, "me/model")


@pytest.mark.parametrize("name", ["a b", "me/../x", "me/x/y", "-x", "me/x.git"])
def test_a_name_that_the_hub_could_not_have_is_refused(run, name):
    with pytest.raises(MinBertError, match="no name on the Hub"):
        prepare(run, name)


# ---- An adapter


def test_an_adapter_goes_up_without_the_weights_and_on_a_base_that_others_have(run, tmp_path):
    with pytest.raises(MinBertError, match="--adapter-only.*adapter_config.json"):
        prepare(run, "me/model", adapter_only=True)
    base = tmp_path / "all-MiniLM-L6-v2"
    (run / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 8}))
    save_file(load_file(run / "model.safetensors"), run / "adapter_model.safetensors")
    assert not {"adapter_config.json", "adapter_model.safetensors"} & paths_of(run)  # they would load in its place
    found = prepare(run, "me/model", adapter_only=True)
    sent = {upload.path: upload.content for upload in found.uploads}
    assert "adapter_model.safetensors" in sent and "model.safetensors" not in sent
    assert json.loads(sent["adapter_config.json"]) == {
        "base_model_name_or_path": "sentence-transformers/all-MiniLM-L6-v2", "r": 8,
    }  # fmt: skip
    assert ModelCard(found.card).data.library_name == "peft"
    rewrite(run / "adapter_config.json", base_model_name_or_path=str(tmp_path / "bert"))
    with pytest.raises(MinBertError, match="--base-model"):
        prepare(run, "me/model", adapter_only=True)
    for wrong in ("no name", str(tmp_path / "bert")):
        with pytest.raises(MinBertError, match="base model '(no name|bert)' is no name on the Hub"):
            prepare(run, "me/model", adapter_only=True, base_model=wrong)
    found = prepare(run, "me/model", adapter_only=True, base_model="me/bert")
    assert ModelCard(found.card).data.base_model == "me/bert"
    (run / "model.safetensors").unlink()
    with pytest.raises(MinBertError, match="Add --adapter-only"):
        prepare(run, "me/model")


# ---- The card


def test_scores_stand_in_the_metadata_as_they_were_measured(run):
    metrics = json.loads((run / "metrics.json").read_text())
    card = ModelCard(prepare(run, "me/model").card)
    found = {(result.task_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert found == {
        (task, metric): metrics[f"eval_{task}_{metric}"]
        for task, metric in (
            ("sst", "accuracy"), ("sst", "macro_f1"), ("sst", "matthews"), ("para", "accuracy"), ("para", "f1"),
            ("para", "matthews"), ("sts", "pearson"), ("sts", "spearman"),
        )
    }  # fmt: skip
    assert {(result.dataset_split, result.dataset_config) for result in card.data.eval_results} == {("dev", None)}
    assert card.data.model_name == "model" and card.data.license is None
    assert "- The weights: unknown, because the publisher did not state it." in card.text
    assert f"{metrics['train_runtime']:,.0f} s of training" in card.text


def test_the_card_says_what_the_records_say(run):
    rewrite(run / "metrics.json", global_step=1234, best_step=617, eval_perplexity=7.25)
    card = ModelCard(prepare(run, "model").card)
    assert card.data.library_name == "transformers" and card.data.model_name == "model"
    for said in (
        "3 tasks at once, with a head for each: sst, para, sts. It has 2 layers of hidden size 32, and was trained",
        "| masked words | perplexity | 7.25 |", "| steps | 1,234 |", "| best step | 617 |", "```yaml\n",
        "## Limits", "`para`: Made for questions", "- Probabilities are not calibrated: `sst`, `para`.",
        "minbert-multitask",
    ):  # fmt: skip
        assert said in card.text, said
    config = json.loads((run / "config.json").read_text())
    del config["custom_pipelines"]
    (run / "config.json").write_text(json.dumps(config))
    (run / "recipe.yaml").unlink()
    card = ModelCard(prepare(run, "model").card)
    assert "minbert-multitask" not in card.text and "```yaml" not in card.text
    assert {result.dataset_split for result in card.data.eval_results} == {"dev"}  # of data that nothing is said of


def test_each_score_has_its_rows_its_interval_and_its_baseline(run):
    metrics = json.loads((run / "metrics.json").read_text())
    rows, baselines = metrics["rows"], metrics["baselines"]
    card = prepare(run, "me/model").card
    cells = [line.strip("| ").split(" | ") for line in card.split("## Scores")[1].split("## ")[0].splitlines()]
    found = {(row[0].strip("`"), row[1]): row for row in cells if len(row) == 6 and row[0].startswith("`")}
    assert len(found) == 8
    for (task, metric), (*_, score, interval, baseline, dev) in found.items():
        assert score == f"{metrics[f'eval_{task}_{metric}']:.3f}"
        assert baseline == f"{baselines[task]['scores'][metric]:z.3f}"
        assert dev == str(rows["dev"][task])
        if metric in ("accuracy", "pearson"):
            low, high = map(float, interval.split(" to "))
            assert low <= float(score) <= high
        else:
            assert not interval
    assert f"`sst`: {baselines['sst']['answer']}." in card
    for task in ("sst", "para", "sts"):
        assert f"| `{task}` | {rows['train'][task]} | {rows['dev'][task]} |" in card
    rewrite(run / "metrics.json", rows=None, baselines=None)  # of a run before they were recorded
    assert "Baselines" not in prepare(run, "me/model").card


def test_the_language_is_known_of_the_packages_data_alone(run, tiny_model, tiny_tokenizer, tmp_path):
    assert ModelCard(prepare(run, "me/model").card).data.language == "en"
    entry = "tasks: {sst: {files: {train: mine.csv, dev: mine.csv}}}\n"
    folder = model_with(tiny_model, tiny_tokenizer, tmp_path / "own", entry, tasks=("sst",))
    card = ModelCard(prepare(folder, "me/model").card)
    assert card.data.language is None and "Language of the texts: unknown." in card.text
    card = ModelCard(prepare(folder, "me/model", language="de").card)
    assert card.data.language == "de" and "Language of the texts: `de`." in card.text


COSINE = {"pair_encoding": "bi", "pooling": "mean", "head": "cosine"}
STARS = {"kind": "score", "text_columns": ["text"], "range": [1, 5]}


@pytest.mark.parametrize(
    ("tasks", "hub_task", "form"),
    [
        ({"sts": None}, "text-ranking", "classifier"), ({"para": None}, "text-classification", "classifier"),
        ({"sts": COSINE}, "sentence-similarity", "sentence-transformers"),
        ({"stars": STARS}, "text-classification", "classifier"),
        ({"sts": {"pair_encoding": "bi"}}, "sentence-similarity", "onnx"),
    ],
)  # fmt: skip
def test_a_task_has_the_name_of_the_hub_and_a_form_that_keeps_it(
    tiny_model, tiny_tokenizer, tmp_path, tasks, hub_task, form
):
    (own,) = get_tasks(tasks)
    card = ModelCard(prepare(model_with(tiny_model, tiny_tokenizer, tmp_path, "", tasks=(own,)), "me/m").card)
    assert card.data.pipeline_tag == hub_task and card.data.tags == ["minbert", own.name]
    assert f"minbert export me/m --to {form} " in card.text
    assert card.text.count("minbert export") == 1


def test_a_score_alone_has_no_probabilities(tiny_model, tiny_tokenizer, tmp_path):
    card = prepare(model_with(tiny_model, tiny_tokenizer, tmp_path, "max_length: 48\n", tasks=("sts",)), "me/m").card
    assert "fine-tuned on one task: sts." in card and "Probabilities" not in card
    assert "- Inputs of more than 48 tokens were cut in training." in card


@pytest.mark.parametrize(
    ("recipe", "metrics", "said"),
    [
        (
            "",
            {"best_metric": 0.5},
            "Scores of the saved model on the dev rows. The checkpoint was chosen by `x` on the sam",
        ),
        (
            "select_on: 0.2\n",
            {"best_metric": 0.5},
            "on 80% of the dev rows. The checkpoint was chosen by `x` on the o",
        ),
        ("select_on: 0.2\n", {}, "Scores of the saved model on the dev rows. One run with one seed."),
    ],
)
def test_scores_say_on_which_rows_the_checkpoint_was_chosen(
    tiny_model, tiny_tokenizer, tmp_path, recipe, metrics, said
):
    folder = model_with(tiny_model, tiny_tokenizer, tmp_path, recipe)
    scores = {"eval_sst_accuracy": 0.5, "metric_for_best_model": "x", **metrics}
    (folder / "metrics.json").write_text(json.dumps(scores))
    assert said in prepare(folder, "me/m").card


def test_each_task_is_asked_about_its_own_kind_of_text(tiny_model, tiny_tokenizer, tmp_path):
    news = Task(name="news", kind="binary", text_columns=("text",), labels=("no", "yes"))
    card = prepare(model_with(tiny_model, tiny_tokenizer, tmp_path / "own", "", tasks=(news,)), "me/own").card
    assert "film" not in card
    assert 'tokenizer("Which is it: no or yes?", return_tensors="pt")' in card
    card = prepare(model_with(tiny_model, tiny_tokenizer, tmp_path / "para", "", tasks=("para",)), "me/para").card
    assert 'tokenizer("How do I learn to swim?", "How deep is the lake where I learned to swim?"' in card


def test_one_row_is_a_row(run):
    leaks = {
        "given": {"sst": {"sst dev": 1}},
        "borrowed": {"sts": [{"source": "para", "dropped": 1, "matches": {}}]},
    }
    rewrite(run / "metrics.json", leaks=leaks)
    card = prepare(run, "me/model").card
    assert "- 1 row of sst dev is also in the training rows of sst. The model was trained on it." in card
    assert "- 1 row was not borrowed from para for sts, because dev or test rows contain it." in card


def test_leak_counts_are_those_of_the_metrics(run):
    leaks = {
        "given": {"sst": {"sst dev": 1234}},
        "borrowed": {"sts": [{"source": "para", "dropped": 17, "matches": {}}]},
    }
    rewrite(run / "metrics.json", leaks=leaks)
    card = prepare(run, "me/model").card
    assert "1,234 rows of sst dev are also in the training rows of sst. The model was trained on them." in card
    assert "17 rows were not borrowed from para for sts, because dev or test rows contain them." in card
    rewrite(run / "metrics.json", leaks={"given": {"sst": {}}, "borrowed": {}})
    assert "found no dev or test row among its training rows" in prepare(run, "me/model").card


def test_data_of_the_hub_stand_with_commit_and_licence(tiny_model, tiny_tokenizer, tmp_path):
    commit = "c0ffee" + "0" * 34
    entries = f"tasks: {{sst: {{dataset_revision: {commit}}}, nli: {{dataset: stanfordnlp/snli}}}}\ndata_dir: hub\n"
    folder = model_with(
        tiny_model, tiny_tokenizer, tmp_path / "m", f"model_name_or_path: me/bert\n{entries}", tasks=("sst", "nli")
    )
    card = ModelCard(prepare(folder, "me/model").card)
    assert card.data.datasets == ["SetFit/sst5", "stanfordnlp/snli"]
    assert card.data.base_model == "me/bert"
    assert "cc-by-sa-4.0" in card.text and "| c0ffee000000 |" in card.text
    assert all(known.licence for known in HUB)
    assert "Not measured" in card.text


@pytest.mark.parametrize(
    ("entry", "split", "config"),
    [
        ("para: null", "validation", "qqp"), ("nli: null", "validation_matched", "mnli"),
        ("nli: {dataset: me/nli, splits: {dev: held_out}}", "held_out", None),
    ],
)  # fmt: skip
def test_scores_name_the_split_of_the_dataset_on_the_hub(tiny_model, tiny_tokenizer, tmp_path, entry, split, config):
    name = entry.split(":")[0]
    recipe = f"model_name_or_path: me/bert\ntasks: {{{entry}}}\ndata_dir: hub\n"
    folder = model_with(tiny_model, tiny_tokenizer, tmp_path / "m", recipe, tasks=(name,))
    (folder / "metrics.json").write_text(json.dumps({f"eval_{name}_accuracy": 0.5}))
    (result,) = ModelCard(prepare(folder, "me/model").card).data.eval_results
    assert (result.dataset_split, result.dataset_config) == (split, config)
    assert result.dataset_type == {"para": "nyu-mll/glue", "nli": "me/nli" if config is None else "nyu-mll/glue"}[name]


def test_the_note_on_minilm_follows_runs_back(tiny_model, tiny_tokenizer, tmp_path):
    recipe = "model_name_or_path: /home/ann/all-MiniLM-L6-v2\ndata_dir: hub\n"
    first = model_with(tiny_model, tiny_tokenizer, tmp_path / "first", recipe)
    recipe = f"model_name_or_path: {first}\ntasks: [sst]\ndata_dir: sample\n"
    second = model_with(tiny_model, tiny_tokenizer, tmp_path / "second", recipe)
    card = ModelCard(prepare(second, "me/model").card)
    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert "has seen such pairs before" in card.text and "the sample in hf_minbert" in card.text
    assert card.data.datasets == ["SetFit/sst5", "nyu-mll/glue"]  # what the first was trained on
    assert str(tmp_path) not in prepare(second, "me/model").card
    (first / "recipe.yaml").unlink()
    assert "has seen such pairs before" not in prepare(second, "me/model").card


def test_a_merged_model_names_its_members_without_their_folders(tiny_model, tiny_tokenizer, tmp_path):
    members = []
    for name in ("a", "b"):
        folder = tmp_path / name / "run"
        members.append(
            model_with(tiny_model, tiny_tokenizer, folder, "model_name_or_path: me/bert\ndata_dir: sample\n")
        )
    merged = tmp_path / "soup"
    tiny_model().save_pretrained(merged)
    tiny_tokenizer.save_pretrained(merged)
    record = {"method": "uniform", "models": [str(member) for member in members], "weights": None}
    (merged / "merge.json").write_text(json.dumps(record))
    scores = {"sst": {"metric": "accuracy", "members": {str(m): 0.5 for m in members}, "result": 0.6}}
    (merged / "metrics.json").write_text(json.dumps({"eval_sst_accuracy": 0.6, "tasks": scores}))
    found = prepare(merged, "me/soup")
    card = ModelCard(found.card)
    assert card.data.base_model == "me/bert" and card.data.base_model_relation == "merge"
    assert "An average (uniform)" in card.text
    metrics = next(json.loads(upload.content) for upload in found.uploads if upload.path == "metrics.json")
    assert metrics["tasks"]["sst"]["members"] == {"run": 0.5, "run (2)": 0.5}


def test_a_model_merged_by_task_vectors_names_its_base_and_numbers(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    record = {"method": "dare", "models": ["/of/mine/a", "/of/mine/b"], "base": "me/bert", "base_revision": None}
    (tmp_path / "merge.json").write_text(json.dumps(record | {"scale": 0.4, "density": 0.5, "seed": 3}))
    card = ModelCard(prepare(tmp_path, "me/model").card)
    assert card.data.base_model == "me/bert" and card.data.base_model_relation == "merge"
    assert "plus task vectors of several models (dare: scale 0.4, density 0.5, seed 3)." in card.text
    assert "Made from `a`, `b`, `me/bert`." in card.text and "average" not in card.text


def test_an_adapter_that_was_merged_is_no_average(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    adapter = model_with(tiny_model, tiny_tokenizer, tmp_path / "lora", "model_name_or_path: me/bert\n")
    (tmp_path / "merge.json").write_text(json.dumps({"method": "merge", "models": [str(adapter)]}))
    card = ModelCard(prepare(tmp_path, "me/model").card)
    assert card.data.base_model == "me/bert" and card.data.base_model_relation == "finetune"
    assert "trained as an adapter" in card.text and "average" not in card.text
    with pytest.raises(MinBertError, match="base model 'no name' is no name on the Hub"):
        prepare(tmp_path, "me/model", base_model="no name")


def test_a_run_that_did_not_finish_is_told_of(run, caplog):
    prepare(run, "me/model")
    assert not caplog.messages
    (run / "metrics.json").unlink()
    assert "Not measured" in prepare(run, "me/model").card
    (said,) = caplog.messages
    assert "did not finish" in said


ODD = [
    "yes: 'sure'",
    '"no", never',
    "ünï # x",
    "- dash",
    "/slash/",
    "`tick`",
    "two\nlines",
    "\\n",
    "{y}",
    "null",
    "a|b",
]


def test_labels_of_any_kind_stand_in_card_and_recipe(tiny_model, tiny_tokenizer, tmp_path):
    (own,) = get_tasks({"own": {"kind": "classes", "text_columns": ["text"], "labels": ODD}})
    entry = {"kind": "classes", "text_columns": ["text"], "labels": ODD, "files": {"train": "/home/ann/odd.csv"}}
    folder = model_with(tiny_model, tiny_tokenizer, tmp_path, f"tasks: {json.dumps({'own': entry})}\n", tasks=(own,))
    found = prepare(folder, "me/model")
    (tmp_path / "sent.yaml").write_bytes(next(one.content for one in found.uploads if one.path == "recipe.yaml"))
    sent = read_recipe(tmp_path / "sent.yaml")["tasks"].value["own"]
    assert sent == {**entry, "files": {"train": "odd.csv"}}
    card = ModelCard(found.card)
    assert card.data.tags == ["minbert", "own"]
    (row,) = [line for line in card.text.splitlines() if line.startswith("| `own` | a sentence")]
    assert row.endswith(r"5 `tick`, 6 two lines, 7 \n, 8 {y}, 9 null, 10 a\|b |")
    for code in re.findall(r"```python\n(.*?)```\n", card.text, re.DOTALL):
        compile(code, "card", "exec")


def test_tasks_of_ones_own_are_described_by_what_they_say(tiny_model, tiny_tokenizer, tmp_path):
    entry = {"kind": "classes", "text_columns": ["text"], "labels": ["spam", "a|b"]}
    (own,) = get_tasks({"mail": entry})
    recipe = (
        f"model_name_or_path: me/bert\ntasks: {{mail: {json.dumps({**entry, 'files': {'train': '/x/mail.csv'}})}}}\n"
    )
    folder = model_with(tiny_model, tiny_tokenizer, tmp_path / "m", recipe, tasks=(own,))
    card = ModelCard(prepare(folder, "me/model").card)
    assert "| `mail` | a sentence | one of 2 classes | 0 spam, 1 a\\|b |" in card.text
    assert "files of its own `mail.csv`" in card.text and card.data.language is None


def test_a_folder_without_records_says_so(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    card = prepare(tmp_path, "me/model").card
    assert "is not recorded" in card and "Not measured" in card
    assert SavedModel.of(tmp_path).bases() == []
