"""Show what a run would train on: each document as text, in scored and unscored pieces.

The pieces are decoded from the tokens that training reads, so they cannot differ from a run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.config.schema import DataConfig, SourceConfig
from stillroom.data.chat import PlainChat
from stillroom.data.corpus import encode_training, length_quantiles, read_records
from stillroom.data.records import Tally
from stillroom.data.sources import BUILTIN_PREFIX, embedded_records
from stillroom.data.tokenize import Encoded, Tokenizer, num_shared, spell

Pieces = list[tuple[str, bool]]  # (text, is scored), in reading order

# Counters of what is left out of training or changed on the way.
_LEFT_OUT = (
    "bad_records",
    "invalid_utf8",
    "documents_without_tokens",
    "empty_answers",
    "unscored_turns",
    "turns_not_marked_generated",
    "unprinted_thoughts",
    "unprinted_turns",
    "answers_without_end_mark",
    "ignored_tools",
    "dropped_nulls",
    "dropped_thoughts",
    "pairs_with_marks",
    "dropped_records",
    "straddling_tokens",
    "truncated_records",
    "truncated_tokens",
    "truncated_targets",
    "rows_without_targets",
)

_SUMMED = ("documents", "tokens", "scored_tokens", "training_rows")
_TOLD_ONCE = ("rows", "notes", "bad_records", "left_out", "max_length")


def preview(config: DataConfig, tokenizer: Tokenizer, *, num_rows: int, cuts: bool = False) -> dict[str, Any]:
    """A summary of `config.train`, and its first `num_rows` documents in pieces (0: all).

    `cuts` shows only what `config.max_length` leaves of each document. The summary counts that in any case. Several
    sources have a summary each, in `sources`, and share the documents shown.
    """
    if not config.is_mixed:
        return {**_one(config, tokenizer, num_rows, cuts), "duplicates": count_duplicates(config)}
    share = -(-num_rows // len(config.sources))  # 0: all
    parts = []
    for source in config.sources:
        part = _one(config.alone(source), tokenizer, share, cuts)
        part["rows"] = [{**row, "source": source.path} for row in part["rows"]]
        parts.append({"path": source.path, "weight": source.weight, "objectives": source.objectives, **part})
    return _joined(parts, num_rows) | {"max_length": config.max_length, "duplicates": count_duplicates(config)}


def _one(config: DataConfig, tokenizer: Tokenizer, num_rows: int, cuts: bool) -> dict[str, Any]:
    encoded, rows, tally = encode_training(config, tokenizer)
    num_scored = encoded.num_scored
    is_shown = rows.is_used if cuts else np.ones(len(encoded.ids), np.bool_)
    shown = (_row(encoded, number, tokenizer, is_shown) for number in range(encoded.num_documents))
    return {
        "shapes": dict(tally.shapes),
        "documents": encoded.num_documents,
        "tokens": len(encoded.ids),
        "scored_tokens": num_scored,
        "scored_share": num_scored / max(len(encoded.ids), 1),
        "lengths": length_quantiles(np.diff(encoded.bounds)),
        "max_length": config.max_length,
        "training_rows": len(rows),
        "left_out": {name: tally.counters[name] for name in _LEFT_OUT if tally.counters[name]},
        "bad_records": [{"where": bad.where, "why": bad.why} for bad in tally.bad],
        "notes": list(tally.notes),
        "rows": list(itertools.islice((row for row in shown if row["tokens"]), num_rows or None)),
    }


def _joined(parts: Sequence[dict[str, Any]], num_rows: int) -> dict[str, Any]:
    """The sums of several sources, and their documents in one list."""
    sums = {name: sum(part[name] for part in parts) for name in _SUMMED}
    left_out = Counter[str]()
    for part in parts:
        left_out.update(part["left_out"])
    return {
        "shapes": dict(sum((Counter(part["shapes"]) for part in parts), Counter())),
        **sums,
        "scored_share": sums["scored_tokens"] / max(sums["tokens"], 1),
        "left_out": dict(left_out),
        "bad_records": [bad for part in parts for bad in part["bad_records"]],
        "notes": list(dict.fromkeys(note for part in parts for note in part["notes"])),
        "rows": [row for part in parts for row in part["rows"]][: num_rows or None],
        "sources": [{name: value for name, value in part.items() if name not in _TOLD_ONCE} for part in parts],
    }


def _row(encoded: Encoded, number: int, tokenizer: Tokenizer, is_shown: npt.NDArray[np.bool_]) -> dict[str, Any]:
    here = slice(int(encoded.bounds[number]), int(encoded.bounds[number + 1]))
    ids, is_scored = encoded.ids[here][is_shown[here]].tolist(), encoded.is_scored[here][is_shown[here]].tolist()
    context = () if encoded.contexts is None else encoded.contexts.of(number).tolist()
    return {
        "id": encoded.names[number],
        "tokens": len(ids),
        "scored_tokens": sum(is_scored),
        "pieces": token_pieces(tokenizer, ids, is_scored),
        **({"teacher_context": spell(tokenizer, context)} if context else {}),
    }


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int], is_scored: Sequence[bool]) -> Pieces:
    """Decode tokens and cut the text where `is_scored` changes. The pieces joined are the decoded whole.

    Some decoders drop a leading space or need all bytes of a character, so pieces are not decoded separately: a cut
    is the length of the common prefix of the whole and the decoded tokens before it.
    """
    whole = spell(tokenizer, list(ids))
    changes = [place for place in range(1, len(ids)) if is_scored[place] != is_scored[place - 1]]
    cuts = [0]
    for place in changes:
        cuts.append(max(cuts[-1], num_shared(spell(tokenizer, list(ids[:place])), whole)))
    cuts.append(len(whole))
    flags = [bool(is_scored[place]) for place in [0, *changes]] if ids else []
    pieces = [(whole[start:end], flag) for (start, end), flag in zip(itertools.pairwise(cuts), flags, strict=False)]
    return [(text, flag) for text, flag in pieces if text]


# -- lengths -----------------------------------------------------------------------------------------------------


# -- duplicates --------------------------------------------------------------------------------------------------


def count_duplicates(config: DataConfig) -> dict[str, int]:
    """Training records with the content of an earlier one, and evaluation records that are also trained on.

    Read apart from the run, without a tokenizer: contents are compared as the file has them. Only 16 bytes of each
    record are kept. Without `config.eval` equal contents fall on one side of the split, and none is on both.
    """
    seen: set[bytes] = set()
    inside = 0
    for source in config.sources:
        for key in _keys(source, config):
            inside += key in seen
            seen.add(key)
    if config.eval is None or config.eval.startswith(BUILTIN_PREFIX):
        return {"inside": inside, "between": 0}
    between = sum(key in seen for key in _keys(config.named(config.eval), config, is_evaluation=True))
    return {"inside": inside, "between": between}


def _keys(source: SourceConfig, config: DataConfig, *, is_evaluation: bool = False) -> Iterator[bytes]:
    if source.path.startswith(BUILTIN_PREFIX):
        records = iter(embedded_records(source.path, train_on_prompt=config.train_on_prompt)[0])
    else:
        tally = Tally()
        records = read_records(source, config, PlainChat(tally), tally, is_evaluation=is_evaluation)
    return (bytes.fromhex(record.key)[:16] for record in records)
