"""Trials of every objective as the mix scores it: the head's two, those that look inside the models, and the gates'.

Legend: B rows, L positions, N scored positions, V vocabulary, D width, H heads, E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillroom.checks import textbook
from stillroom.checks.selftest import spans
from stillroom.checks.selftest.cases import draw, gradient, leaf, slope_error
from stillroom.checks.selftest.trial import Measured, NotHere, Trial, away, worst
from stillroom.config.extensions import OBJECTIVES
from stillroom.config.objectives import ObjectivesConfig
from stillroom.objectives import Mix, divergences, gate_terms
from stillroom.objectives.objective import Inside, plan_objectives
from stillroom.types import IGNORED, Batch, DenseSignal, HeadWeights, Lesson, StudentView

GROUP = "objectives"
_BOUND = 3e-5
_ROWS, _LENGTH, _TOKENS = 4, 10, 61
_WIDTH, _HEADS = 12, 2
_WEIGHTS = {"kd": 0.7, "ce": 0.3}
_INNER: dict[str, dict[str, Any]] = {
    "feature": {},
    "feature, cosine": {"kind": "cosine"},
    "feature, projected": {"projector": "always"},
    "layerwise": {"layers": [[0, 1], [1, 3]]},
    "attention": {"attention_layers": 1, "layers": [[1, 3]]},
    "contrastive": {},
}
_KD: dict[str, dict[str, Any]] = {
    "kd and ce": {},
    "kd, temperature 3": {"temperature": 3.0},
    "kd, weights by entropy": {"token_weight": "entropy"},
    "kd, half of the tokens": {"token_fraction": 0.5},
    "kd, temperatures by difficulty": {"token_temperature": 0.5, "temperature": 2.0},
    "kd, rest to the label": {"top_k": 8, "on_wrong_teacher": "label_residual"},
    "kd, label mixed in": {"on_wrong_teacher": "mft"},
}


def trials() -> list[Trial]:
    made = [Trial(GROUP, name, functools.partial(_kd, settings)) for name, settings in _KD.items()]
    made += [Trial(GROUP, name, functools.partial(_inner, name, settings)) for name, settings in _INNER.items()]
    made += [Trial(GROUP, "gates, load balance", _load_balance), Trial(GROUP, "gates, entropy", _gate_entropy)]
    made += spans.trials(GROUP)
    ours = {name.partition(",")[0] for name in _INNER} | {"kd", "ce", *spans.NAMES}
    others = sorted(set(OBJECTIVES.names()) - ours)
    return made + [Trial(GROUP, name, functools.partial(_unknown, name)) for name in others]


def _unknown(name: str) -> Measured:
    raise NotHere(f"{name} comes from another package, and no formula is known for it")


@dataclass(frozen=True)
class Problem:
    """A batch, and what two models answer to it. All in one dtype."""

    batch: Batch
    hidden: Tensor  # [N, D]
    head: HeadWeights
    teacher: DenseSignal
    taps: Mapping[str, Tensor]  # hidden.0, hidden.1 [B, L, D], attention.1 [B, H, L, L]

    @property
    def sequences(self) -> Tensor:
        return self.batch.positions // _LENGTH

    def view(self, hidden: Tensor | None = None, taps: Mapping[str, Tensor] | None = None) -> StudentView:
        given = self.hidden if hidden is None else hidden
        return StudentView(given, self.head, taps or self.taps, self.batch.positions, self.sequences, _ROWS)


def problem(dtype: torch.dtype) -> Problem:
    targets = torch.randint(_TOKENS, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(5))
    for row in range(_ROWS):
        targets[row, _LENGTH - row :] = IGNORED  # rows of different lengths
    ids = torch.zeros_like(targets)
    batch = Batch(ids, torch.ones_like(ids), targets, torch.zeros_like(ids), tuple(map(str, range(_ROWS))))

    def states(seed: int) -> Tensor:
        return draw(seed, _ROWS, _LENGTH, _WIDTH, spread=1.0).float().to(dtype)

    def maps(seed: int) -> Tensor:
        return torch.softmax(draw(seed, _ROWS, _HEADS, _LENGTH, _LENGTH, spread=2.0), -1).float().to(dtype)

    last, other = states(1), states(2)
    heads = [HeadWeights(draw(seed, _TOKENS, _WIDTH, spread=0.8).float().to(dtype)) for seed in (3, 4)]
    at = batch.positions
    taps = {"hidden.0": states(6), "hidden.1": last, "attention.1": maps(7)}
    teacher_taps = {"hidden.1": states(8), "hidden.3": other, "attention.3": maps(9)}
    signal = DenseSignal(other.reshape(-1, _WIDTH)[at], heads[1], teacher_taps)
    return Problem(batch, last.reshape(-1, _WIDTH)[at], heads[0], signal, taps)


def _score(config: ObjectivesConfig, given: Problem, view: StudentView, weights: Mapping[str, float]) -> Tensor:
    size = Inside(2, _WIDTH), Inside(4, _WIDTH)
    planned = plan_objectives(config, *size, seed=1)
    planned.projectors.to(given.hidden.dtype)
    mix = Mix(config, planned=planned)
    return mix.score(view, given.teacher, given.batch, Lesson("trial", weights), mix.counts([given.batch])).loss


# -- the head's objectives -------------------------------------------------------------------------------


def _kd(settings: dict[str, Any]) -> Measured:
    config = ObjectivesConfig.model_validate({"kd": {"weight": 0.7, **settings}, "ce": {"weight": 0.3}})
    given, exact = problem(torch.float32), problem(torch.float64)
    ours, point = leaf(given.hidden), leaf(exact.hidden)
    loss = _score(config, given, given.view(ours), _WEIGHTS)
    expected = _kd_formula(config, exact, point)
    parts = [
        Measured(away(loss, expected), _BOUND, "the loss"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, point)[0]), _BOUND, "the gradient"),
    ]
    if not config.kd.needs_both_logits:  # else weights are held fixed, which finite differences cannot
        error = slope_error(lambda hidden: _score(config, exact, exact.view(hidden), _WEIGHTS), exact.hidden)
        parts.append(Measured(error, 1e-6, "the gradient against finite differences"))
    return worst(*parts)


def _kd_formula(config: ObjectivesConfig, exact: Problem, hidden: Tensor) -> Tensor:
    kd = config.kd
    student = textbook.logits_of(hidden, exact.head)
    teacher = textbook.logits_of(exact.teacher.hidden, exact.teacher.head)
    targets, count = exact.batch.scored_targets, exact.batch.num_scored
    ce = -torch.log_softmax(student, -1).gather(-1, targets[:, None]).squeeze(-1)
    base = float(kd.temperature)  # type: ignore[arg-type]
    temperatures = torch.full((count,), base, dtype=torch.float64)
    weights = torch.ones_like(temperatures)
    q, p = torch.softmax(student, -1).detach(), torch.softmax(teacher, -1)
    entropy = -(q * q.log()).sum(-1)
    hellinger = (0.5 * (p.sqrt() - q.sqrt()).pow(2).sum(-1)).sqrt()
    for row in range(_ROWS):
        here = (exact.sequences == row).nonzero().squeeze(-1)
        if kd.token_weight == "entropy":
            weights[here] = entropy[here] / entropy[here].mean()
        if kd.token_fraction != 1.0:
            kept = math.ceil(len(here) * float(kd.token_fraction))  # type: ignore[arg-type]
            chosen = here[hellinger[here].argsort(descending=True)[:kept]]
            weights[here] = 0.0
            weights[chosen] = len(here) / kept
        if kd.token_temperature:
            ratio = hellinger[here] / hellinger[here].sort().values[(len(here) - 1) // 2]
            strength = float(kd.token_temperature)  # type: ignore[arg-type]
            temperatures[here] = base * torch.exp(-strength * torch.tanh(ratio.log()))
    t = temperatures[:, None]
    distance = _corrected(config, torch.softmax(teacher / t, -1), torch.softmax(student / t, -1), targets)
    return (0.7 * weights * temperatures**2 * distance + 0.3 * ce).sum() / count


def _corrected(config: ObjectivesConfig, p: Tensor, q: Tensor, targets: Tensor) -> Tensor:
    """Forward KL to what the label makes of the teacher's distribution."""
    kd, rows = config.kd, torch.arange(len(targets))
    if kd.on_wrong_teacher == "label_residual":
        return torch.stack([_with_rest(*row, int(kd.top_k)) for row in zip(p, q, targets, strict=True)])  # type: ignore[arg-type]
    if kd.on_wrong_teacher == "mft":
        label, most = p[rows, targets], p.max(-1).values
        # (1 - a) p + a e_label leads by the margin: a (1 - label + most) = margin + most - label.
        share = torch.where(p.argmax(-1) == targets, 0.0, (kd.label_margin + most - label) / (1 + most - label))
        mixed = (1 - share)[:, None] * p
        mixed[rows, targets] += share
        return textbook.kl(mixed, q)
    return textbook.between(divergences.make("forward_kl"), p, q)


