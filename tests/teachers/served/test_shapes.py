"""Laws of reading answers: what was sent is what was answered, and anything odd is refused and never guessed."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from mutations import mutated
from refusals import refused

from stillroom.core.errors import ServerUnusable
from stillroom.teachers.served.shapes import ECHO, PROMPT_LOGPROBS, read_checked

IDS = (3, 1, 4, 1, 5)
VOCAB, WANTED = 10, 3


def tables(prefix: str = "") -> list[Any]:
    found: list[Any] = [None]
    for own in IDS[1:]:
        ids = [own, *(token for token in range(VOCAB) if token != own)][: WANTED + 1]
        found.append({f"{prefix}{token}": math.log(0.2) for token in ids})
    return found


def vllm() -> dict[str, Any]:
    held = [
        None
        if table is None
        else {key: {"logprob": value, "rank": 1, "decoded_token": "x"} for key, value in table.items()}
        for table in tables()
    ]
    choice = {"prompt_logprobs": held, "prompt_token_ids": list(IDS), "text": ""}
    return {"choices": [choice], "usage": {"prompt_tokens": len(IDS)}}


def echo() -> dict[str, Any]:
    top = tables("token_id:")
    own = [None, *(top[place][f"token_id:{IDS[place]}"] for place in range(1, len(IDS)))]
    tokens = [f"token_id:{token}" for token in IDS]
    held = {
        "tokens": [*tokens, "token_id:0"],
        "token_logprobs": [*own, -1.0],
        "top_logprobs": [*top, {"token_id:0": -1.0}],
    }
    return {"choices": [{"logprobs": held}], "usage": {"prompt_tokens": len(IDS)}}


BOTH = [(PROMPT_LOGPROBS, vllm), (ECHO, echo)]


@pytest.mark.parametrize(("shape", "make"), BOTH, ids=["vllm", "echo"])
def test_an_answer_about_every_token_but_the_first_is_read(shape: Any, make: Any) -> None:
    given = read_checked(shape, make(), IDS, WANTED, VOCAB)
    assert list(given.entries) == [1, 2, 3, 4]
    assert all(given.entries[place][IDS[place]] == math.log(0.2) for place in given.entries)


@pytest.mark.parametrize(("shape", "make"), BOTH, ids=["vllm", "echo"])
def test_an_answer_that_is_odd_anywhere_is_refused_or_says_what_it_said(shape: Any, make: Any) -> None:
    """No mutation may raise anything else, give a token to another place, or give a value that was not sent."""
    chance, sound = random.Random(11), read_checked(shape, make(), IDS, WANTED, VOCAB)
    num_refused = 0
    for _ in range(1500):
        answer = mutated(make(), chance)
        try:
            given = read_checked(shape, answer, IDS, WANTED, VOCAB)
        except ServerUnusable:
            num_refused += 1
            continue
        assert list(given.entries) == list(sound.entries)
        for place, entry in given.entries.items():
            assert IDS[place] in entry and len(entry) >= WANTED
            assert set(entry.values()) <= {math.log(0.2), -5.0, -math.inf}
    assert num_refused > 500


@pytest.mark.parametrize(
    ("shape", "make", "names"), [(*BOTH[0], ("9", "09")), (*BOTH[1], ("token_id:9", "token_id:09"))]
)
def test_a_token_that_is_named_twice_in_two_ways_is_refused(shape: Any, make: Any, names: Any) -> None:
    answer = make()
    choice = answer["choices"][0]
    table = choice["prompt_logprobs"][2] if "prompt_logprobs" in choice else choice["logprobs"]["top_logprobs"][2]
    for name, value in zip(names, (-2.0, -3.0), strict=True):
        table[name] = {"logprob": value} if "prompt_logprobs" in choice else value
    with refused(ServerUnusable, "5 tokens", "token 2", "twice"):
        read_checked(shape, answer, IDS, WANTED, VOCAB)


@pytest.mark.parametrize("sent", [-9999.0, -3.4028234663852886e38, -math.inf])
def test_what_servers_send_for_minus_infinity_is_that(sent: float) -> None:
    """vLLM sends -9999, llama.cpp the lowest FP32: as a number it would be a log-probability."""
    answer = vllm()
    answer["choices"][0]["prompt_logprobs"][2]["0"]["logprob"] = sent
    assert read_checked(PROMPT_LOGPROBS, answer, IDS, WANTED, VOCAB).entries[2][0] == -math.inf


@pytest.mark.parametrize(
    ("values", "told"),
    [([-0.5, -0.5, -0.9, -3.0], "they hold 1.66"), ([2.0, -9.0, -9.0, -9.0], "largest is 2"), ([math.nan] * 4, "nan")],
)
def test_values_that_are_no_log_probabilities_are_refused(values: list[float], told: str) -> None:
    answer = vllm()
    table = answer["choices"][0]["prompt_logprobs"][2]
    for name, value in zip(table, values, strict=True):
        table[name]["logprob"] = value
    with pytest.raises(ServerUnusable, match=told):
        read_checked(PROMPT_LOGPROBS, answer, IDS, WANTED, VOCAB)


@pytest.mark.parametrize("answer", [None, [], "no", {}, {"choices": []}, {"choices": [None]}, {"choices": {}}, 3])
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    with pytest.raises(ServerUnusable):
        read_checked(PROMPT_LOGPROBS, answer, IDS, WANTED, VOCAB)


def test_a_prompt_that_the_server_read_otherwise_is_refused_with_the_token() -> None:
    answer = vllm()
    answer["choices"][0]["prompt_token_ids"] = [0, *IDS[:-1]]
    with refused(ServerUnusable, "", "token 0 is 0"):
        read_checked(PROMPT_LOGPROBS, answer, IDS, WANTED, VOCAB)
