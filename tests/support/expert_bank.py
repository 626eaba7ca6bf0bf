"""A layer whose experts are modules of their own, trained in one process or in several.

No family that transformers builds has such experts; models that bring their code do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config.schema import TrainConfig
from stillroom.parallel import Parallel
from stillroom.precision import ParameterGroup, resolve

# The expert that each process's micro-batch chooses in each step; None: the micro-batch has no target, and chooses
# the third. Nobody with a target ever does.
CHOICES = ((0, 1), (0, 0), (1, None), (1, 1))


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor, chosen: int) -> Tensor:
        answer: Tensor = self.experts[chosen](inputs)
        return answer


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bank = Bank()

    def forward(self, chosen: int, weight: float) -> Tensor:
        inputs = torch.linspace(-1, 1, 8).view(2, 4)
        return weight * self.bank(self.first(inputs), chosen).square().sum()


def trained(parallel: Parallel) -> dict[str, Any]:
    """The weights after all steps, and which parameters each step updated."""
    torch.manual_seed(0)
    student = Student()
    parallel.place(student, [student.bank])
    named = tuple(student.named_parameters())
    config = TrainConfig(weight_decay=0.5)
    optimizer = resolve("fp32", torch.device("cpu")).optimizer([ParameterGroup("student", 0.1, named)], config)
    parallel.prepare(optimizer)
    updated = []
    for choices in CHOICES:
        window = [_micro_batch(choice) for choice in choices]
        window = window if parallel.size == 1 else window[parallel.rank : parallel.rank + 1]
        with parallel.window():
            batches = parallel.scored(window)
            for number, batch in enumerate(batches, start=1):
                chosen, weight = batch.chosen, batch.weight
                loss = parallel.forward(lambda: student(chosen, weight), is_last=number == len(batches))  # noqa: B023
                loss.backward()
        parallel.sum_gradients(optimizer)
        updated.append([name for name, _gradient in optimizer.named_gradients()])
        optimizer.step(1.0, {"student": 1.0})
        optimizer.zero_grad()
    whole = {name: one.detach().full_tensor() if hasattr(one, "full_tensor") else one.detach() for name, one in named}
    return {"updated": updated, "weights": whole}


def _micro_batch(chosen: int | None) -> Any:
    batch = SimpleNamespace(num_scored=int(chosen is not None), chosen=2 if chosen is None else chosen)
    batch.weight = float(batch.num_scored)
    batch.without_targets = lambda: batch
    return batch
