"""JSON schemas of the responses of OpenAI's endpoints."""

from __future__ import annotations

from typing import get_args

from quire.config.tiers import EVICTION_NAMES
from quire.serving.http.schemas import IDS, NUMBER, TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.types.ledger import LedgerKind

FINISH: Schema = {"enum": ["stop", "length", "repetition", None]}
CHAT_FINISH: Schema = {"enum": ["stop", "length", "tool_calls", "function_call", "repetition", None]}
_REASONING = {"reasoning_content": TEXT, "reasoning": TEXT}
_CALL = record({"id": TEXT, "type": {"const": "function"}, "function": record({"name": TEXT, "arguments": TEXT})})
_CALL_DELTA = record(
    {"index": WHOLE, "function": record({"arguments": TEXT}, {"name": TEXT})},
    {"id": TEXT, "type": {"const": "function"}},
)
_MESSAGE = record(
    {"role": {"const": "assistant"}, "content": or_null(TEXT), "refusal": {"type": "null"}},
    {
        **{name: or_null(text) for name, text in _REASONING.items()},
        "tool_calls": many(_CALL),
        "function_call": record({"name": TEXT, "arguments": TEXT}),
    },
)
_DELTA = record(
    {},
    {
        "role": {"const": "assistant"},
        "content": TEXT,
        **_REASONING,
        "tool_calls": many(_CALL_DELTA),
        "function_call": record({"arguments": TEXT}, {"name": TEXT}),
    },
)
_RANK = {"score": NUMBER, "cumulative_logprob": or_null(NUMBER)}  # of ranked answers (best_of and beam search)
_BEST = {"best": record({"index": WHOLE, "text": TEXT})}  # the best answer so far of a beam search that streams it
_STOP_REASON = {"type": ["string", "integer", "null"]}
_TOP = {"token": TEXT, "logprob": NUMBER, "bytes": or_null(many(WHOLE))}
_CHAT_LOGPROBS = record(
    {"content": many(record({**_TOP, "top_logprobs": many(record(_TOP))})), "refusal": {"type": "null"}}
)
_COMPLETION_LOGPROBS = record(
    {
        "tokens": many(TEXT),
        "token_logprobs": many(or_null(NUMBER)),
        "top_logprobs": many(or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": many(WHOLE),
    }
)
_PROMPT_LOGPROB = record({"logprob": NUMBER, "rank": or_null(WHOLE), "decoded_token": TEXT})
_PROMPT_LOGPROBS = many(or_null({"type": "object", "additionalProperties": _PROMPT_LOGPROB}))
_USAGE = record(
    {
        "prompt_tokens": WHOLE,
        "completion_tokens": WHOLE,
        "total_tokens": WHOLE,
        "prompt_tokens_details": record({"cached_tokens": WHOLE}),
    },
    {"completion_tokens_details": record({"reasoning_tokens": WHOLE})},
)
_MISSED_TOKEN = {"token_id": WHOLE, "token": TEXT}  # the first token that was not found, if it is in the prompt
_EVICTED = {"num_tokens": WHOLE, "seconds_ago": NUMBER, "policy": {"enum": list(EVICTION_NAMES)}}
_MISS = {
    "anyOf": [
        record({"reason": {"const": "not_cached"}, "token_index": WHOLE}, _MISSED_TOKEN),
        record({"reason": {"const": "differs"}, "token_index": WHOLE, "request_id": or_null(TEXT)}, _MISSED_TOKEN),
        record({"reason": {"const": "evicted"}, "token_index": WHOLE, **_EVICTED}, _MISSED_TOKEN),
    ]
}
_LEDGER_ENTRY = record(
    {"kind": {"enum": list(get_args(LedgerKind))}, "at_ms": NUMBER, "amount": WHOLE, "note": TEXT},
    {"miss": ref("PrefixMiss"), "prompt": WHOLE},
)
_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
_EXTRAS = {"quire": ref("Explanation"), "warnings": many(TEXT)}
_OF_PROMPT = {"prompt_logprobs": or_null(ref("PromptLogprobs")), "prompt_token_ids": or_null(IDS)}

_SHARED: dict[str, Schema] = {
    "Usage": _USAGE,
    "Explanation": record({"ledger": many(ref("LedgerEntry"))}),
    "LedgerEntry": _LEDGER_ENTRY,
    "PrefixMiss": _MISS,
    "PromptLogprobs": _PROMPT_LOGPROBS,
}  # fmt: skip
CHAT_SCHEMAS: dict[str, Schema] = {
    **_SHARED,
    "ChatLogprobs": _CHAT_LOGPROBS,
    "ChatAnswer": record(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": many(
                record(
                    {
                        "index": WHOLE,
                        "message": _MESSAGE,
                        "logprobs": or_null(ref("ChatLogprobs")),
                        "finish_reason": CHAT_FINISH,
                        "stop_reason": _STOP_REASON,
                        "token_ids": or_null(IDS),
                    },
                    _RANK,
                )
            ),
            "usage": ref("Usage"),
            **_OF_PROMPT,
        },
        {**_EXTRAS, "prompt_text": TEXT},
    ),
    "ChatChunk": record(
        {
            **_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": many(
                record(
                    {
                        "index": WHOLE,
                        "delta": _DELTA,
                        "logprobs": or_null(ref("ChatLogprobs")),
                        "finish_reason": CHAT_FINISH,
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": IDS},
                )
            ),
        },
        {**_EXTRAS, **_BEST, "usage": or_null(ref("Usage")), "prompt_token_ids": IDS, "prompt_text": TEXT},
    ),
}  # fmt: skip
COMPLETION_SCHEMAS: dict[str, Schema] = {
    **_SHARED,
    "CompletionLogprobs": _COMPLETION_LOGPROBS,
    "CompletionAnswer": record(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": many(
                record(
                    {
                        "index": WHOLE,
                        "text": TEXT,
                        "logprobs": or_null(ref("CompletionLogprobs")),
                        "finish_reason": FINISH,
                        "stop_reason": _STOP_REASON,
                        "token_ids": or_null(IDS),
                        **_OF_PROMPT,
                    },
                    _RANK,
                )
            ),
        },
        {**_EXTRAS, "usage": or_null(ref("Usage"))},
    ),
    "CompletionChunk": record(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": many(
                record(
                    {
                        "index": WHOLE,
                        "text": TEXT,
                        "logprobs": or_null(ref("CompletionLogprobs")),
                        "finish_reason": FINISH,
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": IDS, "prompt_token_ids": IDS},
                )
            ),
        },
        {**_EXTRAS, **_BEST, "usage": or_null(ref("Usage"))},
    ),
}  # fmt: skip
