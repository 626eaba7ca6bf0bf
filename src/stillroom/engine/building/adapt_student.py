"""Attach the adapter of `student.adapter` to a loaded student, and store its base as the precision says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stillroom.config import Config
from stillroom.engine.building.shrink_student import student_name
from stillroom.errors import BrokenAtStart
from stillroom.models import LoadedModel, find
from stillroom.models.adapter.adapter_trial import try_adapter
from stillroom.models.adapter.attach import Adapter, attach
from stillroom.models.adapter.frozen_base import store_base
from stillroom.parallel import Parallel
from stillroom.precision import Precision

_HALF_WEIGHTS = {
    "fp16-split": "no weight is stored with a residual",
    "fp16-sr": "no weight is rounded stochastically",
}


def adapted(config: Config, loaded: LoadedModel) -> tuple[LoadedModel, Adapter | None]:
    """The student with its adapter, frozen but for that; as it was loaded where none is asked for."""
    if config.student.adapter is None:
        return loaded, None
    name = student_name(config)
    base, notes = _base_of(config)
    adapter = attach(loaded.network, config.student.adapter, name=name, base_name=base, seed=config.train.seed)
    notes += try_adapter(adapter, name)
    head = loaded.network.get_output_embeddings()
    is_head_adapted = hasattr(head, "base_layer")
    if is_head_adapted and loaded.is_described:
        notes.append(
            "adapter: the head is adapted, so its own logits are used, which keeps a [tokens, vocabulary] tensor"
        )
    is_described = loaded.is_described and not is_head_adapted
    return replace(loaded, is_described=is_described, notes=(*loaded.notes, *adapter.notes, *notes)), adapter


def _base_of(config: Config) -> tuple[str, list[str]]:
    """What others can load the base from; empty, with a note, where it is in no folder of its own."""
    student = config.student
    if student.init == "shrink":
        return "", ["adapter: its base is cut from the teacher and is in no folder: student/ is what can be used alone"]
    source = find(student.model)
    if source.is_adapter:
        return "", [
            f"adapter: {student.model} is an adapter itself, merged; a second one is trained on top of it and student/ "
            "is what can be used alone"
        ]
    if student.init == "random" or not source.has_weights:
        return "", ["adapter: its base is drawn at random and stays so: give a trained student to get a useful one"]
    is_folder = source.is_local and not student.model.startswith("builtin:")
    return str(Path(source.path).resolve()) if is_folder else student.model, []


def check_base(adapter: Adapter, parallel: Parallel) -> None:
    """Raise if the processes have different weights under the adapter: no later comparison looks at them."""
    if not parallel.same_everywhere(int(adapter.base_identity[:15], 16)):
        raise BrokenAtStart(
            "the processes have different weights under the adapter",
            where=adapter.base_name or "student.model",
            advice=["give every process the same model folder and the same libraries"],
        )


def store_frozen(config: Config, adapter: Adapter, precision: Precision) -> list[str]:
    """Store the frozen weights as the precision says, before they move to the device. Return notes for the log."""
    assert config.student.adapter is not None
    dtype = precision.frozen_storage(config.student.adapter.base_dtype)
    num_stored = store_base(adapter.network, dtype, whole=precision.keeps_half_weights)
    num_frozen = sum(part.numel() for part in adapter.network.parameters() if not part.requires_grad)
    word = str(dtype).removeprefix("torch.")
    note = f"adapter: {num_stored:,} of {num_frozen:,} frozen parameters are stored in {word}, the adapter in float32"
    if precision.mode in _HALF_WEIGHTS:
        why = _HALF_WEIGHTS[precision.mode]
        return [note, f"adapter: under {precision.mode} as under fp16-master, because what is trained is FP32: {why}"]
    return [note] if num_stored else []
