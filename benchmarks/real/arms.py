"""The arms of the benchmark: what each sets on top of what all have, and in which order they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LENGTH, ROWS, STEPS = 256, 2, 40
TOKENS = LENGTH * ROWS * STEPS
COMPUTE_TOKENS = 2 * TOKENS  # of text for plain training at equal compute: it may take that many, and takes fewer
TRIAL_STEPS = 8
DEV_BATCHES, TEST_TOKENS, FAR_TOKENS = 2, 8_192, 3_072
SAVE_STEPS = 10
CUT = "cut to 15 of 30 layers"
NARROW = "cut to 15 of 30 layers and to half the width"

SHARED: dict[str, Any] = {
    "student.init": "shrink",
    "student.shrink.layers": 15,
    "student.shrink.method": "influence",
    "data.max_length": LENGTH,
    "data.cache": "off",
    "train.batch_size": ROWS,
    "train.compile": "off",
    "train.save_steps": SAVE_STEPS,
    "eval.max_batches": DEV_BATCHES,
    "eval.samples": 0,
    "precision.mode": "fp32",
}
PLAIN = {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
KL = {"objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0}
# Nine heads of 64 come in groups of three and cannot be halved: all stay.
HALF_WIDTH = {"student.shrink.width": 288, "student.shrink.mlp_width": 768}
FULL_RATES = (2e-4, 6e-4)  # of training all weights
ADAPTER_RATES = (2e-3, 6e-3)  # an adapter wants about ten times as much


@dataclass(frozen=True)
class Trial:
    """Learning rates that are tried on a few steps, judged on dev text; the best serves the arms that name it."""

    name: str
    settings: Mapping[str, Any]
    rates: tuple[float, ...] = FULL_RATES


@dataclass(frozen=True)
class Arm:
    """One way to recover a cut student. Without a trial nothing is trained: a reference."""

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    trial: str = ""
    student: str = CUT
    uses_cache: bool = False
    has_equal_compute: bool = False  # as many steps as cost what those of `kl` cost

    @property
    def is_reference(self) -> bool:
        return not self.trial


LORA = {**KL, "student.adapter.rank": 16}
INNER = {**KL, "objectives.feature.weight": 0.1, "objectives.layerwise.weight": 0.05}

TRIALS = {
    trial.name: trial
    for trial in (
        Trial("plain", PLAIN),
        Trial("kl", KL),
        Trial("lora", LORA, ADAPTER_RATES),
        Trial("narrow-plain", {**PLAIN, **HALF_WIDTH}),
        Trial("narrow-kl", {**KL, **HALF_WIDTH}),
    )
}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("teacher", "teacher", student=""),
        Arm("cut", "not recovered"),
        Arm("plain", "plain training", PLAIN, "plain"),
        Arm("kl", "forward KL, live teacher", KL, "kl"),
        Arm("cached", "forward KL, stored answers (hybrid)", KL, "kl", uses_cache=True),
        Arm("lora", "forward KL, LoRA of rank 16", LORA, "lora"),
        Arm("int8", "forward KL, int8 teacher", {**KL, "teacher.quantisation": "int8"}, "kl"),
        Arm("inner", "forward KL and hidden states", INNER, "kl"),
        Arm("compute", "plain training, equal compute", PLAIN, "plain", has_equal_compute=True),
        Arm("narrow-cut", "not recovered", HALF_WIDTH, student=NARROW),
        Arm("narrow-plain", "plain training", {**PLAIN, **HALF_WIDTH}, "narrow-plain", student=NARROW),
        Arm("narrow-kl", "forward KL, live teacher", {**KL, **HALF_WIDTH}, "narrow-kl", student=NARROW),
    )
}
FURTHER_SEEDS = tuple((name, seed) for seed in (1, 2) for name in ("plain", "kl"))
ORDER = (*((name, 0) for name in ARMS), *FURTHER_SEEDS)
