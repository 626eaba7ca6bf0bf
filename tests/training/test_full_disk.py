"""A disk that is full, really: nothing already good is lost, and the end is 24."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from refusals import refused
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stillroom.cli import main
from stillroom.config import load_config
from stillroom.core.errors import CannotSave
from stillroom.core.files import replaced_folder, write_atomically
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of so many kilobytes."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(kilobytes: int, *options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={kilobytes}k", *options)), "tmpfs", str(place)]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def size(world: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Kilobytes of a finished run, its two checkpoints and the student."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    distill(load_config(overrides=tiny.settings(world)), folder, device="cpu")
    return sum(path.stat().st_size // 1024 + 4 for path in folder.rglob("*"))


@pytest.mark.parametrize("share", [0.08, 0.14, 0.2, 0.3])
def test_a_disk_of_any_size_costs_no_finished_work(
    world: Path, disk: Disk, size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = disk(int(size * share))
    config = load_config(overrides=tiny.settings(world))
    summary, refused = {}, None
    try:
        summary = distill(config, place / "run", device="cpu").summary
    except CannotSave as error:
        refused = error
    if refused is not None:
        assert refused.exit_code == 24 and refused.advice
        subprocess.run(["mount", "-o", f"remount,size={2 * size}k", str(place)], check=True)
        reached = CheckpointStore(place / "run" / "checkpoints").steps()
        summary = resume(place / "run", device="cpu").summary
        resumed = [line for line in (place / "run" / "events.jsonl").read_text().splitlines() if '"resume"' in line]
        assert not reached or json.loads(resumed[-1])["step"] == reached[0], "what was saved was used"
    assert summary["status"] == "done" and (place / "run" / "student" / "config.json").exists()
    assert not list((place / "run").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (PreTrainedModel, SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
        (PreTrainedModel, OSError(122, os.strerror(122))),
        (PreTrainedTokenizerBase, Exception("No space left on device (os error 28)")),
    ],
    ids=["safetensors", "quota", "tokenizers"],
)
def test_whatever_a_library_raises_when_the_disk_is_full_ends_with_24(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: Any
) -> None:
    config = load_config(overrides=tiny.settings(world, train__max_steps=2, train__eval_steps=1, eval__samples=0))
    with monkeypatch.context() as patch:

        def full(*_args: Any, **_options: Any) -> None:
            raise error

        patch.setattr(kind, "save_pretrained", full)
        with refused(CannotSave, "student"):
            distill(config, tmp_path / "run", device="cpu")
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2], "older ones made room"
    assert not list((tmp_path / "run").glob(".tmp-*"))
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"


def test_a_student_refused_for_another_reason_costs_no_checkpoint(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("some tensors share memory")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", refuse)
    with refused(CannotSave, "student", "share memory"):
        distill(load_config(overrides=tiny.settings(world)), tmp_path / "run", device="cpu")
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [8, 4]


@pytest.mark.parametrize("name", ["config.json", "summary.json", "report.html"])
def test_a_file_that_cannot_be_written_ends_with_24_and_leaves_the_old_one(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = ["--set", "train.max_steps=2", "--set", "train.eval_steps=2", "--set", "eval.samples=0"]
    words = ["distill", "--out", str(tmp_path / "run"), "--device", "cpu", *config]
    for key, value in tiny.settings(world, train__max_steps=2, train__eval_steps=2, eval__samples=0).items():
        words += ["--set", f"{key}={value}"]
    replaced = Path.replace

    def refuse(self: Path, target: Any) -> Path:
        if Path(target).name == name:
            raise OSError(28, os.strerror(28))
        return replaced(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(SystemExit) as ended:
            main(words)
    assert ended.value.code == 24
    said = " ".join(capsys.readouterr().err.split())  # where a line breaks depends on the length of the path
    assert "No space left" in said and "Traceback" not in said
    main(words)
    assert (tmp_path / "run" / name).exists() and not list((tmp_path / "run").glob("*.tmp"))


def test_a_failed_replacement_leaves_the_old_file_and_the_old_folder(tmp_path: Path, disk: Disk) -> None:
    place = disk(64)
    write_atomically(place / "file", b"old")
    with replaced_folder(place / "folder") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError, match="No space"):
        write_atomically(place / "file", b"x" * 100_000)
    with pytest.raises(OSError, match="No space"), replaced_folder(place / "folder") as folder:
        (folder / "a").write_bytes(b"x" * 100_000)
    assert (place / "file").read_bytes() == b"old" and (place / "folder" / "a").read_text() == "old"
    assert sorted(path.name for path in place.iterdir()) == ["file", "folder"]
    assert shutil.disk_usage(place).free > 0
