"""Replaces the ids of tool calls in a conversation, for chat templates that accept only ids of a certain form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from quire.serving.text.chat_messages import Message
from quire.serving.text.tool_calls.deepseek_v3 import KIMI_ID

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def shorten_call_ids(messages: Sequence[Message]) -> list[Message] | None:
    """Return a checked conversation in which every id of a call is nine letters and digits, for Mistral's templates,
    which refuse other ids. Other ids are replaced by a hash of them. Returns None if there are no others."""
    short: list[Message] = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [_with_short_id(call, "id") for call in message["tool_calls"]]
        short.append(_with_short_id(changed, "tool_call_id"))
    return None if short == list(messages) else short


def _with_short_id(holder: Message, field: str) -> Message:
    call_id = holder.get(field)
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return holder
    return {**holder, field: hashlib.sha256(call_id.encode()).hexdigest()[:9]}


def name_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Return a checked conversation with `functions.NAME:NUMBER` for every call id of another form.

    Kimi's templates need it: they write ids into the prompt, and no names. Calls are numbered through the conversation.
    """
    changed, made, count = [], dict[str, str](), 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            call_id, name = call.get("id"), call.get("function", call)["name"]
            if not isinstance(call_id, str) or not KIMI_ID.fullmatch(call_id):
                call = {**call, "id": f"functions.{name}:{count}"}
                made[str(call_id)] = call["id"]
            calls.append(call)
            count += 1
        answered = made.get(message.get("tool_call_id", ""))
        with_calls = {**message, "tool_calls": calls} if calls else message
        changed.append({**with_calls, "tool_call_id": answered} if answered else with_calls)
    return changed
