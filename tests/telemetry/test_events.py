"""Laws of the event log: strict JSON always, nothing lost, nothing twice."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.errors import CannotSave, DataError, hide
from stillroom.core.files import strict
from stillroom.core.types import Detail
from stillroom.telemetry.events import EVAL_KEYS, STEP_KEYS, EventLog, problems
from stillroom.telemetry.record import read_events, scan_events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)
TERM = {"raw": 2.0, "weight": 0.5, "scaled": 1.0, "share": 1.0}


def step_fields(step: int, **changes: Any) -> dict[str, Any]:
    fields = dict.fromkeys(STEP_KEYS, 1.0) | {"step": step, "verdict": "keep", "phase": "all", "terms": {"kd": TERM}}
    return fields | changes


def eval_fields(step: int) -> dict[str, Any]:
    return dict.fromkeys(EVAL_KEYS, 1.0) | {"step": step, "terms": {"kd": TERM}}


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(st.text(max_size=6), VALUES, max_size=5))
def test_any_value_becomes_strict_json(fields: dict[str, Any]) -> None:
    text = json.dumps(strict(fields), allow_nan=False)
    assert json.loads(text, parse_constant=refuse) == strict(fields)


@given(value=st.sampled_from([math.nan, math.inf, -math.inf]), depth=st.integers(0, 5))
def test_a_value_that_is_not_finite_is_named_at_any_depth(value: float, depth: int) -> None:
    fields: Any = {"norm": value}
    for level in range(depth):
        fields = {"inner": fields} if level % 2 else {"inner": [0.5, fields]}
    found: Any = strict(fields)
    for level in reversed(range(depth)):
        found = found["inner"] if level % 2 else found["inner"][1]
    assert found == {"norm": None, "norm_nonfinite": str(value)}


def test_in_a_list_the_sibling_says_which_places() -> None:
    assert strict({"norms": [0.5, math.nan, [math.inf, 1.0]]}) == {
        "norms": [0.5, None, [None, 1.0]],
        "norms_nonfinite": {"1": "nan", "2.0": "inf"},
    }


def test_finite_values_get_no_sibling() -> None:
    assert strict({"a": 1.5, "b": [1, 2], "c": None}) == {"a": 1.5, "b": [1, 2], "c": None}


def test_records_scalars_and_paths_become_plain() -> None:
    @dataclass(frozen=True)
    class Pair:
        raw: float
        share: float

    plain = strict({"pair": Pair(math.nan, 0.5), "scalar": np.float32(0.5), "count": np.int64(3), "at": Path("a/b")})
    expected = {"pair": {"raw": None, "raw_nonfinite": "nan", "share": 0.5}, "scalar": 0.5, "count": 3, "at": "a/b"}
    assert plain == expected


def test_what_is_no_value_is_refused() -> None:
    with pytest.raises(TypeError):
        strict({"ids": {1, 2}})


def test_each_record_has_event_schema_and_time(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write("note", text="line\nbreak \u2028 and \ud800")
    (record,) = read_events(tmp_path / "run" / "events.jsonl")
    assert list(record)[:3] == ["event", "schema", "time"]
    assert record["text"] == "line\nbreak \u2028 and \ud800"
    offset = datetime.fromisoformat(record["time"]).utcoffset()
    assert offset is not None
    assert offset.total_seconds() == 0


def test_a_record_is_in_the_file_before_listeners_hear_of_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    heard: list[dict[str, Any]] = []
    with EventLog(path) as log:
        log.listen(lambda record: heard.append(read_events(path)[-1]))
        written = [log.write("note", text="a"), log.write("note", text="b", norm=math.inf)]
    assert heard == written


def test_a_listener_that_changes_its_event_changes_no_one_elses(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def spoil(record: dict[str, Any]) -> None:
        record["terms"]["kd"]["raw"] = "gone"
        record.clear()

    with EventLog(tmp_path / "events.jsonl") as log:
        log.listen(spoil)
        log.listen(heard.append)
        written = log.write("step", step=1, terms={"kd": {"raw": 1.0}})
        log.write("step", step=2, terms={"kd": {"raw": math.nan}})
    assert heard[0] == written and written["terms"] == {"kd": {"raw": 1.0}}
    assert heard == read_events(tmp_path / "events.jsonl")


def test_no_key_that_the_process_knows_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide("sk-told-by-hand")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    said = "sk-told-by-hand and hf_of_the_environment and s3://me:sesame@box/a?X-Amz-Signature=sesame&part=2"
    heard: list[dict[str, Any]] = []
    with EventLog(tmp_path / "events.jsonl") as log:
        log.listen(heard.append)
        written = log.write("note", text=said, deep=[{said: [said]}], path=Path("sk-told-by-hand"))
    held = (tmp_path / "events.jsonl").read_text()
    for secret in ("sk-told", "hf_of", "sesame"):
        assert secret not in held + repr(heard) + repr(written)
    assert written["text"] == "*** and *** and s3://***@box/a?X-Amz-Signature=***&part=2"


def test_an_event_cannot_overwrite_its_own_header(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log, pytest.raises(ValueError, match="schema"):
        log.write("note", schema=7)


@pytest.mark.parametrize("torn", ['{"event": "st', '{"event": "step", "step": 3', "\x00\x00\x00", '{"a": NaN}\n'])
def test_a_torn_last_line_is_passed_over_and_dropped_on_resume(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("step", **step_fields(1))
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    assert len(read_events(path)) == 1
    with EventLog(path) as log:
        assert log.dropped == 1
        log.write("resume", step=1)
    assert [record["event"] for record in read_events(path)] == ["step", "resume"]
    assert path.read_bytes().startswith(whole)


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note", "text": "a"}')
    with EventLog(path) as log:
        assert log.dropped == 0
        log.write("note", text="b")
    assert [record["text"] for record in read_events(path)] == ["a", "b"]


def test_a_broken_line_elsewhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "note"}\n{"event": \n{"event": "note"}\n')
    for reader in (read_events, EventLog):
        with pytest.raises(DataError) as caught:
            reader(path)
        assert caught.value.where == f"{path}:2"
    assert scan_events(path).broken_lines == (2,)
    assert len(scan_events(path).records) == 2


def test_a_log_that_is_not_there_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_events(tmp_path / "none.jsonl")
    assert "none.jsonl" in caught.value.where


@given(reached=st.integers(0, 12), resumed_from=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_a_resumed_run_has_each_step_once(
    tmp_path_factory: pytest.TempPathFactory, reached: int, resumed_from: int
) -> None:
    resumed_from = min(reached, resumed_from)
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    with EventLog(path) as log:
        log.write("run_start", run="a")
        for step in range(1, reached + 1):
            log.write("step", **step_fields(step))
            log.write("eval", **eval_fields(step))
            log.write("checkpoint", step=step, path="x", bytes=1, seconds=0.1)
    with EventLog(path, keep_until_step=resumed_from) as log:
        assert log.dropped == 3 * (reached - resumed_from)
        log.write("resume", step=resumed_from)
        for step in range(resumed_from + 1, 13):
            log.write("step", **step_fields(step))
    records = read_events(path)
    assert [record["step"] for record in records if record["event"] == "step"] == list(range(1, 13))
    assert records[0]["event"] == "run_start"
    assert [path.name for path in path.parent.iterdir()] == ["events.jsonl"]


def test_a_disk_that_refuses_ends_with_the_exit_code_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotSave) as caught:
        EventLog(tmp_path / "file" / "events.jsonl")
    assert caught.value.exit_code == 24
    assert caught.value.advice


def test_the_validator_knows_the_contract() -> None:
    header = {"event": "step", "schema": 1, "time": "2026-01-01T00:00:00+00:00"}
    good = header | step_fields(1, train_loss=None, train_loss_nonfinite="nan")
    assert problems(good) == []
    assert problems(header | eval_fields(1) | {"event": "eval"}) == []
    del good["lr"]
    assert problems(good) == ["step: lr is missing"]
    assert problems(header | step_fields(1, terms={"kd": {"raw": 1.0, "weight": 1.0, "scaled": 1.0}})) == [
        "step: terms.kd.share is missing"
    ]
    (fault,) = problems(header | step_fields(1, lr=0.0, lr_nonfinite="nan"))
    assert "lr_nonfinite" in fault


def test_a_detail_is_marked_in_the_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("note", text=Detail("a kernel"))
        log.write("note", text="the disk is full")
        first, second = log.records()
    assert first["detail"] is True and first["text"] == "a kernel" and "detail" not in second
