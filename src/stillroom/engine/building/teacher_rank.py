"""What a process does that holds the teacher alone."""

from __future__ import annotations

from pathlib import Path

import torch

from stillroom.config import Config
from stillroom.engine.building.models import teacher_dtype
from stillroom.engine.ending.outcome import DONE
from stillroom.engine.ending.result import Result
from stillroom.errors import RunEnded
from stillroom.parallel.link import TeacherRank
from stillroom.teachers.answering import Opened, answer_all
from stillroom.teachers.make import live_teacher, open_live


def answer_trainers(config: Config, parallel: TeacherRank, folder: Path, device: torch.device) -> Result:
    """Answer until the run is over, and end as the trainers did."""

    def open_teacher() -> Opened:
        loaded = open_live(config.teacher, teacher_dtype(config, device))
        return loaded, live_teacher(config, loaded, loaded.anatomy.vocab_rows, device)

    exit_code = answer_all(parallel.links, open_teacher)
    if exit_code:
        raise RunEnded(exit_code, where=str(folder))
    return Result(folder, {"status": DONE, "reason": "", "advice": []})


def unused_ranks(config: Config, num_processes: int, *, has_link: bool) -> list[str]:
    """What to say where processes for the teacher were asked for and there is one process."""
    if not config.teacher.ranks or has_link or num_processes > 1:
        return []
    return [f"teacher.ranks = {config.teacher.ranks} has no effect: there is one process, which holds the teacher too"]
