"""Resolve a folder, a hub id or a builtin name to a folder on this disk.

A hub model is downloaded as a folder of safetensors, configuration and tokenizer (never pickled weights), and is then
treated like any other folder. A name that looks like a path is never looked up on a hub.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from stillroom import builtin
from stillroom.config.schema import ModelSection
from stillroom.errors import AddressUnusable, BrokenAtStart, ConfigError
from stillroom.models.gguf import is_gguf
from stillroom.remote import here

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Not downloaded: variants, and consolidated copies for other programs.
_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
_LEFT_OUT = ("*/*",)
_HUB_SECONDS = 10.0
_FILE_ENDINGS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".json", ".toml", ".onnx", ".zip", ".tar.gz")


@dataclass(frozen=True)
class Source:
    """A model's name and folder, after builtin names are resolved."""

    name: str  # as the user wrote it
    path: str  # a folder, or a hub id that was not fetched yet
    is_local: bool
    note: str = ""  # how it was fetched, for the log
    is_of_hub: bool = False  # a commit that the hub vouches for, not whatever lies in a folder

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def is_gguf(self) -> bool:
        """Whether this is a GGUF file, which has no folder."""
        return self.is_local and is_gguf(self.folder)

    @property
    def is_adapter(self) -> bool:
        return self.is_local and (self.folder / "adapter_config.json").is_file()

    @property
    def has_weights(self) -> bool:
        """Whether the folder has weights of any kind. Pickled ones count, and are refused when read."""
        return (
            not self.is_local
            or self.is_gguf
            or any(
                any(self.folder.glob(pattern))
                for pattern in (
                    "*.safetensors",
                    "*.safetensors.index.json",
                    "*.bin",
                    "*.bin.index.json",
                    "*.pt",
                    "*.pth",
                )
            )
        )

    @property
    def has_tokenizer(self) -> bool:
        return self.is_gguf or any((self.folder / file).is_file() for file in _TOKENIZER_FILES)


def find(name: str) -> Source:
    """Resolve a name by the disk and the name alone. Fetches nothing but what lies behind an address."""
    if name.startswith("builtin:"):
        return _find_builtin(name)
    try:
        path = here(name).expanduser()
    except AddressUnusable as error:
        raise BrokenAtStart(f"there is no model to read: {error.what}", where=name, advice=error.advice) from error
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            return Source(name, str(path), is_local=True)
        if is_gguf(path):
            return Source(name, str(path), is_local=True)
        is_there = path.exists()
    except OSError as error:  # no permission, or not a valid file name
        raise BrokenAtStart(f"{name} cannot be read: {error.strerror}", advice=["check its permissions"]) from error
    if is_there:
        raise BrokenAtStart(
            f"{name} is a file, not a model folder",
            advice=[_WANTED, "a single file is read if it is GGUF and ends in .gguf"],
        )
    reason = _why_a_path(name)
    if reason:
        raise BrokenAtStart(f"there is no model folder {name}", where=reason, advice=[*_neighbours(path), _WANTED])
    return Source(name, name, is_local=False)


_WANTED = "give the folder that holds config.json and the *.safetensors files, or a hub id like org/name"


def _find_builtin(name: str) -> Source:
    short = name.removeprefix("builtin:")
    if short not in builtin.MODELS:
        near = difflib.get_close_matches(short, builtin.MODELS, n=1)
        raise ConfigError(
            f"there is no builtin model {short!r}",
            advice=[f"did you mean builtin:{match}?" for match in near]
            + ["builtin models: " + ", ".join(f"builtin:{model}" for model in builtin.MODELS)],
        )
    return Source(name, str(builtin.model_path(short)), is_local=True)


def _why_a_path(name: str) -> str:
    """Why a name that is not a folder must be a path; empty if it may be a hub id."""
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return "the name is that of a path"
    if "\\" in name or re.match(r"[A-Za-z]:", name):
        return "the name is that of a path"
    if name.lower().endswith(_FILE_ENDINGS):
        return "the name is that of a file"
    parent = name.rpartition("/")[0]
    if parent and Path(parent).is_dir():
        return f"the folder {parent} is here, so the name is taken for a path and not for a hub id"
    return ""


