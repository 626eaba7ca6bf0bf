"""Laws of working memory: two users never share a block, and what is kept is bounded."""

from __future__ import annotations

import gc
import threading

import torch
from head_cases import grads_of, make_case
from test_head import run

from stillroom.objectives.products import Products
from stillroom.objectives.scratch import SHELF, Shelf

CPU = torch.device("cpu")


class Borrower:
    pass


def lend(shelf: Shelf, borrower: Borrower, num_rows: int) -> torch.Tensor:
    return shelf.lend(borrower, num_rows, 64, torch.float32, CPU)


def test_a_block_is_lent_to_one_borrower_and_comes_back_when_that_one_is_gone() -> None:
    shelf, one, two = Shelf(), Borrower(), Borrower()
    first, second = lend(shelf, one, 8), lend(shelf, two, 8)
    assert first.shape == (8, 64) and first.dtype == torch.float32
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1.0).all(), "they do not overlap"
    assert shelf.num_bytes == 0
    del one
    assert shelf.num_bytes == 8 * 64 * 4
    three = Borrower()
    assert lend(shelf, three, 4).data_ptr() == first.data_ptr(), "a smaller matrix fits too"


def test_only_the_two_largest_blocks_are_kept() -> None:
    shelf = Shelf()
    borrowers = [Borrower() for _ in range(4)]
    for num_rows, borrower in zip((1, 5, 3, 7), borrowers, strict=True):
        lend(shelf, borrower, num_rows)
    borrower = None
    borrowers.clear()
    gc.collect()
    assert shelf.num_bytes == (5 + 7) * 64 * 4
    shelf.clear()
    assert shelf.num_bytes == 0


def test_a_dtype_of_another_width_uses_the_same_memory() -> None:
    shelf, one = Shelf(), Borrower()
    place = shelf.lend(one, 4, 64, torch.float64, CPU).data_ptr()
    del one
    two = Borrower()
    found = shelf.lend(two, 8, 64, torch.float32, CPU)
    assert found.data_ptr() == place and found.shape == (8, 64)


def test_a_pass_leaves_its_memory_on_the_shelf_and_the_next_one_takes_it() -> None:
    case = make_case(1, 16)
    SHELF.clear()
    run(case.copy(), chunk_tokens=8).loss.backward()
    kept = SHELF.num_bytes
    assert kept > 0
    run(case.copy(), chunk_tokens=8).loss.backward()
    assert SHELF.num_bytes == kept


def test_what_an_earlier_pass_left_behind_changes_nothing() -> None:
    case = make_case(2, 16)
    SHELF.clear()
    clean = case.copy()
    run(clean, chunk_tokens=8).loss.backward()
    SHELF.clear()
    for block in [Borrower(), Borrower()]:
        SHELF.lend(block, 64, 1024, torch.float64, CPU).fill_(float("nan"))
    del block
    gc.collect()
    again = case.copy()
    run(again, chunk_tokens=8).loss.backward()
    torch.testing.assert_close(grads_of(again), grads_of(clean), rtol=0, atol=0)


def test_passes_in_several_threads_do_not_disturb_each_other() -> None:
    cases = [make_case(seed, 24) for seed in range(4)]
    alone = [case.copy() for case in cases]
    for case in alone:
        run(case, chunk_tokens=4).loss.backward()
    together = [case.copy() for case in cases]
    threads = [
        threading.Thread(target=lambda case=case: [run(case, chunk_tokens=4) for _ in range(20)][-1].loss.backward())
        for case in together
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(grads_of(one), grads_of(other), rtol=0, atol=0)


def test_a_view_of_scratch_does_not_outlive_its_products_in_use() -> None:
    """The borrower of a chunk's memory is the object that makes the logits, so it must be held while they are read."""
    case = make_case(3, 8)
    products = Products(case.hidden, case.head, torch.float64, 4)
    logits = products.logits(slice(0, 4))
    other = Products(case.hidden, case.head, torch.float64, 4)
    assert logits.raw.data_ptr() != other.logits(slice(4, 8)).raw.data_ptr()
