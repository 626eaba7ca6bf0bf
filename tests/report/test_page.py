"""The report: the right words for each kind of run, safe whatever the run recorded, and nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import write_run

from stillroom.core.errors import CannotSave
from stillroom.report import RunRecord, write_report
from stillroom.report.drawing import MAX_POINTS, ROLES, dark_partners, edges_of, means, smooth, thin
from stillroom.report.figures import all_figures
from stillroom.report.history import History
from stillroom.report.page import closeness, commands
from stillroom.report.words import cost, headline, verdict

HOSTILE = (
    "</title></script></style>--><script>alert(1)</script><img src=x onerror=alert(2)>]]>"
    "\"' onload='alert(3)' <a href=\"https://evil.example/\">\x1b[31mred\u202ecod\u2066\x00\x9b2J %{x} ${7*7}"
    " {{ 7*7 }} {% raw %}"
)
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]")


class Page(HTMLParser):
    """The elements of a page, and its text without scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.text += data

    def payload(self) -> dict[str, Any]:
        (index,) = [i for i, (_, attrs) in enumerate(self._all_scripts()) if attrs.get("id") == "drawings"]
        value: dict[str, Any] = json.loads(self.scripts[index])
        return value

    def _all_scripts(self) -> list[tuple[str, dict[str, str | None]]]:
        return [element for element in self.elements if element[0] == "script"]


def page_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def replace_strings(value: Any, by: str) -> Any:
    """The same record with every string leaf hostile, but for those that say what a record is."""
    if isinstance(value, dict):
        kept = ("event", "time", "verdict")
        return {key: value[key] if key in kept else replace_strings(value[key], by) for key in value}
    if isinstance(value, list):
        return [replace_strings(item, by) for item in value]
    return by if isinstance(value, str) else value


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "finished", num_steps=60)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "hostile", num_steps=60)
    log = folder / "events.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if "terms" in record:
            record["terms"][HOSTILE] = {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 0.5}
    log.write_text("".join(json.dumps(replace_strings(record, HOSTILE)) + "\n" for record in records))
    for name in ("config.json", "summary.json", "eval.json"):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(replace_strings(value, HOSTILE) | {HOSTILE: {HOSTILE: HOSTILE}}))
    return folder


# -- what the page says ----------------------------------------------------------------------------------


def test_the_result_comes_first_and_in_words(finished: Path) -> None:
    assert headline(RunRecord.load(finished)) == [
        "The student reached a held-out perplexity of 57.1 (1.62 bits per byte), from 2,031 before training; "
        "the teacher has 20.3.",
        "It closes 68% of the gap in perplexity between the better plain-training baseline (134) and the teacher.",
    ]


def test_the_first_screen_has_verdict_cost_answers_and_the_next_command(finished: Path) -> None:
    text = page_of(finished).text
    run = RunRecord.load(finished)
    said = verdict(run)
    labels = [label for label, _ in cost(run)]
    assert {"time", "tokens seen", "student's parameters"} <= set(labels) and any("memory" in label for label in labels)
    (command, *_others) = [command for _, command in commands(run)]
    assert command.startswith("stillroom ") and str(finished) in command
    place = 0
    for part in (said, labels[0], "prompt", "teacher", "student", command, "Curves"):
        place = text.index(part, place)
    assert said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"student": 20.0, "student_before": 20.0, "teacher": 10.0}, "did not help"),
        ({"student": 20.0, "student_before": 90.0}, "Training helped"),
        ({"student": 9.0, "student_before": 90.0, "teacher": 10.0}, "as good as its teacher"),
        ({"student": 4.0, "student_before": 90.0, "teacher": 20.0}, "better than its teacher"),
        ({"student": 30.0, "student_before": 90.0, "teacher": 10.0}, "Distillation worked: the student closed 50%"),
        ({"student": 80.0, "student_before": 90.0, "teacher": 10.0}, "changed little"),
        ({"student": 30.0, "student_before": 90.0, "teacher": 10.0, "baseline": 29.0}, "did not pay"),
        ({"student": math.nan, "student_before": 90.0, "teacher": 10.0}, ""),
        ({"student": 20.0}, ""),
    ],
)
def test_the_verdict_is_one_plain_sentence(values: dict[str, float | None], words: str) -> None:
    said = verdict(with_perplexities(**values))
    assert words in said and said.count(".") == bool(words) and bool(said) == bool(words)


