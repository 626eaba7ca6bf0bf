"""Laws of the choice of a student: by what `eval.select` says, and no failure for the likelihood of the data alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused

from stillroom import load_config
from stillroom.core.errors import BrokenAtStart, ConfigError, DataError, Interrupted, NoBetterStudent
from stillroom.metrics.metrics import Ledger
from stillroom.training import distill as loading
from stillroom.training import loop, select
from stillroom.training.distill import distill, resume
from stillroom.training.evaluate import Evaluation
from stillroom.training.finish import DIVERGED, DONE, Result, how_it_ended
from stillroom.training.run import RunState
from stillroom.training.select import SELECTIONS, is_better

QUICK = {"train__max_steps": 6, "train__eval_steps": 3, "eval__prompts": 4, "eval__prompt_tokens": 6}


def questions(path: Path, count: int = 120) -> Path:
    """Records with a prompt and a short answer, which a tiny model learns in a few steps."""
    rows = [{"prompt": f"{line.split()[0]} is", "completion": " room"} for line in tiny.sentences(count, 3)]
    path.write_text("".join(json.dumps(row | {"prompt": f"{row['prompt']} {n}"}) + "\n" for n, row in enumerate(rows)))
    return path


def run(world: Path, out: Path, data: Path | None = None, inject: str = "", **over: Any) -> Result:
    more = {"data__train": str(data)} if data else {}
    config = load_config(overrides=tiny.settings(world, **{**QUICK, **more, **over}))
    return distill(config, out, device="cpu", inject=inject)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def evaluation(perplexity: float, **over: Any) -> Evaluation:
    nothing: dict[str, Any] = dict.fromkeys(("bits_per_byte", "nll", "kl", "agreement", "acceptance", "objective"))
    made = {**nothing, "terms": {}, "unscored_tokens": 0, "tokens": 1, "seconds": 0.0, "ledger": Ledger()}
    return Evaluation(perplexity=perplexity, **{**made, **over})


# -- decisions -------------------------------------------------------------------------------------------


def test_a_share_is_better_when_higher_and_a_distance_when_lower() -> None:
    state = RunState(best_rank=-0.5, best_perplexity=10.0)
    assert is_better(evaluation(99.0, select="exact_match", selected=0.75), state)
    assert not is_better(evaluation(1.0, select="exact_match", selected=0.25), state)
    state = RunState(best_rank=0.5, best_perplexity=10.0)
    assert is_better(evaluation(99.0, select="own_kl", selected=0.4), state)
    assert not is_better(evaluation(1.0, select="own_kl", selected=0.6), state)


def test_a_tie_of_few_prompts_is_broken_by_perplexity() -> None:
    state = RunState(best_rank=-0.5, best_perplexity=10.0)
    assert is_better(evaluation(9.0, select="exact_match", selected=0.5), state)
    assert not is_better(evaluation(11.0, select="exact_match", selected=0.5), state)


@pytest.mark.parametrize("broken", [{"selected": None}, {"selected": 1.0, "unscored_tokens": 1}])
def test_a_student_that_cannot_be_measured_is_never_chosen(broken: Mapping[str, Any]) -> None:
    assert not is_better(evaluation(1.0, select="exact_match", **broken), RunState())


@pytest.mark.parametrize(
    ("last", "is_off_course", "status"), [(25.0, True, DIVERGED), (25.0, False, DONE), (None, False, DIVERGED)]
)
def test_perplexity_alone_fails_no_run_that_is_trained_for_something_else(
    last: float | None, is_off_course: bool, status: str
) -> None:
    state = RunState(applied=40, last_perplexity=last, best_step=0, is_off_course=is_off_course)
    end = how_it_ended(state, 20.0, 20.0)
    assert end["status"] == status and end["advice"]


@pytest.mark.parametrize(
    ("name", "last", "before", "status"),
    [
        ("exact_match", 0.10, 0.80, DIVERGED),
        ("exact_match", 0.75, 0.80, DONE),  # within the noise of 32 prompts
        ("exact_match", 0.0, 0.0, DONE),
        ("own_kl", 2.0, 1.0, DIVERGED),
        ("own_kl", 1.001, 1.0, DONE),
    ],
)
def test_a_run_fails_by_what_its_student_is_chosen_by(name: str, last: float, before: float, status: str) -> None:
    selection = SELECTIONS[name]
    state = RunState(applied=40, last_rank=selection.rank(last), best_step=0, last_perplexity=1e9)
    assert how_it_ended(state, before, before, selection, 32)["status"] == status


# -- runs ------------------------------------------------------------------------------------------------


def test_a_student_trained_without_labels_does_not_fail_for_their_likelihood(world: Path, tmp_path: Path) -> None:
    """A good student learns from a bad teacher: the data gets less likely, and the objective better."""
    swapped = {"teacher__model": str(world / "student"), "student__model": str(world / "teacher")}
    more = {**swapped, "train__max_steps": 12, "train__eval_steps": 6, "train__learning_rate": 1e-3}
    kept = run(world, tmp_path / "kd", **more, eval__prompts=0)
    assert kept.summary["status"] == DONE and kept.summary["best_step"] == 0
    assert any("eval.select" in one["text"] for one in events(kept.folder, "note"))
    chosen = run(world, tmp_path / "chosen", **more, eval__select="objective", eval__prompts=0)
    assert chosen.summary["status"] == DONE and chosen.summary["best_step"] == 12
    assert chosen.summary["student"]["perplexity"] > chosen.summary["student_before"]["perplexity"]
    with pytest.raises(NoBetterStudent):
        run(world, tmp_path / "labels", **more, objectives__kd__weight=0.95, objectives__ce__weight=0.05)


def test_answers_are_in_log_summary_and_report(world: Path, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    done = run(world, tmp_path / "run", data, eval__select="exact_match", objectives__ce__weight=1.0)
    evals = events(done.folder, "eval")
    assert [one["answers"]["prompts"] for one in evals] == [4, 4, 4]
    for one in evals:
        figures = one["answers"]
        assert one["selected"] == figures["exact_match"] and 0 <= figures["ended"] <= 1 and figures["length"] >= 1
        assert figures["own_kl"] > 0 and figures["teacher_log_likelihood"] < 0 and figures["uncompared_tokens"] == 0
    samples = events(done.folder, "sample")
    assert len(samples) == 4 and all({"student", "teacher", "reference", "right"} <= one.keys() for one in samples)
    rows = done.summary
    assert rows["select"] == "exact_match" and rows["student"]["answers"]["prompts"] == 4
    assert rows["teacher"]["answers"]["prompts"] == 4 and rows["student_before"]["selected"] is not None
    from stillroom.report import write_report

    page = Path(write_report(done.folder)).read_text(encoding="utf-8")
    assert "exactly right" in page and (", right" in page or ", wrong" in page)


def test_own_kl_is_that_of_the_models_on_the_written_text(world: Path, tmp_path: Path) -> None:
    """Recomputed by hand from the written student and the teacher, on the greedy answers of the final student."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run(world, tmp_path / "run", questions(tmp_path / "q.jsonl"), eval__select="own_kl", train__max_steps=2)
    figures = done.summary["student"]["answers"]
    assert done.summary["student"]["selected"] == pytest.approx(figures["own_kl"], rel=1e-4)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path) for path in (done.folder / "student", world / "teacher")
    )
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "student")
    total, count = 0.0, 0
    for sample in events(done.folder, "sample"):
        before = tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]
        written = student.generate(torch.tensor([before]), max_new_tokens=6, do_sample=False, pad_token_id=1)[0]
        with torch.no_grad():
            log_q, log_p = (
                torch.log_softmax(net(written[None]).logits[0, len(before) - 1 : -1].double(), -1)
                for net in (student, teacher)
            )
        total += float((log_q.exp() * (log_q - log_p)).sum())
        count += len(written) - len(before)
    assert figures["own_kl"] == pytest.approx(total / count, rel=1e-3)


