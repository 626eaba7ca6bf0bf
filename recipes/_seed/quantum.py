"""The script of the QuantumBench guide: a teacher, a student and a JSONL file of questions and answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _seed import harm
from _seed.flags import Flag, make_parser, read, settings_of
from _seed.run import Order, main_of
from _seed.stand_ins import Names, choose
from _seed.views import AverageView, View

FLAGS = (
    Flag("epochs", "train.epochs", float, "passes over the training data"),
    Flag("batch-size", "train.batch_size", int, "rows in a step"),
    Flag("learning-rate", "train.learning_rate", float, "peak learning rate"),
    Flag("temperature", "objectives.kd.temperature", float, "of both models in the distillation term"),
    Flag("max-length", "data.max_length", int, "tokens in a row"),
    Flag("max-grad-norm", "train.max_grad_norm", float, "the gradient is clipped to this norm"),
    Flag("max-steps", "train.max_steps", int, "optimizer steps, instead of epochs"),
    Flag("eval-steps", "train.eval_steps", int, "optimizer steps between evaluations"),
    Flag("save-steps", "train.save_steps", int, "optimizer steps between checkpoints"),
)
_IN_THE_SEED = Names("models/teacher-model", "gpt2", "data/quantumbench.jsonl")
_BUILTIN = Names("builtin:teacher", "builtin:student", "builtin:qa")
_ALPHA, _MAX_LENGTH = 0.5, 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("Distil as distill_quantumbench.py of the guides does: preset quantumbench.", FLAGS)
    parser.add_argument("--teacher-model", default=_IN_THE_SEED.teacher, help="folder, adapter folder or hub id")
    parser.add_argument("--student-model-name", default=_IN_THE_SEED.student, help="folder or hub id")
    parser.add_argument("--data-path", default=_IN_THE_SEED.data, help="JSONL of questions and answers")
    parser.add_argument("--alpha", type=float, help="weight of the distillation term; the labels have the rest")
    parser.add_argument("--fp16", action="store_true", help="FP16 products on a GPU; FP32 on a CPU")
    options = read(parser, arguments)
    return main_of(lambda: order_of(options), options)


def order_of(options: argparse.Namespace) -> tuple[Order, Callable[[str], View]]:
    settings = settings_of(options, FLAGS)
    remarks: list[str] = []
    alpha = _ALPHA if options.alpha is None else options.alpha
    if options.alpha is not None:
        settings |= {"objectives.kd.weight": alpha, "objectives.ce.weight": 1.0 - alpha}
    settings["precision.mode"] = _mode(options, remarks)
    given = Names(options.teacher_model, options.student_model_name, options.data_path)
    chosen = choose(given, _IN_THE_SEED, _BUILTIN)
    columns = _columns(Path(chosen.settings["data.train"]))
    if columns:
        settings["data.columns"] = columns
        remarks.append(f"{chosen.settings['data.train']} has the columns {', '.join(columns.values())}: data.columns")
    harms = [harm.batch_mean(alpha, int(settings.get("data.max_length", _MAX_LENGTH)))]
    order = Order(
        "distill_quantumbench", chosen, preset="quantumbench", settings=settings, harms=harms, remarks=remarks
    )  # fmt: skip
    return order, lambda device: AverageView(device, "Starting knowledge distillation...")


def _mode(options: argparse.Namespace, remarks: list[str]) -> str:
    """FP16 only where it is asked for and on a GPU, as in the guide."""
    from stillroom.precision.device import find_device

    if not options.fp16:
        return "fp32"
    if find_device(options.device).type == "cpu":
        remarks.append("FP16 requested but running on CPU: FP32 is used; --set precision.mode=fp16-mixed insists")
        return "fp32"
    return "fp16-mixed"


def _columns(path: Path) -> dict[str, Any]:
    """The layout of a file of `instruction` and `response`, which Stillroom does not read by itself; else empty."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first)
    except ValueError:  # the engine says what is wrong with the file
        return {}
    if isinstance(record, dict) and {"instruction", "response"} <= set(record) and "output" not in record:
        return {"prompt": "instruction", "completion": "response"}
    return {}
