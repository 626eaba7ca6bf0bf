"""How the threads of a CPU product wait for each other, chosen before torch is loaded.

At the end of each parallel loop OpenMP's threads spin until the last one is done, with GNU's library 300,000 times.
Beside other processes that one may not be running, and the spinning thread burns the time slice it would need: steps of
the demo then take twenty times as long and more. Threads that sleep at once are a fifth slower on an idle machine. A
thousand turns are between: near the one where it is idle, near the other where it is busy
(benchmarks/training/results/busy.json). OpenMP reads its environment once, when torch is loaded, so the choice is made
first, and never against the user's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping

# Any of these is the user's own choice. The last two are those of GNU's and of Intel's and LLVM's OpenMP.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_NAME, _VALUE = "GOMP_SPINCOUNT", "1000"  # read by torch's OpenMP on Linux; others do not look at it

_said: list[str] = []


def spin_briefly(environment: MutableMapping[str, str] = os.environ, loaded: Collection[str] = sys.modules) -> None:
    """Let waiting threads spin for a moment and then sleep, unless the user chose, or torch is loaded already."""
    _said.clear()
    if "torch" in loaded or any(name in environment for name in _CHOICES):
        return
    environment[_NAME] = _VALUE
    _said.append(
        f"{_NAME}={_VALUE} was set: threads that spin while they wait slow training down many times beside other "
        f"processes (set {_NAME} or OMP_WAIT_POLICY yourself to choose)"
    )


def notes() -> list[str]:
    """What was chosen in this process, for the log of a run; nothing where nobody asked."""
    return list(_said)
