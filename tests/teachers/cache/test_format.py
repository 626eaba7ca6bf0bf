"""Laws of a shard: every byte of it counts."""

from __future__ import annotations

from pathlib import Path

import cache_cases as cases
import pytest
from refusals import refused

from stillroom.core.errors import CacheDamaged
from stillroom.teachers.cache.format import Block, Shard, block_sum, shard_bytes
from stillroom.teachers.cache.reader import Cache


def test_a_shard_does_not_depend_on_the_order_of_its_rows() -> None:
    blocks = [Block(bytes([number]) * 16, number + 1, bytes([number] * 9)) for number in range(5)]
    assert shard_bytes("store", blocks, {"mass": 1.0}) == shard_bytes("store", blocks[::-1], {"mass": 1.0})


def read_all(folder: Path, keys: list[str]) -> None:
    cache = Cache(folder)
    for key in keys:
        cache.answer(key)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """At the latest when the row is read, and always by name."""
    cache = cases.write(tmp_path, cases.rows_of([5, 6, 7]))
    (path,) = (shard.path for shard in cache.shards)
    sound = path.read_bytes()
    keys = [row.key for row in cases.needed(cases.rows_of([5, 6, 7]))]
    for place in range(len(sound)):
        cases.spoil(path, place)
        with pytest.raises(CacheDamaged) as caught:
            read_all(tmp_path, keys)
        assert path.name in str(caught.value) and caught.value.advice
        path.write_bytes(sound)


@pytest.mark.parametrize("length", [0, 10, 40, -1, -40])
def test_a_shard_that_was_cut_short_is_refused_by_name(tmp_path: Path, length: int) -> None:
    path = cases.write(tmp_path, cases.rows_of([5, 6, 7])).shards[0].path
    path.write_bytes(path.read_bytes()[:length])
    with refused(CacheDamaged, path.name) as caught:
        Cache(tmp_path)
    assert caught.value.exit_code == 20


def test_two_blocks_that_changed_places_are_noticed(tmp_path: Path) -> None:
    """Both are sound in themselves: the checksum is over the row's key too."""
    blocks = [Block(bytes([number]) * 16, 1, bytes([number] * 9)) for number in range(2)]
    swapped = [Block(blocks[0].key, 1, blocks[1].packed), Block(blocks[1].key, 1, blocks[0].packed)]
    sound, other = (shard_bytes("store", some, {}) for some in (blocks, swapped))
    path = tmp_path / "a.shard"
    path.write_bytes(sound[: -len(blocks[0].packed) * 2] + other[-len(blocks[0].packed) * 2 :])
    with path.open("rb") as file, refused(CacheDamaged, "a.shard", "row 0"):
        Shard(path, "store").block(file.fileno(), 0)
    assert block_sum(blocks[0].key, b"same") != block_sum(blocks[1].key, b"same")


def test_a_shard_of_another_cache_is_refused(tmp_path: Path) -> None:
    mine = cases.write(tmp_path / "a", cases.rows_of([5, 6]))
    other = cases.write(tmp_path / "b", cases.rows_of([7, 8]), cases.SignalSpec("hybrid", 3, 6))
    path = other.shards[0].path
    (mine.folder / "shards" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CacheDamaged, match="another cache"):
        Cache(mine.folder)
