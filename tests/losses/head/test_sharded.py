"""The fused head inside torch's own ways of spreading a model over processes, and under recomputation."""

from __future__ import annotations

import pytest
import sharded_worker
import torch
from process_jobs import group


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("sharded") / "gradients.pt"
    group(2, lambda: sharded_worker.main(out))
    loaded: dict[str, dict[str, torch.Tensor]] = torch.load(out)
    return loaded


@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_processes(
    found: dict[str, dict[str, torch.Tensor]], how: str, is_tied: bool
) -> None:
    wanted = sharded_worker.expected(is_tied)
    gathered = found[f"{how} {is_tied}"]
    assert set(gathered) == set(wanted)
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        assert torch.allclose(gathered[name], gradient, atol=2e-6 * scale, rtol=0), name
