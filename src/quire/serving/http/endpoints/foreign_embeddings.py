"""Embeddings with the paths and fields of Ollama and llama.cpp."""

from __future__ import annotations

import time
from typing import Any

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.embeddings import DIMENSIONS
from quire.serving.http.endpoints.ollama_format import write_error
from quire.serving.http.endpoints.ollama_request import KeepAlive
from quire.serving.http.fields import MODEL, Field, no_effect
from quire.serving.http.pooling.handler import PoolingCall, PoolingEndpoint, PoolingJob
from quire.serving.http.schemas import NUMBER, TEXT, WHOLE, Schema, many, record
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.text_lists import TextList
from quire.serving.http.validators.values import Flag, Text, Whole
from quire.serving.pooled_texts import Rows, check_task
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest
from quire.types.pooling import PoolingParams

_EUCLIDEAN, _NONE = 2, -1  # values of llama.cpp's embd_normalize
_KEPT = (
    MODEL,
    Field("keep_alive", KeepAlive(), "The model stays loaded.", support="no effect"),
    no_effect("options", "Sampling and memory.", {}, why="has no effect on embeddings"),
)


def ollama_embed(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=False)
    call.reader.check_dimensions(call.given.get("dimensions"))
    prompts = [Prompt(text=text) for text in call.given["input"]]
    texts = call.reader.read(prompts, "input", -1 if call.given.get("truncate", True) else None)

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:
        seconds = time.monotonic() - call.received_at
        return {
            "model": call.name,
            "embeddings": rows.tolist(),
            "total_duration": int(seconds * 1e9),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }

    return PoolingJob(texts, PoolingParams(call.given.get("dimensions"), normalize=True), write)


def ollama_embeddings(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=False)
    texts = call.reader.read([Prompt(text=call.given["prompt"])], "prompt", -1)

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:  # noqa: ARG001
        return {"embedding": rows[0].tolist()}

    return PoolingJob(texts, PoolingParams(), write)


def llama_embedding(call: PoolingCall) -> PoolingJob:
    given = call.given
    check_task(call.reader.model, classifies=False)
    if ("content" in given) == ("input" in given):
        raise InvalidRequest("content", "exactly one of content and input is needed", "send one of them")
    name = "content" if "content" in given else "input"
    norm = given.get("embd_normalize", _EUCLIDEAN)
    if norm not in (_EUCLIDEAN, _NONE):
        reason = f"is {norm}, but only 2 (length 1) and -1 (none) are supported"
        raise InvalidRequest("embd_normalize", reason, "send 2 or -1")
    texts = call.reader.read(given[name], name)

    def write(rows: Rows, num_tokens: int) -> list[dict[str, Any]]:  # noqa: ARG001
        return [{"index": place, "embedding": [row]} for place, row in enumerate(rows.tolist())]

    return PoolingJob(texts, PoolingParams(normalize=norm == _EUCLIDEAN), write)


_VECTOR: Schema = many(NUMBER)
FOREIGN_EMBEDDINGS: tuple[Endpoint, ...] = (
    PoolingEndpoint(
        name="ollama_embed",
        paths=("/api/embed",),
        summary="Embed texts, by Ollama's API",
        fields=(
            *_KEPT,
            Field("input", TextList(or_one=True), "A text or a list of them.", is_required=True),
            Field("truncate", Flag(), "Cut texts that are too long; otherwise they are refused.", True),
            DIMENSIONS,
        ),
        response="OllamaEmbeddings",
        error="OllamaError",
        schemas={
            "OllamaEmbeddings": record(
                {
                    "model": TEXT,
                    "embeddings": many(_VECTOR),
                    "total_duration": WHOLE,
                    "load_duration": WHOLE,
                    "prompt_eval_count": WHOLE,
                }
            )
        },
        write_error=write_error,
        id_prefix="embed",
        read=ollama_embed,
    ),
    PoolingEndpoint(
        name="ollama_embeddings",
        paths=("/api/embeddings",),
        summary="Embed one text, by Ollama's older API: normalized only where the model's files say so",
        fields=(*_KEPT, Field("prompt", Text("prompt_characters", 1), "The text.", is_required=True)),
        response="OllamaEmbedding",
        error="OllamaError",
        schemas={"OllamaEmbedding": record({"embedding": _VECTOR})},
        write_error=write_error,
        id_prefix="embed",
        read=ollama_embeddings,
    ),
    PoolingEndpoint(
        name="llama_embedding",
        paths=("/embedding",),
        summary="Embed texts, by llama.cpp's API",
        fields=(
            MODEL,
            Field("content", Prompts(count="inputs"), "A text, token ids, or a list of either."),
            Field("input", Prompts(count="inputs"), "The same as `content`; send one of them."),
            Field("embd_normalize", Whole(-1, 2), "2: scale embeddings to length 1; -1: do not scale them.", 2),
        ),
        response="LlamaEmbeddings",
        schemas={"LlamaEmbeddings": many(record({"index": WHOLE, "embedding": many(_VECTOR)}))},
        id_prefix="embedding",
        read=llama_embedding,
    ),
)
