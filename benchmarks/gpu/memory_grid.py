"""What a step holds on the card, by part, beside what the product plans for it. No card was used.

    python benchmarks/gpu/memory_grid.py      # writes results/memory_grid.json and .md

The product chooses a precision by how many bytes a trained parameter takes (`precision.bytes_per_parameter`) and leaves
the other half of the card to the teacher, the activations and the head. Here a run is built and takes steps on a card
without values (fake_card.py), and every block of memory is followed: what the training state really takes is compared
with the plan, for several sizes and every precision. The peak of the whole step is given with it, by the part of the
step in which it occurs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "head"))
import guard  # isort: skip  # noqa: F401  before torch

import datetime
import json
from typing import Any

import streams
from cards import CARDS, Card
from fake_card import installed
from measure import machine
from recorder import Recorder
from shapes import SMOL_81M, SMOL_135M, SMOL_360M, Problem, Shape

from stillroom.precision import bytes_per_parameter

RESULTS = Path(__file__).with_name("results")
BAR = 0.10
T4, A100 = CARDS[0], CARDS[4]
PROBLEMS = (
    Problem("50M -> 29M, 512 tokens", Shape(8, 512, 1365, 8, 8), Shape(4, 512, 1365, 8, 8), rows=2, length=256),
    Problem("135M -> 81M, 2,048 tokens", SMOL_135M, SMOL_81M),
    Problem("360M -> 135M, 2,048 tokens", SMOL_360M, SMOL_135M),
    Problem("360M -> 135M, 8,192 tokens", SMOL_360M, SMOL_135M, rows=8, length=1024),
)
MODES = {"fp32": T4, "fp16-mixed": T4, "fp16-master": T4, "fp16-split": T4, "fp16-sr": T4, "bf16-mixed": A100}


def measure(problem: Problem, mode: str, card: Card) -> dict[str, Any]:
    """The parts of the second step; the first one fills what is made once."""
    recorder = Recorder(streams.ROWS)
    half = streams.half_of(card.facts.capability)
    over = {"precision.mode": mode}
    with installed(card.facts, recorder), recorder, streams.stillroom(problem, recorder, half, **over) as step:
        run: Any = step.run  # type: ignore[attr-defined]
        step()
        recorder.start()
        at_rest = recorder.live_bytes
        step()
        return _row(problem, mode, run, recorder, at_rest)


def _row(problem: Problem, mode: str, run: Any, recorder: Recorder, at_rest: int) -> dict[str, Any]:
    trained = problem.student.num_parameters
    teacher = sum(p.numel() * p.element_size() for p in run.teacher.as_model().model.parameters())
    plan = bytes_per_parameter(mode)
    planned = {"weights, masters, moments": plan.weights + plan.extra + plan.moments, "gradients": plan.gradients,
               "casts": plan.casts}  # fmt: skip
    recorded = {
        "weights, masters, moments": (at_rest - teacher) / trained,
        "gradients": (recorder.bytes_at_start["optimizer"] - at_rest) / trained,
        "casts": _cast_bytes(run, recorder) / trained,
    }
    state = sum(recorded.values())
    return {
        "problem": problem.name,
        "mode": mode,
        "parameters": trained,
        "planned_bytes_a_parameter": planned,
        "recorded_bytes_a_parameter": recorded,
        "recorded_over_planned": state / plan.on_device,
        "is_met": abs(state / plan.on_device - 1) <= BAR,
        "teacher_bytes": teacher,
        "peak_bytes": recorder.peak_bytes,
        "peak_by_phase": recorder.peak_by_phase,
        "share_of_peak_that_is_planned": (plan.on_device * trained + teacher) / recorder.peak_bytes,
    }


def _cast_bytes(run: Any, recorder: Recorder) -> int:
    """Half copies of trained weights that the forward makes and the backward needs."""
    own = {recorder.number_of(parameter) for parameter in run.student.model.parameters()}
    casts = [kernel for kernel in recorder.kernels if kernel.name == "_to_copy" and kernel.phase == "student forward"]
    return sum(kernel.bytes_written for kernel in casts if own & set(kernel.reads))


def table(result: dict[str, Any]) -> str:
    versions = result["machine"]["versions"]
    lines = [
        "# What a step holds on a card, recorded without one",
        "",
        f"A run of the product on fake tensors (`benchmarks/gpu/memory_grid.py`), torch {versions['torch']}, "
        f"{result['date'][:10]}. Bytes for each trained parameter, planned / recorded. No card was used: "
        "fragmentation, the context of CUDA and the workspaces of cuBLAS are not in it. The product plans the training "
        "state and chooses the head's chunk by what is free; it plans no activations, so the peak of the whole step is "
        "for information.",
        "",
        "| models | precision | weights, masters, moments | gradients | casts | recorded / planned | within 10 % "
        "| peak GB | in | planned state and teacher, share of peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        plan, found = row["planned_bytes_a_parameter"], row["recorded_bytes_a_parameter"]
        parts = " | ".join(f"{plan[part]} / {found[part]:.2f}" for part in plan)
        where = max(row["peak_by_phase"], key=lambda phase: row["peak_by_phase"][phase])
        lines.append(
            f"| {row['problem']} | {row['mode']} | {parts} | {row['recorded_over_planned']:.3f} "
            f"| {'yes' if row['is_met'] else 'no'} | {row['peak_bytes'] / 1e9:.2f} | {where} "
            f"| {row['share_of_peak_that_is_planned']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = []
    for problem in PROBLEMS:
        for mode, card in MODES.items():
            rows.append(measure(problem, mode, card))
            print(f"  {problem.name} {mode}: {rows[-1]['recorded_over_planned']:.3f} of the plan", flush=True)
    result = {"benchmark": "memory grid: recorded on fake tensors, no card was used", "date": started,
              "machine": machine(), "bar": BAR, "rows": rows}  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "memory_grid.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))
    print(f"written: {path}, {path.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
