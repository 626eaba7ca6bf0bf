"""The inner objectives of a run: planned from two real models, checked on them, and told about in the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stillroom.config import Config
from stillroom.errors import ConfigError
from stillroom.models import anatomy, gives_attention
from stillroom.models.attention import show_attention
from stillroom.objectives.inner_terms import Inner, Inside, plan_inner


def make_inner(
    config: Config,
    student: Any,
    teacher: Any,
    device: torch.device,
    *,
    kept: Sequence[int] | None = None,
    tell: Callable[[str], object],
) -> Inner | None:
    """The inner terms of the configuration, with their projectors on the device. None where no lesson has any."""
    objectives = config.objectives
    if objectives.attention.weight != 0.0 and not objectives.attention.attention_layers:
        tell("objectives.attention.attention_layers = 0: the attention term is off")
    if not objectives.inner_weights:
        if config.train.projector_learning_rate:
            tell("train.projector_learning_rate has no effect: no inner objective is used")
        return None
    inner = plan_inner(objectives, _inside(student), _inside(teacher), seed=config.train.seed, kept=kept)
    inner.projectors.to(device)
    for name, term in inner.terms.items():
        pairs = ", ".join(f"{mine} to {goal}" for mine, goal in term.pairs)
        tell(f"{name}: layers of the student to layers of the teacher, counted from 0: {pairs}")
    num_projected = sum(parameter.numel() for parameter in inner.projectors.parameters())
    if num_projected:
        tell(f"projectors of {num_projected:,} parameters are trained beside the student and are no part of it")
    if "attention" in inner.terms:
        _open_attention(inner, student, teacher, config.data.max_length, tell)
    if "contrastive" in inner.terms:
        _tell_of_contrast(config.train.batch_size, tell)
    return inner


def _inside(model: Any) -> Inside:
    found = anatomy(model)
    return Inside(found.num_layers, found.width)


def _open_attention(inner: Inner, student: Any, teacher: Any, length: int, tell: Callable[[str], object]) -> None:
    """Let both models show the maps that are asked for, or refuse while nothing is lost yet."""
    watched = inner.watched
    for role, model, needs in (("student", student, watched.student), ("teacher", teacher, watched.teacher)):
        how = show_attention(model)
        if not gives_attention(model, needs.attention_layers):
            raise ConfigError(
                f"the {role} ({anatomy(model).family}) does not give its attention maps",
                where="objectives.attention",
                advice=["set objectives.attention.weight = 0", "hidden states serve every model: objectives.layerwise"],
            )
        tell(f"attention: the {role} {how}; each chosen layer keeps {length:,} x {length:,} numbers a head and row")


def _tell_of_contrast(batch_size: int, tell: Callable[[str], object]) -> None:
    if batch_size == 1:
        tell("contrastive: a micro-batch of one row has nothing to contrast, so the term is 0: raise train.batch_size")
        return
    tell(
        f"contrastive: the negatives of a row are the other {batch_size - 1} of its micro-batch, "
        "so this term alone depends on how a window is cut into micro-batches"
    )
