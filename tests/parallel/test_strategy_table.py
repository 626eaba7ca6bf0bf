"""Laws of the table in docs/guides/scaling.md: what works trains the student of one process, the rest is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import expert_bank
import feature_runs
import pytest
import torch
from feature_runs import ADAPTED, FEATURES, STRATEGIES
from process_jobs import group, losses
from safetensors.torch import load_file

from stillroom.parallel import Parallel
from stillroom.training.distill import distill, resume

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "scaling.md"
# Losses relative, weights absolute; norms relative to ten times the first. Half activations are rounded to 1/2048 or
# 1/256 of themselves, and sums in another order round some of them to the neighbour. Moments in BF16 are rounded to
# 1/256 by random numbers that are others in each process: three steps of at most 3e-3 differ by 3e-5.
EXACT = (1e-6, 1e-5)
ROUNDED = {
    "bf16-mixed": (1e-5, 2e-5),
    "fp16-mixed": (1e-5, 2e-5),
    "fp16-master": (1e-5, 2e-5),
    "moments in BF16": (1e-5, 1e-4),
}


def table() -> dict[str, dict[str, str]]:
    """What the page says of each feature, by strategy."""
    rows = re.findall(
        r"^\| ([^|]+) \| (works|refused) \| (works|refused) \| (works|refused) \|$", PAGE.read_text(), re.M
    )
    return {name.replace("`", ""): dict(zip(("one", *STRATEGIES), cells, strict=True)) for name, *cells in rows}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    feature_runs.save_worlds(folder)
    return folder


@pytest.fixture(scope="module")
def found(worlds: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Every feature with each strategy, in one start of two processes."""
    group(2, lambda: feature_runs.main(worlds, worlds / "found.pt"))
    answers: dict[tuple[str, str], dict[str, Any]] = torch.load(worlds / "found.pt")
    return answers


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def test_the_page_has_a_row_for_each_feature() -> None:
    assert list(table()) == list(FEATURES)
    assert all(row["one"] == "works" for row in table().values())


@pytest.mark.parametrize("feature", FEATURES)
def test_each_row_of_the_table_is_true(feature: str, worlds: Path, found: dict[Any, dict[str, Any]]) -> None:
    alone = feature_runs.tried(worlds, feature, 4, Parallel())
    assert alone["code"] == 0, alone
    relative, absolute = ROUNDED.get(feature, EXACT)
    for strategy in STRATEGIES:
        run = found[feature, strategy]
        if table()[feature][strategy] == "refused":
            assert run["code"] == 2 and run["where"], (strategy, run)
            continue
        assert run["code"] == 0, (strategy, run)
        assert largest(run["losses"], alone["losses"]) < relative, strategy
        assert largest(run["norms"], alone["norms"]) < 10 * relative, strategy
        assert float((run["weights"] - alone["weights"]).abs().max()) < absolute, strategy
        if feature == "train.compile":
            assert {"compile: student", "compile: teacher"} == {note.split(",")[0] for note in run["notes"]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_of_their_own_that_no_process_used_are_not_updated(strategy: str, found: dict[Any, Any]) -> None:
    """The two processes use other experts of one layer, and a micro-batch without a target uses none."""
    alone, run = expert_bank.trained(Parallel()), found["bank", strategy]
    assert run["updated"] == alone["updated"]
    assert not any("experts.2" in name for names in run["updated"] for name in names)
    assert any("experts.0.weight" not in names for names in run["updated"])
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=1e-6)


def test_gradients_of_terms_of_a_sharded_student_are_those_of_all_rows_together(
    worlds: Path, found: dict[Any, Any]
) -> None:
    alone, run = feature_runs.measured(worlds, 4, Parallel()), found["measured", "fsdp"]
    assert set(run["terms"]) == set(alone["terms"]) >= {"kd", "ce", "feature", "attention"}
    for term in set(alone["terms"]) - {"contrastive"}:  # which compares the rows of a micro-batch with each other
        assert run["terms"][term]["norm"] == pytest.approx(alone["terms"][term]["norm"], rel=1e-5)
    assert run["cosines"]["kd.ce"] == pytest.approx(alone["cosines"]["kd.ce"], abs=1e-5)


@pytest.mark.usefixtures("found")
def test_a_sharded_run_is_taken_up_by_its_like_and_by_one_process(worlds: Path) -> None:
    """With FP16 weights whose parts are masters, and with projectors beside the student."""
    shutil.copytree(worlds / "cut", worlds / "cut-alone")
    resume(worlds / "cut-alone", device="cpu", max_minutes=0.0)
    distill(feature_runs.stopped_run(worlds, 4), worlds / "cut-one", device="cpu")
    folders = [worlds / f"cut-{how}" for how in ("one", "fsdp", "alone")]
    one, *others = (load_file(folder / "student" / "model.safetensors") for folder in folders)
    expected, *norms = (losses(folder, "grad_norm") for folder in folders)
    assert len(expected) == feature_runs.STEPS
    scales = [losses(folder, "loss_scale") for folder in folders]
    assert scales[0] == scales[1] == scales[2], "found from gradients, not from memory that weights are gathered into"
    for other, found in zip(others, norms, strict=True):
        assert largest(found, expected) < 1e-4
        assert set(one) == set(other)
        for part, tensor in one.items():
            assert other[part].dtype == tensor.dtype == torch.float16
            # The neighbour of an FP16 number is a thousandth of it away.
            torch.testing.assert_close(other[part], tensor, rtol=1e-3, atol=2e-5, msg=part)
    dtypes = [json.loads((folder / "student" / "config.json").read_bytes())["dtype"] for folder in folders]
    assert dtypes == ["float16"] * 3


@pytest.mark.usefixtures("found")
def test_a_sharded_adapter_is_written_as_one_process_writes_it(worlds: Path) -> None:
    distill(feature_runs.whole_run(worlds, ADAPTED, 4), worlds / "adapter-one", device="cpu")
    for part in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(worlds / run / "student" / part) for run in ("adapter-one", "adapter-fsdp"))
        assert set(one) == set(other)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=name)
    for part in ("config.json", "adapter/base.json", "adapter/adapter_config.json"):
        assert (worlds / "adapter-one" / "student" / part).exists()
        assert (worlds / "adapter-fsdp" / "student" / part).exists()
