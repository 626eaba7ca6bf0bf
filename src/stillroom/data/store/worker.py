"""A process that tokenizes: `python -m stillroom.data.store.worker`, started and fed by `making.Workers`.

Messages are a length of 8 bytes and a pickle; the first is the `Here` that does the work, each other one a `Job`. The
process ends when its input does, so it does not outlive the one that started it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from stillroom.data.store.making import Here
from stillroom.errors import StillroomError


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the one that started us decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    here: Here = _read()
    _write(answers, True)
    while (job := _read()) is not None:
        try:
            answer: Any = here.make(job)
        except (StillroomError, OSError) as error:
            answer = error
        _write(answers, answer)


def _read() -> Any:
    size = sys.stdin.buffer.read(8)
    return pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "little"))) if len(size) == 8 else None


def _write(answers: Any, value: object) -> None:
    message = pickle.dumps(value)
    answers.write(len(message).to_bytes(8, "little") + message)
    answers.flush()


if __name__ == "__main__":
    main()
