"""The benchmark on a pretrained model: its prompts, texts and plans, the order of its jobs, and what is drawn."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.builtin import Document
from stillroom.config import load_config
from stillroom.training.distill import distill

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "real"))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import arms
import bench_real
import budget
import draw_real
import place
import prompts
import text_files

figures: Any = importlib.import_module("figures")
TRAINED = [name for name, arm in arms.ARMS.items() if arm.is_trained]
TINY = {"student.shrink.layers": 1, "student.shrink.width": 16, "student.shrink.mlp_width": 32}


# -- prompts ---------------------------------------------------------------------------------------------


def test_the_committed_prompts_are_those_of_the_script() -> None:
    made = [json.loads(line) for line in prompts.MADE.read_text(encoding="utf-8").splitlines()]
    assert made == prompts.prompts() and len(made) == 200


def test_no_prompt_is_asked_twice() -> None:
    given = [json.loads(line)["prompt"] for line in prompts.GIVEN.read_text(encoding="utf-8").splitlines()]
    asked = [*given, *(one["prompt"] for one in prompts.prompts())]
    assert len({" ".join(one.lower().split()) for one in asked}) == len(asked) == 220


def test_every_answer_is_a_word_that_its_prompt_does_not_give_away() -> None:
    for one in prompts.prompts():
        assert all(re.fullmatch(r"\w+", answer) for answer in one["answers"]), one
        assert prompts.is_right(f" {one['answers'][0]}.\nmore", one["answers"])
        assert not prompts.is_right(f"nothing of that\n{one['answers'][0]}", one["answers"])
        if one["kind"] != "code":
            assert not prompts.is_right(one["prompt"], one["answers"]), one


def test_sums_and_code_have_the_answers_that_python_gives() -> None:
    for one in prompts.prompts():
        if one["kind"] == "sum":
            assert one["answers"] == [str(eval(one["prompt"].removesuffix("=")))]
        elif code := re.fullmatch(r"In Python, (.*[)\]\d]) returns", one["prompt"]):
            assert str(eval(code[1])) == one["answers"][0]


# -- texts -----------------------------------------------------------------------------------------------


def test_a_package_is_on_one_side_and_documents_follow_it() -> None:
    documents = [Document(f"{group}.{name}", group, "text") for group in ("numpy", "json", "http") for name in "abc"]
    sides = text_files.by_side(documents)
    groups = {side: {one.group for one in found} for side, found in sides.items()}
    assert groups["train"].isdisjoint(groups["dev"] | groups["test"]) and groups["dev"].isdisjoint(groups["test"])
    assert groups["test"] >= {"numpy"} and sum(map(len, sides.values())) == len(documents)
    assert {text_files.side_of(name) for name in text_files.PACKAGES} == {"dev", "test"}


def test_texts_begin_with_long_paragraphs_each_once() -> None:
    long = "word " * 60
    found = text_files.paragraphs([Document("a", "a", f"{long}\n\nshort\n \n{long}"), Document("b", "b", long)])
    assert [one.text.strip() for one in found] == [long.strip()]


def test_stories_have_places_and_messages_in_sentence_case_and_no_tables() -> None:
    data = (
        "1\n1\tYOU ARE AT A ROAD.  I SEE\n1\tA HILL.\n2\tDEAD END\n-1\tEND\n2\n1\tSHORT\n-1\n6\n1\tWHO IS THERE?\n-1\n"
    )
    found = text_files.story_documents(data)
    assert [one.text for one in found] == ["You are at a road. I see a hill.\n\nDead end", "Who is there?"]


# -- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", arms.SCALES.values(), ids=lambda scale: scale.name)
def test_all_arms_and_trials_fit_into_the_hours(scale: Any) -> None:
    seconds = budget.arm_seconds(scale, scale.hours, 2)
    trained = [arms.ARMS[name] for name, _seed in arms.order(scale) if arms.ARMS[name].is_trained]
    rates = len(arms.trials()) * scale.num_rates
    spent = seconds * (sum(arm.share for arm in trained) + rates * scale.trial_share)
    assert 0 < spent + scale.arm_overhead * len(trained) <= 2 * 3600 * scale.hours


def test_hours_that_loading_takes_are_refused() -> None:
    with pytest.raises(SystemExit, match="hours"):
        budget.arm_seconds(arms.NIGHT, 0.1, 1)


def test_steps_take_the_seconds_that_are_left() -> None:
    assert budget.planned_steps(100.0, 7.0) == 14
    assert budget.planned_steps(100.0, 7.0, spent=31.0) == 9
    assert budget.planned_steps(1.0, 7.0, least=4) == 4
    tokens = budget.stored_tokens(100.0, 0.002, 0.004, 2.0)
    assert tokens * 0.002 + 2 * tokens * 0.004 == pytest.approx(100.0)


def test_a_trial_ends_when_the_best_rate_lies_between_two_worse_ones() -> None:
    first = (1e-3, 5e-4, 2e-3)
    assert budget.next_rate({}, first, 2) == 1e-3
    assert budget.next_rate({1e-3: 1.0, 5e-4: 1.1, 2e-3: 1.2}, first, 2) is None
    assert budget.next_rate({1e-3: 1.1, 5e-4: 1.2, 2e-3: 1.0}, first, 2) == 4e-3
    assert budget.next_rate({1e-3: 1.1, 5e-4: 1.0, 2e-3: 1.2}, first, 2) == 2.5e-4
    rising = {5e-4: 1.3, 1e-3: 1.2, 2e-3: 1.1, 4e-3: 1.0, 8e-3: 0.9}
    assert budget.next_rate(rising, first, 2) is None and not budget.is_bracketed(rising)


def test_no_arm_is_trained_before_its_rate_is_chosen_and_its_base_is_there(tmp_path: Path) -> None:
    results = draw_real.Results(tmp_path)
    jobs = dict(bench_real.wanted_jobs(arms.NIGHT, results, set()))
    for name, seed in arms.order(arms.NIGHT):
        arm, needs = arms.ARMS[name], jobs["arm", name, seed]
        assert ("text", "all") in needs
        assert not arm.is_trained or ("timing", name) in needs
        assert not arm.trial or ("rate", arm.trial) in needs
        assert not arm.base or ("arm", arm.base, 0) in needs
    assert sum(job[:2] == ("arm", "kl") for job in jobs) == arms.NIGHT.seeds
    few = {job[:2] for job, _needs in bench_real.wanted_jobs(arms.NIGHT, results, {"plain"})}
    assert ("trial", "plain") in few and not few & {("arm", "kl"), ("trial", "kl"), ("file", "best")}


# -- arms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "best", "narrow-kl"])
def test_the_settings_of_an_arm_train_a_student(world: Path, tmp_path: Path, name: str) -> None:
    asked = {**tiny.settings(world), **arms.SHARED, **arms.ARMS[name].settings, "train.max_steps": 2}
    asked |= {key: value for key, value in TINY.items() if key in asked}
    asked |= {"train.eval_steps": 2, "train.save_steps": 2, "data.max_length": 32}
    del asked["student.model"]
    summary = distill(load_config(overrides=asked), tmp_path / "run", device="cpu").summary
    assert summary["status"] == "done" and summary["steps"] == 2


@pytest.mark.parametrize("name", TRAINED)
def test_the_settings_of_every_arm_are_a_configuration(name: str) -> None:
    arm = arms.ARMS[name]
    shared = {} if arm.base else arms.SHARED
    load_config(overrides={**shared, "data.max_length": arms.LENGTH, **arm.settings})


# -- drawing ---------------------------------------------------------------------------------------------


def record(name: str, seed: int, bits: float, **more: Any) -> dict[str, Any]:
    """A file of an arm: twenty documents of 100 bytes in each text."""
    arm = arms.ARMS[name]
    text = {
        "bits_per_byte": bits, "interval": [bits - 0.1, bits + 0.1], "tokens": 500, "sha256": "0" * 64,
        "documents": {f"d{number}": [100 * (bits + 0.001 * number) * 0.6931471805599453, 100] for number in range(20)},
    }  # fmt: skip
    answers = [{"prompt": f"p{n}", "text": "t | `x`", "is_right": n < 10 * (3 - bits)} for n in range(20)]
    machine = {"processor": "p", "cores": 2, "python": "3", "versions": {"torch": "2", "transformers": "5"}}
    made = {
        "arm": name, "label": arm.label, "student": arm.student, "seed": seed, "parameters": 100, "answers": answers,
        "dev_bits_per_byte": bits, "machine": machine, **{one: dict(text) for one in draw_real.TEXTS},
    }  # fmt: skip
    if arm.is_trained:
        made |= {
            "status": "done", "steps": 9, "tokens": 9000, "learning_rate": 1e-3, "skipped": 0, "peak_gigabytes": 1.0,
            "cpu_seconds": {"steps": 100.0}, "planned_cpu_seconds": 101.0,
            "curve": [{"cpu_seconds": s, "step": s, "bits_per_byte": bits + 1 / (s + 1)} for s in (0, 50, 100)],
        }  # fmt: skip
    return {**made, **more}


@pytest.fixture
def results(tmp_path: Path) -> Any:
    """A few arms, in the folder of the repository that the figures of a page name."""
    folder = tmp_path / "benchmarks" / "real" / "results"
    made = draw_real.Results(folder)
    plan = {"scale": "night", "hours": 8.0, "workers": 2, "arm_cpu_seconds": 101.0}
    files = {folder / "plan.json": plan}
    values = {"teacher": 1.0, "cut": 3.0, "kl": 1.5, "plain": 1.7}
    for name, bits in values.items():
        for seed in range(2 if arms.ARMS[name].is_main else 1):
            files[made.file(("arm", name, seed))] = record(name, seed, bits + 0.01 * seed)
    for rate, bits in ((5e-4, 1.9), (1e-3, 1.8)):
        files[made.file(("trial", "kl", rate))] = {"arm": "kl", "rate": rate, "dev_bits_per_byte": bits}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return made


def test_every_figure_of_the_page_is_that_of_its_field(results: Any, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    draw_real.draw(results, tmp_path / "docs")
    text = (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")
    shown, wrong = figures.checked(text, tmp_path)
    assert wrong == [] and shown == text
    assert len(figures.MARKED.findall(text)) > 30


def test_the_page_says_what_is_missing_and_what_was_not_met(results: Any) -> None:
    told = draw_real.page(results, draw_real.figures(results), "")
    assert "seed 2" in told and "best recipe (seed 0)" in told
    assert "the highest tried" in told
    assert ">74.8<" in told, "per cent that two seeds won back"
    assert "t &#124; &#96;x&#96;" in told and "t | `x`" not in told, "text of a model is no Markdown"


def test_the_page_of_the_documentation_is_that_of_the_result_files() -> None:
    committed = draw_real.Results(bench_real.HERE / "results")
    if not (committed.folder / "plan.json").exists():
        pytest.skip("there are no results yet")
    made = draw_real.figures(committed)
    assert made == json.loads((committed.folder / "figures.json").read_text(encoding="utf-8"))
    page = (bench_real.PAGE / "results.md").read_text(encoding="utf-8")
    picture = "images/flagship.svg"  # there is none before the first arm
    assert draw_real.page(committed, made, picture if (bench_real.PAGE / picture).exists() else "") == page


def test_the_headline_is_of_the_arm_that_is_best_on_dev_text(results: Any) -> None:
    made = draw_real.figures(results)
    assert f"({arms.ARMS['kl'].label}, the best arm" in draw_real.page(results, made, "")
    made["arms"]["plain"]["dev_bits_per_byte"] = 1.2
    assert f"({arms.ARMS['plain'].label}, the best arm" in draw_real.page(results, made, "")


def test_text_that_is_missing_is_written_again_and_text_that_is_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results came from another machine, and the first arm found no text to train on."""
    parts: list[int] = []

    def write_part(_place: Any, _kind: str, number: int, out: Path) -> dict[str, Any]:
        parts.append(number)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text('{"prompt_ids": [1], "ids": [2], "prompt": "a", "completion": "b"}\n', encoding="utf-8")
        return {"tokens": 1_500, "rows": 1, "cpu_seconds": 1.0}

    monkeypatch.setattr(place.Place, "_write_part", write_part)
    here = place.Place(tmp_path, arms.SMALL)
    made = here.written("chat")
    assert parts == [0, 1] and len(made.read_text(encoding="utf-8").splitlines()) == 2
    assert here.written("chat") == made and parts == [0, 1]


