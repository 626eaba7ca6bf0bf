"""A teacher that reads other rows than the student: after a context, or in its own tokens.

Of two tokenizers: which tokens both models have, and what such a run refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, DenseSignal, Needs, PairedSignal, PairedTokens, Signal
from stillroom.data.corpus import other_of
from stillroom.data.two_tokenizers.align import Coverage, by_bytes, token_groups
from stillroom.data.two_tokenizers.token_bytes import TokenBytes
from stillroom.losses.mix import TokenMatch
from stillroom.losses.two_tokenizers import needs_live_teacher
from stillroom.models import Student
from stillroom.teachers.base import SignalKind, Teacher, TeacherTraining
from stillroom.teachers.signals import (
    Coarse,
    SharedTokens,
    SignalSpec,
    TokenGroups,
    cache_spec,
    ids_hash,
    live_spec,
    uses_cache,
)

# What a model's results on its own tokens say of the text, and not of how it is cut into tokens.
_PER_BYTE = ("bits_per_byte", "parameters", "documents", "source")


class OtherRows(Teacher):
    """A teacher that answers a batch on the rows that stand next to the student's, with the same scored tokens.

    `inner` reads those rows as any teacher reads rows: live, live with a few tokens, or from a cache.
    """

    reads_other_rows = True

    def __init__(self, inner: Teacher) -> None:
        self.inner, self.kind = inner, inner.kind
        self.notes, self.num_exact = inner.notes, inner.num_exact
        self.answers_together, self.writes_text = inner.answers_together, inner.writes_text
        self.answers_last = inner.answers_last

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        return self.inner.observe(self.own_batch(batch), needs)

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        return self.inner.whole_answer(self.own_batch(batch), signal)

    def own_batch(self, batch: Batch) -> Batch:
        """The batch after the contexts of its rows, or as it is where none has one."""
        return batch.other or batch

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        self.inner.begin_window([self.own_batch(batch) for batch in window], cursor)

    def end_window(self) -> None:
        self.inner.end_window()

    def verify(self) -> None:
        self.inner.verify()

    def as_model(self) -> Student | None:
        return self.inner.as_model()

    def at_work(self) -> AbstractContextManager[None]:
        return self.inner.at_work()

    def own_metrics(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        found = self.inner.own_metrics([self.own_batch(batch) for batch in batches])
        return None if found is None else self.comparable(found)

    def comparable(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return self.inner.comparable(metrics)

    def summary(self) -> dict[str, Any]:
        return self.inner.summary()

    def close(self) -> None:
        self.inner.close()


class PairedTeacher(OtherRows):
    """A teacher of another tokenizer. `training` is for one that learns."""

    def __init__(
        self, inner: Teacher, tokenizer: Any, coverage: Coverage, training: TeacherTraining | None = None
    ) -> None:
        super().__init__(inner)
        self.kind: SignalKind = "paired"
        self.tokenizer, self._coverage = tokenizer, coverage
        if training is not None:
            self.own_training = training

    @property
    def original(self) -> Teacher:
        inner = self.inner.original
        return self if inner is self.inner else PairedTeacher(inner, self.tokenizer, self._coverage)

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        return as_paired(super().observe(batch, needs))

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        return as_paired(super().whole_answer(batch, signal))

    def own_batch(self, batch: Batch) -> Batch:
        return other_of(batch)

    def comparable(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Keep the metrics per byte: means over tokens cannot be compared, because its tokens differ."""
        intervals = {name: ends for name, ends in metrics.get("intervals", {}).items() if name in _PER_BYTE}
        kept = {name: value if name in _PER_BYTE else None for name, value in metrics.items()}
        return {**kept, "intervals": intervals}

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "two_tokenizers": self._coverage.to_dict()}


def as_paired(signal: Signal | None) -> Signal | None:
    """An answer on the teacher's own rows, marked as one."""
    match signal:
        case None | PairedSignal() | PairedTokens():
            return signal
        case DenseSignal():
            return PairedSignal(signal.hidden, signal.head, signal.taps)
    raise ConfigError(
        f"a teacher of another tokenizer answers with {type(signal).__name__}, whose tokens are not told",
        where="teacher.signal.kind",
        advice=["set it to 'dense', 'hybrid', 'top_k' or 'target'"],
    )


# -- two tokenizers --------------------------------------------------------------------------------------

# Modes of a router that need the student's distribution over the very tokens of the teacher.
SAME_TOKENS_ONLY = ("sar-transient", "sar-meta")


