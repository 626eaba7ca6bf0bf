"""Measure the memory a run uses."""

from __future__ import annotations

import psutil
import torch


def memory_in_use(device: torch.device) -> tuple[float, float, float]:
    """(gigabytes of the GPU, resident gigabytes of the process, percent of the training device's memory).

    The GPU's are the peak since the last call: what is allocated between two steps is far less than what a step needs.
    """
    resident = psutil.Process().memory_info().rss
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return used / 1e9, resident / 1e9, 100.0 * used / total
    return 0.0, resident / 1e9, 100.0 * resident / psutil.virtual_memory().total
