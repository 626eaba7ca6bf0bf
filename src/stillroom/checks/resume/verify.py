"""Train N steps, and k + (N - k) with a SIGKILL between, each in a process of its own, and compare.

The kill strikes before step k, where k is 4 or more one applied step after a checkpoint: the resumed run loads that
checkpoint and takes the lost step again. At the end data, teacher and student are changed in turn, and resuming must be
refused. Everything takes place in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.checks.resume.refusals import refusals
from stillroom.checks.resume.states import Difference, differences, last_state, size_of
from stillroom.config import Config
from stillroom.engine.ending.outcome import FINISHED
from stillroom.errors import BrokenAtStart, ConfigError, NoBetterStudent, StillroomError
from stillroom.telemetry import read_events

STEPS = 8
SIGKILL = -9
_EVAL_BATCHES = 2

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """What was done, and the differences that were found: none where the law holds."""

    steps: int
    killed_at: int
    resumed_from: int
    precision: str
    tensors: int
    bytes: int
    seconds: float
    differences: tuple[Difference, ...]
    refused: tuple[str, ...] = ()  # inputs that were changed, and with which the run was not continued

    @property
    def holds(self) -> bool:
        return not self.differences

    @property
    def first_tensor(self) -> Difference | None:
        return next((one for one in self.differences if one.kind == "tensor"), None)

    def to_dict(self) -> dict[str, Any]:
        first = self.first_tensor
        named = {name: value for name, value in vars(self).items() if name != "differences"}
        return {
            "same": self.holds,
            **named,
            "refused": list(self.refused),
            "first_tensor": first.to_dict() if first else None,
            "differences": [one.to_dict() for one in self.differences],
        }


def middle(num_steps: int) -> int:
    """The step before which a run of so many is killed: a checkpoint and a lost step lie before it."""
    return min(num_steps, num_steps // 2 + 2)


def shortened(config: Config, num_steps: int, kill_at: int) -> Config:
    """The configuration over N steps. The last step before the kill is not saved, where there are enough of them."""
    if not 2 <= kill_at <= num_steps:
        raise ConfigError(
            f"a run of {num_steps} steps cannot be killed before step {kill_at}",
            where="--steps, --kill-at",
            advice=[f"--steps {num_steps} --kill-at {middle(num_steps)}"],
        )
    every = max(1, kill_at - 2)
    train = {"max_steps": num_steps, "save_steps": every, "eval_steps": num_steps, "early_stopping": 0}
    batches = min(config.eval.max_batches or _EVAL_BATCHES, _EVAL_BATCHES)
    router = config.teacher.router
    router = router.model_copy(update={"probe_steps": min(router.probe_steps, num_steps)})
    warmup = min(config.train.warmup_steps, num_steps - 1)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={**train, "max_minutes": 0.0, "warmup_steps": warmup}),
            "eval": config.eval.model_copy(update={"max_batches": batches, "samples": 0}),
            "teacher": config.teacher.model_copy(update={"router": router}),
        }
    )


def verify_resume(
    config: Config,
    *,
    num_steps: int = STEPS,
    kill_at: int | None = None,
    device: str = "auto",
    tell: Tell = lambda _text: None,
    after_kill: Callable[[Path], None] = lambda _folder: None,
) -> Proof:
    """Train twice and compare. `after_kill` is called with the killed run's folder before it is resumed."""
    began = time.monotonic()
    kill_at = middle(num_steps) if kill_at is None else kill_at
    config = shortened(config, num_steps, kill_at)
    with tempfile.TemporaryDirectory(prefix="stillroom-verify-resume-") as name:
        folder = Path(name)
        settings = folder / "config.json"
        settings.write_text(json.dumps(config.to_dict()), encoding="utf-8")
        words = ["distill", str(settings), "--out"]
        tell(f"{num_steps} steps without a break")
        _finished(run_apart([*words, str(folder / "uncut")], device), folder / "uncut")
        tell(f"the same, killed before step {kill_at}")
        cut = folder / "cut"
        killed = run_apart([*words, str(cut), "--inject", f"kill@{kill_at}"], device)
        if killed.returncode != SIGKILL:
            raise _unexpected(killed, "was to be killed and was not")
        resumed_from = last_state(cut).step
        after_kill(cut)
        tell(f"resumed from its checkpoint of step {resumed_from}")
        _finished(run_apart(["resume", str(cut)], device), cut)
        tensors, size = size_of(last_state(folder / "uncut"))
        found = tuple(differences(folder / "uncut", cut))
        tell("its data, its teacher and its student changed in turn")
        tried = dict(refusals(cut, config, folder, device))
        found += tuple(wrong for wrong in tried.values() if wrong is not None)
        refused = tuple(name for name, wrong in tried.items() if wrong is None)
        mode = next(event["precision"]["mode"] for event in read_events(cut / "events.jsonl") if "precision" in event)
    seconds = time.monotonic() - began
    return Proof(num_steps, kill_at, resumed_from, mode, tensors, size, seconds, found, refused)


def run_apart(words: list[str], device: str) -> subprocess.CompletedProcess[str]:
    """A command that trains, in a process of its own, which has this one's environment and directory."""
    command = [sys.executable, "-m", "stillroom", *words, "--device", device, "--no-progress", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _finished(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Raise unless the run took all its steps. A student that did not improve in so few is no fault."""
    if done.returncode in (0, NoBetterStudent.exit_code) and _status(folder) in FINISHED:
        return
    raise _unexpected(done, "did not finish")


def _status(folder: Path) -> str:
    try:
        return str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError):
        return ""


def _unexpected(done: subprocess.CompletedProcess[str], what: str) -> StillroomError:
    """The error of a child, as it gave it."""
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        said, where, advice, code = found["error"], found["where"], list(found["advice"]), int(found["exit_code"])
    except (ValueError, KeyError, IndexError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        said, where, advice, code = last[0], "", [], done.returncode
    kind = ConfigError if code == ConfigError.exit_code else BrokenAtStart
    advice = [*advice, "see that the run itself works: stillroom distill CONFIG --dry-run"]
    return kind(f"a run of this configuration {what}: {said}", where=where or f"exit code {code}", advice=advice)
