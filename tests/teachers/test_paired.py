"""A teacher that reads its own tokens."""

from __future__ import annotations

from pathlib import Path

import pair_tokenizers
import paired_batches
import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.core.errors import ConfigError
from stillroom.core.types import Needs
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.teachers.base import kind_of
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.paired import PairedTeacher


@pytest.fixture(scope="module")
def teacher() -> PairedTeacher:
    tokenizer = pair_tokenizers.built(paired_batches.PAIR[1])
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(tiny.config("llama", vocab_size=len(tokenizer))).eval()
    cpu = torch.device("cpu")
    live = LiveTeacher(network, vocab_size=len(tokenizer), device=cpu, offload=False, is_described=True)
    return PairedTeacher(live, tokenizer, Coverage(10, 9, 5, 4, 6, 4))


def test_its_answer_is_what_its_network_says_of_its_own_rows(teacher: PairedTeacher, tmp_path: Path) -> None:
    batch = paired_batches.corpus(tmp_path, packing="rows").train.batch(range(3))
    assert batch.other is not None
    signal = teacher.observe(batch, Needs(hidden_layers=frozenset({1})))
    assert (
        kind_of(signal) == teacher.kind == "paired" and signal.taps["hidden.1"].shape[:2] == batch.other.targets.shape
    )
    model = teacher.as_model().model
    with torch.no_grad():
        whole = model(input_ids=batch.other.input_ids, attention_mask=batch.other.attention_mask).logits
    logits = signal.hidden @ signal.head.weight.T
    assert torch.allclose(logits, whole.reshape(-1, whole.shape[-1])[batch.other.positions], atol=1e-5)


def test_a_batch_without_its_rows_is_refused(teacher: PairedTeacher, tmp_path: Path) -> None:
    batch = paired_batches.corpus(tmp_path, packing="rows").train.batch([0])
    assert batch.other is not None
    with refused(ConfigError, "data.train"):
        teacher.observe(batch.other, Needs())


def test_only_what_bytes_have_is_comparable(teacher: PairedTeacher) -> None:
    row = {
        "perplexity": 4.0,
        "bits_per_byte": 1.0,
        "kl": 0.0,
        "intervals": {"perplexity": [3, 5], "bits_per_byte": [1, 2]},
    }
    kept = teacher.comparable({**row, "parameters": 7})
    assert kept == {
        "perplexity": None, "bits_per_byte": 1.0, "kl": None, "intervals": {"bits_per_byte": [1, 2]}, "parameters": 7,
    }  # fmt: skip
    assert teacher.summary()["two_tokenizers"]["left_out_bytes"] == 1
