"""What inductor itself makes of a part of a step for a T4, from a CPU wheel: bytes that its kernels move.

Tensors are fake and say `cuda`; what inductor asks of the device and of Triton's driver is answered with a T4's facts.
The graph is traced, lowered and scheduled by inductor; where it would compile, it is stopped and asked what it moves.
`fusion.py` is a model of this compiler, and `compared` says what both think of the same operations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import guard  # isort: skip  # noqa: F401  before torch

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from fusion import compiled
from recorder import Recorder
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CAPABILITY, NUM_SMS = (7, 5), 40


class _Stopped(Exception):
    """The code is written: nothing is compiled."""


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="Tesla T4", major=7, minor=5, total_memory=15_835_660_288, multi_processor_count=NUM_SMS, warp_size=32,
        regs_per_multiprocessor=65_536, max_threads_per_multi_processor=1024, max_threads_per_block=1024,
        shared_memory_per_block=49_152, shared_memory_per_block_optin=65_536, shared_memory_per_multiprocessor=65_536,
        L2_cache_size=4 << 20, gcnArchName="", is_integrated=False, clock_rate=1_590_000,
    )  # fmt: skip


class _Driver:
    """What inductor asks of Triton's driver before anything runs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 75, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextmanager
def installed() -> Iterator[None]:
    """torch, inductor and Triton see a T4."""
    import torch.utils._triton
    import triton
    from torch._dynamo.device_interface import CudaInterface

    zero: Callable[..., int] = lambda *_: 0  # noqa: E731
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device": zero, "_lazy_init": lambda: None,
            "is_initialized": lambda: True, "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_name": lambda device=None: "Tesla T4", "get_device_properties": _properties,
            "synchronize": lambda device=None: None, "set_device": lambda device: None,
            "get_arch_list": lambda: ["sm_75"],
            "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device="cuda": None, "_exchange_device": zero,
            "_maybe_exchange_device": zero, "is_bf16_supported": lambda including_emulation=True: including_emulation,
        },
        torch.version: {"cuda": "12.8"},
        torch.utils._triton: {"has_triton": lambda: True},
        CudaInterface: {
            name: staticmethod(answer)
            for name, answer in {
                "is_available": lambda: True, "current_device": zero, "device_count": lambda: 1, "get_raw_stream": zero,
                "get_compute_capability": lambda device=None: 75, "is_triton_capable": lambda device=None: True,
                "raise_if_triton_unavailable": lambda device=None: None, "get_device_properties": _properties,
                "synchronize": lambda device=None: None,
            }.items()
        },
        CudaInterface.Worker: {
            "get_device_properties": staticmethod(_properties), "current_device": staticmethod(zero),
        },
    }  # fmt: skip
    missing = ("_cuda_getDevice", "_cuda_maybeExchangeDevice", "_cuda_exchangeDevice", "_cuda_getCurrentRawStream")
    with ExitStack() as stack:
        for owner, named in answers.items():
            for name, answer in named.items():
                stack.enter_context(mock.patch.object(owner, name, answer))
        for name in missing:
            stack.enter_context(mock.patch.object(torch._C, name, zero, create=True))
        triton.runtime.driver.set_active(_Driver())
        yield


def inductor_bytes(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> int:
    """Bytes that inductor's kernels and the products between them read and write."""
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[int] = []

    def stop(graph: Any) -> None:
        graph.codegen()
        found.append(int(graph.count_bytes()[0]))
        raise _Stopped

    traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_fx.compile_fx_inner(traced, list(inputs))
        except (_Stopped, InductorError):  # inductor wraps what is raised inside of it
            if not found:
                raise
    return found[0]


def modelled_bytes(function: Callable[..., tuple[Tensor, ...]], shapes: list[tuple[int, ...]]) -> int:
    """The same by the recorder and the model of a compiler."""
    with Recorder() as recorder:
        inputs = [torch.empty(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        recorder.start()
        with recorder.phase("body"):
            held = function(*inputs)
        found = compiled(recorder.kernels, ("body",))
        del held
    return sum(one.bytes_read + one.bytes_written for one in found)


# -- a part of a body: norm, gated MLP, residual, norm -----------------------------------------------------


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).half()


def mlp(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    inner = _norm(x, gain)
    x = x + (torch.nn.functional.silu(inner @ gate) * (inner @ up)) @ down
    return x, _norm(x, last)


SHAPES: list[tuple[int, ...]] = [(2048, 576), (576,), (576, 1536), (576, 1536), (1536, 576), (576,)]


def compared() -> dict[str, int]:
    with installed():
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = tuple(torch.empty(shape, device="cuda", dtype=torch.float16) for shape in SHAPES)
            with torch.no_grad():
                real = inductor_bytes(mlp, inputs)
        with torch.no_grad():
            return {"inductor": real, "model": modelled_bytes(mlp, SHAPES)}


if __name__ == "__main__":
    print(json.dumps(compared()))
