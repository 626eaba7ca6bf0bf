"""The scripts of the student-aware guide: train.py and diagnose_and_fix.py, over its flat JSON configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _seed import harm
from _seed.flags import Flag, make_parser, read, settings_of
from _seed.output import boxed, say
from _seed.run import Job, Order, main_of, prepare
from _seed.stand_ins import Names, choose
from _seed.views import CurriculumView, View
from stillroom.cli.exit import run_to_its_end
from stillroom.config.load import read_file

FLAGS = (
    Flag("epochs", "train.epochs", float, "passes over the training data"),
    Flag("batch-size", "train.batch_size", int, "rows in a micro-batch"),
    Flag("learning-rate", "train.learning_rate", float, "peak learning rate"),
)
_BUILTIN = Names("builtin:teacher", "builtin:student", "builtin:stdlib")
_MAX_PERPLEXITY = 100.0  # the guide's criterion for the first epoch


def _parser(description: str) -> argparse.ArgumentParser:
    parser = make_parser(description, FLAGS)
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the guide's keys")
    parser.add_argument("--teacher-model", help="instead of the file's teacher_model")
    parser.add_argument("--student-model", help="instead of the file's student_model")
    parser.add_argument("--data", help="instead of the file's train_data")
    return parser


def train(arguments: Sequence[str] | None = None) -> int:
    options = read(_parser("Distil as train.py of the student-aware guide does."), arguments)
    return main_of(lambda: order_of(options), options)


def order_of(options: argparse.Namespace) -> tuple[Order, Callable[[str], View]]:
    table = read_file(options.config)
    keys = {"teacher_model": options.teacher_model, "student_model": options.student_model, "train_data": options.data}
    given = Names(*(value or table.get(key) for key, value in keys.items()))
    settings: dict[str, Any] = {"eval.max_perplexity": _MAX_PERPLEXITY, **settings_of(options, FLAGS)}
    harms = [harm.RENORMALISED_TOP_K] if table.get("kd_top_k") else []
    harms += [harm.LONG_WARMUP] if "warmup_steps" in table else []
    order = Order(
        f"train-{options.config.stem}",
        choose(given, in_the_seed=Names(), builtin=_BUILTIN),
        config=options.config,
        settings=settings,
        harms=[*harms, harm.NAN_AS_ZERO],
    )
    return order, CurriculumView


def diagnose_and_fix(arguments: Sequence[str] | None = None) -> int:
    parser = _parser("Look at a configuration of the guide: harmful settings, models, data and one real step.")
    parser.add_argument("--quick", action="store_true", help="leave out the real step")
    parser.add_argument("--fixed", type=Path, metavar="FILE", help="write the configuration as TOML, settings changed")
    options = read(parser, arguments)
    return run_to_its_end(lambda: _diagnose(options), ())


def _diagnose(options: argparse.Namespace) -> int:
    from stillroom.doctor.diagnose import config_lines
    from stillroom.doctor.examine import examine
    from stillroom.doctor.printed import doctor_lines
    from stillroom.doctor.rules import Settings, judge_settings

    order, _view = order_of(options)
    job = prepare(order, options)
    findings = judge_settings(Settings(job.loaded.config.to_dict()))
    say(*job.lines, *job.loaded.notes, "", *boxed("SETTINGS", config_lines(str(options.config), findings)))
    report = examine(lambda: job.loaded, device=options.device, is_quick=options.quick)
    say("", *boxed("MACHINE, MODELS AND DATA", (line for _level, line in doctor_lines(report.to_dict()))))
    changes = [finding.setting for finding in findings if finding.setting and finding.is_alarming]
    say("", *boxed("FIXES", [f"--set '{change}'" for change in changes] or ["nothing needs a fix"]))
    if options.fixed is not None:
        _write_fixed(order, job, changes, options.fixed)
    return 2 if report.of("red") else 0


def _write_fixed(order: Order, job: Job, changes: Sequence[str], path: Path) -> None:
    from stillroom.config import load, parse_assignments
    from stillroom.config.load import toml_lines
    from stillroom.core.files import write_atomically

    fixed = load(order.config, overrides={**job.settings, **parse_assignments(changes)}).config
    write_atomically(path, ("\n".join(toml_lines(fixed.to_dict())) + "\n").encode("utf-8"))
    say(f"written: {path}; `stillroom distill {path}` runs it")
