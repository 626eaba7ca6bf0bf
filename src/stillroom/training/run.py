"""The parts of a run, built once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from torch import Tensor

from stillroom.config import Config
from stillroom.config.schema import NonNegative
from stillroom.core.errors import CannotSave
from stillroom.core.files import LARGEST, Count, Stored, strict
from stillroom.core.locks import Lock
from stillroom.core.types import IGNORED, Batch, LossWeights, Signal, StudentView, is_rollout
from stillroom.data import Corpus, Loader, fixed_batches
from stillroom.data.loader import MixedRows
from stillroom.losses.mix import Mix
from stillroom.models import Student
from stillroom.models.lora import Adapter
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, Precision
from stillroom.precision.storage import local
from stillroom.teachers import NO_TEACHER, Teacher
from stillroom.teachers.several import BySource
from stillroom.telemetry import EventLog
from stillroom.telemetry.events import Stages
from stillroom.training.checkpoint import CheckpointStore, DiskCopies, Mark, Saved, Saves, SnapshotRing, Snapshots
from stillroom.training.evaluate import Evaluation, KeptAnswers, never_stop
from stillroom.training.guard import Guard
from stillroom.training.rollouts import Rollouts
from stillroom.training.schedule import Budget, Curriculum, Schedule

# -- hooks -----------------------------------------------------------------------------------------
# Hooks at fixed places of a run. All are no-ops; `training/faults.py` overrides them to inject faults.


class Hooks:
    """No-ops, in the order in which a run calls them."""

    last_strike: tuple[str, int] | None = None  # the fault that was injected last, and at which step

    def before_step(self, run: Run, step: int) -> None:
        """`step` is the optimizer step that is attempted."""

    def window(self, window: Sequence[Batch], vocab_size: int) -> Sequence[Batch]:
        return window

    def view(self, view: StudentView) -> StudentView:
        return view

    def signal(self, signal: Signal | None) -> Signal | None:
        """Each training signal of the teacher; None where there is none."""
        return signal

    def gradients(self, optimizer: AdamW) -> None:
        """After the last backward of a window, before gradients are summed over processes."""

    def rate_factor(self, factor: float) -> float:
        return factor

    def mid_update(self) -> None:
        """After the student's weights were written, before the step is counted."""

    def in_eval(self) -> None:
        """Before an evaluation."""

    def before_save(self) -> None:
        """Before a save, or the mark of a rollback."""

    def checkpoint_point(self, point: str) -> None:
        """Between the stages of a save, maybe in another thread while later steps are attempted."""

    def after_return(self, step: int) -> None:
        """After a rollback or a reset from `step` to an earlier one."""


# -- pace ------------------------------------------------------------------------------------------
# Intervals of evaluations and checkpoints, and the time needed to stop.
#
# Evaluations are planned from counts (`plan_budget` in training/schedule.py). Checkpoints do not affect training, so
# they are spaced by the clock: without a configured interval they take at most a twentieth of a run.


_SAVING_SHARE = 0.05
_FIRST_SAVE_SECONDS = 60.0  # of training before the first one: until then there is little to lose
_MARGIN = 1.5  # on the time the last save took


@dataclass
class Pace:
    """Intervals in applied steps, and the measured times of the last step and the last save."""

    eval_steps: int = 1
    save_steps: int = 1
    is_save_fixed: bool = True  # the configuration says when, or a rollback depends on it
    step_seconds: float = 0.0
    save_seconds: float = 0.0
    _saved_at: float = field(default_factory=time.monotonic)
    _has_saved: bool = False

    def saved(self, seconds: float) -> None:
        self.save_seconds, self._has_saved = seconds, True
        self._saved_at = time.monotonic()

    def is_save_worth_it(self, *, is_saving: bool = False) -> bool:
        """Whether another save would take no more than its share of the time since the last one.

        Not while one is in flight, which it would have to wait for.
        """
        spent = time.monotonic() - self._saved_at
        is_affordable = self.save_seconds <= _SAVING_SHARE * (spent + self.save_seconds)
        is_affordable &= self._has_saved or spent >= _FIRST_SAVE_SECONDS
        return self.is_save_fixed or (is_affordable and not is_saving)

    def seconds_to_stop(self, *, is_saving: bool = False) -> float:
        """Seconds for one more step, the save in flight, a checkpoint and the student's folder."""
        return self.step_seconds + _MARGIN * (3 if is_saving else 2) * self.save_seconds


