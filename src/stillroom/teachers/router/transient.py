"""sar-transient: move the gates' logits of each token a bounded step downhill, given the student's view."""

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
    """For each gate, offsets of its logits against the router's gradient, of bounded norm. [tokens, experts]

    The offset of a token without a usable gradient is 0; the second result counts those tokens, a term for each gate.
    """
    num_tokens = int(batch.input_ids.numel())
    config, original = teacher.config, teacher.original
    offsets = {
        gate.name: torch.zeros(num_tokens, gate.num_experts, device=original.device, requires_grad=True)
        for gate in teacher.moe_gates
    }
    aims = Aims(truth=config.truth_weight, student=config.student_weight)
    with torch.enable_grad(), teacher.opened(Routing(offsets=offsets)) as routing:
        answer = original.answer(batch, Needs())
        loss, _terms = own_terms(aims, answer, view, None, routing, batch, batch.num_scored, num_tokens)
        # Undo the division by the number of targets, which would flush FP16 gradients to 0: only directions are used.
        slopes = torch.autograd.grad(loss * batch.num_scored, list(offsets.values()))
    moved, unmoved = {}, []
    for name, slope in zip(offsets, slopes, strict=True):
        length = slope.norm(dim=1, keepdim=True)
        is_usable = torch.isfinite(length) & (length > 0)
        step = -config.offset_bound * slope / torch.where(is_usable, length, torch.ones_like(length))
        moved[name] = torch.where(is_usable, step, torch.zeros_like(step))
        unmoved.append(Term((~is_usable).sum().float(), torch.tensor(float(len(length)))))
    return moved, unmoved
