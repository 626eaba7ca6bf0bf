"""What a shape of answers is, the two of `/v1/completions`, and what is checked of every answer of any shape.

prompt_logprobs  vLLM. `choices[0].prompt_logprobs` has an entry for each token of the prompt, null for the first: a
                 table from token id to {"logprob", "rank", "decoded_token"}. The token that came is always in it,
                 so that it has up to one entry more than was asked for.
echo             OpenAI's old completions, as vLLM and others have them. `choices[0].logprobs` has `tokens`,
                 `token_logprobs` and `top_logprobs`, whose tokens are texts, or `token_id:N` where the server can.
                 Texts are refused: several tokens spell the same one, so a table by text loses masses.

The third shape, of llama.cpp's server, is in `llama_cpp.py`.

Prompts are token ids, never texts, and every answer is held against the ids that were sent. The temperature is sent as
1: a model's generation_config may have another, and some servers give log-probabilities after it.

Of vLLM 0.33.0 (its source was read, it was not run): minus infinity is sent as -9999; more than `--max-logprobs` (20)
are refused with status 400; the prefix cache is not read for such requests; what is left of a character that several
tokens spell is the empty text; without a tokenizer (`--skip-tokenizer-init`) `decoded_token` is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stillroom.errors import ServerUnusable
from stillroom.secret_keys import masked
from stillroom.teachers.entries import TOKEN_ID, Entry, Given
from stillroom.teachers.served.client import Client

_COMPLETIONS = "/v1/completions"
_MOST_DIGITS = 12
_MOST_NUMBER = 1e9
_MOST_LOG_PROB = 1e-4  # rounding of a log-probability that is 0
_MOST_MASS = 1.0 + 1e-3  # rounding of half-precision servers; tables of FP32 are within 1e-5
_NOTHING = -9999.0  # what vLLM sends for minus infinity; llama.cpp sends the lowest FP32
_BYTES_OF_ANSWER, _BYTES_OF_ENTRY = 1 << 20, 512  # the most that is read; an entry has some 60 bytes

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Tokens, and which of them are asked about. The first has nothing before it and is never asked about."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    num_wanted: int  # likeliest tokens at each place
    vocab_size: int

    @staticmethod
    def of(ids: Sequence[int], places: Sequence[int] | None, num_wanted: int, vocab_size: int) -> Prompt:
        """`places`: None asks about all."""
        asked = range(1, len(ids)) if places is None else places
        return Prompt(tuple(ids), tuple(asked), min(num_wanted, vocab_size), vocab_size)


class Shape(Protocol):
    """How one kind of server is asked about a prompt."""

    name: str
    max_tokens: int | None  # of a prompt and the token after it, where the server says so in this shape alone
    version: str | None  # of the program, likewise
    num_rechecked: int | None  # tokens of the probe that are asked again while the server is used; None: all
    most_at_once: int | None  # rows that the server takes at the same time, where it says so
    batch_tokens: int  # of rows that a cache's writer hands over at once: enough requests to be under way together

    def score(self, model: str, prompt: Prompt) -> Given:
        """What the server says about `prompt.places`, at least, or `ServerUnusable` with the reason."""
        ...

    def is_raw(self, model: str, prompt: Prompt) -> bool:
        """Whether the answers are known to be those of the model's logits, whatever temperature was asked for."""
        ...


@dataclass(frozen=True)
class Form:
    """One of the two shapes of `/v1/completions`."""

    name: str
    fields: Mapping[str, Any]  # of a request, beside those that every shape has
    count_field: str  # which of them says how many log-probabilities are wanted
    read: Callable[[Answer, tuple[int, ...], str], Given]

    def body(self, model: str, ids: Sequence[int], num_wanted: int) -> dict[str, Any]:
        common = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}
        return {**common, **self.fields, self.count_field: num_wanted}


class Completions:
    """One request gives the whole prompt."""

    max_tokens: int | None = None
    version: str | None = None
    num_rechecked: int | None = None
    most_at_once: int | None = None
    batch_tokens = 16_384

    def __init__(self, form: Form, client: Client) -> None:
        self.name, self._form, self._client = form.name, form, client

    def score(self, model: str, prompt: Prompt) -> Given:
        body = self._form.body(model, prompt.ids, prompt.num_wanted)
        most_bytes = _BYTES_OF_ANSWER + _BYTES_OF_ENTRY * len(prompt.ids) * (prompt.num_wanted + 2)
        answer = self._client.ask("POST", _COMPLETIONS, body, most_bytes=most_bytes)
        return read_checked(self._form, answer, prompt.ids, prompt.num_wanted, prompt.vocab_size)

    def is_raw(self, model: str, prompt: Prompt) -> bool:
        """Not known: many programs speak these shapes, and a setting of theirs may change the temperature."""
        return False


