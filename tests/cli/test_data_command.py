"""`stillroom data`: what would be trained on, as a user and a program see it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import output, run
from trl_templates import template

from stillroom.config.schema import DataConfig
from stillroom.core.types import IGNORED
from stillroom.data import fixed_batches, open_data
from stillroom.telemetry.console import show_preview

END = "<|end|>"
TRAP = ["Is 4 prime? Answer Yes or No.", "No", "And is 5 prime? Yes or No.", "Yes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that holds a tokenizer with a chat template, and no weights."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template("qwen3")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    roles = ["user", "assistant"] * 2
    values: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, TRAP, strict=True)]},
        {"prompt": "Tom said ", "completion": '"Hi"'},
        {"text": "plain words"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{}]}]},
    ]
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def test_as_json_each_row_is_its_text_in_scored_and_unscored_pieces(
    folder: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--set", "data.max_bad_share=0.5", "--set", "data.chat=off")
    code, out, _err = run(capsys, "data", spec, "--model", str(folder), "--json", *given)
    assert code == 0
    result = json.loads(out)
    rows = {row["id"]: row["pieces"] for row in result["rows"]}
    assert list(rows) == ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"]
    chat, prompted, plain = rows.values()
    assert [text for text, is_scored in chat if is_scored] == ["No<|im_end|>", "Yes<|im_end|>", END]
    assert "".join(text for text, _ in chat) == (
        f"<|im_start|>user\n{TRAP[0]}<|im_end|>\n<|im_start|>assistant\nNo<|im_end|>\n<|im_start|>user\n{TRAP[2]}"
        f"<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYes<|im_end|>\n{END}"
    )
    assert prompted == [["Tom said ", False], [f'"Hi"{END}', True]]
    assert plain == [[f"plain words{END}", True]]
    assert result["shapes"] == {"messages": 1, "prompt, completion": 1, "text": 1}
    assert result["left_out"] == {"bad_records": 1}
    assert result["bad_records"] == [
        {"where": "d.jsonl:4", "why": "messages, turn 2: a call of tool_calls has no name"}
    ]
    assert result["scored_tokens"] == sum(row["scored_tokens"] for row in result["rows"])
    assert result["lengths"]["longest"] == max(row["tokens"] for row in result["rows"])


def test_the_pieces_are_the_targets_that_training_reads(folder: Path, tmp_path: Path) -> None:
    from stillroom.config.schema import StudentConfig
    from stillroom.data.preview import preview
    from stillroom.models.load import load_tokenizer

    tokenizer = load_tokenizer(StudentConfig(model=str(folder)), str(folder))
    path = tmp_path / "d.jsonl"
    answers = [f"{number} is {number * number}" for number in range(20)]
    values = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}]} for a in answers]
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    config = DataConfig(train=str(path), packing="rows")
    shown = preview(config, tokenizer, num_rows=0)["rows"]
    corpus = open_data(config, tokenizer)
    trained = {
        batch.sample_ids[0]: tokenizer.decode([int(token) for token in batch.targets[0] if token != IGNORED])
        for rows in (corpus.train, corpus.evaluation)
        for batch in fixed_batches(rows, 1)
    }
    assert trained == {row["id"]: "".join(text for text, is_scored in row["pieces"] if is_scored) for row in shown}


def test_rows_says_how_many_are_shown(folder: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (spec, "--model", str(folder), "--json", "--set", "data.max_bad_share=0.5", "--rows")
    counts = [len(json.loads(output(capsys, "data", *words, number))["rows"]) for number in ("1", "2", "0")]
    assert counts == [1, 2, 3]


def test_a_length_given_shows_what_fits_and_counts_the_rest(
    folder: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (spec, "--model", str(folder), "--json", "--set", "data.max_bad_share=0.5")
    whole = json.loads(output(capsys, "data", *words))
    cut = json.loads(output(capsys, "data", *words, "--max-length", "100"))
    assert cut["rows"][0]["tokens"] == 101 < whole["rows"][0]["tokens"]
    assert cut["left_out"]["truncated_tokens"] == whole["rows"][0]["tokens"] - 101
    assert any("longer than data.max_length = 100" in note for note in cut["notes"])


def test_in_a_pipe_what_is_scored_stands_in_brackets(
    folder: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--set", "data.max_bad_share=0.5", "--set", "data.chat=off")
    code, out, _err = run(capsys, "data", spec, "--model", str(folder), *given)
    assert code == 0 and "\x1b" not in out
    assert f"{TRAP[0]}<|im_end|>\n<|im_start|>assistant\n[[No<|im_end|>]]\n" in out
    assert f'Tom said [["Hi"{END}]]' in out
    for said in (
        "messages (1)",
        "median",
        "% of all",
        "left out  1 bad records",
        "d.jsonl:4: messages, turn 2: a call",
    ):
        assert said in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_what_is_scored_is_coloured_and_no_text_can_move_the_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    pieces = [["ask [bold] \x1b[2J", False], ["No", True], ["x" * 9000, False]]
    show_preview({"rows": [{"id": "d:1", "tokens": 2, "scored_tokens": 1, "pieces": pieces}]}, screen)
    shown = screen.getvalue()
    assert "\x1b[1;32mNo\x1b[0m" in shown and "ask [bold] " in shown
    assert "\x1b[2J" not in shown and "[[" not in shown
    assert "more characters" in shown and len(shown) < 6000


@pytest.mark.parametrize(
    ("harm", "why"), [("{{ 1 / 0 }}", "division by zero"), ("{{ 'a' * 10 ** 10 }}", "it builds 1e+10 characters")]
)
def test_a_harmful_template_ends_with_exit_code_2_and_the_reason(
    harm: str, why: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + harm
    tokenizer.save_pretrained(tmp_path)
    code, out, _err = run(capsys, "data", spec, "--model", str(tmp_path), "--json")
    assert code == 2 and why in json.loads(out)["error"]


def test_a_model_without_a_tokenizer_and_a_missing_file_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _err = run(capsys, "data", "builtin:qa", "--model", str(tmp_path), "--json")
    assert code == 2 and "has no tokenizer" in json.loads(out)["error"]
    code, out, _err = run(capsys, "data", str(tmp_path / "none.jsonl"), "--model", str(folder), "--json")
    assert code == 2


def written(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_copies_inside_and_between_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = written(tmp_path / "a.jsonl", "one", "two", "one", "three", "one")
    other = written(tmp_path / "b.jsonl", "two", "four", "three")
    words = (spec, "--model", str(folder), "--eval-data", other)
    assert json.loads(output(capsys, "data", *words, "--json"))["duplicates"] == {"inside": 2, "between": 2}
    out = output(capsys, "data", *words)
    assert "copies    2 records repeat an earlier one" in out and "2 evaluation records are also trained on" in out
    alone = json.loads(output(capsys, "data", spec, "--model", str(folder), "--json"))
    assert alone["duplicates"] == {"inside": 2, "between": 0}


def test_chats_are_compared_as_the_file_has_them(folder: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (spec, "--model", str(folder), "--json", "--set", "data.max_bad_share=0.5", "--eval-data", spec)
    assert json.loads(output(capsys, "data", *words))["duplicates"] == {"inside": 0, "between": 3}


def test_ten_documents_and_the_quantiles_of_their_lengths_are_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = written(tmp_path / "a.jsonl", *("x " * n for n in range(1, 31)))
    out = output(capsys, "data", spec, "--model", str(folder))
    assert out.count("\n-- a.jsonl:") == 10
    assert all(name in out for name in ("shortest", "first decile", "median", "ninth decile", "longest"))


def test_a_run_s_file_shows_each_of_its_sources(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path / "a.jsonl", *(f"text {n}" for n in range(20)))
    two = tmp_path / "b.csv"
    two.write_text("q,a\n" + "".join(f"{n}?,yes {n}\n" for n in range(30)), encoding="utf-8")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""[student]
model = {str(folder)!r}
[data]
train = [
  {{path = {one!r}, weight = 2}},
  {{path = {str(two)!r}, objectives = "labels", template = "Q: {{q}} A: {{a}}", scored = "a"}},
]
""",
        encoding="utf-8",
    )
    result = json.loads(output(capsys, "data", str(run_file), "--json"))
    first, second = result["sources"]
    assert (first["path"], first["weight"], first["objectives"], first["documents"]) == (one, 2.0, "all", 20)
    assert (second["objectives"], second["documents"]) == ("labels", 30)
    assert second["shapes"] == {"template: q, a": 30}
    assert result["documents"] == 50 and result["tokens"] == first["tokens"] + second["tokens"]
    assert [row["pieces"] for row in result["rows"] if row["id"] == "b.csv:2"] == [
        [["Q: 0? A: ", False], [f"yes 0{END}", True]]
    ]
    out = output(capsys, "data", str(run_file), "--rows", "4")
    assert f"source    {one}, weight 2, learned from text and teacher" in out
    assert f"source    {two}, weight 1, learned from the text alone" in out
    assert out.count(f"  of {one}") == 2 and out.count(f"  of {two}") == 2


def test_without_a_model_or_a_run_s_file_it_is_asked_for(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _out, err = run(capsys, "data", spec)
    assert code == 2 and "--model" in err


def test_what_the_teacher_alone_reads_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A context of the configuration or of the record; records without one are shown as ever."""
    own = {"prompt": "Tom said ", "completion": '"Hi"', "teacher_prompt": "Tom, who is polite, said "}
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (own, {**own, "teacher_prompt": None})))
    words = ("data", str(path), "--model", str(folder), "--set", "data.chat=off")
    first, second = json.loads(run(capsys, *words, "--json")[1])["rows"]
    assert first["teacher_context"] == own["teacher_prompt"] and "teacher_context" not in second
    shown = run(capsys, *words)[1]
    assert own["teacher_prompt"] in shown and shown.count("-- before the first scored text") == 1
    both = json.loads(run(capsys, *words, "--json", "--set", 'data.teacher_prefix="Be kind. "')[1])["rows"]
    assert [row["teacher_context"] for row in both] == ["Be kind. Tom, who is polite, said ", "Be kind. Tom said "]
