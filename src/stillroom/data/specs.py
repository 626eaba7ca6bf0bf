"""Read every source of a configuration into documents, and split off what is held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stillroom.builtin import corpus as stdlib
from stillroom.config.data import DataConfig, SourceConfig
from stillroom.data.chat import chat_writer
from stillroom.data.embedded import BUILTIN_PREFIX, embedded_records
from stillroom.data.encode import Tokenizer
from stillroom.data.reading import read_records
from stillroom.data.records import Record, Tally, content_key
from stillroom.data.sources import pieces_of
from stillroom.data.sources.compressed import data_suffix
from stillroom.data.spans.reading import TwoReadings
from stillroom.data.split import (
    Documents,
    ReadDocuments,
    SourceDocuments,
    StoredDocuments,
    held_out,
    num_distinct,
)
from stillroom.data.store import stored_files
from stillroom.errors import DataError

Tell = Callable[[str], object]

ENOUGH_HELD_OUT = 20  # documents; with fewer, an interval over documents is too narrow


@dataclass(frozen=True)
class SpecReader:
    """Read specs into records; refuse a spec with too many bad ones."""

    config: DataConfig
    tokenizer: Tokenizer
    tally: Tally
    tell: Tell | None = None
    pair: TwoReadings | None = None

    def both_sides(self) -> tuple[SourceDocuments, SourceDocuments]:
        """Training and held-out documents of each source. Of all sources but embedded ones, split together."""
        train, evaluation, outside = dict[int, Documents](), dict[int, Documents](), dict[int, Documents]()
        for number, source in enumerate(self.config.sources):
            if source.path.startswith(BUILTIN_PREFIX):
                train[number], evaluation[number] = self._builtin(source.path)
            else:
                outside[number] = self._outside(source, splits_text=True)
        if outside:
            sides = self._held_out(SourceDocuments([*outside.values()]))
            for side, found in zip((train, evaluation), sides, strict=True):
                side.update(zip(outside, found.sources, strict=True))
        numbers = range(len(self.config.sources))
        return SourceDocuments([train[n] for n in numbers]), SourceDocuments([evaluation[n] for n in numbers])

    def _held_out(self, documents: SourceDocuments) -> tuple[SourceDocuments, SourceDocuments]:
        paths = [source.path for source in self.config.sources if not source.path.startswith(BUILTIN_PREFIX)]
        spec, share, groups = ", ".join(paths), self.config.eval_share, documents.groups()
        is_held = held_out(groups, share, spec, enough=ENOUGH_HELD_OUT)
        num_held = int(is_held.sum())
        is_few = num_distinct(groups[is_held], ENOUGH_HELD_OUT + 1) <= ENOUGH_HELD_OUT  # else none was added
        num_asked = int(held_out(groups, share, spec).sum()) if is_few else num_held
        is_raised = num_held > num_asked
        why = f", not {num_asked:,} as data.eval_share = {share:g} says: so few would not measure" if is_raised else ""
        self.tally.note(f"{num_held:,} of {len(documents):,} records of {spec} are held out by content hash{why}")
        return documents.take(~is_held), documents.take(is_held)

    def training(self) -> SourceDocuments:
        """All documents of `config.train`; of an embedded corpus only the training side."""
        return SourceDocuments(
            [
                self._builtin(source.path)[0] if source.path.startswith(BUILTIN_PREFIX) else self._outside(source)
                for source in self.config.sources
            ]
        )

    def evaluation(self, spec: str) -> Documents:
        is_builtin = spec.startswith(BUILTIN_PREFIX)
        return self._builtin(spec)[1] if is_builtin else self._outside(self.config.named(spec), is_evaluation=True)

    def _outside(self, source: SourceConfig, *, is_evaluation: bool = False, splits_text: bool = False) -> Documents:
        tally, spec = Tally(), source.path
        options: dict[str, Any] = {"teacher": None if self.pair is None else self.pair.teacher, "tell": self.tell}
        files = stored_files(source, self.config, self.tokenizer, tally, splits_text=splits_text, **options)
        documents: Documents
        if files is not None:
            documents = StoredDocuments.of(files)
        else:
            documents = self._in_memory(source, tally, is_evaluation=is_evaluation, splits_text=splits_text)
            tally.counters["records"] += len(documents)
        tally.judge(spec, self.config.max_bad_share)
        if not len(documents):
            why = f" that can be used: {tally.named_bad}" if tally.bad else ""
            raise DataError(f"{spec} holds no record{why}", advice=["check how it was written or downloaded"])
        self.tally.absorb(tally)
        return documents

    def _in_memory(
        self, source: SourceConfig, tally: Tally, *, is_evaluation: bool, splits_text: bool
    ) -> ReadDocuments:
        write_chat = chat_writer(self.tokenizer, tally, self.config.day) if self.pair is None else self.pair.chats
        records = list(read_records(source, self.config, write_chat, tally, is_evaluation=is_evaluation))
        if splits_text and len(records) == 1 and data_suffix(records[0].id.rpartition(":")[0]) == ".txt":
            records = _cut_up(records[0], tally)
        return ReadDocuments(records)

    def _builtin(self, spec: str) -> tuple[Documents, Documents]:
        records, is_stdlib = embedded_records(spec, train_on_prompt=self.config.train_on_prompt)
        self.tally.counters["records"] += len(records)
        self.tally.shapes["embedded"] += len(records)
        if not is_stdlib:
            self.tally.note(
                "this Python carries no text of its standard library: stillroom's own source is used instead, "
                "enough to try things with and too little to learn from"
            )
            documents = ReadDocuments(records)
            is_held = held_out(documents.groups(), stdlib.HELD_OUT_SHARE, spec)
            return documents.take(~is_held), documents.take(is_held)
        sides: dict[stdlib.Split, list[Record]] = {"train": [], "eval": []}
        for record in records:
            sides[stdlib.split_of(record.group)].append(record)
        return ReadDocuments(sides["train"]), ReadDocuments(sides["eval"])


def _cut_up(record: Record, tally: Tally) -> list[Record]:
    """Cut one text into several records, so that part of it can be held out."""
    name = record.id.rpartition(":")[0]
    pieces = [(line, text) for line, text in pieces_of(record.text) if text.strip()]
    if len(pieces) > 1:
        tally.note(f"{name} is one document: it is cut between paragraphs into {len(pieces):,} to hold some out")
    return [
        replace(record, id=f"{name}:{line}", segments=((text, True),), key=content_key(text)) for line, text in pieces
    ]
