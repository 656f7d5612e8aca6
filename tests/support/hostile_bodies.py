"""Requests that mean harm, made from the table of parameters and from what has broken other servers."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.serving.http.endpoints.registry import BY_NAME
from quire.serving.http.fields import Field
from quire.serving.http.limits import MIB, Limits

PATHS: dict[str, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "sglang_generate": "/generate",
    "llama_completion": "/completion",
    "tgi_generate": "/",
    "tgi_generate_stream": "/generate_stream",
}
RAW = [
    "NaN", "-Infinity", "Infinity", "1e999", "18446744073709551616", "-9223372036854775809", "1" * 400, '"\\ud800"',
    '"\\u0000"', "null", "true", "[]", "{}", "[" * 60 + "]" * 60, '{"a":' * 40 + "1" + "}" * 40, "-0.0",
    '"' + "x" * 5_000 + '"', "1e-320", "[[[1]]]", '{"type":"text"}', '{"__proto__":{}}', '["\\ud83d"]', "0.1", "-1",
    "2147483648", '"{{ 7*7 }}"', '"../../etc/passwd"', '"\\udfff\\ud800"', "9" * 5_000, "1e5000", "-1e-5000", '""',
    "[null]", '[[[[[[[[]]]]]]]]', '"18446744073709551616"', "[1e400]", '"data: [DONE]\\n\\n"', '"<|im_end|>"',
]  # fmt: skip
_NAMES = ["", "é", "a" * 999, "constructor", "__class__", "\\ud800", "\\u0000", "n ", "N"]
_DEEP = 10_000  # levels


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request: where it goes and what it carries."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def hostile(rng: random.Random, limits: Limits) -> Hostile:
    """The next one. Most come from the table; some are giants or no JSON at all."""
    endpoint = rng.choice(list(PATHS))
    chance = rng.random()
    if chance < 0.80:
        body = from_table(rng, endpoint, limits)
    elif chance < 0.90:
        body = rng.choice(_STRANGE)(rng, endpoint)
    else:
        body = rng.choice(_LARGE)(rng, endpoint)
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.15:
        headers |= rng.choice(_HEADERS)
    query = rng.choice(["?explain=1", "?explain=%00", "?stream=1", "?explain=1&explain=0", "?" + "a=b&" * 200])
    return Hostile(PATHS[endpoint] + (query if rng.random() < 0.05 else ""), body, headers)


def from_table(rng: random.Random, endpoint: str, limits: Limits) -> bytes:
    """A body of a few parameters, each with a value from the edge of what it may be, or far beyond it."""
    fields = BY_NAME[endpoint].fields_by_name
    parts = [_BASE[endpoint]] if rng.random() < 0.9 else []
    served = sorted(
        name for name, field in fields.items() if field.support == "yes" and name not in ("model", "tokens")
    )
    names = served if rng.random() < 0.7 else sorted(fields)
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 1, 2, 4]))):
        value = rng.choice(RAW) if rng.random() < 0.3 else rng.choice(edge_values(fields[name], limits) or RAW)
        parts.append(f'"{name}":{value}')
    if rng.random() < 0.1:
        parts.append(f'"{rng.choice(_NAMES)}":{rng.choice(RAW)}')
    if parts and rng.random() < 0.05:
        parts.append(rng.choice(parts))  # a name that stands twice
    body = "{" + ",".join(parts) + "}"
    cut = rng.randint(0, len(body)) if rng.random() < 0.1 else len(body)
    return body[:cut].encode()


def edge_values(field: Field, limits: Limits) -> list[str]:
    """Around the ends of what the table allows."""
    return [json.dumps(value) for value in _edges(field.validator.schema(limits))]


def _edges(schema: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for part in [schema, *schema.get("anyOf", ())]:
        low, high = part.get("minimum", part.get("exclusiveMinimum")), part.get("maximum")
        if low is not None and high is not None:
            found += [low, low - 1, low + 1, high, high - 1, high + 1, (low + high) // 2]
            if part.get("type") == "number":
                found += [math.nextafter(low, high), math.nextafter(high, low), math.nextafter(high, math.inf)]
        if part.get("type") == "boolean":
            found += [True, False]
        if "maxLength" in part and part["maxLength"] < 2_000:
            found += ["x" * part["maxLength"], "x" * (part["maxLength"] + 1)]
        if part.get("type") == "array" and part.get("maxItems", 3_000) < 3_000:
            found += [["x"] * part["maxItems"], [1] * (part["maxItems"] + 1), [None], [[]], [{}]]
        found += list(part.get("enum", ()))
        for name, member in part.get("properties", {}).items():  # such as the parameters of Text Generation Inference
            found += [{name: value} for value in _edges(member)]
    return found


_BASE: dict[str, str] = {
    "chat": '"messages":[{"role":"user","content":"x"}]',
    "completions": '"prompt":"x"',
    "tokenize": '"prompt":"x"',
    "detokenize": '"tokens":[1]',
    "responses": '"input":"x"',
    "messages": '"max_tokens":2,"messages":[{"role":"user","content":"x"}]',
    "ollama_chat": '"messages":[{"role":"user","content":"x"}]',
    "ollama_generate": '"prompt":"x"',
    "sglang_generate": '"text":"x"',
    "llama_completion": '"n_predict":2,"prompt":"x"',
    "tgi_generate": '"inputs":"x"',
    "tgi_generate_stream": '"inputs":"x"',
}


def _around(endpoint: str, name: str, value: str) -> bytes:
    return f'{{{_BASE[endpoint]},"{name}":{value}}}'.encode()


def _messages(value: str) -> bytes:
    return f'{{"messages":[{{"role":"user","content":{value}}}],"max_tokens":2}}'.encode()


_STRANGE: list[Callable[[random.Random, str], bytes]] = [
    lambda rng, endpoint: rng.randbytes(rng.randint(1, 300)),
    lambda rng, endpoint: b"",
    lambda rng, endpoint: b" \r\n\t" * rng.randint(1, 50),
    lambda rng, endpoint: b"\xef\xbb\xbf" + _around(endpoint, "n", "1"),
    lambda rng, endpoint: _around(endpoint, "n", "1").decode().encode("utf-16"),
    lambda rng, endpoint: b'{"prompt":"\xff\xfe\x80","max_tokens":2}',
    lambda rng, endpoint: b'{"prompt":"a\x00b","max_tokens":2}',
    lambda rng, endpoint: gzip.compress(_around(endpoint, "n", "1")),
    lambda rng, endpoint: rng.choice([b"null", b"[]", b"0", b'"x"', b"true", b"{} {}", b"{},", b"{'a':1}"]),
    lambda rng, endpoint: b"[" * _DEEP + b"]" * rng.choice([0, _DEEP]),
    lambda rng, endpoint: b'{"a":' * _DEEP + b"1" + b"}" * rng.choice([0, _DEEP]),
    lambda rng, endpoint: _around(endpoint, "logit_bias", '{"a":' * _DEEP + "1" + "}" * _DEEP),
    lambda rng, endpoint: _messages('[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/x"}}]'),
    lambda rng, endpoint: _messages('"\\ud83d"'),
    lambda rng, endpoint: _messages('"{% for a in range(10**9) %}x{% endfor %}"'),
    lambda rng, endpoint: b'{"messages":[{"role":"\\udc00","content":"x"}]}',
    lambda rng, endpoint: b'{"prompt":[[]]}',
    lambda rng, endpoint: b'{"prompt":[0,-1,49152,2147483648]}',
    lambda rng, endpoint: b'{"tokens":[0,-1,1e3,2147483647]}',
    lambda rng, endpoint: b'{"prompt":"x","max_tokens":2,"stop":["' + b"\\u0000" * 1_000 + b'"]}',
]
_LARGE: list[Callable[[random.Random, str], bytes]] = [
    lambda rng, endpoint: b'{"prompt":"' + b"x" * rng.choice([10**5, 3 * MIB, 5 * MIB]) + b'"}',
    lambda rng, endpoint: b'{"prompt":[' + b"1," * 200_000 + b"1]}",
    lambda rng, endpoint: b'{"prompt":[' + b'"x",' * 20_000 + b'"x"],"max_tokens":1}',
    lambda rng, endpoint: b'{"tokens":[' + b"1," * 300_000 + b"1]}",
    lambda rng, endpoint: b'{"messages":[' + b'{"role":"user","content":"x"},' * 5_000 + b'{"role":"user"}]}',
    lambda rng, endpoint: _messages("[" + '{"type":"text","text":"x"},' * 20_000 + '{"type":"text","text":"x"}]'),
    lambda rng, endpoint: _around(endpoint, "stop", json.dumps(["s"] * 10_000)),
    lambda rng, endpoint: _around(endpoint, "logit_bias", json.dumps({str(i): 1 for i in range(50_000)})),
    lambda rng, endpoint: _around(endpoint, "allowed_token_ids", json.dumps(list(range(200_000)))),
    lambda rng, endpoint: _around(endpoint, "n", "1000000000"),
    lambda rng, endpoint: _around(endpoint, "metadata", json.dumps({f"k{i}": "v" * 100 for i in range(5_000)})),
    lambda rng, endpoint: _around(endpoint, "bad_words", json.dumps(["w" * 500] * 3_000)),
]
_HEADERS: list[dict[str, str]] = [
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-7"},
    {"Content-Type": "x" * 5_000},
    {"Content-Encoding": "gzip"},
    {"X-Request-Id": "a" * 5_000},
    {"X-Request-Id": "../../x"},
    {"X-Quire-Explain": "1"},
    {"X-Quire-Lenient": "1"},
    {"X-Quire-Lenient": "\x7f"},
    {"Authorization": "Bearer " + "k" * 10_000},
    {"Authorization": "Basic \x7f"},
    {"X-Junk": "j" * 70_000},
    {"Expect": "100-continue"},
    {"Accept": "nothing/at-all"},
    {"Host": "evil.example:99999"},
    {"Origin": "http://evil.example"},
    {"Connection": "upgrade", "Upgrade": "h2c"},
    {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"},
]

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEADS: tuple[bytes, ...] = (  # whole requests, as bytes that no client would send
    b"\r\n\r\n\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET //health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /%00%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /playground/../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA\x00b: c\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"BREW /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of TLS
    _POST + b"Content-Length: -1\r\n\r\n",
    _POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    _POST + b"Content-Length: 1e3\r\n\r\n",
    _POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    _POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n{}",
    _POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    _POST + b"Content-Length: 1000\r\n\r\n{",
    _POST + b"Content-Length: 2\r\n\r\n{}" * 20,
)
