"""A task's gradient is averaged over processes while the next task computes, to the bits of averaging at the end."""

import json

import pytest
import torch
import torch.distributed as dist

from hf_minbert.training.gradients import GradientRows
from hf_minbert.training.step import RoundStep

pytestmark = pytest.mark.slow


@pytest.fixture
def trained(build_trainer, tiny_model, tmp_path):
    """`trained(name, ...)`: the parameters after some steps of PCGrad, in this process."""

    def make(name: str, **options) -> torch.Tensor:
        usual = {"aggregator": "pcgrad", "max_steps": 5, "per_device_train_batch_size": 2}
        trainer = build_trainer(tmp_path / name, tiny_model(), **{**usual, **options})
        trainer.train()
        return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])

    return make


#: In the last two tasks leave the rounds, and embeddings come in: more or less is averaged than in the step before.
OPTIONS = [
    {},
    {"gradient_accumulation_steps": 2, "max_steps": 4},
    {"mixing": "once", "gradient_accumulation_steps": 3, "gradient_smoothing": 0.5, "max_steps": 4},
    {"freeze": "encoder", "unfreeze": {2: "embeddings", 3: "none"}, "learning_rate": 0.1},
]


def test_it_ends_with_the_bits_of_averaging_at_the_end(together, trained, monkeypatch, tmp_path):
    def job(rank: int) -> None:
        for number, options in enumerate(OPTIONS):
            early = trained(f"early-{number}", **options)
            with monkeypatch.context() as patch:
                patch.setattr(GradientRows, "complete", lambda self, task: None)
                late = trained(f"late-{number}", **options)
            assert torch.equal(early, late), options
            both = [torch.empty_like(early) for _ in range(2)]
            dist.all_gather(both, early)
            assert torch.equal(*both), options

    ended = together(job)
    assert ended.status == [0, 0], ended.said


def test_a_task_is_on_its_way_while_the_next_one_computes(together, trained, monkeypatch, tmp_path):
    def job(rank: int) -> None:
        events = []
        usual, backward, wait = dist.all_reduce, RoundStep._backward, GradientRows._finish

        def all_reduce(tensor, *given, **options):
            events.append("send")
            return usual(tensor, *given, **options)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(
            RoundStep,
            "_backward",
            lambda self, task, *given: (events.append(task), backward(self, task, *given))[1],
        )
        monkeypatch.setattr(GradientRows, "_finish", lambda self: (events.append("wait"), wait(self))[1])
        trained("run", max_steps=3)
        (tmp_path / f"{rank}.json").write_text(json.dumps(events))

    ended = together(job)
    assert ended.status == [0, 0], ended.said
    events = json.loads((tmp_path / "0.json").read_text())
    assert events == json.loads((tmp_path / "1.json").read_text())
    step = events[len(events) - events[::-1].index("sst") - 1 :]  # the last one: a row and a head's gradients per task
    assert step[:10] == ["sst", "send", "send", "para", "send", "send", "sts", "send", "send", "wait"]
