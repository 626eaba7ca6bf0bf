"""How the threads of a CPU product wait for each other, chosen before torch is loaded.

At the end of each parallel loop OpenMP's threads spin until the last one is done. Beside other processes that one may
not be running, and the spinning thread burns the time slice it would need: whole training steps become several times
slower. Threads that sleep instead cost little when the machine is idle (benchmarks/training/bench_busy.py measures
both). OpenMP reads its environment once, when torch is loaded, so the choice is made first, and never against the
user's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, MutableMapping

# Any of these is the user's own choice. The last two are those of GNU's and of Intel's and LLVM's OpenMP.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_NAME, _VALUE = "OMP_WAIT_POLICY", "passive"

_said: list[str] = []


def wait_passively(environment: MutableMapping[str, str] = os.environ, loaded: Collection[str] = sys.modules) -> None:
    """Let threads sleep while they wait, unless the user chose, or torch is loaded and would not read it."""
    _said.clear()
    if "torch" in loaded or any(name in environment for name in _CHOICES):
        return
    environment[_NAME] = _VALUE
    _said.append(
        f"{_NAME}={_VALUE} was set: threads that spin while they wait slow training down several times beside other "
        f"processes (set {_NAME} yourself to choose)"
    )


def notes() -> list[str]:
    """What was chosen in this process, for the log of a run; nothing where nobody asked."""
    return list(_said)
