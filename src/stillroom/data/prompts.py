"""Tokenize a prompt, with the opening that a run's documents have."""

from __future__ import annotations

from stillroom.data.bos import Bos, opened, opening_ids
from stillroom.data.chat import question_text
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Unusable
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


def _printed(tokenizer: Tokenizer, prompt: str) -> str:
    try:
        return question_text(tokenizer, prompt)
    except Unusable as error:
        reason = str(error).removeprefix("the chat template refuses it: ")
        raise ConfigError(
            f"the tokenizer's chat template refuses the prompt: {reason}",
            where="--prompt",
            advice=["--raw continues the text as it stands, without the template"],
        ) from error
