"""The trained gates of a teacher: FP32 copies, their optimizer, and their guard.

The model itself is never written to. FP32 parameters replace the model's gates while it answers, so the original
teacher is always available, the experts do not change, and undoing the training copies a few small matrices.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stillroom.core.errors import BrokenAtStart
from stillroom.models.routers import Gate, find_gates
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, LossScale, ParameterGroup
from stillroom.precision.adamw import COUNTS
from stillroom.precision.storage import Direct

_FORMAT = 1
_MAX_CONSECUTIVE = 20


@dataclass(frozen=True)
class GateOptions:
    """How gates are updated."""

    learning_rate: float
    max_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8


class TrainedGates:
    """FP32 gates with one update rule. A non-finite gradient skips this update and nothing else."""

    def __init__(
        self,
        model: Any,
        gates: Sequence[Gate],
        options: GateOptions,
        device: torch.device,
        tell: Callable[[str], object],
    ) -> None:
        own = dict(model.named_parameters())
        names = [name for gate in gates for name in gate.parameter_names()]
        self.options, self.tell = options, tell
        self.dtype: torch.dtype = own[names[0]].dtype
        self.original = {name: own[name].detach().to(device, torch.float32, copy=True) for name in names}
        self.weights = {name: nn.Parameter(tensor.clone()) for name, tensor in self.original.items()}
        self.good = {name: tensor.clone() for name, tensor in self.original.items()}
        self.optimizer = AdamW(
            [ParameterGroup("router", options.learning_rate, tuple(self.weights.items()))],
            store=lambda _name, parameter: Direct(parameter),  # the gates are FP32: no master copy
            betas=options.betas,
            epsilon=options.epsilon,
            weight_decay=0.0,  # decay towards zero would move gates away from the teacher
        )
        # Gradients flow through the teacher's activations: in FP16 small ones would be lost without a loss scale.
        self.scales_loss = self.dtype == torch.float16
        self.scaler = LossScale()
        self.num_applied = 0  # since the original gates; AdamW's count restarts with fresh moments
        self.num_skipped = 0
        self.num_mended = 0
        self.consecutive = 0
        self.last_norm = 0.0

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scales_loss else 1.0

    @property
    def is_hopeless(self) -> bool:
        """Whether so many updates in a row were not finite that training the gates must end."""
        return self.consecutive >= _MAX_CONSECUTIVE

    # -- the update --------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        return any(weight.grad is not None for weight in self.weights.values())

    def discard(self) -> None:
        self.optimizer.zero_grad()

    def sum_gradients(self, parallel: Parallel, loss: Tensor) -> Tensor:
        """Sum the gradients of all processes and return the sum of their losses. A gate that none used has none."""
        weights = list(self.weights.values())
        own = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
        is_used = loss.new_tensor([float(one.grad is not None) for one in weights])
        summed = torch.cat([*(gradient.reshape(-1) for gradient in own), is_used, loss.detach().float().reshape(1)])
        parallel.sum_(summed)
        *parts, used, total = torch.split(summed, [*(one.numel() for one in weights), len(weights), 1])
        for weight, part, num_used in zip(weights, parts, used.tolist(), strict=True):
            weight.grad = part.view(weight.shape) if num_used else None
        return total.reshape(())

    def apply(self, rate_factor: float, loss: Tensor, scale: float) -> bool:
        """Clip and update from gradients that are multiplied by `scale`. Return False if the update was skipped."""
        square, value = torch.stack([self.optimizer.squared_norms()["router"], loss.detach().float()]).tolist()
        norm = math.sqrt(square) / scale if math.isfinite(square) else float("nan")
        self.last_norm = norm
        if not (math.isfinite(norm) and math.isfinite(value)):
            self._skip(value, norm)
            return False
        # A finite loss went through every gate, so these weights are good.
        self._copy(self.weights, self.good)
        factor = min(1.0, self.options.max_grad_norm / (norm + 1e-12)) / scale
        self.optimizer.step(rate_factor, {"router": factor})
        self.num_applied += 1
        self.discard()
        self.consecutive = 0
        if self.scales_loss:
            self.scaler = self.scaler.after_good_step()
        return True

    def _skip(self, loss: float, norm: float) -> None:
        self.discard()
        self.num_skipped += 1
        self.consecutive += 1
        if self.scales_loss:
            self.scaler = self.scaler.after_overflow()
        self.tell(f"a router update was skipped: loss {loss:.4g}, gradient norm {norm:.4g}; the student continues")
        self.mend()

    @torch.no_grad()
    def mend(self) -> bool:
        """Restore the last good gates if a gate or a moment is not finite. Return whether they were restored."""
        tensors = [*self.weights.values(), *self.optimizer.tensors().values()]
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            return False
        self._copy(self.good, self.weights)
        self._forget()
        self.num_mended += 1
        self.tell("a gate was not finite: the gates are those of the last good router update, with fresh moments")
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the gates of the original teacher."""
        self._copy(self.original, self.weights)
        self._copy(self.original, self.good)
        self._forget()
        self.discard()
        self.num_applied = 0
        self.consecutive = 0

    def _forget(self) -> None:
        for tensor in self.optimizer.tensors().values():
            tensor.zero_()
        self.optimizer.num_updates = 0

    @staticmethod
    @torch.no_grad()
    def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        for name, tensor in target.items():
            tensor.copy_(source[name])

    @torch.no_grad()
    def drift(self, name: str) -> float:
        """Distance of a gate from its original, relative to the original's norm."""
        norm = self.original[name].norm().clamp_min(1e-12)
        return float((self.weights[name] - self.original[name]).norm() / norm)

    # -- state -------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"gate.{name}": weight.detach() for name, weight in self.weights.items()}
        tensors |= {f"good.{name}": tensor for name, tensor in self.good.items()}
        return tensors | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_updates": self.optimizer.num_updates,
            "num_applied": self.num_applied,
            "num_skipped": self.num_skipped,
            "num_mended": self.num_mended,
            "consecutive": self.consecutive,
            "scale": self.scaler.scale,
            "good_steps": self.scaler.good_steps,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        """Restore a saved state. With `keeps_history` (a rollback), counters of skipped and mended updates stay."""
        present = self.tensors()
        counts = f"optimizer.{COUNTS}"  # older checkpoints have one count for all gates
        tensors = {counts: torch.full_like(present[counts], int(state["num_updates"])), **tensors}
        if set(present) != set(tensors):
            odd = sorted(set(present) ^ set(tensors))[:3]
            raise ValueError(f"the saved router has other tensors: {', '.join(odd)}")
        self._copy(tensors, present)
        self.optimizer.num_updates = int(state["num_updates"])
        self.num_applied = int(state["num_applied"])
        self.scaler = LossScale(scale=float(state["scale"]), good_steps=int(state["good_steps"]))
        if not keeps_history:
            self.num_skipped, self.num_mended = int(state["num_skipped"]), int(state["num_mended"])
            self.consecutive = int(state["consecutive"])

    def save(self, folder: Path) -> None:
        """Write the trained gates and the fingerprint of the original ones."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: weight.detach().cpu().contiguous() for name, weight in self.weights.items()},
                  folder / "gates.safetensors")  # fmt: skip
        facts = {
            "format": _FORMAT,
            "names": list(self.weights),
            "dtype": str(self.dtype).removeprefix("torch."),
            "original_sha256": fingerprint(self.original),
            "updates": self.num_applied,
        }
        (folder / "gates.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names and FP32 values of gates."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def merge_gates(model: Any, folder: str | Path, *, patterns: Sequence[str] = ()) -> int:
    """Write the gates that a run trained into the same teacher. Return the number of tensors written.

    The model's gates must be those the training began with, up to the dtype it was loaded in.
    """
    folder = Path(folder)
    facts = json.loads((folder / "gates.json").read_text(encoding="utf-8"))
    trained = load_file(folder / "gates.safetensors")
    own = dict(model.named_parameters())
    expected = [name for gate in find_gates(model, patterns) for name in gate.parameter_names()]
    if sorted(facts["names"]) != sorted(expected) or sorted(trained) != sorted(expected):
        raise BrokenAtStart(f"the gates of {folder} are not those of this model", where=str(folder),
                            advice=["give the teacher that the run was started with"])  # fmt: skip
    dtype = getattr(torch, facts["dtype"])
    if fingerprint({name: own[name].to(dtype) for name in expected}) != facts["original_sha256"]:
        raise BrokenAtStart("the model's gates are not those the training began with", where=str(folder),
                            advice=["load the original teacher", "gates can be merged only once"])  # fmt: skip
    for name, tensor in trained.items():
        own[name].copy_(tensor)
    return len(trained)
