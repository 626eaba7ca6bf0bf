"""The time and memory of a distillation step on five cards, by a model: no card was used.

    python benchmarks/gpu/cost_model.py            # records, computes, writes results/cost_model.json and .md

Each contender's step runs on a fake card (fake_card.py) and is written down kernel by kernel (recorder.py). Published
peaks turn that into seconds (cards.py). The same peaks give the bound: the step's matrix products at the card's best
dtype, one pass over the logits of both models, one over the optimizer's state. Takes a few minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "head"))
import guard  # isort: skip  # noqa: F401  before torch

import datetime
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import streams
import torch
from cards import CARDS, Bound, Card, bound, seconds_by_phase
from fake_card import installed
from fusion import compiled
from measure import machine
from recorder import Kernel, Recorder
from shapes import PROBLEMS, VOCABULARY, Problem
from tables import write_tables

RESULTS = Path(__file__).with_name("results")
BODIES = ("teacher", "student forward", "student backward")
OURS, OURS_PLAIN, OURS_COMPILED = "stillroom", "stillroom, rows not fused", "stillroom, bodies compiled"
TRL, TRL_JSD, NAIVE = "trl GKD, forward KL", "trl GKD as it comes (JSD)", "naive loop"
Make = Callable[[Problem, Recorder, torch.dtype], AbstractContextManager[streams.Step]]
CONTENDERS: dict[str, Make] = {
    OURS: streams.stillroom,
    OURS_PLAIN: lambda problem, recorder, dtype: streams.stillroom(
        problem, recorder, dtype, **{"objectives.kernel": "plain"}
    ),
    TRL: lambda problem, recorder, dtype: streams.trl_gkd(problem, recorder, dtype, beta=0.0),
    TRL_JSD: lambda problem, recorder, dtype: streams.trl_gkd(problem, recorder, dtype, beta=0.5),
    NAIVE: streams.naive,
}
# Streams that are made from ours by the model of a compiler: phases that are fused.
COMPILED: dict[str, tuple[str, ...]] = {
    OURS: (streams.ROWS,),
    OURS_COMPILED: (streams.ROWS, *BODIES),
}
# What a card may reach instead of its peaks; ratios are compared.
ASSUMPTIONS = {"peaks": (1.0, 1.0), "half the products' peak, 80 % of the bandwidth": (0.5, 0.8)}


@dataclass(frozen=True)
class Recorded:
    """One optimizer step of a contender."""

    kernels: list[Kernel]
    peak_bytes: int
    resting_bytes: int  # weights and optimizer state between steps
    host_reads: int
    chosen: str  # the precision that the product chose, and why


def record(make: Make, problem: Problem, card: Card) -> Recorded:
    """A step that is not the first of a run: that one makes the optimizer's state."""
    recorder = Recorder(streams.ROWS)
    with (
        installed(card.facts, recorder),
        recorder,
        make(problem, recorder, streams.half_of(card.facts.capability)) as step,
    ):
        step()
        recorder.start()
        resting = recorder.live_bytes
        step()
        chosen = getattr(step, "chosen", "FP32 weights under autocast")
        return Recorded(recorder.kernels, recorder.peak_bytes, resting, recorder.host_reads, chosen)


def _as_head(kernels: list[Kernel]) -> list[Kernel]:
    return [replace(kernel, phase="head") if kernel.phase == streams.ROWS else kernel for kernel in kernels]


def row_of(kernels: Sequence[Kernel], card: Card, least: Bound) -> dict[str, Any]:
    """A stream in numbers."""
    spent = seconds_by_phase(kernels, card)
    total = sum(spent.values())
    return {
        "seconds": total,
        "seconds_by_phase": spent,
        "x_bound": total / least.step,
        "head_x_bound": spent.get("head", 0.0) / least.head,
        "head_x_products": spent.get("head", 0.0) / least.products["head"],
        "launches": sum(kernel.launches for kernel in kernels),
        "gigabytes": sum(kernel.bytes_read + kernel.bytes_written for kernel in kernels) / 1e9,
        "teraflops": _flops_by_dtype(kernels),
    }


