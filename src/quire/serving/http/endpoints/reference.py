"""Generates docs/reference/http_api.md from the descriptors: `python -m quire.serving.http.endpoints.reference >
FILE`."""

from __future__ import annotations

import json
import sys

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.admin_lora import LOAD_PATH, UNLOAD_PATH
from quire.serving.http.endpoints.registry import ENDPOINTS
from quire.serving.http.fields import Field
from quire.serving.http.limits import LIMITS, Limits
from quire.serving.http.validators.values import Only

_INTRODUCTION = """\
# HTTP API

This page is generated from the tables that validate requests (`python -m quire.serving.http.endpoints.reference`).
`/openapi.json` of a running server describes the same API with the limits of that server.

A parameter that is null counts as absent. A parameter without effect (it is unknown, or it cannot change the answer)
is accepted, and `"warnings"` of the response names it, with its path if it is a member of another one
(`messages[2].foo`); in a stream, the last chunk has the warnings. The header `X-Quire-Warnings` lists the names. With
`--strict`, or the header `X-Quire-Strict: 1`, such a parameter is answered with 400. A parameter that would change the
answer and is not supported is always answered with 400.
A sampling parameter that is left out has the value that the model's makers recommend (`default_sampling_params` of
`GET /v1/models`; `--generation-config none` turns that off), else the default below.
Bodies are JSON (`Content-Type: application/json`), except uploads to `/v1/files`, which are forms. If a name occurs
twice in an object, the last value counts.

`?explain=1` or the header `X-Quire-Explain: 1` adds `"quire": {"ledger": [...]}` to the answer (in a stream: to a last
chunk): what happened to the request, in milliseconds since it was received; see [the ledger](#the-ledger) below.
`X-Request-Id` sets the id of a request; every response returns it. Characters that are not safe in a log become `_`.

Errors look like OpenAI's: `{"error": {"message", "type", "param", "code"}}`. A stream that breaks after its first byte
ends with `data: {"error": {...}}` and `data: [DONE]`. A stream that waits sends comments (`: queued`, `: working`).
"""
_ABORT = (
    "end the request with this id or a unique prefix of it (404: no request matches, 409: several do), or all of them"
)
_KEEP = "pin a prompt in the prefix cache, for all API keys or only for `api_key`"
_STANDBY = "give memory back and take it again; see [sleep and new weights](../guides/sleep_and_weights.md)"
_UPDATE = (
    "replace the weights by those of a folder below `--weights-dir`; without a path, load the model's own files again"
)
_LOAD = (
    'load a LoRA adapter from a folder below `--lora-dir`; with `"load_inplace": true` it may replace another one of '
    "that name"
)
_MODELS = (
    "the models, with `max_model_len` and `default_sampling_params`; LoRA adapters have the model as their `parent`"
)
_READY = (
    "200 while the server accepts new requests; 503 while loading, restarting or draining, and while the engine sleeps "
    "or has no weights, unless a request wakes it up; needs no key"
)
_INVOKE = (
    "of Amazon SageMaker: a body with `messages`, `prompt`, `inputs`, `input`, `query` or `text_1` is answered as by "
    "the endpoint that needs this member: chat completions, completions, TGI's `/`, embeddings or `/classify`, "
    "`/rerank`, `/score`"
)
_END = (
    "of SGLang: end a request, or all. It answers with what it has (`finish_reason` is `abort`); one that still waits "
    "for the engine ends with 503"
)
_ROUTES = f"""\
## Other routes

| Route | Answer |
|-|-|
| `GET /v1/models`, `GET /v1/models/{{id}}` | {_MODELS} |
| `POST /v1/files` | upload a file as a form (`multipart/form-data`): `purpose` (`batch`) and `file` |
| `GET /v1/files` | the files of this key |
| `GET /v1/files/{{id}}`, `GET /v1/files/{{id}}/content`, `DELETE /v1/files/{{id}}` | describe, read or delete a file |
| `GET /v1/batches` | the batches of this key |
| `GET /v1/batches/{{id}}`, `POST /v1/batches/{{id}}/cancel` | describe or stop a batch |
| `GET /v1/responses/{{id}}`, `GET /v1/responses/{{id}}/input_items` | a stored response; its input |
| `DELETE /v1/responses/{{id}}`, `POST /v1/responses/{{id}}/cancel` | delete a stored response; cancel a running one |
| `GET /api/tags`, `GET /api/ps`, `GET /api/version` | of Ollama: models and LoRA adapters; those loaded; its version |
| `GET /v1/capabilities` | version, engine, limits in force, parameters with their support |
| `GET /health` | 200 while the server and its engine are alive, else 503; needs no key |
| `GET /ready` | {_READY} |
| `GET /ping`, `GET /health_generate` | the same as `/health` |
| `POST /invocations` | {_INVOKE} |
| `GET /load` | `server_load`: how many requests wait or run |
| `GET /tokenizer_info` | special tokens, length and chat template of the tokenizer |
| `GET /props`, `GET /slots` | of llama.cpp: the model's properties; which of the engine's sequences are in use |
| `GET /get_model_info`, `GET /get_server_info` | of SGLang: the model; the server's version and sizes |
| `GET /info` | of Text Generation Inference and Text Embeddings Inference: the model and its lengths |
| `GET /version` | the version |
| `GET /metrics` | Prometheus metrics |
| `GET /openapi.json` | this API as OpenAPI 3.1 |
| `GET /` | the playground |

Admin routes exist only if an admin key is set, and accept only that key:

| Route | Effect |
|-|-|
| `POST /admin/drain` | shut down as SIGTERM does |
| `POST /admin/abort` `{{"request_id": ...}}` or `{{"all": true}}` | {_ABORT} |
| `POST /admin/reset_cache` | evict all cached prompts, including pinned ones |
| `POST /admin/prefixes` `{{"name": ..., "prompt": ...}}` or `"messages"` | {_KEEP} |
| `GET /admin/prefixes`, `DELETE /admin/prefixes/{{name}}` | list pinned prompts; remove one |
| `GET /admin/stats` | the engine's counters, and the load of each edge |
| `GET /admin/requests` | live requests of all edges with their state |
| `GET /admin/blocks` | server-sent events: the block map, about four times a second |
| `POST /sleep?level=1&mode=abort`, `POST /wake_up?tags=weights&tags=kv_cache`, `GET /is_sleeping` | {_STANDBY} |
| `POST /pause?mode=abort&clear_cache=true`, `POST /resume`, `GET /is_paused` | stop and continue generating |
| `POST /release_memory_occupation`, `POST /resume_memory_occupation` `{{"tags": ...}}` | of SGLang: sleep, wake up |
| `POST /pause_generation` `{{"mode": ...}}`, `POST /continue_generation` | of SGLang: `abort`, `wait`, `retract` |
| `POST /update_weights_from_disk` `{{"model_path": ..., "mode": "wait", "weight_version": ...}}` | {_UPDATE} |
| `GET /get_weight_version`, `GET /weight_info` | the name of the weights |
| `POST /abort_request` `{{"rid": ...}}` or `{{"abort_all": true}}` | {_END} |
| `POST /abort_requests` `{{"request_ids": [...]}}` | of vLLM: the same; without ids all |
| `POST /reset_prefix_cache`, `POST /flush_cache`, `GET /flush_cache` | the same as `/admin/reset_cache` |
| `GET /get_world_size` | the number of ranks |
| `POST {LOAD_PATH}` `{{"lora_name": ..., "lora_path": ...}}` | {_LOAD} |
| `POST {UNLOAD_PATH}` `{{"lora_name": ...}}` | unload a LoRA adapter; running requests keep it |
"""
_MISS = {
    "`reason`": '`"differs"`: another request has other tokens from here on. `"evicted"`: the tokens from here on were '
    'cached, and their blocks were evicted. `"not_cached"`: no more tokens are cached',
    "`token_index`": "how many tokens were found: the index in `prompt_token_ids` of the first that was not",
    "`token_id`, `token`": "that token of your prompt; absent where the request was preempted and the token is "
    "one of its answer",
    "`request_id`": 'with `"differs"`: the request whose tokens differ, or null if it was sent with another key',
    "`num_tokens`, `seconds_ago`, `policy`": 'with `"evicted"`: how many of your tokens from here on were evicted, '
    "when, and by which eviction policy",
}
_LEDGER = f"""\
## The ledger

Each entry has `kind`, `at_ms`, `amount` (a number of tokens, or 0) and `note` (the reason in words, or empty), and
if several prompts were sent, `prompt`, the index of one. [Observability](../guides/observability.md) lists the kinds.
An entry of kind `missed` says where the prefix cache ended and has a member `miss` that says why:

| Member | Value |
|-|-|
{chr(10).join(f"| {name} | {meaning} |" for name, meaning in _MISS.items())}

`request_id` is the id of that request's answer; it ends in `~` and six characters where the client chose the id, and in
`.N` where it is prompt N of several. The ledger never names a request of another key and says nothing of its evictions,
even where all keys share the cache (`--shared-prefix-cache`).
"""


