"""Give a loaded student the teacher's vocabulary when a run is built."""

from __future__ import annotations

from typing import Any

from stillroom.config import Config
from stillroom.data.spans.pieces import Pieces, pieces_of
from stillroom.errors import ConfigError
from stillroom.models.load.source import find
from stillroom.models.surgery import replace_vocabulary, take_marks


def check_weights(config: Config) -> None:
    """Raise where the student has no weights whose embeddings could be kept."""
    source = find(config.student.model)
    if config.student.init == "auto" and not source.has_weights:
        raise ConfigError(
            f"student.vocabulary = 'teacher' keeps embeddings that were learned, and {config.student.model} has no "
            "weights",
            where="student.vocabulary",
            advice=["leave student.vocabulary out", "give a student that was trained"],
        )


def take_vocabulary(network: Any, own: Any, teachers: Any) -> list[str]:
    """Change the student's rows from its own tokenizer's to the teacher's, and return notes. `own` None: it had none.

    Equal tables of tokens leave the student as it is.
    """
    if own is None or own.get_vocab() == teachers.get_vocab():
        why = "the student brings no tokenizer" if own is None else "both models have the same tokens"
        return [f"student.vocabulary = 'teacher': {why}, and nothing was changed"]
    before = int(network.get_output_embeddings().weight.shape[0])
    pieces = pieces_of(teachers, own)
    replace_vocabulary(network, pieces.tokens, sorted(set(own.get_vocab().values())))
    take_marks(network, teachers)
    return [surgery_note(pieces, before)]


def surgery_note(pieces: Pieces, rows_before: int) -> str:
    """One line for the log: where the rows of the new vocabulary come from."""
    counts = {
        "copied from a token of the same bytes": pieces.num_copied,
        "copied from the mark of the same role": pieces.num_marks,
        "the mean of several tokens": pieces.num_averaged,
        "the mean of all, as nothing spells them": pieces.num_unspelled,
        "the mean of all, as no token has their id": sum(not one for one in pieces.is_token),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return (
        f"student.vocabulary = 'teacher': the student's {rows_before:,} rows of embeddings and head became "
        f"{len(pieces.tokens):,} for the teacher's tokens: {told}"
    )
