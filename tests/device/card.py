"""A graphics card made of main memory: tensors that say they are on a device and hold their values on the CPU.

Values are real, so a run on it trains. What a real card would refuse is refused: operations that mix devices, random
generators of another device, numpy. What costs time on a real card is written into a ledger: values read by the host,
copies in both directions, kernels, and the bytes that are alive. It says nothing about speed, the rounding of real
kernels, streams, or several cards.

`card_cuda.install` makes it `cuda:0`, `card_private.install` a device type of its own.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


@dataclass
class Ledger:
    """What happened on the card since the last `clear`."""

    reads: list[str] = field(default_factory=list)  # where the host waited for a value
    copies_in: list[tuple[str, int, bool]] = field(default_factory=list)  # place, bytes, from pinned memory
    copies_out: list[tuple[str, int]] = field(default_factory=list)
    kernels: collections.Counter[str] = field(default_factory=collections.Counter)
    products: collections.Counter[str] = field(default_factory=collections.Counter)  # matrix products by dtype
    attention: collections.Counter[str] = field(default_factory=collections.Counter)
    masks: collections.Counter[str] = field(default_factory=collections.Counter)  # of attention, by dtype and shape
    live: int = 0
    peak: int = 0

    def clear(self) -> None:
        for found in (self.reads, self.copies_in, self.copies_out, self.kernels, self.products, self.attention,
                      self.masks):  # fmt: skip
            found.clear()
        self.peak = self.live


LEDGER = Ledger()
_OWNERS: collections.Counter[int] = collections.Counter()  # wrappers of each block of memory
PINNED: set[int] = set()  # addresses of memory that was pinned


class Card:
    """The one card of this process; `install` fills it in."""

    device: torch.device = CPU
    random: Tensor  # state of the card's own generator
    generators: ClassVar[dict[int, str]] = {}  # device type by the address that torch knows a generator by


def place() -> str:
    """The nearest line of the product, or of transformers, that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/stillroom/" in name:
            return f"{name.rsplit('/stillroom/', 1)[1]}:{frame.f_lineno}"
        if "/transformers/" in name:
            return f"transformers/{name.rsplit('/transformers/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"


class _Alive:
    """Counts a block of memory while anything on the card uses it."""

    __slots__ = ("address", "size")

    def __init__(self, values: Tensor) -> None:
        storage = values.untyped_storage()
        self.address, self.size = storage.data_ptr(), storage.nbytes()
        if not _OWNERS[self.address]:
            LEDGER.live += self.size
            LEDGER.peak = max(LEDGER.peak, LEDGER.live)
        _OWNERS[self.address] += 1

    def __del__(self) -> None:
        if _OWNERS is None:  # the process is ending
            return
        _OWNERS[self.address] -= 1
        if not _OWNERS[self.address]:
            del _OWNERS[self.address]
            LEDGER.live -= self.size


