"""llama.cpp's server: it gives log-probabilities of the token it generates next, so a prompt is asked token by token.

For token t of a prompt the tokens before it are sent to `/completion`, and one token is generated. Facts, read off the
answers of the server in xllamacpp 2026.10.11549 with models that Stillroom exported:

prompt    `/v1/completions` takes `prompt_logprobs` and `echo` and heeds neither: no log-probabilities of prompts.
forced    `logit_bias` makes the generated token token t itself: its log-probability then stands beside the likeliest,
          even where it is not one of them.
raw       `completion_probabilities` are the softmax of the model's logits before any sampler and any bias, with
          `post_sampling_probs` false. Temperature, penalties and the bias do not show in them.
cached    A slot keeps the keys and values of what it read last. With `cache_prompt` and the same `id_slot` the prompt
          for token t + 1 costs one new token. A row holds a slot until it is done. A slot that is not there is not an
          error: the server takes another.
partial   A token that ends within a character of UTF-8 has no `completion_probabilities`. Another token is generated
          then, and all log-probabilities are asked for where token t is not among the likeliest.
zero      A probability that rounds to 0 has the log-probability -3.4e38, the lowest FP32.
special   What a special token spells is given as an empty text.
exact     With F32 weights, `--flash-attn off` and an F32 cache the log-probabilities are those of transformers to 3e-5.
          Flash attention, the default, computes in halves: 0.04 were seen, and 0.0006 in the loss of a step
          (benchmarks/served).

A grammar of token ids would give a whole prompt by one request. It cannot hold tokens that end a text or part of a
character: the server answers them with status 500.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stillroom.teachers.entries import Entry, Given
from stillroom.teachers.served.client import Client, ServerRefused
from stillroom.teachers.served.shapes import Prompt, bad, check_tables, missing, num_tokens, number, shown

_COMPLETION, _PROPS = "/completion", "/props"
_HOT = 4.0  # another temperature
_MOST_CHANGE, _TOLD = 1e-2, -5.0  # of a log-probability, and of which ones: less is rounding
_FORCED = 1e6  # added to the logit of the token that is asked about
_RECHECKED = 4  # tokens of the probe that are asked again while the server is used: each is a request
_MANY = 1_024  # log-probabilities that are asked for before all of them are: those of a large vocabulary are megabytes
_MOST_SLOTS = 4_096  # of a server: each is a queue entry here
_SLOT_TOKENS = 2_048  # of a batch: a slow server shows its progress, and a kill costs little
_FIELDS = ["completion_probabilities", "tokens_evaluated", "truncated"]  # the settings and the prompt's text are not
_BYTES_OF_ANSWER, _BYTES_OF_ENTRY = 65_536, 2_048  # the most that is read; an entry has some 80 bytes


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
                if _is_partial(answer) and self._whole is not None:
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
        likeliest = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: prompt.num_wanted]
        own = {token: value for token, value in entry.items() if token == prompt.ids[place]}
        return {**dict(likeliest), **own}

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
        most_bytes = _BYTES_OF_ANSWER + _BYTES_OF_ENTRY * (num_wanted + 1)
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


def _is_partial(answer: Any) -> bool:
    return isinstance(answer, Mapping) and "completion_probabilities" not in answer and "tokens_evaluated" in answer


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
        raise bad(f"{column} gives token {token} {entry[token]:.5g}, and beside it {mine:.5g}", where)
    entry.setdefault(token, mine)
    return entry


def _text(one: Mapping[str, Any]) -> str:
    """What a token spells, by its bytes: its text is cut where they end within a character."""
    held = one.get("bytes")
    try:
        return bytes(held).decode("utf-8", errors="replace") if isinstance(held, Sequence) else str(one["token"])
    except (KeyError, TypeError, ValueError):
        return ""
