"""What `stillroom plan` predicts beside what steps really take, over sizes, precisions, lengths, batches and adapters.

    python benchmarks/plan/bench_plan.py [cpu] [held-out] [card]      # writes results/plan.json and .md

On the CPU a run is built from models with real weights, takes two steps, and in the third the bytes of every tensor
that is alive are followed (training/trace.py), with the blocks that the head's pool keeps. On a card nothing was
measured here: the prediction is held against the peaks that benchmarks/gpu/memory_grid.py recorded on fake tensors.
The bar is 15 %.
"""

from __future__ import annotations

import datetime
import gc
import json
import platform
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "support"))

import tiny
import torch
from torch import Tensor
from transformers import LlamaConfig

from stillroom.config import load_config
from stillroom.doctor.plan.plan import find_target
from stillroom.losses.head.products import POOL
from stillroom.precision.gpus import find_gpu
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.memory import CONTEXT, Shapes, lay_out
from stillroom.training.models import load_models
from stillroom.training.run import RunState
from stillroom.training.step import train_step
from stillroom.training.trace import LiveTensors

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("results")
RECORDED = ROOT / "benchmarks" / "gpu" / "results" / "memory_grid.json"
BAR = 0.15
VOCABULARY = 49_152  # of the recorded grid
SHAPES = {  # layers, width, feed-forward, heads, key heads: benchmarks/gpu/shapes.py
    "50M": (8, 512, 1365, 8, 8), "29M": (4, 512, 1365, 8, 8), "81M": (15, 576, 1536, 9, 3),
    "135M": (30, 576, 1536, 9, 3), "360M": (32, 960, 2560, 15, 5),
}  # fmt: skip
HISTORY = (
    "Only the held-out table is a test that was not looked at before. At their first run 19 of 21 CPU cases and 15 of "
    "24 recorded ones were within the bar. After that the head's scratch on a card (fused rows have no temporaries) "
    "and the update's scratch (moments are rounded one by one) were corrected, and the pool's blocks, counted twice in "
    "the "
    "measurement, are counted once. The held-out cases were chosen after that, and no formula was changed for them. "
    "At their first run 6 of 12 were within the bar; three of the misses were 11.3 MB of tensors that an earlier case "
    "had left behind, found by running each in a process of its own, and are now subtracted. OPT reads a value in its "
    "forward pass and cannot be run on shapes: its activations are estimated, and the plan says so.",
)
GRID = {  # problem: rows and length
    "50M -> 29M, 512 tokens": (2, 256), "135M -> 81M, 2,048 tokens": (4, 512),
    "360M -> 135M, 2,048 tokens": (4, 512), "360M -> 135M, 8,192 tokens": (8, 1024),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    width: int = 64
    layers: int = 4
    family: str = "llama"
    over: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("small"),
    Case("wide", width=192),
    Case("deep", layers=10),
    Case("gpt2", family="gpt2"),
    Case("qwen3", family="qwen3"),
    Case("gemma2", family="gemma2"),
    Case("one row", over={"train__batch_size": 1}),
    Case("32 rows", over={"train__batch_size": 32}),
    Case("long rows", over={"data__max_length": 128}),
    Case("accumulated", over={"train__gradient_accumulation_steps": 2}),
    Case("checkpointed", layers=10, over={"student__gradient_checkpointing": True}),
    Case("adapter", width=192, over={"student__adapter": {"rank": 4}}),
    Case("adapter, bf16", width=192, over={"student__adapter": {"rank": 4}, "precision__mode": "bf16-mixed"}),
    Case("bf16 moments", width=192, over={"precision__moments": "bfloat16"}),
    Case("no teacher", over={"objectives__kd__weight": 0.0, "objectives__ce__weight": 1.0}),
    Case("bf16-mixed", width=128, over={"precision__mode": "bf16-mixed"}),
    Case("fp16-mixed", width=128, over={"precision__mode": "fp16-mixed"}),
    Case("fp16-master", width=128, over={"precision__mode": "fp16-master"}),
    Case("fp16-split", width=128, over={"precision__mode": "fp16-split"}),
    Case("fp16-sr", width=128, over={"precision__mode": "fp16-sr"}),
    Case("fp16-split, accumulated", width=128,
         over={"precision__mode": "fp16-split", "train__gradient_accumulation_steps": 2}),
)  # fmt: skip


# Chosen after the formulas were fixed and run without changing them: the other cases were looked at meanwhile.
HELD_OUT = (
    Case("granite", family="granite", width=96),
    Case("phi", family="phi", width=96),
    Case("opt", family="opt", width=96),
    Case("gpt_neox, checkpointed", family="gpt_neox", over={"student__gradient_checkpointing": True}),
    Case("3 rows of 96", width=96, layers=6, over={"train__batch_size": 3, "data__max_length": 96}),
    Case("dora", width=160, over={"student__adapter": {"rank": 8, "kind": "dora"}}),
    Case("fp16-master, adapter", width=160,
         over={"student__adapter": {"rank": 8}, "precision__mode": "fp16-master"}),
    Case("fp16-split, bf16 moments", width=160,
         over={"precision__mode": "fp16-split", "precision__moments": "bfloat16"}),
    Case("fp16-sr, accumulated", width=160,
         over={"precision__mode": "fp16-sr", "train__gradient_accumulation_steps": 4}),
    Case("bf16-mixed, checkpointed", width=96, layers=8,
         over={"precision__mode": "bf16-mixed", "student__gradient_checkpointing": True}),
    Case("streamed teacher", width=160, over={"teacher__placement": "stream"}),
    Case("half teacher", width=160, over={"teacher__dtype": "bfloat16"}),
)  # fmt: skip


