"""Legacy JSON: translate the flat configurations of the student-aware distillation project.

Each key is mapped to ours and each mapping is noted, because some change meaning: a micro-step there is an
optimizer step here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stillroom.errors import ConfigError

Table = dict[str, Any]

_DIRECT = {
    "teacher_model": "teacher.model",
    "student_model": "student.model",
    "teacher_model_name": "teacher.model",
    "student_model_name": "student.model",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "max_length": "data.max_length",
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "learning_rate": "train.learning_rate",
    "router_lr": "train.router_learning_rate",
    "warmup_ratio": "train.warmup_ratio",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "num_epochs": "train.epochs",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "eval_steps": "train.eval_steps",
    "save_steps": "train.save_steps",
    "seed": "train.seed",
    "temperature": "objectives.kd.temperature",
    "alpha_kd": "objectives.kd.weight",
    "alpha_ce": "objectives.ce.weight",
    "alpha_feature": "objectives.feature.weight",
    "alpha_attention": "objectives.attention.weight",
    "alpha_layerwise": "objectives.layerwise.weight",
    "alpha_contrastive": "objectives.contrastive.weight",
    "attention_layers": "objectives.attention.attention_layers",
    "use_gradient_checkpointing": "student.gradient_checkpointing",
}

# Keys whose meaning differs from ours: (our key, our value, the difference).
_MAX_WARMUP = 0.1  # of the optimizer steps

_TRANSLATED: dict[str, Callable[[Any], tuple[str, Any, str]]] = {
    "kd_top_k": lambda value: (
        "objectives.kd.top_k",
        value,
        "the teacher's k likeliest tokens with the exact mass of the rest; the original renormalised both sides",
    ),
    "warmup_steps": lambda value: (
        "train.warmup_steps",
        value,
        "at most a tenth of the optimizer steps, as in the original: train.max_warmup_share",
    ),
    "router_anchor_weight": lambda value: (
        "teacher.router.anchor_weight",
        value,
        "KL to the original teacher's answers; the original took the squared distance of the gates",
    ),
    "router_load_balance_weight": lambda value: (
        "teacher.router.load_balance_weight",
        value,
        "from live gates; the original's had no gradient",
    ),
    "router_entropy_weight": lambda value: (
        "teacher.router.entropy_weight",
        value,
        "from live gates; the original's had no gradient",
    ),
}

_IGNORED = {
    "num_workers": "batches are made in the training process",
    "fp16": "use precision.mode",
}


def is_legacy(table: Table) -> bool:
    """True when the table is flat and has at least two legacy keys."""
    legacy_keys = set(_DIRECT) | set(_TRANSLATED) | {"use_curriculum"}
    return not any(isinstance(value, dict) for value in table.values()) and len(legacy_keys & set(table)) >= 2


def translate(table: Table, where: str = "") -> tuple[Table, list[str]]:
    """Return our nested table and one note for each legacy key. Values are checked with the other settings later."""
    nested: Table = {}
    notes: list[str] = []
    for key, value in table.items():
        if key in _DIRECT:
            _put(nested, _DIRECT[key], value)
            notes.append(f"{key} = {value!r} -> {_DIRECT[key]}")
        elif key in _TRANSLATED:
            target, mapped, why = _TRANSLATED[key](value)
            _put(nested, target, mapped)
            if key == "warmup_steps":
                _put(nested, "train.max_warmup_share", _MAX_WARMUP)
            notes.append(f"{key} = {value!r} -> {target} ({why})")
        elif key == "use_curriculum":
            continue  # below, because it needs all weights
        elif key in _IGNORED:
            notes.append(f"{key} = {value!r} is not used: {_IGNORED[key]}")
        else:
            nested[key] = value  # validation reports it as unknown
    if "use_curriculum" in table:
        is_on = table["use_curriculum"]
        if not isinstance(is_on, bool):
            raise ConfigError(f"use_curriculum: expected true or false, got {is_on!r}"[:200], where=where)
        notes.append(_curriculum(nested, is_on))
    return nested, notes


# Default weight, begin and end of each ramp, as in the student-aware preset.
_RAMPS = {
    "feature": (0.1, 0.3, 0.6),
    "attention": (0.1, 0.3, 0.6),
    "layerwise": (0.05, 0.6, 0.8),
    "contrastive": (0.05, 0.6, 0.8),
}


def _curriculum(nested: Table, is_on: bool) -> str:
    """Three phases: logits alone, then features and attention, then the rest."""
    if not is_on:
        return "use_curriculum = False -> constant weights"
    nested["curriculum"] = {
        "phases": [
            {"name": "logits", "until": 0.3},
            {"name": "features", "until": 0.6},
            {"name": "all", "until": 1.0},
        ]
    }
    objectives = nested.setdefault("objectives", {})
    if "weight" not in objectives.get("kd", {}):
        _put(nested, "objectives.kd.weight", 0.7)
        _put(nested, "objectives.ce.weight", 0.3)
    ramps = []
    for name, (weight, begin, until) in _RAMPS.items():
        end = objectives.get(name, {}).get("weight", weight)
        if isinstance(end, int | float) and end != 0:  # validation reports what is not a number
            ramp = {"start": 0.0, "end": end, "begin": begin, "until": until}
            _put(nested, f"objectives.{name}.weight", ramp)
            ramps.append(f"{name} to {end} from {begin:.0%}")
    inner = ", ".join(ramps) or "no inner objective"
    return f"use_curriculum = True -> phases 0-30-60-100 %, kd {objectives['kd']['weight']} from the start, {inner}"


def _put(table: Table, key: str, value: Any) -> None:
    *folders, last = key.split(".")
    for folder in folders:
        table = table.setdefault(folder, {})
    table[last] = value
