"""Print a preview of data: a summary, and documents with the scored text in colour.

Without colours, scored text is between [[ and ]].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from stillroom.telemetry.record import Fields, items, section, show
from stillroom.telemetry.wording import clean, format_count, format_percent

_SHOWN_CHARACTERS = 4000  # of one document
_SCORED, _UNSCORED = "bold green", "dim"


def show_preview(result: Fields, stream: TextIO | None = None) -> None:
    console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    has_colour = console.is_terminal and not console.no_color
    for line in summary_lines(result):
        console.print(line)
    documents = items(result, "rows")
    if documents:
        console.print(f"\n{len(documents):,} of {show(result, 'documents', format_count)} documents, ", end="")
        console.print(Text("scored in this colour", style=_SCORED) if has_colour else "scored between [[ and ]]")
    for document in documents:
        tokens, scored = document["tokens"], document["scored_tokens"]
        source = f"  of {clean(document['source'])}" if "source" in document else ""
        console.print(f"\n-- {clean(document['id'])}{source}  {tokens:,} tokens, {scored:,} scored")
        pieces = list(_shown(document["pieces"]))
        if has_colour:
            styled = [(text, _SCORED if is_scored else _UNSCORED) for text, is_scored in pieces]
            console.print(Text.assemble(*styled))
        else:
            console.print("".join(f"[[{text}]]" if is_scored else text for text, is_scored in pieces))


def summary_lines(result: Fields) -> list[str]:
    """Name, shapes and lengths of the data, how much is scored, and what is left out and why."""
    shapes = ", ".join(f"{clean(name)} ({count:,})" for name, count in section(result, "shapes").items())
    lines = [
        f"data      {clean(result.get('data'))}",
        f"model     {clean(result.get('model'))}",
        f"shape     {shapes or '-'}",
        f"length    {show(result, 'tokens', format_count)} tokens in {show(result, 'documents', format_count)} "
        f"documents{_spread(result)}",
        f"rows      {show(result, 'training_rows', format_count)} for training, of up to "
        f"{show(result, 'max_length', format_count)} tokens",
        f"scored    {show(result, 'scored_tokens', format_count)} tokens, "
        f"{show(result, 'scored_share', format_percent)} of all",
    ]
    lines += [line for source in items(result, "sources") for line in _source_lines(source)]
    duplicates = section(result, "duplicates")
    lines += (
        [f"copies    {show(duplicates, 'inside', format_count)} records repeat an earlier one"] if duplicates else []
    )
    if duplicates.get("between"):
        lines.append(f"          {show(duplicates, 'between', format_count)} evaluation records are also trained on")
    left_out = section(result, "left_out")
    lines += [f"left out  {count:,} {clean(name.replace('_', ' '))}" for name, count in left_out.items()]
    lines += [f"          {clean(bad['where'])}: {clean(bad['why'])}" for bad in items(result, "bad_records")]
    return [*lines, *(f"note      {clean(note)}" for note in items(result, "notes"))]


def _spread(result: Fields) -> str:
    lengths = section(result, "lengths")
    named = (f"{name.replace('_', ' ')} {show(lengths, name, format_count)}" for name in lengths)
    return ": " + ", ".join(named) if lengths else ""


def _source_lines(source: Fields) -> list[str]:
    """One of several sources: how often it is seen, what of it is learned, and its size."""
    learned = "from the text alone" if source.get("objectives") == "labels" else "from text and teacher"
    return [
        f"source    {clean(source.get('path'))}, weight {show(source, 'weight', '{:g}'.format)}, learned {learned}",
        f"          {show(source, 'tokens', format_count)} tokens in {show(source, 'documents', format_count)} "
        f"documents{_spread(source)}, {show(source, 'scored_share', format_percent)} scored",
    ]


def _shown(pieces: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """The pieces of a document without control characters, cut after _SHOWN_CHARACTERS."""
    num_left = _SHOWN_CHARACTERS
    for text, is_scored in pieces:
        if num_left <= 0:
            break
        yield clean(text[:num_left], keep_lines=True), is_scored
        num_left -= len(text)
    total = sum(len(text) for text, _ in pieces)
    if total > _SHOWN_CHARACTERS:
        yield f"\n... {total - _SHOWN_CHARACTERS:,} more characters", False
