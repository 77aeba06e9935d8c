"""Writes recipes/README.md, the list of every key of a recipe, from the classes that read them.

python scripts/recipe_keys.py

Our own keys come with the help that stands in their class's docstring; those of transformers' `TrainingArguments`
with name, type and default, as they are in the version installed.
"""

from __future__ import annotations

import inspect
import json
import re
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
from hf_minbert.settings.study import STUDY_FILE, packaged_studies, read_study
from hf_minbert.settings.tasks import DataFile, Source, Task
from hf_minbert.training.aggregation.registry import AGGREGATORS
from hf_minbert.training.args import MultiTaskTrainingArguments
from hf_minbert.training.terms.registry import REGULARIZERS

OWN_TASK = """`tasks` can be a mapping of a task's name to these keys. For a task of the package they replace its own.

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

A label cell is a name from `labels` or its id, which is its position there, from 0. Names that are numbers
themselves, such as 1 to 5 for stars, are always read as names. A boolean, or text that spells one, is the label that
spells it in any capitals; where none of two labels does, false is 0 and true is 1, and a message says so. The names of
a `ClassLabel` column count, whatever their capitals. A row with a blank text or label is left out of
training and scoring, and a message says which (`strict_data: true` makes it an error); in prediction every row stays.
Of `kind: labels` a cell names any number of labels, with `label_delimiter` between them, and an empty one none; in
JSON, Parquet and datasets it may be a list of names or ids, and a null is a blank label. Without a column `id`, rows
are numbered from 0. A malformed cell is an error that names file and line.
"""

TAGS = """`kind: tags` is for entities, parts of speech and chunks: one of `labels` for each word of a text, such as
`labels: [O, B-PER, I-PER]`. [`examples/ner_and_intent`](examples/ner_and_intent.yaml) explains such a recipe.

- A `.conll` file has a word a line, its columns separated by tabs or spaces, and a blank line between sentences; lines
  with `-DOCSTART-` are skipped. `tokens` is its first column and `tags` its last; each has its number too, from 0:
  `columns: {tokens: "1", label: "3"}`.
- In `.jsonl`, `.parquet`, saved datasets and the Hub's, both are lists: `columns: {label: ner_tags}`. Tags are names
  or ids, and ids of a `ClassLabel` count by its names. In `.csv` both are text with spaces between words.
- A word of a list or of a column file is one word with one tag, whatever spaces stand within it (`10 000`).
- A tag that is none of the labels, more or fewer tags than words, a blank word, and to train or to score a sentence
  without a word are errors that name file and line. In prediction such a sentence is answered without tags.
- The first piece of a word has its label and gives its answer; other pieces have none. The loss is the mean over the
  labelled words of a batch; of a step with several batches or processes, the mean of theirs. SMART, R-Drop and
  `proximal` are means over the same words.
- Words behind `max_length`, and those that the tokenizer drops, are not read: they are counted in a message, count as
  wrong in scores (`unread_words`), and are answered with `O`, or the first label where there is no `O`.
- With `B-` and `I-` (or `E-`, `S-`, `L-`, `U-`) scores are by entity, `entity_f1` (the default metric),
  `entity_precision` and `entity_recall`, as conlleval counts: an `I-` behind `O` or another type begins an entity;
  and `accuracy` by word. Of other labels, `accuracy` and `macro_f1` by word.
- There is no `pooling`, and no pair. `task_sampling: balanced` and `teachers` are for other kinds. The tokenizer must
  be a fast one.
"""

SHARED = """With `share_rows: true`, tasks whose training rows are the same texts share them: those with the same
training files (or `dataset`) and text columns, without `sources`.
[`examples/shared_rows`](examples/shared_rows.yaml) explains such a recipe.

- The training file is read once and each text is tokenized once. In a round all these tasks take the same rows, and
  their heads read one forward pass of the encoder. A message names the groups. Other tasks, and those with layers of
  their own (`private_layers`), draw rows of their own.
- Each task's gradient is that of a pass of its own, up to rounding. One dropout mask of the encoder and one noise of
  NEFTune serve all tasks; the heads' dropouts are their own. With `aggregator: sum` there is one backward pass too;
  with an aggregator of rows there is one for each task, through the one graph.
- A label may be blank: the row counts for the other tasks. A task's loss is the mean over its labelled rows of a
  batch; several processes weigh theirs by how many they have, so that they do what one does on all. Where a batch
  has none, the task has no loss in that round, which counts as 0 in the mean over accumulated rounds. A row with a
  blank text, or without a label of any of the tasks, is left out (`strict_data: true` makes it an error). Of kind
  `labels` an empty cell of a text file is a row with none of the labels, and not blank. Dev rows are each task's own
  labelled ones.
- As the rows are the same, `task_batch_sizes` and `rows_per_epoch` must be, and `task_sampling` is `shuffle`.
- Teachers answer for labelled rows. A frozen encoder without dropout reads each row once for each task, and then no
  more. Shared passes are not recorded as CUDA graphs.
- Refused in one line: `regularizer` and `proximal`, whose passes are of one task; a `mixing` with one task a step;
  `torch_compile`; `compile_layers` with an aggregator of rows, as compiled layers are differentiated once; where a
  label is missing, `task_weights` that follow the losses, and on several processes `train_metrics: running`.
"""

