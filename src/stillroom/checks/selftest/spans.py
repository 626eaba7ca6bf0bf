"""Trials of the objectives between two tokenizers, on spans that are written down here.

Legend: B rows, L positions of a row, D width. A span is a group of tokens on each side that cover the same bytes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stillroom.checks.selftest.cases import draw, gradient, leaf, slope_error
from stillroom.checks.selftest.trial import Measured, Trial, away, worst
from stillroom.config.objectives import ObjectivesConfig
from stillroom.objectives import Mix
from stillroom.objectives.objective import Inside, Matched, plan_objectives
from stillroom.types import IGNORED, Batch, HeadWeights, Lesson, PairedSignal, StudentView

NAMES = ("alm", "exact_match", "prefix_match", "uld", "span_hidden")
_BOUND = 3e-5
_ROWS, _WIDTH = 3, 8
_STUDENT_SPANS, _TEACHER_SPANS = (0, 0, 1, 2, 2, 2, 3, -1), (0, 1, 2, 2, 3, -1)
_EXACT = (1, 3)  # one token on each side
_STUDENT_TOKENS, _TEACHER_TOKENS = 31, 37
_GROUPS = 9  # some of one token, most of several
_MATCHED = Matched(
    tuple(range(20)), tuple(range(5, 25)), _STUDENT_TOKENS - 20, _TEACHER_TOKENS - 20,
    student_groups=tuple(min(token, _GROUPS - 1) for token in range(_STUDENT_TOKENS)),
    teacher_groups=tuple(token % _GROUPS for token in range(_TEACHER_TOKENS)), num_groups=_GROUPS,
)  # fmt: skip
_TEMPERATURE = 100.0


def trials(group: str) -> list[Trial]:
    return [Trial(group, f"{name}, two tokenizers", functools.partial(_trial, name)) for name in NAMES]


def _batch() -> Batch:
    def side(spans: tuple[int, ...], num_tokens: int, seed: int) -> Batch:
        shape = (_ROWS, len(spans))
        targets = torch.randint(num_tokens, shape, generator=torch.Generator().manual_seed(seed))
        targets[:, -1] = IGNORED
        ids, rows = torch.zeros_like(targets), tuple(map(str, range(_ROWS)))
        places = torch.tensor(spans).expand(shape).contiguous()
        exact = torch.isin(places, torch.tensor(_EXACT))
        return Batch(ids, torch.ones_like(ids), targets, torch.zeros_like(ids), rows, spans=places, is_exact=exact)

    student, other = side(_STUDENT_SPANS, _STUDENT_TOKENS, 1), side(_TEACHER_SPANS, _TEACHER_TOKENS, 2)
    return Batch(
        student.input_ids, student.attention_mask, student.targets, student.target_bytes, student.sample_ids,
        other=other, spans=student.spans, is_exact=student.is_exact,
    )  # fmt: skip


def _trial(name: str) -> Measured:
    config = ObjectivesConfig.model_validate({"kd": {"weight": 0.0}, "ce": {"weight": 0.1}, name: {"weight": 0.5}})
    planned = plan_objectives(config, Inside(1, _WIDTH), Inside(1, _WIDTH + 2), seed=1, matched=_MATCHED)
    batch, mix = _batch(), Mix(config, planned=planned)
    lesson = Lesson("trial", {"kd": 0.0, "ce": 0.0, name: 0.5}, {"alm.temperature": _TEMPERATURE})

    def score(states: Tensor) -> Tensor:
        planned.projectors.to(states.dtype)
        weight = draw(3, _STUDENT_TOKENS, _WIDTH, spread=0.8).to(states.dtype)
        hidden = states.reshape(-1, _WIDTH)[batch.positions]
        view = StudentView(hidden, HeadWeights(weight), {"hidden.0": states}, batch.positions)
        return mix.score(view, _signal(batch, states.dtype), batch, lesson, mix.counts([batch])).loss

    states = draw(5, *batch.input_ids.shape, _WIDTH, spread=1.0)
    parts = [Measured(slope_error(score, states), 1e-6, "the gradient against finite differences")]
    if name != "span_hidden":
        ours, exact = leaf(states, torch.float32), leaf(states.float(), torch.float64)
        loss, expected = score(ours), 0.5 * _formula(name, batch, exact)
        parts += [
            Measured(away(loss, expected), _BOUND, "the loss"),
            Measured(away(gradient(loss, ours)[0], gradient(expected, exact)[0]), _BOUND, "the gradient"),
        ]
    return worst(*parts)


def _signal(batch: Batch, dtype: torch.dtype) -> PairedSignal:
    assert batch.other is not None
    width = _WIDTH + 2
    states = draw(6, *batch.other.input_ids.shape, width, spread=1.0).float().to(dtype)
    weight = draw(4, _TEACHER_TOKENS, width, spread=0.8).float().to(dtype)
    hidden = states.reshape(-1, width)[batch.other.positions]
    return PairedSignal(hidden, HeadWeights(weight), {"hidden.0": states})


def _formula(name: str, batch: Batch, states: Tensor) -> Tensor:
    """The mean of a term over its spans, one after the other, in float64."""
    assert batch.other is not None
    signal = _signal(batch, torch.float64)
    weight = draw(3, _STUDENT_TOKENS, _WIDTH, spread=0.8).float().double()
    ours = torch.log_softmax(states @ weight.T, -1)
    theirs = states.new_zeros(*batch.other.input_ids.shape, _TEACHER_TOKENS)
    theirs.view(-1, _TEACHER_TOKENS)[batch.other.positions] = torch.log_softmax(
        signal.hidden @ signal.head.weight.T, -1
    )
    values = []
    for row in range(_ROWS):
        for span in range(max(_STUDENT_SPANS) + 1):
            mine = [place for place, number in enumerate(_STUDENT_SPANS) if number == span]
            other = [place for place, number in enumerate(_TEACHER_SPANS) if number == span]
            if name == "exact_match" and span not in _EXACT:
                continue
            if name == "alm":
                q = torch.stack([ours[row, place, batch.targets[row, place]] for place in mine]).sum()
                p = torch.stack([theirs[row, place, batch.other.targets[row, place]] for place in other]).sum()
                values.append(_binarised(p, q))
            else:
                values.append(_FORMULAS[name](theirs[row, other[0]].exp(), ours[row, mine[0]].exp()))
    return torch.stack(values).mean()


def _binarised(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between "this span comes" and "another does", tempered; the shift keeps probabilities below 1."""
    p, q = (torch.exp((one - 1e-6) / _TEMPERATURE) for one in (log_p, log_q))
    return _TEMPERATURE * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())


def _exact_match(p: Tensor, q: Tensor) -> Tensor:
    mine, theirs = q[list(_MATCHED.student_ids)], p[list(_MATCHED.teacher_ids)]
    rest = (1 - theirs.sum()) * ((1 - theirs.sum()) / (1 - mine.sum())).log()
    return (theirs * (theirs / mine).log()).sum() + rest


def _prefix_match(p: Tensor, q: Tensor) -> Tensor:
    values = []
    for group in range(_GROUPS):
        mine = q[[token for token, number in enumerate(_MATCHED.student_groups) if number == group]].sum()
        theirs = p[[token for token, number in enumerate(_MATCHED.teacher_groups) if number == group]].sum()
        values.append(theirs * (theirs / mine).log())
    return torch.stack(values).sum()


def _sorted_distance(p: Tensor, q: Tensor) -> Tensor:
    size = max(len(p), len(q))
    p, q = (torch.cat([one.sort(descending=True).values, one.new_zeros(size - len(one))]) for one in (p, q))
    return (p - q).abs().sum()


_FORMULAS = {"exact_match": _exact_match, "prefix_match": _prefix_match, "uld": _sorted_distance}
