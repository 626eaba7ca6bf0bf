"""Laws of benchmarks: what cannot be run is told before a model is loaded, and lm-eval's figures are ours by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import output, run

from stillroom.metrics.lm_eval import figures_of, open_tasks

FOUND = {
    "alias": "stills", "sample_len": 12, "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 0.25,
    "exact_match_stderr,strict": "N/A", "is_odd": True,
}  # fmt: skip


def test_standard_errors_become_intervals_and_no_filter_has_no_name() -> None:
    made = figures_of(FOUND, {"acc": True, "exact_match": True})
    assert made["acc"] == 0.5 and made["exact_match,strict"] == 0.25 and made["samples"] == 12
    assert made["intervals"] == {"acc": [pytest.approx(0.304, abs=1e-3), pytest.approx(0.696, abs=1e-3)]}
    assert made["higher_is_better"] == {"acc": True, "exact_match,strict": True}
    assert not {"alias", "is_odd", "sample_len"} & made.keys()


def test_no_benchmark_loads_nothing() -> None:
    assert open_tasks([]) is None


def task(folder: Path, name: str, data: str) -> Path:
    """A multiple-choice task of lm-eval in a file, with its data beside it."""
    rows = [{"question": "the still", "choices": ["room", "maid"], "answer": place % 2} for place in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / data}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{answer}}'\ndoc_to_choice: '{{choices}}'\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return path


def test_a_task_in_a_file_is_run_by_lm_eval_itself(world: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("lm_eval")
    words = ["eval", "--model", str(world / "student"), "--teacher", str(world / "teacher"), "--max-batches", "1"]
    words += ["--data", str(world / "train.jsonl"), "--tasks", str(task(tmp_path, "stills", "rows.jsonl"))]
    found = json.loads(output(capsys, *words, "--json"))
    assert found["student"]["tasks"]["stills"]["samples"] == 4
    assert 0 <= found["teacher"]["tasks"]["stills"]["acc"] <= 1


def test_a_benchmark_that_cannot_be_run_is_refused_before_a_model_is_loaded(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("lm_eval")
    words = ["eval", "--model", str(tmp_path / "none"), "--data", "none.jsonl", "--tasks"]
    for name, told in ((task(tmp_path, "stills", "gone.jsonl"), "cannot run"), (tmp_path / "gone.yaml", "not there")):
        code, _out, err = run(capsys, *words, str(name))
        assert code == 2 and told in " ".join(err.split()) and "--tasks" in err
