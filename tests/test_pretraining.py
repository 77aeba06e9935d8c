"""Runs with `objective: mlm`: their texts, their perplexity, how they resume, and what the next run gets of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertModel

from hf_minbert import MinBertError, MinBertForMaskedLM, Predictor
from hf_minbert.data.masking import MaskingCollator, Text
from hf_minbert.pretrained.loading import load_tokenizer
from hf_minbert.run import train as run
from hf_minbert.run.masked_lm import MaskedLMTrainer
from hf_minbert.settings.recipe import read_recipe


@pytest.fixture
def train(tiny_bert, course_dir, tmp_path) -> Callable[..., dict]:
    """`train("key=value", ...)`: a run of six steps into `tmp_path / "run"`, with a checkpoint every two."""
    recipe = tmp_path / "recipe.yaml"
    lines = {
        "model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": tmp_path / "run", "objective": "mlm",
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "hidden_dropout_prob": 0.1,
        "save_steps": 2, "logging_steps": 1, "disable_tqdm": "true",
    }  # fmt: skip
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return lambda *words: run.train(read_recipe(recipe, words))


@pytest.fixture
def stock(tiny_config, tiny_tokenizer, tmp_path) -> Callable[..., Path]:
    """`stock(kind)`: the folder of a tiny random model of a class of the library's."""

    def make(kind, **options) -> Path:
        folder = tmp_path / kind.__name__
        sizes = {key: value for key, value in tiny_config().to_dict().items() if key in BertConfig().to_dict()}
        torch.manual_seed(1)
        kind(BertConfig(**{**sizes, "model_type": "bert"}), **options).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


