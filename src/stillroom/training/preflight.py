"""Check one batch before training: targets, alignment with both models, and the kind of the teacher's signal.

Labels shifted by one position train without an error and give a useless student, so the shift is tested twice.
By content: the target of a position must be the next input. By a model: one that knows the language gives the next
token a lower loss than its own input (labels not shifted) and than the token after (labels shifted twice).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillroom.config import Config
from stillroom.config.load import is_shortened
from stillroom.core.errors import BrokenAtStart, CheckpointUnusable, InputsChanged, StillroomError
from stillroom.core.types import IGNORED, Batch, DenseSignal, HeadWeights, PairedSignal, Signal
from stillroom.data import Corpus, Rows
from stillroom.doctor.rules import Settings, Start
from stillroom.doctor.rules import doubts as doubts_about
from stillroom.models.anatomy import head_logits
from stillroom.models.files import student_identity, teacher_identity
from stillroom.parallel import Parallel
from stillroom.precision.storage import local
from stillroom.teachers.base import Teacher, kind_of
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import read_manifest
from stillroom.teachers.several import for_source
from stillroom.teachers.signals import AUTO
from stillroom.training.checkpoint import Saved
from stillroom.training.evaluate import Evaluation
from stillroom.training.memory import parts_of, within_memory
from stillroom.training.run import Run, RunState
from stillroom.training.schedule import Curriculum

_CHUNK = 512
_LEAST_POSITIONS = 32  # fewer say nothing about a shift
_ENOUGH_POSITIONS = 256  # of the first batch: more rows cost time and say the same
_LEAST_GAIN = 0.1  # nats; a random model prefers one alignment or another by less
_SIGMAS = 3.0
SHIFTS = ("as_given", "one_back", "one_ahead")


@torch.no_grad()
def first_forward(run: Run, state: RunState, vocabularies: Mapping[str, str] | None = None) -> None:
    """Run both models on the first batch and log shapes and alignment. Raise where the labels are certainly wrong.

    `vocabularies` are hashes of the models' tables of tokens, for the log.
    """
    batch = _beginning(run.loader.first_window()[0])
    check_targets(batch)
    check_targets(run.teacher.own_batch(batch))
    batch = batch.to(run.device)
    loss_weights = run.loss_weights(state)
    needs = run.mix.needs(loss_weights)
    run.student.eval()
    with run.parallel.gathered():
        with run.precision.autocast():
            view = run.student.observe(batch, needs.student)
        teacher = run.source_teacher(batch)
        signal = teacher.observe(batch, needs.teacher)
        check_kind(teacher, signal, where=run.config.teacher.model)
        dense = signal if isinstance(signal, DenseSignal | PairedSignal) else None
        judge, hidden, head = ("teacher", dense.hidden, dense.head) if dense else ("student", view.hidden, view.head)
        losses = shifted_losses(hidden, head, run.teacher.own_batch(batch) if dense else batch)
    run.student.train()
    means, doubt = judge_alignment(losses)
    run.log.write(
        "first_forward",
        rows=batch.input_ids.shape[0],
        positions=batch.input_ids.shape[1],
        scored=batch.num_scored,
        student_hidden=list(view.hidden.shape),
        teacher_hidden=list(dense.hidden.shape) if dense else None,
        student_logits=[view.hidden.shape[0], view.head.num_real],
        teacher_logits=[dense.hidden.shape[0], dense.head.num_real] if dense else None,
        vocabulary=run.student.vocab_size,
        vocabulary_hash=dict(vocabularies or {}),
        alignment={"model": judge, **means, "positions": losses.shape[1], "doubt": doubt},
        temperature=loss_weights.settings.get("kd.temperature", 1.0),
        weights=dict(loss_weights.weights),
    )
    if doubt == "one_ahead":
        raise BrokenAtStart(
            f"the {judge} predicts the token after the target better than the target: {_format_means(means)}",
            where="first batch",
            advice=[
                "the labels lag behind by one position: check how the data is cut",
                "or the model shifts by itself",
            ],
        )
    # Log no doubt of the student: with random weights it has not learned the text.
    if doubt and judge == "teacher":
        run.log.write("note", text=f"{_DOUBTS[doubt].format(judge)} ({_format_means(means)})")


def _beginning(batch: Batch) -> Batch:
    """The first rows of a batch that have enough positions to be judged."""
    num_rows = len(batch.input_ids)
    scored = (batch.targets != IGNORED).sum(1).cumsum(0)
    enough = min(num_rows, int((scored < _ENOUGH_POSITIONS).sum()) + 1)
    return next(batch.parts(-(-num_rows // enough)))


_DOUBTS = {
    "unknown": "the first batch has too few neighbouring targets to test their alignment with the {}",
    "noise": "the {} does not tell the next token from its neighbours: it has not learned this text yet",
    "one_back": "the {} predicts each position's own input better than the next token, as an untrained model with tied "
    "embeddings does: the targets are the next inputs, so it is the model that does not predict",
}


def _format_means(means: dict[str, float]) -> str:
    return (
        f"loss {means['as_given']:.4g} as given, {means['one_back']:.4g} one back, {means['one_ahead']:.4g} one ahead"
    )


def check_kind(teacher: Teacher, signal: Signal | None, *, where: str) -> None:
    """Raise if the teacher's answer is not of the kind it declares."""
    kind = kind_of(signal)
    if kind != teacher.kind:
        name = type(teacher).__name__
        raise BrokenAtStart(
            f"the teacher {name} declares signals of kind {teacher.kind!r} and answers the first batch with {kind!r}",
            where=where,
            advice=[f"set {name}.kind = {kind!r}", f"or return a signal of kind {teacher.kind!r} from {name}.observe"],
        )


