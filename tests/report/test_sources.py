"""The table of sources in the report."""

from __future__ import annotations

from stillroom.report.history import History, RunRecord
from stillroom.report.page import render, sources

SOURCES = [
    {"name": "a.jsonl", "objectives": "all", "weight": 1.0, "rows": 70, "epochs": 1.5},
    {"name": "<b>.jsonl", "objectives": "labels", "weight": 0.5, "rows": 1400, "epochs": 0.75},
]


def step(number: int, **sources: dict[str, float]) -> dict[str, object]:
    named = {{"a": "a.jsonl", "b": "<b>.jsonl"}[key]: terms for key, terms in sources.items()}
    return {"event": "step", "step": number, "verdict": "keep", "sources": named}


def test_each_source_is_a_row_with_its_own_terms() -> None:
    steps = [step(n, a={"targets": 9, "kd": 9.0, "ce": 9.0}) for n in range(1, 39)]
    steps += [step(39, a={"targets": 10, "kd": 1.0, "ce": 4.0}), step(40, a={"targets": 30, "kd": 2.0, "ce": 4.0})]
    steps[-1]["sources"]["<b>.jsonl"] = {"targets": 5, "ce": 3.0}  # type: ignore[index]
    run = RunRecord("run", {}, History.of(steps), {"sources": SOURCES})
    table = sources(run)
    assert table is not None and table["heads"][5:] == ["kd", "ce"]
    assert table["rows"] == [
        ("a.jsonl", ["teacher and labels", "1", "70", "1.50", "1.750", "4.000"]),
        ("<b>.jsonl", ["labels", "0.5", "1,400", "0.75", "-", "3.000"]),
    ]
    assert "&lt;b&gt;.jsonl" in render(run) and "<b>" not in render(run)


def test_one_source_has_no_table() -> None:
    assert sources(RunRecord("run")) is None
