"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from stillroom.errors import ConfigError
from stillroom.planning.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("15.5 GiB", int(15.5 * 2**30)), ("800mb", 8 * 10**8), ("1024 B", 1024), ("2T", 2 * 10**12)],
)
def test_amounts_are_read_in_powers_of_ten_and_of_two(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16", "15.9", " 17179869184 "])
def test_a_number_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert f"{text.strip()}GB" in caught.value.advice[0]


@pytest.mark.parametrize("text", ["16XB", "", "GB", "-4GB", "0GB", "nan", "1e9", "16 GB GB"])
def test_what_is_no_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="no amount of memory") as caught:
        parse_bytes(text)
    assert "16GB" in caught.value.advice[0]