def _with_rest(p: Tensor, q: Tensor, target: Tensor, top_k: int) -> Tensor:
    """KL of one row: k tokens of the teacher, the label among them, which is given all the rest."""
    ids = p.topk(top_k).indices.tolist()
    if int(target) not in ids:
        ids[-1] = int(target)
    kept = [index for index in ids if index != int(target)]
    masses = {index: p[index] for index in kept} | {int(target): 1 - p[kept].sum()}
    return torch.stack([mass * (mass.log() - q[index].log()) for index, mass in masses.items()]).sum()


# -- inside the models -----------------------------------------------------------------------------------


def _inner(name: str, settings: dict[str, Any]) -> Measured:
    objective = name.partition(",")[0]
    table = {"kd": {"weight": 0.0}, "ce": {"weight": 0.3}, objective: {"weight": 0.5, **settings}}
    config = ObjectivesConfig.model_validate(table)
    given, exact = problem(torch.float32), problem(torch.float64)
    weights = {"kd": 0.0, "ce": 0.0, objective: 0.5}
    tap = "attention.1" if objective == "attention" else "hidden.1"
    ours, point = leaf(given.taps[tap]), leaf(exact.taps[tap])
    loss = _score(config, given, given.view(taps={**given.taps, tap: ours}), weights)
    expected = 0.5 * _inner_formula(config, exact, {**exact.taps, tap: point}, objective)

    def again(value: Tensor) -> Tensor:
        return _score(config, exact, exact.view(taps={**exact.taps, tap: value}), weights)

    return worst(
        Measured(away(loss, expected), _BOUND, "the loss"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, point)[0]), _BOUND, "the gradient"),
        Measured(slope_error(again, exact.taps[tap]), 1e-6, "the gradient against finite differences"),
    )