def weights(folder: Path, start: str = "") -> dict[str, torch.Tensor]:
    return {key: value for key, value in load_file(folder / "model.safetensors").items() if key.startswith(start)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def scores(metrics: dict) -> dict:
    return {key: value for key, value in metrics.items() if key.startswith("eval_")}


# ---- The texts


@pytest.fixture
def collated(monkeypatch) -> list[Text]:
    """All texts that batches are made of."""
    found: list[Text] = []
    original = MaskingCollator.__call__
    monkeypatch.setattr(MaskingCollator, "__call__", lambda self, texts: found.extend(texts) or original(self, texts))
    return found


def write(folder: Path, files: dict[str, list[str]]) -> Path:
    folder.mkdir()
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    """Few rows, with texts that stand in several places."""
    pairs = "id\tsentence1\tsentence2\tis_duplicate"
    return write(tmp_path / "data", {
        "ids-sst-train.csv": ["id\tsentence\tsentiment", "a\tthe film\t1", "b\tthe dog\t2", "c\tthe film\t3"],
        "quora-train.csv": [pairs, "a\twhy is it\tthe dog\t1", "b\thow is it\twhy is it\t0"],
        "ids-sst-dev.csv": ["id\tsentence\tsentiment", "a\ta good man\t1"],
        "quora-dev.csv": [pairs, "a\ta bad man\ta good man\t0"],
        "quora-test-student.csv": ["id\tsentence1\tsentence2", "a\tvery good\tvery bad"],
        "more.txt": ["  it plays ", "", "the dog", "   ", "how", "it plays"],
    })  # fmt: skip


def test_each_text_of_training_is_taken_once_with_both_sentences_of_a_pair(train, data, collated, tiny_tokenizer):
    metrics = train(f"data_dir={data}", "tasks=[sst, para]", "max_steps=-1", "num_train_epochs=1")
    seen = [tiny_tokenizer.decode(text.ids, skip_special_tokens=True) for text in collated if text.place[0] == 42]
    assert sorted(seen) == ["how is it", "the dog", "the film", "why is it"]
    held_out = {tiny_tokenizer.decode(text.ids, skip_special_tokens=True) for text in collated if text.place[0] == 0}
    assert held_out == {"a good man", "a bad man"}
    assert metrics["train_texts"] == {"sst": 2, "para": 2}
    assert metrics["held_out_texts"] == {"sst": 1, "para": 1}


@pytest.mark.parametrize(
    "texts, expected",
    [("[more.txt]", {"more.txt": 3}), ("[more.txt, tasks]", {"more.txt": 3, "sst": 1}), ("tasks", {"sst": 2})],
)
def test_a_text_file_has_a_text_a_line(train, data, texts, expected):
    metrics = train(f"data_dir={data}", "tasks=[sst]", f"mlm_texts={texts}", "max_steps=1")
    assert metrics["train_texts"] == expected


def test_tasks_are_chosen_as_in_any_run(train, data):
    (data / "ids-sst-train.csv").unlink()
    metrics = train(f"data_dir={data}", "tasks=[sst, para]", "train_tasks=para", "eval_tasks=sst", "max_steps=1")
    assert (metrics["train_texts"], metrics["held_out_texts"]) == ({"para": 3}, {"sst": 1})


def test_in_sequence_all_epochs_of_a_task_come_before_the_next_task(train, data, collated):
    words = ["tasks=[sst, para]", "mlm_order=sequence", "num_train_epochs=3", "per_device_train_batch_size=1"]
    train(f"data_dir={data}", *words, "max_steps=-1")
    places = [text.place for text in collated if text.place[0] == 42]
    for part in (places[:6], places[6:]):
        assert [epoch for _, epoch, _ in part] == [0, 0, 1, 1, 2, 2]
    assert {number for *_, number in places[:6]} == {0, 1}
    assert {number for *_, number in places[6:]} == {2, 3}


def test_in_sequence_steps_are_shared_out_by_size(train, data, collated):
    words = ["tasks=[sst, para]", "mlm_order=sequence", "max_steps=2", "per_device_train_batch_size=1"]
    train(f"data_dir={data}", *words)
    numbers = [text.place[2] for text in collated if text.place[0] == 42]
    assert [number < 2 for number in numbers[:2]] == [True, False]  # the loader is a batch ahead


def test_no_text_of_dev_or_test_is_trained_on(train, data):
    text = data / "more.txt"
    text.write_text("it plays\nA good  man!\nvery bad\na bad man plays\n", encoding="utf-8")
    metrics = train(f"data_dir={data}", "tasks=[sst, para]", "eval_tasks=sst", "mlm_texts=[more.txt, tasks]")
    assert metrics["train_texts"] == {"more.txt": 2, "sst": 2, "para": 2}
    found = metrics["leaks"]["more.txt"]
    assert (found["rows"], found["dropped"]) == (4, 2)
    sentences = {name: counts["sentences"] for name, counts in found["matches"].items()}
    assert sentences == {"sst dev": 1, "para dev": 1, "para test": 1}
    assert metrics["leaks"]["sst"] == {"rows": 2, "dropped": 0, "matches": {}}
    text.write_text("a good man\n", encoding="utf-8")
    with pytest.raises(MinBertError, match="all texts of more.txt are also in dev or test rows"):
        train(f"data_dir={data}", "tasks=[sst, para]", "mlm_texts=more.txt", "overwrite=true")


# ---- The perplexity


def test_the_perplexity_is_that_of_all_held_out_tokens_asked_for(train, tmp_path, course_dir):
    metrics = train("per_device_eval_batch_size=3", "tasks=[sst]", "mlm_probability=0.3", "mlm_whole_words=true")
    model = MinBertForMaskedLM.from_pretrained(tmp_path / "run").eval()
    tokenizer = load_tokenizer(str(tmp_path / "run"), model.config)
    lines = (course_dir / "ids-sst-dev.csv").read_text(encoding="utf-8").splitlines()[1:]
    losses = []
    for number, line in enumerate(lines):  # one by one: without padding, and without means of means
        ids = torch.tensor(tokenizer(line.split("\t")[2])["input_ids"])
        batch = MaskingCollator(tokenizer, 0.3, True)([Text(ids.numpy(), (0, 0, number))])
        asked = batch["labels"] != -100
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits
        losses += F.cross_entropy(logits[asked], batch["labels"][asked], reduction="none").tolist()
    mean = sum(losses) / len(losses)
    assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_training_lowers_the_perplexity_of_texts_that_are_new(train, tmp_path):
    pairs = [(who, how) for who in ("man", "dog", "film") for how in ("good", "bad", "very good", "very bad")]
    texts = [f"why is the {who} {how} ?" for who, how in pairs]
    lines = {"train": texts[1:7] + texts[8:], "dev": [texts[0], texts[7]]}
    header = "id\tsentence\tsentiment"
    files = {f"ids-sst-{split}.csv": [header, *(f"a\t{text}\t1" for text in texts)] for split, texts in lines.items()}
    words = ["tasks=[sst]", "max_steps=40", "learning_rate=5e-3", "save_strategy=no", "mlm_probability=0.4"]
    metrics = train(f"data_dir={write(tmp_path / 'data', files)}", *words)
    assert metrics["eval_perplexity"] < metrics["eval_perplexity_before"] / 5


def test_each_task_has_a_perplexity_of_its_own(train):
    together, sst, para = (train(f"eval_tasks={tasks}", "overwrite=true") for tasks in ("[sst, para]", "sst", "para"))
    assert together["eval_sst_perplexity"] == pytest.approx(sst["eval_perplexity"], rel=1e-5)
    assert together["held_out_texts"]["sst"] == sst["held_out_texts"]["sst"]
    assert together["eval_para_perplexity"] != sst["eval_perplexity"]
    assert {key for key in scores(para) if "before" not in key} == {"eval_loss", "eval_perplexity"}


def test_the_perplexity_before_is_that_of_the_model_it_begins_with(train, stock, tmp_path):
    first = train(f"model_name_or_path={stock(BertForPreTraining)}")
    second = train(f"model_name_or_path={tmp_path / 'run'}", f"output_dir={tmp_path / 'next'}", "seed=7")
    assert second["eval_loss_before"] == pytest.approx(first["eval_loss"], abs=1e-6)
    assert json.loads((tmp_path / "next" / "metrics.json").read_text()) == second


def test_batches_packed_accumulated_or_of_another_size_score_the_same(train):
    usual = train("learning_rate=0")
    for words in (["packing=true"], ["per_device_eval_batch_size=1"], ["bf16=false", "gradient_accumulation_steps=2"]):
        other = train("learning_rate=0", "overwrite=true", *words)
        assert scores(other) == pytest.approx(scores(usual), rel=1e-5)
        assert other["eval_loss"] == other["eval_loss_before"]


@pytest.mark.parametrize("more", [[], ["neftune_noise_alpha=5"]], ids=str)
def test_packing_trains_the_same_model(train, tmp_path, more):
    words = ["hidden_dropout_prob=0", "optim=sgd", *more]
    state = tmp_path / "run" / "checkpoint-6" / "trainer_state.json"
    padded = train(*words)
    plain, operations = weights(tmp_path / "run"), json.loads(state.read_text())["total_flos"]
    packed = train(*words, "packing=true", "overwrite=true")
    assert packed["train_loss"] == pytest.approx(padded["train_loss"], rel=1e-5)
    if not torch.cuda.is_available():  # a GPU's batches are filled up to a size that has been recorded
        assert 0 < json.loads(state.read_text())["total_flos"] < 0.95 * operations
    for key, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, plain[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_step_in_several_batches_is_the_same_step(train, tmp_path, packing):
    words = ["hidden_dropout_prob=0", "optim=sgd", "learning_rate=0.1", "max_grad_norm=0", "max_steps=2"]
    words.append(f"packing={packing}")
    train(*words)
    whole = weights(tmp_path / "run")
    train(*words, "per_device_train_batch_size=1", "gradient_accumulation_steps=4", "overwrite=true")
    for key, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-6)


def test_half_precision_trains_nearly_the_same(train, tmp_path):
    full = train("hidden_dropout_prob=0")
    half = train("hidden_dropout_prob=0", "bf16=true", "use_cpu=true", "overwrite=true")
    assert half["eval_loss"] != full["eval_loss"]
    assert half["eval_loss"] == pytest.approx(full["eval_loss"], rel=0.02)
    assert {value.dtype for value in weights(tmp_path / "run").values()} == {torch.float32}


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss(train, tmp_path):
    words = ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true", "learning_rate=0.5"]
    metrics = train(*words)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    scored = {entry["step"]: entry["eval_loss"] for entry in log[:-1] if "eval_loss" in entry and entry["step"]}
    best = min(scored, key=scored.get)
    assert len(set(scored.values())) == 3
    assert (metrics["best_step"], metrics["metric_for_best_model"]) == (best, "eval_loss")
    assert metrics["eval_loss"] == pytest.approx(scored[best], rel=1e-6)
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "run" / f"checkpoint-{best}"))


