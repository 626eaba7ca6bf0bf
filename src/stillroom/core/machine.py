"""Facts of the machine that a library asks the host about, corrected for containers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class MainMemory:
    """Bytes of main memory that this process may use: the host's, or those of its container where they are fewer."""

    available: int
    total: int


def main_memory() -> MainMemory:
    """Ask the host and every control group above this process. psutil sees the host alone."""
    host = psutil.virtual_memory()
    available, total = int(host.available), int(getattr(host, "total", host.available))
    for limit, used in _limits():
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MainMemory(available, total)


def _limits() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each group with a limit, by version 2 and by version 1."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            root, names, dropped = CGROUPS, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            dropped = "total_inactive_file"
        else:
            continue
        # Inside a container the path is often that of the host, and its own group is mounted at the root.
        groups = {root, *(root / part for part in _with_parents(path))}
        found += [limit for group in groups if (limit := _limit(group, *names, dropped)) is not None]
    return found


def _with_parents(path: str) -> list[Path]:
    inner = Path(path.lstrip("/"))
    return [part for part in (inner, *inner.parents) if ".." not in part.parts]


def _limit(group: Path, limit_name: str, used_name: str, dropped: str) -> tuple[int, int] | None:
    """None where the group has no limit, or cannot be read. Cached files are dropped before memory runs out."""
    limit, used = _number_in(group / limit_name), _number_in(group / used_name)
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    try:
        words = [line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()]
        cached = next((int(word[1]) for word in words if len(word) == 2 and word[0] == dropped), 0)
    except (OSError, ValueError):
        cached = 0
    return limit, max(0, used - cached)


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):  # "max" of version 2, or no such file
        return None


def nvidia_driver() -> str:
    """What is known of the driver of an NVIDIA GPU; empty where there is none."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "nvidia-smi is installed" if shutil.which("nvidia-smi") else ""


def shared_memory_bytes() -> int | None:
    """The size of /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return None
