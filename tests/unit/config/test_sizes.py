from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.sizes import GIB, MIB, format_size, parse_size
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1_000, 1_000),
        ("1000", 1_000),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("0.5GiB", 512 * MIB),
        ("512MiB", 512 * MIB),
        ("1MB", 10**6),
        ("3b", 3),
    ],
)
def test_a_size_is_read_as_people_write_it(written: int | str, num_bytes: int) -> None:
    assert parse_size("kv_cache_memory", written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "2 parsecs", "-1GiB", "1e3", "0", 0, -5, True, 1.5, None])
def test_what_is_no_size_is_refused_by_name(written: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_size("kv_cache_memory", written)  # type: ignore[arg-type]


@given(st.integers(min_value=1, max_value=1 << 45))
def test_a_printed_size_is_within_one_percent_of_the_truth(num_bytes: int) -> None:
    assert abs(parse_size("x", format_size(num_bytes)) - num_bytes) <= max(1, num_bytes * 0.01)
