"""Records, and the shapes an object of a data file may have.

A record is one document: a list of (text, is_scored) segments. One that cannot be used becomes a `BadRecord` with
its place and the reason; only a share of them above `data.max_bad_share` stops a run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from stillroom.config.schema import CONTEXTS, DataConfig, Layout
from stillroom.core.errors import DataError
from stillroom.core.types import Detail

Segments = tuple[tuple[str, bool], ...]  # (text, is scored), in reading order

SHAPES = (
    '{"text"}',
    '{"prompt", "completion"}',
    '{"question", "answer"}',
    '{"instruction", "input", "output"}',
    '{"messages": [{"role", "content"}, ...]}',
    '{"prompt": [{"role", "content"}, ...], "completion": [...]}',
    '{"conversations": [{"from", "value"}, ...]}',
)
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields that hold a thought apart from the content
SPEAKERS = {"human": "user", "gpt": "assistant"}  # of turns with "from" and "value"; other names are roles
FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "question",
    "answer",
    "instruction",
    "input",
    "output",
    "text",
    "tools",
    *CONTEXTS,
)
RESULTS = ("tool", "function", "ipython", "observation")  # roles whose text a tool wrote
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)

_NUM_BAD_KEPT = 20  # a file of the wrong kind has millions of bad records
_NUM_BAD_NAMED = 3
_NO_FIELDS = "has no known fields"


_TOKENS = ("prompt_ids", "ids", "tokenizer")  # columns of what `stillroom write` wrote
_MOST_ID = 2**31


class Unusable(ValueError):
    """Raised for a record that cannot be used; the message is the reason in a few words."""


@dataclass(frozen=True)
class WrittenTokens:
    """The tokens that a model read and wrote, with the hash of the vocabulary they are from."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    vocabulary: str


@dataclass(frozen=True)
class Record:
    """One document.

    `key` is a digest of the content in the file, before any chat template, so records with equal content fall on the
    same side of a split with any tokenizer. Records of a `group` are held out together; without one the key decides.
    """

    id: str  # "train.jsonl:17", or the name of a module
    segments: Segments
    key: str
    group: str = ""
    has_template: bool = False  # a chat template printed it: parse special tokens in it
    tokens: WrittenTokens | None = None  # the record as a model wrote it: never encoded again with that vocabulary
    context: str | None = None  # what the teacher reads before the first scored text; None: what the student reads

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    def under(self, prefix: str) -> Record:
        """The record with a text that only the teacher reads, before all others."""
        return replace(self, context=prefix + joined(self.segments[: num_before(self.segments)])) if prefix else self


def num_before(segments: Segments) -> int:
    """The number of segments before the first scored one."""
    return next((place for place, (_, is_scored) in enumerate(segments) if is_scored), len(segments))


def joined(segments: Segments) -> str:
    return "".join(text for text, _ in segments)


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out: its place ("train.jsonl:17") and the reason."""

    where: str
    why: str


@dataclass
class Tally:
    """Counters, notes for the log, and the first bad records, collected while data is read."""

    counters: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)  # records by the fields they were read from

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def detail(self, sentence: str) -> None:
        """Note what nobody needs to act on."""
        self.note(Detail(sentence))

    def refuse(self, where: str, why: str) -> None:
        self.counters["bad_records"] += 1
        if len(self.bad) < _NUM_BAD_KEPT:
            self.bad.append(BadRecord(where, why))

    def absorb(self, other: Tally) -> None:
        self.counters.update(other.counters)
        self.shapes.update(other.shapes)
        self.bad.extend(other.bad)
        for sentence in other.notes:
            self.note(sentence)

    @property
    def named_bad(self) -> str:
        """Name the first bad records with their reasons."""
        return "; ".join(f"{bad.where}: {bad.why}" for bad in self.bad[:_NUM_BAD_NAMED])

    def judge(self, spec: str, max_bad_share: float, needed: Sequence[str] = ()) -> None:
        """Raise if more than `max_bad_share` of the records cannot be used; otherwise note how many.

        `needed` is the advice on what a record must have; by default it names the shapes of training data.
        """
        num_bad = self.counters["bad_records"]
        num_read = num_bad + self.counters["records"]
        if not num_bad:
            return
        named = self.named_bad
        unusable = f"{num_bad:,} of {num_read:,} records of {spec} cannot be used"
        if num_bad <= max_bad_share * num_read:
            self.note(f"{unusable} and are left out: {named}")
            return
        share = min(1.0, -(-100 * num_bad // num_read) / 100)
        advice = list(needed) or [f"fix or remove these records; the shapes read are {', '.join(SHAPES)}"]
        if any(bad.why.startswith(_NO_FIELDS) for bad in self.bad):
            advice.insert(
                0,
                "say which of its columns are the fields: --set \"data.columns={text = 'COLUMN'}\" for plain text, "
                "\"data.columns={prompt = 'COLUMN', completion = 'COLUMN'}\" for answers, or data.template",
            )
        if self.counters["records"]:
            advice.append(f"set data.max_bad_share={share:g} to continue without them")
        raise DataError(f"{unusable}, more than data.max_bad_share={max_bad_share:g} allows: {named}", advice=advice)


def content_key(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def clean(text: str, tally: Tally) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot, by U+FFFD, and count the texts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        tally.counters["invalid_utf8"] += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def is_blank(text: str) -> bool:
    """Whether the text has only white space, byte order marks and NULs."""
    return not text.strip("\0\ufeff \t\r\n\f\v")


# -- shapes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One message of a chat. `thought` is set if the file has it apart from the content, and precedes it."""

    role: str
    content: str
    thought: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()  # of tools, each {"type", "function": {"name", "arguments"}}
    names: Mapping[str, str] = field(default_factory=dict)  # name and tool_call_id of a tool's result
    is_given: bool = False  # an answer that belongs to the prompt: not scored

    @property
    def is_empty_answer(self) -> bool:
        return self.role == "assistant" and is_blank(self.content) and is_blank(self.thought) and not self.calls


