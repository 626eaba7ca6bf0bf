"""Tiny runs in which a fault is really provoked: by settings, by prepared data, by --inject, or by the machine."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.core.errors import StillroomError
from stillroom.data.loader import Loader
from stillroom.training.distill import distill

Listener = Callable[[dict[str, Any]], None]


def make_world(folder: Path) -> Path:
    """Models and texts that all runs share."""
    tiny.save_trained(folder / "teacher", num_layers=2, steps=120)
    tiny.save_trained(folder / "weak_teacher", num_layers=1, width=16, steps=40)
    _with_outliers(folder / "teacher", folder / "outlier_teacher")
    tiny.save_model(folder / "student", num_layers=1)
    tiny.save_text(folder / "train.jsonl", count=300)
    _write(folder / "digits.jsonl", _digits(300, seed=1))
    _write(folder / "digits_eval.jsonl", _digits(30, seed=2))
    _write(folder / "shuffled.jsonl", _shuffled(12, seed=3))
    _write(folder / "shuffled_eval.jsonl", _shuffled(30, seed=4))
    _write(folder / "few.jsonl", tiny.sentences(16, 5))
    few = tiny.sentences(16, 5)
    _write(folder / "other_eval.jsonl", [line for line in tiny.sentences(40, 6) if line not in few])
    _write(folder / "leak_eval.jsonl", tiny.sentences(300, 0)[:30])
    lines = [json.dumps({"text": line}) for line in tiny.sentences(300, 0)]
    broken = [line[: len(line) // 2] if place % 12 == 0 else line for place, line in enumerate(lines)]
    (folder / "broken.jsonl").write_text("\n".join(broken) + "\n", encoding="utf-8")
    asked = [{"prompt": f"{line} {line}", "completion": "best"} for line in tiny.sentences(300, 7)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)) + "\n", encoding="utf-8")
    return folder


@torch.no_grad()
def _with_outliers(source: Path, target: Path, factor: float = 2000.0) -> None:
    """The same function in other numbers: one channel is small after each norm and large in the weights that read it.

    Eight bits for a row of such weights are spent on one of them.
    """
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        readers = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        inner = (layer.mlp.gate_proj, layer.mlp.up_proj)
        for norm, linears in ((layer.input_layernorm, readers), (layer.post_attention_layernorm, inner)):
            norm.weight[3] /= factor
            for linear in linears:
                linear.weight[:, 3] *= factor
    model.save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines) + "\n", encoding="utf-8")


def _digits(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice("0123456789#$%&") for _ in range(30)) for _ in range(count)]


def _shuffled(count: int, seed: int) -> list[str]:
    """Words in no order: what is learned of one text helps little with another."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(tiny.WORDS) for _ in range(14)) for _ in range(count)]


@dataclass(frozen=True)
class Fault:
    """A run with a fault, and the cause that a diagnosis should name first."""

    cause: str
    over: dict[str, Any] = field(default_factory=dict)
    inject: str = ""
    files: dict[str, str] = field(default_factory=dict)  # settings that name a file of the world
    around: Callable[[], Any] | None = None
    listener: Callable[[], Listener] | None = None
    preset: str | None = None


def run(world: Path, out: Path, fault: Fault) -> Path:
    """Carry out the run. It may end as it likes: the record is what counts."""
    base = {"train.max_steps": 16, "train.eval_steps": 8, "train.save_steps": 1000, "eval.max_batches": 4}
    files = {key: str(world / name) for key, name in fault.files.items()}
    config = load_config(None, preset=fault.preset, overrides=tiny.settings(world) | base | files | fault.over)
    listeners = (fault.listener(),) if fault.listener else ()
    with fault.around() if fault.around else nullcontext(), suppress(StillroomError):
        distill(config, out, device="cpu", inject=fault.inject, listeners=listeners)
    return out


@contextmanager
def slow_loading(seconds: float = 0.08) -> Iterator[None]:
    """Each window of batches takes a while to be read."""
    whole = Loader.window

    def window(self: Loader, index: int) -> Any:
        time.sleep(seconds)
        return whole(self, index)

    Loader.window = window  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loader.window = whole  # type: ignore[method-assign]


