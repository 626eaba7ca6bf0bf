"""The time and memory of a distillation step on five cards, by a model: no card was used.

    python benchmarks/gpu/cost_model.py            # records, computes, writes results/cost_model.json and .md

Each contender's step runs on a fake card (fake_card.py) and is written down kernel by kernel (recorder.py). Kernels of
the design that cannot run there take the place of what was recorded (design.py). Rates turn that into seconds
(cards.py): published peaks, and what a T4 is known to sustain. The same rates give the bound: the step's matrix
products at the card's best dtype, one pass over the logits of both models, one over the optimizer's state. The
predictions that `stillroom bench` compares a measurement with are written from the same streams, into the package.
Takes a few minutes.
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
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import streams
import torch
from cards import CARDS, Bound, Card, bound, seconds_by_phase
from design import ONE_PASS, PASSES, ROW_BYTES_FROM, grouped, row_bytes, with_fused_adamw, with_row_kernel
from fake_card import installed
from fusion import compiled
from measure import machine
from recorder import Kernel, Recorder
from shapes import PROBLEMS, VOCABULARY, Problem
from tables import write_tables

from stillroom.precision.gpus import GPUS

RESULTS = Path(__file__).with_name("results")
PREDICTIONS = Path(__file__).parents[2] / "src" / "stillroom" / "bench" / "predictions.json"
BODIES = ("teacher", "student forward", "student backward")
OURS, OURS_PLAIN, OURS_COMPILED = "stillroom", "stillroom, rows not fused", "stillroom, bodies compiled"
OURS_MIXED = "stillroom, fp16-mixed"
EAGER, EAGER_SMALL, EAGER_MIXED = "row kernel", "row kernel, chunks of 512", "row kernel, fp16-mixed"
COMPILED, COMPILED_SMALL, COMPILED_MIXED = (f"{name}, bodies compiled" for name in (EAGER, EAGER_SMALL, EAGER_MIXED))
TRL, TRL_JSD, NAIVE = "trl GKD, forward KL", "trl GKD as it comes (JSD)", "naive loop"
Make = Callable[[Problem, Recorder, torch.dtype], AbstractContextManager[streams.Step]]


def _ours(**over: Any) -> Make:
    return lambda problem, recorder, dtype: streams.stillroom(problem, recorder, dtype, **over)


CONTENDERS: dict[str, Make] = {
    OURS: streams.stillroom,
    OURS_PLAIN: _ours(**{"objectives.kernel": "plain"}),
    OURS_MIXED: _ours(**{"precision.mode": "fp16-mixed"}),
    EAGER: _ours(has_triton=True),
    EAGER_SMALL: _ours(has_triton=True, **{"objectives.chunk_tokens": 512}),
    EAGER_MIXED: _ours(has_triton=True, **{"precision.mode": "fp16-mixed"}),
    TRL: lambda problem, recorder, dtype: streams.trl_gkd(problem, recorder, dtype, beta=0.0),
    TRL_JSD: lambda problem, recorder, dtype: streams.trl_gkd(problem, recorder, dtype, beta=0.5),
    NAIVE: streams.naive,
}
# What a T4 sustains instead of its peaks: 24 TFLOP/s in products, 80 % of the bandwidth.
SUSTAINED = {gpu.name: (gpu.product_share, gpu.memory_share) for gpu in GPUS}
SPARSE = ("top-k", "sampled")  # stored answers


@dataclass(frozen=True)
class Recorded:
    """One optimizer step of a contender."""

    kernels: list[Kernel]
    peak_bytes: int
    resting_bytes: int  # weights and optimizer state between steps
    host_reads: int
    chosen: str  # the precision that the product chose, and why
    peak_by_phase: dict[str, int]

    @property
    def chunk(self) -> int:
        """Positions of a chunk of the head."""
        logits = [one.shape[0] for one in self.kernels if one.is_product and one.shape[-1:] == (VOCABULARY,)]
        return max(logits, default=0)


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
        return Recorded(
            recorder.kernels, recorder.peak_bytes, resting, recorder.host_reads, chosen, dict(recorder.peak_by_phase)
        )


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
    wanted = CONTENDERS if card is CARDS[0] else (OURS, EAGER, TRL)
    return {name: record(CONTENDERS[name], problem, card) for name in wanted}


def streams_of(found: dict[str, Recorded], problem: Problem, card: Card) -> dict[str, tuple[list[Kernel], Recorded]]:
    """Every contender: as recorded, compiled by the model of a compiler, and with the kernels of the design."""
    held = {name: (one.kernels, one) for name, one in found.items()}
    ours, trained = found[OURS], problem.student.num_parameters
    for name in {OURS, OURS_MIXED} & set(found):
        held[name] = (_as_head(compiled(found[name].kernels, (streams.ROWS,))), found[name])
    held[OURS_COMPILED] = (_as_head(compiled(ours.kernels, (streams.ROWS, *BODIES))), ours)
    for name, made in ((EAGER, COMPILED), (EAGER_SMALL, COMPILED_SMALL), (EAGER_MIXED, COMPILED_MIXED)):
        if name in found:
            one = found[name]
            stream = with_fused_adamw(one.kernels, trained, gradient_bytes=2 if "fp16-master" in one.chosen else 4)
            held[name], held[made] = (stream, one), (compiled(stream, BODIES), one)
    return held


def measure(problem: Problem, card: Card) -> dict[str, Any]:
    """The contenders of a problem on a card. Cards that take the same branches share a recording."""
    alike = next(other for other in CARDS if _branches(other) == _branches(card))
    found = record_all(problem, alike)
    held = streams_of(found, problem, card)
    slower = sustained(card)
    rows, least = _rows(held, found, problem, card)
    at_less, less = _rows(held, found, problem, slower)
    kept = ("seconds", "seconds_by_phase", "x_bound", "head_x_bound", "x_trl_seconds")
    return {
        "rows": rows,
        "bound": _bound_row(least),
        "sustained": {
            "rows": {name: {key: row[key] for key in kept} for name, row in at_less.items()},
            "bound": _bound_row(less),
        },
        "head": _heads(found, problem, card),
    }


def sustained(card: Card) -> Card:
    product, memory = SUSTAINED[card.name]
    return replace(card, product_share=product, memory_share=memory)


def _rows(
    held: dict[str, tuple[list[Kernel], Recorded]], found: dict[str, Recorded], problem: Problem, card: Card
) -> tuple[dict[str, dict[str, Any]], Bound]:
    trained = problem.student.num_parameters
    least = bound(found[OURS].kernels, card, tokens=problem.tokens, vocabulary=VOCABULARY, num_trained=trained)
    rows = {name: row_of(kernels, card, least) for name, (kernels, _one) in held.items()}
    for name, row in rows.items():
        one = held[name][1]
        row |= {"host_reads": one.host_reads, "peak_bytes": one.peak_bytes, "resting_bytes": one.resting_bytes,
                "precision": one.chosen}  # fmt: skip
    for row in rows.values():
        row["x_trl_seconds"] = row["seconds"] / rows[TRL]["seconds"]
        row["x_trl_peak"] = row["peak_bytes"] / rows[TRL]["peak_bytes"]
    return rows, least


def _heads(found: dict[str, Recorded], problem: Problem, card: Card) -> list[dict[str, Any]]:
    """The head by divergence and form of the row kernel, at both rates."""
    out = []
    for form, members in row_bytes().items():
        for name, pair in members.items():
            if form == ONE_PASS and card.facts.capability < (7, 0):
                continue
            is_sparse = name in SPARSE
            stream = with_row_kernel(found[EAGER].kernels, pair, vocabulary=VOCABULARY, is_sparse=is_sparse)
            row: dict[str, Any] = {"form": form, "divergence": name, "bytes_per_element": list(pair)}
            for said, rates in (("peaks", card), ("sustained", sustained(card))):
                spent = seconds_by_phase([one for one in stream if one.phase == "head"], rates)["head"]
                least = _head_bound(found[OURS], problem, rates, is_sparse=is_sparse)
                row[said] = {"seconds": spent, "bound": least, "x_bound": spent / least}
            out.append(row)
    return out


def _head_bound(ours: Recorded, problem: Problem, card: Card, *, is_sparse: bool) -> float:
    """Stored answers need no logits of the teacher: three products, and one pass over the student's logits."""
    trained = problem.student.num_parameters
    least = bound(ours.kernels, card, tokens=problem.tokens, vocabulary=VOCABULARY, num_trained=trained)
    if not is_sparse:
        return least.head
    teachers = 2 * problem.tokens * VOCABULARY * problem.teacher.width / card.best_rate
    return least.products["head"] - teachers + least.logits / 2