def test_the_verdict_on_a_dry_run_is_that_it_is_too_short(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=60)
    whole = verdict(RunRecord.load(folder))
    kept = [line for line in (folder / "events.jsonl").read_text().splitlines() if json.loads(line).get("step", 0) <= 5]
    (folder / "events.jsonl").write_text("\n".join(kept) + "\n")
    assert "too few" in verdict(RunRecord.load(folder)) and "too few" not in whole


@pytest.mark.parametrize(("kl", "words"), [(0.1, "worked: 75%"), (0.5, "did not help"), (None, "")])
def test_a_teacher_in_context_is_compared_by_what_it_answers(tmp_path: Path, kl: float | None, words: str) -> None:
    """The labels may be as likely as before, or less."""
    folder = write_run(tmp_path / "run", num_steps=60)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    next(one for one in events if one["event"] == "run_start").setdefault("data", {})["teacher_contexts"] = 9
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = json.loads((folder / "summary.json").read_text())
    summary["student"] |= {"perplexity": 2500.0, "bits_per_byte": 5.0, "kl": kl}
    summary["student_before"] |= {"kl": 0.4}
    (folder / "summary.json").write_text(json.dumps(summary))
    said = verdict(RunRecord.load(folder))
    assert words in said and bool(said) == bool(words)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"is_running": True}, "watch"),
        ({"summary": {"status": "stopped"}}, "resume"),
        ({"summary": {"status": "diverged"}}, "diagnose"),
        ({"summary": {"status": "done"}}, "generate"),
    ],
)
def test_the_next_command_fits_the_end_of_the_run(changes: dict[str, Any], wanted: str) -> None:
    run = replace(RunRecord("run", folder="a run"), **changes)
    assert commands(run)[0][1].startswith(f"stillroom {wanted} 'a run'")


def with_perplexities(**values: float | None) -> RunRecord:
    rows = {row: {"perplexity": value} for row, value in values.items()}
    return RunRecord("run", summary={"status": "done", **rows})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"student": 90.0, "student_before": 50.0, "teacher": 20.0}, "The student got worse"),
        ({"student": 90.0}, "The student has a held-out perplexity of 90.0."),
        ({"student": 60.0, "teacher": 20.0, "baseline": 50.0}, "distillation did not pay in this run"),
        ({"student": 19.0, "teacher": 20.0, "baseline": 50.0}, "it is as good as the teacher"),
        ({"student": 15.0, "teacher": 20.0, "baseline": 18.0}, "There is no gap to close"),
        ({"student": 60.0, "baseline": 80.0}, "25% below the plain-training baseline (80.0)"),
        (
            {"student": 35.0, "teacher": 20.0, "baseline": 50.0},
            "closes 50% of the gap in perplexity between the plain-training",
        ),
        ({"student": 35.0, "teacher": 20.0, "baseline": None}, "the teacher has 20.0."),
    ],
)
def test_the_words_fit_the_numbers(values: dict[str, float | None], words: str) -> None:
    assert words in " ".join(headline(with_perplexities(**values)))


def test_a_broken_student_is_called_broken() -> None:
    row = {"perplexity": None, "perplexity_nonfinite": "nan"}
    run = RunRecord("run", summary={"status": "done", "student": row, "baseline": {"perplexity": 50.0}})
    assert headline(run) == ["The student is broken: its held-out perplexity is nan."]


