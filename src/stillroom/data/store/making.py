"""Make the parts of an entry: objects of a file in, one file of tokens out. Done in this process or in several.

The other processes are started by name and not forked or spawned: a fork copies the threads' locks of the tokenizer,
and a spawned one would run a user's script again. Objects go to them through a pipe, as pickles that never touch a
file.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stillroom.config.schema import DataConfig
from stillroom.data.encode import Encoder, Tokenizer
from stillroom.data.records import Record, Tally, Unusable
from stillroom.data.shaping import make_shaper
from stillroom.data.sources import Item
from stillroom.data.store.part import Part, write_part
from stillroom.errors import DataError, StillroomError


@dataclass(frozen=True)
class Job:
    """Objects of a file, where their part goes, and what was counted while they were read."""

    path: Path
    items: Sequence[Item]
    tally: Tally


@dataclass(frozen=True)
class Made:
    num_records: int
    num_tokens: int


class Maker(Protocol):
    """Makes parts. `num_at_once` jobs may run at the same time, each in a thread of its own."""

    @property
    def num_at_once(self) -> int: ...
    def make(self, job: Job) -> Made: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Here:
    """Make parts in this process."""

    config: DataConfig
    tokenizer: Tokenizer
    num_at_once: int = 1

    def make(self, job: Job) -> Made:
        tally = job.tally
        shape = make_shaper(self.config, self.tokenizer, tally)
        records: list[Record] = []
        for where, value in job.items:
            try:
                records.append(shape(where, value))
            except Unusable as error:
                tally.refuse(where, str(error))
        tally.counters["records"] += len(records)
        part = Part.of(list(Encoder(self.tokenizer, tally, self.config.bos).tokenized(records)), tally)
        write_part(job.path, part)
        return Made(len(records), len(part.ids))

    def close(self) -> None:
        return


class Workers:
    """Make parts in other processes. Raise `DataError` if they cannot be started with this tokenizer."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, num_processes: int) -> None:
        self.num_at_once = num_processes
        try:
            setup = pickle.dumps(Here(config, tokenizer))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(f"the tokenizer cannot be sent to another process: {error}") from error
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stillroom.data.store.worker"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(num_processes)
        ]
        self._free: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        try:
            for process in self._processes:
                _send(process, setup)
            for process in self._processes:
                _answer(process)
                self._free.put(process)
        except BaseException:
            self.close()
            raise

    def make(self, job: Job) -> Made:
        process = self._free.get()
        try:
            _send(process, pickle.dumps(job))
            made = _answer(process)
        finally:
            self._free.put(process)
        assert isinstance(made, Made)
        return made

    def close(self) -> None:
        """End the processes. They are only waited for when they were asked for nothing."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(len(message).to_bytes(8, "little") + message)
        process.stdin.flush()
    except OSError as error:
        raise _ended(process) from error


def _answer(process: subprocess.Popen[bytes]) -> Any:
    """The answer to the last message; an error of ours is raised here."""
    assert process.stdout is not None
    size = process.stdout.read(8)
    message = process.stdout.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if not message:
        raise _ended(process)
    answer = pickle.loads(message)
    if isinstance(answer, StillroomError | OSError):
        raise answer
    return answer


def _ended(process: subprocess.Popen[bytes]) -> DataError:
    code = process.poll()
    return DataError(
        f"a process that tokenizes ended by itself (exit code {'unknown' if code is None else code})",
        where="data.cache",
        advice=[
            "its last words are above; memory may have been short",
            "--set data.cache=off tokenizes in this process",
        ],
    )
