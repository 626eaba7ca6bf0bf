"""Who takes part in the head benchmark: the bare products, ours, the naive loss of the seeds, and the peers.

Each contender turns a problem into a step: one forward and backward of the loss from hidden states, leaving gradients
of the student's hidden states and head weight. Peers that are not installed are reported as absent.

Legend: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from stillroom.losses.head.loss import DenseTeacher, SampledTeacher, TopKTeacher, fused_head_loss

STUDENT_WIDTH, TEACHER_WIDTH, TEMPERATURE, NUM_KEPT = 576, 1024, 2.0, 64
Step = Callable[[], None]


@dataclass(frozen=True)
class Problem:
    """What is computed. Kinds: forward_kl, jsd (dense teachers), top_k, sampled (stored answers); all with labels."""

    kind: str
    num_tokens: int
    vocabulary: int
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.kind} + ce, N={self.num_tokens:,}, V={self.vocabulary:,}, {self.dtype}"


class Data:
    """Random tensors of a problem; the same for every contender."""

    def __init__(self, problem: Problem) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, problem.dtype)
        n, v = problem.num_tokens, problem.vocabulary

        def draw(*shape: int, spread: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(spread).to(dtype)

        self.hidden = draw(n, STUDENT_WIDTH).requires_grad_()
        self.weight = draw(v, STUDENT_WIDTH, spread=0.1).requires_grad_()
        self.teacher_hidden, self.teacher_weight = draw(n, TEACHER_WIDTH), draw(v, TEACHER_WIDTH, spread=0.1)
        self.labels = torch.randint(v, (n,), generator=generator)
        self.stored: TopKTeacher | SampledTeacher | None = None
        if problem.kind in ("top_k", "sampled"):
            self.stored = _stored(problem.kind, n, v, generator)

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None


def _stored(kind: str, n: int, v: int, generator: torch.Generator) -> TopKTeacher | SampledTeacher:
    ids = torch.stack([torch.randperm(v, generator=generator)[:NUM_KEPT] for _ in range(n)])
    shares = torch.softmax(torch.randn(n, NUM_KEPT + 1, generator=generator), -1)
    if kind == "top_k":
        return TopKTeacher(ids, shares[:, :-1].log(), shares[:, -1].log())
    weights = shares[:, :-1] / shares[:, :-1].sum(-1, keepdim=True)
    return SampledTeacher(ids, weights, torch.full((n,), 3.0))


# -- the limit -----------------------------------------------------------------------------------------------------


def bare_products(problem: Problem, data: Data) -> Step:
    """Student logits, teacher logits (where there is a live one), gradient of hidden states, gradient of weight."""
    hidden, weight = data.hidden.detach(), data.weight.detach()

    def step() -> None:
        logits = torch.mm(hidden, weight.t())
        if data.stored is None:
            torch.mm(data.teacher_hidden, data.teacher_weight.t())
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    return step


def kept_products(problem: Problem, data: Data) -> Step:
    """The same into results that were allocated once."""
    hidden, weight = data.hidden.detach(), data.weight.detach()
    columns = -(-problem.vocabulary // 64) * 64  # an odd row length would make the first product slower
    logits, answers = (hidden.new_empty(problem.num_tokens, columns)[:, : problem.vocabulary] for _ in range(2))
    pulled, gradient = torch.empty_like(hidden), torch.empty_like(weight)

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        if data.stored is None:
            torch.mm(data.teacher_hidden, data.teacher_weight.t(), out=answers)
        torch.mm(logits, weight, out=pulled)
        torch.mm(logits.t(), hidden, out=gradient)

    return step


def chunked_products(chunk_tokens: int) -> Callable[[Problem, Data], Step]:
    """The same products a chunk at a time, the gradient of the weight summed up: what chunking itself costs."""

    def prepare(problem: Problem, data: Data) -> Step:
        hidden, weight = data.hidden.detach(), data.weight.detach()

        def step() -> None:
            total = torch.empty_like(weight)
            for start in range(0, problem.num_tokens, chunk_tokens):
                part = hidden[start : start + chunk_tokens]
                logits = torch.mm(part, weight.t())
                if data.stored is None:
                    torch.mm(data.teacher_hidden[start : start + chunk_tokens], data.teacher_weight.t())
                torch.mm(logits, weight)
                if start:
                    total.addmm_(logits.t(), part)
                else:
                    torch.mm(logits.t(), part, out=total)

        return step

    return prepare


# -- ours ----------------------------------------------------------------------------------------------------------


def ours(kernel: str, chunk_tokens: int) -> Callable[[Problem, Data], Step]:
    def prepare(problem: Problem, data: Data) -> Step:
        teacher = data.stored or DenseTeacher(data.teacher_hidden, data.teacher_weight)
        divergence = "jsd" if problem.kind == "jsd" else "forward_kl"

        def step() -> None:
            fused_head_loss(
                data.hidden,
                data.weight,
                teacher,
                data.labels,
                divergence=divergence,
                temperature=TEMPERATURE,
                chunk_tokens=chunk_tokens,
                kernel=kernel,  # type: ignore[arg-type]
            ).loss.backward()

        return step

    return prepare


# -- the seeds and the peers ---------------------------------------------------------------------------------------


def _logits(data: Data) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = F.linear(data.teacher_hidden, data.teacher_weight)
    return F.linear(data.hidden, data.weight), teacher


def naive(problem: Problem, data: Data) -> Step:
    """The loss of seed 002 (kl_div of log_softmax and softmax, T^2, cross-entropy, half and half), per token."""

    def dense() -> None:
        student, teacher = (logits.float() for logits in _logits(data))
        log_probs = F.log_softmax(student / TEMPERATURE, dim=-1)
        probs = F.softmax(teacher / TEMPERATURE, dim=-1)
        kd = F.kl_div(log_probs, probs, reduction="batchmean", log_target=False) * TEMPERATURE**2
        (0.5 * kd + 0.5 * F.cross_entropy(student, data.labels)).backward()

    def sparse() -> None:
        student = F.linear(data.hidden, data.weight).float()
        log_probs = F.log_softmax(student / TEMPERATURE, dim=-1)
        stored = data.stored
        assert stored is not None
        taken = log_probs.gather(-1, stored.ids)
        if isinstance(stored, TopKTeacher):
            probs, tail = stored.log_probs.exp(), torch.log1p(-taken.exp().sum(-1).clamp_max(1 - 1e-6))
            kd = (probs * (stored.log_probs - taken)).sum(-1)
            kd = kd + stored.tail_log_mass.exp() * (stored.tail_log_mass - tail)
        else:
            kd = -(stored.weights * taken).sum(-1) - stored.entropy
        (0.5 * kd.mean() * TEMPERATURE**2 + 0.5 * F.cross_entropy(student, data.labels)).backward()

    return dense if data.stored is None else sparse


def trl_gkd(problem: Problem, data: Data) -> Step:
    """TRL's GKDTrainer.generalized_jsd_loss; cross-entropy added, which TRL's trainer does not have."""
    trainer = importlib.import_module("trl.experimental.gkd").GKDTrainer
    beta = 0.5 if problem.kind == "jsd" else 0.0

    def step() -> None:
        student, teacher = _logits(data)
        kd = trainer.generalized_jsd_loss(
            student[None], teacher[None], labels=data.labels[None], beta=beta, temperature=TEMPERATURE
        )
        (0.5 * kd + 0.5 * F.cross_entropy(student, data.labels)).backward()

    return step


def trl_chunked(problem: Problem, data: Data) -> Step:
    """TRL's chunked divergence, without cross-entropy: it offers none."""
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    beta = 0.5 if problem.kind == "jsd" else 0.0

    def step() -> None:
        divergence, _ = function.apply(
            data.hidden, data.weight, None, data.teacher_hidden, data.teacher_weight, None, beta, TEMPERATURE
        )
        divergence.mean().backward()

    return step


