"""What test_two_processes.py trains, in one process or in several, and what each process records of it."""

from __future__ import annotations

import copy
import hashlib
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import BertTokenizer, TrainerCallback

from hf_minbert import TASKS, MinBertConfig, MinBertForMultiTask, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from hf_minbert.training.aggregation.base import Aggregator
from hf_minbert.training.aggregation.registry import AGGREGATORS

#: Two epochs of most scenarios, three where tasks leave an epoch.
STEPS = 12


class RowSum(Aggregator):
    """The same gradient as `sum`, by the way of one row per task."""

    def altered(self, gram, generator, tasks):
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


class RandomUnits(Aggregator):
    """Rows of length 1 with drawn weights. Not linear, so rows must be averaged over processes before; and drawn,
    so all processes must draw alike.
    """

    def altered(self, gram, generator, tasks):
        weights = torch.rand(len(gram), generator=generator)
        return torch.diag(weights.to(gram) / gram.diagonal().sqrt())


PEFT = find_spec("peft") is not None


def with_lora(model):
    """With adapters, of which none is zero: in a new one of peft's, half has no gradient at the first step."""
    import peft

    torch.manual_seed(3)
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["heads"]}
    return peft.get_peft_model(model, peft.LoraConfig(**settings, init_lora_weights=False))