@contextmanager
def one_shared_processor() -> Iterator[None]:
    """The process has a third of a processor by its own clock, however busy the machine is."""
    whole = time.process_time
    time.process_time = lambda: time.monotonic() / 3
    try:
        yield
    finally:
        time.process_time = whole


def leaking_listener() -> Listener:
    """A listener that keeps 24 MB of each step."""
    kept: list[bytes] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            kept.append(os.urandom(1) * 24_000_000)

    return listen


def stopping_listener() -> Listener:
    """A listener that suspends its process at step 6."""

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 6:
            os.kill(os.getpid(), signal.SIGSTOP)

    return listen


def interrupting_listener() -> Listener:
    """A listener that asks its own process to end at step 12."""

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    return listen


FAULTS = {
    fault.cause: fault
    for fault in (
        Fault("rate_too_high", {"train.learning_rate": 3.0, "train.max_steps": 24}),
        Fault("rate_too_low", {"train.learning_rate": 1e-6}),
        Fault("never_out_of_warmup", {"train.warmup_ratio": 0.95}),
        Fault(
            "schedule_in_micro_batches",
            {"train.gradient_accumulation_steps": 8, "train.batch_size": 1, "train.warmup_steps": 13},
        ),
        Fault("loss_scale_collapsed", {"precision.mode": "fp16-mixed"}, inject="inf_grad@4x200"),
        Fault("divergence", {}, inject="nan_weight@3x40"),
        Fault("dead_component", {"objectives.ce.weight": 1e-4}),
        Fault("dominating_component", {"objectives.feature.weight": 500.0}),
        Fault(
            "active_when_zero",
            {"objectives.feature.weight": 0.1, "train.learning_rate": 3e-3, "train.gradient_accumulation_steps": 1,
             "data.max_length": 32, "student.gradient_checkpointing": False, "train.warmup_ratio": 0.1},
            preset="student-aware",
        ),
        Fault("train_eval_gap", {"train.max_steps": 40}, files={"data.eval": "digits_eval.jsonl"}),
        Fault("noop_updates", {"precision.mode": "fp16-split", "train.learning_rate": 2e-10}),
        Fault("zero_gradients", {"guard.loss_clamp": 0.05}),
        Fault("teacher_degraded", {}, inject="teacher_nan@3x30"),
        Fault(
            "teacher_worse_than_student",
            {"train.learning_rate": 1e-3},
            files={"teacher.model": "weak_teacher", "student.model": "teacher"},
        ),
        Fault("teacher_off_domain", {}, files={"data.train": "digits.jsonl", "data.eval": "digits_eval.jsonl"}),
        Fault(
            "quantised_teacher_too_coarse",
            {"teacher.quantisation": "int8", "teacher.max_quantisation_kl": 20.0},
            files={"teacher.model": "outlier_teacher"},
        ),
        Fault("leaking_data", {}, files={"data.eval": "leak_eval.jsonl"}),
        Fault(
            "data_exhausted",
            {"train.max_steps": 40, "train.eval_steps": 10},
            files={"data.train": "few.jsonl", "data.eval": "other_eval.jsonl"},
        ),
        Fault("bad_lines", {"data.max_bad_share": 0.5}, files={"data.train": "broken.jsonl"}),
        Fault(
            "overfitting",
            {"train.max_steps": 60, "train.eval_steps": 10, "train.learning_rate": 1e-2, "objectives.kd.weight": 0.0,
             "objectives.ce.weight": 1.0},
            files={"data.train": "shuffled.jsonl", "data.eval": "shuffled_eval.jsonl"},
        ),
        Fault(
            "masked_out_data",
            {"data.max_length": 64, "objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0},
            files={"data.train": "asked.jsonl"},
        ),
        Fault("slow_loader", {}, around=slow_loading),
        Fault("memory_creep", {"train.max_steps": 24}, listener=leaking_listener),
        Fault("machine_overloaded", {"train.max_steps": 12}, around=one_shared_processor),
        Fault("stopped_early", {}, listener=interrupting_listener),
    )
}  # fmt: skip
