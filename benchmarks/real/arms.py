"""The arms of the benchmark: what each sets on top of what all have, how long it may train, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LENGTH, ROWS = 256, 4
ANSWER_TOKENS = 16
CUT = "15 of 30 layers"
NARROW = "15 of 30 layers, half the width"


@dataclass(frozen=True)
class Scale:
    """How much of everything: the night, or twenty minutes with the same code."""

    name: str
    hours: float  # by the clock, all workers busy
    seeds: int  # of the two main arms
    docs_tokens: int
    written_tokens: Mapping[str, int]  # by kind, answers alone
    dev_batches: int  # of ROWS rows, at each evaluation
    held_out_tokens: Mapping[str, int]
    num_prompts: int  # that students answer
    num_rates: int  # that a trial begins with
    more_rates: int  # that it may add where the best is at the border
    trial_share: float  # of an arm's CPU seconds, for each rate
    timing_steps: int
    evaluations: int  # of an arm while it trains
    arm_overhead: float  # CPU seconds of loading, evaluating, saving and judging, of each trained arm
    trial_overhead: float  # of each run of a trial or timing


NIGHT = Scale(
    "night", 4.0, 3, 600_000, {"chat": 40_000, "plain": 60_000}, 8,
    {"test": 24_000, "stories": 12_000, "far": 12_000}, 220, 3, 2, 1 / 16, 8, 8, 240.0, 60.0,
)  # fmt: skip
SMALL = Scale(
    "small", 1 / 3, 1, 30_000, {"chat": 2_000, "plain": 2_000}, 1,
    {"test": 3_000, "stories": 2_000, "far": 2_000}, 20, 2, 0, 1 / 4, 3, 2, 70.0, 40.0,
)  # fmt: skip
SCALES = {scale.name: scale for scale in (NIGHT, SMALL)}

# What the teacher writes, in parts that are made one after the other until there are enough tokens.
WRITE: dict[str, dict[str, Any]] = {
    "chat": {"write.start": "template", "write.max_new_tokens": 128, "write.temperature": 0.8, "write.top_p": 0.95},
    "plain": {"write.start": "documents", "write.start_tokens": 24, "write.max_new_tokens": 192, "write.top_p": 0.95},
}
WRITE_ROWS = 64  # written at once, and the prompts of a part

SHARED: dict[str, Any] = {
    "student.init": "shrink",
    "student.shrink.layers": 15,
    "student.shrink.method": "influence",
    "data.max_length": LENGTH,
    "data.packing": "packed",
    "data.cache": "off",
    "train.batch_size": ROWS,
    "train.compile": "off",
    "eval.samples": 0,
    "precision.mode": "auto",  # bf16-mixed on CPUs with the units; others would take fifty times as long in it
}
PLAIN = {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
KL = {"objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0}
# Nine heads of 64 come in groups of three and cannot be halved: all stay.
HALF_WIDTH = {"student.shrink.width": 352, "student.shrink.mlp_width": 960}
ROUNDS = {
    "rollouts.share": {"start": 0.0, "end": 0.25, "begin": 0.25, "until": 0.25},
    "rollouts.every": 16,
    "rollouts.max_new_tokens": 64,
    "rollouts.batch_size": 64,
}
# Chosen by `student.shrink.method = "loss"` on text of another kind, once (benchmarks/quality/results/cut.json). Muon
# is no arm: a step with it takes twice as long on a CPU at this size. Two rounds of cuts ended higher on small models.
BY_LOSS = [0, 1, 2, 8, 9, 11, 15, 19, 20, 22, 23, 24, 27, 28, 29]
BEST = {**KL, "student.shrink.layers": BY_LOSS, "train.schedule": "wsd"}
RATES = (1e-3, 5e-4, 2e-3)  # in the order in which they are tried; a trial continues beyond the border


@dataclass(frozen=True)
class Arm:
    """One way to recover a cut student. Without a trial and a rate nothing is trained: a reference."""

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    trial: str = ""  # the arm whose trial of learning rates it takes its rate from
    rate: float = 0.0  # given, not tried
    student: str = CUT
    text: str = "all"  # or docs: nothing that the teacher wrote; or written: that alone
    epochs_stored: float = 0.0  # passes over stored answers; 0: the teacher is asked in each step
    base: str = ""  # the arm whose student it begins with
    share: float = 1.0  # of the CPU seconds of an arm
    file: str = ""  # it is judged as a GGUF file of this format
    is_main: bool = False  # has all seeds

    @property
    def is_trained(self) -> bool:
        return bool(self.trial or self.rate)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("teacher", "teacher", student=""),
        Arm("cut", "not recovered"),
        Arm("kl", "forward KL, live teacher", KL, "kl", is_main=True),
        Arm("plain", "plain training", PLAIN, "plain", is_main=True),
        Arm("kl-written", "forward KL, what the teacher wrote alone", KL, "kl", text="written", share=1 / 4),
        Arm("kl-docs", "forward KL, documentation alone", KL, "kl", text="docs", share=1 / 4),
        Arm("best", "best recipe", BEST, "kl"),
        Arm("rounds", "forward KL, rounds of own text", {**KL, **ROUNDS}, "kl"),
        Arm("cached", "forward KL, stored answers (hybrid)", KL, "kl", epochs_stored=2.0),
        Arm("q4", "best recipe, rounded to q4_0", base="best", file="q4_0"),
        Arm(
            "q4-trained", "best recipe, trained as q4_0",
            {**KL, "student.init": "pretrained", "student.quantise": "q4_0", "train.weight_decay": 0.0},
            rate=1e-4, base="best", file="q4_0", share=1 / 8,
        ),
        Arm("narrow-cut", "not recovered", HALF_WIDTH, student=NARROW),
        Arm("narrow-kl", "forward KL, live teacher", {**KL, **HALF_WIDTH}, "narrow-kl", student=NARROW),
        Arm("narrow-plain", "plain training", {**PLAIN, **HALF_WIDTH}, "narrow-plain", student=NARROW),
    )
}  # fmt: skip


def order(scale: Scale) -> list[tuple[str, int]]:
    """All arms with their seeds: those that the page needs most come first."""
    first = [(name, 0) for name in ARMS]
    further = [(name, seed) for seed in range(1, scale.seeds) for name, arm in ARMS.items() if arm.is_main]
    place = next(number for number, (name, _seed) in enumerate(first) if name == "narrow-cut")
    return [*first[:place], *further, *first[place:]]


def trials() -> list[str]:
    """The arms whose learning rates are tried."""
    return sorted({arm.trial for arm in ARMS.values() if arm.trial}, key=list(ARMS).index)
