"""The end of a run: choose the student that is kept, judge it, write it and the summary."""

from __future__ import annotations

import html
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from stillroom.core.errors import CannotSave, Interrupted, NoBetterStudent, StudentDiffers
from stillroom.core.files import reason_of, strict, write_atomically
from stillroom.core.types import Detail
from stillroom.data import Rows, prompt_ids
from stillroom.doctor.checks import success_checks
from stillroom.doctor.log_rules import LITTLE_GAIN
from stillroom.doctor.rules import TRIAL_STEPS
from stillroom.models.check import ReadBack, read_back
from stillroom.models.generate import can_generate, continuation, generate, readable
from stillroom.telemetry.record import Event, scan_events
from stillroom.telemetry.results import RESULT_COLUMNS, RESULT_ROWS
from stillroom.telemetry.wording import as_number, clean, format_result, section, show
from stillroom.training.answers import Asked, answer, asked_prompts, teacher_answers
from stillroom.training.by_source import source_rows
from stillroom.training.evaluate import Evaluation, summary_row
from stillroom.training.loop import Stop, advice_of
from stillroom.training.memory import evaluate_held_out, micro_batch_rows, return_unused_memory
from stillroom.training.run import Run, RunState
from stillroom.training.save import gather_student, load_best, save_student, whole_again
from stillroom.training.select import SELECTIONS, Selection, num_judged, selection_of
from stillroom.training.token_view import save_tokens, view_of_all

if TYPE_CHECKING:
    from stillroom.training.evaluate import Evaluation
    from stillroom.training.run import Run


# -- outcome ---------------------------------------------------------------------------------------
# Say after the last step whether training helped.


DONE = "done"
DIVERGED = "diverged"
FINISHED = (DONE, DIVERGED)


def how_it_ended(
    state: RunState, kept: float, before: float, selection: Selection = SELECTIONS["perplexity"], count: int = 0
) -> dict[str, Any]:
    """Status, reason and advice. `kept` and `before` are what `eval.select` measures, of the student that is written
    and of the one before training; `count` is what a share was taken of.

    The student before training is a candidate, so the one kept is never worse. A run without a better student whose
    last student is worse has diverged. By perplexity alone it has not, where the student is trained for something else
    that got better.
    """
    is_perplexity = selection.name == "perplexity"
    last = state.last_perplexity if is_perplexity else selection.value(state.last_rank)
    if state.best_step and _is_gain(selection, kept, before):
        gain = math.log(before / kept) if is_perplexity else math.inf
        advice = [] if gain >= LITTLE_GAIN else [_hardly_moved(state, gain)]
        return {"status": DONE, "reason": "", "advice": advice}
    is_worse = last is not None and selection.is_worse(last, before, count) and state.applied >= TRIAL_STEPS
    ended = "cannot be scored" if last is None else f"has {selection.label} of {selection.show(last)}"
    reason = f"after {state.applied:,} steps the student {ended}, before training {selection.show(before)}"
    outcome = "no evaluation found a better student than the one before training, which is the one kept"
    advice = [
        "lower the learning rate, or warm up for longer: --set train.learning_rate=...",
        "compare the teacher with the student before training: one that knows this text less cannot teach it",
    ]
    if last is None or (is_worse and (state.is_off_course or not is_perplexity)):
        return {"status": DIVERGED, "reason": f"{reason}: {outcome}", "advice": advice}
    if is_worse:
        other = f"{reason}, while what it is trained for got better: {outcome}. Choose the student by that: "
        return {"status": DONE, "reason": "", "advice": [f"{other}{_SELECT}"]}
    return {"status": DONE, "reason": "", "advice": [f"{outcome}: train for longer, or at another learning rate"]}


_SELECT = "--set eval.select=objective"


def _is_gain(selection: Selection, kept: float, before: float) -> bool:
    """Whether the student kept is better; at an equal share it was chosen by perplexity, and is the better one too."""
    return kept >= before if selection.is_share else kept < before


def _hardly_moved(state: RunState, gain: float) -> str:
    return (
        f"the student hardly moved: {state.applied:,} steps lowered its held-out loss by {gain:.2g} nats. Raise "
        "train.learning_rate, or train for longer"
    )


# -- read again ------------------------------------------------------------------------------------
# Read the written student again at the end of a run. Checkpoints are not read: they have checksums.


