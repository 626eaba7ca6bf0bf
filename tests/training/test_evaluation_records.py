"""Laws of evaluation by record: a record is scored as it would be alone, whatever stands beside it in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.config.schema import DataConfig
from stillroom.data import fixed_batches, open_data, open_eval
from stillroom.metrics.evaluate import assess
from stillroom.models import Student
from stillroom.precision import resolve
from stillroom.telemetry.results import assessment_lines, summary_lines
from stillroom.telemetry.wording import start_lines
from stillroom.training.evaluate import evaluate

CPU = torch.device("cpu")
LINES = tiny.sentences(40, 9)
QUESTIONS = [{"prompt": f"{line[:30]} ", "completion": line[30:]} for line in LINES if len(line) > 40]
TEXTS = [{"text": line} for line in LINES]
CHATS = [
    {"messages": [{"role": "user", "content": line[:20]}, {"role": "assistant", "content": line[20:]}]}
    for line in LINES
]
CHATML = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def write(path: Path, values: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(3)
    config = tiny.config("llama")
    found = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():  # far from a uniform answer, so that context matters
            parameter.mul_(6.0)
    return found


def perplexity(model: Any, spec: str, tokenizer: Any, **over: Any) -> float:
    rows = open_eval(spec, tokenizer, DataConfig(**over)).evaluation
    student = Student(model, vocab_size=tiny.VOCAB, is_described=True)
    return evaluate(student, fixed_batches(rows, 5), precision=resolve("fp32", CPU)).perplexity


def alone(model: Any, sequences: list[tuple[list[int], int]]) -> float:
    """The token-weighted mean over records, each scored by itself with the model's own loss on labels."""
    total, count = 0.0, 0
    for ids, num_unscored in sequences:
        labels = torch.tensor([[-100] * num_unscored + ids[num_unscored:]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=labels).loss
        scored = int((labels[:, 1:] != -100).sum())
        total, count = total + float(loss) * scored, count + scored
    return math.exp(total / count)


@pytest.mark.parametrize("kind", ["bos", "none"])
@pytest.mark.parametrize("packing", ["auto", "blocks", "rows"])
def test_a_prompt_with_its_answer_is_scored_as_alone(tmp_path: Path, model: Any, kind: str, packing: str) -> None:
    tokenizer = begun.byte_tokenizer(kind)
    sequences = []
    for value in QUESTIONS:
        prompt, answer = (tokenizer(value[name], add_special_tokens=False)["input_ids"] for name in value)
        opening = [tokenizer.bos_token_id] if kind == "bos" else []
        sequences.append(([*opening, *prompt, *answer, tokenizer.eos_token_id], len(opening) + len(prompt)))
    found = perplexity(model, write(tmp_path / "q.jsonl", QUESTIONS), tokenizer, packing=packing)
    assert found == pytest.approx(alone(model, sequences), rel=1e-5)


@pytest.mark.parametrize("kind", ["bos", "none"])
@pytest.mark.parametrize("packing", ["auto", "blocks"])
def test_a_text_is_scored_as_alone(tmp_path: Path, model: Any, kind: str, packing: str) -> None:
    tokenizer = begun.byte_tokenizer(kind)
    opening = [tokenizer.bos_token_id] if kind == "bos" else []
    texts = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES]
    sequences = [([*opening, *ids, tokenizer.eos_token_id], 0) for ids in texts]
    found = perplexity(model, write(tmp_path / "t.jsonl", TEXTS), tokenizer, packing=packing)
    assert found == pytest.approx(alone(model, sequences), rel=1e-5)


