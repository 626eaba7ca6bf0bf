"""The embedded demo: a distilled student compared with two baselines.

Train the same student three times on the same small transfer set: by the teacher, on the labels with as many tokens,
and on the labels with as much compute (further steps in place of the teacher's forward passes). Each run keeps its best
student by held-out perplexity. The baselines have their own learning rates and weight decays, from the search in
benchmarks/demo.
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
from stillroom.core.errors import BrokenAtStart
from stillroom.data import fixed_batches, open_eval
from stillroom.models import agree_on_vocabulary, load_tokenizer, open_student, open_teacher
from stillroom.precision import resolve
from stillroom.precision.device import find_device
from stillroom.teachers import LiveTeacher
from stillroom.training.distill import distill
from stillroom.training.evaluate import evaluate
from stillroom.training.finish import Result, write_summary
from stillroom.training.run_folder import owned, read_config

Listeners = tuple[Callable[[dict[str, Any]], None], ...]

# Best settings of the search (benchmarks/demo/results) for plain cross-entropy on the same transfer set.
_BASELINES = {
    "baseline": {"learning_rate": 8e-3, "weight_decay": 1.0},
    "baseline_equal_compute": {"learning_rate": 8e-3, "weight_decay": 2.0},
}
_FOLDERS = {"baseline": "equal-tokens", "baseline_equal_compute": "equal-compute"}


def run_demo(
    config: Config,
    folder: Path,
    *,
    device: str = "auto",
    listeners: Listeners = (),
    accept_changed_inputs: bool = False,
) -> Result:
    """Distil, train both baselines, compare. Each part can be interrupted and resumed."""
    with owned(folder, config) as claim:
        if not claim.is_resumed:
            claim.describe()
        claim.is_begun = True
        options: dict[str, Any] = {"listeners": listeners, "accept_changed_inputs": accept_changed_inputs}
        return _three_runs(claim.config, folder, device=device, **options)


def _three_runs(
    config: Config, folder: Path, *, device: str, listeners: Listeners, accept_changed_inputs: bool
) -> Result:
    options: dict[str, Any] = {
        "device": device,
        "listeners": listeners,
        "accept_changed_inputs": accept_changed_inputs,
    }
    note = _note_writer(listeners)
    began = time.monotonic()
    (folder / "baselines").mkdir(exist_ok=True)  # marks the run as a demo
    result = distill(config, folder, **options)
    summary = dict(result.summary)
    if "baseline_equal_compute" in summary:
        return result
    ratio = compute_ratio(summary["teacher"]["parameters"], summary["student"]["parameters"])
    steps = {"baseline": summary["steps"], "baseline_equal_compute": round(summary["steps"] * ratio)}
    for name, chosen in _BASELINES.items():
        kind = _FOLDERS[name].replace("-", " ")
        note(f"now the same student on plain cross-entropy, at {kind}: {steps[name]:,} steps")
        plain = baseline_config(config, steps[name], **chosen)
        plain = _with_minutes_left(plain, time.monotonic() - began)
        done = distill(plain, folder / "baselines" / _FOLDERS[name], **options)
        summary[name] = _compared(done, config, device, chosen)
    summary["compute_ratio"] = ratio
    summary["story"] = story_of(summary)
    write_summary(folder, summary)
    if summary["teacher"]["perplexity"] >= summary["baseline"]["perplexity"]:
        raise BrokenAtStart(
            "the teacher is not better than the plain student: there is nothing to distil",
            where="builtin:teacher",
            advice=["rebuild it with scripts/make_builtin_teacher.py", "or use a stronger teacher with --teacher"],
        )
    return Result(folder, summary)


def _with_minutes_left(config: Config, seconds: float) -> Config:
    """Subtract the elapsed time from the limit, which is for the whole demo; a part without time makes one step."""
    limit = config.train.max_minutes
    if not limit:
        return config
    minutes = max(limit - seconds / 60, 1e-6)
    return config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": minutes})})


def compute_ratio(teacher_parameters: int, student_parameters: int) -> float:
    """Compute of a distillation step divided by that of a plain step.

    The teacher's forward pass costs 2 operations per parameter and token, the student's training step 6.
    """
    return 1.0 + teacher_parameters / (3.0 * student_parameters)


def baseline_config(config: Config, steps: int, *, learning_rate: float, weight_decay: float) -> Config:
    """The same run on labels alone, with as many evaluations spread over its steps."""
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
    table["rollouts"] = None  # nothing is learned on the student's own text without the teacher
    return Config.model_validate(table)


def _compared(done: Result, config: Config, device: str, chosen: dict[str, float]) -> dict[str, Any]:
    """Compare a baseline's student with the teacher on the same held-out batches."""
    where = find_device(device)
    section = config.student.model_copy(update={"model": str(done.folder / "student"), "init": "pretrained"})
    student = open_student(section, load_tokenizer(section, section.model), seed=config.train.seed)
    teacher = open_teacher(config.teacher, torch.float32)
    size = agree_on_vocabulary(
        teacher.tokenizer, student.tokenizer, teacher.anatomy.vocab_rows, student.anatomy.vocab_rows
    )
    corpus = open_eval(config.data.eval or config.data.sources[0].path, student.tokenizer, config.data)
    batches = fixed_batches(corpus.evaluation, config.eval.batch_size or config.train.rows_per_batch, config.eval.limit)
    student.network.to(where)
    evaluation = evaluate(
        student.as_student(size),
        batches,
        precision=resolve("fp32", where),
        teacher=LiveTeacher(
            teacher.network, vocab_size=size, device=where, offload=False, is_described=teacher.is_described
        ),
    )
    summary = done.summary
    return {
        **evaluation.yardsticks(),
        "parameters": student.anatomy.num_parameters,
        "steps": summary["steps"],
        "best_step": summary["best_step"],
        "tokens": summary["tokens"],
        "seconds": summary["seconds"],
        **chosen,
    }


