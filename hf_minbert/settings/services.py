"""The services of `report_to` and their libraries, found without importing torch and transformers."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..errors import MinBertError, unknown_name

#: What a service needs, by module the package that brings it, where that is not one of the service's own name.
NEEDS = {
    "azure_ml": {"azureml.core": "azureml-sdk"},
    "dagshub": {"dagshub": "dagshub", "mlflow": "mlflow"},
    "flyte": {"flytekit": "flytekit", "flytekitplugins.deck": "flytekitplugins-deck-standard"},
    "kubeflow": {},  # asks the environment
}
#: A module that does as well.
INSTEAD = {"tensorboard": "tensorboardX"}
#: Those that an extra of this package brings.
EXTRAS = ("tensorboard",)


@cache
def services() -> tuple[str, ...]:
    """Returns the names of the services, read from the source of transformers."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "integrations" / "integration_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK":
            assert isinstance(node.value, ast.Dict)
            return tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise LookupError(source)


def check_services(report_to: object) -> None:
    """Raises `MinBertError` if `report_to` names an unknown service, or one whose library is not installed."""
    named = [report_to] if isinstance(report_to, str) else report_to if isinstance(report_to, list | tuple) else []
    for name in named:
        if name in ("all", "none") and isinstance(report_to, str):
            continue
        if name not in services():
            raise unknown_name("`report_to`", name, services())
        for module, package in NEEDS.get(name, {name: name}).items():
            if not _is_installed(module) and not _is_installed(INSTEAD.get(module, module)):
                brought = f"'hf_minbert[{package}]'" if package in EXTRAS else package
                raise MinBertError(
                    f"`report_to: {name}` needs the library {package}, which is not installed. Run `pip install "
                    f"{brought}`, or leave it out."
                )


def _is_installed(module: str) -> bool:
    """Whether there is such a module. A folder with that name, such as a folder of logs, does not count."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None
