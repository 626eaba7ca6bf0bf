"""Load and validate a configuration from a file, a preset and `a.b=c` overrides.

Schema defaults, preset, file and overrides are merged field by field; the later one wins. An error names the key
as the user wrote it, and its source. Below, in order: load, paths, files and presets, tables, messages, settings that
were given and are never read, those that are missing, and the three other forms of a configuration: a dry run's, TOML,
and legacy JSON.
"""

from __future__ import annotations

import difflib
import glob
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from stillroom.config.schema import (
    DIVERGENCES,
    OBJECTIVES,
    SOURCE_TAGS,
    TRAINING_MODES,
    Config,
    Layout,
    ObjectivesConfig,
)
from stillroom.core.errors import ConfigError

# -- load -------------------------------------------------------------------------------------------------
# Merge the sources and validate the result.

Table = dict[str, Any]
_MAX_BYTES = 1_000_000
_SHOWN = 120  # characters of a value in a message
_NUMBERS = ("float", "int", "constrained-int")  # pydantic's names of union branches

# Settings that older versions had: (the default, which their run folders store; what became of it).
REMOVED: dict[str, tuple[Any, str]] = {
    "teacher.ranks": (0, "cache the teacher (teacher.cache) or serve it (teacher.server); teacher.placement = 'shard' "
                      "shares its weights"),
    "teacher.router.augmentation_lambda": (0.05, "knowledge-augmentation draws the experts of 0.05 of the tokens"),
    "teacher.router.augmentation_passes": (2, "knowledge-augmentation takes 2 teacher passes"),
    "teacher.router.offset_bound": (0.5, "an offset of sar-transient is 0.5 gate logits long"),
    "teacher.signal.draw_seed": (0, "draws depend on the content of each row alone"),
    "student.shrink.calibration_batches": (8, "widths are ranked on 8 batches of training data"),
    "student.shrink.choice_tokens": (768, "layers are chosen by 768 tokens of training data"),
    "data.short_first_share": (0.3, "data.order = 'short_first' sorts the rows of the first 0.3 of the steps"),
    "objectives.kd.label_margin": (0.2, "with on_wrong_teacher = 'mft' the label leads by 0.2"),
    **{
        f"objectives.{name}.projector": ("auto", "a projector is trained where the widths of the two models differ")
        for name in ("feature", "layerwise", "contrastive", "span_hidden")
    },
    "precision.min_loss_scale": (1.0, "the smallest loss scale is 1"),
    "guard.spike_window": (50, "medians are over the last 50 accepted steps; guard.spike_z says what a spike is"),
    "guard.spike_warmup": (10, "statistics begin after 10 accepted steps; guard.spike_z says what a spike is"),
    "guard.learning_rate_backoff": (0.5, "after a divergence the learning rate is halved for a while"),
    "telemetry.first_steps": (5, "the components of the first 5 steps are printed in full with --verbose"),
}  # fmt: skip


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
        if is_legacy(from_file):
            from_file, legacy_notes = translate(from_file, where)
            notes += legacy_notes
    preset = _one_preset(preset, from_file, where)
    table = merge(read_preset(preset) if preset is not None else {}, from_file)
    for key, value in (overrides or {}).items():
        put(table, key, value)
    if path is not None:
        _refuse_other_folder(table, from_file, Path(path))
    config = build(table, where, overrides or {})
    return Loaded(config.with_given({*leaves(from_file), *flat_leaves(overrides or {})}), tuple(notes))


def _one_preset(asked: str | None, from_file: Table, where: str) -> str | None:
    """The preset that the caller or the file names; the file's is taken out of its table."""
    if "preset" not in from_file:
        return asked
    named: str = from_file.pop("preset")
    if asked is not None and asked != named:
        raise ConfigError(
            f"{where} names the preset {_shortened(named)}, and --preset {asked} is given",
            where="preset",
            advice=["leave --preset out", f"or take `preset` out of {where}"],
        )
    return named


def build(table: Table, where: str, overrides: Collection[str] = ()) -> Config:
    """Validate a table. `overrides` are the keys that did not come from `where` but from the command line."""
    try:
        return Config.model_validate(_without_removed(table, where, overrides))
    except ValidationError as error:
        raise explain(error, where, overrides) from None


