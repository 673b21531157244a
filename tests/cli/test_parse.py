"""Sizes, token counts and numbers as people write them."""

import pytest

from shadowkv.cli.parse import (
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_integer,
    parse_number,
    parse_tokens,
)
from shadowkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("8k", 8192), ("128K", 131072), ("1M", 1 << 20), ("1.5k", 1536), ("1,024", 1024)],
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 << 30), ("80G", 80 << 30), ("80gb", 80 * 10**9), ("512MiB", 512 << 20), ("7", 7), ("0.5KiB", 512)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_bandwidth() -> None:
    assert parse_bandwidth("31.5GB/s") == parse_bandwidth("31.5GB") == 31_500_000_000


@pytest.mark.parametrize("text", ["", "k", "-1", "8q", "1e3", "8 k k", "80GB/s", "nan"])
def test_not_a_size(text: str) -> None:
    for parse in (parse_tokens, parse_bytes):
        with pytest.raises(ConfigError, match="is not"):
            parse(text)


def test_not_a_number() -> None:
    with pytest.raises(ConfigError, match=r"'1\.5' is not a whole number"):
        parse_integer("1.5")
    for text in ("x", "inf", "nan"):
        with pytest.raises(ConfigError):
            parse_number(text)


def test_for_people() -> None:
    assert [format_bytes(n) for n in (0, 512, 2048, 80 << 30, 123 << 40)] == [
        "0 B",
        "512 B",
        "2 KiB",
        "80 GiB",
        "123 TiB",
    ]
    assert [format_seconds(s) for s in (4.21, 59.99, 185, 3723)] == ["4.2 s", "60.0 s", "3:05", "1:02:03"]
