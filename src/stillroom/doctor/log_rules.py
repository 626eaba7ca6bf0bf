"""What the record of a run shows: causes in its data, teacher, schedule, precision, terms, machine and end.

The order of the rules is that of a run. Pure functions without torch: a diagnosis reads JSON that it does not trust, so
a value that is missing or of the wrong kind is neither a finding nor an error.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from stillroom.doctor.rules import (
    INNER,
    TRIAL_STEPS,
    Finding,
    Settings,
    Severity,
    found,
    never_out_of_warmup,
    ramp_text,
    rule,
    schedule_in_micro_batches,
)
from stillroom.telemetry.record import Event, LoggedRun
from stillroom.telemetry.wording import (
    as_number,
    clean,
    format_count,
    format_duration,
    format_lr,
    format_percent,
    items,
    reading,
    section,
)
from stillroom.telemetry.wording import section as mapping
from stillroom.training.guard import SUSPICIOUS_AFTER

NUM_CITED = 5  # steps named in a finding
_INJECTED = re.compile(r"injected (\w+) at step (\d{1,9})\b")
_UNKNOWN = object()


class Case(Settings):
    """The record of a run. `now` and `is_owned` (a process holds the folder) are None where nobody looked."""

    def __init__(
        self, record: LoggedRun, *, now: datetime | None = None, is_owned: bool | None = None, is_live: bool = False
    ) -> None:
        super().__init__(record.config)
        self.record = record
        self.now = now
        self.is_owned = is_owned
        self.is_live = is_live  # asked by the run itself, which continues

    @cached_property
    def steps(self) -> list[Event]:
        """The applied steps, in order."""
        return self.record.kept_steps

    @cached_property
    def attempts(self) -> list[Event]:
        return [event for event in self.record.of("step") if isinstance(event.get("step"), int)]

    @cached_property
    def guards(self) -> list[Event]:
        return self.record.of("guard")

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def exit_code(self) -> Any:
        return self.record.end.get("exit_code")

    def counter(self, name: str) -> float:
        """A counter of the data."""
        return as_number(mapping(self.record.start, "data").get(name)) or 0.0

    @property
    def has_contexts(self) -> bool:
        """Whether the teacher reads records after another beginning than the student: context distillation."""
        return self.counter("teacher_contexts") > 0

    @cached_property
    def vocab_size(self) -> int:
        sizes = [size for event in self.record.of("first_forward") if (size := as_number(event.get("vocabulary")))]
        return int(sizes[-1]) if sizes else 0

    @property
    def distils(self) -> bool:
        """Whether a term that needs the teacher's answers had a weight in any step."""
        return any(as_number(terms_of(step).get("kd", {}).get("weight")) for step in self.steps)

    @cached_property
    def injected(self) -> list[tuple[str, int]]:
        """The faults of --inject that struck, and the steps at which they did."""
        texts = [str(event.get("text")) for event in self.record.of("note")]
        return [(match[1], int(match[2])) for text in texts if (match := _INJECTED.match(text))]

    def has(self, assignment: str) -> bool:
        """Whether the run already had what an assignment for --set asks for."""
        key, _, text = assignment.partition("=")
        value = self._effective(key) if self.record.config else _UNKNOWN
        if value is None or isinstance(value, bool):
            return text.lower() == str(value).lower()
        try:
            return float(text) == as_number(value)
        except ValueError:
            return text == str(value)

    def _effective(self, key: str) -> Any:
        """What a setting came to be: `auto` is replaced by what the run chose, as far as its record says."""
        if key == "precision.mode":
            return self.mode
        if key == "teacher.dtype" and self.get(key) == "auto" and not any(numbers(self.attempts, "gpu_memory_gb")):
            return "float32"  # on a CPU
        return self.get(key)

    # -- the schedule that the run had -------------------------------------------------------------------

    @property
    def schedule(self) -> Mapping[str, Any]:
        return mapping(self.record.start, "schedule")

    @property
    def mode(self) -> str:
        return str(mapping(self.record.start, "precision").get("mode") or super().mode)

    @property
    def planned_steps(self) -> int:
        return self.record.num_steps_planned

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step, over all processes."""
        own = int(as_number(self.schedule.get("gradient_accumulation")) or 1)
        return own * int(as_number(self.schedule.get("processes")) or 1)

    @property
    def warmup_steps(self) -> float:
        return as_number(self.schedule.get("warmup_steps")) or 0.0

    @property
    def warmup_share(self) -> float:
        return self.warmup_steps / self.planned_steps if self.planned_steps else super().warmup_share

    @property
    def span(self) -> tuple[int, ...]:
        return span(self.steps)

    @property
    def num_batches(self) -> float:
        return as_number(self.schedule.get("total_batches")) or 0.0

    @property
    def is_trial(self) -> bool:
        return self.planned_steps < TRIAL_STEPS or not self.steps

    @property
    def ended_in_warmup(self) -> bool:
        return not self.is_trial and self.record.is_finished and self.last_step <= self.warmup_steps

    @property
    def warmup_seen(self) -> Mapping[str, float]:
        if self.is_trial:
            return {}
        rates = numbers(self.steps, "lr")
        return {
            "warmup_steps": self.warmup_steps,
            "steps": self.planned_steps,
            "last_step": self.last_step,
            "peak": as_number(self.schedule.get("learning_rate")) or self.number("train.learning_rate"),
            "median_lr": middle(rates),
            "largest_lr": max(rates, default=0.0),
        }

    @property
    def passes(self) -> float:
        """How often the training data was seen."""
        return self.last_step / max(1, -(-int(self.num_batches) // self.accumulation)) if self.num_batches else 0.0

    # -- losses held out ---------------------------------------------------------------------------------

    def nll(self, row: str) -> float | None:
        """Nats a token of a row of the summary, or of the first or last evaluation where there is no summary."""
        perplexity = self.record.perplexity(row)
        if perplexity is None and row == "teacher":
            for event in self.record.of("teacher_eval"):
                perplexity = reading(event, "perplexity")
        return log_of(perplexity)

    @cached_property
    def losses(self) -> list[tuple[int, float, Event]]:
        """(step, nats a token, event) of each evaluation."""
        known = [(int(event["step"]), log_of(reading(event, "perplexity")), event) for event in self.record.evals]
        return [(step, nll, event) for step, nll, event in known if nll is not None]

    @property
    def nll_before(self) -> float | None:
        first = [event for event in self.record.evals if event["step"] == 0]
        return self.nll("student_before") or (log_of(reading(first[0], "perplexity")) if first else None)

    @property
    def nll_last(self) -> float | None:
        """Of the student after its last step, which need not be the one that was kept."""
        evals = self.record.evals
        return log_of(reading(evals[-1], "perplexity")) if evals else None

    @property
    def nll_best(self) -> float | None:
        return min((nll for _, nll, _ in self.losses), default=None)

    @property
    def teacher_nll_on_training(self) -> float | None:
        """The teacher's loss on the first batch of the training data, where it judged the alignment of targets."""
        for event in reversed(self.record.of("first_forward")):
            alignment = mapping(event, "alignment")
            if alignment.get("model") == "teacher":
                return as_number(alignment.get("as_given"))
        return None

    @property
    def held_out_is_another_kind(self) -> bool:
        """Whether the teacher knows the training text and not the held-out text: then these are two kinds of text."""
        held_out, trained = self.nll("teacher"), self.teacher_nll_on_training
        if held_out is None or trained is None:
            return False
        return held_out - trained > OTHER_KIND_NATS + OTHER_KIND_SHARE * trained

    def train_before(self, eval_step: int) -> list[Event]:
        """The last steps before an evaluation."""
        return [step for step in self.steps if step["step"] <= eval_step][-RECENT_STEPS:]


