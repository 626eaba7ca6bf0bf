"""Executes the PTX of a kernel on a CPU, thread by thread in numpy: what ptxas would be given for a GPU.

A register is an array over the threads of one block. Blocks run in an order that a schedule chooses, at most `slots` of
them at a time, and change places where they touch memory by an atomic operation or an acquiring load. Three things are
checked that no interpreter of the source language sees:

- races: two warps of a block touch a byte, one of them writing, with no barrier in between; or two blocks do, and no
  release and acquire orders them. A release covers what came before the last barrier, an acquire what comes after the
  next one.
- accesses outside of the kernel's memory, and unaligned ones, which are errors;
- sectors of 32 bytes that each warp's access touches, as L1 counts them. Hits in L1 and L2 are not modelled.

Instructions that are not listed here are errors. The approximate ones (ex2, div.full, rcp, lg2) get an error drawn up
to the largest that NVIDIA documents. Time is not modelled, and SASS is not executed: ptxas comes after PTX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Array = Any  # a numpy array over the threads of a block, or a scalar that broadcasts
_WARP, _SECTOR = 32, 32
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_KINDS = {"f": {16: np.float16, 32: np.float32, 64: np.float64}, "u": _UNSIGNED, "b": _UNSIGNED,
          "s": {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}}  # fmt: skip
_REGISTERS = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32, "%f": np.uint32, "%fd": np.uint64}
_FLUSHED = np.float32(2.0**-126)
_SEVERAL = -2  # as the warp of a byte that several warps have read
_IDLE_TURNS = 200  # in which every block looks for a change and finds none: a bounded wait is shorter in tests
_UPDATES: dict[str, Callable[..., Array]] = {  # of atomic operations: the new value by the old and the operands
    "add": lambda old, by: old + by,
    "or": lambda old, by: old | by,
    "cas": lambda old, expected, by: np.where(old == expected, by, old),
}


class Deadlock(RuntimeError):
    """Every block that may run waits for one that may not."""


class Memory:
    """Tensors at made-up addresses. Those that share memory share addresses."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, Array, int]] = {}  # by storage: address, bytes, smallest element
        self._top = 1 << 40

    def address_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.blocks:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self.blocks[key] = self._top, raw, tensor.element_size()
            self._top += (raw.size + 0xFFFFF) & ~0xFFFFF
        base, raw, size = self.blocks[key]
        self.blocks[key] = base, raw, min(size, tensor.element_size())
        return base + tensor.storage_offset() * tensor.element_size()

    def start_of(self, tensor: torch.Tensor) -> int:
        return self.blocks[tensor.untyped_storage().data_ptr()][0]


@dataclass
class Run:
    """What happened."""

    read: Counter[Any] = field(default_factory=Counter)  # sectors, by where a tensor's memory starts
    written: Counter[Any] = field(default_factory=Counter)
    races: Counter[str] = field(default_factory=Counter)  # bytes, by instruction
    instructions: Counter[str] = field(default_factory=Counter)  # of a warp each

    def bytes_read(self, *which: Any) -> int:
        """Of these tensors, or of all."""
        return _SECTOR * sum(self.read[one] for one in which or self.read)

    def bytes_written(self, *which: Any) -> int:
        return _SECTOR * sum(self.written[one] for one in which or self.written)


class _Book:
    """Who touched each unit of a piece of memory last: for writes the block, its warp and its epoch; reads by block."""

    def __init__(self, num_units: int, num_blocks: int) -> None:
        self.written = np.full((3, num_units), -1, np.int32)
        self.read_warp = np.full((num_blocks, num_units), -1, np.int16)
        self.read_epoch = np.full((num_blocks, num_units), -1, np.int32)

    def check(self, block: _Block, units: Array, warps: Array, is_write: bool) -> int:
        """Number of units in conflict with what is known; then note this access."""
        number, epoch, seen = block.number, block.epoch, block.seen
        writer, warp, when = self.written[:, units]
        is_own = writer == number
        clash = is_own & (when == epoch) & (warp != warps)
        clash |= ~is_own & (writer >= 0) & (when > seen[writer])
        if is_write:
            clash |= (self.read_epoch[number, units] == epoch) & (self.read_warp[number, units] != warps)
            if len(seen) > 1:
                others = self.read_epoch[:, units] > seen[:, None]
                others[number] = False
                clash |= others.any(0)
            self.written[0, units], self.written[1, units], self.written[2, units] = number, warps, epoch
            clash |= self.written[1, units] != warps  # two warps in the same instruction
        else:
            is_same = self.read_epoch[number, units] == epoch
            several = is_same & (self.read_warp[number, units] != warps)
            self.read_warp[number, units] = np.where(several, _SEVERAL, warps)
            self.read_epoch[number, units] = epoch
        return int(clash.sum())


