"""Claim a run's folder, and read and write its description."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from stillroom import __version__
from stillroom.config import Config
from stillroom.config.load import build
from stillroom.engine.run_folder import inputs, paths
from stillroom.engine.run_folder.trust import NONE, Trust
from stillroom.errors import CannotSave, ConfigError, StillroomError
from stillroom.files import reason_of, write_atomically
from stillroom.locks import Lock, LockHeld, describe_owner, hold_again
from stillroom.remote import Sender

CONFIG, EVENTS, SUMMARY = "config.json", "events.jsonl", "summary.json"
LOCK = "run.lock"
LOCK_FILES = (LOCK, f"{LOCK}.soft")
_CUT = "cut.json"  # written by engine/building/shrink_student.py before config.json

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
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
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
            "paths": paths.describe(self.config, self.folder),
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
        if self.is_resumed or self.is_begun:
            return
        for name in (CONFIG, EVENTS, _CUT):
            (self.folder / name).unlink(missing_ok=True)
        inputs.remove(self.folder)
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
    return hold_again(folder / LOCK)


def find_run(folder: Path, config: Config) -> tuple[bool, Config]:
    """(whether the folder holds a run of this configuration, the configuration with its paths resolved)."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", where="--out", advice=["choose another folder with --out"])
    if not folder.exists() or all(_is_before_a_run(path) for path in folder.iterdir()):
        return False, config
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder} is not empty and holds no run of ours",
            where="--out",
            advice=["choose another folder with --out", "nothing in it was touched"],
        )
    stored, known = _read(folder)
    given = paths.absolute(config, known, stored)
    if not given.data.day:
        given = given.on_day(stored.data.day)  # the day on which the run began
    differences = differing_keys(stored, given)
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ConfigError(
            f"{folder} holds a run of another configuration: {shown}",
            where="--out",
            advice=["choose another folder with --out", f"or continue that run: stillroom resume {folder}"],
        )
    return True, given


def _is_before_a_run(path: Path) -> bool:
    """Whether a path may be left by a process that was killed before its run began."""
    return path.name in (_CUT, *LOCK_FILES) or inputs.is_ours(path)


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
            raise ConfigError(f"{folder} holds no run: there is no config.json", advice=["give the folder of a run"])
        description = json.loads(path.read_bytes() if contents is None else contents)
        trust.check_table(description["config"], str(path))
        config, known = build(description["config"], str(path)), description.get("paths", {})
        return paths.resolved(config, known, folder), dict(known)
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
        and not (key in paths.KEYS and paths.is_same_file(before.get(key), after.get(key)))
    ]


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else key))
    return flat
