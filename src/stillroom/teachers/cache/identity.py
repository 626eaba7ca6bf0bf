"""Which model it is: a hash of its weights as they lie in its files, however these are cut into shards."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.errors import BrokenAtStart
from stillroom.files import reason_of
from stillroom.models.gguf import is_gguf
from stillroom.models.load.files import check_weight_files, fetch_base, read_json
from stillroom.models.load.source import fetch

_CHUNK = 1 << 22
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


def teacher_identity(section: TeacherConfig, dtype: torch.dtype | str | None) -> dict[str, Any]:
    """What must be the same for the answers to be the same. `dtype` None: not said."""
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
