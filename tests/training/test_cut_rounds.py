"""Laws of students that are cut in rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file

from stillroom.config import Config, load_config
from stillroom.core.errors import ConfigError, InputsChanged, Interrupted
from stillroom.doctor.plan.plan import find_target, make_plan
from stillroom.export.card import Origin
from stillroom.telemetry import read_events
from stillroom.training import cut_rounds
from stillroom.training.cut_rounds import folder_of, last_round, of_round
from stillroom.training.distill import distill, resume, steps

STEPS = 6  # of which the first round has three


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of six layers, and its text."""
    folder = tmp_path_factory.mktemp("deep")
    tiny.save_trained(folder / "teacher", width=32, num_layers=6, steps=40)
    tiny.save_text(folder / "train.jsonl")
    return folder


def settings(deep: Path, **over: Any) -> Config:
    base = {**tiny.settings(deep), "student.init": "shrink", "student.shrink.layers": 2, "student.shrink.rounds": 2}
    base |= {
        "student.shrink.method": "even",
        "student.model": "builtin:student",
        "objectives.layerwise.weight": 0.1,
        "train.max_steps": STEPS,
    }
    return load_config(overrides={**base, **{key.replace("__", "."): value for key, value in over.items()}})


@pytest.fixture(scope="module")
def whole(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distill(settings(deep), tmp_path_factory.mktemp("whole") / "run", device="cpu").folder


def is_same_student(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(run / "student" / "model.safetensors") for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def notes_of(folder: Path) -> str:
    return " ".join(event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note")


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def cut_of(folder: Path) -> list[int]:
    layers: list[int] = json.loads((folder / "cut.json").read_text(encoding="utf-8"))["layers"]
    return layers


# -- what a round is -------------------------------------------------------------------------------------


def test_sizes_fall_evenly_and_all_rounds_together_have_the_steps(deep: Path, tmp_path: Path) -> None:
    wanted = settings(deep, student__shrink__rounds=3, train__max_steps=13, student__shrink__heads=2)
    for number in (1, 2):  # so that the next round knows which layers are left
        folder_of(tmp_path, number).mkdir(parents=True)
        kept = list(range(6 - number))
        (folder_of(tmp_path, number) / "cut.json").write_text(
            json.dumps({"layers": kept, "of": 7 - number, "method": "loss", "why": []}), encoding="utf-8"
        )
    each = [of_round(wanted, tmp_path, number) for number in (1, 2, 3)]
    assert [one.student.shrink.layers for one in each] == [5, 4, 2]
    assert [one.student.shrink.rounds for one in each] == [1, 1, 1]
    assert [one.train.max_steps for one in each] == [3, 3, 7] and sum(one.train.max_steps for one in each) == 13
    assert [len(one.student.shrink.of_layers) for one in each] == [0, 5, 4]
    assert len({one.train.seed for one in each}) == 3 and each[-1].train.seed == wanted.train.seed
    assert [one.eval for one in each[-1:]] == [wanted.eval] and all(one.data == wanted.data for one in each)
    by_epochs = settings(deep, student__shrink__rounds=3, train__max_steps=0, train__epochs=2.0)
    epochs = [of_round(by_epochs, tmp_path, number).train.epochs for number in (1, 2, 3)]
    assert epochs == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    "over",
    [
        {"student__shrink__layers": [0, 2]},
        {"student__shrink__layers": 0},
        {"student__shrink__of_layers": [0, 1]},
        {"student__shrink__rounds": 6},
    ],
)
def test_rounds_that_mean_nothing_are_refused(deep: Path, over: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rounds"):
        settings(deep, **over)


def test_too_few_steps_are_refused_and_leave_nothing(deep: Path, tmp_path: Path) -> None:
    with refused(ConfigError, "student.shrink.rounds"):
        distill(settings(deep, train__max_steps=1), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_one_round_is_a_run_without_rounds(deep: Path, tmp_path: Path) -> None:
    plain = settings(deep, student__shrink__rounds=1, train__max_steps=1)
    assert last_round(plain, tmp_path) is plain
    assert not (distill(plain, tmp_path / "run", device="cpu").folder / "rounds").exists()


# -- runs ------------------------------------------------------------------------------------------------


def test_the_last_round_cuts_the_student_of_the_one_before(whole: Path) -> None:
    first = folder_of(whole, 1)
    assert summary_of(first)["steps"] + summary_of(whole)["steps"] == STEPS
    assert len(cut_of(first)) == 4 and len(cut_of(whole)) == 2
    kept = [cut_of(first)[layer] for layer in cut_of(whole)]
    assert kept != cut_of(whole), "the numbers of a layer in the teacher and in the student before differ"
    pairs = ", ".join(f"{place} to {layer}" for place, layer in enumerate(kept))
    assert pairs in notes_of(whole), "each layer is compared with the teacher's layer that it once was"
    assert "round 1 of 2: 3 steps" in notes_of(whole) and "cut from an earlier student's float32" in notes_of(whole)
    before, after = (load_file(folder / "student" / "model.safetensors") for folder in (first, whole))
    assert before["model.embed_tokens.weight"].shape == after["model.embed_tokens.weight"].shape
    assert not (first / "checkpoints").exists(), "they would take the disk of another run"
    start = next(event for event in read_events(whole / "events.jsonl") if event["event"] == "run_start")
    assert start["teacher"]["layers"] == 6 and start["student"]["layers"] == 2


def stop_after(number: int, config: Config, folder: Path) -> Interrupted:
    """Stop a run after so many steps, counted over its rounds."""
    taken = steps(config, folder, device="cpu")
    for _ in range(number):
        step = next(taken)
    step.stop()
    with pytest.raises(Interrupted) as caught:
        next(taken)
    return caught.value


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_run_that_is_stopped_in_any_round_resumes_to_the_same_student(
    deep: Path, whole: Path, tmp_path: Path, number: int
) -> None:
    """After step 1 of the first round, after its last step, and after step 1 of the last round."""
    error = stop_after(number, settings(deep), tmp_path / "parts")
    assert all("rounds" not in one for one in error.advice) and (tmp_path / "parts" / "checkpoints").exists() == (
        number > 3
    )
    again = resume(tmp_path / "parts", device="cpu")
    assert is_same_student(again.folder, whole) and is_same_student(folder_of(again.folder, 1), folder_of(whole, 1))
    assert again.summary["student"]["perplexity"] == summary_of(whole)["student"]["perplexity"]
    assert cut_of(again.folder) == cut_of(whole)


def test_a_run_that_is_killed_between_rounds_resumes_to_the_same_student(
    deep: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def killed(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cut_rounds, "told", killed)  # the last thing of a round
        with pytest.raises(KeyboardInterrupt):
            distill(settings(deep), tmp_path / "parts", device="cpu")
    tell = lambda event: heard.append(str(event.get("text")))  # noqa: E731
    again = distill(settings(deep), tmp_path / "parts", device="cpu", listeners=(tell,))
    assert is_same_student(again.folder, whole) and not any("round 1 of 2, in" in text for text in heard)
    assert any("round 2 of 2, in" in text for text in heard)


def test_another_student_of_the_round_before_is_refused(deep: Path, tmp_path: Path) -> None:
    stop_after(4, settings(deep), tmp_path / "run")
    weights = folder_of(tmp_path / "run", 1) / "student" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    with pytest.raises(InputsChanged):
        resume(tmp_path / "run", device="cpu")


def test_a_finished_run_is_not_trained_again_and_not_for_longer(whole: Path) -> None:
    assert resume(whole, device="cpu").already_finished
    with refused(ConfigError, "max_steps"):
        resume(whole, device="cpu", max_steps=20)


def test_the_plan_is_that_of_the_largest_student_and_the_card_names_the_rounds(deep: Path) -> None:
    target = find_target("cpu")
    plan = make_plan(settings(deep), target, is_quick=True)
    alone = make_plan(settings(deep, student__shrink__rounds=1, student__shrink__layers=4), target, is_quick=True)
    assert plan.layout.total == alone.layout.total and plan.cost.steps == STEPS
    assert any("rounds" in note for note in plan.notes) and not any("rounds" in note for note in alone.notes)
    assert "in 2 rounds" in Origin.of(settings(deep).to_dict()).words
