"""The choice of a student: what an evaluation is worth by `eval.select`, and whether a run ended worse than it began.

Every measure becomes a *rank*, lower is better: the measure itself, or its negative where higher is better. A tie of
ranks, which few prompts give often, is broken by perplexity.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stillroom.config.schema import Config
from stillroom.core.errors import ConfigError
from stillroom.metrics.lm_eval import Tasks, open_tasks
from stillroom.models.generate import can_generate
from stillroom.telemetry.wording import as_number, format_percent, format_result, section
from stillroom.training.answers import answer, asked_prompts

if TYPE_CHECKING:
    from stillroom.training.evaluate import Evaluation
    from stillroom.training.run import Run, RunState

_WORSE = 1.005  # times the measure before training; a smaller rise is noise
_Z = 1.96  # standard errors of a share that are noise
_PREFERRED = ("acc_norm", "acc", "exact_match")  # of a benchmark's figures


@dataclass(frozen=True)
class Selection:
    """One way to choose a student."""

    name: str
    label: str
    is_share: bool = False  # from 0 to 1, higher is better

    def rank(self, value: float | None) -> float | None:
        """Lower is better; None for a student that cannot be chosen."""
        if value is None or not math.isfinite(value):
            return None
        return -value if self.is_share else value

    def value(self, rank: float | None) -> float | None:
        return -rank if rank is not None and self.is_share else rank

    def is_worse(self, value: float, before: float, count: int) -> bool:
        """Whether a value is worse than before training by more than noise. `count` is what a share was taken of."""
        if not self.is_share:
            return value > _WORSE * before if before > 0 else value > before
        noise = _Z * math.sqrt(2 * before * (1 - before) / max(count, 1)) + 1 / max(count, 1)
        return before - value > noise

    def show(self, value: float) -> str:
        return format_percent(value) if self.is_share else format_result(value)


SELECTIONS = {
    one.name: one
    for one in (
        Selection("perplexity", "a held-out perplexity"),
        Selection("objective", "a held-out objective"),
        Selection("exact_match", "a share of exactly right answers", is_share=True),
        Selection("checker", "a share of right answers", is_share=True),
        Selection("own_kl", "a KL to the teacher on its own text"),
        Selection("tasks", "a mean score of the benchmarks", is_share=True),
    )
}


def selection_of(config: Config) -> Selection:
    return SELECTIONS[config.eval.select]


# -- an evaluation ---------------------------------------------------------------------------------------


def measure(run: Run, state: RunState, result: Evaluation) -> Evaluation:
    """The evaluation with the answers to prompts, the benchmarks, and the rank by which students are chosen."""
    config = run.config.eval
    if config.num_prompts and not can_generate(run.student.model):
        raise ConfigError(
            f"{type(run.student.model).__name__} has no generate method, and prompts are to be answered",
            where="eval.prompts, eval.select",
            advice=["set eval.prompts = 0 and choose by perplexity or objective"],
        )
    if config.num_prompts:
        result = replace(result, answers=answer(run, asked_prompts(run), state.between_batches).figures)
    if config.tasks:
        state.between_batches()
        result = replace(result, tasks=_run_tasks(run))
    if config.select == "perplexity":
        return result
    value = _value(config.select, result)
    shared = run.parallel.broadcast(math.nan if value is None else value)  # processes may differ in the last bit
    return replace(result, select=config.select, selected=shared if math.isfinite(shared) else None)


def _value(select: str, result: Evaluation) -> float | None:
    if select == "objective":
        return result.objective
    if select == "tasks":
        return _mean_score(result.tasks or {})
    return as_number((result.answers or {}).get(select))


@lru_cache(maxsize=1)
def benchmarks(names: tuple[str, ...]) -> Tasks | None:
    """Load the benchmarks of `eval.tasks`, once in a process: before models are loaded, for what cannot be run."""
    return open_tasks(names, where="eval.tasks")


def _run_tasks(run: Run) -> dict[str, Any]:
    tasks = benchmarks(run.config.eval.tasks)
    assert tasks is not None
    was_training = run.student.model.training
    with _same_random_state():
        try:
            size = run.config.eval.batch_size or run.config.train.rows_per_batch
            return tasks.run(run.student.model, run.tokenizer, batch_size=size)
        finally:
            run.student.model.train(was_training)


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore all random generators after the body: lm-eval seeds them, and a run's state is part of its result."""
    own, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(arrays)


def _mean_score(tasks: Mapping[str, Any]) -> float | None:
    """The mean over benchmarks of one figure each: of those that are better when higher, the usual one."""
    scores = []
    for name, figures in tasks.items():
        better = [key for key, is_higher in figures["higher_is_better"].items() if is_higher]
        chosen = next((key for key in (*_PREFERRED, *better) if key in better), None)
        if chosen is None:
            raise ConfigError(
                f"the benchmark {name} has no figure that is better when higher",
                where="eval.tasks",
                advice=["choose benchmarks with an accuracy"],
            )
        scores.append(float(figures[chosen]))
    return sum(scores) / len(scores) if scores else None


def rank_of(result: Evaluation) -> float | None:
    """What students are compared by. One with unscored tokens is never chosen."""
    if not math.isfinite(result.perplexity) or result.unscored_tokens:
        return None
    return SELECTIONS[result.select].rank(result.perplexity if result.select == "perplexity" else result.selected)


def is_better(result: Evaluation, state: RunState) -> bool:
    rank = rank_of(result)
    if rank is None:
        return False
    if state.best_rank is None or state.best_perplexity is None:
        return True
    return (rank, result.perplexity) < (state.best_rank, state.best_perplexity)


# -- the end of a run ------------------------------------------------------------------------------------


def is_off_course(run: Run, state: RunState, result: Evaluation) -> bool:
    """Whether a student is worse than the one before training by what it is trained for.

    Cross-entropy on the data says so by itself only where it is part of the objective. Elsewhere the objective, while
    its weights are constant, and the KL to the teacher must say so too.
    """
    before = section(state.before, "student_before")
    if run.learns_labels:
        return True
    witnesses = [(result.kl, as_number(before.get("kl")))]
    if not run.config.objectives.moving:
        witnesses.append((result.objective, as_number(before.get("objective"))))
    known = [(now, then) for now, then in witnesses if now is not None and then is not None and math.isfinite(now)]
    return all(now > _WORSE * then for now, then in known)


def num_judged(select: str, row: dict[str, Any]) -> int:
    """What a share of an evaluated model was taken of."""
    if select == "tasks":
        return sum(int(as_number(one.get("samples")) or 0) for one in section(row, "tasks").values())
    return int(as_number(section(row, "answers").get("with_reference")) or 0)
