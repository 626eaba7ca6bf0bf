"""Bad data: each fault is told with its place and what to try, and one bad record never stops a run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stillroom.config import parse_assignments
from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data import Loader, open_data, open_eval, sources

GOOD = [json.dumps({"text": f"record number {n} is fine"}).encode() for n in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Single bytes and an end mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate([*alphabet, "[END]"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[END]")


def refusal(config: DataConfig, tokenizer: Any) -> DataError:
    """The error that opening the data ends in; every one has exit code 2 and advice."""
    with pytest.raises(DataError) as caught:
        open_data(config, tokenizer)
    assert caught.value.exit_code == 2
    assert caught.value.advice and all(caught.value.advice) and caught.value.where
    return caught.value


def write(path: Path, *lines: bytes) -> str:
    path.write_bytes(b"\n".join(lines))
    return str(path)


# -- one bad record --------------------------------------------------------------------------------------

BAD_LINES = {
    b'{"text": "cut o': "broken JSON",
    b"[" * 100_000: "broken JSON",
    b"\0\0\0": "broken JSON",
    b'"only a string"': "is text, not an object",
    b"[1, 2]": "is a list, not an object",
    b'{"body": "x", "id": 3}': "has no known fields, only body, id",
    b'{"text": 5}': "text is a number, not text",
    b'{"text": null}': "text is missing",
    b'{"text": ""}': "text is empty",
    b'{"text": "\\u0000\\u0000"}': "text is empty",
    b'{"prompt": "x", "completion": " \\n"}': "completion is empty",
    b'{"prompt": "x", "completion": ["y"]}': "completion is a list, not text",
    b'{"conversations": "hi"}': "conversations is text, not a list of turns",
    b'{"conversations": [{"from": "gpt"}]}': "conversations, turn 1: needs role and content",
    b'{"conversations": [{"from": 5, "value": "x"}]}': "turn 1: role is a number",
    b'{"conversations": [{"from": "human", "value": "x"}]}': "conversations has no assistant turn",
    b'{"messages": "hi"}': "messages is text, not a list of turns",
    b'{"messages": []}': "not a list of turns",
    b'{"messages": [{"role": "user"}]}': "turn 1: needs role and content",
    b'{"messages": [{"role": "assistant", "content": [1]}]}': "content is a list",
    b'{"messages": [{"role": "user", "content": "hi"}]}': "no assistant turn",
    b'{"messages": [{"role": "assistant", "content": ""}]}': "turn 1 is empty",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_one_bad_record_is_left_out_and_told(tmp_path: Path, tokenizer: Any, line: bytes) -> None:
    spec = write(tmp_path / "d.jsonl", *GOOD[:16], line, *GOOD[16:])
    corpus = open_data(DataConfig(train=spec), tokenizer)
    assert corpus.counters["bad_records"] == 1 and corpus.counters["records"] == len(GOOD)
    (note,) = (note for note in corpus.notes if "1 of 201 records" in note)
    assert "d.jsonl:17: " in note and BAD_LINES[line] in note


def test_plain_text_in_another_column_is_read_as_advised(tmp_path: Path, tokenizer: Any) -> None:
    """The advice named a prompt and a completion only, and a file of texts has neither."""
    spec = write(tmp_path / "d.jsonl", *(line.replace(b'"text"', b'"content"') for line in GOOD))
    advice = refusal(DataConfig(train=spec), tokenizer).advice[0]
    advised = parse_assignments([re.findall(r'"(data\.columns=[^"]+)"', advice)[0].replace("COLUMN", "content")])
    corpus = open_data(DataConfig(train=spec, columns=advised["data.columns"]), tokenizer)
    assert corpus.counters["records"] == len(GOOD)


def test_too_many_bad_records_name_the_first_three_and_what_to_try(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "d.jsonl", b"{", b'{"text": 5}', *GOOD[:5], b"[]", b"{}")
    error = refusal(DataConfig(train=spec), tokenizer)
    assert "4 of 9 records" in error.what and "data.max_bad_share=0.01" in error.what
    assert all(place in error.what for place in ("d.jsonl:1: broken JSON", "d.jsonl:2: text is a number", "d.jsonl:8:"))
    assert "d.jsonl:9" not in error.what
    assert any("data.max_bad_share=0.45" in advice for advice in error.advice)
    assert open_data(DataConfig(train=spec, max_bad_share=0.45), tokenizer).counters["bad_records"] == 4


def test_nothing_but_bad_records_stops_even_when_all_are_allowed(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "d.jsonl", b"{", b"{")
    assert "holds no record" in refusal(DataConfig(train=spec, max_bad_share=1.0), tokenizer).what


def test_a_line_above_the_limit_is_left_out(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    long = json.dumps({"text": "x" * (3 << 20)}).encode()
    spec = write(tmp_path / "d.jsonl", *GOOD[:100], long, *GOOD[100:])
    corpus = open_data(DataConfig(train=spec), tokenizer)
    assert corpus.counters["records"] == len(GOOD)
    assert any("d.jsonl:101: the line is longer than 1 MB" in note for note in corpus.notes)


def test_marks_and_blank_lines_are_tolerated(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "d.jsonl", b"\xef\xbb\xbf" + GOOD[0], b"", GOOD[1] + b"\r", b"  ", *GOOD[2:4], b"")
    counters = open_eval(spec, tokenizer, DataConfig()).counters
    assert (counters["records"], counters["bad_records"]) == (4, 0)


def test_lone_surrogates_are_replaced_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "d.jsonl", b'{"text": "lone \\ud800 half"}', GOOD[0])
    corpus = open_eval(spec, tokenizer, DataConfig(packing="rows"))
    assert corpus.counters["invalid_utf8"] == 1 and corpus.counters["records"] == 2
    assert tokenizer.decode(corpus.evaluation.row(0)[:-1].tolist()) == "lone \ufffd half"
    assert any("U+FFFD" in note for note in corpus.notes)


@pytest.mark.parametrize(
    ("name", "lines", "records"),
    [
        ("d.jsonl", (b'{"text": "caf\xe9 au lait"}', *GOOD[:3]), 3),
        ("d.csv", (b"text", b"caf\xe9 au lait", b"one", b'"two', b'thr\xc3"', b"four"), 2),
        ("d.txt", (b"caf\xe9 au lait", b"<|endoftext|>", b"tea", b"<|endoftext|>", b"water"), 2),
        ("d.parquet", (), 0),
    ],
)
def test_texts_that_are_not_utf8_are_bad_records_and_never_learned(
    tmp_path: Path, tokenizer: Any, name: str, lines: tuple[bytes, ...], records: int
) -> None:
    spec = write(tmp_path / name, *lines)
    refused = refusal(DataConfig(train=spec, max_bad_share=0.01), tokenizer)
    assert refused.exit_code == 2
    if records:
        corpus = open_eval(spec, tokenizer, DataConfig(packing="rows", max_bad_share=0.8))
        assert corpus.counters["records"] >= records and corpus.counters["bad_records"] >= 1
        rows = corpus.evaluation
        assert not any("\ufffd" in tokenizer.decode(rows.row(index).tolist()) for index in range(len(rows)))
        assert any("not UTF-8" in note for note in corpus.notes)


def test_a_csv_row_with_the_wrong_number_of_cells_is_bad(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "d.csv", b"prompt,completion", b"a,b", b"a,b,c", b"a", b"c,d")
    corpus = open_eval(spec, tokenizer, DataConfig(packing="rows", max_bad_share=0.5))
    assert (corpus.counters["records"], corpus.counters["bad_records"]) == (2, 2)
    assert any("d.csv:3: has more cells" in note and "d.csv:4: completion is missing" in note for note in corpus.notes)


def test_a_template_that_refuses_a_chat_makes_one_bad_record(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template += "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    answer = {"role": "assistant", "content": "yes"}
    lines = [json.dumps({"messages": [{"role": role, "content": "x"}, answer]}).encode() for role in ("user", "system")]
    corpus = open_eval(write(tmp_path / "d.jsonl", *lines), tokenizer, DataConfig(packing="rows", max_bad_share=0.5))
    assert any("d.jsonl:2: the chat template refuses it: no system role" in note for note in corpus.notes)


# -- whole sources ---------------------------------------------------------------------------------------


def test_a_missing_file_names_its_neighbours(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "train.jsonl", *GOOD)
    error = refusal(DataConfig(train=str(tmp_path / "trian.jsonl")), tokenizer)
    assert "does not exist" in error.what and "train.jsonl" in error.advice[0]
    error = refusal(DataConfig(train=str(tmp_path / "no" / "d.jsonl")), tokenizer)
    assert "the folder" in error.advice[0]


def test_a_glob_without_a_match_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    assert "no file matches" in refusal(DataConfig(train=str(tmp_path / "*.jsonl")), tokenizer).what


def test_an_unknown_extension_is_refused_with_the_known_ones(tmp_path: Path, tokenizer: Any) -> None:
    error = refusal(DataConfig(train=write(tmp_path / "d.xml", b"<a/>")), tokenizer)
    assert "'.xml'" in error.what and ".jsonl" in error.advice[0]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.txt"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, tokenizer: Any, name: str, content: bytes) -> None:
    assert "is empty" in refusal(DataConfig(train=write(tmp_path / name, content)), tokenizer).what


def test_an_empty_file_among_others_is_one_bad_record(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "a.jsonl", *GOOD)
    write(tmp_path / "b.jsonl", b"")
    corpus = open_data(DataConfig(train=str(tmp_path / "*.jsonl")), tokenizer)
    assert any("b.jsonl: the file is empty" in note for note in corpus.notes)


def test_a_file_in_utf16_is_refused_with_what_to_do(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "x"}', encoding="utf-16")
    error = refusal(DataConfig(train=str(tmp_path / "d.jsonl")), tokenizer)
    assert "UTF-16" in error.what and "UTF-8" in error.advice[0]


def test_jsonl_named_json_is_refused_with_the_right_name(tmp_path: Path, tokenizer: Any) -> None:
    error = refusal(DataConfig(train=write(tmp_path / "d.json", *GOOD)), tokenizer)
    assert "line 2" in error.what and ".jsonl" in error.advice[0]
    assert "no list" in refusal(DataConfig(train=write(tmp_path / "e.json", b'{"a": 1}')), tokenizer).what


@pytest.mark.parametrize("content", [b"PAR1 and then nothing PAR1", b"not parquet at all"])
def test_a_broken_parquet_file_is_refused(tmp_path: Path, tokenizer: Any, content: bytes) -> None:
    assert "d.parquet" in refusal(DataConfig(train=write(tmp_path / "d.parquet", content)), tokenizer).what


def test_an_unknown_embedded_corpus_is_refused_with_the_nearest_name(tokenizer: Any) -> None:
    error = refusal(DataConfig(train="builtin:stdlb"), tokenizer)
    assert "did you mean builtin:stdlib" in error.advice[0]
    assert "builtin:qa" in refusal(DataConfig(train="builtin:x"), tokenizer).advice[0]


class Hub:
    """Stands for the `datasets` package."""

    def __init__(self, splits: dict[str, list[dict[str, str]]]) -> None:
        self.splits = splits

    def load_dataset(self, name: str, config: str | None) -> dict[str, list[dict[str, str]]]:
        if name == "far/away":
            raise ConnectionError("Couldn't reach 'far/away' on the Hub")
        return self.splits


def test_a_dataset_out_of_reach_is_refused_with_ways_on(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "needed", lambda module, where: Hub({}))
    error = refusal(DataConfig(train="hf:far/away:cfg"), tokenizer)
    assert "Couldn't reach" in error.what and error.where == "hf:far/away:cfg"
    assert "names no dataset" in refusal(DataConfig(train="hf:"), tokenizer).what


def test_a_missing_package_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal(DataConfig(train="hf:some/set"), tokenizer).advice[0]


def test_a_dataset_is_evaluated_on_its_validation_split(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": [{"text": f"train {n}"} for n in range(9)], "validation": [{"text": "held out"}]}
    monkeypatch.setattr(sources, "needed", lambda module, where: Hub(splits))
    corpus = open_data(DataConfig(train="hf:some/set", eval="hf:some/set", packing="rows"), tokenizer)
    assert (corpus.counters["train_documents"], corpus.counters["eval_documents"]) == (9, 1)
    assert corpus.evaluation.sample_id(0) == "some/set/validation:1"
    del splits["train"]
    assert "no split train" in refusal(DataConfig(train="hf:some/set"), tokenizer).what


# -- what is left ----------------------------------------------------------------------------------------


def test_a_single_document_cannot_be_held_out(tmp_path: Path, tokenizer: Any) -> None:
    for name, lines in (("d.jsonl", [GOOD[0], GOOD[0]]), ("d.txt", [b"one short line"])):
        error = refusal(DataConfig(train=write(tmp_path / name, *lines)), tokenizer)
        assert "one document only" in error.what and "data.eval" in error.advice[0]


def test_prompts_that_fill_every_row_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    lines = [json.dumps({"prompt": f"{n}" * 40, "completion": "x"}).encode() for n in range(9)]
    error = refusal(DataConfig(train=write(tmp_path / "d.jsonl", *lines), packing="rows", max_length=8), tokenizer)
    assert "no row with a target" in error.what and "data.max_length" in error.advice[0]


def test_a_loader_needs_rows_and_sizes(tmp_path: Path, tokenizer: Any) -> None:
    corpus = open_eval(write(tmp_path / "d.jsonl", *GOOD[:4]), tokenizer, DataConfig())
    with pytest.raises(DataError):
        Loader(corpus.train, batch_size=1)
    with pytest.raises(ConfigError):
        Loader(corpus.evaluation, batch_size=0)
    with pytest.raises(IndexError):
        Loader(corpus.evaluation, batch_size=1).window(-1)


# -- where it was given ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "none-*.jsonl", "empty.jsonl", "odd.xyz", "cut.jsonl.gz", "builtin:no"]
)
def test_a_file_that_cannot_be_read_is_told_with_the_setting_that_names_it(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    good = write(tmp_path / "good.jsonl", *GOOD)
    for made in ("empty.jsonl", "odd.xyz"):
        (tmp_path / made).touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    spec = name if name.startswith("builtin") else str(tmp_path / name)
    assert refusal(DataConfig(train=spec), tokenizer).where == "data.train"
    assert refusal(DataConfig(train=good, eval=spec), tokenizer).where == "data.eval"
    with pytest.raises(DataError) as caught:
        open_eval(spec, tokenizer, DataConfig(train=good))
    assert caught.value.where == "data", "an argument of eval and export"
    if name not in ("empty.jsonl", "cut.jsonl.gz"):  # those are there
        with pytest.raises(DataError) as caught:
            sources.refuse_missing(("rollouts.prompts", spec))
        assert caught.value.where == "rollouts.prompts"
