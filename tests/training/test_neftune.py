"""NEFTune's noise goes by each sentence's own length, in whichever form its words come to the encoder."""

import pytest
import torch

from hf_minbert import MinBertError, get_tasks
from hf_minbert.training.neftune import WordNoise
from hf_minbert.training.noise import noise_of_words, uniform_noise
from hf_minbert.training.terms.base import NoiseKey
from hf_minbert.training.trainer import tokens_through

ALPHA, SIZE = 5.0, 32
ROWS = [
    {"sentence": text, "sentence1": text, "sentence2": text[::-1], "label": 1}
    for text in ("a", "the man plays", "why is it not very good ? " * 2, "a film " * 12)
]
BI = {"para": {"pair_encoding": "bi"}, "sst": None}


@pytest.fixture
def noise_of(make_trainer, tiny_model, monkeypatch):
    """`noise_of("sst", ...)`: the noise of each pass of one batch of a task, [N, T, H], and each sentence's tokens."""

    def find(task, tasks=None, **given):
        trainer = make_trainer(
            tiny_model(get_tasks(tasks or ["sst", "para"])), train={task: ROWS}, train_tasks=[task], max_steps=1,
            neftune_noise_alpha=ALPHA, **given,
        )  # fmt: skip
        seen, usual = [], WordNoise._add

        def watched(self, module, inputs, output):
            moved = usual(self, module, inputs, output)
            if moved is not None:
                noise, packing = (moved - output).detach(), self._packing
                packed = packing is not None and len(noise) == 1
                # Two passes may come as one batch.
                parts = noise.split(len(packing.tokens), dim=1) if packed else noise.split(len(self._noise))
                for part in parts:
                    seen.append((packing.unpack(part) if packed else part).view(-1, self._noise.shape[1], SIZE))
            return moved

        monkeypatch.setattr(WordNoise, "_add", watched)
        batch = next(iter(trainer.get_train_dataloader()))[task]
        trainer.train()
        return seen, batch["attention_mask"].flatten(0, -2).bool()

    return find


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("task", "tasks"), [("sst", None), ("para", None), ("para", BI)])
@pytest.mark.parametrize("given", [{}, {"regularizer": "fgm"}, {"regularizer": "smart"}, {"regularizer": "r_drop"}])
def test_the_largest_noise_is_that_of_the_sentences_own_length(noise_of, task, tasks, packing, given):
    passes, mask = noise_of(task, tasks, packing=packing, **given)
    assert len(passes) == (1 if not given else 3 if given["regularizer"] == "smart" else 2)
    assert len({int(row.sum()) for row in mask}) > 2
    for noise in passes:
        for row, real in zip(noise, mask, strict=True):
            bound = ALPHA / (int(real.sum()) * SIZE) ** 0.5
            # Of 3 * 32 uniform numbers and more, the largest is below 0.9 of the bound once in 20,000 times.
            assert 0.9 * bound < row[real].abs().max() <= bound * (1 + 1e-5)
        assert torch.allclose(noise[mask], passes[0][mask], atol=1e-6)  # the difference of two sums is rounded


def test_uniform_noise_is_uniform_and_its_numbers_are_independent():
    rows, positions = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    noise, another = (uniform_noise(key, rows, positions, 101).view(100, 100, 101).double() for key in (11, 12))
    counts = torch.histc(noise, bins=20, min=-1, max=1) / noise.numel()
    assert noise.min() >= -1 and noise.max() < 1
    torch.testing.assert_close(counts, torch.full_like(counts, 0.05), rtol=0, atol=0.001)
    pairs = [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[..., :50], noise[..., 51:])]
    for one, other in [*pairs, (noise[..., 1:], noise[..., :-1]), (noise, another)]:
        assert abs((one * other).mean().item()) < 0.003
        assert abs((one.square() * other.square()).mean().item() - 1 / 9) < 0.003


@pytest.mark.parametrize(("task", "tasks"), [("sst", None), ("para", BI)])
def test_the_noise_of_a_row_does_not_depend_on_padding_or_packing(noise_of, task, tasks):
    (padded, mask), (packed, _) = (noise_of(task, tasks, packing=packing) for packing in (False, True))
    torch.testing.assert_close(packed[0][mask], padded[0][mask], rtol=0, atol=1e-6)  # of differences


