"""Laws of a tied embedding: one gradient for both uses of the weight, with the bits that torch gives it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from stillroom.core.types import Batch, DenseSignal, Needs
from stillroom.losses.divergences import make
from stillroom.losses.head import products
from stillroom.losses.head.loss import score_head
from stillroom.models.student import Student, tie

IDS = torch.tensor([[5, 9, 5, 0, 7, 9], [5, 0, 3, 3, 3, 60]])  # rows that are read often, once and as padding


def model_of(*, is_tied: bool = True, padding: int | None = None) -> Any:
    torch.manual_seed(0)
    config = tiny.config("llama")
    config.tie_word_embeddings = is_tied
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().padding_idx = padding
    return model


def gradients(model: Any, *, is_joined: bool, has_head: bool = True, batches: int = 1) -> dict[str, torch.Tensor]:
    tied = tie(model) if is_joined else None
    assert (tied is not None) == is_joined
    size = int(model.get_output_embeddings().weight.shape[0])
    student = Student(model, vocab_size=size, is_described=True, tied=tied)
    ones = torch.ones_like(IDS)
    for _ in range(batches):
        view = student.observe(Batch(IDS, ones, IDS.roll(-1, 1), ones, ("a", "b")), Needs())
        if has_head:
            torch.manual_seed(1)
            signal = DenseSignal(torch.randn(view.hidden.shape), view.head)
            targets = IDS.roll(-1, 1).flatten()[: len(view.hidden)]
            made = score_head(view, signal, targets, kd_weight=0.5, ce_weight=0.5, divergence=make("forward_kl", {}))
            made.loss.backward()
        else:
            view.hidden.sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("given", [{}, {"batches": 3}, {"has_head": False}])
@pytest.mark.parametrize("padding", [None, 0])
def test_a_joined_gradient_has_the_bits_of_torchs(given: dict[str, Any], padding: int | None) -> None:
    plain = gradients(model_of(padding=padding), is_joined=False, **given)
    joined = gradients(model_of(padding=padding), is_joined=True, **given)
    assert plain.keys() == joined.keys()
    for name, expected in plain.items():
        assert not joined[name].is_sparse and torch.equal(joined[name], expected), name


def test_the_head_s_gradient_is_the_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: list[int] = []
    lend = products.POOL.borrow

    def watched(*given: Any) -> torch.Tensor:
        lent = lend(*given)
        borrowed.append(lent.data_ptr())
        return lent

    monkeypatch.setattr(products.POOL, "borrow", watched)
    model = model_of()
    found = gradients(model, is_joined=True)["model.embed_tokens.weight"]
    assert found.data_ptr() in borrowed, "the embedding's gradient was added to it in place"


def test_a_forward_made_elsewhere_leaves_nothing_for_the_next_view() -> None:
    model = model_of()
    student = Student(model, vocab_size=tiny.VOCAB, is_described=True, tied=tie(model))
    model(input_ids=IDS)
    ones = torch.ones_like(IDS)
    with torch.no_grad():
        view = student.observe(Batch(IDS, ones, IDS, ones, ("a", "b")), Needs())
        states = model.get_input_embeddings()(IDS)
    assert view.head.weight is model.get_output_embeddings().weight
    assert torch.equal(states, functional.embedding(IDS, model.get_input_embeddings().weight))


def test_a_copy_of_the_model_reads_its_own_weight() -> None:
    model = model_of()
    assert tie(model) is not None
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert float(other.get_input_embeddings()(IDS).detach().abs().sum()) > 0


def test_what_is_not_one_trained_fp32_weight_stays_as_it_is() -> None:
    assert tie(model_of(is_tied=False)) is None
    assert tie(model_of().half()) is None
    assert tie(model_of().requires_grad_(False)) is None
