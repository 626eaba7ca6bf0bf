"""The fields of a router event: state of the gates, use of the experts, and means of the router's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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

    def means(self) -> dict[str, float]:
        values = {name: (float(term.total), float(term.count)) for name, term in self._terms.items()}
        return {name: total / max(count, 1.0) for name, (total, count) in values.items()}


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
