"""The lowest versions are those that pyproject.toml declares."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("lowest", ROOT / "scripts" / "lowest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lower_bounds_become_exact_versions(script: Any) -> None:
    project = {
        "name": "still",
        "dependencies": ["torch>=2.6", "numpy>=2.0"],
        "optional-dependencies": {"a": ["peft>=0.18"], "b": ["trl==1.16.0", "still[a]"]},
    }
    assert script.lines(project, []) == ["numpy==2.0", "torch==2.6"]
    assert script.lines(project, ["b"]) == ["numpy==2.0", "peft==0.18", "torch==2.6", "trl==1.16.0"]


@pytest.mark.parametrize("requirement", ["torch", "torch<3", "torch>=2.6,<3"])
def test_a_requirement_without_one_lower_bound_is_refused(script: Any, requirement: str) -> None:
    with pytest.raises(ValueError, match="torch"):
        script.lines({"name": "still", "dependencies": [requirement]}, [])


def test_a_package_with_two_lower_bounds_is_refused(script: Any) -> None:
    with pytest.raises(ValueError, match="torch"):
        script.lines({"name": "still", "dependencies": ["torch>=2.6", "torch>=2.7"]}, [])


def test_every_dependency_of_the_package_declares_its_lowest_version(script: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = script.lines(project, project["optional-dependencies"])
    assert len(found) >= len(project["dependencies"])
