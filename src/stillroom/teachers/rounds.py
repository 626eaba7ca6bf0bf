"""A teacher's stored answers to rounds of rollouts: made once for a round, read in each step.

Kept at each position are the student's own top tokens, which its sampler knows, and the teacher's top tokens of the
others, with the exact mass of the rest. Both models are then two (K+1)-way distributions, and any divergence of them
bounds the full one from below. Reverse KL needs the student's tokens: where it alone puts mass, the teacher's top
tokens say nothing. Truncated or renormalised tokens would be no divergence.

# N positions, V vocabulary, S tokens of the student, K kept ids
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.numerics import head_and_tail
from stillroom.core.types import Batch, DenseSignal, Needs, TopKSignal
from stillroom.data.rollouts import Answers, Round
from stillroom.models.anatomy import head_logits
from stillroom.teachers.base import SignalKind, Teacher

_ROWS_AT_ONCE = 2**25  # values [N, V] in memory at once


@torch.no_grad()
def union_answers(signal: DenseSignal, student_ids: Tensor, teacher_top: int, temperature: float) -> TopKSignal:
    """Reduce a dense answer to the student's tokens [N, S], the teacher's top tokens of the others, and the tail.

    A row that is no distribution stays one: its log-probs are not finite.
    """
    num_tokens = signal.head.num_real
    teacher_top = min(teacher_top, num_tokens - student_ids.shape[1])
    size = max(1, _ROWS_AT_ONCE // num_tokens)
    parts = []
    for start in range(0, len(student_ids), size):
        own = student_ids[start : start + size]
        logits = head_logits(signal.head, signal.hidden[start : start + size]).float() / temperature
        others = logits.scatter(-1, own, -torch.inf).topk(teacher_top, dim=-1).indices
        ids = torch.cat([own, others], dim=-1)
        parts.append((ids, *head_and_tail(logits, ids)[:2]))
    ids, kept, tail = (torch.cat(one) for one in zip(*parts, strict=True))
    return TopKSignal(ids, kept, tail, temperature)


class RoundTeacher(Teacher):
    """Answers the rows of the rounds in use from what was stored with them."""

    kind: SignalKind = "top-k"

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._answers: Mapping[str, Answers] = {}
        self._device = torch.device("cpu")

    def take(self, rounds: Sequence[Round], device: torch.device) -> None:
        """Answer rows of these rounds from now on. Their names are unique."""
        self._device = device
        self._answers = {
            one.name: one.answers for round_ in rounds for one in round_.rollouts if one.answers is not None
        }

    def observe(self, batch: Batch, needs: Needs) -> TopKSignal:
        length = batch.input_ids.shape[1]
        counts = torch.bincount(batch.positions.cpu() // length, minlength=len(batch.sample_ids)).tolist()
        found = [self._of(name, count) for name, count in zip(batch.sample_ids, counts, strict=True)]
        ids, log_probs, tail = (
            torch.from_numpy(np.concatenate([getattr(one, name) for one in found])).to(self._device)
            for name in ("ids", "log_probs", "tail")
        )
        return TopKSignal(ids.long(), log_probs, tail, self.temperature)

    def _of(self, name: str, count: int) -> Answers:
        answers = self._answers.get(name)
        if answers is None or count not in (0, len(answers.tail)):
            raise ConfigError(
                f"no stored answers to {count} positions of {name}",
                where="rollouts.answers",
                advice=["set rollouts.answers = 'live'"],
            )
        return answers if count else Answers(answers.ids[:0], answers.log_probs[:0], answers.tail[:0])
