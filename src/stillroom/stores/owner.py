"""Who a process is, for others on this machine and elsewhere."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

_SAME_SECONDS = 5.0  # the system's idea of when a process began moves with its clock


@lru_cache(maxsize=1)
def host() -> str:
    """This machine, until it is started again. Names are no good: containers share them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def describe_process() -> dict[str, Any]:
    return {
        "host": host(),
        "name": socket.gethostname(),
        "processes": _namespace(),
        "pid": os.getpid(),
        "started": datetime.fromtimestamp(_began(os.getpid()), UTC).isoformat(timespec="seconds"),
        "began": _began(os.getpid()),
    }


def is_dead(owner: Mapping[str, Any]) -> bool:
    """Whether a process that described itself has ended. False where that cannot be seen from here."""
    if owner.get("host") != host() or owner.get("processes") != _namespace():
        return False
    try:
        return abs(_began(int(owner["pid"])) - float(owner["began"])) > _SAME_SECONDS
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return True
    except psutil.Error:
        return False


def _began(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def _namespace() -> str:
    """Which processes can be seen from here: a container sees its own alone."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()
