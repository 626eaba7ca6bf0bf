"""Shorten a configuration for `--dry-run`: the same code path, five steps."""

from __future__ import annotations

from stillroom.config.load import Loaded
from stillroom.config.schema import Config

_STEPS = 5
_BATCHES = 2  # held-out batches in an evaluation
_SAMPLES, _SAMPLE_TOKENS = 1, 8


def shortened(loaded: Loaded) -> Loaded:
    """Set at most five steps; cut evaluation, samples and the router probe if they are longer. Add a note of it."""
    config = loaded.config
    steps = min(config.train.max_steps or _STEPS, _STEPS)
    train = config.train.model_copy(update={"max_steps": steps, "eval_steps": steps, "save_steps": steps})
    held_out = config.eval.model_copy(
        update={
            "max_batches": min(config.eval.max_batches or _BATCHES, _BATCHES),
            "samples": min(config.eval.samples, _SAMPLES),
            "sample_tokens": min(config.eval.sample_tokens, _SAMPLE_TOKENS),
        }
    )
    router = config.teacher.router
    router = router.model_copy(update={"probe_steps": min(router.probe_steps, _STEPS)})
    teacher = config.teacher.model_copy(update={"router": router})
    short: Config = config.model_copy(update={"train": train, "eval": held_out, "teacher": teacher})
    cut = [f"{steps} steps", f"{held_out.max_batches} held-out batches", f"samples of {held_out.sample_tokens} tokens"]
    if router.probe_steps:
        cut.append(f"a router probe of {router.probe_steps} updates, too few to trust")
    return Loaded(short, (*loaded.notes, f"dry run: {', '.join(cut)}"))