def _flops_by_dtype(kernels: Sequence[Kernel]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in kernels:
        if kernel.flops:
            found[kernel.dtype] = found.get(kernel.dtype, 0.0) + kernel.flops / 1e12
    return found


@functools.cache
def record_all(problem: Problem, card: Card) -> dict[str, Recorded]:
    """All contenders on the first card, which has the bars; on the others ours and trl's."""
    is_first = card is CARDS[0]
    return {name: record(make, problem, card) for name, make in CONTENDERS.items() if is_first or name in (OURS, TRL)}


def measure(problem: Problem, card: Card) -> dict[str, Any]:
    """The contenders of a problem on a card. Cards that take the same branches share a recording."""
    alike = next(other for other in CARDS if _branches(other) == _branches(card))
    found = record_all(problem, alike)
    ours = found[OURS]
    held = {name: one.kernels for name, one in found.items()}
    held |= {name: _as_head(compiled(ours.kernels, phases)) for name, phases in COMPILED.items()}
    trained = problem.student.num_parameters
    least = bound(ours.kernels, card, tokens=problem.tokens, vocabulary=VOCABULARY, num_trained=trained)
    rows = {name: row_of(kernels, card, least) for name, kernels in held.items()}
    for name, row in rows.items():
        one = found.get(name, ours)
        row |= {"host_reads": one.host_reads, "peak_bytes": one.peak_bytes, "resting_bytes": one.resting_bytes,
                "precision": one.chosen}  # fmt: skip
    for row in rows.values():
        row["x_trl_seconds"] = row["seconds"] / rows[TRL]["seconds"]
        row["x_trl_peak"] = row["peak_bytes"] / rows[TRL]["peak_bytes"]
    others = {said: _under(held, card, problem, *shares) for said, shares in ASSUMPTIONS.items()}
    return {"rows": rows, "bound": _bound_row(least), "assumptions": others}


def _branches(card: Card) -> tuple[Any, ...]:
    """What the code under test looks at: whether Triton, tensor cores, BF16 and flash are there, and the memory."""
    capability = card.facts.capability
    return capability >= (7, 0), capability >= (8, 0), card.facts.memory_bytes


def _bound_row(least: Bound) -> dict[str, Any]:
    return {"step": least.step, "head": least.head, "products_by_phase": least.products, "logits": least.logits,
            "optimizer": least.optimizer}  # fmt: skip


def _under(
    held: dict[str, list[Kernel]], card: Card, problem: Problem, product_share: float, memory_share: float
) -> dict[str, dict[str, float]]:
    """Ratios of a card that reaches so much of its peaks."""
    slower = replace(card, product_share=product_share, memory_share=memory_share)
    trained = problem.student.num_parameters
    least = bound(held[OURS], slower, tokens=problem.tokens, vocabulary=VOCABULARY, num_trained=trained)
    rows = {name: row_of(kernels, slower, least) for name, kernels in held.items()}
    wanted = ("seconds", "x_bound", "head_x_bound")
    return {
        name: {**{key: row[key] for key in wanted}, "x_trl_seconds": row["seconds"] / rows[TRL]["seconds"]}
        for name, row in rows.items()
    }


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the T4, each said to be met or missed."""
    out = []
    for problem, cards in found.items():
        rows = cards["T4"]["rows"]
        for what, value, bar in (
            ("head, x its bound", rows[OURS]["head_x_bound"], 1.3),
            ("head, x its bound, bodies compiled", rows[OURS_COMPILED]["head_x_bound"], 1.3),
            ("step, x its bound", rows[OURS]["x_bound"], 1.8),
            ("step, x its bound, bodies compiled", rows[OURS_COMPILED]["x_bound"], 1.35),
            ("step, x trl's time", rows[OURS]["x_trl_seconds"], 0.6),
            ("step, x trl's time, bodies compiled", rows[OURS_COMPILED]["x_trl_seconds"], 0.6),
            ("peak memory, x trl's", rows[OURS]["x_trl_peak"], 0.45),
        ):
            out.append({"problem": problem, "what": what, "value": value, "bar": bar, "is_met": value <= bar})
    return out


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {problem.name: {} for problem in PROBLEMS}
    for card in CARDS:
        for problem in PROBLEMS:
            found[problem.name][card.name] = measure(problem, card)
            ours = found[problem.name][card.name]["rows"][OURS]
            print(f"  {problem.name} on {card.name}: {1e3 * ours['seconds']:.1f} ms, modelled", flush=True)
    result = {
        "benchmark": "cost model of a step: modelled, no card was used",
        "date": started,
        "machine": machine(),
        "tokens": PROBLEMS[0].tokens,
        "vocabulary": VOCABULARY,
        "cards": {card.name: _card_row(card) for card in CARDS},
        "problems": found,
        "bars": bars(found),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "cost_model.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}, {write_tables(result, path.with_suffix('.md'))}")


def _card_row(card: Card) -> dict[str, Any]:
    return {"half_tflops": card.half_tflops, "fp32_tflops": card.fp32_tflops,
            "gigabytes_per_second": card.gigabytes_per_second, "memory_bytes": card.facts.memory_bytes,
            "capability": card.facts.capability}  # fmt: skip


if __name__ == "__main__":
    main()
