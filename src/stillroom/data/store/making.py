"""Make the parts of an entry: objects of a file in, one file of tokens out. Done in this process or in several.

The other processes are started by name and not forked or spawned: a fork copies the locks of the tokenizer's threads,
and a spawned one would run a user's script again. They read the tokenizer from files and objects as JSON. A tokenizer
that is another one after that is not used there.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from stillroom import errors
from stillroom.config.data import DataConfig
from stillroom.data.encode import Encoder, Tokenizer
from stillroom.data.records import Record, Tally, Unusable
from stillroom.data.shaping import make_shaper
from stillroom.data.sources import Item
from stillroom.data.spans.encoder import TwoTokenizers
from stillroom.data.spans.reading import readings_of
from stillroom.data.store.part import Part, tally_values, write_part
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
    """Make parts in this process, of the one source that the configuration has."""

    config: DataConfig
    tokenizer: Tokenizer
    teacher: Tokenizer | None = None  # where it has a tokenizer of its own: its tokens and the spans are kept too
    num_at_once: int = 1

    @cached_property
    def _two(self) -> TwoTokenizers | None:
        return None if self.teacher is None else TwoTokenizers(self.tokenizer, self.teacher)

    def make(self, job: Job) -> Made:
        tally = job.tally
        pair = None if self._two is None else readings_of(self._two, self.config, tally)
        shape = make_shaper(self.config, self.tokenizer, tally, pair.chats if pair is not None else None)
        records: list[Record] = []
        for where, value in job.items:
            try:
                records.append(shape(where, value))
            except Unusable as error:
                tally.refuse(where, str(error))
        tally.counters["records"] += len(records)
        if pair is not None:
            part = Part.of_pairs(list(pair.encoder.documents(records)), tally)
        else:
            part = Part.of(list(Encoder(self.tokenizer, tally, self.config.bos).tokenized(records)), tally)
        write_part(job.path, part)
        return Made(len(records), len(part.ids))

    def close(self) -> None:
        return


class Workers:
    """Make parts in other processes. Raise `DataError` if they cannot be started with this tokenizer."""

    def __init__(self, here: Here, tokenizer_digest: str, num_processes: int) -> None:
        self.num_at_once = num_processes
        self._here, self._lock = here, threading.Lock()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stillroom.data.store.worker"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(num_processes)
        ]
        self._free: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        try:
            with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
                self._set_up(folder, tokenizer_digest)
        except BaseException:
            self.close()
            raise

    def _set_up(self, folder: str, tokenizer_digest: str) -> None:
        folders = {}
        for role, tokenizer in (("tokenizer", self._here.tokenizer), ("teacher", self._here.teacher)):
            saved: Any = tokenizer
            if saved is not None:
                folders[role] = str(Path(folder) / role)
                saved.save_pretrained(folders[role])
        setup = {"config": self._here.config.model_dump(mode="json"), **folders}
        for process in self._processes:
            _send(process, json.dumps(setup))
        for process in self._processes:
            if _answer(process)["tokenizer_digest"] != tokenizer_digest:
                raise DataError("the tokenizer is another one after it was saved and read again")
            self._free.put(process)

    def make(self, job: Job) -> Made:
        try:
            message = json.dumps({"path": str(job.path), "items": job.items, "tally": tally_values(job.tally)})
        except (TypeError, ValueError):  # a date or bytes in a column of Parquet
            with self._lock:
                return self._here.make(job)
        process = self._free.get()
        try:
            _send(process, message)
            answer = _answer(process)
        finally:
            self._free.put(process)
        return Made(answer["num_records"], answer["num_tokens"])

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not sent is not missed
                        pipe.close()


# -- messages: 8 bytes of length, then JSON -------------------------------------------------------------------


def write_message(pipe: IO[bytes], text: str) -> None:
    message = text.encode("utf-8")
    pipe.write(len(message).to_bytes(8, "little") + message)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = pipe.read(8)
    message = pipe.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    return json.loads(message) if message else None


def error_values(error: StillroomError | OSError) -> dict[str, Any]:
    if isinstance(error, OSError):
        return {"errno": error.errno, "what": error.strerror or str(error)}
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "advice": error.advice}


def _send(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    try:
        write_message(process.stdin, text)
    except OSError as error:
        raise _ended(process) from error


def _answer(process: subprocess.Popen[bytes]) -> Any:
    """The answer to the last message; an error of ours is raised here."""
    assert process.stdout is not None
    answer = read_message(process.stdout)
    if answer is None:
        raise _ended(process)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["what"])
    if "kind" in answer:
        raise getattr(errors, answer["kind"])(answer["what"], where=answer["where"], advice=answer["advice"])
    return answer


def _ended(process: subprocess.Popen[bytes]) -> DataError:
    code = process.poll()
    return DataError(
        f"a process that tokenizes ended by itself (exit code {'unknown' if code is None else code})",
        where="data.cache",
        advice=["its last words are above; memory may have been short", "--set data.cache=off tokenizes in this one"],
    )
