"""Build a run, train it step by step, recover from faults, and write its results.

The package can be called, for a loop over the steps of a run:

    run = stillroom.training(teacher="org/large", student="org/small", data="texts.jsonl", out="runs/mine")
    for step in run:
        print(step.number, step.loss, step.terms, step.verdict)
        if step.number == 100:
            step.set_weight("ce", 0.1)  # from the next step on
        if step.loss < 1.5:
            step.stop()  # saves, and ends the run
    run.result

The arguments are those of `stillroom.distill`; `help(stillroom.api.training)` says what happens between two steps.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module is an attribute of its package, so a function of the same name could not be."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("stillroom.api").training(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
