"""Configurations and tokenizers that are damaged or of another kind of model end at the start with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from damage import ask, edit, refused, train
from transformers import BertConfig, BertLMHeadModel, LlavaConfig, Qwen3VLConfig, T5Config

from stillroom.core.errors import ConfigError
from stillroom.models import LoadedModel

# -- configuration ---------------------------------------------------------------------------------------


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def setting(**values: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **values)


CONFIGURATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken JSON": (write("config.json", '{"model_type": "llama",'), "not valid JSON"),
    "not UTF-8": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), "not valid JSON"),
    "empty": (write("config.json", ""), "not valid JSON"),
    "a list": (write("config.json", '["llama"]'), "holds a list"),
    "missing": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no kind": (write("config.json", '{"hidden_size": 16}'), "names no model_type"),
    "an unknown kind": (setting(model_type="lama"), "'lama'"),
    "a kind that is no name": (setting(model_type=7), "names no model_type"),
    "a word for a number": (setting(hidden_size="wide"), "hidden_size"),
    "a negative size": (setting(hidden_size=-16), ""),
    "a size of nothing": (setting(hidden_size=0), ""),
    "no layers": (setting(num_hidden_layers=0), ""),
    "no heads": (setting(num_attention_heads=0), ""),
    "a negative vocabulary": (setting(vocab_size=-1), ""),
    "heads that do not divide": (setting(num_attention_heads=3, num_key_value_heads=2), ""),
    "an unknown activation": (setting(hidden_act="relou"), "relou"),
    "an unknown rope": (setting(rope_parameters={"rope_type": "spiral"}), ""),
    "an unknown dtype": (setting(dtype="float17"), "float17"),
    "a broken generation": (write("generation_config.json", "{"), ""),
    "a list for a generation": (write("generation_config.json", "[1]"), ""),
}


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("damage", CONFIGURATIONS)
def test_a_damaged_configuration_is_refused(
    model_folder: Path, damage: str, how: Callable[[Path], LoadedModel]
) -> None:
    change, word = CONFIGURATIONS[damage]
    change(model_folder)
    assert refused(model_folder, word, how=how)


@pytest.mark.parametrize("damage", [name for name in CONFIGURATIONS if "generation" not in name])
def test_a_damaged_configuration_is_refused_for_a_random_student(model_folder: Path, damage: str) -> None:
    change, word = CONFIGURATIONS[damage]
    change(model_folder)
    (model_folder / "model.safetensors").unlink()
    assert refused(model_folder, word, how=train)


def test_a_configuration_that_is_a_folder(model_folder: Path) -> None:
    (model_folder / "config.json").unlink()
    (model_folder / "config.json").mkdir()
    assert refused(model_folder, "config.json")


# -- tokenizers ------------------------------------------------------------------------------------------

TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken JSON": (write("tokenizer.json", "{"), ""),
    "empty": (write("tokenizer.json", ""), ""),
    "a list": (write("tokenizer.json", "[]"), ""),
    "no model": (write("tokenizer.json", "{}"), ""),
    "a broken setting": (write("tokenizer_config.json", "{"), ""),
    "a list for settings": (write("tokenizer_config.json", "[]"), ""),
    "missing": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "has no tokenizer"),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_a_damaged_tokenizer_is_refused(model_folder: Path, damage: str) -> None:
    change, word = TOKENIZERS[damage]
    change(model_folder)
    assert refused(model_folder, "tokenizer", str(model_folder), word)


def test_a_tokenizer_of_an_unknown_class_is_the_table_in_its_file(model_folder: Path) -> None:
    (model_folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    assert ask(model_folder).tokenizer.get_vocab() == tiny.tokenizer().get_vocab()


def test_a_tokenizer_larger_than_the_embeddings_is_refused_with_both_numbers(model_folder: Path) -> None:
    tiny.tokenizer(400).save_pretrained(model_folder)
    highest = max(tiny.tokenizer(400).get_vocab().values())
    refusal = refused(model_folder, f"token id {highest:,}", "320 embeddings", code=2)
    assert refusal and isinstance(refusal.error, ConfigError)


# -- models of another kind ------------------------------------------------------------------------------


def test_an_encoder_decoder_is_called_one(model_folder: Path) -> None:
    T5Config(vocab_size=320, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(model_folder)
    for how in (ask, train):
        assert refused(model_folder, "encoder-decoder model (t5)", how=how)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlavaConfig, ("llava", "its text part is a llama", "LlamaForCausalLM")),
        (Qwen3VLConfig, ("qwen3_vl", "no causal")),
    ],
)
def test_a_model_that_sees_is_called_one(model_folder: Path, config: Any, words: tuple[str, ...]) -> None:
    config().save_pretrained(model_folder)
    for how in (ask, train):
        assert refused(model_folder, "vision-language", "text-only", *words, how=how)


def test_an_encoder_is_not_taken_for_a_decoder(tmp_path: Path) -> None:
    """BERT loads as a causal model and answers like one, with the targets in sight."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    for how in (ask, train):
        assert refused(tmp_path / "bert", "not causal", "BertLMHeadModel", how=how)
    edit(tmp_path / "bert", is_decoder=True)
    assert not ask(tmp_path / "bert").is_described
