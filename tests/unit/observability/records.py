"""Requests as the dispatcher reports them when they end."""

from __future__ import annotations

from typing import Any

from quire.serving.dispatch.observer import RequestRecord
from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams

LEDGER = (
    LedgerEntry("queued", 100.1),
    LedgerEntry("admitted", 100.5, note="no free blocks"),
    LedgerEntry("chunk", 100.5, 12),
    LedgerEntry("first_token", 100.75),
    LedgerEntry("preempted", 101.0, 14),
    LedgerEntry("finished", 102.0),
)


def ended(**changes: Any) -> RequestRecord:
    """A request that came at 100 s, was admitted at 100.5 s, spoke first at 100.75 s and ended at 102 s."""
    fields: dict[str, Any] = {
        "request_id": "r1",
        "endpoint": "chat",
        "num_prompt_tokens": 12,
        "sampling": SamplingParams(max_tokens=32, temperature=0.5),
        "streamed": True,
        "received_at": 100.0,
        "queued_at": 100.0,
        "submitted_at": 100.1,
        "first_token_at": 100.75,
        "last_token_at": 102.0,
        "finished_at": 102.0,
        "num_output_tokens": 6,
        "finish_reasons": ("length",),
        "ledger": LEDGER,
    }
    return RequestRecord(**{**fields, **changes})
