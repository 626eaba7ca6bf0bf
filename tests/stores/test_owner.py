"""Laws of owners: a living process is never taken for dead, and one that cannot be seen is not judged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stillroom.stores.owner import describe_process, is_dead


def test_a_living_process_is_alive_also_after_the_clock_was_set() -> None:
    told = describe_process()
    assert not is_dead(told) and not is_dead(told | {"began": told["began"] + 1.5})


def test_a_process_that_ended_is_dead_and_so_is_one_whose_number_was_given_away() -> None:
    told = describe_process()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert is_dead(told | {"pid": child.pid})
    assert is_dead(told | {"pid": os.getppid(), "began": 1.0}), "another process has its number"


@pytest.mark.parametrize("over", [{"host": "another machine"}, {"processes": "another container"}])
def test_a_process_that_cannot_be_seen_from_here_is_not_dead(over: dict[str, str]) -> None:
    assert not is_dead(describe_process() | {"pid": 2**22 - 7} | over)
