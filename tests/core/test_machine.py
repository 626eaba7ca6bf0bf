"""Main memory is that of the container where it is less than the host's; facts of GPUs that torch does not tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stillroom.core import machine
from stillroom.core.machine import main_memory

GB = 10**9
HOST = SimpleNamespace(available=100 * GB, total=128 * GB)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 128 GB, and control groups in a folder."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: HOST)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "self")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_a_limit_the_host_answers(groups: Path) -> None:
    assert (main_memory().available, main_memory().total) == (100 * GB, 128 * GB)
    (groups / "self").write_text("0::/\n")
    write(groups / "cgroup", memory__max="max", memory__current=5)
    assert main_memory().total == 128 * GB


def test_version_two_limits_what_is_available_and_cached_files_do_not_count(groups: Path) -> None:
    (groups / "self").write_text("0::/docker/abc\n")
    stat = f"anon 1\ninactive_file {2 * GB}"
    write(groups / "cgroup" / "docker" / "abc", memory__max=13 * GB, memory__current=5 * GB, memory__stat=stat)
    assert (main_memory().available, main_memory().total) == (10 * GB, 13 * GB)


def test_the_tightest_group_above_a_process_decides(groups: Path) -> None:
    (groups / "self").write_text("0::/outer/inner\n")
    write(groups / "cgroup" / "outer" / "inner", memory__max="max", memory__current=1 * GB)
    write(groups / "cgroup" / "outer", memory__max=8 * GB, memory__current=3 * GB)
    assert (main_memory().available, main_memory().total) == (5 * GB, 8 * GB)


def test_version_one_limits_too(groups: Path) -> None:
    (groups / "self").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    inside = groups / "cgroup" / "memory"  # a container sees its own group at the root
    write(inside, memory__limit_in_bytes=12 * GB, memory__usage_in_bytes=4 * GB, memory__stat="total_inactive_file 0")
    assert (main_memory().available, main_memory().total) == (8 * GB, 12 * GB)
    write(inside, memory__limit_in_bytes=9223372036854771712)
    assert main_memory().total == 128 * GB, "that number means no limit"


def test_strange_files_are_no_limit(groups: Path) -> None:
    (groups / "self").write_text("no colons\n0::/../../etc\n")
    write(groups / "cgroup", memory__max="lots", memory__current="some")
    assert main_memory().available == 100 * GB
