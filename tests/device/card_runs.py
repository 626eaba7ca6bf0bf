"""Runs of the product on a card made of main memory, in a process of their own:

    python card_runs.py JOB.json

The job names the kind of card, the worlds (teacher, student, text), and the runs. The answer is written beside it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]


@dataclass(frozen=True)
class Case:
    """A run: what is asked, and what its steps may do."""

    settings: dict[str, Any] = field(default_factory=dict)
    world: str = "dense"
    inject: str = ""
    num_reads: int = 1  # at most, of a step that is kept
    copies_from: tuple[str, ...] = ("types.py",)  # files whose copies to the card are planned: the batch
    mutant: str = ""
    act: str = "train"


_SHORT = {
    "train.max_steps": 4,
    "train.eval_steps": 2,
    "train.save_steps": 2,
    "train.batch_size": 2,
    "eval.max_batches": 1,
    "eval.samples": 0,
    "guard.snapshot_steps": 2,
}
_ROUTER = {"teacher.router.probe_steps": 1, "teacher.router.force": True, "teacher.router.every": 1}
_OFFLOAD = ("types.py", "teachers/offload.py")
_EXPERTS = "transformers/integrations/moe.py"  # reads how many tokens each expert has, on cards below sm_80
_FOUR = {"feature": 0.1, "layerwise": 0.1, "attention": 0.1, "contrastive": 0.1}


def _router(mode: str, **over: Any) -> Case:
    settings = {**_ROUTER, "teacher.router.mode": mode, **over}
    return Case(
        settings,
        "moe",
        num_reads=2 if mode in ("truth", "sar", "sar-joint", "sar-meta") else 1,  # the gates' own evidence
        # Drawn on the CPU, so that a run that goes on on another device draws the same experts.
        copies_from=("types.py", "models/routers.py") if mode == "knowledge-augmentation" else ("types.py",),
    )


def _mode(mode: str, **over: Any) -> Case:
    return Case({"precision.mode": mode, **{key.replace("__", "."): value for key, value in over.items()}})


CASES: dict[str, Case] = {
    "auto": Case({"eval.samples": 1, "eval.sample_tokens": 3}),
    **{mode: _mode(mode) for mode in ("fp32", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr", "bf16-mixed")},
    "bf16 moments": _mode("fp16-sr", precision__moments="bfloat16"),
    "accumulation": _mode("fp16-master", train__gradient_accumulation_steps=2),
    "accumulation mixed": _mode("fp16-mixed", train__gradient_accumulation_steps=2),
    "inner": Case({f"objectives.{name}.weight": weight for name, weight in _FOUR.items()}),
    "top-k": Case({"objectives.kd.top_k": 8}),
    "labels alone": Case({"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}),
    "jsd": Case({"objectives.kd.divergence": "jsd"}),
    "recomputed": Case({"student.gradient_checkpointing": True}),
    "fp32 teacher": Case({"teacher.dtype": "float32"}),
    "shared heads": Case(world="grouped"),
    "shrink": Case({"student.init": "shrink", "student.shrink.layers": 1}),
    "offload": Case({"teacher.placement": "offload", "eval.samples": 1, "eval.sample_tokens": 2}, copies_from=_OFFLOAD),
    "offload fp32": Case(
        {"teacher.placement": "offload", "precision.mode": "fp32", "train.gradient_accumulation_steps": 2},
        copies_from=_OFFLOAD,
    ),
    "router truth": _router("truth"),
    "router sar": _router("sar"),
    "router sar-joint": _router("sar-joint"),
    "router sar-meta": _router("sar-meta"),
    "router sar-transient": _router("sar-transient"),
    "router all-experts": _router("all-experts"),
    "router augmentation": _router("knowledge-augmentation"),
    "nan_weight": Case(inject="nan_weight@3"),
    "nan_moment": Case(
        {"precision.mode": "fp16-master"}, inject="nan_moment@3", copies_from=("types.py", "engine/inject.py")
    ),
    "inf_logit": Case(inject="inf_logit@3"),
    "inf_grad": Case(inject="inf_grad@3"),
    "teacher_nan": Case(inject="teacher_nan@3"),
    "huge_weight": Case(inject="huge_weight@3"),
    "replay": Case({"precision.mode": "fp16-mixed"}, inject="inf_grad@3", act="replay"),
    "evaluate": Case(act="evaluate"),
    "generate": Case(act="generate"),
    "from the CPU": Case(act="from cpu"),
    "from the CPU fp16": _mode("fp16-split"),
    "to the CPU": Case(act="to cpu"),
    "cut and resumed": Case({"precision.mode": "fp16-sr"}, act="cut"),
    "mutant item": Case(mutant="item"),
    "mutant copy": Case(mutant="copy"),
    "mutant wrong device": Case(mutant="wrong device"),
    "mutant ring": Case(mutant="ring"),
    "mutant generator": Case({"precision.mode": "fp16-sr"}, mutant="generator"),
    "mutant copied out": Case({"teacher.placement": "offload"}, copies_from=_OFFLOAD, mutant="copied out"),
}
CASES["from the CPU fp16"] = Case(CASES["from the CPU fp16"].settings, act="from cpu")
CASES["router sar offload"] = Case(
    {**CASES["router sar"].settings, "teacher.placement": "offload", "teacher.router.gradient_checkpointing": True},
    "moe", num_reads=2, copies_from=_OFFLOAD,
)  # fmt: skip


# -- what is watched -----------------------------------------------------------------------------------------


class Watch:
    """The laws of a run on a card, looked at from outside: what breaks them is written down."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.broken: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.stop_at = 0  # end the run before this attempt

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        from stillroom.engine import loop
        from stillroom.snapshots import SnapshotRing

        step, keep = loop.train_step, SnapshotRing.keep
        loop.train_step = lambda *args: self._step(step, *args)
        SnapshotRing.keep = lambda ring, saved: self._keep(keep, ring, saved)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            loop.train_step, SnapshotRing.keep = step, keep  # type: ignore[method-assign]

    def _step(self, step: Callable[..., Any], run: Any, state: Any, window: Any) -> Any:
        from card import LEDGER, Card

        if len(self.steps) + 1 == self.stop_at:
            raise RuntimeError("cut here")
        on_card = run.device.type == Card.device.type
        if on_card and run.optimizer._generator.device.type != Card.device.type:
            self.broken.append("the optimizer's generator is not on the card")
        LEDGER.clear()
        outcome = step(run, state, window)
        self.steps.append(
            {
                "verdict": outcome.verdict.action,
                "loss": outcome.evidence.loss,
                "live": LEDGER.live,
                "peak": LEDGER.peak,
                "kernels": sum(LEDGER.kernels.values()),
                "products": dict(LEDGER.products),
                "attention": dict(LEDGER.attention),
                "copied_in": sum(size for _place, size, _pinned in LEDGER.copies_in),
                "pinned_in": sum(size for _place, size, pinned in LEDGER.copies_in if pinned),
            }
        )
        if on_card and outcome.verdict.action == "keep":
            self._judge(outcome.evidence.step)
        return outcome

    def _judge(self, step: int) -> None:
        """A step that is kept reads once, and copies nothing but what is planned."""
        from card import LEDGER

        reads = [read for read in LEDGER.reads if f"at {_EXPERTS}" not in read]
        if not 1 <= len(reads) <= self.case.num_reads:
            self.broken.append(f"step {step} read {len(reads)} times: {', '.join(reads)}")
        if LEDGER.copies_out:
            places = sorted({place for place, _size in LEDGER.copies_out})
            self.broken.append(f"step {step} copied to main memory: {', '.join(places)}")
        odd = sorted(
            {place for place, _size, _pinned in LEDGER.copies_in if not place.startswith(self.case.copies_from)}
        )
        if odd:
            self.broken.append(f"step {step} copied to the card: {', '.join(odd)}")

    def _keep(self, keep: Callable[..., None], ring: Any, saved: Any) -> None:
        """Snapshots are in main memory: the card holds as much after one as before."""
        from card import LEDGER

        before = LEDGER.live
        keep(ring, saved)
        if LEDGER.live > before:
            self.broken.append(f"a snapshot took {LEDGER.live - before} bytes of the card")
        tensors = [tensor for group in ring.newest().tensors.values() for tensor in group.values()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self.broken.append("a snapshot is on the card")


# -- faults that are planted in the product ------------------------------------------------------------------


@contextlib.contextmanager
def planted(mutant: str) -> Iterator[None]:
    """The product with one mistake of the kind that a CPU does not show."""
    import torch

    from stillroom.checkpoint import Saved
    from stillroom.objectives.mix import Mix
    from stillroom.precision import AdamW
    from stillroom.teachers.offload import Offloaded

    score, made = Mix.score, AdamW.__init__

    def spoiled(self: Any, view: Any, signal: Any, batch: Any, *rest: Any) -> Any:
        found = score(self, view, signal, batch, *rest)
        if torch.is_grad_enabled():
            if mutant == "item":
                found.loss.item()
            elif mutant == "copy":
                torch.tensor([1.0, 2.0], device=view.hidden.device)
            else:
                found.loss.detach() * torch.ones(2)
        return found

    def with_cpu_generator(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._generator = torch.Generator()

    def on_the_card(self: Any) -> Any:
        tensors = {name: {key: tensor.clone() for key, tensor in group.items()} for name, group in self.tensors.items()}
        return Saved(self.step, tensors, json.loads(json.dumps(self.scalars)))

    def copied_out(self: Any) -> None:
        for tensor in self._tensors():
            tensor.data = tensor.data.to("cpu")

    patches: dict[str, tuple[Any, str, Any]] = {
        "ring": (Saved, "copied", on_the_card),
        "generator": (AdamW, "__init__", with_cpu_generator),
        "copied out": (Offloaded, "_send_home", copied_out),
        **dict.fromkeys(("item", "copy", "wrong device"), (Mix, "score", spoiled)),
    }
    if not mutant:
        yield
        return
    owner, name, replacement = patches[mutant]
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


# -- running -------------------------------------------------------------------------------------------------


def run_case(case: Case, worlds: dict[str, str], folder: Path, device: str) -> dict[str, Any]:
    import tiny

    from stillroom.config import load_config

    world = Path(worlds[case.world])
    config = load_config(overrides={**tiny.settings(world), **_SHORT, **case.settings})
    watch = Watch(case)
    with watch.active(), planted(case.mutant):
        found = _ACTS[case.act](case, config, world, folder, device, watch)
    return {"broken": watch.broken, "steps": watch.steps, **found}


def _train(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.engine.distill import distill

    return _told(distill(config, folder, device=device, inject=case.inject))


def _told(result: Any) -> dict[str, Any]:
    from stillroom.telemetry import read_events

    events = list(read_events(result.folder / "events.jsonl"))
    return {
        "precision": result.summary["precision"],
        "status": result.summary["status"],
        "actions": [event["action"] for event in events if event["event"] == "guard"],
        "notes": [event["text"] for event in events if event["event"] == "note"],
        "gpu_memory": [event["gpu_memory_gb"] for event in events if event["event"] == "step"],
        "loss_scale": [event["loss_scale"] for event in events if event["event"] == "step"],
    }


def _replay(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.engine.replay import replay

    told = _train(case, config, world, folder, device, watch)
    found = replay(folder, 3, device=device)
    return {**told, "loss": found["now"]["loss"]}


def _evaluate(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.assess import assess

    options: dict[str, Any] = {"teacher": str(world / "teacher"), "max_length": 32, "max_batches": 2}
    student, text = str(world / "student"), str(world / "train.jsonl")
    found = [assess(student, text, device=name, **options)["student"] for name in (device, "cpu")]
    return {"perplexity": [one["perplexity"] for one in found], "kl": [one["kl"] for one in found]}


def _generate(case: Case, config: Any, world: Path, folder: Path, device: str, watch: Watch) -> dict[str, Any]:
    from stillroom.assess import continue_text

    texts = [
        continue_text(str(world / "teacher"), "the still room", device=name, max_new_tokens=6)[0]
        for name in (device, "cpu")
    ]
    return {"texts": texts}


def _cut(config: Any, folder: Path, watch: Watch, *, first: str, then: str) -> dict[str, Any]:
    """A run that ends at its fourth attempt on one device and goes on on another."""
    from stillroom.engine.distill import distill, resume

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
    from stillroom.engine.distill import distill

    told = _cut(config, folder, watch, first=device, then=device)
    distill(config, folder.with_name("uncut"), device=device)
    files = [where / "student" / "model.safetensors" for where in (folder, folder.with_name("uncut"))]
    return {**told, "is_same": files[0].read_bytes() == files[1].read_bytes()}


_ACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": _train,
    "replay": _replay,
    "evaluate": _evaluate,
    "generate": _generate,
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


def main(job: Path) -> None:
    asked = json.loads(job.read_text())
    if asked["card"] == "cuda":
        import card_cuda

        card_cuda.load_guard(Path(asked["guard"]))
        import torch

        card_cuda.install(tuple(asked["capability"]))
        device = "cuda"
    else:
        import card_private
        import torch

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
