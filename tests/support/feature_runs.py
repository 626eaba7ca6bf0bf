"""Runs of a few steps with one feature each, here or in one of several processes, and what they came to.

Every feature is tried with each strategy in one start of two processes. The first one keeps what it found in a file.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import expert_bank
import pair_tokenizers
import tiny
import torch
from torch import Tensor

from stillroom.config import load_config
from stillroom.core.errors import Interrupted, StillroomError
from stillroom.models.compile import CompiledBody
from stillroom.parallel import Parallel
from stillroom.parallel.base import join
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog, read_events
from stillroom.training.build import build_run
from stillroom.training.distill import distill, resume
from stillroom.training.gradients import term_gradients
from stillroom.training.loop import gradients_due
from stillroom.training.models import load_models
from stillroom.training.run import Run, RunState
from stillroom.training.step import train_step

STEPS = 2
STRATEGIES = ("ddp", "fsdp")
# Rows of all lengths; the last window of an epoch leaves a process with fewer micro-batches than the other.
SHARED = {
    "data.packing": "rows",
    "data.train_share": 0.04,
    "train.batch_size": 2,
    "train.max_steps": STEPS,
    "train.compile": "off",
    "objectives.kd.weight": 0.7,
    "objectives.ce.weight": 0.3,
}
GATES = {"teacher.router.every": 1, "teacher.router.load_balance_weight": 0.1, "teacher.router.entropy_weight": 0.01}
SPANS = {"objectives.kd.weight": 0.0, "objectives.alm.weight": 0.5}

# Feature as docs/guides/scaling.md names it: the folder of models, and the settings.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "kd and ce": ("plain", {}),
    "bf16-mixed": ("plain", {"precision.mode": "bf16-mixed"}),
    "fp16-mixed": ("plain", {"precision.mode": "fp16-mixed"}),
    "fp16-master": ("plain", {"precision.mode": "fp16-master"}),
    "fp16-split": ("plain", {"precision.mode": "fp16-split"}),
    "fp16-sr": ("plain", {"precision.mode": "fp16-sr"}),
    "moments in BF16": ("plain", {"precision.moments": "bfloat16"}),
    "moments in int8": ("plain", {"precision.moments": "int8"}),
    "Muon": ("plain", {"train.optimizer": "muon"}),
    "DoRA over an FP16 base": (
        "plain", {"student.adapter.rank": 3, "student.adapter.kind": "dora", "student.adapter.base_dtype": "float16"},
    ),
    "LoRA over an int8 base": ("plain", {"student.adapter.rank": 2, "student.adapter.base_dtype": "int8"}),
    "hidden states and attention maps": (
        "plain",
        {
            "objectives.feature.weight": 0.1, "objectives.attention.weight": 0.1, "objectives.layerwise.weight": 0.1,
            "objectives.contrastive.weight": 0.1,
        },
    ),
    "two tokenizers": (
        "pair",
        {
            **SPANS, "objectives.exact_match.weight": 0.2, "objectives.prefix_match.weight": 0.2,
            "objectives.uld.weight": 0.1, "objectives.span_hidden.weight": 0.1,
        },
    ),
    "a few tokens of the teacher": ("plain", {"teacher.signal.kind": "top_k", "teacher.signal.k": 8}),
    "stored answers of the teacher": ("plain", {"teacher.cache": "auto"}),
    "labels alone next to distilled text": ("plain", {"objectives.feature.weight": 0.1}),
    "a student of stacked experts": ("stacked", {}),
    "a student of experts in one matrix": ("matrix", {}),
    "a curriculum, packed rows, gradient checkpointing": (
        "plain",
        {
            "objectives.kd.weight": {"start": 0.0, "end": 1.0}, "data.packing": "packed",
            "student.gradient_checkpointing": True,
        },
    ),
    "train.compile": ("plain", {"train.compile": "both"}),
    "telemetry.gradient_steps": ("plain", {"telemetry.gradient_steps": 1}),
    "all experts of the teacher": ("router", {"teacher.router.mode": "all-experts"}),
    "experts drawn at random": ("router", {"teacher.router.mode": "knowledge-augmentation"}),
    "gates trained on the student": ("router", {**GATES, "teacher.router.mode": "sar"}),
    "gates trained with the student": ("router", {**GATES, "teacher.router.mode": "sar-joint"}),
    "gates moved for each token": ("router", {"teacher.router.mode": "sar-transient"}),
    "gates trained by lookahead": ("router", {**GATES, "teacher.router.mode": "sar-meta"}),
    "gates trained across two tokenizers": ("router pair", {**GATES, **SPANS, "teacher.router.mode": "sar"}),
}  # fmt: skip


ADAPTED = "DoRA over an FP16 base"  # as a whole run
# A whole run that is stopped and taken up: FP16 weights and a projector. Not layerwise: FSDP2 sums the gradients of a
# tapped state that its layer gives before it adds the tap's, one process after, and FP16 rounds every sum.
STOPPED = {"precision.mode": "fp16-master", "objectives.feature.weight": 0.1, "objectives.attention.weight": 0.1}


def save_worlds(folder: Path) -> None:
    """The models of all features."""
    tiny.save_text(folder / "train.jsonl")
    tiny.save_text(folder / "labels.jsonl", 100, seed=5)
    student = {"width": 32, "num_layers": 2, "seed": 2}
    for name, teacher, kind in (
        ("plain", "llama", "llama"),
        ("stacked", "llama", "mixtral"),
        ("matrix", "llama", "dbrx"),
        ("router", "mixtral", "llama"),
    ):
        tiny.save_model(folder / name / "teacher", teacher, width=48, num_layers=2, seed=1)
        tiny.save_model(folder / name / "student", kind, **student)
    for role, kind in (("teacher", "BPE with bytes"), ("student", "byte-level")):
        words = pair_tokenizers.built(kind)
        size = {"vocab_size": len(words), "with_tokenizer": False, "width": 16, "num_layers": 2}
        for name, family in (("pair", "llama"), ("router pair", "mixtral")):
            tiny.save_model(folder / name / role, family if role == "teacher" else "llama", **size)
            words.save_pretrained(folder / name / role)


def settings(folder: Path, feature: str, accumulation: int) -> dict[str, Any]:
    world, over = FEATURES[feature]
    given = tiny.settings(folder / world, train__gradient_accumulation_steps=accumulation)
    sources: Any = str(folder / "train.jsonl")
    if feature.startswith("labels"):  # windows of one kind of row, of the other and of both
        sources = [{"path": sources}, {"path": str(folder / "labels.jsonl"), "objectives": "labels"}]
    return {**given, "data.train": sources, **SHARED, **over}


def whole_run(folder: Path, feature: str, accumulation: int, **over: Any) -> Any:
    """The configuration of a run from nothing to a written student."""
    ending = {"eval.samples": 0, "eval.max_batches": 1, **over}
    return load_config(overrides={**settings(folder, feature, accumulation), **ending})


def run_whole(folder: Path) -> None:
    """An adapter, written by sharded processes; masters and projectors, stopped and taken up by them."""
    sharded = {"train.strategy": "fsdp"}
    distill(whole_run(folder, ADAPTED, 2, **sharded), folder / "adapter-fsdp", device="cpu")
    with suppress(Interrupted):
        distill(stopped_run(folder, 2, **sharded, **{"train.max_minutes": 1e-9}), folder / "cut", device="cpu")
    parallel = join(2)
    if parallel.is_first:
        shutil.copytree(folder / "cut", folder / "cut-fsdp")
    parallel.wait()
    resume(folder / "cut-fsdp", device="cpu", max_minutes=0.0)


def stopped_run(folder: Path, accumulation: int, **over: Any) -> Any:
    return whole_run(folder, "kd and ce", accumulation, **STOPPED, **over)


def tried(
    folder: Path, feature: str, accumulation: int, parallel: Parallel, loaded: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a run of a feature came to, or the code and the words of its refusal. `loaded`: models to take copies of."""
    log_path = folder / f"{feature.replace(' ', '-')}-{parallel.strategy}-{parallel.rank}.jsonl"
    try:
        with EventLog(log_path) as log, _without_code_generation():
            config = load_config(overrides=settings(folder, feature, accumulation))
            loaded = {} if loaded is None else loaded
            if feature not in loaded:
                where = {"folder": log.path.with_suffix(""), "parallel": parallel}
                loaded[feature] = load_models(config, find_device("cpu"), **where)
            return _trained(config, log, parallel, copy.deepcopy(loaded[feature]))
    except StillroomError as error:
        return {"code": error.exit_code, "what": str(error.what), "where": error.where}


