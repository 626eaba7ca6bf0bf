"""Laws of the quality laboratory: what is chosen where, and that its short cuts change nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "quality"))
import bench_crosstok
import book as books
import lab
import nets
import pairs
import texts

from stillroom.core.types import Needs
from stillroom.data import Encoded, Rows


def rows_of(num_rows: int) -> Rows:
    count = num_rows * texts.LENGTH + 1
    ids = np.random.default_rng(0).integers(2, texts.VOCAB, count).astype(np.int32)
    encoded = Encoded(ids, np.ones_like(ids), np.ones(count, bool), np.array([0, count]), ("text",), ("text",))
    starts = np.arange(num_rows, dtype=np.int64) * texts.LENGTH
    return Rows(encoded, starts, starts + texts.LENGTH + 1, names_offsets=True)


@pytest.mark.parametrize("shape", ["dense", "moe", "many"])
def test_a_remembered_teacher_answers_like_the_live_one(shape: str) -> None:
    model = nets.draw(nets.SHAPES[shape], 0).requires_grad_(False).eval()
    rows = rows_of(6)
    batch = rows.batch([4, 1, 3])
    kept = nets.Remembered(model, rows).observe(batch, Needs())
    asked = nets.live(model).observe(batch, Needs())
    assert torch.allclose(kept.hidden, asked.hidden, atol=1e-5)
    assert torch.equal(kept.head.weight, asked.head.weight)


def test_no_group_of_documents_is_on_two_sides() -> None:
    sides = texts.documents("python")
    groups = [{document.group for document in sides[side]} for side in ("train", "dev", "test")]
    assert all(groups)
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])


def finished(dev: dict[float, float], test: dict[float, float]) -> Any:
    def work(job: Any) -> dict[str, Any]:
        rate = job.learning_rate
        return {"dev": dev.get(rate, 9.0), "test": test.get(rate, 9.0) + job.seed, "cpu_seconds": 0.0}

    return work


def test_a_rate_is_chosen_on_dev_and_never_on_test(tmp_path: Path) -> None:
    book = books.Book("try", tmp_path)
    work = finished(dev={3e-3: 3.0, 1e-2: 2.0, 3e-2: 2.5}, test={3e-3: 1.0, 1e-2: 2.0, 3e-2: 0.5})
    book.tuned("arm", lambda rate, seed: lab.Job(learning_rate=rate, seed=seed), work=work)
    assert book.values("arm") == {0: 2.0, 1: 3.0, 2: 4.0}


def test_a_run_in_the_book_is_not_repeated(tmp_path: Path) -> None:
    count = 0

    def work(job: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"dev": 1.0, "test": float("nan"), "cpu_seconds": 0.0}

    for _ in range(2):
        line = books.Book("try", tmp_path).run("arm", lab.Job(), work)
    assert count == 1
    assert line["test"] is None, "what is not finite is null in the file"


def test_one_side_needs_every_seed() -> None:
    assert books.is_beyond([-0.02, -0.021, -0.019], -1)
    assert not books.is_beyond([-0.02, -0.021, 0.001], -1)
    assert not books.is_beyond([-0.02], -1)


def test_pieces_are_the_whole_text_and_within_their_bound() -> None:
    text = "def f(x):\n    return x\n" * 9 + "\u00e9" * 200 + "\n" + "x" * 400
    parts = list(pairs._cut(text))
    assert "".join(parts) == text and max(len(part.encode()) for part in parts) <= pairs.PIECE_BYTES


def test_rates_go_on_until_the_best_one_is_inside(tmp_path: Path) -> None:
    book = books.Book("try", tmp_path)
    work = finished(dev={1e-3: 2.0, 3e-3: 2.5, 3e-4: 2.2}, test={})
    rates = bench_crosstok._rates(book, "arm", lambda rate, seed: lab.Job(learning_rate=rate, seed=seed), work)
    assert rates == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
