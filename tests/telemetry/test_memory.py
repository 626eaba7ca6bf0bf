"""The memory that is shown is the peak since the last record."""

from __future__ import annotations

import pytest
import torch

from stillroom.precision.device import memory_in_use


def test_a_card_shows_its_peak_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"now": 3 * 10**9, "peak": 7 * 10**9}
    properties = type("Properties", (), {"total_memory": 14 * 10**9})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device=None: used["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device=None: used["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device=None: used.update(peak=used["now"]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=None: properties)
    gpu, _resident, percent = memory_in_use(torch.device("cuda"))
    assert gpu == 7.0 and percent == 50.0
    assert memory_in_use(torch.device("cuda"))[0] == 3.0


def test_without_a_card_its_memory_is_zero() -> None:
    gpu, resident, percent = memory_in_use(torch.device("cpu"))
    assert gpu == 0.0 and resident > 0.0 and 0.0 < percent < 100.0
