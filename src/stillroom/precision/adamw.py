"""AdamW, and Muon for the matrices that are given to it, in FP32 whatever the weights are stored in.

AdamW: Loshchilov and Hutter 2019. On FP16 weights the usual implementation divides by an epsilon that FP16 rounds
to zero and is NaN at the first step; here weights, gradients and moments are FP32 while they are worked on
and return to their storage afterwards, many tensors at a time. Buckets bound the FP32 scratch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_update

from stillroom.core.launch import first_line, triton_doubt, triton_failures
from stillroom.precision import storage as rounding
from stillroom.precision.muon import longest_step as longest_muon_step
from stillroom.precision.muon import muon_update
from stillroom.precision.storage import Direct, Gathered, Master, Moment, Rounded, Storage, in_fp32, local, make_moment

_SCRATCH_BYTES = 1 << 27
MUON_SCRATCH = 28  # bytes for each element
COUNTS = "num_updates"  # in a checkpoint: the updates of each parameter, in the order of the groups


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate. The peak rate is fixed; the schedule multiplies it."""

    name: str
    learning_rate: float
    parameters: tuple[tuple[str, nn.Parameter], ...]
    in_fp32: bool = False  # in every precision: the matrices of an adapter, projectors
    by_muon: frozenset[str] = frozenset()  # names of matrices that Muon updates; AdamW has the others


