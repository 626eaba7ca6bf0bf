"""Laws of opening a server: an honest one is believed, and every lie is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import served_model
import tiny
from refusals import refused
from served_model import serving
from transformers import AutoTokenizer

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError, ServerUnusable, StillroomError
from stillroom.teachers.served.teacher import Server, open_server

K = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_trained(tmp_path_factory.mktemp("served") / "teacher", width=32, num_layers=1, steps=60)


def opened(served: Any, folder: Path, k: int = K, **requests: Any) -> Server:
    wanted = {"retries": 2, "pause_seconds": 0.01, "timeout_seconds": 5.0, **requests}
    section = TeacherConfig.model_validate({"model": str(folder), "server": served.url, "requests": wanted})
    return open_server(section, AutoTokenizer.from_pretrained(folder), num_wanted=k, vocab_size=tiny.VOCAB)


def test_an_honest_server_is_believed_and_says_who_it_is(folder: Path) -> None:
    with serving(folder) as served:
        facts = opened(served, folder).facts
        assert facts.to_dict() == {
            "server": served.url,
            "served_model": served_model.NAME,
            "server_version": "0.0-tiny",
        }
        asked = served.heard[0]
    assert asked["temperature"] == 1.0 and asked["top_p"] == 1.0 and asked["prompt_logprobs"] == K
    assert all(isinstance(token, int) for token in asked["prompt"])


def test_echo_is_used_where_it_is_what_the_server_has(folder: Path) -> None:
    with serving(folder) as honest, serving(folder, "echo") as echo:
        ours, theirs = opened(honest, folder), opened(echo, folder)
        assert (ours.shape.name, theirs.shape.name) == ("prompt_logprobs", "echo")
        assert ours.notes == theirs.notes == ()
        ids = [5, 9, 200, 31, 5, 7]
        one, other = ours.score(ids), theirs.score(ids)
    assert one.entries == other.entries


def test_a_tokenizer_that_the_server_does_not_show_is_said_to_be_unchecked(folder: Path) -> None:
    """In the shape `echo` tokens are ids without texts, and `/detokenize` is not there."""
    with serving(folder, "mute") as served:
        assert ["its tokenizer is not checked" in note for note in opened(served, folder).notes] == [True]


LIES = {
    "shifted": r"not among its own log-probabilities: .* hold the token after, .* shifted by one",
    "shifted back": r"not among its own log-probabilities: .* hold the token before, .* shifted by one",
    "shifted values": r"answers change from that about token \d+ on: each answer is about the token after .* shifted",
    "missing": r"prompt_logprobs: .* has no `prompt_logprobs`; echo: .* has no `logprobs`; llama.cpp: .* status 404",
    "texts": r"a text instead of a token id: several tokens may spell the same text",
    "echo texts": r"echo: .* a text instead of a token id",
    "few": r"log-probabilities, and 16 were asked for: too few",
    "logits": r"are not log-probabilities: the largest is",
    "heavy": r"are not log-probabilities: (the largest is|they hold)",
    "tokenizer": r"the server has another tokenizer: .* spell something else here",
    "mark": r"it counts \d+ tokens in the prompt: the server added or dropped some",
    "other spelling": r"the server has another tokenizer: the probe's tokens spell",
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_server_that_answers_wrongly_is_refused_with_the_reason(folder: Path, lie: str) -> None:
    with serving(folder, lie) as served, pytest.raises(ServerUnusable, match=LIES[lie]) as caught:
        opened(served, folder)
    assert caught.value.exit_code == 20


def test_fewer_log_probs_than_the_server_allows_are_advised(folder: Path) -> None:
    with serving(folder) as served:
        served.max_logprobs = 8
        with refused(ServerUnusable, "http://", "status 400"):
            opened(served, folder)
        assert opened(served, folder, k=8).shape.name == "prompt_logprobs"


def test_a_key_comes_from_the_environment_and_is_asked_for_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder) as served:
        served.key = "sk-tiny-secret"
        with refused(StillroomError, "http://", "status 401") as caught:
            opened(served, folder)
        assert "api_key_variable" in str(caught.value)
        with refused(ConfigError, "teacher.requests.api_key_variable", "TINY_KEY"):
            opened(served, folder, api_key_variable="TINY_KEY")
        monkeypatch.setenv("TINY_KEY", "sk-wrong")
        with pytest.raises(StillroomError) as caught:
            opened(served, folder, api_key_variable="TINY_KEY")
        assert "sk-wrong" not in str(caught.value)
        monkeypatch.setenv("TINY_KEY", "sk-tiny-secret")
        server = opened(served, folder, api_key_variable="TINY_KEY")
        assert "secret" not in str(server.facts)


@pytest.mark.parametrize("limit", [-5, 0, 1, True, "many", 2.5, [512]])
def test_a_length_that_is_none_is_refused(folder: Path, limit: Any) -> None:
    with serving(folder) as served:
        served.max_model_len = limit
        with pytest.raises(ServerUnusable):
            opened(served, folder)


def test_a_key_in_a_models_name_or_a_version_is_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-tiny-secret")
    pages = {"/v1/models": {"data": [{"id": "tiny-sk-tiny-secret"}]}, "/version": {"version": "1-sk-tiny-secret"}}
    with serving(folder) as served:
        served.page = lambda path: (200, pages[path])
        facts = opened(served, folder, api_key_variable="TINY_KEY").facts
    assert facts.to_dict() == {"server": served.url, "served_model": "tiny-***", "server_version": "1-***"}


def test_a_model_that_the_server_does_not_have_is_named(folder: Path) -> None:
    with serving(folder) as served, refused(ConfigError, "teacher.requests.model", "large", "tiny-teacher"):
        opened(served, folder, model="large")


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "garbage"])
def test_faults_for_a_while_change_no_answer(folder: Path, fault: str) -> None:
    ids = list(range(10, 40))
    with serving(folder) as served:
        server = opened(served, folder)
        sound = server.score(ids)
        served.faults = [fault, fault]
        assert server.score(ids).entries == sound.entries
        assert sum(count for name, count in server.client.counters.items() if name.startswith("repeated")) == 2


def test_another_model_behind_the_same_address_is_noticed(folder: Path) -> None:
    with serving(folder) as served:
        server = opened(served, folder)
        server.check_again()
        served.other_after = served.num_asked
        with refused(ServerUnusable, "", "probe"):
            server.check_again()
