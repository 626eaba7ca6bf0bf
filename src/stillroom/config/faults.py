"""The faults of `--inject`, and their syntax: fault@step, or fault@stepxN for N attempts."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from stillroom.errors import ConfigError

FAULTS = {
    "nan_weight": "one weight of the student becomes NaN",
    "nan_embedding": "one weight becomes NaN in the row of a token that is hardly ever used",
    "huge_weight": "eight weights of the student become 30,000",
    "inf_logit": "one hidden value of the student becomes infinite",
    "teacher_nan": "the teacher answers NaN",
    "teacher_garbage": "the teacher answers finite nonsense",
    "router_nan": "one weight of a trained gate becomes NaN",
    "oom": "memory runs out in the student's forward",
    "all_masked": "no token of the batch is scored",
    "bad_batch": "the batch is random tokens",
    "inf_grad": "one gradient becomes infinite",
    "nan_grad": "one gradient becomes NaN",
    "nan_moment": "one moment of the optimizer becomes NaN",
    "lr_spike": "the learning rate is a thousand times too high",
    "disk_full": "the next checkpoint cannot be written",
    "kill": "the process is killed before the step, when its last checkpoint is whole",
    "freeze": "the process is stopped before the step and does not go on, as one that hangs",
    "kill_mid_update": "the process is killed while weights are written",
    "kill_while_writing": "the process is killed while a checkpoint's tensors are written",
    "kill_before_rename": "the process is killed before a checkpoint is renamed into place",
    "kill_after_rename": "the process is killed after a checkpoint was renamed into place",
    "kill_after_mark": "the process is killed after a rollback was noted on the disk, before anything was saved",
    "kill_while_retiring": "the process is killed while checkpoints that a rollback abandoned are removed",
    "kill_in_eval": "the process is killed during an evaluation",
}

_WORD = re.compile(r"^(?P<name>[a-z_]+)@(?P<step>\d{1,9})(?:x(?P<times>[1-9]\d{0,8}))?$")


@dataclass
class Fault:
    name: str
    step: int
    left: int


def parse(spec: str) -> list[Fault]:
    """Parse a list of faults such as `"nan_weight@40,teacher_nan@60x5"`."""
    faults = []
    for word in filter(None, (part.strip() for part in spec.split(","))):
        parts = _WORD.match(word)
        if not parts:
            raise ConfigError(f"--inject {word}: expected fault@step or fault@stepxN", advice=["nan_weight@40"])
        name = parts["name"]
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, n=1)
            raise ConfigError(
                f"--inject {word}: there is no fault {name!r}",
                advice=[f"did you mean {match}?" for match in near] + [f"faults: {', '.join(FAULTS)}"],
            )
        faults.append(Fault(name, int(parts["step"]), int(parts["times"] or 1)))
    return faults
