"""Split a call's models and data into names, which become settings, and objects, which are checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stillroom.api import SETTING
from stillroom.core.errors import ConfigError
from stillroom.data.objects import is_name
from stillroom.metrics.evaluate import open_model
from stillroom.models.load import LoadedModel, model_name
from stillroom.models.objects import GivenModel
from stillroom.training.run_folder import Inputs

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Model: TypeAlias = str | Path | PreTrainedModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]
    Records: TypeAlias = str | Path | Iterable[Mapping[str, Any] | str] | TorchDataset[Any]


def split_inputs(given: Mapping[str, Any]) -> tuple[dict[str, str], Inputs]:
    """(settings for what is given by name, what is given as an object)."""
    names: dict[str, str] = {}
    models: dict[str, GivenModel] = {}
    data: dict[str, Any] = {}
    notes: list[str] = []
    for role, value in given.items():
        model = GivenModel.of(value, role) if role in ("teacher", "student") else None
        if model is not None:
            models[role] = model
            notes += model.check_kept()
        elif role in ("teacher", "student") or is_name(value, role):
            names[SETTING[role]] = str(value)
        else:
            data[role] = value
    teacher, student = models.get("teacher"), models.get("student")
    if teacher is not None and teacher.tokenizer is None:
        if student is None or student.tokenizer is None:
            raise without_tokenizer("teacher")
        models["teacher"] = GivenModel("teacher", teacher.network, student.tokenizer)
        notes.append("the teacher was given without a tokenizer: it takes the student's")
    return names, Inputs(models, data, tuple(notes))


def opened(model: Model, teacher: Model | None) -> tuple[tuple[str, LoadedModel], LoadedModel | None]:
    """((name, model), teacher) for evaluation. If only one of them has a tokenizer, both use it."""
    given = GivenModel.of(model, "model")
    beside = None if teacher is None else GivenModel.of(teacher, "teacher")
    loaded = open_model(model_name(str(model))) if given is None else None
    loaded_beside = open_model(model_name(str(teacher))) if teacher is not None and beside is None else None
    models = [each for each in (given, beside, loaded, loaded_beside) if each is not None]
    tokenizers = [each.tokenizer for each in models if each.tokenizer is not None]
    for role, each in (("model", given), ("teacher", beside)):
        if each is not None and not tokenizers:
            raise without_tokenizer(role)
    if given is not None:
        loaded = given.copied(tokenizers[0])
    if beside is not None:
        loaded_beside = beside.copied(beside.tokenizer if beside.tokenizer is not None else tokenizers[0])
    assert loaded is not None
    return (given.name if given is not None else model_name(str(model)), loaded), loaded_beside


def without_tokenizer(role: str) -> ConfigError:
    return ConfigError(
        f"{role} comes without a tokenizer", where=role, advice=[f"give a pair: {role}=(model, tokenizer)"]
    )
