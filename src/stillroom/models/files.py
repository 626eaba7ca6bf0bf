"""Check the files of a model folder before a loader reads them.

Weights are read only from safetensors in the folder itself. Judge names, not resolved paths: the hub's cache is made
of links. A loader would follow an index to any file, and unpickle one that is not safetensors.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open

from stillroom import builtin
from stillroom.config.schema import ModelSection, StudentConfig, TeacherConfig
from stillroom.core.errors import AddressUnusable, BrokenAtStart, ConfigError, DataError, OutsideName
from stillroom.core.files import inside, is_url, reason_of
from stillroom.core.remote import here, is_below

# -- source ----------------------------------------------------------------------------------------
# Resolve a folder, a hub id or a builtin name to a folder on this disk.
#
# A hub model is downloaded as a folder of safetensors, configuration and tokenizer (never pickled weights), and is
# then treated like any other folder. A name that looks like a path is never looked up on a hub.


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Not downloaded: variants, and consolidated copies for other programs.
_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
_ANY_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")
_HUB_SECONDS = 10.0
_FILE_ENDINGS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".json", ".toml", ".onnx", ".zip", ".tar.gz")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


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
        return not self.is_local or self.is_gguf or any(any(self.folder.glob(one)) for one in _ANY_WEIGHTS)

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
        f"{source.name} brings its own code, which trust_remote_code runs only from a pinned commit of the hub: "
        + (f"{foreign[0]} is of another repository" if foreign else "a revision pins no folder"),
        where="trust_remote_code",
        advice=["name the hub id of the model and its commit", "or use a model that transformers knows"],
    )


_MAPS = ("config.json", "tokenizer_config.json")


def _mapped(path: Path) -> list[str]:
    """The classes that a file names as its own code. A broken file is refused when it is read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        named = table.get("auto_map") or {}
        values = named.values() if isinstance(named, dict) else named  # an old tokenizer has a list
        return [str(one) for value in values for one in (value if isinstance(value, list) else [value]) if one]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []


@lru_cache(maxsize=64)
def _ask_hub(name: str, revision: str | None) -> str | Exception:
    """The current commit of a hub model, or the error. Cached, so that all files are of one commit.

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
        folder = snapshot_download(
            source.name,
            revision=section.revision if is_away else str(answer),
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=is_away,
        )
        return str(folder)
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


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
COMPLETE = "check that the folder is complete and undamaged (config.json, tokenizer.json, model.safetensors)"
_NUMBERS = ("F64", "F32", "F16", "BF16")
_CODES = ("I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
_FOREIGN_ADAPTERS = ("XLORA", "MULTITASK_PROMPT_TUNING")  # they load files that their configuration names
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_weight_files(source: Source) -> list[str]:
    """The safetensors that will be read. Refuse a folder whose weights are not its own safetensors."""
    if (source.folder / "generation_config.json").exists():
        read_json(source, "generation_config.json")  # a loader silently ignores a broken one
    named = read_json(source, "config.json").get("transformers_weights")
    if named is not None and str(named) not in (_SINGLE, _INDEX):
        raise BrokenAtStart(
            f"config.json of {source.name} names its own weights, {named!r}: only {_SINGLE} and {_INDEX} are read",
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


# Regular expressions come with an adapter, and one that backtracks without end would hang the process: Python cannot
# interrupt a match. So they are tried in a process that can be ended, before peft matches names with them.
_PATTERN_SECONDS = 5.0  # ordinary patterns take milliseconds for ten thousand names
_PLAIN = re.compile(r"[\w.\-]*")
# In the forms in which peft uses a pattern. One that does not compile is left for peft to report.
_TRIAL = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    start, end = rf"(?:^|.*?\.){pattern}", rf"{pattern}($|\..*)"
    for form in (pattern, rf"(.*\.)?({pattern})$", rf"(^|.*\.){end}", rf"{start}\.(?P<i>\d+)\."):
        for name in names:
            re.match(form, name), re.fullmatch(form, name)
"""


def check_patterns(config: Mapping[str, Any], names: Sequence[str], adapter: str) -> None:
    """Raise if a pattern does not come to an end on the names of a network's parts."""
    patterns = [pattern for pattern in _patterns(config) if not _PLAIN.fullmatch(pattern)]
    if not patterns:
        return
    trial = json.dumps([patterns, list(names)]).encode()
    command = [sys.executable, "-I", "-c", _TRIAL]
    try:
        subprocess.run(command, input=trial, timeout=_PATTERN_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise BrokenAtStart(
            f"adapter_config.json of {adapter} has a pattern that does not come to an end on the names of its base",
            where="target_modules, exclude_modules, rank_pattern ...",
            advice=["list the names of the layers in target_modules", "get the adapter from a place you trust"],
        ) from None


def _patterns(config: Mapping[str, Any]) -> list[str]:
    """Every string of a configuration that peft may use as a pattern."""
    keys = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters")
    found: list[Any] = []
    for key in (*keys, "rank_pattern", "alpha_pattern"):
        value = config.get(key)
        found += value if isinstance(value, list | dict) else [value]  # of a table, its keys
    return [pattern for pattern in found if isinstance(pattern, str)]


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
            f"{source.name} has its weights only as {listed(pickles)}, which is a pickle: reading one runs its code",
            advice=[
                "convert it where you trust it: load it with transformers and call save_pretrained(folder)",
                f"or get the {wanted} of the same model",
            ],
        )
    others = sorted(path.name for path in source.folder.glob("*.safetensors"))
    held = f"; it holds {listed(others)}" if others else ""
    return BrokenAtStart(
        f"{source.name} has no {wanted} and no index of shards{held}",
        advice=[COMPLETE, "to train a student from scratch on its config.json: --set student.init=random"],
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
            f"{_INDEX} of {source.name} names {listed(foreign)}: only *.safetensors of the folder itself are read",
            advice=["get the folder from a place you trust"],
        )
    missing = [name for name in shards if not inside(source.folder, name).is_file()]
    if missing:
        raise BrokenAtStart(
            f"{source.name} lacks {len(missing)} of {len(shards)} shards: {listed(missing)}",
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
        raise BrokenAtStart(f"{source.name} has no {name}", advice=[COMPLETE, *_below(path)]) from error
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


def listed(names: list[str], most: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# -- written ---------------------------------------------------------------------------------------
# The folder of a model whose weights another program writes: everything except them, and the model read back.


def save_configuration(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """What `save_pretrained` writes besides the weights; `dtype` where they are written in another than the model's."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype or model.dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def open_written(model: Any, folder: Path) -> Any:
    """A model of the same class from a folder, in FP32 and in evaluation mode."""
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


# -- identity: a hash of the weights as they lie in their files, however these are cut into shards ---------------

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
        raise BrokenAtStart(f"{path} is not a safetensors file: {reason_of(error)}", advice=["get it again"]) from error


def _json_hash(value: Any) -> str:
    return _short(json.dumps(value, sort_keys=True))


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()[:16]
