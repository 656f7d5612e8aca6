"""What the router reads of a request."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from quire.serving.router import prompt_keys
from quire.serving.router.prompt_keys import (
    CHUNK_BYTES,
    CHUNK_ENDS,
    MAX_PROMPT_BYTES,
    Prompt,
    num_chunks,
    read_prompt,
)

LONG = "word " * 400


@pytest.fixture(autouse=True, params=["as built", "Python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(prompt_keys, "_READER", "not built")


def read(tenant: bytes = b"", headers: dict[bytes, bytes] | None = None, **fields: Any) -> Prompt:
    return read_prompt(json.dumps(fields).encode(), headers or {}, tenant)


def shared(one: Prompt, other: Prompt) -> int:
    return next((place for place, pair in enumerate(zip(one.keys, other.keys, strict=False)) if pair[0] != pair[1]),
                min(len(one.keys), len(other.keys)))  # fmt: skip


def talk(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def test_the_next_turn_of_a_conversation_begins_with_the_keys_of_the_last() -> None:
    first = read(model="m", messages=talk(LONG))
    second = read(model="m", messages=talk(LONG, "more", LONG))
    assert len(first.keys) == num_chunks(first.num_bytes) > 2
    assert shared(first, second) == len(first.keys)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"cache_salt": "s"},
        {"tenant": b"Bearer other"},
        {"tools": [{"name": "f"}]},
        {"system": "be brief"},
    ],
)
def test_requests_that_share_no_cache_share_no_key(other: dict[str, Any]) -> None:
    given = {"model": "m", "messages": talk(LONG), "tenant": b"Bearer one"}
    assert shared(read(**given), read(**given)) > 0
    assert shared(read(**given), read(**(given | other))) == 0


def test_adapters_of_sglangs_name_are_models() -> None:
    one, other = (read(text=LONG, lora_path=name) for name in ("one", "other"))
    assert (one.model, shared(one, other)) == ("one", 0)


def test_parts_of_content_and_plain_text_have_the_same_keys() -> None:
    plain, parts = talk(LONG), talk([{"type": "text", "text": LONG}])
    assert read(messages=plain).keys == read(messages=parts).keys


@pytest.mark.parametrize("field", ["prompt", "input", "text"])
def test_every_api_has_its_field_for_the_prompt(field: str) -> None:
    assert len(read(**{field: LONG}).keys) == len(LONG) // CHUNK_BYTES
    assert len(read(**{field: [1, 2, 3] * 400}).keys) > 2


def test_a_session_is_read_from_header_or_body_or_salt() -> None:
    assert read(headers={b"x-session-id": b"h"}, user="u").session == "h"
    assert read(session_id="s", user="u").session == "s"
    assert read(prompt_cache_key="k", user="u").session == "k"
    assert read(user="u", cache_salt="c").session == "u"
    assert read(cache_salt="c").session == "c"
    assert read(prompt="x").session == ""


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request_has_no_keys(body: bytes) -> None:
    assert read_prompt(body, {b"x-session-id": b"s"}, b"") == Prompt(session="s")


def test_odd_values_are_left_to_the_replica() -> None:
    prompt = read(model=3, messages=[1, None, {"role": 7, "content": {"a": [None]}}], user=[], stream="yes")
    assert (prompt.model, prompt.session, prompt.answer_id) == ("", "", "")


def test_the_keys_of_one_prompt_are_bounded() -> None:
    assert len(read(prompt="x" * 2 * MAX_PROMPT_BYTES).keys) == len(CHUNK_ENDS) - 1 < 200


def test_chunks_are_small_parts_of_what_stands_before_them() -> None:
    sizes = [end - start for start, end in pairwise(CHUNK_ENDS)]
    assert sizes[:16] == [CHUNK_BYTES] * 16
    assert all(size in (CHUNK_BYTES, sum(sizes[:place]) // 4_096 * 512) for place, size in enumerate(sizes))
    assert [num_chunks(size) for size in (0, 511, 512, 1_024, 1_500)] == [0, 0, 1, 2, 2]