def read_checked(form: Form, answer: Any, ids: tuple[int, ...], num_wanted: int, vocab_size: int) -> Given:
    """What a server said about a prompt, or `ServerUnusable` with the reason."""
    where = f"the answer to a prompt of {len(ids):,} tokens"
    if not isinstance(answer, Mapping) or not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise bad("it has no `choices`", where)
    if not isinstance(answer["choices"][0], Mapping):
        raise bad("its first choice is no object", where)
    _check_prompt(answer, ids, where)
    given = form.read(answer, ids, where)
    check_tables(given, min(num_wanted, vocab_size), vocab_size)
    return given


class MissingField(ServerUnusable):
    """The answer lacks what this shape is made of: the server may have another one."""


def shown(value: Any) -> str:
    """The beginning of what a server sent. Masked before it is cut: half a key would not be known any more."""
    return masked(str(value))[:40]


def missing(what: str, where: str) -> MissingField:
    return MissingField(f"the server's answer cannot be used: {what}", where=where)


def bad(what: str, where: str, advice: Sequence[str] = ()) -> ServerUnusable:
    return ServerUnusable(f"the server's answer cannot be used: {what}", where=where, advice=list(advice))


# -- the two shapes --------------------------------------------------------------------------------------


def _read_prompt_logprobs(answer: Answer, ids: tuple[int, ...], where: str) -> Given:
    choice = answer["choices"][0]
    tables = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
    if tables is None:
        raise missing("it has no `prompt_logprobs`", where)
    _check_length(tables, ids, "prompt_logprobs", where)
    entries: dict[int, Entry] = {}
    texts: dict[int, str] = {}
    for place, table in enumerate(tables[1:], start=1):
        if not isinstance(table, Mapping):
            raise bad(f"prompt_logprobs of token {place} is {table!r}", where)
        entry: dict[int, float] = {}
        for key, value in table.items():
            token = _id(str(key), f"prompt_logprobs of token {place}", where)
            held = isinstance(value, Mapping)
            if token in entry:
                raise bad(f"prompt_logprobs of token {place} names token {token} twice", where)
            entry[token] = number(value.get("logprob") if held else value, f"prompt_logprobs of token {place}", where)
            if held and isinstance(value.get("decoded_token"), str):
                texts[token] = value["decoded_token"]
        entries[place] = entry
    return Given(where, ids, entries, texts, has_own_token=True)


