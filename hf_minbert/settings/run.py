"""What a run needs beside its training arguments: the model, the tasks and their data."""

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
    """What a run needs beside its training arguments: the model, the tasks and their data."""

    model_name_or_path: str = key(
        MISSING,
        "The checkpoint of a text encoder, such as BERT or RoBERTa, or a model saved by this package: a folder or a "
        "Hub id.",
        resume="contents",
    )
    output_dir: str = key(MISSING, "The run's folder.", scope="start")
    data_dir: str | None = key(
        None,
        "The folder with the tasks' files; or `sample` for the sample that comes with the package, or `hub` for the "
        "tasks' datasets on the Hub. Tasks that name their data need none.",
        resume="contents",
        scope="machine",
    )
    tasks: list[str] | dict[str, Any] = key(
        ["sst", "para", "sts"],
        "The tasks the model has, in this order. Each gets a head. A list of names, or a mapping of name to fields of"
        " `Task` (see `hf_minbert.settings.tasks.get_tasks`), such as where its data lies.",
    )
    plugins: list[str] = key(
        [],
        "Modules that register heads, losses, poolings, aggregators and so on when they are imported: names, of files "
        "beside the recipe or in the working directory, or of installed modules. Their code runs.",
        resume="contents",
    )
    max_length: int | None = key(
        None,
        "Longest input in tokens; longer ones are cut. Unless given, the length that the model was trained for; of a "
        "plain encoder, all its positions. The saved model carries it, and what reads text with it cuts there too. "
        "With `objective: mlm` it is for that run alone.",
        travels=True,
    )
    hidden_dropout_prob: float | None = key(
        None,
        "Overrides the checkpoint's dropout on hidden states and before the heads.",
        travels=True,
    )
    attention_probs_dropout_prob: float | None = key(
        None, "Overrides the checkpoint's dropout on attention weights.", travels=True
    )
    private_layers: int | None = key(
        None,
        "How many of the encoder's last layers each task has for itself, a copy of the checkpoint's to begin with; "
        "the layers below are shared.",
    )
    attn_implementation: str = key(
        "sdpa",
        "`sdpa` or `eager`, or another of transformers' attention functions. An encoder of the library's that has no "
        "`sdpa` takes `eager` in its place. With `packing`, attention on a GPU is a fused kernel unless `eager` is "
        "asked for.",
        resume="free",
        handed_on=True,
    )
    model_revision: str | None = key(None, "Branch, tag or commit of a Hub checkpoint.", resume="contents")
    peft: dict[str, Any] | None = key(
        None,
        "Train an adapter and the heads, and leave the rest as it is: `{peft_type: LORA, r: 8, lora_alpha: 16, "
        "target_modules: [query, value]}`, options of the library peft under its names. `peft_type` is `LORA` (with "
        "`use_dora`, `use_rslora`), `LOHA`, `LOKR`, `OFT` or `IA3`; `target_modules` are names of the encoder's "
        "layers, or `all-linear`; unless given, those that make queries and values, of which some encoders make keys "
        "too. The run saves adapter and trained heads alone, beside the name of the model under "
        "them. Trained on without `peft`, that becomes one model with it; with the same `peft`, it goes on.",
    )
    cache_dir: str | None = key(
        None,
        "Where tokenized rows are kept, so that the next run with the same texts, tokenizer and `max_length` starts "
        "sooner, and answers of `teachers`. Unless given no rows are kept, and the answers in the run's folder.",
        resume="free",
        scope="machine",
    )
    strict_data: bool = key(
        False,
        "A blank label or text in training or dev data is an error instead of a dropped row.",
        resume="contents",
    )
    held_out: list[str] | dict[str, Any] | None = key(
        None,
        "Tasks, written as in `tasks`, whose dev and test rows are kept out of borrowed rows (see `sources` of a "
        "task) and of the texts of `objective: mlm`, beside those of `tasks`. Unless given, the package's tasks whose"
        " files lie in `data_dir`. The tasks of later stages are held out in any case.",
        resume="contents",
    )
    drop_shared_sentences: bool = key(
        False,
        "Also drop a borrowed row of which a single sentence stands in a dev or test row. They are only counted "
        "otherwise; a row that stands there whole is always dropped.",
        resume="contents",
    )
    select_on: float | None = key(
        None,
        "The share of each task's dev rows that choose the best model and stop the training early. The scores of "
        "`metrics.json`, the predictions and the report are of the other rows then, which have chosen nothing. The "
        "parts are the same for every seed. Unless given, all dev rows do both, and scores of the best model are a "
        "little too high.",
        objectives="tasks",
        handed_on=True,
    )
    calibrate: Calibrate = key(
        "none",
        "After training, fit on the rows that the model is scored on what its probabilities lack: `temperature`, a "
        "number for each task of kind `classes`, `binary` or `labels` that its outputs are divided by (Guo et al. "
        "2017), unless it is no better on rows that were not fitted. No answer changes. The model's config carries "
        "it. `calibration.json`, the report and the card have the calibration before and after, measured on rows that "
        "were not fitted.",
        resume="after",
        objectives="tasks",
    )
    tune_thresholds: ThresholdMetric | None = key(
        None,
        "After training, fit the probability above which a label is an answer, the second one of a binary task or "
        "each of kind `labels`, to its best `f1`, `accuracy` or `matthews` on the rows that the model is scored on, "
        "which then flatter it a little; "
        "`calibration.json` has the score on rows that were not fitted. The model's config carries it.",
        resume="after",
        objectives="tasks",
    )
    overwrite: bool = key(
        False,
        "Train into a folder that holds a run already, which deletes that run.",
        scope="start",
    )
    stages: list[dict[str, Any]] | None = key(
        None,
        "Runs that follow each other, a list with a mapping for each: its `name`, and the keys in which it differs "
        "from the rest of the recipe. Each begins with the model that the one before ended with (its best one, with "
        "`load_best_model_at_end`), and has its own folder in `output_dir`, where the last one's results end up too.",
        resume="free",
    )
    objective: Objective = key(
        "tasks",
        "What is trained: `tasks`; or `mlm`, masked language modelling, which pre-trains the encoder further without "
        "heads, and is scored by its perplexity on the texts of the dev splits, before and after, of all and of each "
        "task. Texts that are also in dev or test rows are left out. The folder is a checkpoint, from which the next "
        "run or stage takes encoder and pooler. Start from one with BERT's language modelling head, such as google-"
        "bert/bert-base-uncased; without it, as in all-MiniLM, the head starts from random numbers. Keys about "
        "several tasks, such as `aggregator`, have no effect.",
    )
    mlm_texts: list[str] = key(
        ["tasks"],
        "The texts of `objective: mlm`, a list: `tasks` for those of the training splits, or the path of a file with "
        "a text a line, looked for in `data_dir` and in the working directory. Each text is taken once.",
        objectives="mlm",
    )
    mlm_probability: float = key(
        0.15,
        "The share of tokens, or of words, that the model is asked for.",
        objectives="mlm",
    )
    mlm_whole_words: bool = key(False, "Ask for whole words, not for pieces of them.", objectives="mlm")
    mlm_order: TextOrder = key(
        "mixed",
        "`mixed`; or `sequence`, all epochs of the first task's texts, then those of the next task or file.",
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