SUMMARY = "read_back"  # the entry in a run's summary
_ROWS, _LENGTH = 2, 32  # of training text: wrong weights show at once, and a large student answers on a CPU


def read_again(run: Run) -> dict[str, Any]:
    """Compare student/ with the trained student; a note says by how much they differ. The entry for the summary.

    A merged adapter was compared when it was written. Of a sharded student this process has a part only.
    """
    if run.adapter is not None:
        return {}
    if run.parallel.is_sharded:
        run.log.write("note", text="student/ was joined from shards and not compared with the student in memory")
        return {}
    ids = run.canary().input_ids[:_ROWS, :_LENGTH].cpu()
    is_cut = run.config.student.init == "shrink"
    code = run.config.teacher if is_cut else run.config.student
    found = read_back(run.student.model, run.folder / "student", ids, code=code)
    run.log.write("note", text=_difference(found, len(ids)))
    return {SUMMARY: found.to_dict()}


def _difference(found: ReadBack, num_rows: int) -> str:
    if not found.is_equal:
        return f"student/ is written, and read back it is not the trained student: {found.reason}"
    if found.compared == "tensors":
        return Detail("student/ was read back tensor by tensor, as memory for a copy is lacking: all are equal")
    return Detail(f"student/ was read back: logits on {num_rows} rows differ by {found.difference:.1e} at most")


def refuse_changed(folder: Path, summary: Mapping[str, Any]) -> None:
    """Raise if the summary says that the written student is another model. The run is complete, nothing is lost."""
    found = summary.get(SUMMARY) or {}
    if found.get("is_equal", True):
        return
    raise StudentDiffers(
        f"the student was written, and read back it is not the trained one: {found.get('reason')}",
        folder=folder,
        summary=summary,
        advice=[
            "the trained weights are in the run's checkpoints: student/ is another model, compare it before you use it",
            "another version of transformers may write this family correctly: pip install -U transformers",
            "use a student of another family",
        ],
    )


