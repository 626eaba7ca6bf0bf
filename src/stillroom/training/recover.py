"""Examine the state of a run and carry out the verdict on a refused step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from stillroom.core.errors import BrokenAtStart, DataError, Diverged, LossScaleAtFloor, StillroomError, TooManySkips
from stillroom.core.files import LARGEST, Count, Stored, reason_of, strict, write_atomically
from stillroom.core.types import IGNORED, Batch, DenseSignal, Evidence, Examination, LossWeights, Verdict
from stillroom.models.load import not_finite_advice
from stillroom.precision.device import teacher_dtype
from stillroom.training.checkpoint import Saved, SnapshotRing, settle
from stillroom.training.evaluate import evaluate
from stillroom.training.guard import is_astray, is_within_band
from stillroom.training.rollouts import forget_rounds
from stillroom.training.run import Run, RunState, capture, restore, weight_peaks

# -- batch file ------------------------------------------------------------------------------------
# Write a batch to a file and read it back: tensors by name, all other fields as JSON.
#
# The fields are those of the dataclass, so none is forgotten. Fields that a batch computes from its tensors are not
# written: reading computes them again.


_OTHER = "other"  # the one field that is itself a batch
_TENSORS = ("Tensor", "Tensor | None")
_LARGEST_TOKEN = 2**31 - 1


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch, and under `other.` those of its second reading."""
    tensors = {one.name: getattr(batch, one.name) for one in _given() if one.type in _TENSORS}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if batch.other is not None:
        tensors |= {f"{_OTHER}.{name}": tensor for name, tensor in tensors_of(batch.other).items()}
    return tensors


def facts_of(batch: Batch) -> dict[str, Any]:
    """The other fields, as JSON values."""
    facts: dict[str, Any] = {}
    for one in _given():
        value = getattr(batch, one.name)
        if one.name == _OTHER:
            facts[_OTHER] = None if batch.other is None else facts_of(batch.other)
        elif one.type == "tuple[str, ...]":
            facts[one.name] = list(value)
        elif one.type == "int":
            facts[one.name] = int(value)
        elif one.type not in _TENSORS:
            raise TypeError(f"Batch.{one.name} is {one.type}: no file keeps that")
    return facts


def batch_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, prefix: str = "") -> Batch:
    """Read a batch. A field missing from an older file takes its default; KeyError where it has none.

    Raise ValueError for tensors that are not whole numbers [B, L] in their range, and for names that are not B.
    """
    values: dict[str, Any] = {}
    for one in _given():
        if one.type == "Tensor":
            values[one.name] = tensors[prefix + one.name]
        elif one.type in _TENSORS:
            values[one.name] = tensors.get(prefix + one.name)
        elif one.name in facts or one.default is MISSING:
            values[one.name] = _read(one, tensors, facts[one.name], prefix)
    _check(values)
    return Batch(**values)


def _check(values: Mapping[str, Any]) -> None:
    shape = values["input_ids"].shape
    if len(shape) != 2 or not values["input_ids"].numel():
        raise ValueError(f"input_ids has the shape {tuple(shape)}")
    for name, value in values.items():
        if isinstance(value, Tensor):
            least, most = _range(name, int(shape[1]))
            if value.shape != shape or value.is_floating_point() or value.is_complex():
                raise ValueError(f"{name} is {value.dtype} of the shape {tuple(value.shape)}")
            if int(value.min()) < least or int(value.max()) > most:
                raise ValueError(f"{name} has values outside of {least} to {most}")
        elif isinstance(value, tuple) and (value or name == "sample_ids") and len(value) != shape[0]:
            raise ValueError(f"{name} has {len(value)} names for {shape[0]} rows")


def _range(name: str, length: int) -> tuple[int, int]:
    """The smallest and largest value of a tensor of a batch."""
    match name:
        case "attention_mask" | "is_exact":
            return 0, 1
        case "targets":
            return IGNORED, _LARGEST_TOKEN
        case "segments" | "spans":
            return -1, length
        case _:
            return 0, _LARGEST_TOKEN


def _read(one: Field[Any], tensors: Mapping[str, Tensor], value: Any, prefix: str) -> Any:
    if one.name == _OTHER:
        return None if value is None else batch_of(tensors, value, prefix=f"{prefix}{_OTHER}.")
    if one.type == "int":
        if not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ValueError(f"{one.name} is not a count")
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{one.name} is not a list of names")
    return tuple(value)