# -- reach -----------------------------------------------------------------------------------------
# Bound how much updates can have changed the weights.
#
# AdamW moves a weight by at most a few learning rates in one step: |m| / sqrt(v) is bounded by the betas (Cauchy-
# Schwarz inequality); Muon by its largest singular value. A larger change has another cause: a flipped bit, or a
# learning rate that is not the schedule's. The loss of an untrained student may not show it.


_ROUNDING = 0.01  # of a weight, far more than FP16 storage adds
_EARLY_STEPS = 1000  # in which the bias correction may lengthen a step


@cache
def longest_step(beta1: float, beta2: float) -> float:
    """The largest change of a weight in one AdamW update, in learning rates, for any gradients; inf if unbounded.

    With m and v as sums over past gradients and the bias correction of step t.
    """
    ratio = beta1 * beta1 / beta2 if beta2 else math.inf
    if ratio >= 1.0:
        return math.inf
    worst = gain = (1 - beta1) ** 2 / (1 - beta2) / (1 - ratio)  # after very many steps
    for t in range(1, _EARLY_STEPS + 1):
        worst = max(worst, gain * (1 - ratio**t) * (1 - beta2**t) / (1 - beta1**t) ** 2)
    return math.sqrt(worst)


class Reach:
    """The largest weight of each parameter at the last sound state, and the sum of update sizes since then."""

    def __init__(self) -> None:
        self._peaks: Tensor | None = None
        self._factors = 0.0  # of the schedule, summed over the updates since

    def begin(self, run: Run) -> None:
        """Take the present weights as sound."""
        self._peaks = weight_peaks(run)
        self._factors = 0.0

    def extend(self, rate_factor: float) -> None:
        self._factors += rate_factor

    def holds(self, run: Run) -> bool:
        """Whether every weight is within what updates can have made it. NaN is not."""
        if self._peaks is None:
            return True
        longest = max(longest_step(*run.optimizer.betas), run.optimizer.longest_muon_step)
        step = _MARGIN * longest * max(run.optimizer.rates.values())
        travel = step * self._factors if self._factors else 0.0
        return bool((weight_peaks(run) <= self._peaks * (1.0 + _ROUNDING) + travel).all())


@torch.no_grad()
def weight_peaks(run: Run) -> Tensor:
    """The largest magnitude in what this process holds of each parameter; NaN where one is NaN. [parameters]"""
    trained = (*run.student.model.parameters(), *run.mix.projectors.parameters())
    held = [local(parameter.detach()) for parameter in trained]
    # Without a copy of the largest one, which `abs` would make.
    ends = [tensor.aminmax() for tensor in held if tensor.numel()]
    return torch.stack([torch.maximum(-low, high).float() for low, high in ends])


# -- state -----------------------------------------------------------------------------------------
# Everything that changes during a run; capture and restore it.


@dataclass
class TensorGroups:
    """State in addition to the counters: saved separately, or not saved."""

    best_weights: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)  # teacher and student before training, for the summary
    canary_reference: float = math.inf  # at the last good snapshot
    canary_best: float = math.inf  # of all good snapshots, the one before training included
    # Of this process only:
    initial: Saved | None = None  # kept only where the guard may reset the run
    sampled: dict[str, Tensor] = field(default_factory=dict)  # of the last update, read with the next evidence
    reach: Reach = field(default_factory=Reach)
    pace: Pace = field(default_factory=Pace)
    evaluated: Evaluation | None = None  # the last evaluation of the student
    answers: KeptAnswers = field(default_factory=KeptAnswers)  # of the teacher on the held-out text
    saved_at: tuple[int, ...] = ()  # counters that identify the state of the newest checkpoint
    is_changing: bool = False  # a verdict is carried out, or gates are looked after: this is not the state of one step
    has_told_fallback: bool = False  # that positions without a usable teacher are taught by their labels
    begun_at: int | None = None  # position in the log when the present attempt began; None between attempts
    between_batches: Callable[[], None] = never_stop  # called between held-out batches; may raise to stop


_HELD = {known.name for known in fields(TensorGroups)}


