"""Import another program's log-probabilities into a cache, after checking all that can be checked.

Ids must spell what the file says they spell, values must be log-probabilities, and an answer must belong to the token
it stands at: a file that is shifted by one trains without a complaint and teaches nonsense.

vllm        JSONL. `prompt_token_ids` and `prompt_logprobs`, of the line or of its first choice: for each token but the
            first a table from token id to {"logprob", "decoded_token"}. The prompt's own token is always among them.
openai      JSONL. `id` (a row's name, as `stillroom data` prints it) or `prompt_token_ids`, and of the first choice
            `logprobs.content`: for each token of the answer its `token` and `top_logprobs`. Tokens are texts, or
            `token_id:123`, as vLLM's server writes on request; a text that several tokens have is refused.
distillkit  JSONL or Parquet. `input_ids` and two columns of lists, ids and log-probs, one entry for each token that is
            predicted: under one of the names in `COLUMNS`. Compressed columns have to be unpacked by DistillKit first.

Legend: a sequence has T tokens; `entries[t]` is what was said about token t before it was seen.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.files import reason_of
from stillroom.core.types import IGNORED
from stillroom.teachers.cache.writer import NeededRow
from stillroom.teachers.signals import Given, RowAnswer, SignalSpec, Spelling, position_answer

COLUMNS = (
    ("top_indices", "top_values"),
    ("topk_indices", "topk_logprobs"),
    ("topk_ids", "topk_logprobs"),
    ("token_ids", "logprobs"),
    ("indices", "logprobs"),
)

# What DistillKit's sampler writes, today and in its legacy schema.
_PACKED = {"compressed_logprobs", "bytepacked_indices", "packed_indices", "exact_values", "coeffs"}


def read_vllm(path: Path, _find: Callable[[str], int]) -> Iterator[Given]:
    for where, line in _lines(path):
        held = _choice(line, "prompt_logprobs")
        ids, tables = _ids(where, line, held), held.get("prompt_logprobs")
        if not isinstance(tables, list) or len(tables) != len(ids):
            raise _odd(where, "prompt_logprobs has not one entry for each of prompt_token_ids")
        texts: dict[int, str] = {}
        entries = {}
        for place, table in enumerate(tables):
            if table is None:
                continue
            entries[place] = {int(key): _number(where, value) for key, value in table.items()}
            for key, value in table.items():
                if isinstance(value, Mapping) and value.get("decoded_token"):
                    texts[int(key)] = str(value["decoded_token"])
        yield Given(where, ids, entries, texts, has_own_token=True)


def read_openai(path: Path, find: Callable[[str], int]) -> Iterator[Given]:
    for where, line in _lines(path):
        held = _choice(line, "logprobs")
        content = (held.get("logprobs") or {}).get("content")
        if not isinstance(content, list):
            raise _odd(where, "logprobs.content of the first choice is missing")
        prompt = line.get("prompt_token_ids")
        name = "" if prompt is not None else str(line.get("id", ""))
        if prompt is None and not name:
            raise _odd(where, "neither prompt_token_ids nor id says which text was answered")
        before = tuple(int(token) for token in prompt or ())
        answer = tuple(find(str(part["token"])) for part in content)
        entries = {
            len(before) + place: {find(str(one["token"])): _number(where, one) for one in part["top_logprobs"]}
            for place, part in enumerate(content)
        }
        yield Given(where, (*before, *answer), entries, name=name)


def read_distillkit(path: Path, _find: Callable[[str], int]) -> Iterator[Given]:
    records = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    for where, line in records:
        names = next((pair for pair in COLUMNS if pair[0] in line and pair[1] in line), None)
        if names is None or "input_ids" not in line:
            is_packed = not _PACKED.isdisjoint(line)
            packed = " (compressed columns: unpack them with DistillKit's LogprobCompressor first)" if is_packed else ""
            raise _odd(where, f"the columns are {', '.join(line)}; input_ids and ids with log-probs are needed{packed}")
        ids = tuple(int(token) for token in line["input_ids"])
        tokens, values = line[names[0]], line[names[1]]
        # One fewer than tokens: the first is predicted by nothing. As many: each says what follows its token.
        if len(tokens) != len(values) or len(tokens) not in (len(ids), len(ids) - 1):
            raise _odd(where, f"{len(ids)} tokens, {len(tokens)} lists of ids and {len(values)} of log-probs")
        entries = {
            place + 1: dict(zip(map(int, some), map(float, numbers), strict=True))
            for place, (some, numbers) in enumerate(zip(tokens, values, strict=True))
            if place + 1 < len(ids)
        }
        yield Given(where, ids, entries)


READERS: dict[str, Callable[[Path, Callable[[str], int]], Iterator[Given]]] = {
    "vllm": read_vllm,
    "openai": read_openai,
    "distillkit": read_distillkit,
}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise _odd(f"{path.name}:{number}", "the line is not an object")
                    yield f"{path.name}:{number}", line
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}", advice=["give a file of JSON lines"]) from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield f"{path.name}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}", advice=["give a Parquet file"]) from error


def _choice(line: dict[str, Any], name: str) -> dict[str, Any]:
    """Where a field stands: in the line, or in its first choice."""
    choices = line.get("choices")
    if name not in line and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    return line


def _ids(where: str, line: dict[str, Any], held: dict[str, Any]) -> tuple[int, ...]:
    found = held.get("prompt_token_ids", line.get("prompt_token_ids"))
    if not isinstance(found, list):
        raise _odd(where, "prompt_token_ids are missing: ask the server for token ids, texts are ambiguous")
    return tuple(int(token) for token in found)


def _number(where: str, value: Any) -> float:
    found = value.get("logprob") if isinstance(value, Mapping) else value
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise _odd(where, f"a log-probability is {found!r}")
    return float(found)


def _odd(where: str, what: str) -> DataError:
    return DataError(what, where=where, advice=["docs/guides/cache.md shows what each format looks like"])


# -- matching them to rows ---------------------------------------------------------------------------------


_OTHER = "the file was made with another tokenizer: name a teacher and a student that have it"
_BEGINNING = 4  # tokens by which the rows that a sequence may belong to are found
_MOST_MASS = 1.005
_LEAST_LEAD = 0.05  # by which a shifted alignment must be better to be believed


@dataclass
class Imported:
    """What a file came to."""

    answers: dict[str, RowAnswer] = field(default_factory=dict)
    rows: list[NeededRow] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


def read_answers(path: Path, kind: str, tokenizer: Any) -> list[Given]:
    """The sequences of a file, after their tokens, their values and their alignment were checked."""
    if kind not in READERS:
        raise ConfigError(f"unknown format {kind!r}", where="--format", advice=[f"one of {', '.join(READERS)}"])
    spelt = Spelling(tokenizer)
    try:
        given = list(READERS[kind](path, spelt.find))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not of the format {kind}: {error!r}", advice=["docs/guides/cache.md shows what it looks like"]
        ) from error
    if not given:
        raise DataError(f"{path} is empty", advice=["give a file with a record a line"])
    if wrong := spelt.fault(given):
        raise DataError(wrong[0], where=wrong[1], advice=[_OTHER])
    _check_values(given)
    _check_alignment(given)
    return given


def match_rows(given: Iterable[Given], needed: Sequence[NeededRow], spec: SignalSpec) -> Imported:
    """Each row with the answer to its very tokens. A row that begins in the middle of a sequence has none."""
    found = Imported()
    by_beginning: dict[tuple[int, ...], list[NeededRow]] = defaultdict(list)
    by_name = {row.name: row for row in needed}
    for row in needed:
        by_beginning[tuple(row.rows.row(row.index)[:_BEGINNING].tolist())].append(row)
    for one in given:
        named = [by_name[one.name]] if one.name in by_name else []
        candidates = named if one.name else by_beginning.get(one.ids[:_BEGINNING], [])
        found.counters["records"] += 1
        is_matched = False
        for row in candidates:
            answer = _answer(one, row, spec, found.counters)
            if answer is None:
                continue
            is_matched = True
            if row.key not in found.answers:
                found.rows.append(row)
            found.answers[row.key] = answer
        found.counters["unmatched_records"] += not is_matched
    return found


def _answer(given: Given, row: NeededRow, spec: SignalSpec, counters: Counter[str]) -> RowAnswer | None:
    """The row's answer, or None where the tokens are not those of the row.

    Only the last token of a row, an end mark, may lack an answer: it is then unusable, and counted.
    """
    ids = tuple(row.rows.row(row.index).tolist())
    targets = row.rows.batch([row.index]).targets[0].numpy()
    places = np.flatnonzero(targets != IGNORED) + 1
    start = int(places[0]) if given.name else 0
    overlap = ids[start : start + len(given.ids)]
    if given.ids[: len(overlap)] != overlap or start + len(given.ids) < len(ids) - 1:
        return None
    entries = [given.entries.get(int(place) - start) for place in places]
    if any(entry is None for entry in entries[:-1]):
        return None
    counters["unanswered_positions"] += sum(entry is None for entry in entries)
    parts = [position_answer(entry, ids[place], spec, counters) for entry, place in zip(entries, places, strict=True)]
    return RowAnswer.join(parts)


# -- checks ----------------------------------------------------------------------------------------------


def _check_values(given: Sequence[Given]) -> None:
    """Log-probabilities are at most 0, and what they hold at most everything."""
    for one in given:
        for place, entry in one.entries.items():
            values = list(entry.values())
            is_odd = any(math.isnan(value) or value > 1e-3 for value in values)
            if is_odd or math.fsum(math.exp(min(value, 0.0)) for value in values) > _MOST_MASS:
                raise DataError(
                    f"the values at token {place} are not log-probabilities: they sum to more than 1, or are NaN",
                    where=one.where,
                    advice=["store log-probabilities at temperature 1, natural logarithms, and not logits"],
                )


def _check_alignment(given: Sequence[Given]) -> None:
    """Where an answer stands, the token that came must be more likely than its neighbours are."""
    hits, total = Counter({-1: 0, 0: 0, 1: 0}), 0
    for one in given:
        for place, entry in one.entries.items():
            if one.has_own_token and one.ids[place] not in entry:
                raise DataError(
                    f"the answer to token {place} does not hold that token, as this format always does: it is shifted",
                    where=one.where,
                    advice=["check how the file was written: entry t must answer token t"],
                )
            if 0 < place < len(one.ids) - 1:
                hits.update({shift: one.ids[place + shift] in entry for shift in (-1, 0, 1)})
                total += 1
    best = max(hits, key=lambda shift: hits[shift])
    if best and hits[best] - hits[0] > _LEAST_LEAD * total:
        raise DataError(
            f"the answers fit the token {'after' if best > 0 else 'before'} better than their own: it is among the "
            f"top ones in {hits[best] / total:.0%} of positions, their own in {hits[0] / total:.0%}",
            advice=["the file is shifted by one: check how it was written"],
        )


def num_kept(given: Sequence[Given]) -> int:
    """How many of the top tokens every entry of a file has.

    Where the token that came stands next to them, an entry has one more unless it is among them. So the smallest entry
    tells; where all are alike and that token is always the least likely, it stands outside of them all.
    """
    entries = [(one, place, entry) for one in given for place, entry in one.entries.items()]
    least = min((len(entry) for _, _, entry in entries), default=1)
    is_outside = all(
        one.has_own_token and len(entry) == least and min(entry, key=entry.__getitem__) == one.ids[place]
        for one, place, entry in entries
    )
    return max(1, least - is_outside)
