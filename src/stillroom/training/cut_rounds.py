"""Cut a student in rounds: cut a little, recover, cut again.

Each round but the last is a run in RUN/rounds/N with the data, objectives and teacher of the configuration; the next
round cuts its student. The last one is the run itself. So a round is resumed, guarded and recorded like any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.files import ROUNDS
from stillroom.models.anatomy import anatomy_of
from stillroom.models.load import described_model, teacher_shape
from stillroom.models.shrink.cut_budget import parse_budget
from stillroom.models.shrink.width import EXPERTS
from stillroom.telemetry.wording import format_result, section, show
from stillroom.training.student import kept_layers

_OTHER_ROWS = 1_000  # between the random seeds of two rounds: each reads the rows in another order


def folder_of(run: Path, number: int) -> Path:
    return run / ROUNDS / str(number)


def is_one_run(config: Config) -> bool:
    return config.student.shrink.rounds == 1


def last_round(config: Config, run: Path) -> Config:
    """The configuration that is trained in a run's own folder, once the rounds before have ended."""
    return config if is_one_run(config) else of_round(config, run, config.student.shrink.rounds)


def of_round(config: Config, run: Path, number: int) -> Config:
    """The configuration of one round, counted from 1, once those before it have ended."""
    student = sized(config, number)
    if number > 1:
        before = [folder_of(run, earlier) for earlier in range(1, number)]
        layers = tuple(range(_sizes(config)["layers"]))
        for folder in before:
            layers = tuple(layers[layer] for layer in kept_layers(folder, len(layers)))
        shrink = student.shrink.model_copy(update={"of_layers": layers})
        student = student.model_copy(update={"model": str(before[-1] / "student"), "shrink": shrink})
    changes: dict[str, Any] = {"student": student, "train": _train(config, number)}
    if number < config.student.shrink.rounds:
        changes["eval"] = config.eval.model_copy(update={"samples": 0})
    return config.model_copy(update=changes)


def sized(config: Config, number: int) -> Any:
    """The student's section in a round: each size lies on the line from the teacher's to the one that is asked for."""
    shrink, whole = config.student.shrink, _sizes(config)
    sizes: dict[str, int] = {}
    for name in ("layers", "width", "mlp_width", "heads", "experts"):
        asked = getattr(shrink, name)
        if asked:
            sizes[name] = max(asked, whole[name] - (whole[name] - asked) * number // shrink.rounds)
    if "heads" in sizes and number < shrink.rounds:
        sizes["heads"] = -(-sizes["heads"] // whole["group"]) * whole["group"]
    changes: dict[str, Any] = {**sizes, "rounds": 1}
    if shrink.to and number < shrink.rounds:
        with torch.device("meta"):  # no weights
            total = anatomy_of(teacher_shape(config.teacher, torch.float32)[0]).num_parameters
        changes["to"] = str(total - (total - parse_budget(shrink.to, total)) * number // shrink.rounds)
    return config.student.model_copy(update={"shrink": shrink.model_copy(update=changes)})


def _sizes(config: Config) -> dict[str, int]:
    """The teacher's sizes, from its configuration; 0 for one that it does not name."""
    text = described_model(config.teacher, config.teacher.model)[0].get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    return {
        "layers": int(text.num_hidden_layers),
        "width": int(getattr(text, "hidden_size", 0) or 0),
        "mlp_width": int(getattr(text, "intermediate_size", 0) or 0),
        "heads": heads,
        "experts": next((int(getattr(text, name)) for name in EXPERTS if name in vars(text)), 0),
        "group": max(1, heads // int(getattr(text, "num_key_value_heads", 0) or heads or 1)),
    }


def _train(config: Config, number: int) -> Any:
    """The share of the training that a round has: all rounds together take the steps or epochs of the configuration."""
    train, shrink = config.train, config.student.shrink
    earlier = shrink.rounds - 1
    is_last = number == shrink.rounds
    changes: dict[str, Any] = {"seed": train.seed + _OTHER_ROWS * (shrink.rounds - number)}
    if train.max_steps:
        steps = max(1, int(train.max_steps * shrink.round_share / earlier))
        changes["max_steps"] = train.max_steps - earlier * steps if is_last else steps
        if train.max_steps <= earlier * steps:
            raise ConfigError(
                f"train.max_steps = {train.max_steps} leaves no step for each of {shrink.rounds} rounds",
                where="student.shrink.rounds",
                advice=["train for longer", f"or cut in fewer rounds: at most {train.max_steps}"],
            )
    else:
        changes["epochs"] = train.epochs * (1.0 - shrink.round_share if is_last else shrink.round_share / earlier)
    return train.model_copy(update=changes)


def told(name: str, summary: Mapping[str, Any]) -> str:
    """One line about a round that has ended."""
    before, after = (section(summary, key) for key in ("student_before", "student"))
    cut, kept = (show(row, "perplexity", format_result) for row in (before, after))
    return (
        f"{name}: {summary['steps']:,} steps with {after['parameters']:,} parameters, held-out perplexity {cut} right "
        f"after the cut and {kept} after recovery"
    )
