"""Check the files of a model folder before a loader reads them.

Weights are read only from safetensors in the folder itself. Judge names, not resolved paths: the hub's cache is made
of links. A loader would follow an index to any file, and unpickle one that is not safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stillroom.config.schema import ModelSection, TeacherConfig
from stillroom.errors import BrokenAtStart, ConfigError, DataError, OutsideName
from stillroom.files import inside
from stillroom.models.load.source import Source, fetch, find
from stillroom.remote import is_below, is_url

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
COMPLETE = "check that the folder is complete and undamaged (config.json, tokenizer.json, model.safetensors)"
_NUMBERS = ("F64", "F32", "F16", "BF16")
_CODES = ("I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
_FOREIGN_ADAPTERS = ("XLORA", "MULTITASK_PROMPT_TUNING")  # they load files that their configuration names
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_weight_files(source: Source) -> list[str]:
    """The safetensors that will be read. Refuse a folder whose weights are not safetensors of its own."""
    if (source.folder / "generation_config.json").exists():
        read_json(source, "generation_config.json")  # a loader silently ignores a broken one
    named = read_json(source, "config.json").get("transformers_weights")
    if named is not None and str(named) not in (_SINGLE, _INDEX):
        raise BrokenAtStart(
            f"config.json of {source.name} names weights of its own, {named!r}: only {_SINGLE} and {_INDEX} are read",
            advice=["remove transformers_weights from config.json"],
        )
    if (source.folder / _SINGLE).is_file() and named != _INDEX:
        return _readable(source, [_SINGLE])
    if (source.folder / _INDEX).is_file():
        return _readable(source, _check_index(source))
    raise _without_safetensors(source, _SINGLE)


def _readable(source: Source, files: list[str]) -> list[str]:
    """Refuse unreadable files: safetensors are written for their owner alone, and the loader reports "no such file"."""
    for file in files:
        if not os.access(source.folder / file, os.R_OK):
            raise BrokenAtStart(
                f"{source.folder / file} cannot be read: Permission denied", advice=["check its permissions"]
            )
    return files


def check_adapter_files(source: Source) -> None:
    if not (source.folder / _ADAPTER).is_file():
        raise _without_safetensors(source, _ADAPTER)
    told = read_json(source, "adapter_config.json")
    if told.get("megatron_config") or str(told.get("peft_type")).upper() in _FOREIGN_ADAPTERS:
        raise BrokenAtStart(
            f"adapter_config.json of {source.name} names modules or files of other programs, which peft would load",
            advice=["give a model with the adapter merged"],
        )


def fetch_base(section: ModelSection, source: Source, *, weights: bool) -> Source:
    """The base model of an adapter. Files name hub ids, and of a folder of this machine also folders.

    An address needs the user's word, `allow_base`: it would be fetched with the user's keys.
    """
    base = read_json(source, "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BrokenAtStart(
            f"adapter_config.json of {source.name} names no base model", advice=["set base_model_name_or_path"]
        )
    if is_url(base) and not is_below(base, section.allow_base):
        raise BrokenAtStart(
            f"adapter_config.json of {source.name} names an address as its base model: {base}",
            where="base_model_name_or_path",
            advice=[
                f"if you trust it: --allow-base {base}",
                "or copy the base model to this machine, and name its folder in adapter_config.json",
            ],
        )
    is_foreign = source.is_of_hub or is_url(source.name)
    if is_foreign and not is_url(base) and not base.startswith("builtin:") and find(base).is_local:
        raise BrokenAtStart(
            f"the adapter {source.name} is not of this machine and names a folder here as its base model: {base}",
            where="base_model_name_or_path",
            advice=["copy the adapter to a folder of this machine, and check what it names"],
        )
    try:
        found = fetch(TeacherConfig(), base, weights=weights)
    except DataError as error:  # an address that cannot be read
        raise BrokenAtStart(
            f"the base model of {source.name} cannot be fetched: {error.what}", advice=error.advice
        ) from error
    if found.is_gguf:  # peft merges into networks that were loaded from a folder
        raise ConfigError(
            f"the base model {base} of the adapter {source.name} is a GGUF file, and adapters are merged into folders "
            "of safetensors only",
            where="base_model_name_or_path in adapter_config.json",
            advice=["name the folder or hub id that the adapter was trained on", "or give the model already merged"],
        )
    if found.is_adapter:
        raise BrokenAtStart(f"the base model {base} of {source.name} is an adapter itself", advice=["merge it first"])
    return found


def _without_safetensors(source: Source, wanted: str) -> BrokenAtStart:
    pickles = sorted(path.name for pattern in _PICKLES for path in source.folder.glob(pattern))
    if pickles:
        return BrokenAtStart(
            f"{source.name} has its weights only as {_listed(pickles)}, which is a pickle: reading one runs its code",
            advice=[
                "convert it where you trust it: load it with transformers and call save_pretrained(folder)",
                f"or get the {wanted} of the same model",
            ],
        )
    others = sorted(path.name for path in source.folder.glob("*.safetensors"))
    held = f"; it holds {_listed(others)}" if others else ""
    return BrokenAtStart(
        f"{source.name} has no {wanted} and no index of shards{held}",
        advice=[
            COMPLETE,
            "to train a student from scratch on its config.json: --set student.init=random",
        ],
    )


def _check_index(source: Source) -> list[str]:
    index = read_json(source, _INDEX)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise BrokenAtStart(f"{_INDEX} of {source.name} has no table of weights", advice=["get the file again"])
    shards = sorted(set(table.values()))
    foreign = [name for name in shards if not name.endswith(".safetensors") or not _is_within(source, name)]
    if foreign:
        raise BrokenAtStart(
            f"{_INDEX} of {source.name} names {_listed(foreign)}: only *.safetensors of the folder itself are read",
            advice=["get the folder from a place you trust"],
        )
    missing = [name for name in shards if not inside(source.folder, name).is_file()]
    if missing:
        raise BrokenAtStart(
            f"{source.name} lacks {len(missing)} of {len(shards)} shards: {_listed(missing)}",
            advice=["copy or download the missing files"],
        )
    return shards


def _is_within(source: Source, name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    try:
        return inside(source.folder, name).parent == source.folder
    except OutsideName:
        return False


def coded_weights(source: Source, files: list[str], is_number: Callable[[str], bool]) -> list[str]:
    """Quantised tensors of the files, which a loader would cast to floating point as if they were numbers.

    `is_number` says whether the model has a floating-point tensor of this name. A loader may rename the others: those
    are judged by dtypes that only quantised models use.
    """
    coded = []
    for file in files:
        with safe_open(source.folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                kind = str(tensors.get_slice(name).get_dtype())
                if kind not in _NUMBERS and (is_number(name) or kind in _CODES):
                    coded.append(f"{name} ({kind})")
    return coded


def read_json(source: Source, name: str) -> dict[str, Any]:
    """Read a JSON object from the folder. Raise with the name of the file."""
    path = source.folder / name
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenAtStart(
            f"{source.name} has no {name}",
            advice=[
                COMPLETE,
                *_below(path),
            ],
        ) from error
    except OSError as error:
        raise BrokenAtStart(f"{path} cannot be read: {error.strerror}", advice=["check its permissions"]) from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise BrokenAtStart(f"{path} is not valid JSON: {error}", advice=["get the file again"]) from error
    if not isinstance(table, dict):
        raise BrokenAtStart(f"{path} holds a {type(table).__name__}, not an object", advice=["get the file again"])
    return table


def _below(path: Path) -> list[str]:
    """Suggest subfolders that hold a model, such as `student` of a run's folder."""
    try:
        inner = sorted(path.parent.glob(f"*/{path.name}"))
    except OSError:
        return []
    return [f"did you mean {match.parent}?" for match in inner[:2]] if path.name == "config.json" else []


def _listed(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
