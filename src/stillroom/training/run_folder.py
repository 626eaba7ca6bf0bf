"""Claim a run's folder, and read and write its description."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from stillroom import __version__
from stillroom.config import Config
from stillroom.config.load import build, is_shortened
from stillroom.config.schema import DIVERGENCES, OBJECTIVES, READERS, ObjectivesConfig, StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart, CannotSave, ConfigError, DataError, StillroomError
from stillroom.core.files import (
    ROUNDS,
    TEMPORARY,
    FileSum,
    Manifest,
    flush_folder,
    inside,
    is_hidden,
    is_in_store,
    is_url,
    reason_of,
    replaced_folder,
    write_atomically,
    write_durably,
)
from stillroom.core.hub import HubStore, is_repository
from stillroom.core.locks import RUN_LOCK, Lock, LockHeld, alone, describe_owner, hold_again
from stillroom.core.machine import main_memory
from stillroom.core.remote import Known, Sender, Store, as_url, copies_folder, is_below, key_of, read_commit
from stillroom.data.objects import write_records
from stillroom.models.objects import GivenModel
from stillroom.training.checkpoint import MANIFEST, CheckpointStore

# -- inputs ----------------------------------------------------------------------------------------
# Store models and data given as objects in the run's folder, so that the run can be resumed without them.
#
# `inputs/` holds `teacher` and `student` as model folders, `train.jsonl` and `eval.jsonl`, and `inputs.json` with a
# digest of each object. The configuration names these files. A later call with the same folder must give the same
# objects: the digests are compared.


FOLDER, DIGESTS = "inputs", "inputs.json"
# The setting that names each kind of input, and where it is kept.
_PLACES = {
    "teacher": ("teacher.model", "teacher"),
    "student": ("student.model", "student"),
    "data": ("data.train", "train.jsonl"),
    "eval_data": ("data.eval", "eval.jsonl"),
}


@dataclass(frozen=True)
class Inputs:
    """Models and data given as objects, by the name of the argument."""

    models: dict[str, GivenModel] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def settings(self, folder: Path) -> dict[str, str]:
        """The settings that name the stored files, for a run in this folder."""
        return {
            _PLACES[role][0]: str(folder / FOLDER / _PLACES[role][1])
            for role in _PLACES
            if role in self.models or role in self.data
        }

    def keep(self, folder: Path, *, is_resumed: bool, columns: Sequence[str] = ()) -> tuple[str, ...]:
        """Write the objects into a run's folder; for a resumed run, compare their digests. Return notes for the log.

        `columns` are those of the data that the run's layout names: they are kept in addition to the usual fields.
        """
        if not self.models and not self.data:
            return ()
        try:
            remove(folder, keeps_complete=is_resumed)  # half-written files of a killed process
            if is_resumed:
                self._compare(folder, columns)
                return ()
            with replaced_folder(folder / FOLDER) as new:
                notes = self._write(new, columns)
            return (*notes, *self.notes)
        except OSError as error:
            raise CannotSave(
                f"cannot write what was given: {reason_of(error)}",
                where=str(folder / FOLDER),
                advice=[
                    "free some space on that disk",
                    "give models and data by name: then nothing is copied into the run's folder",
                    "of an endless stream give a part: itertools.islice(records, 100_000)",
                ],
            ) from error

    def _write(self, folder: Path, columns: Sequence[str]) -> tuple[str, ...]:
        digests, notes = {}, []
        for role, model in self.models.items():
            model.save(folder / _PLACES[role][1])
            digests[role] = model.fingerprint()
        for role, data in self.data.items():
            written = write_records(data, folder / _PLACES[role][1], role, columns)
            digests[role] = written.sha256
            notes += written.note(role)
        write_durably(folder / DIGESTS, json.dumps(digests, indent=1).encode())
        flush_folder(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        given = " and ".join([*self.models, *self.data])
        return (f"{given} given as objects: kept in {FOLDER}/ of the run's folder, {size / 1e6:,.1f} MB", *notes)

    def _compare(self, folder: Path, columns: Sequence[str]) -> None:
        known = _digests(folder)
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{FOLDER}-", dir=folder) as scratch:
            for role in (*self.models, *self.data):
                model = self.models.get(role)
                if model is not None:
                    digest = model.fingerprint()
                else:
                    scratch_file = Path(scratch) / _PLACES[role][1]
                    digest = write_records(self.data[role], scratch_file, role, columns).sha256
                if digest != known.get(role):
                    raise ConfigError(
                        f"{folder} holds a run whose {role} was another",
                        where=role,
                        advice=[
                            "choose another folder with out",
                            f"or continue that run with what it keeps: stillroom.resume({str(folder)!r})",
                        ],
                    )


def _digests(folder: Path) -> dict[str, str]:
    path = folder / FOLDER / DIGESTS
    try:
        digests = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {reason_of(error)}",
            advice=[f"continue the run with what it keeps: stillroom.resume({str(folder)!r})"],
        ) from error
    return dict(digests) if isinstance(digests, dict) else {}


def is_ours(path: Path) -> bool:
    """Whether a path is the inputs of a run, complete or half-written, or the lock of such."""
    return _is_complete(path) or path.name.startswith(f"{TEMPORARY}{FOLDER}-")


def _is_complete(path: Path) -> bool:
    return path.name == FOLDER and (path / DIGESTS).is_file()


def remove(folder: Path, *, keeps_complete: bool = False) -> None:
    """Remove the inputs of a run; with `keeps_complete`, only half-written ones."""
    if folder.is_dir():
        for path in folder.iterdir():
            if is_ours(path) and not (keeps_complete and _is_complete(path)):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


# -- paths -----------------------------------------------------------------------------------------
# Find the local files of a configuration when a run is resumed from another directory or was moved.
#
# Each path is stored twice: absolute, and relative to the run's folder. The absolute path is used while it exists;
# after the tree was moved, the relative one.


_MODELS = ("teacher.model", "student.model")
_DATA = ("data.train", "data.eval")
_FOLDERS = ("teacher.cache",)
KEYS = (*_MODELS, *_DATA, *_FOLDERS)
_PROMPTS = "rollouts.prompts"  # of a run that has rollouts, where they are not those of the data
_SOURCE = "data.train."  # with the number of the source, where there are several
_OWN_TEACHER = ".teacher"  # after that: the source's
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
        if not (key in _MODELS or key.endswith(_OWN_TEACHER)) or path.exists():
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
            if is_url(absolute) or not Path(absolute).is_absolute():
                raise ValueError(f"paths.{key}.absolute is not a path")  # an address is never reached by this way
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
    own = (_PROMPTS,) if config.rollouts is not None and config.rollouts.prompts != "train" else ()
    if isinstance(train, str):
        return (*KEYS, *own)
    sources = [f"{_SOURCE}{place}" for place in range(len(train))]
    taught = [f"{_SOURCE}{place}{_OWN_TEACHER}" for place, one in enumerate(train) if one.teacher]
    return (*_MODELS, *sources, *taught, "data.eval", *_FOLDERS, *own)


def _get(config: Config, key: str) -> str | None:
    if key.startswith(_SOURCE):
        place, name = _in_source(key)
        named: str | None = getattr(config.data.sources[place], name)
        return named
    section, name = key.split(".")
    value: str | None = getattr(getattr(config, section), name)
    return value


def _in_source(key: str) -> tuple[int, str]:
    """The number of a source, and which of its settings the key is."""
    own = key.removeprefix(_SOURCE)
    return int(own.removesuffix(_OWN_TEACHER)), "teacher" if own.endswith(_OWN_TEACHER) else "path"


def _with(config: Config, changes: Mapping[str, str]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    train = list(config.data.train)
    for key, value in changes.items():
        if key.startswith(_SOURCE):
            place, name = _in_source(key)
            train[place] = train[place].model_copy(update={name: value})  # type: ignore[attr-defined]
            sections.setdefault("data", {})["train"] = tuple(train)
            continue
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    return config.model_copy(update=update)


# -- trust -----------------------------------------------------------------------------------------
# What the user allows a run's folder to name.
#
# A run's folder may come from somebody else. Its configuration alone runs no code and reaches no address: both need
# the user's word, given on this machine's command line or in a call, and never read from the folder.


_CODE, _ADDRESS = "--trust-remote-code", "--allow-address"


@dataclass(frozen=True)
class Trust:
    """Code and addresses that the user allows. Nothing by default."""

    code: bool = False  # of models, from a pinned commit of the hub, and of plug-ins installed here
    addresses: tuple[str, ...] = ()  # each with all that lies below it

    def check_table(self, table: Any, where: str) -> None:
        """Raise for objectives of plug-ins: reading their settings imports them. Those already imported pass."""
        objectives = table.get("objectives") if isinstance(table, Mapping) else None
        names = [name for name in objectives or () if name not in ObjectivesConfig.model_fields]
        self._raise([f"the plug-in {name} (objectives)" for name in names if OBJECTIVES.is_plugin(name)], [], where)

    def check(self, config: Config, where: str) -> None:
        """Raise unless the user allowed all code and all addresses that a run's configuration names."""
        sections: dict[str, TeacherConfig | StudentConfig] = {"teacher": config.teacher, "student": config.student}
        code = [
            f"code that comes with {section.model} ({name}.trust_remote_code)"
            for name, section in sections.items()
            if section.trust_remote_code
        ]
        if DIVERGENCES.is_plugin(config.objectives.kd.divergence):
            code.append(f"the plug-in {config.objectives.kd.divergence} (objectives.kd.divergence)")
        data = {f"data.train.{number}": source.path for number, source in enumerate(config.data.sources)}
        data["data.eval"] = config.data.eval or ""
        if config.rollouts is not None:
            data[_PROMPTS] = config.rollouts.prompts
        code += [f"the plug-in for {path} ({key})" for key, path in data.items() if _has_plugin_reader(path)]
        named = {f"{name}.model": section.model for name, section in sections.items()}
        named |= {f"{name}.allow_base": section.allow_base or "" for name, section in sections.items()}
        named |= {"teacher.cache": config.teacher.cache or "", "teacher.server": config.teacher.server or ""}
        named |= {f"teacher of {source}": spec for source, spec in config.data.source_teachers.items()}
        key = config.teacher.requests.api_key_variable
        note = {"teacher.server": f"; it gets the key in ${key}"} if key else {}
        self._raise(code, self._refused({**named, **data}, note), where)

    def check_addresses(self, named: Mapping[str, str], where: str) -> None:
        """Raise unless the user allowed every address among some settings of a run."""
        self._raise([], self._refused(named), where)

    def _refused(self, named: Mapping[str, str], notes: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """(address, what to say of it) of settings that are addresses and not allowed."""
        return [
            (value, f"the address {value} ({key}{(notes or {}).get(key, '')})")
            for key, value in named.items()
            if is_url(value) and not self._allows(value)
        ]

    def _allows(self, address: str) -> bool:
        return any(is_below(address, one) for one in self.addresses)

    def _raise(self, code: list[str], addresses: list[tuple[str, str]], where: str) -> None:
        code = [] if self.code else code
        if not code and not addresses:
            return
        named = "; ".join((*code, *(said for _address, said in addresses)))
        options = [*([_CODE] if code else []), *(f"{_ADDRESS} {address}" for address, _said in addresses)]
        raise ConfigError(
            f"the run's folder names what only you can allow: {named}",
            where=where,
            advice=[
                f"if you trust it, say so in this command: {' '.join(options)}",
                "a run that you began: give its `stillroom distill` command again, which continues it",
                "nothing of it was run or fetched",
            ],
        )


NONE = Trust()


def _has_plugin_reader(path: str) -> bool:
    return READERS.is_plugin(Path(path).suffix.lower())


CONFIG, EVENTS, SUMMARY = "config.json", "events.jsonl", "summary.json"
LOCK_FILES = (RUN_LOCK, f"{RUN_LOCK}.soft")
_CUT = "cut.json"  # written by training/student.py before config.json

# Settings that a resumed run may change.
_NOT_THE_RUN = (
    "train.max_minutes",
    "train.peer_timeout_minutes",
    "train.strategy",
    "train.shard_size",
    "telemetry",
    "checkpoint",
)
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


@cache  # reading the metadata of packages takes as long as three training steps of a tiny run
def versions() -> dict[str, str]:
    versions_of = {"python": platform.python_version(), "stillroom": __version__}
    for package in _PACKAGES:
        try:
            versions_of[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions_of[package] = "not installed"
    return versions_of


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(main_memory().total / 1e9, 1),
    }


@dataclass
class Claim:
    """A folder that this process owns while the command runs."""

    folder: Path
    config: Config
    is_resumed: bool = False
    lock: Lock | None = None
    made: tuple[Path, ...] = ()  # folders that were created, the innermost first
    sender: Sender | None = None  # of a run in a store
    is_begun: bool = False

    def describe(self) -> None:
        """Write config.json: from now on the same command continues the run."""
        description = {
            "config": self.config.to_dict(),
            "paths": describe(self.config, self.folder),
            "versions": versions(),
            "machine": machine(),
        }
        contents = json.dumps(description, indent=1).encode("utf-8")
        try:
            write_atomically(self.folder / CONFIG, contents)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def withdraw(self) -> None:
        """Remove all files of a run that could not begin, so that the same folder can be used again."""
        if self.is_resumed or self.is_begun or (self.folder / ROUNDS).exists():
            return
        for name in (CONFIG, EVENTS, _CUT):
            (self.folder / name).unlink(missing_ok=True)
        remove(self.folder)
        if self.lock is not None:
            self.lock.release()
        for made in self.made:
            with contextlib.suppress(OSError):  # not empty: another program has put something there
                made.rmdir()


@contextlib.contextmanager
def owned(folder: Path, config: Config, *, is_first: bool = True) -> Iterator[Claim]:
    """Own a folder while the body runs. Of several processes, the first owns it for all.

    Refuse a folder that holds another run or other files, or that another process trains in, and change nothing there.
    A body that fails before it sets `is_begun` leaves nothing in a folder that was empty.
    """
    if not is_first:
        yield Claim(folder, config)
        return
    try:
        find_run(folder, config)  # before any folder is created
        made = _make(folder)
        claim = Claim(folder, config, lock=take_lock(folder), made=made)
    except LockHeld as error:
        raise ConfigError(
            f"{describe_owner(error.owner)} is training in {folder}",
            where="--out",
            advice=[
                "wait for it to end, or stop it: it saves, and the run can be resumed",
                "or choose another folder with --out",
            ],
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    except ValueError as error:  # a name with a NUL character
        raise ConfigError(f"{folder} cannot be a folder: {error}", where="--out") from error
    try:
        claim.is_resumed, claim.config = find_run(folder, config)  # another process may have begun it in between
        if not claim.is_resumed:
            (folder / _CUT).unlink(missing_ok=True)  # of a run that was killed before config.json was written
        yield claim
    except BaseException:
        claim.withdraw()
        raise
    finally:
        if claim.lock is not None:
            claim.lock.release()


def take_lock(folder: Path) -> Lock:
    """Lock a run's folder. Raise LockHeld if it is locked, OSError if the lock file cannot be created."""
    return hold_again(folder / RUN_LOCK)


def find_run(folder: Path, config: Config) -> tuple[bool, Config]:
    """(whether the folder holds a run of this configuration, the configuration with its paths resolved)."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", where="--out", advice=["choose another folder with --out"])
    if not folder.exists() or all(_is_before_a_run(path) for path in folder.iterdir()):
        return False, config
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder} is not empty and not a Stillroom run folder",
            where="--out",
            advice=["choose another folder with --out", "nothing in it was touched"],
        )
    stored, known = _read(folder)
    given = absolute(config, known, stored)
    if not given.data.day:
        given = given.on_day(stored.data.day)  # the day on which the run began
    if given.data.chat == "auto":  # a run is continued with the text that it began with
        given = given.model_copy(update={"data": given.data.model_copy(update={"chat": stored.data.chat})})
    differences = differing_keys(stored, given)
    if differences:
        raise _another_run(folder, stored, given, differences)
    return True, given


def _another_run(folder: Path, stored: Config, given: Config, differences: list[str]) -> ConfigError:
    another = "choose another folder with --out"
    if is_shortened(stored) and not is_shortened(given):
        what = f"{folder} holds a dry run of {stored.train.max_steps} steps, which a whole run does not continue"
        return ConfigError(what, where="--out", advice=[another, "or delete that folder"])
    if is_shortened(given) and not is_shortened(stored):
        what = f"{folder} holds a run, and a dry run needs another folder"
        return ConfigError(what, where="--out", advice=["leave --out out, or name another folder"])
    shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
    resume = f"or continue that run: stillroom resume {folder}"
    is_longer = 0 < stored.train.max_steps < given.train.max_steps
    if is_longer and [line.split()[0] for line in differences] == ["train.max_steps"]:
        resume = f"or when it is finished, train it longer: {resume_longer(folder, given.train.max_steps)}"
    what = f"{folder} holds a run of another configuration: {shown}"
    return ConfigError(what, where="--out", advice=[another, resume])


def resume_longer(folder: Path, steps: int | str = "N") -> str:
    """The command that continues a finished run to more steps."""
    return f"stillroom resume {folder} --max-steps {steps}"


def _is_before_a_run(path: Path) -> bool:
    """Whether a path may be left by a process that was killed before its run began."""
    return path.name in (_CUT, *LOCK_FILES) or is_ours(path)


def _make(folder: Path) -> tuple[Path, ...]:
    """Create a folder with its parents. Return those that were created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(missing)


def _unwritable(folder: Path, error: OSError) -> StillroomError:
    what = f"{folder} cannot be written: {reason_of(error)}"
    if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EINVAL):
        return ConfigError(what, where="--out", advice=["choose another folder with --out"])
    advice = ["see to its permissions or to space on that disk", "or choose another folder with --out"]
    return CannotSave(what, where="--out", advice=advice)


def read_config(folder: Path, contents: bytes | None = None, *, trust: Trust = NONE) -> Config:
    """The configuration of a run, with its paths resolved. `contents` are those of a config.json that is not here.

    Refuse code and addresses that it names and the user did not allow.
    """
    config = stored_config(folder, contents, trust=trust)
    trust.check(config, str(folder / CONFIG))
    return config


def stored_config(folder: Path, contents: bytes | None = None, *, trust: Trust = NONE) -> Config:
    """The same without that refusal, for a caller that uses few of its settings and checks those."""
    return _read(folder, contents, trust)[0]


def _read(folder: Path, contents: bytes | None = None, trust: Trust = NONE) -> tuple[Config, dict[str, Any]]:
    path = folder / CONFIG
    try:
        if contents is None and not path.exists():
            lacks = "it has no config.json" if folder.is_dir() else "there is no such folder"
            raise ConfigError(f"{folder} is not a Stillroom run folder: {lacks}", advice=["give the folder of a run"])
        description = json.loads(path.read_bytes() if contents is None else contents)
        trust.check_table(description["config"], str(path))
        data = description["config"].setdefault("data", {})
        data.setdefault("chat", "off")  # as runs were before there was a choice
        config, known = build(description["config"], str(path)), description.get("paths", {})
        return resolved(config, known, folder), dict(known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged: {reason_of(error)}",
            advice=["restore it from a backup", "the same configuration is in the run_start record of events.jsonl"],
        ) from None


def read_summary(folder: Path) -> tuple[dict[str, Any], str]:
    """(the summary of a finished run, why it cannot be read). Empty for a run that is not finished."""
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{SUMMARY} cannot be read and is written again: {reason_of(error)}"
    if not isinstance(summary, dict):
        return {}, f"{SUMMARY} does not hold an object and is written again"
    return summary, ""


def begun_on(folder: Path) -> date | None:
    """The day of the first record in a run's log, for runs whose configuration does not say; None if it is unknown."""
    try:
        with (folder / EVENTS).open(encoding="utf-8") as log:
            return datetime.fromisoformat(json.loads(log.readline())["time"]).astimezone().date()
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differing_keys(old: Config, new: Config) -> list[str]:
    """A line for each setting in which two configurations are different runs."""
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    return [
        f"{key} is {before.get(key)!r} there and {after.get(key)!r} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and not key.startswith(_NOT_THE_RUN)
        and not (key in (*KEYS, _PROMPTS) and is_same_file(before.get(key), after.get(key)))
    ]


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else key))
    return flat


