"""Laws of reading a log: whole, damaged, and while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillroom.core.errors import DataError
from stillroom.report.history import History
from stillroom.telemetry import record
from stillroom.telemetry.events import EventLog
from stillroom.telemetry.record import Follower, LoggedRun, log_events, read_events, scan_events


def test_each_record_is_read_once_however_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert list(follower.new_events()) == [], "a log that is not there yet has no events"
    whole = b'{"event": "a"}\n{"event": "b", "text": "\\u00e4"}\n{"event": "c"}\n'
    seen = []
    for place in range(len(whole)):
        with path.open("ab") as file:
            file.write(whole[place : place + 1])
        seen += [event["event"] for event in follower.new_events()]
    assert seen == ["a", "b", "c"] and not follower.is_torn


def test_it_reads_what_the_log_wrote(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for number in range(3000):
            log.write("step", step=number, text="x" * 500)
    assert list(Follower(log.path).new_events()) == read_events(log.path)


@pytest.mark.parametrize(
    "line", ["broken", "[1]", '{"event": "x", "y": NaN}', '{"x": 1}', '{"event": 7}', "[" * 100_000, "\xff"]
)
def test_a_broken_line_is_counted_and_the_rest_is_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n' + line.encode("latin-1") + b'\n\n{"event": "b"}\n{"event": "c')
    follower = Follower(path)
    assert [event["event"] for event in follower.new_events()] == ["a", "b"]
    assert follower.broken_lines == [2] and follower.is_torn and follower.last_event() is None


def test_a_last_line_without_an_end_is_read_where_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b"}')
    follower = Follower(path)
    assert [event["event"] for event in follower.new_events()] == ["a"]
    assert follower.last_event() == {"event": "b"} and not follower.is_torn


def test_a_log_that_a_resumed_run_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b"}\n')
    follower = Follower(path)
    list(follower.new_events())
    other = tmp_path / "other"
    other.write_bytes(b'{"event": "a"}\n{"event": "c"}\n')
    other.replace(path)
    assert [event["event"] for event in follower.new_events()] == ["a", "c"]
    assert follower.num_restarts == 1


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_broken_last_line_is_torn_with_or_without_its_end(tmp_path: Path, end: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": "b' + end)
    scan = scan_events(path)
    assert scan.is_torn and scan.broken_lines == () and [event["event"] for event in scan.records] == ["a"]
    missing: list[str] = []
    assert list(log_events(path, missing)) == list(scan.records) and len(missing) == 1


def test_a_line_beyond_every_record_is_broken_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_CHUNK", 64)
    monkeypatch.setattr(record, "_MAX_LINE", 200)
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": "' + "x" * 1000 + '"}\n{"event": "b"}\n')
    scan = scan_events(path)
    assert [event["event"] for event in scan.records] == ["a", "b"] and scan.broken_lines == (2,)


def test_a_log_that_is_not_there_is_an_error_for_who_needs_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_events(tmp_path / "events.jsonl")
    assert caught.value.where == str(tmp_path / "events.jsonl")
    assert list(log_events(tmp_path / "events.jsonl", missing := [])) == [] and len(missing) == 1


def test_a_mark_that_an_editor_put_first_hides_no_record(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'\xef\xbb\xbf{"event": "a"}\n')
    assert read_events(tmp_path / "events.jsonl") == [{"event": "a"}]


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4, 2, 3), (1, 2, 3), (1, 2, 2, 3), (5, 1), ()])
def test_report_and_diagnosis_keep_the_same_steps(numbers: tuple[int, ...]) -> None:
    """Steps that a rollback undid count in neither, also where the run did not reach them again."""
    events = [{"event": "step", "step": number, "train_loss": float(place)} for place, number in enumerate(numbers)]
    kept = LoggedRun("run", events=tuple(events)).kept_steps
    steps, losses = History.of(events).steps.curve("train_loss")
    assert [event["step"] for event in kept] == steps.tolist()
    assert [event["train_loss"] for event in kept] == losses.tolist()
