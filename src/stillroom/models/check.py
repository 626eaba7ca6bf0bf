"""Read a folder of written weights again and compare it with the network it was written from.

`save_pretrained` is not trusted: some families lose or rename a weight or a setting on the way, and a folder that
loads without a word then answers differently. Answers on a few rows decide. Where the copy does not fit in memory, the
tensors of the files are compared with the network's by name, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stillroom.config.schema import ModelSection, TeacherConfig
from stillroom.core.errors import StillroomError
from stillroom.core.machine import main_memory
from stillroom.models.anatomy import in_eval_mode
from stillroom.models.load import explained, load_teacher

# Of the logits' standard deviation: what two orders of summation in FP32 differ by stays far below.
BOUND = 1e-3
_FREE_SHARE = 0.5  # of the free memory that the copy may take
_BYTES = 4  # of a weight of the copy


@dataclass(frozen=True)
class ReadBack:
    """What was compared, and how far it differs at most. None where nothing could be."""

    compared: str  # "logits" or "tensors"
    difference: float | None
    spread: float | None  # standard deviation of the logits
    is_equal: bool
    reason: str = ""  # why it is not

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_back(network: Any, folder: Path, ids: Tensor, *, code: ModelSection | None = None) -> ReadBack:
    """Compare a folder with the network that it was written from, on the tokens `ids` [B, L].

    The network is left as it was. A folder that cannot be loaded differs. `code` is the section of the model that the
    network was made from: it says whether code that comes with the model may be run.
    """
    if code is not None and code.trust_remote_code:
        return compare_tensors(network, folder)  # code is run from a commit of the hub, never from a folder
    if _copy_bytes(network) > _FREE_SHARE * main_memory().available:
        return compare_tensors(network, folder)
    try:
        with in_eval_mode(network), torch.random.fork_rng(devices=[]), torch.no_grad():
            with in_main_memory(network):
                own = logits_of(network, ids)
            copy, _notes = load_teacher(TeacherConfig(model=str(folder)), torch.float32)
            with explained(str(folder), "network"):
                written = logits_of(copy, ids)
    except StillroomError as error:
        return ReadBack("logits", None, None, is_equal=False, reason=str(error.what))
    return compare_logits(own, written)


def compare_logits(own: Tensor, written: Tensor) -> ReadBack:
    """Two answers to the same tokens. A value that is not finite is a difference."""
    difference, spread = float((own - written).abs().max()), float(own.std())
    if difference <= BOUND * max(spread, 1e-6):
        return ReadBack("logits", difference, spread, is_equal=True)
    reason = f"logits differ by {difference:.2g} at a spread of {spread:.2g}"
    return ReadBack("logits", difference, spread, is_equal=False, reason=reason)


def compare_tensors(network: Any, folder: Path) -> ReadBack:
    """The tensors of the files against the network's of the same names; names of one side only are not judged.

    A tied weight is written once, and some families are written under other names.
    """
    own = network.state_dict()
    largest, where, num_compared = 0.0, "", 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(set(file.keys()) & set(own)):
                here, there = own[name].detach().cpu(), file.get_tensor(name)
                num_compared += 1
                apart = float((here.float() - there.float()).abs().max()) if here.shape == there.shape else float("inf")
                if not apart <= largest:
                    largest, where = apart, name
    if not num_compared:
        reason = "no tensor of its files has the name of one of the model's"
        return ReadBack("tensors", None, None, is_equal=False, reason=reason)
    reason = "" if largest == 0.0 else f"{where} differs by {largest:.2g}"
    return ReadBack("tensors", largest, None, is_equal=largest == 0.0, reason=reason)


def logits_of(network: Any, ids: Tensor) -> Tensor:
    answer: Tensor = network(input_ids=ids, use_cache=False).logits.float()
    return answer


@contextmanager
def in_main_memory(network: Any) -> Iterator[None]:
    """Keep every weight and buffer in main memory within the body, numbers in FP32; restore them after it."""
    tensors = [*network.parameters(), *network.buffers()]
    kept = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            is_half = tensor.dtype in (torch.float16, torch.bfloat16)
            tensor.data = tensor.data.to("cpu", torch.float32 if is_half else tensor.dtype)
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data


def _copy_bytes(network: Any) -> int:
    """What the copy takes, and the network itself where it has to come to main memory in FP32."""
    weights = list(network.parameters())
    moved: int = sum(w.numel() for w in weights if w.device.type != "cpu" or w.element_size() < _BYTES)
    whole: int = sum(weight.numel() for weight in weights)
    return _BYTES * (whole + moved)