# -- place -----------------------------------------------------------------------------------------
# The folder a run works in: its own, or for an address a local folder that is uploaded.
#
# The local folder of an address is in the user's cache folder. Of several processes, the first downloads and uploads
# for all, so they must be on one machine.


_CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class Place:
    """The folder that a run works in, and the address it is uploaded to."""

    folder: Path
    url: str = ""
    sender: Sender | None = None  # of the first process
    notes: tuple[str, ...] = ()

    def read_config(self, trust: Trust) -> Config:
        """Read the run's configuration. Other processes than the first read it from the store."""
        is_other = bool(self.url) and self.sender is None
        contents = Store(self.url).read(CONFIG) if is_other else None
        return read_config(self.folder, contents, trust=trust)


_open: dict[Path, Place] = {}  # addresses that this process works in


def folder_of(out: str | Path) -> Path:
    """Return the local folder for a run's folder or address."""
    if not is_in_store(out):
        return Path(out)
    url = as_url(out)
    return inside(copies_folder("runs") / key_of(url), url.rpartition("/")[2] or "run")


@contextlib.contextmanager
def opened(out: str | Path) -> Iterator[Place]:
    """Work in a run's folder or address while the body runs; upload the folder at the end.

    A nested call for the same place gets the same object, and the outer call uploads.
    """
    folder = folder_of(out)
    if folder in _open:
        yield _open[folder]
        return
    if not is_in_store(out):
        yield Place(folder)
        return
    url = as_url(out)
    _refuse_several_machines(url)
    with contextlib.ExitStack() as ending:
        ending.callback(_open.pop, folder, None)
        if os.environ.get("RANK", "0") != "0":
            _open[folder] = Place(folder, url)
            yield _open[folder]
            return
        try:
            store = HubStore(url) if is_repository(url) else Store(url)
            store.entries()  # fail on an unreachable store before anything is loaded
            owner = store.own()
        except (DataError, CannotSave) as error:
            raise ConfigError(error.what, where="--out", advice=error.advice) from error
        ending.callback(owner.release)
        notes, known = _bring(store, folder)
        if not owner.is_exclusive:
            notes.append(f"{url} cannot create a file only if it does not exist: two processes that start on it at the "
                         "same time are not kept apart")  # fmt: skip
        _open[folder] = Place(folder, url, Sender(store, folder, owner, known), tuple(notes))
        yield from _sent(_open[folder])


