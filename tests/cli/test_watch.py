"""The commands that follow a run and compare several: from a pipe, before the run begins, and after it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import output, run
from synthetic import write_run

from stillroom.cli.inspect import _show_new
from stillroom.telemetry.events import EventLog
from stillroom.telemetry.record import Follower


def watching(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stillroom", "watch", str(folder), *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **streams)


def test_a_finished_run_is_shown_with_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "watch", "--verbose", str(write_run(tmp_path / "run", num_steps=60)))
    assert "earlier events" not in text and "step 60" in text and "57.1" in text
    assert text.index("step 10") < text.index("step 60")


def test_of_a_long_past_the_start_and_the_latest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "watch", str(write_run(tmp_path / "run", num_steps=600)))
    assert "earlier events are not shown" in text
    assert "builtin:teacher" in text, "the start of the run is shown all the same"
    assert "step 600" in text and "step 100 " not in text


@pytest.mark.parametrize("num_steps", [20, 300])
def test_of_a_resumed_run_one_start_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int
) -> None:
    folder = write_run(tmp_path / "run", num_steps=num_steps)
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    start = next(line for line in lines if '"run_start"' in line)
    log.write_text("".join([*lines[:-30], start, *lines[-30:]]))
    assert output(capsys, "watch", str(folder), "--no-wait").count("training data") == 1


def test_what_was_shown_before_a_resume_is_not_shown_again(tmp_path: Path) -> None:
    shown: list[Any] = []
    view: Any = SimpleNamespace(handle=lambda event: shown.append(event.get("step")))
    path = tmp_path / "events.jsonl"
    follower = Follower(path)

    def write(*steps: int) -> None:
        with EventLog(path, keep_until_step=steps[0] - 1) as log:
            log.write("run_start")
            for step in steps:
                log.write("step", step=step)

    write(1, 2, 3)
    _show_new(follower, view, is_first=True)
    write(2, 3)
    _show_new(follower, view, is_first=False)
    assert shown == [None, 1, 2, 3, None, 2, 3]


def test_a_run_that_goes_on_can_be_looked_at_without_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "watch", str(write_run(tmp_path / "run", num_steps=60, until=30)), "--no-wait")
    assert "step 30" in text


def test_a_run_that_begins_later_is_followed_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = watching(folder)
    assert process.stderr is not None
    assert "waiting for" in process.stderr.readline()
    with EventLog(folder / "events.jsonl") as log:
        log.write("note", text="first words")
        time.sleep(1.0)
        log.write("note", text="last words")
        log.write("run_end", status="done", steps=1, seconds=1.0, exit_code=0)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.index("first words") < out.index("last words")


def test_an_interrupt_ends_the_watching_politely(tmp_path: Path) -> None:
    process = watching(write_run(tmp_path / "run", num_steps=60, until=30))
    assert process.stdout is not None
    assert any("step 30" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert "stopped watching" in errors and "Traceback" not in errors


def test_a_reader_that_goes_away_ends_the_watching(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=60, until=30)
    process = watching(folder)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with EventLog(folder / "events.jsonl") as log:
        for number in range(200):
            log.write("note", text=f"more {number}")
            time.sleep(0.02)
            if process.poll() is not None:
                break
    assert process.wait(timeout=60) in (0, 141)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("words", [("watch", "{file}"), ("watch", "{nothing}", "--no-wait"), ("report", "{nothing}")])
def test_what_is_no_run_is_an_error_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("x")
    places = {"file": tmp_path / "file", "nothing": tmp_path / "nothing"}
    code, _, errors = run(capsys, *(word.format(**places) for word in words))
    assert code == 2 and "give the folder of a run" in errors


def test_several_runs_share_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, num_steps=60)) for name in ("a", "b")]
    path = Path(output(capsys, "report", *runs, "--out", str(tmp_path / "both.html")).strip())
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "both.html" and "Of 2 runs" in page and len(page.encode()) < 1_500_000
    assert not (tmp_path / "a" / "report.html").exists()


def test_the_second_of_two_folders_must_be_a_run_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "a", num_steps=60)
    code, _, errors = run(capsys, "report", str(good), str(tmp_path / "b"))
    assert code == 2 and "run folder" in errors
