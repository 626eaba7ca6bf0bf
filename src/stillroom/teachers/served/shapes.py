"""What a shape of answers is, the two of `/v1/completions`, and what is checked of every answer of any shape.

prompt_logprobs  vLLM. `choices[0].prompt_logprobs` has an entry for each token of the prompt, null for the first: a
                 table from token id to {"logprob", "rank", "decoded_token"}. The token that came is always in it,
                 so that it has up to one entry more than was asked for.
echo             OpenAI's old completions, as vLLM and others have them. `choices[0].logprobs` has `tokens`,
                 `token_logprobs` and `top_logprobs`, whose tokens are texts, or `token_id:N` where the server can.
                 Texts are refused: several tokens spell the same one, so a table by text loses masses.

Prompts are token ids, never texts, and every answer is held against the ids that were sent. The temperature is sent as
1: a model's generation_config may have another, and some servers give log-probabilities after it.

Of vLLM 0.33.0 (its source was read, it was not run): minus infinity is sent as -9999; more than `--max-logprobs` (20)
are refused with status 400; the prefix cache is not read for such requests; what is left of a character that several
tokens spell is the empty text; without a tokenizer (`--skip-tokenizer-init`) `decoded_token` is null.

llama.cpp's server: it gives log-probabilities of the token it generates next, so a prompt is asked token by token.

For token t of a prompt the tokens before it are sent to `/completion`, and one token is generated. Facts, read off the
answers of the server in xllamacpp 2026.10.11549 with models that Stillroom exported:

prompt    `/v1/completions` takes `prompt_logprobs` and `echo` and heeds neither: no log-probabilities of prompts.
forced    `logit_bias` makes the generated token token t itself: its log-probability then stands next to the top ones,
          even where it is not one of them.
raw       `completion_probabilities` are the softmax of the model's logits before any sampler and any bias, with
          `post_sampling_probs` false. Temperature, penalties and the bias do not show in them.
cached    A slot keeps the keys and values of what it read last. With `cache_prompt` and the same `id_slot` the prompt
          for token t + 1 costs one new token. A row holds a slot until it is done. A slot that is not there is not an
          error: the server takes another.
partial   A token that ends within a character of UTF-8 has no `completion_probabilities`. Another token is generated
          then, and all log-probabilities are asked for where token t is not among the top ones.
zero      A probability that rounds to 0 has the log-probability -3.4e38, the lowest FP32.
special   What a special token spells is given as an empty text.
exact     With F32 weights, `--flash-attn off` and an F32 cache the log-probabilities are those of transformers to 3e-5.
          Flash attention, the default, computes in halves: 0.04 were seen, and 0.0006 in the loss of a step
          (benchmarks/served).

A grammar of token ids would give a whole prompt by one request. It cannot hold tokens that end a text or part of a
character: the server answers them with status 500.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from stillroom.core.errors import ServerUnusable, masked
from stillroom.teachers.served.client import Client, ServerRefused
from stillroom.teachers.signals import TOKEN_ID, Entry, Given

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
    num_wanted: int  # top tokens at each place
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
    fields: Mapping[str, Any]  # of a request, next to those that every shape has
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
        raise bad("its first choice is not an object", where)
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
        raise bad(f"{shown(value)} is not the length of a prompt in tokens", where)
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
        ["it puts its own mark before a prompt, or has another tokenizer"],
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
                f"the values at token {place} are not log-probabilities: {what}",
                given.where,
                ["vLLM: --logprobs-mode raw_logprobs"],
            )


def _shift_reason(given: Given, place: int) -> str:
    """Which neighbours the entries hold instead of the right tokens, over the whole prompt."""
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


# -- llama.cpp ---------------------------------------------------------------------------------------------


_COMPLETION, _PROPS = "/completion", "/props"
_HOT = 4.0  # another temperature
_MOST_CHANGE, _TOLD = 1e-2, -5.0  # of a log-probability, and of which ones: less is rounding
_FORCED = 1e6  # added to the logit of the token that is asked about
_RECHECKED = 4  # tokens of the probe that are asked again while the server is used: each is a request
_MANY = 1_024  # log-probabilities that are asked for before all of them are: those of a large vocabulary are megabytes
_MOST_SLOTS = 4_096  # of a server: each is a queue entry here
_SLOT_TOKENS = 2_048  # of a batch: a slow server shows its progress, and a kill costs little
_FIELDS = ["completion_probabilities", "tokens_evaluated", "truncated"]  # the settings and the prompt's text are not
_LLAMA_ANSWER_BYTES, _LLAMA_ENTRY_BYTES = 65_536, 2_048  # the most that is read; an entry has some 80 bytes


class LlamaCpp:
    """One request for each token that is asked about. As many rows are under way as the server has slots."""

    name = "llama.cpp"
    num_rechecked: int | None = _RECHECKED

    def __init__(self, client: Client) -> None:
        self._client = client
        told = _props(client)
        settings, version = told.get("default_generation_settings"), told.get("build_info")
        limit = settings.get("n_ctx") if isinstance(settings, Mapping) else None
        self.max_tokens = None if limit is None else num_tokens(limit, f"{_PROPS}: `n_ctx`")  # of one slot
        self.version = f"llama.cpp {version}" if isinstance(version, str) else None
        self._whole: int | None = None  # a token that was generated and has its log-probabilities
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        num_slots = int(told["total_slots"])
        self.most_at_once: int | None = num_slots
        self.batch_tokens = _SLOT_TOKENS * num_slots
        for slot in range(num_slots):
            self._slots.put(slot)

    def score(self, model: str, prompt: Prompt) -> Given:
        where = f"the answers to a prompt of {len(prompt.ids):,} tokens"
        entries: dict[int, Entry] = {}
        texts: dict[int, str] = {}
        with self._slot() as slot:
            for place in prompt.places:
                answer = self._forced(model, prompt, place, slot, prompt.ids[place], prompt.num_wanted)
                is_partial = isinstance(answer, Mapping) and "completion_probabilities" not in answer
                if is_partial and "tokens_evaluated" in answer and self._whole is not None:
                    entries[place] = self._around(model, prompt, place, slot, texts, where)
                    continue
                entries[place] = _read(answer, place, prompt.ids[place], texts, where)
                self._whole = prompt.ids[place]
        given = Given(where, prompt.ids, entries, texts, has_own_token=True)
        check_tables(given, prompt.num_wanted, prompt.vocab_size)
        return given

    def is_raw(self, model: str, prompt: Prompt) -> bool:
        """True, or raise where another temperature changes the answer about the first place."""
        place = prompt.places[0]
        entries = []
        with self._slot() as slot:
            for temperature in (1.0, _HOT):
                asked = self._forced(model, prompt, place, slot, prompt.ids[place], prompt.num_wanted, temperature)
                entries.append(_read(asked, place, prompt.ids[place], {}, "the answer at another temperature"))
        one, other = entries
        if any(abs(value - other.get(token, 0.0)) > _MOST_CHANGE for token, value in one.items() if value > _TOLD):
            raise bad("it changes with the temperature that is asked for", f"token {place} of the probe")
        return True

    def _around(self, model: str, prompt: Prompt, place: int, slot: int, texts: dict[int, str], where: str) -> Entry:
        """About a token that ends within a character, while another one is generated."""
        assert self._whole is not None
        wide = max(prompt.num_wanted, min(_MANY, prompt.vocab_size))
        for num_wanted in (prompt.num_wanted, wide, prompt.vocab_size):
            answer = self._forced(model, prompt, place, slot, self._whole, num_wanted)
            entry = _read(answer, place, self._whole, texts, where)
            if prompt.ids[place] in entry:
                break
        top = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: prompt.num_wanted]
        own = {token: value for token, value in entry.items() if token == prompt.ids[place]}
        return {**dict(top), **own}

    def _forced(
        self,
        model: str,
        prompt: Prompt,
        place: int,
        slot: int,
        token: int,
        num_wanted: int,
        temperature: float = 1.0,
    ) -> Any:
        """The answer to the tokens before `place`, with `token` as the one that is generated."""
        body = {
            "model": model,
            "prompt": list(prompt.ids[:place]),
            "n_predict": 1,
            "n_probs": num_wanted,
            "post_sampling_probs": False,
            "logit_bias": [[token, _FORCED]],
            "samplers": ["temperature"],
            "temperature": temperature,
            "cache_prompt": True,
            "id_slot": slot,
            "stream": False,
            "response_fields": _FIELDS,
        }
        most_bytes = _LLAMA_ANSWER_BYTES + _LLAMA_ENTRY_BYTES * (num_wanted + 1)
        return self._client.ask("POST", _COMPLETION, body, most_bytes=most_bytes)

    @contextmanager
    def _slot(self) -> Iterator[int]:
        slot = self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put(slot)


def _props(client: Client) -> Mapping[str, Any]:
    """What llama.cpp's server says of itself, or `MissingField` where another program answers."""
    try:
        told = client.ask("GET", _PROPS)
    except ServerRefused as error:
        raise missing(f"{_PROPS}: status {error.status}", str(client.address)) from error
    found: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    slots = found.get("total_slots")
    if slots is None:
        raise missing(f"{_PROPS} does not tell `total_slots`", str(client.address))
    if not isinstance(slots, int) or not 1 <= slots <= _MOST_SLOTS:
        raise bad(f"{_PROPS} has `total_slots` {shown(slots)}", str(client.address))
    return found