@dataclass(frozen=True)
class Chat:
    """A chat as a template prints it."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    pair: tuple[str, str] | None = None  # prompt and answer of a record that is no chat: its text without a template

    @cached_property
    def key(self) -> str:
        """A digest of the content, before any template."""
        if self.pair is not None:
            return content_key("".join(self.pair))
        content: list[Any] = []
        for turn in self.turns:
            used = {"calls": list(turn.calls), "names": dict(turn.names), "is_given": turn.is_given}
            more = {name: value for name, value in used.items() if value}
            thought = [turn.thought] if turn.thought or more else []
            content.append([turn.role, turn.content, *thought, *([more] if more else [])])
        return content_key(json.dumps([*content, {"tools": self.tools}] if self.tools else content, default=str))


# The fields an object must have to be read in a shape; the first that fits is taken.
_NEEDED = {
    "messages": ("messages",),
    "prompt, completion": ("prompt", "completion"),
    "question, answer": ("question", "answer"),
    "instruction, output": ("instruction", "output"),
    "text": ("text",),
    "conversations": ("conversations",),
}
ChatWriter = Callable[[Chat], tuple[Segments, bool]]  # -> segments, whether a template printed them


@dataclass(frozen=True)
class Shaper:
    """Turn one object of a data file into a record. Raise `Unusable` with the reason."""

    write_chat: ChatWriter
    tally: Tally
    train_on_prompt: bool = False
    prints_pairs: bool = False  # a prompt with an answer is given to `write_chat` as a chat of two turns
    thoughts: Literal["keep", "drop"] = "keep"
    layout: Layout = field(default_factory=Layout)
    teacher_prefix: str = ""

    @staticmethod
    def of(config: DataConfig, source: Layout, write_chat: ChatWriter, tally: Tally) -> Shaper:
        return Shaper(
            write_chat,
            tally,
            train_on_prompt=config.train_on_prompt,
            prints_pairs=config.chat != "off",
            thoughts=config.thoughts,
            layout=source,
            teacher_prefix=config.teacher_prefix,
        )

    def __call__(self, where: str, value: object) -> Record:
        if not isinstance(value, Mapping):
            raise Unusable(f"is {_kind(value)}, not an object with fields")
        if self.layout.has_layout and (missing := missing_columns(value, self.layout)):
            raise Unusable(f"has no column {missing[0]}")
        if self.layout.template:
            return self._templated(where, value).under(self.teacher_prefix)
        if self.layout.columns:
            value = renamed(value, self.layout.columns)
        shape = next((shape for shape in _NEEDED if all(name in value for name in _NEEDED[shape])), None)
        if shape is None:
            raise Unusable(f"{_NO_FIELDS}, only {_listed(value)}")
        record = self._shaped(where, value, shape)
        if all(name in value for name in _TOKENS):
            record = replace(record, tokens=_tokens(value))
        self.tally.shapes[shape] += 1
        return record

    def records(self, items: Iterable[tuple[str, object]]) -> Iterator[Record]:
        """Turn objects into records. Count in the tally what is refused."""
        for where, value in items:
            try:
                record = self(where, value)
            except Unusable as error:
                self.tally.refuse(where, str(error))
            else:
                yield record

    def _shaped(self, where: str, value: Mapping[str, Any], shape: str) -> Record:
        match shape:
            case "messages" | "conversations":
                return self._chat(where, self.turns(value[shape], shape), shape, value)
            case "prompt, completion" if isinstance(value["prompt"], list | tuple):
                given = [replace(turn, is_given=True) for turn in self.turns(value["prompt"], "prompt")]
                return self._chat(where, (*given, *self.turns(value["completion"], "completion")), "completion", value)
            case "prompt, completion":
                return self._pair(where, value, self._text(value, "prompt"), "", "completion")
            case "question, answer":
                return self._pair(where, value, self._full(value, "question"), "\n", "answer")
            case "instruction, output":
                context = self._text(value, "input") if value.get("input") is not None else ""
                asked = self._full(value, "instruction") + (f"\n\n{context}" if context else "")
                return self._pair(where, value, asked, "\n\n", "output")
        return self._in_context(value, self._plain(where, "", self._full(value, "text")))

    def _in_context(self, value: Mapping[str, Any], record: Record) -> Record:
        """The record with what the teacher reads before its first scored text, where that is something else."""
        if value.get("teacher_messages") is not None:
            raise Unusable("teacher_messages is for chats: give teacher_prompt")
        if value.get("teacher_prompt") is not None:
            return replace(record, context=self.teacher_prefix + self._full(value, "teacher_prompt"))
        return record.under(self.teacher_prefix)

    def _templated(self, where: str, value: Mapping[str, Any]) -> Record:
        columns = self.layout.needed_columns
        scored = self.layout.scored or columns
        texts = {name: self._full(value, name) if name in scored else self._text(value, name) for name in columns}
        segments = filled(texts, self.layout)
        if self.train_on_prompt:
            segments = tuple((text, True) for text, _ in segments)
        self.tally.shapes[f"template: {', '.join(columns)}"] += 1
        return Record(where, segments, content_key("".join(text for text, _ in segments)))

    def _plain(self, where: str, prompt: str, answer: str) -> Record:
        segments = tuple(
            (text, is_scored) for text, is_scored in ((prompt, self.train_on_prompt), (answer, True)) if text
        )
        return Record(where, segments, content_key(prompt + answer))

    def _pair(self, where: str, value: Mapping[str, Any], asked: str, joint: str, name: str) -> Record:
        """A prompt with an answer: a chat of two turns, or as it stands, `joint` between them.

        What a model wrote is read as it was asked, and nothing is asked by an empty prompt.
        """
        answer = self._answer(name, self._full(value, name))
        if is_blank(answer):
            raise Unusable(f"{name} is empty without its thought")
        if not self.prints_pairs:
            self.tally.detail("records of a prompt and an answer are read as they stand (data.chat)")
        if not self.prints_pairs or is_blank(asked) or all(one in value for one in _TOKENS):
            return self._in_context(value, self._plain(where, asked + joint, answer))
        turns = (Turn("user", asked), Turn("assistant", answer))
        return self._printed(where, Chat(turns, self._tools(value), (asked + joint, answer)), value)

    def _chat(self, where: str, turns: tuple[Turn, ...], name: str, value: Mapping[str, Any]) -> Record:
        answers = [number for number, turn in enumerate(turns, 1) if turn.role == "assistant" and not turn.is_given]
        empty = [number for number in answers if turns[number - 1].is_empty_answer]
        if not self.train_on_prompt and not answers:
            raise Unusable(f"{name} has no assistant turn to learn from")
        if not self.train_on_prompt and answers == empty:
            raise Unusable(f"{name}, turn {empty[0]} is empty, and no other answer is there to learn from")
        if self.train_on_prompt and any(turn.role in RESULTS for turn in turns):
            raise Unusable("has results of tools, which are not learned: data.train_on_prompt would score them")
        record = self._printed(where, Chat(turns, self._tools(value)), value)
        self.tally.counters["empty_answers"] += len(empty)
        return record

    def _printed(self, where: str, chat: Chat, value: Mapping[str, Any]) -> Record:
        segments, has_template = self.write_chat(chat)
        if self.train_on_prompt:
            segments = tuple((text, True) for text, _ in segments)
        if not any(text for text, is_scored in segments if is_scored):
            raise Unusable("the chat has nothing to score")
        record = Record(where, segments, chat.key, has_template=has_template)
        if chat.pair is not None and not has_template:
            return self._in_context(value, record)
        return replace(record, context=self._chat_context(chat, value, segments))

    def _chat_context(self, chat: Chat, value: Mapping[str, Any], segments: Segments) -> str | None:
        """What the teacher reads before the first scored answer: its own turns in place of those before it."""
        turns, wanted = chat.turns, "teacher_messages" if chat.pair is None else "teacher_prompt"
        for name in {*CONTEXTS} - {wanted}:
            if value.get(name) is not None:
                raise Unusable(f"{name} does not belong to this shape of record: give {wanted}")
        first = next((at for at, turn in enumerate(turns) if turn.role == "assistant" and not turn.is_given), None)
        if first is None:
            return None
        own = turns[:first]
        if value.get(wanted) is not None:
            one = chat.pair is not None
            own = (Turn("user", self._full(value, wanted)),) if one else self.turns(value[wanted], wanted)
        if self.teacher_prefix:
            system, rest = (own[0].content, own[1:]) if own and own[0].role == "system" else ("", own)
            own = (Turn("system", f"{self.teacher_prefix}\n\n{system}" if system else self.teacher_prefix), *rest)
        if own == turns[:first]:
            return None
        counters = self.tally.counters.copy()  # what the print for the student counted
        try:
            other, _ = self.write_chat(replace(chat, turns=(*own, *turns[first:])))
        except Unusable as error:
            raise Unusable(f"as the teacher reads it: {error}") from error
        self.tally.counters = counters
        answers = segments[num_before(segments) :]
        if other[-len(answers) :] != answers:
            raise Unusable("the chat template prints the answers otherwise after the teacher's turns")
        return joined(other[: -len(answers)])

    def turns(self, messages: object, name: str) -> tuple[Turn, ...]:
        """The turns of a chat."""
        if not isinstance(messages, list | tuple) or not messages:
            raise Unusable(f"{name} is {_kind(messages)}, not a list of turns")
        return tuple(self._turn(f"{name}, turn {number}", message) for number, message in enumerate(messages, 1))

    def _turn(self, where: str, message: object) -> Turn:
        if isinstance(message, Mapping) and "role" not in message and {"from", "value"} <= set(message):
            speaker = message["from"]
            role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
            message = {**message, "role": role, "content": message["value"]}
        if not isinstance(message, Mapping) or "role" not in message:
            raise Unusable(f"{where}: needs role and content")
        role, calls = message["role"], self._calls(where, message)
        if "content" not in message and not calls:
            raise Unusable(f"{where}: needs role and content")
        content = message.get("content")
        content = "" if content is None and calls else _parts_joined(where, content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise Unusable(f"{where}: role is {_kind(role)} and content is {_kind(content)}, not text")
        thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), "")
        if not isinstance(thought, str):
            raise Unusable(f"{where}: its thought is {_kind(thought)}, not text")
        if thought and self.thoughts == "drop":
            self.tally.counters["dropped_thoughts"] += 1
            thought = ""
        content = self._answer(where, content) if role == "assistant" else content
        names = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
        role, content, thought = (clean(text, self.tally) for text in (role, content, thought))
        return Turn(role, content, thought, calls, names if role in RESULTS else {})

    def _answer(self, where: str, content: str) -> str:
        """The answer without the thought that it begins with, where thoughts are dropped."""
        if self.thoughts == "keep" or "</think>" not in content:
            return content
        if not (thought := _THOUGHT.match(content)):
            raise Unusable(f"{where} has </think> and does not begin with <think>: what is the thought is unclear")
        self.tally.counters["dropped_thoughts"] += 1
        return content[thought.end() :]

    def _calls(self, where: str, message: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """The calls of a message, their arguments as objects: templates print those as JSON themselves."""
        if message.get("function_call"):
            raise Unusable(f"{where} has function_call: write it as tool_calls")
        found = list[Mapping[str, Any]]()
        for call in _listed_objects(f"{where}: tool_calls", message.get("tool_calls")):
            if message["role"] != "assistant":
                raise Unusable(f"{where} has tool_calls and is of the role {message['role']}")
            function = call.get("function", call)
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or is_blank(name):
                raise Unusable(f"{where}: a call of tool_calls has no name")
            arguments = _decoded(f"{where}: the arguments of {name}", function.get("arguments") or {})
            if not isinstance(arguments, Mapping):
                raise Unusable(f"{where}: the arguments of {name} are {_kind(arguments)}, not an object")
            more = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
            function = {"name": name, "arguments": self._without_nulls(arguments)}
            found.append({"type": "function", **more, "function": function})
        return tuple(found)

    def _tools(self, value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._without_nulls(tool) for tool in _listed_objects("tools", value.get("tools")))

    def _without_nulls(self, value: Any) -> Any:
        """The value without nulls in its objects, and its texts clean. Arrow gives every object the keys of all."""
        match value:
            case str():
                return clean(value, self.tally)
            case Mapping():
                kept = {name: self._without_nulls(inner) for name, inner in value.items() if inner is not None}
                self.tally.counters["dropped_nulls"] += len(value) - len(kept)
                return kept
            case list() | tuple():
                return [self._without_nulls(inner) for inner in value]
        return value

    def _text(self, value: Mapping[str, Any], name: str) -> str:
        text = value[name]
        if text is None:
            raise Unusable(f"{name} is missing")
        if not isinstance(text, str):
            raise Unusable(f"{name} is {_kind(text)}, not text")
        return clean(text, self.tally)

    def _full(self, value: Mapping[str, Any], name: str) -> str:
        text = self._text(value, name)
        if is_blank(text):
            raise Unusable(f"{name} is empty")
        return text


def _tokens(value: Mapping[str, Any]) -> WrittenTokens | None:
    """The ids of a record; None where its writer did not know them."""
    prompt, answer, vocabulary = (value[name] for name in _TOKENS)
    if answer is None:
        return None
    for name, ids in (("prompt_ids", prompt), ("ids", answer)):
        is_list = isinstance(ids, list | tuple)
        if not is_list or not all(type(one) is int and 0 <= one < _MOST_ID for one in ids):
            raise Unusable(f"{name} is not a list of token ids")
    if not answer or not isinstance(vocabulary, str):
        raise Unusable("ids is empty" if not answer else f"tokenizer is {_kind(vocabulary)}, not a hash")
    return WrittenTokens(tuple(prompt), tuple(answer), vocabulary)


def _decoded(where: str, value: object) -> object:
    """A value, or what it holds where it is JSON in a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Unusable(f"{where} is text that is not JSON") from None


