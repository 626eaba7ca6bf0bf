"""A run's folder: who may write there, and what it says about itself."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from stillroom import __version__
from stillroom.checkpoint import write_atomically
from stillroom.config import Config
from stillroom.config.load import build
from stillroom.errors import ConfigError

# May change between a run and its resumption without making it another run.
_NOT_THE_RUN = ("train.max_minutes", "train.peer_timeout_minutes", "telemetry", "checkpoint")
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "stillroom": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def claim(folder: Path, config: Config) -> bool:
    """Make the folder ours. True when it holds a run of this very configuration, to be continued.

    A folder of another run, or of something else entirely, is refused and left as it is.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", where="--out", advice=["choose another folder with --out"])
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        description = {"config": config.to_dict(), "versions": versions(), "machine": machine()}
        write_atomically(folder / "config.json", json.dumps(description, indent=1).encode("utf-8"))
        return False
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} is not empty and holds no run of ours",
            where="--out",
            advice=["choose another folder with --out", "nothing in it was touched"],
        )
    other = read_config(folder)
    differences = differing_keys(other, config)
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ConfigError(
            f"{folder} holds a run of another configuration: {shown}",
            where="--out",
            advice=["choose another folder with --out", f"or continue that run: stillroom resume {folder}"],
        )
    return True


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder} holds no run: there is no config.json", advice=["give the folder of a run"])
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        return build(description["config"], str(path))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}", advice=["restore it from a backup"]) from None


def differing_keys(old: Config, new: Config) -> list[str]:
    """`key: old -> new` for every setting that makes the two different runs."""
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    return [
        f"{key} is {before.get(key)!r} there and {after.get(key)!r} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(_NOT_THE_RUN)
    ]


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else key))
    return flat


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def command_line() -> str:
    return " ".join(["stillroom", *sys.argv[1:]])