@dataclass
class RunState(TensorGroups):
    """The progress of a run. Only the engine writes here."""

    applied: int = 0  # optimizer steps applied; schedule and curriculum depend on it
    attempted: int = 0
    cursor: int = 0  # the next window of the data order
    attempt: int = 0  # how often that window was tried already
    tokens: int = 0
    skipped: int = 0
    retried: int = 0
    rollbacks: int = 0
    undone: int = 0  # rollbacks decided between two steps, without a refused attempt
    seconds: float = 0.0
    best_step: int = -1
    best_perplexity: float | None = None
    evaluations_since_best: int = 0
    last_perplexity: float | None = None  # of the last evaluation; None when it could not be scored everywhere
    best_rank: float | None = None  # by `eval.select`, lower is better: of the best student
    last_rank: float | None = None  # of the last evaluation; None when it cannot be chosen
    is_off_course: bool = True  # whether the last student is worse than the first by what it is trained for, too
    quarantined: list[int] = field(default_factory=list)
    backoff_at: int = -1  # applied step of the last learning-rate backoff
    fallback_until: int = -1  # applied step until which the teacher is not used
    rolled_back_to: int = -1  # step of the snapshot the last rollback returned to
    snapshots_refused: int = 0  # in a row, because the canary did worse
    micro_batch_parts: int = 1  # parts that each micro-batch of the loader is taken in, so that it fits into memory
    shortages: int = 0  # how often memory ran out
    phase: str = ""
    is_finished: bool = False
    owes_evaluation: bool = False  # the evaluation of the last step was interrupted
    round: int = -1  # the round of rollouts in use; -1: none yet
    set_weights: dict[str, float] = field(default_factory=dict)  # of terms, by a caller's loop: they win
    weights_set_at: int = -1  # applied steps when the last of them was set

    def counters(self) -> dict[str, Any]:
        """What a checkpoint stores as JSON under `state`."""
        values = {known.name: getattr(self, known.name) for known in fields(self) if known.name not in _HELD}
        return {name: _own(value) for name, value in values.items()}

    @property
    def success_rate(self) -> float:
        return self.applied_attempts / self.attempted if self.attempted else 1.0

    @property
    def applied_attempts(self) -> int:
        """Attempts that ended in an update, rolled-back ones included."""
        return self.attempted - self.skipped - self.retried - (self.rollbacks - self.undone)


def _own(value: Any) -> Any:
    """A copy of what could be changed in place."""
    return value.copy() if isinstance(value, list | dict) else value


_TEACHER = "router"  # the key of the teacher's state in a checkpoint
# Counters that a rollback does not undo.
_HISTORY = (
    "attempted",
    "skipped",
    "retried",
    "rollbacks",
    "undone",
    "seconds",
    "quarantined",
    "backoff_at",
    "fallback_until",
    "rolled_back_to",
    "best_step",
    "best_perplexity",
    "evaluations_since_best",
    "last_perplexity",
    "best_rank",
    "last_rank",
    "is_off_course",
    "micro_batch_parts",
    "shortages",
    "set_weights",
    "weights_set_at",
)


