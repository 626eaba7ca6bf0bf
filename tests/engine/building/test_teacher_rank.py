"""Laws of a teacher on processes of its own: what it cannot do is refused by name, and one process holds it too."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.config import load_config
from stillroom.engine.building.teacher_rank import unused_ranks
from stillroom.errors import ConfigError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gates": ({"teacher.router.mode": "sar"}, "leave teacher.router.mode out"),
    "quantised": ({"teacher.quantisation": "int8"}, "leave teacher.quantisation out"),
    "served": ({"teacher.server": "http://localhost:1"}, "leave teacher.server out"),
    "cached": ({"teacher.cache": "auto"}, "leave teacher.cache out"),
    "streamed": ({"teacher.placement": "stream"}, "leave teacher.placement out"),
    "sharded": ({"teacher.placement": "shard"}, "leave teacher.placement out"),
    "few tokens": ({"teacher.signal.kind": "top_k"}, "leave teacher.signal.kind out"),
    "hidden states": ({"objectives.feature.weight": 0.1}, "feature look inside the teacher"),
    "attention": ({"objectives.attention.weight": 0.1}, "attention look inside the teacher"),
    "cut": ({"student.init": "shrink"}, "student.init = 'shrink' cuts it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_teacher_on_processes_of_its_own_refuses_by_name(name: str) -> None:
    over, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"teacher.ranks": 1} | over)
    assert words in str(caught.value)


def test_one_process_holds_the_teacher_too_and_says_so() -> None:
    config = load_config(overrides={"teacher.ranks": 1})
    assert "has no effect" in unused_ranks(config, 1, has_link=False)[0]
    assert unused_ranks(config, 1, has_link=True) == unused_ranks(load_config(), 1, has_link=False) == []
