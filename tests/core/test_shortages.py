"""Which errors mean that memory ran out."""

from __future__ import annotations

import pytest
import torch

from stillroom.core.errors import OutOfMemory
from stillroom.core.shortages import explained, is_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_a_library_of_cuda_that_finds_no_room_is_a_shortage(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert isinstance(explained(RuntimeError(text), "a step"), OutOfMemory)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
