"""The environment of a run: machine and versions."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import TrainingArguments

PACKAGES = ("hf_minbert", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "numpy")


def environment(args: TrainingArguments) -> dict[str, Any]:
    """Returns seed, processes, device and versions, for `environment.json` and the model card."""
    device = args.device
    return {
        "seed": args.seed,
        "processes": args.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
