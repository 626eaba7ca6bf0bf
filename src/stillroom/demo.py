"""The embedded default as a story: a distilled student beside honest baselines.

The teacher saw much text, you have little. The same student is trained three times on the same small transfer
set: by the teacher, on the labels with as many tokens, and on the labels with as much compute (the teacher's
forward passes paid back as further steps). Each keeps its best student by held-out perplexity, and the
baselines have learning rates and decay of their own, found by the search in benchmarks/demo.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stillroom import builtin
from stillroom.config import Config
from stillroom.data import fixed_batches, open_eval
from stillroom.engine.building.device import find_device
from stillroom.engine.distill import Result, distill, write_summary
from stillroom.engine.run_folder.folder import owned, read_config
from stillroom.errors import BrokenAtStart
from stillroom.evaluation import evaluate
from stillroom.models import agree_on_vocabulary, load_tokenizer, open_student, open_teacher
from stillroom.precision import resolve
from stillroom.teachers import LiveTeacher

Listeners = tuple[Callable[[dict[str, Any]], None], ...]

# The best of the committed search (benchmarks/demo/results) for plain cross-entropy on the same transfer set.
_BASELINES = {
    "baseline": {"learning_rate": 8e-3, "weight_decay": 1.0},
    "baseline_equal_compute": {"learning_rate": 8e-3, "weight_decay": 2.0},
}
_FOLDERS = {"baseline": "equal-tokens", "baseline_equal_compute": "equal-compute"}


def run_demo(config: Config, folder: Path, *, device: str = "auto", listeners: Listeners = ()) -> Result:
    """Distil, train both baselines, compare. Each part can be interrupted and goes on where it stood."""
    with owned(folder, config) as claim:
        if not claim.is_resumed:
            claim.describe()
        claim.is_begun = True
        return _three_runs(claim.config, folder, device=device, listeners=listeners)


def _three_runs(config: Config, folder: Path, *, device: str, listeners: Listeners) -> Result:
    tell = _teller(listeners)
    began = time.monotonic()
    (folder / "baselines").mkdir(exist_ok=True)  # marks the run as a demo from its first moment
    result = distill(config, folder, device=device, listeners=listeners)
    summary = dict(result.summary)
    if "baseline_equal_compute" in summary:
        return result
    ratio = compute_ratio(summary["teacher"]["parameters"], summary["student"]["parameters"])
    steps = {"baseline": summary["steps"], "baseline_equal_compute": round(summary["steps"] * ratio)}
    for name, chosen in _BASELINES.items():
        kind = _FOLDERS[name].replace("-", " ")
        tell(f"now the same student on plain cross-entropy, at {kind}: {steps[name]:,} steps")
        plain = baseline_config(config, steps[name], **chosen)
        plain = _with_minutes_left(plain, time.monotonic() - began)
        done = distill(plain, folder / "baselines" / _FOLDERS[name], device=device, listeners=listeners)
        summary[name] = _compared(done, config, device, chosen)
    summary["compute_ratio"] = ratio
    summary["story"] = tell_story(summary)
    write_summary(folder, summary)
    if summary["teacher"]["perplexity"] >= summary["baseline"]["perplexity"]:
        raise BrokenAtStart(
            "the teacher is not better than the plain student: there is nothing to distil",
            where="builtin:teacher",
            advice=["rebuild it with scripts/make_builtin_teacher.py", "or use a stronger teacher with --teacher"],
        )
    return Result(folder, summary)


def _with_minutes_left(config: Config, seconds: float) -> Config:
    """A time limit is one for the whole demo; a part that begins too late makes one step and stops."""
    limit = config.train.max_minutes
    if not limit:
        return config
    left = max(limit - seconds / 60, 1e-6)
    return config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": left})})


def compute_ratio(teacher_parameters: int, student_parameters: int) -> float:
    """Compute of a distillation step over that of a plain step.

    A teacher's forward pass costs 2 operations a parameter and token, a student's training step 6.
    """
    return 1.0 + teacher_parameters / (3.0 * student_parameters)


def baseline_config(config: Config, steps: int, *, learning_rate: float, weight_decay: float) -> Config:
    """The same run on labels alone. Evaluations are spread over the longer run; the best one counts."""
    table = config.to_dict()
    table["objectives"]["kd"]["weight"] = 0.0
    table["objectives"]["ce"]["weight"] = 1.0
    interval = max(1, steps * config.train.eval_steps // max(config.train.max_steps, 1))
    table["train"] |= {
        "max_steps": steps,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "eval_steps": interval,
        "save_steps": interval,
    }
    table["eval"]["samples"] = 0
    return Config.model_validate(table)


def _compared(done: Result, config: Config, device: str, chosen: dict[str, float]) -> dict[str, Any]:
    """A baseline's student beside the teacher, on the same held-out batches."""
    where = find_device(device)
    section = config.student.model_copy(update={"model": str(done.folder / "student"), "init": "pretrained"})
    student = open_student(section, load_tokenizer(section, section.model), seed=config.train.seed)
    teacher = open_teacher(config.teacher, torch.float32)
    size = agree_on_vocabulary(
        teacher.tokenizer, student.tokenizer, teacher.anatomy.vocab_rows, student.anatomy.vocab_rows
    )
    corpus = open_eval(config.data.eval or config.data.train, student.tokenizer, config.data)
    batches = fixed_batches(
        corpus.evaluation, config.eval.batch_size or config.train.rows_per_batch, config.eval.max_batches
    )
    student.network.to(where)
    found = evaluate(
        student.as_student(size),
        batches,
        precision=resolve("fp32", where),
        teacher=LiveTeacher(
            teacher.network, vocab_size=size, device=where, offload=False, is_described=teacher.is_described
        ),
    )
    summary = done.summary
    return {
        **found.yardsticks(),
        "parameters": student.anatomy.num_parameters,
        "steps": summary["steps"],
        "best_step": summary["best_step"],
        "tokens": summary["tokens"],
        "seconds": summary["seconds"],
        **chosen,
    }


