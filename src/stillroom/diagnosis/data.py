"""Causes in the data: leaking, exhausted, bad lines, masked out."""

from __future__ import annotations

from stillroom.diagnosis.case import Case, cited, log_of
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.reading import reading
from stillroom.telemetry.wording import as_number, format_count, format_percent

_MUCH_LEAKED = 0.01  # of the evaluation records
_MANY_BAD = 0.001  # of the records
_FEW_SCORED = 0.10  # of the training tokens
_MUCH_CUT = 0.20  # of the targets
_MANY_EPOCHS = 6.0
_TOO_MANY_EPOCHS = 20.0
_MANY_EMPTY = 0.02  # of the attempts, and at least three


def _counter(case: Case, name: str) -> float:
    return as_number(case.data.get(name)) or 0.0


def leaking_data(case: Case) -> Finding | None:
    """Evaluation records that are also trained on: the held-out loss then measures memory."""
    both, all_of = _counter(case, "overlapping_records"), _counter(case, "eval_documents")
    if not both:
        return None
    share = both / max(all_of, both)
    return Finding(
        "leaking_data",
        "problem" if share >= _MUCH_LEAKED else "warning",
        f"{format_count(both)} of {format_count(all_of)} evaluation records ({format_percent(share)}) are also in the "
        "training data, so the held-out loss measures memory too",
        "hold out text that is not trained on: leave data.eval out and a share is held out by content, or give "
        "another file",
        steps=(0,),
        setting="data.eval=none",
        otherwise="take the copies out: `stillroom data SPEC --model MODEL` counts them",
        numbers={"overlapping_records": both, "eval_documents": all_of, "share": share},
    )


def bad_lines(case: Case) -> Finding | None:
    """Records that could not be read and were left out."""
    bad, good = _counter(case, "bad_records"), _counter(case, "records")
    if not bad:
        return None
    share = bad / (bad + good)
    notes = [str(note) for note in case.data.get("notes") or () if "cannot be" in str(note) or "bad" in str(note)]
    return Finding(
        "bad_lines",
        "warning" if share >= _MANY_BAD else "hint",
        f"{format_count(bad)} of {format_count(bad + good)} records ({format_percent(share, 2)}) could not be used "
        f"and were left out{': ' + notes[0] if notes else ''}",
        "see which and why with `stillroom data SPEC --model MODEL`, repair them, and lower data.max_bad_share so that "
        "the next run stops at them",
        steps=(0,),
        setting="data.max_bad_share=0.001",
        otherwise="see which and why with `stillroom data SPEC --model MODEL`, and repair them",
        numbers={"bad_records": bad, "records": good, "share": share},
    )


def masked_out_data(case: Case) -> Finding | None:
    """Most tokens are computed and not learned from, or answers are cut off."""
    tokens, targets = _counter(case, "train_tokens"), _counter(case, "train_targets")
    lost, without = _counter(case, "truncated_targets"), _counter(case, "rows_without_targets")
    empty = [event for event in case.guards if "no scored target" in str(event.get("reason"))]
    share = targets / tokens if tokens else 1.0
    lost_share = lost / (lost + targets) if lost else 0.0
    if share >= _FEW_SCORED and lost_share < _MUCH_CUT and not empty:
        return None
    parts = []
    if share < _FEW_SCORED:
        parts.append(f"{format_percent(share)} of {format_count(tokens)} training tokens are scored")
    if lost:
        parts.append(f"{format_count(lost)} targets are cut off by data.max_length ({format_percent(lost_share)})")
    if without:
        parts.append(f"{format_count(without)} rows have no target left")
    if empty:
        parts.append(f"{len(empty)} steps had no scored target and were skipped")
    length = int(case.number("data.max_length"))
    is_cut = lost_share >= _MUCH_CUT or bool(without)
    is_rare = len(empty) < max(3, _MANY_EMPTY * len(case.attempts))
    is_few = share >= _FEW_SCORED and lost_share < _MUCH_CUT and is_rare
    return Finding(
        "masked_out_data",
        "hint" if is_few else "warning",
        "; ".join(parts),
        "raise data.max_length so that the answers fit"
        if is_cut
        else "learn the prompts too"
        if case.setting("data.packing") in ("packed", "blocks")
        else "pack several records into a row (data.packing=packed), or learn the prompts too",
        steps=cited(empty) or (0,),
        setting=f"data.max_length={2 * length}" if is_cut and length else "data.train_on_prompt=true",
        otherwise="see what is scored, and why not the rest: `stillroom data SPEC --model MODEL`",
        numbers={"scored_share": share, "truncated_targets": lost, "rows_without_targets": without},
    )


def epochs_seen(case: Case) -> float:
    """How often the training data was seen."""
    batches = as_number(case.schedule.get("total_batches"))
    if not batches:
        return 0.0
    return case.last_step / max(1, -(-int(batches) // case.accumulation))


def _still_falls(case: Case) -> bool:
    """Whether the last evaluation is better than the one before by more than a hundredth of a nat."""
    losses = [log_of(reading(event, "perplexity")) for event in case.record.evals[-2:]]
    return len(losses) == 2 and losses[0] is not None and losses[1] is not None and losses[1] < losses[0] - 0.01


def data_exhausted(case: Case) -> Finding | None:
    """So many passes over the data that there is little left to learn from it."""
    epochs = epochs_seen(case)
    if epochs < _MANY_EPOCHS:
        return None
    tokens = _counter(case, "train_tokens")
    per_epoch = case.last_step / epochs
    return Finding(
        "data_exhausted",
        "warning" if epochs >= _TOO_MANY_EPOCHS or not _still_falls(case) else "hint",
        f"{epochs:.1f} passes over {format_count(tokens)} training tokens; the first ended at step {per_epoch:.0f}",
        "give more text, or train for fewer steps; a teacher can also label text that has no labels",
        steps=(round(per_epoch),),
        setting=f"train.max_steps={max(1, round(4 * per_epoch))}",
        numbers={"epochs": epochs, "train_tokens": tokens},
    )


CAUSES = (
    Cause(leaking_data),
    Cause(bad_lines),
    Cause(masked_out_data, explains=("rate_too_low",)),
    Cause(data_exhausted),
)
