"""Everything that changes during a run; capture and restore it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import torch
from torch import Tensor

from stillroom.checkpoint import Mark, Saved
from stillroom.engine.pace import Pace
from stillroom.engine.recovery.reach import Reach
from stillroom.evaluation import Evaluation, never_stop
from stillroom.files import LARGEST, Count, Stored
from stillroom.precision.storage import local
from stillroom.telemetry.strict import strict

if TYPE_CHECKING:
    from stillroom.engine.run import Run


@dataclass
class Holdings:
    """State beside the counters: saved as tensors and values of their own, or not saved."""

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
    saved_at: tuple[int, ...] = ()  # counters that identify the state of the newest checkpoint
    is_changing: bool = False  # a verdict is carried out, or gates are looked after: this is not the state of one step
    has_told_fallback: bool = False  # that positions without a usable teacher are taught by their labels
    begun_at: int | None = None  # position in the log when the present attempt began; None between attempts
    between_batches: Callable[[], None] = never_stop  # called between held-out batches; may raise to stop


_HELD = {known.name for known in fields(Holdings)}


@dataclass
class RunState(Holdings):
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

    def counters(self) -> dict[str, Any]:
        """What a checkpoint stores as JSON under `state`."""
        values = {known.name: getattr(self, known.name) for known in fields(self) if known.name not in _HELD}
        return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}

    @property
    def success_rate(self) -> float:
        return self.applied_attempts / self.attempted if self.attempted else 1.0

    @property
    def applied_attempts(self) -> int:
        """Attempts that ended in an update, rolled-back ones included."""
        return self.attempted - self.skipped - self.retried - (self.rollbacks - self.undone)


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
    "micro_batch_parts",
    "shortages",
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


def frozen_of(model: Any) -> dict[str, Tensor]:
    """What this process holds of the parameters that are not trained."""
    return {name: local(one.data) for name, one in model.named_parameters() if not one.requires_grad}


def projectors_of(run: Run) -> dict[str, Mapping[str, Tensor]]:
    """The projectors that objectives train beside the student, as a group; empty where there are none."""
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
        "before": strict(state.before),  # a yardstick may be infinite, which JSON cannot store
        "events": run.log.position if state.begun_at is None else state.begun_at,
        "processes": run.num_shares,
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
    kinds |= {"str": str, "bool": bool}
    entries: dict[str, Any] = {}
    for one in fields(RunState):
        if one.name in wanted:
            first: Any = one.default
            kinds["int"] = Annotated[int, pydantic.Field(ge=first, le=LARGEST)]
            entries[one.name] = (kinds[str(one.type)], None if one.name in _LATER else ...)
    return pydantic.create_model(name, __base__=_Known, **entries)


# Counters that older checkpoints do not have.
_LATER = {"undone", "last_perplexity", "snapshots_refused", "micro_batch_parts", "shortages", "owes_evaluation"}
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
            setattr(state, name, list(value) if isinstance(value, list) else value)
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
            setattr(state, name, list(value) if isinstance(value, list) else value)
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
    return held
