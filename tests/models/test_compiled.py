"""Laws of compiled bodies: the same losses, few shapes, and a plain body where compiling fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.models import compile
from stillroom.models.compile import CompiledBody
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.models import what_to_compile


def body(notes: list[str], backend: str = "eager") -> tuple[Any, CompiledBody]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    return model, CompiledBody(model, "student", notes.append, backend=backend)


def plain(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def test_lengths_of_one_bucket_are_one_shape_and_answer_as_the_plain_body() -> None:
    notes: list[str] = []
    model, compiled_body = body(notes)
    for length in (3, 33, 64):
        ids = torch.randint(0, 64, (2, length))
        torch.testing.assert_close(compiled_body(ids), plain(model, ids), rtol=1e-5, atol=1e-6)
    assert len(notes) == 1 and "2 rows of 64" in notes[0]
    compiled_body(torch.randint(0, 64, (2, 65)))
    assert len(notes) == 2 and "2 rows of 128" in notes[1]


def test_more_shapes_than_a_run_should_have_are_not_compiled_and_said_to_be_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(compile, "_MAX_SHAPES", 2)
    notes: list[str] = []
    model, compiled_body = body(notes)
    for rows in (1, 2, 3, 4, 3):
        ids = torch.randint(0, 64, (rows, 8))
        torch.testing.assert_close(compiled_body(ids), plain(model, ids), rtol=1e-5, atol=1e-6)
    assert [note.split(",")[0] for note in notes] == [
        "compile: student",
        "compile: student",
        "compile: the student meets more than 2 shapes",
    ]


def test_a_body_that_does_not_compile_runs_as_it_is_and_says_so() -> None:
    notes: list[str] = []

    def fails(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    model, compiled_body = body(notes, backend=fails)  # type: ignore[arg-type]
    ids = torch.randint(0, 64, (2, 8))
    for _ in range(2):
        torch.testing.assert_close(compiled_body(ids), plain(model, ids))
    assert len(notes) == 1 and "runs as it is" in notes[0] and "\n" not in notes[0]


def test_a_compiled_body_that_answers_otherwise_is_not_used() -> None:
    notes: list[str] = []

    def wrong(graph: Any, _inputs: Any) -> Any:
        return lambda *args: tuple(one * 1.5 if one.is_floating_point() else one for one in graph(*args))

    model, compiled_body = body(notes, backend=wrong)  # type: ignore[arg-type]
    ids = torch.randint(0, 64, (2, 8))
    torch.testing.assert_close(compiled_body(ids), plain(model, ids))
    assert len(notes) == 1 and "differs by" in notes[0]


def test_auto_compiles_long_runs_on_a_cpu_only() -> None:
    assert what_to_compile("auto", "cpu", 1e13) == "off"
    assert what_to_compile("auto", "cpu", 1e15) == "student"
    assert what_to_compile("auto", "cuda", 1e15) == "off"
    assert what_to_compile("auto", "cuda", 1e17) == "both"
    assert what_to_compile("auto", "cuda", 1e17, (6, 0)) == "off", "inductor does not serve it"
    assert what_to_compile("auto", "mps", 1e18) == "off"
    assert what_to_compile("both", "cuda", 0.0) == "both"


def test_half_precision_on_a_cpu_is_not_compiled(world: Path, tmp_path: Path) -> None:
    over = tiny.settings(world, train__max_steps=2, train__compile="student", precision__mode="fp16-mixed")
    distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    notes = [event["text"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "note"]
    assert [note for note in notes if note.startswith("compile")] == [
        "compile: off, because FP16 products are emulated on a CPU"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["student", "both"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(world: Path, tmp_path: Path, mode: str) -> None:
    losses = {}
    for name in ("off", mode):
        over = tiny.settings(world, train__max_steps=12, train__compile=name)
        distill(load_config(overrides=over), tmp_path / name, device="cpu")
        events = list(read_events(tmp_path / name / "events.jsonl"))
        losses[name] = [event["train_loss"] for event in events if event["event"] == "step"]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any(note.startswith("compile: student, ") for note in notes)
    assert any(note.startswith("compile: teacher, ") for note in notes) == (mode == "both")
    assert losses[mode] == pytest.approx(losses["off"], rel=1e-5)


def test_half_products_under_autocast_may_differ_by_their_rounding() -> None:
    """A body whose states are FP32 and whose products are BF16 differs from itself compiled by BF16's rounding."""
    network, states = torch.nn.Linear(2, 2), torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compile.compare(lambda: states * 1.01, lambda: states, network, states)[1]
        assert not compile.compare(lambda: states * 1.2, lambda: states, network, states)[1]
    assert not compile.compare(lambda: states * 1.01, lambda: states, network, states)[1]
