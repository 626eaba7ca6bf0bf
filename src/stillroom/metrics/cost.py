"""What a model costs: bytes on disk, seconds to load, tokens a second when it reads and writes, and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.models.generate import ability_of, time_tokens
from stillroom.models.student import num_positions

_PROMPT, _WRITTEN = 128, 32
_MOST_SECONDS, _LEAST_STEPS = 5.0, 4  # of writing, for models that take seconds a token
_SEED = 20_243
_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True)
class Cost:
    """What one model costs. `peak_memory_gb` is while it reads and writes; None where it cannot be measured."""

    disk_megabytes: float | None
    load_seconds: float | None
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    peak_memory_gb: float | None


def disk_megabytes(place: Path) -> float | None:
    """The weights of a model's folder, or of one file. None if there are none."""
    files = [place] if place.is_file() else [path for pattern in _WEIGHTS for path in place.glob(pattern)]
    return sum(path.stat().st_size for path in files) / 1e6 if files else None


@torch.no_grad()
def cost_of(network: Any, *, place: Path | None = None, load_seconds: float | None = None) -> Cost:
    """Read one prompt and write a few tokens. Random tokens: the time does not depend on them."""
    device = next(network.parameters()).device
    count = int(network.get_input_embeddings().weight.shape[0])
    length = max(1, min(_PROMPT, (num_positions(network) or 4 * _PROMPT) - _WRITTEN - 1))
    prompt = torch.randint(count, (length,), generator=torch.Generator().manual_seed(_SEED)).tolist()
    network.eval()
    ability_of(network)  # the trial, and a warm start

    def is_enough(times: list[float]) -> bool:
        return len(times) > 1 + _LEAST_STEPS and times[-1] - times[1] >= _MOST_SECONDS

    time_tokens(network, prompt, 1, lambda: _now(device), is_enough)  # warm
    with _peak_growth(device) as growth:
        # The first new token comes with the prompt.
        began, read, *written = time_tokens(network, prompt, 1 + _WRITTEN, lambda: _now(device), is_enough)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    return Cost(
        disk_megabytes=disk_megabytes(place) if place else None,
        load_seconds=load_seconds,
        prefill_tokens_per_second=length / max(read - began, 1e-9),
        decode_tokens_per_second=len(written) / max(written[-1] - read, 1e-9),
        peak_memory_gb=(weights + growth[0]) / 1e9 if growth else None,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _peak_growth(device: torch.device) -> Iterator[list[int]]:
    """A list that holds, after the body, by how many bytes its peak was above its beginning. Empty if unknown."""
    growth: list[int] = []
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield growth
        growth.append(torch.cuda.max_memory_allocated(device) - before)
        return
    resident = _reset_peak()
    yield growth
    peak = _status("VmHWM")
    if resident is not None and peak is not None:
        growth.append(max(0, peak - resident))


def _reset_peak() -> int | None:
    """Make the resident size of now the peak so far. None where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
