"""The timed path of a newcomer is the tutorial's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "newcomer"))
newcomer: Any = importlib.import_module("bench_newcomer")
PAGE = (ROOT / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8")


def test_every_timed_command_stands_in_the_tutorial() -> None:
    for _name, command in newcomer.STEPS:
        plain = command.partition(" | ")[2] or command
        assert plain.removesuffix(" --no-progress") in PAGE, command


def test_the_configuration_is_the_tutorial_s() -> None:
    assert newcomer.configuration(PAGE).startswith("# mine.toml\npreset")
