"""Plan the objectives beside `kd` and `ce` for two loaded models, and check that the models serve them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stillroom.config import Config
from stillroom.errors import ConfigError
from stillroom.models import anatomy_of, gives_attention
from stillroom.models.attention import show_attention
from stillroom.objectives.inner.terms import InnerObjective
from stillroom.objectives.objective import Inside, Matched, Planned, plan_objectives, union
from stillroom.types import BothNeeds


def make_objectives(
    config: Config,
    student: Any,
    teacher: Any,
    device: torch.device,
    *,
    kept: Sequence[int] | None = None,
    matched: Matched | None = None,
) -> Planned:
    """Plan the objectives beside `kd` and `ce`, put their projectors on the device, and collect notes for the log."""
    objectives = config.objectives
    notes: list[str] = []
    if objectives.attention.weight != 0.0 and not objectives.attention.attention_layers:
        notes.append("objectives.attention.attention_layers = 0: the attention term is off")
    if set(objectives.weights) == {"kd", "ce"}:
        return Planned((), tuple(notes))
    inside = _inside(student), None if teacher is None else _inside(teacher)
    planned = plan_objectives(objectives, *inside, seed=config.train.seed, kept=kept, matched=matched)
    planned.projectors.to(device)
    for objective in planned.objectives:
        if isinstance(objective, InnerObjective):
            pairs = ", ".join(f"{student_layer} to {teacher_layer}" for student_layer, teacher_layer in objective.pairs)
            notes.append(f"{objective.name}: layers of the student to layers of the teacher, counted from 0: {pairs}")
    num_projected = sum(parameter.numel() for parameter in planned.projectors.parameters())
    if num_projected:
        notes.append(f"projectors of {num_projected:,} parameters are trained beside the student and are no part of it")
    asked = union(objective.asked for objective in planned.objectives)
    if asked.student.attention_layers or asked.teacher.attention_layers:
        notes += _open_attention(asked, student, teacher, config.data.max_length)
    if planned.find("contrastive"):
        notes.append(_contrast_note(config.train.rows_per_batch))
    return Planned(planned.objectives, tuple(notes))


def _inside(model: Any) -> Inside:
    anatomy = anatomy_of(model)
    return Inside(anatomy.num_layers, anatomy.width)


def _open_attention(asked: BothNeeds, student: Any, teacher: Any, length: int) -> list[str]:
    """Make both models return the attention maps of the asked layers. Raise if one cannot."""
    notes = []
    for role, model, needs in (("student", student, asked.student), ("teacher", teacher, asked.teacher)):
        if not needs.attention_layers:
            continue
        how = show_attention(model)
        if not gives_attention(model, needs.attention_layers):
            raise ConfigError(
                f"the {role} ({anatomy_of(model).family}) does not give its attention maps",
                where="objectives.attention",
                advice=["set objectives.attention.weight = 0", "hidden states serve every model: objectives.layerwise"],
            )
        notes.append(
            f"attention: the {role} {how}; each chosen layer keeps {length:,} x {length:,} numbers a head and row"
        )
    return notes


def _contrast_note(batch_size: int) -> str:
    if batch_size == 1:
        return "contrastive: a micro-batch of one row has nothing to contrast, so the term is 0: raise train.batch_size"
    return (
        f"contrastive: the negatives of a row are the other {batch_size - 1} of its micro-batch, "
        "so this term alone depends on how a window is cut into micro-batches"
    )