A_FILE = """Wherever a recipe names a file of rows, in `files` of a task, of `held_out` and of `sources`, a mapping of
these keys can stand for its path. `minbert predict` and `evaluate` take the same for `--input`, as
`--read '{quotes: false}'`.

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

Unless `quotes` is `false`, files of cells follow RFC 4180: a cell in double quotes may hold separators, line breaks
and doubled quotes. A line break inside a cell is read as a space, and a message counts such rows. A quote that is not
closed, text after a closing quote and a row of another width are errors, where pandas guesses or skips. One fault is
valid CSV: a quote that was never closed meets one at the end of a later row, and the rows in between become one cell.
So a cell is refused if its lines could be rows by themselves, by the number and look of their cells; in a file of one
column every line could. `line_breaks: true` allows such cells.
"""

BORROWED = """What may stand in an entry of a task's `sources`, which names a `task`, `files` or a `dataset`:

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

The column names of these corpora are known; `columns` gives others. A borrowed row that occurs whole in a dev or test
row of any task, also of a later stage's, is dropped: compared without case, quotes, punctuation and spaces, and in
either order of a pair. A single sentence that occurs there is counted, and drops its row with
`drop_shared_sentences: true`; `held_out` names further tasks. A task's own training rows stay, and its dev and test
rows among them are counted. The counts are in `metrics.json`, under `leaks`.
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

A recipe is a YAML file of `key: value` lines. `minbert train` takes its path, or the name of one of those here, and
after it words that replace its lines:

```bash
minbert train cs224n/baseline data_dir=data learning_rate=2e-5 task_batch_sizes='{sts: 16}'
```

A key with dots reaches into a line and keeps the rest of it: `tasks.sst.head=mlp`, `tasks.sts.sources.0.rows=100`,
`stages.heads.max_steps=2`. A mapping is merged into the one that is there, and `null` takes a part away. What has no
line begins with its default, and in a stage with the recipe's line. A key for all stages changes a stage's own line
only if that line has the task, or the name, that it reaches into.

The scalars are those of YAML 1.2: `3e-5` is a number, `no` is a word, `null` is nothing. A key that is not below is
refused, with the nearest one that is; so is one that stands twice. A run's folder keeps its recipe, complete, as
`recipe.yaml`.
"""

STUDIES = """A study is a table: rows, each a recipe and the keys that it changes, and seeds. Those in
`reports` are the tables of five reports, for BERT-base, with their published scores;
[`reports/small`](reports/small.overrides.yaml) has what changes for a small checkpoint. Those in `comparisons` are our
own, on the small checkpoint. What came of all is in [results](results/README.md).
"""

STOCK = """## The trainer's keys

These are the fields of `TrainingArguments` in transformers {version}, whose documentation explains them. The defaults
are the ones in force here.
"""

NOT_TAKEN = """## Keys that are refused

A step of several tasks cannot honour these fields of `TrainingArguments`. Only the value that asks for nothing is
taken, and then the key can as well be left out.
"""


def docs_of(cls: type | Callable) -> dict[str, str]:
    """Name to help: of settings from their fields, else from the `Args:` of a docstring."""
    if is_dataclass(cls) and any("traits" in f.metadata for f in fields(cls)):
        return {f.name: f.metadata["help"] for f in fields(cls) if "traits" in f.metadata}
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(cls), re.MULTILINE | re.DOTALL)
    if found is None:
        return {}
    entries = re.split(r"^ {4}(\w+): ", found[1], flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


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
    if name == "files":
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
    return table(("key", "what it takes", "default", "what it does"), rows)


def options() -> str:
    """The table of what heads, poolings and losses take. An undocumented option is a KeyError."""
    rows = []
    for key, registry in (
        ("pooling", POOLINGS), ("head", HEADS), *(("loss", of_kind) for of_kind in LOSSES.values()),
    ):  # fmt: skip
        for name, builder in registry.items():
            does, docs = inspect.getdoc(builder).split("\n\n")[0].replace("\n", " "), docs_of(builder)
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
        own_keys(RunSettings, settings),
        "## How the tasks share a step",
        own_keys(MultiTaskTrainingArguments, ours),
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
            ("mapping", "what becomes of the labels"),
            [(f"`{name}`", " ".join(inspect.getdoc(mapping).split())) for name, mapping in MAPPINGS.items()],
        ),
        "### What stands on the encoder",
        "A task's `pooling`, `head` and `loss`, and what may stand in their `pooling_options`, `head_options` and "
        "`loss_options`: `sts: {pair_encoding: bi, pooling: mean, head: cosine, head_options: {mapping: relu}}`.",
        options(),
        STOCK.format(version=version),
        table(
            ("key", "what it takes", "default"),
            [(f"`{f.name}`", type_of(f.name, hints[f.name]), default_in_words(f)) for f in stock],
        ),
        NOT_TAKEN,
        table(("key", "why not"), [(f"`{name}`", reason) for name, (_, reason) in REFUSED.items()]),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
    print(f"{README} is written.")
