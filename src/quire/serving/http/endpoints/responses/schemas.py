"""JSON schemas of the responses and events of `/v1/responses`."""

from __future__ import annotations

from quire.serving.http.schemas import FLAG, NUMBER, TEXT, WHOLE, Schema, many, or_null, record, ref

_ITEM_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_TOP = {"token": TEXT, "logprob": NUMBER, "bytes": many(WHOLE)}
_LOGPROBS = many(record({**_TOP, "top_logprobs": many(record(_TOP))}))
_PART: Schema = {
    "anyOf": [
        record({"type": {"const": "output_text"}, "text": TEXT, "annotations": many({}), "logprobs": _LOGPROBS}),
        record({"type": {"enum": ["reasoning_text", "summary_text"]}, "text": TEXT}),
    ]
}
_HEAD = {"id": TEXT, "status": _ITEM_STATUS}
_ITEM: Schema = {
    "anyOf": [
        record({**_HEAD, "type": {"const": "message"}, "role": {"const": "assistant"}, "content": many(_PART)}),
        record(
            {**_HEAD, "type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT},
            {"namespace": TEXT},
        ),
        record({**_HEAD, "type": {"const": "reasoning"}, "summary": many(_PART)}, {"content": many(_PART)}),
    ]
}
_USAGE = record(
    {
        "input_tokens": WHOLE,
        "input_tokens_details": record({"cached_tokens": WHOLE, "cache_write_tokens": WHOLE}),
        "output_tokens": WHOLE,
        "output_tokens_details": record({"reasoning_tokens": WHOLE}),
        "total_tokens": WHOLE,
    }
)
_RESPONSE = record(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": WHOLE,
        "completed_at": or_null(WHOLE),
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "error": or_null(record({"code": TEXT, "message": TEXT})),
        "incomplete_details": or_null(record({"reason": {"const": "max_output_tokens"}})),
        "model": TEXT,
        "output": many(ref("ResponseItem")),
        "instructions": or_null(TEXT),
        "previous_response_id": or_null(TEXT),
        "max_output_tokens": or_null(WHOLE),
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "tools": many({"type": "object"}),
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": FLAG,
        "reasoning": record({"effort": or_null(TEXT), "summary": or_null(TEXT)}),
        "text": record({"format": {"type": "object"}, "verbosity": TEXT}),
        "truncation": {"enum": ["auto", "disabled"]},
        "store": FLAG,
        "background": FLAG,
        "top_logprobs": WHOLE,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "service_tier": TEXT,
        "usage": or_null(_USAGE),
    },
    {"warnings": many(TEXT), "quire": ref("Explanation")},
)
SCHEMAS: dict[str, Schema] = {
    "Response": _RESPONSE,
    "ResponseItem": _ITEM,
    "ResponseEvent": record(
        {"type": TEXT, "sequence_number": WHOLE},
        {
            "response": ref("Response"),
            "item": ref("ResponseItem"),
            "part": _PART,
            "item_id": TEXT,
            "output_index": WHOLE,
            "content_index": WHOLE,
            "summary_index": WHOLE,
            "delta": TEXT,
            "text": TEXT,
            "name": TEXT,
            "arguments": TEXT,
            "logprobs": _LOGPROBS,
        },
    ),
    "DeletedResponse": record({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "InputItems": record(
        {
            "object": {"const": "list"},
            "data": many({"type": "object"}),
            "first_id": or_null(TEXT),
            "last_id": or_null(TEXT),
            "has_more": FLAG,
        }
    ),
}