def _sent(place: Place) -> Iterator[Place]:
    """Upload at the end. An error of the body is kept; its text names the address instead of the local folder."""
    assert place.sender is not None
    try:
        yield place
    except Exception as error:
        trouble = []
        try:
            place.sender.finish()
        except CannotSave as unsent:
            trouble = [f"{unsent.what}; it is in {place.folder}"]
        if isinstance(error, StillroomError):
            here, there = str(place.folder), place.url
            error.what = error.what.replace(here, there)
            error.advice = (*(one.replace(here, there) for one in error.advice), *trouble)
        raise
    place.sender.finish()


def _refuse_several_machines(url: str) -> None:
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "LOCAL_WORLD_SIZE" in os.environ and size != here:
        raise BrokenAtStart(
            f"processes on several machines share a run's folder, and {url} is worked in on a disk of one machine",
            where="--out",
            advice=["name a folder that all machines share, and copy it to the store at the end"],
        )


# -- downloading a run ------------------------------------------------------------------------------------


def _bring(store: Store, folder: Path) -> tuple[list[str], dict[str, FileSum | None]]:
    """Download the store's last commit, unless the local folder is that commit or continues it.

    Return (notes for the log, the files in the store).
    """
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        commit, listed = read_commit(store), store.entries()
        sums = commit.files if commit is not None else {}
        there = {name: file for name, file in listed.items() if not is_hidden(name)}
        known = {
            name: sums[name] if name in sums and sums[name].bytes == file.size else None for name, file in there.items()
        }
        names, state = {*there, *sums}, Known.read(home)
        is_here = (folder / CONFIG).exists()
        if not _has_run(store, names):
            store.check_empty(names)
            if is_here and state.sent:
                raise ConfigError(
                    f"{store.url} holds no run, but the local folder holds the one that was there",
                    where="--out",
                    advice=[f"to begin again, remove {home}", "or choose another address with --out"],
                )
            return (
                [f"the run continues from {folder}: nothing of it had reached {store.url}"] if is_here else []
            ), known
        if is_here and (commit.id in (state.sent, state.next) if commit is not None else not state.sent):
            return [f"the run continues from {folder}, which is as new as {store.url}"], known
        notes = [f"downloaded from {store.url}"]
        if folder.exists():
            old = folder.with_name(f".old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            notes.append(f"the local folder was older or another run: it is now {old}")
        _bring_files(store, folder, names, {*there})
        Known(sent=commit.id if commit is not None else "").write(home)
        return notes, known


def _has_run(store: Store, names: set[str]) -> bool:
    """Whether an address holds a run: a model has a config.json, too. A damaged one is reported when it is read."""
    if CONFIG not in names:
        return False
    try:
        table = json.loads(store.read(CONFIG) or b"")
    except (ValueError, RecursionError):
        return True
    return isinstance(table, dict) and "config" in table


def _bring_files(store: Store, folder: Path, names: set[str], listed: set[str]) -> None:
    """Download all files, but of the checkpoints only the newest ones, down to the first whose sums hold.

    A damaged checkpoint is downloaded too, so that resuming reports it as it does for a local run. One without a
    manifest was never complete and is left out. The folder is written under another name and renamed, so a kill leaves
    no partial run.
    """
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    def get(name: str) -> None:
        path = inside(aside, name)
        if name in listed or store.size(name) is not None:  # else removed after that commit
            store.get(name, path)

    of_checkpoints = {name for name in names if name.startswith(_CHECKPOINTS) and name.count("/") > 1}
    for name in sorted(names - of_checkpoints):
        get(name)
    for name in of_checkpoints:
        if name.endswith(f"/{MANIFEST}"):
            get(name)
    wanted = True
    for step in CheckpointStore(aside / "checkpoints").steps():
        place = f"{_CHECKPOINTS}step-{step:06d}"
        if not wanted:
            shutil.rmtree(aside / place)
            continue
        for name in of_checkpoints:
            if name.startswith(f"{place}/") and not name.endswith(f"/{MANIFEST}"):
                get(name)
        with contextlib.suppress(OSError, ValueError):
            Manifest.parse((aside / place / MANIFEST).read_bytes()).check(aside / place)
            wanted = False
    aside.rename(folder)
