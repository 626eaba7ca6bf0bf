"""How many questions a model answers: by the likelihood of the choices, and by what it writes.

# B choices of one question, L positions, V vocabulary
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillroom.core.errors import DataError
from stillroom.data import Bos, Rows, prompt_ids
from stillroom.data.chat import turn_end_ids
from stillroom.data.checkers import is_same_text
from stillroom.data.two_tokenizers.align import common_prompt
from stillroom.metrics.metrics import ratio_interval, wilson
from stillroom.models import LoadedModel
from stillroom.models.generate import END, LENGTH, Piece, write
from stillroom.models.student import num_positions

# -- question file ---------------------------------------------------------------------------------
# Questions with known answers, one JSON object a line, in the layouts that question sets are published in.


_QUESTIONS = ("question", "query", "input", "ctx")  # asked; a "prompt" is continued as it stands
_CHOICES = ("choices", "options", "endings")
_ANSWERS = ("answers", "answer", "answerKey", "label", "target", "output")


@dataclass(frozen=True)
class Question:
    """A question with its right answers, or with choices of which one is right."""

    text: str
    is_prompt: bool
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    right: int = -1  # of the choices


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. A line that is none is an error: an accuracy over some of them would be another."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the questions in {path} cannot be read: {error}", where=str(path)) from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"a line is not a question: {error}",
                where=f"{path}:{number}",
                advice=[
                    'a line is an object with "question" and "answer", and "choices" where there are some',
                    'with choices "answer" is the place of the right one from 0, its letter, or its text',
                ],
            ) from error
    if not found:
        raise DataError(f"{path} holds no questions", where=str(path))
    return found


def _question(value: Any) -> Question:
    if not isinstance(value, Mapping):
        raise TypeError("it is not an object")
    is_prompt = "prompt" in value
    text = value["prompt"] if is_prompt else _first(value, _QUESTIONS)
    answer = _first(value, _ANSWERS)
    if not isinstance(text, str):
        raise TypeError("the question is not a text")
    given = next((value[name] for name in _CHOICES if value.get(name)), None)
    if given is None:
        answers = answer if isinstance(answer, list) else [answer]
        if not answers or not all(isinstance(one, str | int | float) for one in answers):
            raise TypeError("the answer is not a text")
        return Question(text, is_prompt, tuple(str(one) for one in answers))
    labels: Sequence[Any] = ()
    if isinstance(given, Mapping):  # as ARC has it
        given, labels = given["text"], given.get("label", ())
    choices = tuple(str(choice) for choice in given)
    if len(choices) < 2:
        raise ValueError("there are fewer than two choices")
    right = _place(answer, choices, labels)
    return Question(text, is_prompt, (choices[right],), choices, right)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    raise LookupError(f"it has none of {', '.join(names)}")


def _place(answer: Any, choices: Sequence[str], labels: Sequence[Any]) -> int:
    """Which choice is right: by its text, its label, its letter, or its place from 0."""
    if isinstance(answer, str):
        for known in (choices, [str(label) for label in labels]):
            if answer in known:
                return list(known).index(answer)
        letter = answer.strip().upper()
        if len(letter) == 1 and letter.isalpha():
            answer = ord(letter) - ord("A")
        elif letter.isdigit():
            answer = int(letter)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise ValueError(f"the answer {answer!r} is none of the {len(choices)} choices")


_BATCH = 8
_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Answered:
    """Accuracies, each with its 95 % interval. None where no question is of that kind."""

    questions: int
    too_long: int  # longer than the model's positions; they count as wrong
    choice_accuracy: float | None  # the most likely choice is the right one
    choice_accuracy_by_byte: (
        float | None
    )  # the most likely by log-probability over bytes, so that length does not matter
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
    matches = [is_same_text(text, *question.answers) for text, question in zip(written, questions, strict=True)]
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
    # A model without a template continues with the next question: its answer is its first line.
    lines = [text.strip().splitlines() for text in texts]
    return [
        text.strip() if is_chat else (found[0] if found else "")
        for text, found, (_, is_chat) in zip(texts, lines, asked, strict=True)
    ]


# -- continuations ---------------------------------------------------------------------------------
# Whether two models write the same text: greedy continuations of the same beginnings, compared as bytes.
#
# Each model writes in its own tokens until there are NUM_BYTES bytes or its text ends. What is counted is the longest
# common beginning of the two texts over the longer of them, the end of a text being one more byte. So it is 1 where
# both write the same, and 0 where the first byte differs; how a model cuts text into tokens does not matter. White
# space before the answer to a prompt is left out: it is the templates'.


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
    """What a model writes greedily after each prompt, cut to NUM_BYTES; None where it could not continue."""
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
