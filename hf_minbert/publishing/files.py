"""Selects the files of a model's folder that are uploaded to the Hub. Only listed files are, without local paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import MinBertError, explain
from ..io import INDEX, json_line, whole_safetensors
from ..model.configuration_minbert import RECIPE, MinBertConfig
from ..model.inference import length_of
from ..model.saving import FILE, why_it_stays
from ..pretrained.data import CALIBRATION, READ_FROM
from ..pretrained.loading import TOKENIZER_FILES
from ..pretrained.weights import MODEL
from ..settings.recipe import read_lines, recipe_text, teacher_recipes
from ..settings.table import names

CARD = "README.md"
PICTURES = "pictures"  # of a report
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHTS = ("model.safetensors", INDEX, "model-*-of-*.safetensors")
ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
#: What a run, or a merge, says of itself. They are read, and go up without local paths.
RECORDS = ("recipe.yaml", "environment.json", "metrics.json", CALIBRATION, "merge.json", "log.jsonl")
PLOTS = (f"report/{PICTURES}/*.png",)  # of `minbert report`
TEACHERS = ("teachers/*.yaml",)  # recipes that recipe.yaml names
NAMES = ("labels",)  # what stands there is no path, whatever it looks like
#: All that may go up beside the code that the config names. What lies there of an older push and is on this list, but
#: not in the new push, goes away.
LISTED = ("config.json", *WEIGHTS, *ADAPTER, *TOKENIZER, *RECORDS, *TEACHERS, *PLOTS, CARD)


@dataclass(frozen=True)
class Upload:
    """A file to upload: its path in the repository, and its text or its local path."""

    path: str
    content: bytes | Path

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    def read(self) -> bytes:
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content


def collect(folder: Path, adapter_only: bool = False, base_model: str | None = None) -> list[Upload]:
    """Returns the files of a model's folder to upload, without the card.

    Args:
        adapter_only: upload the adapter instead of the model's weights.
        base_model: the Hub id of the base model, if the adapter names a folder.

    Raises:
        MinBertError: the folder lacks weights, its config or its tokenizer; a file of weights is truncated; the base
            model of an adapter is not on the Hub; or `base_model` is not a Hub id.
    """
    _check(folder, adapter_only)
    check_base_model(base_model)
    wanted = ("config.json", *(ADAPTER if adapter_only else WEIGHTS), *_code(folder), *TOKENIZER, *RECORDS, *PLOTS)
    teachers = teacher_recipes(plain_recipe(folder / RECIPE)) if (folder / RECIPE).is_file() else ()
    names = [path for path in _files(folder) if is_listed(path, wanted) or path in teachers]
    changed = _with_length(folder)
    if ADAPTER_CONFIG in names:
        changed[ADAPTER_CONFIG] = _on_base(folder / ADAPTER_CONFIG, base_model)
    return [Upload(name, changed[name] if name in changed else _without_paths(folder / name)) for name in names]


def is_adapter_alone(folder: Path) -> bool:
    """Whether the folder has an adapter and no weights of a complete model."""
    there = _files(folder)
    return all(name in there for name in ADAPTER) and not any(is_listed(path, WEIGHTS) for path in there)


def is_listed(path: str, patterns: Iterable[str] = LISTED) -> bool:
    return any(fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in patterns)


def left_here(folder: Path, uploads: Iterable[Upload]) -> list[str]:
    """Returns what is not uploaded from the folder. A subfolder is listed by its name only."""
    sent = {upload.path.split("/")[0] for upload in uploads}
    return sorted(path.name for path in folder.iterdir() if path.name not in sent)


def _files(folder: Path) -> list[str]:
    deeper = (f"report/{PICTURES}/*", *TEACHERS)
    paths = [path for paths in (folder.iterdir(), *map(folder.glob, deeper)) for path in paths if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _code(folder: Path) -> list[str]:
    """Returns the files that load the model without this package: those that its config names, and their imports."""
    if not (folder / "config.json").is_file():  # an adapter's folder may have none
        return []
    from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = [
        *config.get("auto_map", {}).values(),
        *(one["impl"] for one in config.get("custom_pipelines", {}).values()),
    ]
    modules = {f"{name.split('.')[0]}.py" for name in named}
    try:
        imported = [Path(path).name for name in modules for path in get_relative_import_files(folder / name)]
    except FileNotFoundError as error:
        raise MinBertError(
            f"The model's code needs {error.filename}, which is not there. Save the model again, with "
            f"`save_pretrained`."
        ) from error
    plugins = config.get("plugins") or ()
    for name in plugins:
        if name not in get_relative_imports(folder / FILE):
            raise MinBertError(
                f"The model needs the plugin {name!r}, whose code is not in {folder}: nobody else could load it. It "
                f"was not saved: {why_it_stays(name, plugins) or 'it was another file then'}. Then save the "
                "model again."
            )
    return sorted({*modules, *imported})


def _check(folder: Path, adapter_only: bool) -> None:
    there = _files(folder)
    has_weights = any(is_listed(path, WEIGHTS) for path in there)
    has_adapter = all(name in there for name in ADAPTER)
    if adapter_only and not has_adapter:
        raise MinBertError(
            f"--adapter-only sends an adapter, and {folder} has no {' or '.join(ADAPTER)}. Leave it out to send the "
            f"whole model."
        )
    if not adapter_only and not has_weights:
        remedy = (
            "Add --adapter-only to send the adapter alone." if has_adapter else "Give the folder of a saved model."
        )
        raise MinBertError(f"The folder {folder} has no weights (model.safetensors). {remedy}")
    if not adapter_only and "config.json" not in there:
        raise MinBertError(f"The folder {folder} holds no model: it has no config.json. Give that of a saved model.")
    if not any(name in there for name in TOKENIZER_FILES):
        raise MinBertError(f"The folder {folder} has no tokenizer (tokenizer.json). Save it there: others need it.")
    for name in there:
        weights = is_listed(name, ADAPTER if adapter_only else WEIGHTS) and name.endswith(".safetensors")
        if weights and not whole_safetensors(folder / name):
            raise MinBertError(f"{folder / name} ends too early: saving it was interrupted. Save the model again.")


def _with_length(folder: Path) -> dict[str, bytes | Path]:
    """Config and tokenizer with the length of the model, of a folder saved before they stated it: name to text."""
    texts = {name: folder / name for name in ("config.json", "tokenizer_config.json") if (folder / name).is_file()}
    with explain(f"Reading the config of {folder}", "Save the model and its tokenizer again."):
        lines = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in texts.items()}
        if lines.get("config.json", {}).get("model_type") != MinBertConfig.model_type:
            return {}
        config = MinBertConfig.from_pretrained(folder)
    stated = {
        "config.json": {"max_input_length": config.max_input_length},
        "tokenizer_config.json": {"model_max_length": length_of(config)},
    }
    return {
        name: (json.dumps(own | stated[name], indent=2, ensure_ascii=False) + "\n").encode()
        for name, own in lines.items()
        if any(own.get(key) != value for key, value in stated[name].items())
    }


# ---- Without local paths -----------------------------------------------------------------------------------------

#: A path that begins at the root, at home or above the working directory, inside other text; and one that begins at a
#: drive. A backslash without a drive is none: it stands in the patterns by which an adapter names layers.
_PATH = re.compile(r"(?<![\w./:~\\-])(?:(?:file://|~|\.\.)?(?:/[\w.@+-]+)+/?|[A-Za-z]:(?:[/\\][\w.@+-]+)+[/\\]?)")


def _without_paths(file: Path) -> bytes | Path:
    """A record's text with local paths cut to their last part; other files as they are."""
    if file.name not in RECORDS and file.suffix != ".yaml":
        return file
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".yaml":
            return recipe_text(portable(plain_recipe(file))).encode()
        if file.suffix == ".jsonl":
            return "".join(json_line(portable(json.loads(line))) for line in text.splitlines()).encode()
        return (json.dumps(portable(json.loads(text)), indent=2, ensure_ascii=False) + "\n").encode()
    except (OSError, ValueError) as error:
        if isinstance(error, MinBertError):
            raise
        raise MinBertError(f"{file} cannot be read: {error}. Correct it, or remove it from the folder.") from error


