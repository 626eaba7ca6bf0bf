"""Dtypes, loss scaling and master weights. `resolve` picks a policy and says why."""

from stillroom.precision import storage
from stillroom.precision.adamw import AdamW, ParameterGroup
from stillroom.precision.budget import BytesPerParameter, bytes_per_parameter
from stillroom.precision.policy import LossScale, Precision, choose, resolve

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
