"""Measure whether training a teacher's gates helps on this text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from stillroom.teachers.router.teacher import RouterTeacher
from stillroom.teachers.router.terms import Aims
from stillroom.types import Batch

_FLOOR = 0.1  # the probe's learning rate falls along a cosine to this share


def probe_gates(
    teacher: RouterTeacher, windows: Iterable[Sequence[Batch]], held_out: Sequence[Batch], num_steps: int
) -> dict[str, Any]:
    """Tune the gates on the labels alone, measure the gain on held-out text, and restore the gates.

    A teacher whose held-out loss does not fall by the threshold is frozen, unless `teacher.router.force` is set.
    """
    start = teacher.start_nll if teacher.start_nll is not None else teacher.start(held_out).nll
    done = 0
    for done, window in enumerate(windows, start=1):
        _tune(teacher, window, (done - 1) / max(num_steps, 1))
        if done >= num_steps or not teacher.trains:
            break
    after, updates = teacher.assess(held_out).nll, teacher.gates.num_applied
    gain, config = start - after, teacher.config
    is_worthwhile = math.isfinite(gain) and gain >= config.probe_threshold
    teacher.reset(is_frozen=not (is_worthwhile or config.force))
    teacher.probed = {
        "steps": done,
        "updates": updates,
        "nll_before": start,
        "nll_after": after,
        "gain": gain,
        "threshold": config.probe_threshold,
        "is_worthwhile": is_worthwhile,
        "is_forced": config.force,
    }
    return teacher.probed


def _tune(teacher: RouterTeacher, window: Sequence[Batch], progress: float) -> None:
    """One router step on the labels of a window."""
    device = teacher.original.device
    teacher.begin(window, teacher.config.every - 1)  # always due
    own = sum(batch.num_scored for batch in window)
    num_targets = teacher.peers.counts({"targets": own})["targets"]
    for batch in window:
        if batch.num_scored:
            teacher.learn(batch.to(device), None, num_targets=num_targets, aims=Aims(truth=1.0))
    teacher.update_gates(is_kept=True, rate_factor=_FLOOR + (1.0 - _FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def verdict_of(probed: dict[str, Any]) -> str:
    """The result of the probe, as a sentence."""
    finding = (
        f"router probe: {probed['updates']} updates of the gates on the labels moved the teacher's held-out loss from "
        f"{probed['nll_before']:.4f} to {probed['nll_after']:.4f} (gain {probed['gain']:+.4f}, "
        f"{probed['threshold']:g} asked for)"
    )
    if probed["is_worthwhile"]:
        return f"{finding}: its gates are trained"
    cost = "it takes about 1.7 times as long as a frozen teacher and rules out a teacher cache"
    if probed["is_forced"]:
        reason = "and is done because teacher.router.force is set"
        return f"{finding}: training the router is pointless here ({cost}), {reason}"
    return f"{finding}: training the router is pointless here ({cost}); the teacher stays frozen"
