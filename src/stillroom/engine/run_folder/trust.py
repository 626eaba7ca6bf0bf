"""What the user allows a run's folder to name.

A run's folder may come from somebody else. Its configuration alone runs no code and reaches no address: both need the
user's word, given on this machine's command line or in a call, and never read from the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.config import Config
from stillroom.config.extensions import DIVERGENCES, OBJECTIVES, READERS
from stillroom.config.objectives import ObjectivesConfig
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.errors import ConfigError
from stillroom.remote import is_below, is_url

_CODE, _ADDRESS = "--trust-remote-code", "--allow-address"


@dataclass(frozen=True)
class Trust:
    """Code and addresses that the user allows. Nothing by default."""

    code: bool = False  # of models, from a pinned commit of the hub, and of plug-ins installed here
    addresses: tuple[str, ...] = ()  # each with all that lies below it

    def check_table(self, table: Any, where: str) -> None:
        """Raise for objectives of plug-ins: reading their settings imports them. Those already imported pass."""
        objectives = table.get("objectives") if isinstance(table, Mapping) else None
        names = [name for name in objectives or () if name not in ObjectivesConfig.model_fields]
        self._raise([f"the plug-in {name} (objectives)" for name in names if OBJECTIVES.is_plugin(name)], [], where)

    def check(self, config: Config, where: str) -> None:
        """Raise unless the user allowed all code and all addresses that a run's configuration names."""
        sections: dict[str, TeacherConfig | StudentConfig] = {"teacher": config.teacher, "student": config.student}
        code = [
            f"code that comes with {section.model} ({name}.trust_remote_code)"
            for name, section in sections.items()
            if section.trust_remote_code
        ]
        if DIVERGENCES.is_plugin(config.objectives.kd.divergence):
            code.append(f"the plug-in {config.objectives.kd.divergence} (objectives.kd.divergence)")
        data = {f"data.train.{number}": source.path for number, source in enumerate(config.data.sources)}
        data["data.eval"] = config.data.eval or ""
        code += [f"the plug-in for {path} ({key})" for key, path in data.items() if _has_plugin_reader(path)]
        named = {f"{name}.model": section.model for name, section in sections.items()}
        named |= {f"{name}.allow_base": section.allow_base or "" for name, section in sections.items()}
        named |= {"teacher.cache": config.teacher.cache or "", "teacher.server": config.teacher.server or ""}
        key = config.teacher.requests.api_key_variable
        note = {"teacher.server": f"; it gets the key in ${key}"} if key else {}
        self._raise(code, self._refused({**named, **data}, note), where)

    def check_addresses(self, named: Mapping[str, str], where: str) -> None:
        """Raise unless the user allowed every address among some settings of a run."""
        self._raise([], self._refused(named), where)

    def _refused(self, named: Mapping[str, str], notes: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """(address, what to say of it) of settings that are addresses and not allowed."""
        return [
            (value, f"the address {value} ({key}{(notes or {}).get(key, '')})")
            for key, value in named.items()
            if is_url(value) and not self._allows(value)
        ]

    def _allows(self, address: str) -> bool:
        return any(is_below(address, one) for one in self.addresses)

    def _raise(self, code: list[str], addresses: list[tuple[str, str]], where: str) -> None:
        code = [] if self.code else code
        if not code and not addresses:
            return
        named = "; ".join((*code, *(said for _address, said in addresses)))
        options = [*([_CODE] if code else []), *(f"{_ADDRESS} {address}" for address, _said in addresses)]
        raise ConfigError(
            f"the run's folder names what only you can allow: {named}",
            where=where,
            advice=[
                f"if you trust it, say so in this command: {' '.join(options)}",
                "a run that you began: give its `stillroom distill` command again, which continues it",
                "nothing of it was run or fetched",
            ],
        )


NONE = Trust()


def _has_plugin_reader(path: str) -> bool:
    return READERS.is_plugin(Path(path).suffix.lower())