def test_terms_have_other_noise_than_words(make_trainer):
    trainer = make_trainer(train={"sst": ROWS}, train_tasks=["sst"])
    batch, key = next(iter(trainer.get_train_dataloader()))["sst"], NoiseKey(1, 2, 3)
    noise = WordNoise(ALPHA, []).draw(batch, SIZE, key)
    assert torch.corrcoef(torch.stack([noise.flatten(), noise_of_words(batch, SIZE, key).flatten()]))[0, 1] < 0.1


def test_each_step_draws_anew_and_evaluation_has_none(make_trainer, monkeypatch):
    trainer = make_trainer(neftune_noise_alpha=ALPHA, packing=True, dev={"sst": 4}, eval_tasks=["sst"])
    drawn, usual = [], WordNoise.draw

    def draw(self, *given):
        drawn.append(usual(self, *given))
        return drawn[-1]

    monkeypatch.setattr(WordNoise, "draw", draw)
    trainer.train()
    assert len(drawn) == 6  # three tasks in two steps
    assert len({float(noise.flatten()[0]) for noise in drawn}) == 6
    assert trainer.evaluate()["eval_sst_loss"] == trainer.evaluate()["eval_sst_loss"]
    assert not any(module._forward_hooks for module in trainer.model.modules())  # none is left behind


def test_a_private_encoder_has_noise_too(make_trainer, tiny_model):
    losses = []
    for alpha in (None, ALPHA):
        model = tiny_model(["sst", "para"], private_encoders=True)
        assert model.encoder_of("para") is not model.bert
        trainer = make_trainer(model, train={"sst": ROWS, "para": ROWS}, max_steps=1, neftune_noise_alpha=alpha)
        trainer.train()
        losses.append(trainer.state.log_history[0])
    for task in ("sst", "para"):
        assert abs(losses[0][f"loss_{task}"] - losses[1][f"loss_{task}"]) > 1e-4


def test_the_noise_of_a_compiled_model_changes_from_step_to_step(make_trainer, tiny_model):
    losses = []
    for alpha in (None, ALPHA):
        torch.compiler.reset()
        trainer = make_trainer(
            tiny_model(["sst"]), train={"sst": ROWS}, torch_compile=True, torch_compile_backend="eager",
            learning_rate=0.0, max_steps=3, neftune_noise_alpha=alpha,
        )  # fmt: skip
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert max(losses[0]) - min(losses[0]) < 1e-5  # the four rows, each step
    assert len({round(loss, 5) for loss in losses[1]}) == 3


@pytest.mark.parametrize("alpha", [-1.0, float("nan"), float("inf")])
def test_a_noise_that_is_none_is_refused(make_trainer, alpha):
    with pytest.raises(MinBertError, match="`neftune_noise_alpha` must be"):
        make_trainer(neftune_noise_alpha=alpha)


# ---- what else reads the size of a batch


def test_a_packed_batch_counts_the_tokens_that_go_through(make_trainer):
    padded, packed = (make_trainer(train={"sst": ROWS}, train_tasks=["sst"], packing=p) for p in (False, True))
    counts = {}
    for name, trainer in (("padded", padded), ("packed", packed)):
        (batch,) = next(iter(trainer.get_train_dataloader())).values()
        counts[name] = tokens_through(batch)
        real, all_places = int(batch["attention_mask"].sum()), batch["input_ids"].numel()
        assert counts[name] == (all_places if name == "padded" else real) and real < all_places
        trainer.train()
    ratio = packed.state.total_flos / padded.state.total_flos
    assert ratio == pytest.approx(counts["packed"] / counts["padded"])


@pytest.mark.parametrize("regularizer", ["fgm", "smart"])
def test_a_step_with_a_search_is_the_same_packed_and_padded(make_trainer, tiny_model, regularizer):
    """With noise on words and pairs apart: norms are of each sentence, and noise is that of the batch."""
    found = []
    for packing in (False, True):
        trainer = make_trainer(
            tiny_model(get_tasks(BI)), train={"para": ROWS, "sst": ROWS}, packing=packing, max_steps=1,
            regularizer=regularizer, neftune_noise_alpha=ALPHA, learning_rate=0.1,
        )  # fmt: skip
        trainer.train()
        found.append(({n: p.detach() for n, p in trainer.model.named_parameters()}, trainer.state.log_history[0]))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-4)
    for key in (f"{regularizer}_para", f"{regularizer}_sst", "loss_para", "loss_sst"):
        assert found[1][1][key] == pytest.approx(found[0][1][key], rel=1e-3, abs=1e-6)
