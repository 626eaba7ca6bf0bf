"""Replace files and folders atomically and durably, list them with sha256 sums, and check names from outside.

A `Manifest` lists files with their sha256 and size. Checkpoints and runs in a store have one, each with its own extra
fields. The sums detect damage, not an attacker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import numbers
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillroom.core.errors import OutsideName, masked
from stillroom.core.locks import Lock, hold

TEMPORARY = ".tmp-"
ROUNDS = "rounds"  # in a run's folder: the runs that its student was cut in before
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFIT = re.compile(r"[\\\x00-\x1f]|^[A-Za-z]:")  # another system's separators and drives, and control characters
LARGEST = 2**53  # what every reader of JSON takes for the same whole number
Count = Annotated[int, Field(ge=0, le=LARGEST)]
_FULL_WORDS = re.compile(r"no space left|quota exceeded|os error (?:28|122)\b|file too large", re.IGNORECASE)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk. Libraries written in Rust say so only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return bool(_FULL_WORDS.search(str(error)))


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, without the error number."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]


def inside(folder: Path, name: str) -> Path:
    """The path of a name that a file, a manifest or a store gave. Raise for one that is not a plain name below.

    Every such name is joined here: `..`, an absolute path or a drive would lead anywhere, and a hidden name is that of
    a file that Stillroom keeps next to those that are named.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(not part or part.startswith(".") or _UNFIT.search(part) for part in parts):
        raise OutsideName(
            f"{name!r} is not the name of a file within {folder}",
            where="the name is from outside of this machine",
            advice=["do not use what names it: ordinary programs do not write such a name"],
        )
    return folder.joinpath(*parts)


def is_hidden(name: str) -> bool:
    """Whether a name of a listing is left out: a part of it begins with a dot. One with `..` is refused instead."""
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) and not {".", ".."} & {*parts}


def new_run_folder(name: str) -> Path:
    """A folder below `runs` that is not there yet, by a name and the time; two runs may begin in one second."""
    first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = first, 2
    while folder.exists():
        folder, number = first.with_name(f"{first.name}-{number}"), number + 1
    return folder


# -- schemas and manifests ------------------------------------------------------------------


class Stored(BaseModel):
    """Base of the schemas for files that a run reads back.

    A checksum shows that a file is what was written, not that its values can be used. No value is converted, none is
    infinite or NaN; unknown keys are ignored.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, value: object) -> Self:
        """Read JSON values. Raise ValueError in one line, with the key that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "the value"
            raise ValueError(f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


class FileSum(Stored):
    """sha256 and size of a file."""

    sha256: str
    bytes: Count = 0


def sum_of_bytes(contents: bytes) -> FileSum:
    return FileSum(sha256=hashlib.sha256(contents).hexdigest(), bytes=len(contents))


def sum_of_file(path: Path) -> FileSum:
    with path.open("rb") as file:
        return FileSum(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=os.fstat(file.fileno()).st_size)


class Manifest(Stored):
    """Files of a folder with their sums. A format adds its own fields."""

    files: dict[str, FileSum]

    @classmethod
    def parse(cls, contents: bytes) -> Self:
        """Read a manifest. Raise ValueError if it is not one."""
        try:
            return cls.of(json.loads(contents))
        except RecursionError as error:
            raise ValueError("its values are nested too deeply") from error

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(), allow_nan=False, sort_keys=True).encode("utf-8")

    def check(self, folder: Path) -> None:
        """Raise ValueError for the first file whose sum differs, OSError for one that cannot be read."""
        for name, expected in self.files.items():
            if sum_of_file(inside(folder, name)).sha256 != expected.sha256:
                raise ValueError(f"{name} does not match its sha256")


# -- writing ---------------------------------------------------------------------------------------------