def write_reference() -> str:
    """Return the whole page."""
    limits = Limits()
    parts = [_INTRODUCTION]
    parts += [_endpoint(endpoint, limits) for endpoint in ENDPOINTS if endpoint.fields]
    parts += [_LEDGER, _ROUTES, _limits()]
    return "\n".join(parts)


def _endpoint(endpoint: Endpoint, limits: Limits) -> str:
    fields = endpoint.fields
    lines = [
        f"## {endpoint.method} {endpoint.documented_path}",
        "",
        *([endpoint.description, ""] if endpoint.description else []),
        "| Parameter | Value | Default | Meaning |",
        "|-|-|-|-|",
    ]
    lines += [_row(field, limits) for field in fields if field.support == "yes"]
    quiet = [_missing(field) for field in fields if field.support == "no effect"]
    if quiet:
        lines += [
            "",
            f"Accepted with a warning, except for the values in brackets: {'; '.join(quiet)}.",
        ]
    missing = [_missing(field) for field in fields if field.support == "no"]
    if missing:
        lines += ["", f"Not supported, except for the values in brackets: {'; '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _row(field: Field, limits: Limits) -> str:
    default = "required" if field.is_required else "" if field.default is None else f"`{json.dumps(field.default)}`"
    return f"| `{field.name}` | {_value(field.validator.schema(limits))} | {default} | {field.doc} |"


def _missing(field: Field) -> str:
    harmless = field.validator.harmless if isinstance(field.validator, Only) else ()
    values = " (" + ", ".join(f"`{json.dumps(value)}`" for value in harmless) + ")" if harmless else ""
    why = f": {field.validator.why}" if isinstance(field.validator, Only) and field.validator.why != Only().why else ""
    return f"`{field.name}`{values}{why}"


def _value(schema: dict[str, object]) -> str:
    """Describe a schema in a few words."""
    if "anyOf" in schema:
        options = schema["anyOf"]
        assert isinstance(options, list)
        return " or ".join(dict.fromkeys(_value(option) for option in options))
    if "enum" in schema:
        values = schema["enum"]
        assert isinstance(values, list)
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema["type"]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        bracket = "(" if "exclusiveMinimum" in schema else "["
        return f"{bracket}{low}, {schema.get('maximum')}]" + ("" if kind == "integer" else " (number)")
    if kind == "array":
        items = schema["items"]
        assert isinstance(items, dict)
        return f"list of up to {schema['maxItems']}: {_value(items)}"
    if kind == "string":
        return f"text, up to {schema['maxLength']} characters" if "maxLength" in schema else "text"
    return {"boolean": "true or false", "object": "object"}[str(kind)]


def _limits() -> str:
    lines = ["## Limits", "", "`quire serve --limit NAME=VALUE` changes one.", ""]
    lines += ["| Name | Default | Bounds | Over it |", "|-|-|-|-|"]
    lines += [f"| `{one.name}` | {one.value:,} {one.unit} | {one.bounds} | {one.answer} |" for one in LIMITS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(write_reference())
