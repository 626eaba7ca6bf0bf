"""Find the local files of a configuration when a run is resumed from another directory or was moved.

Each path is stored twice: absolute, and relative to the run's folder. The absolute path is used while it exists; after
the tree was moved, the relative one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.config import Config
from stillroom.remote import is_url

_MODELS = ("teacher.model", "student.model")
_DATA = ("data.train", "data.eval")
_FOLDERS = ("teacher.cache",)
KEYS = (*_MODELS, *_DATA, *_FOLDERS)
_SOURCE = "data.train."  # with the number of the source, where there are several
_NOT_FILES = ("builtin:", "hf:")


def local_paths(config: Config) -> dict[str, str]:
    """The absolute path of each setting that names local files, from the current directory."""
    absolute_paths = {}
    for key in _keys(config):
        given = _get(config, key)
        if not given or given.startswith(_NOT_FILES) or is_url(given) or (key in _FOLDERS and given == "auto"):
            continue
        path = Path(given).expanduser().absolute()
        # A model's name may be a hub id, or a file (GGUF); data and caches without a prefix are files.
        if key not in _MODELS or path.exists():
            absolute_paths[key] = os.path.normpath(path)
    return absolute_paths


def describe(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """The paths of a configuration as config.json stores them."""
    here = folder.resolve()
    return {
        key: {"given": str(_get(config, key)), "absolute": path, "relative": os.path.relpath(path, here)}
        for key, path in local_paths(config).items()
    }


def resolved(config: Config, known: Mapping[str, Any], folder: Path) -> Config:
    """The configuration with each stored path in the form that exists."""
    changes = {}
    for key, forms in known.items():
        if key in _keys(config) and isinstance(forms, Mapping) and _get(config, key) == forms.get("given"):
            absolute = str(forms["absolute"])
            moved = os.path.normpath(folder.resolve() / str(forms["relative"]))
            changes[key] = moved if not _exists(absolute) and _exists(moved) else absolute
    return _with(config, changes)


def absolute(config: Config, known: Mapping[str, Any], resolved_there: Config) -> Config:
    """The configuration with absolute paths, to be compared with that of a folder.

    A path that does not exist here and equals the one given when the run began means the same file.
    """
    here = local_paths(config)
    for key, forms in known.items():
        if key not in _keys(config) or not isinstance(forms, Mapping) or _get(config, key) != forms.get("given"):
            continue
        if key not in here or not _exists(here[key]):
            here[key] = str(_get(resolved_there, key))
    return _with(config, here)


def is_same_file(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and os.path.realpath(one) == os.path.realpath(other)


def _exists(path: str) -> bool:
    if glob.has_magic(path) and not Path(path).exists():
        return bool(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob refuses absolute patterns
    return Path(path).exists()


def _keys(config: Config) -> tuple[str, ...]:
    """The settings that may name local files. Each of several sources has its own."""
    train = config.data.train
    if isinstance(train, str):
        return KEYS
    return (*_MODELS, *(f"{_SOURCE}{place}" for place in range(len(train))), "data.eval", *_FOLDERS)


def _get(config: Config, key: str) -> str | None:
    if key.startswith(_SOURCE):
        return config.data.sources[int(key.removeprefix(_SOURCE))].path
    section, name = key.split(".")
    value: str | None = getattr(getattr(config, section), name)
    return value


def _with(config: Config, changes: Mapping[str, str]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    train = list(config.data.train)
    for key, value in changes.items():
        if key.startswith(_SOURCE):
            place = int(key.removeprefix(_SOURCE))
            train[place] = config.data.train[place].model_copy(update={"path": value})  # type: ignore[union-attr]
            sections.setdefault("data", {})["train"] = tuple(train)
            continue
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    return config.model_copy(update=update)
