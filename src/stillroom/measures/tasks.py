"""Benchmarks of lm-eval, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from stillroom.errors import ConfigError


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse in one line, before anything is loaded, what cannot be run."""
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"--tasks {','.join(tasks)} is run by lm-eval, which is not installed",
            where="--tasks",
            advice=["pip install 'stillroom[eval]'"],
        )


def run_tasks(network: Any, tokenizer: Any, tasks: Sequence[str], *, batch_size: int) -> dict[str, dict[str, float]]:
    """The figures of each task, by name. Names that lm-eval does not know are refused by it."""
    check_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found = simple_evaluate(model=model, tasks=list(tasks), batch_size=batch_size)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"lm-eval cannot run {', '.join(tasks)}: {error}", where="--tasks") from error
    results = found["results"] if found else {}
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in results.items()
    }
