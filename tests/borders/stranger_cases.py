"""Runs, models and caches that somebody else made: what they name is not believed, and nothing of theirs is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from border_cases import Case, Place, Words, add_each, case
from model_cases import as_student, as_teacher, edit_json

STRANGERS: list[Case] = []

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_TOUCH = "from pathlib import Path\nPath('unpickled').touch()\nraise SystemExit(99)\n"
_QUIET = ("--device", "cpu", "--no-progress")


def bring_code(folder: Path, **changes: Any) -> Path:
    """Give a model's folder code that leaves a file behind when it is run."""
    classes = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
    edit_json(folder / "config.json", auto_map=classes, **changes)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", "code.T"]})
    (folder / "code.py").write_text(_TOUCH)
    return folder


def given_run(place: Place, changes: dict[str, Any], *, is_finished: bool = False) -> Path:
    """A run of somebody else, whose settings name what they like. Keys have dots."""
    run = place.run(is_finished=is_finished)
    table = json.loads((run / "config.json").read_text())
    for key, value in changes.items():
        section = table["config"]
        *folders, last = key.split(".")
        for name in folders:
            section = section[name]
        section[last] = value
        table["paths"].pop(key, None)
    (run / "config.json").write_text(json.dumps(table))
    return run


# -- run folders that name code --------------------------------------------------------------------------


def _with_code(place: Place, role: str) -> Path:
    changes = {f"{role}.model": str(place.folder / "run" / "evil"), f"{role}.trust_remote_code": True}
    run = given_run(place, {**changes, f"{role}.revision": COMMIT})
    shutil.copytree(place.world / role, run / "evil")
    bring_code(run / "evil", model_type="nosuchmodel")
    return run


add_each(
    STRANGERS,
    2,
    {
        "resume_a_given_run_that_trusts_its_own_teacher": "teacher",
        "resume_a_given_run_that_trusts_its_own_student": "student",
    },
    lambda place, role: ["resume", str(_with_code(place, role)), *_QUIET],
    "--trust-remote-code",
)
add_each(
    STRANGERS,
    20,
    {
        "resume_a_given_run_with_trust_and_code_in_a_folder": "teacher",
        "resume_a_given_run_with_trust_and_a_student_in_a_folder": "student",
    },
    lambda place, role: [
        "resume",
        str(_with_code(place, role)),
        "--trust-remote-code",
        "--accept-changed-inputs",
        *_QUIET,
    ],
    "pins no folder",
)


@case(STRANGERS, 2, "--trust-remote-code")
def replay_a_given_run_that_trusts_its_own_teacher(place: Place) -> Words:
    run = _with_code(place, "teacher")
    (run / "quarantine").mkdir(exist_ok=True)
    return ["replay", str(run), "1", "--device", "cpu"]


def _local_code(place: Place, changes: dict[str, Any]) -> Words:
    folder = bring_code(place.copied("student", "model"), **changes)
    return place.distill(student__model=str(folder), student__trust_remote_code=True, student__revision=COMMIT)


add_each(
    STRANGERS,
    20,
    {
        "folder_with_code_and_a_revision": {"model_type": "nosuchmodel"},
        "folder_with_code_of_a_known_family_and_a_revision": {},
    },
    _local_code,
    "pins no folder",
)


@case(STRANGERS, 20)
def folder_with_a_tokenizer_of_its_own_code_and_a_revision(place: Place) -> Words:
    folder = bring_code(place.copied("student", "model"))
    edit_json(folder / "config.json", auto_map=None)
    return place.distill(student__model=str(folder), student__trust_remote_code=True, student__revision=COMMIT)


@case(STRANGERS, (0, 20))
def generate_from_a_given_run_with_code(place: Place) -> Words:
    run = place.run(is_finished=True)
    bring_code(run / "student")
    return ["generate", str(run), "--prompt", "the still", "--max-new-tokens", "2", "--device", "cpu"]


@case(STRANGERS, 20)
def export_a_given_run_with_code(place: Place) -> Words:
    run = place.run(is_finished=True)
    bring_code(run / "student", model_type="nosuchmodel")
    return ["export", str(run), "--out", "exported"]


# -- run folders that name addresses ---------------------------------------------------------------------

# Nothing listens there: a request would end otherwise than with 2.
_NOWHERE = "http://127.0.0.1:9/"
_SOURCES = [{"path": "s3://stranger/text.jsonl"}]

add_each(
    STRANGERS,
    2,
    {
        "resume_a_given_run_that_names_a_server": {"teacher.server": _NOWHERE},
        "resume_a_given_run_that_names_a_store_for_its_cache": {"teacher.cache": "s3://stranger/cache"},
        "resume_a_given_run_that_names_a_store_for_its_teacher": {"teacher.model": "s3://stranger/model"},
        "resume_a_given_run_that_names_a_store_for_its_student": {"student.model": "https://stranger.example/model"},
        "resume_a_given_run_that_names_a_store_for_its_data": {"data.train": "s3://stranger/text.jsonl"},
        "resume_a_given_run_that_names_a_store_among_its_data": {"data.train": _SOURCES},
        "resume_a_given_run_that_names_a_store_for_held_out_data": {"data.eval": "gs://stranger/text.jsonl"},
        "resume_a_given_run_that_allows_itself_a_base": {"teacher.allow_base": "s3://stranger"},
    },
    lambda place, changes: ["resume", str(given_run(place, changes)), *_QUIET],
    "--allow-address",
)


