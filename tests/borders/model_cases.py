"""Model folders that are damaged, foreign, or something else than they claim."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from border_cases import Case, Place, Words, add_each, case
from safetensors.torch import load_file, save_file

MODELS: list[Case] = []


class Bomb:
    """Unpickling this creates a file: the file must never appear."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (Path("unpickled"),))


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text())
    for key, change in changes.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = change
    path.write_text(json.dumps(value))


def as_student(place: Place, folder: Path) -> Words:
    return place.distill(student__model=str(folder))


def as_teacher(place: Place, folder: Path) -> Words:
    return place.distill(teacher__model=str(folder))


# -- config.json -----------------------------------------------------------------------------------------


def _config_text(place: Place, text: str | bytes) -> Words:
    folder = place.copied("student", "model")
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return as_student(place, folder)


add_each(
    MODELS,
    20,
    {
        "model_config_empty": "",
        "model_config_broken_json": '{"model_type": "llama",',
        "model_config_is_a_list": "[]",
        "model_config_is_a_number": "7",
        "model_config_is_null": "null",
        "model_config_is_binary": b"\x00\xff\xfe\x80" * 100,
        "model_config_is_latin_1": '{"model_type": "llama", "x": "\xe9"}'.encode("latin-1"),
        "model_config_without_a_type": "{}",
        "model_config_of_an_unknown_type": '{"model_type": "nosuchmodel"}',
        "model_config_of_a_type_that_is_a_number": '{"model_type": 7}',
    },
    _config_text,
)


def _config_change(place: Place, changes: dict[str, Any]) -> Words:
    folder = place.copied("student", "model")
    edit_json(folder / "config.json", **changes)
    return as_student(place, folder)


add_each(
    MODELS,
    20,
    {
        "model_width_zero": {"hidden_size": 0},
        "model_width_negative": {"hidden_size": -32},
        "model_width_is_text": {"hidden_size": "wide"},
        "model_width_other_than_its_weights": {"hidden_size": 48},
        "model_layers_negative": {"num_hidden_layers": -1},
        "model_layers_more_than_its_weights": {"num_hidden_layers": 5},
        "model_heads_do_not_divide": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
        "model_vocabulary_other_than_its_weights": {"vocab_size": 999},
        "model_activation_unknown": {"hidden_act": "nosuchactivation"},
        "model_dtype_unknown": {"dtype": "float99"},
        "model_rope_unknown": {"rope_parameters": {"rope_type": "nosuchrope", "rope_theta": 1.0}},
    },
    _config_change,
)


@case(MODELS, 20, "trust_remote_code")
def model_with_code_of_its_own(place: Place) -> Words:
    folder = place.copied("student", "model")
    edit_json(
        folder / "config.json",
        model_type="nosuchmodel",
        auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    )
    (folder / "code.py").write_text("from pathlib import Path\nPath('unpickled').touch()\n")
    return as_student(place, folder)


# -- weights ---------------------------------------------------------------------------------------------


def _weights(place: Place, content: bytes | None) -> Words:
    folder = place.copied("teacher", "model")
    path = folder / "model.safetensors"
    if content is None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(content)
    return as_teacher(place, folder)


add_each(
    MODELS,
    20,
    {
        "weights_truncated": None,
        "weights_empty": b"",
        "weights_seven_bytes": b"1234567",
        "weights_are_text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "weights_are_a_zip": b"PK\x03\x04" + bytes(100),
        "weights_header_longer_than_the_file": struct.pack("<Q", 1 << 40) + b"{}",
        "weights_header_not_json": struct.pack("<Q", 8) + b"notjson!",
        "weights_header_lies_about_offsets": struct.pack("<Q", 60)
        + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999]}}  ',
        "weights_without_tensors": struct.pack("<Q", 2) + b"{}",
    },
    _weights,
)


@case(MODELS, 20, "lm_head")
def weights_without_a_head(place: Place) -> Words:
    return as_teacher(place, _without(place, "teacher", "lm_head.weight"))


@case(MODELS, 20, "layers.0")
def weights_without_a_layer(place: Place) -> Words:
    return as_student(place, _without(place, "student", "model.layers.0."))


def _without(place: Place, part: str, prefix: str) -> Path:
    folder = place.copied(part, "model")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@case(MODELS, 20, "model.embed_tokens.weight")
