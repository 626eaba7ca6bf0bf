"""A server that passed its probe: which model it has, in which shape it answers, and asking it prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stillroom.config.schema import TeacherConfig
from stillroom.errors import ConfigError, ServerGone, ServerUnusable
from stillroom.secret_keys import masked
from stillroom.teachers.entries import Given, Spelling
from stillroom.teachers.served.client import Client, ServerRefused
from stillroom.teachers.served.llama_cpp import LlamaCpp
from stillroom.teachers.served.probe import Probe, check_causal, check_steady, own_log_probs, spread_places
from stillroom.teachers.served.shapes import ECHO, PROMPT_LOGPROBS, Completions, MissingField, Prompt, Shape, num_tokens

_MODELS, _VERSION, _DETOKENIZE = "/v1/models", "/version", "/detokenize"
_OTHER_SHAPE = (400, 404, 405, 422, 501)  # a request that the server does not know, or not so
_LONGEST_NAME = 500  # characters of a model's name or of a version
_TRIED = (
    "programs that give log-probabilities of prompts as token ids: vLLM and llama.cpp's server; others may likewise"
)
_SHAPES: dict[str, Callable[[Client], Shape]] = {
    PROMPT_LOGPROBS.name: lambda client: Completions(PROMPT_LOGPROBS, client),
    ECHO.name: lambda client: Completions(ECHO, client),
    LlamaCpp.name: LlamaCpp,
}


@dataclass(frozen=True)
class Facts:
    """What a server says of itself. Nothing of it is secret."""

    url: str
    model: str
    version: str | None
    max_tokens: int | None  # of a prompt with the token that is generated after it

    def to_dict(self) -> dict[str, Any]:
        return {"server": self.url, "served_model": self.model, "server_version": self.version}


class Server:
    """Asks prompts of ids. Every answer is checked: see `shapes.py`."""

    def __init__(self, client: Client, facts: Facts, shape: Shape, *, num_wanted: int, vocab_size: int) -> None:
        self.client, self.shape = client, shape
        self.facts = replace(
            facts,
            version=masked(shape.version or facts.version or "")[:_LONGEST_NAME] or None,
            max_tokens=facts.max_tokens or shape.max_tokens,
        )
        self.num_wanted, self._vocab_size = min(num_wanted, vocab_size), vocab_size
        self.notes: tuple[str, ...] = ()  # what could not be checked
        self.is_raw = False  # log-probabilities cannot be those of another temperature
        self.probe: Probe | None = None
        self.probed: list[float] = []  # the probe's own tokens, as they were answered first

    def score(self, ids: Sequence[int], places: Sequence[int] | None = None) -> Given:
        """What the server says about tokens of a prompt: about `places`, or all but the first."""
        return self.shape.score(self.facts.model, Prompt.of(ids, places, self.num_wanted, self._vocab_size))

    def check_again(self) -> None:
        """Raise where the probe is answered otherwise than at first."""
        assert self.probe is not None
        places = spread_places(len(self.probe.ids), self.shape.num_rechecked)
        now = own_log_probs(self.score(self.probe.ids, places))
        check_steady([self.probed[place - 1] for place in places], now, since="at the start")


def key_of(section: TeacherConfig) -> str:
    """The server's key, from the environment; empty where none is named."""
    name = section.requests.api_key_variable
    if name is None:
        return ""
    if not (found := os.environ.get(name, "").strip()):
        raise ConfigError(
            f"the environment has no variable {name}", where="teacher.requests.api_key_variable", advice=["export it"]
        )
    if not found.isascii() or not found.isprintable():
        raise ConfigError(f"the key in {name} cannot be sent", where="teacher.requests.api_key_variable")
    return found


def open_server(section: TeacherConfig, tokenizer: Any, *, num_wanted: int, vocab_size: int) -> Server:
    """A server that was asked the probe and answered rightly. `tokenizer` is the one that texts are read with."""
    assert section.server is not None
    client = Client(section.server, section.requests, key_of(section))
    facts = _facts(client, section.requests.model)
    probe = Probe.of(tokenizer)
    wanted = section.requests.shape
    shapes = list(_SHAPES) if wanted == "auto" else [wanted]
    failures: list[str] = []
    for name in shapes:
        try:
            server = Server(client, facts, _SHAPES[name](client), num_wanted=num_wanted, vocab_size=vocab_size)
            given = server.score(probe.ids)
        except ServerUnusable as error:
            failures.append(f"{name}: {error.what}")
            may_differ = isinstance(error, MissingField) or getattr(error, "status", 0) in _OTHER_SHAPE
            if may_differ and name != shapes[-1]:
                continue
            raise _no_shape(client, failures, error, shapes) from error
        server.probe, server.probed = probe, own_log_probs(given)
        server.notes = _check_spelling(server, given, tokenizer)
        check_causal(given, server.score(probe.other), probe.changed, server.num_wanted)
        server.check_again()
        server.is_raw = server.shape.is_raw(facts.model, Prompt.of(probe.ids, None, num_wanted, vocab_size))
        return server
    raise AssertionError  # the last shape returned or raised


