"""Log-probabilities of other programs: what is right is taken over, what is shifted or misspelt is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tiny
import torch
from pyarrow import parquet
from refusals import refused

from stillroom.config import load_config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import Needs, TopKSignal
from stillroom.data import open_data
from stillroom.models import open_teacher
from stillroom.teachers.cache.build import required_rows
from stillroom.teachers.cache.imports import read_distillkit
from stillroom.teachers.cache.reader import Cache, CachedTeacher
from stillroom.training.distill import distill
from stillroom.training.write_cache import import_cache

K = 6
Line = dict[str, Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    tiny.save_trained(folder / "teacher", width=32, num_layers=1, steps=80)
    tiny.save_model(folder / "student", "llama", width=16, num_layers=1, seed=2)
    lines = tiny.sentences(40, 0)
    pairs = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in lines]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def said(small: Path) -> list[Line]:
    """What a server would say of every row: all log-probs of all tokens."""
    loaded = open_teacher(TeacherConfig(model=str(small / "teacher")), torch.float32)
    config = load_config(overrides=settings(small))
    lines = []
    for row in required_rows(config, open_data(config.data, loaded.tokenizer)):
        ids = row.rows.row(row.index).tolist()
        with torch.no_grad():
            log_probs = torch.log_softmax(loaded.network(torch.tensor([ids])).logits[0].double(), dim=-1)
        lines.append({"name": row.name, "ids": ids, "log_probs": log_probs, "words": loaded.tokenizer})
    return lines


def settings(small: Path, **over: Any) -> dict[str, Any]:
    return tiny.settings(small, train__max_steps=3, eval__samples=0, data__max_length=64, **over)


def top(line: Line, place: int, *, own: bool) -> dict[int, float]:
    """Of the token at a place: the K likeliest, and with `own` the one that came."""
    values, ids = line["log_probs"][place - 1].topk(K)
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    token = line["ids"][place]
    return {**found, token: float(line["log_probs"][place - 1][token])} if own else found


def vllm(line: Line, shift: int = 0) -> Line:
    tables: list[Any] = [None]
    for place in range(1, len(line["ids"])):
        entry = top(line, min(len(line["ids"]) - 1, max(1, place + shift)), own=True)
        spelt = {token: line["words"].decode([token]) for token in entry}
        tables.append({str(token): {"logprob": entry[token], "decoded_token": spelt[token]} for token in entry})
    return {"choices": [{"prompt_token_ids": line["ids"], "prompt_logprobs": tables}]}


def distillkit(line: Line, shift: int = 0) -> Line:
    entries = [top(line, min(len(line["ids"]) - 1, max(1, place + shift)), own=False)
               for place in range(1, len(line["ids"]))]  # fmt: skip
    return {
        "input_ids": line["ids"],
        "token_ids": [list(entry) for entry in entries],
        "logprobs": [list(entry.values()) for entry in entries],
    }


def openai(line: Line, begin: int, *, named: bool) -> Line:
    """Of the answer alone, its end mark left out: after a prompt whose ids are given, or of a row that is named."""
    spelt = Counter(line["words"].decode([token]) for token in line["words"].get_vocab().values())

    def word(token: int) -> str:
        text = str(line["words"].decode([token]))
        return text if named and spelt[text] == 1 else f"token_id:{token}"

    content = []
    for place in range(begin, len(line["ids"]) - 1):
        entry = top(line, place, own=False)
        tokens = [{"token": word(token), "logprob": value} for token, value in entry.items()]
        content.append({"token": word(line["ids"][place]), "top_logprobs": tokens})
    which = {"id": line["name"]} if named else {"prompt_token_ids": line["ids"][:begin]}
    return {**which, "choices": [{"logprobs": {"content": content}}]}


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "form"), [("vllm", vllm), ("distillkit", distillkit)])
def test_a_file_becomes_the_top_k_answers_of_its_rows(
    small: Path, said: list[Line], tmp_path: Path, kind: str, form: Callable[[Line], Line]
) -> None:
    path = write(tmp_path / "file.jsonl", [form(line) for line in said])
    config = load_config(overrides=settings(small))
    told = import_cache(config, tmp_path / "cache", path, kind)
    assert told["missing_rows"] == 0 and told["unmatched_records"] == 0 and told["signal"]["k"] == K
    teacher = CachedTeacher(Cache(tmp_path / "cache"), device=torch.device("cpu"))
    rows = open_data(config.data, said[0]["words"]).train
    batch = rows.batch([3])
    signal = teacher.observe(batch, Needs())
    assert isinstance(signal, TopKSignal)
    line = next(one for one in said if one["ids"] == rows.row(3).tolist())
    places = batch.positions.tolist()
    expected = line["log_probs"][places].topk(K)
    assert torch.equal(signal.ids, expected.indices)
    assert torch.allclose(signal.log_probs.double(), expected.values, atol=0.004)
    assert torch.allclose(signal.tail_log_mass.double().exp(), 1 - expected.values.exp().sum(-1), atol=0.004)
    known = teacher.own_metrics([batch])
    if kind == "vllm":
        losses = [-float(line["log_probs"][place, line["ids"][place + 1]]) for place in places]
        assert known is not None and math.log(known["perplexity"]) == pytest.approx(sum(losses) / len(losses), abs=3e-3)
    else:
        assert known is None  # the label is not among the answers, so its probability is not known


def test_a_run_trains_from_an_imported_cache(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "vllm")
    over = settings(small, teacher__cache=str(tmp_path / "cache"), objectives__kd__divergence="reverse_kl")
    summary = distill(load_config(overrides=over), tmp_path / "run", device="cpu").summary
    assert summary["steps"] == 3 and summary["teacher_signal"]["unknown_positions"] == 0


@pytest.mark.parametrize("named", [True, False], ids=["texts of a named row", "ids after a prompt"])
def test_answers_that_end_before_the_end_mark_leave_it_to_its_label(
    small: Path, said: list[Line], tmp_path: Path, named: bool
) -> None:
    config = load_config(overrides=settings(small))
    rows = required_rows(config, open_data(config.data, said[0]["words"]))
    scored = {row.name: int(row.rows.batch([row.index]).num_scored) for row in rows}
    lines = [openai(line, len(line["ids"]) - scored[line["name"]], named=named) for line in said]
    told = import_cache(config, tmp_path / "cache", write(tmp_path / "file.jsonl", lines), "openai")
    assert told["missing_rows"] == 0 and told["unanswered_positions"] == told["unusable_positions"] == len(said)


def test_parquet_columns_are_read(small: Path, said: list[Line], tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([distillkit(line) for line in said]), tmp_path / "file.parquet")
    told = import_cache(
        load_config(overrides=settings(small)), tmp_path / "cache", tmp_path / "file.parquet", "distillkit"
    )
    assert told["missing_rows"] == 0


def test_a_renormalised_import_says_what_mass_was_stored(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    over = {"teacher__signal__kind": "renormalised", "teacher__signal__k": 2}
    import_cache(load_config(overrides=settings(small, **over)), tmp_path / "cache", path, "vllm")
    teacher = CachedTeacher(Cache(tmp_path / "cache"), device=torch.device("cpu"))
    mass = teacher.cache.mean_mass
    assert mass is not None and 0.3 < mass < 0.98
    assert any(f"{mass:.4f}" in note and "overconfident" in note for note in teacher.notes)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(("kind", "form"), [("vllm", vllm), ("distillkit", distillkit)])
def test_a_file_that_is_shifted_by_one_is_refused(
    small: Path, said: list[Line], tmp_path: Path, kind: str, form: Callable[[Line, int], Line], shift: int
) -> None:
    path = write(tmp_path / "file.jsonl", [form(line, shift) for line in said])
    with pytest.raises(DataError, match="shifted"):
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, kind)


def _misspelt(line: Line) -> Line:
    for table in line["choices"][0]["prompt_logprobs"][1:]:
        for value in table.values():
            value["decoded_token"] = value["decoded_token"] + "x"
    return line


def _outside(line: Line) -> Line:
    line["choices"][0]["prompt_logprobs"][1]["99999"] = {"logprob": -3.0}
    return line


def _logits(line: Line) -> Line:
    for table in line["choices"][0]["prompt_logprobs"][1:]:
        for value in table.values():
            value["logprob"] += 9.0
    return line


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_misspelt, "spell something else"),
        (_outside, "outside the tokenizer"),
        (_logits, "not log-probabilities"),
        (lambda line: {"prompt_logprobs": []}, "prompt_token_ids are missing"),
        (lambda line: {"choices": [{**line["choices"][0], "prompt_logprobs": [None]}]}, "not one entry for each"),
    ],
)
def test_what_cannot_be_believed_is_refused_by_name(
    small: Path, said: list[Line], tmp_path: Path, spoil: Callable[[Line], Line], word: str
) -> None:
    path = write(tmp_path / "file.jsonl", [spoil(vllm(line)) for line in said])
    with pytest.raises(DataError, match=word) as caught:
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "vllm")
    assert caught.value.advice and not (tmp_path / "cache").exists()


def test_a_file_of_other_texts_and_an_unknown_format_are_refused(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    other = tiny.save_text(tmp_path / "other.jsonl", count=30, seed=8)
    with refused(DataError, "file.jsonl", "39"):
        import_cache(load_config(overrides=settings(small, data__train=str(other))), tmp_path / "cache", path, "vllm")
    with refused(ConfigError, "--format", "gguf"):
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "gguf")


@pytest.mark.parametrize("columns", [["compressed_logprobs", "bytepacked_indices"], ["packed_indices", "coeffs"]])
def test_compressed_columns_are_refused_with_the_way_to_unpack_them(tmp_path: Path, columns: list[str]) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2], **{name: [[0], [0]] for name in columns}}), encoding="utf-8")
    with refused(DataError, "file.jsonl:1", "LogprobCompressor"):
        list(read_distillkit(path, int))
