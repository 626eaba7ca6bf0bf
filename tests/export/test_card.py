"""Laws of the model card: it says what was recorded, hides the machine, and no name in it is markup."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCardData
from synthetic import evaluated

from stillroom.export.card import Origin, model_card, short_name
from stillroom.telemetry.record import Evaluated

CONFIG: dict[str, Any] = {
    "teacher": {"model": "/home/ada/models/big"},
    "student": {"model": "org/small"},
    "data": {"train": [{"path": "/home/ada/a.jsonl"}], "eval": None},
    "objectives": {"kd": {"weight": 1.0, "divergence": "forward_kl", "temperature": 2.0}, "ce": {"weight": 0.0}},
    "train": {"learning_rate": 0.001, "seed": 3},
}
SUMMARY = {
    "status": "done", "tokens": 123456, "steps": 100, "precision": "fp32",
    "student": {"perplexity": 12.3, "intervals": {"perplexity": [12.0, 12.6]}, "parameters": 1000},
}  # fmt: skip


def card(**over: Any) -> str:
    given = {"title": "small", "config": CONFIG, "summary": SUMMARY, "versions": {"torch": "2"}}
    given |= {"model": {}, "checked": []}
    return model_card(**{**given, **over})


def test_provenance_and_figures_with_intervals_are_told() -> None:
    text = card()
    for words in ("`big`", "`org/small`", "`a.jsonl`", "123,456", "kd x 1 (divergence forward_kl, temperature 2.0)"):
        assert words in text
    assert "| student | 12.3 (12.0 to 12.6) |" in text
    assert "ce x" not in text and "/home/ada" not in text and "## Licence" in text and "## Limits" in text


@pytest.mark.parametrize(
    ("student", "words", "base"),
    [
        ({"model": "org/small"}, "`org/small`", "org/small"),
        ({"model": "/home/ada/models/small"}, "`small`", ""),
        ({"model": "builtin:student", "init": "shrink"}, "cut from its teacher `big`, 3 of 6 layers", ""),
        ({"model": "org/small", "init": "random"}, "random weights in the shape of `org/small`", ""),
        ({"model": "builtin:student"}, "random weights in the shape of `builtin:student`", ""),
        ({"model": "small", "adapter": {"rank": 8}}, "`small`, trained by an adapter that is merged in", "small"),
        ({"model": "x: y\n---", "init": "auto"}, "`x: y ---`", ""),
        ({"model": 3}, "`3`", ""),
    ],
)
def test_the_origin_of_the_weights_is_told_and_a_hub_id_is_the_base_model(
    student: dict[str, Any], words: str, base: str
) -> None:
    config = {**CONFIG, "student": student}
    text = card(config=config, origin=Origin.of(config, layers=(3, 6)))
    assert f"- student began as: {words}\n" in text
    front = yaml.safe_load(text.split("---")[1])
    assert front.get("base_model", "") == base and front["library_name"] == "transformers"


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model() -> None:
    config = {**CONFIG, "student": {"model": "models/small"}}
    assert Origin.of(config).base_model == "models/small"
    assert Origin.of(config, local={"student.model"}).base_model == ""
    cut = {"teacher": {"model": "org/big"}, "student": {"model": "builtin:student", "init": "shrink"}}
    assert Origin.of(cut).base_model == "org/big" and Origin.of(cut, local={"teacher.model"}).base_model == ""


def test_a_model_without_a_run_says_that_nothing_is_known() -> None:
    text = card(config={}, summary={}, versions={})
    assert "No record of a run" in text and "## Figures" not in text


def test_hostile_names_are_inert() -> None:
    hostile = "x`<script>alert(1)</script>`\n# heading\x1b[31m"
    text = card(title=hostile, config={**CONFIG, "student": {"model": hostile}})
    assert "\n# heading" not in text and "\x1b" not in text
    assert all("<script>" not in part for part in text.split("`")[::2])  # only ever between backticks


def test_records_of_another_shape_do_not_break_the_card() -> None:
    text = card(config={"teacher": None, "data": {"train": "builtin:stdlib"}, "objectives": []}, summary={"student": 3})
    assert "builtin:stdlib" in text


def test_paths_are_shortened_and_hub_ids_kept() -> None:
    assert short_name("/a/b/c") == "`c`" and short_name("org/name") == "`org/name`" and short_name("a/b/c") == "`c`"
    assert short_name("builtin:teacher") == "`builtin:teacher`" and short_name(None) == "`-`"
    assert short_name("C:\\Users\\ada\\model") == "`model`"


def test_figures_of_eval_stand_in_the_card_with_what_is_retained() -> None:
    text = card(evaluated=Evaluated({**evaluated(), "data": "/home/ada/held.jsonl"}))
    assert "| perplexity | 20.3 (54.2 to 60.3) | 57.1 (54.2 to 60.3) | 35.6% |" in text
    assert (
        "| `arc_easy acc` | 0.440 | 0.310 (0.287 to 0.334) | 70.5% |" in text
        and "`held.jsonl`, next to `builtin:teacher`" in text
    )
    assert "/home/ada" not in text


def test_figures_that_may_be_another_student_s_are_not_published() -> None:
    text = card(evaluated=Evaluated(evaluated(), "The student has changed since it was measured."))
    assert "Not shown" in text and "retained" not in text


def test_hostile_names_of_benchmarks_are_inert() -> None:
    hostile = "x | `<script>` |\n# heading"
    record = {"student": {"tasks": {hostile: {hostile: 0.5}}}, "data": hostile}
    text = card(evaluated=Evaluated(record))
    assert "\n# heading" not in text and all("<script>" not in part for part in text.split("`")[::2])
    (line,) = [line for line in text.splitlines() if "0.500" in line]
    assert line.count("|") == 3  # the cells of one row


def test_the_figures_stand_in_the_hub_s_own_metadata() -> None:
    data = {"train": [{"path": "/home/ada/a.jsonl"}, {"path": "b.jsonl"}], "eval": "hf:org/texts:small"}
    text = card(config={**CONFIG, "data": data}, evaluated=Evaluated(evaluated()))
    found = ModelCardData(**yaml.safe_load(text.split("---")[1])).eval_results
    figures = {(one.dataset_name, one.metric_type): one.metric_value for one in found or ()}
    assert figures["hf:org/texts:small", "perplexity"] == 12.3 and figures["held_out.jsonl", "kl"] == 0.41
    assert figures["arc_easy", "acc"] == 0.31 and figures["held_out.jsonl", "exact_match"] == 0.31
    assert not {"samples", "parameters", "decode_tokens_per_second"} & {metric for _data, metric in figures}
    assert {one.dataset_type for one in found or ()} == {"org/texts", "held_out.jsonl", "arc_easy"}


def test_metadata_holds_no_path_no_figure_in_doubt_and_nothing_that_is_not_a_number() -> None:
    student = {"perplexity": None, "kl": float("nan"), "agreement": 0.5}
    text = card(summary={"student": student}, evaluated=Evaluated(evaluated(), "it has changed"), title="x\n---\ny: 1")
    (index,) = yaml.safe_load(text.split("---")[1])["model-index"]
    (result,) = index["results"]
    assert result["metrics"] == [{"type": "agreement", "name": "agreement", "value": 0.5}]
    assert result["dataset"]["name"] == "a.jsonl" and "/home/ada" not in text
    assert "model-index" not in card(summary={})