@contextmanager
def _without_code_generation() -> Iterator[None]:
    """torch.compile traces and runs what it traced: generating code takes half a minute."""
    defaults: dict[str, Any] = CompiledBody.__init__.__kwdefaults__
    kept = dict(defaults)
    defaults["backend"] = "eager"
    try:
        yield
    finally:
        defaults.update(kept)


def _trained(config: Any, log: EventLog, parallel: Parallel, models: Any) -> dict[str, Any]:
    device = find_device("cpu")
    run = build_run(config, log.path.with_suffix(""), log, device=device, models=models, parallel=parallel)
    run.student.train()
    state, losses, norms = RunState(), [], []
    while state.applied < STEPS:
        if gradients_due(run, state):
            term_gradients(run, state, run.loader.window(state.cursor))
        outcome = train_step(run, state, run.loader.window(state.cursor))
        losses.append(outcome.evidence.loss)
        norms.append(outcome.evidence.grad_norm)
    told = [event["text"] for event in read_events(log.path) if event["event"] == "note"] if log.path.exists() else []
    return {"code": 0, "losses": losses, "norms": norms, "weights": whole_weights(run), "notes": told}


def whole_weights(run: Run) -> Tensor:
    """Everything that was trained, end to end, in FP64; of FP16 weights their masters. Every process takes part."""
    cells = [cell for cells in run.optimizer.cells.values() for cell in cells]
    held = [_whole(cell.parameter) if hasattr(cell.parameter, "full_tensor") else cell.storage.read() for cell in cells]
    held += run.teacher.training.trained_weights().values()
    return torch.cat([one.detach().double().flatten() for one in held])


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.detach().full_tensor()
    return whole


def measured(folder: Path, rows: int, parallel: Parallel) -> dict[str, Any]:
    """Gradients of single terms, of a micro-batch of so many rows in each process."""
    over = {**settings(folder, "hidden states and attention maps", 1), "train.batch_size": rows}
    config, device = load_config(overrides=over), find_device("cpu")
    with EventLog(folder / f"measured-{parallel.strategy}-{parallel.rank}.jsonl") as log:
        run = build_run(config, folder, log, device=device, models=load_models(config, device), parallel=parallel)
        run.student.train()
        found = term_gradients(run, RunState(), run.loader.window(0))
        assert not list(run.optimizer.named_gradients()), "nothing is left behind"
    return found


def main(worlds: Path, out: Path) -> None:
    loaded: dict[str, Any] = {}
    found = {
        (feature, strategy): tried(worlds, feature, 2, join(2, strategy), loaded)
        for feature in FEATURES
        for strategy in STRATEGIES
    }
    found |= {("bank", strategy): expert_bank.trained(join(2, strategy)) for strategy in STRATEGIES}
    found["measured", "fsdp"] = measured(worlds, 2, join(2, "fsdp"))
    run_whole(worlds)
    if join(2).is_first:
        torch.save(found, out)
