"""Compare what a resumed run reads with what it read before: the data as it was tokenised, and the models' files.

Every checkpoint keeps the hashes. A run that goes on with other data or another teacher is another run, and nothing in
its numbers would tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stillroom.config import Config
from stillroom.core.errors import BrokenAtStart, CheckpointUnusable, InputsChanged, StillroomError
from stillroom.data import Corpus, Rows
from stillroom.parallel import Parallel
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import read_manifest, student_identity, teacher_identity
from stillroom.teachers.signals import AUTO, uses_cache
from stillroom.training.checkpoint import Saved
from stillroom.training.curriculum import Curriculum

ACCEPT = "--accept-changed-inputs"
_WORDS = {"train": "training data", "eval": "held-out data", "teacher": "teacher", "student": "starting student"}

Hashes = Mapping[str, Mapping[str, Any]]


@dataclass
class InputCheck:
    """The hashes of a run's inputs: `models` before they are loaded, `data` before a teacher is asked about it."""

    saved: Saved | None = None
    is_accepted: bool = False  # the user's word that changed inputs are meant
    parallel: Parallel = field(default_factory=Parallel)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # in the first process
    changes: list[str] = field(default_factory=list)  # accepted ones
    changed: set[str] = field(default_factory=set)

    @property
    def note(self) -> str:
        """What to say of a checkpoint without hashes; nothing of others."""
        if self.saved is None or "inputs" in self.saved.scalars:
            return ""
        return "the checkpoint holds no hashes of data and models: whether they are those the run began with is unknown"

    def models(self, config: Config) -> None:
        """Hash the models' files in the first process; raise in all if they are not those of the checkpoint."""
        where = {"teacher": config.teacher.model, "student": config.student.model}
        self._compare(_models(config) if self.parallel.is_first else {}, where)

    def data(self, config: Config, corpus: Corpus) -> None:
        """Hash the rows; raise if they are not those of the checkpoint, or not the same in all processes."""
        found = {"train": _rows(corpus.train), "eval": _rows(corpus.evaluation)}
        for side, facts in found.items():
            if not self.parallel.same_everywhere(int(facts["digest"][:15], 16)):
                raise BrokenAtStart(
                    f"the processes read different {_WORDS[side]}",
                    where="data.train, data.eval",
                    advice=["give every process the same files, tokenizers and libraries"],
                )
        paths = ", ".join(source.path for source in config.data.sources)
        self._compare(found, {"train": paths, "eval": config.data.eval or paths})

    def _compare(self, found: dict[str, dict[str, Any]], where: Mapping[str, str]) -> None:
        self.found |= found
        before = _stored(self.saved)
        changed = {role: text for role, now in found.items() if (text := _change(role, before.get(role, {}), now))}
        if self.parallel.broadcast(float(bool(changed))) and not self.is_accepted:
            raise InputsChanged(
                "; ".join(changed.values()) or "the first process found other inputs than those of the checkpoint",
                where=", ".join(dict.fromkeys(where[role] for role in changed)),
                advice=[
                    "put them back as they were, and resume again",
                    f"go on with the present ones: {ACCEPT}; the log and the report then say so",
                    "or begin again in another folder with --out",
                ],
            )
        self.changed |= set(changed)
        self.changes += changed.values()


def _stored(saved: Saved | None) -> Hashes:
    """The hashes of a checkpoint; empty where it has none."""
    stored = saved.scalars.get("inputs", {}) if saved is not None else {}
    if not isinstance(stored, dict) or not all(_is_table(facts) for facts in stored.values()):
        raise CheckpointUnusable(
            "what the checkpoint says of its inputs is not a table of hashes", advice=["restore the folder from a copy"]
        )
    return stored


def _is_table(facts: Any) -> bool:
    return isinstance(facts, dict) and all(isinstance(value, str | int | None) for value in facts.values())


def _change(role: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How an input differs; empty where it does not, or where one side is not known."""
    unlike = [key for key in now if None not in (before.get(key), now[key]) and before[key] != now[key]]
    if not unlike:
        return ""
    if role in ("teacher", "student"):
        return f"the {_WORDS[role]} is not the one the run began with: other {', '.join(unlike)}"
    counted = [key for key in unlike if key != "digest"]
    if not counted:
        return f"the {_WORDS[role]} has other contents or another order than when the run began, in as many tokens"
    sizes = ", ".join(f"{before[key]} {key} when the run began and {now[key]} now" for key in counted)
    return f"the {_WORDS[role]} is not that the run began with: {sizes}"


def _models(config: Config) -> dict[str, dict[str, Any]]:
    """The hashes of each model that the run reads. One whose files cannot be read is left to its loader to refuse."""
    asks_teacher, is_cut = Curriculum.of(config).uses_teacher, config.student.init == "shrink"
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(StillroomError):
        if asks_teacher and uses_cache(config) and config.teacher.cache != AUTO:
            found["teacher"] = {"answers": read_manifest(folder_of(str(config.teacher.cache))).store}
        if is_cut or (asks_teacher and not found):
            found["teacher"] = {**found.get("teacher", {}), **teacher_identity(config.teacher, None)}
        if not is_cut:
            found["student"] = student_identity(config.student)
    return found


def _rows(rows: Rows) -> dict[str, Any]:
    return {"documents": rows.num_documents, "tokens": rows.num_tokens, "rows": len(rows), "digest": rows.digest()}
