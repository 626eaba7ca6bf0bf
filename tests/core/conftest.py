from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import FaultyStore, faulty_store

from stillroom.core import remote


@pytest.fixture(autouse=True)
def no_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE", 0.0)


@pytest.fixture
def faulty() -> Iterator[type[FaultyStore]]:
    with faulty_store() as store:
        yield store
