"""Fixtures for training: toy rows that show their origin, a trainer over a tiny model, a second aggregator."""

from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace

import pytest
import torch

from hf_minbert import MultiTaskTrainer, MultiTaskTrainingArguments
from hf_minbert.training import graphs
from hf_minbert.training.aggregation.base import Aggregator
from hf_minbert.training.aggregation.registry import AGGREGATORS

STARTS = {"sst": 0, "para": 100, "sts": 200}
LABELS = {"sst": lambda i: i % 5, "para": lambda i: i % 2, "sts": lambda i: i % 11 / 2}
WORDS = ["good", "bad", "not good", "very bad", "a film", "the man plays", "why is it"]
#: Five, three and two batches of four.
SIZES = {"sst": 20, "para": 12, "sts": 8}


@pytest.fixture
def fresh_compiler():
    """The compiler's counters, from nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def toy_rows() -> Callable[..., dict[str, list[dict]]]:
    """`toy_rows(sst=20, para=12)`: texts that end with the row's number, counted from 0, 100 and 200."""

    def text(number: int, step: int) -> str:
        return f"{WORDS[number * step % len(WORDS)]} {' '.join(str(number))}"

    def row(task: str, i: int) -> dict:
        number, label = STARTS[task] + i, LABELS[task](i)
        if task == "sst":
            return {"sentence": text(number, 1), "label": label}
        return {"sentence1": text(number, 2), "sentence2": text(number, 3), "label": label}

    def make(**sizes: int) -> dict[str, list[dict]]:
        return {task: [row(task, i) for i in range(size)] for task, size in (sizes or SIZES).items()}

    return make


@pytest.fixture(scope="session")
def build_trainer(tiny_model, tiny_tokenizer, toy_rows) -> Callable[..., MultiTaskTrainer]:
    """`build_trainer(folder, model=None, train=None, dev=None, ...)`: two steps of plain SGD unless told otherwise.

    `train` and `dev` are sizes of toy rows (`{"sst": 20}`) or rows; further keywords are training arguments.
    """

    def make(
        folder, model=None, *, train=None, dev=None, tokenizer=tiny_tokenizer, callbacks=None, teacher_logits=None,
        **arguments,
    ):  # fmt: skip
        quiet = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
        plain = {"optim": "sgd", "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        sizes = {"max_steps": 2, "per_device_train_batch_size": 4}
        args = MultiTaskTrainingArguments(output_dir=str(folder), **{**quiet, **plain, **sizes, **arguments})
        given = {"train_dataset": train or toy_rows(), "eval_dataset": dev}
        for name, rows in given.items():
            if isinstance(rows, dict) and all(isinstance(size, int) for size in rows.values()):
                given[name] = toy_rows(**rows)
        model = tiny_model() if model is None else model
        return MultiTaskTrainer(
            model, args, **given, processing_class=tokenizer, callbacks=callbacks, teacher_logits=teacher_logits
        )

    return make


@pytest.fixture
def make_trainer(build_trainer, tmp_path) -> Callable[..., MultiTaskTrainer]:
    """`build_trainer` with a folder of its own for each test."""

    def make(model=None, **given):
        return build_trainer(tmp_path / "run", model, **given)

    return make


@pytest.fixture(scope="session")
def scores() -> Callable[[dict[str, float]], dict[str, float]]:
    """`scores(metrics)`: without the epoch and what was timed."""
    timing = ("_runtime", "_per_second", "_preparation_time")

    def make(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if name != "epoch" and not name.endswith(timing)}

    return make


class RowSum(Aggregator):
    """Sums the tasks' gradients row by row: what `sum` does, by the way of the aggregators that need rows."""

    def altered(
        self, gram: torch.Tensor, generator: torch.Generator | None, tasks: Sequence[Hashable]
    ) -> torch.Tensor:
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


@pytest.fixture(params=["sum", "row_sum"])
def aggregator(request, monkeypatch) -> str:
    """Either way to the summed gradient: accumulated in `.grad`, or one row per task."""
    monkeypatch.setitem(AGGREGATORS, "row_sum", RowSum)
    return request.param


@pytest.fixture
def recorded_on_cpu(monkeypatch) -> None:
    """Steps are recorded on a CPU too. In the place of a CUDA graph, a replay computes the recorded pass anew."""

    def record(self, key, inputs):
        task, factor = key[:2]
        static = graphs._copied(inputs)

        def replay():
            recording.outputs = self._accumulate(task, static, factor)

        recording = graphs.Recording(self.gradients.version, SimpleNamespace(replay=replay))
        recording.inputs = [*graphs._tensors(static)]
        self._recordings[key] = recording
        return recording

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(
        MultiTaskTrainingArguments, "uses_graphs", property(lambda args: args.cuda_graphs == "auto" and args.packing)
    )
    monkeypatch.setattr(graphs.GraphedSteps, "_record", record)
