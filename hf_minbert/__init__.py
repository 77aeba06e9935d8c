"""A hand-written BERT for several sentence tasks, as a Hugging Face model.

Importing this package imports neither torch nor transformers. When transformers imports its `AutoConfig`, MinBERT's
config is registered with it. The model classes take longer to import. They are registered with the Auto classes, and
the pipeline "minbert-multitask" with `pipeline`, when the first `MinBertConfig` is built. No model is loaded before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__version__ = "0.2.0"

_HOMES = {
    "MinBertConfig": ".model.configuration_minbert",
    "MinBertModel": ".model.modeling_minbert",
    "MinBertForMaskedLM": ".model.modeling_minbert",
    "MinBertForMultiTask": ".model.modeling_minbert",
    "Task": ".settings.tasks",
    "TASKS": ".settings.tasks",
    "get_tasks": ".settings.tasks",
    "DivergedError": ".errors",
    "MinBertError": ".errors",
    "MultiTaskTrainer": ".training.trainer",
    "MultiTaskTrainingArguments": ".training.args",
    "PCGrad": ".training.aggregation.pcgrad",
    "MultiTaskPipeline": ".model.pipeline_minbert",
    "Predictor": ".pretrained.prediction",
}

__all__ = [
    "MinBertConfig",
    "DivergedError",
    "MinBertError",
    "MinBertForMaskedLM",
    "MinBertForMultiTask",
    "MinBertModel",
    "MultiTaskPipeline",
    "MultiTaskTrainer",
    "MultiTaskTrainingArguments",
    "PCGrad",
    "Predictor",
    "TASKS",
    "Task",
    "__version__",
    "get_tasks",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_config() -> None:
    # Its file imports AutoConfig too: where that one came first, it is being read already.
    import_module(".model.configuration_minbert", __name__)


def _register_config() -> None:
    """Registers the config. The first config that is built then registers the models.

    This is not in the config's own file, because that file is uploaded to the Hub and must not register anything
    there.
    """
    from transformers import AutoConfig

    from .model.configuration_minbert import MinBertConfig

    AutoConfig.register("minbert", MinBertConfig, exist_ok=True)
    MinBertConfig.pipelines_at_hand = frozenset({"minbert-multitask"})
    original = MinBertConfig.__post_init__

    def first(self, **kwargs):
        MinBertConfig.__post_init__ = original
        _register_models()
        original(self, **kwargs)

    MinBertConfig.__post_init__ = first


def _import_plugins_on_demand() -> None:
    from .model.registry import Registry

    def find_more(names, model):
        from .settings.plugins import find_more

        return find_more(names, model)

    Registry.find_more = staticmethod(find_more)


def _register_models() -> None:
    from transformers import (
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.pipelines import PIPELINE_REGISTRY

    from .model.configuration_minbert import MinBertConfig
    from .model.modeling_minbert import MinBertForMaskedLM, MinBertForMultiTask, MinBertModel
    from .model.pipeline_minbert import PIPELINE, MultiTaskPipeline

    AutoModel.register(MinBertConfig, MinBertModel, exist_ok=True)
    AutoModelForMaskedLM.register(MinBertConfig, MinBertForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(MinBertConfig, MinBertForMultiTask, exist_ok=True)
    AutoModelForTokenClassification.register(MinBertConfig, MinBertForMultiTask, exist_ok=True)
    PIPELINE_REGISTRY.register_pipeline(
        PIPELINE, MultiTaskPipeline, pt_model=AutoModelForSequenceClassification, type="text"
    )


class _AfterImport(MetaPathFinder, Loader):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]):
        self.name, self.then = name, then

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the others are to find it
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader  # as if nothing had been between
        self.loader.exec_module(module)
        self.then()


def _after_import(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _MovedModules(MetaPathFinder, Loader):
    """Finds modules of version 0.1 by their old names, and imports them from the folder where they are now.

    Adapters and pickled objects of that version use such names, for example `hf_minbert.modeling_minbert`.
    """

    FOLDERS = ("model", "pretrained", "settings")

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        for folder in self.FOLDERS:
            if (Path(__file__).parent / folder / f"{name}.py").is_file():
                return ModuleSpec(fullname, self, origin=f"{__name__}.{folder}.{name}")
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None and module.__spec__.origin is not None
        sys.modules[module.__name__] = import_module(module.__spec__.origin)  # one module under both names


sys.meta_path.append(_MovedModules())
_after_import(f"{__name__}.model.registry", _import_plugins_on_demand)
_after_import(f"{__name__}.model.configuration_minbert", _register_config)
_after_import("transformers.models.auto.configuration_auto", _import_config)