def reads_its_own_tokens(config: Config) -> bool:
    """Whether the objectives compare spans, so that each model reads its own tokens. Raise for what it cannot have."""
    spans = config.objectives.span_weights
    if not spans:
        return False
    names = " and ".join(spans)
    by_token = [name for name in config.objectives.weights if name not in (*spans, "ce")]
    by_token = [name for name in by_token if config.objectives.weights[name] != 0.0]
    if by_token:
        raise ConfigError(
            f"objectives {names} compare spans of two tokenizers, and {' and '.join(by_token)} compare token by token",
            where="objectives",
            advice=[
                f"set objectives.{by_token[0]}.weight = 0",
                f"models with one tokenizer need no {names}: set their weights to 0",
            ],
        )
    is_sparse = uses_cache(config) or config.teacher.signal.kind not in ("auto", "dense")
    for name in spans:
        if is_sparse and name not in ("alm", "exact_match", "prefix_match"):
            raise needs_live_teacher(name)
    if is_sparse:
        _ = cache_spec(config) if uses_cache(config) else live_spec(config)  # raise for kinds that would be biased
    refused = {
        "teacher.server": bool(config.teacher.server) and "a server gives few tokens, and they say nothing of spans",
        "teacher.router.mode": config.teacher.router.mode in SAME_TOKENS_ONLY
        and f"{config.teacher.router.mode} needs the student's distribution over the teacher's own tokens",
        "student.init": config.student.init == "shrink" and "a student cut from its teacher has the teacher's tokens",
    }
    for where, why in refused.items():
        if why:
            raise ConfigError(
                f"objectives {names} compare spans of two tokenizers, and {where} does not go with that: {why}",
                where=where,
                advice=[f"leave {where} out", f"set the weights of {names} to 0"],
            )
    return True


def matched_tokens(student: Any, teacher: Any) -> TokenMatch:
    """The tokens of two vocabularies that stand for the same bytes, and the marks for the end of a text.

    Of several tokens with the same bytes on one side (a character and <0xNN>) the one that is not a single byte counts.
    """
    if student.get_vocab() == teacher.get_vocab():
        everyone, alone = sorted(student.get_vocab().values()), token_groups(student, teacher)
        return TokenMatch(everyone, everyone, 0, 0, "", alone.student, alone.teacher, alone.num_groups)
    tables = TokenBytes.of(student, "student"), TokenBytes.of(teacher, "teacher")
    if any(table.implies_spaces for table in tables):
        return TokenMatch((), (), 0, 0, "tokens of one stand for a word with or without the space before it")
    ours, theirs = (by_bytes(table) for table in tables)
    shared = [spelled for spelled in ours if spelled in theirs]
    pairs = [(ours[spelled], theirs[spelled]) for spelled in shared]
    rests = [len(one) - len(shared) for one in (ours, theirs)]
    if student.eos_token_id is not None and teacher.eos_token_id is not None:
        taken = {own for own, _ in pairs}, {their for _, their in pairs}
        if student.eos_token_id not in taken[0] and teacher.eos_token_id not in taken[1]:
            pairs.append((int(student.eos_token_id), int(teacher.eos_token_id)))
    pairs.sort()
    groups = token_groups(student, teacher)
    return TokenMatch(
        [own for own, _ in pairs],
        [their for _, their in pairs],
        rests[0],
        rests[1],
        "",
        groups.student,
        groups.teacher,
        groups.num_groups,
    )


@dataclass(frozen=True)
class TokenSpace:
    """The tokens that a teacher answers about, and what they mean to a student of another tokenizer."""

    tokenizer: Any
    matched: TokenMatch | None = None  # None: both models have one tokenizer
    by_groups: bool = False  # few tokens are groups that begin a text alike, else tokens that both have

    @staticmethod
    def of(config: Config, tokenizer: Any, matched: TokenMatch | None) -> TokenSpace:
        return TokenSpace(tokenizer, matched, "prefix_match" in config.objectives.span_weights)

    @property
    def shared(self) -> str:
        """A name for the classes of tokens that answers are about."""
        if self.matched is None:
            return ""
        if self.by_groups:
            return ids_hash("groups", self.matched.teacher_groups)
        return ids_hash("shared", sorted(self.matched.teacher_ids))

    def coarse(self, spec: SignalSpec, vocab_size: int) -> Coarse | None:
        """The classes that a signal of few tokens is taken over; None: the whole vocabulary, or the targets alone."""
        if self.matched is None or spec.kind == "target":
            return None
        if not len(self.matched.teacher_ids):
            raise ConfigError(
                f"answers of kind {spec.kind} are over the tokens that both vocabularies have, and there are none: "
                f"{self.matched.problem or 'no token of one stands for the bytes of a token of the other'}",
                where="teacher.signal.kind",
                advice=["set it to 'target', which serves objectives.alm", "set the weights of the others to 0"],
            )
        if self.by_groups:
            return TokenGroups.of(self.matched.teacher_groups, self.matched.num_groups, vocab_size)
        return SharedTokens.of(self.matched.teacher_ids, vocab_size)

    def within(self, spec: SignalSpec, vocab_size: int) -> SignalSpec:
        """No more tokens are kept than there are."""
        if spec.shared != self.shared:  # of other classes, whose number is not known here
            return spec
        coarse = self.coarse(spec, vocab_size)
        return spec.within(vocab_size if coarse is None else len(coarse.kept))
