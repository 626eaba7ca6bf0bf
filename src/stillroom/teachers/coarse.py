"""A teacher's distribution over the tokens that a student of another tokenizer has too, all others being one.

Ids stay the teacher's: one of the tokens that the student lacks stands for all of them. So a stored answer can be read
without the order in which the shared tokens were listed, and their set alone is part of what a cache is.

Legend: C positions, U vocabulary of the teacher, K shared tokens and one for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def shared_hash(teacher_ids: Sequence[int]) -> str:
    """A name for a set of tokens."""
    told = ",".join(map(str, sorted(teacher_ids)))
    return hashlib.blake2b(told.encode("ascii"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Coarse:
    """Which columns of the teacher's logits are kept, and which are added up."""

    kept: Tensor  # [K], ascending ids
    rest: Tensor  # [U - K + 1], ids that the student lacks; the first is among the kept and stands for all
    place: int  # of that one among the kept; -1 where the student has every token

    @staticmethod
    def of(teacher_ids: Sequence[int], num_tokens: int) -> Coarse:
        is_shared = torch.zeros(num_tokens, dtype=torch.bool)
        is_shared[torch.tensor(teacher_ids, dtype=torch.long)] = True
        rest = (~is_shared).nonzero().squeeze(-1)
        if not len(rest):
            return Coarse(torch.arange(num_tokens), rest, -1)
        is_shared[rest[0]] = True
        kept = is_shared.nonzero().squeeze(-1)
        return Coarse(kept, rest, int(torch.searchsorted(kept, rest[:1])))

    def to(self, device: torch.device) -> Coarse:
        return Coarse(self.kept.to(device), self.rest.to(device), self.place)

    def logits(self, logits: Tensor) -> Tensor:
        """[C, K] of [C, U]. Their softmax has the mass of the others in one place."""
        if self.place < 0:
            return logits
        found = logits.index_select(1, self.kept)
        found[:, self.place] = torch.logsumexp(logits.index_select(1, self.rest), -1)
        return found
