"""A CUDA card without a card: tensors that say `cuda:0`, with shapes, dtypes and lifetimes, and without values.

torch's own fake tensors carry the shapes; a guard of a few lines of C++ lets autograd and autocast take them for
CUDA's. What is asked of `torch.cuda` is answered with a card's published facts, so the code under test takes the
branches it takes there. Whatever a program reads from the device is 1: the loss is 1, every norm is 1, every mask is
all true. Needs g++.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import guard  # isort: skip  before torch
import torch
from attention import fused_attention
from cards import Facts
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils

assert guard.IS_LOADED
DEVICE = torch.device("cuda:0")


# On a card this is one kernel. Without a kernel registered, the dispatcher would take it apart into seven.
_KERNELS = torch.library.Library("aten", "IMPL")
_KERNELS.impl("silu_backward", lambda *_: None, "CUDA")


class _Generator(torch.Generator):
    """Random numbers have no values here, so a generator of the main memory stands for one of the card."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")


def _apply(module: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module.to` for tensors that cannot be swapped: those that are where they should be stay the same objects."""
    for child in module.children():
        child._apply(convert)
    for parameter in module._parameters.values():
        if parameter is not None:
            moved = convert(parameter)
            if moved is not parameter:
                parameter.data = moved.detach()
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


@contextmanager
def installed(facts: Facts, recorder: Any) -> Iterator[None]:
    """torch sees this card; `recorder` is told of attention and asked what is allocated."""
    properties = collections.namedtuple("properties", "total_memory major minor name multi_processor_count")(
        facts.memory_bytes, *facts.capability, facts.name, 40
    )
    has_bf16 = facts.capability >= (8, 0)
    number = 10 * facts.capability[0] + facts.capability[1]
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "get_device_capability": lambda device=None: facts.capability,
        "get_device_name": lambda device=None: facts.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: has_bf16 or including_emulation,
        "get_arch_list": lambda: [f"sm_{number}"],
        "memory_allocated": lambda device=None: recorder.live_bytes,
        "memory_reserved": lambda device=None: recorder.live_bytes,
        "max_memory_allocated": lambda device=None: recorder.peak_bytes,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (facts.memory_bytes - recorder.live_bytes, facts.memory_bytes),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "manual_seed": lambda seed: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        attend = fused_attention(facts.capability, recorder)
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes belong to the calling thread
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: recorder.read_list(tensor)))
        stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
        # transformers takes fake tensors for a graph being traced, and then keeps masks that it drops in a real run.
        stack.enter_context(mock.patch.object(masking_utils, "is_tracing", return_value=False))
        # Numbers from the host become a tensor in main memory first, which is then copied: the recorder sees that.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield
