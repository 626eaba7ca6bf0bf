"""Both models on a few held-out rows, token by token, for the report: `tokens.json` in the run's folder.

For each token: how far the two distributions before it lie apart, what both gave the token that stands there, and
their top five tokens. The distance is the total variation, the share of probability that would have to move: 0 if they
are equal, 1 if they share no token. From stored answers it is taken over the top tokens and the rest as one,
which is a lower bound. A few rows of bounded length, so the file stays below 300 kB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.core.errors import CannotSave
from stillroom.core.files import reason_of, write_atomically
from stillroom.core.types import (
    IGNORED,
    Batch,
    BothNeeds,
    DenseSignal,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
)
from stillroom.data.tokenize import num_shared, spell
from stillroom.metrics.metrics import TOP_K
from stillroom.training.evaluate import log_probs_by_chunk
from stillroom.training.run import Run

Answer = dict[str, Any] | None

NAME = "tokens.json"
SCHEMA = 1
MAX_ROWS = 4
MAX_TOKENS = 96  # of a row
CONTEXT = 8  # tokens shown before the first that is scored
MAX_TEXT = 40  # characters of a token
_DIGITS = 4


def view_of_all(run: Run) -> dict[str, Any] | None:
    """`token_view` where only all processes together can ask the teacher; None elsewhere."""
    if not run.teacher.answers_together:
        return None
    with run.parallel.gathered():
        return token_view(run)


def save_tokens(run: Run, found: dict[str, Any] | None = None) -> None:
    """Write the file, unless all processes found its contents already; nothing where the run has no teacher."""
    found = found or token_view(run)
    if found is None:
        return
    path = run.folder / NAME
    try:
        write_atomically(path, json.dumps(found, allow_nan=False, separators=(",", ":")).encode("ascii"))
    except OSError as error:
        raise CannotSave(
            f"cannot write {NAME}: {reason_of(error)}",
            where=str(path),
            advice=["free some space on that disk", f"then: stillroom resume {run.folder}"],
        ) from error


@torch.no_grad()
def token_view(run: Run) -> dict[str, Any] | None:
    """Rows of tokens with both models' answers, or a note why there are none. None: there is no teacher."""
    teacher = run.teacher.original
    if not teacher.gives_signals:
        return None
    texts, rows = _Texts(run.tokenizer), []
    was_training = run.student.model.training
    run.student.eval()
    try:
        for row in chosen_rows(run.eval_batches()):
            batch = row.up_to(_first_shown(row) + MAX_TOKENS).to(run.precision.device)
            with run.precision.autocast():
                view = run.student.observe(batch, BothNeeds().student)
            signal = teacher.whole_answer(batch, teacher.observe(batch, BothNeeds().teacher))
            if reason := why_not(signal, teacher.num_exact):
                return {"schema": SCHEMA, "note": reason, "rows": []}
            rows.append(_row(row, batch, view, signal, run.tokenizer, texts, teacher.num_exact))
    finally:
        run.student.model.train(was_training)
    is_whole = isinstance(signal, DenseSignal)
    kind = "the whole vocabulary" if is_whole else f"the teacher's {teacher.num_exact} top stored tokens"
    return {"schema": SCHEMA, "compared": kind, "rows": rows, "texts": texts.known}


def why_not(signal: Signal | None, num_exact: int) -> str:
    """Why a teacher's answers cannot be shown token by token; empty where they can."""
    if signal is None:
        return "the teacher gave no answer to the held-out text"
    if isinstance(signal, DenseSignal):
        return ""
    if isinstance(signal, PairedSignal | PairedTokens):
        return "the teacher reads the text with another tokenizer: its tokens are not the student's"
    if not num_exact:
        return "the stored answers are sampled tokens: the teacher's top tokens are not known"
    if signal.temperature != 1.0:
        return f"the stored answers are at temperature {signal.temperature:g}: probabilities at 1 are not known"
    return ""


