"""Laws of what the log says of the rows' lengths."""

from __future__ import annotations

from pathlib import Path

import tiny

from stillroom.config import load_config
from stillroom.data import open_data
from stillroom.data.corpus import length_quantiles, row_lengths


def test_quantiles_are_lengths_that_occur() -> None:
    assert length_quantiles([5, 1, 9, 3, 7]) == {
        "shortest": 1,
        "first_decile": 1,
        "median": 5,
        "ninth_decile": 9,
        "longest": 9,
    }
    assert length_quantiles([]) == {}


def test_a_corpus_knows_the_lengths_of_both_sides_and_the_shapes_of_its_records(world: Path) -> None:
    corpus = open_data(load_config(overrides=tiny.settings(world)).data, tiny.tokenizer())
    lengths = row_lengths(corpus)
    assert set(lengths) == {"train", "eval"}
    assert lengths["train"]["longest"] == corpus.train.lengths.max()
    assert lengths["eval"]["shortest"] == corpus.evaluation.lengths.min()
    assert corpus.shapes == {"text": 300}
