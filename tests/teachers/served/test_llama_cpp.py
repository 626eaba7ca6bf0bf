"""Laws of asking llama.cpp's server: token by token, and as right as one answer for the whole prompt."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny
import torch
from llama_model import LlamaCppModel
from mutations import mutated
from refusals import refused
from served_model import serving
from transformers import AutoTokenizer

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ServerUnusable
from stillroom.teachers.served.shapes import _read
from stillroom.teachers.served.teacher import ServedTeacher, Server, open_server
from stillroom.teachers.signals import SignalSpec

K = 8
IDS = [5, 9, 200, 31, 5, 7, 61, 40, 2, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_trained(tmp_path_factory.mktemp("llama") / "teacher", width=32, num_layers=1, steps=60)


def opened(served: Any, folder: Path, k: int = K, **requests: Any) -> Server:
    wanted = {"retries": 2, "pause_seconds": 0.01, "timeout_seconds": 5.0, **requests}
    section = TeacherConfig.model_validate({"model": str(folder), "server": served.url, "requests": wanted})
    return open_server(section, AutoTokenizer.from_pretrained(folder), num_wanted=k, vocab_size=tiny.VOCAB)


@pytest.fixture
def llama(folder: Path) -> Iterator[LlamaCppModel]:
    with serving(folder, kind=LlamaCppModel) as served:
        yield served


def test_the_shape_is_found_and_its_answers_are_those_of_a_whole_prompt(llama: LlamaCppModel, folder: Path) -> None:
    with serving(folder) as whole:
        ours, theirs = opened(llama, folder), opened(whole, folder)
        one, other = ours.score(IDS), theirs.score(IDS)
    assert (ours.shape.name, theirs.shape.name) == ("llama.cpp", "prompt_logprobs")
    assert one.entries.keys() == other.entries.keys()
    for place, entry in one.entries.items():
        assert entry == pytest.approx(other.entries[place], abs=1e-5)
        assert IDS[place] in entry and len(entry) >= K
    assert ours.facts.version == "llama.cpp b0-unknown" and ours.facts.max_tokens == 512


def test_each_place_is_asked_once_in_order_in_one_slot_and_no_other_place_is(
    llama: LlamaCppModel, folder: Path
) -> None:
    server = opened(llama, folder)
    llama.heard.clear()
    given = server.score(IDS, [2, 3, 7])
    assert list(given.entries) == [2, 3, 7]
    assert [len(body["prompt"]) for body in llama.heard] == [2, 3, 7]
    assert len({body["id_slot"] for body in llama.heard}) == 1
    for body in llama.heard:
        assert body["cache_prompt"] and not body["post_sampling_probs"] and body["n_predict"] == 1
        assert body["logit_bias"][0][0] == IDS[len(body["prompt"])]


def test_rows_that_are_under_way_together_have_slots_of_their_own(llama: LlamaCppModel, folder: Path) -> None:
    server = opened(llama, folder)
    llama.heard.clear()
    rows = [[number, *IDS] for number in range(20, 26)]
    threads = [threading.Thread(target=server.score, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_slot: dict[int, list[int]] = {}
    for body in llama.heard:
        in_slot.setdefault(body["id_slot"], []).append(body["prompt"][0])
    assert set(in_slot) <= set(range(llama.num_slots))
    for rows_of_slot in in_slot.values():
        changes = sum(one != other for one, other in itertools.pairwise(rows_of_slot))
        assert changes == len(set(rows_of_slot)) - 1  # a row is finished before the next one begins


@pytest.mark.parametrize("is_likely", [True, False])
def test_a_token_that_ends_within_a_character_is_answered_while_another_is_generated(
    llama: LlamaCppModel, folder: Path, is_likely: bool
) -> None:
    server = opened(llama, folder)
    sound = server.score(IDS)
    ranks = sorted(sound.entries[4].items(), key=lambda item: -item[1])
    partial = ranks[0][0] if is_likely else next(token for token in range(3, 300) if token not in sound.entries[4])
    ids = [*IDS[:4], partial, *IDS[5:]]
    plain = server.score(ids)
    llama.partial_ids = (partial,)
    llama.heard.clear()
    found = server.score(ids)
    assert {place: pytest.approx(entry) for place, entry in plain.entries.items()} == found.entries
    assert [body["n_probs"] for body in llama.heard].count(tiny.VOCAB) == (0 if is_likely else 1)


LIES = {
    "behind": r"answers change from that about token \d+ on: each answer is about the token before .* shifted by one",
    "unforced": r"was to be generated, and \d+ was: `logit_bias` had no effect",
    "few": r"log-probabilities, and 8 were asked for: too few",
    "mark": r"it counts 2 tokens in a prompt of 1: the server added or dropped some",
    "truncated": r"it truncated a prompt of 1 tokens",
    "sampled": r"has `top_probs`: probabilities after sampling",
    "no table": r"has no `top_logprobs`",
    "twice": r"top_logprobs of token 1 names token \d+ twice",
    "texts": r"top_logprobs of token 1 names 'None' instead of a token id",
    "heated": r"it changes with the temperature that is asked for",
    "logits": r"are not log-probabilities: the largest is",
    "tokenizer": r"the server has another tokenizer: .* spell something else here",
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_llama_cpp_that_answers_wrongly_is_refused_with_the_reason(folder: Path, lie: str) -> None:
    with serving(folder, lie, LlamaCppModel) as served, pytest.raises(ServerUnusable, match=LIES[lie]) as caught:
        opened(served, folder)
    assert caught.value.exit_code == 20


def test_every_reason_is_told_where_no_shape_is_answered(folder: Path) -> None:
    with serving(folder, "missing") as served, pytest.raises(ServerUnusable) as caught:
        opened(served, folder)
    told = str(caught.value)
    assert "prompt_logprobs: " in told and "echo: " in told and "llama.cpp: " in told and "/props: status 404" in told


def test_a_shape_that_llama_cpp_does_not_have_is_refused_with_the_one_it_has(
    llama: LlamaCppModel, folder: Path
) -> None:
    with refused(ServerUnusable, "http://", "logprobs.tokens") as caught:
        opened(llama, folder, shape="echo")
    assert "teacher.requests.shape=llama.cpp" in str(caught.value)


def test_a_prompt_beyond_a_slots_context_is_refused_in_the_servers_words(llama: LlamaCppModel, folder: Path) -> None:
    server = opened(llama, folder)
    llama.max_model_len = 70
    with refused(ServerUnusable, "http://", "status 400", "70 tokens"):
        server.score([5] * 80)


def test_another_model_is_noticed_by_few_tokens_of_the_probe(llama: LlamaCppModel, folder: Path) -> None:
    server = opened(llama, folder)
    llama.heard.clear()
    server.check_again()
    assert len(llama.heard) == 4
    llama.other_after = llama.num_asked
    with refused(ServerUnusable, "", "probe"):
        server.check_again()


def test_faults_for_a_while_change_no_row(llama: LlamaCppModel, folder: Path) -> None:
    spec = SignalSpec("top_k", K, 0)
    server = opened(llama, folder)
    teacher = ServedTeacher(server, spec, vocab_size=tiny.VOCAB, device=torch.device("cpu"), concurrency=4)
    assert "3 requests at once, by llama.cpp" in teacher.notes[0]
    batch = cases.rows_of([12, 9, 14, 3], seed=5, prompt=2).batch(range(4))
    sound = teacher.answer_rows(batch, [spec])[0]
    llama.faults = ["500", "drop", "503", "garbage"]
    again = teacher.answer_rows(batch, [spec])[0]
    assert all(cases.same(one, other) for one, other in zip(sound, again, strict=True))
    assert sum(count for name, count in teacher.facts().items() if name.startswith("repeated")) == 4


def test_a_probability_of_nothing_is_minus_infinity(llama: LlamaCppModel, folder: Path) -> None:
    server = opened(llama, folder)
    with torch.no_grad():
        llama._model.get_output_embeddings().weight[77] = 0.0
        llama._model.get_output_embeddings().weight.mul_(4000.0)
    given = server.score([5, 9, 77])
    assert given.entries[2][77] == float("-inf")


def test_an_answer_that_is_odd_anywhere_is_refused_or_says_what_it_said() -> None:
    """No mutation may raise anything else, name another token, or give a value that was not sent."""
    value, chance, num_refused = -1.5, random.Random(3), 0
    entries = [{"id": token, "token": "x", "bytes": [120], "logprob": value} for token in (4, 5, 6)]
    sound = {
        "completion_probabilities": [{**entries[1], "top_logprobs": entries}],
        "tokens_evaluated": 7,
        "truncated": False,
    }
    for _ in range(2000):
        try:
            found = _read(mutated(sound, chance), 7, 5, {}, "")
        except ServerUnusable:
            num_refused += 1
            continue
        assert 5 in found and set(found.values()) <= {value, -5.0, 3.5, math.inf, -math.inf}
        assert all(token in (4, 5, 6, 10**9) or token > 10**9 for token in found)
    assert num_refused > 500
