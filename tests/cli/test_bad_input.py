"""What a user gets wrong: each mistake has a message that says what, where and what to try, and an exit code."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import tiny
from commands import Command, arguments
from process_jobs import command

from stillroom.core.errors import CommandUnusable, ConfigError, UnknownCommand


def test_a_typo_in_a_key(stillroom: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlerning_rate = 1e-3\n")
    code, _out, err = stillroom("distill", "run.toml")
    assert code == 2 and "train.lerning_rate" in err and "did you mean train.learning_rate?" in err
    assert "run.toml" in err
    assert not (tmp_path / "runs").exists(), "nothing is created for a run that cannot begin"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["distil"], "stillroom distill?"),
        (["trian", "run.toml"], "stillroom distill?"),
        (["evla", "--json"], "stillroom eval?"),
        (["xyzzy"], ""),
    ],
)
def test_a_mistyped_command_is_an_unknown_command_with_the_nearest_one(
    stillroom: Command, words: list[str], near: str
) -> None:
    code, _out, err = stillroom(*words)
    assert code == 2 and UnknownCommand.title in err and words[0] in err and near in err
    assert ConfigError.title not in err and ("did you mean" in err) == bool(near)


def test_a_mistyped_option_is_a_fault_of_the_command_line(stillroom: Command) -> None:
    code, _out, err = stillroom("distill", "--max-stepz", "3")
    assert code == 2 and CommandUnusable.title in err and "--max-stepz" in err


def test_a_missing_configuration(stillroom: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    code, _out, err = stillroom("distill", "rum.toml")
    assert code == 2 and "rum.toml" in err and "run.toml" in err


def test_a_configuration_that_is_not_toml(stillroom: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("train = [")
    code, _out, err = stillroom("distill", "run.toml")
    assert code == 2 and "not valid TOML" in err


def test_a_missing_data_file(stillroom: Command, world: Path, tmp_path: Path) -> None:
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", data__train=str(world / "trian.jsonl")))
    assert code == 2 and "trian.jsonl" in err and "train.jsonl" in err


@pytest.mark.parametrize("words", [("resume",), ("eval",), ("report",), ("watch", "--no-wait"), ("diagnose",)])
def test_a_run_folder_that_does_not_exist_is_said_to_be_missing_and_not_to_lack_a_file(
    stillroom: Command, words: tuple[str, ...]
) -> None:
    code, _out, err = stillroom(*words, "runs/nothing")
    assert code == 2 and "runs/nothing" in err and "no such folder" in err and ".json" not in err


def test_an_empty_data_file(stillroom: Command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", data__train=str(tmp_path / "empty.jsonl")))
    assert code == 2 and "empty.jsonl" in err and "empty" in err.replace("empty.jsonl", "")


def test_one_broken_line_is_counted_and_named_but_not_fatal(stillroom: Command, world: Path, tmp_path: Path) -> None:
    lines = (world / "train.jsonl").read_text().splitlines()
    lines.insert(16, '{"text": "broken')
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    code, out, _err = stillroom(*arguments(world, tmp_path / "run", data__train=str(tmp_path / "data.jsonl")))
    assert code == 0 and "data.jsonl:17" in out


def test_many_broken_lines_stop_the_run(stillroom: Command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a fine line"}\n{"text": "bro\nnonsense\n')
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", data__train=str(tmp_path / "data.jsonl")))
    assert code == 2 and "data.jsonl:2" in err


def test_an_unknown_preset(stillroom: Command) -> None:
    code, _out, err = stillroom("distill", "--preset", "bas")
    assert code == 2 and "did you mean 'base'?" in err


def test_a_missing_model(stillroom: Command, world: Path, tmp_path: Path) -> None:
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", teacher__model="./nowhere"))
    assert code == 20 and "nowhere" in err and "try" in err


def test_a_hub_model_without_a_network(stillroom: Command, world: Path, tmp_path: Path) -> None:
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", teacher__model="some-org/some-model"))
    assert code == 20 and "some-org/some-model" in err and "network" in err


def test_vocabularies_that_differ(stillroom: Command, world: Path, tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "other", vocab_size=400)
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", student__model=str(tmp_path / "other")))
    assert code == 2 and "different vocabularies" in err and "320" in err and "378" in err


def test_a_folder_of_another_run_is_refused_with_what_differs(stillroom: Command, world: Path, tmp_path: Path) -> None:
    assert stillroom(*arguments(world, tmp_path / "run"))[0] == 0
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", train__learning_rate=1e-5))
    assert code == 2 and "train.learning_rate" in err and "0.003" in err and "1e-05" in err
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before, "nothing of the other run is touched"


def test_a_run_and_a_dry_run_in_one_folder_are_told_apart(stillroom: Command, world: Path, tmp_path: Path) -> None:
    """The refusal listed the settings that --dry-run had changed, and the user had changed none."""
    assert stillroom(*arguments(world, tmp_path / "try"), "--dry-run")[0] == 0
    code, _out, err = stillroom(*arguments(world, tmp_path / "try"))
    assert code == 2 and "dry run" in err and "eval.max_batches" not in err
    assert stillroom(*arguments(world, tmp_path / "run"))[0] == 0
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"), "--dry-run")
    assert code == 2 and "dry run" in err and "eval.max_batches" not in err


def test_more_steps_of_a_finished_run_name_the_command_that_gives_them(
    stillroom: Command, world: Path, tmp_path: Path
) -> None:
    steps = {"train__max_steps": 2}
    assert stillroom(*arguments(world, tmp_path / "run", **steps))[0] == 0
    _code, out, err = stillroom("resume", str(tmp_path / "run"))
    assert "--max-steps N" in " ".join(f"{out} {err}".split())
    code, _out, err = stillroom(*arguments(world, tmp_path / "run", train__max_steps=3))
    assert code == 2 and "--max-steps 3" in " ".join(err.split())


def test_a_folder_of_something_else_is_refused(stillroom: Command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("dear reader")
    code, _out, err = stillroom(*arguments(world, tmp_path / "thesis"))
    assert code == 2 and "not empty" in err
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


def test_a_setting_that_would_do_nothing_is_refused(stillroom: Command, world: Path, tmp_path: Path) -> None:
    code, _out, err = stillroom(*arguments(world, tmp_path / "run"), "--set", "teacher.cache=somewhere")
    assert code == 2 and "teacher.cache" in err


def test_resuming_what_is_no_run(stillroom: Command, tmp_path: Path) -> None:
    code, _out, err = stillroom("resume", str(tmp_path))
    assert code == 2 and "not a Stillroom run folder" in " ".join(err.split())


def test_options_work_with_underscores(stillroom: Command, world: Path, tmp_path: Path) -> None:
    code, out, _err = stillroom(*arguments(world, tmp_path / "run"), "--max_minutes", "9", "--no_progress")
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert code == 0 and config["train"]["max_minutes"] == 9 and "step 8" in out


def test_a_dry_run_walks_the_whole_path(stillroom: Command, world: Path, tmp_path: Path) -> None:
    over = {"train__max_steps": 1000, "eval__max_batches": 0}
    code, out, _err = stillroom(*arguments(world, tmp_path / "dry", **over), "--dry-run")
    assert code == 0 and "dry run: 5 steps, 1 held-out batch" in " ".join(out.split())
    assert (tmp_path / "dry" / "report.html").exists()
    assert (tmp_path / "dry" / "checkpoints" / "step-000005" / "manifest.json").exists()
    assert json.loads((tmp_path / "dry" / "summary.json").read_text())["steps"] == 5
    config = json.loads((tmp_path / "dry" / "config.json").read_text())["config"]
    assert config["eval"]["max_batches"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_ends_with_75_and_the_run_goes_on(world: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = arguments(world, tmp_path / "run", train__max_steps=4000, train__eval_steps=4000)
    process = command(words)
    events = tmp_path / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (events.exists() and '"event": "step"' in events.read_text()):
        time.sleep(0.05)
    process.send(number)
    ended = process.wait()
    assert ended.code == 75 and "stillroom resume" in ended.err, ended
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    steps = [json.loads(line) for line in events.read_text().splitlines() if '"event": "step"' in line]
    assert f"step-{steps[-1]['step']:06d}" in saved, "the step that was running is in the checkpoint"
    assert steps[-1]["step"] < 4000


def test_the_error_that_stops_a_run_is_printed_once(stillroom: Command, world: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"foo": 1}\n')
    code, out, err = stillroom(*arguments(world, tmp_path / "run", data__train=str(tmp_path / "bad.jsonl")))
    printed = " ".join((out + err).split())
    assert code == 2 and printed.count("has no known fields") == 1
