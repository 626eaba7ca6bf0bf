"""How large a chunk is, and what a pass holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillroom.losses.head import rows
from stillroom.losses.head.rows import choose_chunk, chunk_size, pass_bytes

GB = 10**9


@given(num_rows=st.integers(0, 5000), num_tokens=st.integers(1, 300_000), width=st.integers(1, 8192))
def test_a_chosen_chunk_keeps_to_its_budget(num_rows: int, num_tokens: int, width: int) -> None:
    chunk = chunk_size(0, num_rows, num_tokens, width)
    assert 1 <= chunk <= 1024
    assert chunk <= max(1, num_rows)
    budget = max(128 * 2**20, 4 * num_tokens * width)
    assert chunk <= 64 or 2 * 4 * chunk * num_tokens <= budget


def test_an_asked_chunk_is_taken() -> None:
    assert chunk_size(512, 2000, 32_000, 576) == 512
    assert chunk_size(512, 100, 32_000, 576) == 100
    assert chunk_size(0, 600, 32_000, 576) == 300  # two equal ones, not 512 and a rest


@given(
    num_rows=st.integers(1, 9000),
    num_tokens=st.integers(1, 300_000),
    width=st.integers(1, 8192),
    free_bytes=st.integers(0, 80 * GB),
)
def test_a_chunk_on_a_device_takes_an_eighth_of_its_free_memory_at_most(
    num_rows: int, num_tokens: int, width: int, free_bytes: int
) -> None:
    chunk = chunk_size(0, num_rows, num_tokens, width, free_bytes)
    assert 1 <= chunk <= min(2048, num_rows)
    assert chunk <= 64 or pass_bytes(chunk, num_tokens) <= free_bytes / 8


def test_a_chunk_on_a_device_does_not_grow_with_the_width() -> None:
    sizes = {chunk_size(0, 4096, 49_152, width, 10 * GB) for width in (64, 576, 8192)}
    assert sizes == {1024}  # four of them; 1,152 would fit
    assert chunk_size(0, 4096, 49_152, 576, 2 * GB) < 256


def test_free_memory_is_asked_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * GB]
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return free[0], 16 * GB

    class Hidden:
        shape, device = (4096, 576), torch.device("cuda:0")

    hidden: torch.Tensor = Hidden()  # type: ignore[assignment]  # no card is at hand
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    rows.forget_free_memory()
    try:
        first = choose_chunk(0, hidden, 49_152)
        free[0] = 1 * GB
        assert choose_chunk(0, hidden, 49_152) == first and len(asked) == 1
        rows.forget_free_memory()
        assert choose_chunk(0, hidden, 49_152) < first
        assert choose_chunk(512, hidden, 49_152) == 512 and len(asked) == 2, "an asked chunk is taken unasked"
    finally:
        rows.forget_free_memory()


def test_what_torch_has_reserved_and_does_not_use_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 * GB, 16 * GB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 3 * GB)
    for reserved, expected in ((3 * GB, 1 * GB), (7 * GB, 5 * GB)):
        rows.forget_free_memory()
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device, reserved=reserved: reserved)
        assert rows._free_bytes(torch.device("cuda:0"), 49_152) == expected
    rows.forget_free_memory()
