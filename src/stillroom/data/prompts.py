"""Tokenize a prompt, with the opening that a run's documents have."""

from __future__ import annotations

from collections.abc import Sequence

from stillroom.data.bos import Bos, opened, opening_ids
from stillroom.data.chat import conversation_text, question_text
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Turn, Unusable
from stillroom.errors import ConfigError


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, bos: Bos = "auto", is_raw: bool = False) -> tuple[list[int], bool]:
    """The tokens of a prompt, and whether the chat template printed it: if there is one, unless `is_raw`.

    The template prints one user turn and opens the answer. Special tokens are parsed in a template's print and nowhere
    else. An empty raw prompt is the opening alone, or else BOS or the end-of-text token.
    """
    is_chat = bool(tokenizer.chat_template) and not is_raw
    text = _printed(tokenizer, prompt) if is_chat else prompt
    options = {"add_special_tokens": False, "split_special_tokens": not is_chat, "verbose": False}
    ids = tokenizer([text], **options)["input_ids"][0] if text else []
    opened_ids = opened(list(ids), opening_ids(tokenizer, bos))
    if opened_ids:
        return opened_ids, is_chat
    marks = (getattr(tokenizer, "bos_token_id", None), tokenizer.eos_token_id)
    begin = next((int(mark) for mark in marks if mark is not None), None)
    if begin is None:
        raise ConfigError("there is nothing to continue: the prompt is empty", advice=["give a text with --prompt"])
    return [begin], is_chat


def chat_ids(tokenizer: Tokenizer, turns: Sequence[Turn], *, bos: Bos = "auto") -> list[int]:
    """The tokens of a conversation that ends in a question, with the opening of the answer.

    Without a chat template turns are "role: content" lines, as such chats are trained on.
    """
    if not tokenizer.chat_template:
        lines = [f"{turn.role}: {turn.content}\n" for turn in turns]
        return prompt_ids(tokenizer, "".join([*lines, "assistant:"]), bos=bos, is_raw=True)[0]
    try:
        text = conversation_text(tokenizer, turns)
    except Unusable as error:
        raise _refused(error, "conversation") from error
    options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
    return opened(list(tokenizer([text], **options)["input_ids"][0]), opening_ids(tokenizer, bos))


_MARK = "stillroom7answer"


def turn_end_ids(tokenizer: Tokenizer) -> set[int]:
    """The special token that the chat template prints right after an answer; empty if it prints none."""
    if not tokenizer.chat_template:
        return set()
    try:
        whole = conversation_text(tokenizer, [Turn("user", "a"), Turn("assistant", _MARK)], opens_answer=False)
    except Unusable:
        return set()
    _before, mark, after = whole.rpartition(_MARK)
    if not mark or not after.strip():
        return set()
    ids = list(tokenizer([after.lstrip()], add_special_tokens=False)["input_ids"][0])
    first = str(tokenizer.convert_ids_to_tokens(ids[0])) if ids else ""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    is_special = ids and (ids[0] in getattr(tokenizer, "all_special_ids", ()) or ids[0] in added)
    return {int(ids[0])} if is_special and first and after.lstrip().startswith(first) else set()


def _printed(tokenizer: Tokenizer, prompt: str) -> str:
    try:
        return question_text(tokenizer, prompt)
    except Unusable as error:
        raise _refused(error, "prompt") from error


def _refused(error: Unusable, what: str) -> ConfigError:
    reason = str(error).removeprefix("the chat template refuses it: ")
    return ConfigError(
        f"the tokenizer's chat template refuses the {what}: {reason}",
        where="--prompt" if what == "prompt" else "",
        advice=["--raw continues the text as it stands, without the template"],
    )
