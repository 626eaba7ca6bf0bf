"""Plans as plain arithmetic: the CPU seconds of an arm, its steps, and the next learning rate of a trial."""

from __future__ import annotations

from collections.abc import Mapping

from arms import ARMS, Scale, order, trials

MOST_USED = 0.9  # of the time: what is planned from a timing is met within a tenth


def arm_seconds(scale: Scale, hours: float, workers: int) -> float:
    """CPU seconds of one arm, so that all of them, their trials and timings fit into so many hours.

    Text that the teacher writes is not in them: it is made once, before.
    """
    trained = [ARMS[name] for name, _seed in order(scale) if ARMS[name].is_trained]
    timings = sum(arm.is_trained for arm in ARMS.values())
    num_rates = len(trials()) * (scale.num_rates + scale.more_rates / 2)
    units = sum(arm.share for arm in trained) + num_rates * scale.trial_share
    over = scale.arm_overhead * len(trained) + scale.trial_overhead * (num_rates + timings)
    seconds = (hours * 3600 * workers * MOST_USED - over) / units
    if seconds <= 0:
        raise SystemExit(f"{hours:g} hours are spent by loading and judging alone ({over / 3600:.1f} CPU hours)")
    return seconds


def planned_steps(seconds: float, per_step: float, *, spent: float = 0.0, least: int = 1) -> int:
    """The steps that fit into so many CPU seconds, after what was spent before the first; `least` at least."""
    return max(least, int((seconds - spent) / per_step))


def stored_tokens(seconds: float, per_token_asked: float, per_token_trained: float, epochs: float) -> float:
    """The tokens whose stored answers are read so many times, so that asking and training take so many seconds."""
    return seconds / (per_token_asked + epochs * per_token_trained)


def next_rate(tried: Mapping[float, float], first: tuple[float, ...], more: int) -> float | None:
    """The learning rate to try next, by the dev loss of those tried; None where the trial is over.

    After the first ones, the best must have a worse one on either side: beyond the border a trial goes by twice or half
    the rate, `more` times at most.
    """
    for rate in first:
        if rate not in tried:
            return rate
    if len(tried) >= len(first) + more:
        return None
    best = min(tried, key=lambda rate: tried[rate])
    if best == max(tried):
        return 2 * best
    return best / 2 if best == min(tried) else None


def is_bracketed(tried: Mapping[float, float]) -> bool:
    """Whether the best rate lies between two that were worse."""
    return min(tried) < min(tried, key=lambda rate: tried[rate]) < max(tried)
