"""Laws of old versions of torch: what they lack is named before any process waits for another."""

from __future__ import annotations

import pytest
from refusals import refused

from stillroom.core.errors import BrokenAtStart
from stillroom.parallel import base
from stillroom.parallel.base import join


@pytest.mark.parametrize(
    ("names", "strategy", "what"),
    [("DDP_OPTIONS", "ddp", "several processes"), ("FSDP_METHODS", "fsdp", "a model in parts")],
)
def test_a_torch_that_is_too_old_is_refused_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, names: str, strategy: str, what: str
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(base, names, (*getattr(base, names), "of_a_later_torch"))
    with refused(BrokenAtStart, "torch", "of_a_later_torch", what) as caught:
        join(1.0, strategy)
    assert caught.value.exit_code == 20


def test_the_installed_torch_has_all_that_is_asked_for() -> None:
    base.check_torch(is_sharded=True)
