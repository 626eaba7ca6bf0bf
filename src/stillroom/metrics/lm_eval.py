"""Benchmarks of lm-eval, where it is installed: by name, or by the path of a task's YAML file.

Tasks are loaded, with their data, before any model is: a benchmark that cannot be run is told at once.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.core.errors import ConfigError

_FILES = (".yaml", ".yml")
_Z = 1.959964  # of a 95 % interval
_PLAIN = ",none"  # figures of no filter


@dataclass(frozen=True)
class Tasks:
    """Benchmarks that can be run."""

    names: tuple[str, ...]
    manager: Any
    where: str = "--tasks"  # the setting that named them

    def run(self, network: Any, tokenizer: Any, *, batch_size: int) -> dict[str, dict[str, Any]]:
        """The figures of each task by name, with `samples`, `intervals` and which figures are better when higher."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        with _quiet(), _explained(self.names, self.where):
            model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=batch_size)
            found = simple_evaluate(
                model=model,
                tasks=list(self.names),
                batch_size=batch_size,
                task_manager=self.manager,
                log_samples=False,
            )
        found = found or {}
        better = found.get("higher_is_better") or {}
        return {
            task: figures_of(values, better.get(task) or {}) for task, values in (found.get("results") or {}).items()
        }


def open_tasks(names: Sequence[str], *, where: str = "--tasks") -> Tasks | None:
    """Load benchmarks. Refuse in one line, before anything else is loaded, what cannot be run."""
    if not names:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"{where} {','.join(names)} is run by lm-eval, which is not installed",
            where=where,
            advice=["pip install 'stillroom[eval]'"],
        )
    files = [name for name in names if name.endswith(_FILES)]
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"{name} is not there", where=where, advice=["name a benchmark, or a task's YAML file"])
    from lm_eval.tasks import TaskManager

    with _quiet(), _explained(names, where):
        manager = TaskManager(include_defaults=len(files) < len(names))  # its own index takes seconds
        manager.load(list(names))
    return Tasks(tuple(names), manager, where)


def figures_of(values: Mapping[str, Any], better: Mapping[str, Any]) -> dict[str, Any]:
    """One task's numbers: `acc,none` as `acc`, standard errors as 95 % intervals, the count as `samples`."""
    numbers = {
        name.removesuffix(_PLAIN): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    errors = {name.replace("_stderr", "", 1): numbers[name] for name in numbers if "_stderr" in name}
    figures: dict[str, Any] = {name: value for name, value in numbers.items() if "_stderr" not in name}
    bounds = {
        name: [figures[name] - _Z * error, figures[name] + _Z * error]
        for name, error in errors.items()
        if name in figures
    }
    count = figures.pop("sample_len", None)
    return {
        **figures,
        **({"samples": int(count)} if count is not None else {}),
        "intervals": bounds,
        "higher_is_better": {name: better.get(name.split(",")[0]) for name in figures},
    }


@contextmanager
def _explained(names: Sequence[str], where: str) -> Iterator[None]:
    """Report what a benchmark's loader or scorer raises as an error of that benchmark."""
    try:
        yield
    except (KeyError, ValueError, TypeError, LookupError, OSError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300].strip("\"'")
        raise ConfigError(
            f"lm-eval cannot run {', '.join(names)}: {reason or type(error).__name__}",
            where=where,
            advice=[
                "its data must be in the cache of datasets, or the network be there",
                "lm-eval ls tasks lists names",
            ],
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its remarks about models that are loaded already, and without asking git where we are."""
    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    logger.setLevel(logging.ERROR)
    from lm_eval import evaluator

    ask, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = ask
        logger.setLevel(level)