class Recorder(TrainerCallback):
    """The gradient that the optimizer gets and a digest of the parameters after it, at every step."""

    def __init__(self):
        self.gradients, self.unreached, self.digests, self.metrics = [], [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.unreached.append([name for name, p in model.named_parameters() if p.grad is None])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        self.gradients.append(flat(grads).clone())

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.digests.append(digest(model))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.metrics.append(metrics)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def digest(model) -> str:
    return hashlib.sha256(flat(model.parameters()).numpy().tobytes()).hexdigest()


class Scenarios:
    """A process alone takes batches as large as those of two processes together."""

    def __init__(self, source: Path, target: Path, rank: int, processes: int):
        self.model = MinBertForMultiTask.from_pretrained(source / "model")
        self.tokenizer = BertTokenizer.from_pretrained(source / "model")
        self.rows = torch.load(source / "rows.pt")
        self.target, self.rank, self.processes = target, rank, processes
        self.recorded: dict[str, dict] = {}

    def trainer(self, name: str, *, rows: int, model=None, train=None, **options) -> MultiTaskTrainer:
        """A trainer and a record of what it does: on `train` alone, or with dev rows on the training rows of all
        tasks, of sst, the longest, the first `rows`.
        """
        settings = {
            "output_dir": str(self.target / name),
            "max_steps": STEPS,
            "optim": "sgd",
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_steps": 3,
        }
        model = copy.deepcopy(self.model) if model is None else model
        recorder = Recorder()
        dev = self.rows["dev"] if train is None else None
        train = train or {**self.rows["train"], "sst": self.rows["train"]["sst"][:rows]}
        trainer = MultiTaskTrainer(
            model,
            MultiTaskTrainingArguments(**{**settings, **options}),
            train_dataset=train,
            eval_dataset=dev,
            processing_class=self.tokenizer,
            callbacks=[recorder],
        )
        self.recorded[name] = vars(recorder)
        return trainer

    def train(self, name: str, resume: bool = False, **options) -> MultiTaskTrainer:
        trainer = self.trainer(name, **options)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train(resume_from_checkpoint=resume)
        after = list(trainer.model.parameters())
        names = [parameter for parameter, _ in trainer.model.named_parameters()]
        self.recorded[name] |= {
            "parameters": flat(after),
            "unmoved": [n for n, a, b in zip(names, before, after, strict=True) if torch.equal(a, b)],
            "epoch": trainer.state.epoch,
            "losses": [entry for entry in trainer.state.log_history if "loss_sst" in entry],
            "totals": [entry for entry in trainer.state.log_history if "conflicts_epoch" in entry],
        }
        return trainer

    def compare(self) -> None:
        """What one process and two must agree on."""
        four = 4 * 2 // self.processes
        plain = self.train("plain", rows=48, per_device_train_batch_size=four)
        self.recorded["plain"]["wrapped"] = plain.model_wrapped is not plain.model
        other = copy.deepcopy(self.model)
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.detach().mul_(1 + self.rank)
        self.train("weights_of_the_first", rows=48, model=other, per_device_train_batch_size=four)
        # Two processes take 4 rows twice a step, one process all 16 of them at once.
        twice = {"gradient_accumulation_steps": 2} if self.processes == 2 else {}
        own = four if self.processes == 2 else 2 * four
        self.train("accumulated", rows=48, per_device_train_batch_size=own, **twice)
        # 35 rows are nine batches of 4, an odd number: the ninth and a tenth are filled from the next pass. An epoch's
        # five rounds of each process make three steps, the last of which has one round only.
        uneven = {"sts": four // 2, "para": 3 * four // 4}
        self.train(
            "uneven", rows=35, per_device_train_batch_size=four, task_batch_sizes=uneven,
            task_weights={"sts": 0.5}, gradient_accumulation_steps=2,
        )  # fmt: skip
        # Of 48, 21 and 13 rows two processes take 4, 2 (1.75) and 1 (1.08) each, one takes 8, 4 (3.5) and 2 (2.17).
        self.train(
            "proportional", rows=48, per_device_train_batch_size=four, task_batch_sizes="proportional",
            task_weights="inverse_batch_size", mixing="once",
        )  # fmt: skip
        # The third epoch has other weights than 1.
        dwa = {"task_weights": "dwa", "task_weights_options": {"temperature": 0.2}}
        self.train("dwa", rows=16, per_device_train_batch_size=four, **dwa)
        learned = {"task_weights": "imtl_l", "task_weights_options": {"learning_rate": 0.1}}
        self.train("imtl_l", rows=48, per_device_train_batch_size=own, **learned, **twice)
        self.train("row_sum", rows=48, per_device_train_batch_size=four, aggregator="row_sum")
        self.train("random_units", rows=48, per_device_train_batch_size=own, aggregator="random_units", **twice)
        # Four steps an epoch: all three tasks in two of them, two in one more, sst alone in the last one.
        leaving = {
            "rows": 48, "mixing": "once", "per_device_train_batch_size": four, "task_sampling": {"sst": "balanced"},
            "rows_per_epoch": {"sst": 0.6, "para": 20}, "redraw_rows": False,
        }  # fmt: skip
        self.train("leaving", aggregator="row_sum", **leaving)
        self.train("frozen", freeze="encoder", **leaving)
        freed = {"freeze": "encoder", "unfreeze": {3: 1, 6: "embeddings", 9: "none"}, "aggregator": "pcgrad"}
        groups = {"learning_rates": {"encoder": 0.005, "sst": 0.02}, "layer_decay": 0.5, "weight_decays": {"sts": 0.1}}
        self.train("freed", rows=48, per_device_train_batch_size=own, **freed, **groups, **twice)
        smart = {"regularizer": "smart", "smart_epsilon": 0.01, "proximal": "momentum"}
        self.train("smart", rows=48, per_device_train_batch_size=own, aggregator="pcgrad", **smart, **twice)
        self.compare_surgery(four, own, twice)
        self.compare_sharing(four)
        self.train("clipped", rows=48, per_device_train_batch_size=four, max_grad_norm=1.0)
        self.train("two_of_three", rows=48, per_device_train_batch_size=four, train_tasks=["sst", "sts"])
        trainer = self.trainer("evaluation", rows=8, per_device_eval_batch_size=4)
        trainer.evaluate()
        outputs = {task: trainer.predict(rows, task=task) for task, rows in self.rows["dev"].items()}
        self.recorded["evaluation"]["predicted"] = {
            task: (torch.from_numpy(output.predictions), output.metrics[f"test_{task}_loss"])
            for task, output in outputs.items()
        }

    def compare_surgery(self, four: int, own: int, twice: dict[str, int]) -> None:
        """PCGrad and GradVac with what a run may combine them with."""
        given = {"rows": 48, "aggregator": "pcgrad", "per_device_train_batch_size": four}
        self.train("pcgrad", **given, conflict_detail="tensors")
        self.train("pcgrad_sharded", **given, conflict_detail="tensors", gradient_reduction="sharded")
        self.train("pcgrad_2", **{**given, "per_device_train_batch_size": own}, **twice, max_grad_norm=0.1)
        self.train("pcgrad_3", **given, gradient_accumulation_steps=3)
        # Windows in which a task is missing from some rounds, and steps with one task alone.
        leaving = {
            "mixing": "once", "rows_per_epoch": {"sst": 0.6, "para": 20}, "redraw_rows": False,
            "gradient_accumulation_steps": 2, "gradient_smoothing": 0.5,
        }  # fmt: skip
        self.train("surgery_leaving", **{**given, "aggregator": "gradvac"}, **leaving)
        frozen = copy.deepcopy(self.model)
        frozen.bert.embeddings.requires_grad_(False)
        frozen.bert.encoder.layer[0].requires_grad_(False)
        self.train("surgery_frozen_layer", model=frozen, gradient_checkpointing=True, **given)
        if PEFT:
            self.train("surgery_lora", model=with_lora(copy.deepcopy(self.model)), **given)
        self.train("surgery_bf16", bf16=True, **given)

    def compare_sharing(self, four: int) -> None:
        """Rows with labels of two tasks, of which one has few: there are steps without any, and more processes."""
        train = self.rows["train"]["sst"]
        second = [{**row, "label": row["label"] % 2 if i % 6 == 0 else None} for i, row in enumerate(train)]
        tasks = [TASKS["sst"], Task("tone", "binary", ("sentence",), labels=("no", "yes"))]
        torch.manual_seed(5)
        model = MinBertForMultiTask(MinBertConfig(**{**self.model.config.to_dict(), "tasks": tasks}))
        given = {"rows": 48, "train": {"sst": train, "tone": second}, "share_rows": True}
        for aggregator, noise in (("sum", 1.0), ("pcgrad", None)):
            self.train(
                f"sharing_{aggregator}", model=copy.deepcopy(model), per_device_train_batch_size=four,
                aggregator=aggregator, neftune_noise_alpha=noise, **given,
            )  # fmt: skip

    def resume(self) -> None:
        """A run of three epochs, and its end again from a checkpoint in the middle of one, with AdamW, dropout and
        an aggregator that remembers.
        """
        # After the checkpoint of step 7, step 8 frees the embeddings.
        freed = {"freeze": "encoder", "unfreeze": {3: "embeddings", 7: "none"}}
        options = {
            **freed, "rows": 40, "per_device_train_batch_size": 4, "optim": "adamw_torch", "learning_rate": 1e-3,
            "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 7,
            "eval_strategy": "steps", "eval_steps": 7, "max_steps": 15,
            "aggregator": "gradvac", "gradient_smoothing": 0.5, "task_weights": "uncertainty",
        }  # fmt: skip
        whole = self.train("whole", model=self.other_model(seed=1), **options)
        folder = Path(whole.args.output_dir)
        if self.rank == 0:
            (folder / "checkpoint-15" / "rng_state_1.pth").unlink()
            (folder / "checkpoint-14" / "optimizer.pt").unlink()
        dist.barrier()
        torch.manual_seed(100 + self.rank)  # nothing of the first run may be needed
        self.train("resumed", resume=True, model=self.other_model(seed=2), **{**options, "output_dir": str(folder)})

    def other_model(self, seed: int) -> MinBertForMultiTask:
        """With dropout, and other weights for another seed."""
        config = copy.deepcopy(self.model.config)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1
        torch.manual_seed(seed)
        return MinBertForMultiTask(config)


def record(source: Path, target: Path, rank: int, processes: int) -> None:
    """Runs the scenarios as the process of this rank and writes `target/<rank>-of-<processes>.pt`.

    Args:
        source: a folder with a model and its tokenizer (`model/`) and rows by task (`rows.pt`).
        target: a folder for what was recorded, `{scenario: what}`, and for what runs leave.
        rank, processes: as in the environment.
    """
    AGGREGATORS.update(row_sum=RowSum, random_units=RandomUnits)
    scenarios = Scenarios(source, target, rank, processes)
    scenarios.compare()
    if processes == 2:
        scenarios.resume()
    torch.save(scenarios.recorded, target / f"{rank}-of-{processes}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()  # without it, some runs of several processes end by a signal
