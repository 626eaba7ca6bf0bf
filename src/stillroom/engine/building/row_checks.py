"""Check that both models can read the rows of a run: their length, and several texts in one."""

from __future__ import annotations

from stillroom.data import Corpus
from stillroom.engine.building.models import Models
from stillroom.errors import ConfigError
from stillroom.models import LoadedModel
from stillroom.models.length import num_positions
from stillroom.models.packed import packing_error

_TOLERANCE = 1e-3  # in standard deviations of the hidden states, in FP32
_HALF_TOLERANCE = 0.05


def check_rows(models: Models, corpus: Corpus) -> list[str]:
    """Raise `ConfigError` if a model cannot read the rows. Return notes for the log."""
    both = {"student": models.loaded_student, "teacher": models.loaded_teacher}
    loaded = {role: model for role, model in both.items() if model is not None}
    longest = max((int(rows.lengths.max()) for rows in (corpus.train, corpus.evaluation) if len(rows)), default=0)
    others = [int(rows.other_lengths.max()) for rows in (corpus.train, corpus.evaluation) if len(rows.other_lengths)]
    for role, model in loaded.items():
        _check_length(role, model, max(others) if others and role == "teacher" else longest)
    if not corpus.train.is_packed:
        return []
    for role, model in loaded.items():
        check_packing(role, model)
    return ["several records share a training row: attention and positions begin anew with each, which was tried"]


def _check_length(role: str, model: LoadedModel, longest: int) -> None:
    limit = num_positions(model.network)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row has {longest:,} tokens, and the {role} ({_name(model)}) has {limit:,} positions",
            where="data.max_length",
            advice=[f"--set data.max_length={limit}", f"use a {role} with more positions"],
        )


def check_packing(role: str, model: LoadedModel) -> None:
    """Raise `ConfigError` if texts of one row change each other's hidden states."""
    error = packing_error(model.network)
    is_wide = model.head.weight.dtype.itemsize >= 4
    if error > (_TOLERANCE if is_wide else _HALF_TOLERANCE):
        raise ConfigError(
            f"the {role} ({_name(model)}) cannot read several texts in one row: they change each "
            f"other's hidden states by {error:.2g} standard deviations",
            where="data.packing",
            advice=["--set data.packing=rows gives each record a row of its own"],
        )


def _name(model: LoadedModel) -> str:
    return type(model.network).__name__
