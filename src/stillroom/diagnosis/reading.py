"""Find what is to be diagnosed: a run's folder, or a configuration."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from stillroom.diagnosis.case import Case
from stillroom.errors import ConfigError
from stillroom.telemetry.run_record import LoggedRun

FILES = ("events.jsonl", "config.json", "summary.json")


def read_case(folder: Path, *, is_owned: bool | None = None) -> Case:
    """The record of a run. Raise where nothing of it can be read; say in `record.missing` what is lacking."""
    if not any((folder / name).exists() for name in FILES):
        held = f"there is none of {', '.join(FILES)}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{folder} holds no run: {held}", advice=["give the folder of a run, or a configuration"])
    record = LoggedRun.load(folder)
    if not record.events and not record.config and not record.summary:
        raise ConfigError(
            f"nothing of the run in {folder} can be read: {' '.join(record.missing)}",
            advice=["restore the files from a copy"],
        )
    return Case(record, now=datetime.now(UTC), is_owned=is_owned)
