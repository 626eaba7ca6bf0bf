"""Laws of the console: everything from events, readable in a pipe and on a narrow terminal, safe to look at."""

from __future__ import annotations

import io
import itertools
import math
import re
import shlex
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stillroom.core.errors import ConfigError, DataError
from stillroom.telemetry import console
from stillroom.telemetry.console import ConsoleView, SilentScreen, render_error
from stillroom.telemetry.results import assessment_lines, summary_lines
from stillroom.telemetry.wording import (
    as_number,
    clean,
    end_line,
    format_duration,
    format_loss,
    format_lr,
    format_norm,
    format_result,
    step_line,
)

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202eevil\u2066\x08\r\nname\u2028next\x00"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def run_start(**changes: Any) -> dict[str, Any]:
    return {
        "event": "run_start",
        "run": "demo",
        "config": {"telemetry": {"log_steps": 10}},
        "precision": {"mode": "fp32", "reason": "the device is a CPU"},
        "schedule": {
            "total_batches": 74823,
            "gradient_accumulation": 16,
            "optimizer_steps": 4677,
            "warmup_steps": 467,
            "learning_rate": 3e-5,
        },
        "teacher": {"name": "builtin:teacher", "parameters": 3214112, "vocabulary": 4096, "layers": 8, "width": 256},
        "student": {"name": "builtin:student", "parameters": 401220, "vocabulary": 4096, "layers": 2, "width": 128},
        "data": {
            "train_tokens": 1204331,
            "eval_tokens": 60221,
            "train_documents": 1020,
            "eval_documents": 55,
            "notes": ["3 of 1,023 records were empty and are not used"],
        },
    } | changes


def step(number: int, **changes: Any) -> dict[str, Any]:
    terms = {
        "kd": {"raw": 0.824, "weight": 0.5, "scaled": 0.412, "share": 0.178},
        "ce": {"raw": 3.804, "weight": 0.5, "scaled": 1.902, "share": 0.822},
    }
    return {
        "event": "step",
        "step": number,
        "train_loss": 2.314,
        "lr": 3e-5,
        "grad_norm": 0.83,
        "verdict": "keep",
        "tokens_per_second": 1204.2,
        "eta_seconds": 130.0,
        "terms": terms,
    } | changes


def other_events() -> list[dict[str, Any]]:
    return [
        {
            "event": "first_forward",
            "rows": 8,
            "positions": 256,
            "scored": 2040,
            "student_hidden": [2040, 128],
            "teacher_hidden": [2040, 256],
            "vocabulary": 4096,
            "temperature": 2.0,
            "weights": {"kd": 0.5, "ce": 0.5},
        },
        {"event": "note", "text": "the head takes the fused path"},
        {
            "event": "eval",
            "step": 20,
            "perplexity": 57.12,
            "bits_per_byte": 1.62,
            "kl": 0.412,
            "agreement": 0.613,
            "objective": 2.31,
            "terms": {},
            "unscored_tokens": 12,
            "best": True,
        },
        {"event": "phase", "step": 20, "from": "warm", "to": "full"},
        {"event": "checkpoint", "step": 20, "path": "checkpoints/step-000020", "bytes": 12_400_000, "seconds": 0.8},
        {"event": "guard", "step": 21, "action": "skip", "reason": "the loss is nan", "sample_ids": list("abcde")},
        {"event": "sample", "prompt": "def f(", "teacher": "self):", "student": "x):\n    return " + 40 * "y "},
        {"event": "resume", "step": 20},
        {"event": "something new"},
        {"event": "run_end", "status": "done", "steps": 4677, "seconds": 29520.0, "exit_code": 0},
    ]


def summary() -> dict[str, Any]:
    row = {"perplexity": 57.12, "bits_per_byte": 1.62, "kl": 0.412, "agreement": 0.613, "parameters": 401220}
    return {
        "status": "done",
        "teacher": row | {"perplexity": 20.3, "kl": None, "agreement": None, "parameters": 3214112},
        "student_before": row | {"perplexity": 2031.4},
        "student": row,
        "baseline": row | {"perplexity": 134.2},
        "baseline_equal_compute": row | {"perplexity": None, "perplexity_nonfinite": "inf"},
        "checks": [{"name": "perplexity fell", "passed": True, "text": "2,031 to 57.1"}],
    }


