"""A mixture-of-experts teacher whose gates choose other experts, or are trained while the student learns.

Measured on small models: gates tuned on the labels recover part of the loss of a teacher on a foreign domain; the
student's term has shown no gain; without the truth and anchor terms the teacher becomes the student. So every training
mode has both, is checked on held-out text, and is undone when the teacher gets worse.

A teacher outside of a run:

    teacher = RouterTeacher(model, RouterConfig(mode="sar"), vocab_size=512, device=torch.device("cpu"),
                            options=GateOptions(learning_rate=1e-2), is_described=True)
    training = teacher.training
    training.start(held_out)                                  # its loss before anything is trained
    for step, batch in enumerate(batches):
        training.begin([batch], step)
        view = student.observe(batch, Needs())
        score = Score.average([mix.score(view, signal, batch, weights, counts)
                               for signal in training.answers(batch, Needs())])
        score.loss.backward(); optimizer.step(...)
        training.learn(batch, view, num_targets=batch.num_scored)
        training.update_gates(is_kept=True, rate_factor=1.0)
    training.watch(teacher.assess(held_out))                  # restores and freezes a teacher that got worse

`probe_gates` measures beforehand whether training the gates helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from stillroom.config import Config
from stillroom.config.schema import TRAINING_MODES, RouterConfig
from stillroom.core.errors import CannotSave, ConfigError
from stillroom.core.files import reason_of, replaced_folder
from stillroom.core.shortages import explained
from stillroom.core.types import Batch, DenseSignal, Evidence, Needs, PairedSignal, StudentView, Term, Verdict
from stillroom.data.corpus import other_of
from stillroom.losses.two_tokenizers import (
    SpanSlots,
    binarised_kl,
    head_values,
    num_spans,
    taken_log_probs,
    teacher_surprisals,
)
from stillroom.models import LoadedModel, Student
from stillroom.models.anatomy import layers_if_any
from stillroom.models.routers import Routing, describe, find_gates, routed
from stillroom.models.student import recomputed
from stillroom.parallel import Parallel
from stillroom.teachers.base import RunContext, SignalKind, Signals, Teacher, TeacherTraining
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.paired import as_paired
from stillroom.teachers.router.gates import GateOptions, TrainedGates
from stillroom.teachers.router.terms import (
    Aims,
    Assessment,
    Direction,
    TermSums,
    assess,
    both_ways,
    check_precision,
    downhill_offsets,
    lookahead_direction,
    own_terms,
    weighted,
)

EXPERIMENTAL_MODES = frozenset({"sar-transient", "sar-meta"})

_TRIAL_TOKENS = 32
_AUGMENTED_PASSES = 2  # passes of knowledge-augmentation: each costs a whole teacher forward
_DRAWN_SHARE = 0.05  # of the tokens, whose experts are then drawn from the gate instead of chosen
_PROBE_FLOOR = 0.1  # the probe's learning rate falls along a cosine to this share


class RouterTeacher(Teacher):
    """A live teacher whose gates may be changed or trained."""

    kind: SignalKind = "dense"
    answers_last = False  # its gates learn

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
        parallel: Parallel | None = None,
    ) -> None:
        self.config, self.seed, self.tell, self.parallel = config, seed, tell, parallel or Parallel()
        self._original = LiveTeacher(
            model, vocab_size=vocab_size, device=device, offload=offload, is_described=is_described
        )
        self.moe_gates = find_gates(model, config.patterns)
        self.gates = TrainedGates(model, self.moe_gates, options, device, tell)
        self.is_frozen = False
        self._blocks = layers_if_any(model)
        self.own_training: RouterTraining = RouterTraining(self)
        tell(describe(self.moe_gates))
        if config.mode in EXPERIMENTAL_MODES:
            tell(f"teacher.router.mode {config.mode} is experimental: it has shown no gain and may hurt over a run")
        _try_out(self)

    @property
    def training(self) -> RouterTraining:
        return self.own_training

    @property
    def trains(self) -> bool:
        return self.config.mode in TRAINING_MODES and not self.is_frozen

    @property
    def original(self) -> LiveTeacher:
        return self._original

    def observe(self, batch: Batch, needs: Needs) -> DenseSignal:
        """The teacher with its present gates, without gradient and without randomness."""
        routing = self.routing()
        if not routing.weights and routing.num_chosen is None:
            return self.original.observe(batch, needs)
        with routed(self.moe_gates, routing):
            return self.original.observe(batch, needs)

    def routing(self) -> Routing:
        """What the mode does at the gates, without randomness."""
        match self.config.mode:
            case "all-experts":
                return Routing(num_chosen=lambda num_experts: num_experts)
            case "knowledge-augmentation":
                return Routing(num_chosen=lambda num_experts: num_experts - 1)
        return Routing(weights=self.gates.weights) if self.trains else Routing()

    @contextmanager
    def opened(self, routing: Routing) -> Iterator[Routing]:
        """Keep the teacher ready for a backward in the body: on the device, recomputed if configured, routed."""
        is_recomputed = self.config.gradient_checkpointing
        with self.original.at_work(), recomputed(self._blocks, is_recomputed), routed(self.moe_gates, routing):
            yield routing

    def assess(self, held_out: Iterable[Batch]) -> Assessment:
        """On all of the held-out text, in every process; the first one's loss counts, so that all decide alike."""
        found = assess(self, held_out)
        return replace(found, nll=self.parallel.broadcast(found.nll))

    def restore_and_freeze(self, why: str) -> None:
        self.gates.restore()
        self.is_frozen = True
        self.tell(f"the teacher's gates are restored and stay frozen: {why}")

    def as_model(self) -> Student:
        return self.original.as_model()

    def at_work(self) -> AbstractContextManager[None]:
        return self.original.at_work()

    def summary(self) -> dict[str, Any]:
        return {
            "router": {
                "mode": self.config.mode,
                "is_frozen": self.is_frozen,
                "updates": self.gates.num_applied,
                "skipped": self.gates.num_skipped,
                "mended": self.gates.num_mended,
                "teacher_nll_start": self.training.start_nll,
                "probe": self.training.probed,
            }
        }


