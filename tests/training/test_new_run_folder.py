"""Laws of a run's folder that nobody named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillroom.core.files import new_run_folder


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one found the folder of the first, and was refused as a run of another configuration."""
    monkeypatch.chdir(tmp_path)
    made = []
    for _ in range(3):
        folder = new_run_folder("demo")
        assert not folder.exists()
        folder.mkdir(parents=True)
        made.append(folder)
    assert len(set(made)) == 3 and all(one.parent == Path("runs") for one in made)
