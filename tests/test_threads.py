"""Threads spin for a while as they wait, by how busy the machine is, unless the user said otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stillroom import threads


@pytest.mark.parametrize(("others", "turns", "words"), [(0, "10000", "idle"), (3, "1000", "3 other tasks")])
def test_the_choice_is_made_before_torch_is_loaded_by_what_else_runs(others: int, turns: str, words: str) -> None:
    environment: dict[str, str] = {}
    threads.choose_waiting(environment, loaded={"json"}, count_others=lambda: others)
    assert environment == {"GOMP_SPINCOUNT": turns}
    (note,) = threads.notes()
    assert f"GOMP_SPINCOUNT={turns} was set" in note and words in note


@pytest.mark.parametrize(
    ("text", "others"), [("0.1 0.2 0.3 1/80 99\n", 0), ("9 9 9 4/80 99\n", 3), ("", 0), ("a b c d e", 0)]
)
def test_tasks_that_run_now_are_counted_without_ourselves(text: str, others: int, tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text(text)
    assert threads.others_running(tmp_path / "loadavg") == others
    assert threads.others_running(tmp_path / "missing") == 0


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_user_s_own_choice_stays(name: str) -> None:
    environment = {name: "7"}
    threads.choose_waiting(environment, loaded=set())
    assert environment == {name: "7"}
    assert threads.notes() == []


def test_a_loaded_torch_would_not_read_it_so_nothing_is_set_or_said() -> None:
    environment: dict[str, str] = {}
    threads.choose_waiting(environment, loaded={"torch"})
    assert environment == {}
    assert threads.notes() == []


def test_a_run_from_the_command_line_sets_it_and_says_so_in_its_log(world: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-m", "stillroom", "distill", "--teacher", str(world / "teacher"),
               "--student", str(world / "student"), "--data", str(world / "train.jsonl"),
               "--out", str(tmp_path / "run"), "--set", "data.max_length=16", "--dry-run"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any("GOMP_SPINCOUNT=" in text and "was set" in text for text in notes)
