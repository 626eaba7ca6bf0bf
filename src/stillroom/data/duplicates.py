"""Count records whose content stands more than once in the training data, or also in the evaluation data."""

from __future__ import annotations

from collections.abc import Iterator

from stillroom.config.data import DataConfig, SourceConfig
from stillroom.data.chat import PlainChat
from stillroom.data.embedded import BUILTIN_PREFIX, embedded_records
from stillroom.data.reading import read_records
from stillroom.data.records import Tally


def count_duplicates(config: DataConfig) -> dict[str, int]:
    """Training records with the content of an earlier one, and evaluation records that are also trained on.

    Read apart from the run, without a tokenizer: contents are compared as the file has them. Only 16 bytes of each
    record are kept. Without `config.eval` equal contents fall on one side of the split, and none is on both.
    """
    seen: set[bytes] = set()
    inside = 0
    for source in config.sources:
        for key in _keys(source, config):
            inside += key in seen
            seen.add(key)
    if config.eval is None or config.eval.startswith(BUILTIN_PREFIX):
        return {"inside": inside, "between": 0}
    between = sum(key in seen for key in _keys(config.named(config.eval), config, is_evaluation=True))
    return {"inside": inside, "between": between}


def _keys(source: SourceConfig, config: DataConfig, *, is_evaluation: bool = False) -> Iterator[bytes]:
    if source.path.startswith(BUILTIN_PREFIX):
        records = iter(embedded_records(source.path, train_on_prompt=config.train_on_prompt)[0])
    else:
        tally = Tally()
        records = read_records(source, config, PlainChat(tally), tally, is_evaluation=is_evaluation)
    return (bytes.fromhex(record.key)[:16] for record in records)
