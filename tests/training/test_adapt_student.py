"""The adapter of a run that is being built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.parallel import Parallel
from stillroom.precision import resolve
from stillroom.training.student import check_base, store_frozen

LORA = {"student__adapter__rank": 2}


class Others(Parallel):
    """A process whose peers have another number, whatever is compared."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def same_everywhere(self, fingerprint: int) -> bool:
        self.asked.append(fingerprint)
        return False


def test_processes_with_different_bases_are_refused(make_run: Any) -> None:
    adapter, others = make_run(**LORA).adapter, Others()
    check_base(adapter, Parallel())
    with refused(BrokenAtStart, "student"):
        check_base(adapter, others)
    assert others.asked == [int(adapter.base_identity[:15], 16)] and 0 < others.asked[0] < 2**62


@pytest.mark.parametrize("mode", ["fp16-split", "fp16-sr", "fp16-master"])
def test_a_policy_for_trained_half_weights_says_that_there_are_none(make_run: Any, mode: str) -> None:
    run = make_run(**LORA, student__adapter__base_dtype="float16")
    said = store_frozen(run.config, run.adapter, resolve(mode))
    assert "the adapter in float32" in said[0]
    assert [mode in note and "as under fp16-master" in note for note in said[1:]] == (
        [True] if mode != "fp16-master" else []
    )


def test_a_run_without_an_adapter_has_none(make_run: Any) -> None:
    run = make_run()
    assert run.adapter is None and run.num_trained == run.num_student_parameters
    assert {part.dtype for part in run.student.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("targets", ["q_proj, v_proj", ["q_proj", "v_proj"], ("q_proj", "v_proj")])
def test_targets_may_be_one_text_or_a_list(targets: Any) -> None:
    assert AdapterConfig(targets=targets).targets == ("q_proj", "v_proj")
    assert AdapterConfig(targets="all-linear").targets == AdapterConfig(targets=["all-linear"]).targets == ()
