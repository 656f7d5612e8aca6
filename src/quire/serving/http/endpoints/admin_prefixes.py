"""Routes for operators to pin prompts, so that they stay in the prefix cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from quire.serving.http.endpoints.tokenize import TOKENIZE
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange
from quire.serving.http.generation.conversation import render_messages, unread_values
from quire.serving.http.json_body import decode_json
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.values import Identifier, Options, Text
from quire.types.errors import InvalidRequest

_TAKEN = ("messages", "tools", "add_special_tokens", "chat_template_kwargs")
_BODY = Options(
    {
        "name": Identifier(),
        "api_key": Text("label", 1),
        "prompt": Prompts(),
        **{name: TOKENIZE.fields_by_name[name].validator for name in _TAKEN},
    }
)


class AdminPrefixes:
    """The handlers that register, list and remove pinned prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def register(self, exchange: Exchange) -> None:
        """Compute a prompt for one API key or for all, and pin its blocks."""
        service = self._service
        service.engine()
        with service.metered() as meter:
            body = decode_json(await exchange.read_body(service.limits, meter.add), service.limits["nesting"])
            given = _BODY.check("body", body, service.limits)
            if "name" not in given:
                raise InvalidRequest("name", "is missing", "send a name to list and remove it by")
            owners = service.pinned_prefixes.owners(given.get("api_key"))
            tokens = await service.in_thread(_tokens, service, given)
        held = await service.pinned_prefixes.register(given["name"], tokens, owners)
        counts = {"num_tokens": len(tokens), "num_blocks": sum(each.num_blocks for each in held), "keys": len(held)}
        await exchange.reply_json({"name": given["name"], **counts}, status=201)

    async def listing(self, exchange: Exchange) -> None:
        await exchange.reply_json({"prefixes": [asdict(row) for row in await self._service.pinned_prefixes.listing()]})

    async def remove(self, exchange: Exchange) -> None:
        name = str(exchange.scope["path_params"]["name"])
        removed = await self._service.pinned_prefixes.remove(name)
        if not removed:
            raise ApiError(404, "name: no prefix is registered under this name", code="prefix_not_found", param="name")
        await exchange.reply_json({"removed": removed})


def _tokens(service: Service, given: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids of the prompt or messages of a request. Raises InvalidRequest."""
    if ("prompt" in given) == ("messages" in given):
        raise InvalidRequest("prompt", "exactly one of prompt and messages is needed", "send one of them")
    if unread := unread_values(service, given):
        raise unread[0]
    if "messages" in given:
        text = render_messages(service, {"add_generation_prompt": False, **given}, given.get("tools", ()))
        return tuple(service.texts.tokenizer.encode(text, given.get("add_special_tokens", False)))
    if unsuited := [name for name in ("tools", "chat_template_kwargs") if name in given]:
        raise InvalidRequest(unsuited[0], "has no effect on a prompt", "send messages, or leave it out")
    prompt, *others = given["prompt"]
    if others:
        raise InvalidRequest("body.prompt", f"has {1 + len(others)} prompts, limit 1", "give each a name")
    if prompt.token_ids is not None:
        return tuple(prompt.token_ids)
    return tuple(service.texts.tokenizer.encode(prompt.text, given.get("add_special_tokens", True)))
