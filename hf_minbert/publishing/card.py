"""The model card: what the model's folder says, in the words of the Hub's metadata and in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..data.encoding import unknown_in_words
from ..evaluation.calibration import MEASURES
from ..pretrained.weights import MODEL
from ..settings.metrics import metrics_of
from ..settings.recipe import recipe_text
from ..settings.tasks import Task
from ..settings.wording import counted
from .demo import examples_of
from .export_classifier import THRESHOLD
from .files import ADAPTER_CONFIG, PLOTS, Upload, is_listed, is_on_hub, portable
from .saved import SavedModel

#: What is known of the package's tasks beyond their numbers.
LIMITS = {
    "sst": "Made for sentences of English film reviews: how other texts, irony or whole reviews fare is not measured. "
    "Neighbouring classes are often confused.",
    "para": "Made for questions that people asked on Quora: other kinds of sentences are not measured. Questions that "
    "share most words are the hard ones, in either direction.",
    "sts": "Made for short English sentences (captions, headlines, forum posts). The number says how alike they are "
    "in meaning, not whether a sentence is true or follows from the other, and may leave the range a little.",
    "cfimdb": "Made for whole film reviews with a clear tendency: there is no neutral answer.",
    "nli": "Made for pairs that were written for the purpose: such data are known to give the answer away in part by "
    "the second sentence alone.",
    "reviews": "The stars of a review stand for its sentiment: a text and its stars do not always agree.",
}  # fmt: skip
MINILM_NOTE = (
    "This model began with all-MiniLM-L6-v2, whose authors trained it on more than a billion pairs, Quora's duplicate "
    "questions and natural language inference (SNLI, MultiNLI) among them. It has seen such pairs before: its scores "
    "on paraphrases and inference cannot be set beside those of models that began with plain BERT."
)
MERGED = "merge"  # what `minbert merge` calls its way, in merge.json


def model_card(
    saved: SavedModel,
    repo_id: str,
    uploads: Iterable[Upload],
    *,
    base_model: str | None = None,
    license: str | None = None,
) -> str:
    """The text of `README.md`.

    Args:
        repo_id: where the model will be found.
        uploads: the files beside the card; plots among them are shown.
        base_model: the Hub id of what it was trained from, where the folder does not know it.
        license: an identifier of the Hub, such as `apache-2.0`; who publishes must know it.
    """
    uploads = list(uploads)
    paths, under = [upload.path for upload in uploads], _under_adapter(uploads)
    bases = [under] if under else [base_model] if base_model else saved.bases()
    sections = [
        _head(saved, repo_id),
        _tasks(saved),
        _use_adapter(saved, repo_id, under) if under else _use(saved, repo_id, paths),
        _scores(saved),
        _calibration(saved),
        _limits(saved),
        _data(saved, bases),
        _training(saved, bases),
        _plots(paths),
        _licence(license),
    ]
    metadata = _metadata(saved, repo_id, bases, license, adapter=under is not None)
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _under_adapter(uploads: Iterable[Upload]) -> str | None:
    """The model that an adapter lies on; `None` if the files are no adapter's."""
    config = next((upload.read() for upload in uploads if upload.path == ADAPTER_CONFIG), None)
    return None if config is None else json.loads(config)["base_model_name_or_path"]


# ---- For machines ------------------------------------------------------------------------------------------------


