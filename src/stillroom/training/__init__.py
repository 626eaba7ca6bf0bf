"""Build a run, train it step by step, recover from faults, and write its results.

The package can be called: `for step in stillroom.training(config, out="runs/mine"): ...` is `stillroom.api.training`,
which has the arguments.
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
