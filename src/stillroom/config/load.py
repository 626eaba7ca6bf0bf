"""Load and validate a configuration from a file, a preset and `a.b=c` overrides.

Schema defaults, preset, file and overrides are merged field by field; the later one wins. An error names the key
as the user wrote it, and its source.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from stillroom.config import legacy_json
from stillroom.config.data import SOURCE_TAGS
from stillroom.config.extensions import OBJECTIVES
from stillroom.config.objectives import ObjectivesConfig
from stillroom.config.schema import Config
from stillroom.errors import ConfigError

Table = dict[str, Any]

_MAX_BYTES = 1_000_000
_SHOWN = 120  # characters of a value in a message
_NUMBERS = ("float", "int", "constrained-int")  # pydantic's names of union branches


class Loaded:
    """A configuration and the notes made while it was read."""

    def __init__(self, config: Config, notes: tuple[str, ...] = ()) -> None:
        self.config = config
        self.notes = notes


def load_config(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Load the configuration of a run. `overrides` maps dotted keys to values and wins over the file."""
    return load(path, preset=preset, overrides=overrides).config


def load(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    notes: list[str] = []
    from_file: Table = {}
    where = "command line"
    if path is not None:
        from_file, where = read_file(Path(path)), str(path)
        if legacy_json.is_legacy(from_file):
            from_file, legacy_notes = legacy_json.translate(from_file)
            notes += legacy_notes
    preset = preset or from_file.pop("preset", None)
    table = read_preset(preset) if preset else {}
    table = merge(table, from_file)
    for key, value in (overrides or {}).items():
        put(table, key, value)
    return Loaded(build(table, where), tuple(notes))


def build(table: Table, where: str) -> Config:
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise explain(error, where) from None


def read_file(path: Path) -> Table:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = _read_text(path)
        is_json = kind == "JSON"
        table = json.loads(text, object_pairs_hook=_without_duplicates) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from None
    except ValueError as error:  # raised by both parsers, and for numbers with thousands of digits
        raise ConfigError(
            f"{path} is not valid {kind}: {error}",
            advice=["`stillroom presets base` prints a complete file to start from"],
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds a {type(table).__name__}, not a table of settings")
    return table


def _read_text(path: Path) -> str:
    try:
        if not path.exists():
            near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
            raise ConfigError(
                f"there is no configuration file {path}",
                advice=[
                    f"did you mean {path.parent / near[0]}?" if near else "check the path, or leave it out for the demo"
                ],
            )
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size / 1e6:,.0f} MB and is no configuration",
                advice=["data goes to --data, a model to --teacher or --student"],
            )
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            advice=["save it as UTF-8", "a model or data file is no configuration: see --teacher and --data"],
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Table:
    """Refuse a duplicate JSON key, as TOML does; `json` silently takes the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for place, (key, _value) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


# -- presets ---------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    folder = resources.files("stillroom.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    if name not in preset_names():
        near = difflib.get_close_matches(str(name), preset_names(), n=1)
        raise ConfigError(
            f"there is no preset {name!r}",
            advice=[f"did you mean {match!r}?" for match in near] + [f"presets: {', '.join(preset_names())}"],
        )
    return (resources.files("stillroom.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def read_preset(name: str) -> Table:
    return tomllib.loads(preset_text(name))


# -- tables ----------------------------------------------------------------------------------------------


def merge(base: Table, over: Table) -> Table:
    """Merge `over` into a copy of `base`, field by field."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def put(table: Table, key: str, value: Any) -> None:
    """Set a dotted key, creating the tables it needs."""
    *folders, last = key.split(".")
    for folder in folders:
        below = table.setdefault(folder, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {folder} is a value, not a section")
        # Write to a copy: a preset's table may be shared with other loads.
        table[folder] = dict(below)
        table = table[folder]
    table[last] = value


def parse_assignments(words: Sequence[str]) -> Table:
    """`["train.max_steps=10"]` -> {"train.max_steps": 10}. Values are TOML; a bare word is a string."""
    parsed: Table = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {word}: expected key=value", advice=["for example --set train.max_steps=100"])
        parsed[key.strip().replace("-", "_")] = _value(text.strip())
    return parsed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise ConfigError("a value of --set is nested too deeply") from None
    except ValueError:
        return {"none": None, "True": True, "False": False}.get(text, text)


# -- messages --------------------------------------------------------------------------------------------


def explain(error: ValidationError, where: str) -> ConfigError:
    """Rewrite a validation error with the keys of the configuration file."""
    lines: list[str] = []
    advice: list[str] = []
    for problem in error.errors():
        if _is_unintended_branch(problem):
            continue
        # pydantic puts the union branch into the location; leave it out.
        path = [str(part) for part in problem["loc"] if not _is_type(str(part))]
        key = ".".join(path) or "configuration"
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}")
            near = nearest_key(key)
            advice.append(
                f"did you mean {near}?" if near else f"keys of {path[0]}: {', '.join(_section_keys(path[0]))}"
            )
        else:
            message = problem["msg"].removeprefix("Value error, ")
            value = problem["input"]
            shown = "" if isinstance(value, dict | BaseModel) else f", got {_shortened(value)}"
            lines.append(f"{key}: {message}{shown}" if path else message)
    unique = list(dict.fromkeys(lines))
    return ConfigError("; ".join(unique), where=where, advice=list(dict.fromkeys(advice)))


def _shortened(value: Any) -> str:
    """The value's repr, with the middle of a long one cut out."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer with thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 4 :]}"


def _is_unintended_branch(problem: Mapping[str, Any]) -> bool:
    """Whether this is the error of the union branch (number or ramp) that the user did not mean."""
    branch = str(problem["loc"][-1]) if problem["loc"] else ""
    if "Ramp" in branch:  # or function-after[..., Ramp]
        return bool(problem["type"] == "model_type")
    return branch in _NUMBERS and isinstance(problem["input"], dict)


def _is_type(part: str) -> bool:
    return part in (*_NUMBERS, "Ramp", *SOURCE_TAGS) or part.startswith(("literal[", "tuple[", "function-after["))


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        kind = _section_of(info.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from all_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
    if model is ObjectivesConfig:
        loaded = OBJECTIVES.loaded()
        for name in (name for name in OBJECTIVES.names() if name not in model.model_fields):
            # An entry point that was not imported yields its name alone: composing a message imports nothing.
            yield from all_keys(loaded[name].section, f"{prefix}{name}.") if name in loaded else (f"{prefix}{name}",)


def _section_of(annotation: Any) -> Any:
    """The section of a field that may also be none; any other annotation as it is."""
    kinds = get_args(annotation)
    return kinds[0] if len(kinds) == 2 and kinds[1] is NoneType else annotation


def nearest_key(key: str) -> str | None:
    """The existing key nearest to a mistyped one, by its whole path or by its last part."""
    keys = list(all_keys())
    whole = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    last = key.rsplit(".", 1)[-1]
    by_last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(keys)}
    near = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)
    return by_last[near[0]] if near else None


def _section_keys(section: str) -> list[str]:
    keys = [key for key in all_keys() if key.startswith(f"{section}.")]
    return keys or list(Config.model_fields)