def _without_removed(table: Table, where: str, overrides: Collection[str]) -> Table:
    """Raise for a removed setting with another value than its old default; drop one that has it.

    Run folders of older versions store every setting, so their defaults must still be readable.
    """
    for key, (default, what) in REMOVED.items():
        *sections, name = key.split(".")
        section: Any = table
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            continue
        if type(section[name]) is bool or section[name] != default:
            raise ConfigError(
                f"{key} = {_shortened(section[name])} was removed: {what}",
                where="command line" if _is_override(key, overrides) else where,
                advice=[f"leave {key} out"],
            )
        kept = {other: value for other, value in section.items() if other != name}
        table = merge(table, {})
        put(table, ".".join(sections), kept)
    return table


def leaves(table: Table) -> Iterator[str]:
    """The dotted keys of the settings in a table; a value that is itself a table, such as a ramp, is one."""
    known = frozenset(all_keys())

    def walk(value: Any, key: str) -> Iterator[str]:
        if key in known or not isinstance(value, dict):
            yield key
            return
        for name, below in value.items():
            yield from walk(below, f"{key}.{name}" if key else str(name))

    yield from walk(table, "")


def flat_leaves(overrides: Mapping[str, Any]) -> Iterator[str]:
    """The same of dotted keys with values."""
    table: Table = {}
    for key, value in overrides.items():
        put(table, key, value)
    yield from leaves(table)


# -- paths ------------------------------------------------------------------------------------------------
# Relative paths are relative to the current folder, not to the configuration.

_PATHS = ("data.train", "data.eval", "teacher.model", "student.model", "teacher.cache")


def _refuse_other_folder(table: Table, from_file: Table, file: Path) -> None:
    """Raise where a relative path of a file is there from the file's folder and not from the current one.

    Paths are relative to the current folder. A name such as org/model may be a hub id and is left alone.
    """
    own_folder = file.expanduser().parent
    for key in _PATHS:
        section, name = key.split(".")
        value = _below(from_file, section, name)
        if value != _below(table, section, name):
            continue  # replaced by --set or an option
        for path in _paths_of(value):
            may_be_hub = section != "data" and name == "model" and not path.startswith(".") and path.count("/") <= 1
            if not may_be_hub and _is_there(own_folder / path) and not _is_there(Path(path)):
                raise ConfigError(
                    f"{key} = {path!r} is not in the current folder {Path.cwd()}; paths are relative to it, and not to "
                    f"the configuration, next to which {own_folder / path} is",
                    where=str(file),
                    advice=[f"cd {own_folder}", f"write the whole path: {(own_folder / path).resolve()}"],
                )


def _below(table: Table, section: str, name: str) -> Any:
    below = table.get(section)
    return below.get(name) if isinstance(below, dict) else None


def _paths_of(value: Any) -> Iterator[str]:
    """Relative paths in a setting that names data or a model: no builtin or hub name, and no address."""
    for one in value if isinstance(value, list | tuple) else [value]:
        path = one.get("path") if isinstance(one, dict) else one
        if isinstance(path, str) and path and ":" not in path and not path.startswith(("/", "~")):
            yield path


def _is_there(path: Path) -> bool:
    try:
        if glob.has_magic(str(path)):
            return bool(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob refuses absolute patterns
        return path.exists()
    except (OSError, ValueError):
        return False


# -- files and presets ------------------------------------------------------------------------------------


def read_file(path: Path) -> Table:
    kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
    try:
        text = _read_text(path)
        is_json = kind == "JSON"
        table = json.loads(text, object_pairs_hook=_without_duplicates) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from None
    except ValueError as error:  # raised by both parsers, and for numbers with thousands of digits
        start = "`stillroom presets base` prints settings to start from, without models and data"
        if path.suffix.lower() in (".yaml", ".yml"):
            raise ConfigError(
                f"{path} is YAML, and configurations are TOML, or JSON where the name ends in .json",
                advice=["write it as TOML: [train] above learning_rate = 1e-4", start],
            ) from None
        raise ConfigError(f"{path} is not valid {kind}: {error}", advice=[start]) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds a {type(table).__name__}, not a table of settings")
    return table


def _read_text(path: Path) -> str:
    try:
        if not path.exists():
            near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
            raise ConfigError(
                f"there is no configuration file {path}",
                where="CONFIG",
                advice=[
                    f"did you mean {path.parent / near[0]}?" if near else "check the path, or leave it out for the demo"
                ],
            )
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size / 1e6:,.0f} MB and is not a configuration",
                advice=["data goes to --data, a model to --teacher or --student"],
            )
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}",
            advice=["save it as UTF-8", "a model or data file is not a configuration: see --teacher and --data"],
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


