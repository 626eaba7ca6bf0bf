"""A mixture-of-experts teacher whose gates choose other experts, or are trained while the student learns.

Measured on small models: gates tuned on the labels recover part of the loss of a teacher on a foreign domain; the
student's term has shown no gain; without the truth and anchor terms the teacher becomes the student. So every training
mode has both, is checked on held-out text, and is undone when the teacher gets worse.

A teacher outside of a run:

    teacher = RouterTeacher(model, RouterConfig(mode="sar"), vocab_size=512, device=torch.device("cpu"),
                            options=GateOptions(learning_rate=1e-2), is_described=True)
    teacher.start(held_out)                                   # its loss before anything is trained
    for step, batch in enumerate(batches):
        teacher.begin([batch], step)
        view = student.observe(batch, Needs())
        score = Score.average([mix.score(view, signal, batch, lesson, counts)
                         for signal in teacher.answers(batch, Needs())])
        score.loss.backward(); optimizer.step(...)
        teacher.learn(batch, view, num_targets=batch.num_scored)
        teacher.update_gates(is_kept=True, rate_factor=1.0)
    teacher.watch(teacher.assess(held_out))                   # restores and freezes a teacher that got worse

`probe_gates` of `teachers.router.probe` measures beforehand whether training the gates helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stillroom.config.teacher import TRAINING_MODES, RouterConfig
from stillroom.models import Student
from stillroom.models.anatomy import layers_if_any
from stillroom.models.recompute import recomputed
from stillroom.models.routers import Routing, describe, find_gates, routed
from stillroom.teachers.base import Answers, SignalKind, Teacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.router.gates import GateOptions, TrainedGates
from stillroom.teachers.router.peers import ALONE, Peers
from stillroom.teachers.router.report import TermSums, event_fields
from stillroom.teachers.router.terms import Aims, Assessment, assess, own_terms, weighted
from stillroom.teachers.router.transient import downhill_offsets
from stillroom.teachers.router.trial import try_out
from stillroom.types import Batch, DenseSignal, Evidence, Needs, StudentView, Term, Verdict

EXPERIMENTAL_MODES = frozenset({"sar-transient", "sar-meta"})


class RouterTeacher(Teacher):
    """A live teacher whose gates may be changed or trained."""

    kind: SignalKind = "dense"

    def __init__(
        self,
        model: Any,
        config: RouterConfig,
        *,
        vocab_size: int,
        device: torch.device,
        options: GateOptions,
        offload: bool = False,
        is_described: bool,
        seed: int = 0,
        tell: Callable[[str], object] = lambda _text: None,
        peers: Peers = ALONE,
    ) -> None:
        self.config, self.seed, self.tell, self.peers = config, seed, tell, peers
        self._original = LiveTeacher(
            model, vocab_size=vocab_size, device=device, offload=offload, is_described=is_described
        )
        self.moe_gates = find_gates(model, config.patterns)
        self.gates = TrainedGates(model, self.moe_gates, options, device, tell)
        self.is_frozen = False
        self.start_nll: float | None = None
        self.probed: dict[str, Any] | None = None
        self._blocks = layers_if_any(model)
        self.is_due = False  # whether the gates learn from this window
        self._num_tokens = 0
        self._loss = torch.zeros((), device=device)
        self._sums = TermSums()  # of terms since the last report
        self._live: Routing | None = None
        self._answer: DenseSignal | None = None
        self._anchor_answer: DenseSignal | None = None
        tell(describe(self.moe_gates))
        if config.mode in EXPERIMENTAL_MODES:
            tell(f"teacher.router.mode {config.mode} is experimental: it has shown no gain and may hurt over a run")
        try_out(self)

    @property
    def trains(self) -> bool:
        return self.config.mode in TRAINING_MODES and not self.is_frozen

    @property
    def needs_student_first(self) -> bool:
        return self.config.mode == "sar-transient"

    @property
    def original(self) -> LiveTeacher:
        return self._original

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> DenseSignal:
        """The teacher with its present gates, without gradient and without randomness."""
        routing = self.routing()
        if not routing.weights and routing.num_chosen is None:
            return self.original.observe(batch, needs)
        with routed(self.moe_gates, routing):
            return self.original.observe(batch, needs)

    def answers(self, batch: Batch, needs: Needs) -> list[DenseSignal]:
        """One; several with knowledge-augmentation; none in sar-transient, which needs the student's view first."""
        if self.needs_student_first:
            return []
        if self.config.mode == "knowledge-augmentation":
            signals = []
            for number in range(self.config.augmentation_passes):
                routing = self.routing()
                routing.sampled_share = self.config.augmentation_lambda
                # Seed by the batch: a resumed run draws the same experts.
                routing.seed = (self.seed * 1_000_003 + batch.index) * 101 + number
                with routed(self.moe_gates, routing):
                    signals.append(self.original.observe(batch, needs))
            return signals
        if self._live is not None:
            self._answer = self.original.answer(batch, needs)
            return [weighted(self._answer, self.config.student_weight)]
        return [self.observe(batch, needs)]

    def signals_after_student(self, answers: Answers, batch: Batch, view: StudentView, needs: Needs) -> Answers:
        return [self._moved_answer(batch, view, needs)] if self.needs_student_first else answers

    def _moved_answer(self, batch: Batch, view: StudentView, needs: Needs) -> DenseSignal:
        """An answer with each token's gate logits moved a bounded step downhill. No weight changes."""
        moved, unmoved = downhill_offsets(self, batch, view)
        for term in unmoved:
            self._sums.add("unmoved_tokens", term)
        with routed(self.moe_gates, Routing(offsets=moved)):
            return self.original.observe(batch, needs)

    def routing(self) -> Routing:
        """What the mode does at the gates, without randomness."""
        match self.config.mode:
            case "all-experts":
                return Routing(num_chosen=lambda num_experts: num_experts)
            case "knowledge-augmentation":
                return Routing(num_chosen=lambda num_experts: num_experts - 1)
        return Routing(weights=self.gates.weights) if self.trains else Routing()

    # -- learning ----------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        self.is_due = self.trains and (step + 1) % self.config.every == 0
        own = sum(int(batch.attention_mask.cpu().sum()) for batch in window)
        self._num_tokens = self.peers.counts({"tokens": own})["tokens"]
        self._loss = torch.zeros_like(self._loss)
        self.gates.discard()

    @contextmanager
    def joint_graph(self, batch: Batch) -> Iterator[None]:
        """In sar-joint the student's backward goes through the gates."""
        if self.config.mode != "sar-joint" or not self.is_due:
            yield
            return
        self._anchor_answer = self._anchor(batch)  # before the trained gates are in place
        with self.opened(Routing(weights=self.gates.weights)) as routing:
            self._live = routing
            try:
                yield
            finally:
                self._live, self._answer, self._anchor_answer = None, None, None

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        """In sar-joint, the router's own terms; none of a batch without a target, as one process takes none."""
        if self._live is None or self._answer is None or not batch.num_scored:
            return 0.0
        own, terms = own_terms(
            self.aims(has_student=False), self._answer, None, self._anchor_answer, self._live, batch, num_targets,
            self._num_tokens,
        )  # fmt: skip
        self._add_router_loss(own, terms)
        return own

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        with self.beside_student():
            self.learn(batch, view, num_targets=num_targets)

    def beside_student(self) -> AbstractContextManager[None]:
        """Around a comparison with the student's view: where the student is sharded, its head is gathered again."""
        return self.peers.gathered() if self.is_due and self.config.mode == "sar" else nullcontext()

    def learn(
        self, batch: Batch, view: StudentView | None, *, num_targets: int,
        aims: Aims | None = None, opposite: StudentView | None = None,
        student_term: Callable[[DenseSignal], tuple[Tensor, Term]] | None = None,
    ) -> None:  # fmt: skip
        """Add one micro-batch to the gates' gradient. `num_targets` are those of the whole window.

        `opposite` is for sar-meta: `view` and `opposite` are then the student one step along the lookahead direction
        and one step against it. `student_term` is for a student of another tokenizer, in place of `view`: the
        share of the window's mean divergence, and the term.
        """
        if not self.is_due or self.config.mode == "sar-joint" or not batch.num_scored:
            return
        aims = aims or self.aims(has_student=view is not None)
        anchor = self._anchor(batch) if aims.anchor else None
        with torch.enable_grad(), self.opened(Routing(weights=self.gates.weights)) as routing:
            answer = self.original.answer(batch, Needs())
            loss, terms = own_terms(aims, answer, view, anchor, routing, batch, num_targets, self._num_tokens, opposite)
            if student_term is not None and self.config.mode == "sar" and self.config.student_weight:
                mean, terms["student"] = student_term(answer)
                loss = loss + self.config.student_weight * mean
            if loss.requires_grad:
                (loss * self.gates.loss_scale).backward()  # type: ignore[no-untyped-call]
        self._add_router_loss(loss, terms)

    def end_window(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        self.update_gates(
            is_kept=verdict.action == "keep",
            rate_factor=rate_factor,
            joint_scale=evidence.loss_scale,
            bad_rows=evidence.bad_teacher_rows,
        )

    def update_gates(self, *, is_kept: bool, rate_factor: float, joint_scale: float = 1.0, bad_rows: int = 0) -> None:
        """Update the gates from the gradient of a window, or drop it with a refused step."""
        if bad_rows and self.trains:
            self.gates.mend()
        if not is_kept:
            self.gates.discard()
            return
        if self.is_due and self.peers.size > 1:
            self._loss = self.gates.sum_gradients(self.peers, self._loss)
        if not self.gates.has_gradient:
            return
        scale = joint_scale if self.config.mode == "sar-joint" else self.gates.loss_scale
        self.gates.apply(rate_factor, self._loss, scale)
        if self.gates.is_hopeless:
            self._restore_and_freeze("its updates are not finite, many times in a row")

    def aims(self, *, has_student: bool) -> Aims:
        config = self.config
        student = config.student_weight if has_student and config.mode in ("sar", "sar-meta") else 0.0
        return Aims(
            config.truth_weight, student, config.anchor_weight, config.load_balance_weight, config.entropy_weight
        )

    def _anchor(self, batch: Batch) -> DenseSignal | None:
        """The original teacher's answer to the same batch."""
        return self.original.observe(batch, Needs()) if self.config.anchor_weight else None

    @contextmanager
    def opened(self, routing: Routing) -> Iterator[Routing]:
        """Keep the teacher ready for a backward in the body: on the device, recomputed if configured, routed."""
        is_recomputed = self.config.gradient_checkpointing
        with self.original.at_work(), recomputed(self._blocks, is_recomputed), routed(self.moe_gates, routing):
            yield routing

    def _add_router_loss(self, loss: Tensor, terms: Mapping[str, Term]) -> None:
        self._loss = self._loss + loss.detach()
        for name, term in terms.items():
            self._sums.add(name, term)

    # -- watching ----------------------------------------------------------------------------------------

    def start(self, held_out: Iterable[Batch]) -> Assessment:
        """Measure the teacher before training. `watch` compares with this loss."""
        assessment = self.assess(held_out)
        self.start_nll = assessment.nll
        return assessment

    def assess(self, held_out: Iterable[Batch]) -> Assessment:
        """On all of the held-out text, in every process; the first one's loss counts, so that all decide alike."""
        found = assess(self, held_out)
        return replace(found, nll=self.peers.broadcast(found.nll))

    def watch(self, assessment: Assessment) -> bool:
        """Restore and freeze gates that made the teacher worse. Return whether they did."""
        if not self.trains or self.start_nll is None:
            return False
        bound = self.start_nll + self.config.max_degradation
        if math.isfinite(assessment.nll) and assessment.nll <= bound:
            return False
        self._restore_and_freeze(f"its held-out loss is {assessment.nll:.4f}, above {self.start_nll:.4f} + "
                        f"{self.config.max_degradation:g}")  # fmt: skip
        return True

    def reset(self, *, is_frozen: bool) -> None:
        """Restore the original teacher and drop the sums of its terms."""
        self.gates.restore()
        self.is_frozen = is_frozen
        self._sums = TermSums()

    def _restore_and_freeze(self, why: str) -> None:
        self.gates.restore()
        self.is_frozen = True
        self.tell(f"the teacher's gates are restored and stay frozen: {why}")

    def report(self, assessment: Assessment) -> dict[str, Any]:
        """The fields of a router event. Start the sums of the terms anew."""
        record = event_fields(self, assessment, self._sums.means(self.peers, self._loss.device))
        self._sums = TermSums()
        return record

    # -- state -------------------------------------------------------------------------------------------

    def as_model(self) -> Student:
        return self.original.as_model()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self.original.at_work():
            yield

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self.gates.weights

    def tensors(self) -> dict[str, Tensor]:
        return self.gates.tensors()

    def state_dict(self) -> dict[str, Any]:
        return {
            "gates": self.gates.state_dict(),
            "is_frozen": self.is_frozen,
            "start_nll": self.start_nll,
            "probed": self.probed,
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        self.gates.load(tensors, state["gates"], keeps_history=keeps_history)
        self.is_frozen = bool(state["is_frozen"])
        self.start_nll = None if state["start_nll"] is None else float(state["start_nll"])
        self.probed = None if state["probed"] is None else dict(state["probed"])
