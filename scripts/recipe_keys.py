"""Writes recipes/README.md, the list of every key of a recipe, from the classes that read them.

python scripts/recipe_keys.py

Our own keys are listed with the help in their class's docstring. Keys of transformers' `TrainingArguments` are listed
with name, type and default, from the installed version.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import transformers

from hf_minbert.data.mappings import MAPPINGS
from hf_minbert.data.rounds import MIXING
from hf_minbert.model.heads import HEADS
from hf_minbert.model.losses import LOSSES, options_of
from hf_minbert.model.pooling import JOINS, POOLINGS
from hf_minbert.settings.keys import default_of
from hf_minbert.settings.recipe import packaged_recipes, type_in_words
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.stock import REFUSED
from hf_minbert.settings.stock import STOCK as STOCK_KEYS
from hf_minbert.settings.study import STUDY_FILE, packaged_studies, read_study
from hf_minbert.settings.table import OURS, names
from hf_minbert.settings.tasks import DataFile, Source, Task
from hf_minbert.settings.teachers import OWN, Teacher
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.args import MultiTaskTrainingArguments
from hf_minbert.training.terms.registry import REGULARIZERS

OWN_TASK = """\
`tasks` can be a mapping from the name of a task to the keys below. For a task of the package, they replace its own.

```yaml
tasks:
  ticket:                                     # do two tickets report the same fault?
    kind: binary
    text_columns: [first, second]             # two columns make a pair
    labels: [different, same]                 # the second one is the "yes"
    files:
      train: [tickets/2023.csv, tickets/2024.jsonl]
      dev: tickets/dev.parquet
    columns: {first: summary, second: candidate, label: is_same}   # the task's names to those in the files
  sst:                                        # beside it, a task of the package as it is
data_dir: sample                              # the data of sst
```

**Labels.** A label is a name from `labels`, or its position there, from 0.

- If names are numbers themselves, such as 1 to 5 for stars, a number is always a name.
- A boolean is the label with that name, in upper or lower case. If no label has such a name, false is 0 and true is
  1, and a message says so. Text that spells a boolean counts as one.
- Values of a `ClassLabel` column are matched by their names, in upper or lower case.
- For `kind: labels`, a cell has any number of names with `label_delimiter` between them. An empty cell has no label.
  In JSON, Parquet and datasets, the cell may also be a list of names or positions; null is a blank label.

**Blank cells.** A row with a blank text or a blank label is left out of training and scoring, and a message counts
such rows. With `strict_data: true` it is an error. Prediction keeps every row.

**Ids.** Without a column `id`, rows are numbered from 0.

An error about a cell names the file and the line.
"""

TAGS = """Use `kind: tags` for entities, parts of speech and chunks. Each word of a text has one of `labels`, such as
`labels: [O, B-PER, I-PER]`. [`examples/ner_and_intent`](examples/ner_and_intent.yaml) explains such a recipe.

**Files.**

- A `.conll` file has one word in each line, columns separated by tabs or spaces, and a blank line between sentences.
  Lines with `-DOCSTART-` are skipped. `tokens` is the first column and `tags` the last. Columns can also be named by
  their number, from 0: `columns: {tokens: "1", label: "3"}`.
- In `.jsonl`, `.parquet` and datasets, tokens and tags are lists: `columns: {label: ner_tags}`. Tags are names or
  ids. The ids of a `ClassLabel` column are matched by their names.
- In `.csv`, tokens and tags are text with spaces between words.
- A word in a list or in a column file may contain spaces (`10 000`). It is still one word with one tag.

**Errors.** These are errors that name file and line: a tag that is not in `labels`, a different number of tags and
words, a blank word. A sentence without words is an error in training and scoring. In prediction it gets no tags.

**Training.**

- The first piece of a word has its label and gives its answer. Other pieces have none.
- The loss of a batch is the mean over its labelled words. For several batches or processes it is the mean of their
  losses. SMART, R-Drop and `proximal` are means over the same words.
