"""The tokenizers: are they the same, can they pad and end a text, and do they know the text at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.models import agree_on_vocabulary, vocabulary_hash

SUBJECT = "tokenizers"
_MOST_UNKNOWN = 0.01  # of the tokens
_LEAST_BYTES = 1.5  # of text in a token; common ones hold 3 to 5


@check(SUBJECT)
def identity(setup: Setup) -> Iterator[Finding]:
    """Raises where teacher and student read text as different tokens."""
    found = setup.part("tokenizers")
    if len(found) == 2:
        size = len(found["student"].get_vocab()) + 1_000_000  # heads are compared where the models are loaded
        agree_on_vocabulary(found["teacher"], found["student"], size, size)
        said = f"teacher and student share {len(found['student'].get_vocab()):,} tokens"
    else:
        said = f"one tokenizer for both, {len(setup.tokenizer.get_vocab()):,} tokens"
    yield Finding("green", SUBJECT, f"{said} (hash {vocabulary_hash(setup.tokenizer)})")


@check(SUBJECT)
def marks(setup: Setup) -> Iterator[Finding]:
    tokenizer = setup.tokenizer
    if tokenizer.eos_token_id is None:
        yield Finding(
            "amber",
            SUBJECT,
            "the tokenizer has no end-of-text token: the student will not learn where a text ends",
            "set eos_token in tokenizer_config.json of the student",
        )
    elif tokenizer.pad_token_id is None:
        yield Finding("green", SUBJECT, "there is no padding token: rows are padded with another one and not scored")


@check(SUBJECT)
def coverage(setup: Setup) -> Iterator[Finding]:
    rows = setup.part("preview")["rows"]
    tokenizer: Any = setup.tokenizer
    ids, size = [], 0
    for row in rows:
        text = "".join(piece for piece, _is_scored in row["pieces"])
        size += len(text.encode("utf-8", errors="replace"))
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        return
    mark = tokenizer.unk_token_id
    unknown = sum(index == mark for index in ids) / len(ids) if mark is not None else 0.0
    if unknown > _MOST_UNKNOWN:
        yield Finding(
            "red",
            SUBJECT,
            f"{unknown:.1%} of the tokens of the text are the unknown one, {tokenizer.unk_token}: what it stands for "
            "cannot be learned",
            "use models whose tokenizer knows this script, or clean the text",
        )
    if size / len(ids) < _LEAST_BYTES:
        yield Finding(
            "amber",
            SUBJECT,
            f"a token holds {size / len(ids):.2f} bytes of this text, where 3 to 5 are usual: the tokenizer was made "
            "for other text",
            "use models of a family that knows this language, or check that the text is not garbled",
        )
    else:
        yield Finding("green", SUBJECT, f"a token holds {size / len(ids):.2f} bytes of this text")
