"""A process that tokenizes: `python -m stillroom.data.store.worker`, started and fed by `making.Workers`.

The first message names the configuration and the tokenizer's folder, each other one is a job. The process ends when its
input does, so it does not outlive the one that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stillroom.config.data import DataConfig
from stillroom.data.store.keys import tokenizers_digest
from stillroom.data.store.making import Here, Job, error_values, read_message, write_message
from stillroom.data.store.part import tally_of
from stillroom.errors import StillroomError


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the one that started us decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    setup = read_message(sys.stdin.buffer)
    if setup is None:
        return
    tokenizer = AutoTokenizer.from_pretrained(setup["tokenizer"], local_files_only=True)
    teacher = AutoTokenizer.from_pretrained(setup["teacher"], local_files_only=True) if "teacher" in setup else None
    here = Here(DataConfig.model_validate(setup["config"]), tokenizer, teacher)
    write_message(answers, json.dumps({"tokenizer_digest": tokenizers_digest(tokenizer, teacher)}))
    while (message := read_message(sys.stdin.buffer)) is not None:
        write_message(answers, json.dumps(_answer(here, message)))


def _answer(here: Here, message: dict[str, Any]) -> dict[str, Any]:
    items = [(where, value) for where, value in message["items"]]
    try:
        made = here.make(Job(Path(message["path"]), items, tally_of(message["tally"])))
    except (StillroomError, OSError) as error:
        return error_values(error)
    return {"num_records": made.num_records, "num_tokens": made.num_tokens}


if __name__ == "__main__":
    main()
