"""Builds guard.cpp for the torch that is installed, once, and loads it. Import this before torch.

torch asks its hooks for CUDA once, when it is loaded, and keeps the answer.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def _library() -> Path:
    source = Path(__file__).with_name("guard.cpp")
    version = importlib.metadata.version("torch")
    library = Path(tempfile.gettempdir()) / f"stillroom-guard-{version}-{source.stat().st_mtime_ns}.so"
    if not library.exists():
        found = importlib.util.find_spec("torch")
        assert found is not None
        assert found.origin is not None
        root = Path(found.origin).parent
        part = library.with_suffix(".part")
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(source), f"-L{root}/lib",
                   "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-o", str(part)]  # fmt: skip
        subprocess.run(command, check=True)
        part.replace(library)
    return library


if "torch" in sys.modules:
    raise ImportError("import guard before torch")
ctypes.CDLL(str(_library()), ctypes.RTLD_GLOBAL)
IS_LOADED = True
