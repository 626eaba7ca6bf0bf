"""Text written by a server: `/v1/chat/completions` for prompts that are asked, `/v1/completions` for texts continued.

Any server of these two takes part: llama.cpp, vLLM, and services that only have the chat. One request asks for one
sample, with its seed, so that an answer that cannot be used costs no other. An answer that is not what was asked for is
asked for again, and then refused with a reason that is counted; a server that is gone ends the command, and what is
written stays.

EXTRA holds what OpenAI's own fields do not have. Without it a server's defaults cut the distribution: llama.cpp keeps
the 40 most probable tokens, vLLM what the model's generation_config says. A server that refuses these fields is asked
without them, and a note says so.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stillroom.config.schema import TeacherConfig, WriteConfig
from stillroom.core.errors import ConfigError
from stillroom.data.chat import turn_end_ids
from stillroom.data.prompts import Answer, Ask, Refused
from stillroom.teachers.served.client import Client, ServerRefused
from stillroom.teachers.served.teacher import facts_of, key_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EXTRA = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
_ENDED = {"stop": "end", "length": "length"}
_UNKNOWN_FIELDS = (400, 422)
_TRIES = 3  # of one sample whose answer cannot be used
_BYTES_OF_ANSWER, _BYTES_OF_TOKEN = 1 << 20, 512


class ServedWriter:
    """A server that writes. `tokenizer` is the model's where it is known: it checks the ids that a server tells."""

    is_local = False

    def __init__(self, section: TeacherConfig, settings: WriteConfig, tokenizer: Any = None) -> None:
        if settings.start == "template":
            raise ConfigError(
                "a server prints the chat template itself, so a model behind it cannot write the questions",
                where="write.start",
                advice=["give prompts", "load the model here: leave teacher.server out"],
            )
        if settings.keep == "best" and settings.checker is None:
            raise ConfigError(
                "without write.checker the best answer is the most probable one, and a server's are not known",
                where="write.keep",
                advice=["set write.checker", "set write.keep = 'all'"],
            )
        assert section.server is not None
        self._settings, self.tokenizer = settings, tokenizer
        self._client = Client(section.server, section.requests, key_of(section))
        self._facts = facts_of(self._client, section.requests.model)
        self._pool = ThreadPoolExecutor(section.requests.concurrency)
        self._lock = threading.Lock()
        self._extra: dict[str, Any] = dict(EXTRA)
        self.notes: list[str] = []

    @property
    def identity(self) -> dict[str, Any]:
        return self._facts.to_dict()

    @property
    def counters(self) -> dict[str, int]:
        """Requests, and how often one was repeated, by cause."""
        return self._client.counters

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown(cancel_futures=True)

    def answer(self, asks: Sequence[Ask]) -> list[Answer | Refused]:
        """One answer each, in order. Raise `ServerGone` where the server is: nothing of these is then written."""
        return list(self._pool.map(self._answer, asks))

    def _answer(self, ask: Ask) -> Answer | Refused:
        found: Answer | Refused = Refused("unasked")
        for _ in range(_TRIES):
            found = self._read(self._asked(ask))
            if isinstance(found, Answer):
                return found
        return found

    def _asked(self, ask: Ask) -> Any:
        settings, prompt = self._settings, ask.prompt
        body: dict[str, Any] = {
            "model": self._facts.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": ask.seed % 2**31,  # llama.cpp and vLLM take 32 bits
            "n": 1,
        }
        if self.is_chat(ask):
            turns = [{"role": turn.role, "content": turn.content} for turn in prompt.turns]
            path, body["messages"] = CHAT, turns or [{"role": "user", "content": prompt.text}]
        else:
            path, body["prompt"] = COMPLETIONS, prompt.text
        most = _BYTES_OF_ANSWER + _BYTES_OF_TOKEN * settings.max_new_tokens
        extra = self._extra
        try:
            return self._client.ask("POST", path, {**body, **extra}, most_bytes=most)
        except ServerRefused as error:
            if error.status not in _UNKNOWN_FIELDS or not extra:
                raise
            found = self._client.ask("POST", path, body, most_bytes=most)
        with self._lock:
            if self._extra:
                self._extra = {}
                self.notes.append(
                    f"the server refuses {', '.join(EXTRA)}: it draws as its own defaults say, and tells no token ids"
                )
        return found

    def is_chat(self, ask: Ask) -> bool:
        return bool(ask.prompt.turns) or not (self._settings.raw or self._settings.start == "documents")

    def _read(self, told: Any) -> Answer | Refused:
        """What a server answered, if it is one answer to what was asked."""
        choices = told.get("choices") if isinstance(told, Mapping) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            return Refused("no_answer", "the server gave no choice, or several")
        choice = choices[0]
        message = choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
        if not isinstance(text, str):
            return Refused("no_text", "an answer has no text")
        ended = _ENDED.get(str(choice.get("finish_reason")))
        if ended is None:
            return Refused("other_end", "an answer ended neither by itself nor at its length")
        usage = told.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        count = count if type(count) is int and count >= 0 else None
        most = self._settings.max_new_tokens
        if (count or 0) > most:
            return Refused("too_long", f"an answer has more than {most:,} tokens")
        prompt_ids, ids = told.get("prompt_token_ids") or choice.get("prompt_token_ids"), choice.get("token_ids")
        if ids is None or prompt_ids is None or self.tokenizer is None:
            return Answer(text, ended, count)
        return self._with_ids(text, ended, prompt_ids, ids)

    def _with_ids(self, text: str, ended: str, prompt_ids: Any, ids: Any) -> Answer | Refused:
        """Hold the ids against the text: they are trained on, so they must be what was written."""
        size = len(self.tokenizer)
        for one in (prompt_ids, ids):
            if not isinstance(one, list) or not all(type(number) is int and 0 <= number < size for number in one):
                return Refused("bad_ids", "an answer has ids that are no tokens")
        spelled = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if len(ids) > self._settings.max_new_tokens or str(spelled).strip() != text.strip():
            return Refused("other_ids", "the ids of an answer spell another text")
        ends = {self.tokenizer.eos_token_id, *turn_end_ids(self.tokenizer)}
        if ended == "end" and (not ids or ids[-1] not in ends):
            return Answer(text, ended, len(ids))  # without the end token, which the student has to learn
        return Answer(text, ended, len(ids), prompt_ids, ids)
