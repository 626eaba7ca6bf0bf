"""A wheel that lacks a file of the package, or holds another, is named before it is published."""

from __future__ import annotations

import importlib
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
check_wheel: Any = importlib.import_module("check_wheel")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("__init__.py", "py.typed", "presets/base.toml", "__pycache__/x.pyc"):
        path = tmp_path / "src" / "stillroom" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    return tmp_path / "src"


def wheel(folder: Path, *names: str) -> Path:
    with zipfile.ZipFile(folder / "stillroom-1-py3-none-any.whl", "w") as archive:
        for name in [*names, "stillroom-1.dist-info/METADATA"]:
            archive.writestr(name, "")
    return folder / "stillroom-1-py3-none-any.whl"


WHOLE = ("stillroom/__init__.py", "stillroom/py.typed", "stillroom/presets/base.toml")


def test_a_whole_wheel_is_accepted(source: Path, tmp_path: Path) -> None:
    assert check_wheel.complaints(wheel(tmp_path, *WHOLE), source) == []


def test_a_missing_file_is_named(source: Path, tmp_path: Path) -> None:
    found = check_wheel.complaints(wheel(tmp_path, *WHOLE[:-1]), source)
    assert len(found) == 1 and "lacks stillroom/presets/base.toml" in found[0]


@pytest.mark.parametrize("name", ["tests/test_x.py", "stillroom/left_over.py"])
def test_a_file_that_does_not_belong_is_named(source: Path, tmp_path: Path, name: str) -> None:
    found = check_wheel.complaints(wheel(tmp_path, *WHOLE, name), source)
    assert len(found) == 1 and name in found[0]


def test_a_source_archive_is_held_to_the_same(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "stillroom-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("__init__.py", "py.typed"):
            archive.add(source / "stillroom" / name, f"stillroom-1/src/stillroom/{name}")
    assert check_wheel.complaints(path, source) == [f"{path.name} lacks src/stillroom/presets/base.toml"]


def test_what_the_package_reads_at_run_time_is_among_its_files() -> None:
    found = check_wheel.package_files(check_wheel.ROOT / "src")
    for name in (
        "py.typed",
        "config/presets/base.toml",
        "report/assets/plotly-basic.min.js",
        "report/assets/LICENSE.plotly",
        "report/assets/page.css",
        "report/templates/run.html",
        "builtin/models/teacher/model.safetensors",
        "builtin/models/moe-teacher/tokenizer.json",
        "builtin/models/student/config.json",
        "losses/head/native/rows.cpp",
    ):
        assert f"stillroom/{name}" in found, name
