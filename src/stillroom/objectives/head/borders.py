"""What the public functions of this room accept. Whatever they cannot compute is refused here, before any row is read.

Shapes, dtypes, devices and plain numbers are known without looking at a tensor's values: they are checked on every
call, and both kernels then rely on them. What only the values can say is in `border_values.py`.

Legend: N positions, V vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.objectives.arguments import check_count, check_number, check_temperature, check_tensor
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.head.sparse import check_pair, kind_of
from stillroom.types import DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, TopKSignal


def check_head(prefix: str, hidden: Tensor, head: HeadWeights, num_rows: int | str, device: torch.device) -> None:
    """Hidden states [N, D] and a head of that width, or logits [N, V or more] and an empty weight."""
    check_tensor(f"{prefix}hidden", hidden, [num_rows, "D"], device=device)
    weight, width = f"{prefix}weight", hidden.shape[1]
    if head.is_identity:
        check_tensor(weight, head.weight, [*head.weight.shape], device=device)
        num_rows_of_weight, source = width, f"{prefix}hidden, which are logits"
        if head.vocab_size is None:
            raise ConfigError(
                f"{weight} is empty, so {prefix}hidden are logits, and how many of them are real is not said",
                where="vocab_size",
                advice=["give the real vocabulary as vocab_size", "give the head's weight [V, D]"],
            )
    else:
        advice = f"a weight of the width of {prefix}hidden, a row for each token"
        check_tensor(weight, head.weight, ["V", width], device=device, advice=advice)
        num_rows_of_weight, source = head.weight.shape[0], weight
        if head.bias is not None:
            advice = f"one entry for each row of {weight}, padding included"
            check_tensor(f"{prefix}bias", head.bias, [num_rows_of_weight], device=device, advice=advice)
    if head.vocab_size is not None and not (_is_whole(head.vocab_size) and 1 <= head.vocab_size <= num_rows_of_weight):
        raise ConfigError(
            f"vocab_size is {head.vocab_size}, and {source} has {num_rows_of_weight:,} tokens",
            where="vocab_size",
            advice=[f"from 1 to {num_rows_of_weight}, or None where no row is padding"],
        )
    check_number(f"{prefix}scale", head.scale, above=0.0)
    if head.softcap is not None:
        check_number(f"{prefix}softcap", head.softcap, above=0.0)
    if head.clamp is not None:
        check_number(f"{prefix}clamp", head.clamp, above=0.0)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_signal(signal: Signal, num_rows: int, num_tokens: int, device: torch.device) -> None:
    """A teacher's answer for as many positions, from the same vocabulary."""
    if isinstance(signal, DenseSignal):
        check_head("teacher.", signal.hidden, signal.head, num_rows, device)
        if signal.head.num_real != num_tokens:
            raise ConfigError(
                f"teacher has {signal.head.num_real:,} tokens, student {num_tokens:,}",
                where="teacher.weight, student_weight",
                advice=["if the difference is padding, give both the real vocabulary as vocab_size"],
            )
        return
    if not isinstance(signal, TopKSignal | SampledSignal):
        raise ConfigError(
            f"teacher is a {type(signal).__name__}",
            where="teacher",
            advice=[
                "DenseTeacher, TopKTeacher or SampledTeacher of stillroom.objectives",
                "None with a kd weight of 0",
            ],
        )
    check_tensor("teacher.ids", signal.ids, [num_rows, "K"], device=device, dtypes="integer")
    kept = [num_rows, signal.ids.shape[1]]
    if isinstance(signal, TopKSignal):
        check_tensor("teacher.log_probs", signal.log_probs, kept, device=device)
        check_tensor("teacher.tail_log_mass", signal.tail_log_mass, [num_rows], device=device)
    else:
        check_tensor("teacher.weights", signal.weights, kept, device=device)
        check_tensor("teacher.entropy", signal.entropy, [num_rows], device=device)
    most = num_tokens if isinstance(signal, TopKSignal) else math.inf  # samples may repeat
    if not 1 <= signal.ids.shape[1] <= most:
        raise ConfigError(
            f"teacher.ids has {signal.ids.shape[1]:,} ids a row, the vocabulary {num_tokens:,} tokens",
            where="teacher.ids",
            advice=["at least one id a row, and none twice"],
        )


def check_pass(
    view: StudentView,
    signal: Signal | None,
    targets: Tensor,
    divergence: Divergence | None,
    temperature: float,
    token_weights: Tensor | None,
    token_temperature: Tensor | None,
    top_k: int,
    chunk_tokens: int,
) -> None:
    """Everything a pass relies on. `signal` is None where no kd is asked for."""
    hidden, device = view.hidden, view.hidden.device
    check_head("student_", hidden, view.head, "N", device)
    num_rows = hidden.shape[0]
    check_tensor("labels", targets, [num_rows], device=device, dtypes="integer")
    if token_weights is not None:
        check_tensor("token_weights", token_weights, [num_rows], device=device, dtypes="real")
    check_count("chunk_tokens", chunk_tokens, advice="1 or more positions in a chunk; 0 chooses")
    check_count("top_k", top_k, advice="how many of a dense teacher's tokens are kept; 0: all")
    if signal is None:
        return
    if divergence is None or not hasattr(divergence, "evaluate"):
        raise ConfigError(f"{divergence!r} is no divergence", where="divergence",
                          advice=["a name, as 'forward_kl'", "what objectives.divergences.make returns"])  # fmt: skip
    check_temperature(temperature)
    check_signal(signal, num_rows, view.head.num_real, device)
    if token_temperature is not None:
        check_tensor("token_temperature", token_temperature, [num_rows], device=device)
    _check_pair(signal, divergence, temperature, token_temperature, top_k)


def _check_pair(
    signal: Signal, divergence: Divergence, temperature: float, token_temperature: Tensor | None, top_k: int
) -> None:
    """Refuse a divergence or a temperature that this kind of answer cannot serve."""
    if isinstance(signal, DenseSignal):
        if top_k and signal.hidden.requires_grad:
            raise ConfigError(
                "a teacher that is being trained needs its whole distribution",
                advice=["set objectives.kd.top_k = 0", "detach the teacher's hidden states"],
            )
        return
    assert isinstance(signal, TopKSignal | SampledSignal), "others are refused by check_signal"
    if token_temperature is not None:
        raise ConfigError(
            "stored teacher answers have one temperature, not one for each token",
            advice=["leave token_temperature out", "use the live teacher"],
        )
    check_pair(kind_of(signal), divergence.name, temperature, signal.temperature)


def check_labels(signal: Signal | None, top_k: int, rest_to_label: bool, label_margin: float | None) -> None:
    """Labels can complete what a sparse teacher says, or correct what a whole one says."""
    is_sparse = isinstance(signal, TopKSignal) or (isinstance(signal, DenseSignal) and top_k > 0)
    if rest_to_label and not is_sparse:
        raise ConfigError(
            "a teacher that says everything leaves nothing over for the label",
            advice=["set objectives.kd.top_k above 0", "set objectives.kd.on_wrong_teacher = 'mft'"],
        )
    if label_margin is None:
        return
    if is_sparse or not isinstance(signal, DenseSignal):
        raise ConfigError(
            "the label can lead only where the teacher's whole row is at hand",
            advice=["set objectives.kd.top_k = 0", "set objectives.kd.on_wrong_teacher = 'label_residual'"],
        )
    if signal.hidden.requires_grad:
        raise ConfigError(
            "a teacher that is being trained is corrected by its own truth term",
            advice=["set objectives.kd.on_wrong_teacher = 'keep'"],
        )