class WithPool(LiveTensors):
    """Blocks that the pool keeps are no tensors, and take memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.whole = max(getattr(self, "whole", 0), self.live + POOL.num_bytes)
        return result


def measured(case: Case, world: Path) -> tuple[int, int]:
    """(predicted, measured) bytes of a step on the CPU. Tensors that earlier cases left behind are not in it."""
    POOL.clear()
    gc.collect()
    left = _bytes(_all_tensors())
    config = load_config(overrides=settings(case, world))
    layout = lay_out(config, Shapes(find_target("cpu")), _mode(config))
    folder = Path(tempfile.mkdtemp(dir=world))
    with EventLog(folder / "events.jsonl") as log:
        models = load_models(config, torch.device("cpu"), folder=folder)
        run = build_run(config, folder, log, device=torch.device("cpu"), models=models)
        run.student.train()
        state = RunState(applied=1)
        window = next(run.loader.window(index) for index in range(50) if _is_full(run.loader.window(index), config))
        for _ in range(2):
            train_step(run, state, window)
        gc.collect()
        known = _all_tensors()
        resting = _bytes(known) - left
        live = WithPool(known)
        with live:
            train_step(run, state, window)
        return sum(layout.device.values()), resting + live.whole


def settings(case: Case, world: Path) -> dict[str, Any]:
    base = {"data__packing": "blocks", "train__compile": "off", "train__batch_size": 8, "data__max_length": 64,
            "train__max_steps": 100}  # fmt: skip
    return tiny.settings(world, **{**base, **case.over})


def _mode(config: Any) -> str:
    return str(config.precision.mode) if config.precision.mode != "auto" else "fp32"


def _is_full(window: Any, config: Any) -> bool:
    rows, length = config.train.rows_per_batch, config.data.max_length
    return all(tuple(batch.input_ids.shape) == (rows, length) for batch in window)


def _all_tensors() -> list[Tensor]:
    """Every tensor of this process; before the run there is none worth counting.

    Without the pool's blocks, which are bytes: held here they could not be lent again, and the pool counts them.
    """
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    return [tensor for tensor in found if tensor.dtype != torch.uint8]


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Predictions for cards beside the peaks of the recorded grid, which has no context of CUDA."""
    rows = []
    for name, (layers, width, inner, heads, keys) in SHAPES.items():
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=keys, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        config.save_pretrained(folder / name)
    targets = {card: Shapes(find_target(gpu=find_gpu(card))) for card in ("T4", "A100")}
    for found in json.loads(RECORDED.read_text())["rows"]:
        large, small = found["problem"].partition(",")[0].split(" -> ")
        num_rows, length = GRID[found["problem"]]
        config = load_config(overrides={
            "teacher.model": str(folder / large), "student.model": str(folder / small), "student.init": "random",
            "data.max_length": length, "train.batch_size": num_rows, "precision.mode": found["mode"],
            "objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0,
        })  # fmt: skip
        shapes = targets["A100" if found["mode"] == "bf16-mixed" else "T4"]
        predicted = sum(lay_out(config, shapes, found["mode"]).device.values()) - CONTEXT
        rows.append(row(f"{found['problem']}, {found['mode']}", predicted, found["peak_bytes"]))
    return rows


def row(name: str, predicted: int, real: int) -> dict[str, Any]:
    off = predicted / real - 1
    print(f"  {name}: {predicted / 1e6:.2f} MB predicted, {real / 1e6:.2f} MB real, {100 * off:+.1f} %", flush=True)
    return {"case": name, "predicted": predicted, "real": real, "error": round(off, 4), "is_met": abs(off) <= BAR}


def on_cpu(cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(cases):
            world = Path(name) / str(number)
            for role, layers in (("teacher", case.layers + 2), ("student", case.layers)):
                tiny.save_model(world / role, case.family, width=case.width, num_layers=layers, seed=number)
            tiny.save_text(world / "train.jsonl", count=1500)
            rows.append(row(case.name, *measured(case, world)))
    return rows


def table(result: dict[str, Any]) -> str:
    versions = result["versions"]
    lines = [
        "# What `stillroom plan` predicts beside what a step takes",
        "",
        f"`benchmarks/plan/bench_plan.py`, {result['date'][:10]}, {result['machine']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}. Bar: within {100 * BAR:.0f} %.",
        "",
        *HISTORY,
    ]
    for title, rows in result["grids"].items():
        met = sum(one["is_met"] for one in rows)
        worst = max(rows, key=lambda one: abs(one["error"]))
        furthest = f"{met} of {len(rows)} within the bar; the furthest {100 * worst['error']:+.1f} % ({worst['case']})."
        lines += [
            "",
            f"## {title}",
            "",
            furthest,
            "",
            "| case | predicted MB | found MB | error |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {one['case']} | {one['predicted'] / 1e6:.2f} | {one['real'] / 1e6:.2f} | {100 * one['error']:+.1f} % |"
            for one in rows
        ]
    return "\n".join([*lines, ""])


def on_card() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        return recorded(Path(name))


PARTS = {
    "cpu": ("Tensors of a real step on the CPU", on_cpu),
    "held-out": ("Tensors of a real step on the CPU, held-out cases", lambda: on_cpu(HELD_OUT)),
    "card": ("Steps recorded on the fake card, no card was used", on_card),
}


def main() -> None:
    """Both parts, or the ones that are named; the others stay as they were written."""
    torch.set_num_threads(1)
    path = RESULTS / "plan.json"
    grids = json.loads(path.read_text())["grids"] if path.is_file() else {}
    for part in sys.argv[1:] or PARTS:
        title, measure = PARTS[part]
        grids[title] = measure()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    result = {"benchmark": "plan: predicted against real peaks", "date": started, "bar": BAR,
              "machine": f"{platform.system()} {platform.machine()}", "versions": versions, "grids": grids}  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
