"""Where a mixture of experts decides: finding its gates, and standing beside them while they decide.

A gate is found by structure, never by its name: it is the module beside a bank of experts whose only matrix has a
row for each expert and a column for each feature. Names mislead ("gate_proj" is a part of every expert), and the
class differs in each family.

What happens inside a gate is the same everywhere: one product gives the logits, one top-k chooses. `routed` steps in
at those two calls, so that logits can be read, computed from other weights, shifted, or chosen from differently,
while everything a family does around them (groups, correction biases, normalisation) stays its own.

Legend: T tokens, E experts, K chosen, D width.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stillroom.errors import BrokenAtStart, ConfigError

LOOKED_FOR = (
    "a module beside a bank of experts (3-d weights with a row for each expert, or a list of equal modules) whose only "
    "matrix is [experts, width]"
)
_CHOSEN_NAMES = ("top_k", "num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts", "num_selected_experts")

_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.logsigmoid)


@dataclass(frozen=True)
class Gate:
    """One router of a model. `weight` and `bias` are names of the model's parameters; a correction bias is neither."""

    name: str
    module: nn.Module
    weight: str
    bias: str | None
    num_experts: int
    num_chosen: int

    def parameter_names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


# -- discovery -------------------------------------------------------------------------------------------


def find_gates(model: nn.Module, patterns: Sequence[str] = ()) -> list[Gate]:
    """The gates of a model, in the order of its layers. `patterns` name modules by hand, with * and ?."""
    found = _by_hand(model, patterns) if patterns else _by_structure(model)
    if found:
        return found
    looked_for = f"modules called {', '.join(patterns)}" if patterns else LOOKED_FOR
    raise BrokenAtStart(
        f"no gate was found in the teacher ({type(model).__name__}); looked for {looked_for}",
        where="teacher.model",
        advice=[
            "a dense teacher has no router: --set teacher.router.mode=frozen",
            "name the gates by hand: --set 'teacher.router.patterns=[\"model.layers.*.mlp.gate\"]'",
        ],
    )


def describe(gates: Sequence[Gate]) -> str:
    """One line for the log: how many, of what size, and which."""
    sizes = sorted({(gate.num_experts, gate.num_chosen) for gate in gates})
    told = " and ".join(f"{chosen} of {experts} experts" for experts, chosen in sizes)
    names = [gate.weight for gate in gates]
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]}"
    biases = sum(gate.bias is not None for gate in gates)
    return f"{len(gates)} gates that choose {told}{', with biases' if biases else ''}: {shown}"


def _by_structure(model: nn.Module) -> list[Gate]:
    found: dict[str, Gate] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        sizes = {child: _bank_size(module) for child, module in children.items()}
        banks = {size for size in sizes.values() if size > 1}
        for child, module in children.items():
            if not banks or sizes[child] > 1:
                continue
            gate = _as_gate(model, f"{name}.{child}" if name else child, parent, module)
            if gate is not None and gate.num_experts in banks:
                found[gate.name] = gate
    return list(found.values())


def _by_hand(model: nn.Module, patterns: Sequence[str]) -> list[Gate]:
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        gate = _as_gate(model, name, modules[name.rpartition(".")[0]], module)
        if gate is None:
            raise ConfigError(
                f"{name} has not exactly one matrix with a column for each feature, so it is not a gate",
                where="teacher.router.patterns",
                advice=["leave teacher.router.patterns out: gates are found by their structure"],
            )
        found.append(gate)
    return found


def _bank_size(module: nn.Module) -> int:
    """How many experts a module holds; 0 when it is no bank of experts."""
    if isinstance(module, nn.ModuleList):
        kinds = {tuple((name, p.shape) for name, p in expert.named_parameters()) for expert in module}
        return len(module) if len(kinds) == 1 and any(kinds) else 0
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0  # its weights are 3-d too, with a row for each channel
    sizes = {int(p.shape[0]) for p in module.parameters(recurse=False) if p.ndim == 3}
    if len(sizes) == 1:
        return sizes.pop()
    declared = getattr(module, "num_experts", 0)  # banks that keep all experts in one matrix
    return declared if isinstance(declared, int) and len(_matrices(module)) >= 2 else 0


def _matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What has rows and columns. A correction bias may be stored as one row: that is not a matrix."""
    return [(path, p) for path, p in module.named_parameters() if p.ndim >= 2 and p.numel() > max(p.shape)]


def _as_gate(model: nn.Module, name: str, parent: nn.Module, module: nn.Module) -> Gate | None:
    matrices = _matrices(module)
    if len(matrices) != 1:
        return None
    path, matrix = matrices[0]
    width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    if matrix.ndim != 2 or matrix.shape[1] != width or matrix.shape[0] < 2:
        return None
    num_experts = int(matrix.shape[0])
    owner = module.get_submodule(path.rpartition(".")[0])
    bias = getattr(owner, "bias", None)
    has_bias = isinstance(bias, nn.Parameter) and tuple(bias.shape) == (num_experts,)
    bias_name = f"{name}.{path.rpartition('.')[0]}.bias".replace("..", ".") if has_bias else None
    return Gate(name, module, f"{name}.{path}", bias_name, num_experts, _num_chosen(model, parent, module))


def _num_chosen(model: nn.Module, parent: nn.Module, module: nn.Module) -> int:
    for holder in (module, parent, model.config.get_text_config()):  # type: ignore[union-attr, operator]
        for name in _CHOSEN_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 1


# -- standing beside -------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a gate did in the last forward."""

    logits: Tensor  # [T, E], FP32 and alive: gradients reach the gate
    chosen: Tensor  # [T, K]
    is_sigmoid: bool  # whether scores are sigmoids of the logits instead of their softmax