def _given() -> Iterator[Field[Any]]:
    """The fields that are arguments of `Batch`."""
    return (one for one in fields(Batch) if one.init)


# -- locate nonfinite ------------------------------------------------------------------------------
# Name the first non-finite tensor of a step: a weight, a module's output, a loss term, or a gradient.
#
# A slow path, for refused steps only. It runs the window's micro-batches again with a hook on every module. A fault
# that does not repeat is found in the weights and gradients it left, or reported as gone.


@torch.no_grad()
def locate(run: Run, window: Sequence[Batch], loss_weights: LossWeights) -> str:
    """A sentence that names the first non-finite tensor, in the order of computation."""
    for name, parameter in run.student.model.named_parameters():
        if not _is_finite(parameter):
            return f"weight {name} of the student is not finite"
    for name, parameter in run.mix.projectors.named_parameters():
        if not _is_finite(parameter):
            return f"projector {name} is not finite"
    for batch in window:
        fault = _in_forward(run, batch, loss_weights) if batch.num_scored else ""
        if fault:
            return fault
    # Backward goes from the last layer to the first, so the last bad gradient was computed first.
    for name, gradient in reversed(list(run.optimizer.named_gradients())):
        if not _is_finite(gradient):
            return f"the gradient of {name} is not finite, though the forward pass is"
    return "nothing is left of it: the step is finite when it is computed again"


def _in_forward(run: Run, batch: Batch, loss_weights: LossWeights) -> str:
    batch = batch.to(run.device)
    needs = run.mix.needs(loss_weights)
    signal = run.teacher_of(loss_weights, batch).observe(batch, needs.teacher)
    if isinstance(signal, DenseSignal) and not _is_finite(signal.hidden):
        return "the teacher's last hidden states are not finite"
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            if not first and isinstance(tensor, Tensor) and not _is_finite(tensor):
                first.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in run.student.model.named_modules() if name]
    was_training = run.student.model.training
    run.student.eval()
    try:
        with run.precision.autocast():
            view = run.student.observe(batch, needs.student)
    finally:
        run.student.model.train(was_training)
        for handle in handles:
            handle.remove()
    if first:
        return f"the output of {first[0]} of the student is not finite"
    score = run.mix.score(view, signal, batch, loss_weights, run.mix.counts([batch]))
    for name, term in score.terms.items():
        if not _is_finite(term.total):
            return f"the {name} term is not finite, though student and teacher are"
    return ""


# -- quarantine ------------------------------------------------------------------------------------
# Store the windows of refused steps for inspection and for `stillroom replay`, and read them back.


MAX_FILES = 50
_NAME = re.compile(r"^step-(\d+)-attempt-(\d+)\.json$")
_TEXT_CHARACTERS = 2000


class _Verdict(Stored):
    action: str
    reason: str = ""


class _Evidence(Stored):
    loss: float | None
    grad_norm: float | None


class _Batch(Stored):
    text: list[str]


class Facts(Stored):
    """The JSON file of a window, as far as it is read again. The other fields of its batches are read by batch_file."""

    step: Count
    verdict: _Verdict
    located: str
    evidence: _Evidence
    batches: list[_Batch]
    attempt: Count | None = None


def load_window(path: Path) -> tuple[Facts, list[Batch]]:
    """Read a stored window. Raise DataError where its two files are damaged or do not belong together."""
    try:
        values = json.loads(path.read_bytes())
        facts = Facts.of(values)
        tensors = load(path.with_suffix(".safetensors").read_bytes())
        window = [batch_of(tensors, batch, prefix=f"{number}.") for number, batch in enumerate(values["batches"])]
        if not window:
            raise ValueError("it has no batch")
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)
        raise DataError(
            f"{path} cannot be read: {reason}", advice=["the files of a quarantined batch belong together"]
        ) from error
    return facts, window


def find_windows(folder: Path) -> dict[tuple[int, int], Path]:
    """The stored windows, by optimizer step and number of the attempt."""
    windows = {
        (int(match[1]), int(match[2])): path for path in folder.glob("*.json") if (match := _NAME.match(path.name))
    }
    return dict(sorted(windows.items()))


