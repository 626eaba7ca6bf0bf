"""Prompts of a data source: what a model is asked to answer, with the record's own answer where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stillroom.config.schema import SourceConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data.records import Chat, Record, Shaper, Tally, Turn, Unusable, content_key, is_blank, renamed
from stillroom.data.sources import BUILTIN_PREFIX, checked, embedded_records, read_spec

# (fields of the prompt, field of the answer); records without the answer are prompts too.
_PAIRS = {"prompt": "completion", "question": "answer", "instruction": "output"}
_PROMPTS_NEED = (
    "to continue the beginnings of plain texts: --set write.start=documents",
    f"fix or remove these records; each needs one of messages, conversations, {', '.join(_PAIRS)}",
)
_DOCUMENTS_NEED = ("fix or remove these records; each needs a text",)


@dataclass(frozen=True)
class Prompt:
    """What is continued: the turns of a chat, or a text as it stands."""

    key: str  # a digest of the content
    text: str  # of the last question, or the text itself
    turns: tuple[Turn, ...] = ()
    reference: str | None = None


def read_prompts(source: SourceConfig, tally: Tally, *, as_documents: bool, max_bad_share: float) -> list[Prompt]:
    """The prompts of a source in its order, each once. Count and note what is left out."""
    found, seen = list[Prompt](), set[str]()
    for prompt in _prompts(source, tally, as_documents=as_documents):
        if prompt.key in seen:
            tally.counters["repeated_prompts"] += 1
            continue
        seen.add(prompt.key)
        found.append(prompt)
    tally.counters["records"] += len(found) + tally.counters["repeated_prompts"]
    tally.judge(source.path, max_bad_share, _DOCUMENTS_NEED if as_documents else _PROMPTS_NEED)
    if not found:
        raise DataError(f"{source.path} holds no prompt", where="write.prompts", advice=["name other data"])
    if count := tally.counters["repeated_prompts"]:
        tally.note(f"{count:,} prompts stand in {source.path} more than once and are answered once")
    return found


def _prompts(source: SourceConfig, tally: Tally, *, as_documents: bool) -> Iterator[Prompt]:
    if source.template:
        raise ConfigError(
            "prompts are not cut out of data.template",
            where="data.template",
            advice=["name the columns: data.columns = {prompt = 'COLUMN', completion = 'COLUMN'}"],
        )
    if source.path.startswith(BUILTIN_PREFIX):
        for record in embedded_records(source.path, train_on_prompt=False)[0]:
            yield _embedded(record, as_documents)
        return
    items = checked(read_spec(source.path, tally, columns=source.needed_columns), source, source.path)
    shaper = Shaper(lambda _chat: ((), False), tally)  # reads turns; nothing is printed here
    for where, value in items:
        try:
            yield _prompt(where, value, source, shaper, as_documents=as_documents)
        except Unusable as error:
            tally.refuse(where, str(error))


def _embedded(record: Record, as_documents: bool) -> Prompt:
    before = record.segments[0][0] if not record.segments[0][1] else ""
    if as_documents or not before:
        return Prompt(content_key(record.text), record.text)
    return Prompt(content_key(before), before, reference=record.text[len(before) :])


def _prompt(where: str, value: object, source: SourceConfig, shaper: Shaper, *, as_documents: bool) -> Prompt:
    if not isinstance(value, Mapping):
        raise Unusable("is no object with fields")
    fields: Mapping[str, Any] = renamed(value, source.columns) if source.columns else value
    if as_documents:
        text = fields.get("text")
        if not isinstance(text, str) or is_blank(text):
            raise Unusable("has no text to begin from")
        return Prompt(content_key(text), text)
    for name in ("messages", "conversations", "prompt"):
        if isinstance(fields.get(name), list | tuple) or (name in fields and name != "prompt"):
            answer = fields.get("completion") if name == "prompt" else None
            turns = shaper.turns(fields[name], name) + (shaper.turns(answer, "completion") if answer else ())
            if fields.get("tools") or any(turn.calls for turn in turns):
                raise Unusable("has tools, which a model that writes is not given")
            return _chat(turns)
    for name, answer in _PAIRS.items():
        if name in fields:
            text, reference = fields[name], fields.get(answer)
            if name == "instruction" and fields.get("input"):
                text = f"{text}\n\n{fields['input']}"
            if not isinstance(text, str) or is_blank(text):
                raise Unusable(f"{name} is no text")
            is_known = isinstance(reference, str) and not is_blank(reference)
            return Prompt(content_key(text), text, reference=reference if is_known else None)
    raise Unusable(f"has no prompt: none of messages, conversations, {', '.join(_PAIRS)}")


def _chat(turns: tuple[Turn, ...]) -> Prompt:
    """The turns before the last answer, which is the reference; all turns where the last is a question."""
    reference = None
    if turns[-1].role == "assistant":
        *before, last = turns
        turns, reference = tuple(before), last.content
    if not turns or turns[-1].role == "assistant":
        raise Unusable("the chat holds no question to answer")
    return Prompt(Chat(turns).key, turns[-1].content, turns, reference)


# -- answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted."""

    prompt: Prompt
    sample: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """What was written. The tokens are None where a server does not tell them."""

    text: str
    ended: str  # end, length, or another word of `models.writer.ENDED`
    num_tokens: int | None
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    log_prob: float | None = None  # mean of its tokens, at temperature 1


@dataclass(frozen=True)
class Refused:
    """An answer that cannot be used: the reason as a counter's name, and in words."""

    reason: str
    words: str = ""
