"""How a GGUF file scales its rotary frequencies.

Transformers leaves the scaling out without a word: the model would answer otherwise than it should. So it is read here,
for the two kinds that a configuration can say, and any other is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.errors import BrokenAtStart
from stillroom.models.load.gguf_header import GgufHeader

FOLDER = "use the model's own folder, with config.json and safetensors"
_FREQUENCIES = "rope_freqs.weight"  # what each frequency is divided by
_READ_BY_TRANSFORMERS = ("gpt-oss", "gpt_oss")
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of every Llama 3 that scales


def scaled_rotation(header: GgufHeader) -> dict[str, Any]:
    """The `rope_parameters` that the file asks for beside its base; empty where nothing is scaled."""
    if header.architecture in _READ_BY_TRANSFORMERS:
        return {}
    kind, factor = header.own("rope.scaling.type"), header.own("rope.scaling.factor")
    divisors = _divisors(header)
    if divisors is not None:
        return _like_llama3(header, divisors)
    if kind in (None, "none") or factor in (None, 1.0):
        return {}
    if kind == "linear" and header.architecture == "llama":
        return {"rope_type": "linear", "factor": float(factor)}
    raise _refused(header, f"rope.scaling.type = {kind!r} with factor {factor:g}")


def _divisors(header: GgufHeader) -> npt.NDArray[np.float64] | None:
    tensor = header.tensors.get(_FREQUENCIES)
    if tensor is None:
        return None
    values = np.fromfile(header.path, dtype="<f4", count=tensor.num_elements, offset=tensor.offset).astype(np.float64)
    return None if (values == 1.0).all() else values


def _like_llama3(header: GgufHeader, divisors: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The settings that give these very divisors, as llama.cpp computes them from a Llama 3's configuration."""
    base, factor = float(header.own("rope.freq_base") or 10_000.0), float(divisors.max())
    wavelengths = 2.0 * math.pi * base ** (np.arange(len(divisors)) / len(divisors))
    smooth = (_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    expected = np.where(wavelengths < _ORIGINAL / _HIGH, 1.0, expected)
    expected = np.where(wavelengths > _ORIGINAL / _LOW, factor, expected)
    if header.architecture != "llama" or not np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
        raise _refused(header, _FREQUENCIES)
    scales = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
    return {"rope_type": "llama3", **scales, "original_max_position_embeddings": _ORIGINAL}


def _refused(header: GgufHeader, told: str) -> BrokenAtStart:
    return BrokenAtStart(
        f"{header.path} scales its rotary frequencies in a way that is not read from GGUF ({told}): it would answer "
        "otherwise than the model does",
        advice=[FOLDER],
    )
