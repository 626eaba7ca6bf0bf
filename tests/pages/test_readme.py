"""The README and the page on when distillation pays are true: what they conclude from the committed results holds.

That its figures are those of the results is held by tests/pages/test_figures.py.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

import stillroom
from stillroom.config.load import build
from stillroom.config.schema import PrecisionConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
figures: Any = importlib.import_module("figures")
README = figures.without_marks((ROOT / "README.md").read_text(encoding="utf-8"))
CLAIMS = figures.without_marks((ROOT / "docs" / "concepts" / "distillation.md").read_text(encoding="utf-8"))


def test_the_readme_has_700_to_950_words() -> None:
    assert 700 <= len(README.split()) <= 950


def test_the_picture_shows_the_run_of_the_table() -> None:
    picture = (ROOT / "docs" / "images" / "demo.png").read_bytes()
    written = re.search(rb"tEXtTitle\0([\d. ]+)", picture)
    assert written is not None
    rows = ("teacher", "distilled student", "no teacher, equal compute", "no teacher, equal tokens")
    found = [re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \|", README, re.MULTILINE) for row in rows]
    assert written[1].decode().split() == [one[1] for one in found if one]


def test_the_divergences_and_fp16_modes_are_as_many_as_counted() -> None:
    modes = [mode for mode in get_args(PrecisionConfig.model_fields["mode"].annotation) if mode.startswith("fp16-")]
    assert len(modes) == 4 and "four FP16 modes" in README
    assert len(stillroom.divergence_names()) == 10 and "ten divergences" in README


def test_the_example_configuration_is_valid() -> None:
    example = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert example
    table = tomllib.loads(example[1])
    table.pop("preset")
    build(table, "README")


def test_make_targets_named_here_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_what_the_experiments_are_said_to_have_found_is_in_their_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "quality"))
    transfer, books = (importlib.import_module(name) for name in ("bench_transfer", "book"))
    book = books.Book("transfer")
    claim = " ".join(CLAIMS[CLAIMS.index("## Which objective when") :].split())
    said = re.search(r"was ([\d.]+) nats better with a teacher than without at ([\d,]+) tokens", claim)
    even = re.search(r"even with it from ([\d,]+) tokens on", claim)
    assert said and even

    def gains(size: int) -> list[float]:
        found: list[float] = books.paired(book.values("kd", size=size), book.values("ce-compute", size=size))
        return found

    sizes = sorted({line["size"] for line in book.runs})
    assert float(said[1]) == pytest.approx(-books.mean(gains(int(said[2].replace(",", "")))), abs=0.005)
    first_even = int(even[1].replace(",", ""))
    for size in sizes:
        better = min(book.values("ce", size=size).values()), min(book.values("ce-compute", size=size).values())
        if size < first_even:
            assert transfer.verdict(gains(size)) == "distillation", size
        else:
            assert transfer.verdict(gains(size)) == "neither", size
        if size <= 20_480:  # the small sets that distillation is for
            assert min(better) - max(book.values("kd", size=size).values()) >= 0.3, size


def test_the_weight_said_to_be_best_off_the_teacher_s_domain_is_that_of_the_result_file() -> None:
    result = ROOT / "benchmarks" / "quality" / "router" / "results" / "router.json"
    runs = json.loads(result.read_text(encoding="utf-8"))["runs"]
    said = re.search(r"`kd` ([\d.]+) with `ce` [\d.]+ was the best of (\w+) weights", CLAIMS)
    assert said and said[2] == "four"
    for regime in ("niche", "close-niche"):
        tried = {run["weight"]: run["dev"] for run in runs if run["regime"] == regime and run["arm"] == "weight"}
        plain = [run["dev"] for run in runs if run["regime"] == regime and run["arm"] == "plain"]
        assert len(tried) == 4
        assert min(tried, key=lambda weight: tried[weight]) == float(said[1])
        assert min(plain) <= min(tried.values()), "no better than plain training"


def test_what_a_cut_student_is_said_to_gain_is_in_its_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "quality"))
    books = importlib.import_module("book")
    book = books.Book("shrink")
    said = re.search(r"cut from its\s+teacher \(`student.init = \"shrink\"`\) ended\s+([\d.]+)\s+nats ahead", CLAIMS)
    assert said
    for size in sorted({line["size"] for line in book.runs}):
        gains = books.paired(book.values("cut, kd", size=size), book.values("random, kd", size=size))
        assert len(gains) >= 3
        assert books.is_beyond(gains, -1), size
        assert -books.mean(gains) == pytest.approx(float(said[1]), abs=0.005), size


def test_the_demo_s_order_holds_for_every_seed_in_the_result_file() -> None:
    runs = json.loads((ROOT / "benchmarks/demo/results/seeds.json").read_text(encoding="utf-8"))["runs"]
    assert len(runs) >= 3
    for run in runs:
        better = min(run["baseline"]["perplexity"], run["baseline_equal_compute"]["perplexity"])
        worse = max(run["baseline"]["perplexity"], run["baseline_equal_compute"]["perplexity"])
        teacher, student = run["teacher"]["perplexity"], run["student"]["perplexity"]
        assert teacher < student < better <= worse < run["student_before"]["perplexity"]
        assert (better - student) / (better - teacher) >= 0.5, "at least half of the gap is closed"
