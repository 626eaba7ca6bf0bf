"""Where router training is tried: at home, in a niche the teacher hardly knows, and with a student close behind it.

Students start warm and learn at a low rate: differences between arms that share a seed then spread by about a
thousandth of a nat, a tenth of what they do from scratch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import lab
import nets
from nets import TeacherName


@dataclass(frozen=True)
class Regime:
    """A teacher, a text to learn from, and a student that has learned something already."""

    label: str
    teacher: TeacherName
    domain: str
    tokens: int
    student: str  # "small": 21,000 parameters; "equal": as many as the teacher, trained on as much
    kd_weight: float | None  # the rest is cross-entropy; None: tuned on dev with the frozen teacher
    steps: int
    rate: float
    arms: tuple[str, ...]
    warm_steps: int = 800  # 0: from scratch


NICHE = 1 / 16
CONTROLS = ("truth", "sar", "anti-sar")  # the question itself and what it must beat
ALL = (
    "all-experts", "knowledge-augmentation", *CONTROLS, "sar as shipped", "sar-joint", "sar unguarded",
    "sar-joint unguarded", "sar-transient", "anti-transient", "sar-meta",
)  # fmt: skip
CLOSE = (*CONTROLS, "all-experts", "sar-meta")
# In the order of what is most worth knowing: an interrupted sweep has the beginning.
REGIMES = {
    "niche": Regime(
        "300 thousand tokens of C++ once, as a sixteenth of the teacher's was; other files of its folders held out",
        TeacherName("moe", NICHE), "cpp-near", 307_200, "small", None, 300, 3e-3, ALL,
    ),
    "niche-full": Regime(
        "as niche, with the teacher's word alone",
        TeacherName("moe", NICHE), "cpp-near", 307_200, "small", 1.0, 300, 3e-3, CONTROLS,
    ),
    "home": Regime(
        "the teacher's own kind of text, 300 thousand tokens once",
        TeacherName("moe"), "python", 307_200, "small", None, 300, 3e-3, ALL,
    ),
    "scarce": Regime(
        "as niche-full, with 20 thousand tokens that are passed over 15 times",
        TeacherName("moe", NICHE), "cpp-near", 20_480, "small", 1.0, 300, 3e-3, CONTROLS,
    ),
    "close-niche": Regime(
        "as niche, with 16 experts in each of 4 layers and a dense student of the teacher's quality",
        TeacherName("many", NICHE), "cpp-near", 153_600, "equal", None, 150, 1e-3, CLOSE,
    ),
    "close-home": Regime(
        "as home, with 16 experts in each of 4 layers and a dense student of the teacher's quality",
        TeacherName("many", NICHE), "python", 153_600, "equal", None, 150, 1e-3, CONTROLS,
    ),
}  # fmt: skip


@functools.cache
def warm_student(kind: str, seed: int, warm_steps: int) -> Any:
    """A student that has learned the home text from labels; of one that equals its teacher there is one only."""
    if kind == "equal":
        return nets.teacher_model(TeacherName("dense", NICHE))
    if not warm_steps:
        return nets.draw(nets.STUDENT, seed)
    job = lab.Job(objectives=lab.PLAIN, steps=warm_steps, seed=seed, transfer_tokens=819_200, checks=1)
    model = nets.draw(nets.STUDENT, seed)
    lab.train(job, model, None)
    return model
