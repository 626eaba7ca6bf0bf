"""Compare the CPU seconds of the head and of a training step between two source trees, interleaved.

python benchmarks/training/compare_trees.py BEFORE/src AFTER/src

Each repetition runs both trees in new processes, one after the other, with one thread. Writes results/trees.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """
import time, torch
from stillroom.objectives import DenseTeacher, fused_head_loss
torch.manual_seed(0)
hidden = torch.randn(512, 256, requires_grad=True)
weight = torch.randn(16384, 256, requires_grad=True)
teacher = DenseTeacher(torch.randn(512, 384), torch.randn(16384, 384))
labels = torch.randint(0, 16384, (512,))
for number in range(8):
    if number == 2:
        began = time.process_time()
    fused_head_loss(hidden, weight, teacher, labels, kd_weight=0.5, ce_weight=0.5, temperature=2.0).loss.backward()
print(time.process_time() - began)
"""
STEP = """
import json, sys, time
from pathlib import Path
from stillroom import distill, load_config
keys = {"train.max_steps": 60, "eval.max_batches": 1, "eval.samples": 0, "train.compile": "off",
        "teacher.model": "builtin:teacher", "student.model": "builtin:student", "telemetry.log_steps": 1}
distill(load_config(overrides=keys), out=Path(sys.argv[1]) / "run", device="cpu")
events = [json.loads(line) for line in (Path(sys.argv[1]) / "run" / "events.jsonl").open()]
print(sum(event.get("cpu_seconds", 0.0) for event in events if event["event"] == "step" and event["step"] > 5))
"""


def measured(source: str, code: str) -> float:
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", code, folder]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    before, after = sys.argv[1:3]
    found: dict[str, object] = {"machine": platform.processor() or platform.machine(), "repetitions": 5}
    for name, code in (("head", HEAD), ("step", STEP)):
        pairs = [(measured(before, code), measured(after, code)) for _ in range(5)]
        ratios = [second / first for first, second in pairs]
        found[name] = {"cpu_seconds": pairs, "ratios": ratios, "median_ratio": statistics.median(ratios)}
        print(name, f"{statistics.median(ratios):.3f}", [f"{ratio:.3f}" for ratio in ratios])
    place = Path(__file__).parent / "results" / "trees.json"
    place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
