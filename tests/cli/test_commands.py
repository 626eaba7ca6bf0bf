"""The commands beside `distill`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from commands import output

from stillroom.cli import main
from stillroom.config import load_config, preset_names
from stillroom.demo import baseline_config, compute_ratio, story_of
from stillroom.training.distill import distill


def test_eval_of_a_model_alone(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("eval", "--model", str(world / "teacher"), "--data", str(world / "train.jsonl"), "--max-length", "32")
    result = json.loads(output(capsys, *words, "--json"))
    assert result["student"]["perplexity"] > 1 and result["student"]["kl"] is None
    assert "perplexity" in output(capsys, *words)


def test_eval_against_a_teacher(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--model", str(world / "student"), "--teacher", str(world / "teacher")]
    words += ["--data", str(world / "train.jsonl"), "--max-length", "32", "--max-batches", "3"]
    result = json.loads(output(capsys, *words, "--json"))
    assert result["student"]["kl"] > 0 and 0 <= result["student"]["agreement"] <= 1
    assert 0 < result["student"]["acceptance"] < 1 and result["teacher"]["kl"] == pytest.approx(0, abs=1e-6)
    assert result["retention"] < 1 and result["student"]["tokens_per_second"] > 0
    assert "retention" in output(capsys, *words)


def test_generate_continues_a_prompt(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "generate", str(world / "teacher"), "--prompt", "the still", "--max-new-tokens", "12")
    assert out.startswith("the still") and len(out) > len("the still\n")


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = output(capsys, "presets")
    assert all(name in listed for name in preset_names())
    assert "forward_kl" in output(capsys, "presets", "base")


def test_a_report_can_be_written_again(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distill(load_config(overrides=tiny.settings(world)), tmp_path / "run", device="cpu")
    path = Path(output(capsys, "report", str(tmp_path / "run")).strip())
    assert path.name == "report.html" and "perplexity" in path.read_text(encoding="utf-8")


def test_distill_can_answer_in_json(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["distill", "--out", str(tmp_path / "run"), "--json", "--device", "cpu"]
    for key, value in tiny.settings(world).items():
        words += ["--set", f"{key}={value}"]
    answer = json.loads(output(capsys, *words))
    assert answer["status"] == "done" and answer["folder"] == str(tmp_path / "run")


def test_the_python_interface_of_the_contract(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import stillroom

    monkeypatch.chdir(tmp_path)
    lines = [
        f'{key.split(".")[-1]} = "{value}"' for key, value in tiny.settings(world).items() if key == "teacher.model"
    ]
    (tmp_path / "run.toml").write_text("[teacher]\n" + "\n".join(lines) + "\n")
    config = stillroom.load_config("run.toml", overrides={**tiny.settings(world), "train.max_steps": 2})
    result = stillroom.distill(config)
    assert result.summary["steps"] == 2 and (result.folder / "report.html").exists()


# -- the demo's arithmetic -------------------------------------------------------------------------------


def test_equal_compute_pays_back_the_teacher_s_forward_passes() -> None:
    assert compute_ratio(3_000_000, 1_000_000) == pytest.approx(2.0)


def test_a_baseline_differs_from_the_demo_only_in_what_it_must() -> None:
    demo = load_config(preset="demo")
    plain = baseline_config(demo, 1200, learning_rate=1e-3, weight_decay=0.5)
    assert plain.data == demo.data and plain.student == demo.student and plain.train.seed == demo.train.seed
    assert plain.objectives.kd.weight == 0 and plain.objectives.ce.weight == 1
    assert plain.train.max_steps == 1200 and plain.train.batch_size == demo.train.batch_size


@pytest.mark.parametrize(("student", "said"), [(50.0, "closes 56%"), (150.0, "did not pay")])
def test_the_story_follows_the_numbers(student: float, said: str) -> None:
    arm = {"steps": 10, "seconds": 1.0, "best_step": 10, "learning_rate": 0.1, "weight_decay": 0.0}
    summary = {
        **arm,
        "transfer_tokens": 1000,
        "teacher": {"perplexity": 10.0},
        "student": {"perplexity": student},
        "baseline": {"perplexity": 120.0, **arm},
        "baseline_equal_compute": {"perplexity": 101.0, **arm},
    }
    assert said in story_of(summary)[-1]


def test_ctrl_c_outside_of_training_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("stillroom.cli.inspect.preset_text", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["presets", "base"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n", "there is no run that could be resumed"
