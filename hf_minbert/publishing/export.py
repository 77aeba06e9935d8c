"""Exports a saved model to forms that other tools load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..errors import MinBertError, explain, unknown_name
from ..io import check_writable, whole_folder, write_json
from ..model.losses import options_of
from ..pretrained.loading import load_config, tasks_of
from ..pretrained.prediction import Predictor
from .export_classifier import ToClassifier
from .export_encoder import ToEncoder, ToSentenceTransformers
from .export_onnx import ToOnnx

logger = logging.getLogger(__name__)

RECORD = "export.json"  # what was exported, and which files the export consists of

#: A form is made from a model's name, config and tasks, and says what does not fit; its options are its keyword-only
#: arguments. `write(predictor, folder)` fills a folder, compares what it wrote with the model, and returns what is to
#: stand in `export.json`.
FORMS = {
    "encoder": ToEncoder,
    "sentence-transformers": ToSentenceTransformers,
    "classifier": ToClassifier,
    "onnx": ToOnnx,
}


def export(name: str, to: str, folder: str | Path, *, overwrite: bool = False, **options: Any) -> dict[str, Any]:
    """Exports a model of this package to a form that other tools load. Weights are loaded last, after all checks.

    Args:
        name: the folder of a finished run, or a Hub id.
        to: a name from `FORMS`.
        folder: a new folder. It gets its name when all files in it have been written and checked.
        overwrite: replace an earlier export.
        options: the options of the form; see its class.

    Returns:
        the content of `export.json`, including `notes`, sentences about what the form cannot express, and
        `largest_difference` from the model.

    Raises:
        MinBertError: the form cannot express the model, something is missing, a folder would be overwritten, or the
            export's answers differ from the model's.
    """
    if to == "bert":
        logger.warning("`bert` is the former name of the form `encoder`.")
        to = "encoder"
    if to not in FORMS:
        raise unknown_name("`to`", to, FORMS)
    known = options_of(FORMS[to])
    for option in options:
        if option not in known:
            forms = " or ".join(form for form in FORMS if option in options_of(FORMS[form]))
            raise MinBertError(f"`{option}` is for {forms or 'no form'}, not for {to}. Leave it out.")
    folder = Path(folder)
    check_destination(folder, overwrite)
    config = load_config(name)
    form = FORMS[to](name, config, tasks_of(config, name), **options)
    predictor = Predictor.from_pretrained(name, device="cpu")
    with whole_folder(folder) as part:
        model = Path(name).resolve().name if Path(name).exists() else name  # the folder may be published: no paths
        found = {"to": to, "model": model, **form.write(predictor, part)}
        found["files"] = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
        write_json(part / RECORD, found)
    return found


def check_destination(folder: Path, overwrite: bool) -> None:
    """Refuses a folder that cannot be written, and a folder whose contents would be lost."""
    check_writable(folder / RECORD)
    folder = folder.resolve()
    check_writable(folder.parent / f".{folder.name}.part" / RECORD)  # where it is made
    check_writable(folder.parent / f".{folder.name}.new")
    if folder == Path.cwd():
        raise MinBertError("--output-dir is the working directory, which would be replaced. Give another folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise MinBertError(f"{folder} is not empty. Choose another --output-dir, or add --overwrite.")
    replaces = "--overwrite replaces only an earlier export, and"
    if not (folder / RECORD).is_file():
        raise MinBertError(f"{replaces} {folder} has no {RECORD}. Choose another --output-dir.")
    with explain(f"Reading {folder / RECORD}", "Choose another --output-dir."):
        ours = {RECORD, *json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]}
    others = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} - ours
    if others:
        raise MinBertError(
            f"{replaces} {folder} holds {min(others)} too. Move it away, or choose another --output-dir."
        )
