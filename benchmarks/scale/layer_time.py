"""Seconds of the parts of a micro-batch on a card, by what benchmarks/gpu recorded kernel by kernel.

Each part is its products at the rate of the card, and passes over memory: so many bytes for each token, layer and unit
of width (or of vocabulary, or for each trained number). How many is taken from the recorded steps of two pairs of
models on three cards; `reproduction` says how far the parts of those steps are from what this file makes of them.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from cards import CARDS, HOST_SECONDS, Card
from shapes import PROBLEMS, VOCABULARY

from stillroom.doctor.plan.cost import forward_flops
from stillroom.training.trace import Sizes

RECORDED = Path(__file__).parents[1] / "gpu" / "results" / "cost_model.json"
OURS = ("stillroom, fp16-mixed", "stillroom")  # FP32 weights under autocast on every card, the first that is there
ON = ("T4", "V100", "A100")
PHASES = ("teacher", "student forward", "student backward", "head", "optimizer")
# Kernels of a layer of the student, for each one of a layer of the teacher: an assumption, the recorded sum fits it.
_STUDENT_LAUNCHES = 4
# Those that the card may wait for, again for each of the teacher's: the host runs ahead while the head is at work.
LAUNCHES = {"teacher": 1, "student forward": 1, "student backward": 2}


@dataclass(frozen=True)
class Passes:
    """Bytes that a card moves beside its products, and kernels that the host launches."""

    by_phase: dict[str, float]  # for each token, layer and width; head: token and vocabulary; optimizer: number
    launches: float  # of a layer of the teacher
    launches_once: float


def _units(phase: str, problem: Any) -> float:
    match phase:
        case "teacher":
            return float(problem.tokens * problem.teacher.layers * problem.teacher.width)
        case "head":
            return float(problem.tokens * VOCABULARY)
        case "optimizer":
            return float(problem.student.num_parameters)
    return float(problem.tokens * problem.student.layers * problem.student.width)


def _cases(recorded: dict[str, Any]) -> list[tuple[Any, Card, dict[str, float], dict[str, float]]]:
    """(problem, card, seconds by phase, seconds of the products by phase)"""
    cards = {card.name: card for card in CARDS}
    found = []
    for problem in PROBLEMS:
        for name in ON:
            one = recorded["problems"][problem.name][name]
            found.append((problem, cards[name], _ours(one)["seconds_by_phase"], one["bound"]["products_by_phase"]))
    return found


def _ours(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(one["rows"][name] for name in OURS if name in one["rows"])
    return found


def calibrated(path: Path = RECORDED) -> Passes:
    recorded = json.loads(path.read_text())
    cases = _cases(recorded)
    by_phase = {
        phase: statistics.median(
            (spent[phase] - products.get(phase, 0.0)) * card.gigabytes_per_second * 1e9 / _units(phase, problem)
            for problem, card, spent, products in cases
        )
        for phase in PHASES
    }
    (first, few), (second, many) = (
        (problem, _ours(recorded["problems"][problem.name][ON[0]])["launches"]) for problem in PROBLEMS
    )
    weight = {one.name: one.teacher.layers + _STUDENT_LAUNCHES * one.student.layers for one in PROBLEMS}
    launches = (many - few) / (weight[second.name] - weight[first.name])
    return Passes(by_phase, launches, few - launches * weight[first.name])


def reproduction(passes: Passes, path: Path = RECORDED) -> list[dict[str, Any]]:
    """The recorded steps beside the same steps by passes: whole steps, and the part that is furthest off."""
    rows = []
    for problem, card, spent, products in _cases(json.loads(path.read_text())):
        made = {
            phase: products.get(phase, 0.0) + card.pass_seconds(passes.by_phase[phase] * _units(phase, problem))
            for phase in PHASES
        }
        for phase, times in LAUNCHES.items():
            layers = problem.teacher.layers if phase == "teacher" else problem.student.layers
            made[phase] = max(made[phase], HOST_SECONDS * passes.launches * times * layers)
        worst = max(PHASES, key=lambda phase: abs(made[phase] / spent[phase] - 1))
        rows.append(
            {
                "models": problem.name,
                "card": card.name,
                "recorded_seconds": sum(spent[phase] for phase in PHASES),
                "seconds": sum(made.values()),
                "over_recorded": sum(made.values()) / sum(spent[phase] for phase in PHASES),
                "furthest_part": worst,
                "furthest_over_recorded": made[worst] / spent[worst],
            }
        )
    return rows


@dataclass(frozen=True)
class Parts:
    """Seconds of one micro-batch on a card, of one layer where there are layers."""

    teacher_layer: float
    forward_layer: float
    backward_layer: float
    head: float
    teacher_head: float  # the teacher's part of `head`
    optimizer: float  # for all trained numbers


def body_flops(sizes: Sizes, length: int) -> float:
    """Of a token in all layers, without the head."""
    return forward_flops(sizes, length) - 2.0 * sizes.vocabulary * sizes.width


@dataclass(frozen=True)
class Compute:
    """One card at work on micro-batches of rows of `length` tokens."""

    card: Card
    passes: Passes
    length: int

    def _layer(self, sizes: Sizes, tokens: float, phase: str, free: frozenset[str]) -> float:
        """Products, which take at least as long as reading the weights, and passes; or the host that launches them."""
        times = 2.0 if phase == "student backward" else 1.0
        flops = times * tokens * body_flops(sizes, self.length) / sizes.layers / self.card.best_rate
        read = self.card.pass_seconds(2.0 * sum(sizes.layer_bytes) / sizes.itemsize / sizes.layers)
        products = 0.0 if "products" in free else max(flops, read)
        moved = self.card.pass_seconds(self.passes.by_phase[phase] * tokens * sizes.width)
        issued = HOST_SECONDS * self.passes.launches * LAUNCHES[phase]
        return max(products + (0.0 if "memory" in free else moved), 0.0 if "host" in free else issued)

    def parts(self, student: Sizes, teacher: Sizes | None, tokens: float, free: frozenset[str] = frozenset()) -> Parts:
        """`teacher` is None where no teacher is at work on this card. `free`: what takes no time."""
        head = tokens * 2.0 * student.vocabulary * student.width / self.card.best_rate
        rows = self.card.pass_seconds(self.passes.by_phase["head"] * tokens * student.vocabulary)
        asked = tokens * 2.0 * teacher.vocabulary * teacher.width / self.card.best_rate if teacher else 0.0
        update = self.card.pass_seconds(self.passes.by_phase["optimizer"] * student.num_trained)
        own = free & {"host"}  # the other names are the student's
        asks = 0.0 if teacher is None or "teacher" in free else self._layer(teacher, tokens, "teacher", own)
        return Parts(
            teacher_layer=asks,
            forward_layer=self._layer(student, tokens, "student forward", free),
            backward_layer=self._layer(student, tokens, "student backward", free),
            head=(0.0 if "products" in free else 3 * head) + (0.0 if "memory" in free else rows),
            teacher_head=0.0 if "teacher" in free else asked,
            optimizer=0.0 if "memory" in free else update,
        )
