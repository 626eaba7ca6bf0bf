"""The device of a run: chosen anew each time, and left with the settings it had."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from refusals import refused

from stillroom.core.errors import BrokenAtStart
from stillroom.precision import device
from stillroom.precision.device import DeviceFacts, check_device, deterministic, find_device


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two cards; the answer lists which were made current."""
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return made_current


@pytest.mark.usefixtures("cards")
def test_a_process_may_ask_for_the_cpu_and_then_for_a_card() -> None:
    assert find_device("cpu").type == "cpu"
    assert find_device("auto") == torch.device("cuda:1"), "the current card"
    assert find_device("cpu").type == "cpu"


def test_each_of_several_processes_has_a_card_of_its_own(
    cards: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert find_device("auto") == find_device("cuda") == torch.device("cuda", rank)
    assert cards == [torch.device("cuda", rank) for rank in (0, 0, 1, 1)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with refused(BrokenAtStart, "--device"):
        find_device("auto")


def test_apples_gpu_is_passed_over_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    told: list[str] = []
    assert find_device("auto", told.append).type == "cpu"
    assert len(told) == 1 and "float64" in told[0]
    with refused(BrokenAtStart, "--device", "mps") as caught:
        find_device("mps")
    assert "--device cpu" in caught.value.advice
    assert find_device("cpu", told.append).type == "cpu" and len(told) == 1, "asked for: nothing to say"


def test_a_gpu_that_torch_cannot_use_is_never_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "nvidia_driver", lambda: "NVRM version: 550.54")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told: list[str] = []
    assert find_device("auto", told.append).type == "cpu"
    assert len(told) == 1 and "550.54" in told[0] and "13.0" in told[0]
    find_device("auto")
    assert "550.54" in caplog.text, "a command without a log of its own says it too"
    find_device("cpu", told.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    find_device("auto", told.append)
    assert len(told) == 1, "asked for, or hidden on purpose"


@pytest.mark.parametrize(
    ("architecture", "built_for"), [("sm_60", ("sm_75", "sm_80")), ("sm_70", ("sm_75", "sm_80", "sm_90", "sm_120"))]
)
def test_a_gpu_that_wheels_left_behind_is_told_which_wheel_has_it(
    architecture: str, built_for: tuple[str, ...]
) -> None:
    facts = DeviceFacts("cuda", "Tesla", architecture=architecture, built_for=built_for)
    with refused(BrokenAtStart, "device", architecture, "torch<2.15", "cu126"):
        check_device(facts)


def state() -> tuple[bool, bool, str | None, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def test_a_run_on_a_card_asks_for_a_fixed_order_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with deterministic(torch.device("cuda")):
        assert state() == (True, True, ":4096:8", False)
    assert state() == before
    with pytest.raises(KeyError), deterministic(torch.device("cuda")):
        raise KeyError
    assert state() == before
    with deterministic(torch.device("cpu")):
        assert state() == before, "a CPU adds in a fixed order already"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(torch.device("cuda")):
        assert state()[2] == ":16:8", "the user's"
    assert state()[2] == ":16:8"


def test_partial_products_are_added_in_fp32_on_a_gpu_and_the_setting_is_restored() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    with contextlib.suppress(RuntimeError), device.wide_sums(torch.device("cuda")):
        assert matmul.allow_fp16_reduced_precision_reduction is False
        raise RuntimeError("a step that fails")
    assert matmul.allow_fp16_reduced_precision_reduction == before
    with device.wide_sums(torch.device("cpu")):
        assert matmul.allow_fp16_reduced_precision_reduction == before
