"""Threads spin briefly while they wait, if nobody said otherwise and torch has yet to look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stillroom import threads


def test_the_choice_is_made_before_torch_is_loaded() -> None:
    environment: dict[str, str] = {}
    threads.spin_briefly(environment, loaded={"json"})
    assert environment == {"GOMP_SPINCOUNT": "1000"}
    assert any("GOMP_SPINCOUNT=1000 was set" in text for text in threads.notes())


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_user_s_own_choice_stays(name: str) -> None:
    environment = {name: "7"}
    threads.spin_briefly(environment, loaded=set())
    assert environment == {name: "7"}
    assert threads.notes() == []


def test_a_loaded_torch_would_not_read_it_so_nothing_is_set_or_said() -> None:
    environment: dict[str, str] = {}
    threads.spin_briefly(environment, loaded={"torch"})
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
    assert any("GOMP_SPINCOUNT=1000 was set" in text for text in notes)