# -- tables -----------------------------------------------------------------------------------------------


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


# -- messages ---------------------------------------------------------------------------------------------
# Errors with the user's keys, and the key that was meant.


def explain(error: ValidationError, where: str, overrides: Collection[str] = ()) -> ConfigError:
    """Rewrite a validation error with the keys of the configuration, and where they were written."""
    lines: list[str] = []
    advice: list[str] = []
    places: list[str] = []
    for problem in error.errors():
        if _is_unintended_branch(problem):
            continue
        # pydantic puts the union branch into the location; leave it out.
        path = [str(part) for part in problem["loc"] if not _is_type(str(part))]
        key = ".".join(path) or "configuration"
        places.append("command line" if path and _is_override(key, overrides) else where)
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
    found_in = " and ".join(dict.fromkeys(places)) or where
    return ConfigError("; ".join(unique), where=found_in, advice=list(dict.fromkeys(advice)))


def _is_override(key: str, overrides: Collection[str]) -> bool:
    """Whether a key, a section that it is in, or a part of it came from the command line."""
    return any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in overrides)


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


# What other programs call our sections and settings.
_OTHER_SECTIONS = {
    "dataset": "data",
    "datasets": "data",
    "optim": "train",
    "optimizer": "train",
    "trainer": "train",
    "loss": "objectives",
    "losses": "objectives",
    "evaluation": "eval",
    "logging": "telemetry",
    "lora": "student.adapter",
    "peft": "student.adapter",
}
_OTHER_NAMES = {
    "lr": "train.learning_rate",
    "bs": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "lr_scheduler_type": "train.schedule",
    "grad_clip": "train.max_grad_norm",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "grad_accum": "train.gradient_accumulation_steps",
    "fp16": "precision.mode",
    "bf16": "precision.mode",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "seq_len": "data.max_length",
    "dataset": "data.train",
    "alpha_kd": "objectives.kd.weight",
    "alpha_ce": "objectives.ce.weight",
}


def nearest_key(key: str) -> str | None:
    """The existing key or section nearest to a mistyped one: by another program's word, whole path, section, or end."""
    key = key.lower()
    keys = list(all_keys())
    first, _, rest = key.partition(".")
    last = key.rsplit(".", 1)[-1]
    if first not in Config.model_fields:  # a mistyped section, or a setting outside of its section
        if not rest and key in _OTHER_NAMES and key not in _OTHER_SECTIONS:
            return _OTHER_NAMES[key]
        section = _OTHER_SECTIONS.get(first) or next(
            iter(difflib.get_close_matches(first, list(Config.model_fields), n=1, cutoff=0.7)), None
        )
        if section is not None:
            return section if not rest or f"{section}.{rest}" not in keys else f"{section}.{rest}"
    elif last in _OTHER_NAMES:
        return _OTHER_NAMES[last]
    # Sections inside a section too: objectives.cee is objectives.ce.
    sections = dict.fromkeys(candidate.rsplit(".", 1)[0] for candidate in keys if candidate.count(".") > 1)
    whole = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=0.75)
    if whole:
        return whole[0]
    by_last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(keys)}
    near = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)
    return by_last[near[0]] if near else None


def _section_keys(section: str) -> list[str]:
    keys = [key for key in all_keys() if key.startswith(f"{section}.")]
    return keys or list(Config.model_fields)