@dataclass
class Routing:
    """What to do at the gates of a forward, and what was seen there.

    `weights` replaces parameters by name, and the product is then computed in FP32 whatever the model is stored in.
    `offsets` are added to the logits of a gate. `num_chosen` changes how many experts answer, by the gate's number of
    experts. `sampled_share` of the tokens draw their experts from the gate's distribution instead of taking the best.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    offsets: Mapping[str, Tensor] = field(default_factory=dict)
    num_chosen: Callable[[int], int] | None = None
    sampled_share: float = 0.0
    seed: int = 0
    seen: dict[str, Seen] = field(default_factory=dict)


@contextmanager
def routed(gates: Sequence[Gate], routing: Routing) -> Iterator[Routing]:
    """Apply a routing to every forward in the body, recomputed ones included: keep it open until after backward."""
    with ExitStack() as stack:
        for number, gate in enumerate(gates):
            stack.enter_context(_patched(gate, number, routing))
        yield routing


@contextmanager
def _patched(gate: Gate, number: int, routing: Routing) -> Iterator[None]:
    module, own = gate.module, gate.module.forward
    was_patched = "forward" in vars(module)
    natural = getattr(module, "top_k", None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        inside = _Inside(gate, number, routing)
        with inside:
            output = own(*args, **kwargs)
        inside.finish()
        return output

    module.forward = forward
    if routing.num_chosen is not None and isinstance(natural, int):
        module.top_k = routing.num_chosen(gate.num_experts)  # type: ignore[assignment]  # some count with it afterwards
    try:
        yield
    finally:
        if routing.num_chosen is not None and isinstance(natural, int):
            module.top_k = natural  # type: ignore[assignment]
        if was_patched:
            module.forward = own
        else:
            del module.forward


class _Inside(TorchFunctionMode):
    """Steps in at the product and at the choice of one gate."""

    def __init__(self, gate: Gate, number: int, routing: Routing) -> None:
        super().__init__()
        self.gate, self.number, self.routing = gate, number, routing
        self.logits: Tensor | None = None
        self.chosen: Tensor | None = None
        self.is_sigmoid = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self.logits is None and _argument(args, kwargs, 1, "weight").shape[0] == self._rows:
            return self._product(args, kwargs)
        if func in _SIGMOIDS:
            self.is_sigmoid = True
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            if scores.ndim == 2 and scores.shape[1] == self._rows:
                return self._choice(scores, _argument(args, kwargs, 1, "k"), kwargs)
        return func(*args, **kwargs)

    @property
    def _rows(self) -> int:
        return self.gate.num_experts

    def _product(self, args: Any, kwargs: Any) -> Tensor:
        inputs: Tensor = _argument(args, kwargs, 0, "input")
        weight, bias = _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 2, "bias")
        weight = self.routing.weights.get(self.gate.weight, weight)
        bias = self.routing.weights.get(self.gate.bias or "", bias)
        is_own = not self.routing.weights
        wide = torch.promote_types(inputs.dtype, torch.float32)
        logits = F.linear(inputs, weight, bias) if is_own else F.linear(inputs.to(wide), weight.to(wide), bias)
        offset = self.routing.offsets.get(self.gate.name)
        self.logits = logits.to(wide).reshape(-1, self._rows)
        if offset is not None:
            self.logits = self.logits + offset
        # What follows in the gate expects the dtype that the model's own product would have had.
        return self.logits.to(inputs.dtype).reshape(logits.shape)

    def _choice(self, scores: Tensor, num_chosen: int, kwargs: Any) -> Any:
        wanted = self.routing.num_chosen
        k = num_chosen if wanted is None else wanted(self._rows)
        values, indices = torch.topk(scores, k, dim=-1, sorted=kwargs.get("sorted", True))
        if self.routing.sampled_share > 0.0 and self.logits is not None:
            indices = self._sampled(indices, k)
            values = scores.gather(1, indices)
        self.chosen = indices
        return torch.return_types.topk((values, indices))

    def _sampled(self, best: Tensor, k: int) -> Tensor:
        """For a share of the tokens, k experts drawn without replacement from softmax(logits): Gumbel top-k."""
        assert self.logits is not None
        generator = torch.Generator().manual_seed((self.routing.seed * 1_009 + self.number) & 0x7FFF_FFFF_FFFF_FFFF)
        uniform = torch.rand(self.logits.shape, generator=generator).clamp_(1e-20, 1 - 1e-7)
        gumbel = -(-uniform.log()).log()
        is_drawn = torch.rand(len(best), 1, generator=generator) < self.routing.sampled_share
        drawn = (self.logits.detach() + gumbel.to(self.logits.device)).topk(k, dim=-1).indices
        return torch.where(is_drawn.to(best.device), drawn, best)

    def finish(self) -> None:
        if self.logits is None:
            raise BrokenAtStart(
                f"{self.gate.name} does not compute its logits as one product, so it cannot be read or trained",
                where="teacher.router",
                advice=["--set teacher.router.mode=frozen"],
            )
        if self.chosen is None:
            if self.routing.num_chosen is not None:
                raise ConfigError(
                    f"{self.gate.name} ({type(self.gate.module).__name__}) chooses its experts in a way that cannot "
                    "be changed from outside",
                    where="teacher.router.mode",
                    advice=["modes that keep the teacher's own choice: frozen, truth, sar"],
                )
            self.chosen = self.logits.detach().topk(self.gate.num_chosen, dim=-1).indices
        self.routing.seen[self.gate.name] = Seen(self.logits, self.chosen, self.is_sigmoid)


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
