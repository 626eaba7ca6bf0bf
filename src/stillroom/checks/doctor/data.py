"""The data: shape, bad records, what is scored, copies on both sides, lengths, and how many steps it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.schedule import steps_of_run

SUBJECT = "data"
_FEW_SCORED = 0.05
_MANY_CUT = 0.05
_MANY_COPIES = 0.25
_MUCH_PADDING = 0.6  # of the places of rows that are padded
_LEAST_HELD_OUT = 5
_FEW_STEPS = 20


def _amber(what: str, to_try: str) -> Finding:
    return Finding("amber", SUBJECT, what, to_try)


@check(SUBJECT)
def records(setup: Setup) -> Iterator[Finding]:
    """Raises where the data cannot be read, or too many of its records cannot be used."""
    found = setup.part("preview")
    shapes = ", ".join(f"{count:,} {shape}" for shape, count in found["shapes"].items())
    share = found["scored_share"]
    tokens = f"{found['tokens']:,} tokens, {share:.0%} of them scored"
    yield Finding("green", SUBJECT, f"{found['documents']:,} documents ({shapes}), {tokens}")
    if found["bad_records"]:
        first = found["bad_records"][0]
        count = found["left_out"].get("bad_records", len(found["bad_records"]))
        yield _amber(
            f"{count:,} records cannot be used, the first is {first['where']}: {first['why']}",
            f"mend them; stillroom data {_spec(setup)} --model {setup.config.student.model} lists them",
        )
    if share < _FEW_SCORED:
        yield _amber(
            f"{share:.1%} of the tokens are scored: most of the work is spent on text that is not learned",
            "--set data.train_on_prompt=true, or shorten the prompts",
        )
    if any("no chat template" in note for note in found["notes"]):
        yield _amber(
            "the data holds chats, and the tokenizer has no chat template: they are written as 'role: content' lines",
            "put the chat_template of the model's family into tokenizer_config.json of the student",
        )
    yield from _left_out(found)


_LOST = {
    "empty_answers": "answers are empty and not scored",
    "unscored_turns": "answers are not scored: the chat template does not print them as they stand",
    "turns_not_marked_generated": "answers are not scored: the chat template does not mark them as generated",
    "invalid_utf8": "texts hold half a character (a lone surrogate), which is replaced by U+FFFD",
    "rows_without_targets": "rows are left out: no target in them is scored",
}


def _left_out(found: dict[str, Any]) -> Iterator[Finding]:
    for name, said in _LOST.items():
        if count := found["left_out"].get(name, 0):
            yield _amber(f"{count:,} {said}", "stillroom data shows what is scored; mend the records")


def _spec(setup: Setup) -> str:
    return setup.config.data.sources[0].path


@check(SUBJECT)
def copies(setup: Setup) -> Iterator[Finding]:
    found = setup.part("preview")
    inside, between = found["duplicates"]["inside"], found["duplicates"]["between"]
    if between:
        yield Finding(
            "red",
            SUBJECT,
            f"{between:,} held-out records also stand in the training data: the student is judged by what it has seen",
            "take them out of one side, or leave data.eval out: copies then fall on one side",
        )
    if inside > _MANY_COPIES * max(found["documents"], 1):
        yield _amber(
            f"{inside:,} of {found['documents']:,} training records are copies of earlier ones",
            "keep one of each (sort -u on a file of lines)",
        )


@check(SUBJECT)
def lengths(setup: Setup) -> Iterator[Finding]:
    found = setup.part("preview")
    cut = found["left_out"].get("truncated_records", 0)
    longest = found.get("lengths", {}).get("ninth_decile", 0)
    if cut > _MANY_CUT * max(found["documents"], 1):
        yield _amber(
            f"{cut:,} of {found['documents']:,} records are longer than data.max_length {found['max_length']:,}: their "
            "ends are not learned",
            f"--set data.max_length={max(longest, found['max_length'])}",
        )
    rows = setup.part("corpus").train
    if len(rows) and not getattr(rows, "is_packed", False):
        used = float(rows.lengths.mean()) / max(int(rows.lengths.max()), 1)
        if 1 - used > _MUCH_PADDING:
            yield _amber(
                f"{1 - used:.0%} of the places of training rows would be padding if all were as long as the longest",
                "--set data.packing=packed, or --set data.group_by_length=true",
            )


@check(SUBJECT)
def steps(setup: Setup) -> Iterator[Finding]:
    """How many steps the data makes, and whether the schedule fits them."""
    corpus, train = setup.part("corpus"), setup.config.train
    rows, held_out = len(corpus.train), len(corpus.evaluation)
    num_batches = -(-rows // train.rows_per_batch)
    num_steps = steps_of_run(num_batches, train.gradient_accumulation_steps, train.epochs, train.max_steps)
    window = train.rows_per_batch * train.gradient_accumulation_steps
    passes = num_steps * window / max(rows, 1)
    yield Finding("green", SUBJECT, f"{rows:,} training rows: {num_steps:,} steps, {passes:.1f} passes over the data")
    if window > rows:
        yield _amber(
            f"a step takes {window:,} rows, and there are {rows:,}: every step sees all of them",
            f"--set train.batch_size={max(1, rows // 4)} --set train.gradient_accumulation_steps=1, or more data",
        )
    if train.max_warmup_share == 1.0 and train.warmup_steps >= num_steps:
        yield Finding(
            "red",
            SUBJECT,
            f"train.warmup_steps {train.warmup_steps:,} is as long as the run of {num_steps:,} optimizer steps: the "
            "learning rate never arrives",
            "--set train.warmup_steps=0 --set train.warmup_ratio=0.1",
        )
    if num_steps < _FEW_STEPS:
        yield _amber(
            f"the run has {num_steps} optimizer steps, which teach little",
            "--set train.max_steps=200, or --set train.gradient_accumulation_steps=1",
        )
    if passes > 20:
        yield _amber(
            f"every row is seen {passes:.0f} times: the student will know this text by heart and little else",
            "more data, or --set train.early_stopping=3",
        )
    if held_out < _LEAST_HELD_OUT:
        yield _amber(
            f"{held_out} held-out rows judge the student: its results are mostly chance",
            "--set data.eval_share=0.1, or name held-out data with --eval-data",
        )