def chosen_rows(batches: Sequence[Batch]) -> list[Batch]:
    """At most MAX_ROWS held-out rows, each alone, spread over those that evaluations score."""
    places = [(number, row) for number, batch in enumerate(batches) for row in range(len(batch.input_ids))]
    wanted = min(MAX_ROWS, len(places))
    found = []
    for number, row in (places[index * len(places) // wanted] for index in range(wanted)):
        alone = list(batches[number].parts(len(batches[number].input_ids)))
        found.append(alone[row])
    return [batch for batch in found if batch.num_scored]


def _first_shown(row: Batch) -> int:
    first = next(place for place, target in enumerate(row.targets[0].tolist()) if target != IGNORED)
    return max(0, first + 1 - CONTEXT)


def _row(
    whole: Batch,
    batch: Batch,
    view: StudentView,
    signal: Signal | None,
    tokenizer: Any,
    texts: _Texts,
    num_exact: int,
) -> dict[str, Any]:
    """The tokens of a row of one, from shortly before the first that is scored. `batch` is what models read of it."""
    targets = whole.targets[0].tolist()
    length, begin = int(whole.attention_mask[0].sum()), _first_shown(whole)
    ids = whole.input_ids[0, :length].tolist()
    if length == len(targets) and targets[length - 1] != IGNORED:
        ids.append(targets[length - 1])
    shown = ids[begin : begin + MAX_TOKENS]
    places = [place for place, target in enumerate(batch.targets[0].tolist()) if target != IGNORED]
    wanted = [number for number, place in enumerate(places) if begin <= place + 1 < begin + len(shown)]
    answers = compare(view, signal, batch.scored_targets, len(wanted), num_exact)
    tokens: list[dict[str, Any]] = [{"text": text} for text in pieces(tokenizer, shown)]
    num_uncompared = 0
    for number in wanted:
        token, answer = tokens[places[number] + 1 - begin], answers[number]
        if answer is None:
            num_uncompared += 1
            continue
        token |= answer
        for side in ("teacher", "student"):
            texts.learn([id_ for id_, _ in answer[side]])
    left_out = max(0, len(ids) - begin - len(shown))
    return {"id": batch.sample_ids[0], "tokens": tokens, "left_out": left_out, "uncompared": num_uncompared}


def compare(view: StudentView, signal: Signal | None, targets: Tensor, count: int, num_exact: int = 0) -> list[Answer]:
    """Both models' answers at the first `count` scored positions; None where one is not finite.

    The logits of all positions of a row are never held: `log_probs_by_chunk` makes those of `count` at most.
    """
    part = slice(0, count)
    log_q = log_probs_by_chunk(view.hidden[part], view.head)(part)
    if isinstance(signal, DenseSignal):
        log_p = log_probs_by_chunk(signal.hidden[part], signal.head)(part)
        size = min(log_p.shape[1], log_q.shape[1])
        log_p, log_q = log_p[:, :size], log_q[:, :size]
        distance = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=1)
        best, ids = log_p.topk(min(TOP_K, size), dim=1)
        of_target = log_p.gather(1, targets[part, None]).squeeze(1)
    else:
        known, kept = _stored(signal, num_exact, part)
        taken = log_q.gather(1, known).exp()
        apart = (kept - taken).abs().sum(dim=1)
        distance = 0.5 * (apart + (kept.sum(dim=1) - taken.sum(dim=1)).abs())
        best, ids = kept[:, :TOP_K].log(), known[:, :TOP_K]
        is_target = known == targets[part, None]
        of_target = torch.where(is_target.any(dim=1), (kept * is_target).sum(dim=1).log(), torch.nan)
    mine, mine_ids = log_q.topk(min(TOP_K, log_q.shape[1]), dim=1)
    student = log_q.gather(1, targets[part, None]).squeeze(1)
    numbers = torch.stack([distance, of_target.exp(), student.exp()], dim=1).float().cpu().tolist()
    theirs = _paired(ids, best)
    ours = _paired(mine_ids, mine)
    return [_answer(numbers[row], theirs[row], ours[row]) for row in range(count)]


def _paired(ids: Tensor, log_probs: Tensor) -> list[list[tuple[int, float]]]:
    rows = zip(ids.cpu().tolist(), log_probs.exp().float().cpu().tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def _stored(signal: Signal | None, num_exact: int, part: slice) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of the teacher's top tokens, in order. [C, num_exact]"""
    match signal:
        case TopKSignal():
            return signal.ids[part, :num_exact], signal.log_probs[part, :num_exact].exp()
        case SampledSignal():
            return signal.ids[part, :num_exact], signal.weights[part, :num_exact]
    raise TypeError(f"{type(signal).__name__} is not a stored answer")


def _answer(numbers: Sequence[float], teacher: list[tuple[int, float]], student: list[tuple[int, float]]) -> Answer:
    """`numbers`: distance, and the probability of the token that stands there, by the teacher and by the student."""
    distance, of_teacher, of_student = numbers
    shown = [distance, of_student, *(value for _, value in [*teacher, *student])]
    if not all(math.isfinite(value) for value in shown):
        return None
    return {
        "distance": round(distance, _DIGITS),
        "teacher_probability": round(of_teacher, _DIGITS) if math.isfinite(of_teacher) else None,
        "student_probability": round(of_student, _DIGITS),
        "teacher": [[id_, round(value, _DIGITS)] for id_, value in teacher],
        "student": [[id_, round(value, _DIGITS)] for id_, value in student],
    }


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the decoded whole. Part of a character is shown with its last token."""
    whole = spell(tokenizer, list(ids))
    cuts = [0]
    for place in range(1, len(ids)):
        before = spell(tokenizer, list(ids[:place])).rstrip("\ufffd")
        cuts.append(max(cuts[-1], num_shared(before, whole)))
    cuts.append(len(whole))
    return [whole[cuts[place] : cuts[place + 1]] for place in range(len(ids))]


class _Texts:
    """The text of each token in a list of top tokens: decoded after another, to keep its space."""

    def __init__(self, tokenizer: Any) -> None:
        self.known: dict[str, str] = {}
        self._spell: Callable[[list[int]], str] = lambda ids: spell(tokenizer, ids)
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._start = self._spell(self._anchor)

    def learn(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            if str(id_) not in self.known:
                whole = self._spell([*self._anchor, id_])
                self.known[str(id_)] = whole[num_shared(whole, self._start) :][:MAX_TEXT]
