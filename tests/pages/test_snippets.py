"""Every fenced block of README and docs is run, read as a configuration, or marked with a reason."""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
import snippets
import tiny
import torch
import typer
import yaml

import stillroom
from stillroom.cli import app
from stillroom.config import load
from stillroom.config.load import build

ROOT = snippets.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALL = [snippet for page in snippets.PAGES for snippet in snippets.snippets(page)]

# Pages whose blocks of these languages another test runs from end to end.
HELD = {
    ("docs/guides/python.md", "python"): "tests/api/test_api_page.py",
    ("docs/guides/trainer.md", "python"): "tests/api/test_api_page.py",
    ("docs/guides/extending.md", "python"): "tests/config/test_extensions.py",
    ("docs/guides/extending.md", "toml"): "tests/config/test_extensions.py",
}
HELD_COMMANDS = {
    "--import answers.jsonl": "tests/teachers/cache/test_importing.py",
    "--install-completion": "tests/cli/test_completion.py",
    "http://": "tests/teachers/served/test_served_teacher.py",  # on another machine, like those below
    "s3://": "tests/core/test_remote.py",
    "/shared/": "tests/core/test_remote.py",
}

# What a reader replaces by names of their own, and what the folder of the test has in its place.
NAMES = {
    "NAME": "models/teacher",
    "TEACHER": "models/teacher",
    "STUDENT": "models/student",
    "FILE": "text.jsonl",
    "org/teacher": "models/teacher",
    "org/name": "models/student",
    "org/model": "models/student",
    "path/to/moe": "models/moe",
    "path/to/student": "models/student",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "models/teacher",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "models/student",
    # Sizes of a teacher with two layers of width 48.
    "student.shrink.layers=8": "student.shrink.layers=1",
    "student.shrink.layers=[0,1,4,7]": "student.shrink.layers=[0,1]",
    "student.shrink.width=1024": "student.shrink.width=32",
    "student.shrink.mlp_width=2816": "student.shrink.mlp_width=64",
    "student.shrink.heads=8": "student.shrink.heads=1",
}
HUB = [name for name in NAMES if name.startswith("HuggingFaceTB/")]
BRIEF = {"train.max_steps": 5, "data.max_length": 32}
SHORT = {
    "data.max_length": 32,
    "train.batch_size": 4,
    "eval.max_batches": 2,
    "eval.samples": 1,
    "eval.sample_tokens": 4,
    "teacher.router.probe_steps": 0,
}


def page_of(snippet: snippets.Snippet) -> str:
    return snippet.page.relative_to(ROOT).as_posix()


def of(*languages: str) -> list[snippets.Snippet]:
    """The blocks of these languages that this file has to run."""
    return [
        one for one in ALL if one.language in languages and not one.mark and (page_of(one), one.language) not in HELD
    ]


# -- which blocks there are -------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    known = {*snippets.SHELL, "toml", "json", "yaml", "python"}
    assert [one.name for one in ALL if one.language not in known] == []


@pytest.mark.parametrize("snippet", [one for one in ALL if one.mark], ids=lambda one: one.name)
def test_a_mark_has_a_reason(snippet: snippets.Snippet) -> None:
    kind, _, reason = snippet.mark.partition(" ")
    assert kind in snippets.MARKS
    if kind == "held-by":
        assert (ROOT / reason).is_file(), reason
    else:
        assert reason.startswith("because ") and len(reason) > 20


