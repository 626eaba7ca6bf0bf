"""Success criteria of a finished run.

Named checks, judged from the run's events, so a run that was resumed is judged as one:

1. The held-out perplexity is below the configured bound, or below that of the student before training, and in either
   case below the size of the vocabulary, which is the perplexity of a guess.
2. The objective held out is less than twice the objective in training, both at the same weights of the terms.
3. No attempted step of the last epoch had a loss or gradient that is not finite.
4. Every term that has a weight has a share in the objective, in every phase, and a term without weight has none.
5. With a teacher: half of the gap between the student before training and the teacher is closed, in bits per byte.
6. With samples: the student's answers do not end in loops, or no more of them than the teacher's do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stillroom.telemetry.wording import as_number, clean, clip, format_count, format_loss, format_percent, format_result

Event = Mapping[str, Any]
Check = dict[str, Any]

MAX_GAP = 2.0
NO_LOSS = 1e-3  # an objective below this is nothing: a multiple of it says nothing
LEAST_CLOSED = 0.5
LAST_STEPS = 20  # training steps whose mean loss is compared with the evaluation


def success_checks(
    events: Iterable[Event],
    *,
    perplexity: float,
    perplexity_before: float | None,
    max_perplexity: float,
    min_share: float,
    epoch_steps: int,
    vocab_size: int = 0,
    bits: Mapping[str, float | None] | None = None,
) -> list[Check]:
    """The checks, each with the measured value, the bound, and a sentence.

    `bits` are bits per byte of `student`, `student_before` and `teacher`; without all three there is no fifth check.
    """
    events = list(events)
    steps = [event for event in events if event.get("event") == "step" and isinstance(event.get("step"), int)]
    # After a rollback the later attempt of a step counts.
    kept = list({event["step"]: event for event in steps if event.get("verdict") == "keep"}.values())
    kept.sort(key=lambda event: int(event["step"]))
    evals = [event for event in events if event.get("event") == "eval" and isinstance(event.get("step"), int)]
    guards = [event for event in events if event.get("event") == "guard"]
    return [
        check_perplexity(perplexity, perplexity_before, max_perplexity, vocab_size),
        check_gap(kept, evals),
        check_finite([*steps, *guards], kept[-1]["step"] if kept else 0, epoch_steps),
        check_balance(kept, min_share),
        *check_closed(bits or {}),
        *check_loops(last_samples(events)),
    ]


def _check(name: str, passed: bool, value: float | None, bound: float | None, text: str) -> Check:
    return {"name": name, "passed": passed, "value": value, "bound": bound, "text": text}


def check_perplexity(perplexity: float, before: float | None, max_perplexity: float, vocab_size: int = 0) -> Check:
    """Whether the student predicts the text. A student worse than a guess always fails."""
    name = "held-out perplexity"
    bound = max_perplexity or before
    whose = "the bound set as eval.max_perplexity" if max_perplexity else "the student before training"
    if bound is None:
        return _check(name, False, perplexity, None, "there is nothing to compare it with")
    text = f"{format_result(perplexity)} against {format_result(bound)}, {whose}"
    is_guess = bool(vocab_size) and not perplexity < vocab_size
    if is_guess:
        text += f"; a guess among all {format_count(vocab_size)} tokens has {format_count(vocab_size)}"
    return _check(name, perplexity < bound and not is_guess, perplexity, bound, text)


def check_gap(kept: Sequence[Event], evals: Sequence[Event]) -> Check:
    """Whether the held-out objective is less than twice that of training; a difference, so a loss of 0 is allowed."""
    name = "train and eval objective within 2x"
    last = max(evals, key=lambda event: int(event["step"]), default=None)
    held_out = as_number(last.get("objective")) if last else None
    recent = [event for event in kept if last and event["step"] <= last["step"]][-LAST_STEPS:]
    losses = [loss for event in recent if (loss := as_number(event.get("train_loss"))) is not None]
    if held_out is None or not losses:
        return _check(name, False, None, MAX_GAP, "the objective was not finite, or nothing was recorded")
    trained = sum(losses) / len(losses)
    passed = held_out - trained < max((MAX_GAP - 1.0) * abs(trained), NO_LOSS)
    ratio = held_out / trained if trained >= NO_LOSS else None
    factor = f"{ratio:.2f}x, " if ratio is not None else ""
    text = f"{factor}{format_loss(held_out)} held out, {format_loss(trained)} in the last {len(losses)} steps"
    return _check(name, passed, ratio, MAX_GAP, text)


def check_finite(attempts: Sequence[Event], last_step: int, epoch_steps: int) -> Check:
    """Whether every loss and gradient of the last epoch was finite.

    A retry does not count: an FP16 run finds its loss scale by overflows of the scaled gradients.
    """
    recent = [event for event in attempts if (as_number(event.get("step")) or 0) > last_step - epoch_steps]
    bad = sorted({int(event["step"]) for event in recent if _is_nonfinite(event)})
    stretch = "the last epoch" if last_step >= epoch_steps else f"the run, {last_step / max(epoch_steps, 1):.2f} epochs"
    retried = sum(event.get("verdict") == "retry" for event in recent)
    text = f"none in {stretch}" if not bad else f"{format_count(len(bad))} in {stretch}, the last at step {bad[-1]}"
    if retried:
        text += f"; {format_count(retried)} overflows of the loss scale were retried"
    return _check("no NaN for an epoch", not bad, float(len(bad)), 0.0, text)


def _is_nonfinite(event: Event) -> bool:
    if "retry" in (event.get("verdict"), event.get("action")):
        return False
    if event.get("event") == "guard":  # weights found not finite between two steps leave no step record
        return event.get("action") in ("rollback", "reset") and "not finite" in str(event.get("reason"))
    return "train_loss_nonfinite" in event or "grad_norm_nonfinite" in event


def check_balance(kept: Sequence[Event], min_share: float) -> Check:
    """Mean share of each term over the steps of each phase in which it has a weight."""
    name = "terms balanced as configured"
    phases: dict[str, list[Event]] = {}
    for event in kept:
        phases.setdefault(str(event.get("phase") or ""), []).append(event)
    least, flagged, seen = math.inf, [], set()
    for phase, steps in phases.items():
        shares = _shares(steps)
        seen |= set(shares)
        for term, share in shares.items():
            if len(shares) > 1:
                least = min(least, share)
                if not min_share <= share <= 1.0 - min_share:
                    asked = _asked(steps, term)
                    remark = f", and {format_percent(asked)} of the weights, as configured" if asked < min_share else ""
                    flagged.append(f"{clean(term)} has {format_percent(share)} in phase {clean(phase)}{remark}")
        flagged += [f"{term} has no weight in phase {clean(phase)} and enters all the same" for term in _unasked(steps)]
    if not seen:
        return _check(name, False, None, min_share, "no step was recorded")
    if flagged:
        return _check(name, False, least if math.isfinite(least) else None, min_share, "; ".join(flagged))
    if not math.isfinite(least):
        return _check(name, True, None, min_share, f"one term at a time: {', '.join(map(clean, sorted(seen)))}")
    text = f"the least share of a term in any phase is {format_percent(least)}"
    return _check(name, True, least, min_share, text)


def check_closed(bits: Mapping[str, float | None]) -> list[Check]:
    """Whether the student came at least half of the way to its teacher; nothing to check where one is not known."""
    name = "half of the gap to the teacher closed"
    after, before, teacher = (as_number(bits.get(row)) for row in ("student", "student_before", "teacher"))
    if after is None or before is None or teacher is None:
        return []
    told = f"bits per byte {format_result(before)} before, {format_result(after)} now, teacher {format_result(teacher)}"
    if before - teacher < NO_LOSS:
        return [_check(name, True, None, LEAST_CLOSED, f"there was no gap: {told}")]
    closed = (before - after) / (before - teacher)
    return [_check(name, closed >= LEAST_CLOSED, closed, LEAST_CLOSED, f"{format_percent(closed, 0)}: {told}")]


_LONGEST_UNIT = 40  # characters
_LEAST_TURNS = 4
_LEAST_LOOP = 8  # characters


def is_loop(text: str) -> bool:
    """Whether at least half of a text is its end repeating a unit of up to 40 characters, four times or more."""
    size = len(text)
    for unit in range(1, min(_LONGEST_UNIT, size // _LEAST_TURNS) + 1):
        length = unit
        while length < size and text[size - 1 - length] == text[size - 1 - length + unit]:
            length += 1
        if length >= max(_LEAST_TURNS * unit, _LEAST_LOOP, size / 2):
            return True
    return False


def last_samples(events: Sequence[Event]) -> list[Event]:
    """The samples of the last start: a run whose end was cut short wrote some before."""
    starts = [place for place, event in enumerate(events) if event.get("event") == "run_start"]
    return [event for event in events[starts[-1] if starts else 0 :] if event.get("event") == "sample"]


def check_loops(samples: Sequence[Event]) -> list[Check]:
    """Whether the student's answers end in loops, more of them than the teacher's (without one: than the texts)."""
    if not samples:
        return []
    beside = "teacher" if any("teacher" in sample for sample in samples) else "reference"
    loops = [sample for sample in samples if is_loop(str(sample.get("student") or ""))]
    others = sum(is_loop(str(sample.get(beside) or "")) for sample in samples)
    whose = "the teacher's" if beside == "teacher" else "the texts themselves"
    text = f"{len(loops)} of {len(samples)} answers end in a loop, {others} of {whose}"
    if loops:
        text += f"; such as {clip(loops[0].get('student'), 40)!r}"
    passed = 2 * len(loops) < len(samples) or len(loops) <= others
    return [_check("answers do not repeat themselves", passed, len(loops) / len(samples), 0.5, text)]


def _terms(event: Event) -> Mapping[str, Any]:
    terms = event.get("terms")
    return terms if isinstance(terms, Mapping) else {}


def _shares(steps: Sequence[Event]) -> dict[str, float]:
    """The mean share of each term over the steps in which it has a weight."""
    shares_of: dict[str, list[float]] = {}
    for event in steps:
        for term, record in _terms(event).items():
            if record.get("weight"):
                shares_of.setdefault(term, []).append(as_number(record.get("share")) or 0.0)
    return {term: sum(shares) / len(shares) for term, shares in shares_of.items()}


def _asked(steps: Sequence[Event], term: str) -> float:
    """The mean share of a term in the sum of the configured weights."""
    shares = []
    for event in steps:
        weights = {name: as_number(record.get("weight")) or 0.0 for name, record in _terms(event).items()}
        if weights.get(term):
            shares.append(weights[term] / sum(weights.values()))
    return sum(shares) / len(shares) if shares else 0.0


def _unasked(steps: Sequence[Event]) -> list[str]:
    """Terms of weight 0 that add to the objective all the same."""
    return sorted(
        {
            clean(term)
            for event in steps
            for term, record in _terms(event).items()
            if not record.get("weight") and as_number(record.get("scaled"))
        }
    )
