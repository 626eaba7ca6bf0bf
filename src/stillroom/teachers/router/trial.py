"""Try one small forward and backward through a teacher's gates when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stillroom.ends import explained
from stillroom.errors import ConfigError
from stillroom.models.routers import Routing
from stillroom.types import Batch, Needs

if TYPE_CHECKING:
    from stillroom.teachers.router.teacher import RouterTeacher

_TRIAL_TOKENS = 32


def try_out(teacher: RouterTeacher) -> None:
    """Raise if the mode cannot choose the teacher's experts. Tell of gates without a gradient."""
    ids = torch.arange(_TRIAL_TOKENS).remainder(teacher.original.vocab_size).unsqueeze(0)
    batch = Batch(ids, torch.ones_like(ids), ids, torch.zeros_like(ids), ("trial",)).to(teacher.original.device)
    try:
        teacher.observe(batch, Needs())
    except (RuntimeError, IndexError) as error:
        if explained(error, "") is not None:  # memory: the run's end says so, and it is no fault of the gates
            raise
        raise ConfigError(
            f"this teacher's experts cannot be chosen as teacher.router.mode {teacher.config.mode} asks: {error}",
            where="teacher.router.mode",
            advice=["modes that keep the teacher's own choice: frozen, truth, sar"],
        ) from error
    if not teacher.trains:
        return
    gates = teacher.gates
    with torch.enable_grad(), teacher.opened(Routing(weights=gates.weights)):
        answer = teacher.original.answer(batch, Needs())
        answer.hidden.float().square().sum().backward()  # type: ignore[no-untyped-call]
    slopes = {gate.name: gates.weights[gate.weight].grad for gate in teacher.moe_gates}
    without_gradient = [name for name, slope in slopes.items() if slope is None or not bool(slope.any())]
    gates.discard()
    if without_gradient:
        teacher.tell(
            f"on a trial text the teacher's answers do not depend on the logits of {len(without_gradient)} of "
            f"{len(slopes)} gates, beyond which expert is first: {without_gradient[0]}; little can be trained there"
        )
