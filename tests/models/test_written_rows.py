"""Laws of written rows: the model's own distribution, its own log-probs, and rows that know nothing of each other."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.core.errors import ConfigError
from stillroom.models.generate import Sampling
from stillroom.models.student import attend_causally
from stillroom.models.writer import Written, choose_tokens, most_probable, row_seed, write_rows

NEW = 12


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 300, (length,), generator=generator).tolist() for length in lengths]


def written(model: Any, asked: list[list[int]], seeds: list[int] | None = None, **options: Any) -> list[Written]:
    options = {"ends": {5}, "num_tokens": tiny.VOCAB, "max_new_tokens": NEW, **options}
    return write_rows(
        model, asked, [row_seed(0, row) for row in range(len(asked))] if seeds is None else seeds, **options
    )


@pytest.fixture(scope="module")
def model() -> Any:
    model = families.build("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform
    attend_causally(model)
    return model


# -- choosing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7), Sampling(1.3, top_p=0.8)])
def test_tokens_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square of 20,000 draws over a vocabulary of 8, temperature and nucleus written out here in float64."""
    scores = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    probs, ids = torch.softmax(scores[0].double() / sampling.temperature, -1).sort(descending=True)
    kept = probs.cumsum(0) - probs < sampling.top_p
    expected = 20_000 * probs[kept] / probs[kept].sum()
    chances = torch.rand(20_000, generator=torch.Generator().manual_seed(1))
    drawn = choose_tokens(torch.log_softmax(scores, -1).expand(20_000, 8), sampling, chances)
    seen = torch.bincount(drawn, minlength=8)[ids].double()
    assert seen[~kept].sum() == 0
    assert ((seen[kept] - expected) ** 2 / expected).sum() < 26.1  # 99.95 % of chi-square with 8 degrees


@pytest.mark.parametrize("spread", [0.1, 3.0, 9.0])
@pytest.mark.parametrize("share", [0.2, 0.95, 0.9999])
@pytest.mark.parametrize("has_ties", [False, True])
def test_top_p_keeps_the_fewest_most_probable_tokens_and_the_first_of_equals(
    spread: float, share: float, has_ties: bool
) -> None:
    """Peaked rows need few tokens and flat ones nearly all; both equal a stable sort of the whole vocabulary."""
    scores = torch.randn(6, 2_000, generator=torch.Generator().manual_seed(2)) * spread
    probs = torch.softmax(torch.cat([scores, scores[:2] * 20]).round(decimals=0 if has_ties else 6), -1)
    ordered, places = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.where(ordered.cumsum(-1) - ordered < share, ordered, 0.0)
    assert torch.equal(most_probable(probs, share), torch.zeros_like(probs).scatter_(1, places, kept))


def test_a_token_without_probability_is_never_chosen() -> None:
    log_probs = torch.log(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])).expand(3, 5)
    chances = torch.tensor([0.0, 0.5, 1.0 - 2.0**-24])
    assert choose_tokens(log_probs, Sampling(1.0), chances).tolist() == [1, 3, 3]
    assert choose_tokens(log_probs, Sampling(1e-40), chances).tolist()[0] in (1, 3)


def test_written_tokens_follow_the_model(model: Any) -> None:
    """Chi-square of the first token of 4,000 rows of one prompt against the model's own probabilities."""
    prompt = prompts(6)[0]
    rows = written(model, [prompt] * 4_000, max_new_tokens=1)
    probs = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1)
    expected = 4_000 * probs
    kept = expected >= 5
    seen = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=tiny.VOCAB).double()
    value = ((seen - expected) ** 2 / expected)[kept].sum() + (seen[~kept].sum() - expected[~kept].sum()) ** 2 / (
        expected[~kept].sum()
    )
    degrees = float(kept.sum())
    assert degrees > 5 and value < degrees + 4 * (2 * degrees) ** 0.5 + 8


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours_or_the_size_of_the_batch(model: Any, temperature: float) -> None:
    asked, options = prompts(6, 2, 9, 4, 4), {"temperature": temperature}
    seeds = [row_seed("x", row) for row in range(len(asked))]
    together = written(model, asked, seeds, **options)
    alone = [written(model, [prompt], [seed], **options)[0] for prompt, seed in zip(asked, seeds, strict=True)]
    pairs = written(model, asked[3:], seeds[3:], **options)
    assert [row.ids for row in together] == [row.ids for row in alone]
    assert [row.ids for row in together[3:]] == [row.ids for row in pairs]
    for one, other in zip(together, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_two_samples_of_a_prompt_differ_and_two_runs_agree(model: Any) -> None:
    prompt = prompts(6)[0]
    seeds = [row_seed(7, 0, "key", sample) for sample in range(4)]
    rows = written(model, [prompt] * 4, seeds)
    assert len({tuple(row.ids) for row in rows}) == 4
    assert [row.ids for row in rows] == [row.ids for row in written(model, [prompt] * 4, seeds)]


def test_seeds_follow_from_their_parts() -> None:
    assert row_seed(1, 23, "a", 0) == row_seed(1, 23, "a", 0)
    assert (
        len({row_seed(1, 23, "a", 0), row_seed(12, 3, "a", 0), row_seed(1, 23, "a", 1), row_seed(1, "23", "a", 0)}) == 4
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral", "gemma2", "mamba", "rwkv"])
def test_log_probs_are_those_of_a_full_forward(family: str) -> None:
    network = families.build(family)
    asked = prompts(6, 2, 9)
    rows = written(network, asked, num_top=3, temperature=1.3, top_p=0.9)
    for prompt, row in zip(asked, rows, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + row.ids])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits.double(), -1)
        given = wanted.gather(1, torch.tensor(row.ids).unsqueeze(1)).squeeze(1)
        assert row.log_probs == pytest.approx(given.tolist(), abs=1e-5)
        assert row.top_ids.tolist() == wanted.topk(3).indices.tolist()