def shown(events: list[dict[str, Any]], stream: io.StringIO, **options: Any) -> str:
    with ConsoleView("auto", stream, **{"verbose": True, **options}) as view:
        for event in events:
            view.handle(event)
        view.finish(summary(), "runs/demo/report.html")
    return stream.getvalue()


def whole_run() -> list[dict[str, Any]]:
    return [run_start(), *(step(number) for number in range(1, 25)), *other_events()]


def control_characters(text: str) -> set[str]:
    return {character for character in text if unicodedata.category(character) in ("Cc", "Cf")} - {"\n"}


# -- numbers ---------------------------------------------------------------------------------------------


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_a_positive_rate_is_never_shown_as_zero(value: float) -> None:
    told = format_lr(value)
    assert re.fullmatch(r"\d\.\d\de[+-]\d\d+", told)
    assert told != "0.00e+00"
    assert not 1e-300 < value < 1e300 or math.isclose(float(told), value, rel_tol=0.0051)


def test_rates_have_three_significant_digits() -> None:
    assert [format_lr(value) for value in (7.96e-6, 3e-5, 1e-3, 5e-324)] == [
        "7.96e-06",
        "3.00e-05",
        "1.00e-03",
        "4.94e-324",
    ]


def test_numbers_read_as_people_write_them() -> None:
    assert [format_result(value) for value in (57.12, 2031.4, 1.6199, 134.2, 99.96, 0.0, 3e-5)] == [
        "57.1",
        "2,031",
        "1.62",
        "134",
        "100",
        "0",
        "3.00e-05",
    ]
    assert [format_loss(value) for value in (2.314, 0.00812, 1204.5, 1e-5)] == [
        "2.314",
        "0.00812",
        "1,204.5",
        "1.00e-05",
    ]
    assert [format_norm(value) for value in (0.83, 0.0123, 25000.0, 0.0)] == ["0.83", "0.0123", "2.50e+04", "0.00"]
    assert [format_duration(value) for value in (0.42, 12, 130, 11100, 187200, 59.7)] == [
        "0.4s",
        "12s",
        "2m10s",
        "3h05m",
        "2d04h",
        "1m00s",
    ]
    assert as_number(10**400) is None
    assert as_number(True) is None


# -- text from outside -----------------------------------------------------------------------------------


@given(st.text())
def test_clean_text_is_one_visible_line_and_stays_so(text: str) -> None:
    told = clean(text)
    assert not control_characters(told) - {"\u200c", "\u200d"}
    assert "\n" not in told
    assert clean(told) == told
    told.encode("utf-8")


def test_clean_leaves_what_people_write_alone() -> None:
    for text in ("meta-llama/Llama-3.2-1B", "na\u00efve \u4e2d\u6587 \U0001f33f", "\u0645\u06cc\u200c\u062e\u0648"):
        assert clean(text) == text


def test_clean_takes_escape_sequences_whole() -> None:
    assert clean(HOSTILE) == "redevil name next"
    assert clean("a\n\tb", keep_lines=True) == "a\n    b"


def test_hostile_names_reach_no_screen() -> None:
    names = {"name": HOSTILE, "parameters": 1}
    events = [
        run_start(run=HOSTILE, teacher=names, student=names, precision={"mode": HOSTILE, "reason": HOSTILE}),
        step(1, terms={HOSTILE: {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 1.0}}),
        {"event": "note", "text": HOSTILE},
        {"event": "guard", "step": 1, "action": HOSTILE, "reason": HOSTILE, "sample_ids": [HOSTILE]},
        {"event": "sample", "prompt": HOSTILE, "teacher": HOSTILE, "student": HOSTILE},
        {"event": "run_end", "status": HOSTILE},
    ]
    assert not control_characters(shown(events, io.StringIO()))


