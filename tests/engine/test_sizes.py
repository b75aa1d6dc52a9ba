from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.sizes import format_binary_size, format_round_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 1048576),
        ("0", 0),
        ("120GB", 120 * 10**9),
        ("120GiB", 120 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        (" 3kB ", 3000),
        ("0.1kB", 100),
    ],
)
def test_gb_is_decimal_and_gib_is_binary(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1G", "1Gb", "1e9", "1,5GB", "nan", "1 2GB", "9" * 40, "٣GB"])
def test_anything_else_is_refused_with_the_units_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*"):
        parse_size(text)


def test_more_than_any_machine_has_is_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match=f"expected at most {2**60} bytes, got '2000000TB'"):
        parse_size("2000000TB")


def test_sizes_are_written_with_three_digits() -> None:
    sizes = (999, 5_242_880, 120 * 10**9, 1_310_720_000)
    assert [format_size(size) for size in sizes] == ["999 B", "5.24 MB", "120 GB", "1.31 GB"]
    assert [format_binary_size(size) for size in (1023, 2**29, 3 * 2**19)] == ["1023 B", "512 MiB", "1.5 MiB"]


def test_a_size_is_written_in_the_unit_that_it_was_thought_in() -> None:
    assert [format_round_size(parse_size(text)) for text in ("120GB", "512MiB", "24GiB")] == [
        "120 GB",
        "512 MiB",
        "24 GiB",
    ]
