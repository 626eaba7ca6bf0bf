"""Run chat templates in the sandbox of transformers, within bounds of work and memory.

A template is a foreign program: it may divide by zero, loop for hours or build a string of 10^10 characters. The
environment is that of `transformers` (its sandbox, tags, filters and globals), and charges each loop step, call,
operator and filter to a budget that grows with the length of the chat. The budget counts work, not time, so the same
records are refused on every machine.

Not bounded: parsing a template (sources above MAX_SOURCE are refused), and one built-in call over values that are
themselves within bounds, such as sorting a list.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from stillroom.data.records import Unusable

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
            environment.budget = Budget(printed_size(list(messages)))
            environment.generation_marks = generation_marks
            pieces = template.generate(
                messages=list(messages),
                tools=None,
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
