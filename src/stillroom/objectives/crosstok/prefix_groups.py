"""Forward KL over groups of tokens that begin a text alike, wherever a span begins.

`exact_match` compares tokens that both vocabularies have and calls all others one. But a teacher's " therefore" is no
other: a student without that token writes " there" first. Here its mass counts where the student writes it
(`data/spans/groups.py`), and every beginning of a span is compared, not only spans of one token on each side.

Legend: C positions of a chunk, V tokens, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.config.extensions import Recipe
from stillroom.config.objectives import PrefixMatchConfig
from stillroom.errors import ConfigError
from stillroom.objectives.crosstok.laws import few_kl, usable
from stillroom.objectives.crosstok.span_terms import BothLogits, FewLaw
from stillroom.objectives.objective import Plan, register
from stillroom.types import SampledSignal, TopKSignal


@dataclass(frozen=True)
class GroupSums:
    """The groups of one vocabulary: the first token of each, the other tokens, and the groups of those."""

    first: Tensor  # [G]
    others: Tensor
    of_others: Tensor

    @staticmethod
    def of(groups: Sequence[int], num_groups: int, size: int, device: torch.device) -> GroupSums:
        """`size` is that of the head. Its rows beyond the tokenizer's ids are no tokens: they join the last group."""
        numbers = torch.tensor([*groups[:size], *[num_groups - 1] * (size - len(groups))])
        order = torch.argsort(numbers, stable=True)
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), numbers[order].diff() > 0])
        others = order[~is_first].sort().values
        return GroupSums(order[is_first].to(device), others.to(device), numbers[others].to(device))

    def log_masses(self, logits: Tensor) -> Tensor:
        """The log of the probability of each group. [C, G]

        A group of one token stays in log space. One of several whose sum underflows counts its first token alone.
        """
        norm = torch.logsumexp(logits, -1, keepdim=True)
        first = logits.index_select(1, self.first) - norm
        if not len(self.others):
            return first
        others = torch.exp(logits.index_select(1, self.others) - norm)
        sums = first.exp().index_add(1, self.of_others, others)
        is_sum = torch.zeros_like(self.first, dtype=torch.bool).index_fill(0, self.of_others, True) & (sums > 0)
        return torch.where(is_sum, torch.where(is_sum, sums, 1.0).log(), first)


def group_kl(teacher_logits: Tensor, logits: Tensor, teacher: GroupSums, student: GroupSums) -> tuple[Tensor, Tensor]:
    """KL(p || q) over groups [C], and where the teacher is unusable. A coarsening, so at most the KL of the models."""
    teacher_logits, is_bad = usable(teacher_logits)
    log_p = teacher.log_masses(teacher_logits)
    p, log_q = log_p.exp(), student.log_masses(logits)
    value = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    return torch.where(is_bad, torch.zeros_like(value), value), is_bad


class PrefixMatch(BothLogits):
    """Forward KL over groups of tokens, where spans begin."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        matched = plan.matched
        if matched is None or matched.problem or not matched.num_groups:
            problem = (matched.problem if matched is not None else "") or "their tokens are not known"
            raise ConfigError(
                f"objectives.{plan.name} cannot compare these vocabularies: {problem}",
                where=f"objectives.{plan.name}.weight",
                advice=[f"set objectives.{plan.name}.weight = 0; objectives.alm compares any two tokenizers"],
            )
        self._matched = matched

    def law(
        self, device: torch.device, num_student: int, num_teacher: int
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        matched = self._matched
        student = GroupSums.of(matched.student_groups, matched.num_groups, num_student, device)
        teacher = GroupSums.of(matched.teacher_groups, matched.num_groups, num_teacher, device)
        return lambda teacher_logits, logits: group_kl(teacher_logits, logits, teacher, student)

    def few_law(self, device: torch.device, num_student: int) -> FewLaw:
        matched = self._matched
        student = GroupSums.of(matched.student_groups, matched.num_groups, num_student, device)
        groups = torch.tensor([*matched.teacher_groups, matched.num_groups - 1], device=device)

        def law(few: TopKSignal | SampledSignal, logits: Tensor) -> tuple[Tensor, Tensor]:
            return few_kl(few, student.log_masses(logits), groups[few.ids.clamp_max(len(groups) - 1)])

        return law


register("prefix_match", Recipe(PrefixMatchConfig, PrefixMatch))