# -- what is never read -----------------------------------------------------------------------------------
# `Config.given` holds the dotted keys that came from a file, an option, `--set` or Python; those of a preset and the
# schema's defaults are not among them. A key without a rule is always read; `tests/config/test_given_settings.py` lists
# those, so that a setting which is added gets a place.

# The settings of objectives.kd that each built-in divergence takes. Members import torch, so this is written twice.
DIVERGENCE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "jsd": ("beta",),
    "skew_forward_kl": ("alpha",),
    "skew_reverse_kl": ("alpha",),
    "alpha_beta": ("alpha", "beta"),
    "taid": ("interpolation",),
}


class Rule(NamedTuple):
    """Keys, with *, and the condition under which a run reads them. `reason` is why not otherwise; {c}: the config."""

    keys: str  # separated by spaces
    is_read: Callable[[Config], Any]
    reason: str

    def covers(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys.split())


def _is_loaded(c: Config) -> bool:
    """Whether the teacher's weights are loaded on this machine at any time."""
    if c.teacher.server or c.teacher.is_student:
        return False
    is_stored = c.teacher.cache not in (None, "auto") and c.teacher.signal.compare == "stored"
    return c.student.init == "shrink" or (c.objectives.asks_teacher and not is_stored)


def _needs_layout(c: Config) -> bool:
    """Whether any source has no layout, held-out data included."""
    return bool(c.data.eval) or isinstance(c.data.train, str) or any(not one.has_layout for one in c.data.train)


def _reads_hub_data(c: Config) -> bool:
    return any(spec.startswith("hf:") for spec in (*(one.path for one in c.data.sources), c.data.eval or ""))


def _has_setting(setting: str) -> Callable[[Config], bool]:
    """Whether the chosen divergence takes a setting."""

    def is_read(c: Config) -> bool:
        name = c.objectives.kd.divergence
        if DIVERGENCES.is_built_in(name):
            return setting in DIVERGENCE_SETTINGS.get(name, ())
        # Of another package: known once it is imported.
        return setting in getattr(DIVERGENCES.loaded().get(name), "settings", (setting,))

    return is_read


_SAR_MODES = {"sar", "sar-joint", "sar-meta", "sar-transient"}
_ROUTER_MODE = "teacher.router.mode is {c.teacher.router.mode}"
_DIVERGENCE = "objectives.kd.divergence is {c.objectives.kd.divergence}, which has no "

