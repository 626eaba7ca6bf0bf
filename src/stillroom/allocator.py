"""Main memory that a step frees is kept for the next one.

glibc gives a freed block of more than 32 MB back to the system, and the next step faults it in again, page by page,
each page cleared by the kernel first. A chunk of logits is such a block, and clearing it takes longer than what the
rows cost in a compiled kernel. The peak stays what it is, because what is kept is used again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SET_BY_HAND = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_AS_LARGE_AS_CAN_BE_SAID = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, once for the process; whether it does. What a user has set in the environment
    stands, and other C libraries are left as they are."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SET_BY_HAND):
        return False
    library = ctypes.CDLL(None)
    settings = (_MMAP_THRESHOLD, _TRIM_THRESHOLD)
    return all(library.mallopt(setting, _AS_LARGE_AS_CAN_BE_SAID) == 1 for setting in settings)
