"""The commands that check: their help costs no torch, and says what they do."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("doctor", ("green", "amber", "red", "--quick", "Exit code 0, or 2")),
        ("selftest", ("float64", "finite differences", "--only", "Exit code 0, or 20")),
        ("verify-resume", ("SIGKILL", "--steps", "--kill-at", "25")),
    ],
)
def test_help_loads_no_torch_and_says_what_is_done(command: str, words: tuple[str, ...]) -> None:
    code = (
        "import sys; from stillroom.cli import main\n"
        f"main(['{command}', '--help'])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for word in words:
        assert word in text
    assert max(map(len, done.stdout.splitlines())) <= 80
