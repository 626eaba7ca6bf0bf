"""What this machine is, as plain facts that a check can be given without it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from stillroom.precision.device import DeviceFacts, facts_of

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    device: DeviceFacts
    num_cores: int
    load: float  # processes that want a core, over the last minute
    num_threads: int
    asked_threads: str  # OMP_NUM_THREADS
    free_memory: int
    total_memory: int
    free_device_memory: int  # that of the machine where the device is a CPU
    free_disk: int
    driver: str  # of an NVIDIA card; empty where there is none
    torch_cuda: str  # the CUDA that torch was built for; empty for a CPU build


def read_machine(device: torch.device, folder: Path) -> Machine:
    memory = psutil.virtual_memory()
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else int(memory.available)
    return Machine(
        device=facts_of(device),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        num_threads=torch.get_num_threads(),
        asked_threads=os.environ.get("OMP_NUM_THREADS", ""),
        free_memory=int(memory.available),
        total_memory=int(memory.total),
        free_device_memory=free,
        free_disk=shutil.disk_usage(folder).free,
        driver=_driver(),
        torch_cuda=torch.version.cuda or "",
    )


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "nvidia-smi is installed" if shutil.which("nvidia-smi") else ""
