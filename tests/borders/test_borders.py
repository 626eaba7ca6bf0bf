"""The table of hostile and damaged inputs: each ends with its code, an explanation, and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from border_cases import CONTROL, Case, Place
from data_cases import DATA
from model_cases import MODELS
from run_cases import RUNS
from setting_cases import SETTINGS
from state_cases import STATES
from stranger_cases import STRANGERS
from teacher_cases import TEACHERS

from stillroom.cli import main

TABLE = [*MODELS, *TEACHERS, *DATA, *SETTINGS, *RUNS, *STRANGERS, *STATES]


def _code_of(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="session")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that ended well, with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    place = Place(folder.parent, world, folder)
    words = place.distill(train__max_steps=2, train__eval_steps=1, train__save_steps=1)
    words[words.index("--out") + 1] = str(folder)
    assert _code_of(words) == 0
    return folder


@pytest.fixture
def place(world: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    yield Place(tmp_path, world, finished)
    assert not (tmp_path / "unpickled").exists(), "code of a model folder was run"


def test_the_table_is_as_large_as_promised() -> None:
    assert len(TABLE) >= 120
    assert len({case.name for case in TABLE}) == len(TABLE), "two cases have one name"


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_every_hostile_input_ends_with_its_code_and_an_explanation(
    case: Case, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    words = case.prepare(place)
    capsys.readouterr()
    code = _code_of(words)
    captured = capsys.readouterr()
    printed = " ".join((captured.out + captured.err).split())  # a long path breaks lines anywhere
    assert "Traceback" not in printed
    assert code in case.codes, f"ended with {code}:\n{printed[-2000:]}"
    assert not CONTROL.search(captured.out + captured.err), "a control character was echoed"
    assert "sk-border" not in captured.out + captured.err, "a key was echoed"
    if code:
        assert captured.err.strip(), "an end without a word"
        assert case.says.lower() in printed.lower(), printed[-2000:]
