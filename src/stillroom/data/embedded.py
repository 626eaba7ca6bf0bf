"""The records of the embedded corpora: the text of the Python installation that runs this."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

from stillroom.builtin import corpus as stdlib
from stillroom.data.records import Record, Segments, content_key
from stillroom.errors import DataError

BUILTIN_PREFIX = "builtin:"

Documents = Iterator[tuple[stdlib.Document, Segments]]


def _whole(documents: Iterator[stdlib.Document]) -> Documents:
    return ((document, ((document.text, True),)) for document in documents)


def _questions(root: Path | None, train_on_prompt: bool) -> Documents:
    for document, prompt, answer in stdlib.question_answers(root):
        yield document, ((prompt, train_on_prompt), (answer, True))


_BUILTINS: dict[str, Callable[[bool], Documents]] = {
    "stdlib": lambda _: _whole(stdlib.modules()),
    "stdlib-source": lambda _: _whole(stdlib.modules()),
    "stdlib-docs": lambda _: _whole(stdlib.docstrings()),
    "qa": lambda train_on_prompt: _questions(None, train_on_prompt),
}
_WITH_TOPICS = ("stdlib", "stdlib-docs")
_OWN_ROOT = Path(stdlib.__file__).resolve().parent.parent


def embedded_records(spec: str, *, train_on_prompt: bool) -> tuple[list[Record], bool]:
    """All records of an embedded corpus, and whether they come from the standard library."""
    name = spec.removeprefix(BUILTIN_PREFIX)
    if name not in _BUILTINS:
        near = difflib.get_close_matches(name, _BUILTINS, n=1)
        advice = [f"did you mean {BUILTIN_PREFIX}{near[0]}"] if near else []
        specs = ", ".join(f"{BUILTIN_PREFIX}{builtin}" for builtin in _BUILTINS)
        raise DataError(f"there is no embedded corpus {spec!r}", advice=[*advice, f"the embedded ones are {specs}"])
    documents = list(_BUILTINS[name](train_on_prompt))
    is_stdlib = bool(documents)
    if not is_stdlib:
        documents = list(_questions(_OWN_ROOT, train_on_prompt) if name == "qa" else _whole(stdlib.own_text()))
    elif name in _WITH_TOPICS:
        documents = [*_whole(stdlib.topics()), *documents]
    return [_embedded(document, segments) for document, segments in documents], is_stdlib


def _embedded(document: stdlib.Document, segments: Segments) -> Record:
    return Record(document.name, segments, content_key("".join(text for text, _ in segments)), document.group)