# -- result ----------------------------------------------------------------------------------------
# The result of a finished run, for the program that started it.


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its folder and its summary.

    `summary` holds what summary.json holds, such as `summary["student"]["perplexity"]`. `already_finished` says that
    the run had ended before the call, which trained nothing.

    With several processes the first has the full summary; the others have only status, reason and advice.
    """

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    already_finished: bool = False

    @property
    def student_path(self) -> Path:
        """The folder of the best student, for `AutoModelForCausalLM.from_pretrained`."""
        return self.folder / "student"

    @property
    def report_path(self) -> Path:
        """The report, one HTML file that opens offline."""
        return self.folder / "report.html"

    def load_student(self) -> tuple[Any, Any]:
        """(model, tokenizer) of the best student: FP32, on the CPU, in evaluation mode."""
        from stillroom.models.objects import reload

        return reload(self.student_path)

    def show_report(self, height: int = 800) -> None:
        """Show the report in a notebook, in a frame whose scripts cannot reach the notebook."""
        page = html.escape(self.report_path.read_text(encoding="utf-8"), quote=True)
        frame = f'<iframe sandbox="allow-scripts" srcdoc="{page}" style="width:100%;height:{height}px"></iframe>'
        shown = {"text/html": frame, "text/plain": str(self.report_path)}
        importlib.import_module("IPython.display").display(shown, raw=True)

    def __repr__(self) -> str:
        parts = [f"folder={str(self.folder)!r}", f"status={self.summary.get('status')!r}"]
        if "steps" in self.summary:
            parts.append(f"steps={self.summary['steps']}")
        row = section(self.summary, "student")
        if row:
            parts.append(f"perplexity={show(row, 'perplexity', format_result)}")
            others = [
                f"{word} {show(section(self.summary, key), 'perplexity', format_result)}"
                for key, word in (("student_before", "before"), ("teacher", "teacher"))
                if section(self.summary, key)
            ]
            parts[-1] += f" ({', '.join(others)})" if others else ""
        return f"Result({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """The result as a small table, for a notebook. Everything that comes from the run is escaped."""
        rows = [(label, section(self.summary, key)) for key, label in RESULT_ROWS if section(self.summary, key)]
        head = "".join(f"<th>{_cell(label)}</th>" for _, label, _ in RESULT_COLUMNS)
        body = "".join(
            f"<tr><th>{_cell(label)}</th>"
            + "".join(f"<td>{_cell(show(row, key, form))}</td>" for key, _, form in RESULT_COLUMNS)
            + "</tr>"
            for label, row in rows
        )
        table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        status = _cell(self.summary.get("status", "unknown"))
        if self.summary.get("status") == "interrupted":
            status = _cell(f"{self.summary.get('reason')}; stillroom.resume({str(self.folder)!r}) continues")
        where = f"<code>{_cell(self.folder)}</code>"
        return f"<div><p>{status}: {where}{self._link()}</p>{table}</div>"

    def _link(self) -> str:
        """A link to the report, which a notebook can follow only below the directory it runs in."""
        path = self.report_path.absolute()
        if not path.exists() or not path.is_relative_to(Path.cwd()):
            return ""
        return f' <a href="{quote(path.relative_to(Path.cwd()).as_posix())}" target="_blank">report</a>'


def _cell(value: object) -> str:
    return html.escape(clean(str(value)), quote=True)


# -- samples ---------------------------------------------------------------------------------------
# Samples for the report: teacher and student continue the same prompts, greedily.


PROMPT_TOKENS = 32

# For the announcement of how long saving takes, not measured on this disk.
_BYTES_A_PARAMETER = 4
_DISK_BYTES_A_SECOND = 2e8


def make_samples(run: Run) -> list[dict[str, str]]:
    """Prompts with the answers of both models and the reference from the record."""
    samples: list[dict[str, str]] = []
    teacher = run.teacher.as_model() if run.teacher.writes_text else None
    rows = run.corpus.evaluation
    wanted = min(run.budget.num_samples, len(rows))
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
    with run.stages.stage("writing samples", wanted, unit="texts", about=None if wanted else 0.0) as advance:
        for number in range(wanted):
            prompt, rest = beginning(rows, number * len(rows) // wanted)
            options: dict[str, Any] = {"max_new_tokens": run.budget.sample_tokens, "note": note}
            with run.precision.half_products():
                student = generate(run.student.model, run.tokenizer, prompt, **options)
            sample = {
                "prompt": readable(run.tokenizer, prompt),
                "student": student,
                "reference": continuation(run.tokenizer, prompt, rest[: run.budget.sample_tokens]),
            }
            if teacher is not None:
                asked = _as_teacher_reads(run, number * len(rows) // wanted, prompt)
                with run.teacher.at_work():
                    sample["teacher"] = generate(
                        teacher.model, run.teacher.tokenizer or run.tokenizer, asked, **options
                    )
            samples.append(sample)
            advance()
    return samples


def _answered(run: Run, state: RunState, final: Evaluation) -> tuple[Evaluation, list[dict[str, Any]]]:
    """The prompts of the evaluations, answered by the student that is kept and by the teacher, in place of samples."""
    prompts = asked_prompts(run)
    ours = answer(run, prompts, lambda: None)
    theirs = teacher_answers(run, prompts, lambda one: _as_teacher_reads(run, one.index, one.ids))
    if theirs is not None and "teacher" in state.before:
        state.before["teacher"] = {**state.before["teacher"], "answers": theirs.figures}
    samples = []
    for place, one in enumerate(prompts):
        sample = {"prompt": one.text, "student": ours.texts[place], "reference": _reference(run, one)}
        if theirs is not None:
            sample["teacher"] = theirs.texts[place]
        right = {"right": ours.is_right[place], "teacher_right": None if theirs is None else theirs.is_right[place]}
        samples.append({**sample, **{name: value for name, value in right.items() if value is not None}})
    return replace(final, answers=ours.figures), samples


def _reference(run: Run, one: Asked) -> str:
    if one.reference is not None:
        return one.reference
    prompt, rest = run.corpus.evaluation.question(one.index)
    return continuation(run.tokenizer, one.ids, [*prompt, *rest][len(one.ids) :][: run.config.eval.prompt_tokens])


def _as_teacher_reads(run: Run, index: int, prompt: list[int]) -> list[int]:
    """The prompt after the teacher's context, or in its own tokens: as its template prints it, or tokenized again."""
    if run.teacher.tokenizer is None:
        return run.corpus.evaluation.in_context(index, prompt)
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


