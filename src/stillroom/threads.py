"""How the threads of a CPU product wait for each other, chosen before torch is loaded.

At the end of each parallel loop OpenMP's threads spin until the last one is done, with GNU's library 300,000 times.
Beside other processes that one may not be running, and the spinning thread burns the time slice it would need: steps of
the demo then take ten times as long and more. Threads that sleep at once cost half a step on an idle machine. Ten
thousand turns cost an idle machine next to nothing and halve the harm of work that comes later; a thousand are better
where the machine is busy already (benchmarks/training/results/busy.json). OpenMP reads its environment once, when torch
is loaded, so the choice is made first, by what runs at that moment, and never against the user's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, MutableMapping
from pathlib import Path

# Any of these is the user's own choice. The last two are those of GNU's and of Intel's and LLVM's OpenMP.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_NAME = "GOMP_SPINCOUNT"  # read by torch's OpenMP on Linux; others do not look at it
_IDLE, _BUSY = "10000", "1000"
_LOOKS, _PAUSE = 5, 0.003  # seconds; a daemon that wakes for a moment is not a busy machine

_said: list[str] = []


def others_running(counts: Path = Path("/proc/loadavg")) -> int:
    """How many tasks beside this one want a core, as the kernel counts them; 0 where it does not say."""
    seen = []
    for _ in range(_LOOKS):
        try:
            running = int(counts.read_text().split()[3].partition("/")[0])
        except (OSError, IndexError, ValueError):  # not Linux, or a container that hides it
            return 0
        seen.append(max(0, running - 1))
        time.sleep(_PAUSE)
    return sorted(seen)[_LOOKS // 2]


def choose_waiting(
    environment: MutableMapping[str, str] = os.environ,
    loaded: Collection[str] = sys.modules,
    count_others: Callable[[], int] = others_running,
) -> None:
    """Let waiting threads spin for a while and then sleep, unless the user chose, or torch is loaded already."""
    _said.clear()
    if "torch" in loaded or any(name in environment for name in _CHOICES):
        return
    others = count_others()
    environment[_NAME] = _BUSY if others else _IDLE
    machine = f"{others} other tasks wanted a core at the start" if others else "the machine was idle at the start"
    _said.append(
        f"{_NAME}={environment[_NAME]} was set, because {machine}: threads that spin while they wait slow training "
        f"down many times beside other processes (set {_NAME} or OMP_WAIT_POLICY yourself to choose)"
    )


def notes() -> list[str]:
    """What was chosen in this process, for the log of a run; nothing where nobody asked."""
    return list(_said)
