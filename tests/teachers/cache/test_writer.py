"""Laws of writing: whole shards or none, the same bytes whatever happened on the way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny
from refusals import refused

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.teachers.cache import writer
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import open_store, write_missing

LENGTHS = [3 + (number * 7) % 17 for number in range(30)]


def test_a_data_set_that_grew_reuses_what_is_there(tmp_path: Path) -> None:
    rows, more = cases.rows_of(LENGTHS), cases.rows_of([4, 9, 12], seed=1)
    before = cases.contents(cases.write(tmp_path, rows).folder)
    teacher = cases.Matrices()
    assert write_missing(tmp_path, cases.needed(rows, more), teacher)
    after = cases.contents(tmp_path)
    assert teacher.num_asked == 3 and len(after) == len(before) + 1
    assert all(after[name] == held for name, held in before.items())
    assert write_missing(tmp_path, cases.needed(rows, more), teacher) and teacher.num_asked == 3


def test_the_batches_it_asks_in_change_nothing(tmp_path: Path) -> None:
    rows = cases.rows_of(LENGTHS)
    for size in (1, 50, 1000):
        cases.write(tmp_path / str(size), rows, teacher=cases.Matrices(batch_tokens=size))
    assert cases.contents(tmp_path / "1") == cases.contents(tmp_path / "50") == cases.contents(tmp_path / "1000")


def test_a_writer_that_is_asked_to_stop_leaves_whole_shards(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, asked = cases.rows_of(LENGTHS), 0
    sound = cases.contents(cases.write(tmp_path_factory.mktemp("sound"), rows).folder)

    def is_stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 9

    open_store(tmp_path, cases.manifest())
    assert not write_missing(tmp_path, cases.needed(rows), cases.Matrices(), is_stopped=is_stopped)
    assert 0 < Cache(tmp_path).num_rows < len(LENGTHS)
    assert write_missing(tmp_path, cases.needed(rows), cases.Matrices())
    assert cases.contents(tmp_path) == sound


class Mortal(cases.Matrices):
    """Kills the process when it is asked for the nth time, or in the middle of a write."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer_rows(batch, specs)


def test_killed_at_random_thirty_times_the_cache_is_the_one_of_an_undisturbed_writer(tmp_path: Path) -> None:
    rows, chance = cases.rows_of(LENGTHS * 6), random.Random(5)
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    place = tmp_path / "killed"

    def die_while_asking() -> None:
        open_store(place, cases.manifest())
        write_missing(place, cases.needed(rows), Mortal(chance.randrange(5)))

    def die_while_writing() -> None:
        replaced, left = Path.replace, chance.randrange(3)

        def replace(self: Path, target: Any) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)  # the temporary file is written, and not in its place
            return replaced(self, target)

        Path.replace = replace  # type: ignore[method-assign]
        open_store(place, cases.manifest())
        write_missing(place, cases.needed(rows), cases.Matrices())

    kills = 0
    for _ in range(30):
        chance.random()
        kills += tiny.in_child(die_while_asking if chance.random() < 0.5 else die_while_writing) == -signal.SIGKILL
    assert kills == 30
    assert 0 < Cache(place).num_rows < len(LENGTHS) * 6
    open_store(place, cases.manifest())
    assert write_missing(place, cases.needed(rows), cases.Matrices())
    assert cases.contents(place) == sound


class Slow(cases.Matrices):
    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        time.sleep(0.005)
        return super().answer_rows(batch, specs)


def test_several_writers_share_the_work_and_leave_what_one_would(tmp_path: Path) -> None:
    rows, place = cases.rows_of(LENGTHS * 4), tmp_path / "shared"
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)

    def write(number: int) -> None:
        teacher = Slow()
        open_store(place, cases.manifest())
        assert write_missing(place, cases.needed(rows), teacher)
        (tmp_path / f"asked-{number}").write_text(str(teacher.num_asked))

    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            os._exit(tiny.in_child(lambda number=number: write(number)))  # type: ignore[misc]
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert cases.contents(place) == sound
    asked = [int((tmp_path / f"asked-{number}").read_text()) for number in range(3)]
    assert sum(asked) == len(rows) and min(asked) > 0


