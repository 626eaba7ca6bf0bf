"""Who takes part in the training benchmark: each is something that can take one optimizer step when asked.

Same models, data, batch, clipping at 1.0 and fused AdamW. All learn by forward KL at T = 1 alone, because that is what
trl's trainer offers; only the seeds' loop has its own half of cross-entropy.
"""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from world import Size, settings

from stillroom.config import load_config
from stillroom.core.types import Batch, Needs, TopKSignal
from stillroom.losses.head.rows import keep_top_k
from stillroom.precision.device import find_device
from stillroom.teachers import Teacher
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.models import in_bf16, load_models
from stillroom.training.run import Run, RunState
from stillroom.training.step import train_step

NUM_KEPT = 64
Step = Callable[[], None]


def make_run(folder: Path, size: Size, **over: Any) -> Run:
    """A Stillroom run, built as the engine builds it."""
    config = load_config(overrides={**settings(folder, size), **over})
    device = find_device("cpu")
    out = Path(tempfile.mkdtemp(dir=folder))
    return build_run(config, out, EventLog(out / "events.jsonl"), device=device, models=load_models(config, device))


def stillroom(folder: Path, size: Size, **over: Any) -> Step:
    """The engine's own step: guard, evidence, clipping and update included."""
    run = make_run(folder, size, **over)
    return _steps_of(run)


def _steps_of(run: Run) -> Step:
    state = RunState()
    run.student.train()
    batches = _batches(run)
    turn = iter(range(10**9))

    def step() -> None:
        outcome = train_step(run, state, [batches[next(turn) % len(batches)]])
        assert outcome.verdict.action == "keep", outcome.verdict

    return step


class MemoryTeacher(Teacher):
    """The teacher's 64 likeliest tokens and the mass of the rest for every batch, in main memory."""

    kind = "top-k"

    def __init__(self, run: Run) -> None:
        self._signals: dict[tuple[str, ...], TopKSignal] = {}
        for batch in _batches(run):
            self._signals[batch.sample_ids] = self._ask(run, batch)

    @staticmethod
    @torch.no_grad()
    def _ask(run: Run, batch: Batch) -> TopKSignal:
        signal: Any = run.teacher.observe(batch, Needs())
        parts = [
            keep_top_k(F.linear(rows, signal.head.weight).float(), NUM_KEPT, torch.ones(len(rows)))
            for rows in signal.hidden.split(256)
        ]
        return TopKSignal(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "log_probs")),
                          torch.cat([part.tail_log_mass for part in parts]))  # fmt: skip

    def observe(self, batch: Batch, needs: Needs) -> TopKSignal:
        return self._signals[batch.sample_ids]


def stillroom_stored(folder: Path, size: Size, **over: Any) -> Step:
    """The same with the teacher's answers at hand: the teacher itself is gone."""
    run = make_run(folder, size, **over)
    run = replace(run, teacher=MemoryTeacher(run))
    return _steps_of(run)


# -- the limit -----------------------------------------------------------------------------------------------------


def _batches(run: Run) -> list[Batch]:
    """The full batches of an epoch: a last one with fewer rows would be the fastest step of all."""
    found = [batch for index in range(run.loader.num_batches) for batch in run.loader.window(index)]
    full = [batch for batch in found if batch.num_scored == max(other.num_scored for other in found)]
    assert len(full) > 1
    return full


def limit(folder: Path, size: Size) -> Step:
    """Both backbones, the four products of the heads and a fused AdamW: what no trainer can leave out."""
    run = make_run(folder, size)
    student, teacher, batches = run.student.model, run.teacher.as_model().model, _batches(run)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)
    turn = iter(range(10**9))

    def step() -> None:
        ids = batches[next(turn) % len(batches)].input_ids
        with torch.no_grad():
            answer = teacher.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            torch.mm(answer, teacher.lm_head.weight.t())
        hidden = student.model(input_ids=ids, use_cache=False).last_hidden_state
        flat, weight = hidden.detach().flatten(0, 1), student.lm_head.weight.detach()
        logits = torch.mm(flat, weight.t())
        student.lm_head.weight.grad = torch.mm(logits.t(), flat)
        hidden.backward(torch.mm(logits, weight).view_as(hidden).mul_(1e-6))
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- the seeds and the peer ----------------------------------------------------------------------------------------


