"""The first loss scale is found from gradients, and from nothing that nobody wrote."""

from __future__ import annotations

import pytest
import torch

from stillroom.training.preflight import PeakWatch

OLD = torch.full((8,), float("nan"), dtype=torch.float16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(8, dtype=torch.float16),
        lambda: torch.empty_like(OLD),
        lambda: torch.empty_strided((8,), (1,), dtype=torch.float16),
        lambda: OLD.new_empty(8),
    ],
)
def test_memory_that_nobody_wrote_is_no_gradient(make: object) -> None:
    """A new block holds what was there before, and that may be anything."""
    with PeakWatch() as watch:
        made = make()  # type: ignore[operator]
    assert watch.peak() == 0.0
    with watch:
        made.copy_(torch.full((8,), 3.0))
    assert watch.peak() == 3.0
