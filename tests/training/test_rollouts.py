"""Laws of runs that learn on the student's own text: rounds survive kills, rollbacks and several processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from process_jobs import commands, wait_for
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import CheckpointUnusable, ConfigError, Diverged, InputsChanged, Interrupted
from stillroom.core.types import IGNORED, ROLLOUTS
from stillroom.data.rollouts import RoundFacts, RoundStore
from stillroom.doctor.resume import differences, verify_resume
from stillroom.telemetry import read_events
from stillroom.training import rollouts as module
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop, training
from stillroom.training.rollouts import ensure_round
from stillroom.training.run import RunState
from stillroom.training.run_folder import Trust
from stillroom.training.step import attempt, train_step

# Rounds at steps 0, 3 and 6, in pieces of two answers.
OWN = {
    "rollouts.share": 0.5,
    "rollouts.every": 3,
    "rollouts.max_new_tokens": 8,
    "rollouts.prompt_tokens": 5,
    "rollouts.batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.batch_size": 2,
    "train.max_steps": 9,
    "train.save_steps": 2,
    "train.eval_steps": 9,
    "objectives.kd.weight": 0.7,
    "objectives.ce.weight": 0.3,
}
STORED = {"rollouts.answers": "stored", "rollouts.keep_rounds": 1, "objectives.kd.divergence": "reverse_kl"}


def settings(world: Path, **over: Any) -> dict[str, Any]:
    return tiny.settings(world) | OWN | {key.replace("__", "."): value for key, value in over.items()}


def config_of(world: Path, **over: Any) -> Any:
    return load_config(overrides=settings(world, **over))


def rounds(folder: Path) -> dict[int, RoundFacts]:
    store = RoundStore(folder / "rollouts")
    return {number: facts for number in store.numbers() if (facts := store.facts(number)) is not None}


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == name]


@pytest.fixture(scope="module", params=["live", "stored"])
def uncut(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run without a break, and its configuration."""
    folder = tmp_path_factory.mktemp("rollouts") / "run"
    over = {} if request.param == "live" else {key.replace(".", "__"): value for key, value in STORED.items()}
    config = config_of(world, **over)
    distill(config, folder, device="cpu")
    return folder, config


# -- what a run has -----------------------------------------------------------------------------------------


def test_a_run_writes_rounds_and_tells_them_apart_from_the_data(uncut: tuple[Path, Any]) -> None:
    folder, config = uncut
    found = rounds(folder)
    assert [one.step for one in found.values()] == [0, 3, 6]
    told = events(folder, "rollouts")
    assert [(one["round"], one["step"]) for one in told] == [(0, 0), (1, 3), (2, 6)]
    assert all(one["weights"] == found[one["round"]].weights for one in told)
    assert told[0]["served"] == 3 * 2 and sum(told[0]["ended"].values()) == told[0]["rows"] + told[0]["dropped"]
    for step in events(folder, "step"):
        own = step["sources"][ROLLOUTS]
        assert set(own) == {"targets", "kd"}, "only what the teacher says"
        assert own["targets"] < step["tokens"] and {"kd", "ce"} <= set(step["terms"])
    if config.rollouts.answers == "stored":
        store = RoundStore(folder / "rollouts")
        (first, *_) = store.read(0).rollouts
        assert first.answers is not None and first.answers.ids.shape == (len(first.ids), 48)
        assert [one["replayed"] > 0 for one in told] == [False, True, True]


def test_the_student_of_a_round_is_asked_about_its_own_tokens(make_run: Callable[..., Any]) -> None:
    """ids in = ids trained: a window has the tokens that were sealed, with their end, and prompts do not train."""
    run, state = make_run(OWN), RunState()
    ensure_round(run, state)
    assert state.round == 0
    written = {one.name: one for one in run.rollouts.store.read(0).rollouts}
    batches = [batch for index in range(3) for batch in run.loader.window(index) if batch.sources]
    assert len(batches) == 3
    for batch in batches:
        for row, name in enumerate(batch.sample_ids):
            targets = [token for token in batch.targets[row].tolist() if token != IGNORED]
            assert targets == written[name].ids
            assert batch.input_ids[row, : len(written[name].prompt)].tolist() == written[name].prompt


