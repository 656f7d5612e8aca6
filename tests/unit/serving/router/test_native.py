"""The router's compiled code does what its Python code does: it reads what msgspec reads, or leaves the body to it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_checks import COMPILER, run_checks
from quire.serving.router import native, prompt_keys
from quire.serving.router.native import NativeReader, NativeTree, Unavailable, open_library
from quire.serving.router.prefix_tree import PythonTree
from quire.serving.router.prompt_keys import CHUNK_ENDS, Prompt, read_by_msgspec, read_prompt

LONGEST = 4_096  # bytes of a prompt that are compared
TENANT = b"Bearer one"
NAMES = (
    "model", "lora_path", "session_id", "prompt_cache_key", "user", "cache_salt", "previous_response_id",
    "input_file_id", "request_id", "system", "instructions", "tools", "functions", "documents", "template", "messages",
    "input", "prompt", "input_ids", "text", "texts", "query", "content", "input_prefix", "stream", "temperature",
)  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "é" * 9, "日本語" * 7, "😀", '"\\/\b\f\n\r\t\0\x1f\x7f', "word " * 9]
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-99, 99).map(lambda n: n / 100)
LEAVES = TEXTS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)
PARTS = st.dictionaries(st.sampled_from(["type", "text", "image_url"]), VALUES, max_size=3) | VALUES
CONTENTS = TEXTS | st.lists(PARTS, max_size=3) | VALUES
MESSAGE_NAMES = ("role", "content", "reasoning_content", "tool_calls", "images", "name")
MESSAGES = st.dictionaries(st.sampled_from(MESSAGE_NAMES), CONTENTS, max_size=5) | VALUES
FIELDS = VALUES | st.lists(MESSAGES, max_size=4) | TEXTS
BODIES = st.dictionaries(st.sampled_from(NAMES), FIELDS, max_size=8)
SPACES = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n\t", "\r : ")])


@pytest.fixture(scope="module", autouse=True)
def every_byte_has_a_key() -> Iterator[None]:
    """Both readers with chunks of one byte: then their keys are equal where their texts are."""
    try:
        reader = NativeReader(range(LONGEST))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_keys, "_READER", reader)
        yield


def is_left_to_msgspec(body: bytes) -> bool:
    assert not isinstance(prompt_keys._READER, str)
    return not prompt_keys._READER.read(body, TENANT, is_fork=False)


def check_equal(body: bytes, *, is_fork: bool = False) -> None:
    assert read_prompt(body, {}, TENANT, is_fork=is_fork) == read_by_msgspec(body, "", TENANT, is_fork=is_fork)


@given(BODIES, SPACES, st.booleans(), st.booleans())
def test_bodies_of_any_fields_are_read_alike(
    body: dict[str, Any], separators: tuple[str, str], is_ascii: bool, is_fork: bool
) -> None:
    check_equal(json.dumps(body, separators=separators, ensure_ascii=is_ascii).encode(), is_fork=is_fork)


@given(BODIES, st.lists(st.tuples(st.integers(0, 2_000), st.sampled_from(
    [b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e9", b"\xff", b"\xc3", b"\xed\xa0\x80",
     b"\\u", b"\\ud83d", b"\n", b"\0", b" ", b"null", b'"role":1,', b'"content":"x",', b'"text":null,', b'"a":1,"a":2,']
)), min_size=1, max_size=3), st.booleans())  # fmt: skip
def test_bodies_with_errors_are_read_alike(
    body: dict[str, Any], changes: list[tuple[int, bytes]], is_ascii: bool
) -> None:
    text = json.dumps(body, ensure_ascii=is_ascii).encode()
    for place, piece in changes:
        place %= len(text) + 1
        text = text[:place] + piece + text[place + (piece == b"") :]
    check_equal(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"messages":[{"content":"x","tool_calls":[1]}]}',
        b'{"messages":[{"role":"a","content":"x","tool_calls":[],"images":"","reasoning_content":"r"}]}',
        b'{"messages":[{"content":"x","role":"a","name":"n","tool_calls":[{"f":-0.5}]}]}',
        b'{"messages":[{"role":"a","content":"x","tool_calls":0,"images":1}]}',
        b'{"messages":[{"role":"a","content":"x","role":"b"}]}',
        b'{"messages":[{"role":null,"content":null},{},[],"x",null,3]}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"t"},{"text":null,"x":1},"s",null,7]}]}',
        b'{"messages":[{"r\\u006fle":"a","content":"x"}]}',
        b'{"m\\u006fdel":"m","prompt":"p"}',
        b'{"model":"a","model":"b","prompt":"p","prompt":"q"}',
        b'{"model":"","lora_path":"l\\n\\u00e9","user":"\\ud83d\\ude00","prompt":"p"}',
        b'{"messages":[],"input":[{"role":"a"}],"prompt":"p","documents":[1]}',
        b'{"messages":["x",{"role":"a"}],"prompt":[1, 2 ,3]}',
        b'{"tools":[{"a":"\\/\\u0041\\u001f\\u007f\\"","b":1e5}],"prompt":"p"}',
        b'{"tools":{"b":[0.10,1.0,-0,-0.0,1E2,0.0001,0.00012,123456789012345678901]},"prompt":"p"}',
        b'{"prompt":"p"} x',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":1e999}',
        b'{"prompt":01}',
        b"[" * 65 + b"]" * 65,
        b'{"prompt":' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'\xef\xbb\xbf{"prompt":"p"}',
        b'{"tools":[{' + b",".join(b'"%d":1' % number for number in range(70)) + b'}],"prompt":"p"}',
    ],
)
def test_odd_bodies_are_read_alike(text: bytes) -> None:
    for length in range(max(len(text) - 40, 0), len(text) + 1):
        check_equal(text[:length])
        check_equal(text[:length], is_fork=True)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [{"role": "user", "content": "Grüße 日本 \n\"'"}], "temperature": 0.7, "user": "é"},
        {"model": "m", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 900}}]}]},
        {"model": "m", "stream": True, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"x": {"type": "number", "minimum": 0.5}}}}}], "messages": [
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": '{"x": "\\n"}'}}]}]},
        {"model": "m", "system": [{"type": "text", "text": "s"}], "max_tokens": 9,
         "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "r"}]}]},
        {"model": "m", "prompt": "word " * 300, "cache_salt": "s", "logprobs": None},
        {"model": "m", "input": [1, 2, 3] * 200, "previous_response_id": "resp_1"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_ascii", [False, True])
def test_bodies_as_clients_send_them_are_not_left_to_msgspec(body: dict[str, Any], is_ascii: bool) -> None:
    text = json.dumps(body, ensure_ascii=is_ascii).encode()
    assert not is_left_to_msgspec(text)
    check_equal(text)


def test_a_body_longer_than_the_router_reads_has_as_many_keys_in_both() -> None:
    body = json.dumps({"prompt": "\n" * 3_000 + "x" * 3 * 2**20, "cache_salt": "y" * 3 * 2**20}).encode()
    check_equal(body)
    assert read_prompt(body, {}, TENANT) != Prompt()


def test_a_session_of_the_headers_comes_first() -> None:
    assert read_prompt(b'{"user":"u"}', {b"x-session-id": b"h"}, b"").session == "h"


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=9), st.integers(0, 30)), max_size=60))
def test_both_trees_hold_and_evict_the_same_chunks(steps: list[tuple[int, list[int], int]]) -> None:
    native, plain = NativeTree(CHUNK_ENDS), PythonTree()
    capacity = 12 * 512
    for what, path, number in steps:
        keys = [hash(tuple(path[:end])) for end in range(1, len(path) + 1)]
        assert native.match(keys) == plain.match(keys)
        if what == 0 and number == 0:
            native.clear()
            plain.clear()
        elif what == 1:
            capacity = (number + 1) * 512
        count = min(len(keys), capacity // 512)
        assert native.insert(keys, count, None, capacity) == plain.insert(keys, count, None, capacity)
        assert (len(native), native.num_bytes) == (len(plain), plain.num_bytes)


def test_a_tree_evicts_no_more_than_it_holds() -> None:
    tree = NativeTree(CHUNK_ENDS)
    for capacity in (-1, -(2**63), 512):
        tree.insert([1, 2, 3], 3, None, capacity)
        assert (len(tree), tree.num_bytes) == ((1, 512) if capacity > 0 else (0, 0))


def test_a_tree_of_many_chunks_grows_and_shrinks_as_the_plain_one_does() -> None:
    native, plain, rng = NativeTree(CHUNK_ENDS), PythonTree(), random.Random(0)
    for _ in range(4_000):
        root = rng.randrange(2_000)
        keys = [(root * 1_000 + place) << 20 for place in range(rng.randrange(1, 17))]
        capacity = rng.choice([512 * 3_000, 512 * 3_000, 512 * 300])
        assert native.insert(keys, len(keys), None, capacity) == plain.insert(keys, len(keys), None, capacity)
    assert (len(native), native.num_bytes) == (len(plain), plain.num_bytes)


def test_a_library_without_its_sources_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (library,) = native._HERE.glob(f"{native.NAME}.*.so")
    (tmp_path / library.name).symlink_to(library)
    monkeypatch.setattr(native, "_HERE", tmp_path)
    with pytest.raises(Unavailable, match="sources of the router's compiled code cannot be read"):
        open_library.__wrapped__()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("flags", [(), ("-U__SSE2__",)], ids=["blocks", "bytes"])
def test_damaged_bodies_and_crowded_trees_pass_the_checks_in_cpp(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """tools/sanitize.py runs them too, and sees accesses out of bounds. Without SSE2 runs are read byte by byte."""
    run_checks("router_checks", tmp_path, *flags)
