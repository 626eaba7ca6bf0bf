"""Built kernels are code: none is loaded that someone else could have put there, or that is not whole."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from process_jobs import Child, wait_for

from stillroom.losses.head import kernel
from stillroom.losses.head import kernel as compiled
from stillroom.losses.head.kernel import Built

CONTENT = b"made by the stub"
STUB = """#!/bin/sh
if [ "$1" = --version ]; then echo stub 1.0; exit 0; fi
echo called >> "{calls}"
sleep {seconds}
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf 'made by the stub' > "$2"; fi
    shift
done
"""
needs_unix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users and modes are those of Unix")
pytestmark = needs_unix


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only says it was called, a cache of its own, and a folder for temporary files of its own."""
    stub, calls, temporary = tmp_path / "stub-c++", tmp_path / "calls", tmp_path / "tmp"
    stub.write_text(STUB.format(calls=calls, seconds=0))
    stub.chmod(0o700)
    calls.touch()
    temporary.mkdir(mode=0o700)
    monkeypatch.setenv("CXX", str(stub))
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return calls


def build() -> Built:
    return compiled.build.__wrapped__()


def built_path() -> Path:
    path = build().path
    assert path is not None
    return path


def is_private(path: Path) -> bool:
    details = path.stat()
    return details.st_uid == os.geteuid() and not details.st_mode & 0o077


def test_a_library_is_built_once_and_private(calls: Path, tmp_path: Path) -> None:
    before = os.umask(0)  # the most careless setting there is
    try:
        first, second = build(), build()
    finally:
        os.umask(before)
    assert first.path is not None and first.path == second.path
    assert first.path.read_bytes() == CONTENT
    assert "built with stub-c++" in first.reason and "built earlier" in second.reason
    assert len(calls.read_text().splitlines()) == 3  # one to compile each source, one to link
    for path in (first.path, first.path.parent, first.path.parent.parent):
        assert is_private(path)
    assert first.path.is_relative_to(tmp_path / "cache")
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]


def _truncate(path: Path) -> None:
    path.write_bytes(CONTENT[:5])


def _change(path: Path) -> None:
    path.write_bytes(CONTENT[:-1] + b"!")


def _open_to_group(path: Path) -> None:
    path.chmod(0o660)


def _open_to_all(path: Path) -> None:
    path.chmod(0o606)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [_truncate, _change, _open_to_group, _open_to_all, _link, _give_away])
def test_a_library_in_doubt_is_built_again_and_said(calls: Path, harm: Callable[[Path], None]) -> None:
    path = built_path()
    harm(path)
    again = build()
    assert again.path == path
    assert path.read_bytes() == CONTENT and not path.is_symlink() and is_private(path)
    assert "built with stub-c++" in again.reason and "was removed" in again.reason
    assert len(calls.read_text().splitlines()) == 6


def test_something_else_under_the_name_of_a_library_leads_to_the_plain_kernel(calls: Path) -> None:
    _make_folder(built_path())
    built = build()
    assert built.path is None and "cannot build into" in built.reason


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_to_is_not_used(calls: Path, tmp_path: Path, mode: int) -> None:
    planted = built_path()
    planted.parent.chmod(mode)
    built = build()
    assert built.path is not None and built.path.is_relative_to(tmp_path / "tmp")
    assert is_private(built.path) and is_private(built.path.parent)
    assert "can be written to by other users" in built.reason and str(built.path.parent) in built.reason
    assert build().path == built.path  # the private folder is kept, and found again


def test_a_folder_of_another_user_is_not_used(calls: Path, tmp_path: Path) -> None:
    folder = built_path().parent
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, -1)
    built = build()
    assert built.path is not None and built.path.is_relative_to(tmp_path / "tmp")
    assert "belongs to another user" in built.reason


def test_a_folder_that_others_can_rename_is_not_used(calls: Path, tmp_path: Path) -> None:
    built_path()
    (tmp_path / "cache").chmod(0o777)
    built = build()
    assert built.path is not None and built.path.is_relative_to(tmp_path / "tmp")
    assert "can be replaced by others" in built.reason


@pytest.mark.parametrize("is_link", [False, True])
def test_a_squatted_temporary_folder_is_not_used_either(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setenv("STILLROOM_CACHE", str(calls / "below a file"))
    squatted = tmp_path / "tmp" / f"stillroom-kernels-{os.geteuid()}"
    if is_link:
        (tmp_path / "target").mkdir(mode=0o700)
        squatted.symlink_to(tmp_path / "target")
    else:
        squatted.mkdir()
        squatted.chmod(0o777)
    built = build()
    assert built.path is not None
    assert not built.path.is_relative_to(squatted) and is_private(built.path.parent)


def test_a_cache_that_cannot_be_written_to_is_replaced_and_said(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLROOM_CACHE", str(calls / "below a file"))  # true for root too
    built = build()
    assert built.path is not None and built.path.is_relative_to(tmp_path / "tmp")
    assert "cannot be made" in built.reason


def test_no_home_is_no_reason_to_fail(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "STILLROOM_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    built = build()
    assert built.path is not None and built.path.is_relative_to(tmp_path / "tmp")


def test_nowhere_to_build_leads_to_the_plain_kernel(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_CACHE", str(calls / "below a file"))
    monkeypatch.setattr(tempfile, "tempdir", str(calls / "below a file"))
    built = build()
    assert built.path is None and "no folder to build in" in built.reason


def test_two_processes_may_build_at_once(calls: Path) -> None:
    stub = Path(os.environ["CXX"])
    stub.write_text(STUB.format(calls=calls, seconds=1))
    both = [Child(lambda: sys.stdout.write(built_path().read_text()), os.environ) for _ in range(2)]
    assert [ended.out for ended in wait_for(both)] == [CONTENT.decode()] * 2
    assert build().reason.startswith("built earlier")


def test_a_truncated_kernel_does_not_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compiled.build().path
    if whole is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel, "build", compiled.build.__wrapped__)
    half = tmp_path / "stillroom" / "kernels" / whole.name
    half.parent.mkdir(parents=True, mode=0o700)
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    half.chmod(0o600)
    choice = kernel._compiled.__wrapped__()
    assert choice.name == "compiled"
    assert f"{half} does not have the checksum in its name and was removed" in choice.reason
