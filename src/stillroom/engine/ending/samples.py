"""Samples for the report: teacher and student continue the same prompts, greedily."""

from __future__ import annotations

from typing import Any

from stillroom.data import Rows, prompt_ids
from stillroom.engine.run import Run
from stillroom.models.generate import can_generate, continuation, generate, readable

PROMPT_TOKENS = 32


def make_samples(run: Run) -> list[dict[str, str]]:
    """Prompts with the answers of both models and the reference from the record."""
    samples: list[dict[str, str]] = []
    teacher = run.teacher.as_model() if run.teacher.writes_text else None
    rows = run.corpus.evaluation
    wanted = min(run.config.eval.samples, len(rows))
    noted: set[str] = set()

    def note(text: str) -> None:
        if text not in noted:
            run.log.write("note", text=text)
        noted.add(text)

    if wanted and not can_generate(run.student.model):
        note(f"no samples: {type(run.student.model).__name__} has no generate method")
        return samples
    if wanted and teacher is not None and not can_generate(teacher.model):
        note(f"no samples of the teacher: {type(teacher.model).__name__} has no generate method")
        teacher = None
    for number in range(wanted):
        prompt, rest = beginning(rows, number * len(rows) // wanted)
        options: dict[str, Any] = {"max_new_tokens": run.config.eval.sample_tokens, "note": note}
        with run.precision.half_products():
            student = generate(run.student.model, run.tokenizer, prompt, **options)
        sample = {
            "prompt": readable(run.tokenizer, prompt),
            "student": student,
            "reference": continuation(run.tokenizer, prompt, rest[: run.config.eval.sample_tokens]),
        }
        if teacher is not None:
            asked = _as_teacher_reads(run, number * len(rows) // wanted, prompt)
            with run.teacher.at_work():
                sample["teacher"] = generate(teacher.model, run.teacher.tokenizer or run.tokenizer, asked, **options)
        samples.append(sample)
    return samples


def _as_teacher_reads(run: Run, index: int, prompt: list[int]) -> list[int]:
    """The prompt in the teacher's tokens: as its template prints it, or the same text tokenized again."""
    if run.teacher.tokenizer is None:
        return prompt
    own = run.corpus.evaluation.other_prompt(index)
    if len(own) > 1:
        return own
    ids, _ = prompt_ids(run.teacher.tokenizer, readable(run.tokenizer, prompt), bos=run.config.data.bos, is_raw=True)
    return ids


def beginning(rows: Rows, index: int) -> tuple[list[int], list[int]]:
    """(prompt, reference answer) of a record.

    Cut a record with a prompt where its answer begins. Cut plain text after its first tokens, a short text in the
    middle.
    """
    prompt, answer = rows.question(index)
    if len(prompt) > 1:
        return prompt, answer
    ids = [*prompt, *answer]
    place = min(PROMPT_TOKENS, max(1, len(ids) // 2))
    return ids[:place], ids[place:]
