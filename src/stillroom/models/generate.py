"""Generate text: `transformers.generate`, with a trial of the model's cache, a seed per prompt and text in pieces.

What is added to the library, and why:
- A family's cache or left padding may change the logits. Each model is tried once against full forward passes; what
  does not hold is not used.
- Each prompt draws from its own random generator. The random state of a run stays as it is, and what a prompt
  gets does not depend on the prompts it is batched with.
- Text is streamed for several prompts at once. `transformers.TextStreamer` takes one, and drops the space before the
  first word with SentencePiece tokenizers.

# B rows, V vocabulary
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError
from stillroom.data import Bos, prompt_ids
from stillroom.data.chat import chat_ids, turn_end_ids
from stillroom.data.records import Turn
from stillroom.models.load import model_name, open_teacher
from stillroom.models.student import NAME as MASKLESS
from stillroom.models.student import num_positions

Prompt = Sequence[int]  # tokens, used as they are
Give = Callable[["Piece"], bool | None]
Note = Callable[[str], object]

_EXPECTED = END, LENGTH = "end of text", "length"


@dataclass(frozen=True)
class Piece:
    """Some text of one prompt's continuation. The last piece of a prompt says why it ended."""

    row: int
    text: str
    ended: str = ""  # "end of text", "length", or a sentence

    @property
    def stopped(self) -> str:
        """A remark for people, where the text ended neither by itself nor at the requested length."""
        return f" [stopped: {self.ended}]" if self.ended not in ("", *_EXPECTED) else ""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0: the most probable token."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"nothing can be written at temperature {self.temperature:g}",
                where="--temperature",
                advice=["use a temperature of 0 (the most probable token) or above"],
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"a share of {self.top_p:g} of the probability cannot be kept",
                where="--top-p",
                advice=["use a share above 0 and at most 1, where 1 keeps every token"],
            )


# -- text ------------------------------------------------------------------------------------------------

_CONTEXT = 8  # tokens decoded before a new one
_BROKEN = "\ufffd"  # what bytes that are not a character yet are decoded to


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens as they were written: without special tokens, and keeping the space before a full stop."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Turn tokens into the text that they add to a prompt, in pieces that joined are the text of all tokens.

    Decoded alone, a token may lose its leading space, so it is decoded behind some tokens that have text. A character
    may be split over tokens, so a piece that ends in a broken one is held back until the next token, or the end.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids, self._before = self._context(prompt)
        self._is_held = False

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while it is held back."""
        self._ids.append(token)
        whole = decoded(self._tokenizer, self._ids)
        self._is_held = whole.endswith(_BROKEN)
        return "" if self._is_held else self._given(whole)

    def rest(self) -> str:
        """Return what was held back."""
        return self._given(decoded(self._tokenizer, self._ids)) if self._is_held else ""

    def _given(self, whole: str) -> str:
        text = whole[_num_shared(whole, self._before) :]
        self._ids, self._before = self._context(self._ids)
        self._is_held = False
        return text

    def _context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens and their text: so many that they have one, and do not begin within a character."""
        for size in range(_CONTEXT, len(ids), _CONTEXT):
            text = decoded(self._tokenizer, ids[-size:])
            if text.strip() and not text.startswith(_BROKEN):
                return list(ids[-size:]), text
        return list(ids), decoded(self._tokenizer, ids)


def _num_shared(one: str, two: str) -> int:
    """How many characters two texts share at their beginning."""
    pairs = zip(one, two, strict=False)
    return next((place for place, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(two)))


def continuation(tokenizer: Any, before: Sequence[int], after: Sequence[int]) -> str:
    """Return the text that `after` adds to `before`: all tokens decoded, without the prefix shared with `before`."""
    whole, start = decoded(tokenizer, [*before, *after]), decoded(tokenizer, before)
    return whole[_num_shared(whole, start) :]


