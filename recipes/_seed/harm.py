"""Settings of the guides that do harm: what each does, what is done instead, and how to have it all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_VOCABULARY = 50_257  # of GPT-2, to say what a clamp does


@dataclass(frozen=True)
class Harm:
    """One remedy of a guide. `letter` are the settings that do it; empty where the engine refuses to."""

    what: str
    why: str
    instead: str
    letter: Mapping[str, Any] = field(default_factory=dict)


def settings_and_lines(harms: Sequence[Harm], *, is_letter: bool) -> tuple[dict[str, Any], list[str]]:
    """The settings to add, and one line for each harm that says what is done."""
    settings: dict[str, Any] = {}
    lines = []
    for harm in harms:
        if is_letter and harm.letter:
            settings.update(harm.letter)
            shown = ", ".join(f"{key} = {value}" for key, value in harm.letter.items())
            lines.append(f"letter of the guide: {harm.what} ({shown}); harmful: {harm.why}")
        else:
            offer = "--letter-of-the-seed does it" if harm.letter else "the engine does not offer it"
            lines.append(f"harmful in the guide: {harm.what}: {harm.why}; here {harm.instead}; {offer}")
    return settings, lines


def clamped_logits(bound: float) -> Harm:
    from stillroom.losses.mix import perplexity_floor  # loads torch, which a command line waits for

    floor = perplexity_floor(bound, _VOCABULARY)
    return Harm(
        f"logits clamped to +-{bound:g}",
        f"no perplexity below {floor:,.1f} can be reached over {_VOCABULARY:,} tokens",
        "logits are left alone and losses computed in FP32",
        {"guard.logit_clamp": bound},
    )


def clamped_loss(bound: float) -> Harm:
    return Harm(
        f"the loss clamped at {bound:g}",
        "a clamped loss has no gradient, so the hardest batches are not learned",
        "a bad batch is skipped and counted",
        {"guard.loss_clamp": bound},
    )


def skipped_norms(bound: float) -> Harm:
    return Harm(
        f"a step skipped where the gradient norm is above {bound:g}",
        "the norm before clipping is above it for most batches of one",
        "the bound follows the run's own norms",
        {"guard.skip_grad_norm": bound, "guard.max_skip_share": 1.0},
    )


FP16_WITHOUT_SCALE = Harm(
    "FP16 weights without loss scaling",
    "small gradients become 0 and small updates round away; AdamW in FP16 gives NaN at the first step",
    "FP16 weights have residuals and the loss is scaled",
    {
        "precision.mode": "fp16-sr",  # the nearest: weights in FP16 alone, AdamW's own numbers in FP32
        "precision.initial_loss_scale": 1.0,
        "precision.loss_scale_growth_steps": 1_000_000_000,
    },
)
RESET_FIRST = Harm(
    "the model reset to its initial state when batches stay bad",
    "all training so far is lost",
    "the run returns to its last good state, and resets only when that was not enough five times",
    {"guard.max_rollbacks": 0, "guard.on_exhausted": "reset"},
)
GATES_IN_ONE_GRAPH = Harm(
    "the teacher's gates trained by the student's own loss",
    "without a guard the teacher becomes the student",
    "gates and student learn in turn, held by the labels and by the original teacher",
    {"teacher.router.mode": "sar-joint"},
)
NAN_AS_ZERO = Harm(
    "a loss that is NaN replaced by 0",
    "the weights are NaN by then and the log looks healthy",
    "the step is refused, and the run returns to its last good state",
)
RENORMALISED_TOP_K = Harm(
    "the teacher's top k tokens renormalised",
    "the student learns that no other token can come",
    "the exact mass of all other tokens is kept",
)
LONG_WARMUP = Harm(
    "warmup_steps counted without the accumulation",
    "a run can end before its warm-up does",
    "the warm-up is at most a tenth of the optimizer steps",
    {"train.max_warmup_share": 1.0},
)


def batch_mean(weight: float, max_length: int) -> Harm:
    return Harm(
        "the distillation term divided by rows, not by tokens",
        f"it weighs up to {max_length} times as much as alpha says",
        "both terms are means over the scored tokens",
        {"objectives.kd.weight": weight * max_length},
    )
