"""Plan a run: lay out its bytes in every precision, fit it into the bound, and say what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stillroom.config import Config
from stillroom.planning.cost import Cost, cost_of
from stillroom.planning.fit import Fitted, fit
from stillroom.planning.parts import Layout, chosen_mode, lay_out, micro_of
from stillroom.planning.probe import count_data, timed_step
from stillroom.planning.shapes import Shapes, Sizes
from stillroom.planning.target import Target
from stillroom.precision.policy import POLICIES


@dataclass(frozen=True)
class Plan:
    target: Target
    mode: str
    reason: str
    layout: Layout
    totals: dict[str, int]  # by precision
    activations: dict[str, int]  # kept for the backward pass, by how
    attention: dict[str, int]  # what both kernels keep
    fitted: Fitted
    cost: Cost
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.layout.total <= self.target.bound

    @property
    def is_possible(self) -> bool:
        return self.fitted.layout.total <= self.target.bound

    def to_dict(self) -> dict[str, Any]:
        after = self.fitted.layout
        return {
            "device": self.target.facts.name,
            "processes": self.target.sharing.num_processes,
            "strategy": self.target.sharing.strategy,
            "bound": self.target.bound,
            "precision": self.mode,
            "reason": self.reason,
            "plan": self.layout.to_dict(),
            "totals": self.totals,
            "activations": self.activations,
            "attention": self.attention,
            "fits": self.fits,
            "is_possible": self.is_possible,
            "short_by": max(0, after.total - self.target.bound),
            "changes": [one.to_dict() for one in self.fitted.applied],
            "settings": self.fitted.settings,
            "fitted": after.to_dict(),
            "cost": self.cost.to_dict(),
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    target: Target,
    *,
    is_quick: bool = False,
    probes: bool = False,
    tell: Callable[[str], None] = lambda _text: None,
) -> Plan:
    """`is_quick`: do not count the data. `probes`: load the models and time one real step on this machine."""
    shapes = Shapes(target)
    tell("the models as shapes")
    mode, reason = chosen_mode(config, shapes)
    counted = None
    if not is_quick:
        tell("the data")
        counted = count_data(config)
    num_tokens = counted[1] if counted else None
    layout = lay_out(config, shapes, mode, num_tokens=num_tokens)
    tell("every precision")
    totals = {name: lay_out(config, shapes, name).total for name in _possible(config, target)}
    fitted = fit(config, shapes, target.bound)
    measured = None
    if probes:
        tell("one real step")
        measured = timed_step(config, target.device)
    cost = cost_of(
        config, layout, teacher=_teacher(config, shapes, layout), counted=counted[:2] if counted else None,
        card=target.card, measured=measured,
    )  # fmt: skip
    kept, attention = _alternatives(config, shapes, mode)
    return Plan(
        target, mode, reason, layout, totals, kept, attention, fitted, cost,
        (*target.notes, *shapes.notes, *target.sharing.notes, *_left_out(config)),
    )  # fmt: skip


def _possible(config: Config, target: Target) -> list[str]:
    """Precisions that the device has, and the configuration allows."""
    has_bf16 = target.facts.has_native_bf16 or not target.is_card
    base = config.student.adapter.base_dtype if config.student.adapter is not None else "auto"
    is_half_possible = base in ("auto", "float16")
    return [
        mode
        for mode, policy in POLICIES.items()
        if (mode != "bf16-mixed" or has_bf16)
        and (is_half_possible or not policy.keeps_half_weights)
        and not (target.sharing.is_sharded and mode in ("fp16-split", "fp16-sr"))
    ]


def _teacher(config: Config, shapes: Shapes, layout: Layout) -> Sizes | None:
    """The teacher's sizes for the cost, also where a cache answers for it. None where nothing asks it."""
    if layout.teacher is not None or not shapes.uses_teacher(config):
        return layout.teacher
    live = config.model_copy(update={"teacher": config.teacher.model_copy(update={"cache": None})})
    return lay_out(live, shapes, layout.mode).teacher


def _alternatives(config: Config, shapes: Shapes, mode: str) -> tuple[dict[str, int], dict[str, int]]:
    """What is kept for the backward pass with and without checkpointing, and by either kind of attention."""

    def kept(**how: bool) -> int:
        _sizes, trace = shapes.student(config, micro_of(config, mode, **how), None)
        return trace.kept - trace.casts

    plain, fused, opened = kept(recomputes=False), kept(), kept(is_open=True)
    activations = {"kept": plain, "checkpointed": kept(recomputes=True)}
    return activations, {"fused kernel": fused, "open, all probabilities kept": opened}


def _left_out(config: Config) -> list[str]:
    notes = ["not counted: fragmentation, compiled bodies, the libraries themselves"]
    if inner := config.objectives.inner_weights:
        notes.append(f"not counted: hidden states and maps that {' and '.join(inner)} keep, and their projectors")
    if config.teacher.placement == "shard":
        notes.append("not counted: a teacher that is no safetensors folder is whole in main memory at first")
    if config.teacher.router.mode != "frozen":
        notes.append(
            f"not counted: the backward pass of the teacher's gates, teacher.router.mode = {config.teacher.router.mode}"
        )
    return notes
