"""The size of a micro-batch, found by trial where `train.batch_size = "auto"`."""

from __future__ import annotations

import math

import numpy as np
import torch

from stillroom.engine.fitting import micro_batch_rows, parts_of, within_memory
from stillroom.engine.run import Run
from stillroom.engine.state import RunState
from stillroom.types import Batch

_ROWS_ON_CPU = 8  # larger micro-batches are no faster there, and main memory cannot be tried without swapping


def find_micro_batch(run: Run, state: RunState) -> None:
    """Take the rows of a step in the largest micro-batches that fit. Weights and random state stay as they are."""
    if run.config.train.batch_size != "auto":
        return
    if run.device.type == "cpu":
        state.micro_batch_parts = math.ceil(run.config.train.rows_per_batch / _ROWS_ON_CPU)
    else:
        within_memory(run, state, lambda: _try(run, state))
    rows, shortages = micro_batch_rows(run, state), state.shortages
    state.shortages = 0  # a trial is no fault
    why = "larger ones are no faster on a CPU" if run.device.type == "cpu" else f"found in {shortages + 1} trials"
    run.log.write("note", text=f"micro-batches of {rows:,} rows, {why}")


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