def with_leaves(value: Any, leaf: Any) -> Any:
    """The same structure with another value in every place, and with hostile names."""
    if isinstance(value, dict):
        return {key: with_leaves(one, leaf) for key, one in value.items()} | {HOSTILE: leaf}
    return [with_leaves(one, leaf) for one in value] if isinstance(value, list) else leaf


@pytest.mark.parametrize("leaf", [HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}], ids=["text", "list", "mapping"])
def test_no_value_of_a_log_reaches_a_screen_as_it_is(leaf: Any) -> None:
    events = [with_leaves(event, leaf) | {"event": event["event"]} for event in whole_run()]
    plain = shown(events, io.StringIO())
    assert not control_characters(plain) and "redevil" in plain
    lively = shown(events, Terminal(), width=80)
    assert "\x1b]0;" not in lively and not {"\u202e", "\u2066", "\x9b", "\x08", "\x07"} & set(lively)


def test_a_line_of_a_log_stays_one_line() -> None:
    assert "\nrun completed" not in shown([step(10, step="1\nrun completed")], io.StringIO())


def test_a_key_is_shown_on_no_screen_and_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalr-example-key")
    error = ConfigError("the key wJalr-example-key", where="wJalr-example-key", advice=["wJalr-example-key"])
    stream = io.StringIO()
    render_error(error, stream)
    for stream_ in (io.StringIO(), Terminal()):
        stream.write(
            shown([step(1, step="wJalr-example-key"), {"event": "note", "text": "wJalr-example-key"}], stream_)
        )
    assert "wJalr" not in stream.getvalue() + str(error) + repr(error)


# -- screens ---------------------------------------------------------------------------------------------


def test_a_step_line_reads_as_documented() -> None:
    assert step_line(step(120), skipped=0) == (
        "step 120  loss 2.314  kd 0.824 (x0.5)  ce 3.804 (x0.5)  lr 3.00e-05  grad 0.83  skipped 0  1,204 tok/s"
        "  eta 2m10s"
    )


def test_a_value_that_is_not_finite_is_said_so() -> None:
    line = step_line(step(7, train_loss=None, train_loss_nonfinite="nan", grad_norm=None, grad_norm_nonfinite="inf"), 1)
    assert "loss nan" in line
    assert "grad inf" in line


