"""The three scripts of the SAR guides: stable, fp16-safe and ultra-stable. They differ in preset and clamps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from _seed import harm
from _seed.flags import Flag, make_parser, read, settings_of
from _seed.precision import DTYPES, wanted_mode
from _seed.run import Order, main_of
from _seed.stand_ins import Names, choose
from _seed.views import AverageView, View
from stillroom.config.load import read_preset

FLAGS = (
    Flag("train_steps", "train.max_steps", int, "optimizer steps"),
    Flag("per_device_batch_size", "train.batch_size", int, "rows in a micro-batch"),
    Flag("grad_accum_steps", "train.gradient_accumulation_steps", int, "micro-batches in a step"),
    Flag("eval_steps", "train.eval_steps", int, "optimizer steps between evaluations"),
    Flag("student_lr", "train.learning_rate", float, "peak learning rate of the student"),
    Flag("router_lr", "train.router_learning_rate", float, "of the gates of a mixture of experts"),
    Flag("temperature", "objectives.kd.temperature", float, "of both models in the distillation term"),
    Flag("alpha_kd", "objectives.kd.weight", float, "weight of the distillation term"),
    Flag("alpha_ce", "objectives.ce.weight", float, "weight of the cross-entropy"),
    Flag("max_grad_norm", "train.max_grad_norm", float, "the gradient is clipped to this norm"),
    Flag("block_size", "data.max_length", int, "tokens in a row"),
)
_BUILTIN = Names("builtin:moe-teacher", "builtin:student", "builtin:stdlib")
_ROUTER_RATE = 1e-5  # of the guides


@dataclass(frozen=True)
class Script:
    name: str
    preset: str
    greeting: str
    logit_clamp: float
    loss_clamp: float
    resets: bool = False


STABLE = Script("train_sar_kd_stable", "stable", "Starting stable training...", 5.0, 6.0)
FP16_SAFE = Script("train_sar_kd_fp16_safe", "fp16-safe", "Starting FP16-safe training...", 5.0, 6.0)
ULTRA_STABLE = Script(
    "train_sar_kd_ultra_stable", "ultra-stable", "Starting ultra-stable training...", 2.5, 5.0, resets=True
)


def main(script: Script, arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(f"Distil as {script.name}.py of the guides does: preset {script.preset}.", FLAGS)
    parser.add_argument("--model-dtype", choices=DTYPES, help="of the student's weights; else as the preset says")
    parser.add_argument(
        "--autocast", action=argparse.BooleanOptionalAction, help="FP16 products with FP32 weights, or none"
    )
    parser.add_argument("--clear-cache-every-step", action="store_true", help="accepted; nothing needs it here")
    parser.add_argument("--teacher-model", help="folder, hub id or builtin:moe-teacher")
    parser.add_argument("--student-model", help="folder, hub id or builtin:student")
    parser.add_argument("--data", help="file, glob, hf:NAME or builtin:stdlib")
    options = read(parser, arguments)
    return main_of(lambda: order_of(script, options), options)


def order_of(script: Script, options: argparse.Namespace) -> tuple[Order, Callable[[str], View]]:
    settings = settings_of(options, FLAGS)
    mode = wanted_mode(options.model_dtype, options.autocast)
    if mode is not None:
        settings["precision.mode"] = mode
    given = Names(options.teacher_model, options.student_model, options.data)
    chosen = choose(given, in_the_seed=Names(), builtin=_BUILTIN)
    remarks = []
    harms = [
        harm.clamped_logits(script.logit_clamp),
        harm.clamped_loss(script.loss_clamp),
        harm.skipped_norms(2.0),
    ]
    if script.resets:
        harms.append(harm.RESET_FIRST)
    if (mode or read_preset(script.preset)["precision"]["mode"]) == "fp16-split":
        harms.append(harm.FP16_WITHOUT_SCALE)
    gates = _gate_settings(chosen.settings["teacher.model"])
    if gates:
        settings = {**gates, **settings}
        harms.append(harm.GATES_IN_ONE_GRAPH)
    else:
        remarks.append("the teacher is not a mixture of experts: it has no gates to train")
    if options.clear_cache_every_step:
        remarks.append("--clear_cache_every_step does nothing: a step that does not fit is taken in smaller parts")
    order = Order(
        script.name, chosen, preset=script.preset, settings=settings, harms=harms, remarks=remarks
    )  # fmt: skip
    return order, lambda device: AverageView(device, script.greeting)


def _gate_settings(teacher: str) -> dict[str, Any]:
    """Settings that train the gates of a mixture of experts; none for another teacher. No weights are loaded."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from stillroom.config.schema import TeacherConfig
    from stillroom.models.load import teacher_shape
    from stillroom.models.routers import has_gates

    with FakeTensorMode():
        network, _notes = teacher_shape(TeacherConfig(model=teacher), torch.float32)
        if not has_gates(network):
            return {}
    return {"teacher.router.mode": "sar", "train.router_learning_rate": _ROUTER_RATE}
