"""A small world to train in: the embedded teacher, a student of a few thousand weights, and a text of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from stillroom import builtin
from stillroom.config import Config, load_config

_SAYING = (
    "the still room keeps spirits and waters, and the maid who keeps the room knows how long a thing must be "
    "heated, how slowly it must drip, and what is left behind when the best of it has gone over the bridge"
)
_NUM_TEXTS = 120


def make_world(folder: Path) -> None:
    """Write the student's configuration and the training text into a folder."""
    student = folder / "student"
    student.mkdir(parents=True, exist_ok=True)
    large = json.loads((builtin.model_path("student") / "config.json").read_text(encoding="utf-8"))
    small = {**large, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (student / "config.json").write_text(json.dumps({**small, "num_key_value_heads": 2}), encoding="utf-8")
    rng, words = random.Random(0), _SAYING.split()
    lines = []
    for _ in range(_NUM_TEXTS):
        start, length = rng.randrange(len(words)), rng.randrange(8, 24)
        lines.append(json.dumps({"text": " ".join(words[(start + i) % len(words)] for i in range(length)) + "."}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def world_config(folder: Path, **over: Any) -> Config:
    """A run of a second or two in that world; `over` with __ for the dots of keys."""
    base: dict[str, Any] = {
        "teacher.model": "builtin:teacher",
        "student.model": str(folder / "student"),
        "student.init": "random",
        "data.train": str(folder / "train.jsonl"),
        "data.max_length": 24,
        "data.eval_share": 0.1,
        "objectives.kd.weight": 0.7,
        "objectives.ce.weight": 0.3,
        "train.batch_size": 2,
        "train.learning_rate": 3e-3,
        "train.compile": "off",
        "guard.snapshot_steps": 4,
        "eval.max_batches": 1,
        "eval.samples": 0,
    }
    return load_config(overrides={**base, **{key.replace("__", "."): value for key, value in over.items()}})