def test_a_run_that_stopped_says_why() -> None:
    step = {"event": "step", "step": 12, "verdict": "keep"}
    end = {"event": "run_end", "status": "stopped", "exit_code": 22, "reason": "step 13: the loss is nan"}
    assert headline(RunRecord("run", history=History.of([step, end]))) == [
        "The run did not finish: it ended at step 12 (exit code 22).",
        "The reason given: step 13: the loss is nan.",
    ]


def test_the_page_has_every_part(finished: Path) -> None:
    page = page_of(finished)
    ids = {attrs.get("id") for _, attrs in page.elements}
    parts = ("result", "advice", "curves", "tokens-view", "samples", "metrics", "checks", "guard", "data", "notes")
    assert {*parts, "evaluated", "settings", "again"} <= ids
    figures = (
        "perplexity",
        "objective",
        "shares",
        "raw",
        "weighted",
        "pulls",
        "gradients",
        "rates",
        "pace",
        "verdicts",
    )
    assert {f"figure-{key}" for key in figures} <= ids
    assert "54.2 to 60.3" in page.text and "69.0% to 71.0%" in page.text
    assert "95 % intervals over 55 held-out documents" in page.text
    assert "2,410,331" in page.text and "3 of 1,023 records were empty" in page.text
    assert "loss nan, grad_norm inf, loss_scale 32768" in page.text
    assert "stdlib:ast:14" in page.text
    assert "start lower: --set precision.loss_scale=16384" in page.text and "Steps 12, 37." in page.text
    assert "41 records cut at data.max_length" in page.text and "median 256" in page.text
    assert "student and teacher place" in page.text and "The nearest preset is" in page.text
    assert "stillroom distill again.json" in page.text
    assert "forward_kl" in page.text
    assert "2.13.0+cpu" in page.text


def test_too_few_documents_for_an_interval_are_told(finished: Path) -> None:
    record = RunRecord.load(finished)
    student = {**record.result("student"), "documents": 2, "intervals": {}}
    table = closeness(replace(record, summary={**record.summary, "student": student}))
    assert table is not None and "(scored: 2)" in table["note"] and "95 %" not in table["note"]


def test_documents_that_no_evaluation_scored_are_not_counted_among_the_scored(finished: Path) -> None:
    record = RunRecord.load(finished)
    student = {**record.result("student"), "documents": 54}
    table = closeness(replace(record, summary={**record.summary, "student": student}))
    assert table is not None and "95 % intervals over 54 of 55 held-out documents" in table["note"]


def test_every_colour_of_a_figure_has_a_dark_partner(finished: Path) -> None:
    page = page_of(finished)
    used = set(re.findall(r"#[0-9a-f]{6}", json.dumps(page.payload()["figures"])))
    assert used <= set(dark_partners())
    assert len(set(dark_partners())) >= len(ROLES)


# -- runs that broke off ---------------------------------------------------------------------------------


def test_a_crashed_run_gets_its_report(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "crashed", num_steps=60, until=30))
    assert "The run did not finish: its record breaks off at step 30 of 60." in page.text
    assert "summary.json is not there." in page.text
    assert "is torn" in page.text
    assert page.payload()["figures"]


@pytest.mark.parametrize("present", [(), ("config.json",), ("summary.json",), ("events.jsonl",)])
def test_any_file_may_be_missing(tmp_path: Path, finished: Path, present: tuple[str, ...]) -> None:
    for name in present:
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    page = page_of(tmp_path)
    for name in {"config.json", "summary.json", "events.jsonl"} - set(present):
        assert f"{name} is not there" in page.text


