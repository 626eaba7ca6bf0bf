"""Harmful settings, found in a configuration alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stillroom.diagnosis.components import INNER, ramp_text
from stillroom.diagnosis.finding import Finding, Severity
from stillroom.telemetry.wording import as_number, format_lr, format_percent

_VOCABULARY = 50_257  # an example, to say what a clamp does
_HIGH_RATE, _LOW_RATE = 2e-2, 1e-7
_HIGH_TEMPERATURE = 5.0
_FEW = 0.02  # share of the teacher in the weights

Table = Mapping[str, Any]
Check = Callable[["Settings"], Iterator[Finding]]


class Settings:
    """A configuration by dotted names."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def get(self, key: str) -> Any:
        value: Any = self._table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        value = as_number(self.get(key))
        return default if value is None else value

    def ramp(self, key: str) -> tuple[float, float, float]:
        """(at the start, at the end, where it begins) of a number or a ramp over the run."""
        value = self.get(key)
        if isinstance(value, Mapping):
            begin = as_number(value.get("begin")) or 0.0
            return as_number(value.get("start")) or 0.0, as_number(value.get("end")) or 0.0, begin
        constant = as_number(value) or 0.0
        return constant, constant, 0.0


def harmful_settings(table: Table) -> list[Finding]:
    """What in a configuration is likely to harm, the gravest first."""
    settings = Settings(table)
    found = [finding for check in _CHECKS for finding in check(settings)]
    return sorted(found, key=lambda finding: ("problem", "warning", "hint").index(finding.severity))


def _found(cause: str, severity: Severity, evidence: str, advice: str, setting: str, **numbers: Any) -> Finding:
    return Finding(cause, severity, evidence, advice, setting=setting, numbers=numbers)


def _clamps(settings: Settings) -> Iterator[Finding]:
    clamp = settings.number("guard.logit_clamp")
    if clamp > 0:
        top = math.exp(2 * clamp) / (math.exp(2 * clamp) + _VOCABULARY - 1) if clamp < 300 else 1.0
        if top < 0.99:
            yield _found(
                "clamped_logits",
                "problem",
                f"guard.logit_clamp = {clamp:g} caps any probability at {format_percent(top, 2)} for a vocabulary of "
                f"{_VOCABULARY:,}: the perplexity cannot fall below {1 / top:,.0f}",
                "turn the clamp off; losses are computed in FP32 and need none",
                "guard.logit_clamp=0",
                clamp=clamp,
            )
    loss = settings.number("guard.loss_clamp")
    if loss > 0:
        yield _found(
            "clamped_loss",
            "problem" if loss <= 10 else "warning",
            f"guard.loss_clamp = {loss:g}: a clamped loss has no gradient, so the hardest batches are not learned",
            "turn the clamp off; the guard skips bad batches",
            "guard.loss_clamp=0",
            clamp=loss,
        )


def _schedule(settings: Settings) -> Iterator[Finding]:
    steps, warmup = settings.number("train.max_steps"), settings.number("train.warmup_steps")
    ratio, micro = settings.number("train.warmup_ratio", 0.1), settings.number("train.gradient_accumulation_steps", 1)
    share = warmup / steps if warmup and steps else 0.0 if warmup else ratio
    share = min(share, settings.number("train.max_warmup_share", 1.0))
    if share <= 0.3:
        return
    if warmup and micro >= 2 and 0.01 <= share / micro <= 0.2:
        yield _found(
            "schedule_in_micro_batches",
            "problem",
            f"train.warmup_steps = {warmup:.0f} is {format_percent(share)} of train.max_steps = {steps:.0f}; divided "
            f"by the accumulation of {micro:.0f} it is {format_percent(share / micro)}",
            "count in optimizer steps",
            f"train.warmup_steps={max(1, round(warmup / micro))}",
            share=share,
        )
        return
    yield _found(
        "never_out_of_warmup",
        "problem" if share >= 0.5 else "warning",
        f"warm-up takes {format_percent(share)} of the run",
        "a tenth is usual",
        f"train.warmup_steps={max(1, round(steps / 10))}" if warmup else "train.warmup_ratio=0.1",
        share=share,
    )


