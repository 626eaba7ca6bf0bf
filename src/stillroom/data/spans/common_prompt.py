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


def common_prompt(row: Batch) -> CommonPrompt | None:
    """The tokens of student and teacher before one span of a row of one; None where there is no span to cut at.

    A record with a prompt is cut where its answer begins. Nothing is tokenized again, so both models are given the
    bytes that they would read in the whole text.
    """
    if row.other is None or row.spans is None or row.other.spans is None:
        return None
    spans, targets = row.spans[0].tolist(), row.targets[0].tolist()
    places = [place for place, span in enumerate(spans) if span >= 0]
    if not places:
        return None
    first_target = next(place for place, target in enumerate(targets) if target != IGNORED)
    opens_answer = first_target > 0
    wanted = places[0] if opens_answer else min(_PROMPT_TOKENS, places[-1] // 2)
    begins = [place for place in places if spans[place] != (spans[place - 1] if place else -1)]
    place = next((one for one in begins if one >= wanted), begins[-1])
    theirs = row.other.spans[0].tolist().index(spans[place])
    ours, told = row.input_ids[0, : place + 1].tolist(), row.other.input_ids[0, : theirs + 1].tolist()
    return CommonPrompt(ours, told, opens_answer)
