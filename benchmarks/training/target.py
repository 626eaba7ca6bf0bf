"""Seconds of training until the student reaches a held-out loss: Stillroom and trl on the embedded models and text.

Both learn by forward KL at T = 1 with the same batches, learning rate, schedule, clipping and weight decay; evaluation
is not on the clock. The target is what Stillroom's student has after two thirds of its steps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

STEPS, EVERY = 180, 20
SETTING: dict[str, Any] = {
    "data.train_share": 0.2,
    "train.max_steps": STEPS,
    "train.learning_rate": 2e-3,
    "train.weight_decay": 0.1,
    "objectives.kd.weight": 1.0,
    "objectives.kd.temperature": 1.0,
    "objectives.ce.weight": 0.0,
    "eval.max_batches": 8,
}


class Clock:
    """Training seconds so far, and the held-out loss at every twentieth step."""

    def __init__(self, model: Any, batches: list[Any]) -> None:
        self._model, self._batches = model, batches
        self.points: list[dict[str, float]] = []
        self._wall = self._cpu = 0.0
        self._started = (0.0, 0.0)

    def start(self) -> None:
        self._started = (time.perf_counter(), time.process_time())

    def stop(self, step: int) -> None:
        self._wall += time.perf_counter() - self._started[0]
        self._cpu += time.process_time() - self._started[1]
        if step % EVERY == 0:
            self.points.append({"step": step, "wall": self._wall, "cpu": self._cpu, "loss": self._loss()})

    @torch.no_grad()
    def _loss(self) -> float:
        self._model.eval()
        total = sum(
            float(
                F.cross_entropy(
                    self._model(input_ids=b.input_ids, use_cache=False).logits.flatten(0, 1),
                    b.targets.flatten(),
                    reduction="sum",
                )
            )
            for b in self._batches
        )
        self._model.train()
        return total / sum(batch.num_scored for batch in self._batches)


def _run(**over: Any) -> Any:
    from stillroom.config import load_config
    from stillroom.precision.device import find_device
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models

    config = load_config(preset="demo", overrides={**SETTING, **over})
    out, device = Path(tempfile.mkdtemp()), find_device("cpu")
    return build_run(config, out, EventLog(out / "events.jsonl"), device=device, models=load_models(config, device))


def ours(**over: Any) -> list[dict[str, float]]:
    from stillroom.training.run import RunState
    from stillroom.training.step import train_step

    run, state = _run(**over), RunState()
    run.student.train()
    clock = Clock(run.student.model, run.eval_batches())
    while state.applied < run.schedule.num_steps:
        clock.start()
        train_step(run, state, run.loader.window(state.cursor))
        clock.stop(state.applied)
    return clock.points


def trl(**over: Any) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    run = _run(**over)
    steps = run.schedule.num_steps
    clock = Clock(run.student.model, run.eval_batches())

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            clock.stop(state.global_step)

    class InOrder(GKDTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    rows = [row.tolist() for i in range(steps) for batch in run.loader.window(i) for row in batch.input_ids]
    train = run.config.train
    args = GKDConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=train.batch_size,
        learning_rate=train.learning_rate, lmbda=0.0, beta=0.0, lr_scheduler_type="cosine",
        warmup_steps=run.schedule.num_warmup, max_grad_norm=train.max_grad_norm, weight_decay=train.weight_decay,
        adam_beta2=train.beta2, report_to=[], logging_strategy="no", save_strategy="no", use_cpu=True,
        gradient_checkpointing=False, bf16=False, fp16=False, disable_tqdm=True, dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    InOrder(
        model=run.student.model, teacher_model=run.teacher.as_model().model, args=args, data_collator=collate,
        processing_class=run.tokenizer, train_dataset=Dataset.from_dict({"input_ids": rows}), callbacks=[Watch()],
    ).train()  # fmt: skip
    return clock.points


def seconds_to(points: list[dict[str, float]], target: float, clock: str) -> float | None:
    """Where the curve crosses the target, on a straight line between two evaluations."""
    before: dict[str, float] = {"loss": float("inf"), "wall": 0.0, "cpu": 0.0}
    for point in points:
        if point["loss"] <= target:
            if before["loss"] == float("inf"):
                return point[clock]
            share = (before["loss"] - target) / (before["loss"] - point["loss"])
            return before[clock] + share * (point[clock] - before[clock])
        before = point
    return None


def bench_cached_target() -> dict[str, Any]:
    """The same for three passes over a smaller share of the text: trl's last loss, and a teacher that is asked once."""
    over: dict[str, Any] = {"data.train_share": 0.05, "train.max_steps": 0, "train.epochs": 3}
    curves = {"trl GKD trainer": trl(**over)}
    target = curves["trl GKD trainer"][-1]["loss"]
    folder = Path(tempfile.mkdtemp())
    wall, cpu = time.perf_counter(), time.process_time()
    _write_cache(folder, over)
    writing = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    curves["stillroom, cached"] = ours(**over, **{"teacher.cache": str(folder)})
    reached = {
        name: {clock: seconds_to(points, target, clock) for clock in ("wall", "cpu")} for name, points in curves.items()
    }
    mine = reached["stillroom, cached"]
    for clock, seconds in mine.items():
        mine[clock] = None if seconds is None else seconds + writing[clock]
    print(f"  target {target:.3f}: {reached}, of which writing the cache took {writing}")
    return {"setting": {**SETTING, **over}, "target": target, "writing": writing, "seconds": reached, "curves": curves}


def _write_cache(folder: Path, over: dict[str, Any]) -> None:
    from stillroom.config import load_config
    from stillroom.training.write_cache import make_cache

    make_cache(load_config(preset="demo", overrides={**SETTING, **over}), folder, device="cpu")


def bench_target() -> dict[str, Any]:
    contenders: dict[str, Callable[[], list[dict[str, float]]]] = {"stillroom": ours, "trl GKD trainer": trl}
    curves = {name: run() for name, run in contenders.items()}
    target = next(point["loss"] for point in curves["stillroom"] if point["step"] >= STEPS * 2 // 3)
    reached = {
        name: {clock: seconds_to(points, target, clock) for clock in ("wall", "cpu")} for name, points in curves.items()
    }
    print(f"  target {target:.3f}: {reached}")
    return {"setting": SETTING, "target": target, "seconds": reached, "curves": curves}
