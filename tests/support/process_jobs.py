"""Processes without a second import of torch: forks of the test process, with own streams and environment.

A fork ends like any process: by its exit code or by the signal that killed it. Tests of the entry point itself
(`python -m stillroom`, torchrun, what `--help` imports) start a new interpreter instead.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors.torch import load_file

from stillroom.telemetry import read_events

TIMEOUT = 240.0  # seconds; no test asserts a duration, this one ends a hang


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the number of the signal that killed it) and what it printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Everything printed, as one line: the console breaks lines anywhere."""
        return " ".join((self.out + self.err).split())


class Child:
    """A forked process. Its output goes to files, so nobody has to read a pipe."""

    def __init__(self, work: Callable[[], object], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stillroom-child-")
        self._code: int | None = None
        out, err = (os.open(Path(self._folder.name) / name, os.O_CREAT | os.O_WRONLY) for name in ("out", "err"))
        self.pid = os.fork()
        if self.pid == 0:
            _become(work, environment, out, err)
        os.close(out)
        os.close(err)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"a child ran for more than {timeout} s:\n{self._ended().said[-3000:]}")
            time.sleep(0.01)
        return self._ended()

    def kill(self) -> None:
        """End the process if it is still there, and wait until it is gone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _ended(self) -> Ended:
        read = [(Path(self._folder.name) / name).read_text(encoding="utf-8") for name in ("out", "err")]
        return Ended(self._code if self._code is not None else 0, *read)


def _become(work: Callable[[], object], environment: Mapping[str, str], out: int, err: int) -> NoReturn:
    """Be a process of its own: nothing of pytest's streams, exit handlers or signal handlers is left."""
    code = 1
    try:
        atexit._clear()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        mine = dict(environment)  # which may be os.environ itself
        os.environ.clear()
        os.environ.update(mine)
        code = _code_of(work)
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - a child must never run the rest of the tests
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code_of(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def environment(**over: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **over}


def command(words: Sequence[str], **over: str) -> Child:
    """Start a command of the command line."""

    def work() -> None:
        from stillroom.cli import main

        sys.argv = ["stillroom", *words]
        main(list(words))

    return Child(work, environment(**over))


def ranks(size: int) -> list[dict[str, str]]:
    """The environment of each process of a group, as torchrun sets it."""
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def commands(each: Iterable[Sequence[str]]) -> list[Child]:
    """Start one command in each process of a group."""
    listed = list(each)
    return [command(words, **rank) for words, rank in zip(listed, ranks(len(listed)), strict=True)]


def group(size: int, work: Callable[[], object]) -> list[Ended]:
    """Do `work` in each of `size` processes that find each other by their environment; all must end well."""
    return _well([Child(work, environment(**rank)) for rank in ranks(size)])


def alone(work: Callable[[], object]) -> Ended:
    """Do `work` in a process of its own, which must end well."""
    return _well([Child(work, environment())])[0]


def _well(children: Sequence[Child]) -> list[Ended]:
    ends = wait_for(children, 2 * TIMEOUT)
    for ended in ends:
        assert ended.code == 0, ended.said[-4000:]
    return ends


def wait_for(children: Sequence[Child], timeout: float = TIMEOUT) -> list[Ended]:
    """Wait until all have ended. None outlives the test, whatever happens."""
    try:
        return [child.wait(timeout) for child in children]
    finally:
        for child in children:
            child.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(folder: Path, key: str = "train_loss") -> list[float]:
    """A value of each step of a run."""
    return [event[key] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def weights(folder: Path) -> torch.Tensor:
    """All weights of the student that a run wrote, end to end."""
    found = load_file(folder / "student" / "model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])