def test_an_interrupted_run_chooses_as_the_whole_one(world: Path, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    more = {"eval__select": "own_kl", "train__save_steps": 3}
    whole = run(world, tmp_path / "whole", data, **more)
    with pytest.raises(Interrupted):
        run(world, tmp_path / "cut", data, **more, train__max_minutes=1e-6)
    again = resume(tmp_path / "cut", device="cpu", max_minutes=0)
    kept = ("best_step", "select")
    assert {name: again.summary[name] for name in kept} == {name: whole.summary[name] for name in kept}
    assert again.summary["student"]["selected"] == whole.summary["student"]["selected"]


def test_early_stopping_goes_by_what_is_chosen_by(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Perplexity falls throughout, and the share of right answers does not rise: the run ends early."""
    measured = loop.measure
    falling = iter(range(100))

    def measure(run: Any, state: Any, result: Evaluation) -> Evaluation:
        return replace(measured(run, state, result), select="exact_match", selected=-float(next(falling)))

    monkeypatch.setattr(loop, "measure", measure)
    data = questions(tmp_path / "questions.jsonl")
    more = {"train__max_steps": 12, "train__early_stopping": 2, "objectives__ce__weight": 1.0}
    done = run(world, tmp_path / "run", data, **more, eval__select="exact_match", train__eval_steps=2)
    perplexities = [one["perplexity"] for one in events(done.folder, "eval")]
    assert perplexities == sorted(perplexities, reverse=True)
    assert done.summary["best_step"] == 0 and done.summary["steps"] == 4


def test_answering_prompts_changes_no_step(world: Path, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    losses = [
        [one["train_loss"] for one in events(run(world, tmp_path / str(n), data, **over).folder, "step")]
        for n, over in enumerate(({"eval__prompts": 0}, {"eval__prompts": 3, "eval__temperature": 1.0}))
    ]
    assert losses[0] == losses[1]


def test_the_canary_of_a_student_trained_without_labels_is_its_objective(world: Path, tmp_path: Path) -> None:
    from stillroom.training import recover

    seen: list[tuple[bool, float]] = []
    real = recover.canary_loss

    def canary_loss(run: Any) -> float:
        seen.append((run.canary_is_objective, real(run)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recover, "canary_loss", canary_loss)
        same = {"student__model": str(world / "teacher"), "eval__prompts": 0, "train__max_steps": 2}
        run(world, tmp_path / "kd", **same)
        run(world, tmp_path / "ce", **same, objectives__ce__weight=1.0)
    is_objective, first = seen[0]
    assert is_objective and first == pytest.approx(0.0, abs=1e-4), "the student is the teacher"
    assert any(not is_other and loss > 0.05 for is_other, loss in seen)


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "name"),
    [
        ({"eval.select": "tasks"}, "eval.tasks"),
        ({"eval.tasks": ["arc_easy"]}, "eval.select"),
        ({"eval.select": "own_kl", "teacher.cache": "somewhere"}, "teacher.cache"),
        ({"eval.select": "objective", "objectives.kd.temperature": {"start": 2.0, "end": 1.0}}, "kd"),
        ({"eval.select": "checker", "eval.checker": "regex:("}, "regex"),
        ({"eval.select": "checker", "eval.checker": "none_such"}, "exact"),
        ({"eval.prompts": 4, "train.strategy": "fsdp"}, "eval.prompts"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused_before_anything_is_loaded(over: dict[str, Any], name: str) -> None:
    with refused(ConfigError, "", name):
        load_config(overrides=over)


def test_right_answers_need_records_with_answers(world: Path, tmp_path: Path) -> None:
    with refused(DataError, "data.eval", "exact_match"):
        run(world, tmp_path / "run", eval__select="exact_match")


def test_own_kl_needs_a_teacher(world: Path, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl")
    with refused(BrokenAtStart, "eval.select", "own_kl"):
        plain = {"objectives__kd__weight": 0.0, "objectives__ce__weight": 1.0}
        run(world, tmp_path / "run", data, eval__select="own_kl", **plain)


def test_benchmarks_that_cannot_be_run_are_refused_before_a_model_is_loaded(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_models", lambda *_args, **_options: pytest.fail("a model was loaded"))
    with refused(ConfigError, "eval.tasks", "gone.yaml"):
        run(world, tmp_path / "run", eval__prompts=0, eval__select="tasks", eval__tasks=[str(tmp_path / "gone.yaml")])


def test_the_best_student_has_the_best_mean_of_its_benchmarks(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, after steps 2, 4 and 6. Of the figures of a task `acc_norm` counts, and none that is a loss."""
    scores = iter([(0.2, 0.4), (0.9, 0.1), (0.6, 0.8), (0.5, 0.5)])

    class Scripted:
        def run(self, _network: Any, _tokenizer: Any, *, batch_size: int) -> dict[str, Any]:
            torch.manual_seed(1)  # as lm-eval does
            better = {"loss": False, "acc": True, "acc_norm": True}
            return {
                name: {"loss": 9.0, "acc": 0.0, "acc_norm": score, "samples": 50, "higher_is_better": better}
                for name, score in zip(("one", "other"), next(scores), strict=True)
            }

    monkeypatch.setattr(select, "benchmarks", lambda _names: Scripted())
    monkeypatch.setattr(loading, "benchmarks", lambda _names: None)
    more = {"eval__prompts": 0, "train__eval_steps": 2, "eval__select": "tasks", "eval__tasks": ["one", "other"]}
    done = run(world, tmp_path / "run", **more)
    assert [one["selected"] for one in events(done.folder, "eval")] == pytest.approx([0.3, 0.5, 0.7, 0.5])
    assert done.summary["best_step"] == 4 and done.summary["student"]["selected"] == pytest.approx(0.7)


def test_benchmarks_choose_and_leave_the_random_state_as_it_was(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"question": "the still", "choices": ["room", "maid"], "answer": place % 2} for place in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stills.yaml").write_text(
        f"task: stills\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{answer}}'\ndoc_to_choice: '{{choices}}'\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    more = {"eval__prompts": 0, "train__max_steps": 2, "train__eval_steps": 1}
    done = run(world, tmp_path / "tasks", **more, eval__select="tasks", eval__tasks=[str(tmp_path / "stills.yaml")])
    plain = run(world, tmp_path / "plain", **more)
    assert done.summary["student"]["selected"] == 0.5, "one answer of two is always right here"
    losses = [[one["train_loss"] for one in events(each.folder, "step")] for each in (done, plain)]
    assert losses[0] == losses[1]
