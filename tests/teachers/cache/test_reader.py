"""Laws of reading: a row meets its own answer, or a named error."""

from __future__ import annotations

from pathlib import Path

import cache_cases as cases
import pytest
from refusals import refused

from stillroom.core.errors import CacheDamaged, ConfigError
from stillroom.teachers.cache import reader
from stillroom.teachers.cache.reader import Cache, damaged_shards


def test_every_row_has_its_own_answer_and_no_other_row_any(tmp_path: Path) -> None:
    rows = cases.rows_of([4, 9, 9, 13, 20] * 4)
    cache = cases.write(tmp_path, rows)
    assert len(cache.shards) > 2 and cache.num_rows == 20
    for number in range(len(rows)):
        batch = rows.batch([number])
        assert cases.same(cache.answer(batch.keys[0]), cases.Matrices().answers(batch)[0])
    strange = cases.rows_of([4, 9], seed=8).batch([0, 1])
    assert not cache.has(strange.keys).any() and cache.has(rows.batch([3, 0]).keys).all()
    with pytest.raises(KeyError):
        cache.answer(strange.keys[0])


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_shards_than_files_may_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_OPEN_FILES", 2)
    rows = cases.rows_of([10] * 12)
    cache = cases.write(tmp_path, rows, shard_tokens=10)
    before = _num_open()
    for number in [*range(12), *range(12)]:
        assert cache.answer(rows.batch([number]).keys[0]).num_positions == 10
    assert _num_open() - before <= 2
    cache.close()
    assert cache.answer(rows.batch([0]).keys[0]).num_positions == 10


def test_all_faults_are_found(tmp_path: Path) -> None:
    cache = cases.write(tmp_path, cases.rows_of([10] * 6), shard_tokens=20)
    assert not list(cache.faults()) and not list(damaged_shards(tmp_path))
    cases.spoil(cache.shards[0].path, -1)
    cases.spoil(cache.shards[2].path, -1)
    faults = list(Cache(tmp_path).faults())
    assert len(faults) == 2 and all("row 1" in str(fault) for fault in faults)
    cases.spoil(cache.shards[1].path, 30)
    assert [cache.shards[1].path.name in str(fault) for fault in damaged_shards(tmp_path)] == [True]


def test_a_shard_that_vanishes_while_it_is_used_is_named(tmp_path: Path) -> None:
    rows = cases.rows_of([10, 10])
    cache = cases.write(tmp_path, rows)
    cache.shards[0].path.unlink()
    with refused(CacheDamaged, "", ".shard"):
        cache.answer(rows.batch([0]).keys[0])


def test_a_folder_without_a_cache_and_one_with_a_broken_manifest_say_so(tmp_path: Path) -> None:
    with refused(ConfigError, "teacher.cache", "cache.json"):
        Cache(tmp_path)
    cases.write(tmp_path, cases.rows_of([4]))
    (tmp_path / "cache.json").write_text('{"format": "stillroom teacher cache", "version": 1')
    with refused(CacheDamaged, "", "cache.json"):
        Cache(tmp_path)


def test_what_was_counted_is_summed_over_shards(tmp_path: Path) -> None:
    cache = cases.write(tmp_path, cases.rows_of([10] * 6), shard_tokens=20)
    assert cache.num_positions == 60 and cache.mean_mass is not None and 0.2 < cache.mean_mass < 1.0
    assert cache.num_bytes == sum(shard.path.stat().st_size for shard in cache.shards)
