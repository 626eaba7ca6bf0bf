"""A run's folder has one owner, is claimed only by a run that can begin, and may be moved."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import gguf_files
import pytest
import tiny

from stillroom.config import Config, load_config
from stillroom.core.errors import BrokenAtStart, CannotSave, ConfigError, Interrupted, StillroomError
from stillroom.core.locks import RUN_LOCK
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.run_folder import owned, read_config, take_lock


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """Another process that owns a folder until it is killed."""
    (tmp_path / "run").mkdir()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        take_lock(tmp_path / "run")
        os.write(told, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_process_is_told_who_owns_the_folder(world: Path, tmp_path: Path, other: int) -> None:
    with pytest.raises(ConfigError) as caught:
        distill(load_config(overrides=tiny.settings(world)), tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 2 and caught.value.advice
    assert str(other) in caught.value.what and socket.gethostname() in caught.value.what
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RUN_LOCK], "nothing is written beside the owner"


def test_a_folder_left_by_a_process_killed_while_loading_can_be_used(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world))
    tiny.in_child(lambda: (take_lock(tmp_path), os.kill(os.getpid(), signal.SIGKILL)))
    with owned(tmp_path, config) as claim:
        assert not claim.is_resumed


def test_what_a_killed_start_left_does_not_make_a_folder_foreign(world: Path, tmp_path: Path) -> None:
    """A choice of layers is kept before the run is described; it is of a run that never began."""
    (tmp_path / "cut.json").write_text("{}")
    with owned(tmp_path, load_config(overrides=tiny.settings(world))) as claim:
        assert not claim.is_resumed and not (tmp_path / "cut.json").exists()


@pytest.mark.parametrize("wrong", ["teacher__model", "student__model", "data__train"])
def test_a_mistyped_name_does_not_claim_the_folder(world: Path, tmp_path: Path, wrong: str) -> None:
    mistyped = load_config(overrides=tiny.settings(world, **{wrong: "./nowhere.jsonl"}))
    with pytest.raises(StillroomError):
        distill(mistyped, tmp_path / "new" / "run", device="cpu")
    assert not (tmp_path / "new").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(StillroomError):
        distill(mistyped, tmp_path / "run", device="cpu")
    assert list((tmp_path / "run").iterdir()) == [], "an empty folder that was there stays, empty"


@pytest.mark.parametrize(("made_again", "at"), [(False, "step"), (True, "step"), (True, "sample")])
def test_a_folder_deleted_under_a_run_ends_it_with_24(world: Path, tmp_path: Path, made_again: bool, at: str) -> None:
    folder = tmp_path / "run"

    def delete(event: dict[str, object]) -> None:
        if event["event"] == at and event.get("step", 2) == 2:
            while folder.exists():  # a checkpoint may just be moved to its place in there
                shutil.rmtree(folder, ignore_errors=True)
            if made_again:
                folder.mkdir()

    config = load_config(overrides=tiny.settings(world, eval__samples=1))
    with pytest.raises(CannotSave):
        distill(config, folder, device="cpu", listeners=(delete,))
    assert not folder.exists() or list(folder.iterdir()) == []


# -- paths -----------------------------------------------------------------------------------------------


def stopped(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: True)
        with pytest.raises(Interrupted):
            distill(config, folder, device="cpu")


def relative_settings(**over: object) -> dict[str, object]:
    return tiny.settings(Path("world"), **over)


def test_a_run_of_relative_paths_resumes_from_anywhere_and_after_a_move(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    shutil.copytree(world, home / "world")
    monkeypatch.chdir(home)
    config = load_config(overrides=relative_settings())
    stopped(config, Path("runs/a"), monkeypatch)
    monkeypatch.chdir(away)
    found = read_config(home / "runs" / "a")
    assert found.teacher.model == str(home / "world" / "teacher")
    stopped(found, home / "runs" / "a", monkeypatch)  # the same run, with absolute names
    stopped(config, home / "runs" / "a", monkeypatch)  # and with the words that were given first
    home.rename(tmp_path / "moved")
    assert read_config(tmp_path / "moved" / "runs" / "a").data.train == str(tmp_path / "moved/world/train.jsonl")
    assert resume(tmp_path / "moved" / "runs" / "a", device="cpu").summary["status"] == "done"


def test_the_same_word_for_other_files_is_another_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "world").symlink_to(world) if name == "one" else shutil.copytree(
            world, tmp_path / "two/world"
        )
    monkeypatch.chdir(tmp_path / "one")
    config = load_config(overrides=relative_settings())
    stopped(config, tmp_path / "run", monkeypatch)
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ConfigError):
        distill(config, tmp_path / "run", device="cpu")


def test_a_model_that_was_local_is_never_asked_of_a_hub(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    shutil.copytree(world / "teacher", tmp_path / "org" / "teacher")
    monkeypatch.chdir(tmp_path)
    config = load_config(overrides=tiny.settings(world, teacher__model="org/teacher"))
    stopped(config, tmp_path / "run", monkeypatch)
    shutil.rmtree(tmp_path / "org")
    with pytest.raises(BrokenAtStart):
        resume(tmp_path / "run", device="cpu")


def test_a_model_that_is_a_relative_file_is_found_from_another_directory(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_files.write(world / "teacher", tmp_path / "teacher.gguf")
    monkeypatch.chdir(tmp_path)
    config = load_config(overrides=tiny.settings(world, teacher__model="teacher.gguf"))
    stopped(config, tmp_path / "run", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_config(tmp_path / "run").teacher.model == str(tmp_path / "teacher.gguf")
    stopped(config, tmp_path / "run", monkeypatch)