def plain_recipe(file: Path) -> dict[str, Any]:
    """Returns the lines of a recipe with plain values. File names are not changed."""
    return {key: value.value for key, value in read_lines(file).items()}


def portable(value: Any) -> Any:
    """Shortens every local path in the value to its last part, because the rest is private and useless to others.

    A token in a recipe is removed, at any depth.
    """
    if isinstance(value, dict):
        short: dict[str, Any] = {}
        for key, item in value.items():
            if key == READ_FROM or key in names(scope="secret"):
                continue
            name = unique = portable(key)
            number = 2
            while unique in short:  # two folders of one name
                unique, number = f"{name} ({number})", number + 1
            short[unique] = item if key in NAMES else portable(item)
        return short
    if isinstance(value, list):
        return [portable(item) for item in value]
    if not isinstance(value, str):
        return value
    parts = value.split(", ")  # as several files are named
    cut = [_last(part) if is_local_path(part) else _PATH.sub(lambda found: _last(found[0]), part) for part in parts]
    return ", ".join(cut)


def is_local_path(text: str) -> bool:
    """Whether the text is a path on this machine. A Hub id and `data/a.csv` are not."""
    outside = text.startswith(("~", "../", "..\\", "file://"))
    absolute = outside or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
    return absolute and _last(text) != ""  # the root itself says nothing


def _last(path: str) -> str:
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


# ---- The model under an adapter ----------------------------------------------------------------------------------


def hub_name(name: str) -> str:
    """Returns the Hub name of a checkpoint in a folder, if the package knows it; otherwise the given name."""
    return MODEL if Path(name).name == MODEL.split("/")[1] else name


def is_on_hub(name: str) -> bool:
    """Whether the name of a model is a Hub id, and not a folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def check_base_model(name: str | None) -> None:
    """Raises `MinBertError` for a given base model that cannot be on the Hub."""
    if name is not None and not is_on_hub(name):
        raise MinBertError(
            f"The base model {portable(name)!r} is no name on the Hub, where others load it from: give owner/name "
            f"(--base-model, or `finetuned_from` of `trainer.push_to_hub`), or leave it out."
        )


def _on_base(file: Path, base_model: str | None) -> bytes:
    """An adapter's config, with a base model that others can load too."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    named = hub_name(settings.get("base_model_name_or_path") or "")
    base = base_model or named
    if not base or not is_on_hub(base):
        raise MinBertError(
            f"The adapter's base model is {named!r}, which is no name on the Hub: nobody else could load the adapter. "
            f"Say where the base is on the Hub: --base-model, or `finetuned_from` of `trainer.push_to_hub`."
        )
    return (json.dumps({**portable(settings), "base_model_name_or_path": base}, indent=2) + "\n").encode()
