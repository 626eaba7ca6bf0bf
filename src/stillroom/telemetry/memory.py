"""Measure the memory a run uses."""

from __future__ import annotations

import psutil
import torch


def memory_in_use(device: torch.device) -> tuple[float, float, float]:
    """(GPU gigabytes in use, resident gigabytes of the process, percent of the training device's memory)."""
    resident = psutil.Process().memory_info().rss
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return used / 1e9, resident / 1e9, 100.0 * used / total
    return 0.0, resident / 1e9, 100.0 * resident / psutil.virtual_memory().total