@pytest.mark.parametrize(("stream", "is_whole"), [(io.StringIO(), True), (Terminal(), False)])
def test_a_sentence_is_one_line_in_a_pipe_and_wrapped_on_a_terminal(
    stream: io.StringIO, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    sentence = "every word of this note is found by grep " * 5
    ConsoleView("plain", stream).handle({"event": "note", "text": sentence.strip()})
    render_error(ConfigError(sentence, advice=[sentence]), stream)
    lines = stream.getvalue().splitlines()
    assert sum(sentence.strip() in line for line in lines) == (3 if is_whole else 0)
    assert is_whole or max(map(len, lines)) <= 60


def test_plain_output_has_no_control_characters() -> None:
    told = shown(whole_run(), io.StringIO())
    assert not control_characters(told)
    assert told.isascii()
    assert "!" not in told
    assert (
        "total batches 74,823 | gradient accumulation 16 | optimizer steps 4,677 | warmup steps 467 (10.0%)\n" in told
    )
    assert "precision fp32: the device is a CPU" in told


@pytest.mark.parametrize(
    ("steps", "label"), [(28, "total batches"), (30, "batches of an epoch"), (84, "batches of an epoch")]
)
def test_batches_are_called_total_only_where_the_run_is_one_epoch(steps: int, label: str) -> None:
    schedule = {"total_batches": 111, "gradient_accumulation": 4, "optimizer_steps": steps, "warmup_steps": 3}
    assert f"{label} 111 | gradient accumulation 4 | optimizer steps {steps}" in quiet([run_start(schedule=schedule)])


def test_with_verbose_steps_appear_every_log_steps_and_first_steps_in_full() -> None:
    told = shown(whole_run(), io.StringIO())
    assert re.findall(r"^step (\d+)", told, flags=re.MULTILINE) == ["1", "2", "3", "4", "5", "10", "20"]
    assert told.count("  term ") == 5
    assert re.search(r"^  kd +0\.824 +0\.5 +0\.412 +17\.8%$", told, flags=re.MULTILINE)


def test_skipped_steps_are_counted() -> None:
    told = shown([run_start(), step(8, verdict="skip"), step(9, verdict="skip"), step(10)], io.StringIO())
    assert "skipped 2" in told
    resumed = shown([run_start(), step(10, skipped=7)], io.StringIO())
    assert "skipped 7" in resumed


def quiet(events: list[dict[str, Any]], stream: io.StringIO | None = None, **options: Any) -> str:
    return shown(events, stream or io.StringIO(), verbose=False, **options)


def test_without_verbose_a_run_prints_what_a_person_acts_on() -> None:
    details = {"notes": ["documents begin with <s>", "3 records are left out"], "details": ["documents begin with <s>"]}
    events = [run_start(data=details), *whole_run()[1:], {"event": "note", "text": "a kernel", "detail": True}]
    told = quiet(events)
    hidden = ("  term ", "first forward", "saved step", "documents begin with", "a kernel", "check passed")
    assert not [words for words in hidden if words in told]
    acted_on = ("eval at step 20", "guard at step 21", "the head takes the fused path", "3 records", "sample", "phase")
    assert not [words for words in acted_on if words not in told]
    assert not [words for words in (*hidden, *acted_on) if words not in shown(events, io.StringIO())]


def test_a_failed_check_is_always_printed() -> None:
    checks = [{"name": "loops", "passed": False, "text": "3 of 3"}, {"name": "fell", "passed": True, "text": "so"}]
    lines = summary_lines({"checks": checks})
    assert lines == ["check failed  loops: 3 of 3", "checks passed  1 of 2"]
    assert len(summary_lines({"checks": checks}, verbose=True)) == 3


def test_a_pipe_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 100_000, 1))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    steps = [step(number) for number in range(1, 301)]  # the clock advances by a second at each reading
    told = quiet([run_start(schedule={"optimizer_steps": 300}), *steps])
    numbers = [int(number) for number in re.findall(r"^step (\d+)", told, flags=re.MULTILINE)]
    assert numbers[0] == 1 and numbers[-1] == 300 and len(numbers) == 6
    assert min(after - before for before, after in itertools.pairwise(numbers[:-1])) >= 55


def stage(state: str, name: str = "evaluating the student", **fields: Any) -> dict[str, Any]:
    return {"event": "stage", "name": name, "state": state, "seconds": 0.0, **fields}


def test_a_long_stage_says_what_it_does_and_about_how_long_it_takes() -> None:
    of = {"total": 40, "unit": "batches"}
    begin, end = stage("begin", **of), stage("end", **of)
    slow = quiet([begin, stage("progress", seconds=1.0, done=4, eta_seconds=9.0, **of), end])
    assert "evaluating the student: 4 of 40 batches, about 9.0s left\n" in slow
    fast = quiet([begin, stage("progress", seconds=0.5, done=20, eta_seconds=0.5, **of), end])
    assert "evaluating" not in fast, "a stage of less than three seconds takes no line"
    known = quiet([stage("begin", eta_seconds=75.0, **of), end])
    assert "evaluating the student: 40 batches, about 1m15s\n" in known
    assert "loading the teacher ...\n" in quiet([stage("begin", "loading the teacher")])
    assert "saving" not in quiet([stage("begin", "saving", eta_seconds=0.2), stage("end", "saving")])


def test_a_terminal_shows_the_stage_below_the_steps_until_it_ends() -> None:
    of = {"total": 40, "unit": "batches", "done": 4, "eta_seconds": 9.0}
    during = quiet([run_start(), step(1), stage("progress", **of)], Terminal(), width=60)
    rows = visible_rows(during)
    assert any(row.startswith("evaluating the student: 4 of 40 batches") for row in rows)
    assert max(cell_len(row) for row in rows) <= 60
    after = quiet([run_start(), step(1), stage("begin"), stage("end"), step(4677)], Terminal(), width=60)
    assert "evaluating" not in after[after.rindex("4,677/4,677") :]