class _Block:
    """The state of one block: registers, shared memory, epochs."""

    def __init__(self, number: int, num_threads: int, num_blocks: int, shared_bytes: int) -> None:
        self.number, self.num_threads = number, num_threads
        self.warps = np.arange(num_threads) // _WARP
        lanes = np.arange(num_threads, dtype=np.uint32)
        full = lambda value: np.full(num_threads, value, np.uint32)  # noqa: E731
        self.registers: dict[str, Array] = {
            "%tid.x": lanes, "%ctaid.x": full(number), "%ntid.x": full(num_threads), "%laneid": lanes % _WARP,
            "%ctaid.y": full(0), "%ctaid.z": full(0), "%nctaid.x": full(num_blocks),
        }  # fmt: skip
        self.shared = np.zeros(shared_bytes + 16, np.uint8)
        self.book = _Book(self.shared.size, 1)
        self.epoch = 1
        self.seen = np.full(num_blocks, -1, np.int32)  # epochs of other blocks that are known to be over
        self.acquired = self.seen.copy()  # known to the acquiring thread; to all after the next barrier
        self.active: Array | None = None  # None: all threads
        self.parked: dict[int, Array] = {}  # threads that wait at an instruction for the others

    def mask(self) -> Array:
        return np.ones(self.num_threads, bool) if self.active is None else self.active


Step = Callable[[_Block, Array], None]


