"""What a cache is: whose answers, to which tokens, reduced how. Written once, compared whenever the cache is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.core.errors import CacheDamaged, ConfigError
from stillroom.core.files import reason_of
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
    teacher: Mapping[str, Any]  # what makes it this teacher: `teacher_identity` in models/files.py
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
