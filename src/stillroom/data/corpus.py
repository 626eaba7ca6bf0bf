"""A run's training data and held-out data, with notes and counters from reading them.

The split depends on content alone, or for the embedded text on the name of the package: it is the same on every
machine, in any order of files, and for any share of the training data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stillroom import builtin as stdlib
from stillroom.config.schema import DataConfig, SourceConfig
from stillroom.core.errors import ConfigError, DataError, at_setting
from stillroom.core.types import Batch
from stillroom.data.chat import chat_writer
from stillroom.data.loader import MixedRows, Part
from stillroom.data.packing import Packing, Rows, pack
from stillroom.data.records import ChatWriter, Record, Shaper, Tally, content_key
from stillroom.data.sources import (
    BUILTIN_PREFIX,
    checked,
    cut_text,
    data_suffix,
    embedded_records,
    note_origin,
    read_spec,
)
from stillroom.data.store import (
    StoredFile,
    digests_of,
    encoded_documents,
    end_to_end,
    hashes_of,
    numbers,
    stored_files,
    whole_column,
)
from stillroom.data.tokenize import Encoded, Encoder, Ints, Numbers, Tokenizer
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.data.two_tokenizers.encode import PairEncoder, TwoTokenizers
from stillroom.metrics.metrics import MIN_DOCUMENTS

# D documents

# -- documents: records in memory, or files of the token store ---------------------------------------------


_SHARE_FOR_ENOUGH = 5  # to hold out enough documents, take at most one of this many

Digests = npt.NDArray[np.bytes_]
Flags = npt.NDArray[np.bool_]


class Documents(Protocol):
    """Documents that can be split and tokenized. Digests are the first 16 bytes of a sha256."""

    def __len__(self) -> int: ...
    def contents(self) -> Digests:
        """[D] A digest of each document's content."""

    def groups(self) -> Digests:
        """[D] A digest of each document's group, or of its content if it has none."""

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        """[D] What `data.train_share` goes by."""

    def take(self, is_taken: Flags) -> Documents: ...
    def encoded(self, encode: Encoder) -> Encoded: ...


@dataclass(frozen=True)
class ReadDocuments:
    """Records in memory."""

    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def contents(self) -> Digests:
        return digests_of([record.key for record in self.records])

    def groups(self) -> Digests:
        return digests_of([record.group or record.key for record in self.records])

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        """Embedded documents are hashed by name, others by content."""
        names = [f"share:{record.id if record.group else record.key}" for record in self.records]
        return hashes_of(digests_of(names))

    def take(self, is_taken: Flags) -> ReadDocuments:
        return ReadDocuments([record for record, taken in zip(self.records, is_taken, strict=True) if taken])

    def encoded(self, encode: Encoder) -> Encoded:
        return encode(self.records)


@dataclass(frozen=True)
class StoredDocuments:
    """Documents of the token store, tokenized already. They come from files and belong to no group."""

    files: Sequence[StoredFile]
    chosen: Numbers  # documents, numbered over all files, in rising order

    @staticmethod
    def of(files: Sequence[StoredFile]) -> StoredDocuments:
        return StoredDocuments(files, numbers(sum(len(file) for file in files)))

    def __len__(self) -> int:
        return len(self.chosen)

    def contents(self) -> Digests:
        digests = whole_column(self.files, "digests")
        return digests if len(self.chosen) == len(digests) else digests[self.chosen]

    def groups(self) -> Digests:
        return self.contents()

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        return whole_column(self.files, "share_hashes")[self.chosen]

    def take(self, is_taken: Flags) -> StoredDocuments:
        return StoredDocuments(self.files, self.chosen[is_taken])

    def encoded(self, encode: Encoder) -> Encoded:
        encode.note_limits()
        encoded = encoded_documents(self.files, self.chosen)
        encode.note_lost(len(self) - encoded.num_documents)
        return encode.found(encoded)


