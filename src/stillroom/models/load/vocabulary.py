"""Compare the vocabularies of two models.

Equal sizes prove nothing and different sizes may be padding, so compare tokenizers by content.
"""

from __future__ import annotations

import hashlib
from typing import Any

from stillroom.errors import ConfigError


def vocabulary_hash(tokenizer: Any) -> str:
    """A hash of the mapping from tokens to ids."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()[:16]


def num_ids(tokenizer: Any) -> int:
    """The number of ids from 0 to the highest in use."""
    return int(max(tokenizer.get_vocab().values())) + 1


def agree_on_vocabulary(teacher: Any, student: Any, teacher_rows: int, student_rows: int) -> int:
    """The number of ids that both models share. Raise if the vocabularies differ.

    `teacher` and `student` are tokenizers, the row counts those of the heads. Of heads padded to different multiples
    the smaller counts, if every real token fits.
    """
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine != theirs:
        shared = len(mine.keys() & theirs.keys())
        moved = sum(1 for token in mine.keys() & theirs.keys() if mine[token] != theirs[token])
        raise ConfigError(
            f"teacher and student have different vocabularies: {len(theirs):,} and {len(mine):,} tokens "
            f"(hashes {vocabulary_hash(teacher)} and {vocabulary_hash(student)}), "
            f"{shared:,} in common, {moved:,} of them under another id",
            where="teacher.model, student.model",
            advice=[
                "teach across tokenizers: --preset cross-tokenizer",
                "or give a pretrained student the teacher's tokens: --set student.vocabulary=teacher",
                "choose a student of the teacher's family",
                "or train a student from scratch on the teacher's tokenizer: --set student.init=random with a "
                "configuration whose vocab_size is the teacher's",
            ],
        )
    size = min(teacher_rows, student_rows)
    highest = num_ids(student) - 1
    if highest >= size:
        raise ConfigError(
            f"token id {highest:,} has no row in a head of {size:,} rows",
            where="teacher.model, student.model",
            advice=["resize the smaller model's embeddings to the tokenizer"],
        )
    return size


def check_rows(tokenizer: Any, head_rows: int, embedding_rows: int, name: str) -> None:
    """Raise if a token of the tokenizer has no row in the model's embeddings or head."""
    num_rows = min(head_rows, embedding_rows)
    highest = num_ids(tokenizer) - 1 if tokenizer is not None else -1
    if highest >= num_rows:
        raise ConfigError(
            f"the tokenizer goes up to token id {highest:,}, and {name} has {embedding_rows:,} embeddings and "
            f"a head of {head_rows:,} rows",
            where=name,
            advice=["use the tokenizer the model was made with", "or resize the model's embeddings to the tokenizer"],
        )