# ---- Resuming


@pytest.mark.parametrize("order", ["mixed", "sequence"])
def test_a_run_that_resumes_ends_as_if_it_had_not_stopped(train, tmp_path, monkeypatch, caplog, order):
    words = [f"mlm_order={order}", "max_steps=12", "attention_probs_dropout_prob=0.1"]  # seven steps are an epoch
    whole = train(*words, f"output_dir={tmp_path / 'whole'}")
    step, left = MaskedLMTrainer.training_step, iter(range(9))

    def training_step(self, *args, **kwargs):
        if next(left, None) is None:
            raise RuntimeError("stopped")
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MaskedLMTrainer, "training_step", training_step)
        with pytest.raises(RuntimeError, match="stopped"):
            train(*words)
    assert not (tmp_path / "run" / "metrics.json").exists()
    caplog.clear()
    resumed = train(*words, "resume_from_checkpoint=true")
    assert "missing keys" not in caplog.text
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert scores(resumed) == scores(whole)


def test_what_decides_a_step_stays_on_resume(train):
    train("max_steps=2")
    for word in (
        "mlm_probability=0.2", "mlm_whole_words=true", "mlm_order=sequence", "objective=tasks", "mlm_texts=x.txt",
    ):  # fmt: skip
        with pytest.raises(MinBertError, match=f"was started with {word.split('=')[0]}"):
            train("max_steps=4", "resume_from_checkpoint=true", word)