def weights_with_another_shape(place: Place) -> Words:
    folder = place.copied("student", "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:, :8].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return as_student(place, folder)


@case(MODELS, 20, "model.layers.77")
def weights_with_layers_too_many(place: Place) -> Words:
    folder = place.copied("student", "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.77.mlp.up_proj.weight"] = torch.ones(64, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return as_student(place, folder)


def _spoiled(place: Place, value: tuple[str, float]) -> Words:
    part, number = value
    folder = place.copied(part, "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return as_teacher(place, folder) if part == "teacher" else as_student(place, folder)


add_each(
    MODELS,
    20,
    {
        "weights_of_the_teacher_are_nan": ("teacher", float("nan")),
        "weights_of_the_student_are_nan": ("student", float("nan")),
        "weights_of_the_teacher_are_infinite": ("teacher", float("inf")),
    },
    _spoiled,
    "finite",
)


@case(MODELS, 20, "safetensors")
def weights_pickled_only(place: Place) -> Words:
    folder = place.copied("student", "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    return as_student(place, folder)


@case(MODELS, 20, "safetensors")
def weights_pickled_with_a_bomb(place: Place) -> Words:
    folder = place.copied("teacher", "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    return as_teacher(place, folder)


def _index(place: Place, index: object) -> Words:
    folder = place.copied("teacher", "model")
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    if isinstance(index, str):
        (place.folder / "outside.bin").write_bytes(pickle.dumps(Bomb()))
        target = index.format(folder=place.folder)
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, target)}
    (folder / "model.safetensors.index.json").write_text(
        index.decode() if isinstance(index, bytes) else json.dumps(index)
    )
    return as_teacher(place, folder)


add_each(
    MODELS,
    20,
    {
        "index_names_a_pickle_outside": "../outside.bin",
        "index_names_an_absolute_path": "{folder}/outside.bin",
        "index_names_a_pickle_inside": "pytorch_model.bin",
        "index_names_a_missing_shard": "model-00002-of-00002.safetensors",
        "index_is_a_list": [],
        "index_is_broken": b"{",
        "index_without_a_map": {"metadata": {}},
        "index_with_a_map_of_numbers": {"weight_map": {"lm_head.weight": 7}},
        "index_with_an_empty_map": {"weight_map": {}},
    },
    _index,
)

# -- tokenizers ------------------------------------------------------------------------------------------


def _tokenizer(place: Place, content: str | None) -> Words:
    folder = place.copied("teacher", "model")
    if content is None:
        for path in folder.glob("tokenizer*"):
            path.unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    return place.distill(teacher__model=str(folder), student__model=str(folder))


add_each(
    MODELS,
    20,
    {
        "tokenizer_missing": None,
        "tokenizer_empty": "",
        "tokenizer_broken": '{"version": "1.0", "model":',
        "tokenizer_is_a_list": "[]",
        "tokenizer_of_an_unknown_kind": '{"version": "1.0", "model": {"type": "NoSuch"}, "added_tokens": []}',
    },
    _tokenizer,
)


def _tokenizer_config(place: Place, content: str) -> Words:
    folder = place.copied("teacher", "model")
    (folder / "tokenizer_config.json").write_text(content)
    return place.distill(teacher__model=str(folder), student__model=str(folder))


add_each(
    MODELS,
    20,
    {"tokenizer_config_broken": "{", "tokenizer_config_is_a_list": "[]"},
    _tokenizer_config,
)


@case(MODELS, (2, 20), "319")
def tokenizer_larger_than_the_embeddings(place: Place) -> Words:
    import tiny

    folder = tiny.save_model(place.folder / "model", width=16, num_layers=1, vocab_size=64, with_tokenizer=False)
    tiny.tokenizer().save_pretrained(folder)
    return place.distill(student__model=str(folder), objectives__kd__weight=0.0, objectives__ce__weight=1.0)


@case(MODELS, (2, 20), "vocabular")
def tokenizer_other_than_the_teachers(place: Place) -> Words:
    import tiny

    folder = tiny.save_model(place.folder / "model", width=16, num_layers=1, vocab_size=300)
    return as_student(place, folder)


# -- not a model of this kind ----------------------------------------------------------------------------


def _foreign(place: Place, content: str) -> Words:
    import transformers

    folder = place.copied("student", "model")
    name, options = content.split(" ", 1)
    config = getattr(transformers, name)(**json.loads(options))
    (folder / "config.json").write_text(config.to_json_string())
    return as_teacher(place, folder)


add_each(
    MODELS,
    20,
    {
        "model_is_an_encoder": 'BertConfig {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 320}',
        "model_is_an_encoder_and_decoder": 'T5Config {"d_model": 32, "num_layers": 1, "vocab_size": 320}',
        "model_sees_pictures": "LlavaConfig {}",
        "model_sees_pictures_too": "Qwen3VLConfig {}",
    },
    _foreign,
)


@case(MODELS, 20, "BERT")
def model_is_not_causal(place: Place) -> Words:
    import tiny
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    folder = place.folder / "bert"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertLMHeadModel(BertConfig(**sizes, vocab_size=tiny.VOCAB)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return as_teacher(place, folder)


# -- folders and names -----------------------------------------------------------------------------------

add_each(
    MODELS,
    (2, 20),
    {
        "name_of_nothing": "./no/such/folder",
        "name_of_nothing_that_looks_local": "no/such/folder",
        "name_empty": "",
        "name_blank": "   ",
        "name_with_a_newline": "a\nb",
        "name_with_an_escape": "\x1b[31mred",
        "name_very_long": "x" * 5000,
        "name_with_a_nul": "a\0b",
        "name_of_no_builtin": "builtin:techer",
        "name_with_dots": "../../..",
    },
    lambda place, name: place.distill(student__model=name),
)


@case(MODELS, 20)
def folder_is_empty(place: Place) -> Words:
    (place.folder / "model").mkdir()
    return as_student(place, place.folder / "model")


@case(MODELS, 20)
def folder_is_a_file(place: Place) -> Words:
    return as_student(place, place.file("model", "weights"))


@case(MODELS, 20)
def folder_holds_a_folder_as_weights(place: Place) -> Words:
    folder = place.copied("student", "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return as_student(place, folder)


@case(MODELS, 20)
def folder_links_to_itself(place: Place) -> Words:
    folder = place.copied("student", "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    return as_student(place, folder)


def _adapter(place: Place, content: str) -> Words:
    folder = place.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(content)
    return as_teacher(place, folder)


add_each(
    MODELS,
    20,
    {
        "adapter_broken": "{",
        "adapter_without_weights": '{"peft_type": "LORA", "base_model_name_or_path": "./nowhere"}',
    },
    _adapter,
)


def _lora(place: Place, **changes: Any) -> Path:
    """A sound adapter over a copy of the student, with its configuration changed."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = place.copied("student", "base")
    network = AutoModelForCausalLM.from_pretrained(base)
    folder = place.folder / "adapter"
    get_peft_model(network, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(base), **changes)
    for path in base.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


_ENDLESS = r"(([a-z_.0-9]+)+)+#"  # no name ends in the sign, and every split of every name is tried

add_each(
    MODELS,
    20,
    {
        "adapter_targets_endless": {"target_modules": _ENDLESS},
        "adapter_exclusions_endless": {"exclude_modules": _ENDLESS},
        "adapter_ranks_endless": {"rank_pattern": {_ENDLESS: 4}},
    },
    lambda place, changes: as_teacher(place, _lora(place, **changes)),
    "pattern",
)


@case(MODELS, 2, "gguf")
def adapter_over_a_gguf_file(place: Place) -> Words:
    import gguf_files

    folder = _lora(place)
    path = gguf_files.write(place.folder / "base", place.folder / "base.gguf")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(path))
    return as_teacher(place, folder)


@case(MODELS, 2, "gguf")
def adapter_over_a_gguf_file_is_planned(place: Place) -> Words:
    return ["plan", *adapter_over_a_gguf_file(place)[6:]]


# -- sizes without end -----------------------------------------------------------------------------------

add_each(
    MODELS,
    20,
    {
        "model_layers_ten_million": {"num_hidden_layers": 10**7},
        "model_layers_beyond_any_number": {"num_hidden_layers": 10**400},
        "model_experts_ten_million": {"model_type": "mixtral", "num_local_experts": 10**7},
    },
    _config_change,
    "num_",
)


def _tokenizer_part(place: Place, changes: dict[str, Any]) -> Words:
    folder = place.copied("teacher", "model")
    edit_json(folder / "tokenizer.json", **changes)
    return place.distill(teacher__model=str(folder), student__model=str(folder))


def _replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


add_each(
    MODELS,
    20,
    {
        "tokenizer_expands_a_letter_a_million_times": {"normalizer": _replaced("e", "e" * 10**6)},
        "tokenizer_doubles_forty_times": {
            "normalizer": {"type": "Sequence", "normalizers": [_replaced(" ", "  ")] * 40}
        },
        "tokenizer_writes_a_million_letters_for_a_token": {"decoder": _replaced("e", "e" * 10**6)},
    },
    _tokenizer_part,
    "tokenizer",
)

# -- panics: errors of Rust that are no `Exception` ------------------------------------------------------

add_each(
    MODELS,
    20,
    {
        "tokenizer_panics_when_loaded": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
        "tokenizer_panics_on_a_text": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "tokenizer_panics_on_a_character": {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAGFiYw=="}
        },
        "tokenizer_panics_on_a_word_of_the_data": {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "spirits(([a-z ,]+)+)+#"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "tokenizer_panics_when_decoding": {"decoder": {"type": "Strip", "content": "e", "start": 10, "stop": 10}},
        "tokenizer_panics_on_truncation": {
            "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
        },
        "tokenizer_knows_no_unknown_token": {
            "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"the": 0, "<|end|>": 1, "<|pad|>": 2}},
        },
    },
    _tokenizer_part,
    "tokenizer",
)
