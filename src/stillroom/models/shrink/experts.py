"""Drop experts of a mixture: keep those that carry the most routing weight on real text, in each layer separately.

What a family does with the others' router logits at minus infinity is what the cut must compute: `check_logits` of
`models/shrink/cut.py` compares the two.

Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch
from stillroom.models.anatomy import backbone, in_eval_mode
from stillroom.models.routers import Gate, Routing, Seen, find_gates, has_gates, routed

Kept = Mapping[str, Tensor]  # a gate's name -> experts, in order


def gates_to_cut(teacher: Any, num_experts: int) -> list[Gate]:
    """The gates of a teacher. Raise if it has none, or too few experts or too few of them would be left."""
    where = "student.shrink.experts"
    if not has_gates(teacher):
        family = teacher.config.get_text_config().model_type
        raise ConfigError(f"this teacher ({family}) has no experts", where=where, advice=["leave it out"])
    gates = find_gates(teacher)
    least, most = max(gate.num_chosen for gate in gates), min(gate.num_experts for gate in gates)
    if not least <= num_experts <= most:
        raise ConfigError(
            f"student.shrink.experts is {num_experts}, and a token of this teacher chooses {least} of {most} experts",
            where=where,
            advice=[f"choose from {least} to {most}"],
        )
    return gates


@torch.no_grad()
def choose_experts(teacher: Any, gates: list[Gate], num_experts: int, batches: Iterable[Batch]) -> Kept:
    """The experts with the most routing weight over the batches, without padding."""
    weights = {gate.name: torch.zeros(gate.num_experts, dtype=torch.float64) for gate in gates}
    device, num_positions = next(teacher.parameters()).device, 0
    for batch in batches:
        places = batch.attention_mask.reshape(-1).nonzero().squeeze(-1)
        num_positions += int(places.numel())
        with in_eval_mode(teacher), routed(gates, Routing()) as routing:
            backbone(teacher)(input_ids=batch.input_ids.to(device), use_cache=False)
        for name, seen in routing.seen.items():
            weights[name] += _weights(seen)[places].sum(0)
    if not num_positions:
        raise ConfigError(
            "experts are ranked by the teacher's routing on real text, and there is no text",
            where="student.shrink.experts",
            advice=["give data.train"],
        )
    ranked = {name: sums.argsort(descending=True, stable=True) for name, sums in weights.items()}
    return {name: order[:num_experts].sort().values for name, order in ranked.items()}


def _weights(seen: Seen) -> Tensor:
    """The score of each expert that a token chose, 0 for the others, in main memory. [T, E]"""
    scores = seen.logits.sigmoid() if seen.is_sigmoid else seen.logits.softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, seen.chosen, scores.gather(1, seen.chosen))
    return chosen.double().cpu()


@contextmanager
def without_experts(gates: Sequence[Gate], kept: Kept) -> Iterator[None]:
    """Let no token choose an expert that is not kept, in the body."""
    offsets = {}
    for gate in gates:
        if gate.name in kept:
            device = next(gate.module.parameters()).device
            offset = torch.full((gate.num_experts,), -torch.inf, device=device)
            offsets[gate.name] = offset.index_fill(0, kept[gate.name].to(device), 0.0)
    with routed(gates, Routing(offsets=offsets)):
        yield


def kept_rows(origin: str, tensor: Tensor, num_rows: int, kept: Kept) -> Tensor:
    """A tensor of the teacher, of a gate or a bank of experts with the rows of the kept experts alone."""
    for name, experts in kept.items():
        if origin.startswith(f"{name.rpartition('.')[0]}.") and tensor.ndim and len(tensor) != num_rows == len(experts):
            return tensor.index_select(0, experts.to(tensor.device))
    return tensor
