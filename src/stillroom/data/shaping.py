"""The way from an object of a data file to a record, as a configuration asks for it."""

from __future__ import annotations

from stillroom.config.schema import DataConfig
from stillroom.data.chat import PlainChat, TemplateChat
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Shaper, Tally


def make_shaper(config: DataConfig, tokenizer: Tokenizer, tally: Tally) -> Shaper:
    write_chat = TemplateChat(tokenizer, tally) if tokenizer.chat_template else PlainChat(tally)
    return Shaper(write_chat, tally, train_on_prompt=config.train_on_prompt)