- There is no `pooling`, and a text is never a pair. `task_sampling: balanced` and `teachers` are not available. The
  tokenizer must be a fast one.

**Unread words.** Words beyond `max_length` are not read, and neither are words that the tokenizer drops. A message
counts them. Their answer is `O`, or the first label if there is no `O`. In scores they count as wrong
(`unread_words`).

**Scores.** If labels start with `B-` and `I-` (or `E-`, `S-`, `L-`, `U-`), scores are by entity, as conlleval counts
them. An `I-` after `O` or after another type starts an entity. The metrics are `entity_f1` (the default),
`entity_precision` and `entity_recall`, and `accuracy` by word. For other labels they are `accuracy` and `macro_f1` by
word.
"""

SHARED = """\
With `share_rows: true`, tasks share their training rows if these are the same texts. Such tasks have the same
training files (or `dataset`), the same text columns and no `sources`.
[`examples/shared_rows`](examples/shared_rows.yaml) explains such a recipe.

**What is shared.**

- The training file is read once, and each text is tokenized once. A message names the groups of tasks.
- In a round, all tasks of a group take the same rows. Their heads read one forward pass of the encoder.
- Other tasks draw rows of their own, and so do tasks with `private_layers`.
- Teachers answer the labelled rows. A frozen encoder without dropout reads each row once for each task. Shared passes
  are not recorded as CUDA graphs.

**Gradients.** Each task's gradient is that of a separate pass, up to rounding. All tasks share one dropout mask of
the encoder and one noise of NEFTune. Each head has its own dropout. With `aggregator: sum` there is one backward
pass. An aggregator of separate gradients needs one backward pass for each task.

**Missing labels.**

- A row may lack the labels of some tasks. It then counts for the other tasks.
- The loss of a task is the mean over its labelled rows of a batch. Several processes weigh their losses by these
  numbers, so that they compute what one process computes on all rows.
- If a batch has no labelled row of a task, the task has no loss in that round. This counts as 0 in the mean over
  accumulated rounds.
- A row is left out if its text is blank or if it has no label at all. With `strict_data: true` this is an error.
- For `kind: labels`, an empty cell of a text file is a row without labels. It is not a missing label.
- Dev rows of a task are its own labelled rows.

**Restrictions.** `task_batch_sizes` and `rows_per_epoch` must be the same for these tasks, and `task_sampling` must
be `shuffle`. The following are refused:

- `regularizer` and `proximal`, whose passes are of one task;
- a `mixing` with one task in each step;
- `torch_compile`;
- `compile_layers` with an aggregator of separate gradients;
- if labels are missing: `task_weights` that follow the losses, and `train_metrics: running` on several processes.
"""

A_FILE = """\
A recipe names files of rows in `files` of a task, of `held_out` and of `sources`. The ending of a file says how
it is read: `.csv`, `.tsv`, `.jsonl`, `.json`, `.parquet` or `.conll`. A `.csv` file is separated by tabs if its header
has one, otherwise by commas, otherwise by semicolons. A folder is one of `Dataset.save_to_disk`.

A mapping of the keys below can replace the path of a file. `minbert predict` and `minbert evaluate` take the same keys
for their `--input`, for example `--read '{quotes: false}'`.

```yaml
tasks:
  mrpc:                                       # GLUE's files, as they are
    kind: binary
    text_columns: [first, second]
    labels: [different, same]
    files:
      train: {path: msr_paraphrase_train.txt, quotes: false}
      dev: {path: msr_paraphrase_test.txt, quotes: false}
    columns: {first: "#1 String", second: "#2 String", label: Quality}
```

Unless `quotes` is `false`, files of cells follow RFC 4180. A cell in double quotes may contain separators, line
breaks and doubled quotes. A line break inside a cell is read as a space, and a message counts such rows.

These are errors: a quote that is not closed, text after a closing quote, and a row with another number of cells.

One mistake is valid CSV. If a quote is never closed, it ends at a quote in a later row, and the rows between them
become one cell. Therefore a cell is refused if its lines could be rows themselves, by the number and the look of
their cells. In a file with one column, every line could be a row. `line_breaks: true` accepts such cells.
"""

BORROWED = """Each entry of `sources` names a `task`, `files` or a `dataset`:

