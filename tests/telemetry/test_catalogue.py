"""Every event that is written, and every key of it, is in the catalogue."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.telemetry.events import EVAL_KEYS, EVENTS, HEADER, HEADER_KEYS, STEP_KEYS, TERM, TERM_KEYS
from stillroom.telemetry.record import scan_events
from stillroom.training.distill import distill

SOURCE = Path(__file__).parents[2] / "src" / "stillroom"


def written() -> set[str]:
    """Names of events in calls of `write` anywhere in the package."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                callee = getattr(node.func, "attr", getattr(node.func, "id", ""))
                name = node.args[0].value
                if callee == "write" and isinstance(name, str) and re.fullmatch(r"[a-z_]+", name):
                    names.add(name)
    return names


def test_the_catalogue_has_every_event_that_is_written_and_no_other() -> None:
    assert written() == set(EVENTS)


def test_the_keys_that_programs_rely_on_are_always_there() -> None:
    assert tuple(HEADER) == HEADER_KEYS and tuple(TERM) == TERM_KEYS
    assert set(STEP_KEYS) <= set(EVENTS["step"].keys)
    assert set(EVAL_KEYS) <= set(EVENTS["eval"].keys)


def undescribed(record: dict[str, Any]) -> set[str]:
    kind = EVENTS[record["event"]]
    keys = {key.removesuffix("_nonfinite") for key in record}
    lacking = {f"{key} is missing" for key in kind.keys if key not in keys}
    return lacking | (keys - set(kind.keys) - set(kind.sometimes) - set(HEADER))


CASES: dict[str, dict[str, Any]] = {
    "a fault": {},
    "two sources": {"telemetry.gradient_steps": 2, "precision.mode": "fp16-split"},
    "stored answers": {"teacher.cache": "auto"},
    "gates": {"teacher.router.mode": "truth", "teacher.router.probe_steps": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_writes_nothing_that_is_not_described(case: str, request: Any, tmp_path: Path) -> None:
    world = request.getfixturevalue("moe_world" if case == "gates" else "world")
    settings = {**tiny.settings(world), **CASES[case]}
    if case == "two sources":
        settings["data.train"] = [str(world / "train.jsonl"), str(tiny.save_text(tmp_path / "b.jsonl", 60, seed=5))]
    inject = "nan_weight@3" if case == "a fault" else ""
    distill(load_config(overrides=settings), tmp_path / "run", device="cpu", inject=inject)
    records = scan_events(tmp_path / "run" / "events.jsonl").records
    assert {record["event"] for record in records} >= {"run_start", "step", "eval", "checkpoint", "run_end"}
    strange = {f"{record['event']}: {key}" for record in records for key in undescribed(record)}
    assert strange == set()
