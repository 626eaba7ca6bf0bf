"""Every end has its code and its words: nothing but an explanation reaches a user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commands import Command, arguments

from stillroom.config import load_config
from stillroom.core.errors import CheckpointUnusable, Interrupted
from stillroom.telemetry import EventLog, read_events
from stillroom.training import distill as room
from stillroom.training import finish, loop
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.run import Pace

# -- faults of ours --------------------------------------------------------------------------------------


def test_a_fault_of_ours_ends_with_70_and_a_traceback_in_the_run_s_folder(
    stillroom: Command, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_(*_args: Any) -> None:
        raise ZeroDivisionError("a \x1b[31mred herring")

    monkeypatch.setattr(room, "first_forward", break_)
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"))
    assert code == 70 and "ZeroDivisionError" in err and "Traceback" not in err and "\x1b" not in err
    (kept,) = (tmp_path / "run").glob("traceback-*.txt")
    assert kept.name in err.replace("\n", "").replace(" ", "") and "break_" in kept.read_text()
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert end["event"] == "run_end" and end["exit_code"] == 70
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_fault_without_a_run_keeps_its_traceback_among_temporary_files(
    stillroom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("stillroom.cli.inspect.preset_text", lambda _name: 1 / 0)
    code, _out, err = stillroom("presets", "base")
    assert code == 70 and "ZeroDivisionError" in err
    assert len(list(tmp_path.glob("traceback-*.txt"))) == 1


class PanicException(BaseException):
    """What a library in Rust raises when it panics."""


def test_a_panic_ends_as_a_fault_does(
    stillroom: Command, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_(*_args: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(room, "first_forward", break_)
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"))
    assert code == 70 and "PanicException" in err and "Traceback" not in err
    assert len([*tmp_path.rglob("traceback-*.txt")]) == 1
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert end["event"] == "run_end" and end["exit_code"] == 70


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 GB")]
)
def test_too_little_memory_is_explained(
    stillroom: Command, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_args: Any) -> None:
        raise error

    monkeypatch.setattr(room, "first_forward", full)
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"))
    assert code == 20 and "memory" in err and "train.batch_size" in err


def test_a_yardstick_that_is_infinite_can_be_saved(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = room._before

    def odd(*args: Any) -> dict[str, Any]:
        found = before(*args)
        found["student_before"]["bits_per_byte"] = float("inf")
        return found

    monkeypatch.setattr(room, "_before", odd)
    result = distill(load_config(overrides=tiny.settings(world)), tmp_path / "run", device="cpu")
    row = json.loads((result.folder / "summary.json").read_text())["student_before"]
    assert row["bits_per_byte"] is None and row["bits_per_byte_nonfinite"] == "inf"


# -- bad words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["file/run", "/proc/nope/run", "x" * 300, "nul\0l"])
def test_a_folder_that_cannot_be_made_is_told(stillroom: Command, world: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    code, _out, err = stillroom(*arguments(world, Path(out)))
    assert code == 2 and "--out" in err and "Traceback" not in err


def test_a_folder_on_a_disk_that_refuses_is_24(
    stillroom: Command, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"))
    assert code == 24 and "Permission denied" in " ".join(err.split())


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.toml", b'[train]\nschedule = "\xe9t\xe9"', "not UTF-8"),
        ("a.toml", bytes(range(256)) * 8, "not UTF-8"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.toml", b"a = " + b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"train": {"seed": 1, "seed": 2}}', "stands twice"),
        ("a.json", b'{"train": {"seed": ' + b"9" * 5000 + b"}}", "not valid JSON"),
        ("a.toml", b"#" * 100_000_000, "100 MB"),
        ("a.toml", b"preset = 5", "no preset 5"),
        ("a.toml", b"[train]\nseed = 18446744073709551616", "train.seed"),
    ],
    ids=["latin-1", "binary", "nested", "nested-toml", "duplicate", "digits", "huge", "preset", "seed"],
)
def test_a_configuration_of_any_kind_ends_with_2(
    stillroom: Command, tmp_path: Path, name: str, contents: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(contents)
    code, _out, err = stillroom("distill", name)
    assert code == 2 and said in " ".join(err.split()) and len(err) < 1000


@pytest.mark.parametrize(
    "words",
    [
        ["distill", "--preset", "base", "--device", "fo\x1b[31mo"],
        ["di\x1b[31mstill"],
        ["distill", "--\x1b[31mx"],
        ["presets", "\x1b]0;title\x07"],
    ],
)
def test_nothing_that_is_echoed_moves_the_cursor(stillroom: Command, words: list[str]) -> None:
    code, out, err = stillroom(*words)
    assert code == 2 and "\x1b" not in out + err and err


def test_a_device_that_is_not_there_is_20(stillroom: Command) -> None:
    code, _out, err = stillroom("distill", "--preset", "base", "--device", "meta")
    assert code == 20 and "--device cpu" in err


def test_output_that_nobody_reads_is_quiet() -> None:
    pipe = f"{sys.executable} -m stillroom presets | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() in ("0", "141")


def test_a_run_whose_console_is_closed_goes_on(tmp_path: Path) -> None:
    def closed(_record: dict[str, Any]) -> None:
        raise BrokenPipeError(32, os.strerror(32))

    with EventLog(tmp_path / "events.jsonl") as log:
        log.listen(closed)
        log.write("step", step=1)
        log.write("step", step=2)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["step", "note", "step"]


# -- damaged folders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    distill(load_config(overrides=tiny.settings(world, eval__max_batches=4)), folder, device="cpu")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_summary_is_written_again(run: Path, contents: bytes) -> None:
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_bytes(contents)
    again = resume(run, device="cpu").summary
    assert again["student"] == before["student"] and again["status"] == "done"


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"config": 5}', b"\xff\xfe", b"[" * 100_000, b'{"a": 1}'])
def test_a_damaged_config_ends_with_2(stillroom: Command, run: Path, contents: bytes) -> None:
    (run / "config.json").write_bytes(contents)
    code, _out, err = stillroom("resume", str(run))
    assert code == 2 and "config.json" in err and "Traceback" not in err


@pytest.mark.parametrize("field", ["format", "step", "files", "files.optimizer.safetensors", "files.state.json"])
def test_a_manifest_without_a_field_falls_back_and_then_ends_with_25(run: Path, field: str) -> None:
    (run / "summary.json").unlink()
    newest, older = (run / "checkpoints" / f"step-{step:06d}" / "manifest.json" for step in (8, 4))

    def spoil(path: Path) -> None:
        manifest = json.loads(path.read_text())
        section, _dot, name = field.partition(".")
        del (manifest[section] if name else manifest)[name or section]
        path.write_text(json.dumps(manifest))

    spoil(newest)
    saved = room.newest_state(run, load_config(), room.Parallel())[0]
    assert saved is not None and saved.step == 4 and "step-000008" in saved.rejected[0]
    spoil(older)
    with pytest.raises(CheckpointUnusable) as caught:
        resume(run, device="cpu")
    assert caught.value.exit_code == 25


# -- stopping --------------------------------------------------------------------------------------------


def test_a_stopped_run_leaves_the_best_student_to_try(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    config = load_config(overrides=tiny.settings(world, train__eval_steps=2, eval__max_batches=4))
    wanted = iter([False] * 15 + [True])  # in the evaluation of step 4, after that of step 2 chose a best
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, True))
        with pytest.raises(Interrupted):
            distill(config, tmp_path / "run", device="cpu")
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").load_newest()
    assert newest is not None and newest.scalars["state"]["best_step"] > 0
    student = load_file(tmp_path / "run" / "student" / "model.safetensors")
    for name, tensor in newest.tensors["best"].items():
        assert torch.equal(tensor, student[name])


@pytest.mark.parametrize("moment", [2, 5, 9, 12])
def test_a_stop_at_any_moment_changes_nothing_that_is_trained(
    world: Path, tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """Between steps and between the batches of an evaluation, that of the last step included."""
    config = load_config(overrides=tiny.settings(world, eval__max_batches=4))
    wanted = iter([False] * moment + [True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            distill(config, tmp_path / "run", device="cpu")
    before = read_events(tmp_path / "run" / "events.jsonl")
    steps = [event["step"] for event in before if event["event"] == "checkpoint"]
    assert len(steps) == len(set(steps)), "nothing is saved twice"
    resume(tmp_path / "run", device="cpu")
    one, other = (folder / "student" / "model.safetensors" for folder in (tmp_path / "run", finished))
    assert one.read_bytes() == other.read_bytes()
    assert told(tmp_path / "run") == told(finished)


def told(folder: Path) -> list[tuple[Any, ...]]:
    keys = {"step": "train_loss", "eval": "objective"}
    events = read_events(folder / "events.jsonl")
    return [(event["event"], event["step"], event[keys[event["event"]]]) for event in events if event["event"] in keys]


def test_the_time_limit_leaves_room_for_saving() -> None:
    stop = Stop(max_minutes=1.0)
    stop.heed_clock()
    assert not stop.is_wanted()
    stop.reserve = Pace(step_seconds=10.0, save_seconds=20.0).seconds_to_stop()
    assert stop.is_wanted() and "time limit" in stop.reason


def test_the_time_limit_waits_for_the_first_step() -> None:
    """Else a run resumed under a limit that is too short would never get further."""
    stop = Stop(max_minutes=1e-9)
    assert not stop.is_wanted()
    stop.heed_clock()
    assert stop.is_wanted()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_loading_ends_with_75_and_leaves_no_folder(
    world: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Sent from inside, in the middle of loading the models."""
    config = load_config(overrides=tiny.settings(world))

    def work() -> None:
        def load(*_args: Any, **_options: Any) -> None:
            os.kill(os.getpid(), number)
            time.sleep(60)

        room.load_models = load  # type: ignore[assignment]
        try:
            distill(config, tmp_path / "run", device="cpu")
        except Interrupted as error:
            os._exit(error.exit_code)

    assert tiny.in_child(work) == 75
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "is_trained", "code"),
    [("first_forward", False, 75), ("evaluate_held_out", True, 75), ("save_student", True, 0)],
)
def test_a_signal_before_the_first_step_or_after_the_last_loses_nothing(
    world: Path, tmp_path: Path, place: str, is_trained: bool, code: int
) -> None:
    """Once the student is being written, finishing is quicker than coming back."""
    config = load_config(overrides=tiny.settings(world, eval__samples=0))
    last = tmp_path / "run" / "checkpoints" / "step-000008"

    def work() -> None:
        module = finish if is_trained else room
        real, is_better = getattr(module, place), loop.is_better
        # The last student is not the best one, so that the best one is evaluated at the end.
        loop.is_better = lambda result, state: state.applied < 8 and is_better(result, state)

        def signalled(*args: Any, **options: Any) -> Any:
            if last.exists() == is_trained:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **options)

        setattr(module, place, signalled)
        try:
            distill(config, tmp_path / "run", device="cpu")
        except Interrupted as error:
            os._exit(error.exit_code)

    assert tiny.in_child(work) == code
    assert last.exists() == is_trained
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"


# -- how often -------------------------------------------------------------------------------------------


def test_saving_waits_until_it_takes_no_more_than_its_share() -> None:
    pace = Pace(is_save_fixed=False)
    assert not pace.is_save_worth_it(), "the first one, when there is little to lose"
    pace.saved(1000.0)
    assert not pace.is_save_worth_it()
    pace.saved(0.0)
    assert pace.is_save_worth_it()
    fixed = Pace(is_save_fixed=True)
    fixed.saved(1000.0)
    assert fixed.is_save_worth_it(is_saving=True), "an interval that was asked for is kept"
    assert not pace.is_save_worth_it(is_saving=True), "it would have to wait for the save in flight"
    assert pace.seconds_to_stop(is_saving=True) == pace.seconds_to_stop() == 0.0
    assert fixed.seconds_to_stop(is_saving=True) == 1.5 * fixed.seconds_to_stop(), (
        "that save, a checkpoint, the student"
    )
