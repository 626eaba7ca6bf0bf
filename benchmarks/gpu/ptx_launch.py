"""Builds a kernel of ours for a GPU that is not here, and runs the PTX it would be given on a CPU (`ptx.py`).

A `Launch` is what the product starts on a device; here the same kernel with the same arguments is compiled as Triton's
launcher would specialise it: sizes and addresses that are multiples of 16 are known to be so, and a size of 1 is a
constant.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from ptx import Emulator, Memory, Run
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.int8: "*i8",
}  # fmt: skip
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Built:
    """A kernel for one architecture, and which of the launch's arguments it takes."""

    ptx: str
    arguments: tuple[str, ...]
    shared_bytes: int
    architecture: int


def build(launch: Any, architecture: int) -> Built:
    """Compile for sm_`architecture`. Needs no driver."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.constants.get(name, launch.arguments.get(name))
        is_fixed = name in launch.constants or (isinstance(value, int) and value == 1)
        if is_fixed:
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], hints[(place,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                hints[(place,)] = [["tt.divisibility", 16]]
    source = _source(launch.kernel, signature, constants, hints)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))
    taken = tuple(name for name, kind in signature.items() if kind != "constexpr")
    return Built(made.asm["ptx"], taken, made.metadata.shared, architecture)


def _source(kernel: Any, signature: dict[str, str], constants: dict[Any, Any], hints: dict[Any, Any]) -> ASTSource:
    """Also for Triton 3.2, which has constants by name, and no type where there is a constant."""
    if "constexprs" in inspect.signature(ASTSource).parameters:
        return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    from triton.backends.compiler import AttrsDescriptor

    held = AttrsDescriptor.from_dict(
        {"arg_properties": {"tt.divisibility": [place for (place,) in hints]}, "cls": "AttrsDescriptor"}
    )
    types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    named = {kernel.arg_names[place]: value for (place,), value in constants.items()}
    return ASTSource(fn=kernel, signature=types, constants=named, attrs=held)


def resources(built: Built, folder: Path) -> dict[str, int]:
    """Registers, spilled bytes and shared memory, as ptxas reports them."""
    source = folder / "kernel.ptx"
    source.write_text(built.ptx)
    command = [_TOOLS / "ptxas", "-v", f"--gpu-name=sm_{built.architecture}", source, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None and spills is not None, said
    return {"registers": int(registers[1]), "spilled_bytes": int(spills[1]) + int(spills[2]),
            "shared_bytes": built.shared_bytes}  # fmt: skip


def execute(launch: Any, built: Built, *, ptx: str | None = None, **options: Any) -> Run:
    """Run the launch's PTX (or a damaged copy) on the launch's own tensors, which then hold what it wrote."""
    memory = Memory()
    given = [_with_addresses(launch, name, memory) for name in built.arguments]
    values = [memory.address_of(one) if isinstance(one, torch.Tensor) else one for one in given]
    run = Emulator(ptx or built.ptx).run(values, launch.grid, memory, built.shared_bytes, **options)
    names: dict[int, str] = {}  # of several tensors in one memory the first: a gradient written over its logits
    for name, one in zip(built.arguments, given, strict=True):
        if isinstance(one, torch.Tensor):
            names.setdefault(memory.start_of(one), name)
    for table in launch.tables.values():
        for place, one in enumerate(one for row in table for one in row):
            names.setdefault(memory.start_of(one), f"table {place}")
    for counted in (run.read, run.written):
        found = {names[int(key)]: count for key, count in counted.items()}
        counted.clear()
        counted.update(found)
    return run


def _with_addresses(launch: Any, name: str, memory: Memory) -> Any:
    """An argument; a table of addresses with those of the emulator's memory."""
    if name not in launch.tables:
        return launch.arguments[name]
    return torch.tensor([[memory.address_of(one) for one in row] for row in launch.tables[name]], dtype=torch.int64)
