"""The event log: one strict JSON object a line.

Every JSON reader accepts it: NaN and infinity are not JSON, so a value that is not finite is written as null with a
sibling key, `"loss": null, "loss_nonfinite": "nan"`, and never as another number.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from stillroom.core.errors import CannotSave
from stillroom.core.files import NONFINITE, NONFINITE_WORDS, strict
from stillroom.core.types import Detail
from stillroom.telemetry.record import Event, refuse_broken, scan_events

SCHEMA = 1

Listener = Callable[[Event], None]

HEADER_KEYS = ("event", "schema", "time")
STEP_KEYS = (
    "step",
    "train_loss",
    "lr",
    "grad_norm",
    "verdict",
    "success_rate",
    "consecutive_nans",
    "gpu_memory_gb",
    "loss_scale",
    "tokens_per_second",
    "phase",
    "terms",
)
EVAL_KEYS = (
    "step",
    "perplexity",
    "bits_per_byte",
    "kl",
    "agreement",
    "objective",
    "terms",
    "unscored_tokens",
)
TERM_KEYS = ("raw", "weight", "scaled", "share")

# Events that a run writes again if it repeats steps after a resume.
_WRITTEN_AGAIN = frozenset(
    {"step", "eval", "checkpoint", "guard", "phase", "gradients", "rollouts", "router", "advice", "changed_inputs"}
)
_WRITTEN_ONCE = frozenset(
    {"sample", "first_forward", "router_probe", "teacher_eval", "stage"}
)  # at the beginning or the end, without a step


# -- writing ---------------------------------------------------------------------------------------------


class EventLog:
    """Append events to a file, then call listeners with each. A listener gets its own copy, which it may change.

    Opening a file that exists continues it: drop a last line torn by a crash, and the records that the resumed run will
    write again. `keep_records` is the `position` of the log when the state was saved: records before it stay (also a
    refused step, which was not applied); of those after it, drop the ones that will be written again, whatever their
    step. Without it, `keep_until_step` decides by the step alone. `dropped` counts the records removed.
    """

    def __init__(
        self, path: Path | str, *, keep_records: int | None = None, keep_until_step: int | None = None
    ) -> None:
        self.path = Path(path)
        self.position = 0  # records so far, including those that wait for disk space
        self._listeners: list[Listener] = []
        self._waiting: list[str] = []  # lines that a full disk refused
        self._writes = threading.RLock()  # a checkpoint's thread may write; a listener may write while it is told
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.dropped = 0
            if self.path.exists():
                self.position, self.dropped = _mend(self.path, keep_records, keep_until_step)
            self._file: TextIO = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write(self, event: str, /, **fields: Any) -> Event:
        """Write one event; return the record as it is in the file."""
        taken = [key for key in HEADER_KEYS if key in fields]
        if taken:
            raise ValueError(f"an event's own fields cannot be called {', '.join(taken)}")
        record = _record(event, fields)
        line = _line(record)
        with self._writes:
            self._waiting.append(line)
            self.position += 1
            self._flush()
            self._notify(line)
        return record

    def announce(self, event: str, /, **fields: Any) -> None:
        """Call the listeners with an event that is not kept, such as the progress of a stage."""
        with self._writes:
            self._notify(_line(_record(event, fields)))

    def _notify(self, line: str) -> None:
        """Call the listeners. Remove one whose pipe or terminal is closed; the run continues."""
        for listener in tuple(self._listeners):
            try:
                listener(json.loads(line))
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._listeners.remove(listener)
                self.write("note", text="nobody reads the console any more: the run continues without it")

    def sync(self) -> None:
        """Flush what is written to the disk."""
        with contextlib.suppress(OSError):  # not every file can be flushed; `write` reports a full disk
            os.fsync(self._file.fileno())

    def _flush(self) -> None:
        """Write the waiting lines. On a full disk they keep waiting, and a half-written line is removed."""
        try:
            good = self._file.tell()
            self._file.write("".join(self._waiting))
            self._file.flush()
            self._waiting.clear()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _cannot_write(self.path, error) from error
            self._reopen(good)

    def _reopen(self, good: int) -> None:
        """Discard the buffer that cannot be written, and cut the file back to its last whole line."""
        with contextlib.suppress(OSError):
            self._file.close()
        try:
            os.truncate(self.path, good)
            self._file = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def records(self) -> tuple[Event, ...]:
        """What is in the file now."""
        return scan_events(self.path).records

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every record written from now on."""
        self._listeners.append(listener)

    def close(self) -> None:
        if self._file.closed:
            return
        self._flush()
        self._file.close()
        if self._waiting:
            waiting = len(self._waiting)
            raise _cannot_write(self.path, OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {waiting} events lost"))

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CannotSave:
            if error is None:  # else report the first error
                raise


class SilentLog(EventLog):
    """The log of every process but the first: writes nothing, because the first writes the same."""

    def __init__(self) -> None:
        self.path = Path()
        self.position = 0
        self.dropped = 0

    def write(self, event: str, /, **fields: Any) -> Event:
        return {"event": event, **fields}

    def announce(self, event: str, /, **fields: Any) -> None:
        return

    def listen(self, listener: Listener) -> None:
        return

    def sync(self) -> None:
        return

    def close(self) -> None:
        return


def _record(event: str, fields: Mapping[str, Any]) -> Event:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    is_detail = {"detail": True} if isinstance(fields.get("text"), Detail) else {}
    return {"event": event, "schema": SCHEMA, "time": now, **strict(dict(fields)), **is_detail}


def _line(record: Event) -> str:
    # Escape non-ASCII characters, some of which break lines in editors and terminals.
    return json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n"


def _mend(path: Path, keep_records: int | None, keep_until_step: int | None) -> tuple[int, int]:
    """Rewrite the file without the records that a resumed run writes again. Return how many were (kept, dropped)."""
    scan = scan_events(path)
    refuse_broken(path, scan)
    kept = [
        record
        for number, record in enumerate(scan.records)
        if (keep_records is not None and number < keep_records)
        or not _comes_again(record, keep_until_step, is_after=keep_records is not None)
    ]
    dropped = len(scan.records) - len(kept) + scan.is_torn
    if dropped or not path.read_bytes().endswith(b"\n"):
        _replace(path, kept)
    return len(kept), dropped


def _comes_again(record: Event, keep_until_step: int | None, *, is_after: bool) -> bool:
    """Whether a resumed run writes this record again. `is_after`: it was written after the state was saved."""
    kind, step = record.get("event"), record.get("step")
    if keep_until_step is None:
        return False
    if kind in _WRITTEN_ONCE:
        return is_after
    is_later = isinstance(step, int) and step > keep_until_step
    # The record of a checkpoint is written after the state is saved, and not again.
    return kind in _WRITTEN_AGAIN and (is_later or (is_after and kind != "checkpoint"))


def _replace(path: Path, records: Iterable[Event]) -> None:
    """Replace the file atomically: a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _cannot_write(path: Path, error: OSError) -> CannotSave:
    return CannotSave(
        f"the event log cannot be written: {error.strerror or error}",
        where=str(path),
        advice=("free space on the disk, or choose another folder with --out", "then continue: stillroom resume RUN"),
    )


# -- the format ------------------------------------------------------------------------------------------


def problems(record: Mapping[str, Any]) -> list[str]:
    """How a record breaks the documented format; empty if it does not."""
    name = record.get("event")
    required = HEADER_KEYS + {"step": STEP_KEYS, "eval": EVAL_KEYS}.get(str(name), ())
    faults = [f"{name}: {key} is missing" for key in required if key not in record]
    terms = record.get("terms") if name in ("step", "eval") else None
    for term, parts in (terms or {}).items():
        faults += [f"{name}: terms.{term}.{key} is missing" for key in TERM_KEYS if key not in parts]
    for scope in (record, *(terms or {}).values()):
        faults += _false_siblings(str(name), scope)
    return faults


def _false_siblings(name: str, scope: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, word in scope.items():
        if key.endswith(NONFINITE) and isinstance(word, str):
            value = scope.get(key.removesuffix(NONFINITE))
            if word not in NONFINITE_WORDS or value is not None:
                faults.append(f"{name}: {key} says {word!r}, and the value is {value!r}")
    return faults


# -- catalogue -------------------------------------------------------------------------------------
# Every event of `events.jsonl`, with the meaning of its keys. The reference page of events is made from this.
#
# A key that ends in `_nonfinite` belongs to one whose value is null because it was not finite; it is not listed.


@dataclass(frozen=True)
class EventKind:
    """When an event is written, and what its keys mean. `sometimes` are keys that not every such event has."""

    when: str
    keys: dict[str, str] = field(default_factory=dict)
    sometimes: dict[str, str] = field(default_factory=dict)


HEADER = {
    "event": "name of the event",
    "schema": "version of the format, 1",
    "time": "UTC, ISO 8601, to the millisecond",
}
TERM = {
    "raw": "mean of the term over its count, unweighted",
    "weight": "its weight in this step",
    "scaled": "raw times weight",
    "share": "scaled over the whole objective",
}
_STEP = "optimizer steps applied so far"
_METRICS = {
    "perplexity": "exp of the mean negative log-likelihood of the targets",
    "bits_per_byte": "the same likelihood over the bytes of text",
    "kl": "mean KL(teacher, student), nats a token",
    "agreement": "share of positions where both models have the same top token",
    "top5_agreement": "share of positions where the teacher's top token is among the student's top five",
    "top5_overlap": "mean overlap of the two models' top five tokens",
    "acceptance": "mean of sum min(p, q), 1 - total variation",
    "calibration_error": "expected calibration error of the top token",
    "intervals": "95 % interval of each metric, by bootstrap over documents",
    "documents": "documents the intervals are drawn over",
    "uncompared_tokens": "positions at which one of the two models gave no distribution",
}
_ALSO_STORED = ("perplexity", "bits_per_byte", "kl", "agreement")  # of a teacher that is not loaded
_BY_SPANS = {"kl_per_byte": "with two tokenizers: KL on spans, bits a byte"}

EVENTS: dict[str, EventKind] = {
    "run_start": EventKind(
        "A run begins, or begins again after a stop.",
        {
            "run": "name of the run's folder",
            "config": "the whole configuration",
            "versions": "of Python, stillroom and its libraries",
            "machine": "platform, processor, cores, memory",
            "precision": "mode, the reason it was chosen, and gflops, the rates of a CPU where they were measured",
            "schedule": "total_batches, gradient_accumulation, processes, optimizer_steps, warmup_steps, learning_rate",
            "teacher": "name, family, parameters, layers, width, vocabulary of the live teacher; null without one",
            "student": "the same of the student, and trained, its trained parameters",
            "data": "records, documents, targets, tokens, what was left out, lengths of rows, notes",
            "setup_seconds": "from the start of the command until this record",
            "stages": "seconds of each stage before this record",
        },
    ),
    "stage": EventKind(
        "A part of the run that is not a step begins or ends: loading, reading data, evaluating, saving.",
        {
            "name": "what is done",
            "state": "begin or end; listeners are also called with `progress`, which is not kept",
            "seconds": "since it began",
        },
        {
            "total": "number of batches or texts, where they can be counted",
            "unit": "what is counted",
            "done": "of these, done",
            "eta_seconds": "estimate of what is left, from what is done or from the last stage of this name",
        },
    ),
    "resume": EventKind("A run continues from a checkpoint.", {"step": "step of the checkpoint"}),
    "weight_set": EventKind(
        "A caller's loop set the weight of a term for the steps after this one.",
        {"step": "applied steps so far", "term": "name of the term", "weight": "its weight from now on"},
    ),
    "changed_inputs": EventKind(
        "A resumed run continues with changed data or models, as the user allowed.",
        {"step": "step of the checkpoint", "changes": "a sentence for each input that changed"},
    ),
    "note": EventKind(
        "Anything a reader of the log should know, in words: choices, warnings, what was left out.",
        {"text": "the sentence"},
        {
            "detail": "true where nobody needs to act on it: a terminal shows it with --verbose only",
            "micro_batch_rows": "rows that now fit, where memory ran out",
            "reason": "what the device said",
            "norm": "gradient norm of a trained gate that was not applied",
        },
    ),
    "teacher_quantised": EventKind(
        "The teacher's layers were quantised and compared with the full ones.",
        {
            "kind": "as in teacher.quantisation",
            "kl": "KL(full, quantised), nats a token",
            "max_kl": "the most that is accepted",
            "positions": "positions it was measured on",
            "layers": "linear layers that were quantised",
            "full_bytes": "their size before",
            "bytes": "their size now",
        },
    ),
    "teacher_eval": EventKind(
        "The teacher was scored on the held-out data, before the first step.",
        {
            **{key: text for key, text in _METRICS.items() if key in _ALSO_STORED},
            "parameters": "of the teacher",
        },
        {
            **{key: text for key, text in _METRICS.items() if key not in _ALSO_STORED},
            **_BY_SPANS,
            "source": "`stored answers`, where it is not loaded",
        },
    ),
    "first_forward": EventKind(
        "Both models answered the first batch; shapes and alignment are checked.",
        {
            "rows": "sequences of the batch",
            "positions": "tokens of a sequence",
            "scored": "scored positions of the batch",
            "student_hidden": "[scored positions, width]",
            "teacher_hidden": "the same of a live teacher, else null",
            "student_logits": "[scored positions, vocabulary]",
            "teacher_logits": "the same of a live teacher, else null",
            "vocabulary": "size of the student's vocabulary",
            "vocabulary_hash": "digest of each model's vocabulary",
            "alignment": "loss with labels as given, one back and one ahead, and the doubt that follows",
            "temperature": "of the distillation term",
            "weights": "of all terms",
        },
    ),
    "step": EventKind(
        "An optimizer step was attempted, applied or refused.",
        {
            "step": "number of the step, from 1",
            "train_loss": "the objective on the window",
            "lr": "learning rate",
            "grad_norm": "norm of the student's gradient, unscaled, before clipping",
            "verdict": "keep, retry, skip, rollback, fallback, reset or halt",
            "success_rate": "share of the attempts so far that were applied",
            "consecutive_nans": "refused steps in a row",
            "loss_scale": "1 where losses are not scaled",
            "skipped": "steps skipped so far",
            "micro_batch_rows": "rows of a micro-batch, which may shrink where memory runs out",
            "rollbacks": "rollbacks so far",
            "tokens": "targets of the window",
            "tokens_per_second": "targets over the seconds of the step",
            "seconds": "by the clock",
            "loader_seconds": "of these, waiting for batches",
            "cpu_seconds": "of all threads of the process",
            "eta_seconds": "estimate of what is left",
            "phase": "phase of the curriculum",
            "temperature": "of the distillation term",
            "terms": "name -> raw, weight, scaled, share",
            "bad_teacher_rows": "positions where the teacher gave no distribution",
            "gpu_memory_gb": "peak on the GPU, 0 without one",
            "memory_gb": "resident size of the process",
            "memory_percent": "share of the device's memory in use",
        },
        {
            "fallback_loss": "mean cross-entropy of the bad_teacher_rows, which are taught by their labels",
            "idle_terms": "terms that the curriculum keeps at weight 0 now",
            "sources": "targets and raw terms by source, where there are several",
            "noop_update_fraction": "FP16 modes: share of sampled weights that an update left as they were",
            "zero_gradient_fraction": "FP16 modes: share of sampled gradients that are exactly 0",
            "clamped_fraction": "share of logits moved by guard.logit_clamp",
            "clamped_losses": "losses moved by guard.loss_clamp",
            "rows_without_contrast": "rows that were alone in their micro-batch",
        },
    ),
    "gradients": EventKind(
        "Each term's gradient was measured by itself (telemetry.gradient_steps).",
        {
            "step": _STEP + " and this one",
            "terms": "name -> norm, share of the summed norms",
            "cosines": "between the gradients of each two terms",
        },
    ),
    "rollouts": EventKind(
        "A round of the student's own text is sealed, and serves the next windows.",
        {
            "step": _STEP,
            "round": "its number",
            "rows": "answers that are learned from",
            "dropped": "answers that are not: their logits were not finite, or they repeat a phrase",
            "served": "rows that the windows of the round take",
            "replayed": "rows of older rounds that are in use again",
            "repeated": "rows that are served twice because answers were dropped",
            "tokens": "written, end tokens included",
            "seconds": "by the clock, until it was sealed",
            "cpu_seconds": "of all threads of the process",
            "tokens_per_second": "tokens over seconds",
            "mean_length": "tokens of an answer",
            "data_length": "tokens of an answer of the data; 0: plain text",
            "ended": "answers by why they ended: end, length, loop, nonfinite, positions",
            "entropy": "of the student where it wrote, estimated from the tokens that it drew; nats a token",
            "weights": "fingerprint of the student that wrote it",
            "reused": "whether it was sealed before a kill, and is taken as it is",
        },
    ),
    "phase": EventKind(
        "The curriculum entered another phase.",
        {"step": _STEP, "from": "phase that ended", "to": "phase that begins"},
    ),
    "guard": EventKind(
        "A step was refused, or the state was found bad between two steps.",
        {
            "step": "number of the step",
            "action": "retry, skip, rollback, fallback, reset or halt",
            "reason": "why, in words",
            "located": "the first tensor that is not finite, where one was looked for",
            "sample_ids": "records of the window",
            "evidence": "loss, grad_norm, terms, loss_scale, bad_teacher_rows",
        },
    ),
    "eval": EventKind(
        "The student was scored on the held-out data.",
        {
            "step": _STEP,
            **_METRICS,
            "objective": "the training objective at the present weights",
            "terms": "name -> raw, weight, scaled, share",
            "unscored_tokens": "targets whose probability is not finite",
            "tokens": "targets scored",
            "seconds": "by the clock",
            "best": "whether it is the best student so far",
        },
        {
            **_BY_SPANS,
            "answers": "with eval.prompts: of the held-out prompts answered, prompts, exact_match and checker "
            "(share of with_reference that is right) with intervals, ended (share that ended by itself), loops (share "
            "cut in a loop), nonfinite, length (mean tokens), teacher_log_likelihood (mean of the written tokens), "
            "own_kl (mean KL(student, teacher) at them), seconds",
            "tasks": "with eval.tasks: figures by benchmark",
            "selected": "what eval.select chooses by, where that is not the perplexity",
        },
    ),
    "checkpoint": EventKind(
        "A checkpoint is whole and in its place. Later steps may be in the log before it.",
        {
            "step": "optimizer steps that are in it",
            "path": "inside the run's folder",
            "bytes": "size on disk",
            "seconds": "from its beginning until it was whole",
            "waited_seconds": "of these, seconds in which training stood still",
        },
    ),
    "router_probe": EventKind(
        "Before the first step: would training the teacher's gates help (teacher.router.probe_steps)?",
        {
            "steps": "router steps that were tried",
            "updates": "of these, applied",
            "nll_before": "the teacher's held-out loss",
            "nll_after": "the same after the probe",
            "gain": "the difference",
            "threshold": "the least gain that counts",
            "is_worthwhile": "whether it was reached",
            "is_forced": "whether the gates are trained all the same",
        },
    ),
    "router": EventKind(
        "The gates of a mixture-of-experts teacher, at the start and at each evaluation.",
        {
            "step": _STEP,
            "mode": "as in teacher.router.mode",
            "is_frozen": "whether the gates are no longer trained",
            "teacher_nll": "held-out loss of the teacher as it stands",
            "teacher_nll_start": "the same before the run",
            "kl_to_original": "KL(original teacher, teacher), nats a token",
            "updates": "router updates applied so far",
            "skipped": "refused so far",
            "mended": "times that gates were not finite and were replaced by the last good ones",
            "grad_norm": "of the last update",
            "terms": "mean of each term of the gates' loss",
            "layers": "for each gate: name, share of each expert, entropy, drift",
            "alarm": "whether the teacher got worse by more than max_degradation and its gates were restored",
        },
    ),
    "advice": EventKind(
        "A cause of trouble was found in the run so far; each is reported once.",
        {
            "step": "last step before it",
            "cause": "name, as in `stillroom diagnose`",
            "severity": "problem or warning",
            "steps": "steps it is seen at",
            "evidence": "in words",
            "advice": "what to try",
            "setting": "as an assignment for --set, or empty",
            "numbers": "the figures behind the evidence",
        },
    ),
    "sample": EventKind(
        "At the end: a held-out text continued by both models.",
        {"prompt": "beginning of the text", "student": "its continuation", "reference": "how the text continues"},
        {
            "teacher": "its continuation, where it is loaded",
            "right": "with eval.prompts: whether the student's answer is right by eval.checker",
            "teacher_right": "the same of the teacher's",
        },
    ),
    "replay": EventKind(
        "`stillroom replay` ran a refused attempt again. Written to a separate log.",
        {
            "step": "of the attempt",
            "attempt": "its number within the run",
            "checkpoint": "step of the checkpoint it was taken from",
            "then": "verdict, reason, located, loss, grad_norm as they were",
            "now": "loss, grad_norm, terms, located as they are",
            "samples": "records of the window",
            "text": "their text",
        },
    ),
    "run_end": EventKind(
        "The run ended, and could still write so.",
        {"status": "done or stopped", "exit_code": "as the command ends"},
        {
            "steps": "steps applied",
            "seconds": "of training, summed over all starts",
            "total_seconds": "of the commands, loading and evaluations included, as far as the log knows them",
            "reason": "why it stopped",
        },
    ),
}


# -- stages ------------------------------------------------------------------------------------------
# Stages of a run: what it does when it takes no step, how far it is, and about how long that takes.
#
# A stage begins and ends in the log. Its progress goes to listeners alone, because a log of batches evaluated helps
# nobody later. Times left are estimated from what is done, at first from the last stage of the same name.


Advance = Callable[[], None]

_PROGRESS_SECONDS = 0.25  # between two announcements


class Sink(Protocol):
    """An `EventLog`, or what replaces it before the log is open."""

    def write(self, event: str, /, **fields: Any) -> object: ...

    def announce(self, event: str, /, **fields: Any) -> None: ...


class Listening:
    """Call listeners while there is no log yet."""

    def __init__(self, listeners: tuple[Callable[[dict[str, Any]], None], ...] = ()) -> None:
        self._listeners = listeners

    def write(self, event: str, /, **fields: Any) -> None:
        for listener in self._listeners:
            listener({"event": event, **fields})

    announce = write


class Stages:
    """The stages of one run. `seconds` holds what each took, the last of a name."""

    def __init__(self, sink: Sink | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.sink: Sink = sink if sink is not None else Listening()
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def stage(
        self, name: str, total: int = 0, *, unit: str = "batches", about: float | None = None
    ) -> Iterator[Advance]:
        """Announce a stage around the body, which calls what it gets after each of `total` parts.

        `about` is how many seconds it is expected to take, where the last stage of this name does not say it. A stage
        that ends with an error has no end in the log: the record of the run's end follows.
        """
        began = told = self._clock()
        counted: dict[str, Any] = {"total": total, "unit": unit} if total else {}
        expected = self.seconds.get(name, about)
        done = 0

        def advance() -> None:
            nonlocal done, told
            done += 1
            now = self._clock()
            if now - told < _PROGRESS_SECONDS:
                return
            told = now
            left = (now - began) / done * max(0, total - done) if total else None
            self.sink.announce(
                "stage",
                name=name,
                state="progress",
                seconds=now - began,
                done=done,
                **counted,
                **({} if left is None else {"eta_seconds": left}),
            )

        estimate = {} if expected is None else {"eta_seconds": round(expected, 3)}
        self.sink.write("stage", name=name, state="begin", seconds=0.0, **counted, **estimate)
        yield advance
        self.seconds[name] = round(self._clock() - began, 3)
        self.sink.write("stage", name=name, state="end", seconds=self.seconds[name], **counted)
