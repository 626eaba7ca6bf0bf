"""What BF16 products on a CPU cost in quality: held-out loss after 300 steps in `bf16-mixed` and in `fp32`.

    PYTHONPATH=src python benchmarks/quality/bench_bf16_cpu.py small              # three seeds, the built-in models
    PYTHONPATH=src python benchmarks/quality/bench_bf16_cpu.py real MODEL.gguf    # a real teacher and its 15-layer cut
    PYTHONPATH=src python benchmarks/quality/bench_bf16_cpu.py real MODEL.gguf --seed 1

Both modes take the same batches of the Python installation's own text. `bf16-mixed` has a BF16 teacher, bodies under
autocast and the head's products from BF16 parts; `rounded` is the same with the head's operands rounded once, for
comparison. Held-out losses are computed in FP32. An arm that is in the result file is not run again, so runs may be
ended and continued; `real MODEL.gguf fp32` runs one arm alone. `nudged` is FP32 on the same batches, with each weight
of the student multiplied once by 1 plus noise of BF16's rounding (2^-9): how far two FP32 runs end apart by chance.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))

import torch
from measure import busy_processes, machine
from torch.nn import functional as F

RESULTS = Path(__file__).with_name("results")
STEPS, LOOKS = 300, (0, 60, 150, 300)
SMALL: dict[str, Any] = {
    "data.train_share": 0.3,
    "train.max_steps": STEPS,
    "train.learning_rate": 2e-3,
}
REAL: dict[str, Any] = {
    "student.init": "shrink",
    "student.shrink.layers": 15,
    "student.shrink.method": "even",
    "data.train": "builtin:stdlib",
    "data.train_share": 0.08,
    "data.max_length": 256,
    "train.batch_size": 1,
    "train.max_steps": STEPS,
    "train.learning_rate": 3e-4,
    "train.compile": "off",
    "objectives.kd.weight": 0.5,
    "objectives.ce.weight": 0.5,
    "objectives.kd.temperature": 1.0,
}
NUM_HELD_OUT = 8  # batches
ARMS: dict[str, dict[str, Any]] = {
    "fp32": {"precision.mode": "fp32", "teacher.dtype": "float32"},
    "bf16-mixed": {"precision.mode": "bf16-mixed", "teacher.dtype": "bfloat16"},
    "rounded": {"precision.mode": "bf16-mixed", "teacher.dtype": "bfloat16"},
    "nudged": {"precision.mode": "fp32", "teacher.dtype": "float32"},
}


@torch.no_grad()
def held_out_loss(run: Any) -> float:
    """Mean cross-entropy in nats a token, in FP32."""
    model, batches = run.student.model, run.eval_batches()[:NUM_HELD_OUT]
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.float().flatten(0, 1)
        targets = batch.targets.flatten()
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets >= 0).sum())
    model.train()
    return total / count


def train(preset: str | None, over: dict[str, Any], arm: str) -> dict[str, Any]:
    from stillroom.config import load_config
    from stillroom.losses.head import products
    from stillroom.precision.device import find_device
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models
    from stillroom.training.run import RunState
    from stillroom.training.step import train_step

    products.LEAST_BF16_WEIGHTS = 0  # the built-in head is too small for them
    if arm == "rounded":
        products.PARTS = 1
    config = load_config(preset=preset, overrides={**over, **ARMS[arm]})
    out, device = Path(tempfile.mkdtemp()), find_device("cpu")
    run = build_run(config, out, EventLog(out / "events.jsonl"), device=device, models=load_models(config, device))
    if arm == "nudged":
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in run.student.model.parameters():
                weight.mul_(1 + 2**-9 * torch.randn(weight.shape, generator=generator))
    state, losses, spent = RunState(), {"0": held_out_loss(run)}, 0.0
    run.student.train()
    while state.applied < STEPS:
        begin = time.process_time()
        train_step(run, state, run.loader.window(state.cursor))
        spent += time.process_time() - begin
        if state.applied in LOOKS:
            losses[str(state.applied)] = held_out_loss(run)
            print(
                arm, state.applied, losses[str(state.applied)], f"{spent / state.applied:.2f} cpu s a step", flush=True
            )
    return {"losses": losses, "cpu_seconds_a_step": spent / STEPS, "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("small", "real"))
    parser.add_argument("model", nargs="?", help="the GGUF file of the real teacher")
    parser.add_argument("arms", nargs="*", help="arms to run; default: fp32 and bf16-mixed")
    parser.add_argument("--seed", type=int, default=0, help="of the real pair's run")
    args = parser.parse_args()
    book_path = RESULTS / "bf16_cpu.json"
    arms = args.arms or ["fp32", "bf16-mixed"]
    if args.kind == "small":
        jobs = [(f"small, seed {seed}, {arm}", "demo", {**SMALL, "train.seed": seed}, arm)
                for seed in (0, 1, 2) for arm in arms]  # fmt: skip
    else:
        over = {**REAL, "teacher.model": args.model, "train.seed": args.seed}
        name = f"real, seed {args.seed}" if args.seed else "real"
        jobs = [(f"{name}, {arm}", None, over, arm) for arm in arms]
    for key, preset, over, arm in jobs:
        book = json.loads(book_path.read_text()) if book_path.exists() else {"runs": {}}
        if key in book["runs"]:
            continue
        print(key, flush=True)
        found = train(preset, over, arm)
        found |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        book = json.loads(book_path.read_text()) if book_path.exists() else {"runs": {}}  # another arm may have ended
        book |= {"benchmark": "quality of BF16 products on a CPU", "machine": machine(), "steps": STEPS}
        book["busy_around"], book["load"] = busy_processes(), os.getloadavg()[0]
        book["runs"][key] = found
        for name, row in book["runs"].items():
            exact = book["runs"].get(name.rpartition(", ")[0] + ", fp32")
            if exact is not None:
                row["against_fp32"] = row["losses"][str(STEPS)] / exact["losses"][str(STEPS)] - 1
        temporary = book_path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(book, indent=1) + "\n")
        temporary.replace(book_path)
    print(f"written: {book_path}")


if __name__ == "__main__":
    main()
