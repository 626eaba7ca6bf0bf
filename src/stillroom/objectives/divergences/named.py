"""Divergences by name: ours, and those of other packages (`config/extensions.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stillroom.config.extensions import DIVERGENCES
from stillroom.errors import ConfigError
from stillroom.objectives.divergences.base import Divergence

Factory = Callable[[Mapping[str, float]], Divergence]
_SETTINGS = ("beta", "alpha", "interpolation")


@dataclass(frozen=True)
class Member:
    """A registered divergence: its factory, and the settings of `objectives.kd` that the factory takes."""

    make: Factory
    settings: tuple[str, ...] = ()  # of beta, alpha, interpolation: each between 0 and 1, and possibly a ramp


def register(name: str, factory: Factory, settings: tuple[str, ...] = ()) -> None:
    """Make a divergence available by name in this process. Packages use an entry point that names a `Member`."""
    DIVERGENCES.register(name, Member(factory, settings))


def names() -> tuple[str, ...]:
    return DIVERGENCES.names()


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that the divergence of that name takes."""
    member: Member = DIVERGENCES.find(name)
    if strange := set(member.settings) - set(_SETTINGS):
        raise ConfigError(
            f"the divergence {name} asks for {', '.join(sorted(strange))}, which objectives.kd does not have",
            advice=[f"settings are {', '.join(_SETTINGS)}"],
        )
    return member.settings


def make(name: str, settings: Mapping[str, float] | None = None) -> Divergence:
    """The divergence of that name; missing settings take its defaults."""
    member: Member = DIVERGENCES.find(name)
    return member.make(settings or {})
