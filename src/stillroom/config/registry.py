"""Objects by name that other packages can add to: objectives, divergences, readers of files and checkers.

Names are listed without importing what they stand for, so checking a configuration and `--help` need no torch.
Packages add names by entry points, a program by `register`. A built-in name cannot be replaced. The registries
are in `config/schema.py`; their entry points are

    stillroom.objectives   name = "package.module:RECIPE"   a stillroom.losses.Recipe
    stillroom.divergences  name = "package.module:MEMBER"   a stillroom.losses.divergences.Member
    stillroom.readers      suffix = "package.module:read"   a function (path, name, tally) -> (where, object) ...
    stillroom.checkers     name = "package.module:check"    a function (answer, reference, prompt) -> 0 to 1
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from stillroom.core.errors import ConfigError

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


class Registry(Generic[T]):
    """Objects by name: built in, registered by a program, or from the entry points of installed packages.

    `known` are the built-in names; their modules register them on import. `prefix` is put before the name of each
    entry point.
    """

    def __init__(
        self, group: str, noun: str, *, accepts: Callable[[Any], bool], known: tuple[str, ...] = (), prefix: str = ""
    ) -> None:
        self._group = group
        self._noun = noun
        self._accepts = accepts
        self._known = known
        self._prefix = prefix
        self._things: dict[str, T] = {}
        self._entries_by_name: dict[str, list[EntryPoint]] | None = None

    def register(self, name: str, thing: T) -> None:
        """Make `thing` available as `name`. Raise if the name already stands for something else."""
        self._check(name, thing, "register")
        if self._things.get(name, thing) is not thing:
            raise ConfigError(
                f"there is a {self._noun} {name!r} already, and a name has one meaning",
                advice=["choose another name"],
            )
        self._things[name] = thing

    def names(self) -> tuple[str, ...]:
        """Every name, sorted. Imports nothing."""
        return tuple(sorted({*self._known, *self._things, *self._entries()}))

    def loaded(self) -> dict[str, T]:
        """What is registered already, without entry points that were not imported; in the order of registration."""
        return dict(self._things)

    def is_built_in(self, name: str) -> bool:
        return name in self._known

    def is_plugin(self, name: str) -> bool:
        """Whether looking up a name would import another package. Imports nothing."""
        return name not in self._known and name not in self._things and name in self._entries()

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._things or name in self._entries()

    def find(self, name: str) -> T:
        """Look up a name. An entry point is imported on its first use."""
        if name in self._things:
            return self._things[name]
        if name not in self._entries():
            near = difflib.get_close_matches(name, self.names(), n=1)
            raise ConfigError(
                f"no {self._noun} is called {name!r}",
                advice=[f"did you mean {match}?" for match in near] + [f"one of {', '.join(self.names())}"],
            )
        first, *others = self._entries()[name]
        if others:
            raise ConfigError(
                f"{len(others) + 1} installed packages bring a {self._noun} {name!r}: "
                + ", ".join(_origin(entry) for entry in (first, *others)),
                advice=["uninstall all but one of them"],
            )
        self._things[name] = self._imported(first, name)
        return self._things[name]

    def _imported(self, entry: EntryPoint, name: str) -> T:
        try:
            thing: T = entry.load()
        except Exception as error:  # a foreign module may raise anything on import
            raise ConfigError(
                f"the {self._noun} {name!r} of {_origin(entry)} cannot be imported: {type(error).__name__}: {error}",
                where=entry.value,
                advice=["fix or update that package", "uninstall it, and leave the name out of the configuration"],
            ) from error
        self._check(name, thing, _origin(entry))
        return thing

    def _check(self, name: str, thing: Any, where: str) -> None:
        if not name.startswith(self._prefix) or not _NAME.fullmatch(name.removeprefix(self._prefix)):
            raise ConfigError(
                f"{name!r} cannot name a {self._noun}", where=where, advice=["small letters, digits and _"]
            )
        if not self._accepts(thing):
            raise ConfigError(
                f"{name!r} is of type {type(thing).__name__}, which is not a {self._noun}",
                where=where,
                advice=["docs/guides/extending.md shows one of each kind"],
            )

    def _entries(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, read once. Those with a built-in or registered name are left out."""
        if self._entries_by_name is None:
            self._entries_by_name = {}
            for entry in dict.fromkeys(entry_points(group=self._group)):
                name = self._prefix + entry.name
                if name not in self._known and name not in self._things:
                    self._entries_by_name.setdefault(name, []).append(entry)
        return self._entries_by_name


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
