"""What a cache is: whose answers, to which tokens, reduced how. Written once, compared whenever the cache is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart, CacheDamaged, ConfigError
from stillroom.core.files import reason_of
from stillroom.models.files import check_weight_files, fetch, fetch_base, is_gguf, read_json
from stillroom.teachers.cache.format import id_bytes
from stillroom.teachers.signals import ENTROPY_STEP, LOG_STEP, SignalSpec

NAME, SHARDS = "cache.json", "shards"
FORMAT, VERSION = "stillroom teacher cache", 1
SHARD_TOKENS = 32_768  # rows of so many tokens make a shard: what a kill can cost
_STEPS = {"log_prob": 1.0 / LOG_STEP, "entropy": 1.0 / ENTROPY_STEP}  # codes in a nat


@dataclass(frozen=True)
class Manifest:
    """The identity of a cache. `about` is for people and compared with nothing."""

    signal: SignalSpec
    vocab_size: int
    tokenizer: str  # hash of the table of tokens
    teacher: Mapping[str, Any]  # what makes it this teacher: see identity.py
    about: Mapping[str, Any] = field(default_factory=dict)
    shard_tokens: int = SHARD_TOKENS

    @property
    def id_bytes(self) -> int:
        return id_bytes(self.vocab_size)

    @property
    def store(self) -> str:
        """A name for all that two shards must have in common to belong together."""
        told = json.dumps(self._identity(), sort_keys=True)
        return hashlib.blake2b(told.encode("utf-8"), digest_size=16).hexdigest()

    def _identity(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "steps": _STEPS,
            "signal": self.signal.to_dict(),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "teacher": dict(self.teacher),
        }

    def to_bytes(self) -> bytes:
        told = {"format": FORMAT, **self._identity(), "shard_tokens": self.shard_tokens, "about": dict(self.about)}
        return json.dumps(told, indent=1, sort_keys=True).encode("utf-8") + b"\n"


def is_there(folder: Path) -> bool:
    return (folder / NAME).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no teacher cache: there is no {NAME}",
            where="teacher.cache",
            advice=[f"write one: stillroom cache CONFIG --out {folder}", "check the path"],
        )
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or found["version"] != VERSION or found["steps"] != _STEPS:
            raise ConfigError(
                f"{path} is of another version of the format: {found.get('version')!r}, and this one reads {VERSION}",
                advice=["write the cache again with this version"],
            )
        return Manifest(
            SignalSpec.of_dict(found["signal"]),
            int(found["vocab_size"]),
            str(found["tokenizer"]),
            dict(found["teacher"]),
            dict(found.get("about", {})),
            int(found["shard_tokens"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CacheDamaged(
            f"{path} is damaged: {reason_of(error)}",
            advice=["restore it from a copy", "or write the cache again into another folder"],
        ) from error


def differences(there: Manifest, here: Manifest) -> list[str]:
    """What a cache is and what is asked for, named where they are not the same."""
    found = [*_unlike("teacher.signal", there.signal.to_dict(), here.signal.to_dict())]
    found += _unlike("teacher", there.teacher, here.teacher)
    if there.tokenizer != here.tokenizer:
        found.append(f"the tokenizer's hash is {there.tokenizer} in the cache and {here.tokenizer} here")
    if there.vocab_size != here.vocab_size:
        found.append(f"the vocabulary has {there.vocab_size:,} tokens in the cache and {here.vocab_size:,} here")
    return found


def _unlike(prefix: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is unknown on one side (None) is compared with nothing: imported answers do not say whose they are."""
    names = {"temperature": "objectives.kd.temperature"} if prefix == "teacher.signal" else {}
    both = {**there, **here}
    return [
        f"{names.get(key, f'{prefix}.{key}')} is {there.get(key)} in the cache and {here.get(key)} here"
        for key in both
        if there.get(key) != here.get(key) and not (prefix == "teacher" and None in (there.get(key), here.get(key)))
    ]


def check_same(there: Manifest, here: Manifest, folder: Path) -> None:
    if unlike := differences(there, here):
        raise ConfigError(
            f"{folder} is not the cache of this configuration: {'; '.join(unlike)}",
            where="teacher.cache",
            advice=[
                "set these as they are in the cache",
                "or write another cache: stillroom cache CONFIG --out ANOTHER",
            ],
        )


# -- identity --------------------------------------------------------------------------------------
# Which model it is: a hash of its weights as they lie in its files, however these are cut into shards.


