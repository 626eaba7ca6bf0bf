"""Write a model as one ONNX file: tokens in, logits out, with free batch and length and no cache."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.core.errors import ConfigError
from stillroom.export.folder import Difference, Job, Row, difference, refuse_changed

FORMS = ("float32",)
CLOSE = 1e-3  # of logits, in another order of summation
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_NAME = "model.onnx"


class _Logits(nn.Module):
    """The network as a function of tokens alone."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=input_ids, use_cache=False).logits
        return logits


def write(job: Job) -> tuple[Difference, Difference]:
    """Write model.onnx and the tokenizer, run it with onnxruntime and compare."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ONNX files are written with packages that are not installed: {', '.join(missing)}",
            where="--format onnx",
            advice=["pip install 'stillroom[onnx]'"],
        )
    expected, cost = job.rounded(lambda _name, weight: weight)
    _make_plain(job.network)
    path = job.folder / _NAME
    example = torch.tensor([job.rows[0][:8], job.rows[0][:8]])
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2)
    with _explained(job.network.config.model_type), _quiet():
        torch.onnx.export(
            _Logits(job.network).eval(),
            (example,),
            str(path),
            dynamo=True,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": {0: batch, 1: length}},
            verbose=False,
        )
    job.tokenizer.save_pretrained(job.folder)
    change = difference(expected, _run(path, job.rows))
    refuse_changed("the ONNX file", change, CLOSE)
    return change, cost


def _make_plain(network: Any) -> None:
    """Attention and experts as products that the exporter can follow: no fused kernel, no loop over what was routed."""
    network.set_attn_implementation("eager")
    if getattr(network.config, "num_experts_per_tok", None):
        network.set_experts_implementation("batched_mm")


@contextlib.contextmanager
def _explained(kind: str) -> Iterator[None]:
    """Torch's exporter raises its own classes for what it cannot follow, and its messages are pages."""
    try:
        yield
    except torch.onnx.errors.OnnxExporterError as error:
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ConfigError(
            f"torch's exporter cannot write this {kind} as ONNX: {reason[:200]}",
            where="--format onnx",
            advice=["--format hf writes every family"],
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without its remarks about packages that are not asked for."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _run(path: Path, rows: list[Row]) -> list[Tensor]:
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(session.run(None, {"input_ids": np.array([row])})[0][0]) for row in rows]