```yaml
tasks:
  para:
    sources:
      - files: {path: mrpc-train.tsv, quotes: false}                       # quotes are ordinary characters there
        columns: {sentence1: "#1 String", sentence2: "#2 String", label: Quality}
  sts:
    sources:
      - {task: para, mapping: paraphrase_to_score, rows: 10000}            # scores drawn from [4, 5] and [0, 4]
      - {files: sick-train.tsv, mapping: relatedness_to_score}             # 1 to 5 becomes 0 to 5
      - {files: snli_1.0_train.jsonl, mapping: nli_to_score}               # votes 0, 3 and 5, averaged
  sst: {sources: [{files: yelp.csv, mapping: stars_to_classes, fraction: 0.1}]}
```

The column names of these corpora are known. `columns` gives other names. The scores of `paraphrase_to_score` are drawn
once for each row, by the run's seed. `nli_to_score` reads the votes from the column `annotator_labels`, which
has a list in each row. Blanks in the list are skipped.

**Leaks.** A borrowed row is dropped if the whole row occurs in a dev or test row of any task, also of a later stage.
The comparison ignores case, quotes, punctuation, spaces and the order of a pair. A row that shares only one sentence
is counted. With `drop_shared_sentences: true` it is dropped too. `held_out` names further tasks to compare with.

The training rows of the task itself are kept. Those that are also dev or test rows are counted. All counts are in
`metrics.json`, under `leaks`.
"""

TEACHERS = """An entry of `teachers` is a saved model, or a recipe that `minbert train` trains before the student:

```yaml
teachers:
  - runs/ensemble                                                     # a folder, or a Hub id
  - {recipe: cs224n/baseline, keys: {tasks.sst.pooling: mean}, seeds: 2}
  - {recipe: cs224n/baseline, name: large, keys: {model_name_or_path: google-bert/bert-large-uncased}}
```

