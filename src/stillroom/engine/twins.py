"""The students of several processes are one student: they begin alike, get the same updates, and are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from stillroom.engine.run import Run
from stillroom.engine.state import weights_of
from stillroom.errors import Diverged

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_twins(run: Run) -> None:
    """Stop when the processes no longer hold the same weights, to the last bit: what is trained would be no one's."""
    if run.agree.size == 1:
        return
    trained = {**weights_of(run.student.model), **dict(run.mix.projectors.named_parameters())}
    if not run.agree.is_alike(fingerprint(trained)):
        raise Diverged(
            f"the students of the {run.agree.size} processes are not the same",
            where="comparison of the weights of all processes",
            advice=["use the same device and the same libraries for every process", "resume from the last checkpoint"],
        )


def fingerprint(tensors: dict[str, Tensor]) -> int:
    """A sum over the bits of every tensor, weighted by place among the tensors."""
    whole = 0
    for place, tensor in enumerate(tensors.values(), start=1):
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        whole = (whole + place * int(bits.sum(dtype=torch.int64))) % (1 << 62)
    return whole
