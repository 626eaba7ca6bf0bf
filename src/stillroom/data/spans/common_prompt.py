"""The same beginning of a text in the tokens of two models, cut where a token begins on both sides."""

from __future__ import annotations

from dataclasses import dataclass

from stillroom.types import IGNORED, Batch

_PROMPT_TOKENS = 32  # of plain text, in the student's tokens; a short text is cut in the middle


@dataclass(frozen=True)
class CommonPrompt:
    """The same beginning for both models."""

    student: list[int]
    teacher: list[int]
    opens_answer: bool  # a prompt ends here: white space before the answer is the template's


def common_prompt(row: Batch, *, opens_document: bool = True) -> CommonPrompt | None:
    """The tokens of student and teacher before one span of a row of one; None where there is no span to cut at.

    A record with a prompt is cut where its answer begins. A row that begins inside of its document is read from its
    first span on. Nothing is tokenized again: both models are given the tokens that they would read in the whole text.
    """
    if row.other is None or row.spans is None or row.other.spans is None:
        return None
    spans, targets, theirs = row.spans[0].tolist(), row.targets[0].tolist(), row.other.spans[0].tolist()
    begins = [place for place, span in enumerate(spans) if span >= 0 and (not place or spans[place - 1] != span)]
    if not begins:
        return None
    opens_answer = opens_document and targets[0] == IGNORED
    wanted = begins[0] if opens_answer else min(_PROMPT_TOKENS, begins[-1] // 2)
    first = 0 if opens_document else begins[0] + 1  # the target at a position is the token after it
    place = next((one for one in begins if one >= max(wanted, first)), begins[-1])
    their_first = 0 if opens_document else theirs.index(spans[begins[0]]) + 1
    ours = row.input_ids[0, first : place + 1].tolist()
    told = row.other.input_ids[0, their_first : theirs.index(spans[place]) + 1].tolist()
    return CommonPrompt(ours, told, opens_answer) if ours and told else None
