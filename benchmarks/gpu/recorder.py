"""What a program asks of the card: each kernel with its FLOPs by operand dtype, bytes, launches, and what is alive."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"}
WRITES_ONLY = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "aminmax", "max", "logsumexp", "linalg_vector_norm", "std", "var_mean"}
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Rows of a table that is not read as a whole: what is read is as large as what comes out.
SELECTS = {"embedding", "index", "index_select", "gather", "_unsafe_index"}
SCATTERS = {"scatter_add_", "scatter_", "scatter_add", "index_add_", "index_fill_", "index_put_", "scatter"}
_CHUNK, _BLOCKS = 65_536, 320  # of a multi-tensor launch: elements a block, blocks a launch
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # tensors a launch, by the number of lists


@dataclass(frozen=True)
class Kernel:
    """One call into the card."""

    name: str
    phase: str
    flops: int
    dtype: str  # of the operands
    bytes_read: int
    bytes_written: int
    launches: int
    shape: tuple[int, ...]
    reads: tuple[int, ...] = ()  # memory blocks by number
    writes: tuple[int, ...] = ()
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of each block that this kernel touches
    waits: bool = False  # the host waits for the answer
    reduces: str = ""  # "row": along the last axis, or wholly; "across": over other axes
    row_length: int = 0  # the last axis of what is read

    @property
    def is_product(self) -> bool:
        return self.flops > 0


class Recorder(TorchDispatchMode):
    """Runs ops on fake tensors and writes down what they would cost. Ops in main memory run as they are."""

    def __init__(self, fused_phase: str = "") -> None:
        """Of what is made inside `fused_phase` only that counts towards the peak which outlives it."""
        super().__init__()
        self._fused_phase = fused_phase
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.kernels: list[Kernel] = []
        self.live_bytes = self.peak_bytes = 0
        self.peak_by_phase: dict[str, int] = {}
        self.bytes_at_start: dict[str, int] = {}  # of each phase, when it was first entered
        self.host_reads = 0
        self.copied_in = self.copied_out = 0
        self._phase = "rest"
        self._answer = 1
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    # -- what a measurement calls --------------------------------------------------------------------------

    def start(self) -> None:
        """Forget what was recorded; what is alive stays so."""
        self.kernels, self.host_reads = [], 0
        self.copied_in = self.copied_out = 0
        self.peak_bytes = self.live_bytes
        self.peak_by_phase, self.bytes_at_start = {}, {}

    def enter_phase(self, name: str) -> str:
        before, self._phase = self._phase, name
        self.bytes_at_start.setdefault(name, self.live_bytes)
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.enter_phase(name)
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def answering(self, value: int) -> Iterator[None]:
        """What the host reads from the card within this block."""
        before, self._answer = self._answer, value
        try:
            yield
        finally:
            self._answer = before

    def note(
        self,
        name: str,
        flops: int,
        dtype: torch.dtype,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        launches: int,
        bytes_read: int | None = None,
        bytes_written: int | None = None,
        waits: bool = False,
        reduces: str = "",
    ) -> None:
        shape = tuple(writes[0].shape) if writes else ()
        read = sum(map(touched, reads)) if bytes_read is None else bytes_read
        written = sum(map(touched, writes)) if bytes_written is None else bytes_written
        blocks = {self._number(tensor): _block_bytes(tensor) for tensor in (*reads, *writes)}
        kernel = Kernel(
            name, self._phase, flops, str(dtype).removeprefix("torch."), read, written, launches, shape,
            tuple(self._number(tensor) for tensor in reads), tuple(self._number(tensor) for tensor in writes),
            blocks, waits, reduces, max((int(t.shape[-1]) for t in reads if t.ndim), default=0),
        )  # fmt: skip
        self.kernels.append(kernel)

    # -- dispatch ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_card = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        name = func._schema.name.split("::")[1]
        target = kwargs.get("device")
        wants_card = target is not None and torch.device(target).type == "cuda"
        if not on_card and not wants_card:
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name in ("_to_copy", "copy_"):
            crossed = self._crossing(name, args, kwargs)
            if crossed is not None:
                return crossed
        if name == "index" and _is_masked(args[1]):
            return self._masked(args)
        if "generator" in kwargs:
            kwargs["generator"] = None
        with self.fake:
            out = func(*args, **kwargs)
        self._account(func, name, args, kwargs, on_card, out)
        return out

    def _read(self, tensor: Tensor) -> Any:
        """The host asks for a value and waits."""
        self._note_read()
        return torch.tensor(self._answer, dtype=tensor.dtype).item()

    def read_list(self, tensor: Tensor) -> Any:
        """`tolist` of a tensor on the card: one copy, however many numbers."""
        self._note_read()
        return _nested(torch.tensor(self._answer, dtype=tensor.dtype).item(), tuple(tensor.shape))

    def _note_read(self) -> None:
        self.host_reads += 1
        self.note("host read", 0, torch.float32, [], [], launches=1, waits=True)

    def _masked(self, args: Any) -> Tensor:
        """values[mask] with a mask that is all true. The host waits to learn how much is left."""
        values, (mask,) = args
        self._note_read()
        with self.fake:
            out = torch.empty((mask.numel(), *values.shape[mask.ndim :]), dtype=values.dtype, device=values.device)
        self._hold(out)
        self.note("index", 0, values.dtype, [values, mask], [out], launches=2)
        return out

    def _crossing(self, name: str, args: Any, kwargs: Any) -> Any:
        """A copy between main memory and the card, or None where it stays on one side."""
        source = args[1] if name == "copy_" else args[0]
        from_card = isinstance(source, FakeTensor)
        to_card = isinstance(args[0], FakeTensor) if name == "copy_" else _goes_to_card(source, kwargs)
        size = source.numel() * source.element_size()
        if from_card and not to_card:
            self._note_read()
            self.copied_out += size
            if name == "copy_":
                return args[0].fill_(1)
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if to_card and not from_card:
            self.copied_in += size
            if name == "copy_":
                return args[0]
            with self.fake:
                made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device="cuda")
            self._hold(made)
            return made
        return None

    def _account(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Any], out: Any) -> None:
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        known = {self._number(tensor) for tensor in inputs if self._is_held(tensor)}
        fresh = [tensor for tensor in made if not self._is_held(tensor)]
        for tensor in fresh:
            self._hold(tensor)
        is_mutable = func._schema.is_mutable
        if name in ALLOCATES or name == "device" or (not is_mutable and not fresh and known):
            return  # a view, or memory without values
        mutated = _mutated(func, args, kwargs) if is_mutable else []
        outs = [value for key, value in kwargs.items() if key == "out" and isinstance(value, Tensor)]
        adds = name in PRODUCTS and any(args[0] is o for o in outs) and kwargs.get("beta", 1) != 0
        reads = [t for t in inputs if not any(t is o for o in outs)]
        reads = [args[0], *reads] if adds else reads
        if name in WRITES_ONLY:
            reads = [t for t in inputs[1:] if t is not inputs[0]]
        if name.startswith("_fused_adam") and kwargs.get("grad_scale") is None:
            mutated = [t for t in mutated if not any(t is gradient for gradient in args[1])]
        writes = [*mutated, *fresh]
        read, written = _partial_bytes(name, reads, writes, args)
        flops = _flops(name, reads, writes)
        dtype = reads[-1].dtype if reads else writes[0].dtype if writes else torch.float32
        launches = _launches(name, args)
        self.note(
            name, flops, dtype, reads, writes, launches=launches, bytes_read=read, bytes_written=written,
            reduces=_reduces(name, args, kwargs),
        )  # fmt: skip

    # -- memory --------------------------------------------------------------------------------------------

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory block in `Kernel.reads` and `Kernel.writes`."""
        return self._number(tensor)

    def _is_held(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._numbers

    def _number(self, tensor: Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return -1
        if not self._is_held(tensor):
            self._hold(tensor)
        return self._numbers[tensor.untyped_storage()]

    def _hold(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        self._count += 1
        self._numbers[storage] = self._count
        size = storage.nbytes()
        self.live_bytes += size
        if not self._fused_phase or self._phase != self._fused_phase:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.peak_by_phase[self._phase] = max(self.peak_by_phase.get(self._phase, 0), self.live_bytes)
        weakref.finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.live_bytes -= size


def _nested(value: Any, shape: tuple[int, ...]) -> Any:
    return [_nested(value, shape[1:]) for _ in range(shape[0])] if shape else value


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor without what an expand repeats."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return distinct * tensor.element_size() if tensor.numel() else 0


def _block_bytes(tensor: Tensor) -> int:
    return touched(tensor)


def _is_masked(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


def _goes_to_card(source: Tensor, kwargs: Any) -> bool:
    target = kwargs.get("device")
    return source.device.type == "cuda" if target is None else torch.device(target).type == "cuda"


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the schema says are written."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _partial_bytes(
    name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], args: Any
) -> tuple[int | None, int | None]:
    """Bytes of ops that touch a part of a tensor; None: all of it."""
    if name in SELECTS and writes:
        size = sum(map(touched, writes))
        indices = sum(touched(t) for t in reads if t.dtype in (torch.int64, torch.int32))
        return size + indices, size
    if name in SCATTERS:
        index = next((t for t in reads if t.dtype in (torch.int64, torch.int32)), None)
        small = (index.numel() if index is not None else 1) * writes[0].element_size()
        if name in ("index_fill_", "index_add_", "index_put_"):
            small *= max(1, writes[0].numel() // max(1, writes[0].shape[0]))
        return 3 * small, small
    return None, None


def _reduces(name: str, args: Any, kwargs: Any) -> str:
    if name not in REDUCTIONS:
        return ""
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if name == "linalg_vector_norm":
        given = kwargs.get("dim", args[2] if len(args) > 2 else None)
    axes = [given] if isinstance(given, int) else list(given or [])
    last = args[0].ndim - 1
    return "across" if axes and last not in {axis % args[0].ndim for axis in axes} else "row"


def _flops(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    if name not in PRODUCTS:
        return 0
    left = reads[-2]  # [.., m, k], the last operand is [.., k, n]
    return 2 * left.numel() * int(reads[-1].shape[-1])


def _launches(name: str, args: Any) -> int:
    """One for most; multi-tensor ops take as many tensors and blocks to a launch as torch's do."""
    if not name.startswith(("_foreach", "_fused_adam", "_amp_foreach")):
        return 1
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    blocks = sum(math.ceil(tensor.numel() / _CHUNK) for tensor in lists[0])
    per = _TENSORS.get(len(lists), 30)
    return max(math.ceil(blocks / _BLOCKS), math.ceil(len(lists[0]) / per)) + (1 if "norm" in name else 0)
