"""The command line lets GPU memory grow in place, before torch is there to read the setting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CODE = """
import os, sys
from stillroom.cli import main
main(["--version"])
assert "torch" not in sys.modules
print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has expandable segments on Linux alone")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "None"),
    ],
)
def test_segments_are_expandable_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    rest = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", _CODE], env={**rest, **given}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr
