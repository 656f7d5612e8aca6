"""/v1/embeddings, as in OpenAI's API, and /pooling: one vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.fields import LABELS as GENERATING_LABELS
from quire.serving.http.fields import MODEL, NAMES, Field, no_effect, not_supported
from quire.serving.http.pooling.handler import PoolingCall, PoolingEndpoint, PoolingJob
from quire.serving.http.schemas import NUMBER, TEXT, WHOLE, Schema, many, record, ref
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.values import Flag, Identifier, OneOf, Whole
from quire.serving.pooled_texts import Rows, check_task
from quire.types.pooling import PoolingParams

MOST_DIMENSIONS = 2**16

REQUEST_ID = Field("request_id", Identifier(), "Names the request in responses and logs.")
TRUNCATION = Field("truncate_prompt_tokens", Whole(-1, "prompt_tokens"),
          "Cut longer texts to this many tokens; -1: to as many as the model takes. Without it, a text that is too "
          "long is refused.")  # fmt: skip
LABELS = (
    no_effect("user", "The user who sent the request.", why="is a label that nothing reads"),
    *(field for field in (*GENERATING_LABELS, *NAMES) if field.name in ("priority", "cache_salt")),
)
COMMON = (MODEL, TRUNCATION, REQUEST_ID, *LABELS)
DIMENSIONS = Field("dimensions", Whole(1, MOST_DIMENSIONS),
          "Cut each embedding to this many dimensions; needs a model that was trained for it "
          "(Matryoshka).")  # fmt: skip
INPUT = (
    Field("input", Prompts(count="inputs"), "A text, token ids, or a list of either.", is_required=True),
    Field("encoding_format", OneOf(("float", "base64")),
          "`base64`: the float32 values of an embedding as base64, instead of a list.", "float"),
    DIMENSIONS,
    Field("normalize", Flag(), "Scale embeddings to length 1. Default: as the model's files say."),
    Field("add_special_tokens", Flag(), "Add the model's special tokens to each text.", True),
    not_supported("messages", "A conversation to embed.", why="is not supported: send text as input"),
)  # fmt: skip
USAGE: Schema = record({"prompt_tokens": WHOLE, "total_tokens": WHOLE})
VECTOR: Schema = {"anyOf": [many(NUMBER), TEXT]}


def listing(call: PoolingCall, data: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Return a response body with a list of results."""
    return {
        "id": call.response_id,
        "object": "list",
        "created": call.created,
        "model": call.name,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def list_schema(item: str) -> Schema:
    head = {"id": TEXT, "object": {"const": "list"}, "created": WHOLE, "model": TEXT}
    return record({**head, "data": many(ref(item)), "usage": USAGE})


def encoded(rows: Rows, form: str) -> list[Any]:
    """Return each row as a list of floats, or as base64 of its float32 values."""
    if form == "float":
        found: list[Any] = rows.tolist()
        return found
    return [base64.b64encode(row.tobytes()).decode() for row in rows]


def embed(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=False)
    return _pooled(call, "embedding", "embedding")


def pool(call: PoolingCall) -> PoolingJob:
    return _pooled(call, "pooling", "data")


def _pooled(call: PoolingCall, kind: str, member: str) -> PoolingJob:
    given = call.given
    params = PoolingParams(given.get("dimensions"), given.get("normalize"))
    call.reader.check_params(params)
    texts = call.reader.read(
        given["input"],
        "input",
        given.get("truncate_prompt_tokens"),
        add_special_tokens=given.get("add_special_tokens", True),
    )

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:
        shown = encoded(rows, given.get("encoding_format", "float"))
        data = [{"object": kind, "index": place, member: row} for place, row in enumerate(shown)]
        return listing(call, data, num_tokens)

    return PoolingJob(texts, params, write)


def _endpoint(
    name: str,
    prefix: str,
    paths: tuple[str, ...],
    summary: str,
    read: Callable[[PoolingCall], PoolingJob],
    schemas: dict[str, Schema],
) -> PoolingEndpoint:
    return PoolingEndpoint(
        name=name,
        paths=paths,
        summary=summary,
        fields=(*COMMON, *INPUT),
        response=next(iter(schemas)),
        schemas=schemas,
        description="See [the guide](../guides/embeddings.md). Needs an encoder, or a decoder that is served to embed.",
        id_prefix=prefix,
        read=read,
    )


EMBEDDINGS: tuple[Endpoint, ...] = (
    _endpoint(
        "embeddings",
        "embd",
        ("/v1/embeddings",),
        "Embed texts",
        embed,
        {
            "Embeddings": list_schema("Embedding"),
            "Embedding": record({"object": {"const": "embedding"}, "index": WHOLE, "embedding": VECTOR}),
        },
    ),
    _endpoint(
        "pooling",
        "pool",
        ("/pooling", "/v1/pooling"),
        "Embed or classify texts, whichever the model does",
        pool,
        {
            "PoolingAnswer": list_schema("PooledText"),
            "PooledText": record({"object": {"const": "pooling"}, "index": WHOLE, "data": VECTOR}),
        },
    ),
)
