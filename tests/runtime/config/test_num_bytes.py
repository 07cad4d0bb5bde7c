"""Amounts of memory, as people write them."""

import pytest
from corun.runtime.config.values import parse_num_bytes
from corun.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 2**32),
        ("4 gib", 2**32),
        ("1.5KiB", 1536),
        ("2MB", 2_000_000),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
    ],
)
def test_amounts(text: str, num_bytes: int) -> None:
    assert parse_num_bytes(text, "--x") == num_bytes


@pytest.mark.parametrize("text", ["", "four", "-1", "4 G", "4GiBs", "1e9", "0.5B", "1.0001KB1"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ConfigError, match="--x is"):
        parse_num_bytes(text, "--x")
