"""Laws of rounds as data: what was written is what is trained on, and a window is a function of its number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from stillroom.core.errors import CheckpointUnusable
from stillroom.core.files import sum_of_bytes
from stillroom.core.types import IGNORED, ROLLOUTS
from stillroom.data.loader import Loader
from stillroom.data.packing import Rows
from stillroom.data.rollouts import (
    Answers,
    Rollout,
    RolloutLoader,
    Round,
    RoundFacts,
    RoundStore,
    chosen_prompts,
    of_bytes,
    rows_of,
    to_bytes,
)

END = 2


def rollout(number: int, name: str = "p", ended: str = "end") -> Rollout:
    size = 1 + number % 4
    ids = [100 + number] * (size - 1) + [END]
    answers = Answers(
        np.full((size, 3), number, np.int32), np.full((size, 3), -1.5, np.float32), np.full(size, -2.5, np.float32)
    )
    return Rollout(f"{name}{number}", [10, 11, 12 + number], ids, [-0.5] * size, ended, answers)


def round_of(number: int, count: int) -> Round:
    rollouts = tuple(rollout(one, f"r{number}.") for one in range(count))
    facts = RoundFacts(
        round=number,
        step=number,
        weights="a",
        settings="b",
        rows=count,
        tokens=0,
        seconds=0.0,
        ended={},
        drops=[],
        pieces={},
    )
    return Round(facts, rollouts)


def data(count: int = 23) -> Rows:
    return rows_of([rollout(number, "d") for number in range(count)], 16, 0)


def loader(
    share: float = 0.5, every: int = 4, keep: int = 0, accumulation: int = 3, steps: int = 12, **more: int
) -> RolloutLoader:
    base = Loader(data(), batch_size=2, accumulation=accumulation, seed=5, **more)
    return RolloutLoader(
        base, share=lambda _progress: share, num_steps=steps, every=every, keep_rounds=keep, max_length=16, pad_id=0
    )


# -- rows ------------------------------------------------------------------------------------------------


def test_ids_written_are_ids_trained_and_the_end_token_is_the_last_target() -> None:
    written = [rollout(number) for number in range(5)]
    batch = rows_of(written, 16, 0).batch(range(5))
    for row, one in enumerate(written):
        whole = [*one.prompt, *one.ids]
        length = int(batch.attention_mask[row].sum())
        assert batch.input_ids[row, :length].tolist() == whole[:-1]
        targets = [token for token in batch.targets[row].tolist() if token != IGNORED]
        assert targets == one.ids and targets[-1] == END
        assert batch.targets[row, : len(one.prompt) - 1].unique().tolist() == [IGNORED], "a prompt never trains"
        assert set(batch.targets[row, length:].tolist()) <= {IGNORED}, "nothing follows the end"


def test_a_piece_is_read_as_it_was_written() -> None:
    nothing = Answers(np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32), np.zeros(0, np.float32))
    written = [rollout(3), Rollout("empty", [1, 2], [], [], "nonfinite", nothing), rollout(1, ended="loop")]
    for one, found in zip(written, of_bytes(to_bytes(written)), strict=True):
        assert found.answers is not None and one.answers is not None
        for name in ("ids", "log_probs", "tail"):
            assert np.array_equal(getattr(found.answers, name), getattr(one.answers, name))
        assert (found.name, found.prompt, found.ids, found.log_probs, found.ended) == (
            one.name, one.prompt, one.ids, one.log_probs, one.ended
        )  # fmt: skip


@pytest.mark.parametrize("cut", [0, 7, 40, -1])
def test_a_damaged_piece_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="piece"):
        of_bytes(to_bytes([rollout(1), rollout(2)])[:cut])


def test_rows_that_do_not_fit_are_no_rows() -> None:
    with pytest.raises(ValueError, match="rows"):
        rows_of([rollout(3)], 4, 0)


# -- files -----------------------------------------------------------------------------------------------


def sealed(store: RoundStore, number: int, weights: str = "ab", drops: tuple[str, ...] = ()) -> RoundFacts:
    store.begin(number, weights)
    store.keep_piece(number, weights, 0, [rollout(0), rollout(1, ended="loop")])
    store.keep_piece(number, weights, 1, [rollout(2)])
    facts = RoundFacts(
        round=number, step=4, weights=weights[0], settings=weights[1], rows=3, tokens=6, seconds=0.5,
        ended={"end": 2, "loop": 1}, drops=list(drops), pieces=store.sums(number, weights, 2),
    )  # fmt: skip
    store.seal(facts)
    return facts


def test_a_sealed_round_is_read_with_its_sums_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    facts = sealed(store, 3)
    assert store.numbers() == [3] and store.read(3).facts == facts == store.facts(3)
    assert [one.name for one in store.read(3).rollouts] == ["p0", "p1", "p2"]
    path = tmp_path / "round-000003" / "piece-000001.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(bytes(contents))
    with refused(CheckpointUnusable, "round-000003"):
        store.read(3)
    path.unlink()
    with refused(CheckpointUnusable, "round-000003"):
        store.read(3)


def test_a_name_in_a_round_does_not_lead_out_of_it(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    sealed(store, 0)
    path = tmp_path / "round-000000" / "round.json"
    facts = json.loads(path.read_text())
    outside = tmp_path / "piece.safetensors"
    outside.write_bytes(to_bytes([rollout(0)]))
    facts |= {"pieces": {"../piece.safetensors": sum_of_bytes(outside.read_bytes()).model_dump()}, "rows": 1}
    path.write_text(json.dumps(facts))
    with pytest.raises(CheckpointUnusable):
        store.read(0)


def test_answers_that_ended_in_a_loop_are_left_out_where_they_are_dropped(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    sealed(store, 0, drops=("loop",))
    assert [one.name for one in store.read(0).rollouts] == ["p0", "p2"]


def test_pieces_of_another_student_are_not_kept(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    store.begin(1, "ab")
    store.keep_piece(1, "ab", 0, [rollout(0)])
    store.begin(1, "ab")
    assert store.piece(1, "ab", 0) is not None, "after a kill the same student keeps what it wrote"
    store.begin(1, "cd")
    assert store.piece(1, "cd", 0) is None and store.piece(1, "ab", 0) is None
    assert store.numbers() == [], "an open round is no sealed one"


def test_rounds_after_one_are_removed(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    for number in (0, 1, 2, 4):
        sealed(store, number)
    assert store.remove_after(1, but=4) == [2] and store.numbers() == [0, 1, 4]


# -- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_share_is_apportioned_and_no_row_of_the_data_is_passed_over(share: float) -> None:
    made = loader(share, every=1000, steps=200)
    made.take([round_of(0, 40)])
    seen, num_rollouts = [], 0
    for index in range(60):
        window = made.whole_window(index)
        assert len(window) == 3
        own = [batch for batch in window if batch.sources]
        assert all(batch.sources == (ROLLOUTS,) * 2 for batch in own)
        num_rollouts += len(own)
        assert abs(num_rollouts - share * 3 * (index + 1)) < 1, "error diffusion, not chance"
        seen += [name for batch in window if not batch.sources for name in batch.sample_ids]
    num_epochs = len(seen) // 23
    for epoch in range(num_epochs):
        assert len(set(seen[epoch * 23 : (epoch + 1) * 23])) == 23
    assert made.epochs(60) == pytest.approx((180 - num_rollouts) / 12)


def test_a_window_is_a_function_of_its_number_and_the_sealed_rounds() -> None:
    one, other = loader(), loader()
    for made in (one, other):
        made.take([round_of(1, made.rows_wanted(1))])
    later = [batch.keys for batch in one.whole_window(6)]
    one.whole_window(5)
    assert [batch.keys for batch in one.whole_window(6)] == later == [batch.keys for batch in other.whole_window(6)]


def test_each_row_of_a_round_is_used_once() -> None:
    made = loader(every=4)
    wanted = made.rows_wanted(1)
    made.take([round_of(1, wanted)])
    names = [
        name
        for index in range(4, 8)
        for batch in made.whole_window(index)
        if batch.sources
        for name in batch.sample_ids
    ]
    assert len(names) == wanted == len(set(names))


def test_replayed_rounds_share_the_windows_with_the_new_one() -> None:
    made = loader(share=1.0, every=4, keep=2)
    rounds = [round_of(1, 24), round_of(2, 24)]
    wanted = made.rows_wanted(3, rounds)
    assert made.rows_served(3) == 24 and wanted == 8
    made.take([*rounds, round_of(3, wanted)])
    names = [name for index in range(12, 16) for batch in made.whole_window(index) for name in batch.sample_ids]
    assert sum(name.startswith("r3.") for name in names) == 8 and len(set(names)) == 24
    assert list(made.older(3)) == [1, 2]


def test_a_window_of_a_round_that_is_not_written_is_not_known() -> None:
    made = loader(share=0.5, every=4)
    made.take([round_of(0, 12)])
    assert made.known(3) and not made.known(4) and made.upcoming(4) == [] and made.upcoming(3)
    with pytest.raises(LookupError):
        made.window(4)
    assert [batch.keys for batch in made.first_window()] == [batch.keys for batch in made.data.window(0)]


def test_one_round_serves_the_whole_run_from_the_first_share_on() -> None:
    base = Loader(data(), batch_size=2, accumulation=2, seed=5)
    made = RolloutLoader(
        base,
        share=lambda progress: 0.5 * (progress >= 0.5),
        num_steps=12,
        every=0,
        keep_rounds=0,
        max_length=16,
        pad_id=0,
    )
    assert [made.uses_rollouts(index) for index in range(12)] == [False] * 6 + [True] * 6
    assert {made.round_of(index) for index in range(20)} == {0} and made.rows_served(0) == 12


def test_processes_share_a_window_of_data_and_rollouts() -> None:
    whole = loader(accumulation=4)
    parts = [loader(accumulation=4, rank=rank, num_ranks=2, initial_world_size=1) for rank in range(2)]
    for made in (whole, *parts):
        made.take([round_of(0, made.rows_wanted(0))])
    keys = [batch.keys for batch in whole.window(1)]
    assert keys == [batch.keys for pair in zip(*(part.window(1) for part in parts), strict=True) for batch in pair]


def test_prompts_of_a_round_are_a_permutation_and_differ_between_rounds() -> None:
    prompts = [(f"p{number}", [number]) for number in range(7)]
    first = chosen_prompts(prompts, 7, 1, 3, 0)
    assert sorted(first) == prompts and first != chosen_prompts(prompts, 7, 1, 3, 1)
    assert first == chosen_prompts(prompts, 7, 1, 3, 0)
    many = chosen_prompts(prompts, 20, 2, 3, 0)
    assert len(many) == 20 and all(one == other for one, other in zip(many[::2], many[1::2], strict=True))


def test_prompts_end_before_the_first_scored_token() -> None:
    rows = rows_of([rollout(3), rollout(1)], 16, 0)
    assert list(rows.prompts(32)) == [("p3", [10, 11, 15], 4), ("p1", [10, 11, 13], 2)]