def check_targets(batch: Batch) -> None:
    """Every scored target must equal the input of the next position, where the row has one."""
    following = batch.input_ids[:, 1:]
    targets = batch.targets[:, :-1]
    is_inside = (targets != IGNORED) & (batch.attention_mask[:, 1:] == 1)
    if batch.segments is not None:  # after the last input of a piece stands the first of another
        is_inside &= batch.segments[:, 1:] == batch.segments[:, :-1]
    wrong = int(((targets != following) & is_inside).sum())
    if wrong:
        raise BrokenAtStart(
            f"{wrong:,} of {int(is_inside.sum()):,} targets of the first batch are not the token that follows: "
            "the labels are misaligned",
            where="first batch",
            advice=["targets[b, l] must be input_ids[b, l + 1]: check how the data is cut"],
        )


def shifted_losses(hidden: Tensor, head: HeadWeights, batch: Batch) -> Tensor:
    """Cross-entropy of the scored positions under three alignments of the targets. [3, N], in the order of SHIFTS.

    Use only positions that have all three, so that the means are over the same positions.
    """
    ahead = torch.full_like(batch.targets, IGNORED)
    ahead[:, :-1] = batch.targets[:, 1:]
    aligned = torch.stack([batch.targets, batch.input_ids, ahead]).reshape(3, -1).index_select(1, batch.positions)
    chosen = (aligned[2] != IGNORED).nonzero().squeeze(-1)
    losses = []
    for begin in range(0, int(chosen.numel()), _CHUNK):
        part = chosen[begin : begin + _CHUNK]
        log_probs = torch.log_softmax(head_logits(head, hidden.index_select(0, part)), dim=-1)
        losses.append(-log_probs.gather(1, aligned[:, part].T).T)
    return torch.cat(losses, dim=1) if losses else torch.zeros(3, 0)