def test_other_texts_are_refused_on_resume_and_so_is_another_length_in_sequence(train, data, tmp_path):
    words = ["tasks=[sst]", "max_steps=2", "mlm_order=sequence"]
    train(*words)
    with pytest.raises(MinBertError, match="training rows of 'sst' are not those"):
        train(*words, "resume_from_checkpoint=true", f"data_dir={data}")
    with pytest.raises(MinBertError, match="was started with max_steps = 2"):
        train("tasks=[sst]", "mlm_order=sequence", "max_steps=4", "resume_from_checkpoint=true")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", [[], ["gradient_accumulation_steps=2", "bf16=true"], ["fp16=true"]], ids=str)
def test_recorded_steps_train_as_single_launches_do(train, monkeypatch, words):
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    given = [*words, "packing=true", "hidden_dropout_prob=0.0", "attention_probs_dropout_prob=0.0", "max_steps=12"]
    plain = train(*given, "cuda_graphs=off", "overwrite=true")
    assert not replays
    recorded = train(*given, "overwrite=true")
    assert replays
    half = any(word in given for word in ("bf16=true", "fp16=true"))
    assert scores(recorded) == pytest.approx(scores(plain), rel=2e-2 if half else 1e-3)


# ---- What the next run gets


def test_encoder_and_pooler_go_into_the_next_run_as_they_are(train, tiny_bert, tmp_path, caplog):
    train()
    ours, before = weights(tmp_path / "run", "bert."), load_file(tiny_bert / "model.safetensors")
    for key in ("pooler.dense.weight", "pooler.dense.bias"):
        assert torch.equal(ours[f"bert.{key}"], before[key])
    moved = [key for key in ours if not torch.equal(ours[key], before[key.removeprefix("bert.")])]
    assert len(moved) == len(ours) - 2
    caplog.clear()
    into = tmp_path / "next"
    train("objective=tasks", f"model_name_or_path={tmp_path / 'run'}", f"output_dir={into}", "learning_rate=0")
    assert_same(weights(into, "bert."), ours)
    assert "random numbers" not in "".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert Predictor.from_pretrained(into).tasks.keys() == {"sst", "para", "sts"}


def test_a_checkpoint_without_a_pooler_does_not_get_one(train, stock, tmp_path, caplog):
    train(f"model_name_or_path={stock(BertModel, add_pooling_layer=False)}")
    assert not [key for key in weights(tmp_path / "run") if "pooler" in key]
    train("objective=tasks", f"model_name_or_path={tmp_path / 'run'}", f"output_dir={tmp_path / 'next'}")
    assert f"{tmp_path / 'run'} has no pooler. The pooler starts with random weights." in caplog.text


