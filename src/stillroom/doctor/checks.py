"""What a run says of itself: doubts before its first step, and the checks of a finished run.

A check is a rule with a title whose outcome is also shown where it passes. It is judged from the run's events, so a run
that was resumed is judged as one:

1. The held-out perplexity is below the configured bound, or below that of the student before training, and in either
   case below the size of the vocabulary, which is the perplexity of a guess. With another `eval.select`: what that
   measures is better than before training.
2. The objective held out is less than twice the objective in training, both at the same weights of the terms.
3. No attempted step of the last epoch had a loss or gradient that is not finite.
4. Every term that has a weight has a share in the objective, in every phase, and a term without weight has none.
5. With a teacher: half of the gap between the student before training and the teacher is closed, in bits per byte.
   Where the teacher reads a context that the student does not, half of the KL divergence from it.
6. With samples: the student's answers do not end in loops, or no more of them than the teacher's do.

After a few steps, as in a dry run, only the third and fourth are judged: the others ask for what takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stillroom.doctor.log_rules import MAX_GAP, Case, mean, numbers, terms_of, terms_without_weight
from stillroom.doctor.rules import TRIAL_STEPS, Finding, found, rule, rules_for
from stillroom.telemetry.record import Event, LoggedRun
from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_count,
    format_loss,
    format_percent,
    format_result,
)

NO_LOSS = 1e-3  # an objective below this is nothing: a multiple of it says nothing
LEAST_CLOSED = 0.5
MOST_LOOPS = 0.5  # of the samples
AT_ANY_LENGTH = ("finite_epoch", "balance")
LONGEST_UNIT, LEAST_TURNS, LEAST_LOOP = 40, 4, 8  # of a loop: characters, repetitions, characters


@dataclass(frozen=True)
class Finished:
    """A run after its last step. `bits` per byte and `kl` are those of `student`, `student_before` and `teacher`."""

    events: Sequence[Event]
    perplexity: float
    perplexity_before: float | None
    max_perplexity: float
    min_share: float
    epoch_steps: int
    vocab_size: int = 0
    bits: Mapping[str, float | None] = field(default_factory=dict)
    kl: Mapping[str, float | None] = field(default_factory=dict)
    select: str = "perplexity"  # what the student was chosen by
    rank: float | None = None  # by that, lower is better
    rank_before: float | None = None

    @cached_property
    def case(self) -> Case:
        return Case(LoggedRun("run", events=tuple(self.events)))

    @property
    def samples(self) -> list[Event]:
        """The samples of the last start: a run whose end was cut short wrote some before."""
        starts = [place for place, event in enumerate(self.events) if event.get("event") == "run_start"]
        return [event for event in self.events[starts[-1] if starts else 0 :] if event.get("event") == "sample"]


def success_checks(events: Iterable[Event], **facts: Any) -> list[dict[str, Any]]:
    """The checks, each with the measured value, the bound, and a sentence. `facts` are those of `Finished`."""
    run = Finished(tuple(events), **facts)
    is_trial = 0 < run.case.last_step < TRIAL_STEPS
    asked = [rule for rule in rules_for("result") if not is_trial or rule.name in AT_ANY_LENGTH]
    outcomes = [(rule.title, finding) for rule in asked for finding in rule.find(run)]
    return [
        {"name": title, "passed": one.severity == "fine", **one.numbers, "text": one.evidence}
        for title, one in outcomes
    ]


def _outcome(passed: bool, value: float | None, bound: float | None, text: str) -> Finding:
    numbers = {"value": value, "bound": bound}
    return found("fine" if passed else "problem", text, "the cause: stillroom diagnose RUN", numbers=numbers)


@rule("result", title="held-out perplexity")
def perplexity(run: Finished) -> Finding | None:
    """Whether the student predicts the text. A student worse than a guess always fails.

    One that is chosen by something else is held to a bound only where one is set.
    """
    if run.select != "perplexity" and not run.max_perplexity:
        return None
    bound = run.max_perplexity or run.perplexity_before
    whose = "the bound set as eval.max_perplexity" if run.max_perplexity else "the student before training"
    if bound is None:
        return _outcome(False, run.perplexity, None, "there is nothing to compare it with")
    text = f"{format_result(run.perplexity)} against {format_result(bound)}, {whose}"
    is_guess = bool(run.vocab_size) and not run.perplexity < run.vocab_size
    if is_guess:
        text += f"; a guess among all {format_count(run.vocab_size)} tokens has {format_count(run.vocab_size)}"
    return _outcome(run.perplexity < bound and not is_guess, run.perplexity, bound, text)


@rule("result", title="better by eval.select")
def selected(run: Finished) -> Finding | None:
    """Whether the student is better than before training by what it was chosen by."""
    if run.select == "perplexity":
        return None
    if run.rank is None or run.rank_before is None:
        return _outcome(False, run.rank, run.rank_before, f"{run.select} is not known")
    text = f"{run.select} {format_result(abs(run.rank))}, before training {format_result(abs(run.rank_before))}"
    return _outcome(run.rank < run.rank_before, run.rank, run.rank_before, text)


@rule("result", title="train and eval objective within 2x")
def objective_gap(run: Finished) -> Finding:
    """Whether the held-out objective is less than twice that of training; a difference, so a loss of 0 is allowed."""
    evals = [event for event in run.case.record.of("eval") if isinstance(event.get("step"), int)]
    last = max(evals, key=lambda event: int(event["step"]), default=None)
    held_out = as_number(last.get("objective")) if last else None
    losses = numbers(run.case.train_before(last["step"]), "train_loss") if last else []
    if held_out is None or not losses:
        return _outcome(False, None, MAX_GAP, "the objective was not finite, or nothing was recorded")
    trained = mean(losses)
    ratio = held_out / trained if trained >= NO_LOSS else None
    factor = f"{ratio:.2f}x, " if ratio is not None else ""
    text = f"{factor}{format_loss(held_out)} held out, {format_loss(trained)} in the last {len(losses)} steps"
    return _outcome(held_out - trained < max((MAX_GAP - 1.0) * abs(trained), NO_LOSS), ratio, MAX_GAP, text)


@rule("result", title="no NaN for an epoch")
def finite_epoch(run: Finished) -> Finding:
    """Whether every loss and gradient of the last epoch was finite.

    A retry does not count: an FP16 run finds its loss scale by overflows of the scaled gradients.
    """
    last_step, epoch = run.case.last_step, run.epoch_steps
    attempts = [*run.case.attempts, *run.case.guards]
    recent = [event for event in attempts if (as_number(event.get("step")) or 0) > last_step - epoch]
    bad = sorted({int(event["step"]) for event in recent if _is_nonfinite(event)})
    stretch = "the last epoch" if last_step >= epoch else f"the run, {last_step / max(epoch, 1):.2f} epochs"
    text = f"none in {stretch}" if not bad else f"{format_count(len(bad))} in {stretch}, the last at step {bad[-1]}"
    if retried := sum(event.get("verdict") == "retry" for event in recent):
        text += f"; {format_count(retried)} overflows of the loss scale were retried"
    return _outcome(not bad, float(len(bad)), 0.0, text)


def _is_nonfinite(event: Event) -> bool:
    if "retry" in (event.get("verdict"), event.get("action")):
        return False
    if event.get("event") == "guard":  # weights found not finite between two steps leave no step record
        return event.get("action") in ("rollback", "reset") and "not finite" in str(event.get("reason"))
    return "train_loss_nonfinite" in event or "grad_norm_nonfinite" in event


@rule("result", title="terms balanced as configured")
def balance(run: Finished) -> Finding:
    """Mean share of each term over the steps of each phase in which it has a weight."""
    phases: dict[str, list[Event]] = {}
    for event in run.case.steps:
        phases.setdefault(str(event.get("phase") or ""), []).append(event)
    least, flagged, seen = math.inf, [], set()
    for phase, steps in phases.items():
        shares = _means(steps, lambda terms, term: as_number(terms[term].get("share")) or 0.0)
        asked = _means(steps, lambda terms, term: _weight(terms[term]) / sum(map(_weight, terms.values())))
        seen |= set(shares)
        for term, share in shares.items() if len(shares) > 1 else ():
            least = min(least, share)
            if not run.min_share <= share <= 1.0 - run.min_share:
                is_asked = asked[term] < run.min_share
                remark = f", and {format_percent(asked[term])} of the weights, as configured" if is_asked else ""
                flagged.append(f"{clean(term)} has {format_percent(share)} in phase {clean(phase)}{remark}")
        extra = sorted({term for event in steps for term in terms_without_weight(event)})
        flagged += [f"{term} has no weight in phase {clean(phase)} and enters all the same" for term in extra]
    value = least if math.isfinite(least) else None
    if not seen:
        return _outcome(False, None, run.min_share, "no step was recorded")
    if flagged:
        return _outcome(False, value, run.min_share, "; ".join(flagged))
    if value is None:
        return _outcome(True, None, run.min_share, f"one term at a time: {', '.join(map(clean, sorted(seen)))}")
    return _outcome(True, value, run.min_share, f"the least share of a term in any phase is {format_percent(least)}")


def _weight(term: Mapping[str, Any]) -> float:
    return as_number(term.get("weight")) or 0.0


def _means(steps: Sequence[Event], value: Any) -> dict[str, float]:
    """The mean of a value of each term over the steps in which it has a weight."""
    values: dict[str, list[float]] = {}
    for terms in map(terms_of, steps):
        for name in [name for name, term in terms.items() if _weight(term)]:
            values.setdefault(name, []).append(value(terms, name))
    return {name: mean(own) for name, own in values.items()}


@rule("result", title="half of the gap to the teacher closed")
def gap_closed(run: Finished) -> Finding | None:
    """Whether the student came at least half of the way to its teacher; nothing to check where one is not known."""
    after, before, teacher = (as_number(run.bits.get(row)) for row in ("student", "student_before", "teacher"))
    if after is None or before is None or teacher is None or run.case.has_contexts:
        return None
    return _closed("bits per byte", before, after, teacher)


@rule("result", title="half of the KL to the teacher closed")
def kl_closed(run: Finished) -> Finding | None:
    """The same of a student that is to answer as the teacher does in its context, whatever the labels are."""
    after, before = (as_number(run.kl.get(row)) for row in ("student", "student_before"))
    if after is None or before is None or not run.case.has_contexts:
        return None
    return _closed("KL from the teacher", before, after, 0.0)


def _closed(what: str, before: float, after: float, teacher: float) -> Finding:
    told = f"{what} {format_result(before)} before, {format_result(after)} now"
    told += f", teacher {format_result(teacher)}" if teacher else ""
    if before - teacher < NO_LOSS:
        return _outcome(True, None, LEAST_CLOSED, f"there was no gap: {told}")
    closed = (before - after) / (before - teacher)
    return _outcome(closed >= LEAST_CLOSED, closed, LEAST_CLOSED, f"{format_percent(closed, 0)}: {told}")


@rule("result", title="answers do not repeat themselves")
def no_loops(run: Finished) -> Finding | None:
    """Whether the student's answers end in loops, more of them than the teacher's (without one: than the texts)."""
    samples = run.samples
    if not samples:
        return None
    other = "teacher" if any("teacher" in sample for sample in samples) else "reference"
    loops = [sample for sample in samples if is_loop(str(sample.get("student") or ""))]
    others = sum(is_loop(str(sample.get(other) or "")) for sample in samples)
    whose = "the teacher's" if other == "teacher" else "the texts themselves"
    text = f"{len(loops)} of {len(samples)} answers end in a loop, {others} of {whose}"
    if loops:
        text += f"; such as {clip(loops[0].get('student'), 40)!r}"
    share = len(loops) / len(samples)
    return _outcome(share < MOST_LOOPS or len(loops) <= others, share, MOST_LOOPS, text)


def is_loop(text: str) -> bool:
    """Whether at least half of a text is its end repeating a unit of up to 40 characters, four times or more."""
    size = len(text)
    for unit in range(1, min(LONGEST_UNIT, size // LEAST_TURNS) + 1):
        length = unit
        while length < size and text[size - 1 - length] == text[size - 1 - length + unit]:
            length += 1
        if length >= max(LEAST_TURNS * unit, LEAST_LOOP, size / 2):
            return True
    return False
