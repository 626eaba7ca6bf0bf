"""The fields of a router event: state of the gates, use of the experts, and means of the router's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stillroom.teachers.router.peers import ALONE, Peers
from stillroom.teachers.router.terms import Assessment
from stillroom.types import Term

if TYPE_CHECKING:
    from stillroom.teachers.router.teacher import RouterTeacher


class TermSums:
    """Sums of named terms over micro-batches, kept on the device."""

    def __init__(self) -> None:
        self._terms: dict[str, Term] = {}

    def add(self, name: str, term: Term) -> None:
        total, count = term.total.detach(), term.count.detach()
        known = self._terms.get(name)
        self._terms[name] = Term(total, count) if known is None else Term(known.total + total, known.count + count)

    def means(self, peers: Peers = ALONE, device: torch.device | None = None) -> dict[str, float]:
        """The means over the micro-batches of all processes."""
        names = peers.names(self._terms)
        held = [self._terms.get(name) for name in names]
        values = [(float(term.total), float(term.count)) if term else (0.0, 0.0) for term in held]
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        peers.sum_(sums)
        return {name: total / max(count, 1.0) for name, (total, count) in zip(names, sums.tolist(), strict=True)}


def event_fields(teacher: RouterTeacher, assessment: Assessment, terms: Mapping[str, float]) -> dict[str, Any]:
    gates = teacher.gates
    return {
        "mode": teacher.config.mode,
        "is_frozen": teacher.is_frozen,
        "teacher_nll": assessment.nll,
        "teacher_nll_start": teacher.start_nll,
        "kl_to_original": assessment.kl_to_original,
        "updates": gates.num_applied,
        "skipped": gates.num_skipped,
        "mended": gates.num_mended,
        "grad_norm": gates.last_norm,
        "terms": dict(terms),
        "layers": [
            {**vars(layer), "drift": gates.drift(gate.weight)}
            for gate, layer in zip(teacher.moe_gates, assessment.layers, strict=True)
        ],
    }
