"""Build the configuration of a call: a given one or a preset, with the call's settings on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.api import arguments as check
from stillroom.config import Config
from stillroom.config.given import refuse_gaps
from stillroom.config.load import build, flat_leaves, put, read_preset
from stillroom.errors import ConfigError
from stillroom.files import new_run_folder


def configured(
    config: Config | None, preset: str | None, settings: Mapping[str, Any], given: Mapping[str, object]
) -> Config:
    """The configuration without the models and data of the call, which are added later."""
    if config is not None and not isinstance(config, Config):
        advice = ["read a file with stillroom.load_config(path)"] if isinstance(config, str | Path) else []
        raise ConfigError(
            f"config is a {type(config).__name__}, not a stillroom.Config",
            where="config",
            advice=[*advice, "or give teacher, student and data as keywords"],
        )
    if config is not None and preset is not None:
        raise ConfigError(
            "a configuration and a preset are both given",
            where="preset",
            advice=["stillroom.load_config(path, preset=...) reads a file on top of a preset"],
        )
    if config is None:
        table = read_preset(check.text(preset, "preset")) if preset is not None else {}
        chosen = _put(table, settings)
        if preset is None:
            _refuse_gaps(chosen, settings, given)
    else:
        chosen = with_settings(config, settings)
    if chosen.student.init == "shrink" and "student" in given:
        raise ConfigError(
            "student is given, and student.init = 'shrink' cuts the student from the teacher",
            where="student",
            advice=["leave student out", "or leave student.init out"],
        )
    refuse_gaps(chosen, also=frozenset(given))
    return chosen


def _refuse_gaps(config: Config, settings: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Raise if a model or data is missing: without a configuration, do not silently use the embedded default."""
    is_cut = config.student.init == "shrink"
    needed = {"teacher": is_cut or config.objectives.asks_teacher, "student": not is_cut, "data": True}
    missing = [
        role
        for role, is_needed in needed.items()
        if is_needed and role not in given and check.SETTING[role] not in settings
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not given",
            where="distill",
            advice=["give teacher, student and data", "or a configuration", "or a preset, such as preset='demo'"],
        )


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    if not settings:
        return config
    return _put(config.model_dump(mode="json", exclude_unset=True), settings, config.given)


def _put(table: dict[str, Any], settings: Mapping[str, Any], given: frozenset[str] = frozenset()) -> Config:
    for key, value in settings.items():
        put(table, key, value)
    return build(table, "settings").with_given({*given, *flat_leaves(settings)})


def new_folder(out: str | Path | None) -> Path:
    if out is not None:
        return check.path(out, "out")
    if check.num_processes() > 1:
        raise ConfigError(
            "several processes train one run in one folder, and none is named",
            where="out",
            advice=["name the folder with out"],
        )
    return new_run_folder("run")