class OnCard(torch.Tensor):
    """A tensor of the card. `values` are its values, on the CPU."""

    values: Tensor
    alive: _Alive

    @staticmethod
    def __new__(cls: Any, values: Tensor, requires_grad: bool = False) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            layout=values.layout, device=Card.device, requires_grad=requires_grad,
        )  # fmt: skip
        made.values = values.detach() if values.requires_grad else values
        made.alive = _Alive(made.values)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        LEDGER.reads.append(f"tolist at {place()}")
        return self.values.tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, *_args: Any, **_options: Any) -> Any:
        raise TypeError(f"can't convert {Card.device} device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __repr__(self, **_options: Any) -> str:
        return f"OnCard({self.values!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Tensor = OnCard(self.values.clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made


# -- one operation -------------------------------------------------------------------------------------------


def _words(text: str) -> set[str]:
    return set(text.split())


FREE = _words(
    "view _unsafe_view t transpose permute slice select unsqueeze squeeze expand detach alias as_strided unbind split "
    "split_with_sizes _reshape_alias unfold diagonal empty empty_like empty_strided new_empty new_empty_strided "
    "lift_fresh chunk view_as_real set_ is_same_size"
)
WAITS = _words(
    "_local_scalar_dense nonzero equal is_nonzero masked_select _unique2 unique_dim unique_consecutive "
    "grouped_mm_fallback"  # of transformers, for experts on cards below sm_80
)
PRODUCTS = _words("mm addmm bmm baddbmm addbmm mv addmv")
# A 0-dimensional CPU tensor beside tensors of the card is taken as a number, but not by these.
STRICT = PRODUCTS | _words(
    "stack cat index_select gather scatter scatter_ scatter_add scatter_add_ embedding index_add index_add_ "
    "native_layer_norm _fused_adamw_ _foreach_copy_"
)
INDEXED = _words("index index_put index_put_ _index_put_impl_ _unsafe_index")
RANDOM = _words(
    "rand randn randint bernoulli bernoulli_ native_dropout uniform_ normal_ random_ multinomial rand_like randn_like "
    "randint_like randperm exponential_ normal"
)


def leaves(value: Any) -> list[Any]:
    """What lists hold, however deep. Operations are given nothing else that is nested."""
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def plain(value: Any) -> Any:
    """The same with the values of the card's tensors in their place."""
    if isinstance(value, OnCard):
        return value.values
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on the card if one of its tensors is there or it is asked to make one there."""
    name = func._schema.name.split("::")[1]
    flat = leaves((args, tuple(kwargs.values())))
    ours = [value for value in flat if isinstance(value, OnCard)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if target is not None and target.type == Card.device.type and (target.index or 0) != 0:
        raise RuntimeError("CUDA error: invalid device ordinal")
    is_here = bool(ours) if target is None else target.type == Card.device.type
    _check_generator(kwargs.get("generator"), is_here)
    if not is_here and not ours:
        return func(*args, **kwargs)
    plain_args, plain_kwargs = plain(args), {key: plain(value) for key, value in kwargs.items()}
    if name == "copy_" or (name == "_to_copy" and target is not None):
        return _copied(func, name, args, plain_args, plain_kwargs, is_here)
    _check_mixed(name, args, flat, ours)
    if plain_kwargs.get("device") is not None:
        plain_kwargs["device"] = CPU
    plain_kwargs.pop("pin_memory", None)
    if name not in FREE:
        LEDGER.kernels[name] += 1
    if name in WAITS or (name == "index" and any(_is_mask(value) for value in leaves(args[1]))):
        LEDGER.reads.append(f"{name} at {place()}")
    answer = _computed(func, name, plain_args, plain_kwargs)
    if name.startswith(("empty", "new_empty")) and answer.is_floating_point():
        answer.fill_(float("nan"))  # who reads what nobody wrote shall see it
    if name == "_local_scalar_dense":
        return answer
    # What is changed in place is given back as the very tensor that was given.
    given = {id(value.values): value for value in ours} if func._schema.is_mutable else {}
    return _wrapped(answer, given)


def _computed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The values, where the CPU has other kernels than a card by a way round."""
    if name in PRODUCTS:
        dtypes = {value.dtype for value in args if isinstance(value, Tensor)}
        if len(dtypes) > 1:
            raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got {dtypes} ({place()})")
        (dtype,) = dtypes
        LEDGER.products[str(dtype).removeprefix("torch.")] += 1
        if dtype in (torch.float16, torch.bfloat16):
            wide = [value.float() if isinstance(value, Tensor) else value for value in args]
            if func._overloadname.startswith("dtype"):  # half in, FP32 out
                result = getattr(torch.ops.aten, name).default(*wide[:-1]).to(wide[-1])
                return kwargs["out"].copy_(result) if "out" in kwargs else result
            if "out" not in kwargs:
                return func(*wide, **kwargs).to(dtype)
    if name in ("_softmax", "_log_softmax") and args[2]:  # half_to_float
        return func(args[0].float(), args[1], False)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and args[3] != args[0].dtype:
        return func(args[0], args[1], args[2], args[0].dtype).to(args[3])
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name in RANDOM and kwargs.get("generator") is None:
        with _own_random():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


@contextlib.contextmanager
def _own_random() -> Iterator[None]:
    """Draw from the card's generator: the CPU's state is afterwards what it was."""
    outer = torch.get_rng_state()
    torch.set_rng_state(Card.random)
    try:
        yield
    finally:
        Card.random = torch.get_rng_state()
        torch.set_rng_state(outer)


def _copied(func: Any, name: str, args: Any, plain_args: Any, plain_kwargs: dict[str, Any], is_here: bool) -> Any:
    """A copy between or within devices."""
    source, there = (args[1], isinstance(args[0], OnCard)) if name == "copy_" else (args[0], is_here)
    size = source.numel() * source.element_size()
    if there and not isinstance(source, OnCard):
        LEDGER.copies_in.append((place(), size, source.untyped_storage().data_ptr() in PINNED))
    elif isinstance(source, OnCard) and not there:
        LEDGER.copies_out.append((place(), size))
        LEDGER.reads.append(f"copy at {place()}")
    else:
        LEDGER.kernels[name] += 1
    if name == "copy_":
        plain_args[0].copy_(plain_args[1])
        return args[0]
    plain_kwargs = {**plain_kwargs, "device": CPU, "pin_memory": False}
    plain_kwargs.pop("non_blocking", None)
    answer = func(*plain_args, **plain_kwargs)
    return OnCard(answer) if there else answer


def _check_mixed(name: str, args: Any, flat: list[Any], ours: list[OnCard]) -> None:
    others = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, OnCard)]
    if not ours or not others:
        return
    if name in INDEXED:  # indices may be on the CPU: each use copies them
        wrong = [value for value in others if value is args[0]]
        if not wrong:
            LEDGER.copies_in.append((place(), sum(value.numel() * value.element_size() for value in others), False))
    else:
        wrong = [value for value in others if value.dim() > 0 or name in STRICT]
    if wrong:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{Card.device} and cpu! (aten::{name}, {place()})"
        )


def _check_generator(generator: Any, is_here: bool) -> None:
    if generator is None:
        return
    found, wanted = Card.generators.get(generator._cdata, "cpu"), Card.device.type if is_here else "cpu"
    if found != wanted:
        raise RuntimeError(f"Expected a {wanted!r} device type for generator but found {found!r} ({place()})")


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _wrapped(answer: Any, given: dict[int, OnCard]) -> Any:
    """The answer as tensors of the card."""
    if isinstance(answer, Tensor):
        return given[id(answer)] if id(answer) in given else OnCard(answer)
    if isinstance(answer, (list, tuple)):
        return type(answer)(_wrapped(part, given) for part in answer)
    return answer


class OnDispatch(TorchDispatchMode):
    """Sees every operation of the process, so that tensors can be made on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})
