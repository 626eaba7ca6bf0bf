"""Which precision is chosen: by the chosen card, by what is really held, and once for a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused

from stillroom.config.schema import Config
from stillroom.core.errors import ConfigError
from stillroom.precision import choose
from stillroom.precision.device import DeviceFacts, facts_of
from stillroom.precision.policy import POLICIES, needs_fp32_weights

P100 = DeviceFacts("cuda", "Tesla P100", False, 16 * 10**9, "sm_60", ("sm_60",), has_tensor_cores=False)
T4 = DeviceFacts("cuda", "Tesla T4", False, 16 * 10**9, "sm_75", ("sm_75",))
A100 = DeviceFacts("cuda", "A100", True, 40 * 10**9, "sm_80", ("sm_80",))


def test_without_tensor_cores_fp16_products_are_not_chosen() -> None:
    mode, reason = choose("auto", P100, 10**8)
    assert mode == "fp32" and "no tensor cores" in reason
    assert choose("auto", P100, 6 * 10**8)[0] == "fp16-split", "where FP32 does not fit, FP16 is for its size"
    assert choose("fp16-mixed", P100)[0] == "fp16-mixed", "what is asked for is given"


def test_bytes_of_a_parameter_decide() -> None:
    """16 bytes a parameter in half of 16 GB: 500 million parameters."""
    assert choose("auto", T4, 499_000_000)[0] == "fp16-master"
    assert choose("auto", T4, 501_000_000)[0] == "fp16-split"
    assert choose("auto", T4, 501_000_000, moments="bfloat16")[0] == "fp16-master", "12 bytes fit"


def test_what_refuses_fp16_weights_is_not_given_them() -> None:
    assert choose("auto", T4, 440_000_000, is_wide=True)[0] == "fp16-mixed"
    assert choose("auto", T4, 460_000_000, is_wide=True)[0] == "fp16-split", "18 bytes, half copies of autocast counted"
    assert not needs_fp32_weights(Config())
    adapted = Config.model_validate({"student": {"adapter": {"rank": 4}}})
    routed = Config.model_validate({"teacher": {"router": {"mode": "sar-meta"}}})
    assert needs_fp32_weights(adapted) and needs_fp32_weights(routed)


@pytest.mark.parametrize("begun_in", list(POLICIES))
@pytest.mark.parametrize("facts", [DeviceFacts("cpu"), A100, P100], ids=["cpu", "a100", "p100"])
def test_a_run_keeps_the_mode_it_began_in(facts: DeviceFacts, begun_in: str) -> None:
    if begun_in == "bf16-mixed" and facts is P100:
        with refused(ConfigError, "precision.mode") as caught:
            choose("auto", facts, 10**6, begun_in=begun_in)
        assert "--device cpu" in caught.value.advice
        return
    mode, reason = choose("auto", facts, 10**6, begun_in=begun_in)
    assert mode == begun_in and "began in it" in reason


def test_a_checkpoint_of_a_mode_nobody_knows_is_refused() -> None:
    with refused(ConfigError, "", "fp8"):
        choose("auto", T4, begun_in="fp8")


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 that is current, and a P100 beside it."""

    def index(device: Any) -> int:
        return torch.device(device).index if device is not None else 0

    properties = type("Properties", (), {"total_memory": 16 * 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: [(8, 0), (6, 0)][index(device)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: ["A100", "P100"][index(device)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_60", "sm_80"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)  # of the current card


@pytest.mark.usefixtures("two_cards")
def test_a_card_is_asked_for_itself_and_not_the_current_one() -> None:
    first, second = facts_of(torch.device("cuda:0")), facts_of(torch.device("cuda:1"))
    assert first.has_native_bf16 and first.has_tensor_cores
    assert not second.has_native_bf16 and not second.has_tensor_cores and second.architecture == "sm_60"
