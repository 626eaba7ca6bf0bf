"""Runs of the product on a card made of main memory, in processes of their own.

    python card_runs.py GUARD.so    # then the path of a job on each line

A job is a JSON file: the kind of card, the worlds (teacher, student, text), and the runs. The answer is written next to
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card_cases import CASES, SHORT, Case
from card_watch import Watch, planted

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


def run_case(case: Case, worlds: dict[str, str], folder: Path, device: str) -> dict[str, Any]:
    import tiny

    from stillroom.config import load_config

    world = Path(worlds[case.world])
    config = load_config(overrides={**tiny.settings(world), **SHORT, **case.settings})
    watch = Watch(case)
    with watch.active(), planted(case.mutant):
        found = _ACTS[case.act](case, config, world, folder, device, watch)
    return {"broken": watch.broken, "steps": watch.steps, **found}


def _train(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.training.distill import distill

    return _told(distill(config, folder, device=device, inject=case.inject))


def _told(result: Any) -> dict[str, Any]:
    import torch

    from stillroom.telemetry import read_events

    events = list(read_events(result.folder / "events.jsonl"))
    return {
        "precision": result.summary["precision"],
        "status": result.summary["status"],
        "actions": [event["action"] for event in events if event["event"] == "guard"],
        "notes": [event["text"] for event in events if event["event"] == "note"],
        "gpu_memory": [event["gpu_memory_gb"] for event in events if event["event"] == "step"],
        "adds_in_half_after": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "loss_scale": [event["loss_scale"] for event in events if event["event"] == "step"],
    }


def _replay(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.training.replay import replay

    told = _train(case, config, world, folder, device, watch)
    found = replay(folder, 3, device=device)
    return {**told, "loss": found["now"]["loss"]}


def _evaluate(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.metrics.evaluate import assess

    options: dict[str, Any] = {"teacher": str(world / "teacher"), "max_length": 32, "max_batches": 2}
    student, text = str(world / "student"), str(world / "train.jsonl")
    found = [assess(student, text, device=name, **options)["student"] for name in (device, "cpu")]
    return {"perplexity": [one["perplexity"] for one in found], "kl": [one["kl"] for one in found]}


def _generate(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    import torch

    from stillroom.models.generate import open_writer

    writers = [open_writer(str(world / "teacher"), torch.device(name)) for name in (device, "cpu")]
    made = [writer.continuations(["the still room"], max_new_tokens=6)[0] for writer in writers]
    return {"texts": [one.text + one.stopped for one in made]}


def _peaks(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    """The largest FP16 value where some tensors are in main memory and some on the card."""
    import torch

    from stillroom.training.preflight import PeakWatch

    found = []
    for here, there in ((3.0, 5.0), (7.0, 5.0), (float("nan"), 5.0)):
        with PeakWatch() as peaks:
            torch.full((4,), here, dtype=torch.float16) * 1.0
            torch.full((4,), there, dtype=torch.float16, device=device) * 1.0
        found.append(str(peaks.peak()))
    return {"peaks": found}


def _bench(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    """The parts of `stillroom bench` with the model's seconds in the place of measured ones."""
    from dataclasses import replace
    from types import SimpleNamespace
    from unittest import mock

    import torch

    from stillroom.bench import parts, run
    from stillroom.bench.predictions import predictions
    from stillroom.models.random import LlamaShape
    from stillroom.precision.gpus import find_gpu, seconds_of

    gpu, known = find_gpu("T4"), predictions()
    shape = LlamaShape(1, 32, 64, 2, 1, 128)
    small = parts.Size(shape, shape, rows=2, length=16, chunk=16)
    found = {}
    for said, rates in (("peak", gpu.peak), ("sustained", gpu.sustained)):

        class Modelled(parts.Clock):
            def time(self, name: str, work: Any, kernels: Any = (), rates: Any = rates) -> float:
                work()
                if name in known:
                    return float(known[name].at(rates) or 0.0)
                # Small operands would take as long as their launch: rates are asked for, not times.
                bare = rates if name == "launches" else replace(rates, launch=0.0, host=0.0)
                return seconds_of(kernels, bare) if kernels else 1.0

            def now(self) -> Any:
                return 0.0

            def between(self, name: str, begin: Any, end: Any, rates: Any = rates) -> float:
                whole = float(known[name].at(rates) or 0.0) if name in known else 1.0
                return whole / _SPANS.get(name.rpartition("/")[2], 1)

        clock = Modelled(torch.device(device))
        named = SimpleNamespace(name="triton", reason="")
        with (
            mock.patch.object(parts, "size_for", return_value=small),
            mock.patch.object(parts, "choose_kernel", return_value=named),
            mock.patch.object(parts, "gpu_state", return_value={}),
        ):
            result: dict[str, Any] = {"facts": {"device": "Tesla T4"}}
            for name in ("constants", "kernels", "step"):
                result[name] = parts.PARTS[name](torch.device(device), clock)
        found[said] = run.verdict(result)
        found[said]["step"] = result["step"]["rows"]
    return found