def write_durably(path: Path, contents: bytes | Iterable[bytes | memoryview]) -> FileSum:
    """Write a file and flush it to the disk. Return its sum. Contents may come in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in (contents,) if isinstance(contents, bytes) else contents:
            digest.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(sha256=digest.hexdigest(), bytes=size)


def write_atomically(path: Path, contents: bytes, *, mark: str = "") -> None:
    """Replace a file: readers see the old one or the new one. A failed write leaves the old one.

    `mark` tells writers apart where they may be on several machines, whose process ids may be the same.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{mark or os.getpid()}")
    try:
        write_durably(temporary, contents)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename durable. Does nothing on a platform that cannot open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it: a kill in between leaves no part of it under its name."""
    gone = folder.with_name(f"{TEMPORARY}gone-{folder.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def swap_in(temporary: Path, final: Path) -> None:
    """Move a folder into its place. The old one is kept under another name until then.

    After a kill between the two renames the place is empty; `mend` puts the old folder back.
    """
    retired = final.with_name(f"{TEMPORARY}old-{final.name}")
    shutil.rmtree(retired, ignore_errors=True)
    if final.exists():
        final.rename(retired)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def mend(folder: Path) -> int:
    """Undo replacements that a kill interrupted, and remove unfinished folders. Return how many there were.

    Only for the owner of the folder: it would also remove what another process is writing.
    """
    leftovers = [path for path in folder.glob(f"{TEMPORARY}*") if path.is_dir() and not path.is_symlink()]
    for path in leftovers:
        name = path.name.removeprefix(f"{TEMPORARY}old-")
        if name != path.name and not (folder / name).exists():
            path.rename(folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)
    return len(leftovers)


@contextlib.contextmanager
def replaced_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder; move it into place when the body succeeds. The old one stays until then.

    The parent folder must exist: one that was deleted is not made again.
    """
    _remove_abandoned(final)
    temporary, lock = _new_locked_folder(final)
    with lock:
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    _flush_file(path)
            flush_folder(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        swap_in(temporary, final)


def _new_locked_folder(final: Path) -> tuple[Path, Lock]:
    """Make a temporary folder next to `final` and lock it. The lock is next to it, because the folder is renamed."""
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}-{secrets.token_hex(4)}")
    lock = hold(_lock_of(temporary))
    try:
        temporary.mkdir()
    except OSError:
        lock.release()
        raise
    return temporary, lock


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _remove_abandoned(final: Path) -> None:
    """Remove unfinished folders whose process has ended: their lock is free."""
    ours = re.compile(re.escape(f"{TEMPORARY}{final.name}-") + r"\d+(-[0-9a-f]{8})?(\.lock)?")
    for path in [path for path in final.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()]:
        left = path.with_name(path.name.removesuffix(".lock"))
        with contextlib.suppress(OSError), hold(_lock_of(left)):
            shutil.rmtree(left, ignore_errors=True)


def _flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- strict ----------------------------------------------------------------------------------------
# Convert values to strict JSON: a number that is not finite becomes null, with a sibling key that names it.
#
# Everything that is written as a record or printed as JSON passes here, so this is also where keys are masked.


NONFINITE = "_nonfinite"
NONFINITE_WORDS = ("nan", "inf", "-inf")


def strict(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping as plain JSON values, with a sibling key for each value that is not finite.

    The sibling of a list maps indices to names: `"norms": [0.5, null], "norms_nonfinite": {"1": "nan"}`; indices into
    nested lists are joined by dots.
    """
    plain: dict[str, Any] = {}
    siblings: dict[str, Any] = {}
    for key, value in fields.items():
        lost: dict[str, str] = {}
        name = masked(str(key))
        plain[name] = _plain(value, "", lost)
        if lost:
            siblings[f"{name}{NONFINITE}"] = lost.get("", lost)
    return plain | siblings


def _plain(value: Any, place: str, lost: dict[str, str]) -> Any:
    """`value` as JSON. What is not finite becomes None and is noted in `lost` under its index."""
    match value:
        case None | bool():
            return value
        case str():
            return masked(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():  # numpy's scalars too
            number = float(value)
            if math.isfinite(number):
                return number
            lost[place] = _word(number)
            return None
        case Mapping():
            return strict(value)
        case list() | tuple():
            below = f"{place}." if place else ""
            return [_plain(item, f"{below}{index}", lost) for index, item in enumerate(value)]
        case os.PathLike():
            return masked(str(os.fspath(value)))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return strict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    raise TypeError(f"{type(value).__name__} has no place in an event: give numbers, text, lists or mappings")


def _word(number: float) -> str:
    if math.isnan(number):
        return "nan"
    return "inf" if number > 0 else "-inf"


# ---- Addresses of stores

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash is left of two where a URL was taken for a path


def is_url(spec: object) -> bool:
    return bool(_URL.match(str(spec)))


def is_in_store(place: object) -> bool:
    """Whether a place is the address of a store, and not a local folder of that name."""
    return is_url(place) and not Path(str(place)).exists()
