"""Store models and data given as objects in the run's folder, so that the run can be resumed without them.

`inputs/` holds `teacher` and `student` as model folders, `train.jsonl` and `eval.jsonl`, and `inputs.json` with a
digest of each object. The configuration names these files. A later call with the same folder must give the same
objects: the digests are compared.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.data.given import write_records
from stillroom.errors import CannotSave, ConfigError
from stillroom.files import TEMPORARY, flush_folder, reason_of, replaced_folder, write_durably
from stillroom.models.load.given import GivenModel

FOLDER, DIGESTS = "inputs", "inputs.json"
# The setting that names each kind of input, and where it is kept.
_PLACES = {
    "teacher": ("teacher.model", "teacher"),
    "student": ("student.model", "student"),
    "data": ("data.train", "train.jsonl"),
    "eval_data": ("data.eval", "eval.jsonl"),
}


@dataclass(frozen=True)
class Inputs:
    """Models and data given as objects, by the name of the argument."""

    models: dict[str, GivenModel] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def settings(self, folder: Path) -> dict[str, str]:
        """The settings that name the stored files, for a run in this folder."""
        return {
            _PLACES[role][0]: str(folder / FOLDER / _PLACES[role][1])
            for role in _PLACES
            if role in self.models or role in self.data
        }

    def keep(self, folder: Path, *, is_resumed: bool, columns: Sequence[str] = ()) -> tuple[str, ...]:
        """Write the objects into a run's folder; for a resumed run, compare their digests. Return notes for the log.

        `columns` are those of the data that the run's layout names: they are kept beside the usual fields.
        """
        if not self.models and not self.data:
            return ()
        try:
            remove(folder, keeps_complete=is_resumed)  # half-written files of a killed process
            if is_resumed:
                self._compare(folder, columns)
                return ()
            with replaced_folder(folder / FOLDER) as new:
                notes = self._write(new, columns)
            return (*notes, *self.notes)
        except OSError as error:
            raise CannotSave(
                f"cannot write what was given: {reason_of(error)}",
                where=str(folder / FOLDER),
                advice=[
                    "free some space on that disk",
                    "give models and data by name: then nothing is copied into the run's folder",
                    "of an endless stream give a part: itertools.islice(records, 100_000)",
                ],
            ) from error

    def _write(self, folder: Path, columns: Sequence[str]) -> tuple[str, ...]:
        digests, notes = {}, []
        for role, model in self.models.items():
            model.save(folder / _PLACES[role][1])
            digests[role] = model.fingerprint()
        for role, data in self.data.items():
            written = write_records(data, folder / _PLACES[role][1], role, columns)
            digests[role] = written.sha256
            notes += written.note(role)
        write_durably(folder / DIGESTS, json.dumps(digests, indent=1).encode())
        flush_folder(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        given = " and ".join([*self.models, *self.data])
        return (f"{given} given as objects: kept in {FOLDER}/ of the run's folder, {size / 1e6:,.1f} MB", *notes)

    def _compare(self, folder: Path, columns: Sequence[str]) -> None:
        known = _digests(folder)
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{FOLDER}-", dir=folder) as scratch:
            for role in (*self.models, *self.data):
                model = self.models.get(role)
                if model is not None:
                    digest = model.fingerprint()
                else:
                    scratch_file = Path(scratch) / _PLACES[role][1]
                    digest = write_records(self.data[role], scratch_file, role, columns).sha256
                if digest != known.get(role):
                    raise ConfigError(
                        f"{folder} holds a run whose {role} was another",
                        where=role,
                        advice=[
                            "choose another folder with out",
                            f"or continue that run with what it keeps: stillroom.resume({str(folder)!r})",
                        ],
                    )


def _digests(folder: Path) -> dict[str, str]:
    path = folder / FOLDER / DIGESTS
    try:
        digests = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {reason_of(error)}",
            advice=[f"continue the run with what it keeps: stillroom.resume({str(folder)!r})"],
        ) from error
    return dict(digests) if isinstance(digests, dict) else {}


def is_ours(path: Path) -> bool:
    """Whether a path is the inputs of a run, complete or half-written."""
    return _is_complete(path) or (path.name.startswith(f"{TEMPORARY}{FOLDER}-") and path.is_dir())


def _is_complete(path: Path) -> bool:
    return path.name == FOLDER and (path / DIGESTS).is_file()


def remove(folder: Path, *, keeps_complete: bool = False) -> None:
    """Remove the inputs of a run; with `keeps_complete`, only half-written ones."""
    if folder.is_dir():
        for path in folder.iterdir():
            if is_ours(path) and not (keeps_complete and _is_complete(path)):
                shutil.rmtree(path, ignore_errors=True)