@case(STRANGERS, 2, "--allow-address")
def resume_a_given_run_whose_address_is_only_beside_the_allowed_one(place: Place) -> Words:
    run = given_run(place, {"teacher.cache": "s3://mine/../stranger/cache"})
    return ["resume", str(run), "--allow-address", "s3://mine", *_QUIET]


@case(STRANGERS, 2)
def resume_a_given_run_whose_path_is_an_address(place: Place) -> Words:
    """The settings name a file, and the table of where it lies an address."""
    run = place.run()
    table = json.loads((run / "config.json").read_text())
    table["paths"]["teacher.model"]["absolute"] = "s3://stranger/model"
    (run / "config.json").write_text(json.dumps(table))
    return ["resume", str(run), *_QUIET]


@case(STRANGERS, 2, "--allow-address")
def eval_a_given_run_that_names_a_store_for_its_teacher(place: Place) -> Words:
    run = given_run(place, {"teacher.model": "s3://stranger/model"}, is_finished=True)
    return ["eval", str(run), "--data", str(place.world / "train.jsonl"), "--device", "cpu"]


@case(STRANGERS, 2, "--allow-address")
def eval_a_given_run_that_names_a_store_for_its_data(place: Place) -> Words:
    run = given_run(place, {"data.eval": "s3://stranger/text.jsonl"}, is_finished=True)
    return ["eval", str(run), "--device", "cpu"]


@case(STRANGERS, 0)
def export_a_given_run_that_names_a_store_for_its_data(place: Place) -> Words:
    """Its text is not fetched: Python's own serves to compare."""
    changes = {"data.train": "s3://stranger/text.jsonl", "data.eval": _NOWHERE}
    return ["export", str(given_run(place, changes, is_finished=True)), "--out", "exported"]


# -- adapters --------------------------------------------------------------------------------------------


def _adapter(place: Place, told: dict[str, Any]) -> Words:
    folder = place.folder / "adapter"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place.world / "teacher" / name, folder / name)
    (folder / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    base = {"peft_type": "LORA", "base_model_name_or_path": str(place.world / "teacher")}
    (folder / "adapter_config.json").write_text(json.dumps({**base, **told}))
    return as_teacher(place, folder)


add_each(
    STRANGERS,
    20,
    {
        "adapter_over_an_address": {"base_model_name_or_path": "s3://stranger/model"},
        "adapter_over_a_web_page": {"base_model_name_or_path": _NOWHERE},
        "adapter_over_a_file_by_address": {"base_model_name_or_path": "file:///etc"},
        "adapter_over_a_number": {"base_model_name_or_path": 7},
        "adapter_that_names_a_module_to_import": {"megatron_config": {"a": 1}, "megatron_core": "stranger"},
        "adapter_of_other_adapters": {"peft_type": "XLORA", "adapters": {"0": "stranger/adapter"}},
    },
    _adapter,
    "adapter_config.json",
)


@case(STRANGERS, 20, "nowhere")
def adapter_over_an_allowed_address_that_is_not_there(place: Place) -> Words:
    base = f"file://{place.folder}/nowhere"
    return [*_adapter(place, {"base_model_name_or_path": base}), "--allow-base", base]


# -- names and kernels in a model's files ----------------------------------------------------------------


def _config(place: Place, changes: dict[str, Any]) -> Words:
    folder = place.copied("student", "model")
    edit_json(folder / "config.json", **changes)
    return as_student(place, folder)


add_each(
    STRANGERS,
    20,
    {
        "model_names_a_kernel_for_its_attention": {"attn_implementation": "stranger/kernel"},
        "model_names_a_kernel_by_the_private_key": {"_attn_implementation": "stranger/kernel:forward"},
        "model_names_a_kernel_by_the_internal_key": {"_attn_implementation_internal": "stranger/kernel"},
        "model_names_a_kernel_for_a_part": {"attn_implementation": {"": "sdpa", "text_config": "stranger/kernel"}},
        "model_names_a_kernel_in_a_part": {"text_config": {"attn_implementation": "stranger/kernel"}},
        "model_names_a_kernel_for_its_experts": {"experts_implementation": "stranger/kernel"},
    },
    _config,
    "implementation",
)


def _shard(place: Place, name: str) -> Words:
    folder = place.copied("student", "model")
    weights = folder / "model.safetensors"
    shutil.copy(weights, place.folder / "outside.safetensors")
    weights.rename(folder / ".hidden.safetensors")
    table = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    return as_student(place, folder)


add_each(
    STRANGERS,
    20,
    {
        "shard_above_the_folder": "../outside.safetensors",
        "shard_by_a_long_way_up": "a/../../outside.safetensors",
        "shard_that_is_hidden": ".hidden.safetensors",
        "shard_by_a_drive": "C:model.safetensors",
        "shard_with_a_nul": "model\0.safetensors",
        "shard_of_no_name": "",
    },
    _shard,
)
