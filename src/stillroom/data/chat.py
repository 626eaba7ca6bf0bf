"""Print chats with the tokenizer's template, and mark which characters are scored.

The segments joined are exactly the template's print. Scored: what it prints of each answer, and the end mark of the
answer's turn. Not scored: what the template adds (headers, an empty thought, the line break after the end mark).

- Answers are found by marks in a second print (`alignment`), never by their words.
- A thought, in a field of its own or inside the content, is part of the answer, with the tags around it. What the
  template leaves out of an answer (thoughts of earlier turns) is counted.
- The end mark is what the template prints between an answer and the opening of an answer that directly follows it,
  without trailing white space. The last answer of a chat may end differently (GPT-OSS); its mark is then everything
  up to the end of the print. An end-of-text token at the end of the print is scored, as at the end of any document.
- If the template marks generated text (`{% generation %}`), an answer outside those marks is not scored, and the
  marks are used when no alignment is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime

from jinja2 import TemplateError

from stillroom.config.data import DataConfig
from stillroom.data.alignment import Aligned, Place, Span, after_mark, align, common_start, generated_spans, messages_of
from stillroom.data.encode import Tokenizer
from stillroom.data.records import ChatWriter, Segments, Shaper, Tally, Turn, Unusable, is_blank
from stillroom.data.template import ChatPrinter, TooMuch
from stillroom.errors import DataError

_QUESTION = Turn("user", "\U000f0001")  # a character that no template prints by itself
_MAX_RUNAWAYS = 3  # consecutive chats that exceed the template's budget; each may cost seconds


@dataclass
class TemplateChat:
    """Print a chat with the tokenizer's template."""

    tokenizer: Tokenizer
    tally: Tally
    day: str = ""  # that the template prints; empty: today
    _usual_marks: dict[bool, str] = field(default_factory=dict)  # end mark of a plain answer, by `in_parts`
    _is_compared: bool = False
    _runaways: int = 0
    _printer: ChatPrinter = field(init=False)
    _wants_parts: bool = field(init=False)

    def __post_init__(self) -> None:
        day = day_or_today(self.day)
        self._printer = replace(_printer(self.tokenizer), now=datetime.fromisoformat(day))
        if prints_day(self.tokenizer):
            self.tally.note(f"the chat template prints the day: it is {day} in all records (data.day)")
        self._wants_parts = _wants_parts(self._printer)

    def __call__(self, turns: tuple[Turn, ...]) -> tuple[Segments, bool]:
        try:
            whole, aligned = self._aligned(turns)
        except Unusable as error:
            self._count_runaway(error)
            raise
        self._runaways = 0
        if aligned is None:
            return _cut(whole, self._generated_spans(turns)), True
        self._count_unprinted(turns, aligned)
        spans: list[Span] = []
        for number, turn in enumerate(turns):
            if turn.role == "assistant" and not turn.is_empty_answer:
                spans += self._answer(number, aligned)
        return _cut(whole, sorted(spans)), True

    def contents(self, turns: tuple[Turn, ...]) -> list[tuple[tuple[int, bool], Span]]:
        """Where the contents (False) and thoughts (True) of the turns stand in the print, in reading order."""
        _, aligned = self._aligned(turns)
        places = () if aligned is None else aligned.places
        return [((place.stretch.turn, place.stretch.is_thought), (place.start, place.end)) for place in places]

    # -- printing ------------------------------------------------------------------------------------------

    def _aligned(self, turns: Sequence[Turn]) -> tuple[str, Aligned | None]:
        """The print and its best alignment. Try contents as text and as parts; take what aligns most turns."""
        filled = {number for number, turn in enumerate(turns) if not is_blank(turn.content + turn.thought)}
        prints: list[tuple[int, str, Aligned | None]] = []
        refusal: Unusable | None = None
        for in_parts in (self._wants_parts, not self._wants_parts):
            messages = messages_of(turns, in_parts=in_parts)
            try:
                whole = self._printer(messages)
            except Unusable as error:
                if isinstance(error.__cause__, TooMuch):
                    raise
                refusal = refusal or error
                continue
            self._compare(messages, whole)
            alignments = self._best_first(turns, whole, in_parts)
            best = alignments[0] if alignments else None
            num_printed = len(best.printed_turns) if best else 0
            prints.append((num_printed, whole, best))
            if best and best.printed_turns == filled:
                break
        if not prints:
            assert refusal is not None
            raise refusal
        _, whole, best = max(prints, key=lambda one: one[0])  # of equals the first
        return whole, best

    def _best_first(self, turns: Sequence[Turn], whole: str, in_parts: bool) -> list[Aligned]:
        alignments: list[Aligned] = []
        for aligned in align(self._printer, turns, whole, in_parts=in_parts):
            alignments.append(aligned)
            if len(aligned.places) == len(aligned.stretches):
                break
        return sorted(alignments, key=lambda one: -len(one.printed_turns))

    def _compare(self, messages: list[dict[str, object]], whole: str) -> None:
        """Check, for the first chat only, that our print equals the tokenizer's own."""
        if self._is_compared or "strftime_now" in self._printer.source:
            return
        self._is_compared = True
        try:
            own = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, TypeError, ValueError) as error:
            own = f"an error: {error}"
        if own != whole:
            start = len(common_start(own, whole))
            raise DataError(
                f"the tokenizer prints chats otherwise than its template: {own[start : start + 40]!r} in place of "
                f"{whole[start : start + 40]!r}",
                advice=["write the chats as text yourself, as {'prompt', 'completion'} or {'text'}"],
            )

    def _count_runaway(self, error: Unusable) -> None:
        self._runaways = self._runaways + 1 if isinstance(error.__cause__, TooMuch) else 0
        if self._runaways >= _MAX_RUNAWAYS:
            raise DataError(
                f"the chat template cannot be used, {self._runaways} chats in a row: {error}",
                advice=["mend chat_template in the model's folder", "write the chats as text yourself"],
            ) from error

    def _count_unprinted(self, turns: Sequence[Turn], aligned: Aligned) -> None:
        others = {stretch.turn for stretch in aligned.stretches if turns[stretch.turn].role != "assistant"}
        self.tally.counters["unprinted_turns"] += len(others - aligned.printed_turns)

    # -- spans ---------------------------------------------------------------------------------------------

    def _generated_spans(self, turns: Sequence[Turn]) -> list[Span]:
        """The template's own generation marks, for answers that could not be aligned."""
        spans = list(generated_spans(self._printer, turns))
        if not spans:
            raise Unusable("the chat template prints the answers so that they cannot be found again")
        return spans

    def _answer(self, number: int, aligned: Aligned) -> list[Span]:
        """The scored spans of one answer: its text with the end mark, and an end-of-text token that ends the print."""
        places = aligned.of_turn(number)
        if not places or not places[-1].stretch.is_final or not self._is_whole(places, aligned):
            self.tally.counters["unscored_turns"] += 1
            return []
        start, end = self._start(number, aligned), places[-1].end
        if aligned.generated is not None and not any(first < end and start < last for first, last in aligned.generated):
            self.tally.counters["turns_not_marked_generated"] += 1
            return []
        dropped = [stretch for stretch in aligned.stretches if stretch.turn == number]
        self.tally.counters["unprinted_thoughts"] += len(dropped) > len(places)
        rest = aligned.whole[end : aligned.after(end)]
        is_last = aligned.after(end) == len(aligned.whole)
        mark = self._end_mark(number, aligned, rest, is_last=is_last)
        spans = [(start, end + len(mark))]
        eos = str(self.tokenizer.eos_token or "")
        if is_last and eos and rest[len(mark) :].strip() == eos:
            spans.append((len(aligned.whole.rstrip()) - len(eos), len(aligned.whole.rstrip())))
        return spans

    def _is_whole(self, places: Sequence[Place], aligned: Aligned) -> bool:
        """Whether no other turn is printed inside the answer."""
        start, end = places[0].start, places[-1].end
        inside = [place for place in aligned.places if start <= place.start and place.end <= end]
        return len(inside) == len(places)

    def _start(self, number: int, aligned: Aligned) -> int:
        """Where the answer begins, including the tags that open its thought."""
        first = aligned.of_turn(number)[0]
        added = aligned.whole[aligned.before(first.start) : first.start]
        if first.stretch.is_thought and aligned.marks_everyone:
            opening = self._opening(aligned.marked[:number], in_parts=aligned.is_in_parts)
            return first.start - len(added.rpartition(opening)[2]) if opening and opening in added else first.start
        lead = first.stretch.lead
        return first.start - len(added) + added.rindex(lead) if lead and added.rstrip().endswith(lead) else first.start

    def _opening(self, before: Sequence[Turn], *, in_parts: bool) -> str:
        """What the template prints to open an answer after these turns, without the answers at their end."""
        turns = list(before)
        while turns and turns[-1].role == "assistant":
            turns.pop()
        messages = messages_of(turns or [_QUESTION], in_parts=in_parts)
        opened = self._printer.try_print(messages, opens_answer=True)
        closed = self._printer.try_print(messages)
        return "" if opened is None or closed is None else opened[len(common_start(opened, closed)) :]

    def _end_mark(self, number: int, aligned: Aligned, rest: str, *, is_last: bool) -> str:
        """The end mark at the start of `rest`, the text after the answer."""
        usual = self._usual_mark(in_parts=aligned.is_in_parts)
        if usual and rest.startswith(usual):
            return usual
        closes = next(stretch.closes for stretch in aligned.stretches if stretch.turn == number and stretch.is_final)
        mark = self._derived_mark(aligned.marked[: number + 1], closes, aligned.marks, in_parts=aligned.is_in_parts)
        if mark is not None and rest.startswith(mark):
            return mark
        if is_last:
            return rest.rstrip()
        self.tally.counters["answers_without_end_mark"] += 1
        return ""

    def _usual_mark(self, *, in_parts: bool) -> str:
        """The end mark of a plain answer to a plain question. Most templates have only this one."""
        if in_parts not in self._usual_marks:
            closes = "\U000f0000"
            turns = [_QUESTION, Turn("assistant", f"y{closes}")]
            mark = self._derived_mark(turns, closes, frozenset(closes), in_parts=in_parts)
            self._usual_marks[in_parts] = mark or ""
            if mark == "":
                self.tally.note("the chat template ends answers with no mark: only the last one of a chat has an end")
        return self._usual_marks[in_parts]

    def _derived_mark(self, turns: Sequence[Turn], closes: str, marks: frozenset[str], *, in_parts: bool) -> str | None:
        """Derive the end mark: let the template open another answer directly after this one."""
        for chat in (list(turns), [_QUESTION, *turns]):  # some templates need a question first
            messages = messages_of(chat, in_parts=in_parts)
            closed = self._printer.try_print(messages)
            if closed is not None:
                break
        else:
            return None
        opened = self._printer.try_print(messages, opens_answer=True)
        after_closed, after_opened = (after_mark(printed or "", closes, marks) for printed in (closed, opened))
        if after_opened is None or after_closed is None or after_opened == after_closed:
            return None if after_closed is None else after_closed.rstrip()
        opening = self._opening(turns[:-1], in_parts=in_parts)
        if opening and after_opened.endswith(opening):
            return after_opened.removesuffix(opening).rstrip()
        return common_start(after_opened, after_closed).rstrip()


