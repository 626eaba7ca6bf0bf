"""Building the C++ row kernel: once for each machine, into the user's cache.

The build takes about two seconds. It is done when first asked for and not in the background, so that which kernel a
run uses depends on the machine and not on timing: a resumed run must repeat its numbers to the last bit.

The library's name holds a hash of everything it was made from (source, flags, compiler, processor, torch), so a stale
one is never loaded, and its own checksum, without which none is (`kernel_cache.py`). OpenMP calls are left unresolved
on purpose: they bind to the runtime that torch has loaded, and the two share one pool of threads.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from stillroom.objectives.head.kernel_cache import choose_folder, fault_of, find, keep

_SOURCE = Path(__file__).with_name("native")
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# From best to most modest; the first that compiles is taken.
_ATTEMPTS = (
    (*_COMMON, "-fopenmp", "-march=native", "-mprefer-vector-width=512"),
    (*_COMMON, "-fopenmp", "-march=native"),
    (*_COMMON, "-fopenmp"),
)
_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Built:
    """A library, or None with the reason why there is none."""

    path: Path | None
    reason: str


@functools.cache
def build() -> Built:
    """The kernel's library for this machine, from the cache or made now."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)
    if compiler is None:
        return Built(None, "no C++ compiler found (g++, c++, clang++)")
    try:
        folder, doubt = choose_folder()
    except OSError as error:
        return Built(None, f"no folder to build in: {error}")
    try:
        stem = f"rows-{_fingerprint(compiler)}"
        path, damage = find(folder, stem)
        built = Built(path, f"built earlier: {path}") if path else _compile(compiler, folder, stem)
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"cannot build into {folder}: {error}")
    place = f"kept in {folder}, because {doubt}" if doubt else ""
    return Built(built.path, "; ".join(filter(None, (built.reason, damage, place))))


def _compile(compiler: str, folder: Path, stem: str) -> Built:
    complaint = ""
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        made = Path(scratch) / "rows.o", Path(scratch) / "rows.so"
        for flags in _ATTEMPTS:
            # Linked without -fopenmp, so that no second OpenMP runtime comes in.
            for command in (
                [compiler, *flags, "-c", str(_SOURCE / "rows.cpp"), "-o", str(made[0])],
                [compiler, "-shared", str(made[0]), "-o", str(made[1])],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
                if done.returncode != 0:
                    complaint = done.stderr.strip().partition("\n")[0]
                    break
            else:
                path = keep(made[1], folder, stem)
                fault = fault_of(path)  # a full disk may say nothing
                return Built(None, f"{path} {fault}") if fault else Built(path, f"built with {Path(compiler).name}")
    return Built(None, f"{Path(compiler).name} failed: {complaint}")


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCE.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    for part in (version, repr(_ATTEMPTS), _processor(), torch.__version__):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` looks at: the cache may be shared by different machines."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