def screen_rows(told: str) -> list[str]:
    """What stands on a terminal that is high enough, after carriage returns, cursor movements and erasures."""
    rows, at = [""], 0
    for mark, text in re.findall(r"(\r|\n|\x1b\[[?\d;]*[A-Za-z])|([^\r\n\x1b]+)", told):
        if mark == "\n":
            at += 1
            rows += [""] * (at == len(rows))
        elif mark == "\x1b[1A":
            at -= 1
        elif mark == "\x1b[2K":
            rows[at] = ""
        rows[at] += text
    return rows


def test_nothing_that_is_said_between_two_runs_is_erased_by_the_second() -> None:
    """The live part of a run that ended is gone: the next one takes no lines for it from what was written since."""
    end = {"event": "run_end", "status": "done", "steps": 1, "seconds": 1.0, "exit_code": 0}
    between = [{"event": "note", "text": f"told between {number}"} for number in range(3)]
    told = quiet([run_start(), step(1), end, *between, stage("begin"), stage("end"), run_start(), step(1)], Terminal())
    assert [row for row in screen_rows(told) if "told between" in row] == [f"note  told between {n}" for n in range(3)]


def test_a_finished_run_ends_with_the_next_command(tmp_path: Path) -> None:
    def last(folder: Path, **changes: Any) -> str:
        stream = io.StringIO()
        with ConsoleView("plain", stream) as view:
            view.handle({"event": "sample", "prompt": "it's \x1b[31mthe\nbeginning of a text", "student": "x"})
            view.finish(summary() | changes, None, folder)
        return stream.getvalue()

    told = last(tmp_path / "my run")
    (line,) = [line for line in told.splitlines() if "stillroom generate" in line]
    words = shlex.split(line[line.index("stillroom") :])
    assert words == ["stillroom", "generate", str(tmp_path / "my run"), "--prompt", "it's the beginning of a"]
    student = tmp_path / "my run" / "student"
    student.mkdir(parents=True)
    (student / "chat_template.jinja").write_text("{{ messages }}")
    assert f"stillroom chat {shlex.quote(str(tmp_path / 'my run'))}" in last(tmp_path / "my run")
    assert "stillroom" not in last(tmp_path / "my run", status="diverged")