def prints_day(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's chat template asks for the time."""
    return "strftime_now" in str(tokenizer.chat_template)


def day_or_today(day: str) -> str:
    return day or date.today().isoformat()


def question_text(tokenizer: Tokenizer, question: str) -> str:
    """Print one question with the opening of an answer. Raise `Unusable` with the template's reason."""
    return conversation_text(tokenizer, [Turn("user", question)])


def conversation_text(tokenizer: Tokenizer, turns: Sequence[Turn], *, opens_answer: bool = True) -> str:
    """Print turns, with the opening of an answer if asked for. Raise `Unusable` with the template's reason."""
    printer = _printer(tokenizer)
    return printer(messages_of(turns, in_parts=_wants_parts(printer)), opens_answer=opens_answer)


def _printer(tokenizer: Tokenizer) -> ChatPrinter:
    """A printer with the tokenizer's default template."""
    source = tokenizer.chat_template
    if not isinstance(source, str):
        try:
            source = str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates without a default
            raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from error
    return ChatPrinter(source, dict(tokenizer.special_tokens_map))


def _wants_parts(printer: ChatPrinter) -> bool:
    """Whether the template prints a content given as parts but not one given as text."""
    prints = [printer.try_print(messages_of([_QUESTION], in_parts=in_parts)) for in_parts in (False, True)]
    return [_QUESTION.content in (text or "") for text in prints] == [False, True]


@dataclass(frozen=True)
class PlainChat:
    """Print a chat as "role: content" lines, for tokenizers without a template."""

    tally: Tally

    def __call__(self, turns: tuple[Turn, ...]) -> tuple[Segments, bool]:
        self.tally.note('the tokenizer has no chat template: chats are written as "role: content" lines')
        pieces: list[tuple[str, bool]] = []
        for turn in turns:
            self.tally.counters["unprinted_thoughts"] += bool(turn.thought)
            is_scored = turn.role == "assistant" and not is_blank(turn.content)
            pieces += [(f"{turn.role}: ", False), (f"{turn.content}\n", is_scored)]
        return _joined(pieces), False

    def contents(self, turns: tuple[Turn, ...]) -> list[tuple[tuple[int, bool], Span]]:
        """As `TemplateChat.contents`."""
        found, cursor = list[tuple[tuple[int, bool], Span]](), 0
        for number, turn in enumerate(turns):
            start = cursor + len(turn.role) + 2
            cursor = start + len(turn.content) + 1
            found.append(((number, False), (start, cursor - 1)))
        return found


def _cut(whole: str, spans: Sequence[Span]) -> Segments:
    pieces: list[tuple[str, bool]] = []
    cursor = 0
    for start, end in spans:
        if start < cursor:
            raise Unusable("the chat template prints one answer inside another")
        pieces += [(whole[cursor:start], False), (whole[start:end], True)]
        cursor = end
    return _joined([*pieces, (whole[cursor:], False)])


def _joined(pieces: Sequence[tuple[str, bool]]) -> Segments:
    """Join adjacent pieces with the same `is_scored`, so that only a real change forces a token boundary."""
    joined: list[tuple[str, bool]] = []
    for text, is_scored in pieces:
        if text and joined and joined[-1][1] == is_scored:
            joined[-1] = (joined[-1][0] + text, is_scored)
        elif text:
            joined.append((text, is_scored))
    return tuple(joined)


# -- from an object of a data file to a record -------------------------------------------------------------------


def chat_writer(tokenizer: Tokenizer, tally: Tally, day: str = "") -> TemplateChat | PlainChat:
    """Print chats with the tokenizer's template, where it has one. `day` is what a template prints that asks for it."""
    return TemplateChat(tokenizer, tally, day) if tokenizer.chat_template else PlainChat(tally)


def make_shaper(config: DataConfig, tokenizer: Tokenizer, tally: Tally, write_chat: ChatWriter | None = None) -> Shaper:
    """The shaper of the one source that `config` has; `write_chat` writes chats where it is not the tokenizer's."""
    (source,) = config.sources
    write_chat = write_chat or chat_writer(tokenizer, tally, config.day)
    return Shaper(write_chat, tally, train_on_prompt=config.train_on_prompt, layout=source)