def _inner_formula(config: ObjectivesConfig, exact: Problem, taps: Mapping[str, Tensor], objective: str) -> Tensor:
    at, teacher = exact.batch.positions, exact.teacher.taps
    if objective == "attention":
        both = taps["attention.1"], teacher["attention.3"]
        maps = [one.transpose(1, 2).reshape(-1, _HEADS, _LENGTH)[at] for one in both]
        return textbook.attention(*maps).mean()
    if objective == "contrastive":
        return _contrast(exact, taps["hidden.1"], teacher["hidden.3"], config.contrastive.temperature)
    section = config.feature if objective == "feature" else config.layerwise
    measure = textbook.cosine if section.kind == "cosine" else textbook.squared_error
    pairs = [(0, 1), (1, 3)] if objective == "layerwise" else [(1, 3)]
    planned = plan_objectives(config, Inside(2, _WIDTH), Inside(4, _WIDTH), seed=1)
    matrices = {name: one.double() for name, one in planned.projectors.state_dict().items()}
    values = []
    for mine, theirs in pairs:
        states = taps[f"hidden.{mine}"].reshape(-1, _WIDTH)[at]
        for matrix in matrices.values():
            states = states @ matrix.T
        values.append(measure(states, teacher[f"hidden.{theirs}"].reshape(-1, _WIDTH)[at]))
    return torch.stack(values).mean()


def _contrast(exact: Problem, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    def pooled(states: Tensor) -> Tensor:
        flat = states.reshape(-1, _WIDTH)
        return torch.stack([flat[exact.batch.positions[exact.sequences == row]].mean(0) for row in range(_ROWS)])

    return textbook.contrast(pooled(student), pooled(teacher), temperature).mean()


# -- gates -----------------------------------------------------------------------------------------------


def _gates() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of gates [T, E] in FP32, the chosen experts [T, 2], and which tokens count."""
    logits = draw(0, 40, 8, spread=2.0, dtype=torch.float32)
    return logits, logits.topk(2).indices, torch.arange(40) % 5 != 0


def _load_balance() -> Measured:
    logits, chosen, is_token = _gates()
    ours, exact = leaf(logits), leaf(logits, torch.float64)
    loss = gate_terms.load_balance(gate_terms.gate_log_probs(ours), chosen, is_token).mean
    shares = torch.bincount(chosen[is_token].reshape(-1), minlength=8).double() / (2 * int(is_token.sum()))
    expected = 8 * (torch.softmax(exact, -1)[is_token].mean(0) * shares).sum()
    return _both(loss, expected, ours, exact)


def _gate_entropy() -> Measured:
    logits, _chosen, is_token = _gates()
    ours, exact = leaf(logits), leaf(logits, torch.float64)
    loss = gate_terms.entropy(gate_terms.gate_log_probs(ours), is_token).mean
    probs = torch.softmax(exact, -1)
    expected = -(probs * probs.log()).sum(-1)[is_token].mean()
    return _both(loss, expected, ours, exact)


def _both(loss: Tensor, expected: Tensor, ours: Tensor, exact: Tensor) -> Measured:
    return worst(
        Measured(away(loss, expected), _BOUND, "the value"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, exact)[0]), _BOUND, "the gradient"),
    )