def _metadata(saved: SavedModel, repo_id: str, bases: list[str], license: str | None, adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    on_hub = [base for base in bases if is_on_hub(base)]
    results = _eval_results(saved)
    several = saved.merge.get("method", MERGED) != MERGED
    relation = "merge" if several else "adapter" if adapter else "finetune"
    known = set(saved.tasks) <= set(LIMITS)
    data = ModelCardData(
        language="en" if known else None,
        license=license,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=_pipeline(next(iter(saved.tasks.values()))) if saved.tasks else "fill-mask",
        tags=["minbert", "multi-task", *saved.tasks],
        base_model=on_hub[0] if len(on_hub) == 1 else on_hub or None,
        base_model_relation=relation if on_hub else None,
        datasets=[*dict.fromkeys(data.name.split(" (")[0] for data in saved.data() if data.on_hub)] or None,
        metrics=[*dict.fromkeys(result.metric_type for result in results)] or None,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml(line_break="\n").strip()


def _eval_results(saved: SavedModel) -> list[Any]:
    from huggingface_hub import EvalResult

    own = {data.task: data for data in saved.data()}
    results = []
    for name, task, metric, value in _measured(saved):
        data = own.get(name)
        there = data is not None and data.on_hub
        results.append(
            EvalResult(
                task_type=_pipeline(task),
                task_name=name,
                dataset_type=data.name.split(" (")[0] if there else name,
                dataset_name=f"{name}, {data.name}" if data else name,
                dataset_config=data.config if data else None,
                dataset_split=data.dev if data else "dev",
                dataset_revision=data.revision if there else None,
                metric_type=metric,
                metric_name=metric,
                metric_value=value,
            )
        )
    return results


def _measured(saved: SavedModel) -> list[tuple[str, Task, str, float]]:
    """Task, its metric and the value, of those that were measured."""
    return [
        (name, task, metric, saved.metrics[f"eval_{name}_{metric}"])
        for name, task in saved.tasks.items()
        for metric in metrics_of(task)
        if saved.metrics.get(f"eval_{name}_{metric}") is not None
    ]


# ---- For people --------------------------------------------------------------------------------------------------


def _head(saved: SavedModel, repo_id: str) -> str:
    names = ", ".join(saved.tasks)
    count = len(saved.tasks)
    family = saved.config.get("family", "bert") if saved.config else "bert"  # folders before 0.2 do not say
    kind = "BERT" if family == "bert" else f"`{family}`"
    what = {
        0: f"An encoder ({kind}), pre-trained further by predicting masked words.",
        1: f"An encoder ({kind}), fine-tuned on one task: {names}.",
    }.get(count, f"One encoder ({kind}), fine-tuned on {count} tasks at once, with a head for each: {names}.")
    size = f"{saved.config['num_hidden_layers']} layers of {saved.config['hidden_size']}" if saved.config else ""
    trained = f"{size}, trained" if size else "Trained"
    return f"# {repo_id.split('/')[-1]}\n\n{what}{_made(saved.merge)} {trained} with hf_minbert."


def _made(merge: Mapping[str, Any]) -> str:
    """How a model that was merged came about; empty for another."""
    if not merge:
        return ""
    if "base" in merge:
        numbers = ", ".join(f"{name} {merge[name]:g}" for name in ("scale", "density", "seed") if name in merge)
        return f" Its encoder is the base plus what several models learned from there ({merge['method']}: {numbers})."
    return {
        "ensemble": " Each task has the encoder of the model that it was trained in.",
        MERGED: " It was trained as an adapter, which is part of the weights here.",
    }.get(merge["method"], f" An average ({merge['method']}) of several models.")


def _line(label: str) -> str:
    """A label as it can stand in a table and a comment."""
    return " ".join(label.split())


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [[*header]]
    lines += [["---"] * len(lines[0]), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tasks(saved: SavedModel) -> str:
    rows = []
    for name, task in saved.tasks.items():
        low, high = task.range or (0, 0)
        kind = task.traits.words.format(count=len(task.labels), low=low, high=high)
        labels = ", ".join(f"{number} {_line(label)}" for number, label in enumerate(task.labels))
        together = {"single": "a sentence", "cross": "two sentences, read together", "bi": "two sentences, read apart"}
        rows.append((f"`{name}`", together[task.pair_encoding], kind, labels or f"{low:g} to {high:g}"))
    return "## Tasks\n\n" + _table(("task", "input", "answer", "labels"), rows) if rows else ""


def _use(saved: SavedModel, repo_id: str, paths: list[str]) -> str:
    blocks = ["## Use", "Without hf_minbert, with transformers 5.17 or newer (the model brings its own code):"]
    if not saved.tasks:
        return "\n\n".join([*blocks, f"```python\n{_loading(repo_id, 'AutoModelForMaskedLM')}\n```"])
    calls = [_loading(repo_id, "AutoModelForSequenceClassification"), "model.eval()", ""]
    calls += [line for task in saved.tasks.values() for line in _call(task)]
    blocks.append(_code("python", *calls))
    single = next((name for name, task in saved.tasks.items() if not task.is_pair), None)
    if single:
        pipeline = _pipeline(saved.tasks[single])
        merged = ', aggregation_strategy="simple"' if saved.tasks[single].traits.is_tags else ""
        blocks += ["A tool that knows one task sees the one that is active:", _code("python",
            "from transformers import pipeline", "",
            f'classify = pipeline("{pipeline}", model="{repo_id}", trust_remote_code=True,',
            f'                    model_kwargs={{"active_task": "{single}"}}{merged})',
            f'print(classify("{_texts(saved.tasks[single])[0]}"))')]  # fmt: skip
    if "custom_pipelines" in saved.config:
        pair = ", ".join(f'"{text}"' for text in _texts(next(iter(saved.tasks.values()))))
        asked = f'"{_texts(saved.tasks[single])[0]}"' if single else f"[({pair})]"
        blocks += ["All tasks at once:", _code("python",
            "from transformers import pipeline", "",
            f'ask = pipeline("minbert-multitask", model="{repo_id}", trust_remote_code=True)',
            f"print(ask({asked}))")]  # fmt: skip
    name, task = next(iter(saved.tasks.items()))
    given = ", ".join(f'["{text}"]' for text in _texts(task))
    blocks += ["With hf_minbert:", _code("python",
        "from hf_minbert import Predictor", "",
        f'predictor = Predictor.from_pretrained("{repo_id}")', f'print(predictor("{name}", {given}))')]  # fmt: skip
    if "recipe.yaml" in paths:
        blocks += ["To train it further, on one GPU or several:", _code("bash",
            f"hf download {repo_id} recipe.yaml --local-dir .",
            f"minbert train recipe.yaml model_name_or_path={repo_id} data_dir=FOLDER output_dir=runs/further",
            "accelerate launch --multi_gpu --num_processes 2 -m hf_minbert train recipe.yaml \\",
            f"    model_name_or_path={repo_id} data_dir=FOLDER output_dir=runs/further")]  # fmt: skip
    return "\n\n".join(blocks)


def _use_adapter(saved: SavedModel, repo_id: str, under: str) -> str:
    name, task = next(iter(saved.tasks.items()))
    given = ", ".join(f'["{text}"]' for text in _texts(task))
    calls = [line for task in saved.tasks.values() for line in _call(task)]
    blocks = [
        "## Use",
        f"This is an adapter of the library peft, with the heads that were trained with it; it lies on `{under}`. "
        "Without hf_minbert, with transformers 5.17 or newer (the adapter brings the code):",
        _code(
            "python",
            "from peft import PeftModel",
            "from transformers import AutoConfig, AutoTokenizer",
            "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
            "",
            f'name, base = "{repo_id}", "{under}"',
            "tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
            "config = AutoConfig.from_pretrained(name, trust_remote_code=True)",
            # The Auto classes would look for the code beside the base model.
            'MinBert = get_class_from_dynamic_module("modeling_minbert.MinBertForMultiTask", name)',
            "model = PeftModel.from_pretrained(MinBert.from_pretrained(base, config=config), name).eval()",
            "",
            *calls,
        ),
        "With hf_minbert:",
        _code(
            "python",
            "from hf_minbert import Predictor",
            "",
            f'predictor = Predictor.from_pretrained("{repo_id}")',
            f'print(predictor("{name}", {given}))',
        ),
    ]
    return "\n\n".join(blocks)


def _pipeline(task: Task) -> str:
    """The stock pipeline that answers such a task."""
    return "token-classification" if task.traits.is_tags else "text-classification"


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _loading(repo_id: str, auto: str) -> str:
    return (
        f'from transformers import {auto}, AutoTokenizer\n\nname = "{repo_id}"\n'
        f"tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)\n"
        f"model = {auto}.from_pretrained(name, trust_remote_code=True)"
    )


def _texts(task: Task) -> tuple[str, ...]:
    return examples_of(task.name, task.kind, task.is_pair)


def _call(task: Task) -> list[str]:
    """The lines that ask one task."""
    texts = ", ".join(f'"{text}"' for text in _texts(task))
    inputs = f'inputs = tokenizer({texts}, return_tensors="pt")'
    if task.pair_encoding == "bi":  # the two sentences of an example are the second dimension
        inputs = (
            f'inputs = tokenizer([{texts}], padding=True, return_tensors="pt")\n'
            f"inputs = {{key: value[None] for key, value in inputs.items()}}  # one example of two sentences"
        )
    logits = f'model(**inputs, task="{task.name}").logits'
    asked = {
        "classes": f"print({logits}.softmax(-1))  # {', '.join(map(_line, task.labels))}",
        "ordinal": f"print({logits}.sigmoid().cumprod(-1))  # more than: {', '.join(map(_line, task.labels[:-1]))}",
        "labels": f"print({logits}.sigmoid())  # of each: {', '.join(map(_line, task.labels))}",
        "binary": f"print({logits}.sigmoid())  # of: {_line(task.labels[-1]) if task.labels else ''}",
        "score": f"print({logits})",
        "tags": f"print({logits}.softmax(-1))  # of each token: {', '.join(map(_line, task.labels))}",
    }
    return [inputs, asked[task.kind]]


def _scores(saved: SavedModel) -> str:
    measured = _measured(saved)
    perplexity = saved.metrics.get("eval_perplexity")
    if not measured and perplexity is None:
        return "## Scores\n\nNot measured: the model's folder has no scores."
    rows = [(f"`{name}`", metric, f"{value:.3f}") for name, _, metric, value in measured]
    rows += [("masked words", "perplexity", f"{perplexity:.2f}")] if perplexity is not None else []
    for key, said in (("eval_overall", "mean of the tasks' main metrics"), ("eval_leaderboard", "the course's mean")):
        if saved.metrics.get(key) is not None:
            rows.append(("all", said, f"{saved.metrics[key]:.3f}"))
    said = "Of the saved model, on the dev rows."
    share = saved.runs[-1].get("select_on") if saved.runs else None
    if saved.metrics.get("best_metric") is not None and share is not None:
        said = (
            f"Of the saved model, on {1 - share:.0%} of the dev rows. The checkpoint was chosen by "
            f"`{saved.metrics['metric_for_best_model']}` on the others (`select_on: {share}`)."
        )
    elif saved.metrics.get("best_metric") is not None:
        said += (
            f" The checkpoint was chosen by `{saved.metrics['metric_for_best_model']}` on the same rows, so these "
            f"numbers flatter it a little."
        )
    return f"## Scores\n\n{said} One run, no confidence interval.\n\n" + _table(("task", "metric", "value"), rows)


def _calibration(saved: SavedModel) -> str:
    """What was fitted to the dev rows after training."""
    if not saved.calibration:
        return ""
    rows, said = [], []
    for name, found in saved.calibration.items():
        shown = ["ece", "brier"] if found["temperature"] != 1 else []
        shown += [found["metric"]] if found["metric"] else []
        both = found["before"], found["after"]
        rows += [(f"`{name}`", MEASURES.get(key, key), *(f"{of[key]:z.3f}" for of in both)) for key in shown]
        if found["temperature"] != 1:
            said.append(f"- `{name}`: outputs are divided by {found['temperature']:.3f}, its temperature.")
        said += [f"- `{name}`: {THRESHOLD.format(*each)}" for each in found["thresholds"].items()]
        said += [f"- `{name}`: {note}" for note in found["notes"]]
    how = (
        "Fitted on the dev rows after training, so that scores with a threshold, which are of the same rows, are "
        "flattered a little. “After” is of rows that were not fitted: each half by what was fitted on the other."
    )
    table = [how, _table(("task", "measure", "before", "after"), rows)] if rows else []  # or notes alone
    return "\n\n".join(["## Calibration", *table, "\n".join(said)])


def _limits(saved: SavedModel) -> str:
    positions = saved.config.get("max_position_embeddings")
    length = saved.config.get("max_input_length") or (saved.runs or [{}])[-1].get("max_length")
    said = " or ".join(f"{own} ({name})" for name, own in length.items()) if isinstance(length, dict) else length
    lines = [f"- Inputs of more than {said} tokens were cut in training."] if length not in (None, positions) else []
    lines += [f"- More than {positions} tokens do not fit: truncate."] if positions else []
    lines += [f"- `{name}`: {LIMITS[name]}" for name in saved.tasks if name in LIMITS]
    for name, task in saved.tasks.items():
        if name not in LIMITS:
            outside = {
                "score": "may leave its range", "set": "names any of its labels, or none",
                "tags": "always names one of its labels for each word",
            }.get(task.traits.answer, "always names one of its labels")  # fmt: skip
            lines.append(f"- `{name}`: a task of its own; the answer {outside}, whatever the text is about.")
    raw = [f"`{name}`" for name, task in saved.tasks.items() if not task.traits.is_score and task.temperature == 1]
    if raw:
        lines.append(f"- Probabilities are those of the heads as trained, not calibrated: {', '.join(raw)}.")
    return "## Limits\n\n" + "\n".join(lines) if lines else ""


def _data(saved: SavedModel, bases: list[str]) -> str:
    found = saved.data()
    parts = []
    if found:
        rows = [
            (data.task, f"[{data.name}](https://huggingface.co/datasets/{data.name.split(' (')[0]})"
             if data.on_hub else " ".join([data.name, *(f"`{file}`" for file in data.files)]),
             data.revision[:12] if data.revision else "", data.licence)
            for data in found
        ]  # fmt: skip
        parts.append(_table(("task", "training rows", "commit", "licence"), rows))
    else:
        parts.append("What it was trained on is not recorded: the model's folder has no recipe.")
    parts.append(_leaks(saved.metrics.get("leaks") or {}))
    unknown = saved.metrics.get("unknown_tokens") or {}
    parts.append(
        "\n".join(
            f"- {unknown_in_words(name, share, 'the training rows')}" for name, share in unknown.items() if share
        )
    )
    if MODEL in (*bases, *saved.bases()):
        parts.append(MINILM_NOTE)
    return "## Data\n\n" + "\n\n".join(part for part in parts if part)


def _leaks(leaks: dict[str, Any]) -> str:
    """What of the dev and test rows the run found among the training rows."""
    lines = [
        f"- {counted(count, 'row')} of {where} {'stands' if count == 1 else 'stand'} in the training rows of {task} "
        f"too; {'it was' if count == 1 else 'they were'} trained on."
        for task, places in (leaks.get("given") or {}).items()
        for where, count in places.items()
    ]
    for task, sources in (leaks.get("borrowed") or {}).items():
        for counts in sources:
            lines.append(
                f"- {counted(counts['dropped'], 'row')} that {task} was to borrow from {counts['source']}, found in "
                f"dev or test rows and left out."
            )
    if lines:
        said = "Overlap of training rows with dev and test rows, compared without case, punctuation and spaces:"
        return "\n".join([said, "", *lines])
    compared = "given" in leaks
    return "No dev or test row that the run could see stands in its training rows." if compared else ""


def _training(saved: SavedModel, bases: list[str]) -> str:
    parts = []
    if bases:
        named = [
            f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else f"`{portable(base)}`" for base in bases
        ]
        parts.append(f"It began with {', '.join(named)}.")
    if saved.merge:
        parts.append("Made from " + ", ".join(f"`{portable(name)}`" for name in saved.parents) + ".")
    parts.append(_as_measured(saved))
    if saved.recipe:
        shown = {key: value for key, value in portable(saved.recipe).items() if value is not None}
        parts.append("The recipe (`recipe.yaml`; paths are cut to their last part):")
        parts.append(f"```yaml\n{recipe_text(shown).strip()}\n```")
    found = [part for part in parts if part]
    return "## Training\n\n" + "\n\n".join(found) if found else ""


def _as_measured(saved: SavedModel) -> str:
    environment, metrics = saved.environment, saved.metrics
    rows: list[tuple[str, Any]] = []
    if "device" in environment:
        processes = environment["processes"]
        rows.append(("hardware", environment["device"] + (f", {processes} processes" if processes > 1 else "")))
    if "train_runtime" in metrics:
        rows.append(("time", f"{metrics['train_runtime']:,.0f} s of training, evaluations included"))
        rows.append(("speed", f"{metrics['train_samples_per_second']:,.1f} rows a second"))
    for key, name in (("global_step", "steps"), ("best_step", "best step"), ("seed", "seed")):
        if metrics.get(key) is not None:
            rows.append((name, f"{metrics[key]:,}"))
    if "versions" in environment:
        there = {name: version for name, version in environment["versions"].items() if version}
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in there.items())))
    return _table(("", "as measured"), rows) if rows else ""


def _plots(paths: Iterable[str]) -> str:
    plots = [path for path in paths if is_listed(path, PLOTS)]
    shown = [
        f"![{path.split('/')[-1].rsplit('.', 1)[0].replace('-', ' ').replace('_', ' ')}]({path})" for path in plots
    ]
    return "## Plots\n\n" + "\n\n".join(shown) if shown else ""


def _licence(license: str | None) -> str:
    weights = f"`{license}`" if license else "not stated by who published it"
    return (
        f"## Licence\n\nThe code files: Apache License 2.0. The weights: {weights}; see the licences of the data and "
        f"of the model that it began with."
    )