def liger(compiled: bool) -> Callable[[Problem, Data], Step]:
    """Liger's fused linear JSD with cross-entropy (beta 0 is forward KL); no T^2."""

    def prepare(problem: Problem, data: Data) -> Step:
        module = importlib.import_module("liger_kernel.chunked_loss.jsd_loss")
        loss = module.LigerFusedLinearJSDLoss(
            beta=0.5 if problem.kind == "jsd" else 0.0, temperature=TEMPERATURE, compiled=compiled, chunk_size=256
        )

        def step() -> None:
            loss(data.hidden, data.weight, data.teacher_hidden, data.teacher_weight, data.labels).backward()

        return step

    return prepare


def torchtune(problem: Problem, data: Data) -> Step:
    """torchtune's ForwardKLLoss (T = 1 only) with cross-entropy added."""
    loss = _torchtune_losses().ForwardKLLoss()

    def step() -> None:
        student, teacher = _logits(data)
        (0.5 * loss(student, teacher, data.labels) + 0.5 * F.cross_entropy(student, data.labels)).backward()

    return step


def _torchtune_losses() -> ModuleType:
    """The losses' own file: importing the package needs a torchao older than those for this torch."""
    path = metadata.distribution("torchtune").locate_file("torchtune/modules/loss/kd_losses.py")
    spec = importlib.util.spec_from_file_location("torchtune_kd_losses", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[[Problem, Data], Step]
    kinds: tuple[str, ...]
    needs: Callable[[], object] | None = None  # fails where the contender is not installed

    def absence(self) -> str | None:
        """Why it cannot take part, or None."""
        if self.needs is None:
            return None
        try:
            self.needs()
        except Exception as error:  # noqa: BLE001  (a peer may fail to import in its own way; the table must say so)
            return f"{type(error).__name__}: {error}"
        return None


def _package(name: str) -> Callable[[], object]:
    return functools.partial(importlib.import_module, name)


_DENSE, _ALL = ("forward_kl", "jsd"), ("forward_kl", "jsd", "top_k", "sampled")
LIMIT = "bare products"
CONTENDERS = (
    Contender(LIMIT, bare_products, _ALL),
    Contender("bare products, into kept memory", kept_products, _ALL),
    Contender("bare products, chunk 256", chunked_products(256), _ALL),
    Contender("stillroom compiled, chunk 512", ours("compiled", 512), _ALL),
    Contender("stillroom compiled, chunk 256", ours("compiled", 256), _ALL),
    Contender("stillroom compiled, chunk auto", ours("compiled", 0), _ALL),
    Contender("stillroom plain, chunk 512", ours("plain", 512), _ALL),
    Contender("stillroom plain, chunk 256", ours("plain", 256), _ALL),
    Contender("naive (seed 002)", naive, ("forward_kl", "top_k", "sampled")),
    Contender("trl GKD loss + ce", trl_gkd, _DENSE, _package("trl.experimental.gkd")),
    Contender("trl chunked divergence, no ce", trl_chunked, _DENSE, _package("trl.kernels.chunked_divergence")),
    Contender("liger eager, chunk 256", liger(False), _DENSE, _package("liger_kernel.chunked_loss.jsd_loss")),
    Contender("liger compiled, chunk 256", liger(True), _DENSE, _package("liger_kernel.chunked_loss.jsd_loss")),
    Contender("torchtune forward KL (T = 1) + ce", torchtune, ("forward_kl",), _torchtune_losses),
)


def loss_gap(problem: Problem, data: Data) -> float:
    """Largest relative difference between our gradients and the naive loss's: the benchmark compares equals."""
    grads = []
    for prepare in (ours("auto", 256), naive):
        data.forget()
        prepare(problem, data)()
        assert data.weight.grad is not None
        grads.append(data.weight.grad.float().clone())
    data.forget()
    gap = float((grads[0] - grads[1]).abs().max() / grads[1].abs().max())
    return gap if math.isfinite(gap) else math.inf
