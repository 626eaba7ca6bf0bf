"""What is counted or measured instead of computed: the data, and one real step."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from stillroom.config import Config
from stillroom.data import open_data
from stillroom.engine.building.assemble import build_run, make_loader
from stillroom.engine.building.models import load_models
from stillroom.engine.state import RunState
from stillroom.engine.step import train_step
from stillroom.errors import BrokenAtStart
from stillroom.models import has_tokenizer, load_tokenizer
from stillroom.parallel import Parallel
from stillroom.schedule import windows_in
from stillroom.telemetry import EventLog


def count_data(config: Config) -> tuple[int, int]:
    """Steps and tokens of one pass over the training data, opened as a run opens it."""
    has_own = not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model)
    section = config.student if has_own else config.teacher
    tokenizer = load_tokenizer(section, section.model)
    corpus = open_data(config.data, tokenizer)
    loader = make_loader(config, corpus, Parallel())
    steps = windows_in(loader.num_batches, config.train.gradient_accumulation_steps)
    rows = loader.num_batches * config.train.rows_per_batch
    return steps, rows * config.data.max_length


def timed_step(config: Config, device: torch.device) -> float:
    """Seconds of the second step of a run that is built, and thrown away. The first one warms up."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a step can only be measured on a device that is here", where="--probe", advice=["--probe --device cpu"]
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        with EventLog(folder / "events.jsonl") as log:
            models = load_models(config, device, folder=folder)
            run = build_run(config, folder, log, device=device, models=models)
            run.student.train()
            state = RunState(applied=1)  # the first step is sampled for the log
            seconds = 0.0
            for cursor in range(2):
                began = time.perf_counter()
                train_step(run, state, run.loader.window(cursor))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - began
    return seconds
