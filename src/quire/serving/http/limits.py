"""All limits of the server, in one table. Validation, the OpenAPI document, the docs and the fuzz tests are driven by
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quire.config.server import DEFAULT_CONNECTIONS
from quire.types import sampling
from quire.types.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what it bounds, what happens to a client that exceeds it, and the range in which an operator may set
    it."""

    name: str
    value: int
    unit: str
    bounds: str
    answer: str
    highest: int = 2**31 - 1
    lowest: int = 1

    @property
    def flag(self) -> str:
        return f"--limit {self.name}=VALUE"


_BAD = "400 invalid_request_error"
_BUSY = "429 rate_limit_error with Retry-After"
_CLOSE = "the connection is closed"

LIMITS: tuple[Limit, ...] = (
    # what one request may ask for
    Limit("body_bytes", 4 * MIB, "bytes", "the body of one request", "413 invalid_request_error", highest=64 * MIB),
    Limit("nesting", 32, "levels", "lists and objects inside each other in a body", _BAD, highest=200),
    Limit("prompts", 256, "prompts", "a list in `prompt`", _BAD, highest=65_536),
    Limit("inputs", 2_048, "texts", "texts of one request to embed, score, rank or classify", _BAD, highest=65_536),
    Limit("prompt_tokens", 2**20, "tokens", "all prompts of a request together; max_model_len bounds each", _BAD),
    Limit("prompt_characters", 4 * MIB, "characters", "all text of a request that is to be tokenized", _BAD),
    Limit("messages", 2_048, "messages", "`messages`", _BAD, highest=8_192),
    Limit("content_parts", 1_024, "parts", "the `content` of one message", _BAD, highest=65_536),
    Limit("image_bytes", 20 * MIB, "bytes", "one encoded image; body_bytes bounds it too", _BAD, highest=2**30),
    Limit("image_pixels", 64_000_000, "pixels", "one image before resizing", _BAD, highest=170_000_000),
    Limit("images_pixels", 200_000_000, "pixels", "all images of a request, before resizing", _BAD, highest=2**40),
    Limit("tools", 128, "tools", "`tools`", _BAD, highest=4_096),
    Limit("n", 128, "samples", "`n`; max_num_seqs bounds it too", _BAD, highest=sampling.MAX_N),
    Limit("choices", 1_024, "samples", "`n` times the number of prompts", _BAD, highest=2**20),
    Limit("max_tokens", 2**20, "tokens", "`max_tokens`; max_model_len bounds it too", _BAD),
    Limit(
        "logprobs",
        20,
        "tokens",
        "`logprobs`, `top_logprobs`, `prompt_logprobs`; -1 asks for the whole vocabulary",
        _BAD,
        highest=2**20,
    ),
    Limit("stop_strings", 16, "strings", "`stop`", _BAD, highest=sampling.MAX_STOP_STRINGS),
    Limit("stop_characters", 1_024, "characters", "one string of `stop` or `bad_words`", _BAD, highest=16_384),
    Limit("stop_tokens", 128, "ids", "`stop_token_ids`", _BAD, highest=sampling.MAX_STOP_TOKENS),
    Limit("bad_words", 128, "strings", "`bad_words`", _BAD, highest=sampling.MAX_BAD_WORDS),
    Limit("logit_bias", 300, "entries", "`logit_bias`", _BAD, highest=sampling.MAX_BIASED_TOKENS),
    Limit(
        "pattern_tokens",
        128,
        "tokens",
        "`max_pattern_size` of `repetition_detection`",
        _BAD,
        highest=sampling.MAX_PATTERN_SIZE,
    ),
    Limit("token_ids", 2**17, "ids", "`allowed_token_ids`", _BAD, highest=2**20),
    Limit("logprob_token_ids", 128, "ids", "`logprob_token_ids`", _BAD, highest=1_024),
    Limit("template_kwargs", 32, "entries", "`chat_template_kwargs`", _BAD, highest=1_024),
    Limit("metadata", 16, "entries", "`metadata` of `/v1/responses`", _BAD, highest=1_024),
    Limit("identifier", 128, "characters", "`request_id`; a longer X-Request-Id header is cut", _BAD, highest=512),
    Limit("label", 512, "characters", "`user`, `cache_salt`, `model` and other names", _BAD, highest=4_096),
    # what all requests together may hold
    Limit("queue_requests", 1_024, "requests", "requests that wait for the engine, at all edges together", _BUSY),
    Limit(
        "queue_tokens",
        2**20,
        "tokens",
        "prompt tokens of requests that wait for the engine, at all edges together; an empty queue takes a request of "
        "any size",
        _BUSY,
    ),
    Limit(
        "bodies_bytes",
        256 * MIB,
        "bytes",
        "bodies that one edge is reading or parsing; uploads count separately, with the same limit; a body of up to "
        "64 KiB always fits",
        _BUSY,
        highest=2**40,
    ),
    Limit(
        "images_bytes",
        1_024 * MIB,
        "bytes",
        "pixels of images, three bytes each, in requests that one edge holds; alone, a request of any size fits",
        _BUSY,
        highest=2**40,
    ),
    Limit(
        "stream_bytes", MIB, "bytes", "text of one stream that its client has not read", "the stream ends with an error"
    ),
    Limit(
        "connections",
        DEFAULT_CONNECTIONS,
        "connections",
        "open connections of one edge; the open files of a process bound it too",
        "503 server_error, then closed",
    ),
    Limit("fork_requests", 256, "requests", "ended requests of one edge that can be forked", "the oldest is forgotten"),
    Limit(
        "fork_tokens",
        2**20,
        "tokens",
        "prompts and answers of ended requests that can be forked",
        "the oldest is forgotten",
    ),
    Limit(
        "quarantine_seconds",
        600,
        "seconds",
        "how long a request is refused after the engine died twice while it ran the same request",
        "503 server_error with Retry-After",
        highest=86_400,
    ),
    Limit("fork_seconds", 300, "seconds", "how long after its end a request can be forked", "404 not_found_error"),
    Limit(
        "stored_responses",
        1_024,
        "responses",
        "responses of `/v1/responses` that one edge keeps",
        "the least recently used is forgotten",
        highest=2**20,
    ),
    Limit(
        "stored_response_bytes",
        64 * MIB,
        "bytes",
        "JSON of stored responses and of the earlier turns of their conversations",
        "the least recently used is forgotten",
        highest=2**40,
    ),
    # files and batches
    Limit("file_bytes", 64 * MIB, "bytes", "one uploaded file", "413 invalid_request_error", highest=2**30),
    Limit("files", 1_024, "files", "uploaded files of one API key and the results of its batches", _BAD),
    Limit("files_bytes", 1_024 * MIB, "bytes", "all files of one API key together", _BAD, highest=2**50),
    Limit("batches", 64, "batches", "batches of one API key that have not ended", _BUSY, highest=65_536),
    Limit("batch_lines", 50_000, "requests", "the lines of one batch", "the batch fails"),
    Limit(
        "batch_requests",
        32,
        "requests",
        "requests of batches that one edge runs at once; never more than half of what the engine can run",
        "the others wait",
    ),
    # time
    Limit("header_bytes", 64 * 2**10, "bytes", "the head of a request", "431 invalid_request_error", highest=MIB),
    Limit("header_seconds", 15, "seconds", "from the first byte of a request to the end of its head", _CLOSE),
    Limit("body_seconds", 60, "seconds", "reading the body of a request", "408 invalid_request_error"),
    Limit("idle_seconds", 300, "seconds", "a connection without a request", _CLOSE),
    Limit("stall_seconds", 30, "seconds", "a client that reads nothing of its answer", _CLOSE),
    Limit(
        "ping_seconds",
        10,
        "seconds",
        "a stream in which nothing is sent, also while its request is queued",
        "a comment (`: queued`, `: working`) is sent",
        highest=3_600,
    ),
    # coalescing
    Limit(
        "coalesce_streams",
        32,
        "streams",
        "live streams of one edge; with more, tokens share events",
        "fewer, larger events",
    ),
    Limit(
        "coalesce_ms",
        50,
        "milliseconds",
        "how long a token waits for its event when streams are above `coalesce_streams`",
        "fewer, larger events",
        highest=1_000,
    ),
)

_BY_NAME = {limit.name: limit for limit in LIMITS}


class Limits(Mapping[str, int]):
    """The limits in force, by name: those of the table, with the operator's changes. Raises ConfigError for an unknown
    name or a value outside the range."""

    def __init__(self, changes: Mapping[str, int] | None = None) -> None:
        self._values = {limit.name: limit.value for limit in LIMITS}
        for name, value in (changes or {}).items():
            limit = _BY_NAME.get(name)
            if limit is None:
                raise ConfigError(f"limit {name}", "there is no such limit", f"known: {', '.join(_BY_NAME)}")
            is_whole = type(value) is int
            if not is_whole or not limit.lowest <= value <= limit.highest:
                allowed = f"a whole number in [{limit.lowest}, {limit.highest}]"
                raise ConfigError(f"limit {name}", f"must be {allowed}, got {value!r}", f"{limit.value} is the default")
            self._values[name] = value

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
