"""Plugins: modules that register heads, losses, aggregators and other parts when they are imported.

A plugin is named in a recipe's `plugins`, imported, or installed as a distribution with an entry point of the group
`hf_minbert.plugins`. A saved model's folder names the plugins that it needs, and may have copies of them. Such copies
are never run here: a plugin is imported from where Python, or the run's recipe, finds it outside the folder.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MinBertError
from .dotted import Value

logger = logging.getLogger(__name__)

GROUP = "hf_minbert.plugins"
_digests: dict[str, str] = {}  # of the plugins that this process has imported, as they were then
_installed: list[str] = []  # those of entry points
_tried: set[str] = set()
_missing: dict[str, str] = {}  # a plugin that nobody named here, to why it is not there


def module_of(entry: str) -> str:
    """Returns the module name of an entry of `plugins`, without its folder: `my_heads` of `/recipes/my_heads`."""
    return Path(entry).name


def located(entries: Any, folder: Path) -> Any:
    """Returns a recipe's `plugins`, with the folder of those in the recipe's folder or the working directory."""
    if isinstance(entries, str):
        entries = [entries]
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries  # what is wrong is said where values become settings
    return [_located(entry, (folder, Path.cwd())) for entry in entries]


def _located(entry: str, folders: Iterable[Path]) -> str:
    place = Path(entry)
    for folder in folders:
        home = (folder / place.parent).resolve()
        top = home / place.name.split(".")[0]
        if top.with_suffix(".py").is_file() or (top / "__init__.py").is_file():
            return str(home / place.name)
    return entry


def load(entries: Iterable[str]) -> dict[str, str]:
    """Imports plugins. Returns their modules, each with the digest of its files.

    Args:
        entries: names of modules, with their folder if they have one, as `located` returns them.

    Raises:
        MinBertError: there is no such module, another module has its name, or importing it fails.
    """
    return {module_of(entry): _load(entry) for entry in entries}


def load_named(values: Mapping[str, Value]) -> None:
    """Imports the plugins of a recipe from `read_recipe`. Raises the errors of `load`."""
    entries = values["plugins"].value if "plugins" in values else None
    if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries):
        load(entries)  # what else stands there is refused where values become settings


def installed() -> dict[str, str]:
    """Returns the plugins of entry points that this process has imported, with their digests."""
    return {name: _digests[name] for name in _installed}


def are_installed() -> bool:
    """Whether a distribution with plugins is installed. They may register any name."""
    return bool(_entries(tuple(sys.path)))


def _load(entry: str, outside: Path | None = None) -> str:
    """Imports a plugin and returns its digest. With `outside`, a plugin in this folder is not imported."""
    name, home = module_of(entry), Path(entry).parent
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) or name.endswith(".py"):
        remedy = f" Write {entry.removesuffix('.py')}." if entry.endswith(".py") else ""
        raise MinBertError(f"`plugins` must name modules, such as my_heads for my_heads.py. Found {entry!r}.{remedy}")
    importlib.invalidate_caches()
    beside = home.is_absolute() and not (outside and home.is_relative_to(outside))
    if beside and str(home) not in sys.path:
        sys.path.append(str(home))  # at the end: a file beside a recipe replaces no library
    files = _files(name)
    if not files or (outside and files[0].is_relative_to(outside)):
        if outside:
            where, put = "outside the model's folder, whose copy is not run unasked", "into"
        else:
            where, put = f"{name!r}", "beside the recipe or into"
        raise MinBertError(
            f"There is no module {where}. Put {name}.py {put} the working directory, install it, or import it first."
        )
    if beside and not files[0].is_relative_to(home):
        raise MinBertError(
            f"The plugin {name!r} in {home} cannot be imported: its name is already used by {files[0]}. Rename it."
        )
    if outside and not any(b".register(" in file.read_bytes() for file in files):
        raise MinBertError(
            f"The module {name!r} ({files[0]}) registers nothing: it is no plugin, and is not imported."
        )
    digest = _digest(files)
    if _digests.get(name, digest) != digest:
        raise MinBertError(f"The plugin {name!r} has changed since it was imported ({files[0]}). Start a new process.")
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # of any kind: it is other people's code
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise MinBertError(f"Importing the plugin {name!r} ({files[0]}) failed: {said}") from error
    if name not in _digests:
        logger.info("Plugin %s: %s.", name, files[0])
    _missing.pop(name, None)
    return _digests.setdefault(name, digest)


def _files(name: str) -> list[Path]:
    """Returns the files of a module, its own first, without importing it. Empty if there is no such module.

    For a package these are all of its files. For a single file, they include files in its folder that it imports.
    """
    try:
        spec = find_spec(name.split(".")[0])  # of a name without dots: to find a part of a package would import that
    except ValueError:  # such as of __main__
        return []
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    found = [Path(spec.origin).resolve()]
    if spec.submodule_search_locations:
        return [*found, *sorted({*found[0].parent.rglob("*.py")} - {*found})]
    for file in found:
        beside = [file.with_name(f"{top}.py") for top in sorted(_imported(file))]
        found += [path for path in beside if path not in found and path.is_file()]
    return found


def _imported(file: Path) -> set[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # which the import says better
        return set()
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in names}


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


# ---- Those that no recipe names ----------------------------------------------------------------------------------


def find_more(plugins: Sequence[str], model: str) -> str:
    """Called by a `Registry` before it refuses a name. Imports a saved model's plugins, then those of entry points.

    Returns:
        a sentence for each missing plugin; empty if there is none.
    """
    load_saved(plugins, model)
    for module in _entries(tuple(sys.path)):
        if module in _tried:
            continue
        _tried.add(module)  # first: a plugin that asks for a name while it is imported comes here again
        try:
            _load(module)
            _installed.append(module)
        except MinBertError as error:
            _missing[module] = str(error)
    return " ".join(_missing.values())


@cache
def _entries(path: tuple[str, ...]) -> list[str]:
    """The modules of installed entry points, by `sys.path`."""
    return [entry.module for entry in entry_points(group=GROUP)]


def load_saved(entries: Iterable[str], model: str | Path) -> None:
    """Imports the plugins that a saved model names, from outside its folder.

    A missing plugin is an error only when one of its names is used.
    """
    for entry in entries:
        name = module_of(entry)
        if name in sys.modules:
            continue
        if not (Path(entry).is_absolute() and Path(entry).parent.is_dir()):
            entry = _located(name, [Path.cwd()])
        try:
            _load(entry, outside=Path(model).resolve())
        except MinBertError as error:
            _missing[name] = f"The model {model} names the plugin {name!r}. {error}"
