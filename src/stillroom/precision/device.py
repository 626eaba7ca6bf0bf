"""What a device can do natively, as plain facts.

`torch.cuda.is_bf16_supported()` says yes on a T4, by emulation, and means the current GPU, not of the chosen one;
a wheel built without a GPU's architecture sees the GPU, allocates on it, and dies at the first kernel. So the
capability of the chosen GPU is asked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.files import reason_of
from stillroom.core.machine import main_memory, nvidia_driver


@dataclass(frozen=True)
class DeviceFacts:
    kind: str  # "cpu", "cuda", "mps"
    name: str = "CPU"
    has_native_bf16: bool = False
    memory_bytes: int = 0
    architecture: str = ""  # e.g. "sm_75"
    built_for: tuple[str, ...] = ()  # architectures of the installed torch
    has_tensor_cores: bool = True  # without them FP16 products with FP32 sums run at FP32's rate
    bf16_gain: float = 0.0  # of a CPU: how many times as fast the run's products are in BF16; 0: not measured
    measured: str = ""  # the same as a sentence
    rates: Mapping[str, float] = field(default_factory=dict)  # GFLOP/s

    @property
    def is_supported(self) -> bool:
        """Whether the installed torch has kernels for this GPU (or can compile them from PTX)."""
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


def teacher_dtype(asked: str, device: torch.device | DeviceFacts) -> torch.dtype:
    """Return the dtype a teacher is loaded in: as asked, or chosen for the device (`auto`)."""
    if asked != "auto":
        dtype: torch.dtype = getattr(torch, asked)
        return dtype
    facts = device if isinstance(device, DeviceFacts) else facts_of(device)
    if facts.kind != "cuda":
        return torch.float32
    # A teacher that was trained in bf16 may overflow FP16; without native bf16 its products would be emulated.
    return torch.bfloat16 if facts.has_native_bf16 else torch.float16


def check_device(facts: DeviceFacts) -> None:
    """Refuse a GPU that the installed torch cannot compute on, before anything is loaded."""
    if not facts.is_supported:
        raise BrokenAtStart(
            f"{facts.name} is {facts.architecture}, and this torch was built for {', '.join(facts.built_for)}",
            where="device",
            advice=[*_wheels_for(facts.architecture), "or run on the CPU: --device cpu"],
        )


def _wheels_for(architecture: str) -> list[str]:
    """Which torch has kernels for a GPU that the installed one left out.

    CUDA 13 has no Pascal and no Volta, and PyPI's wheels are built with it since torch 2.11; wheels of CUDA 12.8 have
    none of both either. The last torch with wheels of CUDA 12.6, which have them, is 2.14.
    """
    number = int(architecture.removeprefix("sm_") or 0)
    if number < 75:
        family = "Volta (V100)" if number >= 70 else "Pascal (P100)"
        return [f"install the last torch with kernels for {family}: {CU126}", "on Kaggle choose a T4 instead"]
    return ["install a newer torch: pip install -U torch"]


# -- device ----------------------------------------------------------------------------------------
# The device of a run, by name, and how it adds up.


CU126 = "pip install 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"
_LOG = logging.getLogger("stillroom")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_FLOAT64 = "sums are taken in float64, which Apple's GPU does not have"


def unused_gpu(driver: str, torch_cuda: str) -> str:
    """Why torch sees no GPU on a machine with an NVIDIA driver; empty where there is no driver, or GPUs are hidden.

    A wheel for a newer CUDA than the driver knows answers `is_available()` with False and says nothing.
    """
    if not driver or os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return ""
    if not torch_cuda:
        return "there is the driver of an NVIDIA GPU, and this torch is built for CPUs alone"
    return (
        f"there is the driver of an NVIDIA GPU ({driver.strip()}), and this torch, built for CUDA {torch_cuda}, sees "
        "no GPU: the driver is most likely older than the wheel needs, or no GPU is passed into this container"
    )


def _warn(text: str) -> None:
    """The default for `tell`: on stderr, where no handler is set."""
    _LOG.warning(text)


def find_device(wanted: str, tell: Callable[[str], None] = _warn) -> torch.device:
    """The device by name; `auto` takes a GPU where torch sees one, else the CPU. `tell` hears what was passed over.

    Nothing is remembered between two calls, so a process may ask for `cpu` and then for `auto`.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if wanted == "auto" and torch.backends.mps.is_available():
            tell(f"the run is on the CPU: {_NO_FLOAT64}")
        if wanted == "auto" and (why := unused_gpu(nvidia_driver(), torch.version.cuda or "")):
            tell(f"the run is on the CPU, many times slower than on a GPU: {why}; stillroom doctor says what to do")
        return torch.device("cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a CUDA device was asked for and torch sees none",
            where="--device",
            advice=[
                "stillroom doctor: it tells a driver that is too old from a torch without CUDA",
                "--device cpu",
            ],
        )
    if wanted in ("auto", "cuda"):
        return _own_card()
    try:
        device = torch.device(wanted)
    except RuntimeError:
        advice = ["cpu, cuda, cuda:1, or auto, which takes a GPU where there is one"]
        raise ConfigError(f"there is no device {wanted!r}", where="--device", advice=advice) from None
    if device.type == "mps":
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {_NO_FLOAT64}", where="--device", advice=["--device cpu"]
        )
    try:
        torch.zeros(1, device=device).tolist()  # `meta` and a GPU that is not there fail here
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = reason_of(error)
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {reason}", where="--device", advice=["--device cpu", "--device auto"]
        ) from error
    return device


def _own_card() -> torch.device:
    """The GPU of this process: its own where several processes share a machine, else the current one."""
    local = os.environ.get("LOCAL_RANK", "")
    if not local.isdecimal():
        return torch.device("cuda", torch.cuda.current_device())
    if int(local) >= torch.cuda.device_count():
        raise BrokenAtStart(
            f"process {local} of this machine has no GPU: torch sees {torch.cuda.device_count()}",
            where="--device",
            advice=["start as many processes as there are GPUs", "--device cpu"],
        )
    device = torch.device("cuda", int(local))
    torch.cuda.set_device(device)  # collectives use the current GPU
    return device


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU, ask torch for kernels that add in a fixed order, and leave its settings as they were.

    An operation that has none is warned of by torch and computed all the same: refusing it would end the run. On a CPU
    with the same number of threads the order is fixed already.
    """
    if device.type != "cuda":
        yield
        return
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property, which types do not know
    fills = memory.fill_uninitialized_memory
    workspace = os.environ.get(_WORKSPACE)
    if workspace is None:
        os.environ[_WORKSPACE] = ":4096:8"  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=not was_on or warned)
    memory.fill_uninitialized_memory = False  # a kernel for each allocation, and nothing reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        memory.fill_uninitialized_memory = fills
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


@contextmanager
def wide_sums(device: torch.device) -> Iterator[None]:
    """On a GPU, keep cuBLAS from adding partial FP16 products in FP16, and restore the setting.

    torch allows it by default. A weight's gradient is a sum over thousands of tokens, scaled on top: a partial sum may
    overflow where the result would not.
    """
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before


# -- memory ----------------------------------------------------------------------------------------
# Measure the memory a run uses.


def memory_in_use(device: torch.device) -> tuple[float, float, float]:
    """(gigabytes of the GPU, resident gigabytes of the process, percent of the training device's memory).

    The GPU's are the peak since the last call: what is allocated between two steps is far less than what a step needs.
    """
    resident = psutil.Process().memory_info().rss
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return used / 1e9, resident / 1e9, 100.0 * used / total
    return 0.0, resident / 1e9, 100.0 * resident / main_memory().total
