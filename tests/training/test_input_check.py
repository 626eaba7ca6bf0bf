"""A resumed run reads what it read before, or says that it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.core.errors import InputsChanged, Interrupted
from stillroom.models import files as identity
from stillroom.report import write_report
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result
from stillroom.training.loop import Stop


@pytest.fixture(scope="module")
def original(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, two files of data and a run that was stopped after its second step."""
    home = tmp_path_factory.mktemp("original") / "home"
    shutil.copytree(world, home)
    (home / "data").mkdir()
    for number in range(2):
        tiny.save_text(home / "data" / f"{number}.jsonl", 60, seed=number)
    settings = tiny.settings(home, data__train=str(home / "data" / "*.jsonl"), eval__samples=0)
    with pytest.MonkeyPatch.context() as patch:
        wanted = iter([False, True])
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            distill(load_config(overrides=settings), home / "run", device="cpu")
    return home.rename(home.with_name("moved"))  # so that copies of it find their own files


@pytest.fixture
def home(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "home"))


def add_a_file(home: Path) -> None:
    tiny.save_text(home / "data" / "2.jsonl", 60, seed=2)


def change_a_document(home: Path) -> None:
    path = home / "data" / "0.jsonl"
    first, rest = path.read_text().split("\n", 1)
    record = json.loads(first)
    words = record["text"].split()
    path.write_text(json.dumps({"text": " ".join(reversed(words))}) + "\n" + rest)


def change_the_order(home: Path) -> None:
    path = home / "data" / "0.jsonl"
    path.write_text("".join(f"{line}\n" for line in reversed(path.read_text().splitlines())))


def other_teacher(home: Path) -> None:
    shutil.rmtree(home / "teacher")
    tiny.save_model(home / "teacher", seed=7, width=48, num_layers=3)


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 1
    path.write_bytes(contents)


def other_student_configuration(home: Path) -> None:
    path = home / "student" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))


CHANGES: dict[str, Callable[[Path], None]] = {
    "a file more": add_a_file,
    "another document": change_a_document,
    "another order": change_the_order,
    "another teacher": other_teacher,
    "a bit of the teacher": lambda home: flip_a_bit(home / "teacher" / "model.safetensors"),
    "a bit of the student": lambda home: flip_a_bit(home / "student" / "model.safetensors"),
    "another configuration": other_student_configuration,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_whose_inputs_changed_is_refused_with_25(home: Path, change: str) -> None:
    CHANGES[change](home)
    checkpoints = sorted(path.name for path in (home / "run" / "checkpoints").iterdir())
    with pytest.raises(InputsChanged) as refused:
        resume(home / "run", device="cpu")
    assert refused.value.exit_code == 25
    assert sorted(path.name for path in (home / "run" / "checkpoints").iterdir()) == checkpoints


def finished(home: Path, **options: Any) -> tuple[Result, list[dict[str, Any]]]:
    result = resume(home / "run", device="cpu", **options)
    return result, list(read_events(home / "run" / "events.jsonl"))


def test_the_same_inputs_elsewhere_are_the_same(home: Path) -> None:
    """Times, places and the way weights are cut into files do not count."""
    for path in home.rglob("*.jsonl"):
        path.touch()
    result, events = finished(home)
    assert result.summary["status"] == "done" and "changed_inputs" not in result.summary
    assert not [event for event in events if event["event"] == "changed_inputs"]


def test_accepted_changes_are_in_the_log_the_summary_and_the_report(home: Path) -> None:
    add_a_file(home)
    other_teacher(home)
    before = next(event for event in read_events(home / "run" / "events.jsonl") if event["event"] == "teacher_eval")
    result, events = finished(home, accept_changed_inputs=True)
    (changed,) = [event for event in events if event["event"] == "changed_inputs"]
    assert changed["step"] == 2 and len(changed["changes"]) == 3  # teacher, train, eval
    assert result.summary["changed_inputs"] == [{"step": 2, "changes": changed["changes"]}]
    assert result.summary["teacher"]["perplexity"] != before["perplexity"], "it describes the teacher that taught"
    report = write_report(home / "run").read_text()
    assert "with changed inputs" in report


def test_a_run_without_hashes_goes_on_with_a_note(home: Path) -> None:
    """As versions before wrote them."""
    import hashlib

    for path in (home / "run" / "checkpoints").glob("step-*"):
        state, manifest = (
            json.loads((path / "state.json").read_text()),
            json.loads((path / "manifest.json").read_text()),
        )
        del state["inputs"]
        contents = json.dumps(state).encode()
        (path / "state.json").write_bytes(contents)
        manifest["files"]["state.json"] = {"sha256": hashlib.sha256(contents).hexdigest(), "bytes": len(contents)}
        (path / "manifest.json").write_text(json.dumps(manifest))
    add_a_file(home)
    result, events = finished(home)
    assert result.summary["status"] == "done"
    assert [event for event in events if event["event"] == "note" and "no hashes" in event["text"]]


def test_the_weights_of_a_model_are_read_for_its_hash_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    tensors = identity._tensors
    monkeypatch.setattr(identity, "_tensors", lambda path: hashed.append(path) or tensors(path))
    identity._hash.cache_clear()
    settings = tiny.settings(world, train__max_steps=2, eval__samples=0, teacher__cache="auto")
    distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    assert sorted(path.parent.name for path in hashed) == ["student", "teacher"]
