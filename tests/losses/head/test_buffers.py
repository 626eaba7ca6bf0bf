"""Laws of working memory: two users never share a block, and what is kept is bounded."""

from __future__ import annotations

import threading

import pytest
import torch
from head_cases import grads_of, make_case, run

from stillroom.losses.head import products
from stillroom.losses.head.products import BufferPool

CPU = torch.device("cpu")


def borrow(pool: BufferPool, num_rows: int) -> torch.Tensor:
    return pool.borrow((num_rows, 64), torch.float32, CPU)


def test_memory_is_lent_to_one_tensor_and_comes_back_when_that_one_is_gone() -> None:
    pool = BufferPool(least_kept_bytes=0)
    first, second = borrow(pool, 8), borrow(pool, 8)
    assert first.shape == (8, 64) and first.dtype == torch.float32
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1.0).all(), "they do not overlap"
    assert pool.num_bytes == 0
    place = first.data_ptr()
    del first
    assert pool.num_bytes == 8 * 64 * 4
    assert borrow(pool, 4).data_ptr() == place, "a smaller matrix fits too"


def test_a_view_keeps_the_memory_from_being_lent_again() -> None:
    pool = BufferPool(least_kept_bytes=0)
    part = borrow(pool, 8)[2:4, 5:]
    assert pool.num_bytes == 0
    part.fill_(3.0)
    borrow(pool, 8).fill_(4.0)
    assert (part == 3.0).all()


def test_small_tensors_are_left_to_the_allocator() -> None:
    pool = BufferPool(least_kept_bytes=1024)
    borrow(pool, 3)
    assert pool.num_bytes == 0
    borrow(pool, 4)
    assert pool.num_bytes == 1024


def test_only_the_five_largest_blocks_are_kept() -> None:
    pool = BufferPool(least_kept_bytes=0)
    lent = [borrow(pool, num_rows) for num_rows in (1, 5, 3, 7, 2, 9, 4)]
    lent.clear()
    assert pool.num_bytes == (3 + 4 + 5 + 7 + 9) * 64 * 4
    pool.clear()
    assert pool.num_bytes == 0


def test_a_dtype_of_another_width_uses_the_same_memory() -> None:
    pool = BufferPool(least_kept_bytes=0)
    place = pool.borrow((4, 64), torch.float64, CPU).data_ptr()
    found = pool.borrow((8, 64), torch.float32, CPU)
    assert found.data_ptr() == place and found.shape == (8, 64)


def test_rows_start_where_vectors_like_them() -> None:
    assert borrow(BufferPool(least_kept_bytes=0), 33).data_ptr() % 64 == 0


def test_garbage_that_is_collected_while_a_block_is_lent_does_not_lock_up() -> None:
    """The collector may run inside the pool; what it brings back must not wait for what it interrupted."""
    pool = BufferPool(least_kept_bytes=0)

    def borrow_inside() -> None:
        with pool._lock:
            borrow(pool, 8)

    thread = threading.Thread(target=borrow_inside, daemon=True)  # a lock-up is a failure here, not a hanging test run
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert pool.num_bytes == 8 * 64 * 4


@pytest.fixture
def small_shelf(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    """A pool that keeps what small problems need, in place of the library's."""
    pool = BufferPool(least_kept_bytes=0)
    monkeypatch.setattr(products, "POOL", pool)
    return pool


def test_a_pass_leaves_its_memory_on_the_shelf_and_the_next_one_takes_it(small_shelf: BufferPool) -> None:
    case = make_case(1, 16)
    run(case.copy(), chunk_tokens=8).loss.backward()
    kept = small_shelf.num_bytes
    assert kept > 0
    run(case.copy(), chunk_tokens=8).loss.backward()
    assert small_shelf.num_bytes == kept


def test_a_gradient_that_is_in_use_is_never_lent_again(small_shelf: BufferPool) -> None:
    """The weight's gradient is handed to the parameter; another pass, with or without gradients, must not write it."""
    case, other = make_case(4, 16).copy(), make_case(5, 16).copy()
    run(case, chunk_tokens=8).loss.backward()
    gradient = case.head.weight.grad
    assert gradient is not None
    before = gradient.clone()
    for _ in range(3):
        run(other, chunk_tokens=8).loss.backward()  # accumulates: a second gradient for a while
    assert torch.equal(gradient, before)
    place = gradient.data_ptr()
    case.head.weight.grad = gradient = None
    again = case.copy()
    run(again, chunk_tokens=8).loss.backward()
    assert again.head.weight.grad is not None and again.head.weight.grad.data_ptr() == place, "and is, once it is not"


def test_the_scratch_does_not_grow_with_the_tokens(small_shelf: BufferPool) -> None:
    kept = []
    for num_rows in (64, 512):
        small_shelf.clear()
        run(make_case(0, num_rows, 50), chunk_tokens=8)
        kept.append(small_shelf.num_bytes)
    assert 0 < kept[0] == kept[1] <= 2 * 8 * 64 * 8


def test_what_an_earlier_pass_left_behind_changes_nothing(small_shelf: BufferPool) -> None:
    case = make_case(2, 16)
    clean = case.copy()
    run(clean, chunk_tokens=8).loss.backward()
    small_shelf.clear()
    spoiled = [small_shelf.borrow((64, 1024), torch.float64, CPU).fill_(float("nan")) for _ in range(5)]
    spoiled.clear()
    assert small_shelf.num_bytes > 0
    again = case.copy()
    run(again, chunk_tokens=8).loss.backward()
    torch.testing.assert_close(grads_of(again), grads_of(clean), rtol=0, atol=0)


def test_passes_in_several_threads_do_not_disturb_each_other(small_shelf: BufferPool) -> None:
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
