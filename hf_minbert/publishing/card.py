"""The model card: what the model's folder contains, as the Hub's metadata and in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..data.encoding import unknown_in_words
from ..pretrained.weights import MODEL
from ..settings.keys import default_of
from ..settings.recipe import packaged_recipes, recipe_text
from ..settings.table import OURS
from ..settings.tasks import Task
from ..settings.teachers import read_teacher
from ..settings.wording import counted
from .files import ADAPTER_CONFIG, PLOTS, Upload, is_listed, is_on_hub, portable
from .saved import SavedModel
from .scores import calibration, measured, row_counts, scores, table
from .usage import adapter_usage, one_line, usage

#: What is known of the package's tasks beyond their numbers.
LIMITS = {
    "sst": "Made for sentences of English film reviews. Other texts, irony and whole reviews were not tested. "
    "Neighbouring classes are often confused.",
    "para": "Made for questions that people asked on Quora. Other kinds of sentences were not tested. Two questions "
    "that share most of their words are hard, whether they mean the same or not.",
    "sts": "Made for short English sentences (captions, headlines, forum posts). The score says how similar they are "
    "in meaning, not whether a sentence is true or follows from the other. It may be slightly outside the range.",
    "cfimdb": "Made for whole film reviews that are clearly positive or negative. There is no neutral answer.",
    "nli": "Made for pairs that were written for the purpose. In such data the second sentence alone often gives the "
    "answer away.",
    "reviews": "The stars of a review are used as its sentiment. A text and its stars do not always agree.",
}  # fmt: skip
MINILM_NOTE = (
    "The base model, all-MiniLM-L6-v2, was trained by its authors on more than a billion pairs. Quora's duplicate "
    "questions and natural language inference (SNLI, MultiNLI) are among them. The model has seen such pairs before, "
    "so its scores on paraphrases and inference cannot be compared with those of models based on plain BERT."
)
#: The columns of training rows without labels, by their names in the metrics.
WITHOUT_LABELS = {
    "own": "own rows without labels", "files": "rows of files without labels", "pairs": "new pairs without labels",
}  # fmt: skip
MERGED = "merge"  # what `minbert merge` calls its way, in merge.json


def model_card(
    saved: SavedModel,
    repo_id: str,
    uploads: Iterable[Upload],
    *,
    base_model: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> str:
    """Returns the text of `README.md`.

    Args:
        repo_id: the name of the model on the Hub.
        uploads: the files beside the card. Plots among them are shown.
        base_model: the Hub id of the model that it was trained from, if the folder does not know it.
        license: a licence identifier of the Hub, such as `apache-2.0`. The publisher must know it.
        language: the code of the texts' language, such as `de`. For the package's own data it is known.
    """
    uploads = list(uploads)
    paths, under = [upload.path for upload in uploads], _under_adapter(uploads)
    language = language or _language(saved)
    bases = [under] if under else [base_model] if base_model else saved.bases()
    sections = [
        _head(saved, repo_id, language),
        _tasks(saved),
        adapter_usage(saved, repo_id, under) if under else usage(saved, repo_id, paths),
        scores(saved),
        calibration(saved),
        _limits(saved),
        _data(saved, bases),
        _training(saved, bases, paths),
        _plots(paths),
        _licence(license),
    ]
    metadata = _metadata(saved, repo_id, bases, license, language, adapter=under is not None)
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _under_adapter(uploads: Iterable[Upload]) -> str | None:
    """Returns the base model of an adapter; `None` if the files are not those of an adapter."""
    config = next((upload.read() for upload in uploads if upload.path == ADAPTER_CONFIG), None)
    return None if config is None else json.loads(config)["base_model_name_or_path"]


# ---- For machines ------------------------------------------------------------------------------------------------


def _metadata(
    saved: SavedModel, repo_id: str, bases: list[str], license: str | None, language: str | None, adapter: bool
) -> str:
    from huggingface_hub import ModelCardData

    on_hub = [base for base in bases if is_on_hub(base)]
    results = _eval_results(saved)
    several = saved.merge.get("method", MERGED) != MERGED
    relation = "merge" if several else "adapter" if adapter else "finetune"
    hub_tasks = [*dict.fromkeys(map(_hub_task, saved.tasks.values()))] or ["fill-mask"]
    data = ModelCardData(
        language=language,
        license=license,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=hub_tasks[0],
        tags=["minbert", *(["multi-task"] if len(saved.tasks) > 1 else []), *saved.tasks, *hub_tasks[1:]],
        base_model=on_hub[0] if len(on_hub) == 1 else on_hub or None,
        base_model_relation=relation if on_hub else None,
        datasets=[*dict.fromkeys(data.name.split(" (")[0] for data in saved.data() if data.on_hub)] or None,
        metrics=[*dict.fromkeys(result.metric_type for result in results)] or None,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml(line_break="\n").strip()


def _language(saved: SavedModel) -> str | None:
    """Returns English if all training data is known to be English; otherwise the language is unknown."""
    found = saved.data()
    return "en" if found and all(data.english for data in found) else None


def _hub_task(task: Task) -> str:
    """The Hub's word for such a task, by which people look for models."""
    if task.traits.is_tags:
        return "token-classification"
    if task.traits.is_score and task.is_pair:  # two vectors that are compared, or a cross-encoder's score
        return "sentence-similarity" if task.pair_encoding == "bi" else "text-ranking"
    return "text-classification"


