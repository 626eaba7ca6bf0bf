"""Laws of the seam between a run and its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.engine.hooks import Hooks
from stillroom.engine.inject import Injector, make_hooks
from stillroom.teachers import NO_TEACHER, FaultyTeacher, Teacher
from stillroom.teachers.base import kind_of
from stillroom.teachers.wrapped import WrappedTeacher
from stillroom.types import (
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

BATCH = Batch(*(torch.ones(1, 4, dtype=torch.long) for _ in range(4)), ("a",))
VIEW = StudentView(torch.zeros(4, 3), HeadWeights(torch.zeros(5, 3)))
IDS = torch.arange(8).reshape(4, 2)
SIGNALS: dict[str, Signal] = {
    "dense": DenseSignal(torch.arange(12.0).reshape(4, 3), HeadWeights(torch.ones(5, 3))),
    "top-k": TopKSignal(IDS, torch.full((4, 2), -1.0), torch.full((4,), -2.0)),
    "sampled": SampledSignal(IDS, torch.full((4, 2), 0.5), torch.ones(4)),
    "paired": PairedSignal(torch.arange(12.0).reshape(4, 3), HeadWeights(torch.ones(5, 3))),
}


class Fixed(Teacher):
    """Gives one signal, before the student's view or after it."""

    def __init__(self, signal: Signal, *, waits: bool) -> None:
        self.signal, self.waits = signal, waits
        self.kind = "dense"

    def answers(self, batch: Batch, needs: Needs) -> Any:
        return [] if self.waits else [self.signal]

    def signals_after_student(self, answers: Any, batch: Batch, view: StudentView, needs: Needs) -> Any:
        return [self.signal] if self.waits else answers


def numbers(signal: Any) -> torch.Tensor:
    found: torch.Tensor = next(
        getattr(signal, name) for name in ("hidden", "log_probs", "weights") if hasattr(signal, name)
    )
    return found


def test_no_teacher_takes_part_in_a_window_and_does_nothing(tmp_path: Path) -> None:
    teacher = NO_TEACHER
    teacher.begin_run()
    teacher.begin([BATCH], 0, 0)
    with teacher.joint_graph(BATCH), teacher.at_work():
        assert [*teacher.signals_after_student(teacher.answers(BATCH, Needs()), BATCH, VIEW, Needs())] == [None]
        assert teacher.extra_loss(BATCH, VIEW, num_targets=4) == 0.0
    teacher.after_student(BATCH, VIEW, num_targets=4)
    teacher.end_window(Verdict("keep"), Evidence(1, 1.0, 1.0, 4), 1.0)
    teacher.look_after(1, is_eval=True)
    teacher.save(tmp_path)
    assert teacher.as_model() is None and teacher.original is teacher and not teacher.gives_signals
    assert not teacher.tensors() and not teacher.state_dict() and not teacher.summary() and not [*tmp_path.iterdir()]


def test_every_signal_has_one_kind() -> None:
    assert {kind: kind_of(signal) for kind, signal in SIGNALS.items()} == {kind: kind for kind in SIGNALS}
    assert kind_of(None) == NO_TEACHER.kind


def test_a_faulty_teacher_hides_nothing_of_the_one_inside() -> None:
    """A method that the wrapper forgot would be the base's no-op: a router that silently never learns."""
    asked = {name for name in vars(Teacher) if not name.startswith("_")} - {"kind", "notes", "gives_signals"}
    assert asked <= set(vars(WrappedTeacher)) and issubclass(FaultyTeacher, WrappedTeacher)


@pytest.mark.parametrize("waits", [False, True], ids=["before the student", "after the student"])
@pytest.mark.parametrize("kind", list(SIGNALS))
@pytest.mark.parametrize("fault", ["teacher_nan", "teacher_garbage"])
def test_a_fault_strikes_every_signal_whenever_it_is_given(fault: str, kind: str, waits: bool) -> None:
    said: list[str] = []
    injector = Injector(f"{fault}@1", tell=said.append)
    injector.step = 1
    teacher = injector.teacher(Fixed(SIGNALS[kind], waits=waits))
    teacher.begin([BATCH], 0, 0)
    found = [
        teacher.signals_after_student(teacher.answers(BATCH, Needs()), BATCH, VIEW, Needs())[0] for _time in range(2)
    ]
    assert found[1] is SIGNALS[kind], "it strikes once"
    if fault == "teacher_nan":
        assert numbers(found[0]).isnan().all()
    else:
        assert numbers(found[0]).isfinite().all() and found[0] is not SIGNALS[kind]
    assert len(said) == 1 and said[0].startswith(f"injected {fault}")


def test_a_fault_of_a_teacher_that_nobody_asks_is_said_not_to_strike() -> None:
    said: list[str] = []
    Injector("teacher_nan@3", tell=said.append).teacher(NO_TEACHER)
    assert said == ["teacher_nan@3 will not strike: no objective asks a teacher"]


def test_without_faults_nothing_steps_in() -> None:
    hooks = make_hooks("", tell=print)
    assert type(hooks) is Hooks and hooks.teacher(NO_TEACHER) is NO_TEACHER
    assert type(make_hooks("nan_grad@1", tell=print)) is Injector
