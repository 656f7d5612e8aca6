"""The OpenAPI document, built from the tables of parameters and limits."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serving.http.exchange import FLAG_WORDS
from quire.serving.http.fields import Endpoint, fields_of
from quire.serving.http.limits import Limits
from quire.serving.http.schemas import SCHEMAS, Schema, record, ref
from quire.serving.http.validators.values import nullable

_ERRORS = {
    "400": "A parameter is wrong, unknown or not supported; the message names it.",
    "401": "A key is needed.",
    "404": "There is no such model, path or request.",
    "405": "The path does not take this method.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "421": "The Host header names another host.",
    "429": "The queue is full; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "The engine is loading, restarted or shutting down.",
    "504": "The request was not done within its time limit.",
}
_GET_ERRORS = ("400", "401", "404", "405", "421", "500", "503")
_POSTS: dict[str, tuple[Endpoint, str, str, str | None]] = {
    "/v1/chat/completions": ("chat", "Answer a conversation", "ChatAnswer", "ChatChunk"),
    "/v1/completions": ("completions", "Continue prompts", "CompletionAnswer", "CompletionChunk"),
    "/v1/fork": ("fork", "Go on from the middle of an answer", "CompletionAnswer", "CompletionChunk"),
    "/tokenize": ("tokenize", "Text to token ids", "Tokens", None),
    "/detokenize": ("detokenize", "Token ids to text", "Text", None),
}
_GETS = {
    "/v1/models": ("The models served", "Models"),
    "/v1/capabilities": ("What this server takes, and how far", "Capabilities"),
    "/health": ("Whether the server and its engine are alive", "Health"),
    "/ready": ("Whether it takes new requests", "Health"),
    "/version": ("The version", "Version"),
}


def build_openapi(limits: Limits, version: str, root_path: str = "") -> bytes:
    """An OpenAPI 3.1 document of the public API with these limits, as JSON. Its paths begin with `root_path`."""
    paths: dict[str, Any] = {path: {"post": _post(path, limits)} for path in _POSTS}
    paths |= {path: {"get": _get(path, summary, name)} for path, (summary, name) in _GETS.items()}
    paths["/v1/models/{model}"] = {"get": _one_model()}
    paths["/metrics"] = {"get": _metrics()}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Quire", "version": version, "description": "OpenAI-compatible inference."},
            **({"servers": [{"url": root_path}]} if root_path else {}),
            "paths": paths,
            "components": {
                "schemas": SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def request_schema(endpoint: Endpoint, limits: Limits) -> Schema:
    """What a body may hold, as validation has it; a parameter that is null counts as absent."""
    members = {}
    for field in fields_of(endpoint).values():
        schema = field.validator.schema(limits)
        members[field.name] = {**(schema if field.is_required else nullable(schema)), "description": field.doc}
        if field.default is not None:
            members[field.name]["default"] = field.default
    required = [field.name for field in fields_of(endpoint).values() if field.is_required]
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


def _post(path: str, limits: Limits) -> Schema:
    endpoint, summary, answer, chunk = _POSTS[path]
    content: dict[str, Any] = {"application/json": {"schema": ref(answer)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(chunk)}
    parameters = []
    if chunk is not None:
        parameters = [
            _flag("query", "explain", "Add the request's ledger to the answer."),
            _flag("query", "lenient", "Turn unknown and unsupported parameters into warnings."),
            _flag("header", "X-Quire-Explain", "The same as `explain`."),
            _flag("header", "X-Quire-Lenient", "The same as `lenient`."),
        ]
    body = {"application/json": {"schema": request_schema(endpoint, limits)}}
    return {
        "summary": summary,
        "operationId": endpoint,
        "parameters": parameters,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": summary, "content": content}, **_errors(_ERRORS)},
    }


def _event(chunk: str) -> Schema:
    """One event of a stream, as a client's reader hands it over: comments are no events."""
    inside = {"anyOf": [ref(chunk), ref("Error")]}
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": inside}]}
    text = f"One event. Its data is a {chunk}; in a broken stream an Error comes last; `[DONE]` ends either."
    return {**record({"data": {"type": "string", **data}}, is_open=True), "description": text}


def _get(path: str, summary: str, name: str) -> Schema:
    content = {"application/json": {"schema": ref(name)}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "responses": {"200": {"description": summary, "content": content}, **_errors(_GET_ERRORS)},
    }


def _one_model() -> Schema:
    where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**_get("/v1/models/model", "One model", "Model"), "parameters": [where]}


def _metrics() -> Schema:
    text = {"text/plain": {"schema": {"type": "string"}}}
    page = {"200": {"description": "Prometheus metrics", "content": text}}
    return {"summary": "Metrics", "operationId": "metrics", "responses": {**page, **_errors(_GET_ERRORS)}}


def _flag(place: str, name: str, doc: str) -> Schema:
    return {"name": name, "in": place, "description": doc, "schema": {"enum": list(FLAG_WORDS)}}


def _errors(codes: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": ref("Error")}}
    return {code: {"description": _ERRORS[code], "content": content} for code in codes}