@dataclass
class _Cell:
    """One parameter with what the optimizer keeps for it."""

    name: str
    storage: Storage
    first: Moment
    second: Moment | None  # Muon has one
    decay: float
    num_updates: Tensor  # of this parameter, a scalar that the update itself counts up
    sums_in_fp32: bool = False
    leaves_gradient: bool = False  # where it is: whoever sums over processes takes it from there
    accumulated: Tensor | None = None  # FP32 sum over micro-batches, where the parameter's own would be FP16

    @property
    def parameter(self) -> nn.Parameter:
        return self.storage.parameter

    @property
    def gradient(self) -> Tensor | None:
        if self.accumulated is not None or self.parameter.grad is None:
            return self.accumulated
        return local(self.parameter.grad)

    @property
    def known_gradient(self) -> Tensor:
        assert self.gradient is not None  # buckets hold only parameters with a gradient
        return self.gradient

    @property
    def scratch_bytes(self) -> int:
        """What an update of this parameter needs in addition to what is kept."""
        each = self.storage.scratch_bytes
        each += MUON_SCRATCH + self.first.scratch_bytes if self.second is None else 2 * self.first.scratch_bytes
        each += 4 if self.known_gradient.dtype != torch.float32 else 0
        return each * self.num_held

    @property
    def num_held(self) -> int:
        """Numbers of the parameter that this process holds."""
        return self.first.shape.numel()

    @property
    def moments(self) -> dict[str, Moment]:
        return {"first": self.first} | ({} if self.second is None else {"second": self.second})

    @property
    def draws(self) -> dict[str, int]:
        """Random numbers that writing each moment takes."""
        return {name: moment.draws for name, moment in self.moments.items()}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What cells of one bucket have in common."""
        return self.decay, type(self.storage).__name__, type(self.first).__name__, self.second is None

    def accumulate(self, parameter: Tensor) -> None:
        """Move a fresh gradient into the FP32 sum: an FP16 sum would drop what is small compared with it."""
        if self.leaves_gradient:
            return
        assert parameter.grad is not None
        if self.accumulated is None:
            self.accumulated = parameter.grad.float()
        else:
            self.accumulated.add_(parameter.grad)
        parameter.grad = None


def _copy(present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in present.items():
        tensor.copy_(saved[name])


class AdamW:
    """Groups of cells, and one update over all of them."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        store: Any,  # (name, parameter) -> Storage
        moment_dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        seed: int = 0,
    ) -> None:
        self.betas, self.momentum = betas, momentum
        self.epsilon = epsilon
        self.seed = seed
        self.num_updates = 0
        self.rates = {group.name: group.learning_rate for group in groups}
        self.fp32_groups = frozenset(group.name for group in groups if group.in_fp32)
        first = next(parameter for group in groups for _name, parameter in group.parameters)
        self._generator = torch.Generator(device=first.device)
        # A parameter that no batch used so far has had no update: counted with the others, its first would be 0.45 of
        # what it should be after a hundred of theirs.
        self._counts = torch.zeros(sum(len(group.parameters) for group in groups), device=first.device)
        counts = iter(self._counts.unbind())
        self.cells: dict[str, list[_Cell]] = {}
        for group in groups:
            self.cells[group.name] = []
            for name, parameter in group.parameters:
                storage: Storage = Direct(parameter) if group.in_fp32 else store(name, parameter)
                # Biases and norm weights are not decayed: pulling a gain towards zero is not regularisation.
                decay = weight_decay if parameter.ndim >= 2 else 0.0
                first_moment = make_moment(parameter, moment_dtype, is_second=False)
                is_muons = name in group.by_muon
                second_moment = None if is_muons else make_moment(parameter, moment_dtype, is_second=True)
                cell = _Cell(name, storage, first_moment, second_moment, decay, next(counts))
                self.cells[group.name].append(cell)
        self._by_parameter = {cell.parameter: cell for cell in self._all_cells()}

    # -- gradients ---------------------------------------------------------------------------------------

    def accumulate_in_fp32(self) -> None:
        """From now on, sum the gradients of FP16 parameters over micro-batches and processes in FP32."""
        for cell in self._all_cells():
            if cell.parameter.dtype == torch.float16 and not cell.sums_in_fp32:
                cell.sums_in_fp32 = True
                cell.parameter.register_post_accumulate_grad_hook(cell.accumulate)  # type: ignore[no-untyped-call]

    def gradients(self, group: str) -> list[Tensor]:
        return [cell.gradient for cell in self.cells[group] if cell.gradient is not None]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for cell in self._all_cells():
            if cell.gradient is not None:
                yield cell.name, cell.gradient

    def leave_gradients(self, is_left: bool) -> None:
        """Whether the next backward leaves FP16 gradients where they are, next to the FP32 sums of those before."""
        for cell in self._all_cells():
            cell.leaves_gradient = is_left

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """The FP32 sum of a parameter's gradients over the micro-batches so far."""
        return self._by_parameter[parameter].accumulated

    def take_sums(self, sums: Mapping[nn.Parameter, Tensor], is_used: Tensor) -> None:
        """Take gradients that were summed over processes, for parameters that any of them used; none for the others."""
        for cell, has_sum in zip(self._all_cells(), is_used.tolist(), strict=True):
            found = sums[cell.parameter] if has_sum else None
            if cell.sums_in_fp32:
                cell.accumulated, cell.parameter.grad = found, None
            else:
                cell.parameter.grad = found

    def squared_norms(self) -> dict[str, Tensor]:
        """The squared gradient norm of each group in FP32, on the device: nothing is read back here."""
        found = {}
        for name in self.cells:
            gradients = self.gradients(name)
            if gradients:
                norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
                found[name] = torch.stack(norms).square().sum()
            else:
                found[name] = torch.zeros((), device=self._generator.device)
        return found

    def zero_grad(self) -> None:
        for cell in self._all_cells():
            cell.parameter.grad = None
            cell.accumulated = None

    # -- the update --------------------------------------------------------------------------------------

    @torch.no_grad()
    def sampled_step(self, rate_factor: float, gradient_factors: Mapping[str, float]) -> dict[str, Tensor]:
        """`step`, and what it did to one matrix: the share of weights that did not move and of gradients that are 0.

        Both stay on the device; whoever wants them reads them with the next step's evidence.
        """
        cells = [cell for cell in self._all_cells() if cell.gradient is not None and cell.parameter.ndim >= 2]
        if not cells:
            self.step(rate_factor, gradient_factors)
            return {}
        cell = cells[len(cells) // 2]
        before = cell.storage.read().clone()
        assert cell.gradient is not None
        zeros = (cell.gradient == 0).float().mean()
        self.step(rate_factor, gradient_factors)
        return {
            "noop_update_fraction": (cell.storage.read() == before).float().mean(),
            "zero_gradient_fraction": zeros,
        }

    @torch.no_grad()
    def step(self, rate_factor: float, gradient_factors: Mapping[str, float]) -> None:
        """One update. Gradients are multiplied by their group's factor (unscaling and clipping in one) in FP32."""
        # The random bits of a step depend on the seed and the step alone, so a resumed run draws them again.
        self._generator.manual_seed((self.seed * 1_000_003 + self.num_updates) & 0x7FFF_FFFF_FFFF_FFFF)
        for name, cells in self.cells.items():
            rate = self.rates[name] * rate_factor
            for bucket in _buckets([cell for cell in cells if cell.gradient is not None]):
                self._update(bucket, rate, gradient_factors[name])
        self.num_updates += 1

    def _update(self, bucket: list[_Cell], rate: float, factor: float) -> None:
        if choose_update(bucket[0].first.values.device).is_at_once and self._update_at_once(bucket, rate, factor):
            return
        kind: Any = type(bucket[0].storage)
        storages = [cell.storage for cell in bucket]
        firsts = [cell.first for cell in bucket]
        seconds = [cell.second for cell in bucket if cell.second is not None]
        weights, gradients = kind.read_all(storages), in_fp32([cell.known_gradient for cell in bucket])
        torch._foreach_mul_(gradients.parts, factor)
        held, counts, decay = type(firsts[0]), [cell.num_updates for cell in bucket], bucket[0].decay
        first, second = held.read_all(firsts), held.read_all(seconds) if seconds else None
        if second is None:
            muon_update(weights.parts, gradients.parts, first.parts, rate=rate, decay=decay, momentum=self.momentum)
            torch._foreach_add_(counts, 1)
        else:
            _fused_update(
                weights.parts, gradients.parts, first.parts, second.parts, counts,
                rate=rate, decay=decay, betas=self.betas, epsilon=self.epsilon,
            )  # fmt: skip
        bits = self._draw(bucket)
        kind.write_all(storages, weights, bits.get("weights"))
        held.write_all(firsts, first, bits.get("first"))
        if second is not None:
            held.write_all(seconds, second, bits.get("second"))

    def _update_at_once(self, bucket: list[_Cell], rate: float, factor: float) -> bool:
        """Update by one launch that unscales and writes FP16 copies too. False: the kernel does not serve these."""
        from stillroom.precision import adamw_triton

        kind = type(bucket[0].storage)
        if kind not in (Direct, Gathered, Master) or bucket[0].second is None:
            return False
        weights = [cell.storage.read() for cell in bucket]
        gradients = [cell.known_gradient for cell in bucket]
        firsts = [cell.first.values for cell in bucket]
        seconds = [cell.second.values for cell in bucket if cell.second is not None]
        halves = [cell.parameter.data for cell in bucket] if kind is Master else []
        if not adamw_triton.serves(weights, gradients, [*firsts, *seconds], halves):
            return False
        counts = [cell.num_updates for cell in bucket]
        torch._foreach_add_(counts, 1)
        adamw_triton.prepare(
            weights, gradients, firsts, seconds, halves, counts,
            factor=factor, rate=rate, decay=bucket[0].decay, betas=self.betas, epsilon=self.epsilon,
        ).start()  # fmt: skip
        return True

    def _draw(self, bucket: list[_Cell]) -> dict[str, Tensor]:
        """The random bits of a bucket in one draw: for each parameter in turn those of its weights and its moments."""
        held = [{"weights": cell.num_held * cell.storage.draws} | cell.draws for cell in bucket]
        streams = [name for name, count in held[0].items() if count]
        if not streams:
            return {}
        num_bits = rounding.FP16_BITS if streams == ["weights"] else rounding.BF16_BITS
        sizes = [counts[stream] for counts in held for stream in streams]
        drawn = rounding.random_bits(sum(sizes), num_bits, self._generator, bucket[0].parameter.device)
        if len(streams) == 1:
            return {streams[0]: drawn}
        pieces = torch.split(drawn, sizes)
        found = {name: torch.cat(pieces[number :: len(streams)]) for number, name in enumerate(streams)}
        if "weights" in found:
            found["weights"].bitwise_and_((1 << rounding.FP16_BITS) - 1)
        return found

    @property
    def longest_muon_step(self) -> float:
        """The largest change of a weight in one of Muon's updates, in learning rates; 0 where it has no matrices."""
        shapes = {cell.first.shape for cell in self._all_cells() if cell.second is None}
        return max(map(longest_muon_step, shapes), default=0.0)

    # -- state -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Copy masters over FP16 weights, where there are masters."""
        with torch.no_grad():
            for cell in self._all_cells():
                cell.storage.refresh()

    def rounded(self) -> dict[str, Rounded]:
        """Weights that are rounded to blocks of a file, by name."""
        return {cell.name: cell.storage for cell in self._all_cells() if isinstance(cell.storage, Rounded)}

    def moments(self) -> Iterator[Tensor]:
        """Of each moment the tensor in which a value that is not finite shows: its values or its scales."""
        for cell in self._all_cells():
            yield from (list(moment.tensors().values())[-1] for moment in cell.moments.values())

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs in addition to the weights, under stable names."""
        found: dict[str, Tensor] = {COUNTS: self._counts}
        for cell in self._all_cells():
            for label, moment in cell.moments.items():
                found |= {f"{cell.name}.{label}{end}": tensor for end, tensor in moment.tensors().items()}
            for name, tensor in cell.storage.extra().items():
                found[f"{cell.name}.{name}"] = tensor
        return found

    @torch.no_grad()
    def load_tensors(
        self, saved: Mapping[str, Tensor], load: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None] = _copy
    ) -> None:
        """Put a saved state back by `load`, `num_updates` first: an old checkpoint has one count for all parameters."""
        mine = self.tensors()
        if COUNTS not in saved:
            mine.pop(COUNTS).fill_(self.num_updates)
        if set(mine) != set(saved):
            odd = sorted(set(mine) ^ set(saved))[:3]
            raise ValueError(f"optimizer state of other parameters or another precision: {', '.join(odd)}")
        load(mine, saved)

    def _all_cells(self) -> Iterator[_Cell]:
        for cells in self.cells.values():
            yield from cells


def _fused_update(
    weights: list[Tensor], gradients: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], counts: list[Tensor],
    *, rate: float, decay: float, betas: tuple[float, float], epsilon: float,
) -> None:  # fmt: skip
    """torch's fused AdamW, which counts the updates up itself."""
    adamw_update(
        weights, gradients, firsts, seconds, [], counts, fused=True, amsgrad=False, beta1=betas[0], beta2=betas[1],
        lr=rate, weight_decay=decay, eps=epsilon, maximize=False,
    )  # fmt: skip


@dataclass(frozen=True)
class UpdateChoice:
    """Whether a device updates by the Triton kernel, and why."""

    is_at_once: bool
    reason: str


@functools.cache
def choose_update(device: torch.device) -> UpdateChoice:
    """The Triton kernel on CUDA devices where it can be built and does what torch's update does, tried once."""
    if device.type != "cuda":
        return UpdateChoice(False, "the kernel serves CUDA devices")
    if doubt := triton_doubt():
        return UpdateChoice(False, doubt)
    from stillroom.precision import adamw_triton

    try:
        agrees = adamw_triton.agrees(device, _fused_update)
    except torch.OutOfMemoryError:
        raise
    except triton_failures() as error:
        return UpdateChoice(False, f"the Triton kernel failed: {type(error).__name__}: {first_line(error)}")
    return UpdateChoice(agrees, "tried" if agrees else "the Triton kernel's numbers differ from torch's")


def describe_update(optimizer: AdamW) -> tuple[str, ...]:
    """Which update a run on a GPU has and why, and what Muon has, for its log."""
    cells, told = [cell for cells in optimizer.cells.values() for cell in cells], []
    if by_muon := sum(cell.second is None for cell in cells):
        told.append(f"optimizer: Muon for {by_muon} matrices, AdamW for {len(cells) - by_muon} other parameters")
    device = cells[0].parameter.device
    if device.type == "cuda":
        choice = choose_update(device)
        said = "one Triton launch for each bucket" if choice.is_at_once else "torch's fused AdamW"
        told.append(f"optimizer: {said} ({choice.reason})")
    return tuple(told)


def _buckets(cells: list[_Cell]) -> Iterator[list[_Cell]]:
    """Runs of cells of one kind, no larger than their FP32 scratch may be.

    Where the update needs no scratch, a run is as long as it is.
    """
    bucket: list[_Cell] = []
    size = 0
    for cell in sorted(cells, key=lambda cell: cell.kind):
        if bucket and not (cell.kind == bucket[0].kind and size + cell.scratch_bytes <= _SCRATCH_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(cell)
        size += cell.scratch_bytes
    if bucket:
        yield bucket
