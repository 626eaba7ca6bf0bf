"""Causes in the teacher: degraded, off its domain, worse than the student, quantised too coarsely."""

from __future__ import annotations

import math

from stillroom.diagnosis.case import Case, cited, mean, numbers
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.wording import as_number, format_percent

_LIKE_A_GUESS = 0.6  # of the log of the vocabulary's size, which is the loss of a guess
_WORSE_NATS = 0.02
_AHEAD_NATS = 1.0
_OTHER_KIND_NATS = 0.7
_MANY_BAD_ROWS, _SOME_BAD_ROWS = 0.10, 0.01  # of the steps
_COARSE_NATS = 0.05
_COARSE_SHARE = 0.2  # of the distance that is left between student and teacher


def teacher_degraded(case: Case) -> Finding | None:
    """The teacher gave no usable answers in some steps, or its trained gates made it worse."""
    alarms = [event for event in case.record.of("router") if event.get("alarm")]
    bad = [step for step in case.attempts if as_number(step.get("bad_teacher_rows"))]
    fallbacks = [event for event in case.guards if event.get("action") == "fallback"]
    if alarms:
        start = numbers(case.record.of("router"), "teacher_nll")[:1]
        now = numbers(alarms, "teacher_nll")[-1:]
        losses = f" (held-out loss {start[0]:.4g} at first, {now[0]:.4g} then)" if start and now else ""
        return Finding(
            "teacher_degraded",
            "problem",
            f"training its gates made the teacher worse{losses}: they were restored and frozen",
            "lower the rate of the gates, or hold them closer to the original teacher",
            steps=cited(alarms),
            setting=f"train.router_learning_rate={_third(case)}",
            numbers={"alarms": len(alarms)},
        )
    share = len(bad) / max(len(case.attempts), 1)
    if not bad and not fallbacks:
        return None
    rows = sum(numbers(bad, "bad_teacher_rows"))
    fell = f", and {len(fallbacks)} stretches were trained on labels alone" if fallbacks else ""
    is_grave = bool(fallbacks) or share >= _MANY_BAD_ROWS
    return Finding(
        "teacher_degraded",
        "problem" if is_grave else "warning" if share >= _SOME_BAD_ROWS and len(bad) > 1 else "hint",
        f"in {len(bad)} of {len(case.attempts)} steps the teacher gave no usable answer ({rows:.0f} rows){fell}",
        _better_answers(case),
        steps=cited(bad or fallbacks),
        setting="" if case.setting("teacher.server") or case.setting("teacher.cache") else "teacher.dtype=float32",
        otherwise="it is in float32 already, so its weights or files are at fault: check its folder",
        numbers={"steps": len(bad), "rows": rows, "share": share, "fallbacks": len(fallbacks)},
    )


def _better_answers(case: Case) -> str:
    if case.setting("teacher.server"):
        return "look at the server's own log: its answers cannot be used"
    if case.setting("teacher.cache"):
        return "write the cache again (`stillroom cache`) with teacher.dtype=float32: its answers cannot be used"
    return "load the teacher in float32; if it still answers NaN, its folder is damaged"


def _third(case: Case) -> str:
    rate = case.number("train.router_learning_rate") or case.number("train.learning_rate", 1e-3)
    return f"{rate / 3:.2g}"


def teacher_off_domain(case: Case) -> Finding | None:
    """The teacher hardly knows the training text: its loss is near that of a guess."""
    held_out, trained = case.nll("teacher"), case.teacher_nll_on_training
    if held_out is None or not case.vocab_size or not case.distils:
        return None
    guess = math.log(case.vocab_size)
    least = min(held_out, trained) if trained is not None else held_out
    before = case.nll_before
    is_ahead = before is not None and held_out < before - _AHEAD_NATS  # a weak teacher of a weaker student still helps
    if least < _LIKE_A_GUESS * guess or is_ahead:
        return None
    seen = f", {trained:.3g} on the first training batch" if trained is not None else ""
    return Finding(
        "teacher_off_domain",
        "problem",
        f"the teacher's loss is {held_out:.3g} nats a token on the held-out text{seen}; a guess among "
        f"{case.vocab_size:,} tokens has {guess:.3g}",
        "take text the teacher knows, or a teacher that knows this text; until then learn from the labels",
        steps=(0,),
        setting="objectives.ce.weight=1",
        otherwise="take text the teacher knows, or a teacher that knows this text",
        numbers={"teacher_nll": held_out, "teacher_nll_on_training": trained, "guess": guess},
    )