def _neighbours(path: Path) -> list[str]:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:  # no such folder, or not readable
        return []
    return [f"did you mean {path.parent / near}?" for near in difflib.get_close_matches(path.name, names, n=1)]


def fetch(section: ModelSection, name: str, *, weights: bool) -> Source:
    """The model as a folder on this disk. Download a hub model, or without a network take it from the hub's cache."""
    source = find(name)
    if source.is_local:
        return source
    wanted = [*_SMALL_FILES, *(("*.py",) if section.trust_remote_code else ())]
    folder = _download(source, section, wanted)
    if weights:
        folder = _download(source, section, [*wanted, *_WEIGHT_FILES, *_indexed(folder)])
    answer = _ask_hub(name, section.revision)
    note = ""
    if isinstance(answer, Exception):
        note = f"{name} is taken from the hub's cache as it is, because the hub did not answer: {one_line(answer)}"
    return replace(source, path=folder, is_local=True, note=note, is_of_hub=True)


def runs_code(section: ModelSection, source: Source) -> bool:
    """Whether code that comes with a model is run: where the user asked for it, and a commit of the hub pins it.

    Refuse code that no commit pins: that of a folder, and that of another repository.
    """
    if not section.trust_remote_code:
        return False
    places = [place for file in _MAPS for place in _mapped(source.folder / file)]
    foreign = [place for place in places if "--" in place]  # repository--module.Class
    if source.is_of_hub and not foreign:
        return True
    if not places:
        return False
    raise BrokenAtStart(
        f"{source.name} brings code of its own, which trust_remote_code runs only from a pinned commit of the hub: "
        + (f"{foreign[0]} is of another repository" if foreign else "a revision pins no folder"),
        where="trust_remote_code",
        advice=["name the hub id of the model and its commit", "or use a model that transformers knows"],
    )


_MAPS = ("config.json", "tokenizer_config.json")


def _mapped(path: Path) -> list[str]:
    """The classes that a file names as code of its own. A broken file is refused when it is read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        named = table.get("auto_map") or {}
        values = named.values() if isinstance(named, dict) else named  # an old tokenizer has a list
        return [str(one) for value in values for one in (value if isinstance(value, list) else [value]) if one]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []


@lru_cache(maxsize=64)
def _ask_hub(name: str, revision: str | None) -> str | Exception:
    """The current commit of a hub model, or the error. Asked once, so that all files are of one commit.

    The downloader's own request has no time limit, and transformers retries for over a minute.
    """
    try:
        return str(HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS).sha)
    except Exception as error:  # noqa: BLE001 - the caller raises it unless the cache has the model
        return error


def _download(source: Source, section: ModelSection, patterns: list[str]) -> str:
    answer = _ask_hub(source.name, section.revision)
    is_away = isinstance(answer, Exception)
    try:
        return str(
            snapshot_download(
                source.name,
                revision=section.revision if is_away else str(answer),
                allow_patterns=patterns,
                ignore_patterns=list(_LEFT_OUT),
                local_files_only=is_away,
            )
        )
    except MemoryError:
        raise
    except Exception as error:  # the hub raises many classes
        reason = one_line(answer if isinstance(answer, Exception) else error)
        raise BrokenAtStart(
            f"cannot fetch {source.name} from the hub: {reason}",
            advice=[
                "check the spelling of the hub id and the network; a private or gated model needs `hf auth login`",
                "for a folder on this disk, check the path: there is none of this name here",
                "download it elsewhere and give the folder instead",
                "with HF_HUB_OFFLINE=1 only models already in the cache can be used",
            ],
        ) from error


def _indexed(folder: str) -> list[str]:
    """Safetensors named by an index that the usual patterns miss. A broken index is refused when it is read."""
    try:
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({str(name) for name in index["weight_map"].values() if str(name).endswith(".safetensors")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def one_line(error: BaseException) -> str:
    """Format another library's error as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