def _branches(card: Card) -> tuple[Any, ...]:
    """What the code under test looks at: whether Triton, tensor cores, BF16 and flash are there, and the memory."""
    capability = card.facts.capability
    return capability >= (7, 0), capability >= (8, 0), card.facts.memory_bytes // 2**33


def _bound_row(least: Bound) -> dict[str, Any]:
    return {"step": least.step, "head": least.head, "products_by_phase": least.products, "logits": least.logits,
            "optimizer": least.optimizer}  # fmt: skip


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the T4, at its peaks and at what it sustains, each said to be met or missed."""
    out = []

    def add(problem: str, what: str, rates: str, value: float, bar: float) -> None:
        out.append({"problem": problem, "what": what, "rates": rates, "value": value, "bar": bar,
                    "is_met": value <= bar})  # fmt: skip

    for problem, cards in found.items():
        here = cards["T4"]
        for said, at_most in (("peaks", (1.2, 1.4)), ("sustained", (1.1, 1.25))):
            best: dict[str, float] = {}  # of the forms of the kernel
            for one in here["head"]:
                best[one["divergence"]] = min(one[said]["x_bound"], best.get(one["divergence"], math.inf))
            for name in ("forward_kl", *SPARSE):
                if name in best:
                    add(problem, f"head, x its bound, {name}", said, best.pop(name), at_most[0])
            add(problem, "head, x its bound, worst of the others", said, max(best.values()), at_most[1])
        for name in (COMPILED, COMPILED_SMALL):
            chunks = ", chunks of 512" * (name == COMPILED_SMALL)
            less = here["sustained"]["rows"][name]
            add(problem, f"step, x its bound{chunks}", "peaks", here["rows"][name]["x_bound"], 1.45)
            add(problem, f"step, x its bound{chunks}", "sustained", less["x_bound"], 1.25)
            add(problem, f"step, x trl's time{chunks}", "peaks", here["rows"][name]["x_trl_seconds"], 0.3)
            add(problem, f"step, x trl's time{chunks}", "sustained", less["x_trl_seconds"], 0.3)
            bar = 0.40 if problem.startswith("135M") else 0.47
            add(problem, f"peak memory, x trl's{chunks}", "either", here["rows"][name]["x_trl_peak"], bar)
    return out


# -- predictions ---------------------------------------------------------------------------------------------------

_RATIO = (0.9, 1.3)  # measured over modelled, at rates measured on the same GPU: outside of it the model is wrong
_MEMORY = (0.9, 1.15)
_FORMULA = "sum of count x max(flops / rate of the dtype, bytes / bandwidth, launches x launch), or launches x host"


def write_predictions() -> None:
    """What a GPU is predicted to take, as kernels whose seconds follow from rates: for `stillroom bench`."""
    problem, card = PROBLEMS[0], CARDS[0]
    found = record_all(problem, card)
    held = streams_of(found, problem, card)
    made: dict[str, Any] = {}
    # The head alone, with half weights: by the name of the row kernel.
    master = found[EAGER]
    for kernel, form in (("triton", ONE_PASS), ("triton-passes", PASSES)):
        for name in ("forward_kl", "jsd"):
            stream = with_row_kernel(master.kernels, row_bytes()[form][name], vocabulary=VOCABULARY)
            made[f"head/{name}/{kernel}"] = _prediction(grouped([one for one in stream if one.phase == "head"]))
    fused = held[OURS][0]
    plain = grouped([one for one in fused if one.phase == "head"])
    made["head/forward_kl/inductor"] = _prediction(plain)
    # In the code that inductor writes for sm_75, rows of jsd move 52 bytes an element and those of forward KL 36.
    more = [problem.tokens // master.chunk, 0, "half", 16 * master.chunk * VOCABULARY, 1]
    made["head/jsd/inductor"] = _prediction([*plain, more])
    for said, name in (
        ("inductor rows, eager bodies", OURS), ("inductor rows, compiled bodies", OURS_COMPILED),
        ("triton rows, eager bodies", EAGER), ("triton rows, compiled bodies", COMPILED),
        ("triton rows, compiled bodies, fp16-mixed", COMPILED_MIXED),
    ):  # fmt: skip
        kernels, one = held[name]
        for phase in ("teacher", "student forward", "head", "student backward", "optimizer"):
            made[f"step/{said}/{phase}"] = _prediction(grouped([k for k in kernels if k.phase == phase]))
        made[f"memory/{said}"] = {
            "value": one.peak_bytes,
            "unit": "bytes",
            "interval": list(_MEMORY),
            "formula": "recorded",
        }
    layers, width = problem.student.layers, problem.student.width
    per = {}
    for said, name in (("eager", EAGER), ("compiled", COMPILED)):
        for phase, count in (("teacher", problem.teacher.layers), ("student forward", layers),
                             ("student backward", layers)):  # fmt: skip
            moved = sum(k.bytes_read + k.bytes_written for k in held[name][0] if k.phase == phase and not k.is_product)
            per.setdefault(said, {})[phase] = moved / (problem.tokens * count * width)
    result = {
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "by": "benchmarks/gpu/cost_model.py",
        "problem": problem.name, "tokens": problem.tokens, "vocabulary": VOCABULARY, "chunk": 1024,
        "row_bytes_from": ROW_BYTES_FROM,
        "body_bytes": per,  # of what is no product, a token, layer and unit of width
        "predictions": made,
    }  # fmt: skip
    PREDICTIONS.write_text(json.dumps(result, separators=(",", ":")).replace('"head/', '\n"head/')
                           .replace('"step/', '\n"step/').replace('"memory/', '\n"memory/') + "\n")  # fmt: skip


def _prediction(kernels: Sequence[Any]) -> dict[str, Any]:
    return {"kernels": [list(one) for one in kernels], "interval": list(_RATIO), "formula": _FORMULA}


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {problem.name: {} for problem in PROBLEMS}
    for card in CARDS:
        for problem in PROBLEMS:
            found[problem.name][card.name] = measure(problem, card)
            ours = found[problem.name][card.name]["rows"][EAGER]
            print(f"  {problem.name} on {card.name}: {1e3 * ours['seconds']:.1f} ms, modelled", flush=True)
    result = {
        "benchmark": "cost model of a step: modelled, no card was used",
        "date": started,
        "machine": machine(),
        "tokens": PROBLEMS[0].tokens,
        "vocabulary": VOCABULARY,
        "row_bytes": {"bytes_per_element": row_bytes(), "from": ROW_BYTES_FROM},
        "cards": {card.name: _card_row(card) for card in CARDS},
        "problems": found,
        "bars": bars(found),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "cost_model.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    write_predictions()
    print(f"written: {path}, {PREDICTIONS}, {write_tables(result, path.with_suffix('.md'))}")


def _card_row(card: Card) -> dict[str, Any]:
    return {"half_tflops": card.half_tflops, "fp32_tflops": card.fp32_tflops,
            "gigabytes_per_second": card.gigabytes_per_second, "sustained": SUSTAINED[card.name],
            "memory_bytes": card.facts.memory_bytes,
            "capability": card.facts.capability}  # fmt: skip


if __name__ == "__main__":
    main()
