"""Find the gates of a mixture of experts; intercept their logits and top-k.

A gate is found by structure: the module next to a bank of experts whose only matrix has a row for each expert and a
column for each feature. Names mislead ("gate_proj" is a part of every expert), and each family has its own class.

In every gate one product gives the logits and one top-k chooses. `routed` intercepts those two calls, to read the
logits, compute them from other weights, shift them, or choose differently. What a family does around them (groups,
correction biases, normalisation) is unchanged.

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

from stillroom.core.errors import BrokenAtStart, ConfigError

LOOKED_FOR = (
    "a module next to a bank of experts (3-d weights with a row for each expert, or a list of equal modules) whose "
    "only matrix is [experts, width]"
)
_CHOSEN_NAMES = ("top_k", "num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts", "num_selected_experts")

_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.logsigmoid)


@dataclass(frozen=True)
class Gate:
    """One router of a model. `weight` and `bias` are parameter names; a correction bias is neither."""

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
    """The gates of a model, in the order of its layers. `patterns` are module names with * and ?."""
    gates = _by_name(model, patterns) if patterns else gates_by_structure(model)
    if gates:
        return gates
    looked_for = f"modules called {', '.join(patterns)}" if patterns else LOOKED_FOR
    raise BrokenAtStart(
        f"no gate was found in the teacher ({type(model).__name__}); looked for {looked_for}",
        where="teacher.model",
        advice=[
            "a dense teacher has no router: --set teacher.router.mode=frozen",
            "name the gates by hand: --set 'teacher.router.patterns=[\"model.layers.*.mlp.gate\"]'",
        ],
    )


def has_gates(model: nn.Module) -> bool:
    """Whether a model has gates that are found by structure. Reads shapes alone, so fake tensors will do."""
    return bool(gates_by_structure(model))


def describe(gates: Sequence[Gate]) -> str:
    """One line for the log: number, sizes and names of the gates."""
    sizes = sorted({(gate.num_experts, gate.num_chosen) for gate in gates})
    choices = " and ".join(f"{chosen} of {experts} experts" for experts, chosen in sizes)
    names = [gate.weight for gate in gates]
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]}"
    biases = sum(gate.bias is not None for gate in gates)
    return f"{len(gates)} gates that choose {choices}{', with biases' if biases else ''}: {shown}"


def gates_by_structure(model: nn.Module) -> list[Gate]:
    gates: dict[str, Gate] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        sizes = {child: _bank_size(module) for child, module in children.items()}
        banks = {size for size in sizes.values() if size > 1}
        for child, module in children.items():
            if not banks or sizes[child] > 1:
                continue
            gate = _as_gate(model, f"{name}.{child}" if name else child, parent, module)
            if gate is not None and gate.num_experts in banks:
                gates[gate.name] = gate
    return list(gates.values())


def _by_name(model: nn.Module, patterns: Sequence[str]) -> list[Gate]:
    modules = dict(model.named_modules())
    gates = []
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
        gates.append(gate)
    return gates


def _bank_size(module: nn.Module) -> int:
    """The number of experts in a module; 0 if it is not a bank of experts."""
    if isinstance(module, nn.ModuleList):
        kinds = {tuple((name, p.shape) for name, p in expert.named_parameters()) for expert in module}
        return len(module) if len(kinds) == 1 and any(kinds) else 0
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0  # a convolution has 3-d weights too
    sizes = {int(p.shape[0]) for p in module.parameters(recurse=False) if p.ndim == 3}
    if len(sizes) == 1:
        return sizes.pop()
    declared = getattr(module, "num_experts", 0)  # all experts in one matrix
    return declared if isinstance(declared, int) and len(_matrices(module)) >= 2 else 0


def _matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters with several rows and columns: a correction bias may be stored as a matrix of one row."""
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


# -- interception ----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a gate did in the last forward."""

    logits: Tensor  # [T, E], FP32, part of the graph
    chosen: Tensor  # [T, K]
    is_sigmoid: bool  # scores are sigmoids of the logits, not their softmax


@dataclass
class Routing:
    """Changes to the gates during a forward, and what was `seen` there.

    `weights` replaces parameters by name; the product is then computed in FP32. `offsets` are added to a gate's logits,
    by the gate's name. `num_chosen` maps a gate's number of experts to how many are used. `sampled_share` of the
    tokens draw their experts from the gate's distribution instead of taking the best.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    offsets: Mapping[str, Tensor] = field(default_factory=dict)
    num_chosen: Callable[[int], int] | None = None
    sampled_share: float = 0.0
    seed: int = 0
    seen: dict[str, Seen] = field(default_factory=dict)


@contextmanager
def routed(gates: Sequence[Gate], routing: Routing) -> Iterator[Routing]:
    """Apply a routing to every forward in the body. Run the backward inside too: it may recompute forwards."""
    with ExitStack() as stack:
        for number, gate in enumerate(gates):
            stack.enter_context(_patched(gate, number, routing))
        yield routing


@contextmanager
def _patched(gate: Gate, number: int, routing: Routing) -> Iterator[None]:
    module, own = gate.module, gate.module.forward
    was_patched = "forward" in vars(module)
    own_top_k = getattr(module, "top_k", None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        interception = _Interception(gate, number, routing)
        with interception:
            output = own(*args, **kwargs)
        interception.finish()
        return output

    module.forward = forward
    if routing.num_chosen is not None and isinstance(own_top_k, int):
        module.top_k = routing.num_chosen(gate.num_experts)  # type: ignore[assignment]  # some read it after the top-k
    try:
        yield
    finally:
        if routing.num_chosen is not None and isinstance(own_top_k, int):
            module.top_k = own_top_k  # type: ignore[assignment]
        if was_patched:
            module.forward = own
        else:
            del module.forward


class _Interception(TorchFunctionMode):
    """Intercept the product and the top-k of one gate."""

    def __init__(self, gate: Gate, number: int, routing: Routing) -> None:
        super().__init__()
        self.gate, self.number, self.routing = gate, number, routing
        self.logits: Tensor | None = None
        self.chosen: Tensor | None = None
        self.is_sigmoid = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        num_experts = self.gate.num_experts
        if func is F.linear and self.logits is None and _argument(args, kwargs, 1, "weight").shape[0] == num_experts:
            return self._product(args, kwargs)
        if func in _SIGMOIDS:
            self.is_sigmoid = True
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            if scores.ndim == 2 and scores.shape[1] == num_experts:
                return self._choice(scores, _argument(args, kwargs, 1, "k"), kwargs)
        return func(*args, **kwargs)

    def _product(self, args: Any, kwargs: Any) -> Tensor:
        inputs: Tensor = _argument(args, kwargs, 0, "input")
        weight, bias = _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 2, "bias")
        weight = self.routing.weights.get(self.gate.weight, weight)
        bias = self.routing.weights.get(self.gate.bias or "", bias)
        is_own = not self.routing.weights
        wide = torch.promote_types(inputs.dtype, torch.float32)
        logits = F.linear(inputs, weight, bias) if is_own else F.linear(inputs.to(wide), weight.to(wide), bias)
        offset = self.routing.offsets.get(self.gate.name)
        self.logits = logits.to(wide).reshape(-1, self.gate.num_experts)
        if offset is not None:
            self.logits = self.logits + offset
        # The rest of the gate expects the dtype of the model's own product.
        return self.logits.to(inputs.dtype).reshape(logits.shape)

    def _choice(self, scores: Tensor, num_chosen: int, kwargs: Any) -> Any:
        wanted = self.routing.num_chosen
        k = num_chosen if wanted is None else wanted(self.gate.num_experts)
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
