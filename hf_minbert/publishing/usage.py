"""The model card's section on using the model: code for each of its tasks, with inputs that fit them."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..errors import MinBertError
from ..model.configuration_minbert import MinBertConfig
from ..model.spans import mark_entities
from ..settings.tasks import Task
from .demo import examples_of
from .export_classifier import ToClassifier
from .export_encoder import ToSentenceTransformers
from .saved import SavedModel

HEADING = "## How to use the model"
TRANSFORMERS = (
    "It needs transformers 5.17 or newer and torch. The repository contains the code of the model, and "
    "`trust_remote_code=True` allows transformers to run it:"
)


def usage(saved: SavedModel, repo_id: str, paths: Iterable[str]) -> str:
    """Returns code for a complete model: with this package, with transformers, and exported as a stock model.

    Args:
        paths: the paths of the repository's files.
    """
    if not saved.tasks:
        loading = _loading(repo_id, "AutoModelForMaskedLM")
        return f"{HEADING}\n\n{TRANSFORMERS}\n\n{code_block('python', *loading)}"
    blocks = [HEADING, *_with_package(saved, repo_id), *_with_transformers(saved, repo_id), *_exported(saved, repo_id)]
    if "recipe.yaml" in paths:
        blocks += _further(saved, repo_id)
    return "\n\n".join(blocks)


def _further(saved: SavedModel, repo_id: str) -> list[str]:
    """How to train the model further: from its weights, on labels alone."""
    given, said = f"model_name_or_path={repo_id} data_dir=FOLDER output_dir=runs/further", []
    if saved.teachers:
        words = [f"tasks.{name}.{key}" for name in saved.tasks for key in saved.without_labels(name)]
        given = " ".join([given, "teachers=null", *(f"{word}=null" for word in words)])
        said = ["The teachers are left out (`teachers=null`). Each row needs a label then."]
    return [
        "### Train it further", "On one GPU, or on several with `accelerate`:", code_block("bash",
            f"hf download {repo_id} recipe.yaml --local-dir .", f"minbert train recipe.yaml {given}",
            "accelerate launch --multi_gpu --num_processes 2 -m hf_minbert train recipe.yaml \\",
            f"    {given}"), *said]  # fmt: skip


def adapter_usage(saved: SavedModel, repo_id: str, under: str) -> str:
    """Returns code for an adapter on the model `under`: with this package, and with transformers and peft."""
    loading = [
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
    ]
    calls = [line for task in saved.tasks.values() for line in _call(task)]
    blocks = [
        HEADING,
        f"This is an adapter of the library peft for `{under}`, with the heads that were trained with it.",
        *_with_package(saved, repo_id),
        "### With transformers and peft",
        "It needs transformers 5.17 or newer, peft and torch. The repository contains the code of the model:",
        code_block("python", *loading, *calls),
    ]
    return "\n\n".join(blocks)


def code_block(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def one_line(label: str) -> str:
    """Returns a label in a form that fits in a table and a comment."""
    return " ".join(label.split())


def _with_package(saved: SavedModel, repo_id: str) -> list[str]:
    asked = []
    for name, task in saved.tasks.items():
        given = ", ".join(f"[{text}]" for text in _texts(task))
        asked.append(f'print(predictor("{name}", {given}))')
    loading = ["from hf_minbert import Predictor", "", f'predictor = Predictor.from_pretrained("{repo_id}")']
    return ["### With hf_minbert", code_block("python", *loading, *asked)]


def _with_transformers(saved: SavedModel, repo_id: str) -> list[str]:
    loading = [*_loading(repo_id, "AutoModelForSequenceClassification"), "model.eval()", ""]
    calls = [line for task in saved.tasks.values() for line in _call(task)]
    blocks = ["### With transformers", TRANSFORMERS, code_block("python", *loading, *calls)]
    single = next((task for task in saved.tasks.values() if not task.is_pair), None)
    if single is not None:
        merged = ', aggregation_strategy="simple"' if single.traits.is_tags else ""
        blocks += ["A stock pipeline uses one task, the active one:", code_block("python",
            "from transformers import pipeline", "",
            f'ask = pipeline("{_stock_pipeline(single)}", model="{repo_id}", trust_remote_code=True,',
            f'               model_kwargs={{"active_task": "{single.name}"}}{merged})',
            f"print(ask({_texts(single)[0]}))")]  # fmt: skip
    if "custom_pipelines" in saved.config:
        asked = []
        for name, task in saved.tasks.items():
            given = f"[({', '.join(_texts(task))})]" if task.is_pair else _texts(task)[0]
            asked.append(f'print(ask({given}, tasks=["{name}"]))')
        blocks += ["The pipeline of this model cuts long inputs as in training. Without `tasks`, each task that can "
                   "read the input answers:", code_block("python",
            "from transformers import pipeline", "",
            f'ask = pipeline("minbert-multitask", model="{repo_id}", trust_remote_code=True)', *asked)]  # fmt: skip
    return blocks


def _exported(saved: SavedModel, repo_id: str) -> list[str]:
    forms = {name: _form(saved, name) for name in saved.tasks}
    commands = [
        f"minbert export {repo_id} --to {form} --task {name} --output-dir exports/{name}"
        for name, form in forms.items()
        if form != "onnx"
    ]
    if "onnx" in forms.values():
        commands.append(f"minbert export {repo_id} --to onnx --output-dir exports/onnx")
    said = "With hf_minbert, a task becomes a model that other tools load without code of this repository"
    said += ". As ONNX, all tasks are exported together:" if "onnx" in forms.values() else ":"
    blocks = ["### As a stock model", said, code_block("bash", *commands)]
    stock = next((name for name, form in forms.items() if form != "onnx"), None)
    if stock is not None:
        blocks.append(code_block("python", *_stock_code(saved.tasks[stock], forms[stock])))
    return blocks


def _form(saved: SavedModel, name: str) -> str:
    """Returns the form of `minbert export` that keeps the task's answers in a stock class; otherwise `onnx`."""
    config, task = MinBertConfig.from_dict(saved.config), saved.tasks[name]
    form, make = "classifier", ToClassifier
    if task.pair_encoding == "bi" and task.head == "cosine":
        form, make = "sentence-transformers", ToSentenceTransformers
    try:
        make("", config, saved.tasks, task=name)
    except MinBertError:  # the class cannot compute what this task does
        return "onnx"
    return form


