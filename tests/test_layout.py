"""The package's modules as a graph: which imports which, and in which folder each lies."""

import ast
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_minbert"
#: Modules that nothing of the package needs to import: people, tools and saved folders do.
ENTRIES = {
    "hf_minbert.run.worker",  # the process of a worker
    "hf_minbert",  # the package
    "hf_minbert.__main__",  # python -m
    "hf_minbert.evaluation.hf_metrics",  # for the library `evaluate`
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> set[str]:
    """The package's modules that a module imports: at its top, inside functions, or for types alone."""
    path, found = MODULES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{home}.{alias.name}" for alias in node.names}
            submodules = names & MODULES.keys()
            found |= submodules | ({home} if submodules < names else set())
    return found & MODULES.keys() - {module}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {module: imports_of(module) for module in MODULES}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {module: reached(module) for module in graph}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_modules_import_each_other(graph):
    assert circles(graph) == []


def test_no_folders_import_each_other(graph):
    def folder(module: str) -> str:
        return ".".join(module.split(".")[:2])

    folders: dict[str, set[str]] = {folder(module): set() for module in graph}
    for module, others in graph.items():
        folders[folder(module)] |= {folder(other) for other in others} - {folder(module)}
    folders["hf_minbert"] = set()  # its public names import everything, when they are asked for
    assert circles(folders) == []


def test_the_top_level_has_few_folders_and_files():
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len([path for path in entries if path.is_dir()]) <= 10
    assert len([path for path in entries if path.is_file()]) <= 4


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=lambda path: path.name)
def test_what_travels_with_a_model_imports_its_neighbours_alone(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "hf_minbert"]
        elif isinstance(node, ast.ImportFrom) and node.level:
            # The library copies what it finds by `from .x import`, and nothing else.
            assert node.level == 1 and (path.parent / f"{node.module}.py").is_file(), ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] != "hf_minbert", ast.unparse(node)


def test_no_module_is_left_over(graph):
    used = ENTRIES.union(*graph.values()) | {m for m, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(MODULES.keys() - used) == []
