"""Lets autograd and autocast work on tensors that say `cuda` where torch has no CUDA. Import this before torch.

The guard is the one of the tests' card. torch asks for it once, when it is loaded, and keeps the answer.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "device"))
import card_cuda


def _library() -> Path:
    """Built once for each torch."""
    name = f"stillroom-guard-{importlib.metadata.version('torch')}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        part = library.with_suffix(".part")
        card_cuda.build_guard(part)
        part.replace(library)
    return library


if "torch" in sys.modules:
    raise ImportError("import guard before torch")
card_cuda.load_guard(_library())
IS_LOADED = True
