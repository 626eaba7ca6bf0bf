"""A teacher's distribution over what its tokens mean to a student of another tokenizer.

Either the tokens that both have, all others being one (for objectives.exact_match), or groups of tokens that begin a
text alike (for objectives.prefix_match). Ids stay the teacher's: the first token of a class stands for all of it. So a
stored answer can be read without a list of classes, and their hash alone is part of what a cache is.

Legend: C positions, U vocabulary of the teacher, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stillroom.objectives.crosstok.prefix_groups import GroupSums


class Coarse(Protocol):
    """Classes of a teacher's tokens."""

    @property
    def kept(self) -> Tensor:
        """[K] The token that stands for each class, ascending."""

    def to(self, device: torch.device) -> Coarse: ...
    def logits(self, logits: Tensor) -> Tensor:
        """[C, K] of [C, U]: their softmax is the mass of each class."""


def ids_hash(kind: str, ids: Sequence[int]) -> str:
    """A name for classes."""
    told = f"{kind}:" + ",".join(map(str, ids))
    return hashlib.blake2b(told.encode("ascii"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class SharedTokens:
    """Which columns of the teacher's logits are kept, and which are added up."""

    kept: Tensor  # [K], ascending ids
    rest: Tensor  # [U - K + 1], ids that the student lacks; the first is among the kept and stands for all
    place: int  # of that one among the kept; -1 where the student has every token

    @staticmethod
    def of(teacher_ids: Sequence[int], num_tokens: int) -> SharedTokens:
        is_shared = torch.zeros(num_tokens, dtype=torch.bool)
        is_shared[torch.tensor(teacher_ids, dtype=torch.long)] = True
        rest = (~is_shared).nonzero().squeeze(-1)
        if not len(rest):
            return SharedTokens(torch.arange(num_tokens), rest, -1)
        is_shared[rest[0]] = True
        kept = is_shared.nonzero().squeeze(-1)
        return SharedTokens(kept, rest, int(torch.searchsorted(kept, rest[:1])))

    def to(self, device: torch.device) -> SharedTokens:
        return SharedTokens(self.kept.to(device), self.rest.to(device), self.place)

    def logits(self, logits: Tensor) -> Tensor:
        """[C, K] of [C, U]. Their softmax has the mass of the others in one place."""
        if self.place < 0:
            return logits
        found = logits.index_select(1, self.kept)
        found[:, self.place] = torch.logsumexp(logits.index_select(1, self.rest), -1)
        return found


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens, in the order of their first ones."""

    sums: GroupSums

    @staticmethod
    def of(groups: Sequence[int], num_groups: int, num_tokens: int) -> TokenGroups:
        found = GroupSums.of(groups, num_groups, num_tokens, torch.device("cpu"))
        order = found.first.argsort()
        return TokenGroups(GroupSums(found.first[order], found.others, order.argsort()[found.of_others]))

    @property
    def kept(self) -> Tensor:
        return self.sums.first

    def to(self, device: torch.device) -> TokenGroups:
        one = self.sums
        return TokenGroups(GroupSums(one.first.to(device), one.others.to(device), one.of_others.to(device)))

    def logits(self, logits: Tensor) -> Tensor:
        return self.sums.log_masses(logits)
