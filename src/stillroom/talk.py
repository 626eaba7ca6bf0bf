"""Let a model write: continue prompts, and answer questions turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stillroom.config.schema import TeacherConfig
from stillroom.data import Bos, prompt_ids
from stillroom.data.prompts import chat_ids, turn_end_ids
from stillroom.data.records import Turn
from stillroom.engine.building.device import find_device
from stillroom.models import open_teacher
from stillroom.models.generate import END, Piece, stream
from stillroom.models.load.names import model_name

_NEXT_QUESTION = "\nuser:"  # where a model without a chat template goes on to ask itself


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
    text: str
    ended: str
    is_chat: bool  # the prompt was printed by the chat template
    stopped: str = ""  # a remark, where it ended neither by itself nor at the length asked for


@dataclass(frozen=True)
class Writer:
    """A loaded model that continues prompts. Options are those of `stillroom.models.generate.stream`."""

    network: Any
    tokenizer: Any
    bos: Bos = "auto"

    def prompts(self, prompts: Sequence[str], is_raw: bool) -> tuple[list[list[int]], bool]:
        """The tokens of prompts, and whether the chat template printed them: it does if there is one, unless raw."""
        asked = [prompt_ids(self.tokenizer, prompt, bos=self.bos, is_raw=is_raw) for prompt in prompts]
        return [ids for ids, _is_chat in asked], any(is_chat for _ids, is_chat in asked)

    def stream(self, prompts: Sequence[str], *, is_raw: bool = False, **options: Any) -> Iterator[Piece]:
        ids, is_chat = self.prompts(prompts, is_raw)
        return self.write(ids, ends_turn=is_chat, **options)

    def write(self, ids: Sequence[Sequence[int]], *, ends_turn: bool, **options: Any) -> Iterator[Piece]:
        stops = turn_end_ids(self.tokenizer) if ends_turn else set()
        return stream(self.network, self.tokenizer, ids, stops=stops, **options)

    def continuations(self, prompts: Sequence[str], *, is_raw: bool = False, **options: Any) -> list[Continuation]:
        """All prompts at once."""
        ids, is_chat = self.prompts(prompts, is_raw)
        texts, last = [""] * len(prompts), dict[int, Piece]()
        for piece in self.write(ids, ends_turn=is_chat, **options):
            texts[piece.row] += piece.text
            last[piece.row] = piece
        return [
            Continuation(prompt, texts[row], last[row].ended, is_chat, last[row].stopped)
            for row, prompt in enumerate(prompts)
        ]


def open_writer(name: str, *, device: str = "auto", bos: Bos = "auto") -> Writer:
    """Load a model for writing. The folder of a run means its student."""
    where = find_device(device)
    loaded = open_teacher(TeacherConfig(model=model_name(name)), torch.float32)
    return Writer(loaded.network.to(where), loaded.tokenizer, bos)


def continue_text(
    name: str, prompt: str, *, device: str = "auto", is_raw: bool = False, bos: Bos = "auto", **options: Any
) -> str:
    """The model's continuation of one prompt, with a remark where it was stopped."""
    writer = open_writer(name, device=device, bos=bos)
    (made,) = writer.continuations([prompt], is_raw=is_raw, **options)
    return made.text + made.stopped


@dataclass
class Conversation:
    """A conversation with one model. Every answer and question so far is part of the next prompt."""

    writer: Writer
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""  # why the last answer ended

    @property
    def is_templated(self) -> bool:
        return bool(self.writer.tokenizer.chat_template)

    def ask(self, question: str, *, seed: int = 0, **options: Any) -> Iterator[str]:
        """The answer in pieces. It enters the history when it is read to its end, or left: what was read, then.

        Each answer draws with a seed of its own, so that a question asked twice may be answered differently, and the
        same conversation with the same seed is the same.
        """
        before = [Turn("system", self.system)] if self.system else []
        ids = chat_ids(self.writer.tokenizer, [*before, *self.turns, Turn("user", question)], bos=self.writer.bos)
        pieces = self.writer.write([ids], ends_turn=True, seed=seed + len(self.turns) // 2, **options)
        answer = ""
        try:
            for text in self._texts(pieces):
                text = text if answer else text.lstrip()
                answer += text
                yield text
        finally:
            pieces.close()  # type: ignore[attr-defined]
            self.turns += [Turn("user", question), Turn("assistant", answer.strip())]

    def _texts(self, pieces: Iterator[Piece]) -> Iterator[str]:
        def texts() -> Iterator[str]:
            for piece in pieces:
                self.ended = piece.ended
                yield piece.text

        if self.is_templated:
            yield from texts()
            return
        for text, is_over in until(texts(), _NEXT_QUESTION):
            yield text
            if is_over:
                self.ended = END
                return

    def reset(self) -> None:
        self.turns.clear()


def until(pieces: Iterator[str], mark: str) -> Iterator[tuple[str, bool]]:
    """Text up to a mark that may be split over pieces, and whether it was reached. What may begin it is held back."""
    held = ""
    for piece in pieces:
        held += piece
        before, found, _after = held.partition(mark)
        if found:
            yield before, True
            return
        keep = next((size for size in range(min(len(mark) - 1, len(held)), 0, -1) if held.endswith(mark[:size])), 0)
        text, held = held[: len(held) - keep], held[len(held) - keep :]
        if text:
            yield text, False
    if held:
        yield held, False