RULES: tuple[Rule, ...] = (
    Rule("student.model student.revision", lambda c: c.student.reads_model, "the student is cut"),
    Rule("teacher.revision", lambda c: is_hub_id(c.teacher.model), "{c.teacher.model} is not a model of a hub"),
    Rule("student.revision", lambda c: is_hub_id(c.student.model), "{c.student.model} is not a model of a hub"),
    Rule(
        "teacher.cache teacher.server teacher.signal.* teacher.router.* teacher.requests.* "
        "guard.fallback_after guard.fallback_steps",
        lambda c: c.objectives.asks_teacher,
        "no objective asks the teacher",
    ),
    Rule("teacher.requests.*", lambda c: c.teacher.server, "teacher.server is not set"),
    Rule("teacher.placement teacher.quantisation teacher.max_quantisation_kl", _is_loaded, "the teacher is not loaded"),
    # A named cache is compared with the dtype that is asked for, so it is read there.
    Rule(
        "teacher.dtype",
        lambda c: _is_loaded(c) or (c.teacher.cache and not c.teacher.server),
        "the teacher is not loaded",
    ),
    Rule("teacher.max_quantisation_kl", lambda c: c.teacher.quantisation != "none", "teacher.quantisation is none"),
    Rule("teacher.ema_decay", lambda c: c.teacher.model == "ema", "teacher.model is {c.teacher.model}"),
    Rule("teacher.concurrent", lambda c: c.data.source_teachers, "no source of data.train has its own teacher"),
    Rule("data.teacher_prefix", lambda c: c.objectives.asks_teacher, "no objective asks the teacher"),
    Rule("teacher.signal.compare", lambda c: c.teacher.cache, "teacher.cache is not set"),
    Rule("teacher.router.patterns", lambda c: c.teacher.router.mode != "frozen", _ROUTER_MODE),
    Rule(
        "teacher.router.truth_weight teacher.router.gradient_checkpointing",
        lambda c: c.teacher.router.mode in TRAINING_MODES | {"sar-transient"},
        _ROUTER_MODE,
    ),
    Rule("teacher.router.student_weight", lambda c: c.teacher.router.mode in _SAR_MODES, _ROUTER_MODE),
    Rule(
        "teacher.router.anchor_weight teacher.router.load_balance_weight teacher.router.entropy_weight "
        "teacher.router.every teacher.router.max_degradation teacher.router.probe_* teacher.router.force "
        "train.router_learning_rate",
        lambda c: c.teacher.router.mode in TRAINING_MODES,
        _ROUTER_MODE,
    ),
    Rule(
        "teacher.router.probe_threshold teacher.router.force",
        lambda c: c.teacher.router.probe_steps,
        "teacher.router.probe_steps is 0",
    ),
    Rule("student.shrink.*", lambda c: c.student.init == "shrink", "student.init is {c.student.init}"),
    Rule("student.shrink.round_share", lambda c: c.student.shrink.rounds > 1, "student.shrink.rounds is 1"),
    Rule(
        "student.shrink.method",
        lambda c: c.student.shrink.to or (c.student.shrink.layers and isinstance(c.student.shrink.layers, int)),
        "no layers are chosen",
    ),
    Rule(" ".join(f"data.{name}" for name in Layout.model_fields), _needs_layout, "every source has its own layout"),
    Rule("data.eval_share", lambda c: c.data.eval is None, "data.eval is the held-out data"),
    Rule("data.streaming", _reads_hub_data, "no data comes from a hub (hf:NAME)"),
    Rule("data.min_coverage", lambda c: c.objectives.span_weights, "no objective compares two tokenizers"),
    *(Rule(f"objectives.kd.{name}", _has_setting(name), _DIVERGENCE + name) for name in ("alpha", "beta")),
    Rule("objectives.kd.interpolation", _has_setting("interpolation"), _DIVERGENCE + "interpolation"),
    Rule(
        "objectives.kd.token_criterion",
        lambda c: c.objectives.kd.token_fraction != 1.0,
        "objectives.kd.token_fraction is 1",
    ),
    Rule("train.epochs", lambda c: not c.train.max_steps, "train.max_steps is {c.train.max_steps}"),
    Rule("train.step_rows", lambda c: c.train.batch_size == "auto", "train.batch_size is {c.train.batch_size}"),
    Rule("train.projector_learning_rate", lambda c: c.objectives.inner_weights, "no inner objective is used"),
    Rule("train.min_learning_rate_ratio", lambda c: c.train.schedule != "constant", "train.schedule is constant"),
    Rule("train.decay_ratio", lambda c: c.train.schedule == "wsd", "train.schedule is {c.train.schedule}"),
    Rule("train.momentum", lambda c: c.train.optimizer == "muon", "train.optimizer is {c.train.optimizer}"),
    Rule("train.warmup_ratio", lambda c: not c.train.warmup_steps, "train.warmup_steps is {c.train.warmup_steps}"),
    Rule(
        "precision.*loss_scale*",
        lambda c: c.precision.mode not in ("fp32", "bf16-mixed"),
        "precision.mode is {c.precision.mode}",
    ),
    Rule("eval.sample_tokens", lambda c: c.eval.samples, "eval.samples is 0"),
    Rule(
        "rollouts.teacher_top rollouts.student_top",
        lambda c: c.rollouts is not None and c.rollouts.answers == "stored",
        "rollouts.answers is live",
    ),
    Rule("eval.samples eval.sample_tokens", lambda c: not c.eval.num_prompts, "eval.prompts are the samples"),
    Rule(
        "eval.prompt_tokens eval.temperature eval.checker",
        lambda c: c.eval.num_prompts,
        "eval.prompts is 0 and eval.select is {c.eval.select}",
    ),
)


