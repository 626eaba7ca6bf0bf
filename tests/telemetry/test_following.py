"""Laws of reading a log while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillroom.telemetry.events import EventLog, read_events
from stillroom.telemetry.following import Follower


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


@pytest.mark.parametrize("line", ["broken", "[1]", '{"x": NaN}', "\xff"])
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
