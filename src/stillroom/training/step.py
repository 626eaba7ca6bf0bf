"""One optimizer step. Read this page first.

Score a window of micro-batches in FP32, gather its gradients, read one small record of evidence from the device, and
carry out the guard's verdict on it. A refused step never calls the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillroom.core.types import Batch, Evidence, LossWeights, Score, StudentView, TermRecord, Verdict
from stillroom.losses.mix import LABEL_LOSS, NUM_LABELS
from stillroom.teachers.base import Signals
from stillroom.training.by_source import Sums, add_score, shared, source_counts, source_means
from stillroom.training.memory import parts_of, within_memory
from stillroom.training.recover import carry_out, examine
from stillroom.training.run import Run, RunState


@dataclass
class Tally:
    """Sums over the micro-batches of a window, kept on the device."""

    loss: Tensor | None = None
    totals: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, Tensor] = field(default_factory=dict)
    by_source: Sums = field(default_factory=dict)

    def add(self, score: Score, batch: Batch) -> None:
        loss = score.loss.detach()
        if batch.sources:
            add_score(self.by_source, batch, score)
        self.loss = loss if self.loss is None else self.loss + loss
        for name, term in score.terms.items():
            self.totals[name] = self.totals[name] + term.total if name in self.totals else term.total
        for name, count in score.counters.items():
            self.counters[name] = self.counters[name] + count if name in self.counters else count


@dataclass(frozen=True)
class StepOutcome:
    """The evidence of one attempt and the verdict on it."""

    verdict: Verdict
    evidence: Evidence
    loss_weights: LossWeights
    terms: dict[str, TermRecord]
    learning_rate: float
    num_targets: int


def train_step(run: Run, state: RunState, window: Sequence[Batch]) -> StepOutcome:
    """Attempt one optimizer step over a window of micro-batches."""
    run.hooks.before_step(run, state.applied + 1)
    window = run.hooks.window(window, run.student.vocab_size)
    evidence, loss_weights = attempt(run, state, window)
    rate = run.hooks.rate_factor(run.rate_factor(state))
    verdict = run.guard.judge(evidence)
    if verdict.action == "examine":
        verdict = run.guard.diagnose(evidence, verdict.reason, examine(run, state))
        if verdict.action == "keep":
            run.log.write("note", text=f"step {evidence.step} was examined and is kept: {verdict.reason}")
    state.is_changing = True
    state.attempted += 1
    run.teacher.end_window()
    run.teacher.training.end(verdict, evidence, rate)
    if verdict.action == "keep":
        _tell_fallback(run, state, evidence, loss_weights)
        _apply(run, state, evidence, rate)
        run.teacher.training.after_update()
        run.guard.accept(evidence)
        state.applied += 1
        state.cursor += 1
        state.attempt = 0
        state.tokens += evidence.num_targets
    else:
        all_batches = run.parallel.whole_window(run.loader, state.cursor, window)
        carry_out(run, state, all_batches, evidence, verdict)
    run.optimizer.zero_grad()
    state.is_changing = False

    terms = TermRecord.table(dict(evidence.terms), loss_weights.weights)
    peak = run.config.train.learning_rate
    return StepOutcome(verdict, evidence, loss_weights, terms, peak * rate, evidence.num_targets)


def _tell_fallback(run: Run, state: RunState, evidence: Evidence, loss_weights: LossWeights) -> None:
    """Log once in a process what positions without a usable teacher are learned from. Step records count them."""
    if not evidence.bad_teacher_rows or state.has_told_fallback:
        return
    state.has_told_fallback = True
    even = "" if loss_weights.weight("ce") else ", though objectives.ce.weight is 0 here"
    run.log.write(
        "note",
        text=f"the teacher gave no usable answer at {evidence.bad_teacher_rows:,} of {evidence.num_targets:,} "
        f"positions of step {evidence.step}: such positions are taught by their labels{even}. Later ones are counted "
        "as bad_teacher_rows of a step",
    )


def attempt(run: Run, state: RunState, window: Sequence[Batch]) -> tuple[Evidence, LossWeights]:
    """Forward and backward of a window. Leave the gradients in place and apply nothing."""
    loss_weights = run.loss_weights(state)
    # Counts of the whole window over all processes, before any forward: the only divisor.
    counts = run.mix.counts(window)
    if run.config.is_mixed:
        counts |= source_counts(run, window)
    counts = run.parallel.counts(counts)
    tally = within_memory(run, state, lambda: _gather(run, state, window, loss_weights, counts))
    run.hooks.gradients(run.optimizer)
    run.parallel.sum_gradients(run.optimizer)
    return _read_evidence(run, state, tally, loss_weights, counts), loss_weights


def _gather(
    run: Run, state: RunState, window: Sequence[Batch], loss_weights: LossWeights, counts: dict[str, int]
) -> Tally:
    """Forward and backward of every micro-batch of a window."""
    tally = Tally()
    if run.config.data.label_sources:  # a window may hold labels alone
        tally.totals = {
            term: torch.zeros((), device=run.device) for term, weight in loss_weights.weights.items() if weight
        }
    with run.parallel.window():
        run.teacher.begin_window(window, state.cursor)
        run.teacher.training.begin(window, state.applied, state.cursor)
        run.parallel.seed(run.config.train.seed, state.attempted)
        batches = run.parallel.scored(list(parts_of(window, state)))
        for number, batch in enumerate(batches, start=1):
            tally.add(_learn(run, batch, loss_weights, counts, is_last=number == len(batches)), batch)
    return tally


def _learn(run: Run, batch: Batch, loss_weights: LossWeights, counts: dict[str, int], *, is_last: bool) -> Score:
    """Forward and backward of one micro-batch; gradients of several processes are summed in the last backward."""
    micro = MicroStep(run, batch.to(run.device), loss_weights, counts)
    training = micro.teacher.training
    with training.joint_graph(micro.batch):
        micro.answers = training.answers(micro.batch, micro.needs.teacher)
        run.precision.backward(run.parallel.forward(micro.loss, is_last=is_last))
    training.after_student(micro.batch, micro.view, num_targets=counts["ce"])
    return micro.score


class MicroStep:
    """The forward of one micro-batch: `loss` leaves the student's view and its score behind.

    DDP and FSDP2 follow only what runs inside of the forward that they wrap, and the fused head multiplies with the
    student's head outside of the student's own forward: so all of `loss` runs inside of `parallel.forward`.
    """

    view: StudentView
    score: Score

    def __init__(self, run: Run, batch: Batch, loss_weights: LossWeights, counts: dict[str, int]) -> None:
        self.run, self.batch, self.loss_weights, self.counts = run, batch, loss_weights, counts
        self.needs, self.teacher = run.mix.needs(loss_weights), run.teacher_of(loss_weights, batch)
        self.answers: Signals = ()

    def loss(self) -> Tensor:
        run, batch, training = self.run, self.batch, self.teacher.training
        with run.precision.autocast():
            view = run.student.observe(batch, self.needs.student)
        self.view = run.hooks.view(view)
        signals = training.signals_after_student(self.answers, batch, self.view, self.needs.teacher)
        scores = [
            run.mix.score(self.view, run.hooks.signal(signal), batch, self.loss_weights, self.counts)
            for signal in signals
        ]
        self.score = Score.average(scores)
        return self.score.loss + training.extra_loss(batch, self.view, num_targets=self.counts["ce"])


def _read_evidence(
    run: Run, state: RunState, tally: Tally, loss_weights: LossWeights, counts: dict[str, int]
) -> Evidence:
    """Pack what the guard needs into one tensor and read it: the only host read of a step.

    Terms, counters and squared norms are summed over all processes, so all of them read the same.
    """
    norms = run.parallel.mean_of_norms(run.precision.squared_norms(run.optimizer))
    zero = torch.zeros((), device=run.device)
    summed = {"loss": tally.loss if tally.loss is not None else zero}
    summed |= {f"counter.{name}": count for name, count in ({"bad_teacher_rows": zero} | tally.counters).items()}
    summed |= {f"term.{name}": total for name, total in tally.totals.items()}
    summed |= {f"source.{key}": total for key, total in sorted(tally.by_source.items())}
    if run.config.is_mixed:
        summed = shared(run, summed, zero)
    summed |= {f"norm.{name}": square for name, square in norms.items()}
    named = summed | {f"sample.{name}": share for name, share in state.sampled.items()}
    stacked = torch.stack([value.detach().reshape(()).to(run.device, torch.float32) for value in named.values()])
    run.parallel.sum_(stacked[: len(summed)])
    values = dict(zip(named, stacked.tolist(), strict=True))
    counters = _under("counter.", values)
    means = {name: total / max(counts[name], 1) for name, total in _under("term.", values).items()}
    scale = run.precision.loss_scale
    group_norms = {name: math.sqrt(values[f"norm.{name}"]) / scale for name in norms}
    return Evidence(
        step=state.applied + 1,
        loss=values["loss"],
        grad_norm=math.sqrt(sum(norm * norm for norm in group_norms.values())),
        num_targets=counts["ce"],
        loss_scale=scale,
        terms=means,
        group_norms=group_norms,
        is_scaled=run.precision.scales_loss,
        is_scale_at_floor=run.precision.scales_loss and run.precision.scaler.is_at_floor,
        bad_teacher_rows=int(counters.pop("bad_teacher_rows")),
        label_loss=_label_loss(counters),
        counters=counters,
        phase=loss_weights.phase,
        attempt=state.attempt,
        samples={name: values[f"sample.{name}"] for name in state.sampled},
        sources=source_means(_under("source.", values), counts) if run.config.is_mixed else {},
    )


def _label_loss(counters: dict[str, float]) -> float | None:
    """The mean cross-entropy of what is learned from the teacher alone; None where it is a term, or nothing is."""
    total, count = counters.pop(LABEL_LOSS, None), counters.pop(NUM_LABELS, 0.0)
    return total / count if total is not None and count else None


def _under(prefix: str, values: dict[str, float]) -> dict[str, float]:
    """The values whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _apply(run: Run, state: RunState, evidence: Evidence, rate: float) -> None:
    """Clip each group to the bound and update. Every `log_steps`, sample how much of the update was stored."""
    bound = run.config.train.max_grad_norm
    factors = {name: min(1.0, bound / (norm + 1e-12)) for name, norm in evidence.group_norms.items()}
    is_sampled = state.applied % run.config.telemetry.log_steps == 0
    state.reach.extend(run.rate_factor(state))
    state.sampled = run.precision.step(run.optimizer, rate, factors, is_sampled=is_sampled)
    run.hooks.mid_update()
