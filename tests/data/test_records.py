"""Laws of the border between a prompt and its answer: no character is put in or lost there, whatever the tokenizer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stillroom.config.schema import DataConfig
from stillroom.data import Encoder, Record, Tally
from stillroom.data.preview import preview

END = "</s>"
LINES = [
    'Tom said "Hi" and "No" at a time when Jane said "Yes"',
    "what time is it? it is time to say something",
    "the quick brown fox jumps over the lazy dog; 4 + 4 = 8 (eight)",
    "caf\u00e9 na\u00efve \u00e9t\u00e9 \U0001f600",
] * 4


def made(backend: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    backend.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def sentencepiece_bpe(scheme: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    special = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    return made(backend, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))


def llama_like() -> PreTrainedTokenizerFast:
    """As Llama 2 files have it: the space is put in front by a normalizer."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    return made(backend, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))


def unigram() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", END], unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
    )
    return made(backend, trainer)


def byte_level(*, trims: bool, adds_space: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made(
        backend,
        trainers.BpeTrainer(vocab_size=420, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )


def word_piece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[UNK]", END]
    return made(backend, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False))


TOKENIZERS = {
    "sentencepiece, a space at the first word": sentencepiece_bpe("first"),
    "sentencepiece, a space at every beginning": sentencepiece_bpe("always"),
    "llama": llama_like(),
    "unigram": unigram(),
    "byte level": byte_level(trims=False, adds_space=False),
    "byte level, trimmed": byte_level(trims=True, adds_space=False),
    "byte level, a space in front": byte_level(trims=True, adds_space=True),
    "word pieces": word_piece(),
}
EXACT = [name for name in TOKENIZERS if name not in ("unigram", "word pieces")]  # those that lose no character

BORDERS = [
    ("Tom said ", '"Hi"'),
    ("Tom said", ' "Hi"'),
    ("a ti", "me"),
    ("what is 4 + 4 = ", "8"),
    ("caf", "\u00e9 na\u00efve"),
    ("it is time\n", "\nto say"),
    ("what  ", "  time"),
    ("q", "u"),
]


def encoded(name: str, parts: tuple[tuple[str, bool], ...]) -> tuple[Any, Tally]:
    """The tokens of one record, less those that open and close a document."""
    tally = Tally()
    return Encoder(TOKENIZERS[name], tally)([Record("x", parts, "")]), tally


def spelt(name: str, ids: Any) -> str:
    return str(TOKENIZERS[name].decode([int(token) for token in ids], clean_up_tokenization_spaces=False))


def whole(name: str, text: str) -> str:
    """What the tokenizer makes of the text when nobody cuts it."""
    return spelt(name, TOKENIZERS[name](text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("prompt", "answer"), BORDERS)
def test_the_tokens_spell_the_text_of_the_file(name: str, prompt: str, answer: str) -> None:
    found, _ = encoded(name, ((prompt, False), (answer, True)))
    text = spelt(name, found.ids[:-1])
    assert text == whole(name, prompt + answer)
    if name in EXACT:
        assert text.removeprefix(" ") == prompt + answer
    assert spelt(name, found.ids[-1:]) == END


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("prompt", "answer"), BORDERS)
def test_no_token_holds_both_prompt_and_answer(name: str, prompt: str, answer: str) -> None:
    found, tally = encoded(name, ((prompt, False), (answer, True)))
    assert int(found.num_bytes.sum()) == len((prompt + answer).encode("utf-8"))
    if name in EXACT or not tally.counters["straddling_tokens"]:
        assert int(found.num_bytes[found.is_scored].sum()) == len(answer.encode("utf-8"))
        assert tally.counters["straddling_tokens"] == 0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_prompt_s_tokens_are_those_of_the_prompt_alone(name: str) -> None:
    """What a model is given when it is asked, so that the answer is learned where it will be wanted."""
    for prompt, answer in BORDERS:
        found, _ = encoded(name, ((prompt, False), (answer, True)))
        alone = TOKENIZERS[name](prompt, add_special_tokens=False)["input_ids"]
        uncut = TOKENIZERS[name](prompt + answer, add_special_tokens=False)["input_ids"]
        asked = found.ids[~found.is_scored].tolist()
        assert asked == alone or found.ids[:-1].tolist() == uncut


WORDS = st.text(st.sampled_from("tTme \n\"'.a4\u00e9"), min_size=1, max_size=8)


@given(texts=st.lists(WORDS, min_size=2, max_size=5), name=st.sampled_from(list(TOKENIZERS)))
@settings(max_examples=300)
def test_any_number_of_borders_leaves_the_text_as_it_is(texts: list[str], name: str) -> None:
    parts = tuple(zip(texts, itertools.cycle([False, True]), strict=False))
    found, _ = encoded(name, parts)
    if found.num_documents:
        assert spelt(name, found.ids[:-1]) == whole(name, "".join(texts))
        assert int(found.num_bytes.sum()) == len("".join(texts).encode("utf-8"))


def test_a_token_that_cannot_be_parted_is_not_scored_and_counted() -> None:
    """A vocabulary of whole words only: the second half of a word has no token."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, END: 1, "time": 2, "a": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tally = Tally()
    found = Encoder(tokenizer, tally)([Record("x", (("a ti", False), ("me a", True)), "")])
    assert found.ids.tolist() == [3, 2, 3, 1]
    assert found.is_scored.tolist() == [False, False, True, True]
    assert tally.counters["straddling_tokens"] == 1


def test_an_end_mark_that_takes_in_the_line_break_stays_one_token_and_is_scored() -> None:
    """As the marks of Phi-3: the break after them is text of the next header, and no token of its own."""
    tokenizer = byte_level(trims=False, adds_space=False)
    marks = [AddedToken(mark, rstrip=True, special=True) for mark in ("<|user|>", "<|assistant|>", "<|end|>")]
    tokenizer.add_tokens(marks, special_tokens=True)
    turn = (("<|user|>\nq<|end|>\n<|assistant|>\n", False), ("No<|end|>", True))
    for parts in ((*turn, ("\n", False), *turn, ("\n", False)), (*turn, ("\n", False), (END, True))):
        text = "".join(part for part, _ in parts)
        found = Encoder(tokenizer, Tally())([Record("x", parts, "", has_template=True)])
        uncut = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found.ids[: len(uncut)].tolist() == uncut
        scored = tokenizer.decode(found.ids[found.is_scored].tolist())
        assert scored == "".join(part for part, is_scored in parts if is_scored).removesuffix(END) + END


class WithoutOffsets:
    """A tokenizer that says no offsets, around one that has them."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        return self._inner(text, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_without_offsets_the_text_stays_too(name: str) -> None:
    tokenizer: Any = WithoutOffsets(TOKENIZERS[name])
    for prompt, answer in BORDERS:
        tally = Tally()
        found = Encoder(tokenizer, tally)([Record("x", ((prompt, False), (answer, True)), "")])
        uncut = TOKENIZERS[name](prompt + answer, add_special_tokens=False)["input_ids"]
        assert found.ids[:-1].tolist() == uncut
        assert found.is_scored[0] == (len(uncut) == 0) or not prompt.strip()
        assert int(found.num_bytes.sum()) == len((prompt + answer).encode("utf-8"))


@pytest.mark.parametrize("name", EXACT)
def test_the_preview_shows_the_border_where_the_file_has_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in BORDERS), encoding="utf-8")
    rows = preview(DataConfig(train=str(path)), TOKENIZERS[name], num_rows=0)["rows"]
    for row, (prompt, answer) in zip(rows, BORDERS, strict=True):
        (first, is_first_scored), (last, is_last_scored) = row["pieces"]
        assert (first.removeprefix(" "), last) == (prompt, answer + END)
        assert (is_first_scored, is_last_scored) == (False, True)
