"""The models and data of a world as objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMED = ("teacher.model", "student.model", "data.train")


def quick(world: Path, **over: Any) -> dict[str, Any]:
    """Settings of a short run without what is given as an object."""
    return {key: value for key, value in tiny.settings(world, **over).items() if key not in NAMED}


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def texts(world: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (world / "train.jsonl").read_text(encoding="utf-8").splitlines()]


def given(world: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(world / "teacher")
    return {
        "teacher": (load(world / "teacher"), tokenizer),
        "student": (load(world / "student"), tokenizer),
        "data": texts(world),
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
