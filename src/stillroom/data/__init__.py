"""Data: from a spec to batches of tokens, with the bytes each target stands for.

`open_data(config.data, tokenizer)` gives a `Corpus` of rows to train on and rows held out. A `Loader` cuts
the first into windows of micro-batches, one window for each optimizer step; `fixed_batches` reads the others
in order.
"""

from stillroom.data.bos import Bos, opening_difference, opening_ids
from stillroom.data.corpus import Corpus, open_data, open_eval
from stillroom.data.encode import Encoded, Encoder, Tokenizer
from stillroom.data.loader import Loader, fixed_batches, fixed_rows
from stillroom.data.packing import Rows, pack
from stillroom.data.prompts import prompt_ids
from stillroom.data.records import BadRecord, Record, Tally

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
    "opening_difference",
    "opening_ids",
    "pack",
    "prompt_ids",
]
