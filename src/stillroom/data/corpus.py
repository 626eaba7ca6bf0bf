"""A run's training data and held-out data, with notes and counters from reading them.

The split depends on content alone, or for the embedded text on the name of the package: it is the same on every
machine, in any order of files, and for any share of the training data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stillroom.config.data import DataConfig
from stillroom.data.embedded import BUILTIN_PREFIX
from stillroom.data.encode import Encoder, Tokenizer
from stillroom.data.encoded import Encoded
from stillroom.data.mixing import MixedRows, Part
from stillroom.data.packing import Packing, Rows, pack
from stillroom.data.records import Tally
from stillroom.data.spans.common import Coverage
from stillroom.data.spans.reading import two_readings
from stillroom.data.specs import SpecReader, Tell
from stillroom.data.split import (
    Documents,
    SourceDocuments,
    note_overlap,
    share_of,
)
from stillroom.errors import ConfigError, DataError
from stillroom.yardsticks import MIN_DOCUMENTS

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
    """Read, split and encode a run's training and held-out data. `tell` hears how long work goes on, meanwhile.

    With a tokenizer of the teacher's own each batch has the teacher's rows beside the student's.
    """
    tally = Tally()
    reader = SpecReader(config, tokenizer, tally, tell, two_readings(tokenizer, teacher_tokenizer, config, tally))
    evaluation: Documents
    if _is_split(config):
        train, evaluation = reader.both_sides()
    else:
        train, evaluation = reader.training(), reader.evaluation(str(config.eval))
        note_overlap(train, evaluation, tally)
    if config.train_share < 1:
        train = train.take(share_of(train.share_hashes(), config.train_share))
    return _packed(train, evaluation, reader)


def open_eval(
    spec: str, tokenizer: Tokenizer, config: DataConfig, *, teacher_tokenizer: Tokenizer | None = None
) -> Corpus:
    """Read all of a spec as evaluation data (of an embedded corpus: its held-out side). `train` is empty."""
    tally = Tally()
    reader = SpecReader(config, tokenizer, tally, None, two_readings(tokenizer, teacher_tokenizer, config, tally))
    return _packed(SourceDocuments([]), reader.evaluation(spec), reader)


def open_held_out(config: DataConfig, tokenizer: Tokenizer, *, teacher_tokenizer: Tokenizer | None = None) -> Corpus:
    """Read what `open_data` holds out: `eval`, or the share of `train` that the split takes. `train` is empty."""
    if not _is_split(config):
        return open_eval(str(config.eval), tokenizer, config, teacher_tokenizer=teacher_tokenizer)
    tally = Tally()
    reader = SpecReader(config, tokenizer, tally, None, two_readings(tokenizer, teacher_tokenizer, config, tally))
    return _packed(SourceDocuments([]), reader.both_sides()[1], reader)


def _is_split(config: DataConfig) -> bool:
    """Whether a share of the training data is held out."""
    is_builtin = len(config.sources) == 1 and config.sources[0].path.startswith(BUILTIN_PREFIX)
    return config.eval is None or (is_builtin and config.eval == config.sources[0].path)


def encode_training(config: DataConfig, tokenizer: Tokenizer) -> tuple[Encoded, Rows, Tally]:
    """Documents, rows and tally of `config.train`, before any share is held out."""
    tally = Tally()
    documents = SpecReader(config, tokenizer, tally).training()
    encoded = documents.encoded(Encoder(tokenizer, tally, config.bos))
    rows = pack(encoded, _train_packing(config, encoded, tally), config.max_length, tally)
    _note_truncation("train", encoded, config.max_length, tally)
    _note_counts(tally)
    return encoded, rows, tally


def _packed(train: SourceDocuments, evaluation: Documents, reader: SpecReader) -> Corpus:
    config, tokenizer, tally = reader.config, reader.tokenizer, reader.tally
    pad_id = next((id_ for id_ in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id_ is not None), 0)
    encode = Encoder(tokenizer, tally, config.bos) if reader.pair is None else reader.pair.encoder
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
    rows = pack(encoded, packing, config.max_length, side_tally, pad_id=pad_id)
    if len(documents) and not len(rows):
        raise DataError(
            f"the {side} data has {len(encoded.ids):,} tokens and no row with a target to score",
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
    return packing


def _asked_packing(config: DataConfig, encoded: Encoded, tally: Tally) -> Packing:
    """With `auto`: rows if any record has a prompt, else blocks."""
    num_prompted, num_documents = int(encoded.prompts.sum()), encoded.num_documents
    if not num_documents:
        return "rows"
    if config.packing == "blocks" and num_prompted:
        tally.note("records share training rows, prompts and answers of several in one: data.packing is blocks")
    if config.packing != "auto":
        return config.packing
    if num_prompted:
        tally.note(f"each record is trained in rows of its own: {num_prompted:,} of {num_documents:,} have a prompt")
        return "rows"
    tally.note(f"documents are joined end to end in training rows of {config.max_length:,} tokens: all are plain text")
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
    tally.note(f"each held-out document is scored by itself{cut}")
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
        "ignored_tools": "{:,} chats come with tools, which are not given to the chat template",
        "straddling_tokens": "{:,} tokens hold both scored and unscored text and are not scored",
        "rows_without_targets": "{:,} rows are left out: no target in them is scored",
        "unpaired_chats": "{:,} chats are learned from the labels alone: the teacher's template cannot print them",
        "unpaired_turns": "{:,} turns of chats are in no span: the two templates do not print the same contents",
        "spans_cut_by_rows": "{:,} spans are in no row: a row begins, ends or is cut off inside of them",
    }
    for name, sentence in sentences.items():
        if count := tally.counters[name]:
            tally.note(sentence.format(count))