class Emulator:
    """One kernel."""

    def __init__(self, ptx: str) -> None:
        entry = ptx[ptx.index(".entry") :]
        self._parameters = re.findall(r"\.param \.\w+[^,)]*?(\w+_param_\d+)", entry[: entry.index("{")])
        found = re.search(r"\.(?:reqntid|maxntid) (\d+)", entry)
        assert found is not None
        self.num_threads = int(found[1])
        body = re.sub(r"//[^\n]*", "", entry[entry.index("{") + 1 :])
        body = re.split(r"^\$L__func_end\d+:", body, flags=re.MULTILINE)[0]
        self._code: list[tuple[str, list[str], str, str]] = []  # operation, operands, guard, text
        self._labels: dict[str, int] = {}
        for piece in map(str.strip, re.split(r"[;\n]", body)):
            while label := re.match(r"^([$\w]+):", piece):
                self._labels[label[1]] = len(self._code)
                piece = piece[label.end() :].strip()
            if piece and not piece.startswith(".") and piece not in "{}":
                self._code.append(_parsed(piece))

    def run(
        self,
        values: list[Any],
        grid: int,
        memory: Memory,
        shared_bytes: int,
        *,
        slots: int = 1,
        schedule: str = "first",
        seed: int = 0,
        checks: bool = True,
    ) -> Run:
        """Start `grid` blocks. `schedule` is first, last or random: which of the running blocks continues."""
        self._run, self._memory, self._random = Run(), memory, np.random.default_rng(seed)
        self._values = dict(zip(self._parameters, [*values, *[0] * len(self._parameters)], strict=False))
        self._released: dict[int, Array] = {}  # by address: what a release made known
        self._pieces = sorted(memory.blocks.values(), key=lambda piece: piece[0])
        self._books = [_Book(raw.size // size, grid) if checks else None for _base, raw, size in self._pieces]
        self._grid, self._shared_bytes, self._changes = grid, shared_bytes, 0
        steps = [self._step(*one) for one in self._code]
        waiting = list(range(grid))
        running: list[tuple[Iterator[bool], list[int]]] = []  # a block, and the change it has seen where it spins
        idle = 0
        with np.errstate(all="ignore"):
            while waiting or running:
                while waiting and len(running) < slots:
                    running.append((self._blocks_turns(waiting.pop(0), steps), [-1]))
                able = [one for one in running if one[1][0] != self._changes]
                idle = 0 if able else idle + 1
                if idle > _IDLE_TURNS:
                    raise Deadlock(f"{len(running)} blocks wait for {len(waiting)} that have not started")
                able = able or running
                place = {"first": 0, "last": -1}.get(schedule)
                chosen = able[int(self._random.integers(len(able))) if place is None else place]
                spins = next(chosen[0], None)
                if spins is None:
                    running.remove(chosen)
                elif spins:
                    chosen[1][0] = self._changes
        return self._run

    def _blocks_turns(self, number: int, steps: list[Step | None]) -> Iterator[bool]:
        """Run a block; yield at each synchronising access, True if it came back to one and nothing had changed."""
        block = _Block(number, self.num_threads, self._grid, self._shared_bytes)
        num_warps = self.num_threads // _WARP
        place, last = 0, (-1, -1)
        while place < len(self._code):
            if place in block.parked:
                joined = block.parked.pop(place) | block.mask()
                block.active = None if joined.all() else joined
            operation, operands, guard, text = self._code[place]
            step = steps[place]
            self._run.instructions[operation] += num_warps
            active = block.active
            if guard:
                chosen = block.registers[guard.lstrip("!")]
                chosen = ~chosen if guard[0] == "!" else chosen
                active = chosen if active is None else chosen & active
            if operation.startswith("bra"):
                place = self._branch(block, place, active, operands[0], text)
                continue
            if operation == "ret":
                assert block.active is None, "a part of a block ends"
                return
            if active is None or active.any():
                assert step is not None
                step(block, active)
            place += 1
            if operation.startswith("atom") or ".acquire" in operation:
                this = place, self._changes
                yield this == last
                last = this

    def _branch(self, block: _Block, place: int, active: Array | None, label: str, text: str) -> int:
        """Threads that part at a branch wait at the earlier of the two places for the others to come there."""
        target, mask = self._labels[label], block.mask()
        taken = mask if active is None else active
        if not taken.any():
            return place + 1
        if (taken == mask).all():
            earliest = min(block.parked, default=target)
            if earliest >= target:
                return target
            block.parked[target] = block.parked.get(target, False) | mask
            block.active = np.zeros(block.num_threads, bool)
            return earliest
        if target <= place:
            raise RuntimeError(f"threads part at a backward branch: {text}")
        block.parked[target] = block.parked.get(target, False) | taken
        block.active = mask & ~taken
        return place + 1

    # -- decoding --------------------------------------------------------------------------------------------

    def _step(self, operation: str, operands: list[str], _guard: str, text: str) -> Step | None:
        name, *types = operation.split(".")
        if name in ("bra", "ret"):
            return None
        if name == "bar":
            return _barrier
        if name in ("ld", "st", "atom"):
            return (
                self._parameter(types, operands) if types[0] == "param" else self._access(name, types, operands, text)
            )
        if name == "mov" and "{" in operands[0] + operands[1]:
            return _packed(types, operands)
        if name == "shfl":
            return _shuffle(types, operands, text)
        return self._computed(name, types, operands, text)

    def _parameter(self, types: list[str], operands: list[str]) -> Step:
        kind = _kind(types[-1])
        value = self._values[operands[1].strip("[] ")]
        bits = np.array(value, np.float32).view(kind) if isinstance(value, float) else np.array(value).astype(kind)
        return lambda block, active: _put(block, operands[0], np.full(block.num_threads, bits), active)

    def _access(self, name: str, types: list[str], operands: list[str], text: str) -> Step:
        """A load, a store or an atomic operation."""
        space = "shared" if "shared" in types else "global"
        kind = _UNSIGNED[int(re.sub(r"\D", "", types[-1]))]
        is_load = name != "st"
        registers = [one.strip() for one in operands[0 if is_load else 1].strip("{} ").split(",")]
        found = re.match(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operands[1 if is_load else 0])
        assert found is not None, text
        base, offset = found[1], int(found[2] or "0", 0)
        pointer = _reader(base, np.uint64 if base.startswith("%rd") else np.uint32)
        size = np.dtype(kind).itemsize
        width = size * len(registers)
        given = [_reader(operand, kind) for operand in operands[2:]] if name == "atom" else []
        update = _UPDATES.get(types[-2]) if name == "atom" else None
        if name == "atom" and update is None:
            raise NotImplementedError(text)

        def step(block: _Block, active: Array | None) -> None:
            lanes = np.arange(block.num_threads) if active is None else np.nonzero(active)[0]
            at = np.broadcast_to(pointer(block.registers), (block.num_threads,))[lanes].astype(np.int64) + offset
            piece, raw, where = self._find(block, space, at, width, text)
            if space == "global" and name != "atom" and "acquire" not in types:
                sectors = np.unique(lanes // _WARP * (1 << 45) + at // _SECTOR).size
                (self._run.read if is_load else self._run.written)[self._pieces[piece][0]] += sectors
                self._changes += not is_load
            if name == "atom" or "acquire" in types:
                self._order(block, int(at[0]), types)
                self._changes += name == "atom"
            else:
                self._judge(block, space, piece, where, lanes // _WARP, width, not is_load, text)
            cells = raw.view(np.uint8)
            for place, register in enumerate(registers):
                index = (where + place * size)[:, None] + np.arange(size)
                if is_load:
                    value = np.zeros(block.num_threads, kind)
                    value[lanes] = cells[index].reshape(-1).view(kind)
                    _put(block, register, value, active)
                    if update is not None:
                        assert lanes.size == 1, text
                        by = [np.broadcast_to(one(block.registers), (block.num_threads,))[lanes] for one in given]
                        cells[index] = update(value[lanes], *by).view(np.uint8).reshape(-1, size)
                else:
                    value = np.broadcast_to(_reader(register, kind)(block.registers), (block.num_threads,))[lanes]
                    cells[index] = np.ascontiguousarray(value).view(np.uint8).reshape(-1, size)

        return step

    def _find(self, block: _Block, space: str, at: Array, width: int, text: str) -> tuple[int, Array, Array]:
        """The piece of memory that all addresses lie in."""
        if space == "shared":
            piece, base, raw = -1, 0, block.shared
        else:
            piece = next((i for i, (base, raw, _) in enumerate(self._pieces) if base <= at[0] < base + raw.size), -1)
            if piece < 0:
                raise IndexError(f"address {int(at[0]):#x} belongs to nothing: {text}")
            base, raw, _size = self._pieces[piece]
        where = at - base
        if (where < 0).any() or (where + width > raw.size).any():
            raise IndexError(f"{text} leaves its memory by {int((where + width).max() - raw.size)} bytes")
        if (at % width).any():
            raise IndexError(f"{text} is not aligned")
        return piece, raw, where

    def _judge(
        self, block: _Block, space: str, piece: int, where: Array, warps: Array, width: int, is_write: bool, text: str
    ) -> None:
        book, unit = (block.book, 1) if space == "shared" else (self._books[piece], self._pieces[piece][2])
        if book is None:
            return
        num_units = max(1, width // unit)
        units = (where[:, None] // unit + np.arange(num_units)).reshape(-1)
        one = _Alone(block) if space == "shared" else block
        clashes = book.check(one, units, np.repeat(warps, num_units), is_write)  # type: ignore[arg-type]
        if clashes:
            self._run.races[text] += clashes * unit

    def _order(self, block: _Block, address: int, types: list[str]) -> None:
        """A release makes known what came before the last barrier; an acquire learns it."""
        known = self._released.get(address)
        if ("acquire" in types or "acq_rel" in types) and known is not None:
            block.acquired = np.maximum(block.acquired, known)
        if "acq_rel" in types or "release" in types:
            mine = np.maximum(block.seen, block.acquired)
            mine[block.number] = block.epoch - 1
            self._released[address] = mine if known is None else np.maximum(known, mine)

    def _computed(self, name: str, types: list[str], operands: list[str], text: str) -> Step:
        """An operation on registers alone."""
        last = types[-1]
        kind = np.bool_ if last == "pred" else _kind(last)
        kinds: list[Any] = [kind] * (len(operands) - 1)
        if name == "cvt":
            compute = _conversion(types)
        elif name == "setp":
            compute = _comparison(types[0], last)
        else:
            compute = self._arithmetic(name, types, last, kind, text)
            if name in ("shl", "shr"):
                kinds[1] = np.uint32
            elif name == "selp":
                kinds[2] = np.bool_
            elif name == "mad" and "wide" in types:
                kinds[2] = np.int64 if last[0] == "s" else np.uint64
        readers = [_reader(operand, one) for operand, one in zip(operands[1:], kinds, strict=True)]
        target = operands[0]
        return lambda block, active: _put(block, target, compute(*(read(block.registers) for read in readers)), active)

    def _arithmetic(self, name: str, types: list[str], last: str, kind: Any, text: str) -> Callable[..., Array]:
        wide = np.int64 if last[0] == "s" else np.uint64
        flush = _flushed if "ftz" in types else lambda value: value
        if name in ("mul", "mad") and "wide" in types:
            return lambda x, y, z=0: (
                x.astype(wide) * y.astype(wide) + wide(z) if np.ndim(z) == 0 else (x.astype(wide) * y.astype(wide) + z)
            )
        if name == "mul" and "hi" in types:
            return lambda x, y: ((x.astype(wide) * y.astype(wide)) >> wide(32)).astype(kind)
        is_float = last[0] == "f"
        keeps_nan = "NaN" in types
        table: dict[str, Callable[..., Array]] = {
            "mov": lambda x: x,
            "add": lambda x, y: flush(x + y),
            "sub": lambda x, y: flush(x - y),
            "mul": lambda x, y: flush(x * y),
            "mad": lambda x, y, z: x * y + z,
            "fma": lambda x, y, z: flush((_double(x) * _double(y) + _double(z)).astype(kind)),
            "neg": lambda x: -x,
            "abs": np.abs,
            "max": np.maximum if keeps_nan or not is_float else np.fmax,
            "min": np.minimum if keeps_nan or not is_float else np.fmin,
            "rem": lambda x, y: np.fmod(x, y),
            "and": lambda x, y: x & y,
            "or": lambda x, y: x | y,
            "xor": lambda x, y: x ^ y,
            "not": lambda x: ~x,
            "shl": lambda x, y: x << y.astype(kind),
            "shr": lambda x, y: x >> y.astype(kind),
            "selp": lambda x, y, chosen: np.where(chosen, x, y),
            "sqrt": lambda x: np.sqrt(x) if "rn" in types else self._inexact(np.sqrt(_double(x)), 2.0**-22),
            "rsqrt": lambda x: self._inexact(1.0 / np.sqrt(_double(x)), 2.0**-22),
            "rcp": lambda x: self._inexact(1.0 / _double(x), 2.0**-24 if "rn" in types else 2.0**-23),
            "ex2": lambda x: flush(self._inexact(np.exp2(_double(flush(x))), 2.0**-22)),
            "lg2": lambda x: self._inexact(np.log2(_double(x)), 2.0**-22, 2.0**-22),
        }
        if name == "div":
            if not is_float:
                return lambda x, y: np.trunc(_double(x) / _double(y)).astype(kind)
            return lambda x, y: x / y if "rn" in types else self._inexact(_double(x) / _double(y), 2.0**-22)
        if name not in table:
            raise NotImplementedError(text)
        return table[name]

    def _inexact(self, value: Array, relative: float, absolute: float = 0.0) -> Array:
        draw = self._random.uniform(-1.0, 1.0, np.shape(value))
        return (value + draw * np.maximum(relative * np.abs(value), absolute)).astype(np.float32)


class _Alone:
    """A block as its own shared memory sees it: there is no other."""

    def __init__(self, block: _Block) -> None:
        self.number, self.epoch, self.seen = 0, block.epoch, np.zeros(1, np.int32)


def _parsed(text: str) -> tuple[str, list[str], str, str]:
    guard, instruction = "", text
    if text.startswith("@"):
        guard, instruction = text[1:].split(None, 1)
    operation, _, rest = instruction.replace("\t", " ").partition(" ")
    operands = [one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
    return operation, operands, guard, text


def _kind(name: str) -> Any:
    return _KINDS[name[0]][int(name[1:])]


def _double(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < _FLUSHED, np.float32(0), x)


def _reader(name: str, kind: Any) -> Callable[[dict[str, Array]], Array]:
    if name.startswith("%"):
        return lambda registers: registers[name] if kind is np.bool_ else _as(registers[name], kind)
    if re.match(r"0[fFdD][0-9A-Fa-f]{8}", name):
        number = int(name[2:], 16)
        literal = np.array(number, np.uint32 if len(name) == 10 else np.uint64).view(kind)
        return lambda registers: literal
    bits = 8 * np.dtype(kind).itemsize
    value = 0 if name == "global_smem" else int(name, 0)
    number = np.array(value & ((1 << bits) - 1), _UNSIGNED[bits]).view(kind)
    return lambda registers: number


def _as(register: Array, kind: Any) -> Array:
    size = np.dtype(kind).itemsize
    narrow = register if register.dtype.itemsize == size else register.astype(_UNSIGNED[8 * size])
    return narrow.view(kind)


def _put(block: _Block, name: str, value: Array, active: Array | None) -> None:
    prefix = re.match(r"%[a-z]+", name)
    if prefix is None:  # "_": the value is not wanted
        return
    kind = _REGISTERS[prefix[0]]
    value = np.asarray(value)
    if value.ndim == 0:
        value = np.full(block.num_threads, value)
    if kind is not np.bool_ and value.dtype != kind:
        if value.dtype.itemsize != np.dtype(kind).itemsize:
            value = value.astype(np.int64 if value.dtype.kind == "i" else np.uint64)
            value = value.astype(kind)
        value = np.ascontiguousarray(value).view(kind)
    if active is not None:
        value = np.where(active, value, block.registers.get(name, np.zeros(1, kind)))
    block.registers[name] = value


def _barrier(block: _Block, _active: Array | None) -> None:
    assert block.active is None, "a barrier that not all threads come to"
    block.epoch += 1
    block.seen = np.maximum(block.seen, block.acquired)


def _packed(types: list[str], operands: list[str]) -> Step:
    """Several registers as one, or one as several."""
    bits = int(types[-1][1:])
    many, one = (operands[0], operands[1]) if "{" in operands[0] else (operands[1], operands[0])
    parts = [part.strip() for part in many.strip("{} ").split(",")]
    each = bits // len(parts)

    def step(block: _Block, active: Array | None) -> None:
        if "{" in operands[0]:
            value = np.ascontiguousarray(_reader(one, _UNSIGNED[bits])(block.registers)).view(_UNSIGNED[each])
            for place, part in enumerate(parts):
                _put(block, part, value.reshape(block.num_threads, -1)[:, place].copy(), active)
        else:
            values = [_reader(part, _UNSIGNED[each])(block.registers) for part in parts]
            joined = np.stack([np.broadcast_to(value, (block.num_threads,)) for value in values], 1)
            _put(block, one, np.ascontiguousarray(joined).view(_UNSIGNED[bits]).reshape(-1), active)

    return step


def _shuffle(types: list[str], operands: list[str], text: str) -> Step:
    target, source = operands[0].split("|")[0], _reader(operands[1], np.uint32)
    by = _reader(operands[2], np.uint32)
    if types[1] not in ("bfly", "idx"):
        raise NotImplementedError(text)

    def step(block: _Block, active: Array | None) -> None:
        lane = np.arange(block.num_threads)
        other = np.broadcast_to(by(block.registers), (block.num_threads,)).astype(np.int64)
        inside = (lane % _WARP) ^ other if types[1] == "bfly" else other % _WARP
        _put(block, target, source(block.registers)[lane // _WARP * _WARP + inside], active)

    return step


def _comparison(name: str, last: str) -> Callable[[Array, Array], Array]:
    table = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    if last[0] != "f":
        return table[name]
    is_nan = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
    if name in ("nan", "num"):
        return lambda x, y: is_nan(x, y) == (name == "nan")
    if name.endswith("u"):  # true where one of them is NaN
        return lambda x, y: table[name[:-1]](x, y) | is_nan(x, y)
    return lambda x, y: table[name](x, y) & ~is_nan(x, y)


def _conversion(types: list[str]) -> Callable[[Array], Array]:
    to, source = _kind(types[-2]), types[-1]
    reads = _kind(source)
    rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil}.get(types[0], np.trunc)

    def convert(value: Array) -> Array:
        value = _as(np.asarray(value), reads) if np.asarray(value).dtype != reads else value
        return rounding(value).astype(to) if source[0] == "f" and types[-2][0] != "f" else value.astype(to)

    return convert
