"""Prove that a killed and resumed run equals an uninterrupted one: `stillroom verify-resume`.

Train N steps, and k + (N - k) with a SIGKILL between, each in its own process, and compare. The kill comes before step
k, where k is 4 or more one applied step after a checkpoint: the resumed run loads that checkpoint and takes the lost
step again. At the end data, teacher and student are changed in turn, and resuming must be refused. Everything takes
place in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillroom.config import Config
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import (
    BrokenAtStart,
    CheckpointUnusable,
    ConfigError,
    InputsChanged,
    NoBetterStudent,
    StillroomError,
)
from stillroom.data.rollouts import RoundStore
from stillroom.models.files import fetch
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import NAME as CACHE
from stillroom.teachers.signals import AUTO, uses_cache
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointStore, Saved
from stillroom.training.distill import resume
from stillroom.training.finish import FINISHED
from stillroom.training.schedule import Curriculum

STEPS = 8
SIGKILL = -9
_EVAL_BATCHES = 2
# Groups of a checkpoint in the order in which a difference is likely to arise; others follow by name.
_GROUPS = ("student", "projectors", "router", "optimizer", "random", "best")
_STATES = ("state", "precision", "guard", "num_updates", "canary", "canary_best")
_CLOCKS = frozenset({"seconds"})
_RECORDED = ("train_loss", "grad_norm", "lr", "loss_scale", "verdict")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same in both runs."""

    kind: str  # "step", "state", "tensor", "round" or "input"
    name: str
    what: str

    def to_dict(self) -> dict[str, str]:
        return dict(vars(self))


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
    batches = min(config.eval.limit or _EVAL_BATCHES, _EVAL_BATCHES)
    router = config.teacher.router
    router = router.model_copy(update={"probe_steps": min(router.probe_steps, num_steps)})
    warmup = min(config.train.warmup_steps, num_steps - 1)
    rollouts = config.rollouts
    if rollouts is not None:  # several rounds, one of which is in use where the run is killed
        rollouts = rollouts.model_copy(update={"every": min(rollouts.every, max(1, num_steps // 3))})
    return config.model_copy(
        update={
            "rollouts": rollouts,
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
    """Run a command that trains in its own process, with this one's environment and directory."""
    command = [sys.executable, "-m", "stillroom", *words, "--device", device, "--no-progress", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _finished(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Raise unless the run took all its steps. That the student did not improve in so few steps is fine."""
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


# -- comparing two runs ----------------------------------------------------------------------------------------


def last_state(folder: Path) -> Saved:
    """Load the newest checkpoint of a run."""
    saved = CheckpointStore(folder / "checkpoints").load_newest()
    if saved is None:
        raise CheckpointUnusable("the run left no checkpoint", where=str(folder), advice=["run it with more --steps"])
    return saved


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """What differs between two runs' folders, the earliest and most telling first; nothing where all bits agree."""
    yield from _of_steps(steps_of(one), steps_of(other))
    mine, theirs = last_state(one), last_state(other)
    yield from _of_tensors(mine.tensors, theirs.tensors)
    yield from _of_scalars(mine, theirs)
    yield from _of_students(one / "student", other / "student")
    yield from _of_rounds(one / "rollouts", other / "rollouts")


def _of_rounds(mine: Path, theirs: Path) -> Iterator[Difference]:
    """Rounds of rollouts whose pieces are not the same files."""
    stores = RoundStore(mine), RoundStore(theirs)
    for number in sorted({*stores[0].numbers(), *stores[1].numbers()}):
        one, other = (store.facts(number) for store in stores)
        if one is None or other is None or (one.pieces, one.step) != (other.pieces, other.step):
            yield Difference("round", f"round {number}", "the student wrote other text, or at another step")


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """What was recorded of each step that was applied."""
    events = read_events(folder / "events.jsonl")
    taken = [event for event in events if event["event"] == "step" and event["verdict"] == "keep"]
    return {event["step"]: {name: event.get(name) for name in _RECORDED} for event in taken}


def _of_steps(mine: Mapping[int, Any], theirs: Mapping[int, Any]) -> Iterator[Difference]:
    for step in sorted({*mine, *theirs}):
        one, other = mine.get(step), theirs.get(step)
        if one == other:
            continue
        if one is None or other is None:
            yield Difference(
                "step", f"step {step}", f"only the {'resumed' if one is None else 'uninterrupted'} run has it"
            )
        else:
            said = [f"{name} {one[name]!r} and {other[name]!r}" for name in _RECORDED if one[name] != other[name]]
            yield Difference("step", f"step {step}", "; ".join(said))
        return  # every later step follows from this one


def _of_tensors(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    known = [*(group for group in _GROUPS if group in mine or group in theirs)]
    for group in [*known, *sorted({*mine, *theirs} - set(known))]:
        one, other = mine.get(group, {}), theirs.get(group, {})
        for name in dict.fromkeys((*one, *other)):
            if name not in one or name not in other:
                yield Difference("tensor", f"{group}/{name}", "only one of the two runs has it")
            elif what := gap(one[name], other[name]):
                yield Difference("tensor", f"{group}/{name}", what)


def gap(one: Tensor, other: Tensor) -> str:
    """How two tensors differ; empty where every bit is the same. NaN equals NaN of the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = [tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.element_size()) for tensor in (one, other)]
    is_other = (bits[0] != bits[1]).any(-1)
    count = int(is_other.sum())
    if not count:
        return ""
    place = int(is_other.nonzero()[0])
    pair = [tensor.flatten()[place].item() for tensor in (one, other)]
    return (
        f"{count:,} of {one.numel():,} values, the first at {place:,}: {pair[0]!r} uninterrupted, {pair[1]!r} resumed"
    )


def _of_scalars(mine: Saved, theirs: Saved) -> Iterator[Difference]:
    for key in _STATES:
        one, other = (_without_clocks(saved.scalars.get(key)) for saved in (mine, theirs))
        if one != other:
            yield Difference("state", key, f"{_shown(one, other)} uninterrupted, {_shown(other, one)} resumed")


def _without_clocks(value: Any) -> Any:
    return {name: part for name, part in value.items() if name not in _CLOCKS} if isinstance(value, dict) else value


def _shown(value: Any, other: Any) -> str:
    """The part of a value that is not in the other one."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {name: part for name, part in value.items() if other.get(name) != part}
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _of_students(mine: Path, theirs: Path) -> Iterator[Difference]:
    for path in sorted(mine.glob("*.safetensors")):
        other = theirs / path.name
        if not other.exists() or path.read_bytes() != other.read_bytes():
            yield Difference("tensor", f"student/{path.name}", "the written student is not the same file")


def size_of(saved: Saved) -> tuple[int, int]:
    """How many tensors a checkpoint has, and their bytes."""
    tensors = [tensor for group in saved.tensors.values() for tensor in group.values()]
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- changed inputs --------------------------------------------------------------------------------------------


def refusals(run: Path, config: Config, scratch: Path, device: str) -> Iterator[tuple[str, Difference | None]]:
    """(input, what is wrong) for data, teacher and student of a run with a checkpoint; None: its change was refused.

    The run's configuration names a changed copy each time, and is put back. An input that is not read is left out.
    """
    path = run / "config.json"
    original = path.read_bytes()
    for name, key, value in _changed(config, scratch):
        (run / "summary.json").unlink(missing_ok=True)  # of a finished run nothing is continued
        try:
            path.write_bytes(_with(original, key, value))
            resume(run, device=device)
            wrong = "the run continued with a changed one"
        except InputsChanged:
            wrong = ""
        except StillroomError as error:
            wrong = f"another error came first: {error.what}"
        finally:
            path.write_bytes(original)
        yield name, Difference("input", name, wrong) if wrong else None


def _changed(config: Config, scratch: Path) -> Iterator[tuple[str, str, Any]]:
    """(input, the setting that names it, a changed one)."""
    yield "data", "data.train_share", config.data.train_share / 2  # as if half of the documents were gone
    asks_teacher, is_cut = Curriculum.of(config).uses_teacher, config.student.init == "shrink"
    if uses_cache(config) and config.teacher.cache != AUTO:
        yield "teacher", "teacher.cache", _copied(folder_of(str(config.teacher.cache)), scratch / "cache", CACHE)
    elif (asks_teacher or is_cut) and not config.teacher.server and not config.teacher.is_student:
        yield "teacher", "teacher.model", _other_model(config.teacher, scratch / "teacher")
    if not is_cut:
        yield "student", "student.model", _other_model(config.student, scratch / "student")


def _other_model(section: StudentConfig | TeacherConfig, place: Path) -> str:
    """A copy of a model in which one bit of its weights is another; of one without weights, its configuration."""
    reads_weights = not (isinstance(section, StudentConfig) and section.init == "random")
    source = fetch(section, section.model, weights=reads_weights)
    if source.is_gguf:
        place = place.with_suffix(".gguf")
        _spoil(source.folder, place)
        return str(place)
    weights = sorted(source.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size) if reads_weights else []
    return _copied(source.folder, place, weights[0].name if weights else "config.json")


def _copied(folder: Path, place: Path, spoiled: str) -> str:
    """A folder of links to the files of another one, but for one file, which is a changed copy."""
    place.mkdir()
    for path in folder.iterdir():
        if path.name != spoiled:
            (place / path.name).symlink_to(path.resolve())
    _spoil(folder / spoiled, place / spoiled)
    return str(place)


def _spoil(path: Path, place: Path) -> None:
    contents = bytearray(path.read_bytes())
    if path.suffix == ".json":
        told = json.loads(contents)
        told.get("teacher", told)["changed_by_verify_resume"] = "yes"
        contents = bytearray(json.dumps(told).encode())
    else:
        contents[-1] ^= 1
    place.write_bytes(contents)


def _with(contents: bytes, key: str, value: Any) -> bytes:
    """A run's config.json with one setting changed."""
    told = json.loads(contents)
    section, name = key.split(".")
    told["config"][section][name] = value
    told["paths"].pop(key, None)
    return json.dumps(told).encode()