def test_what_is_won_back_is_a_share_of_what_the_cut_added(results: Any) -> None:
    made = draw_real.figures(results)["arms"]
    assert made["kl"]["test"]["won_back"] == pytest.approx((0.75 + 0.745) / 2)
    assert made["kl"]["seeds"] == 2 and made["kl"]["cpu_hours"] == pytest.approx(100 / 3600)
    assert made["kl"]["answered"] == pytest.approx((15 + 15) / 40)
    assert draw_real.quality(results.arms(), "kl", 0)[-1][1] == pytest.approx(100 * (1.5 - 1 / 101) / 2)


def test_a_lead_is_paired_over_documents_and_seeds(results: Any) -> None:
    arms_done = results.arms()
    ahead = draw_real.lead(arms_done, "kl", "plain", "test")
    assert ahead["bits_per_byte"] == pytest.approx(0.2) and ahead["seeds"] == 2
    assert ahead["low"] == pytest.approx(0.2) and ahead["high"] == pytest.approx(0.2), "the same on each document"
    documents = arms_done["kl", 1]["test"]["documents"]
    for name in list(documents)[:10]:
        documents[name][0] += 100.0
    torn = draw_real.lead(arms_done, "kl", "plain", "test")
    assert torn["low"] < torn["bits_per_byte"] < torn["high"] and torn["low"] < 0 < ahead["low"]


def test_arms_judged_on_different_files_are_not_put_into_one_table(results: Any) -> None:
    path = results.file(("arm", "kl", 1))
    changed = json.loads(path.read_text(encoding="utf-8"))
    changed["far"]["sha256"] = "1" * 64
    path.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(SystemExit, match="different files of far"):
        results.arms()
