"""Prompts answered in evaluation: a few fixed held-out prompts, the student's answers, and what they are worth.

A student is used by what it writes, and held-out likelihood tells that badly for students trained on labels. The
prompts are the same at every evaluation, spread over the held-out records; answers are drawn with fixed seeds, so two
evaluations of the same weights are equal.

# B rows, L positions, V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stillroom.core.errors import DataError
from stillroom.data.chat import turn_end_ids
from stillroom.data.checkers import RIGHT, is_same_text, open_checker
from stillroom.metrics.metrics import wilson
from stillroom.models.generate import can_generate, continuation, end_ids, readable
from stillroom.models.writer import Written, row_seed, write_rows

if TYPE_CHECKING:
    from stillroom.training.run import Run

_ROWS = 32  # answered at once
_SCORED_ROWS = 4  # read at once by both models, with logits over the whole vocabulary


@dataclass(frozen=True)
class Asked:
    """A held-out prompt: its tokens, as text, and the record's answer where there is one."""

    index: int  # of the held-out row
    ids: list[int]
    text: str
    reference: str | None


@dataclass(frozen=True)
class Answered:
    """What a model wrote, and the figures of it."""

    texts: list[str]
    is_right: list[bool | None]  # None without a reference to compare with
    figures: dict[str, Any]


