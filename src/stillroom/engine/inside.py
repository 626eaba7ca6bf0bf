"""The inner objectives of a run: planned from two real models and checked on them, with what there is to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stillroom.config import Config
from stillroom.errors import ConfigError
from stillroom.models import anatomy, gives_attention
from stillroom.models.attention import show_attention
from stillroom.objectives.inner_terms import Inner, Inside, plan_inner


def make_inner(
    config: Config, student: Any, teacher: Any, device: torch.device, *, kept: Sequence[int] | None = None
) -> Inner:
    """The inner terms of the configuration, with their projectors on the device, and notes for the log."""
    objectives = config.objectives
    notes: list[str] = []
    if objectives.attention.weight != 0.0 and not objectives.attention.attention_layers:
        notes.append("objectives.attention.attention_layers = 0: the attention term is off")
    if not objectives.inner_weights:
        if config.train.projector_learning_rate:
            notes.append("train.projector_learning_rate has no effect: no inner objective is used")
        return Inner({}, nn.ModuleDict(), tuple(notes))
    inner = plan_inner(objectives, _inside(student), _inside(teacher), seed=config.train.seed, kept=kept)
    inner.projectors.to(device)
    for name, term in inner.terms.items():
        pairs = ", ".join(f"{mine} to {goal}" for mine, goal in term.pairs)
        notes.append(f"{name}: layers of the student to layers of the teacher, counted from 0: {pairs}")
    num_projected = sum(parameter.numel() for parameter in inner.projectors.parameters())
    if num_projected:
        notes.append(f"projectors of {num_projected:,} parameters are trained beside the student and are no part of it")
    if "attention" in inner.terms:
        notes += _open_attention(inner, student, teacher, config.data.max_length)
    if "contrastive" in inner.terms:
        notes.append(_on_contrast(config.train.batch_size))
    return Inner(inner.terms, inner.projectors, tuple(notes))


def _inside(model: Any) -> Inside:
    found = anatomy(model)
    return Inside(found.num_layers, found.width)


def _open_attention(inner: Inner, student: Any, teacher: Any, length: int) -> list[str]:
    """Let both models show the maps that are asked for, or refuse while nothing is lost yet."""
    watched, notes = inner.watched, []
    for role, model, needs in (("student", student, watched.student), ("teacher", teacher, watched.teacher)):
        how = show_attention(model)
        if not gives_attention(model, needs.attention_layers):
            raise ConfigError(
                f"the {role} ({anatomy(model).family}) does not give its attention maps",
                where="objectives.attention",
                advice=["set objectives.attention.weight = 0", "hidden states serve every model: objectives.layerwise"],
            )
        notes.append(
            f"attention: the {role} {how}; each chosen layer keeps {length:,} x {length:,} numbers a head and row"
        )
    return notes


def _on_contrast(batch_size: int) -> str:
    if batch_size == 1:
        return "contrastive: a micro-batch of one row has nothing to contrast, so the term is 0: raise train.batch_size"
    return (
        f"contrastive: the negatives of a row are the other {batch_size - 1} of its micro-batch, "
        "so this term alone depends on how a window is cut into micro-batches"
    )
