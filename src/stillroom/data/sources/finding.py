"""Find the files of a spec: a file, a glob or a folder, here or behind a URL."""

from __future__ import annotations

import difflib
import glob
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from stillroom.config.extensions import READERS
from stillroom.data.sources.compressed import COMPRESSED, data_suffix
from stillroom.errors import DataError
from stillroom.remote import is_url, local_copy

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+")  # org/name, without the suffix of a file


def locate(spec: str) -> list[Path]:
    """The files of a spec, sorted. Raise if there are none or if one has a suffix without a reader."""
    if is_url(spec):
        return _remote(spec)
    path = Path(spec).expanduser()
    try:
        is_there = path.exists()
    except OSError as error:  # not a valid file name
        raise DataError(f"{spec[:80]} is no name of a file: {error.strerror}", advice=["check data.train"]) from error
    if path.is_dir():
        return _inside(path, spec)
    if is_there:
        paths = [path]
    elif glob.has_magic(spec):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        paths = sorted(match for match in map(Path, names) if match.is_file())
        if not paths:
            raise DataError(f"no file matches {spec}", advice=[f"list what is there: ls {path.parent}"])
    else:
        hub = [f"for the dataset of a hub write hf:{spec}"] if _HUB_NAME.fullmatch(spec) else []
        raise DataError(f"{spec} does not exist", advice=[*hub, *_similar_names(path)])
    return _with_readers(paths, spec)


def _with_readers(paths: list[Path], spec: str) -> list[Path]:
    for file in paths:
        if data_suffix(file) not in READERS:
            raise DataError(
                f"{file} has the extension {data_suffix(file) or 'of no kind'!r}, which is not read",
                where=spec if len(paths) > 1 else "",
                advice=[f"rename or convert it to one of {_read_suffixes()}"],
            )
    return paths


def _remote(url: str) -> list[Path]:
    """Copies of the files of a URL. A folder holds files of one format, as here."""
    folder = _copied(url)
    paths = _files(folder)
    is_file = [path.name for path in paths] == [url.rstrip("/").rpartition("/")[2]]
    return _with_readers(paths, url) if is_file or glob.has_magic(url) else _inside(folder, url)


@lru_cache(maxsize=64)
def _copied(url: str) -> Path:
    """Once a process: data that is read twice is the same, whatever becomes of the store."""
    return local_copy(url)


def unread(spec: str, paths: list[Path]) -> list[Path]:
    """The files of a folder that are not among `paths`; of any other spec none."""
    folder = Path(spec).expanduser()
    return sorted(set(_files(folder)) - set(paths)) if folder.is_dir() else []


def _inside(folder: Path, spec: str) -> list[Path]:
    """The data files of a folder and its folders. Raise unless all have one format: a README.txt is no data."""
    paths = [path for path in _files(folder) if data_suffix(path) in READERS]
    if not paths:
        raise DataError(
            f"{spec} is a folder without data files",
            advice=[f"it holds no {_read_suffixes()}, and is no folder of datasets.save_to_disk", "name a file"],
        )
    kinds = Counter(data_suffix(path) for path in paths)
    if len(kinds) > 1:
        held = ", ".join(f"{suffix} ({count:,})" for suffix, count in sorted(kinds.items()))
        raise DataError(
            f"{spec} is a folder with data files of several kinds: {held}",
            advice=[f"name those of one kind with a glob: '{folder / '**' / f'*{suffix}*'}'" for suffix in kinds],
        )
    return paths


def _files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _read_suffixes() -> str:
    return f"{', '.join(READERS.names())}, also with {' or '.join(COMPRESSED)}"


def _similar_names(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return [f"the folder {path.parent} does not exist either; check the path, or name a glob in quotes"]
    names = sorted(entry.name for entry in path.parent.iterdir())
    similar = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if data_suffix(n) in READERS][:3]
    if similar:
        return [f"did you mean {path.parent / name}" for name in similar]
    return [f"{path.parent} holds no data files; for a hub dataset write hf:NAME, for embedded text builtin:stdlib"]