@dataclass(frozen=True)
class SourceDocuments:
    """Documents of several sources, one source after the other. A source of which nothing is left keeps its place."""

    sources: Sequence[Documents]

    def __len__(self) -> int:
        return sum(len(documents) for documents in self.sources)

    def contents(self) -> Digests:
        return _joined([documents.contents() for documents in self.sources], digests_of([]))

    def groups(self) -> Digests:
        return _joined([documents.groups() for documents in self.sources], digests_of([]))

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        return _joined([documents.share_hashes() for documents in self.sources], np.empty(0, np.uint64))

    def take(self, is_taken: Flags) -> SourceDocuments:
        ends = np.cumsum([len(documents) for documents in self.sources])
        flags = np.split(is_taken, ends[:-1])
        return SourceDocuments([one.take(own) for one, own in zip(self.sources, flags, strict=True)])

    def encoded(self, encode: Encoder) -> Encoded:
        several = [documents.encoded(encode) for documents in self.sources if len(documents)]
        if len(several) == 1:
            return several[0]
        return end_to_end(several) if several else encode([])


def _joined(arrays: Sequence[npt.NDArray[Any]], nothing: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The arrays end to end. One array is not copied: of many documents the digests alone are large."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([nothing, *arrays])


# -- splitting by hashes of contents -----------------------------------------------------------------------


def held_out(groups: Digests, share: float, spec: str, *, enough: int = 1) -> Flags:
    """[D] Which documents are held out, by the hash of each one's group or content; neither side is empty.

    Equal contents share a hash, so they are never on both sides. Hold out the hashes below `share`; if those are fewer
    than `enough` contents, hold out the next lowest too, up to a fifth of all. The split is a function of the contents,
    and a smaller share is a subset of a larger one.
    """
    shares = _as_shares(hashes_of(groups))
    is_below: Flags = shares < share
    below = groups[is_below]
    if num_distinct(below, enough) >= enough and not is_below.all():
        return is_below
    num_below = len(np.unique(below))
    distinct, first = np.unique(groups, return_index=True)
    if len(distinct) < 2:
        raise DataError(
            f"{spec} holds one document only, so nothing of it can be held out",
            where="data.train",
            advice=["give separate held-out data as data.eval", "give more text"],
        )
    in_order = distinct[np.lexsort((distinct, shares[first]))]
    num_wanted = max(1, min(enough, len(distinct) // _SHARE_FOR_ENOUGH), num_below)
    return np.isin(groups, in_order[: min(num_wanted, len(distinct) - 1)])


def num_distinct(groups: Digests, enough: int) -> int:
    """The number of distinct digests; if `enough` are among the first ones, the number among those."""
    among_first = len(np.unique(groups[: 100 * enough]))
    return among_first if among_first >= enough else len(np.unique(groups))


def share_of(hashes: npt.NDArray[np.uint64], share: float) -> Flags:
    """[D] The documents whose hash is below `share`, at least one: a smaller share is a subset of a larger one."""
    shares = _as_shares(hashes)
    is_taken: Flags = shares <= max(share, shares.min())
    return is_taken


def _as_shares(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = hashes.astype(np.float64)
    shares /= 2.0**64
    return shares


# -- reading the sources of a configuration ----------------------------------------------------------------


def read_records(
    source: SourceConfig,
    config: DataConfig,
    write_chat: ChatWriter,
    tally: Tally,
    *,
    is_evaluation: bool = False,
) -> Iterator[Record]:
    """Read the records of a source other than an embedded corpus. Count in the tally what is refused."""
    columns = source.needed_columns
    items = read_spec(source.path, tally, is_evaluation=is_evaluation, streams=config.streaming, columns=columns)
    items = checked(items, source, source.path)
    if config.max_records:
        items = _first(items, config.max_records, source.path, tally)
    return Shaper.of(config, source, write_chat, tally).records(items)


def _first(items: Iterator[tuple[str, object]], limit: int, spec: str, tally: Tally) -> Iterator[tuple[str, object]]:
    yield from itertools.islice(items, limit)
    if next(items, None) is not None:
        tally.note(f"{spec} holds more than data.max_records = {limit:,}: the rest is not read")


Tell = Callable[[str], object]

ENOUGH_HELD_OUT = 20  # documents; with fewer, an interval over documents is too narrow


@dataclass(frozen=True)
class SpecReader:
    """Read specs into records; refuse a spec with too many bad ones."""

    config: DataConfig
    tokenizer: Tokenizer
    tally: Tally
    tell: Tell | None = None
    pair: PairEncoder | None = None  # where the teacher has its own tokenizer

    def both_sides(self) -> tuple[SourceDocuments, SourceDocuments]:
        """Training and held-out documents of each source. Of all sources but embedded ones, split together."""
        train, evaluation, outside = dict[int, Documents](), dict[int, Documents](), dict[int, Documents]()
        for number, source in enumerate(self.config.sources):
            with at_setting("data.train"):
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
        why = f"; data.eval_share = {share:g} would be {num_asked:,}, too few to measure" if is_raised else ""
        self.tally.note(f"{num_held:,} of {len(documents):,} records of {spec} are held out by content hash{why}")
        return documents.take(~is_held), documents.take(is_held)

    def training(self) -> SourceDocuments:
        """All documents of `config.train`; of an embedded corpus only the training side."""
        with at_setting("data.train"):
            return SourceDocuments(
                [
                    self._builtin(source.path)[0] if source.path.startswith(BUILTIN_PREFIX) else self._outside(source)
                    for source in self.config.sources
                ]
            )

    def evaluation(self, spec: str, setting: str) -> Documents:
        is_builtin = spec.startswith(BUILTIN_PREFIX)
        with at_setting(setting):
            return self._builtin(spec)[1] if is_builtin else self._outside(self.config.named(spec), is_evaluation=True)

    def _outside(self, source: SourceConfig, *, is_evaluation: bool = False, splits_text: bool = False) -> Documents:
        tally, spec = Tally(), source.path
        options: dict[str, Any] = {"teacher": None if self.pair is None else self.pair.two.teacher, "tell": self.tell}
        files = stored_files(source, self.config, self.tokenizer, tally, splits_text=splits_text, **options)
        documents: Documents
        if files is not None:
            documents = StoredDocuments.of(files)
        else:
            documents = self._in_memory(source, tally, is_evaluation=is_evaluation, splits_text=splits_text)
            tally.counters["records"] += len(documents)
        note_origin(spec, tally)
        tally.judge(spec, self.config.max_bad_share)
        if not len(documents):
            why = f" that can be used: {tally.named_bad}" if tally.bad else ""
            raise DataError(f"{spec} holds no record{why}", advice=["check how it was written or downloaded"])
        self.tally.absorb(tally)
        return documents

    def _in_memory(
        self, source: SourceConfig, tally: Tally, *, is_evaluation: bool, splits_text: bool
    ) -> ReadDocuments:
        write_chat = chat_writer(self.tokenizer, tally, self.config) if self.pair is None else self.pair.chats
        records = list(read_records(source, self.config, write_chat, tally, is_evaluation=is_evaluation))
        if splits_text and len(records) == 1 and data_suffix(records[0].id.rpartition(":")[0]) == ".txt":
            records = _cut_up(records[0], tally)
        return ReadDocuments(records)

    def _builtin(self, spec: str) -> tuple[Documents, Documents]:
        found, is_stdlib = embedded_records(spec, train_on_prompt=self.config.train_on_prompt)
        records = [record.under(self.config.teacher_prefix) for record in found]
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
    return [
        replace(record, id=f"{name}:{line}", segments=((text, True),), key=content_key(text))
        for line, text in cut_text(name, record.text, tally)
    ]


# -- a run's data ------------------------------------------------------------------------------------------


COUNTERS = (
    "records",
    "bad_records",
    "invalid_utf8",
    "truncated_records",
    "truncated_tokens",
    "truncated_targets",
    "rows_without_targets",
    "overlapping_records",
    "train_tokens",
    "eval_tokens",
    "train_targets",
    "eval_targets",
    "train_documents",
    "eval_documents",
)


@dataclass(frozen=True)
class Corpus:
    """Training rows, held-out rows, notes for the log, and counters."""

    train: Rows
    evaluation: Rows
    notes: tuple[str, ...]
    counters: dict[str, int]
    shapes: dict[str, int] = field(default_factory=dict)  # records by how they are laid out
    coverage: Coverage | None = None  # of the text by spans of both tokenizers, where there are two


def open_data(
    config: DataConfig, tokenizer: Tokenizer, *, tell: Tell | None = None, teacher_tokenizer: Tokenizer | None = None
) -> Corpus:
    """Read, split and encode a run's training and held-out data. `tell` is called during long work.

    If the teacher has its own tokenizer, each batch has the teacher's rows next to the student's.
    """
    reader = _reader(config, tokenizer, teacher_tokenizer, tell)
    evaluation: Documents
    if _is_split(config):
        train, evaluation = reader.both_sides()
    else:
        train, evaluation = reader.training(), reader.evaluation(str(config.eval), "data.eval")
        if count := int(np.isin(evaluation.contents(), train.contents()).sum()):
            reader.tally.counters["overlapping_records"] += count
            reader.tally.note(f"{count:,} of {len(evaluation):,} evaluation records also stand in the training data")
    if config.train_share < 1:
        train = train.take(share_of(train.share_hashes(), config.train_share))
    return _packed(train, evaluation, reader)


def open_eval(
    spec: str,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    teacher_tokenizer: Tokenizer | None = None,
    setting: str = "data",
) -> Corpus:
    """Read all of a spec as evaluation data (of an embedded corpus: its held-out side). `train` is empty.

    `setting` is where the spec was given, for errors.
    """
    reader = _reader(config, tokenizer, teacher_tokenizer)
    return _packed(SourceDocuments([]), reader.evaluation(spec, setting), reader)


def open_held_out(config: DataConfig, tokenizer: Tokenizer, *, teacher_tokenizer: Tokenizer | None = None) -> Corpus:
    """Read what `open_data` holds out: `eval`, or the share of `train` that the split takes. `train` is empty."""
    if not _is_split(config):
        spec, theirs = str(config.eval), teacher_tokenizer
        return open_eval(spec, tokenizer, config, teacher_tokenizer=theirs, setting="data.eval")
    reader = _reader(config, tokenizer, teacher_tokenizer)
    return _packed(SourceDocuments([]), reader.both_sides()[1], reader)


def _reader(
    config: DataConfig, tokenizer: Tokenizer, teacher_tokenizer: Tokenizer | None, tell: Tell | None = None
) -> SpecReader:
    tally = Tally()
    pair = None
    if teacher_tokenizer is not None:
        pair = PairEncoder.make(TwoTokenizers(tokenizer, teacher_tokenizer), config, tally)
    return SpecReader(config, tokenizer, tally, tell, pair)


def _is_split(config: DataConfig) -> bool:
    """Whether a share of the training data is held out."""
    is_builtin = len(config.sources) == 1 and config.sources[0].path.startswith(BUILTIN_PREFIX)
    return config.eval is None or (is_builtin and config.eval == config.sources[0].path)


def encode_training(config: DataConfig, tokenizer: Tokenizer) -> tuple[Encoded, Rows, Tally]:
    """Documents, rows and tally of `config.train`, before any share is held out."""
    tally = Tally()
    documents = SpecReader(config, tokenizer, tally).training()
    encoded = documents.encoded(Encoder(tokenizer, tally, config.bos))
    rows = pack(encoded, _train_packing(config, encoded, tally), config.max_length, tally, on_long=config.on_long)
    _note_truncation("train", encoded, config.max_length, tally)
    _note_counts(tally)
    return encoded, rows, tally


def _packed(train: SourceDocuments, evaluation: Documents, reader: SpecReader) -> Corpus:
    config, tokenizer, tally = reader.config, reader.tokenizer, reader.tally
    pad_id = next((id_ for id_ in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id_ is not None), 0)
    encode = Encoder(tokenizer, tally, config.bos) if reader.pair is None else reader.pair
    sides: dict[str, Rows] = {}
    for side, documents in (("train", train), ("eval", evaluation)):
        if side == "train" and config.is_mixed and len(train):
            rows: Rows = _mixed(train, config, encode, tally, pad_id)
        else:
            rows = _rows(side, documents, config, encode, tally, pad_id)
        tally.counters[f"{side}_tokens"] = rows.num_tokens
        tally.counters[f"{side}_targets"] = rows.num_targets
        tally.counters[f"{side}_documents"] = rows.num_documents
        sides[side] = rows
    _note_scoring(sides["eval"], config.max_length, tally)
    _note_counts(tally)
    coverage = None if reader.pair is None else reader.pair.judged(config.min_coverage)
    counters = {name: tally.counters[name] for name in sorted({*COUNTERS, *tally.counters})}
    notes, shapes = tuple(tally.notes), dict(tally.shapes)
    return Corpus(sides["train"], sides["eval"], notes, counters, shapes, coverage)


def _rows(side: str, documents: Documents, config: DataConfig, encode: Encoder, tally: Tally, pad_id: int) -> Rows:
    encoded, side_tally = documents.encoded(encode), Tally()
    packing = _train_packing(config, encoded, side_tally) if side == "train" else "rows"
    rows = pack(encoded, packing, config.max_length, side_tally, pad_id=pad_id, on_long=config.on_long)
    if len(documents) and not len(rows):
        raise DataError(
            f"the {side} data has {len(encoded.ids):,} tokens and no row with a target to score",
            where="data.max_length",
            advice=[f"raise data.max_length above {config.max_length}: prompts fill the rows", "give more text"],
        )
    _note_truncation(side, encoded, config.max_length, side_tally)
    tally.absorb(side_tally)
    return rows


def _mixed(train: SourceDocuments, config: DataConfig, encode: Encoder, tally: Tally, pad_id: int) -> MixedRows:
    """The rows of each source apart, so that no row holds text of two."""
    parts = []
    for name, source, own in zip(config.source_names, config.sources, train.sources, strict=True):
        if not len(own):
            raise DataError(
                f"no record of {source.path} is left to train on",
                where="data.train",
                advice=["give more of it", "leave the source out", "raise data.train_share"],
            )
        part = Part(name, _rows("train", own, config, encode, tally, pad_id), source.weight)
        tally.note(
            f"source {part.name}: {len(part.rows):,} rows, {part.rows_per_epoch:,} in an epoch (weight "
            f"{source.weight:g}), learned from {'the labels alone' if source.objectives == 'labels' else 'all terms'}"
        )
        parts.append(part)
    return MixedRows(parts, pad_id=pad_id)


def _train_packing(config: DataConfig, encoded: Encoded, tally: Tally) -> Packing:
    """How to make training rows. Raise if they cannot be in the order that is asked for."""
    packing = _asked_packing(config, encoded, tally)
    if packing == "blocks" and config.order == "short_first":
        raise ConfigError(
            f"data.order is short_first, and blocks are all of {config.max_length:,} tokens",
            where="data.order, data.packing",
            advice=["set data.packing = 'rows' or 'packed'", "set data.order = 'shuffled'"],
        )
    if packing == "blocks" and config.on_long == "drop" and encoded.prompts.any():
        raise ConfigError(
            "data.on_long is drop, and blocks join all records end to end",
            where="data.on_long, data.packing",
            advice=["set data.packing = 'rows' or 'packed'", "leave data.on_long out"],
        )
    return packing


def _asked_packing(config: DataConfig, encoded: Encoded, tally: Tally) -> Packing:
    """With `auto`: rows if any record has a prompt, else blocks."""
    num_prompted, num_documents = int(encoded.prompts.sum()), encoded.num_documents
    if not num_documents:
        return "rows"
    if encoded.contexts is not None and config.packing in ("auto", "blocks"):
        if config.packing == "blocks":
            raise ConfigError(
                "the teacher reads a context before each record, and a row of blocks holds several",
                where="data.packing",
                advice=["--set data.packing=rows", "--set data.packing=packed"],
            )
        tally.detail("each record is trained in its own rows: the teacher reads a context before each")
        return "rows"
    if config.packing == "blocks" and num_prompted:
        tally.note("records share training rows, prompts and answers of several in one: data.packing is blocks")
    if config.packing != "auto":
        return config.packing
    if num_prompted:
        tally.detail(f"each record is trained in its own rows: {num_prompted:,} of {num_documents:,} have a prompt")
        return "rows"
    tally.detail(
        f"documents are joined end to end in training rows of {config.max_length:,} tokens: all are plain text"
    )
    return "blocks"


def _note_truncation(side: str, encoded: Encoded, max_length: int, tally: Tally) -> None:
    """Note how much of the records with a prompt does not fit into their row."""
    lost, scored = tally.counters["truncated_tokens"], tally.counters["truncated_targets"]
    if lost:
        name, whole = "training data" if side == "train" else "held-out data", len(encoded.ids)
        tally.note(
            f"{name}: {tally.counters['truncated_records']:,} of {encoded.num_documents:,} records are longer than "
            f"data.max_length = {max_length:,}, and {lost:,} of {whole:,} tokens ({lost / whole:.0%}) are cut off, "
            f"{scored:,} of {encoded.num_scored:,} targets among them"
        )


def _note_scoring(rows: Rows, max_length: int, tally: Tally) -> None:
    """Note how held-out documents are scored, and if they are too few for an interval."""
    if not len(rows):
        return
    num_documents = rows.num_documents
    is_cut = len(rows) > num_documents
    cut = f"; a text longer than {max_length:,} tokens is cut into consecutive rows" if is_cut else ""
    tally.detail(f"each held-out document is scored by itself{cut}")
    if num_documents < MIN_DOCUMENTS:
        tally.note(
            f"held-out documents: {num_documents:,}, too few to say how sure a result is (it takes {MIN_DOCUMENTS}): "
            "give more as data.eval"
        )


def _note_counts(tally: Tally) -> None:
    sentences = {
        "invalid_utf8": "{:,} texts held half a character (a lone surrogate); it was replaced by U+FFFD",
        "empty_answers": "{:,} answers of chats are empty and not scored",
        "unscored_turns": "{:,} answers are not scored: the chat template does not print them as they stand",
        "turns_not_marked_generated": "{:,} answers are not scored: the chat template does not mark them as generated",
        "unprinted_thoughts": "{:,} answers lack a part, such as an earlier thought: the template does not print it",
        "unprinted_turns": "{:,} turns of others than the assistant are not printed by the chat template",
        "answers_without_end_mark": "{:,} answers are scored without an end mark: none was found after them",
        "ignored_tools": "{:,} chats come with tools, which the chat template does not print",
        "dropped_nulls": "{:,} nulls in tools and their calls are left out: Arrow has them where a key is missing",
        "dropped_thoughts": "{:,} thoughts are left out: data.thoughts is drop",
        "pairs_with_marks": "{:,} prompts or answers hold marks of the chat template and are read as they stand: print "
        "them with it all the same with data.chat = 'on'",
        "dropped_records": "{:,} records are left out: they are longer than data.max_length, and data.on_long is drop",
        "kept_ids": "{:,} answers are read in the very tokens they were written in",
        "ids_of_another_vocabulary": "{:,} answers are tokenized again: their ids are of another vocabulary, and one "
        "that was cut at a length is read as if it ended there",
        "ids_of_another_text": "{:,} answers are tokenized again: their ids spell another text than stands there",
        "unread_ids": "{:,} answers are tokenized again, for two tokenizers: their ids are not read",
        "teacher_contexts": "{:,} records are read by the teacher after another beginning than the student's",
        "unaligned_contexts": "{:,} records are left out: their answer begins inside a token, and the teacher reads "
        "another beginning",
        "straddling_tokens": "{:,} tokens hold both scored and unscored text and are not scored",
        "rows_without_targets": "{:,} rows are left out: no target in them is scored",
        "unpaired_chats": "{:,} chats are learned from the labels alone: the teacher's template cannot print them",
        "unpaired_turns": "{:,} turns of chats are in no span: the two templates do not print the same contents",
        "spans_cut_by_rows": "{:,} spans are in no row: a row begins, ends or is cut off inside of them",
    }
    for name, sentence in sentences.items():
        if count := tally.counters[name]:
            tally.note(sentence.format(count))


# -- the rows of a teacher with its own tokenizer, or with a context ---------------------------------------


class TeacherRows(Rows):
    """Row r is what a teacher with its own tokenizer or context reads for row r of the student."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_packed(self) -> bool:
        return self._rows.is_packed

    @property
    def lengths(self) -> Ints:
        return self._rows.other_lengths

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        batch = self._rows.batch(indices, index=index)
        return batch.other or batch


def other_of(batch: Batch) -> Batch:
    """The teacher's side of a batch."""
    if batch.other is None:
        raise ConfigError(
            "the teacher has its own tokenizer, and a batch has no rows for it",
            where="data.train",
            advice=["open the data with both tokenizers"],
        )
    return batch.other


QUANTILES = {"shortest": 0, "first_decile": 0.1, "median": 0.5, "ninth_decile": 0.9, "longest": 1}


def length_quantiles(counts: Any) -> dict[str, int]:
    """Quantiles of lengths, each of them one that occurs."""
    if not len(counts):
        return {}
    found = np.quantile(counts, list(QUANTILES.values()), method="nearest").tolist()
    return {name: int(value) for name, value in zip(QUANTILES, found, strict=True)}


def row_lengths(corpus: Corpus) -> dict[str, dict[str, int]]:
    """Quantiles of the rows' lengths in tokens, by side."""
    sides = {"train": corpus.train, "eval": corpus.evaluation}
    return {side: length_quantiles(rows.lengths) for side, rows in sides.items() if len(rows)}
