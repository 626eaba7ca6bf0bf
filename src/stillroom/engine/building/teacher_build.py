"""Make a loaded teacher ready to answer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stillroom.config import Config
from stillroom.data import Rows, fixed_batches
from stillroom.models import LoadedModel
from stillroom.teachers.quantised import check_quantisation, quantise_layers, quantised

_PROBE_ROWS = 64  # spread over the data; they are taken until there are enough positions

Write = Callable[..., object]


def quantise_teacher(
    config: Config,
    loaded: LoadedModel | None,
    rows: Rows,
    vocab_size: int,
    device: torch.device,
    *,
    write: Write,
) -> LoadedModel | None:
    """The teacher as `teacher.quantisation` says, measured on rows of the training data; an event says by how much."""
    if loaded is None or config.teacher.quantisation == "none":
        return loaded
    check_quantisation(config.teacher, device)
    probe = list(fixed_batches(rows, 1, _PROBE_ROWS))
    ready, found = quantised(loaded, config.teacher, probe, vocab_size=vocab_size, device=device)
    write("teacher_quantised", **found.to_dict())
    return ready


def plainly_quantised(config: Config, loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """The teacher as `teacher.quantisation` says, not measured."""
    if config.teacher.quantisation != "none":
        check_quantisation(config.teacher, device)
        quantise_layers(loaded.network, config.teacher.quantisation, device, name=config.teacher.model)
    return loaded