def visible_rows(written: str) -> list[str]:
    """What a terminal would show in each row that was ever drawn."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("width", [80, 60, 120])
def test_the_live_line_survives_the_width(width: int) -> None:
    many = {name: {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 0.2} for name in ("kd", "ce", "hidden", "rout")}
    rows = visible_rows(shown([*whole_run(), step(4677, terms=many)], Terminal(), width=width))
    assert max(cell_len(row) for row in rows) <= width
    told = "\n".join(rows)
    for part in ("4,677/4,677", "1,204 tok/s", "eta 2m10s", "loss 2.314", "lr 3.00e-05", "grad 0.83", "skipped 0"):
        assert part in told


def test_the_live_screen_leaves_the_terminal_as_it_was() -> None:
    before = sys.stdout
    told = shown(whole_run(), Terminal(), width=80)
    assert sys.stdout is before
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h") > 0


def test_quiet_is_quiet() -> None:
    stream = Terminal()
    with ConsoleView("quiet", stream) as view:
        for event in whole_run():
            view.handle(event)
        view.finish(summary(), "report.html")
    assert stream.getvalue() == ""


class Gone(io.StringIO):
    """A pipe whose reader left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_who_left_does_not_end_the_run(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Gone()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    before = sys.stdout
    assert shown(whole_run(), stream) == ""
    assert sys.stdout is before


def test_a_closed_stream_does_not_end_the_run() -> None:
    stream = io.StringIO()
    view = ConsoleView("plain", stream)
    stream.close()
    view.handle(run_start())
    assert isinstance(view._screen, SilentScreen), "the view falls silent at the first event"
    view.finish(summary())


def test_a_narrow_encoding_gets_escapes() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ConsoleView("plain", stream).handle({"event": "note", "text": "na\u00efve"})
    stream.seek(0)
    assert stream.read() == "note  na\\xefve\n"


def test_events_with_nothing_in_them_are_shown_with_blanks() -> None:
    names = (
        "run_start",
        "step",
        "first_forward",
        "note",
        "eval",
        "gradients",
        "phase",
        "checkpoint",
        "guard",
        "sample",
        "run_end",
    )
    for stream in (io.StringIO(), Terminal()):
        text = shown([{"event": name} for name in names], stream, width=80)
        assert "loss -" in text and "perplexity -" in text and "weights -" in text and "ended" in text


# -- the end ---------------------------------------------------------------------------------------------


def test_the_last_table_is_aligned_and_fits_eighty_columns() -> None:
    lines = summary_lines(summary(), "runs/demo/report.html")
    table = lines[:6]
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= 80
    assert [line[:20].strip() for line in table[1:]] == [
        "teacher",
        "student before",
        "student",
        "plain, equal tokens",
        "plain, equal compute",
    ]
    assert "inf" in table[5]
    assert lines[6:] == ["checks passed  1 of 1", "report  runs/demo/report.html"]


def test_a_run_that_stopped_says_why() -> None:
    stopped = {"event": "run_end", "status": "stopped", "exit_code": 22, "reason": "the loss is nan"}
    assert end_line(stopped) == "stopped  exit code 22  the loss is nan"


def test_an_assessment_sets_the_models_side_by_side() -> None:
    row = {"perplexity": 57.12, "bits_per_byte": 1.62, "parameters": 401220, "tokens_per_second": 8200.4}
    result = {"model": "a", "data": "b", "student": row, "teacher": row, "retention": 0.5, "memory_gb": 1.9}
    assert assessment_lines(result) == [
        "model   a",
        "data    b",
        "                         student       teacher",
        "perplexity                  57.1          57.1",
        "bits/byte                   1.62          1.62",
        "parameters               401,220       401,220",
        "tokens/s                   8,200         8,200",
        "retention  50.0% (teacher's perplexity over the student's)",
        "memory  1.90 GB of the process",
    ]


def test_intervals_stand_beside_their_values_within_eighty_columns() -> None:
    intervals = {"perplexity": [55.0, 59.3], "bits_per_byte": [1.6, 1.6], "agreement": [0.999, 1.0]}
    row = {"perplexity": 57.12, "bits_per_byte": 1.62, "agreement": 0.999, "documents": 312, "intervals": intervals}
    lines = assessment_lines({"student": row, "teacher": row})
    assert lines == [
        "                         student  95 % interval         teacher  95 % interval",
        "perplexity                  57.1  55.0 to 59.3             57.1  55.0 to 59.3",
        "bits/byte                   1.62                           1.62",
        "agreement                  99.9%  99.9% to 100.0%         99.9%  99.9% to 100.0%",
        "documents                    312                            312",
    ]
    assert max(map(len, lines)) <= 80
    told = summary_lines({"student": row})[2]
    assert told == "95 % interval over 312 documents: student's perplexity 55.0 to 59.3"


def test_a_yardstick_that_is_not_a_number_is_said_to_be_none() -> None:
    row = {"perplexity": None, "perplexity_nonfinite": "nan"}
    assert assessment_lines({"student": row}) == ["perplexity                   nan"]


def test_an_error_fills_one_screen_with_what_where_and_what_to_try() -> None:
    stream = Terminal()
    what = "teacher has 32,000 tokens, student 50,257 " + "and more words " * 20 + HOSTILE
    advice = ("set data.tokenizers = 'dual'", "or take the student's own")
    render_error(ConfigError(what, where="run.toml: data", advice=advice), stream)
    told = stream.getvalue()
    assert not control_characters(told)
    assert max(len(line) for line in told.splitlines()) <= 80
    assert told.startswith("the configuration cannot be used\n\n  what   teacher has 32,000 tokens")
    last = "\n  try    set data.tokenizers = 'dual'\n  or     take the student's own\n\nexit code 2\n"
    assert f"\n  where  run.toml: data{last}" in told


def test_an_error_without_place_or_advice_says_neither() -> None:
    stream = io.StringIO()
    render_error(DataError("no record can be used"), stream)
    assert stream.getvalue() == "the data cannot be used\n\n  what   no record can be used\n\nexit code 2\n"
