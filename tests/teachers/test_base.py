"""Laws of the seam between a run and its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.core.types import (
    Batch,
    DenseSignal,
    Evidence,
    HeadWeights,
    Needs,
    PairedSignal,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
    Verdict,
)
from stillroom.teachers import NO_TEACHER, Teacher
from stillroom.teachers.base import kind_of
from stillroom.teachers.paired import OtherRows, PairedTeacher
from stillroom.teachers.several import BySource
from stillroom.training.faults import Injector, make_hooks
from stillroom.training.run import Hooks

BATCH = Batch(*(torch.ones(1, 4, dtype=torch.long) for _ in range(4)), ("a",))
VIEW = StudentView(torch.zeros(4, 3), HeadWeights(torch.zeros(5, 3)))
IDS = torch.arange(8).reshape(4, 2)
SIGNALS: dict[str, Signal] = {
    "dense": DenseSignal(torch.arange(12.0).reshape(4, 3), HeadWeights(torch.ones(5, 3))),
    "top-k": TopKSignal(IDS, torch.full((4, 2), -1.0), torch.full((4,), -2.0)),
    "sampled": SampledSignal(IDS, torch.full((4, 2), 0.5), torch.ones(4)),
    "paired": PairedSignal(torch.arange(12.0).reshape(4, 3), HeadWeights(torch.ones(5, 3))),
}


def numbers(signal: Any) -> torch.Tensor:
    found: torch.Tensor = next(
        getattr(signal, name) for name in ("hidden", "log_probs", "weights") if hasattr(signal, name)
    )
    return found


def test_no_teacher_takes_part_in_a_window_and_does_nothing(tmp_path: Path) -> None:
    teacher, training = NO_TEACHER, NO_TEACHER.training
    training.begin_run()
    teacher.begin_window([BATCH], 0)
    training.begin([BATCH], 0, 0)
    with training.joint_graph(BATCH), teacher.at_work():
        assert [*training.signals_after_student(training.answers(BATCH, Needs()), BATCH, VIEW, Needs())] == [None]
        assert training.extra_loss(BATCH, VIEW, num_targets=4) == 0.0
    training.after_student(BATCH, VIEW, num_targets=4)
    teacher.end_window()
    training.end(Verdict("keep"), Evidence(1, 1.0, 1.0, 4), 1.0)
    teacher.verify()
    training.look_after(1, is_eval=True)
    training.save(tmp_path)
    teacher.close()
    assert teacher.as_model() is None and teacher.original is teacher and not teacher.gives_signals
    assert not training.tensors() and not training.state_dict() and not teacher.summary() and not [*tmp_path.iterdir()]


def test_a_teacher_has_at_most_a_dozen_methods() -> None:
    methods = [name for name, value in vars(Teacher).items() if not name.startswith("_") and callable(value)]
    assert len(methods) <= 12, methods


def test_every_signal_has_one_kind() -> None:
    assert {kind: kind_of(signal) for kind, signal in SIGNALS.items()} == {kind: kind for kind in SIGNALS}
    assert kind_of(None) == NO_TEACHER.kind


@pytest.mark.parametrize("wrapper", [OtherRows, PairedTeacher, BySource])
def test_a_teacher_around_others_hides_nothing_of_them(wrapper: type[Teacher]) -> None:
    """A method that the wrapper forgot would be the base's no-op: a server whose change of model is never seen."""
    asked = {name for name, value in vars(Teacher).items() if not name.startswith("_") and callable(value)}
    assert not [name for name in asked if getattr(wrapper, name) is getattr(Teacher, name)]


@pytest.mark.parametrize("kind", list(SIGNALS))
@pytest.mark.parametrize("fault", ["teacher_nan", "teacher_garbage"])
def test_a_fault_strikes_every_signal_once(fault: str, kind: str) -> None:
    said: list[str] = []
    injector = Injector(f"{fault}@1", tell=said.append)
    injector.step = 1
    assert injector.signal(None) is None, "no signal, no fault"
    found = [injector.signal(SIGNALS[kind]) for _time in range(2)]
    assert found[1] is SIGNALS[kind], "it strikes once"
    if fault == "teacher_nan":
        assert numbers(found[0]).isnan().all()
    else:
        assert numbers(found[0]).isfinite().all() and found[0] is not SIGNALS[kind]
    assert len(said) == 1


def test_a_fault_of_a_teacher_that_nobody_asks_is_said_not_to_strike() -> None:
    said: list[str] = []
    Injector("teacher_nan@3", tell=said.append).warn_without_teacher(NO_TEACHER)
    assert len(said) == 1


def test_without_faults_nothing_steps_in() -> None:
    assert type(make_hooks("", tell=print)) is Hooks
    assert type(make_hooks("nan_grad@1", tell=print)) is Injector
