"""How many questions a model answers: by the likelihood of the choices, and by what it writes.

# B choices of one question, L positions, V vocabulary
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillroom.data import Bos, prompt_ids
from stillroom.data.prompts import turn_end_ids
from stillroom.measures.question_file import Question
from stillroom.models.generate import Piece, write
from stillroom.models.length import num_positions

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_Z = 1.959964  # of a 95 % interval
_BATCH = 8
_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Answered:
    """Accuracies, each with its 95 % interval. None where no question is of that kind."""

    questions: int
    too_long: int  # longer than the model's positions; they count as wrong
    choice_accuracy: float | None  # the likeliest choice is the right one
    choice_accuracy_by_byte: float | None  # the likeliest by log-probability over bytes, so that length does not matter
    exact_match: float | None  # what is written, normalised, is a right answer
    answer_perplexity: float | None  # of the first right answer, by token
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)


def answer_questions(
    network: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    bos: Bos = "auto",
    max_new_tokens: int = _ANSWER_TOKENS,
) -> Answered:
    """Ask each question: with the chat template where there is one, else as "Question: ...\\nAnswer:"."""
    asked = [_asked(tokenizer, question, bos) for question in questions]
    scores = [
        _scores(network, tokenizer, ids, question, chat) for question, (ids, chat) in zip(questions, asked, strict=True)
    ]
    written = _written(network, tokenizer, asked, max_new_tokens)
    matches = [_is_match(text, question) for text, question in zip(written, questions, strict=True)]
    chosen = [(question, score) for question, score in zip(questions, scores, strict=True) if question.choices]
    counts = {
        "choice_accuracy": [_best(score.sums) == question.right for question, score in chosen],
        "choice_accuracy_by_byte": [_best(score.by_byte) == question.right for question, score in chosen],
        "exact_match": matches,
    }
    shares = {name: sum(hits) / len(hits) if hits else None for name, hits in counts.items()}
    tokens = sum(score.right_tokens for score in scores)
    total = sum(score.right_sum for score in scores)
    return Answered(
        questions=len(questions),
        too_long=sum(score.is_too_long for score in scores),
        answer_perplexity=math.exp(min(-total / tokens, 700.0)) if tokens else None,
        intervals={name: wilson(sum(hits), len(hits)) for name, hits in counts.items() if hits},
        choice_accuracy=shares["choice_accuracy"],
        choice_accuracy_by_byte=shares["choice_accuracy_by_byte"],
        exact_match=shares["exact_match"],
    )


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and double spaces (Rajpurkar et al. 2016)."""
    plain = "".join(" " if character in "-/" else character for character in text.lower())
    plain = "".join(character for character in plain if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): right for few questions and shares near 0 and 1."""
    share, squared = hits / total, _Z * _Z / total
    middle = (share + squared / 2) / (1 + squared)
    width = _Z * math.sqrt(share * (1 - share) / total + squared / (4 * total)) / (1 + squared)
    return max(0.0, middle - width), min(1.0, middle + width)


def _asked(tokenizer: Any, question: Question, bos: Bos) -> tuple[list[int], bool]:
    """The tokens of a question, and whether the chat template printed it."""
    if question.is_prompt:
        return prompt_ids(tokenizer, question.text, bos=bos, is_raw=True)
    text = question.text if tokenizer.chat_template else f"Question: {question.text}\nAnswer:"
    return prompt_ids(tokenizer, text, bos=bos)


@dataclass(frozen=True)
class _Scores:
    sums: list[float]  # of each choice
    by_byte: list[float]
    right_sum: float
    right_tokens: int
    is_too_long: bool = False


def _scores(network: Any, tokenizer: Any, ids: list[int], question: Question, is_chat: bool) -> _Scores:
    """Log-probabilities of the choices, or of the first right answer where there are none."""
    texts = question.choices or question.answers[:1]
    spaced = (
        texts
        if is_chat or (question.text.endswith((" ", "\n")) and question.is_prompt)
        else [f" {text}" for text in texts]
    )
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ends = [list(tokenizer([text], **options)["input_ids"][0]) for text in spaced]
    limit = num_positions(network)
    if not all(ends) or (limit and len(ids) + max(map(len, ends)) > limit):
        return _Scores([], [], 0.0, 0, is_too_long=True)
    sums = _log_probs(network, ids, ends)
    right = max(question.right, 0)
    by_byte = [total / max(len(text.encode("utf-8")), 1) for total, text in zip(sums, texts, strict=True)]
    return _Scores(sums, by_byte, sums[right], len(ends[right]))


@torch.no_grad()
def _log_probs(network: Any, ids: list[int], ends: Sequence[list[int]]) -> list[float]:
    """The log-probability of each continuation. Rows are padded on the right: no scored position sees padding."""
    longest = max(map(len, ends))
    rows = torch.tensor(
        [ids + end + [0] * (longest - len(end)) for end in ends], device=next(network.parameters()).device
    )
    logits: Tensor = network(input_ids=rows, use_cache=False).logits[:, len(ids) - 1 : -1].float()
    taken = torch.log_softmax(logits, -1).gather(2, rows[:, len(ids) :, None]).squeeze(2)
    sums = [float(taken[row, : len(end)].sum()) for row, end in enumerate(ends)]
    return [value if math.isfinite(value) else -math.inf for value in sums]


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__) if values else -1


def _written(network: Any, tokenizer: Any, asked: Sequence[tuple[list[int], bool]], max_new_tokens: int) -> list[str]:
    texts = [""] * len(asked)
    for begin in range(0, len(asked), _BATCH):
        part = asked[begin : begin + _BATCH]
        stops = turn_end_ids(tokenizer) if any(is_chat for _ids, is_chat in part) else set()

        def add(piece: Piece, begin: int = begin) -> None:
            texts[begin + piece.row] += piece.text

        write(network, tokenizer, [ids for ids, _ in part], add, max_new_tokens=max_new_tokens, stops=stops)
    # A model without a template goes on to the next question: its answer is its first line.
    lines = [text.strip().splitlines() for text in texts]
    return [
        text.strip() if is_chat else (found[0] if found else "")
        for text, found, (_, is_chat) in zip(texts, lines, asked, strict=True)
    ]


def _is_match(text: str, question: Question) -> bool:
    """Whether a text is a right answer. An answer of which nothing is left, such as "A", is compared as it stands."""
    written, *right = (normalised(one) or one.strip().lower() for one in (text, *question.answers))
    return bool(written) and written in right
