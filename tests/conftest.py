"""Fixtures that many tests share. Models are built once a session and never changed by a test."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network is a bug
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "support"))

import hypothesis
import pytest
import tiny
import torch

torch.set_num_threads(1)
# No test cuts the power, and a killed process loses nothing that it wrote: waiting for the disk is left out, which is
# a fifth of a short run. A descriptor that is closed still raises.
os.fsync = os.fstat  # type: ignore[assignment]
# No test asserts a duration, and neither does hypothesis: a busy machine is not a broken law.
# Examples are drawn anew in each run of the suite, so few are enough; `make test-slow` tries ten times as many.
hypothesis.settings.register_profile("laws", deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny teacher, a tinier student and a text, as a user would have them."""
    folder = tmp_path_factory.mktemp("world")
    tiny.save_trained(folder / "teacher", width=48, num_layers=2)
    tiny.save_model(folder / "student", "llama", width=32, num_layers=1, seed=2)
    tiny.save_text(folder / "train.jsonl")
    return folder


@pytest.fixture(scope="session")
def moe_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts as the teacher."""
    folder = tmp_path_factory.mktemp("moe_world")
    tiny.save_trained(folder / "teacher", "mixtral", width=32, num_layers=2, steps=60)
    tiny.save_model(folder / "student", "llama", width=24, num_layers=1, seed=2)
    tiny.save_text(folder / "train.jsonl")
    return folder


@pytest.fixture(scope="session")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("sound") / "model", width=16, num_layers=1)


@pytest.fixture
def model_folder(sound_model: Path, tmp_path: Path) -> Path:
    """A copy of a sound model that a test may damage."""
    return Path(shutil.copytree(sound_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def shared_run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The result of a finished run, trained once for all tests that ask for the same settings and faults.

    It is there to be read; a test that changes its folder takes a copy (`copied_run`).
    """
    from stillroom.config import load_config
    from stillroom.training.distill import distill

    made: dict[str, Any] = {}

    def run(inject: str = "", **over: Any) -> Any:
        key = json.dumps([inject, over], sort_keys=True)
        if key not in made:
            config = load_config(overrides=tiny.settings(world, **over))
            made[key] = distill(config, tmp_path_factory.mktemp("shared") / "run", device="cpu", inject=inject)
        return made[key]

    return run


@pytest.fixture
def copied_run(shared_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """A copy of such a run's folder, to be damaged or continued."""

    def copied(inject: str = "", **over: Any) -> Path:
        return Path(shutil.copytree(shared_run(inject, **over).folder, tmp_path / "run"))

    return copied


@pytest.fixture
def make_run(world: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Build a run of the tiny world in training mode: settings as keywords (`train__max_steps=3`) or by full name."""
    from stillroom.config import load_config
    from stillroom.precision.device import find_device
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models

    with ExitStack() as logs:

        def build(settings: Mapping[str, Any] | None = None, **over: Any) -> Any:
            config = load_config(overrides={**tiny.settings(world, **over), **(settings or {})})
            device = find_device("cpu")
            log = logs.enter_context(EventLog(tmp_path / f"{next(numbers)}.jsonl"))
            run = build_run(config, tmp_path, log, device=device, models=load_models(config, device))
            run.student.train()
            return run

        numbers = count()
        yield build


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """From the call on, the answer lists every way in which a value is read from the device."""

    def begin() -> list[str]:
        reads: list[str] = []
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            original = getattr(torch.Tensor, name)

            def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
                reads.append(_name)
                return _original(self, *args)

            monkeypatch.setattr(torch.Tensor, name, counted)
        return reads

    return begin
