"""What a reader of data needs for two tokenizers: a writer of chats for both, an encoder for both, and a verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from stillroom.config.data import DataConfig
from stillroom.data.chat import chat_writer
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Tally
from stillroom.data.spans.chats import PairedChats
from stillroom.data.spans.common import Coverage
from stillroom.data.spans.encoder import PairEncoder, TwoTokenizers
from stillroom.errors import ConfigError

_SHORT = 2.0  # tokens of the student in a span: terms on spans helped at 1.4, and harmed a student of characters


@dataclass(frozen=True)
class TwoReadings:
    """Both readings of the data of one run. `covered` gathers the coverage of all that was encoded."""

    chats: PairedChats
    encoder: PairEncoder
    tally: Tally
    covered: list[Coverage] = field(default_factory=list)

    @property
    def teacher(self) -> Tokenizer:
        assert self.encoder.two is not None
        return self.encoder.two.teacher

    def judged(self, least: float) -> Coverage:
        """The coverage of all documents, in a note. Raise where it is below `least`."""
        coverage = sum(self.covered, Coverage())
        for note in (coverage_note(coverage), *shorter_notes(coverage)):
            self.tally.note(note)
        if coverage.num_bytes and (coverage.share < least or not coverage.num_spans):
            raise ConfigError(
                f"the tokenizers of teacher and student read {coverage.share:.1%} of the text as the same bytes: "
                f"{coverage.left_out:,} of {coverage.num_bytes:,} bytes are dropped or changed by one of them",
                where="teacher.model, student.model",
                advice=[
                    "use a teacher or a student whose tokenizer keeps every byte, as byte-level BPE does",
                    f"accept less with --set data.min_coverage={max(coverage.share - 0.01, 0.0):.2f}",
                ],
            )
        return coverage


def coverage_note(coverage: Coverage) -> str:
    """One line for the log."""
    per_span = [tokens / max(coverage.num_spans, 1) for tokens in (coverage.student_tokens, coverage.teacher_tokens)]
    return (
        f"two tokenizers: {coverage.share:.1%} of {coverage.num_bytes:,} bytes are in spans that both have, "
        f"{coverage.one_to_one_share:.1%} in spans of one token each, {coverage.left_out:,} bytes are left out; "
        f"{per_span[0]:.2f} tokens of the student and {per_span[1]:.2f} of the teacher in a span"
    )


def shorter_notes(coverage: Coverage) -> list[str]:
    """A warning where the student's tokens are much shorter than the teacher's.

    A teacher that has just ended a token knows that no longer token came: after "th" it expects no "e". A student of
    characters does not know where the teacher's tokens end, and would learn that "e" is rare after "th".
    """
    per_span = coverage.student_tokens / max(coverage.num_spans, 1)
    if per_span < _SHORT:
        return []
    return [
        f"the student's tokens are much shorter than the teacher's, {per_span:.2f} in a span: what the teacher knows "
        "by where its own tokens end, the student cannot know, and it learns wrongly. compare with objectives.ce "
        "alone before you rely on it"
    ]


def two_readings(student: Tokenizer, teacher: Tokenizer | None, config: DataConfig, tally: Tally) -> TwoReadings | None:
    """None where both models have one tokenizer. Raise `ConfigError` for a tokenizer that cannot be used."""
    if teacher is None:
        return None
    return readings_of(TwoTokenizers(student, teacher), config, tally)


def readings_of(two: TwoTokenizers, config: DataConfig, tally: Tally) -> TwoReadings:
    _ = two.tables  # raise for a tokenizer that cannot be used, before anything is read
    printers = chat_writer(two.student, tally, config.day), chat_writer(two.teacher, Tally(), config.day)
    chats = PairedChats(*printers, tally, train_on_prompt=config.train_on_prompt)
    covered: list[Coverage] = []
    return TwoReadings(chats, PairEncoder.of(two, chats, tally, config.bos, covered.append), tally, covered)
