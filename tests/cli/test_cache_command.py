"""`stillroom cache` as a person types it: what it says, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from stillroom.cli import main
from stillroom.core.errors import Interrupted
from stillroom.teachers.cache import writer
from stillroom.teachers.cache.reader import Cache
from stillroom.training import write_cache


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    tiny.save_trained(folder / "teacher", width=32, num_layers=1, steps=20)
    tiny.save_model(folder / "student", "llama", width=16, num_layers=1, seed=2)
    tiny.save_text(folder / "train.jsonl", count=40)
    table: dict[str, dict[str, object]] = {}
    for key, value in tiny.settings(folder, eval__samples=0, train__max_steps=4).items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    (folder / "run.json").write_text(json.dumps(table))
    return folder


def ended(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def words(small: Path, out: Path, *more: str) -> list[str]:
    return ["cache", str(small / "run.json"), "--out", str(out), "--device", "cpu", *more]


def test_the_command_writes_tells_and_is_done_at_once_the_second_time(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(words(small, tmp_path / "cache")) == 0
    said = capsys.readouterr().out
    assert said.count("minutes left") == 1, "a short cache has one line of progress, its last"
    for word in ("tokens/s", "MB", "minutes left", "top 8 tokens exactly and 12 drawn", "bytes a position"):
        assert word in said
    monkeypatch.setattr(write_cache, "open_live", lambda *_: pytest.fail("the teacher was loaded for nothing"))
    assert ended(words(small, tmp_path / "cache", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == told["rows_of_the_data"] == Cache(tmp_path / "cache").num_rows
    assert told["bytes_per_position"] < 60


def test_info_and_verify_say_what_is_there(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(words(small, tmp_path / "cache", "--set", "teacher.signal.kind=top_k", "--set", "teacher.signal.k=5"))
    capsys.readouterr()
    assert ended(["cache", "info", str(tmp_path / "cache")]) == 0
    said = capsys.readouterr().out
    assert "its top 5 tokens and the exact mass of the rest" in said and "mass" in said
    assert ended(["cache", "verify", str(tmp_path / "cache"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True


def test_verify_finds_a_flipped_byte_and_names_shard_and_row(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(words(small, tmp_path / "cache"))
    (path,) = (tmp_path / "cache" / "shards").iterdir()
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(bytes(held))
    capsys.readouterr()
    assert ended(["cache", "verify", str(tmp_path / "cache")]) == 20
    said = " ".join(capsys.readouterr().err.split())
    assert path.name in said and "row" in said and "checksum" in said and "Traceback" not in said


def test_a_time_limit_ends_with_75_and_the_same_command_goes_on(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stillroom.training.loop.Stop.is_late", lambda _self: True)
        assert ended(words(small, tmp_path / "cache", "--max-minutes", "1")) == Interrupted.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert "rows left to ask" in said and "time limit" in said
    assert ended(words(small, tmp_path / "cache")) == 0


def test_a_full_disk_ends_with_24(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, held: bytes, **options: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer, "write_atomically", refuse)
    assert ended(words(small, tmp_path / "cache")) == 24
    assert "No space left" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "given",
    [["cache"], ["cache", "info"], ["cache", "verify", "nowhere"], ["cache", "a.json"], ["cache", "none.json", "dir"]],
    ids=" ".join,
)
def test_words_that_do_not_make_a_command_end_with_2(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(given) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_dense_answers_are_refused(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(words(small, tmp_path / "cache", "--set", "teacher.signal.kind=dense")) == 2
    assert "no dense answers" in capsys.readouterr().err and not (tmp_path / "cache").exists()


def test_several_temperatures_are_asked_for_at_once(small: Path, tmp_path: Path) -> None:
    given = words(small, tmp_path / "both", "--temperature", "1", "--temperature", "2")
    assert ended(given) == 0
    found = [Cache(tmp_path / "both" / f"temperature-{degree}") for degree in (1, 2)]
    assert [cache.manifest.signal.temperature for cache in found] == [1.0, 2.0]
    alone = tmp_path / "alone"
    assert ended(words(small, alone, "--set", "objectives.kd.temperature=2.0")) == 0
    assert [path.read_bytes() for path in (alone / "shards").iterdir()] == [
        shard.path.read_bytes() for shard in found[1].shards
    ]


@pytest.mark.slow
def test_two_processes_write_one_cache_and_train_what_the_live_teacher_trains(small: Path, tmp_path: Path) -> None:
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, setting in (("stored", "teacher.cache=auto"), ("live", "teacher.signal.kind=hybrid")):
        given = ["distill", str(small / "run.json"), "--out", str(tmp_path / name), "--device", "cpu", "--set", setting]
        subprocess.run([*runner, "-m", "stillroom", *given], check=True, timeout=240, env=environment)
    mine, theirs = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("stored", "live"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
