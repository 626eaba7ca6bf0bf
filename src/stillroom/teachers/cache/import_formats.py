"""Files of log-probabilities that other programs write, read into one shape.

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.errors import DataError
from stillroom.files import reason_of
from stillroom.teachers.entries import Given

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
                        raise _odd(f"{path.name}:{number}", "the line is no object")
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
    return DataError(what, where=where, advice=["docs/cache.md shows what each format looks like"])
