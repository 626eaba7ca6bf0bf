"""One optimizer step of each contender on the fake card: Stillroom's own step, trl's GKD loss, and the naive loop.

All learn by forward KL at T = 1 on the same rows, clip at 1.0 and update with AdamW. Stillroom's weights are what
`auto` chooses, those of the others FP32 under autocast; the teacher is half. trl's trainer cannot be built without a
device, so its `compute_loss` is called as it stands, and what accelerate and the trainer put around it is written out
here: both forwards under autocast with their outputs cast to FP32, the scaler, clipping, fused AdamW.
"""

from __future__ import annotations

import json
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from design import noted_rows
from fake_card import DEVICE
from recorder import Recorder
from shapes import VOCABULARY, Problem
from torch import Tensor
from torch.nn import functional as F

from stillroom.config import load_config
from stillroom.core.launch import Launch
from stillroom.losses.head import kernel
from stillroom.losses.head.kernel_triton import TritonKernel
from stillroom.models import LoadedModel
from stillroom.models.anatomy import anatomy_of
from stillroom.models.student import attend_causally
from stillroom.teachers.build import find_source
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.models import Models
from stillroom.training.run import RunState
from stillroom.training.step import train_step

Step = Callable[[], None]
ROWS = "head rows"  # fused by torch.compile whether or not the bodies are compiled
PHASES = ("teacher", "student forward", "head", "student backward", "optimizer", "rest")


def half_of(capability: tuple[int, int]) -> torch.dtype:
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


# -- ours ----------------------------------------------------------------------------------------------------------


@contextmanager
def stillroom(
    problem: Problem, recorder: Recorder, dtype: torch.dtype, *, has_triton: bool = False, **over: Any
) -> Iterator[Step]:
    """The engine's step on a run that the engine built; only loading and trying the models is left out.

    `has_triton`: its rows go through the Triton kernel, otherwise through what torch.compile makes of the plain one.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        tokenizer, text = _text(folder, problem)
        teacher = problem.teacher.build(problem.length, dtype).eval().requires_grad_(False)
        student = problem.student.build(problem.length, torch.float32)
        for network in (teacher, student):
            attend_causally(network)
        loaded = [
            LoadedModel(network, tokenizer, anatomy_of(network), is_described=True) for network in (teacher, student)
        ]
        settings = {
            "teacher.model": "built", "student.model": "built", "data.train": str(text), "data.eval_share": 0.1,
            "data.max_length": problem.length, "train.batch_size": problem.rows, "train.max_steps": 1000,
            "objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0, "objectives.kd.temperature": 1.0,
            "telemetry.log_steps": 1000, "train.compile": "off",
        }  # fmt: skip
        config = load_config(overrides={**settings, **over})
        source = find_source(config, DEVICE, folder, tokenizer, None)
        models = Models(source, loaded[0], loaded[1], VOCABULARY, ())
        log = stack.enter_context(EventLog(folder / "events.jsonl"))
        run = build_run(config, folder, log, device=DEVICE, models=models)
        run.student.train()
        window = run.loader.window(0)
        assert sum(batch.num_scored for batch in window) == problem.tokens
        state = RunState(applied=1)  # the first step is sampled for the log
        _mark_phases(stack, run, recorder)
        stack.enter_context(_triton_rows(recorder) if has_triton else _fused_rows(recorder))

        def step() -> None:
            outcome = train_step(run, replace(state), window)
            assert outcome.verdict.action == "keep", outcome.verdict

        step.chosen = f"{run.precision.mode} ({run.precision.reason})"  # type: ignore[attr-defined]
        step.run = run  # type: ignore[attr-defined]
        yield step


@contextmanager
def _fused_rows(recorder: Recorder) -> Iterator[None]:
    """The product has its rows fused by torch.compile where Triton serves the card. Here the function that it would
    compile runs op by op, in a phase of its own, which the model of a compiler then fuses."""
    with mock.patch.object(torch, "compile", side_effect=lambda function, **_: function):
        fused = kernel.InductorKernel()
    fused._fused = _in_phase(fused._fused, recorder, ROWS)
    choice = kernel.KernelChoice(fused, "fused by torch.compile")

    def choose(device: torch.device) -> Any:
        doubt = torch.cuda.get_device_capability(device) < kernel.LEAST_CAPABILITY
        return kernel.KernelChoice(kernel.PlainKernel(), "no Triton for this card") if doubt else choice

    with mock.patch.object(kernel, "_fused", choose):
        yield


@contextmanager
def _triton_rows(recorder: Recorder) -> Iterator[None]:
    """The product's own calls around its Triton kernel; the kernel itself, which needs values, is written down with
    the bytes that were counted in its PTX."""

    def choose(device: torch.device) -> Any:
        has_meetings = torch.cuda.get_device_capability(device) >= kernel.LEAST_CAPABILITY
        num_blocks = torch.cuda.get_device_properties(device).multi_processor_count if has_meetings else 0
        return kernel.KernelChoice(TritonKernel(kernel.PlainKernel(), num_blocks), "counted as PTX")

    with (
        mock.patch.object(kernel, "_fused", choose),
        mock.patch.object(Launch, "start", lambda launch: noted_rows(launch, recorder)),
    ):
        yield


def _mark_phases(stack: ExitStack, run: Any, recorder: Recorder) -> None:
    """Name the parts of a step from outside. The backward of the head ends where the hidden states have a gradient."""

    def within(owner: Any, method: str, phase: str) -> None:
        plain = getattr(owner, method)

        def marked(*args: Any, **options: Any) -> Any:
            with recorder.phase(phase):
                return plain(*args, **options)

        stack.enter_context(mock.patch.object(owner, method, marked))

    within(type(run.teacher), "observe", "teacher")
    within(type(run.mix), "score", "head")
    within(type(run.optimizer), "step", "optimizer")
    within(type(run.optimizer), "squared_norms", "optimizer")
    within(type(run.precision), "backward", "head")
    observe = type(run.student).observe

    def observed(*args: Any, **options: Any) -> Any:
        with recorder.phase("student forward"):
            view = observe(*args, **options)
        _to_body_at(view.hidden, recorder)
        return view

    stack.enter_context(mock.patch.object(type(run.student), "observe", observed))


def _to_body_at(hidden: Tensor, recorder: Recorder) -> None:
    def arrived(_gradient: Tensor) -> None:
        recorder.enter_phase("student backward")

    if hidden.requires_grad:
        hidden.register_hook(arrived)  # type: ignore[no-untyped-call]


def _text(folder: Path, problem: Problem) -> tuple[Any, Path]:
    """A tokenizer of few words, and documents that are a row each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(100)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1", unk_token="t1")
    rows = range(4 * problem.rows + 8)
    lines = [" ".join(f"t{2 + (i * (row + 1)) % 90}" for i in range(problem.length + 1)) for row in rows]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return tokenizer, path