def asked_prompts(run: Run) -> list[Asked]:
    """The prompts of a run. Raise where its student is chosen by right answers and no record has one."""
    rows, wanted = run.corpus.evaluation, min(run.config.eval.num_prompts, len(run.corpus.evaluation))
    found = []
    for number in range(wanted):
        index = number * len(rows) // wanted
        prompt, answer = rows.question(index)
        reference = continuation(run.tokenizer, prompt, answer) if len(prompt) > 1 else None
        if reference is None:  # plain text: its first tokens
            prompt = [*prompt, *answer][: max(1, min(run.config.eval.prompt_tokens, (1 + len(answer)) // 2))]
        found.append(Asked(index, prompt, readable(run.tokenizer, prompt), reference))
    if found and run.config.eval.select in ("exact_match", "checker") and all(one.reference is None for one in found):
        raise DataError(
            f"eval.select = '{run.config.eval.select}' compares answers, and the held-out data has no record with a "
            "prompt and an answer",
            where="data.eval",
            advice=["hold out records with prompts: --eval-data FILE", "choose by perplexity, objective or own_kl"],
        )
    return found


def answer(run: Run, prompts: Sequence[Asked], between: Callable[[], None]) -> Answered:
    """Let the student answer, and compare with the records' answers and the teacher."""
    began = time.monotonic()
    with run.precision.half_products():
        rows = written(run, run.student.model, run.tokenizer, [one.ids for one in prompts], between)
    found = judged(run, prompts, rows, run.tokenizer)
    found.figures.update(_against_teacher(run, prompts, rows, between))
    found.figures["seconds"] = time.monotonic() - began
    return found


def teacher_answers(run: Run, prompts: Sequence[Asked], read: Callable[[Asked], list[int]]) -> Answered | None:
    """The teacher's answers to the same prompts; None where it cannot write. `read`: a prompt in its tokens."""
    teacher = run.teacher.as_model() if run.teacher.writes_text else None
    if teacher is None or not can_generate(teacher.model):
        return None
    tokenizer = run.teacher.tokenizer or run.tokenizer
    asked = [read(one) for one in prompts]
    with run.teacher.at_work():
        rows = written(run, teacher.model, tokenizer, asked, lambda: None)
    return judged(run, prompts, rows, tokenizer, asked)


def written(
    run: Run, model: Any, tokenizer: Any, prompts: Sequence[list[int]], between: Callable[[], None]
) -> list[Written]:
    settings, rows = run.config.eval, list[Written]()

    def note(text: str) -> None:
        run.log.write("note", text=text)

    for begin in range(0, len(prompts), _ROWS):
        between()
        part = prompts[begin : begin + _ROWS]
        rows += write_rows(
            model,
            part,
            [row_seed(run.config.train.seed, "eval", begin + place) for place in range(len(part))],
            ends=end_ids(model, tokenizer) | turn_end_ids(tokenizer),
            num_tokens=len(tokenizer),
            max_new_tokens=settings.prompt_tokens,
            temperature=settings.temperature,
            note=note,
        )
    return rows


def judged(
    run: Run,
    prompts: Sequence[Asked],
    rows: Sequence[Written],
    tokenizer: Any,
    asked: Sequence[Sequence[int]] = (),
) -> Answered:
    """Texts, which of them are right, and shares. `asked` are the prompts in the tokens of who wrote, if others."""
    ids = asked or [one.ids for one in prompts]
    texts = [continuation(tokenizer, before, row.ids) for before, row in zip(ids, rows, strict=True)]
    check = open_checker(run.config.eval.checker)
    same, checked = list[bool](), list[bool | None]()
    for one, text in zip(prompts, texts, strict=True):
        if one.reference is None:
            checked.append(None)
            continue
        same.append(is_same_text(text, one.reference))
        checked.append(check(text.strip(), one.reference.strip(), one.text) >= RIGHT)
    right = [bool(one) for one in checked if one is not None]
    intervals = {
        name: wilson(sum(hits), len(hits)) for name, hits in (("exact_match", same), ("checker", right)) if hits
    }
    count = max(len(rows), 1)
    figures = {
        "prompts": len(rows),
        "with_reference": len(same),
        "exact_match": sum(same) / len(same) if same else None,
        "checker": sum(right) / len(right) if right else None,
        "intervals": {name: list(bounds) for name, bounds in intervals.items()},
        "ended": sum(row.ended == "end" for row in rows) / count,
        "loops": sum(row.ended == "loop" for row in rows) / count,
        "nonfinite": sum(row.ended == "nonfinite" for row in rows),
        "length": sum(len(row.ids) for row in rows) / count,
    }
    return Answered(texts, checked, figures)


def _against_teacher(
    run: Run, prompts: Sequence[Asked], rows: Sequence[Written], between: Callable[[], None]
) -> dict[str, float | int | None]:
    """The teacher's mean log-likelihood of the written tokens, and the mean KL(student, teacher) at them.

    None without a network of the teacher's that reads the student's tokens. Positions at which one of both is not
    finite are counted and left out.
    """
    teacher = run.teacher.original.as_model()
    if teacher is None or run.teacher.reads_other_rows:
        return {"teacher_log_likelihood": None, "own_kl": None}
    log_likelihood, own_kl, count, lost = 0.0, 0.0, 0, 0
    whole = [(one.ids, row.ids) for one, row in zip(prompts, rows, strict=True) if row.ids]
    for begin in range(0, len(whole), _SCORED_ROWS):
        between()
        part = whole[begin : begin + _SCORED_ROWS]
        with run.precision.half_products():
            log_q = log_probs_of(run.student.model, part)
        with run.teacher.at_work():
            log_p = log_probs_of(teacher.model, part)
        for ours, theirs, (_, ids) in zip(log_q, log_p, part, strict=True):
            size = min(ours.shape[1], theirs.shape[1])
            ours, theirs = ours[:, :size], theirs[:, :size].to(ours.device)
            q = ours.exp()
            kl = torch.where(q > 0, q * (ours - theirs), 0.0).sum(dim=1)
            taken = theirs.gather(1, torch.tensor(ids, device=theirs.device).unsqueeze(1)).squeeze(1)
            is_sound = torch.isfinite(kl) & torch.isfinite(taken)
            own_kl += float(kl[is_sound].double().sum())
            log_likelihood += float(taken[is_sound].double().sum())
            count += int(is_sound.sum())
            lost += int((~is_sound).sum())
    if not count:
        return {"teacher_log_likelihood": None, "own_kl": None, "uncompared_tokens": lost}
    return {"teacher_log_likelihood": log_likelihood / count, "own_kl": own_kl / count, "uncompared_tokens": lost}


@torch.no_grad()
def log_probs_of(network: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """The log-probabilities at each written token of (prompt, written) rows, by one full forward. [written, V] each.

    Rows are padded on the right: no position that is read sees padding.
    """
    longest = max(len(prompt) + len(ids) for prompt, ids in rows)
    device = next(network.parameters()).device
    padded = [[*prompt, *ids] + [0] * (longest - len(prompt) - len(ids)) for prompt, ids in rows]
    was_training = network.training
    network.eval()
    try:
        logits = network(input_ids=torch.tensor(padded, device=device), use_cache=False).logits
    finally:
        network.train(was_training)
    return [
        torch.log_softmax(logits[place, len(prompt) - 1 : len(prompt) - 1 + len(ids)].float(), dim=-1)
        for place, (prompt, ids) in enumerate(rows)
    ]