def _rates(settings: Settings) -> Iterator[Finding]:
    rate, mode = settings.number("train.learning_rate", 1e-3), str(settings.get("precision.mode") or "auto")
    router = settings.number("train.router_learning_rate")
    if rate > _HIGH_RATE:
        yield _found(
            "rate_too_high", "problem", f"train.learning_rate = {format_lr(rate)}: AdamW moves every weight by about "
            "this much in a step", "1e-3 to 1e-2 for a small student from scratch, 1e-5 to 3e-4 for a pretrained one",
            "train.learning_rate=0.001", learning_rate=rate,
        )  # fmt: skip
    if rate < _LOW_RATE:
        yield _found(
            "rate_too_low", "problem", f"train.learning_rate = {format_lr(rate)}: below the spacing of FP32 weights of "
            "size 1, so updates are lost", "1e-5 to 3e-4 for a pretrained student", "train.learning_rate=0.0001",
            learning_rate=rate,
        )  # fmt: skip
    elif rate < 1e-5 and mode == "fp16-sr":
        yield _found(
            "noop_updates", "warning", f"train.learning_rate = {format_lr(rate)} in fp16-sr: the spacing of FP16 "
            "weights of size 0.1 is 6e-5, so a weight moves only now and then", "keep FP32 masters",
            "precision.mode=fp16-master", learning_rate=rate,
        )  # fmt: skip
    if router > 3 * rate:
        yield _found(
            "router_rate_too_high", "warning", f"train.router_learning_rate = {format_lr(router)} is "
            f"{router / rate:.0f} times the student's", "take the student's", "train.router_learning_rate=0",
            router_learning_rate=router,
        )  # fmt: skip
    skipped = settings.number("guard.skip_grad_norm")
    if skipped > 0:
        yield _found(
            "skipped_norms", "warning", f"guard.skip_grad_norm = {skipped:g} is compared with the norm before "
            "clipping, which small batches exceed in most steps", "turn it off; guard.spike_z follows the run's norms",
            "guard.skip_grad_norm=0", skip_grad_norm=skipped,
        )  # fmt: skip
    norm = settings.number("train.max_grad_norm", 1.0)
    if norm < 0.1:
        yield _found(
            "clipped_to_nothing", "warning", f"train.max_grad_norm = {norm:g}: every gradient is clipped, so a bad "
            "batch weighs as much as a good one", "1.0 bounds bad batches and leaves ordinary ones alone",
            "train.max_grad_norm=1.0", max_grad_norm=norm,
        )  # fmt: skip


def _objectives(settings: Settings) -> Iterator[Finding]:
    temperature = max(settings.ramp("objectives.kd.temperature")[:2])
    if temperature > _HIGH_TEMPERATURE:
        yield _found(
            "temperature_too_high", "warning", f"objectives.kd.temperature = {temperature:g}: the teacher's answer "
            "becomes nearly uniform", "1 to 2", "objectives.kd.temperature=1", temperature=temperature,
        )  # fmt: skip
    kd, ce = max(settings.ramp("objectives.kd.weight")[:2]), max(settings.ramp("objectives.ce.weight")[:2])
    if 0 < kd < _FEW * (kd + ce):
        yield _found(
            "hardly_distils", "warning", f"objectives.kd.weight = {kd:g} beside objectives.ce.weight = {ce:g}: plain "
            "training that pays for a teacher", "raise it, or set it to 0 and save the teacher's passes",
            "objectives.kd.weight=0.5", kd=kd, ce=ce,
        )  # fmt: skip
    if settings.get("teacher.signal.kind") == "renormalised":
        yield _found(
            "biased_signal", "warning", "teacher.signal.kind = renormalised: the student learns that no other token "
            "can come", "top_k keeps the exact mass of the rest", "teacher.signal.kind=top_k",
        )  # fmt: skip
    if max(settings.ramp("objectives.contrastive.weight")[:2]) and settings.get("train.batch_size") == 1:
        yield _found(
            "dead_component", "warning", "objectives.contrastive has a weight and train.batch_size is 1: a row has "
            "nothing to be told from", "give batches several rows", "train.batch_size=8",
        )  # fmt: skip


def _phases(settings: Settings) -> Iterator[Finding]:
    phases: list[Any] = list(settings.get("curriculum.phases") or ())
    if len(phases) < 2:
        return
    until = as_number(phases[0].get("until")) if isinstance(phases[0], Mapping) else None
    for name in sorted(INNER):
        start, end, begin = settings.ramp(f"objectives.{name}.weight")
        if until is not None and (start > 0 or (end > 0 and begin < until)):
            yield _found(
                "active_when_zero",
                "warning",
                f"objectives.{name} has a weight in the first phase, {phases[0].get('name')}, where the logits should "
                "be alone",
                "let it begin where the phase ends",
                f"objectives.{name}.weight={ramp_text(end, until)}",
                weight=start,
            )


def _data(settings: Settings) -> Iterator[Finding]:
    train, held_out = settings.get("data.train"), settings.get("data.eval")
    if held_out is not None and held_out == train:
        yield _found(
            "leaking_data", "problem", f"data.eval and data.train are both {train}", "leave data.eval out: a share is "
            "held out by content", "data.eval=none",
        )  # fmt: skip
    bad = settings.number("data.max_bad_share")
    if bad > 0.1:
        yield _found(
            "bad_lines", "hint", f"data.max_bad_share = {bad:g}: so much of the data may be unreadable before a run "
            "stops", "1 % is the default", "data.max_bad_share=0.01",
        )  # fmt: skip
    steps, every = settings.number("train.max_steps"), settings.number("train.eval_steps")
    if steps and every > steps:
        yield _found(
            "never_evaluated", "hint", f"train.eval_steps = {every:.0f} and train.max_steps = {steps:.0f}: the only "
            "evaluation is the last", "leave it out: up to ten are spread over the run", "train.eval_steps=0",
        )  # fmt: skip


_CHECKS: tuple[Check, ...] = (_clamps, _rates, _schedule, _phases, _objectives, _data)