def _read_echo(answer: Answer, ids: tuple[int, ...], where: str) -> Given:
    held = answer["choices"][0].get("logprobs")
    if not isinstance(held, Mapping):
        raise missing("it has no `logprobs`", where)
    tokens, own, tables = (held.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    for name, column in (("tokens", tokens), ("token_logprobs", own), ("top_logprobs", tables)):
        if isinstance(column, list) and len(column) in (len(ids), len(ids) + 1):
            continue
        told = f"{len(column):,} entries" if isinstance(column, list) else "nothing"
        raise missing(f"logprobs.{name} has {told} for {len(ids):,} tokens: the prompt is not echoed", where)
    assert isinstance(tokens, list) and isinstance(own, list) and isinstance(tables, list)
    named = tuple(_id(str(token), "logprobs.tokens", where, prefix=TOKEN_ID) for token in tokens[: len(ids)])
    if named != ids:
        raise _other_tokens(named, ids, where)
    entries: dict[int, Entry] = {}
    for place in range(1, len(ids)):
        column = f"logprobs.top_logprobs of token {place}"
        if not isinstance(tables[place], Mapping):
            raise bad(f"{column} is {tables[place]!r}", where)
        entry = {
            _id(str(key), column, where, prefix=TOKEN_ID): number(value, column, where)
            for key, value in tables[place].items()
        }
        if len(entry) != len(tables[place]):
            raise bad(f"{column} names a token twice", where)
        entry.setdefault(ids[place], number(own[place], f"logprobs.token_logprobs of token {place}", where))
        entries[place] = entry
    return Given(where, ids, entries, has_own_token=True)


PROMPT_LOGPROBS = Form("prompt_logprobs", {"return_token_ids": True}, "prompt_logprobs", _read_prompt_logprobs)
ECHO = Form("echo", {"echo": True, "return_tokens_as_token_ids": True}, "logprobs", _read_echo)


# -- checks ----------------------------------------------------------------------------------------------


def _id(text: str, column: str, where: str, prefix: str = "") -> int:
    digits = text.removeprefix(prefix)
    if (prefix and digits == text) or not digits.isascii() or not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise bad(
            f"{column} names {shown(text)!r}, a text instead of a token id: several tokens may spell the same text",
            where,
            ["use a server that answers with ids: vLLM's prompt_logprobs, or its return_tokens_as_token_ids"],
        )
    return int(digits)


def number(value: Any, column: str, where: str) -> float:
    """A log-probability. What stands for minus infinity becomes that."""
    if isinstance(value, float) and not math.isnan(value):
        return value if value > _NOTHING else -math.inf
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST_NUMBER:
        return float(value)
    raise bad(
        f"a log-probability in {column} is {shown(value) if not isinstance(value, int) else 'an integer'}",
        where,
    )


def num_tokens(value: Any, where: str) -> int:
    """How many tokens a server says that it takes: a whole number, at least two, or `ServerUnusable`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise bad(f"{shown(value)} tokens is no length of a prompt", where)
    return value


def _check_prompt(answer: Answer, ids: tuple[int, ...], where: str) -> None:
    """Where the server says which tokens it read, they are those that were sent."""
    choice, usage = answer["choices"][0], answer.get("usage")
    named = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
    if isinstance(named, list) and tuple(named) != ids:
        raise _other_tokens(tuple(named), ids, where)
    count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    if isinstance(count, int) and count != len(ids):
        raise bad(f"it counts {count:,} tokens in the prompt: the server added or dropped some", where)


def _other_tokens(named: tuple[Any, ...], ids: tuple[int, ...], where: str) -> ServerUnusable:
    pairs = zip(named, ids, strict=False)
    place = next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(named), len(ids)))
    told = f"{len(named):,} tokens" if place >= min(len(named), len(ids)) else f"token {place} is {named[place]}"
    sent = f"{len(ids):,}" if place >= min(len(named), len(ids)) else f"{ids[place]}"
    return bad(
        f"the server read other tokens than were sent: {told}, and was {sent}",
        where,
        ["it puts a mark of its own before a prompt, or has another tokenizer"],
    )


def _check_length(tables: Any, ids: tuple[int, ...], name: str, where: str) -> None:
    if not isinstance(tables, list) or len(tables) != len(ids):
        told = f"{len(tables):,} entries" if isinstance(tables, list) else type(tables).__name__
        raise bad(f"`{name}` has {told} for {len(ids):,} tokens", where)


def check_tables(given: Given, num_wanted: int, vocab_size: int) -> None:
    for place, entry in given.entries.items():
        if given.ids[place] not in entry:
            raise bad(_shift_reason(given, place), given.where, ["entry t must answer token t of the prompt"])
        if len(entry) < num_wanted:
            raise bad(
                f"token {place} has {len(entry):,} log-probabilities, and {num_wanted:,} were asked for: too few",
                given.where,
                [
                    "start vLLM with --max-logprobs N",
                    f"--set teacher.signal.kind=top_k --set teacher.signal.k={len(entry)}",
                ],
            )
        if (highest := max(entry)) >= vocab_size:
            raise bad(f"token id {highest:,} lies outside the vocabulary of {vocab_size:,}", given.where)
        values = entry.values()
        mass = math.fsum(math.exp(min(value, 0.0)) for value in values)
        if max(values) > _MOST_LOG_PROB or mass > _MOST_MASS:
            what = f"the largest is {max(values):.4g}" if max(values) > _MOST_LOG_PROB else f"they hold {mass:.4f}"
            raise bad(
                f"the values at token {place} are no log-probabilities: {what}",
                given.where,
                ["vLLM: --logprobs-mode raw_logprobs"],
            )


def _shift_reason(given: Given, place: int) -> str:
    """Which neighbours the entries hold instead of their own tokens, over the whole prompt."""
    last = len(given.ids) - 1
    counts = {
        shift: sum(given.ids[at + shift] in entry for at, entry in given.entries.items() if 0 <= at + shift <= last)
        for shift in (-1, 0, 1)
    }
    total = len(given.entries)
    best = max((-1, 1), key=lambda shift: counts[shift])
    told = f"token {place} is not among its own log-probabilities"
    if counts[best] > counts[0]:
        side = "before" if best < 0 else "after"
        return f"{told}: {counts[best]:,} of {total:,} hold the token {side}, {counts[0]:,} their own: shifted by one"
    return told
