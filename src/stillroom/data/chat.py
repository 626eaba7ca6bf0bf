"""Print chats with the tokenizer's template, and mark which characters are scored.

The segments joined are exactly the template's print. Scored: what it prints of each answer, and the end mark of the
answer's turn. Not scored: what the template adds (headers, an empty thought, the line break after the end mark).

- Answers are found by marks in a second print, never by their words.
- A call of a tool is part of its answer, from the end of what the template prints to open one. Results of tools, and
  answers that belong to a prompt, are not scored.
- A thought, in a separate field or inside the content, is part of the answer, with the tags around it. What the
  template leaves out of an answer (thoughts of earlier turns) is counted.
- The end mark is what the template prints between an answer and the opening of an answer that directly follows it,
  without trailing white space. The last answer of a chat may end differently (GPT-OSS); its mark is then everything
  up to the end of the print. An end-of-text token at the end of the print is scored, as at the end of any document.
- If the template marks generated text (`{% generation %}`), an answer outside those marks is not scored, and the
  marks are used when no alignment is found.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data.records import Chat, Segments, Tally, Turn, Unusable, is_blank
from stillroom.data.tokenize import Bos, Tokenizer, opened, opening_ids

# -- running a template ------------------------------------------------------------------------------------
#
# Run chat templates in the sandbox of transformers, within bounds of work and memory.
#
# A template is a foreign program: it may divide by zero, loop for hours or build a string of 10^10 characters. The
# environment is that of `transformers` (its sandbox, tags, filters and globals), and charges each loop step, call,
# operator and filter to a budget that grows with the length of the chat. The budget counts work, not time, so the
# same records are refused on every machine.
#
# Not bounded: parsing a template (sources above MAX_SOURCE are refused), and one built-in call over values that are
# themselves within bounds, such as sorting a list.


MAX_SOURCE = 1_000_000
_BASE_WORK, _WORK_PER_CHARACTER = 20_000_000, 200
_BASE_SIZE, _SIZE_PER_CHARACTER = 1_000_000, 20
_STEP = 16  # cost of a loop step, call or operator, in addition to the characters it makes
_MAX_WIDTH = 10_000  # of padding, indentation and batches
_MAX_INDENT = 16  # of JSON, where it is repeated for each value and level
_MAX_BITS = 100_000

_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
_TEXT_FILTERS = _WIDTH_FILTERS | {
    "capitalize", "e", "escape", "forceescape", "format", "join", "lower", "pprint", "replace", "string", "striptags",
    "title", "trim", "upper", "urlencode", "urlize", "wordcount", "xmlattr",
}  # fmt: skip


class TooMuch(TemplateRuntimeError):
    """The template exceeded the budget of a chat of this length."""


class Budget:
    """The work one print has left, and the largest value it may build."""

    def __init__(self, num_characters: int) -> None:
        self.left = _BASE_WORK + _WORK_PER_CHARACTER * num_characters
        self.largest = _BASE_SIZE + _SIZE_PER_CHARACTER * num_characters

    def spend(self, size: int = 0) -> None:
        if size > self.largest:
            raise TooMuch(f"it builds {size:.3g} characters, more than the {self.largest:,} allowed for this chat")
        self.left -= _STEP + size
        if self.left < 0:
            raise TooMuch("it does more work than is allowed for this chat: an endless loop, or text doubled again")


def printed_size(value: object, sizes: dict[int, int] | None = None) -> int:
    """Approximate length of `str(value)`. A list that occurs a thousand times is counted a thousand times."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    if not isinstance(value, Mapping | Sequence | set | frozenset):
        return _STEP
    sizes = {} if sizes is None else sizes
    if id(value) not in sizes:
        sizes[id(value)] = 0  # a value inside itself is printed as "..."
        parts: Iterable[object] = [*value, *value.values()] if isinstance(value, Mapping) else value
        if isinstance(value, range):
            return 6 * len(value)
        sizes[id(value)] = sum(2 + printed_size(part, sizes) for part in parts)
    return sizes[id(value)]


def _made(value: object) -> int:
    """Size of a new value itself, without its items, which existed before."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _formatted_size(pattern: str, values: Iterable[object]) -> int:
    """An upper bound of the length of a formatted %-pattern or {}-pattern."""
    widths = sum(int(digits[:18]) for digits in re.findall(r"\d+", pattern))
    widest = max([widths, *(value for value in values if isinstance(value, int))], default=0)
    fields = pattern.count("{") + pattern.count("%")
    return len(pattern) + widest + fields * sum(printed_size(value) for value in values)


class _Charged(NodeTransformer):
    """Route loops and `~` through filters that charge the budget; the sandbox intercepts only binary operators."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja calls it by this name
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_charged_loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_charged_join", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which surrounds generated text: print the environment's marks around it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it
    priority = 200  # after the tag of transformers, which counts characters

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        opening, closing = getattr(self.environment, "generation_marks", ("", ""))
        return f"{opening}{caller()}{closing}"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of `transformers` with a budget. One print at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        self.budget = Budget(0)
        self.generation_marks = ("", "")
        self.now = datetime.now()
        theirs = chat_template_utils._compile_jinja_template("").environment
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            optimized=False,  # else constants are computed before there is a budget
            finalize=self._finalized,
            extensions=[*map(type, theirs.extensions.values()), _Generation],
        )
        self.filters = {name: self._charged_filter(name, run) for name, run in theirs.filters.items()}
        self.filters |= {"_charged_loop": self._charged_loop, "_charged_join": self._charged_join}
        self.globals = {**theirs.globals, "strftime_now": self._strftime_now}
        del self.globals["lipsum"]  # random text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charged().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        pieces = list(parts)
        self.budget.spend(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_operator_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        self.budget.spend(_call_size(called, args, kwargs))
        result = super().call(context, called, *args, **kwargs)
        self.budget.spend(_made(result))
        return result

    def _charged_filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = 1 if hasattr(run, "jinja_pass_arg") else 0

        @functools.wraps(run)
        def charged(*args: Any, **kwargs: Any) -> Any:
            passed, values = args[:num_passed], args[num_passed:]
            if name in _TEXT_FILTERS:
                values = tuple(list(value) if isinstance(value, Iterator) else value for value in values)
                self.budget.spend(_filter_size(name, values, kwargs))
            result = run(*passed, *values, **kwargs)
            self.budget.spend(_made(result))
            return result

        return charged

    def _charged_loop(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.spend()
            yield value

    def _charged_join(self, parts: list[Any]) -> str:
        self.budget.spend(sum(printed_size(part) for part in parts))
        return "".join(map(str, parts))

    def _finalized(self, value: Any) -> Any:
        self.budget.spend(printed_size(value))
        return value

    def _strftime_now(self, pattern: str) -> str:
        self.budget.spend(_MAX_WIDTH + _formatted_size(pattern, ()))
        return self.now.strftime(pattern)


def _operator_size(operator: str, left: Any, right: Any) -> int:
    match operator:
        case "+":
            return _made(left) + _made(right)
        case "*" if isinstance(left, int) and isinstance(right, int):
            return 0 if left.bit_length() + right.bit_length() <= _MAX_BITS else 1 << 62
        case "*":
            count = next((value for value in (left, right) if isinstance(value, int)), 1)
            return count * max(_made(left), _made(right))
        case "**" if isinstance(left, int) and isinstance(right, int):
            return 0 if abs(right) * left.bit_length() <= _MAX_BITS else 1 << 62
        case "%" if isinstance(left, str):
            return _formatted_size(left, right if isinstance(right, tuple) else (right,))
    return 0


def _call_size(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Characters that a string method will make."""
    method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return 0
    options = [*args, *kwargs.values()]
    if name == "join" and options:
        return _text_size(name, options[0], [text])
    return _text_size(name, text, options) + max([0, *(option for option in options if isinstance(option, int))])


def _filter_size(name: str, values: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Characters that a filter will make of its first value."""
    options = [*values[1:], *kwargs.values()]
    widest = _MAX_INDENT if name == "tojson" else _MAX_WIDTH
    if name in _WIDTH_FILTERS and any(isinstance(option, int) and option > widest for option in options):
        raise TooMuch(f"the filter {name} is given {max(option for option in options if isinstance(option, int)):,}")
    return _text_size(name, values[0], options) if values else 0


def _text_size(name: str, value: Any, options: Sequence[Any]) -> int:
    """An upper bound of what a method or filter of this name makes of a value, without widths that are numbers."""
    match name:
        case "replace" if len(options) > 1:
            return printed_size(value) + str(value).count(str(options[0])) * printed_size(options[1])
        case "join":
            separators = sum(printed_size(option) for option in options)
            return printed_size(value) + separators * (len(value) if isinstance(value, Sequence | Mapping) else 1)
        case "format" | "format_map":
            return _formatted_size(str(value), options)
        case "translate" if options and isinstance(options[0], Mapping):
            return printed_size(value) * max([1, *(printed_size(new) for new in options[0].values())])
        case "expandtabs":
            widths = [option for option in options if isinstance(option, int)]
            return printed_size(value) + str(value).count("\t") * max([8, *widths])
        case "indent":
            widths = [option if isinstance(option, int) else printed_size(option) for option in options]
            return printed_size(value) + (str(value).count("\n") + 1) * max([4, *widths])
    return printed_size(value)


@functools.lru_cache(maxsize=128)
def _compiled(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"it is longer than {MAX_SOURCE:,} characters")
    environment = BoundedEnvironment()
    return environment, environment.from_string(source)


@dataclass(frozen=True)
class ChatPrinter:
    """Print chats with one template. `variables` are the tokenizer's special tokens by name."""

    source: str
    variables: Mapping[str, str]
    now: datetime = field(default_factory=datetime.now)  # the same for all prints, so that they can be compared
    tools: tuple[Mapping[str, Any], ...] = ()  # definitions that all prints are given

    @property
    def has_generation_marks(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        opens_answer: bool = False,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Print the chat. Raise `Unusable` with the template's reason if it fails."""
        try:
            environment, template = _compiled(self.source)
            environment.now = self.now
            environment.budget = Budget(printed_size([*messages, *self.tools]))
            environment.generation_marks = generation_marks
            pieces = template.generate(
                messages=list(messages),
                tools=list(self.tools) or None,
                documents=None,
                add_generation_prompt=opens_answer,
                **self.variables,
            )
            return environment.concat(pieces)
        except Exception as error:  # a foreign program may raise anything; any error refuses the chat
            reason = str(error) or type(error).__name__
            if not isinstance(error, jinja2.TemplateError):
                reason = f"{type(error).__name__}: {reason}"
            raise Unusable(f"the chat template refuses it: {reason}") from error

    def try_print(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """Print the chat; None if that fails."""
        try:
            return self(messages, **options)
        except Unusable:
            return None


# -- finding the turns in the print ------------------------------------------------------------------------
#
# Find where the turns of a chat stand in the text that a template prints.
#
# Do not search for an answer's words: the question may contain them. Print the chat a second time with marks
# (private-use characters, each used once) in the contents. If removing the marks gives the first print, the marks
# show where the contents are. If not, try other places for the marks; what cannot be aligned is not scored.
#
# A template may cut a content at tags (the thought up to `</think>`), strip it, or test how it begins. So mark
# contents in stretches between the tags that appear in the template's source, first with the white space at a
# stretch's ends inside the marks, then outside.


_TAG = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")
_ATOM = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]|\w+|\s+|.", re.DOTALL)
_FIRST_MARK, _LAST_MARK = 0xF0000, 0x10FFFD  # private-use code points
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")

Span = tuple[int, int]  # characters [start, end) of the printed chat


@dataclass(frozen=True)
class Stretch:
    """A part of a turn's content, or of its thought, between two marks."""

    turn: int
    opens: str
    closes: str
    is_thought: bool = False
    is_final: bool = False  # only tags and white space follow it in the content
    call: int = -1  # the call of a tool that it is a text of, if any
    lead: str = ""  # the tags before it, if the content begins with them


@dataclass(frozen=True)
class Place:
    stretch: Stretch
    start: int
    end: int


@dataclass(frozen=True)
class Aligned:
    """A printed chat and the places of its turns."""

    whole: str
    places: tuple[Place, ...]  # in reading order
    marked: tuple[Turn, ...]  # the turns with marks, to print parts of the chat again
    stretches: tuple[Stretch, ...]
    marks: frozenset[str]
    marks_everyone: bool
    form: Form  # in which the messages were given to the template
    generated: tuple[Span, ...] | None  # what the template itself marks as generated

    def of_turn(self, turn: int) -> list[Place]:
        return [place for place in self.places if place.stretch.turn == turn]

    @property
    def printed_turns(self) -> set[int]:
        return {place.stretch.turn for place in self.places}

    def before(self, start: int) -> int:
        """The end of the marked text before `start`."""
        return max((place.end for place in self.places if place.end <= start), default=0)

    def after(self, end: int) -> int:
        """The start of the marked text after `end`, or the end of the chat."""
        return min((place.start for place in self.places if place.start >= end), default=len(self.whole))


class Form(NamedTuple):
    """What templates differ in: contents as lists of parts, arguments of calls as objects or as JSON in a text."""

    in_parts: bool = False
    has_json: bool = False


def messages_of(turns: Sequence[Turn], form: Form) -> list[dict[str, object]]:
    """Turns as the messages a template takes. A thought is passed under both names in use."""
    messages: list[dict[str, object]] = []
    for turn in turns:
        content: object = [{"type": "text", "text": turn.content}] if form.in_parts else turn.content
        thought = {"reasoning_content": turn.thought, "thinking": turn.thought} if turn.thought else {}
        calls = {"tool_calls": [_given_call(call, form) for call in turn.calls]} if turn.calls else {}
        messages.append({"role": turn.role, "content": content, **thought, **calls, **turn.names})
    return messages


def _given_call(call: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
    if not form.has_json:
        return call
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def align(printer: ChatPrinter, turns: Sequence[Turn], whole: str, form: Form) -> Iterator[Aligned]:
    """Yield each way to mark the turns that leaves the printed chat unchanged, the most exact first."""
    tags = set(_TAG.findall(printer.source))
    tried: list[tuple[Turn, ...]] = []
    for marks_everyone, left, right in product((True, False), (True, False), (True, False)):
        marks = _free_marks([printer.source, whole, *map(_text_of, turns)])
        generation = (next(marks, ""), next(marks, ""))
        writer = _Marker(tags, marks, is_outer=(left, right))
        marked = tuple(
            writer.marked(number, turn) if marks_everyone or turn.role == "assistant" else turn
            for number, turn in enumerate(turns)
        )
        if marked in tried:
            continue
        tried.append(marked)
        printed = printer.try_print(messages_of(marked, form), generation_marks=generation)
        if printed is None:
            continue
        used = frozenset(generation) | {m for stretch in writer.stretches for m in (stretch.opens, stretch.closes)}
        unmarked, positions = _without_marks(printed, used)
        if unmarked == whole:
            yield Aligned(
                whole,
                tuple(_places(writer.stretches, positions)),
                marked,
                tuple(writer.stretches),
                used,
                marks_everyone,
                form,
                _generated(positions, generation) if printer.has_generation_marks else None,
            )


def _generation_spans(printer: ChatPrinter, turns: Sequence[Turn]) -> tuple[Span, ...]:
    """Find the spans that the template marks with `{% generation %}`; none if it marks none."""
    marks = _free_marks([printer.source, *map(_text_of, turns)])
    generation = (next(marks), next(marks))
    printed = printer.try_print(messages_of(turns, Form()), generation_marks=generation)
    return () if printed is None else _generated(_without_marks(printed, frozenset(generation))[1], generation)


def after_mark(printed: str, mark: str, marks: frozenset[str]) -> str | None:
    """The text after the last `mark` in a marked print, with all marks removed; None without such a mark."""
    _, separator, after = printed.rpartition(mark)
    return _without_marks(after, marks)[0] if separator else None


def common_start(left: str, right: str) -> str:
    """The common prefix of two texts in whole words and tags: `<|end|>` and `<|endoftext|>` share nothing."""
    shared = ""
    for one, other in zip(_ATOM.findall(left), _ATOM.findall(right), strict=False):
        if one != other:
            break
        shared += one
    return shared


# -- marks -----------------------------------------------------------------------------------------------


def _free_marks(texts: Iterable[str]) -> Iterator[str]:
    taken = {character for text in texts for character in text if ord(character) >= _FIRST_MARK}
    return (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)


def _text_of(turn: Turn) -> str:
    return turn.content + turn.thought + (json.dumps(turn.calls, ensure_ascii=False) if turn.calls else "")


class _Marker:
    """Put marks into turns. `is_outer`: whether white space at the (left, right) end of a content is inside them."""

    def __init__(self, tags: set[str], marks: Iterator[str], *, is_outer: tuple[bool, bool]) -> None:
        self._tags = tags
        self._marks = marks
        self._is_outer = is_outer
        self.stretches: list[Stretch] = []

    def marked(self, number: int, turn: Turn) -> Turn:
        thought = self._stretch(Stretch(number, "", "", is_thought=True), turn.thought, (False, False))
        content = self._content(number, turn.content)
        stretch = Stretch(number, "", "", is_final=True)
        calls = tuple(self._call(replace(stretch, call=place), call) for place, call in enumerate(turn.calls))
        return replace(turn, thought=thought, content=content, calls=calls)

    def _call(self, stretch: Stretch, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call with marks in its name and in all texts of its arguments: templates print them in any order."""
        return {**call, "function": {name: self._leaves(stretch, value) for name, value in call["function"].items()}}

    def _leaves(self, stretch: Stretch, value: Any) -> Any:
        match value:
            case str():
                return self._stretch(stretch, value, (False, False))
            case Mapping():
                return {name: self._leaves(stretch, inner) for name, inner in value.items()}
            case list():
                return [self._leaves(stretch, inner) for inner in value]
        return value

    def _content(self, number: int, content: str) -> str:
        parts = self._parts(content)
        filled = [place for place, part in enumerate(parts) if not is_blank(part) and part not in self._tags]
        if not filled:
            return self._stretch(Stretch(number, "", "", is_final=True), content, (False, False))
        for place in filled:
            is_final = place == filled[-1]
            lead = "".join(parts[:place]).strip() if place == filled[0] else ""
            stretch = Stretch(number, "", "", is_final=is_final, lead=lead)
            parts[place] = self._stretch(stretch, parts[place], self._is_outer if is_final else (False, False))
        return "".join(parts)

    def _parts(self, content: str) -> list[str]:
        """The content cut around the tags that appear in the template's source."""
        parts: list[str] = [""]
        for piece in re.split(f"({_TAG.pattern})", content):
            if piece in self._tags:
                parts += [piece, ""]
            else:
                parts[-1] += piece
        return parts

    def _stretch(self, stretch: Stretch, text: str, is_outer: tuple[bool, bool]) -> str:
        core = text.strip()
        if is_blank(core):
            return text
        stretch = replace(stretch, opens=next(self._marks, ""), closes=next(self._marks, ""))
        self.stretches.append(stretch)
        start = 0 if is_outer[0] else text.index(core)
        end = len(text) if is_outer[1] else text.index(core) + len(core)
        return text[:start] + stretch.opens + text[start:end] + stretch.closes + text[end:]


def _without_marks(printed: str, marks: frozenset[str]) -> tuple[str, dict[str, list[int]]]:
    """The print without marks, and the positions of each mark in it."""
    positions: dict[str, list[int]] = {}
    pieces: list[str] = []
    cursor = length = 0
    for match in _MARKS.finditer(printed):
        if match[0] not in marks:  # a private-use character of the text itself
            continue
        pieces.append(printed[cursor : match.start()])
        length += match.start() - cursor
        positions.setdefault(match[0], []).append(length)
        cursor = match.end()
    return "".join([*pieces, printed[cursor:]]), positions


def _places(stretches: Sequence[Stretch], positions: dict[str, list[int]]) -> list[Place]:
    """The places of the stretches that are printed whole and exactly once."""
    places = []
    for stretch in stretches:
        starts, ends = positions.get(stretch.opens, []), positions.get(stretch.closes, [])
        if len(starts) == len(ends) == 1 and starts[0] <= ends[0]:
            places.append(Place(stretch, starts[0], ends[0]))
    return sorted(places, key=lambda place: place.start)


def _generated(positions: dict[str, list[int]], marks: tuple[str, str]) -> tuple[Span, ...]:
    return tuple(zip(positions.get(marks[0], []), positions.get(marks[1], []), strict=False))


# -- writing chats -----------------------------------------------------------------------------------------


_QUESTION = Turn("user", "\U000f0001")  # a character that no template prints by itself
_MAX_RUNAWAYS = 3  # consecutive chats that exceed the template's budget; each may cost seconds


@dataclass
class TemplateChat:
    """Print a chat with the tokenizer's template."""

    tokenizer: Tokenizer
    tally: Tally
    day: str = ""  # that the template prints; empty: today
    prints_marks: bool = True  # False: a pair that holds marks of the template already stays as it stands
    _usual_marks: dict[Form, str] = field(default_factory=dict)  # end mark of a plain answer
    _is_compared: bool = False
    _runaways: int = 0
    _printer: ChatPrinter = field(init=False)
    _wants_parts: bool = field(init=False)

    def __post_init__(self) -> None:
        day = day_or_today(self.day)
        self._printer = replace(_printer(self.tokenizer), now=datetime.fromisoformat(day))
        if prints_day(self.tokenizer):
            self.tally.note(f"the chat template prints the day: it is {day} in all records (data.day)")
        self._wants_parts = _wants_parts(self._printer)

    def __call__(self, chat: Chat) -> tuple[Segments, bool]:
        if chat.pair is not None:
            if not self.prints_marks and any(mark in text for mark in self._own_marks for text in chat.pair):
                self.tally.counters["pairs_with_marks"] += 1
                return _joined([(chat.pair[0], False), (chat.pair[1], True)]), False
            self.tally.note("records of a prompt and an answer are printed with the chat template (data.chat)")
        turns = chat.turns
        self.tally.counters["ignored_tools"] += bool(chat.tools) and "tools" not in self._printer.source
        try:
            whole, aligned = self._aligned(chat)
        except Unusable as error:
            self._count_runaway(error)
            raise
        self._runaways = 0
        if aligned is None:
            spans = list(_generation_spans(self._printer, turns))
            if not spans or any(turn.is_given for turn in turns):
                raise Unusable("the chat template prints the answers so that they cannot be found again")
            return _cut(whole, spans), True
        others = {stretch.turn for stretch in aligned.stretches if turns[stretch.turn].role != "assistant"}
        self.tally.counters["unprinted_turns"] += len(others - aligned.printed_turns)
        spans = []
        for number, turn in enumerate(turns):
            if turn.role == "assistant" and not turn.is_given and not turn.is_empty_answer:
                spans += self._answer(number, aligned)
        return _cut(whole, sorted(spans)), True

    def contents(self, chat: Chat) -> list[tuple[tuple[int, bool], Span]]:
        """Where the contents (False) and thoughts (True) of the turns stand in the print, in reading order."""
        _, aligned = self._aligned(chat)
        places = () if aligned is None else aligned.places
        return [
            ((place.stretch.turn, place.stretch.is_thought), (place.start, place.end))
            for place in places
            if place.stretch.call < 0
        ]

    @cached_property
    def _own_marks(self) -> list[str]:
        """The special tokens that the template prints around turns."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return [str(token) for token in added if token.special and str(token) in self._printer.source]

    # -- printing ------------------------------------------------------------------------------------------

    def _aligned(self, chat: Chat) -> tuple[str, Aligned | None]:
        """The print and its best alignment. Try the forms of messages; take the one that aligns most turns."""
        turns = chat.turns
        if chat.tools != self._printer.tools:
            self._printer = replace(self._printer, tools=chat.tools)
        has_calls = any(turn.calls for turn in turns)
        filled = {number for number, turn in enumerate(turns) if not is_blank(_text_of(turn))}
        prints: list[tuple[int, str, Aligned | None]] = []
        refusal: Unusable | None = None
        parts = (self._wants_parts, not self._wants_parts)
        for form in (Form(in_parts, has_json) for in_parts in parts for has_json in (False, True)[: 1 + has_calls]):
            messages = messages_of(turns, form)
            try:
                whole = self._printer(messages)
            except Unusable as error:
                if isinstance(error.__cause__, TooMuch):
                    raise
                refusal = refusal or error
                continue
            self._compare(messages, whole)
            alignments = self._best_first(turns, whole, form)
            best = alignments[0] if alignments else None
            num_printed = len(best.printed_turns) if best else 0
            prints.append((num_printed, whole, best))
            if best and best.printed_turns == filled:
                break
        if not prints:
            assert refusal is not None
            raise refusal
        _, whole, best = max(prints, key=lambda one: one[0])  # of equals the first
        return whole, best

    def _best_first(self, turns: Sequence[Turn], whole: str, form: Form) -> list[Aligned]:
        alignments: list[Aligned] = []
        for aligned in align(self._printer, turns, whole, form):
            alignments.append(aligned)
            if len(aligned.places) == len(aligned.stretches):
                break
        return sorted(alignments, key=lambda one: -len(one.printed_turns))

    def _compare(self, messages: list[dict[str, object]], whole: str) -> None:
        """Check, for the first chat only, that our print equals the tokenizer's own."""
        if self._is_compared or "strftime_now" in self._printer.source:
            return
        self._is_compared = True
        try:
            tools = list(self._printer.tools) or None
            own = str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        except (TemplateError, TypeError, ValueError) as error:
            own = f"an error: {error}"
        if own != whole:
            start = len(common_start(own, whole))
            raise DataError(
                f"the tokenizer prints chats otherwise than its template: {own[start : start + 40]!r} in place of "
                f"{whole[start : start + 40]!r}",
                advice=["write the chats as text yourself, as {'prompt', 'completion'} or {'text'}"],
            )

    def _count_runaway(self, error: Unusable) -> None:
        self._runaways = self._runaways + 1 if isinstance(error.__cause__, TooMuch) else 0
        if self._runaways >= _MAX_RUNAWAYS:
            raise DataError(
                f"the chat template cannot be used, {self._runaways} chats in a row: {error}",
                advice=["fix chat_template in the model's folder", "write the chats as text yourself"],
            ) from error

    # -- spans ---------------------------------------------------------------------------------------------

    def _answer(self, number: int, aligned: Aligned) -> list[Span]:
        """The scored spans of one answer: its text with the end mark, and an end-of-text token that ends the print."""
        places, start = aligned.of_turn(number), None
        own = [stretch for stretch in aligned.stretches if stretch.turn == number]
        has_calls = {stretch.call for stretch in own} == {place.stretch.call for place in places}
        if places and has_calls and places[-1].stretch.is_final and self._is_whole(places, aligned):
            start = self._start(number, aligned)
        if start is None:
            self.tally.counters["unscored_turns"] += 1
            return []
        end = places[-1].end
        if aligned.generated is not None and not any(first < end and start < last for first, last in aligned.generated):
            self.tally.counters["turns_not_marked_generated"] += 1
            return []
        is_printed = {place.stretch for place in places}
        self.tally.counters["unprinted_thoughts"] += any(one.call < 0 and one not in is_printed for one in own)
        rest = aligned.whole[end : aligned.after(end)]
        is_last = aligned.after(end) == len(aligned.whole)
        mark = self._end_mark(number, aligned, places[-1].stretch, rest, is_last=is_last)
        if mark is None:
            return []
        spans = [(start, end + len(mark))]
        eos = str(self.tokenizer.eos_token or "")
        if is_last and eos and rest[len(mark) :].strip() == eos:
            spans.append((len(aligned.whole.rstrip()) - len(eos), len(aligned.whole.rstrip())))
        return spans

    def _is_whole(self, places: Sequence[Place], aligned: Aligned) -> bool:
        """Whether no other turn is printed inside the answer."""
        start, end = places[0].start, places[-1].end
        inside = [place for place in aligned.places if start <= place.start and place.end <= end]
        return len(inside) == len(places)

    def _start(self, number: int, aligned: Aligned) -> int | None:
        """Where the answer begins, including the tags that open its thought; None if that is unclear."""
        first = aligned.of_turn(number)[0]
        added = aligned.whole[aligned.before(first.start) : first.start]
        if first.stretch.call >= 0:
            if header := next((one for one in self._headers(number, aligned) if added.startswith(one)), ""):
                return first.start - len(added) + len(header)
            opening = self._opening(aligned.marked[:number], aligned.form)
            return first.start - len(added.rpartition(opening)[2]) if opening and opening in added else None
        if first.stretch.is_thought and aligned.marks_everyone:
            opening = self._opening(aligned.marked[:number], aligned.form)
            return first.start - len(added.rpartition(opening)[2]) if opening and opening in added else first.start
        lead = first.stretch.lead
        return first.start - len(added) + added.rindex(lead) if lead and added.rstrip().endswith(lead) else first.start

    def _headers(self, number: int, aligned: Aligned) -> Iterator[str]:
        """What the template prints before a plain answer in place of this call: the turn's header, an empty thought."""
        mark = "\U0010fffd"  # after the last that `_free_marks` gives
        turns = [*aligned.marked[:number], Turn("assistant", mark), *aligned.marked[number + 1 :]]
        for chat in (turns, turns[: number + 1]):  # results may be refused that follow no call
            printed = self._printer.try_print(messages_of(chat, aligned.form)) or ""
            before, found, _ = printed.partition(mark)
            if found:
                yield before[max(before.rfind(one) for one in aligned.marks) + 1 :]

    def _opening(self, before: Sequence[Turn], form: Form) -> str:
        """What the template prints to open an answer after these turns, without the answers at their end."""
        turns = list(before)
        while turns and turns[-1].role == "assistant":
            turns.pop()
        messages = messages_of(turns or [_QUESTION], form)
        opened = self._printer.try_print(messages, opens_answer=True)
        closed = self._printer.try_print(messages)
        return "" if opened is None or closed is None else opened[len(common_start(opened, closed)) :]

    def _end_mark(self, number: int, aligned: Aligned, final: Stretch, rest: str, *, is_last: bool) -> str | None:
        """The end mark at the start of `rest`, the text after the answer; of a call with all that closes it."""
        usual = self._usual_mark(aligned.form)
        if usual and rest.startswith(usual):
            return usual
        mark = self._derived_mark(aligned.marked[: number + 1], final.closes, aligned.marks, aligned.form)
        if mark is not None and rest.startswith(mark):
            return mark
        if is_last:
            return rest.rstrip()
        self.tally.counters["unscored_turns" if final.call >= 0 else "answers_without_end_mark"] += 1
        return None if final.call >= 0 else ""

    def _usual_mark(self, form: Form) -> str:
        """The end mark of a plain answer to a plain question. Most templates have only this one."""
        if form not in self._usual_marks:
            closes = "\U000f0000"
            turns = [_QUESTION, Turn("assistant", f"y{closes}")]
            mark = self._derived_mark(turns, closes, frozenset(closes), form)
            self._usual_marks[form] = mark or ""
            if mark == "":
                self.tally.note("the chat template ends answers with no mark: only the last one of a chat has an end")
        return self._usual_marks[form]

    def _derived_mark(self, turns: Sequence[Turn], closes: str, marks: frozenset[str], form: Form) -> str | None:
        """Derive the end mark: let the template open another answer directly after this one."""
        for chat in (list(turns), [_QUESTION, *turns]):  # some templates need a question first
            messages = messages_of(chat, form)
            closed = self._printer.try_print(messages)
            if closed is not None:
                break
        else:
            return None
        opened = self._printer.try_print(messages, opens_answer=True)
        after_closed, after_opened = (after_mark(printed or "", closes, marks) for printed in (closed, opened))
        if after_opened is None or after_closed is None or after_opened == after_closed:
            return None if after_closed is None else after_closed.rstrip()
        opening = self._opening(turns[:-1], form)
        if opening and after_opened.endswith(opening):
            return after_opened.removesuffix(opening).rstrip()
        return common_start(after_opened, after_closed).rstrip()


def prints_day(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's chat template asks for the time."""
    return "strftime_now" in str(tokenizer.chat_template)


def day_or_today(day: str) -> str:
    return day or date.today().isoformat()


def conversation_text(tokenizer: Tokenizer, turns: Sequence[Turn], *, opens_answer: bool = True) -> str:
    """Print turns, with the opening of an answer if asked for. Raise `Unusable` with the template's reason."""
    printer = _printer(tokenizer)
    return printer(messages_of(turns, Form(_wants_parts(printer))), opens_answer=opens_answer)


def _printer(tokenizer: Tokenizer) -> ChatPrinter:
    """A printer with the tokenizer's default template."""
    source = tokenizer.chat_template
    if not isinstance(source, str):
        try:
            source = str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates without a default
            raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from error
    return ChatPrinter(source, dict(tokenizer.special_tokens_map))


def _wants_parts(printer: ChatPrinter) -> bool:
    """Whether the template prints a content given as parts but not one given as text."""
    prints = [printer.try_print(messages_of([_QUESTION], Form(in_parts))) for in_parts in (False, True)]
    return [_QUESTION.content in (text or "") for text in prints] == [False, True]


@dataclass(frozen=True)
class PlainChat:
    """Print a chat as "role: content" lines, for tokenizers without a template. A pair is written as it stands."""

    tally: Tally

    def __call__(self, chat: Chat) -> tuple[Segments, bool]:
        self.tally.counters["ignored_tools"] += bool(chat.tools)
        if any(turn.calls for turn in chat.turns):
            raise Unusable("has calls of tools, and the tokenizer has no chat template to print them")
        if chat.pair is None:
            self.tally.note('the tokenizer has no chat template: chats are written as "role: content" lines')
        pieces: list[tuple[str, bool]] = []
        for turn, (header, text) in zip(chat.turns, self._written(chat), strict=True):
            self.tally.counters["unprinted_thoughts"] += bool(turn.thought)
            is_scored = turn.role == "assistant" and not turn.is_given and not is_blank(turn.content)
            pieces += [(header, False), (text, is_scored)]
        return _joined(pieces), False

    def _written(self, chat: Chat) -> list[tuple[str, str]]:
        """What is put before the text of each turn, and the text with what follows it."""
        if chat.pair is not None:
            return [("", text) for text in chat.pair]
        return [(f"{turn.role}: ", f"{turn.content}\n") for turn in chat.turns]

    def contents(self, chat: Chat) -> list[tuple[tuple[int, bool], Span]]:
        """As `TemplateChat.contents`."""
        found, cursor = list[tuple[tuple[int, bool], Span]](), 0
        for number, (turn, (header, text)) in enumerate(zip(chat.turns, self._written(chat), strict=True)):
            start = cursor + len(header)
            cursor = start + len(text)
            found.append(((number, False), (start, start + len(turn.content))))
        return found


def _cut(whole: str, spans: Sequence[Span]) -> Segments:
    pieces: list[tuple[str, bool]] = []
    cursor = 0
    for start, end in spans:
        if start < cursor:
            raise Unusable("the chat template prints one answer inside another")
        pieces += [(whole[cursor:start], False), (whole[start:end], True)]
        cursor = end
    return _joined([*pieces, (whole[cursor:], False)])


def _joined(pieces: Sequence[tuple[str, bool]]) -> Segments:
    """Join adjacent pieces with the same `is_scored`, so that only a real change forces a token boundary."""
    joined: list[tuple[str, bool]] = []
    for text, is_scored in pieces:
        if text and joined and joined[-1][1] == is_scored:
            joined[-1] = (joined[-1][0] + text, is_scored)
        elif text:
            joined.append((text, is_scored))
    return tuple(joined)


def chat_writer(tokenizer: Tokenizer, tally: Tally, config: DataConfig) -> TemplateChat | PlainChat:
    """Print chats with the tokenizer's template, where it has one."""
    if tokenizer.chat_template:
        return TemplateChat(tokenizer, tally, config.day, prints_marks=config.chat == "on")
    if config.chat == "on":
        raise ConfigError(
            "data.chat is on and the tokenizer has no chat template",
            where="data.chat",
            advice=["put chat_template into tokenizer_config.json of the model", "--set data.chat=auto"],
        )
    return PlainChat(tally)


# -- prompts: tokenized with the opening that a run's documents have ---------------------------------------


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, bos: Bos = "auto", is_raw: bool = False) -> tuple[list[int], bool]:
    """The tokens of a prompt, and whether the chat template printed it: if there is one, unless `is_raw`.

    The template prints one user turn and opens the answer. Special tokens are parsed in a template's print and nowhere
    else. An empty raw prompt is the opening alone, or else BOS or the end-of-text token.
    """
    is_chat = bool(tokenizer.chat_template) and not is_raw
    text = _question_text(tokenizer, [Turn("user", prompt)], "prompt") if is_chat else prompt
    if ids := _opened_ids(tokenizer, text, bos, is_printed=is_chat):
        return ids, is_chat
    marks = (getattr(tokenizer, "bos_token_id", None), tokenizer.eos_token_id)
    begin = next((int(mark) for mark in marks if mark is not None), None)
    if begin is None:
        raise ConfigError("there is nothing to continue: the prompt is empty", advice=["give a text with --prompt"])
    return [begin], is_chat


def chat_ids(tokenizer: Tokenizer, turns: Sequence[Turn], *, bos: Bos = "auto") -> list[int]:
    """The tokens of a conversation that ends in a question, with the opening of the answer.

    Without a chat template turns are "role: content" lines, as such chats are trained on.
    """
    if not tokenizer.chat_template:
        lines = [f"{turn.role}: {turn.content}\n" for turn in turns]
        return prompt_ids(tokenizer, "".join([*lines, "assistant:"]), bos=bos, is_raw=True)[0]
    return _opened_ids(tokenizer, _question_text(tokenizer, turns, "conversation"), bos)


def _opened_ids(tokenizer: Tokenizer, text: str, bos: Bos, *, is_printed: bool = True) -> list[int]:
    """The tokens of a text after the opening of documents. Special tokens are parsed in what a template printed."""
    options = {"add_special_tokens": False, "split_special_tokens": not is_printed, "verbose": False}
    ids = tokenizer([text], **options)["input_ids"][0] if text else []
    return opened(list(ids), opening_ids(tokenizer, bos))


_MARK = "stillroom7answer"


def question_opening(tokenizer: Tokenizer, *, bos: Bos = "auto") -> tuple[list[int], set[int]]:
    """The tokens that a chat template prints before a user's question, and those that end the question.

    A system block that the template prints by itself is part of them.
    """
    text = _question_text(tokenizer, [Turn("user", _MARK)], "prompt")
    before, mark, after = text.partition(_MARK)
    if not mark or not before:
        raise ConfigError(
            "the chat template prints nothing before a question, so there is nothing to begin from",
            where="write.start",
            advice=["--set write.start=documents begins with texts"],
        )
    return _opened_ids(tokenizer, before, bos), _first_special(tokenizer, after) | turn_end_ids(tokenizer)


def turn_end_ids(tokenizer: Tokenizer) -> set[int]:
    """The special token that the chat template prints right after an answer; empty if it prints none."""
    if not tokenizer.chat_template:
        return set()
    try:
        whole = conversation_text(tokenizer, [Turn("user", "a"), Turn("assistant", _MARK)], opens_answer=False)
    except Unusable:
        return set()
    _before, mark, after = whole.rpartition(_MARK)
    if not mark or not after.strip():
        return set()
    return _first_special(tokenizer, after)


def _first_special(tokenizer: Tokenizer, after: str) -> set[int]:
    """The special token that a print begins with; empty if it begins with none."""
    ids = list(tokenizer([after.lstrip()], add_special_tokens=False)["input_ids"][0])
    first = str(tokenizer.convert_ids_to_tokens(ids[0])) if ids else ""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    is_special = ids and (ids[0] in getattr(tokenizer, "all_special_ids", ()) or ids[0] in added)
    return {int(ids[0])} if is_special and first and after.lstrip().startswith(first) else set()


def _question_text(tokenizer: Tokenizer, turns: Sequence[Turn], what: str) -> str:
    """Print turns with the opening of an answer, for a command. `what` names them in the error."""
    try:
        return conversation_text(tokenizer, turns)
    except Unusable as error:
        reason = str(error).removeprefix("the chat template refuses it: ")
        raise ConfigError(
            f"the tokenizer's chat template refuses the {what}: {reason}",
            where="--prompt" if what == "prompt" else "",
            advice=["--raw continues the text as it stands, without the template"],
        ) from error
