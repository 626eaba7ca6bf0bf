"""The configuration: settings that do harm, that are far from what is known to work, or that contradict each other.

What cannot be built at all is told when the configuration is read. The bounds are those of published ablations and of
the presets' reasons; a setting beyond them may be right, so it is amber.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.config.given import unread_notes
from stillroom.config.sections import Ramp, Scalar, ends
from stillroom.engine.recovery.reach import longest_step
from stillroom.precision.resolve import choose

SUBJECT = "configuration"
_WARM, _COLD = 4.0, 0.5  # temperatures with published gains lie between
_LEAST_SHARE = 0.1  # of the teacher among all weights
_TYPICAL_WEIGHT = 0.02  # root mean square of a transformer's matrices
_LEAST_MOVED = 0.1  # share of FP16 weights that a stochastically rounded update should move
_HIGH_RATE, _HIGH_PRETRAINED = 2e-2, 3e-3


def _amber(what: str, to_try: str) -> Finding:
    return Finding("amber", SUBJECT, what, to_try)


@check(SUBJECT)
def translated(setup: Setup) -> Iterator[Finding]:
    for note in setup.notes:
        yield Finding("green", SUBJECT, note)
    for note in unread_notes(setup.config):
        yield _amber(note, "leave it out")


@check(SUBJECT)
def precision(setup: Setup) -> Iterator[Finding]:
    """Raises for a mode that the device cannot do."""
    config, facts = setup.config, setup.machine.device
    mode, reason = choose(config.precision.mode, facts, moments=config.precision.moments)
    yield Finding("green", SUBJECT, f"precision {mode}: {reason}")
    spacing = 2.0 ** (math.floor(math.log2(_TYPICAL_WEIGHT)) - 10)  # of FP16 at a typical weight
    rate = config.train.learning_rate
    if mode == "fp16-sr" and rate / spacing < _LEAST_MOVED:
        yield _amber(
            f"at learning rate {rate:g} FP16 weights alone move in {rate / spacing:.1%} of their updates, the rest is "
            f"noise: FP16's steps at weights of {_TYPICAL_WEIGHT} are {spacing:.1e}",
            "--set precision.mode=fp16-split",
        )
    if config.precision.initial_loss_scale < config.precision.min_loss_scale:
        yield Finding(
            "red",
            SUBJECT,
            f"the loss scale begins at {config.precision.initial_loss_scale:g}, below its floor of "
            f"{config.precision.min_loss_scale:g}",
            "--set precision.min_loss_scale=1",
        )


@check(SUBJECT)
def clamps(setup: Setup) -> Iterator[Finding]:
    guard = setup.config.guard
    if guard.logit_clamp:
        yield _amber(
            f"guard.logit_clamp {guard.logit_clamp:g} puts a floor under the perplexity, and clamped logits have no "
            "gradient",
            "--set guard.logit_clamp=0",
        )
    if guard.loss_clamp:
        yield _amber(
            f"guard.loss_clamp {guard.loss_clamp:g}: batches with a larger loss have no gradient, and early ones have",
            "--set guard.loss_clamp=0",
        )
    if guard.max_skip_share > 0.5 or guard.max_consecutive > 200:
        yield _amber(
            "the guard lets most steps be refused before it stops the run: a broken run will look like a slow one",
            "--set guard.max_skip_share=0.1 --set guard.max_consecutive=20",
        )


@check(SUBJECT)
def objectives(setup: Setup) -> Iterator[Finding]:
    config = setup.config
    kd = config.objectives.kd
    temperatures = ends(kd.temperature)
    if setup.uses_teacher and (max(temperatures) > _WARM or min(temperatures) < _COLD):
        yield _amber(
            f"objectives.kd.temperature {_said(kd.temperature)}: ablations of language models find the best at 1 to 2, "
            "and far from there the teacher's knowledge is blurred or lost",
            "--set objectives.kd.temperature=1",
        )
    share = _teachers_share(config.objectives.weights)
    if setup.uses_teacher and share < _LEAST_SHARE:
        yield _amber(
            f"the teacher's terms have {share:.0%} of the weights: it costs its forward passes and hardly teaches",
            "--set objectives.kd.weight=1 --set objectives.ce.weight=0",
        )
    if setup.uses_teacher and kd.divergence != "forward_kl" and config.teacher.signal.kind in ("sampled", "hybrid"):
        yield Finding(
            "red",
            SUBJECT,
            f"{kd.divergence} cannot be estimated from {config.teacher.signal.kind} answers",
            "--set objectives.kd.divergence=forward_kl, or --set teacher.signal.kind=top_k",
        )
    if config.teacher.signal.kind == "renormalised":
        yield _amber(
            "renormalised answers tell the student that all other tokens are impossible",
            "--set teacher.signal.kind=top_k",
        )
    if "contrastive" in config.objectives.weights and config.train.rows_per_batch == 1:
        yield _amber(
            "objectives.contrastive compares the rows of a micro-batch, and it has one: the term is always 0",
            "--set train.batch_size=4, or --set objectives.contrastive.weight=0",
        )


def _said(value: Scalar) -> str:
    return f"{value.start:g} to {value.end:g}" if isinstance(value, Ramp) else f"{value:g}"


def _teachers_share(weights: dict[str, Scalar]) -> float:
    """The largest share of terms other than cross-entropy, at either end of their ramps."""
    shares = []
    for place in (0, -1):
        now = {name: ends(weight)[place] for name, weight in weights.items()}
        total = sum(now.values())
        shares.append((total - now.get("ce", 0.0)) / total if total else 0.0)
    return max(shares)


@check(SUBJECT)
def training(setup: Setup) -> Iterator[Finding]:
    train = setup.config.train
    if train.learning_rate > _HIGH_RATE:
        yield _amber(
            f"train.learning_rate {train.learning_rate:g} is above what any student we know of learns at",
            "--set train.learning_rate=1e-3",
        )
    elif train.learning_rate > _HIGH_PRETRAINED and setup.config.student.init == "pretrained":
        yield _amber(
            f"train.learning_rate {train.learning_rate:g} is a rate for random weights: pretrained ones forget at it",
            "--set train.learning_rate=3e-4",
        )
    if math.isinf(longest_step(train.beta1, train.beta2)):
        yield _amber(
            f"with train.beta1 {train.beta1:g} and train.beta2 {train.beta2:g} nothing bounds the step of AdamW",
            "--set train.beta1=0.9 --set train.beta2=0.95",
        )
    if train.max_grad_norm < 0.01:
        yield _amber(
            f"train.max_grad_norm {train.max_grad_norm:g} clips every step: what AdamW sees is mostly its epsilon",
            "--set train.max_grad_norm=1",
        )
    if train.epsilon >= 1e-4:
        yield _amber(
            f"train.epsilon {train.epsilon:g} is larger than most gradients: small ones are not followed",
            "--set train.epsilon=1e-8",
        )
    if train.warmup_ratio > 0.5 and not train.warmup_steps:
        yield _amber(
            f"train.warmup_ratio {train.warmup_ratio:g}: most of the run is spent below its learning rate",
            "--set train.warmup_ratio=0.1",
        )


@check(SUBJECT)
def pairs(setup: Setup) -> Iterator[Finding]:
    config = setup.config
    is_loaded = config.student.init in ("auto", "pretrained")
    if setup.uses_teacher and is_loaded and config.teacher.model == config.student.model:
        yield _amber(
            f"teacher and student are the same model, {config.teacher.model}: there is nothing to distil",
            "--student with a smaller model, or --set student.init=shrink --set student.shrink.layers=...",
        )
    if config.data.eval is not None and config.data.eval in {source.path for source in config.data.sources}:
        yield Finding(
            "red",
            SUBJECT,
            f"data.eval is the training data, {config.data.eval}: every result would be that of memorised text",
            "leave data.eval out (a share of the training data is then held out), or name other data",
        )
    router = config.teacher.router
    if router.mode in ("sar", "sar-joint") and not (router.truth_weight or router.anchor_weight):
        yield _amber(
            f"teacher.router.mode {router.mode} with nothing but the student to follow turns the teacher into it",
            "--set teacher.router.truth_weight=1 --set teacher.router.anchor_weight=1",
        )
