"""Blocks of lines that the guides show, each from one record of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _seed.output import boxed
from stillroom.core.errors import StillroomError, TooManySkips
from stillroom.telemetry.wording import as_number, format_percent

Event = Mapping[str, Any]

# What the NaN detector of the guide suggests, after what was found here.
_SUGGESTED = (
    "Lower learning rate (try 1e-5 or lower)",
    "Reduce batch size",
    "Check input data for invalid values",
    "Ensure teacher model is valid",
    "Try --dry-run first to diagnose",
)


def number(event: Event, key: str, form: str = ".4f") -> str:
    """A number of a record; `nan` or `inf` where it was not finite, `-` where there is none."""
    value = as_number(event.get(key))
    return format(value, form) if value is not None else str(event.get(f"{key}_nonfinite") or "-")


def weight_text(value: Any) -> str:
    """A weight, or the ends of a ramp."""
    return f"{value['start']:g} to {value['end']:g}" if isinstance(value, Mapping) else f"{value:g}"


def configuration_lines(start: Event, device: str) -> list[str]:
    """The configuration of a run that begins."""
    config, schedule = start["config"], start["schedule"]
    train, objectives = config["train"], config["objectives"]
    steps, warmup = int(schedule["optimizer_steps"]), int(schedule["warmup_steps"])
    lines = [
        "Training Configuration:",
        f"  Learning rate: {train['learning_rate']:g}",
        f"  Warmup steps: {warmup} ({format_percent(warmup / max(steps, 1), 0)} of {steps} total steps)",
        f"  Temperature: {weight_text(objectives['kd']['temperature'])}",
        f"  Alpha (distillation weight): {weight_text(objectives['kd']['weight'])}, "
        f"CE weight: {weight_text(objectives['ce']['weight'])}",
        f"  Max grad norm: {train['max_grad_norm']:g} (gradient clipping)",
        f"  Batch size: {train['batch_size']}, gradient accumulation: {train['gradient_accumulation_steps']}",
        f"  FP16: {str(start['precision']['mode']).startswith('fp16')}",
        f"  Device: {device}",
        f"  Teacher: {config['teacher']['model']}",
        f"  Student: {config['student']['model']}",
    ]
    if config["teacher"]["router"]["mode"] != "frozen":
        rate = train["router_learning_rate"] or train["learning_rate"]
        lines.append(f"  Router: {config['teacher']['router']['mode']}, learning rate {rate:g}")
    return lines


def shape_lines(event: Event) -> list[str]:
    """The logits of the first forward pass. Only those of scored positions are made."""
    rows, positions, scored = event["rows"], event["positions"], event["scored"]
    weights = event["weights"]
    shapes = []
    for name in ("student", "teacher"):
        logits = event[f"{name}_logits"]
        shape = f"torch.Size([{rows}, {positions}, {logits[1]}])" if logits else "none: its answers are not dense"
        shapes.append(f"{name.capitalize()} logits shape: {shape}")
    return boxed(
        "LOGIT SHAPE CHECK (First Forward Pass)",
        [
            *shapes,
            f"Scored positions: {scored} of {rows * positions}; the logits of the others are not made",
            f"Vocabulary: {event['vocabulary']} tokens, the same for both",
            f"Temperature: {event['temperature']:g}",
            f"Alpha (distillation weight): {weights.get('kd', 0.0):g}, CE weight: {weights.get('ce', 0.0):g}",
        ],
    )


def component_lines(event: Event) -> list[str]:
    """The terms of one of the first steps, which the guide counts from 0."""
    terms = event["terms"]
    kd, ce = terms.get("kd", {}), terms.get("ce", {})
    others = [
        f"  {name} (weight {number(term, 'weight', 'g')}): {number(term, 'raw', '.6f')}"
        for name, term in terms.items()
        if name not in ("kd", "ce")
    ]
    temperature = float(event["temperature"])
    return [
        f"[Step {int(event['step']) - 1}] Loss Components:",
        f"  Distillation Loss (alpha={number(kd, 'weight', 'g')}): {number(kd, 'raw', '.6f')}",
        f"  Cross-Entropy Loss (1-alpha={number(ce, 'weight', 'g')}): {number(ce, 'raw', '.6f')}",
        *others,
        f"  Combined Loss: {number(event, 'train_loss', '.6f')}",
        f"  Temperature: {temperature:g}, Temperature^2: {temperature**2:g}",
    ]


def scheduler_lines(start: Event) -> list[str]:
    """The schedule in optimizer steps, each line with the word that the guide's grep looks for."""
    schedule, train = start["schedule"], start["config"]["train"]
    size = int(schedule["gradient_accumulation"]) * int(schedule["processes"])
    steps, warmup, epoch = (int(schedule[key]) for key in ("optimizer_steps", "warmup_steps", "total_batches"))
    whole, rest = divmod(epoch, size)
    total = steps * size if train["max_steps"] else round(epoch * float(train["epochs"]))
    lines = [
        f"Total batches: {total:,}",
        f"Gradient accumulation: {size}",
        f"Optimizer steps: {steps:,}",
        f"Warmup steps: {warmup:,} ({format_percent(warmup / max(steps, 1))})",
    ]
    if rest:
        lines.append(f"An epoch has {whole:,} steps of {size} batches and a last one of {rest}")
    return [f"[Scheduler] {line}" for line in lines]


def stop_lines(error: StillroomError, fault: Event) -> list[str]:
    """The end of a run that the guard halted at `fault`. What was found comes before what the guide suggests."""
    value = number(fault.get("evidence", {}), "loss")
    what = "NaN loss" if value in ("nan", "inf", "-inf", "-") else "An unusable step"
    where = f"{what} detected at step {fault.get('step', '-')}! Loss value: {value}. Training stopped..."
    if isinstance(error, TooManySkips):
        where = f"Too many {'NaN' if what == 'NaN loss' else 'bad'} batches, stopping training. {where}"
    fixes: Sequence[str] = [*error.advice, *_SUGGESTED]
    return boxed(
        "TRAINING STOPPED DUE TO NUMERICAL INSTABILITY",
        [
            where,
            f"Cause: {error.what}" + (f" ({error.where})" if error.where else ""),
            "Suggested fixes:",
            *(f"  {place}. {fix}" for place, fix in enumerate(fixes, start=1)),
        ],
    )


def end_lines(summary: Event, folder: object) -> list[str]:
    """The result of a finished run, with its checks."""
    lines = [
        f"Final validation perplexity: {number(summary['student'], 'perplexity', '.2f')}",
        f"Best student of step {summary['best_step']}, before training "
        f"{number(summary['student_before'], 'perplexity', '.2f')}",
        f"Success rate: {format_percent(float(summary['success_rate']), 0)}, "
        f"batches skipped: {summary['skipped']}, rollbacks: {summary['rollbacks']}",
        "Success criteria:",
    ]
    lines += [f"  [{'x' if check['passed'] else ' '}] {check['name']}: {check['text']}" for check in summary["checks"]]
    return [*lines, f"Saved: {folder}/student", f"Report: {folder}/report.html", "Training completed"]
