"""Check single arguments; errors name the argument. No check reads a tensor's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from stillroom.config.sections import LEAST_TEMPERATURE
from stillroom.core.errors import ConfigError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_number(name: str, value: object, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """A finite number, not a tensor, within its bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is a {type(value).__name__}, not a number", where=name, advice=[f"{name} = 1.0"])
    number = float(value)
    if not (math.isfinite(number) and number >= least and number > above):
        bound = f"above {above:g}" if above > -math.inf else f"{least:g} or above" if least > -math.inf else "finite"
        raise ConfigError(f"{name} is {number:g}", where=name, advice=[f"a number that is {bound}"])


def check_count(name: str, value: object, *, advice: str) -> None:
    """A whole number, 0 or above."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {value!r}", where=name, advice=[advice])


def check_temperature(temperature: object) -> None:
    if isinstance(temperature, Tensor) or not isinstance(temperature, Real):
        raise ConfigError(
            f"temperature is a {type(temperature).__name__}, not a number",
            where="temperature",
            advice=["temperature = 2.0", "token_temperature takes one for each position"],
        )
    if not LEAST_TEMPERATURE <= float(temperature) < math.inf:
        raise ConfigError(
            f"temperature is {float(temperature):g}",
            where="temperature",
            advice=[f"{LEAST_TEMPERATURE:g} or above; 1 is neutral"],
        )


def check_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | str],
    *,
    device: torch.device,
    dtypes: str = "floating",
    advice: str = "one entry for each position of the student's hidden states, in the same order",
) -> None:
    """A tensor of that shape, on that device. A name in place of a length matches any length.

    `dtypes` is "floating", "integer" or "real" (either of them, or bool). `advice` is for a wrong shape.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}, not a tensor", where=name, advice=["torch.as_tensor"])
    lengths = tuple(tensor.shape)
    is_same = len(lengths) == len(shape) and all(
        isinstance(asked, str) or asked == length for asked, length in zip(shape, lengths, strict=True)
    )
    if not is_same:
        asked = ", ".join(f"{length}" for length in shape)
        raise ConfigError(
            f"{name} has shape {list(lengths)}, and [{asked}] is needed",
            where=name,
            advice=[advice],
        )
    is_integer, is_floating = tensor.dtype in _INTEGERS, tensor.dtype.is_floating_point
    is_right = {"floating": is_floating, "integer": is_integer}.get(dtypes, not tensor.dtype.is_complex)
    if not is_right:
        raise ConfigError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and {dtypes} numbers are needed",
            where=name,
            advice=[f"{name}.long()" if dtypes == "integer" else f"{name}.float()"],
        )
    if tensor.device != device:
        raise ConfigError(
            f"{name} is on {tensor.device}, the student on {device}", where=name, advice=[f"{name}.to('{device}')"]
        )
