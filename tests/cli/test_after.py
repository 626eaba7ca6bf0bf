"""`stillroom diagnose` and `stillroom compare` on real folders, good and damaged."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import tiny
from commands import arguments, run

from stillroom.cli import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs: one that hardly learns, and one that does."""
    world = tmp_path_factory.mktemp("after")
    tiny.save_trained(world / "teacher", num_layers=1, steps=60)
    tiny.save_model(world / "student", num_layers=1)
    tiny.save_text(world / "train.jsonl")
    for name, rate in (("slow", 1e-6), ("quick", 3e-3)):
        over = {"train__learning_rate": rate, "train__max_steps": 12, "eval__samples": 0}
        with redirect_stdout(io.StringIO()) as printed:
            main(arguments(world, world / name, **over))
        (world / f"{name}.txt").write_text(printed.getvalue(), encoding="utf-8")
    return world / "slow", world / "quick"


def test_diagnose_names_cause_steps_evidence_and_setting(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "diagnose", str(folders[0]))
    assert code == 0, "problems are a result, not a failure"
    assert "1. problem  rate too low  (steps 1, 12)" in out and "--set 'train.learning_rate=1e-05'" in out
    assert max(map(len, out.splitlines())) <= 80 and out.isascii() and "\x1b" not in out


def test_diagnose_as_json_is_one_object(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "diagnose", str(folders[0]), "--json")
    found = json.loads(out)
    assert code == 0 and found["findings"][0]["cause"] == "rate_too_low" and found["missing"] == []
    assert found["findings"][0]["steps"] == [1, 12] and found["state"].startswith("done, step 12 of 12")


def test_a_healthy_run_has_nothing_alarming(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "diagnose", str(folders[1]), "--json")
    assert not [one for one in json.loads(out)["findings"] if one["severity"] != "hint"]


def test_the_console_of_a_run_says_its_advice_once(folders: tuple[Path, Path]) -> None:
    slow, quick = ((folder.parent / f"{folder.name}.txt").read_text(encoding="utf-8") for folder in folders)
    assert slow.count("advice  rate too low: 12 steps lowered the held-out loss by") == 1
    assert "advice" not in quick


@pytest.mark.parametrize("damage", ["torn", "no_summary", "no_config", "no_events", "broken_line", "not_json"])
def test_a_damaged_folder_is_diagnosed_as_far_as_it_can_be_read(
    damage: str, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folders[0], folder, ignore=shutil.ignore_patterns("checkpoints", "student"))
    events = (folder / "events.jsonl").read_bytes()
    match damage:
        case "torn":
            (folder / "events.jsonl").write_bytes(events[:-40])
        case "broken_line":
            (folder / "events.jsonl").write_bytes(events.replace(b'{"event": "run_start"', b'"event": "run_start"', 1))
        case "not_json":
            (folder / "summary.json").write_text("{", encoding="utf-8")
        case _:
            names = {"no_summary": "summary.json", "no_config": "config.json", "no_events": "events.jsonl"}
            (folder / names[damage]).unlink()
    code, out, _ = run(capsys, "diagnose", str(folder))
    assert code == 0 and "missing" in out
    if damage != "no_events":
        assert "rate too low" in out


@pytest.mark.parametrize("kind", ["no_folder", "empty_folder", "nothing_readable"])
def test_what_cannot_be_read_ends_with_exit_code_2(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if kind != "no_folder":
        folder.mkdir()
    if kind == "nothing_readable":
        (folder / "events.jsonl").write_bytes(b"\xff\xfe{")
    code, _, err = run(capsys, "diagnose", str(folder))
    assert code == 2 and str(folder) in err.replace("\n         ", "")
    assert run(capsys, "compare", str(folder), str(tmp_path))[0] == 2


def test_a_configuration_alone_is_searched_for_harmful_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[guard]\nlogit_clamp = 2.5\n", encoding="utf-8")
    code, out, _ = run(capsys, "diagnose", str(path))
    assert code == 0 and "clamped logits" in out and "--set 'guard.logit_clamp=0'" in out
    _, out, _ = run(capsys, "diagnose", str(path), "--json")
    assert json.loads(out)["findings"][0]["cause"] == "clamped_logits"
    path.write_text("[guard]\nlogit_clmp = 2.5\n", encoding="utf-8")
    assert run(capsys, "diagnose", str(path))[0] == 2


def test_compare_lists_what_differs_with_intervals(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "compare", *map(str, folders))
    assert code == 0 and "train.learning_rate  1e-06 -> 0.003" in out and "train.seed" not in out
    assert "second better" in out and "95 % interval" in out
    _, out, _ = run(capsys, "compare", *map(str, folders), "--json")
    found = json.loads(out)
    assert list(found["settings"]) == ["train.learning_rate"]
    assert len(found["results"]["student"]["perplexity"]["intervals"][0]) == 2
    assert run(capsys, "compare", str(folders[0]), str(folders[0]))[0] == 2


def test_diagnose_reads_a_run_without_torch(folders: tuple[Path, Path]) -> None:
    code = (
        "import sys\nfrom stillroom.cli import app\n"
        f"app(args=['diagnose', {str(folders[0])!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
