"""sar-transient: where each token's gates would have to go for a better answer, given the student's view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.models.routers import Routing
from stillroom.teachers.router.terms import Aims, own_terms
from stillroom.types import Batch, Needs, StudentView, Term

if TYPE_CHECKING:
    from stillroom.teachers.router.teacher import RouterTeacher


def downhill_offsets(teacher: RouterTeacher, batch: Batch, view: StudentView) -> tuple[dict[str, Tensor], list[Term]]:
    """For each gate, offsets of its logits of bounded length against the router's gradient, [tokens, experts].

    Where a token has no usable gradient the offset is 0; how many those are is the second answer, a term for each gate.
    """
    num_tokens = int(batch.input_ids.numel())
    config, original = teacher.config, teacher.original
    offsets = {
        gate.name: torch.zeros(num_tokens, gate.num_experts, device=original.device, requires_grad=True)
        for gate in teacher.found
    }
    aims = Aims(truth=config.truth_weight, student=config.student_weight)
    with torch.enable_grad(), teacher.opened(Routing(offsets=offsets)) as routing:
        answer = original.answer(batch, Needs())
        loss, _terms = own_terms(aims, answer, view, None, routing, batch, batch.num_scored, num_tokens)
        # One over the number of targets would flush FP16 gradients to zero; only directions are used.
        slopes = torch.autograd.grad(loss * batch.num_scored, list(offsets.values()))
    moved, unmoved = {}, []
    for name, slope in zip(offsets, slopes, strict=True):
        length = slope.norm(dim=1, keepdim=True)
        is_usable = torch.isfinite(length) & (length > 0)
        step = -config.offset_bound * slope / torch.where(is_usable, length, torch.ones_like(length))
        moved[name] = torch.where(is_usable, step, torch.zeros_like(step))
        unmoved.append(Term((~is_usable).sum().float(), torch.tensor(float(len(length)))))
    return moved, unmoved
