"""Read the records of one source, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stillroom.config.data import DataConfig, SourceConfig
from stillroom.data.records import ChatWriter, Record, Shaper, Tally, Unusable
from stillroom.data.sources import read_spec
from stillroom.data.sources.checked import checked


def read_records(
    source: SourceConfig,
    config: DataConfig,
    write_chat: ChatWriter,
    tally: Tally,
    *,
    is_evaluation: bool = False,
) -> Iterator[Record]:
    """The records of a source that is no embedded corpus. Count in the tally what is refused."""
    columns = source.needed_columns
    items = read_spec(source.path, tally, is_evaluation=is_evaluation, streams=config.streaming, columns=columns)
    items = checked(items, source, source.path)
    if config.max_records:
        items = _first(items, config.max_records, source.path, tally)
    shape = Shaper(write_chat, tally, train_on_prompt=config.train_on_prompt, layout=source)
    for where, value in items:
        try:
            record = shape(where, value)
        except Unusable as error:
            tally.refuse(where, str(error))
            continue
        yield record


def _first(items: Iterator[tuple[str, object]], limit: int, spec: str, tally: Tally) -> Iterator[tuple[str, object]]:
    yield from itertools.islice(items, limit)
    if next(items, None) is not None:
        tally.note(f"{spec} holds more than data.max_records = {limit:,}: the rest is not read")