def finish(run: Run, state: RunState, stop: Stop) -> Result:
    """Evaluate the best student, and write it with the summary and the last events."""

    def check_stop() -> None:
        if run.parallel.any_of(bool(stop.reason)):
            raise Interrupted(
                f"stopped after the last step, before the result was written: {stop.reason or 'as another process'}",
                where=str(run.folder),
                advice=[f"nothing is trained again: stillroom resume {run.folder}"],
            )

    # A best student from before a rollback may have the number of the last step and other weights.
    is_last_best = state.best_step == state.applied and state.evaluations_since_best == 0
    if not is_last_best:
        load_best(run, state)
        whose = f"that of step {state.best_step}" if state.best_step else "the one before training"
        run.log.write("note", text=f"the best student is {whose}, and it is the one kept")
    # Compare with the teacher as it was given: trained gates would change the measure.
    reference = run.teacher.original
    final = state.evaluated if is_last_best and reference is run.teacher else None
    if final is None:
        options: dict[str, Any] = {"precision": run.precision, "teacher": reference, "between": check_stop}
        final = evaluate_held_out(run, state, run.student, answers=state.answers, **options)
    check_stop()
    end = _end(run, state, final)
    gather_student(run)
    tokens = view_of_all(run)
    if not run.parallel.is_first:
        return Result(run.folder, dict(end))
    about = _BYTES_A_PARAMETER * run.num_student_parameters / _DISK_BYTES_A_SECOND
    with run.stages.stage("saving the student and reading it back", about=about):
        save_student(run)
        return_unused_memory()  # a second student is read
        found = read_again(run)
        run = whole_again(run)
        run.teacher.training.save(run.folder)
    with run.stages.stage("comparing teacher and student token by token", about=0.0):
        save_tokens(run, tokens)
    final, samples = _answered(run, state, final) if run.config.eval.num_prompts else (final, make_samples(run))
    for sample in samples:
        run.log.write("sample", **sample)
    run.check_folder()  # its log is read again
    summary = {**_summary(run, state, end, final, stop), **found}
    write_summary(run.folder, summary)
    is_diagnosed = any(one["severity"] != "hint" for one in summary["advice"])  # then that advice says it
    for text in end["advice"]:
        if not is_diagnosed or text.endswith(_SELECT):
            run.log.write("note", text=text)
    is_changed = not found.get(SUMMARY, {}).get("is_equal", True)
    code = NoBetterStudent.exit_code if end["status"] != DONE else StudentDiffers.exit_code if is_changed else 0
    reason = {"reason": end["reason"]} if end["reason"] else {}
    times = {"seconds": state.seconds, "total_seconds": summary["total_seconds"]}
    run.log.write("run_end", status=end["status"], steps=state.applied, **times, exit_code=code, **reason)
    return Result(run.folder, summary)


def _end(run: Run, state: RunState, final: Evaluation) -> dict[str, Any]:
    selection, before = selection_of(run.config), state.before["student_before"]
    if selection.name == "perplexity":
        return how_it_ended(state, final.perplexity, before["perplexity"])
    kept = selection.value(state.best_rank)
    assert kept is not None  # the student before training was measured, or the run did not begin
    return how_it_ended(state, kept, before["selected"], selection, num_judged(selection.name, before))


def _summary(run: Run, state: RunState, end: dict[str, Any], final: Evaluation, stop: Stop) -> dict[str, Any]:
    """The contents of summary.json."""
    events = scan_events(run.log.path).records
    summary = {
        **end,
        "steps": state.applied,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "total_seconds": round(earlier_seconds(events) + stop.seconds, 3),
        "success_rate": state.success_rate,
        "skipped": state.skipped,
        "retried": state.retried,
        "rollbacks": state.rollbacks,
        "label_taught_rows": label_taught_rows(events),
        "micro_batch_rows": micro_batch_rows(run, state),
        "shortages": state.shortages,
        "best_step": state.best_step,
        "precision": run.precision.mode,
        "trained_parameters": run.num_trained,
        "transfer_tokens": run.corpus.counters.get("train_tokens"),
        "learning_rate": run.config.train.learning_rate,
        "weight_decay": run.config.train.weight_decay,
        **state.before,
        "select": run.config.eval.select,
        "student": {
            **summary_row(final, run.num_student_parameters),
            **_selected(run, state),
            "steps": state.applied,
            "tokens": state.tokens,
        },
        **run.teacher.summary(),
    }
    if run.rollouts is not None:
        summary["rollouts"] = _written(events)
    if run.config.data.is_mixed:
        summary["sources"] = source_rows(run, state.cursor)
    if changed := [{"step": e["step"], "changes": e["changes"]} for e in events if e["event"] == "changed_inputs"]:
        summary["changed_inputs"] = changed
    summary["checks"] = _checks(run, summary, events)
    summary["advice"] = advice_of(events, summary, end["advice"])
    return summary


