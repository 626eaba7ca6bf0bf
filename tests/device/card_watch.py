"""The laws of a run on a card, and mistakes planted in the product to see that the laws are watched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from card_cases import EXPERTS, Case


class Watch:
    """The laws of a run on a card, looked at from outside: what breaks them is written down."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.broken: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.stop_at = 0  # end the run before this attempt
        self._adds_in_half = False  # whether cuBLAS was allowed to add partial products in FP16 at any backward

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        import torch

        from stillroom.losses.mix import Mix
        from stillroom.training import loop
        from stillroom.training.checkpoint import SnapshotRing

        step, keep, score = loop.train_step, SnapshotRing.keep, Mix.score

        def scored(mix: Any, *args: Any) -> Any:
            found = score(mix, *args)
            if found.loss.requires_grad:
                found.loss.register_hook(lambda _gradient: self._look_at_sums(torch))
            return found

        Mix.score = scored  # type: ignore[method-assign]
        loop.train_step = lambda *args: self._step(step, *args)
        SnapshotRing.keep = lambda snapshots, saved: self._keep(keep, snapshots, saved)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            loop.train_step, SnapshotRing.keep, Mix.score = step, keep, score  # type: ignore[method-assign]

    def _look_at_sums(self, torch: Any) -> None:
        self._adds_in_half |= bool(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)

    def _step(self, step: Callable[..., Any], run: Any, state: Any, window: Any) -> Any:
        from card import LEDGER, Card

        if len(self.steps) + 1 == self.stop_at:
            raise RuntimeError("cut here")
        on_card = run.device.type == Card.device.type
        if on_card and run.optimizer._generator.device.type != Card.device.type:
            self.broken.append("the optimizer's generator is not on the card")
        LEDGER.clear()
        self._adds_in_half = False
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
                "masks": dict(LEDGER.masks),
                "adds_in_half": self._adds_in_half,
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

        reads = [read for read in LEDGER.reads if f"at {EXPERTS}" not in read]
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

    def _keep(self, keep: Callable[..., None], snapshots: Any, saved: Any) -> None:
        """Snapshots are in main memory: the card holds as much after one as before."""
        from card import LEDGER

        before = LEDGER.live
        keep(snapshots, saved)
        if LEDGER.live > before:
            self.broken.append(f"a snapshot took {LEDGER.live - before} bytes of the card")
        tensors = [tensor for group in snapshots.newest().tensors.values() for tensor in group.values()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self.broken.append("a snapshot is on the card")


@contextlib.contextmanager
def planted(mutant: str) -> Iterator[None]:
    """The product with one mistake of the kind that a CPU does not show."""
    import torch

    from stillroom.losses.mix import Mix
    from stillroom.precision import AdamW
    from stillroom.teachers.placement import Offloaded
    from stillroom.training.checkpoint import Saved

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

    def on_the_card(self: Any, but: Any = ()) -> Any:
        tensors = {name: {key: tensor.clone() for key, tensor in group.items()} for name, group in self.tensors.items()}
        return Saved(self.step, tensors, json.loads(json.dumps(self.scalars)))

    def without_room(self: Any, view: Any, signal: Any, batch: Any, *rest: Any) -> Any:
        if torch.is_grad_enabled() and batch.input_ids.shape[0] > 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return score(self, view, signal, batch, *rest)

    mm = torch.mm

    def mm_of_old(*args: Any, **options: Any) -> Any:
        if "out_dtype" in options:
            raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")
        return mm(*args, **options)

    import card

    def not_pinned(self: Any) -> Any:
        card.PINNED.clear()  # of earlier cases: their addresses may be given to other memory
        raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")

    def copied_out(self: Any) -> None:
        for tensor in self._tensors():
            tensor.data = tensor.data.to("cpu")

    patches: dict[str, tuple[Any, str, Any]] = {
        "ring": (Saved, "copied", on_the_card),
        "generator": (AdamW, "__init__", with_cpu_generator),
        "full cublas": (Mix, "score", without_room),
        "old torch": (torch, "mm", mm_of_old),
        "no pinning": (torch.Tensor, "pin_memory", not_pinned),
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
