"""Faults are really provoked in tiny runs, and the diagnosis names the provoked cause first."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tiny
from provoked import FAULTS, Fault, make_world, run, stopping_listener

from stillroom.core.locks import RUN_LOCK, is_held
from stillroom.doctor.diagnose import diagnose, read_case
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import Finding, rules_for
from stillroom.telemetry.record import read_events

HEALTHY = ("base", "student-aware", "sar", "instruct")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the runs that were made so far; a test that needs another adds it."""
    return {}


def folder_of(name: str, world: Path, runs: dict[str, Path]) -> Path:
    if name not in runs:
        runs[name] = run(world, world / "runs" / name, FAULTS[name])
    return runs[name]


def findings_of(folder: Path) -> list[Finding]:
    """The findings of a run. None proposes a setting that the run has already."""
    case = read_case(folder, is_owned=is_held(folder / RUN_LOCK))
    findings = diagnose(case)
    assert not [one.setting for one in findings if one.setting and case.has(one.setting)]
    return findings


@pytest.mark.parametrize("name", FAULTS)
def test_the_provoked_cause_is_named_first(name: str, world: Path, runs: dict[str, Path]) -> None:
    findings = findings_of(folder_of(name, world, runs))
    assert findings, "nothing was found"
    first = findings[0]
    assert first.cause == name, [(one.cause, one.evidence) for one in findings]
    assert any(character.isdigit() for character in first.evidence), "evidence has numbers"
    assert first.steps and first.advice


def test_a_run_that_was_killed_has_stopped_early(world: Path, tmp_path: Path) -> None:
    assert tiny.in_child(lambda: run(world, tmp_path / "run", Fault("", inject="kill@12"))) == -signal.SIGKILL
    first = findings_of(tmp_path / "run")[0]
    assert first.cause == "stopped_early" and "killed" in first.evidence and first.steps == (11,)


def test_a_suspended_run_has_stalled_and_one_that_goes_on_has_not(world: Path, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover
        run(world, tmp_path / "run", Fault("", listener=stopping_listener))
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)  # returns when it is suspended
        case = read_case(tmp_path / "run", is_owned=is_held(tmp_path / "run" / RUN_LOCK))
        assert case.is_owned is True
        now = [one.cause for one in diagnose(case) if one.is_alarming]
        later = Case(case.record, now=datetime.now(UTC) + timedelta(hours=1), is_owned=True)
        assert "stalled_run" not in now and "stopped_early" not in now
        assert diagnose(later)[0].cause == "stalled_run" and diagnose(later)[0].steps == (6,)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert is_held(tmp_path / "run" / RUN_LOCK) is False


@pytest.mark.parametrize("preset", HEALTHY)
def test_nothing_alarming_is_found_in_a_healthy_run(preset: str, world: Path, tmp_path: Path) -> None:
    over: dict[str, object] = {
        "train.max_steps": 24,
        "train.learning_rate": 3e-3,
        "train.gradient_accumulation_steps": 1,
        "train.warmup_ratio": 0.1,
    }
    files = {}
    if preset == "sar":
        moe = tiny.save_trained(tmp_path / "moe", "qwen3_moe", num_layers=1, steps=80)
        over |= {"teacher.model": str(moe), "teacher.router.probe_steps": 2, "teacher.router.force": True}
    if preset == "instruct":
        pairs = [line.rsplit(" ", 6) for line in tiny.sentences(300, 8)]
        lines = [json.dumps({"prompt": pair[0], "completion": " ".join(pair[1:])}) for pair in pairs]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        over |= {"data.train": str(tmp_path / "pairs.jsonl"), "data.max_length": 64}
    folder = run(world, tmp_path / "run", Fault("", over, files=files, preset=preset))
    found = [(one.cause, one.severity, one.evidence) for one in findings_of(folder) if one.is_alarming]
    assert not found
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert not [event for event in read_events(folder / "events.jsonl") if event["event"] == "advice"]


def test_a_run_says_once_while_it_goes_on_what_the_diagnosis_finds(world: Path, runs: dict[str, Path]) -> None:
    folder = folder_of("leaking_data", world, runs)
    said = [event for event in read_events(folder / "events.jsonl") if event["event"] == "advice"]
    assert [(event["cause"], event["step"]) for event in said] == [("leaking_data", 8)]
    assert said[0]["setting"] == "data.eval=none" and "30 of 30" in said[0]["evidence"]
    advice = json.loads((folder / "summary.json").read_text())["advice"]
    assert advice[0]["cause"] == "leaking_data"
    assert {"cause", "steps", "evidence", "advice"} <= advice[0].keys()


def test_what_follows_from_a_root_is_not_said_beside_it(world: Path, runs: dict[str, Path]) -> None:
    folder = folder_of("teacher_off_domain", world, runs)
    said = [event["cause"] for event in read_events(folder / "events.jsonl") if event["event"] == "advice"]
    assert said == ["teacher_off_domain"]
    assert len([one for one in findings_of(folder) if one.is_alarming]) > 1


def test_every_cause_but_two_is_provoked() -> None:
    others = {"student_overtook_teacher", "refused_batches", "stalled_run"}  # a stalled run has a test of its own
    others |= {"length_inflation", "rollout_loops", "entropy_collapse", "stale_rounds"}  # test_rollout_rules.py
    assert {rule.name for rule in rules_for("log")} - others == set(FAULTS)
