"""What stands at the beginning of a document: the tokens a tokenizer puts before a text by its own default.

Most models of the Llama kind were trained with a begin-of-text token (BOS) before each document and answer badly
without it. Whether a tokenizer adds one is asked of the tokenizer itself, with a short text: its class and its
settings do not say. An opening has no bytes and is never a target, and a document has it once.
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
    """The tokens that begin a document: usually BOS, or none; some tokenizers have an opening of two tokens."""
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
    """Whether tokens begin with the opening already, as those of most chat templates do."""
    return list(ids[: len(opening)]) == list(opening)


def opened(ids: Sequence[int], opening: Sequence[int]) -> list[int]:
    """The tokens with the opening before them, once."""
    return list(ids) if is_opened(ids, opening) else [*opening, *ids]


def opening_note(tokenizer: Tokenizer, wanted: Bos, opening: Sequence[int]) -> str:
    """A sentence for the log."""
    if not opening:
        why = "data.bos is false" if wanted is False else "the tokenizer adds none by itself"
        return f"documents begin without a begin-of-text token: {why}"
    why = "data.bos is true" if not _added_before_text(tokenizer) else "the tokenizer adds it by itself"
    names = " ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in opening)
    return f"each document begins with {names}: {why}"


def opening_difference(teacher: Any, student: Any, wanted: Bos) -> list[str]:
    """Say where the teacher's tokenizer begins texts otherwise than the student's, which is followed."""
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
    """What the tokenizer puts before a text when its special tokens are not turned off."""
    bare = list(tokenizer([_PROBE], add_special_tokens=False)["input_ids"][0])
    whole = list(tokenizer([_PROBE], add_special_tokens=True)["input_ids"][0])
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return tuple(int(number) for number in whole[: next(starts, 0)])
