"""/tokenize and /detokenize: text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import ADD_SPECIAL_TOKENS, MODEL, TEMPLATE, TOOLS, Field, check_body, not_supported
from quire.serving.http.generation.conversation import render_prompt, unread_values, with_placeholders
from quire.serving.http.json_body import decode_json
from quire.serving.http.schemas import IDS, TEXT, WHOLE, many, or_null, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Messages
from quire.serving.http.validators.values import Bounds, Flag, Schema, Text, TokenIds
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.sampling import check_vocabulary


@dataclass(frozen=True, slots=True)
class TextOrTexts:
    """A text, possibly empty, or a list of such texts."""

    def check(self, where: str, value: Any, limits: Bounds) -> str | list[str]:
        text = Text("prompt_characters")
        if not isinstance(value, list):
            return text.check(where, value, limits)
        if len(value) > limits["prompts"]:
            raise InvalidRequest(where, f"has {len(value)} texts, limit {limits['prompts']}", "send fewer at once")
        texts: list[str] = [text.check(f"{where}[{place}]", item, limits) for place, item in enumerate(value)]
        size, limit = sum(map(len, texts)), limits["prompt_characters"]
        if size > limit:
            raise InvalidRequest(where, f"has {size} characters in all, limit {limit}", "send less at once")
        return texts

    def schema(self, limits: Bounds) -> Schema:
        text = Text("prompt_characters").schema(limits)
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": limits["prompts"]}]}


@dataclass(frozen=True, kw_only=True)
class TextEndpoint(Endpoint):
    """An endpoint whose response is computed from the validated fields of the body by `work`, in a text thread."""

    work: Callable[[Service, dict[str, Any]], dict[str, Any]]

    def make_handler(self, service: Service) -> Handler:
        return TextHandler(service, self)


class TextHandler:
    """Reads a JSON body, runs `work` on it in a text thread and replies with the result."""

    def __init__(self, service: Service, endpoint: TextEndpoint) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        service.engine()
        strict = exchange.is_asked("strict") or service.config.strict
        query = exchange.check_query("strict", *self._endpoint.query, strict=strict)
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            answer, warnings = await service.knowing_adapters(
                lambda: service.in_thread_of(body, self._answer, body, strict)
            )
            exchange.warnings = warnings = [*query, *warnings]
            await exchange.reply_json({**answer, "warnings": warnings} if warnings else answer)

    def _answer(self, body: bytes, strict: bool) -> tuple[dict[str, Any], list[str]]:
        service, limits = self._service, self._service.limits
        given, warnings = check_body(
            self._endpoint.fields_by_name, decode_json(body, limits["nesting"]), limits, strict=strict
        )
        service.served_name(given.get("model"))
        unread = unread_values(service, given)
        if unread and strict:
            raise unread[0]
        return self._endpoint.work(service, given), [*warnings, *map(str, unread)]


def tokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    if sum(name in given for name in ("prompt", "messages", "content")) != 1:
        raise InvalidRequest("prompt", "exactly one of prompt, messages and content is needed", "send one of them")
    tokenizer, images = service.texts.tokenizer, tuple[PromptImage, ...]()
    if "content" in given:
        text, add_special = given["content"], given.get("add_special", given.get("add_special_tokens", False))
    elif "prompt" in given:
        text, add_special = given["prompt"], given.get("add_special_tokens", True)
    else:
        rendered = render_prompt(service, given, given.get("tools", ()))
        text, images, add_special = rendered.text or "", rendered.images, given.get("add_special_tokens", False)
    length = service.engine().max_model_len
    if isinstance(text, list):
        found = [_shown(tokenizer, given, tokenizer.encode(one, add_special)) for one in text]
        return {name: [one[name] for one in found] for name in ("count", "tokens", "token_strs")} | {
            "max_model_len": length
        }
    tokens = tokenizer.encode(text, add_special)
    if images:
        tokens = list(with_placeholders(service, tokens, images))
    return {**_shown(tokenizer, given, tokens), "max_model_len": length}


def _shown(tokenizer: Tokenizer, given: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """Return the tokens of one text in the form that the request asks for."""
    names = [tokenizer.raw_token(token) for token in tokens] if given.get("return_token_strs") else None
    shown = [_piece(tokenizer, token) for token in tokens] if given.get("with_pieces") else tokens
    return {"count": len(tokens), "tokens": shown, "token_strs": names}


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """Return a token in llama.cpp's format: its text, or its bytes if they are not valid UTF-8."""
    raw = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


def detokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    tokens = given["tokens"]
    check_vocabulary("tokens", tokens, service.engine().vocab_size)
    text = service.texts.tokenizer.decode(tokens, skip_special_tokens=given.get("skip_special_tokens", False))
    return {"prompt": text, "content": text, "text": text}  # the names of vLLM, llama.cpp and SGLang


_TOKENS = {"anyOf": [IDS, many(record({"id": WHOLE, "piece": {"anyOf": [TEXT, IDS]}}))]}
_NAMES = or_null(many(TEXT))
TOKENIZE = TextEndpoint(
    name="tokenize",
    paths=("/tokenize", "/v1/tokenize"),
    summary="Text to token ids",
    fields=(
        MODEL,
        Field(
            "prompt",
            TextOrTexts(),
            "The text to tokenize, or a list of texts, for which the response has lists; this or `messages`.",
        ),
        Field("messages", Messages(), "A conversation to render and tokenize; this or `prompt`."),
        ADD_SPECIAL_TOKENS,
        *TEMPLATE,
        TOOLS,
        Field("return_token_strs", Flag(), "Also return each token as it is spelled in the vocabulary.", False),
        Field("content", Text("prompt_characters"), "llama.cpp's name of `prompt`; by default without special tokens."),
        Field("add_special", Flag(), "llama.cpp's name of `add_special_tokens`; needs `content`.", False),
        Field("with_pieces", Flag(), "Return each token as an object with `id` and `piece`, its text or bytes.", False),
        not_supported("parse_special", "Special tokens in the text.", True, why="cannot be turned off here"),
        not_supported("chat_template", "A template with the request.", why="is set by the operator only"),
    ),
    response="Tokens",
    schemas={
        "Tokens": record(
            {
                "count": {"anyOf": [WHOLE, many(WHOLE)]},
                "max_model_len": WHOLE,
                "tokens": {"anyOf": [_TOKENS, many(_TOKENS)]},
                "token_strs": {"anyOf": [_NAMES, many(_NAMES)]},
            },
            {"warnings": many(TEXT)},
        )
    },
    work=tokenize,
)
DETOKENIZE = TextEndpoint(
    name="detokenize",
    paths=("/detokenize", "/v1/detokenize"),
    summary="Token ids to text",
    fields=(
        MODEL,
        Field("tokens", TokenIds("prompt_tokens"), "The token ids to turn into text.", is_required=True),
        Field("skip_special_tokens", Flag(), "Leave special tokens out of the text.", False),
    ),
    response="Text",
    schemas={"Text": record({"prompt": TEXT, "content": TEXT, "text": TEXT}, {"warnings": many(TEXT)})},
    work=detokenize,
)
