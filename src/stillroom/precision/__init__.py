"""Dtypes, loss scaling and master weights. `resolve` picks a policy and says why."""

from stillroom.precision import storage
from stillroom.precision.adamw import AdamW, ParameterGroup
from stillroom.precision.policy import BytesPerParameter, LossScale, Precision, bytes_per_parameter, choose, resolve

__all__ = [
    "AdamW",
    "BytesPerParameter",
    "LossScale",
    "ParameterGroup",
    "Precision",
    "bytes_per_parameter",
    "choose",
    "resolve",
    "storage",
]
