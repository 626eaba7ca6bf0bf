"""What the plain kernel holds while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergence_cases import MEMBERS
from live_bytes import LiveBytes

from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.rows import TEMPORARIES, Logits, RowPlan, RowRecord, _run_block, rows_at_once

NUM_TOKENS = 2048
# Settings at which a divergence computes in float64 or takes a longer way.
ENDS = [
    divergences.make("skew_reverse_kl", {"alpha": 0.95}),
    divergences.make("skew_forward_kl", {"alpha": 0.95}),
    divergences.make("alpha_beta", {"alpha": 0.01, "beta": 0.02}),
    divergences.make("alpha_beta", {"alpha": 0.0, "beta": 0.5}),
    divergences.make("taid", {"interpolation": 0.05}),
]
HEADS = {"bare": {}, "all": {"bias": torch.ones(NUM_TOKENS), "scale": 0.5, "softcap": 20.0, "clamp": 15.0}}
ASKS: list[dict[str, Any]] = [{}, {"wants_teacher": True}, {"top_k": 8}, {"label_margin": 0.1}]


def blocks_alive(num_rows: int, member: Divergence, head: dict[str, Any], asked: dict[str, Any]) -> float:
    """The most that is alive at once in a block of so many rows, in [rows, V] of FP32."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(num_rows, NUM_TOKENS, generator=generator) for _ in range(2))
    ones = torch.ones(num_rows)
    record = RowRecord(
        targets=torch.arange(num_rows),
        temperatures=ones * 2,
        kd_weights=ones,
        ce_weights=ones,
        kd=torch.zeros(num_rows),
        ce=torch.zeros(num_rows),
        is_bad=torch.zeros(num_rows, dtype=torch.bool),
        clamped=torch.zeros(num_rows) if "clamp" in head else None,
    )
    asked = {"wants_teacher": False, **asked}
    plan = RowPlan(member, has_ce=True, is_unit_temperature=False, wants_student=True, **asked)
    with LiveBytes() as memory:
        _run_block(Logits(student, **head), Logits(teacher, **head), record, plan)
    return memory.peak / student.nbytes


@pytest.mark.parametrize("asked", ASKS, ids=str)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("member", [*MEMBERS, *ENDS], ids=repr)
def test_a_chunk_on_a_device_needs_three_blocks_of_temporaries_at_most(
    member: Divergence, head: dict[str, Any], asked: dict[str, Any]
) -> None:
    chunk = 640
    block = rows_at_once(chunk, 49_152, "cuda")
    num_rows = 8
    assert blocks_alive(num_rows, member, head, asked) * block <= TEMPORARIES * chunk
    assert TEMPORARIES == 3


@pytest.mark.parametrize("num_rows", [1, 7, 64, 640, 2048])
@pytest.mark.parametrize("num_tokens", [5, 320, 49_152, 151_936, 2_000_000])
def test_blocks_are_never_empty_and_small_chunks_are_not_cut(num_rows: int, num_tokens: int) -> None:
    for kind in ("cpu", "cuda"):
        assert rows_at_once(num_rows, num_tokens, kind) >= 1
    if num_rows * num_tokens <= 1 << 20:
        assert rows_at_once(num_rows, num_tokens, "cuda") == num_rows
