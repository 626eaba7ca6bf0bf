"""Trials of the guard: each rung of its ladder in short runs into which faults are injected.

One run has the faults of weights, moments, data and teacher; another, in FP16, those of the loss scale; a third must
stop. What is judged is the record: the verdict on each attempt, and that the student is finite in the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillroom.checks.resume.states import last_state
from stillroom.checks.selftest.trial import EXACT, Measured, Trial, Wrong
from stillroom.checks.selftest.world import world_config
from stillroom.engine.distill import distill
from stillroom.errors import NoBetterStudent, StillroomError
from stillroom.telemetry import read_events

GROUP = "guard"
_STEPS = 18

Events = list[dict[str, Any]]


def trials(folder: Path) -> list[Trial]:
    """In a folder that holds a world."""
    faults = "nan_weight@6,inf_logit@9,nan_moment@11,all_masked@13,teacher_nan@15x3"
    main = _run(folder, "faults", faults, train__max_steps=_STEPS, guard__fallback_after=3, guard__fallback_steps=2)
    half = _run(folder, "overflow", "inf_grad@3", precision__mode="fp16-mixed", train__max_steps=5)
    strict = _run(folder, "strict", "nan_grad@3", train__max_steps=5, guard__on_nonfinite="halt")

    def made(name: str, check: Callable[[], None]) -> Trial:
        return Trial(GROUP, name, functools.partial(_holds, check))

    return [
        made("NaN in a weight: back to a good state", lambda: _judged(main(), (6,), "rollback")),
        made("logits that are not finite: the batch is left out", lambda: _judged(main(), (9,), "skip")),
        # A broken moment reaches the weights with the update, and is found in the next step.
        made("NaN in a moment: back to a good state", lambda: _judged(main(), (11, 12), "rollback")),
        made("no scored token: the batch is left out", lambda: _judged(main(), (13,), "skip")),
        made("a teacher that answers NaN: labels for a while", lambda: _judged(main(), (17,), "fallback")),
        made("the student of that run is finite", lambda: _finite(main(), folder / "faults")),
        made("an overflow in FP16: again at a smaller scale", lambda: _judged(half(), (3,), "retry")),
        made("on_nonfinite = halt: the run stops", lambda: _stopped(strict())),
    ]


def _run(folder: Path, name: str, faults: str, **over: Any) -> Callable[[], Events]:
    """The events of a run, which takes place when they are first asked for."""

    @functools.cache
    def events() -> Events:
        config = world_config(folder, train__eval_steps=100, guard__max_skip_share=1.0, **over)
        try:
            distill(config, folder / name, device="cpu", inject=faults)
        except NoBetterStudent:
            pass  # so few steps need not teach anything
        except StillroomError as error:
            if error.exit_code != 22:
                raise
        return read_events(folder / name / "events.jsonl")

    return events


def _holds(check: Callable[[], None]) -> Measured:
    check()
    return EXACT


def _judged(events: Events, steps: tuple[int, ...], verdict: str) -> None:
    """Raise unless one of the attempts at these steps was judged so."""
    seen = [event["verdict"] for event in events if event["event"] == "step" and event["step"] in steps]
    if verdict not in seen:
        raise Wrong(f"step {steps[0]} was judged {', '.join(seen) or 'not at all'}, and not {verdict}")


def _finite(_events: Events, folder: Path) -> None:
    saved = last_state(folder)
    if saved.step != _STEPS:
        raise Wrong(f"the last checkpoint is that of step {saved.step}: later states were not fit to be saved")
    for name, tensor in saved.tensors["student"].items():
        if not bool(tensor.isfinite().all()):
            raise Wrong(f"{name} is not finite")


def _stopped(events: Events) -> None:
    codes = [event.get("exit_code") for event in events if event["event"] == "run_end"]
    if codes != [22]:
        raise Wrong(f"the run ended with exit code {codes}, and not with 22")