def _eval_results(saved: SavedModel) -> list[Any]:
    from huggingface_hub import EvalResult

    own = {data.task: data for data in saved.data()}
    results = []
    for name, task, metric, value in measured(saved):
        data = own.get(name)
        there = data is not None and data.on_hub
        results.append(
            EvalResult(
                task_type=_hub_task(task),
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


# ---- For people --------------------------------------------------------------------------------------------------


def _head(saved: SavedModel, repo_id: str, language: str | None) -> str:
    names = ", ".join(saved.tasks)
    count = len(saved.tasks)
    family = saved.config.get("family", "bert") if saved.config else "bert"  # folders before 0.2 do not say
    kind = "BERT" if family == "bert" else f"`{family}`"
    what = {
        0: f"An encoder ({kind}), pre-trained further with masked language modelling.",
        1: f"An encoder ({kind}), fine-tuned on one task: {names}.",
    }.get(count, f"One encoder ({kind}), fine-tuned on {count} tasks at once, with a head for each: {names}.")
    size = "It"
    if saved.config:
        size += f" has {saved.config['num_hidden_layers']} layers of hidden size {saved.config['hidden_size']}, and"
    taught = ", also on the answers of teachers (distillation)" if saved.teachers else ""
    of_texts = f"`{language}`" if language else "unknown"
    said = f"{size} was trained with hf_minbert{taught}. Language of the texts: {of_texts}."
    return f"# {repo_id.split('/')[-1]}\n\n{what}{_made(saved.merge)} {said}"


def _made(merge: Mapping[str, Any]) -> str:
    """How a model that was merged came about; empty for another."""
    if not merge:
        return ""
    if "base" in merge:
        numbers = ", ".join(f"{name} {merge[name]:g}" for name in ("scale", "density", "seed") if name in merge)
        return f" Its encoder is the base model plus task vectors of several models ({merge['method']}: {numbers})."
    return {
        "ensemble": " Each task has the encoder of the model that it was trained in.",
        MERGED: " It was trained as an adapter, which is merged into the weights.",
    }.get(merge["method"], f" An average ({merge['method']}) of several models.")


def _tasks(saved: SavedModel) -> str:
    rows = []
    for name, task in saved.tasks.items():
        low, high = task.range or (0, 0)
        kind = task.traits.words.format(count=len(task.labels), low=low, high=high)
        labels = ", ".join(f"{number} {one_line(label)}" for number, label in enumerate(task.labels))
        together = {"single": "a sentence", "cross": "two sentences, read together", "bi": "two sentences, each alone"}
        rows.append((f"`{name}`", together[task.pair_encoding], kind, labels or f"{low:g} to {high:g}"))
    return "## Tasks\n\n" + table(("task", "input", "answer", "labels"), rows) if rows else ""


def _limits(saved: SavedModel) -> str:
    positions = saved.config.get("max_position_embeddings")
    length = saved.config.get("max_input_length") or (saved.runs or [{}])[-1].get("max_length")
    said = " or ".join(f"{own} ({name})" for name, own in length.items()) if isinstance(length, dict) else length
    lines = [f"- Inputs of more than {said} tokens were cut in training."] if length not in (None, positions) else []
    lines += [f"- The model reads at most {positions} tokens. Truncate longer inputs."] if positions else []
    lines += [f"- `{name}`: {LIMITS[name]}" for name in saved.tasks if name in LIMITS]
    for name, task in saved.tasks.items():
        if name not in LIMITS:
            outside = {
                "score": "may be outside the range", "set": "is any of the labels, or none",
                "tags": "is one of the labels for each word",
            }.get(task.traits.answer, "is always one of the labels")  # fmt: skip
            lines.append(f"- `{name}`: the answer {outside}, also for texts that have nothing to do with the task.")
    raw = [f"`{name}`" for name, task in saved.tasks.items() if not task.traits.is_score and task.temperature == 1]
    if raw:
        lines.append(f"- Probabilities are not calibrated: {', '.join(raw)}.")
    return "## Limits\n\n" + "\n".join(lines) if lines else ""


def _data(saved: SavedModel, bases: list[str]) -> str:
    found = saved.data()
    parts = [_counts(saved)]
    if found:
        rows = [
            (data.task, f"[{data.name}](https://huggingface.co/datasets/{data.name.split(' (')[0]})"
             if data.on_hub else " ".join([data.name, *(f"`{file}`" for file in data.files)]),
             data.revision[:12] if data.revision else "", data.licence)
            for data in found
        ]  # fmt: skip
        parts.append(table(("task", "source of the training rows", "commit", "licence"), rows))
    else:
        parts.append("What it was trained on is not recorded: the folder of the model has no recipe.")
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


def _counts(saved: SavedModel) -> str:
    """How many rows each task was trained and scored on."""
    stage = " of the last stage" if len(saved.runs) > 1 else ""
    columns = {f"training rows{stage}": row_counts(saved, "train")}
    if without := row_counts(saved, "unlabelled"):
        for kind, said in WITHOUT_LABELS.items():
            columns[said] = {name: of[kind] for name, of in without.items()}
    columns["dev rows"] = row_counts(saved, "dev")
    rows = [
        (f"`{name}`", *(f"{of[name]:,}" if of.get(name) else "none" for of in columns.values()))
        for name in saved.tasks
        if any(name in of for of in columns.values())
    ]
    said = "The rows without labels were learnt from the answers of the teachers alone." if without else ""
    return "\n\n".join(part for part in (table(("task", *columns), rows), said) if part) if rows else ""


def _leaks(leaks: dict[str, Any]) -> str:
    """What of the dev and test rows the run found among the training rows."""
    lines = [
        f"- {counted(count, 'row')} of {where} {'is' if count == 1 else 'are'} also in the training rows of {task}. "
        f"The model was trained on {'it' if count == 1 else 'them'}."
        for task, places in (leaks.get("given") or {}).items()
        for where, count in places.items()
    ]
    for task, sources in (leaks.get("borrowed") or {}).items():
        for counts in sources:
            lines.append(
                f"- {counted(counts['dropped'], 'row', 'was', 'were')} not borrowed from {counts['source']} for "
                f"{task}, because dev or test rows contain {'it' if counts['dropped'] == 1 else 'them'}."
            )
    lines += [
        f"- {counted(of['dropped'], 'row')} without labels {'was' if of['dropped'] == 1 else 'were'} left out for "
        f"{task}, because dev or test rows contain {'it' if of['dropped'] == 1 else 'them'}."
        for task, of in (leaks.get("unlabelled") or {}).items()
        if of["dropped"]
    ]
    if lines:
        said = "Overlap of training rows with dev and test rows, compared without case, punctuation and spaces:"
        return "\n".join([said, "", *lines])
    compared = "given" in leaks
    return "The run found no dev or test row among its training rows." if compared else ""


def _training(saved: SavedModel, bases: list[str], paths: list[str]) -> str:
    parts = []
    if bases:
        named = [
            f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else f"`{portable(base)}`" for base in bases
        ]
        parts.append(f"Base model: {', '.join(named)}.")
    if saved.merge:
        parts.append("Made from " + ", ".join(f"`{portable(name)}`" for name in saved.parents) + ".")
    parts.append(_teachers(saved, paths))
    parts.append(_as_measured(saved))
    if saved.recipe:
        shown = {key: value for key, value in portable(saved.recipe).items() if value is not None}
        parts.append("The recipe (`recipe.yaml`; paths are shortened to their last part):")
        parts.append(f"```yaml\n{recipe_text(shown).strip()}\n```")
    found = [part for part in parts if part]
    return "## Training\n\n" + "\n\n".join(found) if found else ""


def _teachers(saved: SavedModel, paths: list[str]) -> str:
    """Whose answers the model learned."""
    lines = []
    for entry in saved.teachers:
        if isinstance(entry, str):
            link = f"[{entry}](https://huggingface.co/{entry})" if is_on_hub(entry) else f"`{portable(entry)}`"
            lines.append(f"- The saved model {link}.")
            continue
        teacher, recipe = read_teacher(entry), portable(entry["recipe"])
        there = f"[`{recipe}`]({recipe})" if recipe in paths else f"`{recipe}`"
        there += " of hf_minbert" if recipe in packaged_recipes() else ""
        seeds = f"seed{'s' * (len(teacher.seeds) > 1)} {', '.join(map(str, teacher.seeds))}"
        keys = f", with other values of {', '.join(f'`{key}`' for key in teacher.keys)}" if teacher.keys else ""
        lines.append(f"- `{teacher.name}`, trained by the recipe {there}{keys}; {seeds}.")
    if not lines:
        return ""
    usual = default_of(OURS["distill_weight"])
    weights = sorted({run.get("distill_weight", usual) for run in saved.runs if run.get("teachers")})
    said = f"Teachers, whose answers have the weight {' or '.join(f'{weight:g}' for weight in weights)} in the loss:"
    return "\n".join([said, "", *lines])


def _as_measured(saved: SavedModel) -> str:
    environment, metrics = saved.environment, saved.metrics
    rows: list[tuple[str, Any]] = []
    without = ", without that of the teachers" if saved.teachers else ""
    theirs = [each["train_runtime"] for each in metrics.get("teachers") or ()]
    if "device" in environment:
        processes = environment["processes"]
        rows.append(("hardware", environment["device"] + (f", {processes} processes" if processes > 1 else "")))
    if "train_runtime" in metrics:
        rows.append(("time", f"{metrics['train_runtime']:,.0f} s of training, with evaluations{without}"))
        rows += [("time of the teachers", f"{sum(theirs):,.0f} s of training, with evaluations")] if theirs else []
        rows.append(("speed", f"{metrics['train_samples_per_second']:,.1f} rows per second"))
    for key, name in (("global_step", "steps"), ("best_step", "best step"), ("seed", "seed")):
        if metrics.get(key) is not None:
            rows.append((name, f"{metrics[key]:,}"))
    if "versions" in environment:
        there = {name: version for name, version in environment["versions"].items() if version}
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in there.items())))
    return table(("", "as measured"), rows) if rows else ""


def _plots(paths: Iterable[str]) -> str:
    plots = [path for path in paths if is_listed(path, PLOTS)]
    shown = [
        f"![{path.split('/')[-1].rsplit('.', 1)[0].replace('-', ' ').replace('_', ' ')}]({path})" for path in plots
    ]
    return "## Plots\n\n" + "\n\n".join(shown) if shown else ""


def _licence(license: str | None) -> str:
    weights = f"`{license}`" if license else "unknown, because the publisher did not state it"
    return (
        f"## Licence\n\n- The code files: Apache License 2.0.\n- The weights: {weights}. See also the "
        f"licences of the data and of the base model."
    )
