"""What other packages may add by name: objectives, divergences and readers of files.

A name is known without importing what it stands for, so a configuration is checked, and `--help` printed, without
torch. Packages bring names by entry points; a program adds them with `register`. A name of ours cannot be replaced.

    stillroom.objectives   name = "package.module:RECIPE"   a Recipe
    stillroom.divergences  name = "package.module:MEMBER"   a stillroom.objectives.divergences.Member
    stillroom.readers      suffix = "package.module:read"   a function (path, name, tally) -> (where, object) ...
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillroom.config.sections import ObjectiveSection
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.objectives.objective import Objective, Plan

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


@dataclass(frozen=True)
class Recipe:
    """An objective before there is a run: the class of its section, and what makes it when the models are known."""

    section: type[ObjectiveSection]
    make: Callable[[Plan], Objective]


class Registry(Generic[T]):
    """Things under names: ours, those a program registered, and those that installed packages bring.

    `known` are names of ours that are registered when their module is imported. `prefix` stands before each name that a
    package brings.
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
        self._brought: dict[str, list[EntryPoint]] | None = None

    def register(self, name: str, thing: T) -> None:
        """Make a thing available by name. A name that stands for something else is refused."""
        self._check(name, thing, "register")
        if self._things.get(name, thing) is not thing:
            raise ConfigError(
                f"there is a {self._noun} {name!r} already, and a name has one meaning",
                advice=["choose another name"],
            )
        self._things[name] = thing

    def names(self) -> tuple[str, ...]:
        """Every name, sorted. Nothing is imported for it."""
        return tuple(sorted({*self._known, *self._things, *self._entries()}))

    def loaded(self) -> dict[str, T]:
        """What needs no further import, in the order of registration."""
        return dict(self._things)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._things or name in self._entries()

    def find(self, name: str) -> T:
        """What the name stands for; of a package that brings it, imported now."""
        if name in self._things:
            return self._things[name]
        if name not in self._entries():
            near = difflib.get_close_matches(name, self.names(), n=1)
            raise ConfigError(
                f"no {self._noun} is called {name!r}",
                advice=[f"did you mean {known}?" for known in near] + [f"one of {', '.join(self.names())}"],
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
        except Exception as error:  # a foreign module may raise anything, and all of it ends here with its cause
            raise ConfigError(
                f"the {self._noun} {name!r} of {_origin(entry)} cannot be imported: {type(error).__name__}: {error}",
                where=entry.value,
                advice=["mend or update that package", "uninstall it, and leave the name out of the configuration"],
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
                f"{name!r} is of type {type(thing).__name__}, which is no {self._noun}",
                where=where,
                advice=["docs/extending.md shows one of each kind"],
            )

    def _entries(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, looked for once, and only where a name is none of ours."""
        if self._brought is None:
            self._brought = {}
            for entry in dict.fromkeys(entry_points(group=self._group)):
                name = self._prefix + entry.name
                if name not in self._known and name not in self._things:
                    self._brought.setdefault(name, []).append(entry)
        return self._brought


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _is_recipe(thing: Any) -> bool:
    return isinstance(thing, Recipe) and issubclass(thing.section, ObjectiveSection) and callable(thing.make)


OBJECTIVES: Registry[Recipe] = Registry(
    "stillroom.objectives",
    "objective",
    accepts=_is_recipe,
    known=("kd", "ce", "feature", "layerwise", "attention", "contrastive"),
)

# Members are maths, so only their names are known here; `objectives/divergences/named.py` says what a member is.
DIVERGENCES: Registry[Any] = Registry(
    "stillroom.divergences",
    "divergence",
    accepts=lambda thing: callable(getattr(thing, "make", None)) and isinstance(getattr(thing, "settings", 0), tuple),
    known=(
        "forward_kl",
        "reverse_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "total_variation",
        "alpha_beta",
        "taid",
        "todi",
        "akl",
    ),
)

# By suffix; `data/sources.py` registers ours before it asks for any.
READERS: Registry[Any] = Registry("stillroom.readers", "reader of files", accepts=callable, prefix=".")
