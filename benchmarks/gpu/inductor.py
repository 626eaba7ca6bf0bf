"""What inductor itself makes of a layer for a T4, from a CPU wheel: bytes that its kernels move, forward and backward.

Tensors are fake and say `cuda`; what inductor asks of the device and of Triton's driver is answered with a T4's facts.
The graph is traced, cut in forward and backward, lowered and scheduled by torch; where it would compile, it is stopped
and asked what it moves. `fusion.py` is a model of this compiler, and `compared` says what both think of the same layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import guard  # isort: skip  # noqa: F401  before torch

import datetime
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


def _moved(graph: Any, inputs: Any) -> int:
    """Bytes that inductor's kernels and the products between them read and write."""
    from torch._inductor import compile_fx
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering

    found: list[int] = []

    def stop(lowered: Any) -> None:
        lowered.codegen()
        found.append(int(lowered.count_bytes()[0]))
        raise _Stopped

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_fx.compile_fx_inner(graph, list(inputs))
        except (_Stopped, InductorError):  # inductor wraps what is raised inside of it
            if not found:
                raise
    return found[0]


def inductor_bytes(function: Function, *, trains: bool) -> dict[str, int]:
    """By direction. With a backward, torch's partition decides what is kept for it and what is made again."""
    from functorch.compile import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: dict[str, int] = {}

    def note(direction: str) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            found[direction] = _moved(graph, inputs)
            return make_boxed_func(graph.forward)

        return compiler

    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains):
        made = aot_function(
            function, fw_compiler=note("forward"), bw_compiler=note("backward"), inference_compiler=note("forward"),
            partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
        )  # fmt: skip
        answer = made(*_inputs(trains))
        if trains:
            answer.backward(torch.empty_like(answer))
    return found


def modelled_bytes(function: Function, *, trains: bool) -> dict[str, int]:
    """The same by the recorder and the model of a compiler."""
    with Recorder() as recorder, torch.set_grad_enabled(trains), torch.autograd.set_multithreading_enabled(False):
        inputs = _inputs(trains)
        gradient = torch.empty_like(inputs[0])
        recorder.start()
        with recorder.phase("forward"):
            answer = function(*inputs)
        with recorder.phase("backward"):
            if trains:
                answer.backward(gradient)
        kernels = compiled(recorder.kernels, ("forward", "backward"))
    return {
        direction: sum(one.bytes_read + one.bytes_written for one in kernels if one.phase == direction)
        for direction in ("forward", "backward")
        if any(one.phase == direction for one in kernels)
    }


# -- a layer of SmolLM2-81M, 2,048 tokens, half weights ----------------------------------------------------

ROWS, LENGTH, WIDTH, HEADS, KEY_HEADS, MLP = 4, 512, 576, 9, 3, 1536
SHAPES: tuple[tuple[int, ...], ...] = (
    (ROWS, LENGTH, WIDTH), (LENGTH, WIDTH // HEADS), (LENGTH, WIDTH // HEADS), (WIDTH,),
    (WIDTH, WIDTH), (WIDTH, WIDTH // HEADS * KEY_HEADS), (WIDTH, WIDTH // HEADS * KEY_HEADS), (WIDTH, WIDTH),
    (WIDTH,), (WIDTH, MLP), (WIDTH, MLP), (MLP, WIDTH),
)  # fmt: skip
Function = Callable[..., Tensor]


def _inputs(trains: bool) -> list[Tensor]:
    made = [torch.empty(shape, device="cuda", dtype=torch.float16) for shape in SHAPES]
    return [one.requires_grad_(trains and place not in (1, 2)) for place, one in enumerate(made)]  # angles are fixed


@torch.library.custom_op("stillroom_gpu::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One kernel, whatever is around it. It has no values here."""
    raise NotImplementedError


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("stillroom_gpu::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@attention_backward.register_fake
def _(gradient: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


attention.register_autograd(
    lambda ctx, gradient: attention_backward(gradient, *ctx.saved_tensors), setup_context=_keep
)  # fmt: skip


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).half()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def layer(
    x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    mlp_gain: Tensor, gate: Tensor, up: Tensor, down: Tensor,
) -> Tensor:  # fmt: skip
    rows, length, width = x.shape
    inner = _norm(x, gain)
    q, k, v = ((inner @ one).view(rows, length, -1, width // HEADS).transpose(1, 2) for one in (query, key, value))
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    # Below compute capability 8.0 the kernel knows no grouped queries: heads are repeated.
    k, v = (
        one[:, :, None].expand(-1, -1, HEADS // KEY_HEADS, -1, -1).reshape(rows, HEADS, length, -1) for one in (k, v)
    )
    attended = attention(q, k, v)
    x = x + attended.transpose(1, 2).reshape(rows, length, width) @ out
    inner = _norm(x, mlp_gain)
    return x + (torch.nn.functional.silu(inner @ gate) * (inner @ up)) @ down


def compared() -> dict[str, dict[str, int]]:
    """Bytes of a teacher's layer and of a trained one, by direction, as inductor and as the model has them."""
    with installed():
        return {
            f"{name}, {direction}": {"inductor": real, "model": modelled[direction]}
            for name, trains in (("teacher", False), ("student", True))
            for modelled in [modelled_bytes(layer, trains=trains)]
            for direction, real in inductor_bytes(layer, trains=trains).items()
        }


def main() -> None:
    """Print what was found; with a path, write it there too."""
    result = {
        "benchmark": "bytes of a layer of SmolLM2-81M for a T4, 2,048 tokens: inductor's own count and the model's",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "layers": compared(),
    }
    for path in map(Path, sys.argv[1:]):
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
