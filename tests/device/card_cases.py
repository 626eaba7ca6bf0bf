"""The runs that are tried on a card made of main memory, and what their steps may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A run: what is asked, and what its steps may do."""

    settings: dict[str, Any] = field(default_factory=dict)
    world: str = "dense"
    inject: str = ""
    num_reads: int = 1  # at most, of a step that is kept
    copies_from: tuple[str, ...] = ("core/types.py",)  # files whose copies to the card are planned: the batch
    mutant: str = ""
    act: str = "train"


SHORT = {
    "train.max_steps": 4,
    "train.eval_steps": 2,
    "train.save_steps": 2,
    "train.batch_size": 2,
    "eval.max_batches": 1,
    "eval.samples": 0,
    "guard.snapshot_steps": 2,
}
_ROUTER = {"teacher.router.probe_steps": 1, "teacher.router.force": True, "teacher.router.every": 1}
_OFFLOAD = ("core/types.py", "teachers/placement.py")
EXPERTS = "transformers/integrations/moe.py"  # reads how many tokens each expert has, on cards below sm_80
_LORA = {"student.adapter.rank": 2}
_FOUR = {"feature": 0.1, "layerwise": 0.1, "attention": 0.1, "contrastive": 0.1}


def _router(mode: str, **over: Any) -> Case:
    settings = {**_ROUTER, "teacher.router.mode": mode, **over}
    return Case(
        settings,
        "moe",
        num_reads=2 if mode in ("truth", "sar", "sar-joint", "sar-meta") else 1,  # the gates' own evidence
        # Drawn on the CPU, so that a run that goes on on another device draws the same experts.
        copies_from=("core/types.py", "models/routers.py") if mode == "knowledge-augmentation" else ("core/types.py",),
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
    "adapter": Case({**_LORA, "eval.samples": 1, "eval.sample_tokens": 2, "student.adapter.dropout": 0.1}),
    "adapter in halves": Case({**_LORA, "precision.mode": "fp16-master", "student.adapter.kind": "dora"}),
    "adapter in fp32": Case({**_LORA, "precision.mode": "fp32", "student.adapter.base_dtype": "float16"}),
    "offload": Case({"teacher.placement": "offload", "eval.samples": 1, "eval.sample_tokens": 2}, copies_from=_OFFLOAD),
    "offload fp32": Case(
        {"teacher.placement": "offload", "precision.mode": "fp32", "train.gradient_accumulation_steps": 2},
        copies_from=_OFFLOAD,
    ),
    "stream": Case({"teacher.placement": "stream"}, copies_from=("core/types.py", "teachers/placement.py")),
    "int8": Case({"teacher.quantisation": "int8"}),
    "router truth": _router("truth"),
    "router sar": _router("sar"),
    "router sar-joint": _router("sar-joint"),
    "router sar-meta": _router("sar-meta"),
    "router sar-transient": _router("sar-transient"),
    "router all-experts": _router("all-experts"),
    "router augmentation": _router("knowledge-augmentation"),
    # With FP32 weights: an FP16 one that is damaged alone is written over from its master.
    "nan_weight": Case({"precision.mode": "fp16-mixed"}, inject="nan_weight@3"),
    "nan_moment": Case(
        {"precision.mode": "fp16-master"}, inject="nan_moment@3", copies_from=("core/types.py", "training/faults.py")
    ),
    "inf_logit": Case(inject="inf_logit@3"),
    "inf_grad": Case(inject="inf_grad@3"),
    "teacher_nan": Case(inject="teacher_nan@3"),
    "huge_weight": Case({"precision.mode": "fp16-mixed"}, inject="huge_weight@3"),
    "replay": Case(inject="inf_logit@3", act="replay"),
    "evaluate": Case(act="evaluate"),
    "generate": Case(act="generate"),
    "as on the CPU": Case({"precision.mode": "fp32", "teacher.dtype": "float32"}, act="beside"),
    "from the CPU": Case(act="from cpu"),
    "from the CPU fp16": Case({"precision.mode": "fp16-split"}, act="from cpu"),
    "to the CPU": Case(act="to cpu"),
    "cut and resumed": Case({"precision.mode": "fp16-sr"}, act="cut"),
    "packed": Case({"data.packing": "packed"}),
    "packed shared heads": Case({"data.packing": "packed"}, world="grouped"),
    # What a machine may do to a run; `mutant` plants it.
    "old torch": Case(mutant="old torch"),
    "full cublas": Case(mutant="full cublas", num_reads=2),
    "offload without pinning": Case({"teacher.placement": "offload"}, copies_from=_OFFLOAD, mutant="no pinning"),
    "stream without pinning": Case({"teacher.placement": "stream"}, copies_from=_OFFLOAD, mutant="no pinning"),
    "peaks": Case(act="peaks"),
    "bench": Case(act="bench"),
    "mutant item": Case(mutant="item"),
    "mutant copy": Case(mutant="copy"),
    "mutant wrong device": Case(mutant="wrong device"),
    "mutant ring": Case(mutant="ring"),
    "mutant generator": Case({"precision.mode": "fp16-sr"}, mutant="generator"),
    "mutant copied out": Case({"teacher.placement": "offload"}, copies_from=_OFFLOAD, mutant="copied out"),
}
CASES["router sar offload"] = Case(
    {**CASES["router sar"].settings, "teacher.placement": "offload", "teacher.router.gradient_checkpointing": True},
    "moe", num_reads=2, copies_from=_OFFLOAD,
)  # fmt: skip
