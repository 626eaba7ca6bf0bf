"""What the public functions of this room accept. Whatever they cannot compute is refused here, before any row is read.

Shapes, dtypes, devices and plain numbers are known without looking at a tensor's values: they are checked on every
call, and both kernels then rely on them. What only the values can say is in `border_values.py`.

Legend: N positions, V vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.config.sections import LEAST_TEMPERATURE
from stillroom.core.errors import ConfigError
from stillroom.core.types import DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, TopKSignal
from stillroom.losses.arguments import check_count, check_number, check_temperature, check_tensor
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.rows import check_pair, kind_of, without_empty_tail


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
                "DenseTeacher, TopKTeacher or SampledTeacher of stillroom.losses",
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


# -- border values ---------------------------------------------------------------------------------
# Checks of tensor values: labels and ids inside the vocabulary, masses that sum to 1.
#
# They are computed on the tensors' device and read in one copy. The mix does not call them: its labels and its
# teacher's answers are checked where they are made, because a training step may read from the device only once.
#
# A stored row with NaN or infinite mass is accepted: a broken teacher writes such rows, and the pass counts them and
# scores them by their labels.
#
# Legend: N positions, V vocabulary, K kept ids.


_SLACK = 0.02  # how far the masses of a stored row may be from 1: BF16 log-probs of a flat row are off by as much


@dataclass(frozen=True)
class _Finding:
    """Rows that break a rule, and how to say it of one of them."""

    argument: str
    is_bad: Tensor  # [N], bool
    say: Callable[[int], str]
    advice: tuple[str, ...]


def check_values(
    labels: Tensor,
    signal: Signal | None,
    token_weights: Tensor | None,
    token_temperature: Tensor | None,
    num_tokens: int,
    positions: Tensor,
) -> None:
    """Refuse values that no pass can use. `positions` [N] are the places of the rows in the caller's tensors."""
    if labels.numel() == 0:
        return
    findings = [_label_finding(labels, num_tokens)]
    if token_weights is not None:
        findings.append(_number_finding("token_weights", token_weights, 0.0, "weights are finite and 0 or above"))
    if token_temperature is not None:
        advice = f"temperatures are finite and {LEAST_TEMPERATURE:g} or above"
        findings.append(_number_finding("token_temperature", token_temperature, LEAST_TEMPERATURE, advice))
    if isinstance(signal, TopKSignal):
        findings += _top_k_findings(signal, num_tokens)
    elif isinstance(signal, SampledSignal):
        findings += _sampled_findings(signal, num_tokens)
    broken = torch.stack([finding.is_bad.any() for finding in findings]).tolist()
    for finding, is_broken in zip(findings, broken, strict=True):
        if is_broken:
            (row, *_) = finding.is_bad.nonzero().squeeze(-1).tolist()
            (place,) = positions[row : row + 1].tolist()
            raise ConfigError(
                f"position {place:,}: {finding.say(row)}", where=finding.argument, advice=list(finding.advice)
            )


def _label_finding(labels: Tensor, num_tokens: int) -> _Finding:
    return _Finding(
        "labels",
        (labels < 0) | (labels >= num_tokens),
        lambda row: f"the label {labels[row].tolist():,} lies outside the vocabulary of {num_tokens:,} tokens",
        ("-100 where a position is not scored", "vocab_size or the head's weight is that of another tokenizer"),
    )


def _number_finding(name: str, values: Tensor, least: float, advice: str) -> _Finding:
    is_bad = ~(values >= least)
    if values.dtype.is_floating_point:
        is_bad = is_bad | ~values.isfinite()
    return _Finding(name, is_bad, lambda row: f"{name} holds {values[row].tolist():g}", (advice,))


def _id_finding(ids: Tensor, num_tokens: int) -> _Finding:
    is_outside = (ids < 0) | (ids >= num_tokens)
    return _Finding(
        "teacher.ids",
        is_outside.any(-1),
        lambda row: f"the id {ids[row][is_outside[row]].tolist()[0]:,} lies outside the vocabulary of {num_tokens:,}",
        ("ids of the student's own vocabulary",),
    )


def _top_k_findings(signal: TopKSignal, num_tokens: int) -> Iterator[_Finding]:
    signal = without_empty_tail(signal, num_tokens)
    ordered = signal.ids.sort(-1).values
    mass = signal.log_probs.double().exp().sum(-1) + signal.tail_log_mass.double().exp()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.ids",
        (ordered[:, 1:] == ordered[:, :-1]).any(-1),
        lambda row: "an id stands in the row twice",
        ("distinct ids, as torch.topk gives them",),
    )
    yield _Finding(
        "teacher.log_probs, teacher.tail_log_mass",
        mass.isfinite() & (mass > 0) & ((mass - 1).abs() > _SLACK),
        lambda row: f"kept tokens and tail have a mass of {mass[row].tolist():.4g} instead of 1",
        (
            "natural logarithms of probabilities at the temperature of the call, not probabilities and not logits",
            "tail_log_mass: the log of the mass that the kept tokens leave over (core.numerics.tail_log_mass)",
        ),
    )


def _sampled_findings(signal: SampledSignal, num_tokens: int) -> Iterator[_Finding]:
    weights, entropy = signal.weights.double(), signal.entropy.double()
    mass = weights.sum(-1)
    is_usable = (mass + entropy).isfinite()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.weights",
        is_usable & ((weights < 0).any(-1) | ((mass - 1).abs() > _SLACK)),
        lambda row: f"weights from {weights[row].min().tolist():.4g} up, with a sum of {mass[row].tolist():.4g}",
        ("weights of 0 or above that sum to 1 in each row",),
    )
    most = math.log(num_tokens)
    yield _Finding(
        "teacher.entropy",
        is_usable & ((entropy < -_SLACK) | (entropy > most + _SLACK)),
        lambda row: (
            f"an entropy of {entropy[row].tolist():.4g} nats, where {num_tokens:,} tokens allow 0 to {most:.4g}"
        ),
        ("the entropy of the teacher's whole distribution at the temperature of the call, in nats",),
    )