def _read(answer: Any, place: int, generated: int, texts: dict[int, str], where: str) -> Entry:
    """What was said about the token at `place`. Adds to `texts` what tokens spell."""
    held = answer.get("completion_probabilities") if isinstance(answer, Mapping) else None
    if not isinstance(held, list) or not held:
        raise missing("it has no `completion_probabilities`", where)
    own, count = held[0], answer.get("tokens_evaluated")
    if len(held) != 1 or not isinstance(own, Mapping):
        raise bad(f"`completion_probabilities` has {len(held)} entries for one token", where)
    if count != place:
        raise bad(f"it counts {count!r} tokens in a prompt of {place:,}: the server added or dropped some", where)
    if answer.get("truncated") is True:
        raise bad(f"it truncated a prompt of {place:,} tokens", where, ["start the server with a longer context: -c N"])
    if "top_probs" in own:
        raise bad("it has `top_probs`: probabilities after sampling, of another temperature", where)
    if not isinstance(own.get("top_logprobs"), list):
        raise missing("it has no `top_logprobs`", where)
    if own.get("id") != generated:
        told = f"token {generated} was to be generated, and {own.get('id')!r} was"
        raise bad(f"{told}: `logit_bias` had no effect, so the log-probability of token {place} is not known", where)
    return _table(own, place, texts, where)


def _table(own: Mapping[str, Any], place: int, texts: dict[int, str], where: str) -> Entry:
    column, entry = f"top_logprobs of token {place}", dict[int, float]()
    for one in own["top_logprobs"]:
        token = one.get("id") if isinstance(one, Mapping) else None
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise bad(f"{column} names {shown(token)!r} instead of a token id", where)
        if token in entry:
            raise bad(f"{column} names token {token} twice", where)
        entry[token] = number(one.get("logprob"), column, where)
        if text := _text(one):
            texts[token] = text
    mine = number(own.get("logprob"), f"the log-probability of token {place}", where)
    token = own["id"]
    if token in entry and abs(entry[token] - mine) > 1e-3:
        raise bad(f"{column} gives token {token} {entry[token]:.5g}, and next to it {mine:.5g}", where)
    entry.setdefault(token, mine)
    return entry


def _text(one: Mapping[str, Any]) -> str:
    """What a token spells, by its bytes: its text is cut where they end within a character."""
    held = one.get("bytes")
    try:
        return bytes(held).decode("utf-8", errors="replace") if isinstance(held, Sequence) else str(one["token"])
    except (KeyError, TypeError, ValueError):
        return ""