def _no_shape(client: Client, failures: Sequence[str], last: ServerUnusable, shapes: Sequence[str]) -> ServerUnusable:
    """The reason of each shape that was tried."""
    advice = [*last.advice, _TRIED]
    if client.server_header.lower().startswith(LlamaCpp.name) and LlamaCpp.name not in shapes:
        advice = [f"--set teacher.requests.shape={LlamaCpp.name}", *advice]
    told = "; ".join(failures)
    return ServerUnusable(
        f"the server gives no usable log-probabilities: {told}", where=str(client.address), advice=advice
    )


def _facts(client: Client, wanted: str | None) -> Facts:
    """The model that is asked for, or the only one there is."""
    url = str(client.address)
    try:
        listed = client.ask("GET", _MODELS)
        models = {masked(str(one["id"])): one for one in listed["data"]}
        if any(len(name) > _LONGEST_NAME for name in models):
            raise ServerUnusable(f"{_MODELS} has a name of more than {_LONGEST_NAME:,} characters", where=url)
    except ServerRefused as error:
        if error.status not in (404, 405, 501) or wanted is None:
            raise
        models = {}
    except (KeyError, TypeError) as error:
        raise ServerUnusable(f"{_MODELS} gives no list of models", where=url, advice=[_TRIED]) from error
    if wanted is None and len(models) != 1:
        raise ConfigError(
            f"the server has {len(models)} models: {', '.join(sorted(models)[:8])}",
            where="teacher.requests.model",
            advice=["name one of them: --set teacher.requests.model=NAME"],
        )
    if wanted is not None and models and wanted not in models:
        raise ConfigError(
            f"the server has no model {wanted!r}, but {', '.join(sorted(models)[:8])}",
            where="teacher.requests.model",
            advice=["name one of them: --set teacher.requests.model=NAME"],
        )
    name = wanted or next(iter(models))
    about = models.get(name, {})
    limit = about.get("max_model_len") if isinstance(about, Mapping) else None
    most = None if limit is None else num_tokens(limit, f"{_MODELS}: `max_model_len`")
    return Facts(url, name, _version(client), most)


def _version(client: Client) -> str | None:
    """What the server says of its version; its Server header where it has no page for that."""
    try:
        found = client.ask("GET", _VERSION)
    except ServerRefused:
        return client.server_header or None
    return str(found["version"]) if isinstance(found, Mapping) and "version" in found else client.server_header or None


def _check_spelling(server: Server, given: Given, tokenizer: Any) -> tuple[str, ...]:
    """Raise where tokens spell something else on the server. Answers with what could not be checked, for the log."""
    spelling, wrong = Spelling(tokenizer), None
    if found := spelling.fault([given]):
        wrong = found[0]
    elif not given.texts:
        try:
            asked = {"model": server.facts.model, "tokens": list(given.ids)}
            told = server.client.ask("POST", _DETOKENIZE, asked)
        except (ServerRefused, ServerGone) as error:
            return (f"the server does not say what its tokens spell ({error.what}): its tokenizer is not checked",)
        held = told if isinstance(told, Mapping) else {}
        text = held.get("prompt", held.get("content"))  # vLLM's name, and llama.cpp's
        ours = tokenizer.decode(list(given.ids), clean_up_tokenization_spaces=False)
        if not isinstance(text, str) or text.strip() != ours.strip():
            wrong = f"the probe's tokens spell {masked(str(text))[:60]!r} there and {ours[:60]!r} in the tokenizer"
    if wrong is None:
        return ()
    raise ServerUnusable(
        f"the server has another tokenizer: {wrong}",
        where=server.facts.url,
        advice=[
            "name the folder or hub id of the served model in teacher.model",
            "choose a student with its tokens",
        ],
    )
