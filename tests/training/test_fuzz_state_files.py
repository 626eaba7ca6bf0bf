"""Damaged state files of runs and caches: whatever reads them ends with a documented code and an explanation."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import state_files as files
import tiny

from stillroom.cli import main

NUM_CASES = 500
_DOCUMENTED = frozenset({0, 2, 20, 21, 22, 23, 24, 25, 75})
_HANG_SECONDS = 60
_STEP = 2  # whose window was put into quarantine

Words = list[str]


@dataclass(frozen=True)
class Ground:
    """A finished run with a quarantined window and two checkpoints, a second run, and a cache."""

    run: Path
    other: Path
    cache: Path
    text: Path


def _code_of(words: Words) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def ground(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("state")
    settings = tiny.settings(
        world, train__max_steps=3, train__eval_steps=1, train__save_steps=1, eval__max_batches=1, data__max_length=16
    )
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    common = ["--device", "cpu", *sets]
    quiet = [*common, "--no-progress"]
    run, other, cache = folder / "run", folder / "other", folder / "cache"
    assert _code_of(["distill", "--out", str(run), "--inject", f"nan_grad@{_STEP}", *quiet]) == 0
    assert _code_of(["distill", "--out", str(other), *quiet]) == 0
    text = tiny.save_text(folder / "text.jsonl", count=4, seed=9)
    assert _code_of(["eval", str(run), "--data", str(text), "--max-batches", "1", "--device", "cpu"]) == 0
    few = ["--set", "teacher.signal.kind=top_k", "--set", "teacher.signal.k=4"]
    assert _code_of(["cache", "--out", str(cache), *common, *few]) == 0
    return Ground(run, other, cache, text)


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """End a case that hangs, as a failure."""

    def late(_number: int, _frame: object) -> None:
        raise AssertionError("the command did not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_HANG_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- what is damaged, and who reads it -------------------------------------------------------------------


def _checkpoint(run: Path, chance: random.Random) -> Words:
    """Both checkpoints or the newest, with or without sums that hold."""
    found = files.checkpoints(run)
    for checkpoint in found[: chance.choice([1, len(found)])]:
        match chance.randrange(8):
            case 0:
                files.damage_bytes(chance.choice(sorted(checkpoint.iterdir())), chance)
                continue
            case 1:
                files.damage_json(checkpoint / "manifest.json", chance)
                continue
            case 2 | 3:
                files.damage_tensors(chance.choice(sorted(checkpoint.glob("*.safetensors"))), chance)
            case _:
                files.damage_json(checkpoint / "state.json", chance, chance.choice([1, 1, 3]))
        files.reseal(checkpoint)
    return _resume(run) if chance.random() < 0.8 else _replay(run)


def _mark(run: Path, chance: random.Random) -> Words:
    path = files.note_rollback(run)
    if chance.random() < 0.2:
        files.damage_bytes(path, chance)
    else:
        files.damage_json(path, chance, chance.choice([1, 1, 2]))
    return _resume(run)


def _quarantine(run: Path, chance: random.Random) -> Words:
    facts = next((run / "quarantine").glob("step-*.json"))
    match chance.randrange(5):
        case 0:
            files.damage_bytes(chance.choice([facts, facts.with_suffix(".safetensors")]), chance)
        case 1 | 2:
            files.damage_tensors(facts.with_suffix(".safetensors"), chance)
        case _:
            files.damage_json(facts, chance, chance.choice([1, 1, 3]))
    return _replay(run)


def _record(run: Path, chance: random.Random) -> Words:
    """Files of the run that commands read to show it: log, summary, configuration, figures of an evaluation."""
    name = chance.choice(["events.jsonl", "events.jsonl", "summary.json", "config.json", "eval.json"])
    if chance.random() < 0.2:
        files.damage_bytes(run / name, chance)
    elif name == "events.jsonl":
        files.damage_lines(run / name, chance)
    else:
        files.damage_json(run / name, chance, chance.choice([1, 1, 3]))
    shown = ["watch", str(run), "--no-wait", "--no-progress"]
    return chance.choice(
        [
            ["report", str(run)],
            ["report", str(run), str(run.parent / "other"), "--out", str(run.parent / "compared.html")],
            shown,
            shown,
            ["diagnose", str(run)],
            ["diagnose", str(run), "--json"],
            ["compare", str(run), str(run.parent / "other")],
            ["compare", str(run.parent / "other"), str(run), "--json"],
            ["export", str(run), "--out", str(run.parent / "exported")],
        ]
    )


def _ended(run: Path, chance: random.Random) -> Words:
    """What a finished run left, read by a command that goes on with it."""
    name = chance.choice(["summary.json", "events.jsonl"])
    if chance.random() < 0.3:
        files.damage_bytes(run / name, chance)
    elif name == "summary.json":
        files.damage_json(run / name, chance)
    else:
        files.damage_lines(run / name, chance)
    if name == "events.jsonl" and chance.random() < 0.7:
        (run / "summary.json").unlink()
    return ["resume", str(run), "--device", "cpu", "--no-progress", "--max-minutes", "0.2"]


def _configuration(run: Path, chance: random.Random) -> Words:
    if chance.random() < 0.3:
        files.damage_bytes(run / "config.json", chance)
    else:
        files.damage_json(run / "config.json", chance)
    return chance.choice([_resume(run), _replay(run), ["eval", str(run), *_MEASURED, str(run.parent / "text.jsonl")]])


def _cache(run: Path, chance: random.Random) -> Words:
    cache = run.parent / "cache"
    if chance.random() < 0.5:
        files.damage_json(cache / "cache.json", chance)
    else:
        path = chance.choice([cache / "cache.json", *sorted((cache / "shards").iterdir())])
        files.damage_bytes(path, chance)
    return ["cache", chance.choice(["info", "verify"]), str(cache)]


_MEASURED = ["--device", "cpu", "--max-batches", "1", "--data"]
_TARGETS: dict[Callable[[Path, random.Random], Words], int] = {
    _checkpoint: 5,
    _mark: 2,
    _quarantine: 3,
    _record: 6,
    _ended: 2,
    _configuration: 2,
    _cache: 2,
}  # with how often each is drawn


def _resume(run: Path) -> Words:
    (run / "summary.json").unlink()
    return ["resume", str(run), "--device", "cpu", "--no-progress", "--max-minutes", "0.2"]


def _replay(run: Path) -> Words:
    return ["replay", str(run), str(_STEP), "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_a_damaged_state_file_ends_in_a_documented_code(
    seed: int, ground: Ground, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    target = chance.choices([*_TARGETS], [*_TARGETS.values()])[0]
    run = files.linked(ground.run, tmp_path / "run")
    for beside in (ground.other, ground.cache):
        files.linked(beside, tmp_path / beside.name)
    (tmp_path / "text.jsonl").symlink_to(ground.text)
    words = target(run, chance)
    capsys.readouterr()
    code = _code_of(words)
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed, f"{target.__name__}: {' '.join(words)}\n{printed[-3000:]}"
    assert code in _DOCUMENTED, f"{target.__name__}: {' '.join(words)} ended with {code}:\n{printed[-3000:]}"
