"""The folder of a model whose weights another program writes: everything beside them, and the model read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_configuration(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """What `save_pretrained` writes beside the weights; `dtype` where they are written in another than the model's."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype or model.dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def open_written(model: Any, folder: Path) -> Any:
    """A model of the same class from a folder, in FP32 and in evaluation mode."""
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()