def _stock_code(task: Task, form: str) -> list[str]:
    folder, texts = f"exports/{task.name}", _texts(task)
    if form == "sentence-transformers":
        return [
            "from sentence_transformers import SentenceTransformer", "",
            f'model = SentenceTransformer("{folder}")', f"vectors = model.encode([{', '.join(texts)}])",
            "print(model.similarity(vectors[:1], vectors[1:]))  # the cosine",
        ]  # fmt: skip
    given = f'{{"text": {texts[0]}, "text_pair": {texts[1]}}}' if task.is_pair else texts[0]
    strategy = "simple" if mark_entities(task.labels) else "first"
    option = f', aggregation_strategy="{strategy}"' if task.traits.is_tags else ""
    call = given if task.traits.is_tags else f"{given}, truncation=True, top_k=None"
    return [
        "from transformers import pipeline", "",
        f'ask = pipeline("{_stock_pipeline(task)}", model="{folder}"{option})', f"print(ask({call}))",
    ]  # fmt: skip


def _stock_pipeline(task: Task) -> str:
    """The pipeline of transformers that answers such a task."""
    return "token-classification" if task.traits.is_tags else "text-classification"


def _loading(repo_id: str, auto: str) -> list[str]:
    return [
        f"from transformers import {auto}, AutoTokenizer", "", f'name = "{repo_id}"',
        "tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
        f"model = {auto}.from_pretrained(name, trust_remote_code=True)",
    ]  # fmt: skip


def _texts(task: Task) -> list[str]:
    """An input for the task, as Python writes its texts."""
    return [json.dumps(text, ensure_ascii=False) for text in examples_of(task.to_config())]


def _call(task: Task) -> list[str]:
    """The lines that ask one task."""
    texts = ", ".join(_texts(task))
    inputs = [f'inputs = tokenizer({texts}, return_tensors="pt")']
    if task.pair_encoding == "bi":  # the two sentences of an example are the second dimension
        inputs = [
            f'inputs = tokenizer([{texts}], padding=True, return_tensors="pt")',
            "inputs = {key: value[None] for key, value in inputs.items()}  # one example of two sentences",
        ]
    logits, fitted = f'model(**inputs, task="{task.name}").logits', []
    if task.temperature != 1:  # which the model divides by only where it is asked without `task`
        fitted = [f'logits = {logits} / model.config.get_task("{task.name}")["temperature"]  # it is calibrated']
        logits = "logits"
    labels = ", ".join(map(one_line, task.labels))
    asked = {
        "classes": f"print({logits}.softmax(-1))  # probabilities: {labels}",
        "ordinal": f"print({logits}.sigmoid().cumprod(-1))  # more than: {', '.join(map(one_line, task.labels[:-1]))}",
        "labels": f"print({logits}.sigmoid())  # probability of each: {labels}",
        "binary": f"print({logits}.sigmoid())  # probability: {one_line(task.labels[-1]) if task.labels else ''}",
        "score": f"print({logits})  # the score",
        "tags": f"print({logits}.softmax(-1))  # probabilities for each token: {labels}",
    }
    return [*inputs, *fitted, asked[task.kind]]
