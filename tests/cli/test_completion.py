"""A shell can complete commands, options and presets."""

from __future__ import annotations

import commands
import pytest

from stillroom.config import preset_names


def offered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What bash is offered after these words, the last of which is not finished."""
    monkeypatch.setattr("sys.argv", ["stillroom"])
    monkeypatch.setenv("_STILLROOM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["stillroom", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    return commands.output(capsys).split()


def test_commands_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(offered(capsys, monkeypatch, "re")) == {"resume", "replay", "report"}


def test_options_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"--max-steps", "--max-minutes"} <= set(offered(capsys, monkeypatch, "distill", "--max"))


def test_presets_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in preset_names() if name.startswith("s")]
    assert len(names) > 1
    assert sorted(offered(capsys, monkeypatch, "distill", "--preset", "s")) == sorted(names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script_and_exit_code_0(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["stillroom"])
    monkeypatch.setenv("_STILLROOM_COMPLETE", f"source_{shell}")
    script = commands.output(capsys)
    assert f"complete_{shell}" in script and "stillroom" in script


def test_the_help_says_how_completion_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--install-completion" in commands.output(capsys, "--help")
