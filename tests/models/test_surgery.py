"""New rows of embeddings and head: copied, averaged, and tied as before."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.core.errors import BrokenAtStart
from stillroom.models.anatomy import new_rows, replace_vocabulary, take_marks

PIECES = [(7,), (3, 5, 9), (), (3,), (2, 2)]
USED = range(4, 10)


def model(family: str, *, tied: bool, **size: Any) -> Any:
    torch.manual_seed(0)
    config = tiny.config(family, **{"vocab_size": 40, **size})
    config.tie_word_embeddings = tied
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("phi", False)])
def test_rows_are_copied_and_averaged_in_embeddings_head_and_bias(family: str, tied: bool) -> None:
    network = model(family, tied=tied)
    old = [part.clone() for part in (network.get_input_embeddings().weight, network.get_output_embeddings().weight)]
    bias = getattr(network.get_output_embeddings(), "bias", None)
    tables = [*old, *([] if bias is None else [bias.detach().clone().unsqueeze(1)])]
    replace_vocabulary(network, PIECES, USED)
    inputs, head = network.get_input_embeddings(), network.get_output_embeddings()
    found = [inputs.weight, head.weight, *([] if bias is None else [head.bias.unsqueeze(1)])]
    for new, before in zip(found, tables, strict=True):
        assert new.shape[0] == len(PIECES)
        assert torch.equal(new[0], before[7]) and torch.equal(new[3], before[3])
        assert torch.allclose(new[1], before[[3, 5, 9]].mean(0), atol=1e-6)
        assert torch.allclose(new[2], before[4:10].mean(0), atol=1e-6), "padding rows are no part of the mean"
        assert torch.allclose(new[4], before[2], atol=1e-6)
    assert (head.weight is inputs.weight) is tied
    assert network.config.get_text_config().vocab_size == len(PIECES)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_the_changed_model_answers_and_every_row_learns() -> None:
    network = model("llama", tied=True)  # padding is id 1: an ordinary token after the change
    assert network.get_input_embeddings().padding_idx == 1
    replace_vocabulary(network, PIECES, USED)
    ids = torch.arange(len(PIECES)).unsqueeze(0)
    (network.get_input_embeddings()(ids) * 1.0).sum().backward()
    assert (network.get_input_embeddings().weight.grad.abs().sum(1) > 0).all()
    assert network(ids).logits.shape == (1, len(PIECES), len(PIECES))


def test_a_vocabulary_may_grow() -> None:
    network = model("llama", tied=False, vocab_size=8)
    replace_vocabulary(network, [(number % 8,) for number in range(20)], range(8))
    assert torch.equal(network.get_output_embeddings().weight[:8], network.get_output_embeddings().weight[8:16])


def test_means_are_summed_in_fp32_and_kept_in_the_table_s_dtype() -> None:
    table = torch.full((2, 3), 60_000.0, dtype=torch.float16)
    rows = new_rows(table, [(0, 1)], [0, 1])
    assert rows.dtype == torch.float16 and torch.equal(rows, table[:1]), "a sum in half precision is infinite"


def test_marks_are_those_of_the_tokenizer() -> None:
    network, words = model("llama", tied=True), tiny.tokenizer()
    network.config.bos_token_id = 5
    take_marks(network, words)
    for config in (network.config, network.generation_config):
        assert config.eos_token_id == words.eos_token_id and config.pad_token_id == words.pad_token_id
        assert config.bos_token_id is None, "the tokenizer has none"


def test_a_network_that_does_not_take_the_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model("llama", tied=True)
    monkeypatch.setattr(network, "resize_token_embeddings", lambda *_args, **_options: None)
    with refused(BrokenAtStart, "student.vocabulary", "LlamaForCausalLM"):
        replace_vocabulary(network, PIECES, USED)
