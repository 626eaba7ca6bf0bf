"""What a run cannot have where its student is sharded, refused by name before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator

from stillroom.config import Config
from stillroom.engine.building.models import Models
from stillroom.errors import ConfigError
from stillroom.models.anatomy import layers_if_any
from stillroom.models.routers import has_gates
from stillroom.parallel import Parallel
from stillroom.precision import Precision


def check_strategy(config: Config, models: Models, precision: Precision, parallel: Parallel) -> None:
    """Raise for the first setting that does not work with `train.strategy = "fsdp"`."""
    if not parallel.is_sharded:
        return
    for where, why, instead in _refused(config, models, precision):
        raise ConfigError(
            f"train.strategy = 'fsdp' does not work with {why}",
            where=where,
            advice=[instead, "or let each process have the whole student: --set train.strategy=ddp"],
        )


def unused_strategy(config: Config, parallel: Parallel) -> list[str]:
    """What to say where a strategy was asked for and there is one process."""
    asked = config.train.strategy
    if asked == "auto" or parallel.size > 1:
        return []
    return [f"train.strategy = {asked!r} has no effect: there is one process, which holds the whole student"]


def _refused(config: Config, models: Models, precision: Precision) -> Iterator[tuple[str, str, str]]:
    """(setting, what it is, what to set instead) of everything that is in the way."""
    if precision.mode in ("fp16-split", "fp16-sr") and config.student.adapter is None:
        yield "precision.mode", f"{precision.mode}: its parts are FP32 masters", "--precision fp16-master"
    if config.train.compile in ("student", "both"):
        if config.student.gradient_checkpointing:
            yield "train.compile", "compiled layers that are computed again in the backward", "--set train.compile=off"
        if not layers_if_any(models.student):
            yield "train.compile", "a compiled student that is not a list of layers", "--set train.compile=off"
    if config.train.batch_size == "auto" and precision.device.type != "cpu":
        yield "train.batch_size", "batch_size = auto: a trial that runs out of memory cannot be taken back", "a number"
    if has_gates(models.student) and not _sends_zeros_for_unused():
        yield "student.model", "a mixture of experts as the student: this torch cannot skip experts", "a newer torch"


def _sends_zeros_for_unused() -> bool:
    """Whether this torch can reduce a layer whose experts were used in one process and not in another."""
    from torch.distributed.fsdp import FSDPModule  # it takes half a second to import

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")
