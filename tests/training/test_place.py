"""Laws of runs in a store: killed here it goes on elsewhere as the same run, and a store that is away costs nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tiny
from commands import run as command
from faulty_store import FaultyStore, faulty_store

import stillroom
from stillroom.config import load_config
from stillroom.core import remote
from stillroom.core.errors import BrokenAtStart, CannotSave, CheckpointUnusable, ConfigError, Interrupted
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.run_folder import folder_of, opened

SETTINGS = {"train__max_steps": 8, "train__eval_steps": 4, "train__save_steps": 2, "eval__samples": 0}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))


@pytest.fixture
def faulty() -> Iterator[type[FaultyStore]]:
    with faulty_store() as store:
        yield store


@pytest.fixture
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Go to another machine: nothing of this one's folders is there."""
    return lambda name="elsewhere": monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    distill(config(world), folder, device="cpu")
    return folder


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SETTINGS, **over}))


def student(folder: Path) -> bytes:
    return (folder / "student" / "model.safetensors").read_bytes()


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note")


def relative(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_killed_here_goes_on_elsewhere_bit_for_bit(
    world: Path, tmp_path: Path, undisturbed: Path, faulty: type[FaultyStore], move: Any
) -> None:
    store = tmp_path / "store" / "run"
    url = f"faulty://{store}"

    def killed() -> None:
        def wait_for_store(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                sender.wait()

        with opened(url) as place:
            assert place.sender is not None
            sender = place.sender
            settled = config(world, checkpoint__background="off")  # what was sent must not depend on speed
            distill(settled, url, device="cpu", inject="kill_before_rename@6", listeners=(wait_for_store,))

    faulty.fail_every = 3
    assert tiny.in_child(killed) == -9
    assert sorted(path.parent.name for path in store.rglob("manifest.json")) == ["step-000002", "step-000004"]
    move()
    result = resume(url, device="cpu")
    assert result.folder == folder_of(url) and str(tmp_path / "elsewhere") in str(result.folder)
    assert url in notes(result.folder), "the log says where it came from"
    assert student(result.folder) == student(undisturbed) == student(store)
    assert relative(store) - {".stillroom/commit.json"} == relative(result.folder)
    steps = [event["step"] for event in read_events(store / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, 9)), "the log has each step once"
    move("third")
    assert resume(url, device="cpu").summary == result.summary, "a finished run is returned"


def test_a_checkpoint_that_is_broken_in_the_store_falls_back_to_the_one_before(
    world: Path, tmp_path: Path, undisturbed: Path, faulty: type[FaultyStore], move: Any
) -> None:
    url, store = f"faulty://{tmp_path}/store/run", tmp_path / "store" / "run"
    distill(config(world), url, device="cpu")
    (store / "summary.json").unlink()
    shutil.copytree(store, tmp_path / "all-broken")
    weights = store / "checkpoints" / "step-000008" / "student.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    (store / "checkpoints" / "step-000006" / "manifest.json").rename(tmp_path / "manifest.json")
    faulty.late = {"step-000006/manifest.json"}  # a listing that is late: the index of the commit names it
    (tmp_path / "manifest.json").rename(store / "checkpoints" / "step-000006" / "manifest.json")
    move()
    folder = resume(url, device="cpu").folder
    assert student(folder) == student(undisturbed)
    assert "step-000008: student.safetensors" in notes(folder), "the log names what was not used"
    for path in (tmp_path / "all-broken" / "checkpoints").rglob("student.safetensors"):
        path.write_bytes(b"broken")
    move("third")
    with pytest.raises(CheckpointUnusable):
        resume(f"faulty://{tmp_path}/all-broken", device="cpu")


def test_a_store_that_is_away_costs_nothing_and_the_same_command_sends_the_run(
    world: Path, tmp_path: Path, undisturbed: Path, faulty: type[FaultyStore]
) -> None:
    url, store = f"faulty://{tmp_path}/store/run", tmp_path / "store" / "run"

    def fail(event: dict[str, Any]) -> None:
        faulty.is_away = faulty.is_away or event["event"] == "step"

    with pytest.raises(CannotSave) as caught:
        distill(config(world), url, device="cpu", listeners=(fail,))
    here = folder_of(url)
    assert caught.value.exit_code == 24 and str(here) in str(caught.value) and student(here) == student(undisturbed)
    assert sum(url in note and str(here) in note for note in notes(here).splitlines()) == 1, "it is said once"
    with pytest.raises(ConfigError):
        resume(url, device="cpu")
    faulty.is_away = False
    assert resume(url, device="cpu").folder == here
    assert student(store) == student(undisturbed)
    shutil.rmtree(store)
    with pytest.raises(ConfigError) as gone:
        resume(url, device="cpu")
    assert str(here.parent) in str(gone.value), "what is left here is named"


def test_a_folder_that_fell_behind_the_store_is_put_aside(
    world: Path, tmp_path: Path, undisturbed: Path, faulty: type[FaultyStore], move: Any
) -> None:
    url = f"faulty://{tmp_path}/store/run"
    assert tiny.in_child(lambda: distill(config(world), url, device="cpu", inject="kill_before_rename@6")) == -9
    move()
    resume(url, device="cpu")
    move("here")
    folder = resume(url, device="cpu").folder
    assert student(folder) == student(undisturbed) and (folder.parent / ".old-run").is_dir()


def test_one_run_at_a_time_and_nothing_is_left_of_one_that_could_not_begin(
    world: Path, tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    url = f"faulty://{tmp_path}/store/run"
    with opened(url), pytest.raises(ConfigError):
        _in_thread(lambda: distill(config(world), url, device="cpu"))
    with pytest.raises(BrokenAtStart):
        distill(config(world, teacher__model="./nowhere"), url, device="cpu")
    assert not relative(tmp_path / "store")
    (tmp_path / "store" / "photo.jpg").write_text("not ours")
    with pytest.raises(ConfigError):
        distill(config(world), f"faulty://{tmp_path}/store", device="cpu")


def _in_thread(work: Any) -> None:
    """As another process would: the places that are open are of this one."""
    from stillroom.training import run_folder

    known, run_folder._open = run_folder._open, {}
    try:
        work()
    finally:
        run_folder._open = known


def test_a_store_without_conditional_creation_is_said(world: Path, tmp_path: Path, faulty: type[FaultyStore]) -> None:
    faulty.ignores_exclusive = True
    with opened(f"faulty://{tmp_path}/store/run") as place:
        assert len(place.notes) == 1


def test_processes_on_several_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(BrokenAtStart), opened("memory://box/run"):
        pass


def test_a_run_of_objects_goes_on_elsewhere_with_the_inputs_it_began_with(
    world: Path, tmp_path: Path, move: Any
) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    settings = {key: value for key, value in tiny.settings(world, **SETTINGS).items() if key != "data.train"}
    records = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    with pytest.raises(Interrupted) as caught:
        stillroom.distill(
            data=records, out="memory://box/run", settings={**settings, "train.max_minutes": 1e-9}, device="cpu"
        )
    assert "stillroom resume memory://box/run" in str(caught.value), "the address, and not the folder of this machine"
    shutil.rmtree(tmp_path / "here")
    move()
    result = stillroom.resume("memory://box/run", device="cpu", max_minutes=0)
    assert result.summary["steps"] == 8 and list((result.folder / "inputs").iterdir())
    assert memory.exists("/box/run/report.html")
    memory.store.clear()


def test_the_commands_write_and_read_a_run_in_memory(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], move: Any
) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    words = ["distill", "--out", "memory://box/run", "--device", "cpu", "--no-progress", "--json"]
    for key, value in tiny.settings(world, **SETTINGS).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    code, out, err = command(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["folder"] == "memory://box/run" and memory.exists("/box/run/report.html")
    move()
    code, out, err = command(capsys, "resume", "memory://box/run", "--device", "cpu", "--json")
    assert code == 0, err
    assert [name for name in memory.store if "/.stillroom/" in name] == ["/box/run/.stillroom/commit.json"]
    memory.store.clear()
    assert os.environ["XDG_CACHE_HOME"].endswith("elsewhere")
