"""One BERT written by hand, several sentence tasks, one training run, one published model.

Importing the package makes `AutoConfig` know MinBERT. The model classes, which cost more to import, become
known to the Auto classes, and the pipeline "minbert-multitask" to `pipeline`, when the first `MinBertConfig` is built:
no model is loaded without one.
"""

from __future__ import annotations

from importlib import import_module

from transformers import AutoConfig

from .configuration_minbert import MinBertConfig

__version__ = "0.1.0"

_HOMES = {
    "MinBertModel": ".modeling_minbert",
    "MinBertForMaskedLM": ".modeling_minbert",
    "MinBertForMultiTask": ".modeling_minbert",
    "Task": ".tasks",
    "TASKS": ".tasks",
    "get_tasks": ".tasks",
    "MinBertError": ".errors",
    "MultiTaskTrainer": ".training.trainer",
    "MultiTaskTrainingArguments": ".training.args",
    "PCGrad": ".training.aggregators",
    "MultiTaskPipeline": ".pipeline_minbert",
    "Predictor": ".prediction",
}

__all__ = [
    "MinBertConfig",
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


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
    from transformers.pipelines import PIPELINE_REGISTRY

    from .modeling_minbert import MinBertForMaskedLM, MinBertForMultiTask, MinBertModel
    from .pipeline_minbert import PIPELINE, MultiTaskPipeline

    AutoModel.register(MinBertConfig, MinBertModel, exist_ok=True)
    AutoModelForMaskedLM.register(MinBertConfig, MinBertForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(MinBertConfig, MinBertForMultiTask, exist_ok=True)
    PIPELINE_REGISTRY.register_pipeline(
        PIPELINE, MultiTaskPipeline, pt_model=AutoModelForSequenceClassification, type="text"
    )


def _hook_first_config() -> None:
    # Here and not in the config's own file: that file travels to the Hub, where no package is to register.
    original = MinBertConfig.__post_init__

    def first(self, **kwargs):
        MinBertConfig.__post_init__ = original
        _register_models()
        original(self, **kwargs)

    MinBertConfig.__post_init__ = first


AutoConfig.register("minbert", MinBertConfig, exist_ok=True)
MinBertConfig.pipelines_at_hand = frozenset({"minbert-multitask"})
_hook_first_config()
