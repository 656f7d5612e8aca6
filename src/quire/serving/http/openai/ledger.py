"""The ledger of a request as its client reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serving.desk.observer import RequestRecord
from quire.serving.desk.ticket import Ticket
from quire.serving.http.openai.logprobs import TokenNames
from quire.types.ledger import PrefixMiss
from quire.types.request import TokenIds


def ledger_entries(tickets: Sequence[Ticket], names: TokenNames) -> list[dict[str, Any]]:
    """What happened to a request, in milliseconds since its head was read. Several prompts are told apart."""
    entries: list[dict[str, Any]] = []
    for place, ticket in enumerate(tickets):
        record = ticket.record
        which = {"prompt": place} if len(tickets) > 1 else {}
        entries.append({"kind": "received", "at_ms": 0.0, "amount": 0, "note": _wait_note(record), **which})
        for entry in ticket.finished.ledger if ticket.finished is not None else ():
            at = round((entry.at - record.received_at) * 1_000, 3)
            more = {} if entry.miss is None else {"miss": _miss(entry.miss, ticket.submit.prompt_token_ids, names)}
            told = {"kind": entry.kind, "at_ms": at, "amount": entry.amount, "note": entry.note}
            entries.append({**told, **more, **which})
    return entries


def _wait_note(record: RequestRecord) -> str:
    if record.submitted_at is None or record.queued_at is None:
        return ""
    waited = (record.submitted_at - record.queued_at) * 1_000
    return f"waited {waited:.1f} ms at the edge for a place in the engine" if waited >= 1 else ""


def _miss(miss: PrefixMiss, prompt: TokenIds, names: TokenNames) -> dict[str, Any]:
    """Why a prefix was not found, with the first token of the client's own prompt that was not. A request that was
    preempted computes tokens of its answer again: they may be missed too, and are not named."""
    told: dict[str, Any] = {"reason": miss.reason, "token_index": miss.num_found}
    if miss.num_found < len(prompt):
        token = prompt[miss.num_found]
        told |= {"token_id": token, "token": names[token].key}
    if miss.reason == "differs":
        told["request_id"] = miss.request_id or None
    elif miss.reason == "evicted":
        seconds = round(miss.seconds_ago, 3)
        told |= {"num_tokens": miss.num_tokens, "seconds_ago": seconds, "policy": miss.policy}
    return told
