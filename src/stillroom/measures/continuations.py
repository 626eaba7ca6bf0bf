"""Whether two models write the same text: greedy continuations of the same beginnings, compared as bytes.

Each model writes in its own tokens until there are NUM_BYTES bytes or its text ends. What is counted is the longest
common beginning of the two texts over the longer of them, the end of a text being one more byte. So it is 1 where both
write the same, and 0 where the first byte differs; how a model cuts text into tokens does not matter. White space
before the answer to a prompt is left out: it is the templates'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.data import Rows
from stillroom.data.spans.common_prompt import common_prompt
from stillroom.models import LoadedModel
from stillroom.models.generate import END, LENGTH, Piece, write
from stillroom.yardsticks import ratio_interval

NUM_PROMPTS = 16
NUM_BYTES = 64
_END = b"\xff"  # in no UTF-8 text


@dataclass(frozen=True)
class TextAgreement:
    """How much of what two models write is the same."""

    agreement: float | None  # None without a prompt that both could continue
    interval: tuple[float, float] | None  # 95 %, by bootstrap over prompts
    prompts: int
    left_out: int  # prompts without a common beginning, or that a model could not continue


def text_agreement(
    student: LoadedModel, teacher: LoadedModel, rows: Rows, *, num_prompts: int = NUM_PROMPTS
) -> TextAgreement:
    """Compare the continuations of beginnings that are spread over rows with both models' tokens."""
    count = min(num_prompts, len(rows))
    indices = [number * len(rows) // count for number in range(count)]
    chosen = [common_prompt(rows.batch([one]), opens_document=rows.opens_document(one)) for one in indices]
    prompts = [prompt for prompt in chosen if prompt is not None]
    if not prompts:
        return TextAgreement(None, None, 0, count)
    answers = [prompt.opens_answer for prompt in prompts]
    ours = written(student.network, student.tokenizer, [prompt.student for prompt in prompts], answers)
    theirs = written(teacher.network, teacher.tokenizer, [prompt.teacher for prompt in prompts], answers)
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    same = np.array([num_common(one, other) for one, other in pairs], np.float64)
    longer = np.array([max(len(one), len(other)) for one, other in pairs], np.float64)
    share = float(same.sum() / longer.sum()) if pairs else None
    return TextAgreement(share, ratio_interval(same, longer), len(pairs), count - len(pairs))


def written(
    network: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], is_answer: Sequence[bool]
) -> list[bytes | None]:
    """What a model writes greedily after each prompt, cut to NUM_BYTES; None where it could not go on."""
    texts, ended = [""] * len(prompts), [""] * len(prompts)

    def add(piece: Piece) -> bool:
        text = texts[piece.row] + piece.text
        texts[piece.row] = text.lstrip() if is_answer[piece.row] else text
        ended[piece.row] = piece.ended
        return all(end or len(text.encode("utf-8")) >= NUM_BYTES for text, end in zip(texts, ended, strict=True))

    write(network, tokenizer, prompts, add, max_new_tokens=NUM_BYTES)
    return [_compared(text, end) for text, end in zip(texts, ended, strict=True)]


def _compared(text: str, ended: str) -> bytes | None:
    spelled = text.encode("utf-8", "replace")
    if len(spelled) >= NUM_BYTES:
        return spelled[:NUM_BYTES]
    if ended == END:
        return spelled + _END
    return spelled if ended == LENGTH else None


def num_common(one: bytes, other: bytes) -> int:
    """Bytes that two texts begin with alike."""
    size = min(len(one), len(other))
    differs = np.frombuffer(one[:size], np.uint8) != np.frombuffer(other[:size], np.uint8)
    return int(differs.argmax()) if differs.any() else size