_CHUNK = 1 << 22
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


def teacher_identity(section: TeacherConfig, dtype: torch.dtype | str | None) -> dict[str, Any]:
    """What must be the same for the answers to be the same. `dtype` None: missing."""
    if section.server:
        return {"served_model": section.requests.model}
    files, config = _of_files(section)
    quantisation = section.quantisation if config is None else _quantisation(section, config)
    named = None if dtype is None else str(dtype).removeprefix("torch.")
    return {**files, "quantisation": quantisation, "dtype": named}


def student_identity(section: StudentConfig) -> dict[str, Any]:
    """What must be the same for a student to begin the same: of one drawn at random, its configuration alone."""
    source = fetch(section, section.model, weights=section.init != "random")
    return _of_files(section, has_weights=section.init != "random" and source.has_weights)[0]


def _of_files(
    section: StudentConfig | TeacherConfig, *, has_weights: bool = True
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Hashes of a model's files, and its config.json; None for a GGUF file, which is everything."""
    source = fetch(section, section.model, weights=has_weights)
    if source.is_gguf:
        weights = weights_hash(source.folder.parent, [source.folder.name])
        return {"weights": weights, "config": "gguf", "adapter": "none"}, None
    adapter, base = None, source
    if source.is_adapter:
        told = read_json(source, "adapter_config.json")
        base = fetch_base(section, source, weights=True)
        files = sorted(path.name for path in source.folder.glob("adapter_model*.safetensors"))
        adapter = _short(_json_hash(told), weights_hash(source.folder, files))
    config = read_json(base, "config.json")
    found = {
        "weights": weights_hash(base.folder, check_weight_files(base)) if has_weights else "none",
        "config": _json_hash({key: value for key, value in config.items() if key not in _NOT_THE_MODEL}),
        "adapter": adapter or "none",
    }
    if section.trust_remote_code:
        found["code"] = _short(*(path.read_text("utf-8", "replace") for path in sorted(base.folder.glob("*.py"))))
    return found, config


def _quantisation(section: TeacherConfig, config: dict[str, Any]) -> str:
    """How the files are quantised, and how the teacher is when it is loaded."""
    of_files = config.get("quantization_config")
    kinds = [*([_json_hash(of_files)] if of_files else []), section.quantisation]
    return "+".join(kind for kind in kinds if kind != "none") or "none"


def weights_hash(folder: Path, files: list[str]) -> str:
    """Over name, type, shape and bytes of every tensor, by name: copies that are cut differently have one hash."""
    paths = tuple(folder / file for file in files)
    try:
        stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    except OSError as error:
        raise BrokenAtStart(f"{folder} cannot be read: {reason_of(error)}", advice=["check the disk"]) from error
    return _hash(paths, stamps)


@lru_cache(maxsize=8)
def _hash(paths: tuple[Path, ...], _stamps: tuple[tuple[int, int], ...]) -> str:
    """Gigabytes are read once in a process, while the files stay as they are."""
    digest = hashlib.sha256()
    for _name, told, path, begin, length in sorted(tensor for one in paths for tensor in _tensors(one)):
        digest.update(told.encode("utf-8"))
        try:
            with path.open("rb") as opened:
                opened.seek(begin)
                left = length
                while left:
                    part = opened.read(min(_CHUNK, left))
                    if not part:
                        raise BrokenAtStart(f"{path} was cut short", advice=["get the file again"])
                    digest.update(part)
                    left -= len(part)
        except OSError as error:
            raise BrokenAtStart(f"{path} cannot be read: {reason_of(error)}", advice=["check the disk"]) from error
    return digest.hexdigest()[:32]


def _tensors(path: Path) -> list[tuple[str, str, Path, int, int]]:
    """(name, name with type and shape, file, where its bytes begin, how many) of every tensor of a safetensors file.

    A GGUF file is one stretch of bytes: its header says what the model is.
    """
    if is_gguf(path):
        return [("", "gguf\n", path, 0, path.stat().st_size)]
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, 1 << 28)))
        return [
            (
                name,
                f"{name} {entry['dtype']} {entry['shape']}\n",
                path,
                8 + length + int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenAtStart(f"{path} is no safetensors file: {reason_of(error)}", advice=["get it again"]) from error


def _json_hash(value: Any) -> str:
    return _short(json.dumps(value, sort_keys=True))


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()[:16]
