"""The opening of a document: the tokens that a tokenizer adds before a text by default.

Most models of the Llama kind were trained with a begin-of-text token (BOS) before each document and answer badly
without it. Tokenize a short text to learn whether a tokenizer adds one: its class and settings do not tell. An
opening has no bytes, is never a target, and occurs once in a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.data.encode import Tokenizer

Bos = Literal["auto"] | bool

_PROBE = "a"


def opening_ids(tokenizer: Tokenizer, wanted: Bos) -> tuple[int, ...]:
    """The tokens that begin a document: usually BOS or none; with some tokenizers two tokens."""
    if wanted is False:
        return ()
    own = _added_before_text(tokenizer)
    if own or wanted == "auto":
        return own
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        raise ConfigError(
            "data.bos is true and the tokenizer has no begin-of-text token",
            where="data.bos",
            advice=[
                "--set data.bos=auto follows the tokenizer's own default",
                "name bos_token in the tokenizer's files",
            ],
        )
    return (int(bos),)


def is_opened(ids: Sequence[int], opening: Sequence[int]) -> bool:
    """Whether the tokens already begin with the opening, as most chat templates print it."""
    return list(ids[: len(opening)]) == list(opening)


def opened(ids: Sequence[int], opening: Sequence[int]) -> list[int]:
    """Put the opening before the tokens unless it is there."""
    return list(ids) if is_opened(ids, opening) else [*opening, *ids]


def opening_note(tokenizer: Tokenizer, wanted: Bos, opening: Sequence[int]) -> str:
    """One line for the log."""
    if not opening:
        why = "data.bos is false" if wanted is False else "the tokenizer adds none by itself"
        return f"documents begin without a begin-of-text token: {why}"
    why = "data.bos is true" if not _added_before_text(tokenizer) else "the tokenizer adds it by itself"
    names = " ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in opening)
    return f"each document begins with {names}: {why}"


def opening_difference(teacher: Any, student: Any, wanted: Bos) -> list[str]:
    """A note if the teacher's tokenizer opens texts differently from the student's, which is used."""
    if wanted != "auto" or _added_before_text(teacher) == _added_before_text(student):
        return []
    theirs, ours = (
        " ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in _added_before_text(tokenizer)) or "nothing"
        for tokenizer in (teacher, student)
    )
    return [
        f"the teacher's tokenizer begins texts with {theirs} and the student's with {ours}: documents begin as the "
        "student's; data.bos = true or false decides for both"
    ]


def _added_before_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer adds before a text with its default settings."""
    bare = list(tokenizer([_PROBE], add_special_tokens=False)["input_ids"][0])
    whole = list(tokenizer([_PROBE], add_special_tokens=True)["input_ids"][0])
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return tuple(int(number) for number in whole[: next(starts, 0)])
