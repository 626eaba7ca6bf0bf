"""Laws of comparing a student with a few tokens of its teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stillroom.core.types import HeadWeights
from stillroom.metrics.metrics import AGAINST_TEACHER, TOP_K
from stillroom.teachers.signals import SignalSpec, reduce_row, signal_of
from stillroom.training.evaluate import stored_comparison, unmeasured_by

V, D, N = 60, 8, 50


@pytest.fixture(scope="module")
def models() -> tuple[torch.Tensor, HeadWeights, torch.Tensor, torch.Tensor]:
    """(teacher's hidden states, both heads, log q, log p)"""
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(N, D, generator=generator), HeadWeights(torch.randn(V, D, generator=generator))
    other = hidden + 0.4 * torch.randn(N, D, generator=generator)
    log_p, log_q = (torch.log_softmax(states @ head.weight.T, dim=-1) for states in (hidden, other))
    return hidden, head, log_q, log_p


def compared(models: tuple[torch.Tensor, HeadWeights, torch.Tensor, torch.Tensor], spec: SignalSpec, key: str) -> dict:
    hidden, head, log_q, _log_p = models
    signal = signal_of(reduce_row(hidden, head, torch.zeros(N, dtype=torch.long), spec, key), spec)
    ids = log_q.topk(TOP_K, dim=1).indices
    return stored_comparison(log_q, signal, ids, torch.ones(N, dtype=torch.bool), spec.exact)


def test_kl_from_draws_is_that_of_the_distributions_on_average(models) -> None:  # type: ignore[no-untyped-def]
    _hidden, _head, log_q, log_p = models
    whole = float((log_p.exp() * (log_p - log_q)).sum(dim=1).mean())
    for spec in (SignalSpec("hybrid", 4, 8), SignalSpec("sampled", 0, 20)):
        values = [float(compared(models, spec, f"{key}")["kl"].mean()) for key in range(80)]
        assert abs(np.mean(values) - whole) < 4 * np.std(values) / np.sqrt(80) + 0.003


def test_kl_from_top_k_is_a_lower_bound_that_closes(models) -> None:  # type: ignore[no-untyped-def]
    _hidden, _head, log_q, log_p = models
    whole = float((log_p.exp() * (log_p - log_q)).sum(dim=1).mean())
    found = [float(compared(models, SignalSpec("top_k", k, 0), "row")["kl"].mean()) for k in (2, 8, 30, V)]
    assert found == sorted(found) and found[0] < whole and found[-1] == pytest.approx(whole, abs=0.003)


def test_agreement_is_that_of_the_likeliest_tokens(models) -> None:  # type: ignore[no-untyped-def]
    _hidden, _head, log_q, log_p = models
    found = compared(models, SignalSpec("hybrid", 6, 4), "row")
    assert torch.equal(found["agree"].bool(), log_p.argmax(-1) == log_q.argmax(-1))
    mine, theirs = log_q.topk(TOP_K).indices, log_p.topk(TOP_K).indices
    shared = [len(set(a) & set(b)) / TOP_K for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)]
    assert found["shared"].tolist() == pytest.approx(shared)


def test_what_a_signal_cannot_tell_is_none_and_not_zero(models) -> None:  # type: ignore[no-untyped-def]
    hidden, head, _log_q, _log_p = models

    def of(spec: SignalSpec) -> frozenset[str]:
        return unmeasured_by(signal_of(reduce_row(hidden, head, torch.zeros(N).long(), spec, "row"), spec), spec.exact)

    assert of(SignalSpec("hybrid", 8, 4)) == {"acceptance"}
    assert of(SignalSpec("hybrid", 2, 4)) == {"acceptance", "top5_overlap"}
    assert of(SignalSpec("sampled", 0, 9)) == {"acceptance", "agreement", "top5_agreement", "top5_overlap"}
    assert of(SignalSpec("hybrid", 8, 4, 2.0)) == AGAINST_TEACHER
    assert unmeasured_by(None, 0) == frozenset()


def test_an_unusable_answer_is_not_compared(models) -> None:  # type: ignore[no-untyped-def]
    hidden, head, log_q, _log_p = models
    broken = hidden.clone()
    broken[7] = float("nan")
    found = compared((broken, head, log_q, log_q), SignalSpec("hybrid", 4, 4), "row")
    assert found["uncompared"].nonzero().flatten().tolist() == [7]
    assert all(float(found[name][7]) == 0.0 for name in ("kl", "agree", "compared"))