def weights_of(model: Any) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name, what this process holds of them; a tied tensor once.

    Frozen parameters never change, so nothing that is kept or saved holds them.
    """
    weights = {name: local(one.data) for name, one in model.named_parameters() if one.requires_grad}
    parameters = {name for name, _parameter in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            weights[name] = tensor
    return weights


def kept_weights(run: Run) -> dict[str, Tensor]:
    """What is kept of a best student: its weights, and of those that are rounded to blocks the masters.

    The codes of a file are made from masters: a search may find others for weights that are rounded already.
    """
    return {**weights_of(run.student.model), **{name: one.master for name, one in run.optimizer.rounded().items()}}


def frozen_of(model: Any) -> dict[str, Tensor]:
    """What this process holds of the parameters that are not trained."""
    return {name: local(one.data) for name, one in model.named_parameters() if not one.requires_grad}


def projectors_of(run: Run) -> dict[str, Mapping[str, Tensor]]:
    """The projectors that objectives train with the student, as a group; empty where there are none."""
    weights = weights_of(run.mix.projectors)
    return {"projectors": weights} if weights else {}


def capture(run: Run, state: RunState) -> Saved:
    """The full state as named tensors and JSON values. The tensors are not copies."""
    random = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(run.device)
    tensors: dict[str, Mapping[str, Tensor]] = {
        "student": weights_of(run.student.model),
        **projectors_of(run),
        "optimizer": run.optimizer.tensors(),
        "random": random,
    }
    if learned := run.teacher.training.tensors():
        tensors[_TEACHER] = learned
    if state.best_weights:
        tensors["best"] = state.best_weights
    scalars = {
        "state": state.counters(),
        "precision": run.precision.state_dict(),
        "guard": run.guard.state_dict(),
        "num_updates": run.optimizer.num_updates,
        "before": strict(state.before),  # a metric may be infinite, which JSON cannot store
        "events": run.log.position if state.begun_at is None else state.begun_at,
        "processes": run.initial_world_size,
        "base": run.adapter.base_identity if run.adapter else None,  # the frozen weights are not in the checkpoint
        **({"inputs": run.inputs} if run.inputs else {}),
        "canary": state.canary_reference if math.isfinite(state.canary_reference) else None,
        "canary_best": state.canary_best if math.isfinite(state.canary_best) else None,
        _TEACHER: run.teacher.training.state_dict() or None,
    }
    return Saved(state.applied, tensors, scalars, line=state.rollbacks)


# -- the values of a checkpoint --------------------------------------------------------------------------


class _Known(Stored):
    model_config = pydantic.ConfigDict(extra="forbid")  # each key becomes an attribute of the state


def _counters(name: str, wanted: Collection[str]) -> type[_Known]:
    """A schema of counters of RunState by their types. A whole number is never below its first value."""
    kinds: dict[str, Any] = {"float": float, "float | None": float | None, "list[int]": list[Count]}
    kinds |= {"str": str, "bool": bool, "dict[str, float]": dict[str, NonNegative]}
    entries: dict[str, Any] = {}
    for one in fields(RunState):
        if one.name in wanted:
            first: Any = one.default
            kinds["int"] = Annotated[int, pydantic.Field(ge=first, le=LARGEST)]
            entries[one.name] = (kinds[str(one.type)], None if one.name in _LATER else ...)
    return pydantic.create_model(name, __base__=_Known, **entries)


# Counters that older checkpoints do not have.
_LATER = {
    "undone", "last_perplexity", "snapshots_refused", "micro_batch_parts", "shortages", "owes_evaluation", "round",
    "best_rank", "last_rank", "is_off_course", "set_weights", "weights_set_at",
}  # fmt: skip
_AllCounters = _counters("_AllCounters", [known.name for known in fields(RunState) if known.name not in _HELD])
_HistoryCounters = _counters("_HistoryCounters", _HISTORY)


class _GuardWindows(Stored):
    losses: dict[str, list[float]]
    norms: list[float]
    phase: str


class _Guard(Stored):
    windows: _GuardWindows
    recent: list[bool]
    consecutive: Count
    consecutive_teacher: Count
    num_kept: Count
    num_rollbacks: Count
    has_reset: bool
    consecutive_spikes: Count = 0  # not in older checkpoints, as the next
    consecutive_floor: Count = 0


class _Precision(Stored):
    mode: str
    scale: Annotated[float, pydantic.Field(gt=0)]
    good_steps: Count
    device: str = ""


class _Scalars(Stored):
    """state.json of a checkpoint: what `capture` gives."""

    state: _AllCounters  # type: ignore[valid-type]
    precision: _Precision
    guard: _Guard
    num_updates: Count
    before: dict[str, dict[str, Any]]
    canary: float | None
    events: Count | None = None
    processes: Annotated[int, pydantic.Field(ge=1, le=LARGEST)] = 1
    base: str | None = None
    canary_best: float | None = None
    router: dict[str, Any] | None = None


class _History(Stored):
    """What the mark of a rollback keeps: what `history` gives."""

    state: _HistoryCounters  # type: ignore[valid-type]
    guard: _Guard
    events: Count


def why_unusable(saved: Saved) -> str:
    """Why a checkpoint whose sums hold cannot be continued from; empty where it can."""
    missing = {"student", "optimizer", "random"} - set(saved.tensors)
    if missing:
        return f"{', '.join(sorted(missing))} missing"
    try:
        _Scalars.of(saved.scalars)
    except ValueError as error:
        return f"state.json: {error}"
    applied = saved.scalars["state"]["applied"]
    return "" if applied == saved.step else f"state.json is of step {applied}"


def why_unusable_mark(mark: Mark) -> str:
    """Why a run cannot be continued after a rollback by its mark; empty where it can."""
    try:
        _History.of(mark.history)
    except ValueError as error:
        return str(error)
    return ""


def history(run: Run, state: RunState) -> dict[str, Any]:
    """Budgets and counters that a rollback does not undo, for its mark on the disk."""
    kept = {name: value for name, value in state.counters().items() if name in _HISTORY}
    return {"state": kept, "guard": run.guard.state_dict(), "events": run.log.position}


def restore_history(run: Run, state: RunState, mark: Mark) -> None:
    """Restore the budgets and counters of a rollback's mark.

    The best student of abandoned steps stays the best if its weights can be found.
    """
    best = run.checkpoints.abandoned_best(int(mark.history["state"]["best_step"]))
    for name, value in mark.history["state"].items():
        if best or not name.startswith(("best_", "evaluations_since_best")):
            setattr(state, name, _own(value))
    if best:
        state.best_weights = _best(run, best)
    statistics = run.guard.statistics()
    run.guard.load_state_dict({**mark.history["guard"], "windows": statistics})


@torch.no_grad()
def restore(run: Run, state: RunState, saved: Saved, *, keeps_history: bool = False) -> None:
    """Restore a saved state. A rollback keeps its history: budgets spent stay spent."""
    run.parallel.load("student", weights_of(run.student.model), saved.tensors["student"])
    for group, weights in projectors_of(run).items():
        run.parallel.load(group, weights, saved.tensors.get(group, {}))
    run.optimizer.num_updates = int(saved.scalars["num_updates"])
    run.optimizer.load_tensors(saved.tensors["optimizer"], partial(run.parallel.load, "optimizer"))
    torch.set_rng_state(saved.tensors["random"]["cpu"])
    if "cuda" in saved.tensors["random"] and run.device.type == "cuda":
        torch.cuda.set_rng_state(saved.tensors["random"]["cuda"], run.device)
    run.precision.load_state_dict(saved.scalars["precision"])
    state.reach.begin(run)
    # The canary losses of the saved state: later ones belong to undone steps.
    state.canary_reference = _or_unknown(saved.scalars["canary"])
    state.canary_best = _or_unknown(saved.scalars.get("canary_best", saved.scalars["canary"]))
    teacher = saved.tensors.get(_TEACHER, {}), saved.scalars.get(_TEACHER) or {}
    run.teacher.training.load(*teacher, keeps_history=keeps_history)
    for name, value in saved.scalars["state"].items():
        if not (keeps_history and name in _HISTORY):
            setattr(state, name, _own(value))
    if state.best_rank is None:  # not in older checkpoints, which chose by perplexity
        state.best_rank, state.last_rank = state.best_perplexity, state.last_perplexity
    if keeps_history:
        run.guard.restore_statistics(saved.scalars["guard"]["windows"])
    else:
        run.guard.load_state_dict(saved.scalars["guard"])
        state.best_weights = _best(run, saved.tensors.get("best", {}))


def _or_unknown(canary: float | None) -> float:
    return float("inf") if canary is None else float(canary)


def _best(run: Run, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this process holds of the best student, in main memory; empty where there is none."""
    if not saved:
        return {}
    held = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights_of(run.student.model).items()}
    run.parallel.load("best", held, saved)
    return held if run.disk_copies is None else run.disk_copies.copy(held)


