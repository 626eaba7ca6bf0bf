"""The teacher's dtype where none is asked for: what the chosen device computes natively."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.precision import device as devices
from stillroom.precision.device import DeviceFacts, teacher_dtype


@pytest.mark.parametrize(
    ("device", "native", "wanted", "dtype"),
    [
        ("cpu", False, "auto", torch.float32),
        ("cuda", False, "auto", torch.float16),
        ("cuda", True, "auto", torch.bfloat16),
        ("cuda", True, "float16", torch.float16),
        ("xpu", False, "auto", torch.float32),
    ],
)
def test_a_teacher_is_bf16_where_bf16_is_native(
    device: str, native: bool, wanted: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "facts_of", lambda where: DeviceFacts(where.type, has_native_bf16=native))
    config = load_config(overrides={**tiny.settings(Path()), "teacher.dtype": wanted})
    assert teacher_dtype(config.teacher.dtype, torch.device(device)) == dtype