def test_a_head_that_predicts_words_is_used_where_there_is_one(train, stock, tmp_path, caplog):
    train(f"model_name_or_path={stock(BertForMaskedLM)}", "learning_rate=0")
    theirs, ours = weights(tmp_path / "BertForMaskedLM", "cls."), weights(tmp_path / "run", "cls.")
    assert_same(theirs, ours)
    assert "no head that predicts words" not in caplog.text
    train("overwrite=true")
    assert "has no head that predicts words. The new head starts from random numbers" in caplog.text


def test_a_finished_run_of_tasks_can_be_pretrained_further(train, finished_run, tmp_path):
    train(f"model_name_or_path={finished_run}", "learning_rate=0")
    assert_same(weights(tmp_path / "run", "bert."), weights(finished_run, "bert."))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["tasks"] is None


def test_it_is_a_stage_like_any_other(train, tmp_path, minbert):
    stages = "[{name: words, objective: mlm}, {name: heads, freeze: encoder, max_steps: 2}]"
    recipe = tmp_path / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8").replace("objective: mlm\n", "mixing: once\n")
    recipe.write_text(f"{text}load_best_model_at_end: true\neval_strategy: steps\neval_steps: 2\n", encoding="utf-8")
    metrics = train(f"stages={stages}")
    folders = [tmp_path / "run" / "stages" / name for name in ("1-words", "2-heads")]
    assert_same(weights(folders[1], "bert."), weights(folders[0], "bert."))
    assert metrics["stages"]["words"]["eval_perplexity"] > 1
    assert "eval_overall" in metrics


def test_the_packaged_recipe_runs(tiny_bert, course_dir, tmp_path):
    words = {"model_name_or_path": tiny_bert, "data_dir": course_dir, "output_dir": tmp_path / "run"}
    fast = ["max_length=32", "num_train_epochs=1", "disable_tqdm=true"]
    metrics = run.train(read_recipe("cs224n/pretrain", [*(f"{key}={value}" for key, value in words.items()), *fast]))
    assert metrics["stages"]["words"]["metric_for_best_model"] == "eval_loss"
    assert metrics["metric_for_best_model"] == "eval_overall"


def test_the_command_prints_the_perplexity(minbert, train, tmp_path):
    ended = minbert("train", tmp_path / "recipe.yaml", "max_steps=1")
    assert ended.status == 0
    assert "perplexity_before" in ended.out


# ---- Refused


@pytest.mark.parametrize(
    "word, said",
    [
        ("freeze=encoder", "trains the whole encoder. Found `freeze: encoder`"),
        ("metric_for_best_model=sts_pearson", "Unknown metric_for_best_model 'sts_pearson'.*loss, perplexity"),
        ("mlm_probability=1", "`mlm_probability` must be more than 0 and less than 1. Found 1"),
        ("mlm_probability=0", "`mlm_probability` must be more than 0 and less than 1. Found 0"),
        ("mlm_texts=[]", "`mlm_texts` is empty"),
        ("mlm_texts=corpus.txt", "`mlm_texts`: reading corpus.txt failed.*one text per line"),
        ("mlm_order=random", "`mlm_order` must be one of mixed, sequence"),
        ("objective=nsp", "`objective` must be one of tasks, mlm"),
        ("train_tasks=[mnli]", "`train_tasks`: Unknown task 'mnli'"),
        ("max_length=999", "`max_length` must be from 8 to 64"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(train, tmp_path, word, said):
    with pytest.raises(MinBertError, match=said):
        train(word)
    assert not (tmp_path / "run").exists()


def test_a_file_without_texts_is_refused(train, tmp_path):
    file = tmp_path / "blank.txt"
    file.write_text("\n  \n", encoding="utf-8")
    with pytest.raises(MinBertError, match="there is no text in .*blank.txt"):
        train(f"mlm_texts={file}")


def test_a_model_with_private_layers_is_refused(train, tmp_path):
    train("objective=tasks", "private_layers=1", "max_steps=1")
    with pytest.raises(MinBertError, match="trains one encoder.*for each task alone"):
        train(f"model_name_or_path={tmp_path / 'run'}", f"output_dir={tmp_path / 'next'}")


def test_keys_about_several_tasks_are_said_to_have_no_effect(train, caplog):
    train("mixing=once", "aggregator=pcgrad", "max_steps=1", "packing=true", "early_stopping_threshold=0")
    assert "No effect with `objective: mlm`: `aggregator`, `mixing`." in caplog.text
