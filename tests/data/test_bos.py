"""Laws of a document's beginning: as the tokenizer begins texts itself, once, without bytes, never a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoTokenizer
from trl_templates import template

from stillroom.builtin import model_path
from stillroom.config import load_config
from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import IGNORED
from stillroom.data import Encoder, Record, Tally, fixed_batches, open_data, open_eval, opening_ids, pack, prompt_ids
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.models import load_models
from stillroom.training.student import cut_student

QUESTION = {"prompt": "the still room", "completion": " keeps spirits and waters"}
CHAT = {"messages": [{"role": "user", "content": "the still"}, {"role": "assistant", "content": "room keeps"}]}


def text(words: str) -> Record:
    return Record("doc", ((words, True),), words)


def write(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def rows_of(spec: str, tokenizer: Any, **over: Any) -> list[list[int]]:
    rows = open_eval(spec, tokenizer, DataConfig(**over)).evaluation
    return [rows.row(number).tolist() for number in range(len(rows))]


# -- asking the tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", begun.PUTS)
def test_documents_begin_as_the_tokenizer_begins_texts(kind: str) -> None:
    tokenizer = begun.byte_tokenizer(kind)
    opening = tokenizer.convert_tokens_to_ids(begun.PUTS[kind][1])
    assert list(opening_ids(tokenizer, "auto")) == opening
    encoded = Encoder(tokenizer, Tally())([text("the still room")])
    bare = tokenizer("the still room", add_special_tokens=False)["input_ids"]
    assert encoded.ids.tolist() == [*opening, *bare, tokenizer.eos_token_id]


def test_the_tokenizer_is_asked_and_not_its_settings(tmp_path: Path) -> None:
    """A Llama tokenizer loaded again says `add_bos_token = False` and adds it all the same."""
    begun.llama_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    wanted = tokenizer("the room")["input_ids"]
    assert wanted[0] == tokenizer.bos_token_id
    assert Encoder(tokenizer, Tally())([text("the room")]).ids.tolist() == [*wanted, tokenizer.eos_token_id]


def test_the_embedded_tokenizer_begins_with_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_path("teacher")))
    assert opening_ids(tokenizer, "auto") == ()


def test_true_and_false_overrule_the_tokenizer() -> None:
    with_none, with_bos = begun.byte_tokenizer("none"), begun.byte_tokenizer("bos")
    assert opening_ids(with_none, True) == (with_none.bos_token_id,) == opening_ids(with_bos, True)
    assert opening_ids(with_none, False) == () == opening_ids(with_bos, False)


def test_a_bos_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    spec = write(tmp_path / "d.jsonl", {"text": "the still room"})
    with refused(ConfigError, "data.bos"):
        open_eval(spec, begun.byte_tokenizer("none", has_bos=False), DataConfig(bos=True))


@pytest.mark.parametrize(("kind", "said"), [("bos", "begins with <s>"), ("none", "without a begin-of-text token")])
def test_the_log_says_how_documents_begin(tmp_path: Path, kind: str, said: str) -> None:
    spec = write(tmp_path / "d.jsonl", {"text": "the still room"})
    notes = open_eval(spec, begun.byte_tokenizer(kind), DataConfig()).notes
    assert sum(said in note for note in notes) == 1


def test_a_teacher_that_begins_texts_otherwise_is_told(tmp_path: Path) -> None:
    begun.save(tmp_path / "teacher", begun.byte_tokenizer("bos"))
    begun.save(tmp_path / "student", begun.byte_tokenizer("none"))
    over = {"teacher.model": str(tmp_path / "teacher"), "student.model": str(tmp_path / "student")}
    for wanted, is_told in (("auto", True), (True, False)):
        models = load_models(load_config(overrides={**over, "data.bos": wanted}), find_device("cpu"))
        assert any("begins texts with <s> and the student's with nothing" in note for note in models.notes) == is_told


# -- what it is worth ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["blocks", "rows"])
def test_an_opening_has_no_bytes_and_is_never_a_target(packing: Any) -> None:
    tokenizer = begun.byte_tokenizer()
    words = tiny.sentences(12, 5)
    encoded = Encoder(tokenizer, Tally())([text(line) for line in words])
    assert int(encoded.num_bytes.sum()) == sum(len(line) for line in words)
    rows = pack(encoded, packing, 16, Tally(), pad_id=3)
    bos = tokenizer.bos_token_id
    inputs = targets = 0
    for batch in fixed_batches(rows, 4):
        inputs += int((batch.input_ids == bos).sum())
        targets += int((batch.targets == bos).sum())
        assert (batch.target_bytes[batch.targets == IGNORED] == 0).all()
    assert (inputs, targets) == (len(words), 0)
    assert rows.num_targets == len(encoded.ids) - len(words)  # every token but the openings


def test_in_blocks_each_document_is_opened() -> None:
    tokenizer = begun.byte_tokenizer()
    encoded = Encoder(tokenizer, Tally())([text(line) for line in tiny.sentences(5, 5)])
    assert (encoded.ids[encoded.bounds[:-1]] == tokenizer.bos_token_id).all()
    assert (encoded.ids == tokenizer.bos_token_id).sum() == 5


def test_a_long_text_is_opened_once() -> None:
    tokenizer = begun.byte_tokenizer()
    rows = pack(Encoder(tokenizer, Tally())([text("the still room " * 20)]), "rows", 8, Tally())
    ids = [rows.row(number).tolist() for number in range(len(rows))]
    assert len(ids) > 2 and ids[0][0] == tokenizer.bos_token_id
    assert all(tokenizer.bos_token_id not in row for row in ids[1:])


# -- chats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "gemma", "phi3"])
@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_a_chat_has_one_opening_whether_its_template_writes_it_or_not(
    tmp_path: Path, name: str, train_on_prompt: bool
) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template(name))
    spec = write(tmp_path / "c.jsonl", CHAT, CHAT)
    rows = open_eval(spec, tokenizer, DataConfig(train_on_prompt=train_on_prompt)).evaluation
    for number in range(len(rows)):
        ids = rows.row(number).tolist()
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    (batch,) = fixed_batches(rows, 2)
    assert not (batch.targets == tokenizer.bos_token_id).any()


@pytest.mark.parametrize("kind", ["bos", "none"])
def test_an_opening_that_a_template_wrote_is_no_target_either(tmp_path: Path, kind: str) -> None:
    tokenizer = begun.byte_tokenizer(kind, chat_template=template("llama3"))
    write(tmp_path / "c.jsonl", *({"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": line}]}
                                  for line in tiny.sentences(30, 3)))  # fmt: skip
    config = DataConfig(train=str(tmp_path / "c.jsonl"), packing="blocks", train_on_prompt=True, max_length=32)
    rows = open_data(config, tokenizer).train
    bos = tokenizer.bos_token_id
    batches = list(fixed_batches(rows, 4))
    assert sum(int((batch.input_ids == bos).sum()) for batch in batches) > 8
    assert not any((batch.targets == bos).any() for batch in batches)
    assert (rows._encoded.num_bytes[rows._encoded.ids == bos] == 0).all()


def test_a_prompt_of_a_chat_has_one_opening() -> None:
    for name in ("llama3", "qwen2_5"):
        tokenizer = begun.byte_tokenizer(chat_template=template(name))
        ids, is_chat = prompt_ids(tokenizer, "the still room")
        assert is_chat and ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


# -- whoever makes rows ----------------------------------------------------------------------------------


def test_prompts_begin_as_training_rows_do(tmp_path: Path) -> None:
    for kind in begun.PUTS:
        tokenizer = begun.byte_tokenizer(kind)
        (row,) = rows_of(write(tmp_path / "q.jsonl", QUESTION), tokenizer)
        ids, is_chat = prompt_ids(tokenizer, QUESTION["prompt"])
        assert not is_chat and row[: len(ids)] == ids


def test_an_empty_prompt_is_the_opening() -> None:
    assert prompt_ids(begun.byte_tokenizer(), "")[0] == [1]
    assert prompt_ids(begun.byte_tokenizer("none"), "")[0] == [1]
    assert prompt_ids(begun.byte_tokenizer("none", has_bos=False), "")[0] == [2]  # what stands between documents


def test_training_canary_first_batch_and_calibration_begin_alike(tmp_path: Path) -> None:
    """Everything that reads text in a run reads rows of the corpus, and these begin as the tokenizer says."""
    tokenizer = begun.byte_tokenizer()
    begun.save(tmp_path / "teacher", tokenizer)
    begun.save(tmp_path / "student", tokenizer, seed=1)
    write(tmp_path / "train.jsonl", *({**QUESTION, "prompt": line} for line in tiny.sentences(60, 1)))
    config = load_config(overrides=tiny.settings(tmp_path, data__max_length=64))
    device = find_device("cpu")
    with EventLog(tmp_path / "events.jsonl") as log:
        run = build_run(config, tmp_path, log, device=device, models=load_models(config, device))
    table = config.to_dict()
    table["student"] |= {"init": "shrink", "shrink": {"mlp_width": 32}}
    calibration: list[torch.Tensor] = []
    teacher = run.teacher.as_model()
    assert teacher is not None
    embedding = teacher.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _module, inputs: calibration.append(inputs[0])):
        cut_student(type(config).model_validate(table), teacher.model, tokenizer, device)
    calibration = [ids for ids in calibration if len(ids) == config.train.batch_size]  # not the trials of a structure
    assert calibration
    batches = [run.canary(), *run.loader.window(0), *run.eval_batches()]
    for ids in [*calibration, *(batch.input_ids for batch in batches)]:
        assert (ids[:, 0] == 1).all() and int((ids == 1).sum()) == len(ids)


def test_train_and_held_out_sides_begin_alike(tmp_path: Path) -> None:
    spec = write(tmp_path / "d.jsonl", *({"text": line} for line in tiny.sentences(50, 1)))
    corpus = open_data(DataConfig(train=spec, max_length=16), begun.byte_tokenizer())
    for rows, count in ((corpus.train, "train_documents"), (corpus.evaluation, "eval_documents")):
        found = sum(int((batch.input_ids == 1).sum()) for batch in fixed_batches(rows, 8))
        assert found == corpus.counters[count]
