"""Changes that make a run fit, the least harmful first, each tried on shapes before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from stillroom.config import Config
from stillroom.config.load import build, put
from stillroom.errors import ConfigError
from stillroom.models import find
from stillroom.planning.parts import COPY, Layout, chosen_mode, lay_out
from stillroom.planning.shapes import Shapes

_SHORTEST = 64  # positions of a row that still hold a sentence or two
_RANK = 16
_AIM = 0.95


@dataclass(frozen=True)
class Change:
    settings: Mapping[str, Any]
    what: str
    cost: str


@dataclass(frozen=True)
class Applied:
    change: Change
    saved: int
    left: int  # the total after it

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.change.settings),
            "what": self.change.what,
            "saves": self.saved,
            "costs": self.change.cost,
            "total_after": self.left,
        }


@dataclass(frozen=True)
class Fitted:
    config: Config
    layout: Layout
    applied: tuple[Applied, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted keys that differ from what was asked for."""
        return {key: value for one in self.applied for key, value in one.change.settings.items()}


def fit(config: Config, shapes: Shapes, bound: int) -> Fitted:
    """Apply changes until the run takes no more than `bound`, or none is left. One that saves nothing is not kept.

    Predictions are off by a few per cent. So changes that cost time alone go on until a twentieth of the bound is left;
    one that changes what is learned is made only where the run would not fit without it.
    """
    now = lay_out(config, shapes, chosen_mode(config, shapes)[0])
    if now.total <= bound:
        return Fitted(config, now, ())
    applied: list[Applied] = []
    for propose in _IN_ORDER_OF_HARM:
        while now.total > (_AIM * bound if propose in _TIME_ALONE else bound):
            change = propose(config, now, shapes)
            tried = _try(config, change, shapes) if change else None
            if change is None or tried is None or tried[1].total >= now.total:
                break
            applied.append(Applied(change, now.total - tried[1].total, tried[1].total))
            config, now = tried
    return Fitted(config, now, tuple(applied))


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with other values of dotted keys; raises as one that a user wrote would."""
    table = config.to_dict()
    for key, value in settings.items():
        put(table, key, value)
    return build(table, "the fitted configuration")


def _try(config: Config, change: Change, shapes: Shapes) -> tuple[Config, Layout] | None:
    """None where the configuration does not allow it."""
    try:
        new = changed(config, change.settings)
        return new, lay_out(new, shapes, chosen_mode(new, shapes)[0])
    except ConfigError:
        return None


def _awaited_saves(_config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    if not now.on_cpu or COPY not in now.host:
        return None
    cost = "nothing learned changes; training waits while a checkpoint is written"
    return Change({"checkpoint.background": "off"}, "checkpoints without a copy of the state", cost)


def _smaller_batch(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    """The next smaller divisor, so that a step has the same rows."""
    rows, parts = config.train.rows_per_batch, config.train.gradient_accumulation_steps
    smaller = next((size for size in range(rows // 2, 0, -1) if rows % size == 0), None)
    if smaller is None:
        return None
    settings = {"train.batch_size": smaller, "train.gradient_accumulation_steps": parts * rows // smaller}
    return Change(settings, f"micro-batches of {smaller}", "nothing learned changes; small products are slower")


def _recompute(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    if config.student.gradient_checkpointing:
        return None
    cost = "a second forward pass of the student: a third more of its time"
    return Change({"student.gradient_checkpointing": True}, "activations computed again in the backward pass", cost)


def _cache(config: Config, _now: Layout, shapes: Shapes) -> Change | None:
    if config.teacher.cache or config.teacher.server or not shapes.uses_teacher(config):
        return None
    cost = "the teacher reads the data once before the run, disk, and only its likeliest tokens are kept"
    return Change({"teacher.cache": "auto"}, "the teacher's answers stored before the run", cost)


def _offload(config: Config, now: Layout, shapes: Shapes) -> Change | None:
    is_here = now.teacher is not None and config.teacher.placement == "device"
    if not is_here or not shapes.target.is_card or config.teacher.quantisation != "none":
        return None
    return Change({"teacher.placement": "offload"}, "the teacher in main memory between its answers",
                  "its weights are copied to the card for each micro-batch")  # fmt: skip


def _stream(config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    if now.teacher is None or config.teacher.placement == "stream" or config.teacher.quantisation != "none":
        return None
    return Change({"teacher.placement": "stream"}, "two layers of the teacher at a time",
                  "its files are read for each micro-batch")  # fmt: skip


def _moments(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    if config.precision.moments == "bfloat16":
        return None
    cost = "moments have 8 bits, rounded stochastically"
    return Change({"precision.moments": "bfloat16"}, "moments in bfloat16", cost)


def _split(config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    if now.mode in ("fp16-split", "fp16-sr") or config.student.adapter is not None:
        return None
    cost = "FP16 range with a scaled loss; weights have 22 bits"
    return Change({"precision.mode": "fp16-split"}, "FP16 weights with FP16 residuals", cost)


def _adapter(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    student = config.student
    if student.adapter is not None or student.init not in ("auto", "pretrained") or find_spec("peft") is None:
        return None
    if not find(student.model).has_weights:  # a base that is drawn at random and stays so learns nothing
        return None
    return Change({"student.adapter": {"rank": _RANK}}, f"an adapter of rank {_RANK} is trained alone",
                  "the student's own weights stay as they are: it learns less")  # fmt: skip


def _shorter(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    length = config.data.max_length // 2
    if length < _SHORTEST:
        return None
    return Change({"data.max_length": length}, f"rows of {length}",
                  "longer texts are cut: nothing is learned of what lies further back")  # fmt: skip


_IN_ORDER_OF_HARM: tuple[Callable[[Config, Layout, Shapes], Change | None], ...] = (
    _awaited_saves, _smaller_batch, _recompute, _cache, _offload, _stream, _moments, _split, _adapter, _shorter,
)  # fmt: skip
_TIME_ALONE = (_awaited_saves, _smaller_batch, _recompute)
