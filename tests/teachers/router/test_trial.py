"""The trial of a router teacher: what it means when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, OutOfMemory
from stillroom.teachers.live import LiveTeacher
from stillroom.training.distill import distill


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (RuntimeError("The size of tensor a (4) must match the size of tensor b (3)"), ConfigError),
    ],
    ids=["card", "main memory", "shapes"],
)
def test_memory_that_runs_out_in_the_trial_is_told_as_such(
    error: RuntimeError, end: type[Exception], moe_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: Any) -> None:
        raise error

    monkeypatch.setattr(LiveTeacher, "observe", fails)
    config = load_config(overrides=tiny.settings(moe_world, teacher__router__mode="all-experts"))
    with pytest.raises(end) as caught:
        distill(config, tmp_path / "run", device="cpu")
    assert ("cannot be chosen" in str(caught.value)) is (end is ConfigError)