_RECOVERY_STEPS = 50
_BACKOFF = 0.5  # factor on the learning rate after a divergence; it returns to 1 over the recovery steps
_CANARY_ROWS = 4
_CANARY_TARGETS = 128  # scored positions of it, and as many more as stand in the same columns


def held_out_batches(config: Config, corpus: Corpus, num_batches: int) -> list[Batch]:
    """The batches of an evaluation: so many, of rows that are spread evenly, or all for 0."""
    size = config.eval.batch_size or config.train.rows_per_batch
    return list(fixed_batches(corpus.evaluation, size, num_batches))


@dataclass(frozen=True)
class Run:
    """The parts of a run. What changes is in RunState and inside the parts: weights, optimizer, guard, precision."""

    config: Config
    folder: Path
    tokenizer: Any
    student: Student
    teacher: Teacher
    corpus: Corpus
    loader: Loader
    mix: Mix
    curriculum: Curriculum
    schedule: Schedule
    budget: Budget
    precision: Precision
    optimizer: AdamW
    guard: Guard
    log: EventLog
    checkpoints: CheckpointStore
    snapshots: Snapshots
    saves: Saves = field(default_factory=Saves)
    hooks: Hooks = field(default_factory=Hooks)
    parallel: Parallel = field(default_factory=Parallel)
    initial_world_size: int = 1  # processes that the run began with: a window has `accumulation` micro-batches for each
    lock: Lock | None = None  # of the process that writes
    adapter: Adapter | None = None  # in the student, where that is what is trained
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # hashes of data and models, for the checkpoints
    rollouts: Rollouts | None = None  # rounds of the student's own text
    stages: Stages = field(default_factory=Stages)  # what is announced between steps
    canary_answers: KeptAnswers = field(default_factory=KeptAnswers)  # of the teacher on the canary batch

    @property
    def device(self) -> torch.device:
        return self.precision.device

    @property
    def num_trained(self) -> int:
        """Parameters of the student that are trained."""
        return sum(cell.parameter.numel() for cell in self.optimizer.cells["student"])

    @property
    def num_student_parameters(self) -> int:
        """Of the student that is written: an adapter is merged into it."""
        held: int = sum(parameter.numel() for parameter in self.student.model.parameters())
        return held - (self.adapter.num_trained if self.adapter else 0)

    @property
    def disk_copies(self) -> DiskCopies | None:
        """Where copies of the state go that are too large for memory; None: into memory."""
        return self.snapshots.disk if isinstance(self.snapshots, SnapshotRing) else None

    def check_folder(self) -> None:
        """Raise if the folder was deleted or replaced, before anything is saved into it."""
        if self.lock is not None and not self.lock.holds():
            raise CannotSave(
                "the folder of the run was deleted or replaced while it was training",
                where=str(self.folder),
                advice=["begin again in another folder with --out", "leave a run's folder alone until it has ended"],
            )

    def last_loss_weights(self, state: RunState) -> LossWeights:
        """The loss weights of the last applied step."""
        return self.loss_weights(replace(state, applied=max(state.applied - 1, 0)))

    def loss_weights(self, state: RunState) -> LossWeights:
        """The curriculum's loss weights, or labels alone while the teacher is suspended."""
        curriculum = self.curriculum
        if state.applied < state.fallback_until:
            curriculum = curriculum.without_teacher()
        elif state.set_weights:
            curriculum = curriculum.with_weights(state.set_weights, state.weights_set_at)
        return curriculum.at(state.applied / max(self.schedule.num_steps, 1))

    def rate_factor(self, state: RunState) -> float:
        """The schedule's share of the peak learning rate, lowered for a while after a divergence."""
        factor = self.schedule.factor(state.applied)
        since = state.applied - state.backoff_at
        if state.backoff_at >= 0 and since < _RECOVERY_STEPS:
            factor *= _BACKOFF + (1.0 - _BACKOFF) * since / _RECOVERY_STEPS
        return factor

    def teacher_of(self, loss_weights: LossWeights, batch: Batch) -> Teacher:
        """The teacher of a batch; `NO_TEACHER` where no term needs one, or all rows are learned from the labels."""
        stored = self.rollouts.teacher if self.rollouts is not None else None
        if stored is not None and loss_weights.asks_teacher and is_rollout(batch):
            return stored
        is_labels_only = bool(batch.sources) and self.config.data.label_sources.issuperset(batch.sources)
        return self.source_teacher(batch) if loss_weights.asks_teacher and not is_labels_only else NO_TEACHER

    def source_teacher(self, batch: Batch) -> Teacher:
        """The teacher of a batch's source, where sources have their own."""
        return self.teacher.of(batch) if isinstance(self.teacher, BySource) else self.teacher

    def eval_batches(self) -> list[Batch]:
        return held_out_batches(self.config, self.corpus, self.budget.num_batches)

    @property
    def canary_is_objective(self) -> bool:
        """Whether the canary's loss is the objective, for a student that is not trained or chosen by labels."""
        return self.config.eval.select != "perplexity" or not self.learns_labels

    @property
    def learns_labels(self) -> bool:
        """Whether cross-entropy on the data is part of the objective at any time."""
        return self.config.objectives.weights.get("ce", 0.0) != 0.0

    def canary(self) -> Batch:
        """A fixed batch whose loss tells whether the student is sound.

        Training rows: on held-out text an overfitting student gets worse without a fault. The beginnings of a few rows
        are enough, because they are only compared with themselves.
        """
        num_rows, rows = min(self.config.train.rows_per_batch, _CANARY_ROWS), self.corpus.train
        if isinstance(self.teacher, BySource) and isinstance(rows, MixedRows):  # a batch has one teacher
            rows = MixedRows(rows.parts[:1])
        batch = next(iter(fixed_batches(rows, num_rows, 1)))
        scored = (batch.targets != IGNORED).sum(0).cumsum(0)  # up to and with each column
        return batch.up_to(int((scored < _CANARY_TARGETS).sum()) + 1)