def story_of(summary: dict[str, Any]) -> list[str]:
    """Sentences about the cost of each run and the source of the gain."""
    runs = [("distilled", {**summary, **summary["student"]})]
    runs += [(f"plain, {_FOLDERS[name].replace('-', ' ')}", summary[name]) for name in _BASELINES]
    costs = [
        f"{name}: {run['steps']:,} steps in {run['seconds']:.0f} s, best at step {run['best_step']:,}, "
        f"learning rate {run['learning_rate']:g}, weight decay {run['weight_decay']:g}"
        for name, run in runs
    ]
    return [*costs, _conclusion(summary)]


def _teacher_tokens() -> int:
    """Size of the builtin teacher's training set, from its training log."""
    log = builtin.model_path("teacher") / "training_log.jsonl"
    return int(json.loads(log.read_text(encoding="utf-8").splitlines()[0])["train_tokens"])


def _conclusion(summary: dict[str, Any]) -> str:
    student = summary["student"]["perplexity"]
    teacher = summary["teacher"]["perplexity"]
    tokens, compute = summary["baseline"]["perplexity"], summary["baseline_equal_compute"]["perplexity"]
    better = min(tokens, compute)
    result = (
        f"The transfer set has {summary['transfer_tokens']:,} tokens; the teacher saw {_teacher_tokens():,}. "
        f"Distilled, the student reaches perplexity {student:.1f}; on the labels alone {tokens:.1f} with as many "
        f"tokens and {compute:.1f} with as much compute. "
    )
    if student < better:
        closed = (better - student) / (better - teacher)
        return result + (
            f"That closes {closed:.0%} of the gap in perplexity between the better baseline and the teacher "
            f"({teacher:.1f}). The gain is the teacher's knowledge of text the student never saw; with all of that "
            "text available, plain training at equal compute catches up."
        )
    return result + "Distillation did not pay here."


# -- resuming --------------------------------------------------------------------------------------------


def is_demo_run(folder: Path) -> bool:
    return (folder / "baselines").is_dir()


def resume_demo(
    folder: Path,
    *,
    device: str,
    max_minutes: float | None,
    listeners: Listeners,
    accept_changed_inputs: bool = False,
) -> Result:
    config = read_config(folder)
    if max_minutes is not None:
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": max_minutes})})
    options: dict[str, Any] = {"listeners": listeners, "accept_changed_inputs": accept_changed_inputs}
    return run_demo(config, folder, device=device, **options)


def _note_writer(listeners: Listeners) -> Callable[[str], None]:
    def write(text: str) -> None:
        for listener in listeners:
            listener({"event": "note", "text": text})

    return write
