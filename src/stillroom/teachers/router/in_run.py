"""A router teacher inside a run: lookahead, probe, checks on held-out text, events, and saving of the gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stillroom.config import Config
from stillroom.config.teacher import TRAINING_MODES
from stillroom.errors import CannotSave
from stillroom.files import reason_of, replaced_folder
from stillroom.models import LoadedModel, Student
from stillroom.precision import AdamW, Precision
from stillroom.teachers.router.gates import GateOptions
from stillroom.teachers.router.meta import Direction, both_ways, check_precision, lookahead_direction
from stillroom.teachers.router.peers import ALONE, Peers
from stillroom.teachers.router.probe import probe_gates, verdict_of
from stillroom.teachers.router.teacher import RouterTeacher
from stillroom.types import Batch, StudentView


@dataclass(frozen=True)
class Surroundings:
    """The parts of a run that a teacher may use."""

    student: Student
    optimizer: AdamW  # the student's
    precision: Precision
    learning_rate: float  # the student's, at its peak
    window: Callable[[int], Sequence[Batch]]  # a window of the data order, by number
    held_out: Callable[[], Sequence[Batch]]
    write: Callable[..., object]  # writes an event: its name, then its fields
    peers: Peers = ALONE  # the other processes


class RunRouter(RouterTeacher):
    """A `RouterTeacher` that uses the parts of a run."""

    def __init__(self, config: Config, loaded: LoadedModel, vocab_size: int, surroundings: Surroundings) -> None:
        if config.teacher.router.mode == "sar-meta":
            check_precision(surroundings.precision)
        train = config.train
        super().__init__(
            loaded.network,
            config.teacher.router,
            vocab_size=vocab_size,
            device=surroundings.precision.device,
            options=GateOptions(
                learning_rate=train.router_learning_rate or train.learning_rate,
                max_grad_norm=train.max_grad_norm,
                betas=(train.beta1, train.beta2),
                epsilon=train.epsilon,
            ),
            offload=config.teacher.placement == "offload",
            is_described=loaded.is_described,
            seed=train.seed,
            tell=lambda text: surroundings.write("note", text=text),
            peers=surroundings.peers,
        )
        self._run = surroundings
        self._direction: Direction = {}  # of this window's lookahead batch, in sar-meta

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        """In sar-meta, compute the lookahead direction from the first batch of the next window."""
        super().begin(window, step, cursor)
        self._direction = {}
        if self.config.mode == "sar-meta" and self.is_due:
            run, lookahead_batch = self._run, self._run.window(cursor + 1)[0]
            self._direction = lookahead_direction(
                run.student, run.optimizer, run.precision, lookahead_batch, run.learning_rate
            )

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        if self.config.mode != "sar-meta":
            super().after_student(batch, view, num_targets=num_targets)
        elif self.is_due and self._direction:  # empty before the student's first update
            forward, backward = both_ways(self._run.student, self._run.precision, batch, self._direction)
            self.learn(batch, forward, num_targets=num_targets, opposite=backward)

    def begin_run(self) -> None:
        """Measure the teacher before training, and probe whether training its gates helps."""
        held_out = self._run.held_out()
        self._run.write("router", step=0, **self.report(self.start(held_out)), alarm=False)
        steps = self.config.probe_steps
        if not steps or not self.trains:
            return
        probed = probe_gates(self, (self._run.window(index) for index in range(steps)), held_out, steps)
        self._run.write("router_probe", **probed)
        self._run.write("note", text=verdict_of(probed))

    def look_after(self, step: int, *, is_eval: bool) -> None:
        """Repair non-finite gates; at an evaluation, also restore gates that made the teacher worse."""
        self.gates.mend()
        if not is_eval:
            return
        assessment = self.assess(self._run.held_out())
        record = self.report(assessment)
        alarm = self.watch(assessment)
        self._run.write("router", step=step, **{**record, "is_frozen": self.is_frozen}, alarm=alarm)

    def summary(self) -> dict[str, Any]:
        return {
            "router": {
                "mode": self.config.mode,
                "is_frozen": self.is_frozen,
                "updates": self.gates.num_applied,
                "skipped": self.gates.num_skipped,
                "mended": self.gates.num_mended,
                "teacher_nll_start": self.start_nll,
                "probe": self.probed,
            }
        }

    def save(self, folder: Path) -> None:
        """Write the trained gates to `router/` in the run's folder."""
        if self.config.mode not in TRAINING_MODES:
            return
        try:
            with replaced_folder(folder / "router") as aside:
                self.gates.save(aside)
        except (OSError, SafetensorError) as error:
            raise CannotSave(
                f"cannot write the trained gates: {reason_of(error)}",
                where=str(folder / "router"),
                advice=["free some space on that disk, then `stillroom resume` the run"],
            ) from error