def _selected(run: Run, state: RunState) -> dict[str, float | None]:
    """What the kept student was chosen by, where it is not the perplexity."""
    selection = selection_of(run.config)
    return {} if selection.name == "perplexity" else {"selected": selection.value(state.best_rank)}


def _written(events: Sequence[Event]) -> dict[str, Any]:
    """What the student wrote, rounds that a rollback dropped included."""
    rounds = [event for event in events if event.get("event") == "rollouts"]
    sums = {key: sum(as_number(event.get(key)) or 0.0 for event in rounds) for key in ("rows", "tokens", "seconds")}
    return {"rounds": len(rounds), "rows": int(sums["rows"]), "tokens": int(sums["tokens"]), "seconds": sums["seconds"]}


def label_taught_rows(events: Sequence[Event]) -> int:
    """Positions of the applied steps that were taught by their labels, where the teacher gave no usable answer."""
    kept = {event.get("step"): event for event in events if event.get("event") == "step" and _is_kept(event)}
    return sum(int(as_number(event.get("bad_teacher_rows")) or 0) for event in kept.values())


def _is_kept(event: Event) -> bool:
    return event.get("verdict") == "keep"


def earlier_seconds(events: Sequence[Event]) -> float:
    """The time of the starts before this one, from the first moment to the last event; what a kill cut off is lost."""
    total, began, last = 0.0, None, None
    for event in events:
        moment = _moment(event)
        if event.get("event") == "run_start":
            if began is not None and last is not None:
                total += max(0.0, last - began)
            setup = as_number(event.get("setup_seconds")) or 0.0
            began, last = (None if moment is None else moment - setup), None
        elif moment is not None:
            last = moment
    return total


def _moment(event: Event) -> float | None:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return None


def result_or_error(result: Result) -> Result:
    """The result; raise for a run that found no better student, or whose student was not written correctly."""
    if result.summary.get("status", DONE) == DONE:
        refuse_changed(result.folder, result.summary)
        return result
    raise NoBetterStudent(
        str(result.summary["reason"]),
        folder=result.folder,
        summary=result.summary,
        advice=_remedies(result.summary["advice"])[:_NUM_ADVICE],
    )


_NUM_ADVICE = 3  # more do not fit on the screen of an error


def _remedies(found: list[Any]) -> list[str]:
    """Advice of a summary as lines, each setting once. Hints, as about speed, are no cause of a bad result.

    In processes but the first, and in older summaries, an entry is a text already.
    """
    lines, settings = list[str](), set[str]()
    for one in found:
        if not isinstance(one, dict):
            lines.append(str(one))
        elif one.get("severity") != "hint" and (not one.get("setting") or one["setting"] not in settings):
            lines.append(str(one.get("advice")))
            settings.add(one.get("setting", ""))
    return lines


def _checks(run: Run, summary: dict[str, Any], events: tuple[Event, ...]) -> list[dict[str, Any]]:
    """The success criteria, judged from the event log, which has all starts of a resumed run."""
    before, selection = summary.get("student_before", {}), selection_of(run.config)
    return success_checks(
        events,
        perplexity=summary["student"]["perplexity"],
        perplexity_before=before.get("perplexity"),
        max_perplexity=run.config.eval.max_perplexity,
        min_share=run.config.eval.min_share,
        epoch_steps=run.loader.num_windows,
        vocab_size=run.student.vocab_size,
        select=run.config.eval.select,
        rank=selection.rank(as_number(summary["student"].get("selected"))),
        rank_before=selection.rank(as_number(before.get("selected"))),
        bits={row: summary.get(row, {}).get("bits_per_byte") for row in ("student", "student_before", "teacher")},
        kl={row: summary.get(row, {}).get("kl") for row in ("student", "student_before")},
    )


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    contents = json.dumps(strict(summary), indent=1, allow_nan=False).encode("utf-8")
    try:
        write_atomically(folder / "summary.json", contents)
    except OSError as error:
        raise CannotSave(
            f"cannot write the summary: {reason_of(error)}",
            where=str(folder / "summary.json"),
            advice=[
                "free some space on that disk",
                f"then continue, nothing is trained again: stillroom resume {folder}",
            ],
        ) from error
