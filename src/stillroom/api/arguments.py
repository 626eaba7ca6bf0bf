"""Check the arguments of the package's functions before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stillroom.errors import ConfigError

# The setting that each argument replaces.
SETTING = {
    "teacher": "teacher.model",
    "student": "student.model",
    "data": "data.train",
    "eval_data": "data.eval",
}


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"a {type(value).__name__}"
    return ConfigError(f"{name} is {shown}: expected {expected}", where=name)


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def path(value: object, name: str) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "the path of a folder")
    return Path(value).expanduser()


def flag(value: object, name: str, *, may_be_none: bool = True) -> None:
    if not isinstance(value, bool) and not (value is None and may_be_none):
        raise _wrong(name, value, "True, False or None" if may_be_none else "True or False")


def whole(value: object, name: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"a whole number of at least {least}")


def number(value: object, name: str, *, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (isinstance(value, int | float) and least <= value < math.inf):
        raise _wrong(name, value, f"a number of at least {least:g}")


def bos(value: object) -> None:
    if value != "auto" and not isinstance(value, bool):
        raise _wrong("bos", value, "'auto', True or False")


def device(value: object) -> str:
    """The name of a device, from a string or a `torch.device`."""
    if isinstance(value, str) and value:
        return value
    if type(value).__name__ == "device" and hasattr(value, "type"):
        return str(value)
    raise _wrong("device", value, "a torch.device, or 'auto', 'cpu', 'cuda', 'cuda:1'")


def listeners(value: object) -> tuple[Callable[[dict[str, Any]], None], ...]:
    if not isinstance(value, Sequence) or not all(callable(listener) for listener in value):
        raise _wrong("listeners", value, "a list of functions, each called with an event")
    return tuple(value)


def settings(value: object, given: Collection[str]) -> dict[str, Any]:
    """Dotted keys with their values. Raise if one repeats an argument."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong("settings", value, "a mapping of dotted keys to values, such as {'train.max_steps': 100}")
    twice = [role for role in given if SETTING[role] in value]
    if twice:
        raise ConfigError(f"{twice[0]} is given, and settings name {SETTING[twice[0]]}", where="settings")
    return dict(value)


# -- processes -------------------------------------------------------------------------------------------


def num_processes() -> int:
    """How many processes torchrun or accelerate started for one run."""
    return _environment("WORLD_SIZE", 1)


def is_first_process() -> bool:
    """Whether this process writes and prints for all."""
    return num_processes() == 1 or _environment("RANK", 0) == 0


def _environment(name: str, default: int) -> int:
    word = os.environ.get(name, str(default))
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"{name} is {word!r}, not a number", where="environment", advice=[f"unset {name}"]) from None