_SPANS = {"optimizer": 2}  # a step calls the optimizer twice: for the norm, and to update


def _beside(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    """The same run on the card and on the CPU."""
    from stillroom.training.distill import distill

    told = _train(case, config, world, folder, device, watch)
    distill(config, folder.with_name("cpu"), device="cpu")
    return told


def _cut(config: Any, folder: Path, watch: Watch, *, first: str, then: str) -> dict[str, Any]:
    """A run that ends at its fourth attempt on one device and goes on on another."""
    from stillroom.training.distill import distill, resume

    watch.stop_at = 4
    with contextlib.suppress(RuntimeError):
        distill(config, folder, device=first)
    watch.stop_at = 0
    return _told(resume(folder, device=then))


def _from_cpu(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    return _cut(config, folder, watch, first="cpu", then=device)


def _to_cpu(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    return _cut(config, folder, watch, first=device, then="cpu")


def _cut_and_resumed(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    """Against the same run uncut: the students' files are compared."""
    from stillroom.training.distill import distill

    told = _cut(config, folder, watch, first=device, then=device)
    distill(config, folder.with_name("uncut"), device=device)
    files = [where / "student" / "model.safetensors" for where in (folder, folder.with_name("uncut"))]
    return {**told, "is_same": files[0].read_bytes() == files[1].read_bytes()}


_ACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": _train,
    "replay": _replay,
    "evaluate": _evaluate,
    "generate": _generate,
    "peaks": _peaks,
    "bench": _bench,
    "beside": _beside,
    "from cpu": _from_cpu,
    "to cpu": _to_cpu,
    "cut": _cut_and_resumed,
}


def _saves_from_main_memory() -> None:
    """A limit of the card: its tensors have no memory that safetensors could look at."""
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def moved(self: Any, *args: Any, **options: Any) -> None:
        where = next(self.parameters()).device
        self.to("cpu")
        try:
            save(self, *args, **options)
        finally:
            self.to(where)

    PreTrainedModel.save_pretrained = moved


def carry_out(job: Path) -> None:
    """Make this process one with a card, and write beside the job what its runs came to."""
    import torch

    asked = json.loads(job.read_text())
    if asked["card"] == "cuda":
        import card_cuda

        card_cuda.install(tuple(asked["capability"]))
        device = "cuda"
    else:
        import card_private

        card_private.install()
        device = card_private.NAME
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    _saves_from_main_memory()
    answers = {}
    for name in asked["runs"]:
        folder = job.parent / name.replace(" ", "-") / "run"
        folder.parent.mkdir()
        try:
            answers[name] = run_case(CASES[name], asked["worlds"], folder, device)
        except Exception as error:  # noqa: BLE001 - the answer says what happened
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            answers[name] = {"error": f"{type(error).__name__}: {error}", "at": frames[-6:]}
        shutil.rmtree(folder.parent)
    job.with_suffix(".answer").write_text(json.dumps(answers))


def serve(guard: Path) -> None:
    """Carry out jobs whose paths come line by line, each in a fork: torch is imported once, after the guard."""
    import card_cuda

    card_cuda.load_guard(guard)
    import stillroom.training.distill  # noqa: F401 - what every fork needs

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                carry_out(Path(line.strip()))
            except BaseException:  # noqa: BLE001 - a fork must not read the next job
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
