"""A saved model with temperatures and thresholds: all who ask it get the same answers, and what is said of it."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import pipeline

from hf_minbert import MinBertError, Predictor, Task
from hf_minbert.pretrained.data import RunData, calibration_of
from hf_minbert.pretrained.merging import average, ensemble
from hf_minbert.publishing.card import model_card
from hf_minbert.publishing.demo import examples_of
from hf_minbert.publishing.export import export
from hf_minbert.publishing.files import collect
from hf_minbert.publishing.saved import SavedModel
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import read_recipe

TEXTS = ["a good film", "the man plays the very very bad dog .", "it", "how is it , you"]
PAIRS = [(text, other) for text, other in zip(TEXTS, ["not bad", "why", "the dog", "how is it"], strict=True)]

BY_HAND = {"sst": {"temperature": 2.5}, "para": {"temperature": 0.5, "thresholds": 0.01}}


@pytest.fixture(scope="module")
def raw(finished_run):
    """Before anything was fitted. Not to be changed."""
    return finished_run


@pytest.fixture(scope="module")
def fitted(raw, tmp_path_factory):
    """The same run with temperatures and a threshold by hand, as two random models' dev rows would hardly tell any."""
    folder = tmp_path_factory.mktemp("fitted") / "run"
    shutil.copytree(raw, folder)
    config = json.loads((folder / "config.json").read_text())
    for task in config["tasks"]:
        task.update(BY_HAND.get(task["name"], {}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scaled(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(axis=-1, keepdims=True)


def probabilities(folder, task, *texts):
    return np.array([[*row["probabilities"].values()] for row in Predictor.from_pretrained(folder)(task, *texts)])


# ---- Who asks


def test_the_predictor_divides_outputs_and_takes_the_threshold(raw, fitted):
    columns = [*zip(*PAIRS, strict=True)]
    np.testing.assert_allclose(
        probabilities(fitted, "sst", TEXTS), scaled(probabilities(raw, "sst", TEXTS), 2.5), rtol=1e-5
    )
    para = probabilities(fitted, "para", *columns)
    np.testing.assert_allclose(para, scaled(probabilities(raw, "para", *columns), 0.5), rtol=1e-5)
    answers = Predictor.from_pretrained(fitted)("para", *columns)
    assert [row["prediction"] for row in answers] == [int(yes > 0.01) for yes in para[:, 1]]
    assert any(
        row["prediction"] and row["probabilities"]["duplicate"] < 0.5 for row in answers
    )  # else nothing is seen


def printed_by_card(folder) -> list[torch.Tensor]:
    """What the card's code with transformers prints, a tensor for each task."""
    card = model_card(SavedModel.of(folder), "me/m", collect(folder))
    code = next(block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "model.eval()" in block)
    found: list[torch.Tensor] = []
    exec(code.replace('"me/m"', repr(str(folder))), {"print": found.append})
    return found


def test_the_code_of_the_card_gives_the_same_probabilities(fitted, tiny_model, tiny_tokenizer, tmp_path):
    labels = Task("topics", "labels", ("text",), labels=("art", "sport", "war"), temperature=0.25, thresholds=0.7)
    tiny_model(tasks=(labels,)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    for folder in (fitted, tmp_path):
        tasks = SavedModel.of(folder).tasks
        for (name, task), tensor in zip(tasks.items(), printed_by_card(folder), strict=True):
            if task.traits.is_score:
                continue
            wanted = probabilities(folder, name, *([text] for text in examples_of(task.to_config())))[0]
            found = tensor.detach().numpy()[0]
            np.testing.assert_allclose(found, wanted[1:] if task.kind == "binary" else wanted, rtol=1e-4)


def test_pipelines_give_the_same_probabilities(fitted):
    columns = [*zip(*PAIRS, strict=True)]
    ask = pipeline("minbert-multitask", model=str(fitted), trust_remote_code=True)
    ours = [[*answer["para"]["scores"].values()] for answer in ask(PAIRS, tasks=["para"])]
    np.testing.assert_allclose(ours, probabilities(fitted, "para", *columns), rtol=1e-5)
    labels = [row["label"] for row in Predictor.from_pretrained(fitted)("para", *columns)]
    assert [answer["para"]["label"] for answer in ask(PAIRS, tasks=["para"])] == labels
    for task, inputs in (("sst", TEXTS), ("para", [{"text": a, "text_pair": b} for a, b in PAIRS])):
        stock = pipeline(
            "text-classification", model=str(fitted), trust_remote_code=True, model_kwargs={"active_task": task}
        )
        theirs = [{one["label"]: one["score"] for one in answer} for answer in stock(inputs, top_k=None)]
        expected = Predictor.from_pretrained(fitted)(task, *([TEXTS] if task == "sst" else columns))
        for found, row in zip(theirs, expected, strict=True):
            assert found == pytest.approx(row["probabilities"], rel=1e-4)


def test_the_loss_is_that_of_the_heads_own_outputs(raw, fitted):
    losses = []
    for folder in (raw, fitted):
        predictor = Predictor.from_pretrained(folder, device="cpu")
        inputs = predictor.tokenizer(TEXTS, padding=True, return_tensors="pt")
        with torch.inference_mode():
            predictor.model.set_active_task("sst")
            losses.append(predictor.model(**inputs, labels=torch.tensor([0, 1, 2, 3])).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("logits", [1, 2])
def test_a_classifier_has_the_temperature_in_its_weights(fitted, tmp_path, logits):
    export(fitted, "classifier", tmp_path / "out", task="para", logits=logits)
    classify = pipeline("text-classification", model=str(tmp_path / "out"))
    found = classify([{"text": a, "text_pair": b} for a, b in PAIRS], top_k=None)
    yes = [next(one["score"] for one in answer if one["label"] == "duplicate") for answer in found]
    np.testing.assert_allclose(yes, probabilities(fitted, "para", *zip(*PAIRS, strict=True))[:, 1], rtol=1e-4)
    assert "The threshold of 'duplicate' is a probability of 0.0100" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="not installed")
def test_a_graph_has_the_temperature_and_the_readme_the_threshold(fitted, tmp_path, monkeypatch, capsys):
    from hf_minbert.publishing.export_onnx import OnnxModel

    export(fitted, "onnx", tmp_path / "out")
    predictor = Predictor.from_pretrained(fitted)
    graphs = Predictor(OnnxModel(predictor.model.config, tmp_path / "out"), predictor.tokenizer)
    rows = [{"sentence": text} for text in TEXTS]
    np.testing.assert_allclose(graphs.logits("sst", rows), predictor.logits("sst", rows) / 2.5, atol=1e-4)
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())["tasks"]
    assert tasks["para"]["thresholds"] == 0.01 and "thresholds" not in tasks["sst"]


# ---- The verb, and the key of a recipe


@pytest.fixture(scope="module")
def calibrated(raw, tmp_path_factory):
    """The run after `calibrate`, which both ways share."""
    from hf_minbert.run.calibrate import calibrate

    folder = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(raw, folder)
    predictor, data = Predictor.from_pretrained(folder), RunData.of(folder)
    rows = {name: data.rows(task, "dev") for name, task in predictor.tasks.items()}
    found = calibrate(folder, predictor, rows, temperature=True, thresholds="f1")
    return folder, found


def test_the_folder_carries_what_was_fitted_and_weights_stay(raw, calibrated):
    folder, found = calibrated
    assert [*found] == ["sst", "para"]
    tasks = {task["name"]: task for task in json.loads((folder / "config.json").read_text())["tasks"]}
    for name, of in found.items():
        assert (tasks[name]["temperature"], tasks[name]["thresholds"]) == (
            of["temperature"],
            of["thresholds"].get("duplicate", 0.5),
        )
    assert [*found["para"]["thresholds"]] == ["duplicate"] and found["sst"]["thresholds"] == {}
    assert (folder / "model.safetensors").read_bytes() == (raw / "model.safetensors").read_bytes()
    assert json.loads((folder / "calibration.json").read_text()) == found
    predictor = Predictor.from_pretrained(folder)
    assert calibration_of(folder, predictor.tasks) == found
    assert calibration_of(folder, Predictor.from_pretrained(raw).tasks) == {}  # of a model that has it no longer


def test_scores_and_predictions_are_those_of_the_model_as_it_is(calibrated, minbert, tmp_path):
    folder, _ = calibrated
    assert minbert("evaluate", folder, "--output", tmp_path / "found.json").status == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    for key, value in json.loads((tmp_path / "found.json").read_text()).items():
        assert metrics[key] == pytest.approx(value)
    predictor, data = Predictor.from_pretrained(folder), RunData.of(folder)
    decoded = predictor.decode("para", data.rows(predictor.task("para"), "dev"))
    lines = [line.split(",") for line in (folder / "predictions" / "para-dev.csv").read_text().splitlines()[1:]]
    assert [int(line[1]) for line in lines] == decoded.values.tolist()
    np.testing.assert_allclose([float(line[4]) for line in lines], decoded.probabilities[:, 1], rtol=1e-6)


def test_the_verb_does_the_same_and_says_it(raw, calibrated, tmp_path, minbert):
    folder = tmp_path / "run"
    shutil.copytree(raw, folder)
    ended = minbert("calibrate", folder, "--thresholds", "f1")
    assert ended.status == 0, ended.err
    assert json.loads((folder / "calibration.json").read_text()) == calibrated[1]
    assert (folder / "config.json").read_text() == (calibrated[0] / "config.json").read_text()
    assert f"para: temperature {calibrated[1]['para']['temperature']:.3f}, 'duplicate' above " in ended.out
    assert "“after” is measured on other dev rows than the fit" in ended.out
    refused = minbert("calibrate", folder, "--task", "sts")
    assert refused.status == 2 and "of kind classes, binary or labels. Found sts (score). Give --task" in refused.err
    assert "No temperature, which is for tasks of kind classes, binary or labels: sts (score)." in ended.out
    refused = minbert("calibrate", folder, "--task", "sst", "--no-temperature", "--thresholds", "f1")
    assert refused.status == 2 and "Found sst (classes). Leave --no-temperature out" in refused.err
    only = minbert("calibrate", folder, "--task", "sst", "--thresholds", "f1")  # a temperature is left to fit
    assert only.status == 0 and "No threshold, which is for tasks of kind binary or labels: sst" in only.out
    refused = minbert("calibrate", folder, "--no-temperature")
    assert refused.status == 2 and "nothing to fit" in refused.err
    refused = minbert("calibrate", tmp_path / "nowhere")
    assert refused.status == 2 and "is not a folder" in refused.err


def test_undo_restores_what_was_there_before_the_first_fit(fitted, tmp_path, minbert):
    folder = tmp_path / "run"
    shutil.copytree(fitted, folder)
    assert minbert("evaluate", folder, "--output", tmp_path / "before.json").status == 0
    before = json.loads((folder / "config.json").read_text())
    refused = minbert("calibrate", folder, "--undo")
    assert refused.status == 2 and "There is nothing to undo" in refused.err
    for _ in range(2):  # a second fit does not take the first for the origin
        assert minbert("calibrate", folder, "--thresholds", "f1").status == 0
    assert json.loads((folder / "config.json").read_text()) != before
    refused = minbert("calibrate", folder, "--undo", "--thresholds", "f1")
    assert refused.status == 2 and "--undo fits nothing" in refused.err
    ended = minbert("calibrate", folder, "--undo", "--task", "para")
    assert ended.status == 0 and ended.out == "Restored: para.\n"
    assert [*json.loads((folder / "calibration.json").read_text())] == ["sst"]
    assert minbert("calibrate", folder, "--undo").status == 0
    assert json.loads((folder / "config.json").read_text()) == before
    assert not (folder / "calibration.json").exists()
    metrics = json.loads((folder / "metrics.json").read_text())
    for key, value in json.loads((tmp_path / "before.json").read_text()).items():
        assert metrics[key] == pytest.approx(value)


def test_the_key_of_a_recipe_fits_after_training_and_leaving_it_out_later_takes_it_away(raw, calibrated, tmp_path):
    words = [f"output_dir={tmp_path / 'run'}", "calibrate=temperature", "tune_thresholds=f1"]
    metrics = train(read_recipe(raw / "recipe.yaml", words))
    found, expected = json.loads((tmp_path / "run" / "calibration.json").read_text()), calibrated[1]
    for name, of in expected.items():
        assert found[name]["temperature"] == pytest.approx(of["temperature"], rel=1e-3)
        assert found[name]["thresholds"] == pytest.approx(of["thresholds"], rel=1e-3)
    assert metrics["eval_para_f1"] == json.loads((tmp_path / "run" / "metrics.json").read_text())["eval_para_f1"]
    further = [words[0], "num_train_epochs=3", "resume_from_checkpoint=true", "calibrate=none", "tune_thresholds=null"]
    train(read_recipe(tmp_path / "run" / "recipe.yaml", further))
    assert not (tmp_path / "run" / "calibration.json").exists()
    assert Predictor.from_pretrained(tmp_path / "run").task("para").temperature == 1


def test_a_recipe_that_has_nothing_to_fit_is_refused_before_training(raw, tmp_path):
    with pytest.raises(MinBertError, match="A threshold is for tasks of kind binary or labels. Found sst"):
        train(read_recipe(raw / "recipe.yaml", [f"output_dir={tmp_path}", "tasks=[sst]", "tune_thresholds=f1"]))


def test_nothing_is_fitted_to_a_single_row(raw, tmp_path, caplog):
    from hf_minbert.run.calibrate import calibrate

    folder = tmp_path / "run"
    shutil.copytree(raw, folder)
    predictor, data = Predictor.from_pretrained(folder), RunData.of(folder)
    rows = {name: data.rows(predictor.task(name), "dev").select([0]) for name in ("sst", "para")}
    assert calibrate(folder, predictor, rows, temperature=True, thresholds="accuracy") == {}
    assert "sst: there is only one row, so nothing is fitted" in caplog.text
    assert (folder / "config.json").read_text() == (raw / "config.json").read_text()
    assert not (folder / "calibration.json").exists()


def test_a_folder_with_older_code_is_refused(raw, tmp_path, minbert):
    folder = tmp_path / "run"
    shutil.copytree(raw, folder)
    code = folder / "inference.py"
    code.write_text(code.read_text().replace("temperature", "warmth"))
    ended = minbert("calibrate", folder)
    assert ended.status == 2 and "version without temperatures. Save the model again" in ended.err


# ---- Models of several


def test_an_ensemble_keeps_each_tasks_own_and_an_average_has_what_all_have(raw, fitted):
    one, other = (Predictor.from_pretrained(folder).model for folder in (raw, fitted))
    merged = ensemble([one, other], take={"sst": 1, "para": 1, "sts": 0})
    assert [task["temperature"] for task in merged.config.tasks] == [2.5, 0.5, 1.0]
    assert merged.config.get_task("para")["thresholds"] == 0.01
    assert [task["temperature"] for task in average([one, other]).config.tasks] == [1.0, 1.0, 1.0]
    assert average([one, other]).config.get_task("para")["thresholds"] == 0.5
    assert [task["temperature"] for task in average([other, other]).config.tasks] == [2.5, 0.5, 1.0]


# ---- What is said


def test_the_card_says_what_was_fitted_on_what(calibrated, raw):
    folder, found = calibrated
    saved = SavedModel.of(folder)
    card = model_card(saved, "me/minbert", collect(folder))
    part = card.split("## Calibration")[1].split("\n## ")[0]
    assert f"| `sst` | expected calibration error, ten bins | {found['sst']['before']['ece']:.3f}" in part
    assert f"The threshold of 'duplicate' is a probability of {found['para']['thresholds']['duplicate']:.4f}" in part
    assert "measured with what was fitted on the other half" in part
    noted = [(name, note) for name, of in found.items() for note in of["notes"]]
    assert noted and all(f"- `{name}`: {note}" in part for name, note in noted)
    assert "calibration.json" in [upload.path for upload in collect(folder)]
    other = model_card(SavedModel.of(raw), "me/minbert", collect(raw))
    assert "## Calibration" not in other and "Probabilities are not calibrated: `sst`, `para`." in other


def test_the_report_shows_before_and_after(calibrated, tmp_path, minbert):
    pytest.importorskip("matplotlib")
    folder, found = calibrated
    assert minbert("report", folder, "--output-dir", tmp_path).status == 0
    text = Path(tmp_path / "report.md").read_text()
    part = text.split("### Fitted on dev")[1]
    assert all(note in text for of in found.values() for note in of["notes"])
    assert f"divided by {found['sst']['temperature']:.3f}" in part and "| Brier score |" in part
    assert text.count("### Fitted on dev") == 2
    assert (tmp_path / "pictures" / "para-calibration-after.png").is_file()
