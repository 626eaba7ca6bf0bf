"""Import another program's log-probabilities into a cache, after checking all that can be checked.

Ids must spell what the file says they spell, values must be log-probabilities, and an answer must belong to the token
it stands at: a file that is shifted by one trains without a complaint and teaches nonsense.

vllm        JSONL. `prompt_token_ids` and `prompt_logprobs`, of the line or of its first choice: for each token but the
            first a table from token id to {"logprob", "decoded_token"}. The prompt's own token is always among them.
openai      JSONL. `id` (a row's name, as `stillroom data` prints it) or `prompt_token_ids`, and of the first choice
            `logprobs.content`: for each token of the answer its `token` and `top_logprobs`. Tokens are texts, or
            `token_id:123`, as vLLM's server writes on request; a text that several tokens have is refused.
distillkit  JSONL or Parquet, or a folder of Parquet files. `input_ids` and two columns of lists, ids and log-probs, one
            entry for each token that is predicted: under one of the names in `COLUMNS`. Or what its sampler writes:
            packed columns, and `compression_config.yaml` in the same folder, which says how.
axolotl     JSONL or Parquet. `input_ids`, `target_token_ids`, `target_logprobs` and `target_mask` of the plugin for
            distillation, each a list for each token: what was said before that token.

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
import numpy.typing as npt

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
    ("token_ids", "top_values"),
    ("indices", "logprobs"),
)

_NOTHING = -1e8  # below it a value stands for no token: -inf, or -1e9 where axolotl fills up


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
    layout: Layout | None = None
    for where, line in _records(path):
        ids = tuple(int(token) for token in line["input_ids"])
        is_packed = any(names <= set(line) for names in PACKED)
        if is_packed:
            layout = layout or _layout(path)
            tokens, values = layout.unpacked(where, line)
        elif names := next((pair for pair in COLUMNS if pair[0] in line and pair[1] in line), None):
            tokens, values = line[names[0]], line[names[1]]
        else:
            raise _odd(where, f"the columns are {', '.join(line)}; input_ids and ids with log-probs are needed")
        # One fewer than tokens: the first is predicted by nothing. As many: each says what follows its token.
        if len(tokens) != len(values) or len(tokens) not in (len(ids), len(ids) - 1):
            raise _odd(where, f"{len(ids)} tokens, {len(tokens)} lists of ids and {len(values)} of log-probs")
        entries = {
            place + 1: _entry(where, some, numbers)
            for place, (some, numbers) in enumerate(zip(tokens, values, strict=True))
            if place + 1 < len(ids)
        }
        yield Given(where, ids, entries, has_any_end=is_packed)  # the sampler puts a padding token after each text


def read_axolotl(path: Path, _find: Callable[[str], int]) -> Iterator[Given]:
    for where, line in _records(path):
        ids = tuple(int(token) for token in line["input_ids"])
        tokens, values, masks = (line[f"target_{name}"] for name in ("token_ids", "logprobs", "mask"))
        if not len(ids) == len(tokens) == len(values) == len(masks):
            counts = f"{len(tokens)} lists of ids, {len(values)} of log-probs and {len(masks)} of masks"
            raise _odd(where, f"{len(ids)} tokens, {counts}: the text is packed or was cut")
        entries = {}
        for place, (some, numbers, mask) in enumerate(zip(tokens, values, masks, strict=True)):
            kept = [one for one in zip(some, numbers, mask, strict=True) if one[2]]
            if place and kept:
                entries[place] = _entry(where, [token for token, _, _ in kept], [value for _, value, _ in kept])
        yield Given(where, ids, entries)


def _entry(where: str, tokens: Sequence[Any], values: Sequence[Any]) -> dict[int, float]:
    if len(tokens) != len(values):
        raise _odd(where, f"a token has {len(tokens)} ids and {len(values)} log-probs")
    found = {int(token): float(value) for token, value in zip(tokens, values, strict=True) if not value < _NOTHING}
    if len(found) != sum(not value < _NOTHING for value in values):
        raise _odd(where, "an id stands twice in the answer to one token")
    return found


READERS: dict[str, Callable[[Path, Callable[[str], int]], Iterator[Given]]] = {
    "vllm": read_vllm,
    "openai": read_openai,
    "distillkit": read_distillkit,
    "axolotl": read_axolotl,
}
_TEMPERATURES = ("temperature", "gen_temperature", "kd_temperature", "preapplied_temperature")


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for file in files:
        yield from _parquet(file) if file.suffix == ".parquet" else _lines(file)


def _at_one(where: str, line: Mapping[str, Any]) -> None:
    """Raise if a record says that it was made at another temperature than 1."""
    for name in _TEMPERATURES:
        if line.get(name) not in (None, 1, 1.0):
            raise DataError(
                f"{name} is {line[name]}: log-probabilities at temperature 1 are needed",
                where=where,
                advice=["write the file again at temperature 1: other temperatures are applied in training"],
            )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise _odd(f"{path.name}:{number}", "the line is not an object")
                    _at_one(f"{path.name}:{number}", line)
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
                _at_one(f"{path.name}:{number}", row)
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


# -- the packed columns of DistillKit ------------------------------------------------------------------------
#
# The log-probs of a position in falling order, each but the first as the difference to the one before if
# `delta_encoding`: `exact_k` numbers; the coefficients of a curve through the others; what the curve misses, in bins of
# whole numbers with a scale. Integers are bits, the highest first, end to end up to a whole byte. The legacy columns
# have numbers and coefficients of a curve in 1/n or n, and ids in words of 64 bits, the first in the lowest bits.

PACKED = ({"compressed_logprobs", "bytepacked_indices"}, {"packed_indices", "exact_values", "coeffs"})
_CONFIG = "compression_config.yaml"
_DTYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}
Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """How columns are packed, by the names of `compression_config.yaml`. T positions, k tokens each."""

    settings: Mapping[str, Any]

    def unpacked(self, where: str, line: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """The ids and the log-probs of each position."""
        try:
            is_legacy = "polynomial_degree" in self.settings
            ids, values = self._legacy(line) if is_legacy else self._current(line)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the packed columns are not what {_CONFIG} says: {reason_of(error)}",
                where=where,
                advice=["put the file of the run that sampled them next to them"],
            ) from error
        return ids.tolist(), values.tolist()

    def _current(self, line: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], Floats]:
        given, k, num_exact = self.settings, int(self.settings["k"]), int(self.settings["exact_k"])
        packed = _Cursor(np.array(line["compressed_logprobs"], np.uint8))
        exact = packed.floats(num_exact, given.get("exact_dtype", "float32"))
        terms, num_rest = given.get("polynomial_terms") or [], k - num_exact
        coefficients = packed.floats(len(terms), given.get("term_dtype", "float32"))
        rest = np.zeros((len(exact), num_rest))
        at = 0
        for one in given.get("residual_bins") or []:
            scale, bits = packed.floats(1, one["scale_dtype"]), int(one["element_bits"])
            whole = packed.integers(int(one["num_elements"]), bits).astype(np.float64)
            rest[:, at : at + whole.shape[1]] = (2 * whole - 1 if bits == 1 else whole - 2.0 ** (bits - 1)) * scale
            at += whole.shape[1]
        packed.check_end()
        if terms:
            steps = np.linspace(0, 1, num_rest) if given.get("normalize_t") else np.arange(num_rest, dtype=np.float64)
            curve = [getattr(np, term)(steps) if term in ("sqrt", "exp") else steps ** int(term) for term in terms]
            rest += coefficients @ np.array(curve)
        values = np.concatenate([exact, rest], axis=1)
        values = np.cumsum(values, axis=1) if given.get("delta_encoding", True) else values
        indices = _Cursor(np.array(line["bytepacked_indices"], np.uint8))
        ids = indices.integers(k, int(np.ceil(np.log2(np.float32(given["d"])))))
        indices.check_end()
        return ids, values

    def _legacy(self, line: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], Floats]:
        given, k, num_exact = self.settings, int(self.settings["k"]), int(self.settings["exact_k"])
        exact, coefficients = np.array(line["exact_values"], np.float64), np.array(line["coeffs"], np.float64)
        steps, sign = np.arange(1.0, k - num_exact + 1), -1 if given.get("invert_polynomial", True) else 1
        curve = [steps ** (sign * power) for power in range(int(given["polynomial_degree"]) + 1)]
        curve += [np.sqrt(steps)] if given.get("with_sqrt_term") else []
        if exact.shape[1:] != (num_exact,) or (k > num_exact and coefficients.shape[1:] != (len(curve),)):
            raise ValueError(f"{exact.shape[1:]} numbers and {coefficients.shape[1:]} coefficients a position")
        rest = coefficients @ np.array(curve) if k > num_exact else np.empty((len(exact), 0))
        bits = int(np.ceil(np.log2(np.float32(given["vocab_size"]))))
        words, per_word = np.array(line["packed_indices"], np.uint64), 64 // bits
        if words.shape != (len(exact), -(-k // per_word)):
            raise ValueError(f"{words.shape[1:]} words of ids a position")
        shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
        ids = (words[:, :, None] >> shifts) & np.uint64(2**bits - 1)
        return ids.reshape(len(words), -1)[:, :k].astype(np.int64), np.concatenate([exact, rest], axis=1)


@dataclass
class _Cursor:
    """Reads the bytes of all positions at once, [T, size]."""

    packed: Bytes
    at: int = 0

    def _taken(self, size: int) -> Bytes:
        if self.packed.ndim != 2 or self.at + size > self.packed.shape[1]:
            raise ValueError(f"{self.packed.shape[1:]} bytes a position are too few")
        self.at += size
        return np.ascontiguousarray(self.packed[:, self.at - size : self.at])

    def floats(self, count: int, dtype: str) -> Floats:
        kind = np.dtype(_DTYPES[dtype])
        found = self._taken(count * kind.itemsize).view(kind)
        if dtype == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float64).reshape(len(self.packed), count)

    def integers(self, count: int, bits: int) -> npt.NDArray[np.int64]:
        flags = np.unpackbits(self._taken(-(-count * bits // 8)), axis=1)[:, : count * bits]
        weights = 1 << np.arange(bits - 1, -1, -1, dtype=np.int64)
        found: npt.NDArray[np.int64] = flags.reshape(len(flags), count, bits).astype(np.int64) @ weights
        return found

    def check_end(self) -> None:
        if self.at != self.packed.shape[1]:
            raise ValueError(f"{self.packed.shape[1]} bytes a position, and {self.at} are expected")


def _layout(path: Path) -> Layout:
    import yaml  # type: ignore[import-untyped]

    place = (path if path.is_dir() else path.parent) / _CONFIG
    try:
        settings = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"the columns are packed, and {place} cannot be read: {reason_of(error)}",
            where=str(path),
            advice=["the sampler of DistillKit writes it next to its Parquet files: copy it there"],
        ) from error
    if not isinstance(settings, dict):
        raise _odd(str(place), "it is not a table of settings")
    return Layout(settings)


# -- matching them to rows ---------------------------------------------------------------------------------


_OTHER = "the file was made with another tokenizer: name a teacher and a student that have it"
_BEGINNING = 4  # tokens by which the rows that a sequence may belong to are found
_MOST_MASS = 1.005
_LEAST_TAIL = 1e-5
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


def check_tails(given: Sequence[Given], path: Path) -> None:
    """Raise if nothing is left over anywhere: a few tokens that always hold everything were renormalised."""
    masses = [math.fsum(math.exp(value) for value in entry.values()) for one in given for entry in one.entries.values()]
    if masses and min(masses) > 1 - _LEAST_TAIL:
        raise DataError(
            f"the tokens of every position of {path.name} sum to 1: they were renormalised, and what the teacher gave "
            "other tokens is not known",
            where=str(path),
            advice=["--set teacher.signal.kind=renormalised takes them as they are"],
        )


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
    is_free = given.has_any_end and len(overlap) == len(given.ids)
    same = len(overlap) - is_free
    if given.ids[:same] != overlap[:same] or start + len(given.ids) < len(ids) - 1:
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
