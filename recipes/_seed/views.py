"""What a recipe prints during its run, from the run's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from _seed.blocks import component_lines, configuration_lines, number, scheduler_lines, shape_lines
from _seed.output import say
from _seed.precision import mode_lines
from stillroom.core.files import NONFINITE
from stillroom.telemetry.wording import as_number, format_percent

Event = Mapping[str, Any]

_FIRST_STEPS = 5
_EVERY = 25  # steps of an average in the fp16-safe guide


class View:
    """What all recipes print: configuration, precision, shapes, the first steps, faults and notes."""

    greeting = "Starting training..."

    def __init__(self, device: str) -> None:
        self.device = device
        self.num_steps = 0
        self.last_step: Event = {}
        self.last_fault: Event = {}  # the last attempt that the guard refused

    def handle(self, event: Event) -> None:
        """Print what an event says. Events without a method here are not printed."""
        method: Callable[[Event], None] | None = getattr(self, f"on_{event['event']}", None)
        if method is not None:
            method(event)

    def on_run_start(self, event: Event) -> None:
        self.num_steps = int(event["schedule"]["optimizer_steps"])
        say(*configuration_lines(event, self.device), "", *scheduler_lines(event), "", self.greeting)
        say(*mode_lines(event, self.device))

    def on_first_forward(self, event: Event) -> None:
        say(*shape_lines(event))

    def on_step(self, event: Event) -> None:
        self.last_step = event
        if int(event["step"]) <= _FIRST_STEPS:
            say(*component_lines(event), "")

    def on_guard(self, event: Event) -> None:
        self.last_fault = event
        found, terms = event["evidence"], event["evidence"]["terms"]
        if as_number(found["loss"]) is None:
            parts = "".join(f", {name}={number(terms, name)}" for name in terms if not name.endswith(NONFINITE))
            say(f"  Numerical issue: total_loss={number(found, 'loss')}{parts}")
        say(f"  Step {event['step']}: {event['action']}: {event['reason']}")

    def on_note(self, event: Event) -> None:
        say(f"  note: {event['text']}")

    def on_advice(self, event: Event) -> None:
        say(f"  advice: {event['evidence']}. {event['advice']}")

    def on_resume(self, event: Event) -> None:
        say(f"Resuming at step {event['step']}")

    def on_eval(self, event: Event) -> None:
        raise NotImplementedError


class AverageView(View):
    """The lines of the SAR and QuantumBench guides: averages over some steps, and the validation perplexity."""

    def __init__(self, device: str, greeting: str) -> None:
        super().__init__(device)
        self.greeting = greeting
        self._kept: list[Event] = []

    def on_step(self, event: Event) -> None:
        super().on_step(event)
        if event["verdict"] == "keep":
            self._kept.append(event)
            if int(event["step"]) % _EVERY == 0 or event["step"] == self.num_steps:
                self._average(event)

    def _average(self, event: Event) -> None:
        """The mean loss and the mean weighted terms since the last such line, as in avg_loss = kd + ce."""
        names = dict.fromkeys(name for step in self._kept for name in step["terms"])
        sums = {name: sum(step["terms"].get(name, {}).get("scaled") or 0.0 for step in self._kept) for name in names}
        loss = sum(float(step["train_loss"]) for step in self._kept) / len(self._kept)
        parts = ", ".join(f"{name}={value / len(self._kept):.4f}" for name, value in sums.items())
        say(
            f"  Step {event['step']}: avg_loss={loss:.4f} ({parts}) "
            f"success_rate={format_percent(float(event['success_rate']), 0)} "
            f"consecutive_nans={event['consecutive_nans']} grad_norm={number(event, 'grad_norm', '.3f')} "
            f"lr={number(event, 'lr', '.3e')} gpu_memory_gb={number(event, 'gpu_memory_gb', '.1f')}"
        )
        self._kept.clear()

    def on_eval(self, event: Event) -> None:
        perplexity = number(event, "perplexity", ".2f")
        say(f"Running evaluation at step {event['step']}", f"  Step {event['step']}: Validation PPL = {perplexity}")
        if event.get("unscored_tokens"):
            say(f"  Evaluation could not score {event['unscored_tokens']} tokens")
        if event.get("best"):
            say(f"  New best model! PPL: {perplexity}")


class CurriculumView(View):
    """The lines of the student-aware guide: a progress line, the curriculum's weights, and each term raw and scaled."""

    greeting = "Starting student-aware distillation..."

    def __init__(self, device: str, log_steps: int = 10) -> None:
        super().__init__(device)
        self._log_steps = log_steps
        self._phase = ""
        self._told = -1  # the step whose terms were printed last

    def on_step(self, event: Event) -> None:
        super().on_step(event)
        step = int(event["step"])
        if step <= _FIRST_STEPS or step % self._log_steps == 0 or step == self.num_steps:
            say(
                f"step {step}/{self.num_steps} loss={number(event, 'train_loss')} lr={number(event, 'lr', '.3e')} "
                f"grad_norm={number(event, 'grad_norm', '.3f')} memory={number(event, 'memory_percent', '.0f')}% "
                f"{1.0 / max(float(event['seconds']), 1e-9):.2f} it/s"
            )
        if event["phase"] != self._phase:
            self._phase = str(event["phase"])
            self._debug(event)

    def _debug(self, event: Event) -> None:
        """The three blocks of the guide's debugging, for one step."""
        step, terms = int(event["step"]), event["terms"]
        idle = {name: {"weight": 0.0} for name in event.get("idle_terms", ())}
        known = {**terms, **idle}
        self._told = step
        say(
            f"[CURRICULUM] Step {step}, Progress {format_percent(step / max(self.num_steps, 1))}, phase {self._phase}",
            "  Curriculum weights:",
            *(f"    {name}: {number(term, 'weight')}" for name, term in known.items()),
            f"[KD LOSS] Step {step}",
            f"  Raw KD loss: {number(terms.get('kd', {}), 'raw')}",
            f"  Curriculum weight: {number(terms.get('kd', {}), 'weight')}",
            f"  Weighted KD loss: {number(terms.get('kd', {}), 'scaled')}",
        )
        inner = {name: term for name, term in known.items() if name not in ("kd", "ce")}
        if inner:
            say(f"[ROUTING LOSSES] Step {step}")
        for name, term in inner.items():
            raw = number(term, "raw") if name in terms else "not computed at weight 0"
            scaled = number(term, "scaled") if name in terms else "0.0000"
            say(f"  {name}_loss:", f"    Raw: {raw}", f"    Weight: {number(term, 'weight')}", f"    Scaled: {scaled}")

    def on_eval(self, event: Event) -> None:
        if self.last_step and self.last_step["step"] != self._told:
            self._debug(self.last_step)
        parts = [
            f"{name}={number(term, 'scaled')} ({number(term, 'share', '.1%')})" for name, term in event["terms"].items()
        ]
        say(
            f"Eval at step {event['step']}: total={number(event, 'objective')} {' '.join(parts)} "
            f"perplexity={number(event, 'perplexity', '.2f')}"
        )