def test_stored_answers_are_those_of_the_live_teacher(make_run: Callable[..., Any]) -> None:
    """One temperature, exact tail: with all tokens kept the loss is that of the live teacher."""
    every = {"rollouts.answers": "stored", "rollouts.teacher_top": 320, "rollouts.student_top": 16}
    found = []
    for over in (OWN, OWN | every, OWN | STORED):
        run, state = make_run(over | {"objectives.kd.divergence": "reverse_kl"}), RunState()
        ensure_round(run, state)
        outcome = train_step(run, state, run.loader.window(0))
        found.append(outcome.evidence.sources[ROLLOUTS]["kd"])
    live, whole, few = found
    assert whole == pytest.approx(live, rel=1e-5)
    assert 0.0 < few < live, "a few tokens bound it from below"


# -- kills ---------------------------------------------------------------------------------------------------


def die(*_args: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(method: str, after: int) -> Callable[[], None]:
    """Kill the process at a call of a method of the store."""
    original, calls = getattr(RoundStore, method), []

    def counted(self: RoundStore, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            die()
        return original(self, *args, **options)

    def patch() -> None:
        setattr(RoundStore, method, counted)

    return patch


@pytest.mark.parametrize(
    ("method", "after"),
    [("keep_piece", 1), ("keep_piece", 3), ("seal", 1), ("read", 1)],
    ids=["while a round is written", "in the second round", "before sealing", "after sealing"],
)
def test_a_kill_at_any_moment_of_a_round_changes_nothing(
    uncut: tuple[Path, Any], tmp_path: Path, method: str, after: int
) -> None:
    folder, config = uncut
    patch = killed_in(method, after)

    def work() -> None:
        patch()
        distill(config, tmp_path / "run", device="cpu")

    assert tiny.in_child(work) == -9
    distill(config, tmp_path / "run", device="cpu")  # the same command goes on
    assert list(differences(folder, tmp_path / "run")) == []
    assert not list((tmp_path / "run" / "rollouts").glob("*.of-*"))


def test_a_kill_between_rounds_changes_nothing(uncut: tuple[Path, Any], tmp_path: Path) -> None:
    """Killed before step 6: the checkpoint of step 4 is in the middle of round 1, which is read again."""
    folder, config = uncut
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="kill@6")) == -9
    resume(tmp_path / "run", device="cpu")
    assert list(differences(folder, tmp_path / "run")) == []


def test_a_sealed_round_of_this_very_student_is_taken_again(uncut: tuple[Path, Any], tmp_path: Path) -> None:
    """Killed before step 8: round 2 was sealed at step 6, the run goes on from there, and does not write it again."""
    folder, config = uncut
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="kill@8")) == -9
    made = (tmp_path / "run" / "rollouts" / "round-000002" / "round.json").stat().st_mtime_ns
    resume(tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "rollouts" / "round-000002" / "round.json").stat().st_mtime_ns == made
    assert list(differences(folder, tmp_path / "run")) == []


def test_a_sealed_round_of_another_student_is_written_again(uncut: tuple[Path, Any], tmp_path: Path) -> None:
    """Killed before step 8, resumed from step 6, where round 2 is to begin: its seal names other weights."""
    folder, config = uncut
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="kill@8")) == -9
    path = tmp_path / "run" / "rollouts" / "round-000002" / "round.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": "0" * 16}))
    resume(tmp_path / "run", device="cpu")
    assert rounds(tmp_path / "run")[2].weights != "0" * 16
    assert list(differences(folder, tmp_path / "run")) == []


