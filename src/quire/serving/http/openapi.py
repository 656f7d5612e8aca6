"""Builds the OpenAPI document from the descriptors of endpoints and the table of limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.exchange import FLAG_WORDS
from quire.serving.http.limits import Limits
from quire.serving.http.schemas import ERROR, Schema, record, ref
from quire.serving.http.validators.values import Prunable, nullable

_ERRORS = {
    "400": "A parameter is invalid or not supported; the message names it.",
    "401": "A valid API key is needed.",
    "403": "The request came from a web page of another site, and the server has no keys.",
    "404": "The model, path or request does not exist.",
    "405": "The path does not support this method.",
    "408": "The body was sent too slowly.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "421": "The Host header names another host.",
    "429": "The queue is full; Retry-After says when to try again.",
    "500": "Internal error of the server.",
    "503": "The engine is loading or restarting, or the server is shutting down.",
    "504": "The request did not finish within its time limit.",
    "507": "The server's disk is full.",
}
_GET_ERRORS = ("400", "401", "404", "405", "421", "500", "503")
_ERRORS_BY_METHOD: dict[str, Iterable[str]] = {"GET": _GET_ERRORS, "DELETE": (*_GET_ERRORS, "403"), "POST": _ERRORS}


def build_openapi(
    endpoints: Sequence[Endpoint], limits: Limits, version: str, root_path: str = "", *, strict: bool = False
) -> bytes:
    """Return the OpenAPI 3.1 document of these endpoints with these limits, as JSON. `root_path` becomes the server
    URL. With `strict`, the schemas allow no parameters without effect."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Schema] = {"Error": ERROR}
    for endpoint in endpoints:
        paths.setdefault(endpoint.documented_path, {})[endpoint.method.lower()] = _operation(
            endpoint, limits, strict=strict
        )
        schemas |= endpoint.schemas
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Quire", "version": version, "description": "OpenAI-compatible inference."},
            **({"servers": [{"url": root_path}]} if root_path else {}),
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def request_schema(endpoint: Endpoint, limits: Limits, *, strict: bool) -> Schema:
    """Return the schema of a request body. Null is allowed for optional parameters and means absent."""
    members = {}
    for field in endpoint.fields:
        schema = field.validator.schema(limits)
        if not strict and field.support == "no effect":
            schema = {}
        elif not strict and isinstance(field.validator, Prunable):
            schema = _allow_unknown(schema)
        members[field.name] = {**(schema if field.is_required else nullable(schema)), "description": field.doc}
        if field.default is not None:
            members[field.name]["default"] = field.default
    required = [field.name for field in endpoint.fields if field.is_required]
    others = {"type": "null"} if strict else True
    return {"type": "object", "properties": members, "required": required, "additionalProperties": others}


def _allow_unknown(schema: Any) -> Any:
    """Return the schema with unknown members allowed in all objects."""
    if isinstance(schema, list):
        return [_allow_unknown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = (False, {"type": "null"})
    return {
        name: _allow_unknown(one) for name, one in schema.items() if name != "additionalProperties" or one not in closed
    }


def _operation(endpoint: Endpoint, limits: Limits, *, strict: bool) -> Schema:
    body = {"type": "string"} if endpoint.response is None else ref(endpoint.response)
    content: dict[str, Any] = {endpoint.content_type: {"schema": body}}
    if endpoint.event is not None:
        content[endpoint.stream_type] = {"schema": _event(endpoint, endpoint.event)}
    found: Schema = {"summary": endpoint.summary, "operationId": endpoint.name, "parameters": _parameters(endpoint)}
    if endpoint.fields:
        request = {"application/json": {"schema": request_schema(endpoint, limits, strict=strict)}}
        found["requestBody"] = {"required": True, "content": request}
    errors = _errors(endpoint, _ERRORS_BY_METHOD[endpoint.method])
    return {**found, "responses": {"200": {"description": endpoint.summary, "content": content}, **errors}}


def _parameters(endpoint: Endpoint) -> list[Schema]:
    """Return the path parameters, and for endpoints that stream, their query parameters and headers."""
    names = re.findall(r"\{(\w+)\}", endpoint.documented_path)
    found: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if endpoint.event is not None:
        found += [
            _flag("query", "explain", "Add the request's ledger to the answer."),
            _flag("query", "strict", "Refuse parameters without effect instead of warning about them."),
            _flag("header", "X-Quire-Explain", "The same as `explain`."),
            _flag("header", "X-Quire-Strict", "The same as `strict`."),
        ]
    return found


def _event(endpoint: Endpoint, chunk: str) -> Schema:
    """Return the schema of one event of a stream as a client's SSE reader returns it, which skips comments; or of one
    line of JSON."""
    inside: Schema = {"anyOf": [ref(chunk), ref(endpoint.error)]}
    ending = f"a stream that fails ends with a {endpoint.error}"
    if endpoint.stream_type != "text/event-stream":
        return {**inside, "description": f"One line, a {chunk}; {ending}."}
    data: Schema = {"contentMediaType": "application/json", "contentSchema": inside}
    if endpoint.ends_with_done:
        data, ending = {"anyOf": [{"const": "[DONE]"}, data]}, f"{ending}; `[DONE]` follows in both cases"
    text = f"One event. Its data is a {chunk}; {ending}."
    return {**record({"data": {"type": "string", **data}}, is_open=True), "description": text}


def _flag(place: str, name: str, doc: str) -> Schema:
    return {"name": name, "in": place, "description": doc, "schema": {"enum": list(FLAG_WORDS)}}


def _errors(endpoint: Endpoint, codes: Iterable[str]) -> dict[str, Any]:
    """Return the error responses. Errors found before the request reaches its endpoint have the schema Error at every
    endpoint."""
    schema = ref("Error") if endpoint.error == "Error" else {"anyOf": [ref(endpoint.error), ref("Error")]}
    content = {"application/json": {"schema": schema}}
    return {code: {"description": _ERRORS[code], "content": content} for code in codes}
