"""Laws of a batch: what follows from its tensors belongs to them, and no field is lost on any way it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from stillroom.core.errors import DataError
from stillroom.core.types import IGNORED, Batch
from stillroom.data.loader import Loader
from stillroom.data.packing import pack
from stillroom.data.records import Tally
from stillroom.data.tokenize import Encoded
from stillroom.training.faults import Injector
from stillroom.training.recover import batch_of, facts_of, tensors_of
from stillroom.training.replay import read_window

VOCAB = 50
BATCHES = st.tuples(st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 7))


def draw(seed: int = 0, num_rows: int = 3, length: int = 5, *, has_other: bool = True) -> Batch:
    """Rows of all lengths, some targets unscored, every field filled."""
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(1, VOCAB, (num_rows, length)))
    mask = torch.from_numpy(np.arange(length) < random.integers(1, length + 1, (num_rows, 1))).long()
    is_scored = torch.from_numpy(random.random((num_rows, length)) < 0.6) & (mask == 1)
    targets = torch.where(is_scored, ids.roll(-1, 1), IGNORED)
    names = tuple(f"text:{number}" for number in range(num_rows))
    other = draw(seed + 1, num_rows, length + 2, has_other=False) if has_other else None
    documents, sources = tuple(f"d{name}" for name in names), tuple(f"s{name}" for name in names)
    segments = torch.where(mask == 1, torch.arange(length) // 2, -1)
    spans, is_exact = torch.where(is_scored, torch.arange(length) // 3, -1), is_scored & (ids > VOCAB // 2)
    fields_of = (ids * mask, mask, targets, is_scored.long() * 3, names, 7, documents, other, segments, sources)
    return Batch(*fields_of, spans, is_exact)


def same(one: object, two: object) -> bool:
    if isinstance(one, Batch):
        return isinstance(two, Batch) and all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and one == two


def test_the_drawn_batch_has_no_field_at_its_default() -> None:
    """Otherwise a lost field would look like a kept one."""
    batch = draw()
    assert not [one.name for one in fields(batch) if same(getattr(batch, one.name), one.default)]


@given(BATCHES)
def test_positions_are_those_of_the_scored_targets_in_row_order(shape: tuple[int, int, int]) -> None:
    batch = draw(*shape)
    flat = batch.targets.reshape(-1)
    expected = (flat != IGNORED).nonzero().squeeze(-1)
    assert torch.equal(batch.positions, expected) and torch.equal(batch.scored_targets, flat[expected])
    assert batch.num_scored == int((flat != IGNORED).sum()) and IGNORED not in batch.scored_targets


def test_other_targets_have_other_positions() -> None:
    batch = draw()
    moved = replace(batch, targets=batch.input_ids)
    assert moved.num_scored == batch.input_ids.numel() and torch.equal(
        moved.scored_targets, batch.input_ids.reshape(-1)
    )
    assert moved.keys != batch.keys
    none = batch.without_targets()
    assert none.num_scored == 0 and not none.target_bytes.any() and none.documents == batch.documents
    assert none.other is not None and none.other.num_scored == 0


def test_a_packed_row_does_not_find_answers_that_were_computed_across_its_pieces() -> None:
    """Caches of packed rows once had them, under the digest of the same bytes without a mark."""
    drawn = draw(num_rows=1)
    packed = replace(drawn, attention_mask=torch.ones_like(drawn.input_ids))
    assert packed.segments is not None
    arrays = (packed.input_ids, packed.targets, packed.segments)
    unmarked = hashlib.blake2b(b"".join(one.numpy().tobytes() for one in arrays), digest_size=16).hexdigest()
    assert packed.keys != (unmarked,)


@pytest.mark.parametrize("fault", ["all_masked", "bad_batch"])
def test_an_injected_window_is_scored_where_its_own_targets_are(fault: str) -> None:
    injector = Injector(f"{fault}@1")
    injector.step = 1
    (batch,) = injector.window([draw()], VOCAB)
    assert torch.equal(batch.scored_targets, batch.targets[batch.targets != IGNORED])
    assert batch.keys != draw().keys and batch.documents == draw().documents


# -- moving and keeping ----------------------------------------------------------------------------------


@given(BATCHES)
def test_a_moved_batch_has_every_field(shape: tuple[int, int, int]) -> None:
    batch = draw(*shape)
    assert same(batch, batch.to("cpu"))


def test_every_tensor_of_a_batch_moves_and_nothing_is_computed_there() -> None:
    """A tensor on `meta` holds no values: whoever computed positions there would fail."""
    batch = draw()
    moved = batch.to("meta")
    assert moved.num_scored == batch.num_scored and moved.keys == batch.keys and moved.other is not None
    for one in fields(batch):
        value = getattr(moved, one.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "meta" and getattr(batch, one.name).device.type == "cpu"
            assert getattr(moved.other, one.name).device.type == "meta"
        elif one.name != "other":
            assert value == getattr(batch, one.name)


def test_asking_a_batch_reads_nothing_from_the_device(count_reads: Callable[[], list[str]]) -> None:
    batch = draw()
    reads = count_reads()
    there = batch.to("cpu")
    assert there.num_scored and len(there.scored_targets) and there.keys
    assert reads == []


@given(BATCHES, st.booleans())
def test_a_kept_batch_is_read_back_with_every_field(shape: tuple[int, int, int], has_other: bool) -> None:
    batch = draw(*shape, has_other=has_other)
    facts = json.loads(json.dumps(facts_of(batch)))
    assert same(batch, batch_of(load(save(tensors_of(batch))), facts))


def kept_window(folder: Path, change: Callable[[dict[str, Any]], object] = lambda facts: None) -> Path:
    """A quarantined window of one batch, its facts changed by hand."""
    place = folder / "quarantine"
    place.mkdir()
    batch = draw(has_other=False)
    batches: list[dict[str, Any]] = [{**facts_of(batch), "text": []}]
    facts = {
        "step": 3,
        "verdict": {"action": "skip", "reason": "a NaN"},
        "located": "",
        "evidence": {"loss": None, "grad_norm": 1.0},
        "batches": batches,
    }
    change(batches[0])
    path = place / "step-000003-attempt-000004"
    path.with_suffix(".json").write_text(json.dumps(facts))
    path.with_suffix(".safetensors").write_bytes(save({f"0.{name}": t for name, t in tensors_of(batch).items()}))
    return path


def test_replay_keeps_the_documents_of_a_window(tmp_path: Path) -> None:
    kept_window(tmp_path)
    _facts, (batch,) = read_window(tmp_path, 3)
    assert same(batch, draw(has_other=False)) and batch.documents == ("dtext:0", "dtext:1", "dtext:2")


def test_a_window_kept_before_documents_were_still_loads(tmp_path: Path) -> None:
    kept_window(tmp_path, lambda facts: [facts.pop(name) for name in ("documents", "other")])
    _facts, (batch,) = read_window(tmp_path, 3)
    assert same(batch, replace(draw(has_other=False), documents=()))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("sample_ids"),
        lambda facts: facts.update(documents="d"),
        lambda facts: facts.update(index="first"),
        lambda facts: facts.update(other={}),
    ],
    ids=["no names", "documents no list", "index no number", "another reading without its tensors"],
)
def test_a_damaged_window_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    kept_window(tmp_path, change)
    with pytest.raises(DataError):
        read_window(tmp_path, 3)


# -- keys ------------------------------------------------------------------------------------------------


def documents(lengths: list[int]) -> Encoded:
    ids = np.random.default_rng(0).integers(1, VOCAB, sum(lengths)).astype(np.int32)
    names = tuple(f"text:{number}" for number in range(len(lengths)))
    return Encoded(ids, np.ones_like(ids), ids > 5, np.cumsum([0, *lengths]), names, names)


@pytest.mark.parametrize("packing", ["rows", "blocks"])
def test_a_row_has_the_same_key_in_whatever_batch_it_stands(packing: Any) -> None:
    rows = pack(documents([3, 9, 5, 14, 8]), packing, 6, Tally())
    expected = {rows.sample_id(row): rows.batch([row]).keys[0] for row in range(len(rows))}
    assert len(set(expected.values())) == len(rows) > 5
    for seed, size in ((0, 1), (1, 2), (2, 4)):
        loader = Loader(rows, batch_size=size, seed=seed)
        for index in range(loader.num_windows):
            (batch,) = loader.window(index)
            assert batch.keys == tuple(expected[name] for name in batch.sample_ids)


def test_keys_tell_contents_apart_and_not_names() -> None:
    batch = draw()
    assert replace(batch, sample_ids=("another",) * 3, documents=(), index=3).keys == batch.keys
    assert replace(batch, input_ids=batch.input_ids + 1).keys != batch.keys
    unscored = batch.targets.reshape(-1).clone()
    unscored[batch.positions[0]] = IGNORED
    assert replace(batch, targets=unscored.view_as(batch.targets)).keys != batch.keys
