"""A run on the Hub: each checkpoint is a commit, a kill loses nothing, and no fault of the Hub stops training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import run as command
from hub_server import TOKEN, Hub, hub_server
from huggingface_hub import _commit_api

from stillroom.config import load_config
from stillroom.core.errors import CannotSave, CheckpointUnusable, ConfigError
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


@pytest.fixture(scope="module")
def undisturbed(shared_run: Callable[..., Any]) -> Path:
    return Path(shared_run(**SETTINGS).folder)


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SETTINGS, **over}))


def train(world: Path, url: str = URL, **options: Any) -> Any:
    """Train and wait for the upload after each step, so that what was sent does not depend on speed."""

    def wait(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            sender.wait()

    with opened(url) as place:
        assert place.sender is not None
        sender = place.sender
        return distill(config(world), url, device="cpu", listeners=(wait,), **options)


def student(folder: Path) -> bytes:
    return (folder / "student" / "model.safetensors").read_bytes()


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note")


def no_token_in(*texts: str | bytes, folders: tuple[Path, ...] = ()) -> None:
    held = [text.encode() if isinstance(text, str) else text for text in texts]
    held += [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert held and not any(TOKEN.encode() in one for one in held)


def test_a_kill_between_upload_and_commit_loses_nothing_and_the_run_continues_elsewhere_bit_for_bit(
    world: Path, tmp_path: Path, hub: Hub, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        send, calls = _commit_api._send_commit, []

        def send_or_die(**options: Any) -> Any:
            calls.append(options)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(**options)

        _commit_api._send_commit = send_or_die
        train(world)

    assert tiny.in_child(killed) == -9
    repo = hub.repos["org/run"]
    held = sorted(name for name in repo.head() if name.endswith("/manifest.json"))
    assert held == ["checkpoints/step-000002/manifest.json", "checkpoints/step-000004/manifest.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    result = resume(URL, device="cpu")
    assert student(result.folder) == student(undisturbed) == repo.head()["student/model.safetensors"]
    print(repo.titles)
    print(hub.requests)
