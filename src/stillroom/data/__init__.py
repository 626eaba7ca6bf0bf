"""Data: read a spec into batches of tokens, with the number of text bytes of each target.

`open_data(config.data, tokenizer)` returns a `Corpus` of training rows and held-out rows. A `Loader` cuts the training
rows into windows of micro-batches, one for each optimizer step; `fixed_batches` reads the held-out rows in order.
"""

from stillroom.data.chat import prompt_ids
from stillroom.data.corpus import Corpus, open_data, open_eval, open_held_out
from stillroom.data.loader import Loader, fixed_batches, fixed_rows
from stillroom.data.packing import Rows, pack
from stillroom.data.records import BadRecord, Record, Tally
from stillroom.data.tokenize import Bos, Encoded, Encoder, Tokenizer, opening_difference, opening_ids

__all__ = [
    "BadRecord",
    "Bos",
    "Corpus",
    "Encoded",
    "Encoder",
    "Loader",
    "Record",
    "Rows",
    "Tally",
    "Tokenizer",
    "fixed_batches",
    "fixed_rows",
    "open_data",
    "open_eval",
    "open_held_out",
    "opening_difference",
    "opening_ids",
    "pack",
    "prompt_ids",
]
