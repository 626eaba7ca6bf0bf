"""A run on the Hub: each checkpoint is a commit, a kill loses nothing, and no fault of the Hub stops training."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import arguments
from commands import run as command
from hub_server import TOKEN, Hub, hub_server

from stillroom.config import load_config
from stillroom.core.errors import CannotSave, CheckpointUnusable, ConfigError
from stillroom.core.files import sum_of_file
from stillroom.core.hub import HubStore, Repository
from stillroom.core.remote import COMMIT, Commit
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.run_folder import folder_of, opened

URL = "hf://org/run"
SETTINGS = {
    "train__max_steps": 6, "train__eval_steps": 3, "train__save_steps": 2, "eval__samples": 0,
    "checkpoint__background": "off",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    with hub_server(monkeypatch) as server:
        yield server


@pytest.fixture
def undisturbed(shared_run: Callable[..., Any]) -> bytes:
    return student(shared_run(**SETTINGS).folder)


@pytest.fixture
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Go to another machine: nothing of this one's folders is there."""
    return lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))


def train(world: Path, url: str = URL, on_step: Callable[[int], object] = bool) -> Any:
    """Train and wait for the upload after each step, so that what was sent does not depend on speed."""

    def wait(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            sender.wait()
            on_step(event["step"])

    with opened(url) as place:
        assert place.sender is not None
        sender = place.sender
        config = load_config(overrides=tiny.settings(world, **SETTINGS))
        return distill(config, url, device="cpu", listeners=(wait,))


def student(folder: Path) -> bytes:
    return (folder / "student" / "model.safetensors").read_bytes()


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note")


def without_token(folder: Path, *texts: str) -> bool:
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return bool(files) and not any(TOKEN.encode() in one for one in [*files, *(text.encode() for text in texts)])


def test_a_kill_between_upload_and_commit_loses_nothing_and_the_run_continues_elsewhere_bit_for_bit(
    world: Path, tmp_path: Path, hub: Hub, undisturbed: bytes, move: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_at_the_third(_method: str, path: str) -> Any:
        if path.startswith("/process/"):
            child.append(int(path.removeprefix("/process/")))
            return 200, {}
        if "/commit/" in path and hub.count("/commit/") == 3:
            os.kill(child[0], signal.SIGKILL)
            return "drop"
        return None

    def killed() -> None:
        urllib.request.urlopen(f"{hub.url}/process/{os.getpid()}").close()
        train(world)

    child: list[int] = []
    hub.fault = kill_at_the_third
    assert tiny.in_child(killed) == -9
    repo = hub.repos["org/run"]
    assert repo.titles[1:] == ["Stillroom: step-000002", "Stillroom: step-000004"] and repo.private
    assert not [name for name in repo.head() if "step-000006" in name], "what was uploaded and not committed"
    num_sent = hub.count("/large/")
    move()
    code, out, err = command(capsys, "resume", URL, "--device", "cpu", "--json")
    assert code == 0 and repo.head()["student/model.safetensors"] == student(folder_of(URL)) == undisturbed, err
    assert hub.count("/large/") - num_sent <= 2, "the checkpoint that had arrived is not sent again"
    assert without_token(tmp_path, out, err), "the token is in no file and no output"
    held = b"".join(repo.head().values())
    assert TOKEN.encode() not in held and repo.titles[-1].endswith("finished")


def test_a_hub_that_fails_for_a_while_and_a_person_who_edits_disturb_nothing(
    world: Path, tmp_path: Path, hub: Hub, undisturbed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(_method: str, path: str) -> Any:
        if "/preupload/" not in path:
            return None
        if hub.count("/preupload/") <= 30:  # all tries of one upload
            return 503, f"no {TOKEN}"
        repo = hub.repos["org/run"]
        if len(repo.titles) == 1:
            repo.commit("main", {**repo.head(), "LICENSE": b"mine"}, "edited on the website")
        return None

    hub.fault, hub.seconds = away, 0.002
    code, out, err = command(capsys, *arguments(world, Path(URL), **SETTINGS))
    repo = hub.repos["org/run"]
    assert code == 0 and student(folder_of(URL)) == undisturbed == repo.head()["student/model.safetensors"], err
    assert repo.head()["LICENSE"] == b"mine" and repo.titles[1] == "edited on the website"
    assert "uploads failed" in out
    assert without_token(tmp_path, out, err)


def test_a_hub_that_is_away_at_the_end_leaves_the_run_here_and_resume_sends_it(
    world: Path, hub: Hub, undisturbed: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(step: int) -> None:
        if step == 6:
            hub.fault = lambda _method, path: (403, f"storage is full {TOKEN}") if "/commit/" in path else None

    with pytest.raises(CannotSave) as failed:
        train(world, on_step=away)
    here = folder_of(URL)
    assert f"stillroom resume {URL}" in str(failed.value) and str(here) in str(failed.value)
    assert TOKEN not in str(failed.value) and student(here) == undisturbed
    hub.fault = lambda _method, _path: None
    code, out, _err = command(capsys, "resume", URL, "--device", "cpu")
    repo = hub.repos["org/run"]
    assert code == 0 and repo.head()["student/model.safetensors"] == undisturbed and TOKEN not in out
    steps = [event["step"] for event in read_events(here / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, 7)), "nothing is trained again"


def test_a_damaged_file_falls_back_to_the_checkpoint_before_and_without_one_ends_with_25(
    world: Path, hub: Hub, undisturbed: bytes, move: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(world)
    repo = hub.repos["org/run"]
    whole = {name: held for name, held in repo.head().items() if name != "summary.json"}
    broken = sorted(name for name in whole if name.startswith("checkpoints/") and name.endswith("student.safetensors"))
    for count in (1, len(broken)):
        damaged = {name: whole[name][:-1] + b"?" for name in broken[-count:]}
        repo.commit("main", {**whole, **damaged}, "damaged")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{count}"))
        if count == 1:
            folder = resume(URL, device="cpu").folder
            assert student(folder) == undisturbed and "student.safetensors" in notes(folder)
        else:
            with pytest.raises(CheckpointUnusable) as refused:
                resume(URL, device="cpu")
            assert refused.value.exit_code == 25


def test_a_process_whose_run_another_has_continued_ends_with_24_and_sends_nothing(world: Path, hub: Hub) -> None:
    def continue_it(step: int) -> None:
        repo = hub.repos["org/run"]
        if step == 3:
            other = Commit.parse(repo.head()[COMMIT]).model_copy(update={"id": "of another"})
            repo.commit("main", {**repo.head(), COMMIT: other.to_bytes()}, "other")

    with pytest.raises(CannotSave):
        train(world, on_step=continue_it)
    assert hub.repos["org/run"].titles[-1] == "other"


def test_two_that_send_in_the_same_moment_are_told_apart_by_the_parent(hub: Hub, tmp_path: Path) -> None:
    store = HubStore(URL).own()
    store.prepare()
    repo, path = hub.repos["org/run"], tmp_path / "config.json"
    path.write_bytes(b"{}")
    mine = Commit(id="mine", files={"config.json": sum_of_file(path)})

    def other_is_first(_method: str, path: str) -> Any:
        if "/commit/" in path and len(repo.titles) == 1:
            repo.commit("main", {COMMIT: Commit(id="other", files={}).to_bytes()}, "other")

    hub.fault = other_is_first
    with pytest.raises(CannotSave):
        store.send({"config.json": path}, mine, {})
    assert repo.titles == ["initial commit", "other"]


def test_a_run_on_a_branch_begins_empty_and_leaves_the_model_on_main(world: Path, hub: Hub, move: Any) -> None:
    url = "hf://org/run@tries"
    Repository("org/run").create(private=True)
    repo = hub.repos["org/run"]
    model = {**repo.head(), "config.json": b"{}", "model.safetensors": b"published"}
    repo.commit("main", model, "a model")
    with pytest.raises(ConfigError):
        train(world)
    assert repo.titles[-1] == "a model", "nothing of it was touched"
    train(world, url)
    assert repo.head() == model
    assert "model.safetensors" not in repo.head("tries") and "events.jsonl" in repo.head("tries")
    move()
    assert resume(url, device="cpu").summary["steps"] == 6


def test_a_typo_in_resume_and_a_run_that_cannot_begin_create_nothing(
    world: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _out, _err = command(capsys, "resume", "hf://org/typo")
    assert code == 2 and not hub.repos
    with pytest.raises(CannotSave):
        train(world, "hf://strangers/run")
    assert not list(folder_of("hf://strangers/run").glob("*.json*")) and not hub.repos
    monkeypatch.setenv("HF_TOKEN", "hf_" + "y" * 34)
    code, out, err = command(capsys, "resume", URL)
    assert code == 2 and "HF_TOKEN" in err and "y" * 30 not in out + err


def test_commands_read_a_run_on_the_hub_and_a_public_one_is_remarked_upon(
    world: Path, hub: Hub, capsys: pytest.CaptureFixture[str], move: Any
) -> None:
    Repository("org/run").create(private=False)
    result = train(world)
    assert "public" in notes(result.folder)
    move()
    code, out, err = command(capsys, "report", URL)
    assert code == 0 and out.strip() == f"{URL}/report.html" and "report.html" in hub.repos["org/run"].head(), err
    earlier = next(sha for sha, files in hub.repos["org/run"].commits.items() if "student/model.safetensors" in files)
    words = ("--prompt", "the still", "--max-new-tokens", "2")
    assert command(capsys, "generate", f"{URL}@{earlier}", *words)[0] == 0
    assert command(capsys, "diagnose", URL)[0] == 0
