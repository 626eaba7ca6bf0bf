"""Tensors that several processes hold in parts, in safetensors files of each process.

torch.distributed.checkpoint plans which process writes what and reads any part of any tensor back, whatever the number
of processes then is. Its Hugging Face storage is used, because its own format pickles.
"""

from __future__ import annotations

import json
import logging
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stillroom.core.files import FileSum, Manifest, reason_of, sum_of_file

if TYPE_CHECKING:
    from stillroom.parallel import Parallel

_FILE_BYTES = 1 << 28  # of all processes together; a smaller state is one file for each process
_MOST_FILES = 16  # of a process
_MOST_OPEN = 512  # files of all processes, which are open at once when they are joined
WHOLE_FILE = "model-00001-of-00001.safetensors"  # as torch names it
_SEPARATOR = "/"  # between group and name


def write_shards(folder: Path, groups: Mapping[str, Mapping[str, Tensor]], parallel: Parallel) -> dict[str, FileSum]:
    """Write what this process holds, together with the others. Return the sums of the files it wrote.

    DTensors are written by each process that holds a part, plain tensors by one.
    """
    _save(folder, _flat(groups), parallel)
    return {
        path.name: sum_of_file(path) for path in sorted(folder.glob(f"shard-{parallel.rank + 1:05d}-*.safetensors"))
    }


def write_whole(folder: Path, tensors: Mapping[str, Tensor], parallel: Parallel) -> None:
    """Write tensors that are held in parts as `WHOLE_FILE`, by way of files: no process holds the whole.

    The first process joins them, one tensor at a time.
    """
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    parts = folder / "parts"
    _save(parts, dict(tensors), parallel)
    if parallel.is_first:
        with quiet_dcp():
            consolidate_safetensors_files(str(parts), str(folder), dict.fromkeys(tensors, 1))


def _save(folder: Path, state: dict[str, Tensor], parallel: Parallel) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    files = _in_files(state, min(_MOST_FILES, max(1, _MOST_OPEN // parallel.size)))
    with _quiet_log(), _as_os_error():
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        save(state, storage_writer=writer, process_group=parallel.group)


def _in_files(state: Mapping[str, Tensor], most: int) -> dict[str, int]:
    """The number of the file of each tensor, from 1: a file is in memory as a whole when it is written."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    room, number, filled = max(_FILE_BYTES, -(-sum(sizes.values()) // most)), 1, 0
    files: dict[str, int] = {}
    for name, size in sizes.items():
        if filled and filled + size > room and number < most:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Without what torch logs about its internals."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_dcp() -> Iterator[None]:
    """Without its warnings either. Not for a second thread: Python's list of filters is the same for all threads."""
    with _quiet_log(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn torch's error about the files of any process into the OSError it was, in every process."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise OSError(getattr(first, "errno", None) or 5, reason_of(first)) from error


def read_shards(folder: Path, manifest: Manifest) -> tuple[dict[str, ShardGroup], Mapping[str, Any]]:
    """The groups of tensors and the JSON values of a checkpoint whose sha256 sums hold. No tensor is read yet."""
    manifest.check(folder)
    unknown = {path.name for path in folder.glob("*.safetensors")} - set(manifest.files)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is not in the manifest")
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with _as_value_errors():
        known: Mapping[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    groups: dict[str, dict[str, Tensor]] = {}
    for key, about in known.items():
        group, _, name = key.partition(_SEPARATOR)
        groups.setdefault(group, {})[name] = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
    found = {group: ShardGroup(folder, group, shapes) for group, shapes in groups.items()}
    return found, json.loads((folder / "state.json").read_bytes())


class ShardGroup(Mapping[str, Tensor]):
    """Named tensors in the files of several processes, read when they are asked for."""

    def __init__(self, folder: Path, group: str, shapes: Mapping[str, Tensor]) -> None:
        self._folder, self._group, self._shapes = folder, group, shapes

    def into(self, present: Mapping[str, Tensor]) -> None:
        """Read into tensors that are there: of a DTensor only the part that this process holds."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        state: dict[str, Any] = _flat({self._group: present})
        with quiet_dcp(), _as_value_errors():
            load(state, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)

    def __getitem__(self, name: str) -> Tensor:
        whole = torch.empty_like(self._shapes[name], device="cpu")
        self.into({name: whole})
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Raise ValueError for files that do not fit. torch wraps its reason in an error that is not an `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _trace in error.failures.values()]
        raise ValueError(reason_of(causes[0] if causes else error)) from error
    except (LookupError, struct.error, TypeError) as error:
        raise ValueError(f"the tensors cannot be read: {reason_of(error)}") from error


def _flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{group}{_SEPARATOR}{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
