"""State files whose checksums hold and whose values cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import state_files as files
import torch
from border_cases import Case, Place, Words, add_each, case
from safetensors.torch import load_file, save_file

STATES: list[Case] = []
Change = Callable[[dict[str, Any]], object]


def _resume(run: Path) -> Words:
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


def _resealed(checkpoint: Path, change: Change) -> None:
    def changed(state: dict[str, Any]) -> dict[str, Any]:
        change(state)
        return state

    files.edit(checkpoint / "state.json", changed)
    files.reseal(checkpoint)


def _all_resealed(place: Place, change: Change) -> Words:
    run = place.run()
    for checkpoint in files.checkpoints(run):
        _resealed(checkpoint, change)
    return _resume(run)


add_each(
    STATES,
    25,
    {
        "state_counter_is_text": lambda state: state["state"].update(cursor="text"),
        "state_counter_is_infinite": lambda state: state["state"].update(tokens=float("inf")),
        "state_counter_is_negative": lambda state: state["state"].update(attempted=-5),
        "state_counter_has_400_digits": lambda state: state["state"].update(seconds=10**400),
        "state_counter_is_unknown": lambda state: state["state"].update(weights_of="nothing"),
        "state_counter_is_missing": lambda state: state["state"].pop("applied"),
        "state_counters_are_a_list": lambda state: state.update(state=[1]),
        "state_of_another_step": lambda state: state["state"].update(applied=7),
        "state_guard_is_a_number": lambda state: state.update(guard=3.5),
        "state_guard_losses_are_a_list": lambda state: state["guard"]["windows"].update(losses=[]),
        "state_precision_is_empty": lambda state: state.update(precision={}),
        "state_scale_is_zero": lambda state: state["precision"].update(scale=0.0),
        "state_before_is_a_list": lambda state: state.update(before=[]),
        "state_events_are_text": lambda state: state.update(events="many"),
        "state_processes_are_none": lambda state: state.update(processes=0),
    },
    _all_resealed,
    "state.json",
)


@case(STATES, 0)
def state_of_the_newest_is_wrong_and_an_older_one_is_sound(place: Place) -> Words:
    run = place.run()
    _resealed(files.checkpoints(run)[0], lambda state: state.update(num_updates="text"))
    return _resume(run)


@case(STATES, 25, "optimizer")
def state_tensor_would_be_broadcast(place: Place) -> Words:
    run = place.run()
    for checkpoint in files.checkpoints(run):
        path = checkpoint / "optimizer.safetensors"
        tensors = dict(load_file(path))
        name = max(tensors, key=lambda one: tensors[one].numel())
        save_file({**tensors, name: tensors[name].reshape(-1)[:1].clone()}, path)
        files.reseal(checkpoint)
    return _resume(run)


def _mark(place: Place, change: Change) -> Words:
    run = place.run()
    path = files.note_rollback(run)
    note = json.loads(path.read_bytes())
    change(note)
    path.write_text(json.dumps(note))
    return _resume(run)


add_each(
    STATES,
    25,
    {
        "rollback_without_history": lambda note: note.update(history={}),
        "rollback_to_infinity": lambda note: note.update(to=float("inf")),
        "rollback_with_a_guard_of_text": lambda note: note["history"].update(guard="text"),
        "rollback_with_a_counter_of_text": lambda note: note["history"]["state"].update(best_step="text"),
    },
    _mark,
    "rollback",
)


def _window(place: Place, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Words:
    """Replay a quarantined window of two rows, written as a run writes it and then changed."""
    run = place.run(is_finished=True)
    ids = torch.arange(16).reshape(2, 8)
    names = ("input_ids", "attention_mask", "targets", "target_bytes")
    tensors = {f"0.{name}": ids.clone() for name in names}
    tensors["0.attention_mask"] = torch.ones_like(ids)
    facts: dict[str, Any] = {
        "step": 1,
        "attempt": 1,
        "verdict": {"action": "skip", "reason": "a NaN"},
        "located": "",
        "evidence": {"loss": None, "grad_norm": 1.0},
        "batches": [{"sample_ids": ["a", "b"], "index": 0, "text": ["a", "b"]}],
    }
    change(facts, tensors)
    path = run / "quarantine" / "step-000001-attempt-000001"
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(facts))
    save_file(tensors, path.with_suffix(".safetensors"))
    return ["replay", str(run), "1", "--device", "cpu"]


add_each(STATES, 0, {"window_as_it_was_written": lambda facts, tensors: None}, _window)
add_each(
    STATES,
    2,
    {
        "window_verdict_is_a_number": lambda facts, tensors: facts.update(verdict=7),
        "window_without_its_place": lambda facts, tensors: facts.pop("located"),
        "window_evidence_is_text": lambda facts, tensors: facts["evidence"].update(loss="low"),
        "window_text_is_a_number": lambda facts, tensors: facts["batches"][0].update(text=7),
        "window_without_batches": lambda facts, tensors: facts.update(batches=[]),
        "window_with_too_few_names": lambda facts, tensors: facts["batches"][0].update(sample_ids=["a"]),
        "window_tokens_beyond_the_vocabulary": lambda facts, tensors: tensors["0.input_ids"].add_(10**6),
        "window_tokens_negative": lambda facts, tensors: tensors["0.input_ids"].sub_(99),
        "window_tokens_are_fractions": lambda facts, tensors: tensors.update(
            {"0.input_ids": tensors["0.input_ids"].float()}
        ),
        "window_targets_in_one_row": lambda facts, tensors: tensors.update({"0.targets": tensors["0.targets"][0]}),
    },
    _window,
    "batch",
)
