"""Laws of the token view: what a run records of both models on held-out text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.core.types import DenseSignal, HeadWeights, PairedSignal, SampledSignal, StudentView, TopKSignal
from stillroom.training.distill import distill
from stillroom.training.token_view import MAX_ROWS, MAX_TOKENS, compare, pieces, why_not
from stillroom.training.write_cache import make_cache

V, D, N = 40, 8, 12


@pytest.fixture(scope="module")
def both() -> tuple[StudentView, DenseSignal, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    head = HeadWeights(torch.randn(V, D, generator=generator))
    hidden = torch.randn(N, D, generator=generator)
    other = hidden + 0.5 * torch.randn(N, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    return StudentView(hidden=other, head=head), DenseSignal(hidden=hidden, head=head), targets


def probabilities(both: tuple[StudentView, DenseSignal, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    view, signal, _ = both
    p, q = (torch.softmax(part.hidden @ part.head.weight.T, dim=-1) for part in (signal, view))
    return p, q


def test_the_distance_is_the_total_variation_and_the_lists_are_the_likeliest(both) -> None:  # type: ignore[no-untyped-def]
    view, signal, targets = both
    p, q = probabilities(both)
    answers = compare(view, signal, targets, N)
    assert [a["distance"] for a in answers] == pytest.approx((0.5 * (p - q).abs().sum(1)).tolist(), abs=1e-4)
    assert [a["teacher_probability"] for a in answers] == pytest.approx(
        p.gather(1, targets[:, None]).squeeze(1).tolist(), abs=1e-4
    )
    for answer, p_row, q_row in zip(answers, p, q, strict=True):
        assert [id_ for id_, _ in answer["teacher"]] == p_row.topk(5).indices.tolist()
        assert [id_ for id_, _ in answer["student"]] == q_row.topk(5).indices.tolist()


@pytest.mark.parametrize("kind", ["top-k", "hybrid"])
def test_stored_answers_give_a_lower_bound_of_the_distance(both, kind: str) -> None:  # type: ignore[no-untyped-def]
    view, _, targets = both
    p, q = probabilities(both)
    best, ids = p.topk(8)
    if kind == "top-k":
        signal = TopKSignal(ids=ids, log_probs=best.log(), tail_log_mass=(1 - best.sum(1)).log())
    else:
        drawn = torch.cat([ids, ids[:, :2]], dim=1)
        signal = SampledSignal(ids=drawn, weights=torch.cat([best, best[:, :2]], dim=1), entropy=torch.zeros(N))
    answers = compare(view, signal, targets, N, num_exact=8)
    whole = 0.5 * (p - q).abs().sum(1)
    found = torch.tensor([answer["distance"] for answer in answers])
    assert (found <= whole + 1e-3).all() and (found > 0.3 * whole).all()
    assert [[id_ for id_, _ in answer["teacher"]] for answer in answers] == ids[:, :5].tolist()


def test_what_is_not_finite_is_left_out_and_not_zero(both) -> None:  # type: ignore[no-untyped-def]
    view, signal, targets = both
    hidden = view.hidden.clone()
    hidden[3] = torch.nan
    answers = compare(StudentView(hidden=hidden, head=view.head), signal, targets, N)
    assert [place for place, answer in enumerate(answers) if answer is None] == [3]


def test_pieces_joined_are_the_text() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("the still r\u00f6\u00f6m keeps \U0001f41d spirits", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == "the still r\u00f6\u00f6m keeps \U0001f41d spirits"
    assert len(pieces(tokenizer, ids)) == len(ids)


def test_a_run_records_its_tokens_and_stays_within_bounds(world: Path, tmp_path: Path) -> None:
    over = {"objectives__kd__weight": 0.6, "objectives__ce__weight": 0.4}
    folder = distill(load_config(overrides=tiny.settings(world, **over)), tmp_path / "run", device="cpu").folder
    path = folder / "tokens.json"
    found = json.loads(path.read_text())
    assert 0 < len(found["rows"]) <= MAX_ROWS and path.stat().st_size < 300_000
    assert found["compared"] == "the whole vocabulary"
    for row in found["rows"]:
        assert len(row["tokens"]) <= MAX_TOKENS and row["uncompared"] == 0
        compared = [token for token in row["tokens"] if "distance" in token]
        assert compared and all(0 <= token["distance"] <= 1 for token in compared)
        for token in compared:
            assert {str(id_) for id_, _ in token["teacher"] + token["student"]} <= set(found["texts"])


def test_a_stored_teacher_is_shown_by_what_it_stored(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world, objectives__kd__weight=1.0))
    make_cache(config, tmp_path / "cache", device="cpu")
    stored = config.model_copy(update={"teacher": config.teacher.model_copy(update={"cache": str(tmp_path / "cache")})})
    folder = distill(stored, tmp_path / "run", device="cpu").folder
    found = json.loads((folder / "tokens.json").read_text())
    assert "stored tokens" in found["compared"]
    assert all("distance" in row["tokens"][-1] for row in found["rows"]) and found["rows"]


def test_a_run_on_labels_alone_records_none(world: Path, tmp_path: Path) -> None:
    over = {"objectives__kd__weight": 0.0, "objectives__ce__weight": 1.0}
    folder = distill(load_config(overrides=tiny.settings(world, **over)), tmp_path / "run", device="cpu").folder
    assert not (folder / "tokens.json").exists()


def test_what_cannot_be_compared_is_said() -> None:
    ids, weights = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
    drawn = SampledSignal(ids=ids, weights=weights, entropy=torch.ones(2))
    warm = TopKSignal(ids=ids, log_probs=weights, tail_log_mass=torch.ones(2), temperature=2.0)
    assert "sampled tokens" in why_not(drawn, 0)
    assert "temperature 2" in why_not(warm, 3)
    assert why_not(drawn, 3) == ""
    paired = PairedSignal(hidden=weights, head=HeadWeights(weights))
    assert "another tokenizer" in why_not(paired, 0)