def seeds_loop(folder: Path, size: Size) -> Step:
    """The loop of the seeds: full logits of both models, kl_div, half cross-entropy, AdamW as it comes."""
    run = make_run(folder, size)
    student, teacher, batches = run.student.model, run.teacher.as_model().model, _batches(run)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    turn = iter(range(10**9))

    def step() -> None:
        batch = batches[next(turn) % len(batches)]
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        logits = student(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        kd = F.kl_div(F.log_softmax(logits, -1), F.softmax(teacher_logits, -1), reduction="batchmean")
        (0.5 * kd + 0.5 * F.cross_entropy(logits, batch.targets.flatten())).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Turns:
    """Lets a trainer that owns its loop take one step at a time, from a thread that waits in between."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: list[BaseException] = []

    def wait(self) -> None:
        self._go.acquire()

    def report(self) -> None:
        self._done.release()

    def run(self, work: Callable[[], object]) -> None:
        def body() -> None:
            torch.set_num_threads(torch.get_num_threads())
            try:
                work()
            except Exception as error:  # noqa: BLE001  (handed to whoever asked for the step)
                self._error.append(error)
                self._done.release()

        threading.Thread(target=body, daemon=True).start()

    def step(self) -> None:
        self._go.release()
        self._done.acquire()
        if self._error:
            raise self._error[0]


def trl_gkd(beta: float, *, is_bf16: bool = False) -> Callable[[Path, Size], Step]:
    """trl's GKDTrainer, off-policy; everything else as it comes (fused AdamW is its default).

    In BF16 its best setting: `bf16=True` and a teacher with BF16 weights.
    """

    def prepare(folder: Path, size: Size) -> Step:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        run = make_run(folder, size, **{"precision.mode": "fp32"})
        teacher = run.teacher.as_model().model
        if is_bf16:
            in_bf16(teacher)
        turns = _Turns()

        class OneByOne(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                turns.wait()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                turns.report()

        def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
            ids = torch.tensor([item["input_ids"] for item in items])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

        args = GKDConfig(
            output_dir=str(folder / f"trl-{beta}"), max_steps=100_000, per_device_train_batch_size=size.batch,
            learning_rate=1e-4, lmbda=0.0, beta=beta, max_grad_norm=1.0, weight_decay=0.0, report_to=[],
            logging_strategy="no", save_strategy="no", use_cpu=True, gradient_checkpointing=False, bf16=is_bf16,
            fp16=False, disable_tqdm=True, dataloader_num_workers=0, seed=0,
        )  # fmt: skip
        rows = [row.tolist() for batch in _batches(run) for row in batch.input_ids]
        trainer = GKDTrainer(
            model=run.student.model, teacher_model=teacher, args=args, data_collator=collate,
            processing_class=copy.copy(run.tokenizer), train_dataset=Dataset.from_dict({"input_ids": rows}),
            callbacks=[OneByOne()],
        )  # fmt: skip
        turns.run(trainer.train)
        return turns.step

    return prepare


def smaller(size: Size, **changes: int) -> Size:
    return replace(size, **changes)


LIMIT, PEER = "limit: backbones, four products, fused AdamW", "trl GKD trainer, forward KL (beta 0)"
CONTENDERS: dict[str, Callable[[Path, Size], Step]] = {
    LIMIT: limit,
    "stillroom": stillroom,
    "stillroom, plain kernel": lambda folder, size: stillroom(folder, size, **{"objectives.kernel": "plain"}),
    "stillroom, stored top-64 + tail": stillroom_stored,
    PEER: trl_gkd(0.0),
    "trl GKD trainer as it comes (JSD 0.5)": trl_gkd(0.5),
    "loop of the seeds": seeds_loop,
}
