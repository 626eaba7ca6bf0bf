"""Models and data that stand in for those of a guide.

The guides name models that are not part of this project, or name none. A name of the user's own is never replaced. The
name that stands in a guide's command, or no name, is replaced by what the environment says, else by what ships with the
package. A line says what was replaced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.errors import ConfigError

ROLES = ("teacher", "student", "data")
VARIABLE = {role: f"STILLROOM_RECIPE_{role.upper()}" for role in ROLES}
SETTING = {"teacher": "teacher.model", "student": "student.model", "data": "data.train"}


@dataclass(frozen=True)
class Names:
    """The names of both models and of the data; None where nothing is named."""

    teacher: str | None = None
    student: str | None = None
    data: str | None = None

    def of(self, role: str) -> str | None:
        value: str | None = getattr(self, role)
        return value


@dataclass(frozen=True)
class Chosen:
    settings: dict[str, str]
    remarks: tuple[str, ...]


def choose(given: Names, in_the_seed: Names, builtin: Names) -> Chosen:
    """The settings of both models and the data, and a remark for each that stands in for another.

    The builtin models are a pair with one tokenizer, so they replace both or none.
    """
    names: dict[str, str] = {}
    remarks: list[str] = []
    missing: list[str] = []
    for role in ROLES:
        name, variable = given.of(role), os.environ.get(VARIABLE[role])
        is_the_seeds = name == in_the_seed.of(role)
        if name and (not is_the_seeds or Path(name).exists()):
            names[role] = name
        elif variable:
            names[role] = variable
            remarks.append(f"{variable} stands in for {_words(role, name)}: {VARIABLE[role]}")
        else:
            missing.append(role)
    models = [role for role in missing if role != "data"]
    if len(models) == 1:
        names[models[0]] = _left_alone(models[0], given)
        missing.remove(models[0])
    for role in missing:
        names[role] = str(builtin.of(role))
        remarks.append(
            f"{names[role]} stands in for {_words(role, given.of(role))}, which is not here: name yours with a flag or "
            f"in {VARIABLE[role]}"
        )
    return Chosen({SETTING[role]: name for role, name in names.items()}, tuple(remarks))


def _words(role: str, name: str | None) -> str:
    return f"the {role} {name}" if name else f"the guide's {role}"


def _left_alone(role: str, given: Names) -> str:
    """The guide's own name with a model of the user's: the engine fetches it, or says that it cannot."""
    name, other = given.of(role), "student" if role == "teacher" else "teacher"
    if name is None:
        raise ConfigError(
            f"the {other} is named and the {role} is not: both must read the same tokens",
            where="command line",
            advice=[f"name both, or none, or set {VARIABLE[role]}"],
        )
    return name
