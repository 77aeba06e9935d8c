"""Writes files atomically, with the permissions of the umask, and checks whether files are complete."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import MinBertError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"  # names the files of a model that is saved in several


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes `content`; text is encoded as UTF-8. A reader sees the old file or the new one, never a part of it.

    Missing folders are created.

    Raises:
        MinBertError: the path is a folder or a device, or cannot be written.
    """
    path = Path(path).resolve()  # a link stays a link: the file that it points to is replaced
    _check_is_file(path)
    # Not tempfile.mkstemp: its files are readable by their owner only, and stay so after the move.
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise MinBertError(f"Cannot write {path}: {error.strerror}. Give a path that can be written.") from error


def check_writable(path: str | Path) -> None:
    """Checks whether `write_atomically` could write to this path. Creates nothing.

    Raises:
        MinBertError: the path cannot be written.
    """
    path = Path(path).resolve()
    _check_is_file(path)
    nearest = next(folder for folder in path.parents if folder.exists())
    if not nearest.is_dir():
        raise MinBertError(f"Cannot write {path}: {nearest} is not a folder. Give a path that can be written.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise MinBertError(f"Cannot write {path}: {nearest} may not be written. Give a path that can be written.")


def _check_is_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise MinBertError(f"Cannot write {path}: it is not a file. Give the path of a file.")


@contextmanager
def whole_folder(path: str | Path) -> Generator[Path]:
    """Creates a new folder that is renamed to `path` when the block ends. If the block fails, the folder is removed.

    An existing folder `path` is replaced with all its files. Until then the new folder has a hidden name. Hidden
    folders that a killed process left are removed first, and this is logged.

    Raises:
        MinBertError: the folder cannot be made, or a file in it cannot be written.
    """
    path = Path(path).resolve()
    part, old = (path.with_name(f".{path.name[:100]}.{end}") for end in ("part", "old"))
    try:
        if old.exists() and not path.exists():  # killed between the two moves
            os.replace(old, path)
            logger.info("%s is there again: a killed process had begun to replace it.", path)
        for leftover in (part, old):
            if leftover.exists():
                shutil.rmtree(leftover)
                logger.info("Removed %s, which a killed process had left.", leftover)
        part.mkdir(parents=True)
        yield part
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
    except OSError as error:
        raise MinBertError(
            f"Cannot write {path}: {error.strerror or error}. Give a path that can be written."
        ) from error
    finally:
        if old.exists() and not path.exists():  # stopped between the two moves
            os.replace(old, path)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)


def write_json(path: str | Path, obj: Any) -> None:
    """Writes strict JSON atomically. NaN and infinities become null, because JSON does not have them."""
    write_atomically(path, json.dumps(_plain(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def json_line(obj: Any) -> str:
    """Returns one line of strict JSON with its line break; see `write_json`."""
    return json.dumps(_plain(obj), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy":  # which reading a recipe does not import
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its header says: 8 bytes of header length, the header, the tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        if len(length) < 8:
            return False
        header_size = int.from_bytes(length, "little")
        if header_size > path.stat().st_size:
            return False
        try:
            header = json.loads(file.read(header_size))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + header_size + max(ends, default=0)
