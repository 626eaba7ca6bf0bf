"""What torch does outside of operations, on a card made of main memory: data, generators, attention."""

from __future__ import annotations

from typing import Any

import torch
from card import CPU, LEDGER, PINNED, Card, OnCard, OnDispatch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes


def install(device: torch.device) -> None:
    """Make the card part of this process, for good."""
    Card.device = device
    Card.random = torch.Generator().manual_seed(0).get_state()
    _patch_data()
    _patch_generators()
    _patch_attention()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.autograd.set_multithreading_enabled(False)  # the mode belongs to this thread
    OnDispatch().__enter__()


def pin_memory(self: Tensor, *_args: Any) -> Tensor:
    if isinstance(self, OnCard):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    made = self.clone()
    PINNED.add(made.untyped_storage().data_ptr())
    return made


def _patch_data() -> None:
    """`tensor.data` works across devices: the tensor stays the same object and becomes one of the other kind."""
    original: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]

    def get(self: Tensor) -> Tensor:
        if isinstance(self, OnCard):
            with torch.no_grad():
                return OnCard(self.values.detach())
        return original.__get__(self)  # type: ignore[no-any-return]

    def put(self: Tensor, new: Tensor) -> None:
        if isinstance(self, OnCard) != isinstance(new, OnCard):
            fresh = OnCard(new.values) if isinstance(new, OnCard) else new.detach()
            if isinstance(self, torch.nn.Parameter):
                fresh = torch.nn.Parameter(fresh, self.requires_grad)
            _swap(self, fresh)
            return
        original.__set__(self, new)
        if isinstance(self, OnCard) and isinstance(new, OnCard):
            self.values, self.alive = new.values, new.alive

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]


def _swap(one: Tensor, other: Tensor) -> None:
    """`torch.utils.swap_tensors` for tensors that others hold too: on a real card they may."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def _patch_generators() -> None:
    original: Any = torch.Generator

    class Generator(original):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            made = original.__new__(cls, device="cpu")
            made.belongs_to = torch.device(device)
            Card.generators[made._cdata] = made.belongs_to.type
            return made

        def __init__(self, device: Any = "cpu") -> None: ...

        @property
        def device(self) -> torch.device:
            return Card.device if self.belongs_to.type == Card.device.type else CPU

    torch.Generator = Generator  # type: ignore[misc]


def _patch_attention() -> None:
    """One kernel forward and one backward, as a fused kernel; which one a card would choose is not known here."""
    original = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if not isinstance(query, OnCard):
            return original(query, key, value, *args, **options)
        if torch.is_autocast_enabled(Card.device.type):
            dtype = torch.get_autocast_dtype(Card.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        names = ("attn_mask", "dropout_p", "is_causal")
        options = {**dict(zip(names, args, strict=False)), **options}
        LEDGER.attention[f"{str(query.dtype).removeprefix('torch.')} gqa={options.get('enable_gqa', False)}"] += 1
        mask = options.get("attn_mask")
        if mask is not None:
            LEDGER.masks[f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)} {list(mask.stride())}"] += 1
        made: Tensor = _Attention.apply(query, key, value, options, original)
        return made

    functional.scaled_dot_product_attention = attend  # type: ignore[assignment]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, options: dict[str, Any], original: Any) -> Tensor:
        ctx.save_for_backward(query, key, value)
        mask = options.get("attn_mask")
        ctx.options = {**options, "attn_mask": mask.values if isinstance(mask, OnCard) else mask, "dropout_p": 0.0}
        ctx.original = original
        LEDGER.kernels["attention"] += 1
        with _disable_current_modes():
            answer = original(*(part.values.float() for part in (query, key, value)), **ctx.options)
            return OnCard(answer.detach().to(query.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        parts = ctx.saved_tensors
        LEDGER.kernels["attention backward"] += 1
        with _disable_current_modes():
            with torch.enable_grad():
                inner = [part.values.float().detach().requires_grad_() for part in parts]
                answer = ctx.original(*inner, **ctx.options)
                found = torch.autograd.grad(answer, inner, gradient.values.float())
            return *(OnCard(one.detach().to(parts[0].dtype)) for one in found), None, None