def judge_alignment(losses: Tensor) -> tuple[dict[str, float], str]:
    """The three mean losses, and a doubt: empty, `unknown`, `noise`, `one_back` or `one_ahead`.

    A shift is better when its gain exceeds both a fixed bound and three standard errors.
    """
    num_positions = losses.shape[1]
    means = losses.double().mean(dim=1).tolist() if num_positions else [math.nan] * 3
    mean_of = dict(zip(SHIFTS, means, strict=True))
    if num_positions < _LEAST_POSITIONS or not all(map(math.isfinite, means)):
        return mean_of, "unknown"
    gains: dict[str, Any] = {}
    for place, name in ((1, "one_back"), (2, "one_ahead")):
        gain = (losses[0] - losses[place]).double()
        error = float(gain.std()) / math.sqrt(num_positions)
        gains[name] = (float(gain.mean()), max(_LEAST_GAIN, _SIGMAS * error))
    # The better shift: where tokens alternate, a model that repeats its input also finds the token after the target.
    name = max(gains, key=lambda shift: gains[shift][0])
    mean, bound = gains[name]
    if mean > bound:
        return mean_of, name
    return mean_of, "" if all(mean < -bound for mean, bound in gains.values()) else "noise"


# -- loss scale ------------------------------------------------------------------------------------
# Find the loss scale of an FP16 run before its first step.
#
# A scale that is too large costs one step for each halving. Gradients are proportional to the scale, so one backward
# pass of the first micro-batch at a small scale tells which scale fits.


_PROBE_SCALE = 64.0  # holds gradients up to 1,000; gradients that FP16 rounds to 0 here are small at 65,536 too
_LARGEST = 65504.0 / 8.0  # an eighth of FP16's range: gradients grow in the first steps


_UNWRITTEN = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)  # their memory holds what was there before


_SENT = frozenset({"fsdp", "c10d", "_c10d_functional"})  # what processes send each other: weights, unwritten memory too
_COPIED_OUT = torch.ops.aten.split_with_sizes_copy  # gathered weights


def _is_computed(func: Any) -> bool:
    """Whether an operation computes new numbers: not memory as it was found, not a view, nothing gathered."""
    packet = func.overloadpacket
    if packet in _UNWRITTEN or packet is _COPIED_OUT or func.namespace in _SENT:
        return False
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return not aliases or any(alias.is_write for alias in aliases)


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


class PeakWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, record the largest magnitude of every FP16 tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peaks: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if not _is_computed(func):
            return answer
        for tensor in answer if isinstance(answer, (tuple, list)) else (answer,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float16 and tensor.numel():
                self._peaks.append(tensor.detach().abs().amax().float())
        return answer

    def peak(self) -> float:
        """Over all devices: layers that are streamed and rows of a cache are in main memory, the rest on the GPU."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for value in self._peaks:
            by_device.setdefault(value.device, []).append(value)
        largest = [float(torch.stack(values).amax()) for values in by_device.values()]
        return max(largest, key=_nan_is_largest, default=0.0)


def find_loss_scale(run: Run, state: RunState) -> None:
    """Lower the configured scale until gradients fit FP16, and log it. Leave weights and random state unchanged."""
    if not run.precision.scales_loss:
        return
    window = run.loader.first_window()
    counts = run.parallel.counts(run.mix.counts(window))
    configured, floor = run.precision.loss_scale, run.precision.scaler.floor
    peak = math.inf
    for probe in sorted({min(_PROBE_SCALE, configured), floor}, reverse=True):
        run.precision.start_at(probe)
        peak = run.parallel.worst(within_memory(run, state, lambda: _peak_at(run, state, window, counts))) / probe
        if math.isfinite(peak):
            break
    scale = fitting_scale(peak, configured, floor)
    run.precision.start_at(scale)
    if scale < configured:
        cause = f"gradients of the first batch reach {peak:.3g}" if math.isfinite(peak) else "the first batch overflows"
        run.log.write("note", text=f"loss scale {scale:,.0f} instead of {configured:,.0f}: FP16 {cause}")


def fitting_scale(peak: float, configured: float, floor: float) -> float:
    """The configured scale, halved until unscaled gradients up to `peak` fit; never below the floor."""
    scale = configured
    while scale > floor and not peak * scale <= _LARGEST:
        scale = max(scale / 2.0, floor)
    return scale


def _peak_at(run: Run, state: RunState, window: Sequence[Batch], counts: dict[str, int]) -> float:
    """The largest FP16 gradient of the first micro-batch at the present scale, in activations and weights."""
    batches = run.parallel.scored(list(parts_of(window, state)))
    if not batches:
        return 0.0
    loss_weights = run.loss_weights(state)
    needs = run.mix.needs(loss_weights)
    batch = batches[0].to(run.device)
    watch = PeakWatch()
    devices = [run.device] if run.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        run.student.train()
        signal = run.teacher_of(loss_weights, batch).observe(batch, needs.teacher)

        def compute() -> Tensor:
            with run.precision.autocast():
                view = run.student.observe(batch, needs.student)
            return run.mix.score(view, signal, batch, loss_weights, counts).loss

        loss = run.parallel.trial(compute)
        with watch:
            run.precision.backward(loss)
    run.optimizer.zero_grad()
    return watch.peak()


# ---- Doubts before the first step


def doubts(run: Run, student: Evaluation) -> list[str]:
    """Reasons why this configuration is unlikely to work, measured on the student before training."""
    rate, schedule = run.config.train.learning_rate, run.schedule
    start = Start(
        perplexity=student.perplexity,
        vocab_size=run.student.vocab_size,
        kl=student.kl,
        agreement=student.agreement,
        num_steps=schedule.num_steps,
        learning_rate=rate,
        travel=lambda: rate * sum(schedule.factor(step) for step in range(schedule.num_steps)),
        spread=lambda: _spread(run),
        is_own_teacher=run.config.teacher.is_student,
        learns_labels=run.learns_labels,
        is_dry_run=is_shortened(run.config),
    )
    return doubts_about(start, Settings(run.config.to_dict()))


@torch.no_grad()
def _spread(run: Run) -> float:
    """Root mean square of all matrices of the student."""
    matrices = [parameter for parameter in run.student.model.parameters() if parameter.ndim >= 2]
    squares = torch.stack([local(matrix.detach()).float().square().sum() for matrix in matrices]).sum()
    if run.parallel.is_sharded:
        run.parallel.sum_(squares)
        squares = squares / run.parallel.num_copies
    return math.sqrt(float(squares) / sum(matrix.numel() for matrix in matrices))


# -- inputs ----------------------------------------------------------------------------------------
# Compare what a resumed run reads with what it read before: the data as it was tokenised, and the models' files.
#
# Every checkpoint keeps the hashes. A run that continues with other data or another teacher is another run, and nothing
# in its numbers would tell.


ACCEPT = "--accept-changed-inputs"
_WORDS = {
    "train": "training data",
    "eval": "held-out data",
    "prompts": "set of prompts for rollouts",
    "teacher": "teacher",
    "student": "starting student",
}

Hashes = Mapping[str, Mapping[str, Any]]


@dataclass
class InputCheck:
    """The hashes of a run's inputs: `models` before they are loaded, `data` before a teacher is asked about it."""

    saved: Saved | None = None
    is_accepted: bool = False  # the user's word that changed inputs are meant
    parallel: Parallel = field(default_factory=Parallel)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # in the first process
    changes: list[str] = field(default_factory=list)  # accepted ones
    changed: set[str] = field(default_factory=set)

    @property
    def note(self) -> str:
        """What to say of a checkpoint without hashes; nothing of others."""
        if self.saved is None or "inputs" in self.saved.scalars:
            return ""
        return "the checkpoint holds no hashes of data and models: whether they are those the run began with is unknown"

    def models(self, config: Config) -> None:
        """Hash the models' files in the first process; raise in all if they are not those of the checkpoint."""
        where = {"teacher": config.teacher.model, "student": config.student.model}
        where |= {_role(name): spec for name, spec in config.data.source_teachers.items()}
        self._compare(_models(config) if self.parallel.is_first else {}, where)

    def data(self, config: Config, corpus: Corpus) -> None:
        """Hash the rows; raise if they are not those of the checkpoint, or not the same in all processes."""
        found = {"train": _rows(corpus.train), "eval": _rows(corpus.evaluation)}
        for side, facts in found.items():
            if not self.parallel.same_everywhere(int(facts["digest"][:15], 16)):
                raise BrokenAtStart(
                    f"the processes read different {_WORDS[side]}",
                    where="data.train, data.eval",
                    advice=["give every process the same files, tokenizers and libraries"],
                )
        paths = ", ".join(source.path for source in config.data.sources)
        self._compare(found, {"train": paths, "eval": config.data.eval or paths})

    def prompts(self, where: str, prompts: Sequence[tuple[str, list[int]]]) -> None:
        """Hash the prompts that rollouts answer; raise if they are not those of the checkpoint."""
        digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:32]
        self._compare({"prompts": {"prompts": len(prompts), "digest": digest}}, {"prompts": where})

    def _compare(self, found: dict[str, dict[str, Any]], where: Mapping[str, str]) -> None:
        self.found |= found
        before = _stored(self.saved)
        changed = {role: text for role, now in found.items() if (text := _change(role, before.get(role, {}), now))}
        if self.parallel.broadcast(float(bool(changed))) and not self.is_accepted:
            raise InputsChanged(
                "; ".join(changed.values()) or "the first process found other inputs than those of the checkpoint",
                where=", ".join(dict.fromkeys(where[role] for role in changed)),
                advice=[
                    "put them back as they were, and resume again",
                    f"continue with the present ones: {ACCEPT}; the log and the report then say so",
                    "or begin again in another folder with --out",
                ],
            )
        self.changed |= set(changed)
        self.changes += changed.values()


