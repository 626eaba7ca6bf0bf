"""Trials of what a run leaves on the disk: a kill and a resumption, a student saved and read again, stored answers."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path

import numpy as np
import torch

from stillroom.checks.resume.states import differences, gap, last_state
from stillroom.checks.resume.verify import SIGKILL, run_apart
from stillroom.checks.selftest.cases import draw
from stillroom.checks.selftest.trial import EXACT, Measured, Trial, Wrong
from stillroom.checks.selftest.world import world_config
from stillroom.config.schema import StudentConfig
from stillroom.engine.distill import distill, resume
from stillroom.engine.state import weights_of
from stillroom.errors import NoBetterStudent
from stillroom.models import load_student
from stillroom.teachers.cache.format import id_bytes, pack, unpack
from stillroom.teachers.signals import SignalSpec, reduce_row
from stillroom.types import HeadWeights

GROUP = "survival"


def trials(folder: Path) -> list[Trial]:
    """In a folder that holds a world."""
    return [
        Trial(GROUP, "killed and resumed: the same bits", functools.partial(_resumes, folder)),
        Trial(GROUP, "a student that is saved and read again: the same bits", functools.partial(_reloads, folder)),
        Trial(GROUP, "a teacher's answer that is stored and read again", _stores),
    ]


def _resumes(folder: Path) -> Measured:
    """A process that is killed before its fourth step, and resumed in this one, beside a run without a break."""
    over = {"train__gradient_accumulation_steps": 2, "train__save_steps": 2, "train__eval_steps": 5}
    config = world_config(folder, precision__mode="fp16-split", train__max_steps=5, **over)
    settings = folder / "killed.json"
    settings.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    killed = run_apart(["distill", str(settings), "--out", str(folder / "killed"), "--inject", "kill@4"], "cpu")
    if killed.returncode != SIGKILL:
        raise Wrong(f"the process was to be killed and ended with {killed.returncode}: {killed.stderr[-200:]}")
    with contextlib.suppress(NoBetterStudent):  # so few steps need not teach anything
        distill(config, folder / "uncut", device="cpu")
    with contextlib.suppress(NoBetterStudent):
        resume(folder / "killed", device="cpu")
    for first in differences(folder / "uncut", folder / "killed"):
        raise Wrong(f"{first.name}: {first.what}")
    return EXACT


def _reloads(folder: Path) -> Measured:
    """The student's folder holds the best weights of the last checkpoint, and a loader reads these back."""
    out = folder / "saved"
    try:
        distill(world_config(folder, train__max_steps=3), out, device="cpu")
    except NoBetterStudent as end:
        raise Wrong(f"three steps at a sound rate made the student worse: {end.what}") from None
    model, _notes = load_student(StudentConfig(model=str(out / "student"), init="pretrained"), seed=0)
    kept = last_state(out).tensors["best"]
    read = weights_of(model)
    for name, tensor in kept.items():
        if name not in read or gap(tensor, read[name]):
            raise Wrong(f"{name}: {gap(tensor, read[name]) if name in read else 'missing'}")
    return EXACT


def _stores() -> Measured:
    """Each kind of answer, packed as a cache packs it."""
    hidden, head = draw(1, 30, 12, spread=1.0).float(), HeadWeights(draw(3, 500, 12, spread=1.0).float())
    targets = torch.arange(30)
    for kind, exact, draws in (("top_k", 16, 0), ("sampled", 0, 20), ("hybrid", 8, 12), ("renormalised", 16, 0)):
        spec = SignalSpec(kind, exact, draws)  # type: ignore[arg-type]
        answer = reduce_row(hidden, head, targets, spec, "row")
        size = id_bytes(500)
        again = unpack(pack(answer, size), 30, spec, size)
        for name, values in vars(answer).items():
            if not np.array_equal(values, getattr(again, name)):
                raise Wrong(f"{kind}: {name} is not what was packed")
    return EXACT