class RouterTraining(TeacherTraining):
    """Trains the gates of a router teacher, and asks it as its mode says.

    With the parts of a `run` it also looks ahead (sar-meta), probes, checks itself on held-out text and writes events.
    """

    def __init__(self, teacher: RouterTeacher, run: RunContext | None = None) -> None:
        if run is not None and teacher.config.mode == "sar-meta":
            check_precision(run.precision)
        super().__init__(teacher)
        self.router, self.config, self.gates = teacher, teacher.config, teacher.gates
        self.parallel = teacher.parallel
        self._run = run
        self.start_nll: float | None = None
        self.probed: dict[str, Any] | None = None
        # of the present window
        self.is_due = False  # whether the gates learn from it
        self._num_tokens = 0
        self._loss = torch.zeros((), device=teacher.original.device)
        self._direction: Direction = {}  # of its lookahead batch, in sar-meta
        # of the present micro-batch, in sar-joint
        self._live: Routing | None = None
        self._answer: DenseSignal | None = None
        self._anchor_answer: DenseSignal | None = None
        self._sums = TermSums()  # of terms since the last report

    # -- answering ---------------------------------------------------------------------------------------

    def answers(self, batch: Batch, needs: Needs) -> Signals:
        """One; several with knowledge-augmentation; none in sar-transient, which needs the student's view first."""
        teacher = self.router
        if self.config.mode == "sar-transient":
            return []
        if self.config.mode == "knowledge-augmentation":
            signals = []
            for number in range(_AUGMENTED_PASSES):
                routing = teacher.routing()
                routing.sampled_share = _DRAWN_SHARE
                # Seed by the batch: a resumed run draws the same experts.
                routing.seed = (teacher.seed * 1_000_003 + batch.index) * 101 + number
                with routed(teacher.moe_gates, routing):
                    signals.append(teacher.original.observe(batch, needs))
            return signals
        if self._live is not None:
            self._answer = teacher.original.answer(batch, needs)
            return [weighted(self._answer, self.config.student_weight)]
        return [teacher.observe(batch, needs)]

    def signals_after_student(self, answers: Signals, batch: Batch, view: StudentView, needs: Needs) -> Signals:
        return [self._moved_answer(batch, view, needs)] if self.config.mode == "sar-transient" else answers

    def _moved_answer(self, batch: Batch, view: StudentView, needs: Needs) -> DenseSignal:
        """An answer with each token's gate logits moved a bounded step downhill. No weight changes."""
        moved, unmoved = downhill_offsets(self.router, batch, view)
        for term in unmoved:
            self._sums.add("unmoved_tokens", term)
        with routed(self.router.moe_gates, Routing(offsets=moved)):
            return self.router.original.observe(batch, needs)

    # -- learning ----------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        self.begin_rows(window, step, cursor)

    def begin_rows(self, rows: Sequence[Batch], step: int, cursor: int = 0) -> None:
        """Begin a window of rows as the teacher reads them.

        In sar-meta, also compute the lookahead direction from the first batch of the next window.
        """
        self.is_due = self.router.trains and (step + 1) % self.config.every == 0
        own = sum(int(batch.attention_mask.cpu().sum()) for batch in rows)
        self._num_tokens = self.parallel.counts({"tokens": own})["tokens"]
        self._loss = torch.zeros_like(self._loss)
        self.gates.discard()
        self._direction = {}
        if self._run is not None and self.config.mode == "sar-meta" and self.is_due:
            run, lookahead_batch = self._run, self._run.window(cursor + 1)[0]
            self._direction = lookahead_direction(
                run.student, run.optimizer, run.precision, lookahead_batch, run.learning_rate
            )

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        """In sar-joint the student's backward goes through the gates."""
        return self._joined(batch) if self.config.mode == "sar-joint" and self.is_due else nullcontext()

    @contextmanager
    def _joined(self, batch: Batch) -> Iterator[None]:
        self._anchor_answer = self._anchor(batch)  # before the trained gates are in place
        with self.router.opened(Routing(weights=self.gates.weights)) as routing:
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
        self._add_loss(own, terms)
        return own

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        if self.config.mode != "sar-meta":
            with self.beside_student():
                self.learn(batch, view, num_targets=num_targets)
        elif self._run is not None and self.is_due and self._direction:  # empty before the student's first update
            forward, backward = both_ways(self._run.student, self._run.precision, batch, self._direction)
            self.learn(batch, forward, num_targets=num_targets, opposite=backward)

    def beside_student(self) -> AbstractContextManager[None]:
        """Around a comparison with the student's view: where the student is sharded, its head is gathered again."""
        return self.parallel.gathered() if self.is_due and self.config.mode == "sar" else nullcontext()

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
        with torch.enable_grad(), self.router.opened(Routing(weights=self.gates.weights)) as routing:
            answer = self.router.original.answer(batch, Needs())
            loss, terms = own_terms(aims, answer, view, anchor, routing, batch, num_targets, self._num_tokens, opposite)
            if student_term is not None and self.config.mode == "sar" and self.config.student_weight:
                mean, terms["student"] = student_term(answer)
                loss = loss + self.config.student_weight * mean
            if loss.requires_grad:
                (loss * self.gates.loss_scale).backward()  # type: ignore[no-untyped-call]
        self._add_loss(loss, terms)

    def end(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        self.update_gates(
            is_kept=verdict.action == "keep",
            rate_factor=rate_factor,
            joint_scale=evidence.loss_scale,
            bad_rows=evidence.bad_teacher_rows,
        )

    def update_gates(self, *, is_kept: bool, rate_factor: float, joint_scale: float = 1.0, bad_rows: int = 0) -> None:
        """Update the gates from the gradient of a window, or drop it with a refused step."""
        if bad_rows and self.router.trains:
            self.gates.mend()
        if not is_kept:
            self.gates.discard()
            return
        if self.is_due and self.parallel.size > 1:
            self._loss = self.gates.sum_gradients(self.parallel, self._loss)
        if not self.gates.has_gradient:
            return
        scale = joint_scale if self.config.mode == "sar-joint" else self.gates.loss_scale
        self.gates.apply(rate_factor, self._loss, scale)
        if self.gates.is_hopeless:
            self.router.restore_and_freeze("its updates are not finite, many times in a row")

    def aims(self, *, has_student: bool) -> Aims:
        config = self.config
        student = config.student_weight if has_student and config.mode in ("sar", "sar-meta") else 0.0
        return Aims(
            config.truth_weight, student, config.anchor_weight, config.load_balance_weight, config.entropy_weight
        )

    def _anchor(self, batch: Batch) -> DenseSignal | None:
        """The original teacher's answer to the same batch."""
        return self.router.original.observe(batch, Needs()) if self.config.anchor_weight else None

    def _add_loss(self, loss: Tensor, terms: Mapping[str, Term]) -> None:
        self._loss = self._loss + loss.detach()
        for name, term in terms.items():
            self._sums.add(name, term)

    # -- between windows ---------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Measure the teacher before training, and probe whether training its gates helps."""
        run = self._run
        if run is None:
            return
        held_out = run.held_out()
        run.write("router", step=0, **self.report(self.start(held_out)), alarm=False)
        steps = self.config.probe_steps
        if not steps or not self.router.trains:
            return
        probed = probe_gates(self.router, (run.window(index) for index in range(steps)), held_out, steps)
        run.write("router_probe", **probed)
        run.tell(probe_verdict(probed))

    def look_after(self, step: int, *, is_eval: bool) -> None:
        """Repair non-finite gates; at an evaluation, also restore gates that made the teacher worse."""
        self.gates.mend()
        if self._run is None or not is_eval:
            return
        assessment = self.router.assess(self._run.held_out())
        record = self.report(assessment)
        alarm = self.watch(assessment)
        self._run.write("router", step=step, **{**record, "is_frozen": self.router.is_frozen}, alarm=alarm)

    def start(self, held_out: Iterable[Batch]) -> Assessment:
        """Measure the teacher before training. `watch` compares with this loss."""
        assessment = self.router.assess(held_out)
        self.start_nll = assessment.nll
        return assessment

    def watch(self, assessment: Assessment) -> bool:
        """Restore and freeze gates that made the teacher worse. Return whether they did."""
        if not self.router.trains or self.start_nll is None:
            return False
        bound = self.start_nll + self.config.max_degradation
        if math.isfinite(assessment.nll) and assessment.nll <= bound:
            return False
        self.router.restore_and_freeze(
            f"its held-out loss is {assessment.nll:.4f}, above {self.start_nll:.4f} + {self.config.max_degradation:g}"
        )
        return True

    def reset(self, *, is_frozen: bool) -> None:
        """Restore the original teacher and drop the sums of its terms."""
        self.gates.restore()
        self.router.is_frozen = is_frozen
        self._sums = TermSums()

    def report(self, assessment: Assessment) -> dict[str, Any]:
        """The fields of a router event. Restart the sums of the terms."""
        terms = self._sums.means(self.parallel, self._loss.device)
        self._sums = TermSums()
        gates = self.gates
        return {
            "mode": self.config.mode,
            "is_frozen": self.router.is_frozen,
            "teacher_nll": assessment.nll,
            "teacher_nll_start": self.start_nll,
            "kl_to_original": assessment.kl_to_original,
            "updates": gates.num_applied,
            "skipped": gates.num_skipped,
            "mended": gates.num_mended,
            "grad_norm": gates.last_norm,
            "terms": terms,
            "layers": [
                {**vars(layer), "drift": gates.drift(gate.weight)}
                for gate, layer in zip(self.router.moe_gates, assessment.layers, strict=True)
            ],
        }

    # -- state -------------------------------------------------------------------------------------------

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self.gates.weights

    def tensors(self) -> dict[str, Tensor]:
        return self.gates.tensors()

    def state_dict(self) -> dict[str, Any]:
        return {
            "gates": self.gates.state_dict(),
            "is_frozen": self.router.is_frozen,
            "start_nll": self.start_nll,
            "probed": self.probed,
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        self.gates.load(tensors, state["gates"], keeps_history=keeps_history)
        self.router.is_frozen = bool(state["is_frozen"])
        self.start_nll = None if state["start_nll"] is None else float(state["start_nll"])
        self.probed = None if state["probed"] is None else dict(state["probed"])

    def save(self, folder: Path) -> None:
        """Write the trained gates to `router/` in the run's folder."""
        if self.config.mode not in TRAINING_MODES:
            return
        try:
            with replaced_folder(folder / "router") as aside:
                self.gates.save(aside)
        except (OSError, SafetensorError) as error:
            raise CannotSave(
                f"cannot write the trained gates: {reason_of(error)}",
                where=str(folder / "router"),
                advice=["free some space on that disk, then `stillroom resume` the run"],
            ) from error


# -- for a run ---------------------------------------------------------------------------------------


def router_teacher(
    config: Config, loaded: LoadedModel, vocab_size: int, run: RunContext, *, is_paired: bool
) -> RouterTeacher:
    """The router teacher of a run. `is_paired`: it has its own tokenizer."""
    num_processes, train = run.parallel.size, config.train
    if num_processes > 1 and config.teacher.router.mode == "sar-meta":
        raise ConfigError(
            f"teacher.router.mode = 'sar-meta' moves the student by hand in one process, and there are {num_processes}",
            where="teacher.router.mode",
            advice=["--set teacher.router.mode=sar", "start a single process"],
        )
    teacher = RouterTeacher(
        loaded.network,
        config.teacher.router,
        vocab_size=vocab_size,
        device=run.precision.device,
        options=GateOptions(
            learning_rate=train.router_learning_rate or train.learning_rate,
            max_grad_norm=train.max_grad_norm,
            betas=(train.beta1, train.beta2),
            epsilon=train.epsilon,
        ),
        offload=config.teacher.placement == "offload",
        is_described=loaded.is_described,
        seed=train.seed,
        tell=run.tell,
        parallel=run.parallel,
    )
    teacher.own_training = (PairedRouterTraining if is_paired else RouterTraining)(teacher, run)
    return teacher


# -- before training -------------------------------------------------------------------------------------


def _try_out(teacher: RouterTeacher) -> None:
    """Raise if the mode cannot choose the teacher's experts. Tell of gates without a gradient."""
    ids = torch.arange(_TRIAL_TOKENS).remainder(teacher.original.vocab_size).unsqueeze(0)
    batch = Batch(ids, torch.ones_like(ids), ids, torch.zeros_like(ids), ("trial",)).to(teacher.original.device)
    try:
        teacher.observe(batch, Needs())
    except (RuntimeError, IndexError) as error:
        if explained(error, "") is not None:  # memory: the run's end says so, and it is not a fault of the gates
            raise
        raise ConfigError(
            f"this teacher's experts cannot be chosen as teacher.router.mode {teacher.config.mode} asks: {error}",
            where="teacher.router.mode",
            advice=["modes that keep the teacher's own choice: frozen, truth, sar"],
        ) from error
    if not teacher.trains:
        return
    gates = teacher.gates
    with torch.enable_grad(), teacher.opened(Routing(weights=gates.weights)):
        answer = teacher.original.answer(batch, Needs())
        answer.hidden.float().square().sum().backward()  # type: ignore[no-untyped-call]
    slopes = {gate.name: gates.weights[gate.weight].grad for gate in teacher.moe_gates}
    without_gradient = [name for name, slope in slopes.items() if slope is None or not bool(slope.any())]
    gates.discard()
    if without_gradient:
        teacher.tell(
            f"on a trial text the teacher's answers do not depend on the logits of {len(without_gradient)} of "
            f"{len(slopes)} gates, beyond which expert is first: {without_gradient[0]}; little can be trained there"
        )


def probe_gates(
    teacher: RouterTeacher, windows: Iterable[Sequence[Batch]], held_out: Sequence[Batch], num_steps: int
) -> dict[str, Any]:
    """Tune the gates on the labels alone, measure the gain on held-out text, and restore the gates.

    A teacher whose held-out loss does not fall by the threshold is frozen, unless `teacher.router.force` is set.
    """
    training, config = teacher.training, teacher.config
    start = training.start_nll if training.start_nll is not None else training.start(held_out).nll
    done = 0
    for done, window in enumerate(windows, start=1):
        _tune(teacher, window, (done - 1) / max(num_steps, 1))
        if done >= num_steps or not teacher.trains:
            break
    after, updates = teacher.assess(held_out).nll, teacher.gates.num_applied
    gain = start - after
    is_worthwhile = math.isfinite(gain) and gain >= config.probe_threshold
    training.reset(is_frozen=not (is_worthwhile or config.force))
    training.probed = {
        "steps": done,
        "updates": updates,
        "nll_before": start,
        "nll_after": after,
        "gain": gain,
        "threshold": config.probe_threshold,
        "is_worthwhile": is_worthwhile,
        "is_forced": config.force,
    }
    return training.probed


def _tune(teacher: RouterTeacher, window: Sequence[Batch], progress: float) -> None:
    """One router step on the labels of a window, whose rows are those that the teacher reads."""
    training = teacher.training
    training.begin_rows(window, teacher.config.every - 1)  # always due
    own = sum(batch.num_scored for batch in window)
    num_targets = teacher.parallel.counts({"targets": own})["targets"]
    for batch in window:
        if batch.num_scored:
            training.learn(batch.to(teacher.original.device), None, num_targets=num_targets, aims=Aims(truth=1.0))
    falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    training.update_gates(is_kept=True, rate_factor=_PROBE_FLOOR + (1.0 - _PROBE_FLOOR) * falling)


def probe_verdict(probed: dict[str, Any]) -> str:
    """The result of the probe, as a sentence."""
    finding = (
        f"router probe: {probed['updates']} updates of the gates on the labels moved the teacher's held-out loss from "
        f"{probed['nll_before']:.4f} to {probed['nll_after']:.4f} (gain {probed['gain']:+.4f}, "
        f"{probed['threshold']:g} asked for)"
    )
    if probed["is_worthwhile"]:
        return f"{finding}: its gates are trained"
    cost = "it takes about 1.7 times as long as a frozen teacher and rules out a teacher cache"
    if probed["is_forced"]:
        reason = "and is done because teacher.router.force is set"
        return f"{finding}: training the router is pointless here ({cost}), {reason}"
    return f"{finding}: training the router is pointless here ({cost}); the teacher stays frozen"


# -- paired ----------------------------------------------------------------------------------------
# Training of a teacher's gates where the teacher has its own tokenizer.
#
# The gates learn from the teacher's own rows: labels, anchor, balance and entropy are counted in its own tokens. What
# the student has to do with it is compared on spans. In `sar-joint` the gradient of every objective on spans continues
# into the gates; in `sar` the student's term is the KL between "this span comes" and "another does" of teacher and
# student, in place of the KL of their distributions over tokens, which they do not share.


class PairedRouterTraining(RouterTraining):
    """Trains the gates on the teacher's rows of a run's batches."""

    _num_targets = _num_spans = 0  # of the window, in the teacher's rows

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        rows = [other_of(batch) for batch in window]
        own = {"targets": sum(batch.num_scored for batch in rows), "spans": num_spans(window)}
        counts = self.parallel.counts(own)
        self._num_targets, self._num_spans = counts["targets"], counts["spans"]
        self.begin_rows(rows, step, cursor)

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        return super().joint_graph(other_of(batch))

    def answers(self, batch: Batch, needs: Needs) -> Signals:
        return [as_paired(answer) for answer in super().answers(other_of(batch), needs)]

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        return super().extra_loss(other_of(batch), view, num_targets=self._num_targets)

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        def student_term(answer: DenseSignal) -> tuple[Tensor, Term]:
            term = span_divergence(answer, view, batch)
            return term.total / max(self._num_spans, 1), term

        with self.beside_student():
            self.learn(other_of(batch), None, num_targets=self._num_targets, student_term=student_term)


def span_divergence(answer: DenseSignal, view: StudentView, batch: Batch) -> Term:
    """The sum over spans of the KL between "this span comes" and "another does", with gradient to the teacher alone."""
    slots = SpanSlots.of(batch)
    assert batch.other is not None
    told = PairedSignal(answer.hidden, answer.head)
    theirs, is_bad = teacher_surprisals(told, batch.other, slots)
    with torch.no_grad():
        ours = slots.sum_student(-head_values(view.hidden, view.head, taken_log_probs(batch.scored_targets)))
    is_used = slots.is_span & ~is_bad & torch.isfinite(ours)
    values = binarised_kl(torch.where(is_used, theirs, 1.0), torch.where(is_used, ours, 1.0).to(theirs.dtype), 1.0)
    return Term(torch.where(is_used, values, torch.zeros_like(values)).sum(), is_used.sum().to(values.dtype))
