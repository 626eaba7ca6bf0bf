"""Shapes of one's own: a map of columns, and a template with what is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tiny

from stillroom.config.schema import DataConfig
from stillroom.core.errors import DataError
from stillroom.data import open_data, open_eval
from stillroom.data.preview import preview

ROWS = [{"q": f"what is {n}?", "a": f"it is {n}.", "text": "not this", "id": n} for n in range(40)]


def file_of(path: Path, rows: list[Any] = ROWS) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        head = ",".join(rows[0])
        path.write_text("\n".join([head, *(",".join(str(value) for value in row.values()) for row in rows)]))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pieces(spec: str, **over: Any) -> list[list[tuple[str, bool]]]:
    config = DataConfig(train=spec, **over)
    return [row["pieces"] for row in preview(config, tiny.tokenizer(), num_rows=0)["rows"]]


def refusal(config: DataConfig) -> DataError:
    with pytest.raises(DataError) as caught:
        open_data(config, tiny.tokenizer())
    assert caught.value.exit_code == 2 and caught.value.advice
    return caught.value


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_columns_name_the_fields_of_a_record(tmp_path: Path, name: str) -> None:
    shown = pieces(file_of(tmp_path / name), columns={"prompt": "q", "completion": "a"})
    assert shown[3] == [("what is 3?", False), ("it is 3.<|end|>", True)]
    assert len(shown) == len(ROWS)


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    """A file that also has a known field, such as text, is read as the map says."""
    assert pieces(file_of(tmp_path / "a.jsonl"), columns={"text": "a"})[0] == [("it is 0.<|end|>", True)]


def test_an_optional_input_may_be_missing_everywhere(tmp_path: Path) -> None:
    columns = {"instruction": "q", "input": "context", "output": "a"}
    assert pieces(file_of(tmp_path / "a.jsonl"), columns=columns)[0][0] == ("what is 0?\n\n", False)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_template_scores_the_named_columns_and_what_ends_it(tmp_path: Path, name: str) -> None:
    spec = file_of(tmp_path / name)
    shown = pieces(spec, template="Q: {q}\nA: {a}\n###", scored="a")
    assert shown[7] == [("Q: what is 7?\nA: ", False), ("it is 7.\n###<|end|>", True)]
    assert pieces(spec, template="Q: {q}\nA: {a}")[7] == [("Q: what is 7?\nA: it is 7.<|end|>", True)]
    twice = pieces(spec, template="{q} {a}\n{q} {a}", scored=["a"])[1]
    assert [is_scored for _, is_scored in twice] == [False, True, False, True]


def test_a_template_may_score_the_prompt_too(tmp_path: Path) -> None:
    spec = file_of(tmp_path / "a.jsonl")
    shown = pieces(spec, template="Q: {q}\nA: {a}", scored="a", train_on_prompt=True)
    assert shown[0] == [("Q: what is 0?\nA: it is 0.<|end|>", True)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize(
    "layout", [{"columns": {"prompt": "qq", "completion": "a"}}, {"template": "{qq} {a}", "scored": "a"}]
)
def test_a_mistyped_column_is_refused_with_those_there_are(tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    error = refusal(DataConfig(train=file_of(tmp_path / name), max_bad_share=1.0, **layout))
    assert "no column 'qq'" in error.what and "it has q, a, text, id" in error.what
    assert f"data.{next(iter(layout))}" in error.what and "did you mean q?" in error.advice


def test_the_layout_holds_for_evaluation_data_too(tmp_path: Path) -> None:
    config = DataConfig(template="{q}{a}", scored="a")
    corpus = open_eval(file_of(tmp_path / "a.jsonl"), tiny.tokenizer(), config)
    assert corpus.counters["eval_documents"] == len(ROWS)


BAD_ROWS = [
    ({"q": "x"}, "has no column a"),
    ({"q": "x", "a": None}, "a is missing"),
    ({"q": "x", "a": 5}, "a is a number, not text"),
    ({"q": "x", "a": " "}, "a is empty"),
    (["q", "a"], "is a list, not an object"),
]


@pytest.mark.parametrize(("row", "why"), BAD_ROWS)
@pytest.mark.parametrize(
    "layout", [{"columns": {"prompt": "q", "completion": "a"}}, {"template": "{q} {a}", "scored": "a"}]
)
def test_a_record_without_its_columns_is_left_out_and_told(
    tmp_path: Path, row: Any, why: str, layout: dict[str, Any]
) -> None:
    if why == "a is empty" and "columns" in layout:
        why = "completion is empty"
    why = why.replace("a is", "completion is") if "columns" in layout and not why.startswith("is") else why
    config = DataConfig(train=file_of(tmp_path / "a.jsonl", [*ROWS, row]), max_bad_share=0.1, **layout)
    corpus = open_data(config, tiny.tokenizer())
    assert corpus.counters["bad_records"] == 1
    assert any(f"a.jsonl:41: {why}" in note for note in corpus.notes)


def test_only_the_first_records_are_read_where_a_number_is_set(tmp_path: Path) -> None:
    spec = file_of(tmp_path / "a.jsonl")
    result = preview(DataConfig(train=spec, max_records=7), tiny.tokenizer(), num_rows=0)
    assert [row["id"] for row in result["rows"]] == [f"a.jsonl:{n}" for n in range(1, 8)]
    assert any("more than data.max_records = 7" in note for note in result["notes"])
    whole = preview(DataConfig(train=spec, max_records=40), tiny.tokenizer(), num_rows=1)
    assert whole["documents"] == 40 and not any("max_records" in note for note in whole["notes"])


def test_conversations_are_chats_with_other_names(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    talk = [("system", "be brief"), ("human", "why?"), ("gpt", "because."), ("human", "so?"), ("gpt", "so.")]
    roles = {"human": "user", "gpt": "assistant"}
    foreign = {"conversations": [{"from": who, "value": text} for who, text in talk]}
    usual = {"messages": [{"role": roles.get(who, who), "content": text} for who, text in talk]}
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    shown = [
        preview(DataConfig(train=file_of(tmp_path / "a.jsonl", [row]), **over), tokenizer, num_rows=0)["rows"][0]
        for row, over in ((usual, {}), (foreign, {}), (foreign, {"columns": {"messages": "conversations"}}))
    ]
    assert shown[0]["pieces"] == shown[1]["pieces"] == shown[2]["pieces"]
    assert "because." in "".join(text for text, is_scored in shown[0]["pieces"] if is_scored)