def test_a_long_text_is_scored_in_consecutive_rows_of_its_own(tmp_path: Path, model: Any) -> None:
    tokenizer = begun.byte_tokenizer()
    sequences = []
    for line in LINES:
        ids = [1, *tokenizer(line, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        sequences += [(ids[start : start + 9], 0) for start in range(0, len(ids) - 1, 8)]
    found = perplexity(model, write(tmp_path / "t.jsonl", TEXTS), tokenizer, max_length=8)
    assert found == pytest.approx(alone(model, sequences), rel=1e-5)


@pytest.mark.parametrize("values", [QUESTIONS, TEXTS, CHATS])
def test_the_order_of_records_does_not_change_what_they_score(tmp_path: Path, model: Any, values: Any) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=CHATML)
    one = perplexity(model, write(tmp_path / "a.jsonl", values), tokenizer)
    assert perplexity(model, write(tmp_path / "b.jsonl", values[::-1]), tokenizer) == pytest.approx(one, rel=1e-5)


# -- how training rows are made --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "is_joined"), [(TEXTS, True), (QUESTIONS, False), (CHATS, False), ([*TEXTS, *QUESTIONS], False)]
)
def test_records_with_a_prompt_are_never_joined_by_default(tmp_path: Path, values: Any, is_joined: bool) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=CHATML)
    spec = write(tmp_path / "d.jsonl", values)
    corpus = open_data(DataConfig(train=spec, max_length=48), tokenizer)
    openings = [int((corpus.train.row(number) == 1).sum()) for number in range(len(corpus.train))]
    assert (max(openings) > 1) == is_joined
    asked = open_data(DataConfig(train=spec, max_length=48, packing="blocks"), tokenizer).train
    assert max(int((asked.row(number) == 1).sum()) for number in range(len(asked))) > 1


# -- counting --------------------------------------------------------------------------------------------


def test_the_header_counts_what_is_trained_on_and_the_log_says_what_is_cut(tmp_path: Path) -> None:
    values = [{"prompt": f"{line} ", "completion": " ".join(LINES[:4])} for line in LINES]
    corpus = open_data(DataConfig(train=write(tmp_path / "d.jsonl", values), max_length=64), tiny.tokenizer())
    rows, counters = corpus.train, corpus.counters
    assert counters["train_tokens"] == sum(len(rows.row(number)) for number in range(len(rows)))
    assert counters["truncated_tokens"] > counters["train_tokens"]
    (cut,) = (note for note in corpus.notes if note.startswith("training data: "))
    assert "are longer than data.max_length = 64" in cut and "%) are cut off" in cut
    told = start_lines({"data": {**counters, "notes": []}})
    assert any(f"{counters['train_tokens']:,} tokens" in line and "of them scored" in line for line in told)


@pytest.mark.parametrize("packing", ["auto", "rows", "blocks"])
def test_no_plain_text_is_left_out(tmp_path: Path, packing: Any) -> None:
    """A few long texts, as under the preset for instructions, are trained on whole."""
    tokenizer = begun.byte_tokenizer()
    values = [{"text": f"{number} " + " ".join(LINES[number:])} for number in range(12)]
    config = DataConfig(train=write(tmp_path / "d.jsonl", values), max_length=32, packing=packing)
    corpus = open_data(config, tokenizer)
    sizes = [len(tokenizer(value["text"])["input_ids"]) + 1 for value in values]
    assert corpus.counters["train_tokens"] + corpus.counters["eval_tokens"] == sum(sizes)
    assert corpus.counters["truncated_tokens"] == 0


# -- how sure it is --------------------------------------------------------------------------------------


def test_few_documents_are_given_no_interval_and_the_reader_is_told_why(tmp_path: Path) -> None:
    begun.save(tmp_path / "model", begun.byte_tokenizer())
    found = assess(str(tmp_path / "model"), write(tmp_path / "t.jsonl", TEXTS[:2]), device="cpu")
    assert found["student"]["intervals"] == {} and found["student"]["documents"] == 2
    lines = assessment_lines(found)
    told = "no 95 % interval: it needs 8 held-out documents (scored: 2)"
    assert told in lines and told in summary_lines({"student": found["student"]})
    assert not any("no 95 %" in line for line in summary_lines({"student": {"documents": 55}}))


def test_eval_says_how_it_read_the_data(tmp_path: Path) -> None:
    begun.save(tmp_path / "model", begun.byte_tokenizer())
    spec = write(tmp_path / "q.jsonl", [{"prompt": "a ", "completion": LINES[0] * 20}] * 9)
    lines = assessment_lines(assess(str(tmp_path / "model"), spec, device="cpu", max_length=64))
    notes = [line for line in lines if line.startswith("note  ")]
    assert any("begins with <s>" in note for note in notes)
    assert any("scored by itself" in note for note in notes) and any("are cut off" in note for note in notes)