# -- trl and the naive loop ----------------------------------------------------------------------------------------


@contextmanager
def trl_gkd(problem: Problem, recorder: Recorder, dtype: torch.dtype, *, beta: float) -> Iterator[Step]:
    from accelerate.utils.operations import convert_outputs_to_fp32
    from trl.experimental.gkd import GKDTrainer

    teacher, student = _networks(problem, dtype)
    for network in (teacher, student):  # as accelerate's prepare_model does
        forward = torch.autocast("cuda", dtype=dtype)(network.forward)
        network.forward = convert_outputs_to_fp32(forward)
    trainer = types.SimpleNamespace(
        teacher_model=_Phased(teacher, recorder, "teacher"), beta=beta,
        generalized_jsd_loss=_in_phase(GKDTrainer.generalized_jsd_loss, recorder, "head"),
    )  # fmt: skip
    ids = _ids(problem)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)
    phased = _Phased(student, recorder, "student forward", marks=True)

    def loss() -> Tensor:
        found: Tensor = GKDTrainer.compute_loss(trainer, phased, inputs, num_items_in_batch=problem.tokens)
        return found

    yield _update(loss, student, optimizer, recorder, dtype)


@contextmanager
def naive(problem: Problem, recorder: Recorder, dtype: torch.dtype) -> Iterator[Step]:
    """Full logits of both, kl_div, half cross-entropy, AdamW as it comes."""
    teacher, student = _networks(problem, dtype)
    asked = _Phased(teacher, recorder, "teacher")
    learner = _Phased(student, recorder, "student forward", marks=True)
    ids = _ids(problem)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, foreach=True)  # what torch chooses on a card

    def loss() -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            with torch.no_grad():
                teacher_logits = asked(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            logits = learner(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            with recorder.phase("head"):
                kd = F.kl_div(F.log_softmax(logits, -1), F.softmax(teacher_logits, -1), reduction="batchmean")
                return 0.5 * kd + 0.5 * F.cross_entropy(logits, ids.flatten())

    yield _update(loss, student, optimizer, recorder, dtype)


class _Phased:
    """A network whose head and body are recorded apart."""

    def __init__(self, network: Any, recorder: Recorder, phase: str, *, marks: bool = False) -> None:
        self._network, self._recorder, self._phase = network, recorder, phase
        head = network.get_output_embeddings()
        head.forward = _in_phase(head.forward, recorder, "head")
        if marks:
            network.base_model.register_forward_hook(
                lambda _module, _args, answer: _to_body_at(answer.last_hidden_state, recorder)
            )

    def eval(self) -> None:
        self._network.eval()

    def __call__(self, **options: Any) -> Any:
        with self._recorder.phase(self._phase):
            return self._network(**options)


def _in_phase(call: Callable[..., Any], recorder: Recorder, phase: str) -> Callable[..., Any]:
    def marked(*args: Any, **options: Any) -> Any:
        with recorder.phase(phase):
            return call(*args, **options)

    return marked


def _networks(problem: Problem, dtype: torch.dtype) -> tuple[Any, Any]:
    teacher = problem.teacher.build(problem.length, dtype).eval().requires_grad_(False)
    return teacher, problem.student.build(problem.length, torch.float32).train()


def _ids(problem: Problem) -> Tensor:
    return torch.zeros(problem.rows, problem.length, dtype=torch.long, device="cuda")


def _update(
    loss_of: Callable[[], Tensor], student: Any, optimizer: Any, recorder: Recorder, dtype: torch.dtype
) -> Step:
    """What a trainer does around a loss: scale it for FP16, go back, unscale, clip, update."""
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def step() -> None:
        loss = loss_of()
        with recorder.phase("head"):
            scaler.scale(loss).backward()
        with recorder.phase("optimizer"), recorder.answering(0):  # nothing overflowed
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0, foreach=True)  # what torch chooses on a card
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step
