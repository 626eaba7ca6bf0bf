"""What a device can do natively, as plain facts.

`torch.cuda.is_bf16_supported()` says yes on a T4, by emulation, and speaks of the current card, not of the chosen one;
a wheel built without a card's architecture sees the card, allocates on it, and dies at the first kernel. So the
capability of the chosen card is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stillroom.errors import BrokenAtStart


@dataclass(frozen=True)
class DeviceFacts:
    kind: str  # "cpu", "cuda", "mps"
    name: str = "CPU"
    has_native_bf16: bool = False
    memory_bytes: int = 0
    architecture: str = ""  # e.g. "sm_75"
    built_for: tuple[str, ...] = ()  # architectures of the installed torch
    has_tensor_cores: bool = True  # without them FP16 products with FP32 sums run at FP32's rate

    @property
    def is_supported(self) -> bool:
        """Whether the installed torch has kernels for this card (or can compile them from PTX)."""
        if self.kind != "cuda" or not self.built_for:
            return True
        number = int(self.architecture.removeprefix("sm_") or 0)
        major = number // 10
        for built in self.built_for:
            family, _, version = built.partition("_")
            known = int("".join(filter(str.isdigit, version)) or 0)
            same_major = family == "sm" and known // 10 == major and known <= number
            if same_major or (family == "compute" and known <= number):
                return True
        return False


def facts_of(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(kind=device.type, name=device.type.upper())
    major, minor = torch.cuda.get_device_capability(device)
    is_amd = torch.version.hip is not None  # its capability numbers mean other things
    return DeviceFacts(
        kind="cuda",
        name=torch.cuda.get_device_name(device),
        has_native_bf16=is_amd or major >= 8,
        has_tensor_cores=is_amd or major >= 7,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        architecture=f"sm_{major}{minor}",
        built_for=tuple(torch.cuda.get_arch_list()),
    )


def teacher_dtype(asked: str, facts: DeviceFacts) -> torch.dtype:
    """The dtype a teacher is loaded in: as asked, or chosen for the device (`auto`)."""
    if asked != "auto":
        dtype: torch.dtype = getattr(torch, asked)
        return dtype
    if facts.kind != "cuda":
        return torch.float32
    # A teacher that was trained in bf16 may overflow FP16; without native bf16 its products would be emulated.
    return torch.bfloat16 if facts.has_native_bf16 else torch.float16


def check_device(facts: DeviceFacts) -> None:
    """Refuse a card that the installed torch cannot compute on, before anything is loaded."""
    if not facts.is_supported:
        raise BrokenAtStart(
            f"{facts.name} is {facts.architecture}, and this torch was built for {', '.join(facts.built_for)}",
            where="device",
            advice=[
                "install a torch built for it: Pascal cards need a cu126 build, torch 2.14 or older",
                "or run on the CPU: --device cpu",
            ],
        )
