"""Folders of runs that were damaged, cut short, or are no runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tiny
from border_cases import Case, Place, Words, add_each, case

RUNS: list[Case] = []


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def _resume(place: Place, named: tuple[str, str | bytes]) -> Words:
    name, content = named
    run = place.run()
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    2,
    {
        "run_config_empty": ("config.json", ""),
        "run_config_broken": ("config.json", "{"),
        "run_config_is_a_list": ("config.json", "[]"),
        "run_config_without_a_config": ("config.json", "{}"),
        "run_config_of_another_version": ("config.json", '{"config": {"nosuch": 1}}'),
        "run_config_latin_1": ("config.json", b'{"config": "\xe9"}'),
        "run_config_binary": ("config.json", bytes(range(256))),
    },
    _resume,
)


def _all_checkpoints(place: Place, damage: tuple[str, bytes | None]) -> Words:
    run = place.run()
    name, content = damage
    for path in (run / "checkpoints").glob("step-*"):
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    25,
    {
        "checkpoints_all_without_manifest": ("manifest.json", None),
        "checkpoints_all_with_an_empty_manifest": ("manifest.json", b""),
        "checkpoints_all_with_a_broken_manifest": ("manifest.json", b"{"),
        "checkpoints_all_with_a_list": ("manifest.json", b"[]"),
        "checkpoints_all_with_no_fields": ("manifest.json", b"{}"),
        "checkpoints_all_of_another_format": ("manifest.json", b'{"format": 99, "files": {}, "step": 1}'),
        "checkpoints_all_with_files_of_no_kind": ("manifest.json", b'{"format": 1, "files": 7, "step": 1}'),
        "checkpoints_all_with_files_outside": (
            "manifest.json",
            b'{"format": 1, "files": {"../../config.json": {"sha256": "0"}}, "step": 1}',
        ),
        "checkpoints_all_without_weights": ("student.safetensors", None),
        "checkpoints_all_with_empty_weights": ("student.safetensors", b""),
        "checkpoints_all_with_other_state": ("state.json", b"{}"),
    },
    _all_checkpoints,
)


def _newest_checkpoint(place: Place, damage: tuple[str, bytes | None]) -> Words:
    run = place.run()
    name, content = damage
    path = newest(run) / name
    if content is None:
        content = path.read_bytes()
        content = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(content)
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    0,
    {
        "checkpoint_newest_with_a_flipped_bit": ("student.safetensors", None),
        "checkpoint_newest_truncated": ("optimizer.safetensors", b"12345678"),
        "checkpoint_newest_without_fields": ("manifest.json", b"{}"),
        "checkpoint_newest_with_a_list": ("manifest.json", b"[1]"),
    },
    _newest_checkpoint,
)


@case(RUNS, (0, 25))
def checkpoints_are_a_file(place: Place) -> Words:
    run = place.run()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("no folder")
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


@case(RUNS, 25)
def checkpoints_with_a_sealed_state_that_lacks_fields(place: Place) -> Words:
    """Every sum holds, and what was sealed is not a state."""
    import hashlib

    run = place.run()
    for path in (run / "checkpoints").glob("step-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "state.json").write_text("{}")
        manifest["files"]["state.json"]["sha256"] = hashlib.sha256(b"{}").hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


def _summary(place: Place, content: bytes) -> Words:
    run = place.run(is_finished=True)
    (run / "summary.json").write_bytes(content)
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    (0, 2, 25),
    {
        "summary_empty": b"",
        "summary_broken": b"{",
        "summary_is_a_list": b"[]",
        "summary_binary": bytes(range(256)),
    },
    _summary,
)


def _events(place: Place, content: bytes) -> Words:
    run = place.run(is_finished=True)
    (run / "events.jsonl").write_bytes(content)
    return ["report", str(run)]


add_each(
    RUNS,
    (0, 2),
    {
        "events_empty": b"",
        "events_binary": bytes(range(256)) * 32,
        "events_broken": b'{"event": "step"\n{"event": \n',
        "events_of_numbers": b"1\n2\n",
        "events_without_fields": b'{"event": "step"}\n{"event": "eval"}\n{"event": "run_start"}\n',
        "events_of_unknown_kinds": b'{"event": "nosuch"}\n{"noevent": 1}\n',
        "events_nested_deeply": b"[" * 100_000 + b"\n",
        "events_with_text_for_numbers": b'{"event": "step", "step": "one", "train_loss": "low"}\n',
    },
    _events,
)


@case(RUNS, (0, 2, 25))
def resume_with_torn_events(place: Place) -> Words:
    run = place.run()
    events = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(events[: len(events) // 2])
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


@case(RUNS, (0, 2, 25))
def resume_with_binary_events(place: Place) -> Words:
    run = place.run()
    (run / "events.jsonl").write_bytes(bytes(range(256)) * 8)
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    2,
    {
        "resume_of_nothing": ["resume", "nowhere"],
        "resume_of_no_run": ["resume", "."],
        "resume_of_a_file": ["resume", "{run}/config.json"],
        "report_of_nothing": ["report", "nowhere"],
        "report_of_no_run": ["report", "."],
        "replay_of_nothing": ["replay", "nowhere", "1"],
        "replay_of_a_step_that_was_kept": ["replay", "{run}", "1"],
        "replay_of_a_negative_step": ["replay", "{run}", "--", "-1"],
        "replay_of_a_word": ["replay", "{run}", "soon"],
    },
    lambda place, words: [word.format(run=place.run(is_finished=True)) if "{" in word else word for word in words],
)


def _quarantine(place: Place, content: bytes) -> Words:
    run = place.run(is_finished=True)
    (run / "quarantine").mkdir(exist_ok=True)
    (run / "quarantine" / "step-000001.json").write_bytes(b'{"step": 1}')
    (run / "quarantine" / "step-000001.safetensors").write_bytes(content)
    return ["replay", str(run), "1", "--device", "cpu"]


add_each(
    RUNS,
    (2, 25),
    {
        "quarantined_batch_empty": b"",
        "quarantined_batch_garbage": b"12345678abcdefgh",
        "quarantined_batch_without_tensors": b"\x02\0\0\0\0\0\0\0{}",
    },
    _quarantine,
)


# -- a run whose world has changed -----------------------------------------------------------------------


def _pointing(run: Path, **settings: object) -> Words:
    """Resume a run whose configuration names other inputs than it began with."""
    path = run / "config.json"
    told = json.loads(path.read_text())
    for key, value in settings.items():
        section, name = key.split("__")
        told["config"][section][name] = value
        told["paths"].pop(f"{section}.{name}", None)
    path.write_text(json.dumps(told))
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


def _changed_text(place: Place, change: Callable[[list[str]], list[str]]) -> Words:
    path = place.copied("train.jsonl")
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    return _pointing(place.run(), data__train=str(path))


add_each(
    RUNS,
    25,
    {
        "resume_with_a_record_more": lambda lines: [*lines, '{"text": "one more than there were before"}'],
        "resume_with_a_record_less": lambda lines: lines[1:],
        "resume_with_records_in_another_order": lambda lines: lines[::-1],
        "resume_with_a_record_twice": lambda lines: [*lines, lines[0]],
        "resume_with_one_word_changed": lambda lines: [lines[0].replace("the", "thy"), *lines[1:]],
    },
    _changed_text,
    says="--accept-changed-inputs",
)


@case(RUNS, 25, "--accept-changed-inputs")
def resume_with_a_file_more_in_the_folder(place: Place) -> Words:
    (place.folder / "data").mkdir()
    place.copied("train.jsonl", "data/0.jsonl")
    place.copied("train.jsonl", "data/1.jsonl")
    return _pointing(place.run(), data__train=str(place.folder / "data"))


def _changed_model(place: Place, changed: tuple[str, str, bytes | None]) -> Words:
    role, name, content = changed
    path = place.copied(role) / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x01" if content is None else content)
    return _pointing(place.run(), **{f"{role}__model": str(path.parent)})


add_each(
    RUNS,
    25,
    {
        "resume_with_a_byte_of_the_teacher_changed": ("teacher", "model.safetensors", None),
        "resume_with_a_byte_of_the_student_changed": ("student", "model.safetensors", None),
    },
    _changed_model,
    says="--accept-changed-inputs",
)
add_each(
    RUNS,
    (20, 25),
    {
        "resume_with_an_empty_teacher": ("teacher", "model.safetensors", b""),
        "resume_with_a_student_that_has_no_configuration": ("student", "config.json", b"{}"),
        "resume_with_a_teacher_that_is_no_json": ("teacher", "config.json", b"\xff\xfe"),
    },
    _changed_model,
)


@case(RUNS, 25, "--accept-changed-inputs")
def resume_with_teacher_and_student_exchanged(place: Place) -> Words:
    return _pointing(
        place.run(), teacher__model=str(place.world / "student"), student__model=str(place.world / "teacher")
    )


@case(RUNS, 0)
def resume_with_a_record_more_that_is_accepted(place: Place) -> Words:
    return [*_changed_text(place, lambda lines: [*lines, '{"text": "one more"}']), "--accept-changed-inputs"]


@case(RUNS, 25)
def resume_with_a_student_of_another_shape_that_is_accepted(place: Place) -> Words:
    """What is accepted must still fit the checkpoint."""
    tiny.save_model(place.folder / "student", width=16, num_layers=1)
    return [*_pointing(place.run(), student__model=str(place.folder / "student")), "--accept-changed-inputs"]


@case(RUNS, (2, 20))
def resume_with_data_that_is_gone(place: Place) -> Words:
    return _pointing(place.run(), data__train=str(place.folder / "gone.jsonl"))


@case(RUNS, 0)
def resume_of_a_finished_run_whose_data_is_gone(place: Place) -> Words:
    """Nothing is read again: it is finished."""
    return _pointing(place.run(is_finished=True), data__train=str(place.folder / "gone.jsonl"))


add_each(
    RUNS,
    2,
    {
        "day_of_no_calendar": "2026-02-30",
        "day_that_is_a_word": "yesterday",
        "day_that_is_a_number": 7,
    },
    lambda place, day: place.distill(data__day=day),
    says="data.day",
)


def _stored_inputs(place: Place, inputs: object) -> Words:
    """A sealed checkpoint whose record of its inputs is of another type."""
    import hashlib

    run = place.run()
    for path in (run / "checkpoints").glob("step-*"):
        state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "manifest.json"))
        contents = json.dumps({**state, "inputs": inputs}).encode()
        (path / "state.json").write_bytes(contents)
        manifest["files"]["state.json"]["sha256"] = hashlib.sha256(contents).hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))
    return ["resume", str(run), "--device", "cpu", "--no-progress"]


add_each(
    RUNS,
    25,
    {
        "checkpoints_with_inputs_of_another_type": 7,
        "checkpoints_with_an_input_of_another_type": {"train": [1]},
        "checkpoints_with_a_count_of_another_type": {"train": {"documents": "many", "digest": 3}},
        "checkpoints_with_inputs_nested": {"teacher": {"weights": {"a": 1}}},
    },
    _stored_inputs,
)
