"""Causes in what was learned: over-fitting, a gap between train and eval, batches that were refused."""

from __future__ import annotations

from stillroom.diagnosis.case import Case, cited, log_of, mean, numbers, terms_of
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.data import epochs_seen
from stillroom.diagnosis.finding import Finding
from stillroom.diagnosis.teacher import held_out_is_another_kind
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import items, reading, section
from stillroom.telemetry.wording import as_number, format_percent

_RISE = 0.02  # nats of held-out loss above its best
_GAP = 2.0
_LEAST_GAP = 0.2  # in the unit of the objective
_LAST_STEPS = 20
_MANY_REFUSED = 0.05  # of the attempts


def _train_at(case: Case, eval_step: int) -> list[Event]:
    """The last steps before an evaluation."""
    return [step for step in case.steps if step["step"] <= eval_step][-_LAST_STEPS:]


def overfitting(case: Case) -> Finding | None:
    """The held-out loss rises while the training loss falls."""
    evals = [(int(event["step"]), log_of(reading(event, "perplexity")), event) for event in case.record.evals]
    known = [(step, nll, event) for step, nll, event in evals if nll is not None]
    if len(known) < 3 or held_out_is_another_kind(case):
        return None
    best_step, best, best_event = min(known, key=lambda one: one[1])
    last_step, last, _ = known[-1]
    if best_step == last_step or last - best <= max(_RISE, _half_width(best_event)):
        return None
    then, now = (mean(numbers(_train_at(case, step)[-5:], "train_loss")) for step in (max(best_step, 5), last_step))
    if not now < then:
        return None
    stops = case.number("train.early_stopping") > 0
    return Finding(
        "overfitting",
        "problem",
        f"the held-out loss was best at step {best_step} with {best:.3g} and is {last:.3g} at step {last_step}, while "
        f"the training loss fell from {then:.3g} to {now:.3g}; {epochs_seen(case):.1f} passes over the data",
        "give more text or fewer passes"
        if stops
        else "stop at the best evaluation, and give more text or fewer passes",
        steps=(best_step, last_step),
        setting="" if stops else "train.early_stopping=3",
        numbers={"best_nll": best, "last_nll": last, "train_then": then, "train_now": now},
    )


def _half_width(event: Event) -> float:
    """Half the 95 % interval of the held-out loss, in nats; 0 where there is none."""
    bounds = [log_of(as_number(bound)) for bound in items(section(event, "intervals"), "perplexity")]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return 0.0
    return (bounds[1] - bounds[0]) / 2


def train_eval_gap(case: Case) -> Finding | None:
    """Train and eval are far apart: two kinds of text, or an objective that is twice as large held out."""
    if held_out_is_another_kind(case):
        return _two_kinds(case)
    for event in reversed(case.record.evals):
        step, held_out = int(event["step"]), as_number(event.get("objective"))
        trained = mean(numbers(_train_at(case, step), "train_loss"))
        if held_out is None or trained != trained:
            continue
        if held_out - trained < max(_LEAST_GAP, (_GAP - 1.0) * abs(trained)):
            return None
        return Finding(
            "train_eval_gap",
            "warning",
            f"the objective is {held_out:.3g} held out and {trained:.3g} in training before step {step}"
            f"{_largest(case, event, step)}; {epochs_seen(case):.1f} passes over the training data",
            "give more text, or train for fewer passes",
            steps=(step,),
            setting="" if case.number("train.early_stopping") else "train.early_stopping=3",
            numbers={"held_out": held_out, "train": trained},
        )
    return None


def _two_kinds(case: Case) -> Finding:
    held_out, trained, last = case.nll("teacher"), case.teacher_nll_on_training, case.nll_last
    student = f"; the student ends at {last:.3g} held out" if last is not None else ""
    return Finding(
        "train_eval_gap",
        "problem",
        f"the teacher has a loss of {held_out:.3g} on the held-out text and of {trained:.3g} on training text: these "
        f"are two kinds of text{student}",
        "hold out text of the same kind: leave data.eval out, and a share of the training text is held out",
        steps=(0, case.last_step),
        setting="data.eval=none",
        otherwise="hold out more of it, with data.eval_share: few documents may be of one kind by chance",
        numbers={"teacher_held_out": held_out, "teacher_train": trained, "student_held_out": last},
    )


def _largest(case: Case, event: Event, step: int) -> str:
    """The term that differs most."""
    steps = _train_at(case, step)
    gaps = {}
    for name, term in terms_of(event).items():
        own = [raw for one in steps if (raw := as_number(terms_of(one).get(name, {}).get("raw"))) is not None]
        held_out = as_number(term.get("raw"))
        if own and held_out is not None:
            gaps[name] = (held_out, mean(own))
    if not gaps:
        return ""
    name, (theirs, ours) = max(gaps.items(), key=lambda one: one[1][0] - one[1][1])
    return f"; {name} differs most, {theirs:.3g} against {ours:.3g}"


def refused_batches(case: Case) -> Finding | None:
    """Batches the guard refused while the student was sound."""
    refused = [event for event in case.guards if event.get("action") == "skip"]
    refused = [event for event in refused if "no scored target" not in str(event.get("reason"))]
    share = len(refused) / max(len(case.attempts), 1)
    is_ended = case.record.end.get("exit_code") == 21
    if not refused and not is_ended:
        return None
    reason = str(refused[-1].get("reason")) if refused else str(case.record.end.get("reason"))
    return Finding(
        "refused_batches",
        "problem" if is_ended else "warning" if share >= _MANY_REFUSED and len(refused) > 1 else "hint",
        f"{len(refused)} of {len(case.attempts)} attempts ({format_percent(share)}) were refused; the last: {reason}",
        "look at what is in quarantine/: `stillroom replay RUN STEP` says where it goes wrong",
        steps=cited(refused),
        setting="",
        numbers={"refused": len(refused), "attempts": len(case.attempts)},
    )


CAUSES = (
    Cause(overfitting, explains=("train_eval_gap", "data_exhausted")),
    Cause(train_eval_gap, is_live=False, explains=("rate_too_low", "rate_too_high", "divergence", "stopped_early")),
    Cause(refused_batches),
)