def teacher_worse_than_student(case: Case) -> Finding | None:
    """The teacher predicts the held-out text worse than the student did before training."""
    teacher, before = case.nll("teacher"), case.nll_before
    if teacher is None or before is None or not case.distils or teacher <= before + _WORSE_NATS:
        return None
    if held_out_is_another_kind(case):
        return None  # the comparison is on text that is not trained on
    after = case.nll_last
    moved = f", and {after:.3g} after it" if after is not None else ""
    return Finding(
        "teacher_worse_than_student",
        "problem",
        f"the teacher's held-out loss is {teacher:.3g}; the student's was {before:.3g} before training{moved}",
        "take a teacher that is better on this text, or learn from the labels alone",
        steps=(0, case.last_step),
        setting="objectives.ce.weight=1",
        otherwise="take a teacher that is better on this text, or leave it out: objectives.kd.weight=0",
        numbers={"teacher_nll": teacher, "student_nll_before": before, "student_nll": after},
    )


def quantised_teacher_too_coarse(case: Case) -> Finding | None:
    """Quantising changed the teacher's answers by as much as the student could still gain from them."""
    for event in reversed(case.record.of("teacher_quantised")):
        kl = as_number(event.get("kl"))
        if kl is None:
            continue
        left = as_number(case.record.result("student").get("kl"))
        is_large = left is not None and kl > _COARSE_SHARE * left
        if kl < _COARSE_NATS and not is_large:
            return None
        beside = f"; the student ends {left:.3g} from the teacher" if left is not None else ""
        return Finding(
            "quantised_teacher_too_coarse",
            "warning",
            f"the quantised teacher ({event.get('kind')}) is {kl:.3g} nats a token from the full one{beside}",
            "quantise less, or not at all",
            steps=(0,),
            setting="teacher.quantisation=none",
            numbers={"kl": kl, "student_kl": left, "max_kl": as_number(event.get("max_kl"))},
        )
    return None


def held_out_is_another_kind(case: Case) -> bool:
    """Whether the teacher knows the training text and not the held-out text: then these are two kinds of text."""
    held_out, trained = case.nll("teacher"), case.teacher_nll_on_training
    if held_out is None or trained is None:
        return False
    return held_out - trained > _OTHER_KIND_NATS + 0.25 * trained


def student_overtook_teacher(case: Case) -> Finding | None:
    """The finished student is better than its teacher: nothing is left to be learned from it."""
    teacher, before, best = case.nll("teacher"), case.nll_before, case.nll_best
    if teacher is None or before is None or best is None or before <= teacher or best >= teacher - _WORSE_NATS:
        return None
    passed = [event for event in case.record.evals if (event.get("perplexity") or math.inf) < math.exp(teacher)]
    kd = mean([share for step in case.steps[-20:] if (share := _kd_share(step)) is not None])
    return Finding(
        "student_overtook_teacher",
        "hint",
        f"the student's held-out loss of {best:.3g} is below the teacher's {teacher:.3g}"
        + (f"; the teacher's term still has {format_percent(kd)} of the objective" if kd == kd else ""),
        "lower the weight of the teacher towards the end, as a ramp",
        steps=cited(passed),
        setting="objectives.kd.weight={start = 1.0, end = 0.3}",
        numbers={"teacher_nll": teacher, "student_nll": best},
    )


def _kd_share(step: object) -> float | None:
    terms = step.get("terms") if isinstance(step, dict) else None
    kd = terms.get("kd") if isinstance(terms, dict) else None
    return as_number(kd.get("share")) if isinstance(kd, dict) else None


CAUSES = (
    Cause(teacher_degraded, explains=("divergence", "refused_batches")),
    Cause(
        teacher_off_domain,
        explains=("teacher_worse_than_student", "rate_too_high", "rate_too_low", "divergence", "overfitting"),
    ),
    Cause(teacher_worse_than_student, explains=("rate_too_high", "rate_too_low", "divergence", "overfitting")),
    Cause(quantised_teacher_too_coarse),
    Cause(student_overtook_teacher, is_live=False),
)
