"""Forward KL over groups of tokens that begin a text alike, wherever a span begins.

`exact_match` compares tokens that both vocabularies have and calls all others one. But a teacher's " therefore" is no
other: a student without that token writes " there" first. Here its mass counts where the student writes it
(`data/spans/groups.py`), and every beginning of a span is compared, not only spans of one token on each side.

Legend: C positions of a chunk, V tokens, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stillroom.config.extensions import Recipe
from stillroom.config.objectives import PrefixMatchConfig
from stillroom.errors import ConfigError
from stillroom.objectives.crosstok.span_terms import BothLogits
from stillroom.objectives.objective import Plan, register


def group_log_masses(logits: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """The log of the probability of each group. [C, G]

    The largest logit of a group is taken out before the sum, so no group underflows.
    """
    index = groups.expand_as(logits)
    room = logits.new_full((logits.shape[0], num_groups), -torch.inf)
    largest = room.scatter_reduce(1, index, logits.detach(), "amax")
    sums = torch.zeros_like(room).index_add(1, groups, torch.exp(logits - largest.gather(1, index)))
    return sums.log() + largest - torch.logsumexp(logits, -1, keepdim=True)


def group_kl(
    teacher_logits: Tensor, logits: Tensor, groups: tuple[Tensor, Tensor], num_groups: int
) -> tuple[Tensor, Tensor]:
    """KL(p || q) over groups [C], and where the teacher is unusable. A coarsening, so at most the KL of the models."""
    is_bad = ~torch.isfinite(torch.logsumexp(teacher_logits, -1))
    teacher_logits = torch.where(is_bad[:, None], torch.zeros_like(teacher_logits), teacher_logits)
    log_p = group_log_masses(teacher_logits, groups[1], num_groups)
    log_q = group_log_masses(logits, groups[0], num_groups)
    p = log_p.exp()
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
        sizes = (self._matched.student_groups, num_student), (self._matched.teacher_groups, num_teacher)
        groups = [_padded(one, size, device) for one, size in sizes]

        def law(teacher_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            return group_kl(teacher_logits, logits, (groups[0], groups[1]), self._matched.num_groups)

        return law


def _padded(groups: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Rows of a head beyond the tokenizer's ids are no tokens: they join the last group."""
    found = torch.as_tensor(groups, device=device)[:size]
    return torch.nn.functional.pad(found, (0, size - len(found)), value=int(found.max()))


register("prefix_match", Recipe(PrefixMatchConfig, PrefixMatch))