def keep_window(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> Path | None:
    """Write a window's tensors, evidence and verdict, unless the folder holds MAX_FILES already.

    The file name includes the number of the attempt, because a refused attempt does not advance the step. A resumed
    run that refuses the same attempt writes the same file.
    """
    if not run.parallel.is_first:
        return None
    run.check_folder()
    folder = run.folder / "quarantine"
    path = folder / f"step-{evidence.step:06d}-attempt-{state.attempted:06d}"
    kept = find_windows(folder)
    if len(kept) >= MAX_FILES and (evidence.step, state.attempted) not in kept:
        run.log.write("note", text=f"quarantine holds {MAX_FILES} batches already: this one is not kept")
        return None
    try:
        folder.mkdir(exist_ok=True)
        _write(path, window, _facts(run, state, window, evidence, verdict, located))
    except OSError as error:
        run.log.write("note", text=f"the batch cannot be kept in quarantine: {reason_of(error)}; the run continues")
        return None
    return path


def _write(path: Path, window: Sequence[Batch], facts: dict[str, Any]) -> None:
    tensors = {
        f"{number}.{name}": tensor for number, batch in enumerate(window) for name, tensor in tensors_of(batch).items()
    }
    write_atomically(path.with_suffix(".safetensors"), save(tensors))
    write_atomically(path.with_suffix(".json"), json.dumps(strict(facts), indent=1, allow_nan=False).encode("utf-8"))


def _facts(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> dict[str, Any]:
    return {
        "step": evidence.step,
        "attempt": state.attempted,
        "verdict": asdict(verdict),
        "located": located,
        "evidence": {**asdict(evidence), "terms": dict(evidence.terms), "group_norms": dict(evidence.group_norms)},
        "batches": [
            {**facts_of(batch), "text": [_text(run, row.tolist()) for row in batch.input_ids]} for batch in window
        ],
    }


def _text(run: Run, ids: list[int]) -> str:
    """The row as text, with unprintable characters escaped."""
    text = run.tokenizer.decode(ids)[:_TEXT_CHARACTERS]
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


_PATIENCE = 2
_AFTERMATH = 8  # steps after an injected fault that it may still be the cause of
_LEAST_TOKEN_SHARE = 0.1  # of all weights, for cross-entropy and distillation together


@torch.no_grad()
def examine(run: Run, state: RunState) -> Examination:
    """Check weights, moments and the canary. Slow: used only for a suspicious step."""
    # Repair FP16 copies from their FP32 masters.
    run.optimizer.refresh()
    weights = run.parallel.all_of(_weights_are_finite(run))
    moments = run.parallel.all_of(all(_is_finite(t) for t in run.optimizer.tensors().values()))
    loss = canary_loss(run) if weights else float("nan")
    is_reached = run.parallel.all_of(state.reach.holds(run))
    return Examination(weights, moments, loss, *_canary_bounds(run, state), is_reached)


@torch.no_grad()
def is_sound(run: Run) -> bool:
    """Whether every weight and moment is finite. Checked before anything is kept or saved."""
    return run.parallel.all_of(
        _weights_are_finite(run) and all(_is_finite(t) for t in run.optimizer.tensors().values())
    )


def _weights_are_finite(run: Run) -> bool:
    return _is_finite(weight_peaks(run))


def _is_finite(tensor: Tensor) -> bool:
    """By its ends: NaN is an end of any tensor that has one, and nothing of its size is made."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def check_state(run: Run, state: RunState, evidence: Evidence) -> Examination | None:
    """Examine the state after a step; None if it was bad and was rolled back.

    The state is good if it is finite, no weight is larger than updates can have made it, and the canary is not far
    worse than its best. Called before anything is kept, and after the first steps, when the guard has no statistics.
    """
    exam = _examine_finite(run, state) if is_sound(run) else examine(run, state)
    if _passes(exam):
        state.reach.begin(run)
        if exam.canary_best == float("inf"):
            state.canary_reference = state.canary_best = exam.canary_loss
        return exam
    verdict = run.guard.diagnose(evidence, f"checked after step {state.applied}", exam)
    state.undone += 1
    carry_out(run, state, [], evidence, verdict)
    return None


def is_good(run: Run, state: RunState) -> bool:
    """Whether the present state passes what `check_state` asks. Changes nothing."""
    return is_sound(run) and _passes(_examine_finite(run, state))


def _passes(exam: Examination) -> bool:
    return exam.weights_finite and exam.moments_finite and exam.weights_reached and not is_astray(exam)


def _examine_finite(run: Run, state: RunState) -> Examination:
    """Examine a state that is known to be finite."""
    is_reached = run.parallel.all_of(state.reach.holds(run))
    return Examination(True, True, canary_loss(run), *_canary_bounds(run, state), is_reached)


def _canary_bounds(run: Run, state: RunState) -> tuple[float, float]:
    """The canary losses to compare with: at the last snapshot, and the best.

    Infinite while kd and ce have almost no weight: training hidden states alone may raise the loss on tokens without a
    fault.
    """
    weights = run.loss_weights(state).weights
    if run.canary_is_objective and state.applied < state.fallback_until:  # its teacher's answers cannot be used now
        return float("inf"), float("inf")
    if sum(weights.get(term, 0.0) for term in ("kd", "ce")) >= _LEAST_TOKEN_SHARE * sum(weights.values()):
        return state.canary_reference, state.canary_best
    return float("inf"), float("inf")


def canary_loss(run: Run) -> float:
    """The loss on the canary batch; positions that cannot be scored count as infinite.

    Plain cross-entropy, or the objective at the end of the run where the student is not trained or chosen by that: what
    a sound student loses there would be taken for a divergence.
    """
    options: dict[str, Any] = {}
    if run.canary_is_objective:
        options = {"teacher": run.teacher, "mix": run.mix, "loss_weights": run.curriculum.at(1.0)}
        options["answers"] = run.canary_answers
    # Dropout is off in evaluation, so the random state does not change.
    with run.parallel.gathered():
        result = evaluate(run.student, [run.canary()], precision=run.precision, **options)
    loss = result.nll if result.objective is None else result.objective
    return run.parallel.worst(loss if result.unscored_tokens == 0 else float("inf"))


def take_snapshot(run: Run, state: RunState, exam: Examination | None = None) -> bool:
    """Keep the present state for a rollback, unless the canary got worse. Return whether it was kept.

    The caller has checked that weights and moments are finite. A canary worse than at the last snapshot may be the
    first sign of a divergence, so the state is not kept; after two such refusals in a row the higher loss is accepted,
    unless it is far above the best.
    """
    exam = exam or _examine_finite(run, state)
    if not math.isfinite(exam.canary_loss) or is_astray(exam):
        return False
    if not is_within_band(exam) and state.snapshots_refused < _PATIENCE:
        state.snapshots_refused += 1
        return False
    state.snapshots_refused = 0
    state.canary_reference = exam.canary_loss
    state.canary_best = min(exam.canary_best, exam.canary_loss)
    keep_snapshot(run, state)
    return True


def keep_snapshot(run: Run, state: RunState) -> None:
    """Keep the present state without a check: that of a resumed run comes from a sealed checkpoint."""
    run.snapshots.keep(state_to_return_to(run, state))


def state_to_return_to(run: Run, state: RunState) -> Saved:
    """The present state without the best student, which a rollback does not restore."""
    saved = capture(run, state)
    without_best = {name: group for name, group in saved.tensors.items() if name != "best"}
    return Saved(saved.step, without_best, saved.scalars)


def carry_out(run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict) -> None:
    """Carry out any verdict but keep, and log it."""
    state.is_changing = True
    is_finite = math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
    # Do not locate a retry: the overflow is in the scaled gradients.
    located = "" if is_finite or verdict.action == "retry" else _located(run, state, window)
    run.log.write(
        "guard",
        step=evidence.step,
        action=verdict.action,
        reason=verdict.reason,
        located=located,
        sample_ids=[name for batch in window for name in batch.sample_ids],
        evidence={
            "loss": evidence.loss,
            "grad_norm": evidence.grad_norm,
            "terms": dict(evidence.terms),
            "loss_scale": evidence.loss_scale,
            "bad_teacher_rows": evidence.bad_teacher_rows,
        },
    )
    match verdict.action:
        case "retry":
            run.precision.back_off()
            state.retried += 1
            state.attempt += 1
        case "skip":
            _skip_window(run, state, window, evidence, verdict, located)
        case "fallback":
            _skip_window(run, state, window, evidence, verdict, located)
            state.fallback_until = state.applied + run.config.guard.fallback_steps
        case "rollback":
            settle(run, state)  # it may be what is returned to, and nothing of this line is saved after the mark
            state.rollbacks += 1
            roll_back(run, state, verdict)
        case "reset":
            settle(run, state)
            state.rollbacks += 1
            _reset(run, state)
        case _:
            keep_window(run, state, window, evidence, verdict, located)
            raise _halted(run, verdict, evidence, located)
    state.is_changing = False


def _located(run: Run, state: RunState, window: Sequence[Batch]) -> str:
    if run.parallel.is_sharded:  # the search would end at another place in each process
        return "not looked for in a sharded student"
    if run.teacher.answers_together:
        return "not looked for where the teacher is sharded"
    return locate(run, window, run.loss_weights(state))


def _skip_window(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> None:
    keep_window(run, state, window, evidence, verdict, located)
    state.skipped += 1
    state.quarantined.append(state.cursor)
    state.cursor += 1
    state.attempt = 0


def roll_back(run: Run, state: RunState, verdict: Verdict) -> None:
    """Return to the last good state, data cursor included. Quarantined windows stay skipped."""
    newest = run.snapshots.newest()
    if newest is None:
        raise Diverged(
            f"step {state.applied + 1}: {verdict.reason}, and there is no good state to return to",
            where=f"optimizer step {state.applied + 1}",
            advice=_advice(run, state.applied + 1),
        )
    failed_at = state.applied
    # The first rollback to a snapshot repeats the steps unchanged: the fault may not repeat. At the second, go back
    # one snapshot further, and after a divergence lower the learning rate.
    is_second = newest.step == state.rolled_back_to
    if is_second and len(run.snapshots) > 1:
        run.snapshots.drop_newest()
        newest = run.snapshots.newest() or newest
    restore(run, state, newest, keeps_history=True)
    forget_rounds(run, state)
    state.rolled_back_to = newest.step
    if verdict.backs_off and is_second:
        state.backoff_at = state.applied
    run.hooks.after_return(failed_at + 1)
    run.log.write("note", text=f"rolled back from step {failed_at} to step {state.applied}")


def _reset(run: Run, state: RunState) -> None:
    if state.initial is None:
        raise Diverged(
            "the initial state was not kept, so the run cannot begin again", advice=_advice(run, state.applied + 1)
        )
    failed_at = state.applied
    restore(run, state, state.initial, keeps_history=True)
    forget_rounds(run, state)
    state.rolled_back_to = -1
    state.canary_reference = state.canary_best = canary_loss(run)  # no canary loss was measured for the initial state
    if isinstance(run.snapshots, SnapshotRing):  # its snapshots are of the training that was dropped
        while len(run.snapshots):
            run.snapshots.drop_newest()
        keep_snapshot(run, state)
    run.hooks.after_return(failed_at + 1)
    run.log.write("note", text="began again from the initial weights: all training so far is lost")


def _halted(run: Run, verdict: Verdict, evidence: Evidence, located: str) -> StillroomError:
    kinds: dict[int, type[StillroomError]] = {20: BrokenAtStart, 21: TooManySkips, 22: Diverged, 23: LossScaleAtFloor}
    kind = kinds.get(verdict.exit_code, Diverged)
    what = f"{verdict.reason}: {located}" if located else verdict.reason
    return kind(what, where=f"optimizer step {evidence.step}", advice=_advice(run, evidence.step, evidence))


def _advice(run: Run, step: int, evidence: Evidence | None = None) -> list[str]:
    """Advice for the cause of the halt, most promising first."""
    if run.hooks.last_strike is not None and step - run.hooks.last_strike[1] <= _AFTERMATH:
        name, at = run.hooks.last_strike
        return [f"nothing to change: --inject struck {name} at step {at}; the same run without it may be sound"]
    advice = []
    if evidence is not None and evidence.bad_teacher_rows:
        told = not_finite_advice(teacher_dtype(run.config.teacher.dtype, run.device))
        advice += [f"the teacher's answers are not finite: {text}" for text in told]
    if evidence is not None and evidence.is_scale_at_floor:
        advice.append("FP16 overflows in the student itself: --precision fp32, or bf16-mixed if the GPU has it")
    if evidence is not None and not math.isfinite(evidence.terms.get("ce", 0.0)):
        advice.append("the student's own logits are not finite: lower train.learning_rate by a factor of ten")
    rate = run.config.train.learning_rate
    is_spike = evidence is not None and math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
    why = f" ({rate:g} is probably too high: the losses are finite and far above those before)" if is_spike else ""
    return [
        *advice,
        f"lower the learning rate: --set train.learning_rate={rate / 10:.2g}{why}",
        "look at the batches that were set aside, in quarantine/",
    ]
