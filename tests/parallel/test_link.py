"""Laws of processes that hold the teacher: messages arrive whole, and no end waits for one that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from process_jobs import environment, free_port, losses

from stillroom.errors import ConfigError, Interrupted
from stillroom.parallel import Parallel, link
from stillroom.parallel.link import Link, check_teacher_ranks, make_links, telling_the_end
from stillroom.teachers.answering import answer_all


def linked() -> tuple[Link, Link]:
    """Both ends of a connection: a trainer's and its teacher's."""
    store, ends = dist.HashStore(), dict[bool, Link]()

    def make(is_teacher: bool) -> None:
        ends[is_teacher] = Link(store, 0, is_teacher=is_teacher, timeout=timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(is_teacher,)) for is_teacher in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[False], ends[True]


def test_a_message_arrives_as_it_was_sent() -> None:
    trainer, teacher = linked()
    tensors = [torch.randn(3, 2).bfloat16(), torch.arange(4), torch.empty(0, 5), torch.randn(2, 3).t()]
    sending = threading.Thread(target=trainer.send, args=({"do": "ask", "text": "\u00e4"}, tensors))
    sending.start()
    header, found = teacher.receive()
    sending.join()
    assert header == {"do": "ask", "text": "\u00e4"}
    for sent, arrived in zip(tensors, found, strict=True):
        assert arrived.dtype == sent.dtype and torch.equal(arrived, sent)
    assert trainer.sent_bytes == teacher.received_bytes > 0


def test_an_end_whose_other_end_is_gone_is_interrupted_and_does_not_wait_again() -> None:
    trainer, teacher = linked()
    del teacher
    with pytest.raises(Interrupted, match="another process of this run is gone"):
        trainer.receive()
    trainer.end(0)
    trainer, teacher = linked()
    del trainer
    with pytest.raises(Interrupted, match="another process of this run is gone"):
        answer_all([teacher], lambda: pytest.fail("nobody asked"))


@pytest.mark.parametrize(("error", "exit_code"), [(None, 0), (Interrupted("later"), 75), (KeyError("x"), 1)])
def test_the_process_that_holds_the_teacher_ends_as_the_trainer_does(error: Exception | None, exit_code: int) -> None:
    parallel, found = Parallel(), []
    parallel.link, teacher = linked()
    answering = threading.Thread(target=lambda: found.append(answer_all([teacher], lambda: pytest.fail("asked"))))
    answering.start()
    with nullcontext() if error is None else pytest.raises(type(error)), telling_the_end(parallel):
        if error is not None:
            raise error
    answering.join()
    assert found == [exit_code]


def test_a_trainer_asks_the_teacher_of_its_number_modulo_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "Link", lambda _store, number, **how: (number, how["is_teacher"]))
    found: list[Any] = [make_links(dist.HashStore(), rank, 7, 2, timedelta(seconds=1)) for rank in range(7)]
    assert found[:5] == [[(rank, False)] for rank in range(5)]
    assert found[5:] == [[(0, True), (2, True), (4, True)], [(1, True), (3, True)]]


def test_a_teacher_that_nobody_asks_is_refused() -> None:
    for ranks, size in ((0, 1), (1, 2), (2, 5)):
        check_teacher_ranks(ranks, size)
    for ranks, size in ((1, 1), (2, 3), (4, 4)):
        with pytest.raises(ConfigError, match=f"teacher.ranks = {ranks} of {size} processes"):
            check_teacher_ranks(ranks, size)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "teacher"])
def test_a_process_whose_teacher_or_trainer_was_killed_ends_and_can_be_resumed(
    victim: str, world: Path, tmp_path: Path
) -> None:
    given = tiny.settings(world) | {"train.max_steps": 4000, "train.save_steps": 5, "teacher.ranks": 1}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "stillroom", "distill", "--out", str(tmp_path / "run"), "--device", "cpu", *words]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    trainer, teacher = (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                         env=environment(RANK=str(rank), **place))
        for rank in range(2)
    )  # fmt: skip
    left, killed = (teacher, trainer) if victim == "trainer" else (trainer, teacher)
    try:
        while trainer.poll() is None and not (tmp_path / "run" / "checkpoints" / "step-000005").is_dir():
            time.sleep(0.05)
        os.kill(killed.pid, signal.SIGKILL)
        _out, told = left.communicate(timeout=120)
    finally:
        trainer.kill()
        teacher.kill()
    assert left.returncode == 75, told[-3000:]
    assert "another process of this run is gone" in " ".join(told.split())
    assert len(losses(tmp_path / "run")) >= 5
    manifest = tmp_path / "run" / "checkpoints" / "step-000005" / "manifest.json"
    assert not manifest.exists() or json.loads(manifest.read_bytes())