def tell_story(summary: dict[str, Any]) -> list[str]:
    """What each arm cost and where the gain comes from, in words that the numbers support."""
    arms = [("distilled", {**summary, **summary["student"]})]
    arms += [(f"plain, {_FOLDERS[name].replace('-', ' ')}", summary[name]) for name in _BASELINES]
    told = [
        f"{name}: {arm['steps']:,} steps in {arm['seconds']:.0f} s, best at step {arm['best_step']:,}, "
        f"learning rate {arm['learning_rate']:g}, weight decay {arm['weight_decay']:g}"
        for name, arm in arms
    ]
    return [*told, _moral(summary)]


def _teacher_tokens() -> int:
    """How much different text the builtin teacher was trained on, as its own log says."""
    log = builtin.model_path("teacher") / "training_log.jsonl"
    return int(json.loads(log.read_text(encoding="utf-8").splitlines()[0])["train_tokens"])


def _moral(summary: dict[str, Any]) -> str:
    student = summary["student"]["perplexity"]
    teacher = summary["teacher"]["perplexity"]
    tokens, compute = summary["baseline"]["perplexity"], summary["baseline_equal_compute"]["perplexity"]
    better = min(tokens, compute)
    said = (
        f"The transfer set has {summary['transfer_tokens']:,} tokens; the teacher saw {_teacher_tokens():,}. "
        f"Distilled, the student reaches perplexity {student:.1f}; on the labels alone {tokens:.1f} with as many "
        f"tokens and {compute:.1f} with as much compute. "
    )
    if student < better:
        closed = (better - student) / (better - teacher)
        return said + (
            f"That closes {closed:.0%} of the gap between the better baseline and the teacher ({teacher:.1f}). "
            "The gain is the teacher's knowledge of text the student never saw; with all of that text at hand, "
            "plain training at equal compute catches up."
        )
    return said + "Distillation did not pay here."


# -- resuming --------------------------------------------------------------------------------------------


def is_demo_run(folder: Path) -> bool:
    return (folder / "baselines").is_dir()


def resume_demo(folder: Path, *, device: str, max_minutes: float | None, listeners: Listeners) -> Result:
    config = read_config(folder)
    if max_minutes is not None:
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": max_minutes})})
    return run_demo(config, folder, device=device, listeners=listeners)


def _teller(listeners: Listeners) -> Callable[[str], None]:
    def tell(text: str) -> None:
        for listener in listeners:
            listener({"event": "note", "text": text})

    return tell
