"""Laws of kept memory, each in a process of its own: the setting is the process's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from stillroom.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)  # 16,384 pages, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory() if "keep" in sys.argv else None
faults()
print(kept, faults())
"""
on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")


def second_time(*words: str, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True, env={**clean, **environment}
    )
    return done.stdout.split()


@on_glibc
def test_a_block_that_is_kept_is_not_faulted_in_again() -> None:
    _, without = second_time()  # few where the system hands out huge pages unasked
    kept, faults = second_time("keep")
    assert kept == "True"
    assert int(faults) < int(without) / 10


@on_glibc
def test_what_the_user_set_in_the_environment_stands() -> None:
    kept, _ = second_time("keep", MALLOC_MMAP_THRESHOLD_="1048576")
    assert kept == "False"