def _listed_objects(where: str, value: object) -> list[Mapping[str, Any]]:
    """A list of objects, as such or as JSON, each or all in a text; empty where it is null."""
    values = _decoded(where, value) if value else []
    if not isinstance(values, list | tuple):
        raise Unusable(f"{where} is {_kind(values)}, not a list")
    objects = [_decoded(where, one) for one in values]
    if other := next((one for one in objects if not isinstance(one, Mapping)), None):
        raise Unusable(f"{where} holds {_kind(other)}, not an object")
    return [one for one in objects if isinstance(one, Mapping)]


def _parts_joined(where: str, content: object) -> object:
    """Join a content given as parts. Raise `Unusable` if a part is not text."""
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        return content
    kinds = [str(part.get("type", "text")) for part in content]
    if other := next((kind for kind in kinds if kind != "text"), None):
        raise Unusable(f"{where}: content has a part of type {other}, and only text is read")
    texts = [part.get("text") for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise Unusable(f"{where}: content has a part of type text without its text")
    return "".join(str(text) for text in texts)


def _kind(value: object) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "int": "a number"}
    names |= {"float": "a number", "bool": "true or false", "tuple": "a list"}
    return names.get(type(value).__name__, type(value).__name__)


def _listed(value: Mapping[Any, Any]) -> str:
    names = [str(name) for name in value]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "none"