@pytest.mark.parametrize(("page", "test"), sorted({(page, test) for (page, _), test in HELD.items()}))
def test_a_page_that_is_left_to_another_test_is_read_there(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")
    assert all((ROOT / held).is_file() for held in HELD_COMMANDS.values())


# -- configurations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("snippet", of("toml", "json"), ids=lambda one: one.name)
def test_a_configuration_is_valid(snippet: snippets.Snippet, tmp_path: Path) -> None:
    path = tmp_path / f"run.{snippet.language}"
    path.write_text(snippet.text, encoding="utf-8")
    assert load(path).config.to_dict()


@pytest.mark.parametrize("snippet", of("yaml"), ids=lambda one: one.name)
def test_yaml_of_other_programs_can_be_read(snippet: snippets.Snippet) -> None:
    documents = list(yaml.safe_load_all(snippet.text))
    assert documents and all(isinstance(one, dict) for one in documents)


# -- commands ---------------------------------------------------------------------------------------------


def group() -> Any:
    return typer.main.get_command(app)


def unknown_words(command: str) -> list[str]:
    """The command and options of a command line that stillroom does not have."""
    words = [word for word in re.split(r"[\s,=|()]+", command) if word]
    node, strange = group(), []
    for place, word in enumerate(words[1:]):
        inner = getattr(node, "commands", {})
        if inner and re.fullmatch(r"[a-z][a-z-]*", word) and (word in inner or place == 0):
            if word not in inner:
                return [word]
            node = inner[word]
    if node.name == "cache":  # without a subcommand it writes
        node = node.commands["write"]
    options = {name for one in node.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    strange += [word for word in words if word.startswith("--") and word.replace("_", "-") not in options]
    return strange


@pytest.mark.parametrize("page", snippets.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_running_text_have_options_that_exist(page: Path) -> None:
    assert {command: bad for command in snippets.inline_commands(page) if (bad := unknown_words(command))} == {}


def test_an_option_that_does_not_exist_is_found() -> None:
    assert unknown_words("stillroom distill --max-stepps 3") == ["--max-stepps"]
    assert unknown_words("stillroom distil run.toml") == ["distil"]
    assert unknown_words("stillroom cache info DIR") == []


@pytest.fixture(scope="module")
def prepared(world: Path, moe_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it who followed the pages: models, texts, a configuration, two finished runs."""
    from stillroom.cli import main

    folder = tmp_path_factory.mktemp("reader")
    for name in ("teacher", "student"):
        shutil.copytree(world / name, folder / "models" / name)
    shutil.copytree(moe_world / "teacher", folder / "models" / "moe")
    for name in ("text.jsonl", "texts.jsonl"):
        shutil.copy(world / "train.jsonl", folder / name)
    for number, name in enumerate(("held_out.jsonl", "other.jsonl")):
        tiny.save_text(folder / name, 40, seed=8 + number)
    (folder / "data").mkdir()
    shutil.copy(world / "train.jsonl", folder / "data" / "a.jsonl")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    turns = [{"role": "user", "content": "the still room"}, {"role": "assistant", "content": "keeps spirits"}]
    for name in ("chats.jsonl", "held.jsonl"):
        lines = [json.dumps({"messages": [*turns, *turns[:number]]}) for number in (0, 2)]
        (folder / name).write_text("\n".join(lines * 2) + "\n", encoding="utf-8")
    question = {"question": "what keeps the room?", "answer": "spirits"}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    (folder / "run.toml").write_text(configuration("models/teacher"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, seed in (("runs/a", "0"), ("runs/b", "1")):
            main(["distill", "run.toml", "--out", name, "--seed", seed, "--device", "cpu", "--no-progress"])
        main(["export", "models/teacher", "--out", "gguf", "--format", "gguf", "--dtype", "float32"])
    shutil.move(next((folder / "gguf").glob("*.gguf")), folder / "models" / "teacher.gguf")
    return folder


def configuration(teacher: str) -> str:
    """A run of a second."""
    return f"""
[teacher]
model = "{teacher}"
[student]
model = "models/student"
[data]
train = "text.jsonl"
eval = "held_out.jsonl"
max_length = 32
[train]
max_steps = 12
batch_size = 4
learning_rate = 3e-3
[eval]
max_batches = 2
samples = 1
sample_tokens = 4
"""


def adapted(words: list[str]) -> list[str]:
    """A command with the reader's names in place of its own, and small sizes where a run would be long."""
    words = [NAMES.get(word) or "=".join(NAMES.get(part, part) for part in word.split("=")) for word in words]
    if words[1] not in ("distill", "cache", "doctor") or words[2:3] in (["info"], ["verify"]):
        return words
    has_file = any(word.endswith((".toml", ".json")) and not word.startswith("-") for word in words[2:])
    settings: dict[str, object] = dict(SHORT)
    named = " ".join(words)
    if not has_file:
        for key, option, value in (
            ("teacher.model", "--teacher", "models/teacher"),
            ("student.model", "--student", "models/student"),
            ("data.train", "--data", "text.jsonl"),
        ):
            if option not in words and f"{key}=" not in named and "init=shrink" not in named:
                settings[key] = value
    if words[1] == "distill" and "--inject" not in words:  # a fault has its step
        settings["train.max_steps"] = 12
    out = [*words, "--device", "cpu"]
    for key, value in settings.items():
        out += ["--set", f"{key}={value}"]
    return [*out, "--no-progress"] if words[1] == "distill" else out


def run_line(line: str, run: Callable[..., tuple[int, str, str]], patch: pytest.MonkeyPatch) -> None:
    """Run one line of a block: commands joined by && or a pipe."""
    if line.startswith(("mkdir ", "python -c ")):
        subprocess.run(line.replace("python ", f"{sys.executable} ", 1), shell=True, check=True)
        return
    for command in re.split(r"\s+&&\s+", line):
        left, pipe, right = command.rpartition(" | ")
        given = subprocess.run(left, shell=True, capture_output=True, text=True, check=True).stdout if pipe else ""
        words = shlex.split(right)
        if words[0] == "stillroom":
            patch.setattr("sys.stdin", io.StringIO(given or "the still room\n/quit\n"))
            code, out, err = run(*adapted(words)[1:])
            assert code == 0, f"{command}\n{out[-2000:]}\n{err[-2000:]}"
        else:
            check_other(words)


def check_other(words: list[str]) -> None:
    """A command of another program is not run: what it names must exist."""
    program, rest = words[0], words[1:]
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in rest if "=" not in word), words
    elif program == "pip":
        for extra in re.findall(r"stillroom\[([\w,]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"]), extra
    elif program == "python":
        assert rest[0] == "-m" or (ROOT / rest[0]).is_file(), words
    elif program in ("torchrun", "accelerate"):  # several processes: tests/parallel runs them
        assert unknown_words(" ".join(words[words.index("stillroom") :])) == [], words
    elif program == "docker":
        dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
        for target in re.findall(r"--target (\w+)", " ".join(rest)):
            assert f" AS {target}\n" in dockerfile, target
    else:
        assert program in ("git", "cd"), words


@pytest.mark.parametrize("snippet", of("bash", "sh"), ids=lambda one: one.name)
def test_every_line_for_a_shell_is_a_command_that_is_looked_at(snippet: snippets.Snippet) -> None:
    lines = [line for line in re.sub(r"\\\n\s*", "", snippet.text).splitlines() if line and not line.startswith("#")]
    installing = [line for line in lines if line.startswith((".venv/bin/pip install", "export PATH="))]
    assert len(snippet.commands) + len(installing) == len(lines)


def pages_with_commands() -> list[Path]:
    blocks = [one for one in of(*snippets.SHELL) if one.commands]
    return sorted({one.page for one in blocks})


@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run_in_their_order(
    page: Path,
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Path(shutil.copytree(prepared, tmp_path / "reader"))
    monkeypatch.chdir(reader)
    blocks = [one for one in of(*snippets.SHELL, "toml") if one.page == page]
    if any(re.match(r"stillroom .*--out runs/a\b", line) for one in blocks for line in one.commands):
        shutil.rmtree("runs")
    for block in blocks:
        if name := re.match(r"# (\w+\.toml)\n", block.text):  # a file that the page has its reader write
            text = re.sub("|".join(map(re.escape, NAMES)), lambda word: NAMES[word[0]], block.text)
            Path(name[1]).write_text(text, encoding="utf-8")
        is_held = False  # what follows in the block may need what was not made
        for line in block.commands:
            is_held = is_held or any(part in line for part in HELD_COMMANDS)
            if is_held and line.startswith("stillroom"):
                assert unknown_words(line) == [], line
            else:
                run_line(line, lambda *words: commands.run(capsys, *words), monkeypatch)


# -- python -----------------------------------------------------------------------------------------------


def surroundings(page: str, reader: Path) -> dict[str, object]:
    """Names that a block of a page uses and does not make."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    if page == "docs/concepts/objectives.md":
        return {
            "student_hidden": matrix(6, 8), "student_weight": matrix(11, 8), "teacher_hidden": matrix(6, 10),
            "teacher_weight": matrix(11, 10), "labels": torch.tensor([0, 3, -100, 10, 2, 5]),
        }  # fmt: skip
    if page == "docs/concepts/router.md":
        settings = tiny.settings(reader, train__max_steps=2, train__eval_steps=2, teacher__router__mode="truth")
        settings |= {"teacher.model": str(reader / "models" / "moe"), "student.model": str(reader / "models/student")}
        from stillroom.training.distill import distill

        distill(build(nested({**settings, "data.train": "text.jsonl"}), "page"), reader / "runs" / "mine", device="cpu")
        return {"model": AutoModelForCausalLM.from_pretrained(reader / "models" / "moe")}
    return {}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return table


@pytest.mark.parametrize("snippet", of("python"), ids=lambda one: one.name)
def test_a_block_of_python_runs(
    snippet: snippets.Snippet, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Path(shutil.copytree(prepared, tmp_path / "reader"))
    monkeypatch.chdir(reader)
    names = {"__name__": "page", **surroundings(page_of(snippet), reader)}
    if page_of(snippet) == "README.md":  # its run is as long as its data
        monkeypatch.setattr(stillroom, "distill", functools.partial(stillroom.distill, settings=BRIEF))
    text = re.sub("|".join(map(re.escape, HUB)), lambda word: NAMES[word[0]], snippet.text)
    exec(compile("\n" * (snippet.line - 1) + text, str(snippet.page), "exec"), names)