def unread(config: Config) -> Iterator[tuple[str, str]]:
    """(key, why it is not read) of each setting that was given and that this run never reads."""
    for key in sorted(config.given):
        rule = next((rule for rule in RULES if rule.covers(key) and not rule.is_read(config)), None)
        why = rule.reason.format(c=config) if rule else _why_objective_is_off(key, config)
        if why:
            yield key, why


def _why_objective_is_off(key: str, config: Config) -> str:
    """Why a setting of an objective, built in or of another package, is not read: its weight is 0."""
    section, name, setting = [*key.split("."), "", ""][:3]
    if section != "objectives" or not setting or setting == "weight" or name not in config.objectives.sections:
        return ""
    found = config.objectives.sections[name]
    if setting == "attention_layers" and found.weight != 0.0:  # it is what switches the objective off
        return ""
    return f"objectives.{name}.weight is 0" if found.used_weight == 0.0 else ""


def unread_notes(config: Config) -> tuple[str, ...]:
    return tuple(f"{key} = {_shown(config, key)} is not read: {why}" for key, why in unread(config))


def refuse_unread(config: Config) -> None:
    """Raise for the first settings that were given and are not read, as `--strict` asks."""
    notes = unread_notes(config)
    if notes:
        raise ConfigError("; ".join(notes), where="--strict", advice=["leave them out", "leave --strict out"])


