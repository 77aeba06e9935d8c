"""A model with an adapter: how a run with `peft` saves it, and how it is loaded and merged into one model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from transformers.dynamic_module_utils import custom_object_save

from ..errors import MinBertError, explain
from ..model.modeling_minbert import MinBertForMultiTask
from ..model.saving import plugins_of, save_plugins

NAME = "default"  # what peft calls an adapter that has no name
#: peft reads them as their common base, which lacks what they share.
AdapterConfig = LoraConfig | LoHaConfig | LoKrConfig | OFTConfig | IA3Config


class AdaptedModel(PeftModel):
    """A `PeftModel` around `MinBertForMultiTask` whose saved folder is that of a run, with the tasks in its config.

    The model's code is saved there too, so that base and adapter load without this package.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        with warnings.catch_warnings():  # of an attribute's new name in transformers, which is peft's affair
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            super().__init__(*args, **kwargs)

    def get_base_model(self) -> MinBertForMultiTask:
        """Returns the model under the adapter, with the adapter's layers in it."""
        return cast(MinBertForMultiTask, super().get_base_model())  # peft knows it as any module

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Saves the adapter, trained heads, config and code. See `PeftModel.save_pretrained`."""
        # Unless told, peft asks the Hub at each checkpoint whether the base's vocabulary is still of that size.
        kwargs.setdefault("save_embedding_layers", False)
        super().save_pretrained(str(save_directory), *args, **kwargs)
        model = self.get_base_model()
        model.config.architectures = [type(model).__name__]
        model.config.plugins = plugins_of(model.config.tasks or (), model.config.plugins or ()) or None
        custom_object_save(model, save_directory, config=cast(Any, model.config))  # its annotation says dict
        save_plugins(model.config.plugins or (), save_directory)
        model.config.save_pretrained(save_directory)

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Does nothing.

        The card of peft does not mention the tasks, and contains the base's path on this machine.
        """


def read_adapter(name: str, revision: str | None = None) -> AdapterConfig:
    """Reads the config of a saved adapter. Raises `MinBertError` if it cannot be read or names no model."""
    with explain(f"Reading the adapter {name!r}", "Give the folder of a finished run."):
        adapter = PeftConfig.from_pretrained(name, revision=revision)
        if not adapter.base_model_name_or_path:
            raise MinBertError(
                f"The adapter {name!r} does not name its base model, so it cannot be loaded. Set "
                f"`base_model_name_or_path` in its adapter_config.json."
            )
    return cast(AdapterConfig, adapter)


def load_adapted(
    name: str,
    adapter: AdapterConfig,
    base: MinBertForMultiTask,
    missing: list[str],
    revision: str | None = None,
    other: Iterable[str] = (),
) -> tuple[AdaptedModel, list[str]]:
    """Loads a saved adapter onto the model that it was trained on.

    Args:
        name, revision: the adapter.
        adapter: its config.
        base: the base model, with the tasks of the result.
        missing: the names of the weights that the base lacks.
        other: tasks whose saved heads differ from those of `base`.

    Returns:
        the model, ready for training, and the weights that both base and adapter lack.

    Raises:
        MinBertError: the adapter lacks weights, or was trained on another encoder.
    """
    heads = {f"heads.{task}" for task in base.config.task_names if task not in other}
    saved = [part for part in adapter.modules_to_save or () if part in heads or not part.startswith("heads.")]
    new = lacking(missing) - {*saved}
    adapter.modules_to_save, adapter.inference_mode = sorted({*saved, *new}), False
    with explain(f"Loading the adapter {name!r}", "It does not go with this version of peft, or it is broken."):
        model = AdaptedModel(base, adapter)
        weights = load_peft_weights(name, device="cpu", revision=revision)
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        lost = [key for key in own if key not in weights and not _is_of(key, new)]
        if not lost:
            set_peft_model_state_dict(model, {key: weights.get(key, value) for key, value in own.items()})
    if lost:
        raise MinBertError(
            f"The adapter {name!r} lacks {len(lost)} of its weights, among them {lost[0]}. It was trained for "
            f"other tasks with private layers, or on another base model than it names."
        )
    return model, [key for key in missing if not _is_of(key, {*saved})]


def merged(model: AdaptedModel) -> MinBertForMultiTask:
    """Merges the adapter into an ordinary model with the same outputs, up to rounding. Consumes the adapted model."""
    model.merge_adapter()
    plain = model.get_base_model()
    # By hand: peft's `merge_and_unload` takes a head that is saved whole for one layer, but with LoRA.
    for name, module in [*plain.named_modules()]:
        if isinstance(module, BaseTunerLayer):
            plain.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            plain.set_submodule(name, module.modules_to_save[NAME])
    return plain.requires_grad_(True)


def lacking(missing: Iterable[str]) -> set[str]:
    """Returns the modules that a base lacks: heads and the shared encoder's pooler."""
    heads = {".".join(key.split(".")[:2]) for key in missing if key.startswith("heads.")}
    return heads | {key.partition(".pooler.")[0] + ".pooler" for key in missing if re.match(r"bert\..*pooler\.", key)}


def _is_of(key: str, modules: Iterable[str]) -> bool:
    """Whether a weight, by its name in a model or in an adapter's file, is in one of these modules of the model."""
    return key.removeprefix("base_model.model.").startswith(tuple(f"{module}." for module in modules))