def test_files_of_the_wrong_kind_are_survived(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    (tmp_path / "summary.json").write_text("{")
    lines = [
        '{"event": "step", "step": "x"}',
        "broken",
        '{"event": "step", "step": 1, "train_loss": "high", "terms": 3}',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(tmp_path)
    assert "config.json does not hold an object." in page.text
    assert "summary.json cannot be read" in page.text
    assert "events.jsonl has 1 broken lines that are left out: 2." in page.text


def test_values_of_the_wrong_type_in_a_summary_are_left_blank_and_the_others_shown(tmp_path: Path) -> None:
    summary = {"status": 7, "student": {"perplexity": "low", "kl": [1]}, "teacher": 3, "checks": [1, {"name": None}]}
    summary["student_before"] = {"perplexity": 3.0, "intervals": {"perplexity": ["a", 2], "kl": 5}}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"steps": 10**400, "baseline": {"perplexity": True}}))
    page = page_of(tmp_path)
    assert "3.00" in page.text and "low" not in page.text


def test_values_of_the_wrong_type_in_a_log_are_left_blank_and_the_others_shown(tmp_path: Path) -> None:
    wrong: tuple[Any, ...] = (7, None, "x", [1], {"a": [1]}, True, 10**400)
    with (tmp_path / "events.jsonl").open("w") as file:
        for kind in ("run_start", "sample", "guard", "router", "router_probe", "note", "gradients", "changed_inputs"):
            for value in wrong:
                keys = ("run", "data", "prompt", "teacher", "reason", "evidence", "layers", "terms", "changes", "text")
                file.write(json.dumps({"event": kind, "step": 1, **dict.fromkeys(keys, value)}) + "\n")
        file.write(json.dumps({"event": "sample", "prompt": "a prompt", "student": "an answer"}) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"advice": [*wrong, {"steps": [10**400], "advice": "try"}]}))
    page = page_of(tmp_path)
    assert "a prompt" in page.text and "an answer" in page.text and "try" in page.text


def test_an_answer_of_white_space_is_named_and_not_an_empty_box(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "sample", "prompt": "a", "student": " \n "}) + "\n")
    assert "nothing but white space" in page_of(tmp_path).text


def test_a_refused_disk_is_an_error_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(CannotSave):
        write_report(tmp_path / "not there")


def test_after_a_rollback_the_later_attempt_counts() -> None:
    attempts = [(1, "keep", 5.0), (2, "keep", 9.0), (2, "skip", None), (2, "keep", 4.0), (3, "keep", 3.0)]
    events = [
        {"event": "step", "step": step, "verdict": verdict, "train_loss": loss} for step, verdict, loss in attempts
    ]
    run = RunRecord("run", history=History.of(events))
    assert run.steps.curve("train_loss")[1].tolist() == [5.0, 4.0, 3.0]
    assert [step for step, _, _ in run.refused] == [2]


# -- hostile runs ----------------------------------------------------------------------------------------


def test_hostile_text_opens_no_element(finished: Path, hostile: Path) -> None:
    ours = {tag for tag, _ in page_of(finished).elements} | {"aside"}
    page = page_of(hostile)
    assert {tag for tag, _ in page.elements} <= ours
    assert [tag for tag, _ in page.elements].count("script") == 4  # two with data, two that run
    allowed = {"class", "id", "lang", "scope", "charset", "content", "name", "http-equiv", "type"}
    allowed |= {"role", "aria-label", "aria-labelledby", "aria-live", "aria-selected"}
    allowed |= {"data-label", "data-at", "dir", "tabindex"}
    for tag, attrs in page.elements:
        assert set(attrs) <= allowed, tag
    assert "<script>alert(1)</script>" in page.text and "{{ 7*7 }}" in page.text  # shown as the text it is


def test_hostile_text_cannot_leave_its_data_block(hostile: Path) -> None:
    source = write_report(hostile).read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="drawings">(.*?)</script>', source, flags=re.DOTALL)
    assert not set("<>&") & set(block)
    names = [trace["name"] for figure in json.loads(block)["figures"] for trace in figure["data"]]
    assert not any("<" in name for name in names)  # plotly would read tags in a label
    assert any("&lt;/title&gt;" in name for name in names)