def test_a_request_to_stop_takes_effect_between_two_pieces(
    uncut: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = uncut
    write, calls = module._write_piece, []

    def stopped(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # in the second round
            os.kill(os.getpid(), signal.SIGTERM)
        return write(*args)

    monkeypatch.setattr(module, "_write_piece", stopped)
    with refused(Interrupted, "run"):
        distill(config, tmp_path / "run", device="cpu")
    monkeypatch.undo()
    assert len(calls) == 4 and list((tmp_path / "run" / "rollouts").glob("round-000001.of-*/piece-*"))
    resume(tmp_path / "run", device="cpu")
    assert list(differences(folder, tmp_path / "run")) == []


def test_a_changed_round_in_use_is_refused(uncut: tuple[Path, Any], tmp_path: Path) -> None:
    _folder, config = uncut
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="kill@6")) == -9
    (path, *_) = sorted((tmp_path / "run" / "rollouts" / "round-000001").glob("piece-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with refused(CheckpointUnusable, "round-000001"):
        resume(tmp_path / "run", device="cpu")


@pytest.mark.slow
def test_verify_resume_covers_rounds(world: Path) -> None:
    proof = verify_resume(config_of(world), num_steps=9, kill_at=6, device="cpu")
    assert proof.holds, proof.differences


# -- faults --------------------------------------------------------------------------------------------------


def test_a_rollback_drops_the_rounds_that_were_written_after_it(world: Path, tmp_path: Path) -> None:
    """A fault at step 8 returns to the snapshot of step 4: round 2, of step 6, is dropped and written again."""
    over = {"guard__snapshot_steps": 4, "train__save_steps": 20}
    distill(config_of(world, **over), tmp_path / "run", device="cpu", inject="nan_weight@8")
    told = events(tmp_path / "run", "rollouts")
    assert [(one["round"], one["step"], one["reused"]) for one in told] == [
        (0, 0, False), (1, 3, False), (2, 6, False), (2, 6, False),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rollbacks"] == 1 and summary["steps"] == 9
    assert any("are dropped: 2" in note["text"] for note in events(tmp_path / "run", "note"))
    distill(config_of(world, **over), tmp_path / "sound", device="cpu")
    assert rounds(tmp_path / "run")[2].pieces == rounds(tmp_path / "sound")[2].pieces


def test_a_skipped_step_keeps_the_round(world: Path, tmp_path: Path) -> None:
    distill(config_of(world), tmp_path / "run", device="cpu", inject="nan_grad@2")
    assert [one["round"] for one in events(tmp_path / "run", "rollouts")][:2] == [0, 1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["skipped"] == 1


def test_a_retry_sees_the_same_rows(make_run: Callable[..., Any]) -> None:
    """FP16 overflows at first: the window is tried again at a smaller scale, and has the same keys."""
    run, state = make_run(OWN | {"precision.mode": "fp16-mixed"}), RunState()
    run.precision.start_at(2.0**24)
    keys, actions = [], []
    for _ in range(3):
        ensure_round(run, state)
        window = run.loader.window(state.cursor)
        keys.append([batch.keys for batch in window])
        actions.append(train_step(run, state, window).verdict.action)
        if actions[-1] == "keep":
            break
    assert actions[0] == "retry" and keys[0] == keys[1] and state.round == 0


def test_a_bad_teacher_moves_nothing_on_rollouts_alone(make_run: Callable[..., Any]) -> None:
    """All rows are the student's own and the teacher answers NaN: no gradient, and it is counted."""
    run, state = make_run(OWN | {"rollouts.share": 1.0}), RunState()
    ensure_round(run, state)
    observe = run.teacher.observe

    def broken(batch: Any, needs: Any) -> Any:
        signal = observe(batch, needs)
        signal.hidden.fill_(float("nan"))
        return signal

    run.teacher.observe = broken
    evidence, _weights = attempt(run, state, run.loader.window(state.cursor))
    assert evidence.grad_norm == 0.0 and evidence.loss == 0.0
    assert evidence.bad_teacher_rows == evidence.num_targets


def test_a_student_that_writes_nothing_usable_ends_the_run(make_run: Callable[..., Any]) -> None:
    run = make_run(OWN)
    next(iter(run.student.model.parameters())).data.fill_(float("nan"))
    with refused(Diverged, "rollouts"):
        ensure_round(run, RunState())


def test_new_text_begins_new_statistics_of_the_guard(make_run: Callable[..., Any]) -> None:
    run, state = make_run(OWN), RunState()
    for _ in training(run, state, Stop()):
        if state.applied == 4:
            break
    kept = [len(values) for name, values in run.guard._losses.items() if name.endswith("\nloss")]
    assert sum(kept) == 4, "rounds of few steps are part of the spread"
    state.round = -1
    run.rollouts.loader.forget()
    ensure_round(run, state)
    assert not run.guard._losses, "the first round is other text than before"


# -- several processes ---------------------------------------------------------------------------------------


def test_two_processes_write_and_learn_what_one_does(world: Path, tmp_path: Path) -> None:
    over = {"train__gradient_accumulation_steps": 1}
    words = [word for key, value in settings(world, **over).items() for word in ("--set", f"{key}={value}")]
    words = ["distill", "--out", str(tmp_path / "two"), "--device", "cpu", "--no-progress", *words]
    ends = wait_for(commands([words, words]))
    assert [one.code for one in ends] == [0, 0], ends
    distill(config_of(world), tmp_path / "one", device="cpu")
    one, two = rounds(tmp_path / "one"), rounds(tmp_path / "two")
    assert one[0].pieces == two[0].pieces, "the same student writes the same bytes, whoever writes which piece"
    assert [facts.step for facts in one.values()] == [facts.step for facts in two.values()]
    for mine, theirs in zip(events(tmp_path / "one", "step"), events(tmp_path / "two", "step"), strict=True):
        assert theirs["train_loss"] == pytest.approx(mine["train_loss"], rel=1e-4)
        assert theirs["sources"][ROLLOUTS] == pytest.approx(mine["sources"][ROLLOUTS], rel=1e-4)


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "key"),
    [
        ({"teacher.cache": "auto"}, "teacher.cache"),
        ({"objectives.kd.weight": 0.0}, "objectives.kd.weight"),
        ({"objectives.kd.on_wrong_teacher": "mft"}, "objectives.kd.on_wrong_teacher"),
        ({"objectives.alm.weight": 0.5}, "objectives.alm"),
        ({"teacher.router.mode": "sar"}, "teacher.router.mode"),
        ({"train.strategy": "fsdp"}, "train.strategy"),
        ({"data.train_on_prompt": True}, "data.train_on_prompt"),
        ({"rollouts.max_new_tokens": 32}, "rollouts.max_new_tokens"),
        ({"rollouts.share": 0.0}, "rollouts.share"),
        ({"rollouts.temperature": 0.0}, "rollouts.temperature"),
        (STORED | {"objectives.feature.weight": 0.1}, "feature"),
        (STORED | {"teacher.server": "http://127.0.0.1:9"}, "rollouts.answers"),
        (STORED | {"objectives.kd.token_temperature": 0.5}, "objectives.kd.token_temperature"),
    ],
)
def test_what_rollouts_cannot_be_combined_with_is_named(world: Path, over: dict[str, Any], key: str) -> None:
    with refused(ConfigError) as caught:
        load_config(overrides=settings(world) | over)
    assert key in str(caught.value.what) + str(caught.value.where) + str(caught.value.advice)


def test_prompts_that_leave_no_room_are_refused(make_run: Callable[..., Any]) -> None:
    with refused(ConfigError, "rollouts.max_new_tokens"):
        make_run(OWN | {"rollouts.prompt_tokens": 16, "rollouts.max_new_tokens": 31, "data.packing": "blocks"})


def test_changed_prompts_are_refused_by_a_resumed_run(world: Path, tmp_path: Path) -> None:
    """And a relative path is found again from another folder, as all others."""
    path = tmp_path / "prompts.jsonl"
    tiny.save_text(path, 6, seed=9)
    config = config_of(world, rollouts__prompts=str(path))
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="kill@4")) == -9
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["paths"]["rollouts.prompts"]["absolute"] == str(path)
    tiny.save_text(path, 6, seed=10)
    with refused(InputsChanged, "prompts.jsonl"):
        resume(tmp_path / "run", device="cpu")


def test_a_stranger_cannot_name_an_address_for_prompts(world: Path) -> None:
    config = config_of(world, rollouts__prompts="https://example.org/prompts.jsonl")
    with refused(ConfigError, "config.json", "rollouts.prompts"):
        Trust().check(config, "config.json")


def test_a_spec_gives_the_prompts(world: Path, make_run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"the room {n}", "completion": " keeps"}) for n in range(5)))
    run = make_run(OWN | {"rollouts.prompts": str(path), "rollouts.samples": 2})
    assert len(run.rollouts.prompts) == 5 and run.rollouts.answer_length > 0
    state = RunState()
    ensure_round(run, state)
    names = [one.name for one in run.rollouts.store.read(0).rollouts]
    assert len(set(names)) == len(names) and {name.rpartition(".")[2] for name in names} == {"0", "1"}
