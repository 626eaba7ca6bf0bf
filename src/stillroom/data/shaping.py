"""The way from an object of a data file to a record, as a configuration asks for it."""

from __future__ import annotations

from stillroom.config.data import DataConfig
from stillroom.data.chat import PlainChat, TemplateChat
from stillroom.data.encode import Tokenizer
from stillroom.data.records import ChatWriter, Shaper, Tally


def chat_writer(tokenizer: Tokenizer, tally: Tally, day: str = "") -> TemplateChat | PlainChat:
    """Print chats with the tokenizer's template, where it has one. `day` is what a template prints that asks for it."""
    return TemplateChat(tokenizer, tally, day) if tokenizer.chat_template else PlainChat(tally)


def make_shaper(config: DataConfig, tokenizer: Tokenizer, tally: Tally, write_chat: ChatWriter | None = None) -> Shaper:
    """The shaper of the one source that `config` has; `write_chat` writes chats where it is not the tokenizer's."""
    (source,) = config.sources
    write_chat = write_chat or chat_writer(tokenizer, tally, config.day)
    return Shaper(write_chat, tally, train_on_prompt=config.train_on_prompt, layout=source)