def readable(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens for people: a line break stands for special tokens between two texts."""
    special = special_ids(tokenizer)
    parts: list[list[int]] = [[]]
    for number in ids:
        if number in special:
            parts.append([])
        else:
            parts[-1].append(number)
    texts = [str(tokenizer.decode(part)) for part in parts if part]
    if len(texts) < 2:
        return "".join(texts)
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def special_ids(tokenizer: Any) -> set[int]:
    """Return the special tokens: those with a role, and those added as special, such as turn marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text: the tokenizer's, and those of the model's generation settings.

    Of the latter only special tokens count: a configuration made without a tokenizer may name any id.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {number for number in (named if isinstance(named, list | tuple) else [named]) if number is not None}
    own = {tokenizer.eos_token_id} - {None}
    return own | (ends & special_ids(tokenizer))


# -- what transformers is called with --------------------------------------------------------------------


class _Stopped(Exception):
    """Raised by a streamer to leave `transformers.generate`."""


def padded_generate(model: Any, prompts: Sequence[Sequence[int]], settings: GenerationConfig, **options: Any) -> Any:
    """Call the model's `generate`, with shorter prompts padded on the left."""
    longest = max(map(len, prompts))
    # Padding is masked, so any token will do. A row's own first token leaves its repetition penalty as it is.
    ids = torch.tensor([[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    is_padded = min(map(len, prompts)) < longest
    device = next(model.parameters()).device
    if is_padded:
        is_real = [[int(column >= longest - len(prompt)) for column in range(longest)] for prompt in prompts]
        options["attention_mask"] = torch.tensor(is_real, device=device)
    with _ready(model, is_padded):
        return model.generate(input_ids=ids.to(device), generation_config=settings, **options)


@contextmanager
def _ready(model: Any, is_padded: bool) -> Iterator[None]:
    """Set the model up for writing in the body.

    `generate` fills in whatever the call leaves open from the model's own generation settings, which come from outside
    and may ask for beams, a helper model or a compiler: they are put aside. Maskless attention would see the padding.
    """
    was_training, own_settings = model.training, model.generation_config
    is_switched = is_padded and model.config.get_text_config()._attn_implementation == MASKLESS
    model.eval()
    model.generation_config = GenerationConfig()
    if is_switched:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.train(was_training)
        model.generation_config = own_settings
        if is_switched:
            model.set_attn_implementation(MASKLESS)


def can_generate(model: Any) -> bool:
    """Whether the class of a model has transformers' generation."""
    return hasattr(model, "generate") and hasattr(model, "prepare_inputs_for_generation")


# -- the trial -------------------------------------------------------------------------------------------

_SEED = 20_242
_PROMPTS, _WRITTEN = (9, 4), 4  # lengths of the trial
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # in standard deviations of the logits
_HALF_TOLERANCE = 0.05


@dataclass(frozen=True)
class Ability:
    """What a model's cache gave in a trial."""

    caches: bool
    pads: bool
    note: str = ""  # a line for the log, if one of both is not so


_KNOWN: WeakKeyDictionary[Any, dict[str, Ability]] = WeakKeyDictionary()


def ability_of(model: Any) -> Ability:
    """Try the model's cache and left padding once; later calls are cached."""
    kind = f"{model.config.get_text_config()._attn_implementation} {next(model.parameters()).dtype}"
    known = _KNOWN.setdefault(model, {})
    if kind not in known:
        known[kind] = _tried(model)
    return known[kind]


def checked_ability(model: Any, num_prompts: int, max_new_tokens: int, note: Note) -> Ability:
    """How a model writes. Raise where it cannot, or nothing is asked for; `note` gets what a user should know."""
    if max_new_tokens < 1:
        raise ConfigError(f"{max_new_tokens} tokens cannot be written", advice=["ask for at least one token"])
    if not can_generate(model):
        raise ConfigError(
            f"{type(model).__name__} has no generate method",
            where="model",
            advice=["derive its class from transformers.GenerationMixin too"],
        )
    ability = ability_of(model)
    if ability.note and (num_prompts > 1 or not ability.caches):
        note(ability.note)
    return ability


def _tried(model: Any) -> Ability:
    generator = torch.Generator().manual_seed(_SEED)
    count = int(model.get_input_embeddings().weight.shape[0])
    prompts = [torch.randint(count, (size,), generator=generator).tolist() for size in _PROMPTS]
    name = type(model).__name__
    alone = _difference(model, prompts[:1])
    if alone:
        return Ability(False, False, f"{name} computes the whole text again for each token: {alone}")
    together = _difference(model, prompts)
    if together:
        return Ability(True, False, f"{name} continues several prompts one after the other: padded, {together}")
    return Ability(True, True)


@torch.no_grad()
def _difference(model: Any, prompts: Sequence[Sequence[int]]) -> str:
    """Why the cache cannot be used for these prompts; empty if it gives the logits of full forward passes."""
    settings = greedy_settings(_WRITTEN, return_dict_in_generate=True, output_logits=True)
    try:
        written = padded_generate(model, prompts, settings)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        return f"its cache fails with {type(error).__name__}"
    given = torch.stack(written.logits, dim=1).float()  # [B, written, V]
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
    largest = 0.0
    for row, prompt in enumerate(prompts):
        ids = written.sequences[row : row + 1, -len(prompt) - _WRITTEN : -1]
        with _ready(model, is_padded=False):
            wanted = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        change = (given[row] - wanted).abs().max() / wanted.std().clamp_min(1e-6)
        # NaN in both is the model's own; `generate` reports it where it writes.
        largest = max(largest, float(torch.nan_to_num(change)))
    return "" if largest <= tolerance else f"its cache changes the logits by {largest:.2g} of their spread"


def greedy_settings(max_new_tokens: int, *, use_cache: bool = True, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, use_cache=use_cache, **more)


# -- writing ---------------------------------------------------------------------------------------------


def generate(model: Any, tokenizer: Any, prompt: Prompt, **options: Any) -> str:
    """Return the continuation of a prompt, without the prompt. Options as of `write`."""
    return generate_all(model, tokenizer, [prompt], **options)[0]


def generate_all(model: Any, tokenizer: Any, prompts: Sequence[Prompt], **options: Any) -> list[str]:
    """Return the continuation of each prompt, with a remark where one was stopped. Options as of `write`."""
    texts = [""] * len(prompts)

    def add(piece: Piece) -> None:
        texts[piece.row] += piece.text + piece.stopped

    write(model, tokenizer, prompts, add, **options)
    return texts


def stream(model: Any, tokenizer: Any, prompts: Sequence[Prompt], **options: Any) -> Iterator[Piece]:
    """Yield the continuations of prompts in pieces while a thread writes them. Options as of `write`.

    Closing the iterator stops the writing.
    """
    pieces: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()
    is_closed = threading.Event()

    def give(piece: Piece) -> bool:
        pieces.put(piece)
        return is_closed.is_set()

    def work() -> None:
        try:
            write(model, tokenizer, prompts, give, **options)
            pieces.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that reads
            pieces.put(error)

    thread = threading.Thread(target=work, name="generate", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        is_closed.set()
        thread.join()


def write(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    give: Give,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stops: Collection[int] = (),
    note: Note = lambda _text: None,
) -> None:
    """Continue prompts and call `give` with each piece as it is written; writing stops if it returns True.

    `stops` are tokens that end a text in addition to those of tokenizer and model. `note` gets lines for the log.
    """
    sampling = Sampling(temperature, top_p, seed)
    ability = checked_ability(model, len(prompts), max_new_tokens, note)
    ends = frozenset({*end_ids(model, tokenizer), *stops})
    settings: dict[str, Any] = {"repetition_penalty": _penalty(model, note), "use_cache": ability.caches}
    if ends:
        settings |= {"eos_token_id": sorted(ends), "pad_token_id": min(ends)}
    rows = [_Row(number, list(ids), TextStream(tokenizer, ids), sampling) for number, ids in enumerate(prompts)]
    with suppress(_Stopped):
        for group in [rows] if ability.pads else [[row] for row in rows]:
            _Group(group, sampling, len(tokenizer), ends, max_new_tokens, give).write(model, settings)


class _Row:
    """One prompt and what was written after it."""

    def __init__(self, number: int, prompt: list[int], text: TextStream, sampling: Sampling) -> None:
        self.number, self.prompt, self.text = number, prompt, text
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.written: list[int] = []
        self.is_broken = False  # its logits are not finite
        self.ended = ""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.written)


@dataclass
class _Group(BaseStreamer):  # type: ignore[misc]
    """Rows that are written together: chooses their tokens, turns these into pieces and ends rows."""

    rows: list[_Row]
    sampling: Sampling
    num_tokens: int  # ids above are padding of the head
    ends: frozenset[int]
    max_new_tokens: int
    give: Give
    is_prompt: bool = True  # `generate` hands its streamer the prompts first

    def write(self, model: Any, settings: dict[str, Any]) -> None:
        """Write until every row has ended.

        Rows continue in step, and one beyond the model's last position would fail. So when a row has filled the
        positions, `generate` is called again for the others.
        """
        limit = num_positions(model)
        while True:
            for row in self.rows:
                if limit and row.length >= limit and not row.ended:
                    self._end(row, f"the model's {limit:,} positions are full")
            self.rows = [row for row in self.rows if not row.ended]
            if not self.rows:
                return
            num_left = self.max_new_tokens - len(self.rows[0].written)  # the same for all
            if limit:
                num_left = min(num_left, limit - max(row.length for row in self.rows))
            self.is_prompt = True
            padded_generate(
                model,
                [row.prompt + row.written for row in self.rows],
                greedy_settings(num_left, **settings),
                logits_processor=[self.choose],
                stopping_criteria=[self.are_broken],
                streamer=self,
            )

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave a drawn token as the only one. Rows whose scores are not finite are marked, and end after it."""
        scores[:, self.num_tokens :] = -torch.inf
        is_finite = torch.isfinite(scores[:, : self.num_tokens]).all(dim=-1).tolist()
        for row, is_sound in zip(self.rows, is_finite, strict=True):
            row.is_broken = row.is_broken or not is_sound
        if not all(is_finite):
            scores = torch.nan_to_num(scores)
        if self.sampling.temperature <= 0:
            return scores
        tokens = draw(scores, self.sampling, [row.generator for row in self.rows])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.to(scores.device), 0.0)

    def are_broken(self, input_ids: Tensor, scores: Any, **_options: Any) -> Tensor:
        return torch.tensor([row.is_broken for row in self.rows], device=input_ids.device)

    def put(self, value: Tensor) -> None:
        """Take the tokens of one step, or the prompts."""
        if self.is_prompt:
            self.is_prompt = False
            return
        for row, token in zip(self.rows, value.tolist(), strict=True):
            if row.ended:
                continue
            if row.is_broken or token in self.ends:
                self._end(row, "logits are not finite" if row.is_broken else END)
                continue
            row.written.append(token)
            text = row.text.add(token)
            if len(row.written) >= self.max_new_tokens:
                self._end(row, LENGTH, text)
            else:
                self._give(Piece(row.number, text))

    def end(self) -> None:
        """Called by `generate` at its end; each row's last piece had its rest."""

    def _end(self, row: _Row, reason: str, text: str = "") -> None:
        row.ended = reason
        self._give(Piece(row.number, text + row.text.rest(), reason))

    def _give(self, piece: Piece) -> None:
        if self.give(piece):
            raise _Stopped


def draw(scores: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw a token for each row of scores [B, V], each with its own generator, on the CPU and in FP32. [B, 1]"""
    wide = scores.cpu().float()
    # The largest becomes 0: a tiny temperature would divide to infinity otherwise, and infinities differ by NaN.
    wide = (wide - wide.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_p < 1.0:
        wide = TopPLogitsWarper(sampling.top_p)(None, wide)
    pairs = zip(torch.softmax(wide, dim=-1), generators, strict=True)
    return torch.stack([torch.multinomial(probs, 1, generator=generator) for probs, generator in pairs])


# Settings of a model's generation configuration that change which token is the most probable.
_UNUSED = (
    "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "encoder_repetition_penalty", "sequence_bias",
)  # fmt: skip


def _penalty(model: Any, note: Note) -> float:
    """The repetition penalty that the model is published with. Other such settings are named in the log."""
    settings = getattr(model, "generation_config", None)
    unused = [name for name in _UNUSED if getattr(settings, name, None)]
    if unused:
        note(f"generation settings of the model that are not used: {', '.join(unused)}")
    return float(getattr(settings, "repetition_penalty", None) or 1.0)


def time_tokens(
    model: Any,
    prompt: Sequence[int],
    num_tokens: int,
    clock: Callable[[], float],
    is_enough: Callable[[list[float]], bool],
) -> list[float]:
    """Read the clock before the prompt is read and after each token that is written, until `is_enough` of them."""
    times: list[float] = []

    class Clock(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None:
            times.append(clock())
            if is_enough(times):
                raise _Stopped

        def end(self) -> None: ...

    with suppress(_Stopped):
        padded_generate(
            model, [prompt], greedy_settings(num_tokens, use_cache=ability_of(model).caches), streamer=Clock()
        )
    return times


# -- prompts and conversations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
    text: str
    ended: str
    is_chat: bool  # the prompt was printed by the chat template
    stopped: str = ""  # a remark, where it ended neither by itself nor at the requested length


@dataclass(frozen=True)
class Writer:
    """A loaded model that continues prompts. Options are those of `write`."""

    network: Any
    tokenizer: Any
    bos: Bos = "auto"

    def prompts(self, prompts: Sequence[str], is_raw: bool) -> tuple[list[list[int]], bool]:
        """Tokenize prompts; say whether the chat template printed them: it does if there is one, unless raw."""
        asked = [prompt_ids(self.tokenizer, prompt, bos=self.bos, is_raw=is_raw) for prompt in prompts]
        return [ids for ids, _is_chat in asked], any(is_chat for _ids, is_chat in asked)

    def stream(self, ids: Sequence[Sequence[int]], *, ends_turn: bool, **options: Any) -> Iterator[Piece]:
        """Continue tokenized prompts in pieces, to the end of a turn or of a text."""
        stops = turn_end_ids(self.tokenizer) if ends_turn else set()
        return stream(self.network, self.tokenizer, ids, stops=stops, **options)

    def continuations(self, prompts: Sequence[str], *, is_raw: bool = False, **options: Any) -> list[Continuation]:
        """Continue all prompts at once."""
        ids, is_chat = self.prompts(prompts, is_raw)
        texts, last = [""] * len(prompts), dict[int, Piece]()

        def add(piece: Piece) -> None:
            texts[piece.row] += piece.text
            last[piece.row] = piece

        stops = turn_end_ids(self.tokenizer) if is_chat else set()
        write(self.network, self.tokenizer, ids, add, stops=stops, **options)
        return [
            Continuation(prompt, texts[row], last[row].ended, is_chat, last[row].stopped)
            for row, prompt in enumerate(prompts)
        ]


def open_writer(name: str, device: torch.device, *, bos: Bos = "auto") -> Writer:
    """Load a model for writing. The folder of a run means its student."""
    loaded = open_teacher(TeacherConfig(model=model_name(name)), torch.float32)
    return Writer(loaded.network.to(device), loaded.tokenizer, bos)


_NEXT_QUESTION = "\nuser:"  # where a model without a chat template continues to ask itself


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
        """Yield the answer in pieces. It enters the history when it is read to its end, or left: what was read, then.

        Each answer draws with its own seed, so that a question asked twice may be answered differently, and the same
        conversation with the same seed is the same.
        """
        before = [Turn("system", self.system)] if self.system else []
        ids = chat_ids(self.writer.tokenizer, [*before, *self.turns, Turn("user", question)], bos=self.writer.bos)
        pieces = self.writer.stream([ids], ends_turn=True, seed=seed + len(self.turns) // 2, **options)
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
    """Yield text up to a mark that may be split over pieces, and whether it was reached."""
    held = ""  # what may begin the mark
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