def test_hostile_tokens_are_text(hostile: Path) -> None:
    view = json.loads((hostile / "tokens.json").read_text())
    view["texts"] = dict.fromkeys(view["texts"], HOSTILE)
    for row in view["rows"]:
        row["id"] = HOSTILE
        for token in row["tokens"]:
            token["text"] = HOSTILE
    view["rows"] += ["x", {"tokens": [1, {"distance": "far"}, {"distance": 7.0}, {"distance": 0.5, "teacher": [[1]]}]}]
    (hostile / "tokens.json").write_text(json.dumps(view))
    source = write_report(hostile).read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="tokens">(.*?)</script>', source, flags=re.DOTALL)
    assert not set("<>&") & set(block) and not FORBIDDEN.search(block)
    assert not any("<img" in text and "\x1b" in text for text in json.loads(block)["texts"].values())
    assert "img" not in {tag for tag, _ in Page(source).elements}


def test_no_control_or_direction_character_reaches_the_page(hostile: Path) -> None:
    source = write_report(hostile).read_text(encoding="utf-8")
    ours = source[: source.index("plotly.js (basic")]
    assert not FORBIDDEN.search(ours)


@pytest.mark.parametrize("kind", ["finished", "hostile"])
def test_the_page_fetches_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    page = page_of(request.getfixturevalue(kind))
    for _, attrs in page.elements:
        assert not {"src", "href", "srcset", "action", "data", "poster", "style"} & set(attrs)
    style = (Path(__file__).parents[2] / "src/stillroom/report/assets/page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_our_two_scripts_and_no_other(finished: Path) -> None:
    page = page_of(finished)
    policies = [attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[2:]]
    scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert len(hashes) == 2
    assert policies == [
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    ]


# -- curves ----------------------------------------------------------------------------------------------


def test_thinning_keeps_spikes_and_the_limit() -> None:
    ys = np.sin(np.arange(50_000) / 500)
    ys[31_234] = 99.0
    xs, thinned = thin((np.arange(50_000.0), ys))
    assert len(xs) <= MAX_POINTS
    assert xs.tolist() == sorted(xs)
    assert thinned.max() == 99.0
    assert thinned.min() == ys.min()


def test_thinning_keeps_the_lowest_and_the_highest_of_every_stretch() -> None:
    ys = np.random.default_rng(3).normal(size=10_000)
    xs, thinned = thin((np.arange(10_000.0), ys), limit=100)
    for begin in range(0, 10_000, 200):
        inside = thinned[(xs >= begin) & (xs < begin + 200)]
        assert {inside.min(), inside.max()} == {ys[begin : begin + 200].min(), ys[begin : begin + 200].max()}


def test_short_curves_are_left_alone() -> None:
    one = (np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    assert thin(one) is one or thin(one) == one
    assert smooth((np.array([1.0, 2.0]), np.array([3.0, 3.0])))[1].tolist() == [3.0, 3.0]
    assert smooth((np.empty(0), np.empty(0)))[1].tolist() == []


def test_stretches_hold_every_point_once() -> None:
    xs = np.arange(1.0, 1002.0)
    edges = edges_of(xs, limit=300)
    assert len(edges) - 1 <= 300
    counts, _ = np.histogram(xs, edges + 0.5)
    assert counts.sum() == 1001
    np.testing.assert_allclose((means((xs, xs), edges) * counts).sum(), xs.sum())


def test_a_long_run_makes_figures_of_bounded_size() -> None:
    terms = {"kd": {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 1.0}, "ce": {"share": 0.0}}
    common = {"event": "step", "verdict": "keep", "lr": 1e-4, "grad_norm": 0.5, "loss_scale": 1.0, "terms": terms}
    events = (
        common | {"step": step, "train_loss": 3 + math.sin(step), "tokens_per_second": 9.0} for step in range(30_000)
    )
    figures = all_figures(RunRecord("run", history=History.of(events)))
    assert max(len(trace["x"]) for figure in figures for trace in figure.traces) <= MAX_POINTS
