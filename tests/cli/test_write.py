"""Laws of the commands that let a model write: several prompts, streams, and conversations in a pipe."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import begun
import families
import pytest
from commands import output, run
from trl_templates import template


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    found = {}
    for name, words in {"base": None, "chatty": template("llama3")}.items():
        families.build("llama").save_pretrained(path / name)
        begun.byte_tokenizer(chat_template=words).save_pretrained(path / name)
        found[name] = str(path / name)
    return found


class Typed(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def talk(monkeypatch: Any, capsys: Any, text: str, *words: str, typed: bool = False) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", (Typed if typed else io.StringIO)(text))
    return run(capsys, "chat", *words, "--max-new-tokens", "6")


# -- generate --------------------------------------------------------------------------------------------


def test_several_prompts_give_what_each_gives_alone(models: dict[str, str], capsys: Any) -> None:
    words = [
        "generate",
        models["base"],
        "--max-new-tokens",
        "8",
        "--temperature",
        "1.2",
        "--top-p",
        "0.9",
        "--seed",
        "4",
    ]
    prompts = ["the still room", "how", "what is left behind when"]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = json.loads(output(capsys, *words, *asked, "--json"))
    assert [row["prompt"] for row in together["continuations"]] == prompts and together["is_chat"] is False
    for prompt, row in zip(prompts, together["continuations"], strict=True):
        alone = json.loads(output(capsys, *words, "--prompt", prompt, "--json"))["continuations"][0]
        assert alone == row and row["ended"] in ("length", "end of text")


@pytest.mark.parametrize("name", ["base", "chatty"])
def test_a_stream_prints_what_is_printed_at_once(models: dict[str, str], capsys: Any, name: str) -> None:
    words = ["generate", models[name], "--prompt", "the still", "--max-new-tokens", "12"]
    assert output(capsys, *words, "--stream").rstrip() == output(capsys, *words).rstrip()


def test_a_second_model_continues_the_same_prompts(models: dict[str, str], capsys: Any) -> None:
    words = ["--prompt", "the still", "--prompt", "room", "--max-new-tokens", "6"]
    alone = {name: json.loads(output(capsys, "generate", models[name], *words, "--json")) for name in models}
    both = ["generate", models["base"], "--against", models["chatty"], *words]
    found = json.loads(output(capsys, *both, "--json"))
    assert found.pop("against") == alone["chatty"] and found == alone["base"]
    lines = output(capsys, *both).splitlines()
    assert sum(line.startswith("student: ") for line in lines) == 2
    assert sum(line.startswith("teacher: ") for line in lines) == 2
    assert output(capsys, *both, "--stream").splitlines() == lines


def test_a_stream_and_an_object_exclude_each_other(models: dict[str, str], capsys: Any) -> None:
    code, _out, err = run(capsys, "generate", models["base"], "--prompt", "a", "--stream", "--json")
    assert code == 2 and "--stream" in err


@pytest.mark.parametrize("wrong", [["--temperature", "-1"], ["--top-p", "0"], ["--top-p", "2"]])
def test_impossible_sampling_is_refused(
    models: dict[str, str], capsys: Any, monkeypatch: Any, wrong: list[str]
) -> None:
    code, _out, err = run(capsys, "generate", models["base"], "--prompt", "a", *wrong)
    assert code == 2 and wrong[0] in err
    code, _out, err = talk(monkeypatch, capsys, "a\n", models["base"], *wrong)
    assert code == 2 and wrong[0] in err


# -- chat ------------------------------------------------------------------------------------------------


def test_in_a_pipe_each_line_has_an_answer(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    code, out, _err = talk(monkeypatch, capsys, "the still\n\nroom\n", models["chatty"], "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [answer["question"] for answer in answers] == ["the still", "", "room"]
    assert answers[1]["student"] == {"answer": "", "ended": ""} and answers[0]["student"]["answer"]
    asked = output(capsys, "generate", models["chatty"], "--prompt", "the still", "--max-new-tokens", "6")
    assert asked.strip() == answers[0]["student"]["answer"].strip()
    code, out, err = talk(monkeypatch, capsys, "the still\n", models["chatty"])
    assert code == 0 and out.strip() == answers[0]["student"]["answer"] and "> " not in out + err


def test_reset_forgets_and_quit_ends(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    text = "the still\nthe still\n/reset\nthe still\n/quit\nnever asked\n"
    _code, out, _err = talk(monkeypatch, capsys, text, models["chatty"], "--json")
    answers = [json.loads(line)["student"]["answer"] for line in out.splitlines()]
    assert len(answers) == 3 and answers[0] == answers[2] != answers[1]


def test_the_teacher_answers_beside_the_student(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    words = [models["chatty"], "--against", models["base"]]
    code, out, err = talk(monkeypatch, capsys, "the still\n", *words)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("student: ") and any(line.startswith("teacher: ") for line in lines)
    assert "the teacher has no chat template" in err
    _code, out, _err = talk(monkeypatch, capsys, "the still\n", *words, "--json")
    assert set(json.loads(out)) == {"question", "student", "teacher"}


def test_a_person_gets_a_prompt_and_ends_politely(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    code, out, err = talk(monkeypatch, capsys, "\nthe\n", models["chatty"], typed=True)  # then Ctrl-D
    assert code == 0 and err.count("> ") == 3 and out.strip()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("stillroom.models.generate.stream", interrupted)
    code, _out, err = talk(monkeypatch, capsys, "the\nroom\n", models["chatty"], typed=True)
    assert code == 0 and "resume" not in err
    assert err.count("> ") == 3, "Ctrl-C ends the answer and not the conversation"


def test_an_answer_without_a_word_is_named(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("stillroom.models.generate.Conversation.ask", lambda *_words, **_options: iter([" ", "\n"]))
    _code, _out, err = talk(monkeypatch, capsys, "the still\n\n", models["chatty"])
    assert err.count("wrote no word") == 1, "an empty line is no question"
    _code, _out, err = talk(monkeypatch, capsys, "the\n", models["chatty"], "--against", models["base"])
    assert "student: the model wrote no word" in err and "teacher: the model wrote no word" in err


def test_a_person_is_greeted_and_helped(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    _code, out, err = talk(monkeypatch, capsys, "/help\n/clear\n", models["chatty"], typed=True)
    assert "chatty" in err and err.count("/quit") == 2 and "cleared" in err and not out
    _code, _out, err = talk(monkeypatch, capsys, "the\n", models["chatty"])
    assert "/quit" not in err, "a pipe is not greeted"


def test_ctrl_c_at_the_prompt_drops_the_line(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    lines = iter([KeyboardInterrupt, "/quit\n"])

    def readline() -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=readline))
    code, _out, err = run(capsys, "chat", models["chatty"])
    assert code == 0 and err.count("> ") == 2


def test_a_full_history_says_how_to_go_on(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    code, _out, err = talk(monkeypatch, capsys, "the still room " * 40 + "\n", models["chatty"])
    assert code == 0 and "128 positions are full; /clear" in err


def test_text_that_is_not_utf8_is_refused(models: dict[str, str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    code, _out, err = run(capsys, "chat", models["chatty"])
    assert code == 2 and "not UTF-8" in err


def test_a_model_that_is_not_there_is_refused(models: dict[str, str], capsys: Any, tmp_path: Path) -> None:
    gone = str(tmp_path / "none")
    for words in (["chat", gone], ["chat", models["base"], "--against", gone], ["generate", gone, "--prompt", "a"]):
        code, _out, err = run(capsys, *words)
        assert code == 20 and "no model folder" in err


def test_what_cannot_be_asked_is_refused(models: dict[str, str], capsys: Any) -> None:
    code, _out, err = run(capsys, "generate", models["base"])
    assert code == 2 and "--prompt" in err
    code, _out, err = run(capsys, "generate", models["base"], "--prompt", "a", "--max-new-tokens", "0")
    assert code == 2 and "--max-new-tokens" in err
    code, _out, err = run(capsys, "chat", models["base"], "--bos", "perhaps")
    assert code == 2 and "--bos perhaps" in err