def test_greedy_tokens_are_those_of_transformers(model: Any) -> None:
    asked = prompts(6, 2, 9)
    model.generation_config.eos_token_id = None
    rows = written(model, asked, temperature=0.0, ends=set(), cuts_loops=False)
    for prompt, row in zip(asked, rows, strict=True):
        ids = torch.tensor([prompt])
        given = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert row.ids == given[0, len(prompt) :].tolist()


# -- ends ----------------------------------------------------------------------------------------------------


def test_the_end_token_is_the_last_and_is_scored(model: Any) -> None:
    asked = prompts(6, 3)
    free = written(model, asked, ends=set())
    stop = free[0].ids[4]
    rows = written(model, asked, ends={stop})
    assert rows[0].ended == "end" and rows[0].ids == free[0].ids[: free[0].ids.index(stop) + 1]
    assert len(rows[0].log_probs) == len(rows[0].ids) and rows[0].log_probs == free[0].log_probs[: len(rows[0].ids)]
    assert {row.ended for row in free} == {"length"}


def test_a_phrase_that_stands_four_times_ends_the_answer_if_asked() -> None:
    """A model that repeats three tokens for ever: cut after 16 of them at the earliest, and counted."""
    network = families.build("gpt2")
    with torch.no_grad():
        network.transformer.wte.weight.zero_()
        network.transformer.wte.weight[:3] = torch.eye(3, network.config.n_embd) * 50
        network.transformer.wpe.weight.zero_()
    head = torch.zeros(tiny.VOCAB, network.config.n_embd)
    head[1, 0] = head[2, 1] = head[0, 2] = 500.0
    network.lm_head.weight = torch.nn.Parameter(head)
    for block in network.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
        torch.nn.init.zeros_(block.mlp.c_proj.weight)
    free = written(network, [[0]], max_new_tokens=40, cuts_loops=False)[0]
    assert free.ids == [1, 2, 0] * 13 + [1] and free.ended == "length"
    cut = written(network, [[0]], max_new_tokens=40)[0]
    assert cut.ids == free.ids[:16] and cut.ended == "loop"


def test_a_row_with_broken_logits_ends_and_the_other_continues(model: Any) -> None:
    asked = prompts(4, 4)
    wanted = written(model, asked)
    calls: list[int] = []

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            output[0] = float("nan")
        return output

    handle = model.lm_head.register_forward_hook(spoil)
    rows = written(model, asked)
    handle.remove()
    assert rows[0].ended == "nonfinite" and rows[0].ids == wanted[0].ids[:2]
    assert rows[1].ids == wanted[1].ids and rows[1].ended == wanted[1].ended


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_positions_of_a_model_are_never_exceeded(family: str) -> None:
    network = AutoModelForCausalLM.from_config(families.config(family, max_position_embeddings=16)).eval()
    asked = prompts(10, 4, 16)
    rows = written(network, asked, max_new_tokens=40, ends=set())
    assert [len(row.ids) for row in rows] == [6, 12, 0]
    assert {row.ended for row in rows} == {"positions"}
    assert rows[1].ids == written(network, asked[1:2], [row_seed(0, 1)], max_new_tokens=40, ends=set())[0].ids


def test_padding_rows_of_the_head_have_no_probability(model: Any) -> None:
    rows = written(model, prompts(3) * 50, num_tokens=10, ends=set(), num_top=4)
    assert max(max(row.ids) for row in rows) < 10 and max(int(row.top_ids.max()) for row in rows) < 10


def test_writing_leaves_the_random_state_and_the_model_alone(model: Any) -> None:
    model.train()
    state, before = torch.random.get_rng_state(), model.config._attn_implementation
    written(model, prompts(3, 5))
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == before
    model.eval()


def test_impossible_requests_are_refused(model: Any) -> None:
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(ConfigError):
            written(model, prompts(3), **wrong)
    with pytest.raises(ConfigError):
        written(model, [[]])
