"""Copies the code of the plugins that a model needs into its folder.

This file is uploaded to the Hub with a model. It may import only its neighbours and published libraries.
"""

from __future__ import annotations

import ast
import logging
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_imports, get_relative_imports

from .heads import registries_of

logger = logging.getLogger(__name__)

PACKAGE = __name__.rpartition(".")[0]

FILE = "plugins.py"
#: Imported by `modeling_minbert`. The library finds the plugins by these relative imports, and fetches them too.
TEXT = '"""The plugins of this model. Each is a file beside this one, and registers what the tasks name."""\n\n'
LINE = "from .{name} import __name__ as _  # noqa: F401\n"
FORM = "`try: from .heads import Head` and `except ImportError: from hf_minbert.model.heads import Head`"


def plugins_of(tasks: Iterable[Mapping[str, Any]], known: Sequence[str] = ()) -> list[str]:
    """Returns the modules that registered the names in the tasks, in the order of the names.

    Args:
        known: the entry of the config, which is used if a name is not registered.
    """
    found: dict[str, None] = {}
    for task in tasks:
        for key, registry in registries_of(task).items():
            name = task[key]
            if not name or name in registry.own:
                continue
            modules = [registry.modules[name].removeprefix(f"{PACKAGE}.")] if name in registry.modules else known
            found |= dict.fromkeys(modules)
    return list(found)


def save_plugins(plugins: Sequence[str], folder: str | Path) -> None:
    """Copies the plugins into a folder with the model's own code, and warns about those that cannot be copied."""
    if not plugins:
        return
    folder, lines = Path(folder), [TEXT]
    for name in plugins:
        why, file = why_it_stays(name, plugins), _file(name)
        if why is not None or file is None:
            _warn(f"The plugin {name} is not saved with the model: {why}.")
            continue
        lines.append(LINE.format(name=name))
        if file.resolve() != (folder / file.name).resolve():
            shutil.copyfile(file, folder / file.name)
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def why_it_stays(name: str, plugins: Sequence[str] = ()) -> str | None:
    """Returns a clause that says why a plugin cannot be copied to the model's folder; `None` if it can.

    Args:
        plugins: all plugins that the model needs.
    """
    if name == "__main__":
        return "it is the script that was run. Put it into a module of its own"
    file = _file(name)
    if file is None:
        return "no such module is imported here. Import it first"
    if "." in name or file.name == "__init__.py":
        return "it is a package, or a part of one. Put it into one file"
    own = {path.stem for path in Path(__file__).parent.glob("*.py")}
    if name in own and file.parent != Path(__file__).parent:
        return f"the model has a file {name}.py of its own. Rename it"
    for top in get_imports(file) + _tried_first(file):
        if top == PACKAGE.split(".")[0]:
            return f"it imports {top} where that must be installed. Import the model's files by {FORM}"
        if top not in sys.stdlib_module_names and top not in _published():
            return f"it imports {top}, which is of no installed distribution. Put what it needs into its own file"
    for near in get_relative_imports(file):
        if near not in own and near not in plugins:
            return f"it imports .{near}, which is none of the model's files. Import that by its full name"
    return None


def _tried_first(file: Path) -> list[str]:
    """Returns this package's name if a `try` begins with an import of it. The library skips imports inside `try`."""
    tries = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Try)]
    begun = [inner for node in tries for part in node.body for inner in ast.walk(part)]
    modules = [node.module or "" for node in begun if isinstance(node, ast.ImportFrom) and node.level == 0]
    modules += [alias.name for node in begun if isinstance(node, ast.Import) for alias in node.names]
    return [top for top in (module.split(".")[0] for module in modules) if top == PACKAGE.split(".")[0]]


def _file(name: str) -> Path | None:
    here = Path(__file__)
    if name in get_relative_imports(here.with_name(FILE)):  # this is a saved folder, and the plugin is a part of it
        return here.with_name(f"{name}.py")
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else Path(file)


@cache
def _published() -> frozenset[str]:
    return frozenset(packages_distributions())


@cache
def _warn(message: str) -> None:
    """Once: a run saves often."""
    logger.warning(message)