def test_a_claim_of_a_process_that_ended_falls_to_the_next(tmp_path: Path) -> None:
    """The lock is the system's: nothing has to be cleared by hand after a kill."""
    rows = cases.rows_of(LENGTHS)
    open_store(tmp_path, cases.manifest())
    tiny.in_child(lambda: write_missing(tmp_path, cases.needed(rows), Mortal(1)))
    finished = threading.Event()

    def write() -> None:
        write_missing(tmp_path, cases.needed(rows), cases.Matrices())
        finished.set()

    threading.Thread(target=write, daemon=True).start()
    assert finished.wait(60)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = cases.rows_of(LENGTHS)
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    place, written = tmp_path / "full", 0
    real = writer.write_atomically

    def fill_up(path: Path, held: bytes, **options: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(28, os.strerror(28))
        real(path, held, **options)

    open_store(place, cases.manifest())
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_atomically", fill_up)
        with refused(CannotSave, "shards") as caught:
            write_missing(place, cases.needed(rows), cases.Matrices())
    assert caught.value.exit_code == 24 and any("same command" in text for text in caught.value.advice)
    assert Cache(place).num_rows > 0
    assert write_missing(place, cases.needed(rows), cases.Matrices())
    assert cases.contents(place) == sound


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (cases.manifest(weights="x"), "teacher.weights is w in the cache and x here"),
        (cases.manifest(adapter="y"), "teacher.adapter"),
        (cases.manifest(dtype="float16"), "teacher.dtype is float32 in the cache and float16 here"),
        (cases.manifest(cases.SignalSpec("hybrid", 4, 7)), "teacher.signal.draws is 6 in the cache and 7 here"),
        (cases.manifest(cases.SignalSpec("hybrid", 5, 6)), "teacher.signal.m"),
        (cases.manifest(cases.SignalSpec("hybrid", 4, 6, 2.0)), "objectives.kd.temperature is 1.0 in the cache"),
        (cases.manifest(cases.SignalSpec("top_k", 4, 0)), "teacher.signal.kind is hybrid in the cache and top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_of_another_cache_is_refused_with_what_differs(tmp_path: Path, other: Any, named: str) -> None:
    before = cases.contents(cases.write(tmp_path, cases.rows_of([4, 5])).folder)
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path, other)
    assert named in str(caught.value) and caught.value.exit_code == 2
    assert cases.contents(tmp_path) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with refused(ConfigError, "--out", "thesis.tex"):
        open_store(tmp_path, cases.manifest())
    assert cases.contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_progress_counts_up_to_all(tmp_path: Path) -> None:
    told: list[Any] = []
    open_store(tmp_path, cases.manifest())
    write_missing(tmp_path, cases.needed(cases.rows_of(LENGTHS)), cases.Matrices(), tell=told.append)
    assert [one.done_tokens for one in told] == sorted(one.done_tokens for one in told)
    assert told[-1].done_tokens == told[-1].all_tokens == sum(LENGTHS) and told[-1].num_bytes > 0


def test_several_signals_are_written_in_one_pass_as_each_by_itself(tmp_path: Path) -> None:
    rows, teacher = cases.rows_of(LENGTHS), cases.Matrices()
    specs = [cases.SignalSpec("hybrid", 4, 6, degree) for degree in (1.0, 2.0)]
    alone = [cases.contents(cases.write(tmp_path / f"alone-{n}", rows, spec).folder) for n, spec in enumerate(specs)]
    places = [tmp_path / "one", tmp_path / "two"]
    for place, spec in zip(places, specs, strict=True):
        open_store(place, cases.manifest(spec))
    assert write_missing(places[0], cases.needed(rows), teacher, beside=places[1:])
    assert teacher.num_asked == len(rows)
    assert [cases.contents(place) for place in places] == alone
    first = next((places[1] / "shards").iterdir())
    first.unlink()  # as a kill between the two would leave it
    assert write_missing(places[0], cases.needed(rows), teacher, beside=places[1:])
    assert [cases.contents(place) for place in places] == alone and teacher.num_asked < 2 * len(rows)
