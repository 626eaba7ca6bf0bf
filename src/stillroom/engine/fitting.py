"""Fit the work of a run into memory: choose micro-batches that fit, and cut them smaller where memory runs out.

How many fit is asked of the model of memory (`engine/memory.py`), and a trial or the next attempt has the last word.
Terms are sums and the counts of the whole window divide once, so a window in smaller parts gives the same loss and the
same gradient, up to the order of FP32 sums. The size that fits is kept for the rest of the run, in its checkpoints too.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from stillroom.ends import is_out_of_memory
from stillroom.engine.memory import ROWS_ON_CPU, Shapes, Sharing, auto_parts, held_here, parts_that_fit
from stillroom.engine.run import Run
from stillroom.engine.state import RunState
from stillroom.errors import OutOfMemory, StillroomError
from stillroom.evaluation import Evaluation, evaluate
from stillroom.files import reason_of
from stillroom.models import Student
from stillroom.objectives.head.buffers import POOL
from stillroom.objectives.head.chunks import forget_free_memory
from stillroom.types import Batch

T = TypeVar("T")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parts_of(batches: Iterable[Batch], state: RunState) -> Iterator[Batch]:
    """The micro-batches at the size that fits."""
    for batch in batches:
        yield from batch.parts(state.micro_batch_parts)


def micro_batch_rows(run: Run, state: RunState) -> int:
    """Rows in the largest micro-batch."""
    return math.ceil(run.config.train.rows_per_batch / state.micro_batch_parts)


# ---- Where `train.batch_size = "auto"`


def find_micro_batch(run: Run, state: RunState) -> None:
    """Take the rows of a step in the largest micro-batches that fit. Weights and random state stay as they are."""
    if run.config.train.batch_size != "auto":
        return
    on_cpu = run.device.type == "cpu"
    mode, otherwise = run.precision.mode, math.ceil(run.config.train.step_rows / ROWS_ON_CPU) if on_cpu else 1
    state.micro_batch_parts = _predicted(run, lambda shapes: auto_parts(run.config, shapes, mode), otherwise)
    if not on_cpu:  # main memory cannot be tried without swapping
        within_memory(run, state, lambda: _try(run, state))
    rows, shortages = micro_batch_rows(run, state), state.shortages
    state.shortages = 0  # a trial is no fault
    why = f"larger than {ROWS_ON_CPU} are no faster on a CPU" if on_cpu else f"found in {shortages + 1} trials"
    run.log.write("note", text=f"micro-batches of {rows:,} rows, {why}")


def _predicted(run: Run, ask: Callable[[Shapes], int], otherwise: int) -> int:
    """Ask the model of memory for a number of parts; all processes take the largest."""
    parallel = run.parallel
    shard_size = run.config.train.shard_size if parallel.is_sharded else 0
    sharing = Sharing(parallel.size, parallel.is_sharded, shard_size)
    try:
        parts = ask(Shapes(held_here(run.device, sharing)))
    except StillroomError as error:  # a configuration that is not on this machine, or a family without shapes
        run.log.write("note", text=f"how much memory a micro-batch takes is not known: {error}")
        parts = otherwise
    return int(parallel.worst(float(parts)))


def _try(run: Run, state: RunState) -> None:
    """Forward and backward of rows of the greatest length, every position scored."""
    lesson = run.lesson(state)
    needs = run.mix.needs(lesson)
    whole = _longest(run)
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        run.student.train()
        batch = next(iter(parts_of([whole], state))).to(run.device)
        signal = run.teacher_of(lesson, batch).observe(batch, needs.teacher)
        with run.precision.autocast():
            view = run.student.observe(batch, needs.student)
        view = run.hooks.view(view)
        score = run.mix.score(view, signal, batch, lesson, run.mix.counts([batch]))
        run.precision.backward(score.loss)
    run.optimizer.zero_grad()


def _longest(run: Run) -> Batch:
    """As many rows as a step has, of the greatest length that the data may have; with a mask if theirs have one."""
    shape = (run.config.train.rows_per_batch, run.config.data.max_length)
    if len(run.corpus.train.other_lengths):  # the teacher's rows and the spans cannot be made up
        by_length = np.argsort(-(run.corpus.train.lengths + run.corpus.train.other_lengths), kind="stable")
        return run.corpus.train.batch(np.resize(by_length, shape[0]))
    ids = torch.randint(0, run.student.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    segments = torch.zeros_like(ids) if run.corpus.train.is_packed else None
    names = tuple(f"trial-{row}" for row in range(shape[0]))
    return Batch(ids, ones, ids.roll(-1, dims=1), ones, names, segments=segments)


# ---- Where memory runs out


def within_memory(run: Run, state: RunState, work: Callable[[], T]) -> T:
    """The result of `work`, which uses `parts_of`. Where memory runs out in any process, all take smaller parts."""
    while True:
        result, shortage = None, ""
        try:
            result = work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = reason_of(error)
            if not run.parallel.takes_smaller_parts:
                raise _no_room(
                    run, "with a sharded model micro-batches are not made smaller, and one does not fit", shortage
                ) from error
        # Outside of the handler: the error's traceback holds the tensors of the work that failed.
        if not run.parallel.any_of(bool(shortage)):
            return result  # type: ignore[return-value]
        _take_smaller_parts(run, state, shortage or "memory ran out in another process")


def evaluate_held_out(
    run: Run, state: RunState, student: Student, *, read: Callable[[Batch], Batch] = lambda batch: batch, **options: Any
) -> Evaluation:
    """`evaluate` on the held-out batches, in parts that fit. `read` says how the model reads a batch."""

    def work() -> Evaluation:
        with run.parallel.gathered():
            return evaluate(student, parts_of([read(batch) for batch in run.eval_batches()], state), **options)

    return within_memory(run, state, work)


def _take_smaller_parts(run: Run, state: RunState, shortage: str) -> None:
    rows = micro_batch_rows(run, state)
    run.optimizer.zero_grad()
    if rows <= 1:
        raise _no_room(run, "not even a micro-batch of one row fits", shortage)
    run.parallel.prepare(run.optimizer)
    state.micro_batch_parts *= 2
    state.shortages += 1
    gc.collect()
    POOL.clear()
    forget_free_memory()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        # Where the model of memory says that half is still too much, do not try it. Main memory has no such bound.
        least, mode = state.micro_batch_parts, run.precision.mode
        state.micro_batch_parts = _predicted(
            run, lambda shapes: parts_that_fit(run.config, shapes, mode, least=least), least
        )
    now = micro_batch_rows(run, state)
    text = f"memory ran out: micro-batches of {now:,} rows instead of {rows:,}, and the same work again"
    if run.mix.planned.find("contrastive"):
        text += "; the contrastive term now compares fewer rows"
    run.log.write("note", text=text, micro_batch_rows=now, reason=shortage)


def _no_room(run: Run, what: str, shortage: str) -> OutOfMemory:
    return OutOfMemory(
        f"{what} into memory{_by_how_much(shortage)}: {shortage}",
        where=str(run.device),
        advice=[
            "recompute activations: --set student.gradient_checkpointing=true",
            f"shorter rows: --set data.max_length={max(run.config.data.max_length // 2, 1)}",
            "keep the teacher off the device: --set teacher.placement=offload",
            f"then continue from the last checkpoint: stillroom resume {run.folder}",
        ],
    )


def _by_how_much(reason: str) -> str:
    """What was missing, where the allocator's message says how much it wanted and how much was free."""
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", reason)
    free = re.search(r"([\d.]+) (bytes|KiB|MiB|GiB) is free", reason)
    if not wanted or not free:
        return ""
    missing = float(wanted[1]) * _UNITS[wanted[2]] - float(free[1]) * _UNITS[free[2]]
    return f", {missing / 2**20:,.0f} MiB are missing" if missing > 0 else ""
