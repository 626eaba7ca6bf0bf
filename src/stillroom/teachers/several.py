"""Several teachers: each source of the training data may have its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, Needs, Signal
from stillroom.models import Student
from stillroom.teachers.base import Teacher
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import is_there


class BySource(Teacher):
    """Asks the teacher of a batch's source; `main` about sources without one, rollouts and held-out text.

    A micro-batch holds rows of one source, so no answer is put together from those of two.
    """

    def __init__(self, main: Teacher, others: Mapping[str, Teacher]) -> None:
        self.main, self.others = main, dict(others)
        self.kind, self.tokenizer, self.num_exact = main.kind, main.tokenizer, main.num_exact
        self.answers_together, self.writes_text = main.answers_together, main.writes_text
        self.answers_last, self.reads_other_rows = main.answers_last, main.reads_other_rows
        self.own_training = main.own_training
        self.notes = main.notes

    def everyone(self) -> Iterator[Teacher]:
        yield from (self.main, *self.others.values())

    def of(self, batch: Batch) -> Teacher:
        """The teacher of a batch."""
        asked = {id(one): one for one in (self.others.get(name, self.main) for name in batch.sources or ("",))}
        if len(asked) > 1:
            raise ValueError(f"a batch of {sorted(set(batch.sources))} has rows of several teachers")
        return next(iter(asked.values()))

    @property
    def original(self) -> Teacher:
        return self.main.original

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        return self.of(batch).observe(batch, needs)

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        return self.of(batch).whole_answer(batch, signal)

    def own_batch(self, batch: Batch) -> Batch:
        return self.of(batch).own_batch(batch)

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        for teacher in self.everyone():
            teacher.begin_window([batch for batch in window if self.of(batch) is teacher], cursor)

    def end_window(self) -> None:
        for teacher in self.everyone():
            teacher.end_window()

    def verify(self) -> None:
        for teacher in self.everyone():
            teacher.verify()

    def as_model(self) -> Student | None:
        return self.main.as_model()

    def at_work(self) -> AbstractContextManager[None]:
        return self.main.at_work()

    def own_metrics(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        return self.main.own_metrics(batches)

    def comparable(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return self.main.comparable(metrics)

    def summary(self) -> dict[str, Any]:
        return self.main.summary()

    def close(self) -> None:
        for teacher in self.everyone():
            teacher.close()


def of_source(batches: Iterable[Batch], name: str | None, others: Iterable[str]) -> list[Batch]:
    """The batches that the teacher of a source is asked about; without a name, those of the main one."""
    taken = set(others)
    return [one for one in batches if (name in one.sources if name is not None else taken.isdisjoint(one.sources))]


def is_cache(spec: str) -> bool:
    """Whether the teacher of a source is a folder of stored answers, rather than a model."""
    return is_there(folder_of(spec))


def for_source(config: Config, spec: str) -> Config:
    """The configuration with a source's teacher as its own: a cache, or a model that is loaded as [teacher] says."""
    stored = {"cache": spec, "placement": "device", "quantisation": "none"}
    named = stored if is_cache(spec) else {"model": spec, "cache": None}
    signal = config.teacher.signal.model_copy(update={"kind": "auto", "compare": "stored"}) if named is stored else None
    plain = {
        "server": None,
        "revision": None,
        "trust_remote_code": False,
        **named,
        **({"signal": signal} if signal is not None else {}),
    }
    return config.model_copy(update={"teacher": config.teacher.model_copy(update=plain)})


def live_models(config: Config) -> dict[str, str]:
    """The sources whose teacher is a model, and not a cache."""
    return {name: spec for name, spec in config.data.source_teachers.items() if not is_cache(spec)}


def check_memory(config: Config, *, is_main_live: bool) -> None:
    """Raise if more than one teacher would be in memory and nobody asked for that."""
    live = live_models(config)
    if config.teacher.concurrent or len(live) + is_main_live < 2:
        return
    name, spec = next(reversed(live.items()))
    raise ConfigError(
        f"{len(live) + is_main_live} teachers would be in memory at a time: "
        + ", ".join([*([config.teacher.model] if is_main_live else []), *live.values()]),
        where="data.train[].teacher",
        advice=[
            f"store the answers of {spec} and name their folder as the source's teacher: stillroom cache CONFIG "
            f"--source {name} --out DIR",
            "hold all of them: --set teacher.concurrent=true",
        ],
    )
