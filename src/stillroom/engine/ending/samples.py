"""Samples for the report: the same beginnings continued by teacher and student, greedily."""

from __future__ import annotations

from stillroom.data import Rows
from stillroom.engine.run import Run
from stillroom.models.generate import continuation, generate, readable

PROMPT_TOKENS = 32


def make_samples(run: Run) -> list[dict[str, str]]:
    """Questions answered, and texts continued from their first tokens, by both models and by the record itself."""
    samples, teacher = [], run.teacher.as_model()
    rows = run.corpus.evaluation
    wanted = min(run.config.eval.samples, len(rows))
    for number in range(wanted):
        prompt, rest = beginning(rows, number * len(rows) // wanted)
        options = {"max_new_tokens": run.config.eval.sample_tokens}
        with run.precision.half_products():
            student = generate(run.student.model, run.tokenizer, prompt, **options)
        sample = {
            "prompt": readable(run.tokenizer, prompt),
            "student": student,
            "reference": continuation(run.tokenizer, prompt, rest[: run.config.eval.sample_tokens]),
        }
        if teacher is not None:
            with run.teacher.at_work():
                sample["teacher"] = generate(teacher.model, run.tokenizer, prompt, **options)
        samples.append(sample)
    return samples


def beginning(rows: Rows, index: int) -> tuple[list[int], list[int]]:
    """What is continued, and how the record goes on.

    A record with a prompt is cut where its answer begins. Plain text is cut after its first tokens, a short one in the
    middle: its end mark is nothing to continue from.
    """
    prompt, answer = rows.question(index)
    if len(prompt) > 1:
        return prompt, answer
    ids = [*prompt, *answer]
    place = min(PROMPT_TOKENS, max(1, len(ids) // 2))
    return ids[:place], ids[place:]
