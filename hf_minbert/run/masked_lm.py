"""The trainer of further pre-training. It predicts masked words, and its loss is a mean over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import EvalPrediction, Trainer
from transformers.trainer_utils import TrainOutput

from ..data.masking import TrainingTexts
from ..model.modeling_minbert import IGNORED, MinBertForMaskedLM
from ..training.aggregation.registry import make_aggregator
from ..training.args import MultiTaskTrainingArguments
from ..training.checkpoints import WholeCheckpoints, to_resume
from ..training.distributed import without_ddp
from ..training.gradients import Gradients, StaticGradients, collector
from ..training.graphs import GraphedSteps
from ..training.neftune import WordNoise
from ..training.pushing import PushesToHub
from ..training.terms.base import NoiseKey
from ..training.timeline import part
from ..training.trainer import MultiTaskTrainer, tokens_through

METRICS = ("loss", "perplexity")
TEXTS = "texts"  # the one task


class MaskedLMTrainer(WholeCheckpoints, PushesToHub, Trainer):
    """The stock Trainer with our own order of texts, and a perplexity over all masked tokens.

    Args:
        held_out: the number of texts in `eval_dataset` from each source, in their order.
        about: entries about the texts for the metrics of the training.
    """

    model: MinBertForMaskedLM
    args: MultiTaskTrainingArguments
    train_dataset: TrainingTexts
    get_optimizer_cls_and_kwargs = staticmethod(MultiTaskTrainer.get_optimizer_cls_and_kwargs)

    def __init__(self, *arguments: Any, held_out: Mapping[str, int], about: Mapping[str, Any], **given: Any):
        self._held_out, self._about = held_out, about
        super().__init__(*arguments, compute_metrics=self._metrics, **given)
        # A step's loss is a mean over its tokens, however many batches and processes they come in.
        self.model_accepts_loss_kwargs = True
        self.neftune_noise_alpha = None  # `compute_loss` adds the noise, and not the stock hook
        self._word_noise: WordNoise | None = None
        self._gradients: Gradients
        self._graphs: GraphedSteps | None
        # What is tied is not in a checkpoint either; unless told, the library warns that it is missing.
        self.model._keys_to_ignore_on_save = [*self.model.all_tied_weights_keys]

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **kwargs: Any) -> TrainOutput:
        """Trains. The metrics include the scores on held-out texts; `eval_<name>_before` are those before training."""
        resume_from_checkpoint = to_resume(resume_from_checkpoint, self.args)
        # Not by `evaluate` before training: only then do all processes have the first one's weights.
        self.args.eval_on_start = resume_from_checkpoint is None
        alpha, words = self.args.neftune_noise_alpha, self.model.get_input_embeddings()
        self._word_noise = WordNoise(alpha, [words]) if alpha else None
        self._make_step()
        output = super().train(resume_from_checkpoint, *others, **kwargs)
        if self._word_noise is not None:
            self._word_noise.remove()
        start = next(entry for entry in self.state.log_history if entry["step"] == 0 and "eval_loss" in entry)
        before = {f"{name}_before": value for name, value in _scores(start).items()}
        output.metrics.update(**_scores(self.evaluate()), **before, **self._about)
        return output

    @part("evaluation")
    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        return super().evaluate(*arguments, **named)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        texts = train_dataset or self.train_dataset  # which draws its order itself, and fills up the last step
        per_step = self.args.train_batch_size * self.args.world_size if self.args.world_size > 1 else 1
        return SequentialSampler(range(-(-len(texts) // per_step) * per_step))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        without_ddp(self.accelerator)

    def _make_step(self) -> None:
        """Sets up what collects the gradients, and what records the steps."""
        recorded = self.args.uses_graphs
        self._gradients = collector(self.model.parameters(), make_aggregator("sum"), static=recorded)
        self._graphs, self._batches = None, 0  # batches of the current step
        if recorded and isinstance(self._gradients, StaticGradients):
            self._graphs = GraphedSteps(self._forward, self._gradients)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Does the same as the stock method. The last batch of a step averages the gradients over processes.

        DDP regroups gradients after its first step. With three or more processes it then adds them in another order,
        and a resumed run would round differently from an uninterrupted one.
        """
        if not self.model.training:
            model.train()  # only if needed: it visits every module
        if callable(train := getattr(self.optimizer, "train", None)):  # schedule-free optimizers have two modes
            train()
        batch = self._prepare_inputs(inputs)
        given: dict[str, Any] = {"batch": batch, "words": num_items_in_batch}
        if self._word_noise is not None:
            size = self.model.config.word_size
            given["noise"] = self._word_noise.draw({**batch, "task": TEXTS}, size, self._key())
        if self._graphs is None:
            outputs, loss = self._forward(given)
            self._gradients.add(TEXTS, loss)
        else:
            outputs = self._graphs(TEXTS, given, 1.0)
        self._batches += 1
        if self.accelerator.sync_gradients:
            self._batches = 0
            self._gradients.combine(torch.Generator())  # a sum draws nothing
        return outputs["loss"].clone()  # the next replay overwrites it

    def _key(self) -> NoiseKey:
        args = self.args
        batches_before = self._batches * args.world_size + args.process_index
        return NoiseKey(args.seed, self.state.global_step, batches_before * args.per_device_train_batch_size)

    def _forward(self, given: Mapping[str, Any], factor: float = 1.0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The batch's share of the step's loss, detached, and scaled to be differentiated."""
        batch, noisy = given["batch"], nullcontext()
        if self._word_noise is not None:
            noisy = self._word_noise.added(batch, given["noise"])
        with self.compute_loss_context_manager(), noisy:
            model = cast(nn.Module, self.model_wrapped)
            loss = cast(torch.Tensor, self.compute_loss(model, batch, num_items_in_batch=given["words"]))
        scaler = self.accelerator.scaler
        return {"loss": loss.detach()}, loss if scaler is None else scaler.scale(loss)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """As the stock one: scales all gradients to `max_grad_norm` if they are longer. Returns their norm before."""
        self.accelerator.unscale_gradients()
        return self._gradients.clip(self.args.max_grad_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Does the same as the stock method, for the tokens that pass through the encoder."""
        return super().floating_point_ops(inputs) // inputs["input_ids"].numel() * tokens_through(inputs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Returns the loss of each text, summed over its masked tokens, and the number of masked tokens, both [B].

        The stock method would keep all logits, and its `eval_loss` would be a mean over batches.
        """
        inputs = self._prepare_inputs(inputs)
        asked = inputs["labels"] != IGNORED
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits
        places = inputs["predicted"]
        labels = F.pad(inputs["labels"].flatten(), (0, 1), value=IGNORED)[places]
        losses = F.cross_entropy(logits.float(), labels, reduction="none")  # 0 of fillers
        texts = (places // asked.shape[1]).clamp(max=len(asked) - 1)
        sums = losses.new_zeros(len(asked)).index_add_(0, texts, losses)
        return None, sums, asked.sum(dim=1)

    def _metrics(self, found: EvalPrediction) -> dict[str, float]:
        """`loss`, `perplexity` and, of several sources, that of each."""
        sums, counts = np.asarray(found.predictions, dtype=np.float64), np.asarray(found.label_ids)
        loss = sums.sum() / max(counts.sum(), 1)
        metrics = {"loss": float(loss), "perplexity": _perplexity(loss)}
        bounds = pairwise(np.cumsum([0, *self._held_out.values()]))
        for source, (start, end) in zip(self._held_out, bounds, strict=True):
            if len(self._held_out) > 1:
                mean = sums[start:end].sum() / max(counts[start:end].sum(), 1)
                metrics[f"{source}_perplexity"] = _perplexity(mean)
        return metrics


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # training has diverged, which is no reason to stop it here


def _scores(entry: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name.endswith(METRICS) and name.startswith("eval_")}
