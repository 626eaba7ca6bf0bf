"""What a start from the teacher and what inner objectives are worth on the embedded corpus, at equal steps.

    python benchmarks/inner/bench_inner.py list                      # the runs there are
    python benchmarks/inner/bench_inner.py run ARM RATE SEED         # one of them, added to the results
    python benchmarks/inner/bench_inner.py table                     # the results as a table

`random` and `cut` train a student of one and the same shape (3 layers, width 96, 529,056 parameters) on the same
tokens; they differ in where its weights begin. `depth` keeps 3 of the teacher's 6 layers whole (1,611,456 parameters),
the case for which hidden-state matching is reported to help. `+name` adds an inner objective of weight 0.1. Each arm's
learning rate is the best of those tried with seed 0; perplexity is held out, and the best student of a run counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "inner.json"
STEPS = 300
CUT = {
    "student.init": "shrink",
    "student.shrink.layers": 3,
    "student.shrink.width": 96,
    "student.shrink.mlp_width": 256,
    "student.shrink.heads": 3,
}
DEPTH = {"student.init": "shrink", "student.shrink.layers": 3}
ARMS: dict[str, dict[str, Any]] = {
    "random": {},
    "random+feature": {"objectives.feature.weight": 0.1},
    "random+layerwise": {"objectives.layerwise.weight": 0.1},
    "random+attention": {"objectives.attention.weight": 0.1},
    "random+contrastive": {"objectives.contrastive.weight": 0.1},
    "cut": CUT,
    "depth": DEPTH,
    "depth+feature": {**DEPTH, "objectives.feature.weight": 0.1, "objectives.feature.kind": "cosine"},
    "depth+layerwise": {**DEPTH, "objectives.layerwise.weight": 0.1, "objectives.layerwise.kind": "cosine"},
}
RATES = {"random": (8e-3, 4e-3, 2e-3), "cut": (8e-3, 4e-3, 2e-3), "depth": (4e-3, 2e-3, 1e-3)}


def run(arm: str, rate: float, seed: int) -> None:
    import torch

    torch.set_num_threads(1)
    from stillroom.config import load_config
    from stillroom.engine.distill import distill
    from stillroom.engine.folder import machine, versions

    over = {"train.seed": seed, "train.learning_rate": rate, "train.max_steps": STEPS, "eval.samples": 0, **ARMS[arm]}
    folder = Path(tempfile.mkdtemp())
    try:
        summary = distill(load_config(preset="demo", overrides=over), folder / "run", device="cpu").summary
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line = {"arm": arm, "learning_rate": rate, "seed": seed, "best_step": summary["best_step"]}
    line |= {key: summary[key] for key in ("teacher", "student_before", "student")}
    print(json.dumps({**line, "perplexity": summary["student"]["perplexity"]}), flush=True)
    lines = [known for known in _lines() if (known["arm"], known["learning_rate"], known["seed"]) != (arm, rate, seed)]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    table = {"machine": machine(), "versions": versions(), "steps": STEPS, "runs": [*lines, line]}
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")


def _lines() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    return found


def table() -> None:
    for arm in ARMS:
        lines = [line for line in _lines() if line["arm"] == arm]
        for rate in sorted({line["learning_rate"] for line in lines}):
            chosen = [line for line in lines if line["learning_rate"] == rate]
            after = [line["student"]["perplexity"] for line in chosen]
            before = fmean(line["student_before"]["perplexity"] for line in chosen)
            spread = f"{min(after):.2f} to {max(after):.2f}"
            print(f"| {arm} | {rate:g} | {len(after)} | {before:.1f} | {fmean(after):.2f} | {spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["list", "run", "table"])
    parser.add_argument("arm", nargs="?", default="random")
    parser.add_argument("rate", nargs="?", type=float, default=4e-3)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    args = parser.parse_args()
    if args.job == "run":
        run(args.arm, args.rate, args.seed)
    elif args.job == "table":
        table()
    else:
        for arm in ARMS:
            print(arm, *RATES[arm.split("+")[0]])


if __name__ == "__main__":
    main()