# -- columns and templates of the user ---------------------------------------------------------------------------


OPTIONAL = ("input", "tools")  # fields that records may lack


def missing_columns(value: Mapping[str, Any], layout: Layout) -> list[str]:
    """List the columns of a layout that an object lacks and must have."""
    optional = [layout.columns.get(name) for name in OPTIONAL]
    return [column for column in layout.needed_columns if column not in value and column not in optional]


def renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Take the fields of a record, each from its column."""
    return {field: value[column] for field, column in columns.items() if column in value}


def filled(value: Mapping[str, str], layout: Layout) -> Segments:
    """Fill a template and cut it into segments. `value` holds the text of each column.

    Scored are the columns that the layout names, and the text after the last column if that is one of them: what ends
    an answer is learned with it. If none is named, all is scored.
    """
    pieces, segments = layout.pieces, list[tuple[str, bool]]()
    scored = set(layout.scored)
    last = next(name for _, name in reversed(pieces) if name)
    for literal, name in pieces:
        is_end = name is None and last in scored
        segments.append((literal, not scored or is_end))
        if name is not None:
            segments.append((value[name], not scored or name in scored))
    joined = itertools.groupby((one for one in segments if one[0]), key=lambda one: one[1])
    return tuple(("".join(text for text, _ in group), is_scored) for is_scored, group in joined)
