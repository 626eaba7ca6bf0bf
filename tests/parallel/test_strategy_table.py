"""Laws of the table in docs/scaling.md: what it says works trains the student of one process, the rest is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import expert_bank
import feature_runs
import pytest
import torch
from feature_runs import FEATURES, STRATEGIES
from process_jobs import environment, free_port
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.engine.distill import distill
from stillroom.parallel import Parallel

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
# Losses and norms relative, weights absolute. FP16 activations are rounded to 1/2048 of themselves, and sums in another
# order round some of them to the neighbour: a step of 3e-3 then moves by a few parts in a thousand.
EXACT = (1e-6, 1e-5)
ROUNDED = {"fp16-mixed": (1e-4, 2e-5), "bf16-mixed": (1e-4, 2e-5)}


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
    runner = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    script = Path(__file__).parents[1] / "support" / "feature_runs.py"
    done = subprocess.run(
        [sys.executable, "-m", *runner, str(script), str(worlds), str(worlds / "found.pt")],
        capture_output=True, text=True, timeout=480, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_of_their_own_that_no_process_used_are_not_updated(strategy: str, found: dict[Any, Any]) -> None:
    """The two processes use other experts of one layer, and a micro-batch without a target uses none."""
    alone, run = expert_bank.trained(Parallel()), found["bank", strategy]
    assert run["updated"] == alone["updated"]
    assert not any("experts.2" in name for names in run["updated"] for name in names)
    assert any("experts.0.weight" not in names for names in run["updated"])
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("found")
def test_a_sharded_adapter_is_written_as_one_process_writes_it(worlds: Path) -> None:
    over = feature_runs.whole_runs(worlds)["adapter-fsdp"]
    over |= {"train.gradient_accumulation_steps": 4, "train.strategy": "auto"}
    distill(load_config(overrides=over), worlds / "adapter-one", device="cpu")
    for part in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(worlds / run / "student" / part) for run in ("adapter-one", "adapter-fsdp"))
        assert set(one) == set(other)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=name)
    for part in ("config.json", "adapter/base.json", "adapter/adapter_config.json"):
        assert (worlds / "adapter-one" / "student" / part).exists()
        assert (worlds / "adapter-fsdp" / "student" / part).exists()