[Distillation](../docs/regularizers.md#distillation) has examples. If several teachers have the same task, the mean of
their answers is used.

**Runs.** A teacher that is trained here is a run in `OUTPUT_DIR/teachers/NAME/seed-N`, in a process of its own.
`--jobs 2` trains two at a time. A teacher leaves its model, log and scores, and no checkpoint.

**Recipes.** The command reads a teacher's recipe once, at its start. It writes a copy as `teachers/NAME.yaml` beside
the run's `recipe.yaml`, which names the copy. Move both together to train the same model elsewhere. `minbert publish`
uploads both. A recipe of the package keeps its name and is not copied.

**Interruption.** The same command continues. If the student had begun already, add `resume_from_checkpoint=true`.

- A finished teacher is not trained again. An interrupted teacher continues from its checkpoint.
- A failed teacher stops the command with its reason. The next command tries it again.
- A teacher whose recipe has changed is refused. `overwrite=true` trains it anew and keeps the others.

**Sharing.** In `minbert study` and `minbert search`, all rows, seeds and trials with the same teacher share it. It is
in the folder `teachers` of the study or search. A launcher cannot train teachers: train them first by the command
without the launcher.

**Keys.** A teacher's recipe says how the teacher is trained. `keys` of the entry replace its lines. The student's
recipe also replaces some of them:

- keys about the checkpoint, the data and the machine: {keys};
- the trainer's keys about the machine, such as `use_cpu`;
- where the rows of a task are, if both recipes have the task.

If `keys` and the student's recipe have the same key, `keys` count. `plugins` of both recipes are loaded. The dev and
test rows of the student's tasks are kept out of what a teacher borrows.

**Tasks.** Kind, labels, range and text columns of a teacher's tasks must be those of the student. This is checked
before anything is trained.

**Answers** are kept in `cache_dir`, or in `OUTPUT_DIR/teachers/answers`. Their name is a hash of the teacher's
weights, config and tokenizer, the task, the length and the texts. Another student, seed or resumed run reads them.

**Rows without labels** are learned from the teachers' answers alone. There are three sources:

- the files in `unlabelled` of a task; rows that are also dev or test rows are dropped, as borrowed rows are;
- training rows of the task with a blank label;
- `unlabelled_pairs`: new pairs of the task's sentences.

Beside its batch of labelled rows, a round has a batch of such rows. The labelled batches are the same as without
them. The ratio of both kinds is that of all training rows, but a round has at least one row without a label. The loss
is the mean over all these rows. For a row without a label, it is the divergence from the teachers with weight 1. With
`distill_weight: 0`, the weight is 0.

**New pairs.** Half of them join a first sentence with a second sentence that is near it. Nearness is the cosine of
mean-pooled states of the checkpoint that the run starts from. The other half is drawn at random. No new pair is a
training, dev or test row. The pairs depend on the checkpoint and the texts, not on `seed`. They are kept beside the
answers, and all students share both.
"""

README = Path(__file__).parents[1] / "recipes" / "README.md"
MANY = 12  # names that a table's cell takes
REGISTRIES = {
    "mixing": [*MIXING], "aggregator": [*AGGREGATORS, "torchjd.UPGrad and so on"],
    "regularizer": ["none", *REGULARIZERS], "head": [*HEADS],
    "mapping": [*MAPPINGS],
    "pooling": [*POOLINGS], "join": [*JOINS],
    "loss": [*dict.fromkeys(name for of_kind in LOSSES.values() for name in of_kind)],
}  # fmt: skip

HEAD = """# Recipes

<!-- Written by scripts/recipe_keys.py. Edit that, or the docstrings that it reads, and run it again. -->

A recipe is a YAML file with lines of the form `key: value`. `minbert train` takes its path, or the name of a recipe
of the package. Further arguments replace lines of the recipe:

```bash
minbert train cs224n/baseline data_dir=data learning_rate=2e-5 task_batch_sizes='{sts: 16}'
```

**Keys with dots** change a part of a line: `tasks.sst.head=mlp`, `tasks.sts.sources.0.rows=100`,
`stages.heads.max_steps=2`. A mapping is merged into the existing one. `null` removes a part. A key that the recipe
does not have starts with its default, or in a stage with the recipe's line.

If a recipe has stages, `max_steps=2` changes the recipe, and every stage that has `max_steps` itself. A key with dots
changes a stage only if the stage has that part, such as the task.

**Values** are those of YAML 1.2: `3e-5` is a number, `no` is a word, `null` is nothing.

**Mistakes.** An unknown key is refused, and the message names the nearest known key. A key that occurs twice is
refused.

The folder of a run contains its complete recipe as `recipe.yaml`.
"""

STUDIES = """\
A study is a table of rows. Each row is a recipe with changed keys, and is trained with several seeds. The studies in
`reports` are the tables of five reports, for BERT-base, with their published scores.
[`reports/small`](reports/small.overrides.yaml) changes them for a small checkpoint. The studies in `comparisons` are
our own, for the small checkpoint. [Results](results/README.md) shows what was found.
"""

MODEL = """\
Some of these keys are explained in more detail on other pages:

- [Tasks and data](../docs/data.md): `data_dir`, `tasks`, `held_out`, `drop_shared_sentences`;
- [Evaluating and predicting](../docs/predicting.md): `max_length`, `calibrate`, `tune_thresholds`;
- [Adapters](../docs/adapters.md): `peft`;
- [Stages and pre-training](../docs/stages.md): `stages`, `objective`, `mlm_texts`;
- [Studies](../docs/studies.md#studies): `select_on`.
"""

SHARED_STEP = """\
Some of these keys are explained in more detail on other pages:

- [Mixing and gradient surgery](../docs/mixing.md): batches, weights of losses, frozen layers, aggregators;
- [Regularizers](../docs/regularizers.md): `regularizer`, `smart_*`, `teachers`, `proximal`;
- [Speed and several GPUs](../docs/speed.md): `packing`, `cuda_graphs`, `compile_layers`.
"""

STOCK = """## The trainer's keys

These keys are fields of `TrainingArguments` in transformers {version}. Its documentation explains them. The defaults
are those of this package.
"""

NOT_TAKEN = """## Keys that are refused

These fields of `TrainingArguments` do not work with several tasks in a step. Only the value that switches them off is
accepted.
"""


def docs_of(cls: type | Callable) -> dict[str, str]:
    """Name to help: of settings from their fields, else from the `Args:` of a docstring."""
    if is_dataclass(cls) and any("traits" in f.metadata for f in fields(cls)):
        return {f.name: f.metadata["help"] for f in fields(cls) if "traits" in f.metadata}
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(cls), re.MULTILINE | re.DOTALL)
    if found is None:
        return {}
    entries = re.split(r"^ {4}(\w+): ", found[1], flags=re.MULTILINE)[1:]
    texts = [" ".join(text.split()) for text in entries[1::2]]
    return {name: text[:1].upper() + text[1:] for name, text in zip(entries[::2], texts, strict=True)}


def first_paragraph(documented: type | Callable) -> str:
    return " ".join(inspect.getdoc(documented).split("\n\n")[0].split())


def default_in_words(field: Field) -> str:
    value = default_of(field)
    if value is MISSING:
        return "(required)"
    value = value.value if isinstance(value, Enum) else value
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)}`"


def type_of(name: str, hint: Any) -> str:
    if name in REGISTRIES:
        return f"one of {', '.join(REGISTRIES[name])}"
    options = [option for option in typing.get_args(hint) or [hint] if option is not type(None)]
    if options == [tuple[float, float]]:
        return "two numbers like [0, 5] or null"
    if hint == float | list[float]:
        return "a number, or a list of numbers like [0.5, 0.4]"
    if name in ("files", "unlabelled"):
        files = "a path, a mapping like {path: a.tsv, quotes: false}, or a list of them"
        return (
            f"a mapping of train, dev and test to {files}" if typing.get_origin(hint) is dict else f"{files}, or null"
        )
    if hint == tuple[Source, ...]:
        return "a list of mappings like [{task: para}]"
    words = type_in_words(list[str] if hint == tuple[str, ...] else hint)
    if not name.startswith(("task_", "rows_per_")):  # the example is a task's
        words = words.replace(" like {sts: ...}", "")
    names = re.search(r"one of ([^ ,]+(?:, [^ ,]+)*)", words)
    if names and len(names[1].split(", ")) > MANY:
        words = words.replace(names[1], f"{', '.join(names[1].split(', ')[:3])} and so on")
    return words.removesuffix(" or one of ")  # the empty text of `pair_encoding`, which means that none is given


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def own_keys(cls: type, names: list[str]) -> str:
    """The table of the fields of ours. An undocumented one is a KeyError."""
    hints, docs, by_name = typing.get_type_hints(cls), docs_of(cls), {f.name: f for f in fields(cls)}
    rows = [(f"`{name}`", type_of(name, hints[name]), default_in_words(by_name[name]), docs[name]) for name in names]
    return table(("key", "type or values", "default", "what it does"), rows)


def options() -> str:
    """The table of what heads, pooling methods and losses take. An undocumented option is a KeyError."""
    rows = []
    for key, registry in (
        ("pooling", POOLINGS), ("head", HEADS), *(("loss", of_kind) for of_kind in LOSSES.values()),
    ):  # fmt: skip
        for name, builder in registry.items():
            does, docs = first_paragraph(builder), docs_of(builder)
            # A loss documents its options alone; a class may document further arguments.
            taken = "<br>".join(f"`{option}`: {docs[option]}" for option in options_of(builder))
            rows.append((f"`{key}: {name}`", does, taken))
    return table(("choice", "what it is", "its options"), rows)


def recipe_lists() -> str:
    """For each folder a table of its recipes, each with the first sentence of the comment at its top."""
    folders: dict[Path, list[tuple[str, ...]]] = {}
    for name, path in packaged_recipes().items():
        comment = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
        text = " ".join(line.removeprefix("#").strip() for line in comment[0].split("\n#\n")[0].splitlines())
        row = (f"[`{name}`]({name}.yaml)", re.split(r"(?<=[.:]) ", text)[0].rstrip(":.") + ".")
        folders.setdefault(Path(name).parent, []).append(row)
    parts = []
    for folder, rows in sorted(folders.items()):  # those outside any folder come first, under no heading
        about = (README.parent / folder / "README.md").is_file()
        name = f"[{folder.as_posix()}]({folder.as_posix()}/README.md)" if about else folder.as_posix()
        parts += [f"### {name}"] if folder.parts else []
        parts.append(table(("recipe", "what it is"), rows))
    return "\n\n".join(parts)


def about_teachers() -> str:
    """`TEACHERS` with the keys that a teacher takes from the student's recipe, those of the stock trainer in words."""
    keys = (*names(among=OURS, of_teachers=True), *names(among=STOCK_KEYS, handed_on=True))
    listed = ", ".join(f"`{name}`" for name in dict.fromkeys(keys) if name not in OWN)
    (line,) = (line for line in TEACHERS.splitlines() if "{keys}" in line)
    filled = line.replace("{keys}", listed)
    return TEACHERS.replace(line, textwrap.fill(filled, 119, subsequent_indent="  ", break_on_hyphens=False))


def study_list() -> str:
    rows = [(f"[`{name}`]({name}{STUDY_FILE})", f"{read_study(name).title}.") for name in packaged_studies()]
    return table(("study", "what it is"), rows)


def render() -> str:
    """The whole of recipes/README.md."""
    ours = [name for name in docs_of(MultiTaskTrainingArguments) if name not in REFUSED]
    settings = [f.name for f in fields(RunSettings)]
    stock = [f for f in fields(MultiTaskTrainingArguments) if f.init and f.name not in {*ours, *settings, *REFUSED}]
    hints = typing.get_type_hints(MultiTaskTrainingArguments)
    version = ".".join(transformers.__version__.split(".")[:2])
    parts = [
        HEAD,
        "## Recipes of the package",
        recipe_lists(),
        "### Studies",
        STUDIES,
        study_list(),
        "## Model, tasks and data",
        MODEL,
        own_keys(RunSettings, settings),
        "## How the tasks share a step",
        SHARED_STEP,
        own_keys(MultiTaskTrainingArguments, ours),
        "### Teachers",
        about_teachers(),
        table(("key of an entry", "what it does"), [(f"`{name}`", text) for name, text in docs_of(Teacher).items()]),
        "## A task of your own",
        OWN_TASK,
        own_keys(Task, [f.name for f in fields(Task) if f.name != "name"]),
        "### A tag for each word",
        TAGS,
        "### Rows with labels of several tasks",
        SHARED,
        "### How a file is read",
        A_FILE,
        own_keys(DataFile, [f.name for f in fields(DataFile)]),
        "### Borrowed rows",
        BORROWED,
        own_keys(Source, [f.name for f in fields(Source)]),
        table(
            ("mapping", "how it maps the labels"),
            [(f"`{name}`", first_paragraph(mapping)) for name, mapping in MAPPINGS.items()],
        ),
        "### Pooling, heads and losses",
        "These are the choices for `pooling`, `head` and `loss` of a task. Each takes its options in "
        "`pooling_options`, `head_options` or\n`loss_options`, for example "
        "`sts: {pair_encoding: bi, pooling: mean, head: cosine, head_options: {mapping: relu}}`.\n"
        "[Heads and losses](../docs/heads.md) says which to choose.",
        options(),
        STOCK.format(version=version),
        table(
            ("key", "type or values", "default"),
            [(f"`{f.name}`", type_of(f.name, hints[f.name]), default_in_words(f)) for f in stock],
        ),
        NOT_TAKEN,
        table(("key", "why not"), [(f"`{name}`", reason) for name, (_, reason) in REFUSED.items()]),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
    print(f"{README} is written.")