def log_of(perplexity: float | None) -> float | None:
    if perplexity is None or not perplexity > 0 or not math.isfinite(perplexity):
        return None
    return math.log(perplexity)


def terms_of(step: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: term for name, term in mapping(step, "terms").items() if isinstance(term, Mapping)}


def terms_without_weight(step: Mapping[str, Any]) -> list[str]:
    """Terms of weight 0 that add to the objective all the same."""
    return [
        clean(name)
        for name, term in terms_of(step).items()
        if not as_number(term.get("weight")) and as_number(term.get("scaled"))
    ]


def numbers(events: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values of a key."""
    return [value for event in events if (value := as_number(event.get(key))) is not None]


def middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def cited(events: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """The first steps of some events, each once, in order."""
    steps = dict.fromkeys(event["step"] for event in events if isinstance(event.get("step"), int))
    return tuple(steps)[:NUM_CITED]


def span(events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The first and the last step of some events."""
    steps = [event["step"] for event in events if isinstance(event.get("step"), int)]
    return tuple(dict.fromkeys((steps[0], steps[-1]))) if steps else ()


# -- data ------------------------------------------------------------------------------------------------

MUCH_LEAKED = 0.01  # of the evaluation records
MANY_BAD = 0.001  # of the records
FEW_SCORED = 0.10  # of the training tokens
MUCH_CUT = 0.20  # of the targets
MANY_PASSES, TOO_MANY_PASSES = 6.0, 20.0
MANY_EMPTY = 0.02  # of the attempts, and at least three


@rule("log")
def leaking_data(case: Case) -> Finding | None:
    """Evaluation records that are also trained on: the held-out loss then measures memory."""
    both, all_of = case.counter("overlapping_records"), case.counter("eval_documents")
    if not both:
        return None
    share = both / max(all_of, both)
    return found(
        "problem" if share >= MUCH_LEAKED else "warning",
        f"{format_count(both)} of {format_count(all_of)} evaluation records ({format_percent(share)}) are also in the "
        "training data, so the held-out loss measures memory too",
        "hold out text that is not trained on: leave data.eval out and a share is held out by content, or give "
        "another file",
        "data.eval=none",
        steps=(0,),
        otherwise="take the copies out: `stillroom data SPEC --model MODEL` counts them",
        numbers={"overlapping_records": both, "eval_documents": all_of, "share": share},
    )


@rule("log")
def bad_lines(case: Case) -> Finding | None:
    """Records that could not be read and were left out."""
    bad, good = case.counter("bad_records"), case.counter("records")
    if not bad:
        return None
    share = bad / (bad + good)
    notes = [str(note) for note in items(mapping(case.record.start, "data"), "notes")]
    reasons = [note for note in notes if "cannot be" in note or "bad" in note]
    see = "see which and why with `stillroom data SPEC --model MODEL`"
    return found(
        "warning" if share >= MANY_BAD else "hint",
        f"{format_count(bad)} of {format_count(bad + good)} records ({format_percent(share, 2)}) could not be used "
        f"and were left out{': ' + reasons[0] if reasons else ''}",
        f"{see}, repair them, and lower data.max_bad_share so that the next run stops at them",
        "data.max_bad_share=0.001",
        steps=(0,),
        otherwise=f"{see}, and repair them",
        numbers={"bad_records": bad, "records": good, "share": share},
    )


@rule("log", explains=("rate_too_low",))
def masked_out_data(case: Case) -> Finding | None:
    """Most tokens are computed and not learned from, or answers are cut off."""
    tokens, targets = case.counter("train_tokens"), case.counter("train_targets")
    lost, without = case.counter("truncated_targets"), case.counter("rows_without_targets")
    empty = [event for event in case.guards if "no scored target" in str(event.get("reason"))]
    share = targets / tokens if tokens else 1.0
    lost_share = lost / (lost + targets) if lost else 0.0
    is_sound = share >= FEW_SCORED and lost_share < MUCH_CUT
    if is_sound and not empty:
        return None
    parts = []
    if share < FEW_SCORED:
        parts.append(f"{format_percent(share)} of {format_count(tokens)} training tokens are scored")
    if lost:
        parts.append(f"{format_count(lost)} targets are cut off by data.max_length ({format_percent(lost_share)})")
    if without:
        parts.append(f"{format_count(without)} rows have no target left")
    if empty:
        parts.append(f"{len(empty)} steps had no scored target and were skipped")
    length = int(case.number("data.max_length"))
    is_cut = lost_share >= MUCH_CUT or bool(without)
    is_rare = len(empty) < max(3, MANY_EMPTY * len(case.attempts))
    if is_cut:
        advice = "raise data.max_length so that the answers fit"
    elif case.get("data.packing") in ("packed", "blocks"):
        advice = "learn the prompts too"
    else:
        advice = "pack several records into a row (data.packing=packed), or learn the prompts too"
    return found(
        "hint" if is_sound and is_rare else "warning",
        "; ".join(parts),
        advice,
        f"data.max_length={2 * length}" if is_cut and length else "data.train_on_prompt=true",
        steps=cited(empty) or (0,),
        otherwise="see what is scored, and why not the rest: `stillroom data SPEC --model MODEL`",
        numbers={"scored_share": share, "truncated_targets": lost, "rows_without_targets": without},
    )


@rule("log")
def data_exhausted(case: Case) -> Finding | None:
    """So many passes over the data that there is little left to learn from it."""
    if case.passes < MANY_PASSES:
        return None
    last = [nll for _, nll, _ in case.losses[-2:]]
    still_falls = len(last) == 2 and last[1] < last[0] - LITTLE_GAIN
    tokens, per_pass = case.counter("train_tokens"), case.last_step / case.passes
    return found(
        "warning" if case.passes >= TOO_MANY_PASSES or not still_falls else "hint",
        f"{case.passes:.1f} passes over {format_count(tokens)} training tokens; the first ended at step {per_pass:.0f}",
        "give more text, or train for fewer steps; a teacher can also label text that has no labels",
        f"train.max_steps={max(1, round(4 * per_pass))}",
        steps=(round(per_pass),),
        numbers={"epochs": case.passes, "train_tokens": tokens},
    )


# -- the teacher -----------------------------------------------------------------------------------------

LIKE_A_GUESS = 0.6  # of the log of the vocabulary's size, which is the loss of a guess
WORSE_NATS = 0.02
AHEAD_NATS = 1.0
OTHER_KIND_NATS, OTHER_KIND_SHARE = 0.7, 0.25  # and of the loss on training text
MANY_BAD_STEPS, SOME_BAD_STEPS = 0.10, 0.01
COARSE_NATS = 0.05
COARSE_SHARE = 0.2  # of the distance that is left between student and teacher


@rule("log", explains=("divergence", "refused_batches"))
def teacher_degraded(case: Case) -> Finding | None:
    """The teacher gave no usable answers in some steps, or its trained gates made it worse."""
    alarms = [event for event in case.record.of("router") if event.get("alarm")]
    if alarms:
        start, now = numbers(case.record.of("router"), "teacher_nll")[:1], numbers(alarms, "teacher_nll")[-1:]
        losses = f" (held-out loss {start[0]:.4g} at first, {now[0]:.4g} then)" if start and now else ""
        rate = case.number("train.router_learning_rate") or case.number("train.learning_rate", 1e-3)
        return found(
            "problem",
            f"training its gates made the teacher worse{losses}: they were restored and frozen",
            "lower the rate of the gates, or hold them closer to the original teacher",
            f"train.router_learning_rate={rate / 3:.2g}",
            steps=cited(alarms),
            alarms=len(alarms),
        )
    bad = [step for step in case.attempts if as_number(step.get("bad_teacher_rows"))]
    fallbacks = [event for event in case.guards if event.get("action") == "fallback"]
    if not bad and not fallbacks:
        return None
    share, rows = len(bad) / max(len(case.attempts), 1), sum(numbers(bad, "bad_teacher_rows"))
    fell = f", and {len(fallbacks)} stretches were trained on labels alone" if fallbacks else ""
    is_some = share >= SOME_BAD_STEPS and len(bad) > 1
    if case.get("teacher.server"):
        advice = "look at the server's own log: its answers cannot be used"
    elif case.get("teacher.cache"):
        advice = "write the cache again (`stillroom cache`) with teacher.dtype=float32: its answers cannot be used"
    else:
        advice = "load the teacher in float32; if it still answers NaN, its folder is damaged"
    return found(
        "problem" if fallbacks or share >= MANY_BAD_STEPS else "warning" if is_some else "hint",
        f"in {len(bad)} of {len(case.attempts)} steps the teacher gave no usable answer ({rows:.0f} rows){fell}",
        advice,
        "" if case.get("teacher.server") or case.get("teacher.cache") else "teacher.dtype=float32",
        steps=cited(bad or fallbacks),
        otherwise="it is in float32 already, so its weights or files are at fault: check its folder",
        numbers={"steps": len(bad), "rows": rows, "share": share, "fallbacks": len(fallbacks)},
    )


@rule("log", explains=("teacher_worse_than_student", "rate_too_high", "rate_too_low", "divergence", "overfitting"))
def teacher_off_domain(case: Case) -> Finding | None:
    """The teacher hardly knows the training text: its loss is near that of a guess."""
    held_out, trained, before = case.nll("teacher"), case.teacher_nll_on_training, case.nll_before
    if held_out is None or not case.vocab_size or not case.distils:
        return None
    guess = math.log(case.vocab_size)
    least = min(held_out, trained) if trained is not None else held_out
    is_ahead = before is not None and held_out < before - AHEAD_NATS  # a weak teacher of a weaker student still helps
    if least < LIKE_A_GUESS * guess or is_ahead:
        return None
    seen = f", {trained:.3g} on the first training batch" if trained is not None else ""
    return found(
        "problem",
        f"the teacher's loss is {held_out:.3g} nats a token on the held-out text{seen}; a guess among "
        f"{case.vocab_size:,} tokens has {guess:.3g}",
        "take text the teacher knows, or a teacher that knows this text; until then learn from the labels",
        "objectives.ce.weight=1",
        steps=(0,),
        otherwise="take text the teacher knows, or a teacher that knows this text",
        numbers={"teacher_nll": held_out, "teacher_nll_on_training": trained, "guess": guess},
    )


@rule("log", explains=("rate_too_high", "rate_too_low", "divergence", "overfitting"))
def teacher_worse_than_student(case: Case) -> Finding | None:
    """The teacher predicts the held-out text worse than the student did before training."""
    teacher, before, after = case.nll("teacher"), case.nll_before, case.nll_last
    if teacher is None or before is None or not case.distils or teacher <= before + WORSE_NATS:
        return None
    if case.held_out_is_another_kind:
        return None  # the comparison is on text that is not trained on
    moved = f", and {after:.3g} after it" if after is not None else ""
    return found(
        "problem",
        f"the teacher's held-out loss is {teacher:.3g}; the student's was {before:.3g} before training{moved}",
        "take a teacher that is better on this text, or learn from the labels alone",
        "objectives.ce.weight=1",
        steps=(0, case.last_step),
        otherwise="take a teacher that is better on this text, or leave it out: objectives.kd.weight=0",
        numbers={"teacher_nll": teacher, "student_nll_before": before, "student_nll": after},
    )


@rule("log")
def quantised_teacher_too_coarse(case: Case) -> Finding | None:
    """Quantising changed the teacher's answers by as much as the student could still gain from them."""
    events = [event for event in case.record.of("teacher_quantised") if as_number(event.get("kl")) is not None]
    if not events:
        return None
    kl, left = as_number(events[-1].get("kl")) or 0.0, as_number(case.record.result("student").get("kl"))
    if kl < COARSE_NATS and (left is None or kl <= COARSE_SHARE * left):
        return None
    compared = f"; the student ends {left:.3g} from the teacher" if left is not None else ""
    return found(
        "warning",
        f"the quantised teacher ({clean(events[-1].get('kind'))}) is {kl:.3g} nats a token from the full one{compared}",
        "quantise less, or not at all",
        "teacher.quantisation=none",
        steps=(0,),
        numbers={"kl": kl, "student_kl": left, "max_kl": as_number(events[-1].get("max_kl"))},
    )


@rule("log", is_live=False)
def student_overtook_teacher(case: Case) -> Finding | None:
    """The finished student is better than its teacher: nothing is left to be learned from it."""
    teacher, before, best = case.nll("teacher"), case.nll_before, case.nll_best
    if teacher is None or before is None or best is None or before <= teacher or best >= teacher - WORSE_NATS:
        return None
    shares = numbers([terms_of(step).get("kd", {}) for step in case.steps[-RECENT_STEPS:]], "share")
    still = f"; the teacher's term still has {format_percent(mean(shares))} of the objective" if shares else ""
    return found(
        "hint",
        f"the student's held-out loss of {best:.3g} is below the teacher's {teacher:.3g}{still}",
        "lower the weight of the teacher towards the end, as a ramp",
        "objectives.kd.weight={start = 1.0, end = 0.3}",
        steps=cited(event for event in case.record.evals if (event.get("perplexity") or math.inf) < math.exp(teacher)),
        numbers={"teacher_nll": teacher, "student_nll": best},
    )


# -- the schedule and the learning rate ------------------------------------------------------------------

rule("log", explains=("never_out_of_warmup", "data_exhausted", "rate_too_low"))(schedule_in_micro_batches)
rule("log", explains=("rate_too_low",))(never_out_of_warmup)

LITTLE_GAIN = 0.01  # nats of held-out loss; less is noise
LITTLE_GAIN_SHARE = 0.002  # of the distance to the teacher
ROOM = 0.2  # nats
ROSE, ROSE_SHARE = 0.5, 0.25  # nats of training loss above its best stretch, and of that
STRETCH = 5  # steps


@rule("log", explains=("divergence", "overfitting", "refused_batches", "stopped_early"))
def rate_too_high(case: Case) -> Finding | None:
    """The student was driven away by its own updates: finite, and worse."""
    astray = [event for event in case.guards if "canary loss" in str(event.get("reason"))]
    before, last, rise = case.nll_before, case.nll_last, _rise(case)
    is_worse = before is not None and last is not None and last > before + LITTLE_GAIN and case.last_step >= TRIAL_STEPS
    spikes, in_a_row = _spikes_in_a_row(case)
    if not astray and not (is_worse and not case.is_live) and rise is None and in_a_row < SUSPICIOUS_AFTER:
        return None
    rate, bound = case.number("train.learning_rate"), case.number("train.max_grad_norm", 1.0)
    norms = numbers(case.attempts, "grad_norm")
    parts = []
    if astray:
        parts.append(f"{len(astray)} times the loss on a fixed batch ran away, first: {astray[0].get('reason')}")
    if is_worse:
        parts.append(f"held-out loss {last:.3g} after the last step, {before:.3g} before training")
    if rise is not None:
        parts.append(f"training loss rose from {rise[0]:.3g} to {rise[1]:.3g}")
    if in_a_row >= SUSPICIOUS_AFTER:
        parts.append(f"{in_a_row} batches in a row had losses far above those before, while the student was sound")
    if norms:
        clipped = mean([float(norm > bound) for norm in norms])
        parts.append(f"gradients were clipped in {format_percent(clipped, 0)} of the steps")
    finding = found(
        "problem" if is_worse or case.exit_code == 22 or rise is not None else "warning",
        f"at a peak rate of {format_lr(rate)}: " + "; ".join(parts),
        "lower the learning rate, or warm up for longer",
        f"train.learning_rate={rate / 10:.2g}",
        steps=cited(astray or spikes) or case.span,
        numbers={
            "learning_rate": rate,
            "runaways": len(astray),
            "in_a_row": in_a_row,
            "nll_before": before,
            "nll_last": last,
        },
    )
    # A poor teacher makes the labels less likely. That the objective itself got worse is the rate's doing.
    return replace(finding, is_root=rise is not None or case.exit_code == 22)


def _spikes_in_a_row(case: Case) -> tuple[list[Event], int]:
    """The batches refused for finite losses, and how many of them at most at one step: a skip does not advance it."""
    skips = [event for event in case.guards if event.get("action") == "skip"]
    spikes = [event for event in skips if "far outside the last" in str(event.get("reason"))]
    return spikes, max(Counter(event.get("step") for event in spikes).values(), default=0)


def _rise(case: Case) -> tuple[float, float] | None:
    """The best stretch of training loss and the last, where the last is far above, in the last phase."""
    losses = numbers(_last_phase(case), "train_loss")
    stretches = [middle(losses[at : at + STRETCH]) for at in range(0, len(losses) - STRETCH + 1, STRETCH)]
    if len(stretches) < 2:
        return None
    best, last = min(stretches), stretches[-1]
    return (best, last) if last > best + max(ROSE, ROSE_SHARE * abs(best)) else None


@rule("log", is_live=False)
def rate_too_low(case: Case) -> Finding | None:
    """The held-out loss hardly fell although there was room."""
    before, best, teacher, last = case.nll_before, case.nll_best, case.nll("teacher"), case.nll_last
    if before is None or best is None or case.record.evals[-1]["step"] < TRIAL_STEPS:
        return None
    room, gain = before - (teacher if teacher is not None else 0.0), before - best
    has_gained = gain >= max(LITTLE_GAIN, LITTLE_GAIN_SHARE * room)
    if room < ROOM or has_gained or last is None or last > before + LITTLE_GAIN:
        return None
    rate, travel = case.number("train.learning_rate"), sum(numbers(case.steps, "lr"))
    whose = f"; the teacher's is {teacher:.3g}" if teacher is not None else ""
    return found(
        "problem",
        f"{case.last_step:,} steps lowered the held-out loss by {gain:.2g} nats, from {before:.4g}{whose}; the rates "
        f"of all steps add up to {travel:.2g}, which is about how far a weight can move",
        "raise the learning rate, or train for longer",
        f"train.learning_rate={min(10 * rate, max(3e-3, rate)):.2g}",
        steps=case.span,
        otherwise="train for longer",
        numbers={"learning_rate": rate, "gain": gain, "room": room, "travel": travel},
    )


@rule("log", explains=("refused_batches", "stopped_early"))
def divergence(case: Case) -> Finding | None:
    """The state was lost and had to be given up: rollbacks, a reset, or the end of the run."""
    given_up = [event for event in case.guards if event.get("action") in ("rollback", "reset", "halt")]
    summary = case.record.summary
    is_ended = case.exit_code == 22 or summary.get("status") == "diverged"
    if not given_up and not is_ended:
        return None
    if given_up:
        what = f"{len(given_up)} times the state was given up; the last: {given_up[-1].get('reason')}"
    else:
        what = str(case.record.end.get("reason") or summary.get("reason") or "the run ended as diverged")
    look = ", and look at the batch: `stillroom replay RUN STEP`" if given_up else ""
    if case.get("guard.on_nonfinite") == "halt":
        advice, setting = "let the guard skip and roll back", "guard.on_nonfinite=recover"
    elif case.mode == "fp32":
        rate = case.number("train.learning_rate", 1e-3)
        advice, setting = f"lower the learning rate{look}", f"train.learning_rate={rate / 10:.2g}"
    else:
        advice, setting = f"train in a precision with more range{look}", "precision.mode=fp32"
    return found(
        "problem" if is_ended or case.exit_code in (21, 23) else "warning",
        what,
        advice,
        setting,
        steps=cited(given_up),
        numbers={"times": len(given_up), "rollbacks": summary.get("rollbacks")},
    )


# -- precision -------------------------------------------------------------------------------------------

COLLAPSED = 1 / 256  # of the first loss scale
MOSTLY, NEARLY_ALL, ALL_BUT_FEW = 0.5, 0.9, 0.99


@rule("log", explains=("divergence", "refused_batches", "stopped_early"))
def loss_scale_collapsed(case: Case) -> Finding | None:
    """FP16 gradients overflow at ever smaller loss scales."""
    scales, is_at_floor = numbers(case.attempts, "loss_scale"), case.exit_code == 23
    has_fallen = any(scale != 1.0 for scale in scales) and scales[-1] <= COLLAPSED * scales[0]
    if not scales or not (is_at_floor or has_fallen):
        return None
    retried = [step for step in case.attempts if step.get("verdict") == "retry"]
    return found(
        "problem",
        f"the loss scale fell from {scales[0]:g} to {min(scales):g} in {len(retried)} retries"
        + ("; it is at its floor and the run stopped" if is_at_floor else ""),
        "bf16-mixed where the GPU has it, else fp32: gradients that overflow at every scale are too large for FP16",
        "precision.mode=fp32",
        steps=cited(retried),
        numbers={"first_scale": scales[0], "least_scale": min(scales), "retries": len(retried)},
    )


@rule("log", explains=("rate_too_low", "noop_updates"))
def zero_gradients(case: Case) -> Finding | None:
    """Most steps have no gradient: the objective does not depend on the weights."""
    dead = [step for step in case.steps if as_number(step.get("grad_norm")) == 0.0]
    sampled = numbers(case.steps, "zero_gradient_fraction")
    share = len(dead) / max(len(case.steps), 1)
    # One sample says little: half of a fresh adapter has no gradient in the first step.
    if share < MOSTLY and not (len(sampled) > 1 and mean(sampled) >= NEARLY_ALL):
        return None
    parts = [f"the gradient is exactly 0 in {len(dead)} of {len(case.steps)} steps"]
    if sampled:
        parts.append(f"{format_percent(mean(sampled))} of the gradients of a sampled matrix are 0")
    setting, advice = "objectives.kd.weight=1", "give a term with a gradient a weight"
    clamps = (("clamped_losses", "guard.loss_clamp"), ("clamped_fraction", "guard.logit_clamp"))
    clamp = next((clamp for key, clamp in clamps if any(numbers(case.steps, key))), "")
    if clamp:
        parts.append(f"{clamp} is {case.number(clamp):g}, and what is clamped has no gradient")
        setting, advice = f"{clamp}=0", "turn the clamp off"
    return found(
        "problem",
        "; ".join(parts),
        advice,
        setting,
        steps=cited(dead) or case.span,
        otherwise="see which terms have a weight in the steps' records, and whether they depend on the student",
        numbers={"steps": len(dead), "share": share, "zero_gradient_fraction": mean(sampled) if sampled else None},
    )


@rule("log", explains=("rate_too_low",))
def noop_updates(case: Case) -> Finding | None:
    """Updates that are smaller than the spacing of the stored numbers are lost."""
    sampled = [step for step in case.steps if as_number(step.get("noop_update_fraction")) is not None]
    lost = [
        (as_number(step.get("noop_update_fraction")) or 0.0) - (as_number(step.get("zero_gradient_fraction")) or 0.0)
        for step in sampled
    ]
    # Stochastic rounding keeps a weight most of the time and moves it by more when it does: the mean arrives.
    is_rounded = case.mode == "fp16-sr"
    if not lost or mean(lost) < (ALL_BUT_FEW if is_rounded else MOSTLY):
        return None
    rate = case.number("train.learning_rate")
    if case.mode in ("fp16-sr", "fp16-split"):
        advice = "keep FP32 masters (precision.mode=fp16-master), or raise the learning rate"
        setting = "precision.mode=fp16-master"
    else:
        advice, setting = "raise the learning rate", f"train.learning_rate={100 * rate:.2g}"
    return found(
        "warning" if is_rounded else "problem",
        f"{format_percent(mean(lost))} of the weights of a sampled matrix did not move although they had a gradient, "
        f"at {format_lr(max(numbers(case.steps, 'lr'), default=0.0))} and less, in {case.mode}",
        advice,
        setting,
        steps=cited(sampled),
        numbers={"noop_update_fraction": mean(lost), "learning_rate": rate},
    )


# -- terms of the objective ------------------------------------------------------------------------------

DEAD, DOMINATING = 0.005, 0.95  # of the objective
SMALL_WEIGHT = 0.02  # of all weights: a term with a larger one is small because its raw value is, as a ramp may be
LARGE_WEIGHT = 2.0
LEAST_STEPS_OF_A_TERM = 3


def _by_term(steps: list[Event], key: str) -> dict[str, list[float]]:
    """The values of each term in the steps in which it has a weight."""
    by_term: dict[str, list[float]] = {}
    for step in steps:
        for name, term in terms_of(step).items():
            value = as_number(term.get(key))
            if as_number(term.get("weight")) and value is not None:
                by_term.setdefault(name, []).append(value)
    return {name: values for name, values in by_term.items() if len(values) >= LEAST_STEPS_OF_A_TERM}


def _last_phase(case: Case) -> list[Event]:
    phase = case.steps[-1].get("phase") if case.steps else None
    return [step for step in case.steps if step.get("phase") == phase]


@rule("log")
def active_when_zero(case: Case) -> Finding | None:
    """A term that looks inside the models is active in the first phase, or a term of weight 0 enters all the same."""
    wrong = [step for step in [*case.steps, *case.record.evals] if terms_without_weight(step)]
    if wrong:
        names = sorted({name for step in wrong for name in terms_without_weight(step)})
        return found(
            "problem",
            f"{', '.join(names)} has weight 0 and adds to the objective in {len(wrong)} records",
            "train and eval must weigh alike: this is a fault of the program that wrote the events",
            f"objectives.{names[0]}.weight=0",
            steps=cited(wrong),
            records=len(wrong),
        )
    planned = items(mapping(case.record.config, "curriculum"), "phases")
    if len(planned) < 2 or not case.steps:
        return None
    phase = str(case.steps[0].get("phase") or "")
    first = [step for step in case.steps if str(step.get("phase") or "") == phase]
    early = {name: values for name, values in _by_term(first, "weight").items() if name in INNER}
    if not early:
        return None
    shares = _by_term(first, "share")
    terms = [f"{name} at weight {mean(w):.3g} ({format_percent(mean(shares[name]))})" for name, w in early.items()]
    ends = [as_number(one.get("until")) for one in planned if isinstance(one, Mapping) and one.get("name") == phase]
    name, weights = next(iter(early.items()))
    return found(
        "warning",
        f"in the first phase, {clean(phase)}, {', '.join(terms)} of the objective; a curriculum begins with the logits "
        "alone",
        "let the term begin after the first phase, as a ramp",
        f"objectives.{name}.weight={ramp_text(max(weights), next(iter(ends), None) or 0.3)}",
        steps=(int(first[0]["step"]), int(first[-1]["step"])),
        numbers={"phase": phase, **{f"{term}_weight": mean(w) for term, w in early.items()}},
    )


@rule("log", explains=("dead_component", "rate_too_low", "train_eval_gap"))
def dominating_component(case: Case) -> Finding | None:
    """One term is almost all of the objective because of its weight: the others are not learned."""
    steps = _last_phase(case)
    shares, weights, raws = (_by_term(steps, key) for key in ("share", "weight", "raw"))
    for name, values in shares.items():
        others = [other for other in shares if other != name]
        share, weight = mean(values), mean(weights[name])
        if not others or share < DOMINATING or not (name in INNER or weight > LARGE_WEIGHT):
            continue
        return found(
            "problem",
            f"{clean(name)} is {format_percent(share)} of the objective (raw {mean(raws[name]):.3g} at weight "
            f"{weight:.3g}); " + ", ".join(f"{clean(other)} {format_percent(mean(shares[other]))}" for other in others),
            f"lower the weight of {clean(name)}; at the proposed one it has half of the objective",
            f"objectives.{clean(name)}.weight={weight * (1.0 - share) / share:.2g}",
            steps=(int(steps[0]["step"]), int(steps[-1]["step"])),
            numbers={"term": name, "share": share, "weight": weight},
        )
    return None


@rule("log")
def dead_component(case: Case) -> Finding | None:
    """A term that has a weight and hardly a share: it costs time and teaches nothing."""
    steps = _last_phase(case)
    shares, weights, raws = (_by_term(steps, key) for key in ("share", "weight", "raw"))
    for name, values in shares.items() if len(shares) > 1 else ():
        is_nothing, share, weight = max(raws[name]) == 0.0, mean(values), mean(weights[name])
        asked = weight / sum(mean(others) for others in weights.values())
        if share >= DEAD or not (is_nothing or asked < SMALL_WEIGHT):
            continue
        if name == "contrastive" and is_nothing and case.get("train.batch_size") in (1, None):
            advice = "a batch of one has no negatives: raise train.batch_size"
            setting = "train.batch_size=8"
        else:
            advice = f"leave it out (objectives.{clean(name)}.weight=0), or give it a weight that counts"
            setting = f"objectives.{clean(name)}.weight=0"
        return found(
            "warning",
            f"{clean(name)} is {format_percent(share, 3)} of the objective (raw {mean(raws[name]):.3g} at "
            f"weight {weight:.3g})",
            advice,
            setting,
            steps=(int(steps[0]["step"]), int(steps[-1]["step"])),
            numbers={"term": name, "share": share, "weight": weight, "raw": mean(raws[name])},
        )
    return None


# -- what was learned ------------------------------------------------------------------------------------

RISE = 0.02  # nats of held-out loss above its best
MAX_GAP = 2.0  # of the objective held out to that in training
LEAST_GAP = 0.2  # in the unit of the objective
RECENT_STEPS = 20  # training steps whose mean loss is compared with an evaluation
MANY_REFUSED = 0.05  # of the attempts


@rule("log", explains=("train_eval_gap", "data_exhausted"))
def overfitting(case: Case) -> Finding | None:
    """The held-out loss rises while the training loss falls."""
    if len(case.losses) < 3 or case.held_out_is_another_kind:
        return None
    best_step, best, best_event = min(case.losses, key=lambda one: one[1])
    last_step, last, _ = case.losses[-1]
    if best_step == last_step or last - best <= max(RISE, _half_width(best_event)):
        return None
    then, now = (mean(numbers(case.train_before(at)[-5:], "train_loss")) for at in (max(best_step, 5), last_step))
    if not now < then:
        return None
    stops = case.number("train.early_stopping") > 0
    return found(
        "problem",
        f"the held-out loss was best at step {best_step} with {best:.3g} and is {last:.3g} at step {last_step}, while "
        f"the training loss fell from {then:.3g} to {now:.3g}; {case.passes:.1f} passes over the data",
        ("" if stops else "stop at the best evaluation, and ") + "give more text or fewer passes",
        "" if stops else "train.early_stopping=3",
        steps=(best_step, last_step),
        numbers={"best_nll": best, "last_nll": last, "train_then": then, "train_now": now},
    )


def _half_width(event: Event) -> float:
    """Half the 95 % interval of the held-out loss, in nats; 0 where there is none."""
    bounds = [log_of(as_number(bound)) for bound in items(section(event, "intervals"), "perplexity")]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return 0.0
    return (bounds[1] - bounds[0]) / 2


@rule("log", is_live=False, explains=("rate_too_low", "rate_too_high", "divergence", "stopped_early"))
def train_eval_gap(case: Case) -> Finding | None:
    """Train and eval are far apart: two kinds of text, or an objective that is twice as large held out."""
    if case.held_out_is_another_kind:
        return _two_kinds(case)
    for event in reversed(case.record.evals):
        step, held_out = int(event["step"]), as_number(event.get("objective"))
        recent = case.train_before(step)
        trained = mean(numbers(recent, "train_loss"))
        if held_out is None or math.isnan(trained):
            continue
        if held_out - trained < max(LEAST_GAP, (MAX_GAP - 1.0) * abs(trained)):
            return None
        return found(
            "warning",
            f"the objective is {held_out:.3g} held out and {trained:.3g} in training before step {step}"
            f"{_largest_gap(recent, event)}; {case.passes:.1f} passes over the training data",
            "give more text, or train for fewer passes",
            "" if case.number("train.early_stopping") else "train.early_stopping=3",
            steps=(step,),
            numbers={"held_out": held_out, "train": trained},
        )
    return None


def _two_kinds(case: Case) -> Finding:
    held_out, trained, last = case.nll("teacher"), case.teacher_nll_on_training, case.nll_last
    student = f"; the student ends at {last:.3g} held out" if last is not None else ""
    return found(
        "problem",
        f"the teacher has a loss of {held_out:.3g} on the held-out text and of {trained:.3g} on training text: these "
        f"are two kinds of text{student}",
        "hold out text of the same kind: leave data.eval out, and a share of the training text is held out",
        "data.eval=none",
        steps=(0, case.last_step),
        otherwise="hold out more of it, with data.eval_share: few documents may be of one kind by chance",
        numbers={"teacher_held_out": held_out, "teacher_train": trained, "student_held_out": last},
    )


def _largest_gap(steps: list[Event], event: Event) -> str:
    """The term that differs most."""
    gaps = {}
    for name, term in terms_of(event).items():
        own, held_out = numbers([terms_of(one).get(name, {}) for one in steps], "raw"), as_number(term.get("raw"))
        if own and held_out is not None:
            gaps[name] = (held_out, mean(own))
    if not gaps:
        return ""
    name, (theirs, ours) = max(gaps.items(), key=lambda one: one[1][0] - one[1][1])
    return f"; {clean(name)} differs most, {theirs:.3g} against {ours:.3g}"


@rule("log")
def refused_batches(case: Case) -> Finding | None:
    """Batches the guard refused while the student was sound."""
    refused = [event for event in case.guards if event.get("action") == "skip"]
    refused = [event for event in refused if "no scored target" not in str(event.get("reason"))]
    is_ended = case.exit_code == 21
    if not refused and not is_ended:
        return None
    share = len(refused) / max(len(case.attempts), 1)
    reason = refused[-1].get("reason") if refused else case.record.end.get("reason")
    return found(
        "problem" if is_ended else "warning" if share >= MANY_REFUSED and len(refused) > 1 else "hint",
        f"{len(refused)} of {len(case.attempts)} attempts ({format_percent(share)}) were refused; the last: {reason}",
        "look at what is in quarantine/: `stillroom replay RUN STEP` says where it goes wrong",
        steps=cited(refused),
        numbers={"refused": len(refused), "attempts": len(case.attempts)},
    )


# -- the student's own text --------------------------------------------------------------------------------

LEAST_ROUNDS = 3
TOO_LONG = 2.0  # times the data's answers
GROWN = 1.5  # times the first rounds
MANY_LOOPS = 0.1  # of the answers
ENTROPY_LOST = 0.5  # of the first rounds' entropy, while the distance to the teacher grows
STALE = 0.25  # rise of the loss on rollouts where a new round begins


def _rounds(case: Case) -> list[Event]:
    """The records of rounds, the last of each number: one that a rollback dropped was written again."""
    by_number = {event["round"]: event for event in case.record.of("rollouts") if isinstance(event.get("round"), int)}
    return [by_number[number] for number in sorted(by_number)]


def _ended(event: Event, *names: str) -> float:
    """The share of a round's answers that ended so."""
    counts = {name: as_number(count) or 0.0 for name, count in mapping(event, "ended").items()}
    return sum(counts.get(name, 0.0) for name in names) / max(sum(counts.values()), 1.0)


def _own_losses(case: Case) -> list[tuple[int, float]]:
    """The kd term on rollouts by step."""
    found = []
    for step in case.steps:
        own = mapping(mapping(step, "sources"), "rollouts")
        if (value := as_number(own.get("kd"))) is not None:
            found.append((int(step["step"]), value))
    return found


@rule("log")
def length_inflation(case: Case) -> Finding | None:
    """Answers of the student grow beyond those of the data."""
    rounds = _rounds(case)
    lengths = numbers(rounds, "mean_length")
    wanted = as_number(rounds[-1].get("data_length")) if rounds else None
    if len(rounds) < LEAST_ROUNDS or len(lengths) < LEAST_ROUNDS or not wanted:
        return None
    first, last = lengths[0], lengths[-1]
    if last < TOO_LONG * wanted or last < GROWN * first:
        return None
    unfinished = _ended(rounds[-1], "length", "loop", "positions")
    return found(
        "warning",
        f"the student's answers grew from {first:.0f} to {last:.0f} tokens, those of the data have {wanted:.0f}; "
        f"{format_percent(unfinished)} of the last round do not end",
        "long answers weigh most in a mean over tokens: cut them at the length of the data's",
        setting=f"rollouts.max_new_tokens={max(1, round(1.5 * wanted))}",
        otherwise="use forward KL, and begin rollouts later (rollouts.share)",
        steps=cited(rounds[-1:]),
        numbers={"first": first, "last": last, "data": wanted, "unfinished": unfinished},
    )


@rule("log")
def rollout_loops(case: Case) -> Finding | None:
    """Many answers repeat a phrase."""
    rounds = _rounds(case)
    share = _ended(rounds[-1], "loop") if rounds else 0.0
    if share < MANY_LOOPS:
        return None
    return found(
        "warning",
        f"{format_percent(share)} of the answers of the last round repeat a phrase; they are cut there",
        "an untrained student repeats itself: begin rollouts later",
        setting="rollouts.share={start = 0.0, end = 0.5, begin = 0.5, until = 0.5}",
        otherwise="leave loops out with rollouts.on_loop = 'drop'",
        steps=cited(rounds[-1:]),
        numbers={"loops": share},
    )


@rule("log")
def entropy_collapse(case: Case) -> Finding | None:
    """The student's text loses variety while it moves away from the teacher."""
    rounds, losses = _rounds(case), _own_losses(case)
    entropies = numbers(rounds, "entropy")
    if len(entropies) < LEAST_ROUNDS or len(losses) < 2 * LEAST_ROUNDS:
        return None
    third = len(losses) // 3
    before, after = (mean([value for _, value in part]) for part in (losses[:third], losses[-third:]))
    first, last = entropies[0], entropies[-1]
    if first <= 0 or last > ENTROPY_LOST * first or after <= before:
        return None
    return found(
        "warning",
        f"the entropy of the student's text fell from {first:.2g} to {last:.2g} nats a token, and its distance to the "
        f"teacher there rose from {before:.2g} to {after:.2g}",
        "forward KL keeps what the teacher finds possible",
        setting="objectives.kd.divergence=forward_kl",
        otherwise="lower train.learning_rate, or rollouts.share",
        steps=cited(rounds[-1:]),
        numbers={"first": first, "last": last, "kd_before": before, "kd_after": after},
    )


@rule("log")
def stale_rounds(case: Case) -> Finding | None:
    """The loss on rollouts falls within a round and rises where the next begins: the text is of another student."""
    rounds, losses = _rounds(case), dict(_own_losses(case))
    rises = []
    for one in rounds[1:]:
        start = as_number(one.get("step"))
        earlier = [value for step, value in losses.items() if start is not None and start - 2 <= step <= start]
        later = [value for step, value in losses.items() if start is not None and start < step <= start + 3]
        if earlier and later and mean(earlier) > 0:
            rises.append(mean(later) / mean(earlier) - 1.0)
    every = as_number(case.get("rollouts.every"))
    if len(rises) < LEAST_ROUNDS or middle(rises) < STALE or not every or every < 2:
        return None
    return found(
        "hint",
        f"the loss on rollouts rises by {format_percent(middle(rises))} where a new round begins: the student has "
        "moved away from what it wrote",
        "write more often",
        setting=f"rollouts.every={max(1, int(every) // 2)}",
        steps=cited(rounds[1:]),
        numbers={"rise": middle(rises), "every": every},
    )


# -- the machine -----------------------------------------------------------------------------------------

LEAST_STEPS_TIMED = 8
SLOW_LOADER = 0.3  # of a step's time
WITHOUT_PROCESSOR = 0.7  # of the time in which one thread should be busy
LEAST_GROWTH_GB = 0.1
LEAST_GROWTH = 0.1  # of the level after the first fifth
LEAST_RISE = 0.15  # of the growth, in each fifth
LEAST_STEPS_OF_MEMORY = 12
SETTLING_STEPS = 4  # memory grows while the first steps and evaluations allocate


def _shares_of_time(steps: list[Event], key: str) -> list[float]:
    """A duration of each step as a share of its time."""
    pairs = [(as_number(step.get(key)), as_number(step.get("seconds"))) for step in steps]
    return [part / whole for part, whole in pairs if part is not None and whole]


@rule("log")
def memory_creep(case: Case) -> Finding | None:
    """Memory that grows in every stretch of the run."""
    steps = case.steps[SETTLING_STEPS:]
    for key, where in (("gpu_memory_gb", "the GPU"), ("memory_gb", "the process")):
        sizes = [value for value in numbers(steps, key) if value > 0]
        fifth = len(sizes) // 5
        if fifth < 2 or len(steps) < LEAST_STEPS_OF_MEMORY:
            continue
        # The first fifth is left out: caches and the first evaluation fill up there.
        levels = [middle(sizes[at * fifth : (at + 1) * fifth]) for at in range(1, 5)]
        growth = levels[-1] - levels[0]
        rises = [after - before for before, after in pairwise(levels)]
        if growth < max(LEAST_GROWTH_GB, LEAST_GROWTH * levels[0]) or min(rises) < LEAST_RISE * growth:
            continue
        per_step, full = growth / (3 * fifth), ""
        total = as_number(mapping(case.record.start, "machine").get("memory_gb"))
        if total and key == "memory_gb":
            full = f"; {total:g} GB are full in {(total - sizes[-1]) / per_step:,.0f} steps"
        return found(
            "warning",
            f"the memory of {where} grows by {1000 * per_step:.3g} MB a step, from {levels[0]:.3g} GB to "
            f"{levels[-1]:.3g} GB{full}",
            "save often and resume (`stillroom resume RUN` begins with a fresh process); look for a listener or an "
            "extension that keeps tensors",
            "train.save_steps=100",
            steps=span(steps),
            otherwise="look for a listener or an extension that keeps tensors; `stillroom resume RUN` begins afresh",
            numbers={"gb_per_step": per_step, "first_gb": levels[0], "last_gb": levels[-1]},
        )
    return None


@rule("log")
def slow_loader(case: Case) -> Finding | None:
    """Steps wait for their data."""
    shares = _shares_of_time(case.steps[1:], "loader_seconds")
    if len(shares) < LEAST_STEPS_TIMED or middle(shares) < SLOW_LOADER:
        return None
    waited = middle(numbers(case.steps[1:], "loader_seconds"))
    return found(
        "warning",
        f"the median step waits {format_duration(waited)} for its batch, {format_percent(middle(shares))} of its time",
        "keep the tokens in the store on a local disk, and shorten what a step reads",
        "data.cache=auto",
        steps=case.span,
        otherwise="put the data and the token store on a fast disk of this machine, and shorten what a step reads",
        numbers={"share": middle(shares), "loader_seconds": waited},
    )


@rule("log")
def machine_overloaded(case: Case) -> Finding | None:
    """On a CPU, the process did not get a processor: others use the machine, or it swaps."""
    steps = [step for step in case.steps[1:] if not as_number(step.get("gpu_memory_gb"))]
    busy, waited = _shares_of_time(steps, "cpu_seconds"), _shares_of_time(steps, "loader_seconds")
    if len(busy) < LEAST_STEPS_TIMED or middle(busy) >= WITHOUT_PROCESSOR:
        return None
    if waited and middle(waited) >= SLOW_LOADER:
        return None
    cores = as_number(mapping(case.record.start, "machine").get("cores"))
    others = f"; the machine has {cores:.0f} processor{'s' * (cores > 1)}" if cores else ""
    return found(
        "hint",
        f"in the median step the process had a processor for {format_percent(middle(busy))} of the time{others}",
        "stop other programs, or give this run its own processors (taskset); fewer threads also help: OMP_NUM_THREADS",
        steps=span(steps),
        numbers={"cpu_share": middle(busy), "cores": cores},
    )


# -- the end ---------------------------------------------------------------------------------------------

QUIET_SECONDS = 300.0
QUIET_FACTOR = 20.0  # times the longest silence so far
_RESUME = "continue: stillroom resume RUN"


def _time_of(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


@rule("log", is_live=False)
def stalled_run(case: Case) -> Finding | None:
    """A process holds the folder and has written nothing for far longer than ever before."""
    times = [time for event in case.record.events if (time := _time_of(event.get("time"))) is not None]
    if case.record.end or not case.is_owned or not times or case.now is None:
        return None
    silence = (case.now - times[-1]).total_seconds()
    longest = max(((after - before).total_seconds() for before, after in pairwise(times)), default=0.0)
    if silence <= max(QUIET_SECONDS, QUIET_FACTOR * longest):
        return None
    has_others = (as_number(case.schedule.get("processes")) or 1) > 1
    waits = "; a run in several processes waits for the slowest at most train.peer_timeout_minutes"
    return found(
        "problem",
        f"the last event ({clean(case.record.events[-1].get('event'))}) is {format_duration(silence)} old; the longest "
        f"silence before was {format_duration(longest)}, and a process still holds the folder",
        f"end that process and {_RESUME}{waits if has_others else ''}",
        "train.peer_timeout_minutes=5" if has_others else "",
        steps=(case.last_step,),
        otherwise=f"end that process and {_RESUME}",
        numbers={"silent_seconds": silence, "longest_before": longest},
    )


@rule("log", is_live=False)
def stopped_early(case: Case) -> Finding | None:
    """The run did not take all its steps."""
    end, done, planned, code = case.record.end, case.last_step, case.planned_steps, case.exit_code
    where = f"at step {done:,} of {planned:,}"
    severity: Severity = "problem"
    advice, setting = _RESUME, ""
    if code and (done < planned or not planned):
        severity = "warning" if code == 75 else "problem"
        reason = clean(end.get("reason") or "no reason recorded")
        place = "" if reason.startswith("stopped at step") else f"stopped {where}: "
        what = f"{place}{reason} (exit code {code})"
        if code in (20, 21, 22, 23):  # the same settings would end the same way
            advice = "change what the reason names and start again with another --out"
        setting = "train.max_minutes=0" if "minutes" in str(end.get("reason")) else ""
    elif end and done < planned:
        patience = case.number("train.early_stopping")
        severity, advice = "warning", "for a longer run, wait for more evaluations"
        what = f"ended {where}: no better student in {patience:.0f} evaluations"
        setting = f"train.early_stopping={2 * int(case.number('train.early_stopping', 1))}"
    elif not end and case.record.events and case.is_owned is False:
        what = f"the log ends {where} without an end: the process was killed or the machine went down"
    else:
        return None
    return found(
        severity,
        what,
        advice,
        setting,
        steps=(done,),
        numbers={"steps": done, "planned": planned, "exit_code": code},
    )
