"""Sizes as people write them."""

import pytest

from mlxinfer.errors import InvalidRequestError
from mlxinfer.memory import default_kv_bytes, parse_bytes, total_memory_bytes


def test_sizes_are_read_with_decimal_and_binary_units() -> None:
    for text, expected in (
        *(("8GB", 8_000_000_000), ("8gb", 8_000_000_000), ("1.5G", 1_500_000_000)),
        *(("512 MiB", 512 * 2**20), ("2gib", 2 * 2**30), ("4096", 4096), (4096, 4096)),
    ):
        assert parse_bytes(text) == expected, text


def test_what_is_no_size() -> None:
    for text in ("", "GB", "-1", "8 Gb/s", "lots", 0, -5, 1.5, True, None, "0", "9" * 400, 10**30):
        with pytest.raises(InvalidRequestError, match=r"max_memory.*above 0"):
            parse_bytes(text)  # type: ignore[arg-type]


def test_the_default_is_a_share_and_never_nothing() -> None:
    assert default_kv_bytes(10**10, 5 * 10**9) == 2 * 10**9
    assert default_kv_bytes(10**9, 5 * 10**9) == 64 * 10**6
    assert total_memory_bytes() > 10**8