def _stored(saved: Saved | None) -> Hashes:
    """The hashes of a checkpoint; empty where it has none."""
    stored = saved.scalars.get("inputs", {}) if saved is not None else {}
    if not isinstance(stored, dict) or not all(_is_table(facts) for facts in stored.values()):
        raise CheckpointUnusable(
            "what the checkpoint says of its inputs is not a table of hashes", advice=["restore the folder from a copy"]
        )
    return stored


def _is_table(facts: Any) -> bool:
    return isinstance(facts, dict) and all(isinstance(value, str | int | None) for value in facts.values())


def _change(role: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How an input differs; empty where it does not, or where one side is not known."""
    unlike = [key for key in now if None not in (before.get(key), now[key]) and before[key] != now[key]]
    if not unlike:
        return ""
    if role == "student" or role.startswith("teacher"):
        return f"the {_WORDS.get(role, role)} is not the one the run began with: other {', '.join(unlike)}"
    counted = [key for key in unlike if key != "digest"]
    if not counted:
        return f"the {_WORDS[role]} has other contents or another order than when the run began, in as many tokens"
    sizes = ", ".join(f"{before[key]} {key} when the run began and {now[key]} now" for key in counted)
    return f"the {_WORDS[role]} is not that the run began with: {sizes}"


def _models(config: Config) -> dict[str, dict[str, Any]]:
    """The hashes of each model that the run reads. One whose files cannot be read is left to its loader to refuse."""
    asks_teacher, is_cut = Curriculum.of(config).uses_teacher, config.student.init == "shrink"
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(StillroomError):
        if asks_teacher and config.teacher.cache not in (None, "", AUTO):
            found["teacher"] = {"answers": read_manifest(folder_of(str(config.teacher.cache))).store}
        if is_cut or (asks_teacher and not found and not config.teacher.is_student):
            found["teacher"] = {**found.get("teacher", {}), **teacher_identity(config.teacher, None)}
        if config.student.reads_model:
            found["student"] = student_identity(config.student)
    for name, spec in config.data.source_teachers.items() if asks_teacher else ():
        with contextlib.suppress(StillroomError):
            own = for_source(config, spec).teacher
            answers = {"answers": read_manifest(folder_of(spec)).store} if own.cache else teacher_identity(own, None)
            found[_role(name)] = answers
    return found


def _role(source: str) -> str:
    return f"teacher of {source}"


def _rows(rows: Rows) -> dict[str, Any]:
    return {"documents": rows.num_documents, "tokens": rows.num_tokens, "rows": len(rows), "digest": rows.digest()}
