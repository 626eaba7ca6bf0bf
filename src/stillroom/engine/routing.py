"""What a run does about its teacher's gates: build, teach, watch, and leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.engine.agree import Agreement
from stillroom.errors import CannotSave, ConfigError
from stillroom.files import reason_of, replaced_folder
from stillroom.models import LoadedModel
from stillroom.models.routers import find_gates
from stillroom.precision import Precision
from stillroom.teachers.gates import GateOptions
from stillroom.teachers.meta import both_ways, check_precision, quiz_direction
from stillroom.teachers.router import TRAINING_MODES, RouterTeacher
from stillroom.teachers.router_probe import probe_gates, verdict_of
from stillroom.telemetry import EventLog
from stillroom.types import Batch, Evidence, StudentView, Verdict

if TYPE_CHECKING:
    from stillroom.engine.run import Run
    from stillroom.engine.state import RunState


def unused_router_settings(config: Config) -> list[str]:
    """Router settings that would do nothing are said aloud, and those that cannot work together are refused."""
    router, train = config.teacher.router, config.train
    if router.mode == "sar-joint" and config.objectives.kd.top_k:
        raise ConfigError(
            "sar-joint sends the student's gradient into the teacher, which needs its whole distribution",
            where="objectives.kd.top_k",
            advice=["--set objectives.kd.top_k=0", "--set teacher.router.mode=sar"],
        )
    notes = []
    if router.mode != "frozen" and not Curriculum.of(config).uses_teacher:
        notes.append(f"teacher.router.mode {router.mode} has no effect: no objective asks the teacher")
    if train.router_learning_rate and router.mode not in TRAINING_MODES:
        notes.append(f"train.router_learning_rate has no effect: teacher.router.mode is {router.mode}")
    return notes


def num_router_parameters(config: Config, model: Any) -> int:
    """Weights that are trained beside the student's: they count when a precision is chosen."""
    router = config.teacher.router
    if model is None or router.mode not in TRAINING_MODES:
        return 0
    own = dict(model.named_parameters())
    names = [name for gate in find_gates(model, router.patterns) for name in gate.parameter_names()]
    return sum(int(own[name].numel()) for name in names)


def make_router(
    config: Config,
    teacher: LoadedModel | None,
    vocab_size: int,
    precision: Precision,
    log: EventLog,
    agree: Agreement,
) -> RouterTeacher | None:
    """A teacher with gates to look after, where the configuration asks for one."""
    if teacher is None or config.teacher.router.mode == "frozen":
        return None
    if agree.size > 1:
        raise ConfigError(
            f"teacher.router.mode = {config.teacher.router.mode!r} works in one process, and there are {agree.size}",
            where="teacher.router.mode",
            advice=["set teacher.router.mode = 'frozen'", "start a single process"],
        )
    if config.teacher.router.mode == "sar-meta":
        check_precision(precision)
    train = config.train
    options = GateOptions(
        learning_rate=train.router_learning_rate or train.learning_rate,
        max_grad_norm=train.max_grad_norm,
        betas=(train.beta1, train.beta2),
        epsilon=train.epsilon,
    )
    return RouterTeacher(
        teacher.network,
        config.teacher.router,
        vocab_size=vocab_size,
        device=precision.device,
        options=options,
        offload=config.teacher.placement == "offload",
        is_described=teacher.is_described,
        seed=train.seed,
        tell=lambda text: log.write("note", text=text),
    )


def begin_router(run: Run) -> None:
    """Measure the teacher before anything is trained, and find out whether its gates are worth training."""
    router = run.router
    if router is None:
        return
    held_out = run.eval_batches()
    run.log.write("router", step=0, **router.report(router.start(held_out)), alarm=False)
    steps = router.config.probe_steps
    if not steps or not router.trains:
        return
    found = probe_gates(router, (run.loader.window(index) for index in range(steps)), held_out, steps)
    run.log.write("router_probe", **found)
    run.log.write("note", text=verdict_of(found))


def begin_window(run: Run, state: RunState, window: Sequence[Batch]) -> None:
    """Tell the router that a window begins; with sar-meta, set the quiz: the first batch of the window after it."""
    assert run.router is not None
    run.router.begin(window, state.applied)
    run.direction = {}
    if run.router.config.mode == "sar-meta" and run.router.is_due:
        quiz = run.loader.window(state.cursor + 1)[0]
        rate = run.config.train.learning_rate
        run.direction = quiz_direction(run.student, run.optimizer, run.precision, quiz, rate)


def teach(run: Run, router: RouterTeacher, batch: Batch, view: StudentView, num_targets: int) -> None:
    """The gates' part of a micro-batch, after the student's."""
    opposite = None
    if router.config.mode == "sar-meta" and router.is_due and run.direction:
        view, opposite = both_ways(run.student, run.precision, batch, run.direction)
    elif router.config.mode == "sar-meta":
        return  # before the student's first update there is no step to look along
    router.learn(batch, view, num_targets=num_targets, opposite=opposite)


def settle(run: Run, evidence: Evidence, verdict: Verdict, rate: float) -> None:
    """Update the gates with a kept step, and leave them alone with a refused one."""
    assert run.router is not None
    run.router.settle(
        is_kept=verdict.action == "keep",
        rate_factor=rate,
        joint_scale=evidence.loss_scale,
        bad_rows=evidence.bad_teacher_rows,
    )


def look_after_router(run: Run, state: RunState, *, is_eval: bool) -> None:
    """Before anything is kept, gates are finite; at an evaluation, the teacher is no worse than it may be."""
    router = run.router
    if router is None:
        return
    router.gates.mend()
    if not is_eval:
        return
    found = router.assess(run.eval_batches())
    record = router.report(found)
    alarm = router.watch(found)
    run.log.write("router", step=state.applied, **{**record, "is_frozen": router.is_frozen}, alarm=alarm)


def _save_gates(run: Run, router: RouterTeacher) -> None:
    """Whole or not at all, like the student."""
    try:
        with replaced_folder(run.folder / "router") as folder:
            router.gates.save(folder)
    except (OSError, SafetensorError) as error:
        raise CannotSave(
            f"cannot write the trained gates: {reason_of(error)}",
            where=str(run.folder / "router"),
            advice=["free some space on that disk, then `stillroom resume` the run"],
        ) from error


def finish_router(run: Run) -> dict[str, Any]:
    """Save the trained gates beside the student; answers with what the summary says about them."""
    router = run.router
    if router is None:
        return {}
    if router.config.mode in TRAINING_MODES:
        _save_gates(run, router)
    return {
        "router": {
            "mode": router.config.mode,
            "is_frozen": router.is_frozen,
            "updates": router.gates.num_applied,
            "skipped": router.gates.num_skipped,
            "mended": router.gates.num_mended,
            "teacher_nll_start": router.start_nll,
            "probe": router.probed,
        }
    }
