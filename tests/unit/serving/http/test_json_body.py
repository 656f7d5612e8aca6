"""Strict JSON."""

from __future__ import annotations

import pytest

from quire.serving.http.json_body import check_numbers, decode_json
from quire.types.errors import InvalidRequest


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"NaN", b"[Infinity]", b"1e999", b'"\\ud800"', b'"\xff"', b"{'a':1}", b"[1,]", b"{} {}", b"9" * 9_999],
)  # fmt: skip
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_json(body, 8)


def test_a_byte_order_mark_is_skipped() -> None:
    assert decode_json(b'\xef\xbb\xbf{"a": 1}', 8) == {"a": 1}
    with pytest.raises(InvalidRequest, match="is empty"):
        decode_json(b"\xef\xbb\xbf", 8)


def test_errors_quote_nothing_of_the_program() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_json(b'{"a": nope}', 8)
    assert "msgspec" not in str(caught.value)


@pytest.mark.parametrize("depth", [1, 8])
def test_nesting_up_to_the_limit_is_read(depth: int) -> None:
    assert decode_json(b"[" * depth + b"]" * depth, 8) is not None


@pytest.mark.parametrize("shape", [(b"[", b"]"), (b'{"a":', b"}"), (b'[1,{"a":', b"}]")])
@pytest.mark.parametrize("depth", [9, 900, 200_000])
def test_nesting_beyond_it_is_refused_however_deep(shape: tuple[bytes, bytes], depth: int) -> None:
    with pytest.raises(InvalidRequest, match="nested deeper than 8"):
        decode_json(shape[0] * depth + b"1" + shape[1] * depth, 8)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert len(decode_json(b"[" + b"[1]," * 500 + b"[2]]", 8)) == 501


def test_brackets_in_text_are_not_depth() -> None:
    assert decode_json(b'["' + b"[" * 500 + b'"]', 8) == ["[" * 500]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_numbers_beyond_64_bits_are_refused_in_free_data(number: int) -> None:
    check_numbers("x", {"a": [2**64 - 1, -(2**63), True, "text"]})
    with pytest.raises(InvalidRequest, match="64 bits"):
        check_numbers("x", {"a": [{"b": number}]})
