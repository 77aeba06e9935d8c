"""The settings of a run besides its training arguments: the model, the tasks and their data."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ..errors import MinBertError
from .keys import documented, key

Objective = Literal["tasks", "mlm"]
TextOrder = Literal["mixed", "sequence"]
Calibrate = Literal["none", "temperature"]
ThresholdMetric = Literal["f1", "accuracy", "matthews"]


@documented
@dataclass
class RunSettings:
    """The settings of a run besides its training arguments: the model, the tasks and their data."""

    model_name_or_path: str = key(
        MISSING,
        "The checkpoint to start from: a text encoder such as BERT or RoBERTa, or a model saved by this package. A "
        "folder or a Hub id.",
        resume="contents",
    )
    output_dir: str = key(MISSING, "The folder of the run.", scope="start")
    data_dir: str | None = key(
        None,
        "The folder with the files of the tasks; `sample` for the sample in the package; `hub` for datasets on the "
        "Hub.",
        resume="contents",
        scope="machine",
    )
    tasks: list[str] | dict[str, Any] = key(
        ["sst", "para", "sts"],
        "The tasks of the model, in the order of its heads: a list of names, or a mapping from names to fields of "
        "`Task`.",
    )
    plugins: list[str] = key(
        [],
        "Modules to import, which register heads, losses and other parts: installed modules, or files beside the "
        "recipe or in the working directory. Their code is executed.",
        resume="contents",
    )
    max_length: int | None = key(
        None,
        "Longest input in tokens; longer inputs are cut. The default is the length that the model was trained for, "
        "or all positions of a plain encoder.",
        travels=True,
    )
    hidden_dropout_prob: float | None = key(
        None,
        "Replaces the checkpoint's dropout on hidden states and before the heads.",
        travels=True,
    )
    attention_probs_dropout_prob: float | None = key(
        None, "Replaces the checkpoint's dropout on attention weights.", travels=True
    )
    private_layers: int | None = key(
        None,
        "Number of last encoder layers that each task has for itself, as copies of the checkpoint's layers. The "
        "layers below are shared.",
    )
    attn_implementation: str = key(
        "sdpa",
        "`sdpa`, `eager`, or another attention function of transformers. An encoder of transformers without `sdpa` "
        "uses `eager`.",
        resume="free",
        handed_on=True,
    )
    model_revision: str | None = key(None, "Branch, tag or commit of a checkpoint on the Hub.", resume="contents")
    peft: dict[str, Any] | None = key(
        None,
        "Trains an adapter and the heads instead of the whole model. Takes options of the peft library, such as "
        "`{peft_type: LORA, r: 8}`.",
    )
    cache_dir: str | None = key(
        None,
        "Folder for tokenized rows and teachers' answers, which later runs read again. Without it, rows are not "
        "kept, and answers are in the folder of the run.",
        resume="free",
        scope="machine",
    )
    strict_data: bool = key(
        False,
        "Makes a blank text or label in training or dev rows an error. Otherwise such rows are dropped.",
        resume="contents",
    )
    held_out: list[str] | dict[str, Any] | None = key(
        None,
        "Further tasks whose dev and test rows are kept out of borrowed rows and `mlm` texts. The default is the "
        "package's tasks with files in `data_dir`.",
        resume="contents",
    )
    drop_shared_sentences: bool = key(
        False,
        "Also drops borrowed rows that share a single sentence with a dev or test row. Otherwise these are only "
        "counted.",
        resume="contents",
    )
    select_on: float | None = key(
        None,
        "Share of each task's dev rows that choose the best model and stop training early. The scores are then of "
        "the other rows.",
        objectives="tasks",
        handed_on=True,
    )
    calibrate: Calibrate = key(
        "none",
        "After training, `temperature` fits a temperature for each task of kind `classes`, `binary` or `labels`, on "
        "the rows that score the model. No answer changes.",
        resume="after",
        objectives="tasks",
    )
    tune_thresholds: ThresholdMetric | None = key(
        None,
        "After training, fits the probability above which a label is an answer. It maximizes `f1`, `accuracy` or "
        "`matthews` on the rows that score the model.",
        resume="after",
        objectives="tasks",
    )
    overwrite: bool = key(
        False,
        "Deletes the run that is already in `output_dir`, and trains anew.",
        scope="start",
    )
    stages: list[dict[str, Any]] | None = key(
        None,
        "Stages that are trained one after the other, each from the model before it: a list of mappings with a "
        "`name` and the keys that differ.",
        resume="free",
    )
    objective: Objective = key(
        "tasks",
        "What is trained: `tasks`, or `mlm`, which continues to pre-train the encoder by masked language modelling "
        "on the texts of the tasks, without heads.",
    )
    mlm_texts: list[str] = key(
        ["tasks"],
        "The texts of `objective: mlm`, a list: `tasks` for the training texts of the tasks, and paths of files "
        "with one text in each line.",
        objectives="mlm",
    )
    mlm_probability: float = key(
        0.15,
        "Share of the tokens, or of the words, that are predicted.",
        objectives="mlm",
    )
    mlm_whole_words: bool = key(
        False, "Chooses whole words to predict instead of single word pieces.", objectives="mlm"
    )
    mlm_order: TextOrder = key(
        "mixed",
        "`mixed`, or `sequence`: all epochs on the texts of the first task, then all epochs on those of the next "
        "task or file.",
        objectives="mlm",
    )

    def __post_init__(self):
        for name, value in self.dropouts.items():
            if not 0 <= value < 1:
                raise MinBertError(f"`{name}` must be at least 0 and less than 1. Found {value}.")
        if self.select_on is not None and not 0 < self.select_on < 1:
            raise MinBertError(f"`select_on` must be more than 0 and less than 1. Found {self.select_on}.")
        if not 0 < self.mlm_probability < 1:
            raise MinBertError(f"`mlm_probability` must be more than 0 and less than 1. Found {self.mlm_probability}.")
        if not self.mlm_texts:
            raise MinBertError("`mlm_texts` is empty. Give `tasks`, the path of a text file, or both.")

    @property
    def dropouts(self) -> dict[str, float]:
        """The changes to the dropout in the checkpoint's config."""
        rates = {
            "hidden_dropout_prob": self.hidden_dropout_prob,
            "attention_probs_dropout_prob": self.attention_probs_dropout_prob,
        }
        return {name: rate for name, rate in rates.items() if rate is not None}