def _shown(config: Config, key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether a model's name may be looked up on a hub: it is no file here, no path, no address, no builtin name."""
    try:
        is_here = Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        is_here = False
    return not is_here and not name.endswith(".gguf") and bool(_HUB_ID.fullmatch(name)) and not name.startswith(".")


# -- what is missing ----------------------------------------------------------------------------------------

# The setting of each part of a run, and the option that gives it.
ROLES = {
    "teacher": ("teacher.model", "--teacher"),
    "student": ("student.model", "--student"),
    "data": ("data.train", "--data"),
}


def refuse_gaps(config: Config, *, also: frozenset[str] = frozenset(), roles: tuple[str, ...] = tuple(ROLES)) -> None:
    """Raise if a model or data of the user's is named and another part is left to its embedded default.

    A preset may name the embedded parts, as `demo` does. `also` are roles given as objects. `roles` are those that a
    command uses.
    """
    given = {role for role, (key, _option) in ROLES.items() if role in also or _is_users_own(config, key)}
    given |= {"teacher.server"} & config.given
    missing = [role for role in _unnamed(config, roles) if role not in also]
    if given and missing:
        raise ConfigError(
            f"{' and '.join(missing)} not given: your {' and '.join(sorted(given))} would be used with the embedded "
            "demo models and text",
            where=", ".join(ROLES[role][0] for role in missing),
            advice=[
                " ".join(f"{ROLES[role][1]} {role.upper()}" for role in missing)
                + ", or "
                + " and ".join(ROLES[role][0] for role in missing)
                + " in the configuration",
                "the embedded ones by name: " + ", ".join(f"{ROLES[role][1]} {_TOYS[role]}" for role in missing),
            ],
        )


_TOYS = {"teacher": "builtin:teacher", "student": "builtin:student", "data": "builtin:stdlib"}


def embedded_notes(config: Config) -> tuple[str, ...]:
    """A note where parts of a run are embedded ones because nobody named any."""
    missing = _unnamed(config, tuple(ROLES))
    if not missing:
        return ()
    keys, toys = (", ".join(names) for names in zip(*((ROLES[one][0], _TOYS[one]) for one in missing), strict=True))
    return (f"this trains the embedded demo models and text ({toys}): for your own set {keys}",)


def _unnamed(config: Config, roles: tuple[str, ...]) -> list[str]:
    """The parts that a run needs and that neither the user nor a preset names."""
    is_cut = config.student.init == "shrink"
    needed = {"teacher": is_cut or config.objectives.asks_teacher, "student": not is_cut, "data": True}
    return [role for role in roles if needed[role] and not _is_named(config, ROLES[role][0])]


def _is_users_own(config: Config, key: str) -> bool:
    if key not in config.given:
        return False
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    names = [value] if isinstance(value, str) else [source.path for source in value]
    return any(not one.startswith("builtin:") for one in names)


def _is_named(config: Config, key: str) -> bool:
    section, name = key.split(".")
    return name in getattr(config, section).model_fields_set


# -- dry run ----------------------------------------------------------------------------------------------
# The same code path as a run, in five steps.

_STEPS = 5
_BATCHES = 1  # held-out batches in an evaluation
_SAMPLES, _SAMPLE_TOKENS = 1, 8


def shortened(loaded: Loaded) -> Loaded:
    """Set at most five steps; cut evaluation, samples and the router probe if they are longer. Add a note of it."""
    config = loaded.config
    steps = min(config.train.max_steps or _STEPS, _STEPS)
    train = config.train.model_copy(update={"max_steps": steps, "eval_steps": steps, "save_steps": steps})
    held_out = config.eval.model_copy(
        update={
            "max_batches": min(config.eval.limit or _BATCHES, _BATCHES),
            "samples": min(config.eval.samples, _SAMPLES),
            "sample_tokens": min(config.eval.sample_tokens, _SAMPLE_TOKENS),
        }
    )
    router = config.teacher.router
    router = router.model_copy(update={"probe_steps": min(router.probe_steps, _STEPS)})
    teacher = config.teacher.model_copy(update={"router": router})
    short: Config = config.model_copy(update={"train": train, "eval": held_out, "teacher": teacher})
    cut = [f"{steps} steps", "1 held-out batch", f"samples of {held_out.sample_tokens} tokens"]
    if router.probe_steps:
        cut.append(f"a router probe of {router.probe_steps} updates, too few to trust")
    return Loaded(short, (*loaded.notes, f"dry run: {', '.join(cut)}"))


def is_shortened(config: Config) -> bool:
    """Whether a configuration is that of a dry run: shortening it once more changes nothing."""
    return shortened(Loaded(config, ())).config.to_dict() == config.to_dict()


# -- TOML -------------------------------------------------------------------------------------------------
# Write a configuration as TOML, which the standard library can only read.


def toml_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A table of sections as TOML. Values that are None are left out: TOML has none, and the schema's default is it."""
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    for key, value in plain.items():
        yield f"{key} = {_literal(value)}"
    yield from _sections(table, "")


def _sections(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            continue
        own = {name: one for name, one in value.items() if one is not None and not isinstance(one, Mapping)}
        name = f"{prefix}{_key(key)}"
        if own:
            yield ""
            yield f"[{name}]"
            for inner, one in own.items():
                yield f"{_key(inner)} = {_literal(one)}"
        yield from _sections(value, f"{name}.")


def _key(text: str) -> str:
    is_bare = text.replace("-", "").replace("_", "").isalnum() and text.isascii()
    return text if is_bare else _literal(text)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_literal(one)}" for key, one in value.items() if one is not None)
        return "{ " + inside + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


# -- legacy JSON ------------------------------------------------------------------------------------------
# Translate the flat configurations of the student-aware distillation project. Each mapping is noted, because some
# change meaning: a micro-step there is an optimizer step here.

_DIRECT = {
    "teacher_model": "teacher.model",
    "student_model": "student.model",
    "teacher_model_name": "teacher.model",
    "student_model_name": "student.model",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "max_length": "data.max_length",
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "learning_rate": "train.learning_rate",
    "router_lr": "train.router_learning_rate",
    "warmup_ratio": "train.warmup_ratio",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "num_epochs": "train.epochs",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "eval_steps": "train.eval_steps",
    "save_steps": "train.save_steps",
    "seed": "train.seed",
    "temperature": "objectives.kd.temperature",
    "alpha_kd": "objectives.kd.weight",
    "alpha_ce": "objectives.ce.weight",
    "alpha_feature": "objectives.feature.weight",
    "alpha_attention": "objectives.attention.weight",
    "alpha_layerwise": "objectives.layerwise.weight",
    "alpha_contrastive": "objectives.contrastive.weight",
    "attention_layers": "objectives.attention.attention_layers",
    "use_gradient_checkpointing": "student.gradient_checkpointing",
}
_MAX_WARMUP = 0.1  # of the optimizer steps
# Keys whose meaning differs from ours: (our key, our value, the difference).
_TRANSLATED: dict[str, Callable[[Any], tuple[str, Any, str]]] = {
    "kd_top_k": lambda value: (
        "objectives.kd.top_k",
        value,
        "the teacher's k most likely tokens with the exact mass of the rest; the original renormalised both sides",
    ),
    "warmup_steps": lambda value: (
        "train.warmup_steps",
        value,
        "at most a tenth of the optimizer steps, as in the original: train.max_warmup_share",
    ),
    "router_anchor_weight": lambda value: (
        "teacher.router.anchor_weight",
        value,
        "KL to the original teacher's answers; the original took the squared distance of the gates",
    ),
    "router_load_balance_weight": lambda value: (
        "teacher.router.load_balance_weight",
        value,
        "from live gates; the original's had no gradient",
    ),
    "router_entropy_weight": lambda value: (
        "teacher.router.entropy_weight",
        value,
        "from live gates; the original's had no gradient",
    ),
}
_IGNORED = {
    "num_workers": "batches are made in the training process",
    "fp16": "use precision.mode",
}


def is_legacy(table: Table) -> bool:
    """True when the table is flat and has at least two legacy keys."""
    legacy_keys = set(_DIRECT) | set(_TRANSLATED) | {"use_curriculum"}
    return not any(isinstance(value, dict) for value in table.values()) and len(legacy_keys & set(table)) >= 2


def translate(table: Table, where: str = "") -> tuple[Table, list[str]]:
    """Return our nested table and one note for each legacy key. Values are checked with the other settings later."""
    nested: Table = {}
    notes: list[str] = []
    for key, value in table.items():
        if key in _DIRECT:
            put(nested, _DIRECT[key], value)
            notes.append(f"{key} = {value!r} -> {_DIRECT[key]}")
        elif key in _TRANSLATED:
            target, mapped, why = _TRANSLATED[key](value)
            put(nested, target, mapped)
            if key == "warmup_steps":
                put(nested, "train.max_warmup_share", _MAX_WARMUP)
            notes.append(f"{key} = {value!r} -> {target} ({why})")
        elif key == "use_curriculum":
            continue  # below, because it needs all weights
        elif key in _IGNORED:
            notes.append(f"{key} = {value!r} is not used: {_IGNORED[key]}")
        else:
            nested[key] = value  # validation reports it as unknown
    if "use_curriculum" in table:
        is_on = table["use_curriculum"]
        if not isinstance(is_on, bool):
            raise ConfigError(f"use_curriculum: expected true or false, got {is_on!r}"[:200], where=where)
        notes.append(_curriculum(nested, is_on))
    return nested, notes


# Default weight, begin and end of each ramp, as in the student-aware preset.
_RAMPS = {
    "feature": (0.1, 0.3, 0.6),
    "attention": (0.1, 0.3, 0.6),
    "layerwise": (0.05, 0.6, 0.8),
    "contrastive": (0.05, 0.6, 0.8),
}


def _curriculum(nested: Table, is_on: bool) -> str:
    """Three phases: logits alone, then features and attention, then the rest."""
    if not is_on:
        return "use_curriculum = False -> constant weights"
    nested["curriculum"] = {
        "phases": [
            {"name": "logits", "until": 0.3},
            {"name": "features", "until": 0.6},
            {"name": "all", "until": 1.0},
        ]
    }
    given = nested.get("objectives", {})
    if "weight" not in given.get("kd", {}):
        put(nested, "objectives.kd.weight", 0.7)
        put(nested, "objectives.ce.weight", 0.3)
    ramps = []
    for name, (weight, begin, until) in _RAMPS.items():
        end = given.get(name, {}).get("weight", weight)
        if isinstance(end, int | float) and end != 0:  # validation reports what is not a number
            ramp = {"start": 0.0, "end": end, "begin": begin, "until": until}
            put(nested, f"objectives.{name}.weight", ramp)
            ramps.append(f"{name} to {end} from {begin:.0%}")
    inner = ", ".join(ramps) or "no inner objective"
    kd_weight = nested["objectives"]["kd"]["weight"]
    return f"use_curriculum = True -> phases 0-30-60-100 %, kd {kd_weight} from the start, {inner}"
