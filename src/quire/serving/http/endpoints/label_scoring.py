"""Scoring with a model that generates text: the probability of given tokens after a query and each of several items.
SGLang and vLLM call it generative scoring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.http.endpoints.openai_format import Names, extras, usage_json
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import ADD_SPECIAL_TOKENS, LABELS, MODEL, NAMES, TRUNCATION, Field, not_supported
from quire.serving.http.generation.handler import GenerationEndpoint, GenerationHandler
from quire.serving.http.generation.results import count_usage
from quire.serving.http.generation.settings import GenerationSettings, Parameters, ResponseOptions, StreamFormat
from quire.serving.http.pooling.handler import PoolingEndpoint
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import NUMBER, TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.values import Bounds, Flag, Text, TokenIds
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Query:
    """One text, or one list of token ids."""

    def check(self, where: str, value: Any, limits: Bounds) -> Prompt:
        if isinstance(value, list) and not all(isinstance(item, int) for item in value):
            raise InvalidRequest(where, "must be one text or a list of token ids", "send one query for all items")
        (prompt,) = Prompts().check(where, value, limits)
        return prompt

    def schema(self, limits: Bounds) -> Schema:
        return {"anyOf": [Text("prompt_characters", 1).schema(limits), TokenIds("prompt_tokens", 1).schema(limits)]}


class LabelFormat:
    """A ResponseFormat: for each item, SGLang's `scores` with one value per label token, and vLLM's `data` with the
    first of them."""

    def __init__(self, service: Service) -> None:
        self._names = Names(service.texts.tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:  # noqa: ARG002
        return lambda _entry, _offset: ()

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        labels: list[int] = options.parameters["labels"]
        scores = [_scores(request, labels, softmax=options.parameters["apply_softmax"]) for request in requests]
        data = [{"index": place, "object": "score", "score": row[0]} for place, row in enumerate(scores)]
        body: dict[str, Any] = {
            "id": options.response_id,
            "object": options.parameters["object"],
            "created": options.created,
            "model": options.model,
            "scores": scores,
            "data": data,
            "usage": usage_json(count_usage(options, requests, 0, 0)),
        }
        return msgspec.json.encode(body | extras(options, requests, self._names))

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> StreamFormat:  # noqa: ARG002
        raise AssertionError("scores are never streamed: there is no such field")


def _scores(request: InFlightRequest, labels: Sequence[int], *, softmax: bool) -> list[float]:
    """Return the probability of each label token after the prompt. With `softmax` they are normalized over the label
    tokens."""
    ((end, _),) = request.ends()
    entry = end.logprobs[0]
    logprobs = dict(zip(entry.token_ids.tolist(), entry.logprobs.tolist(), strict=True))
    found = [logprobs[token] for token in labels]
    best = max(found)
    if not softmax or best == -math.inf:
        return [math.exp(value) for value in found]
    shares = [math.exp(value - best) for value in found]
    total = sum(shares)
    return [share / total for share in shares]


def translator(*, softmax: bool, name: str) -> Callable[[Service, Parameters, RequestHead], Parameters]:
    """Return the translate function of an endpoint. `softmax`: the default of `apply_softmax`; `name`: the `object`
    member of its responses."""

    def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
        query, items, labels = given.pop("query"), given.pop("items"), given.pop("label_token_ids")
        prompts = _prompts(query, items, service.limits, item_first=given.pop("item_first", False))
        return {
            **given,
            "prompt": prompts,
            "labels": labels,
            "logprob_token_ids": list(dict.fromkeys(labels)),
            "apply_softmax": given.get("apply_softmax", softmax),
            "object": name,
            "temperature": 0.0,
            "max_tokens": 0,
            "echo": True,  # the prompt is scored; nothing is generated
        }

    return translate


def _prompts(query: Prompt, items: Sequence[Prompt], limits: Bounds, *, item_first: bool) -> list[Prompt]:
    """Join the query with each item. Raises InvalidRequest if only one of them is text, or if the prompts are too long
    together."""
    for place, item in enumerate(items):
        if (item.text is None) != (query.text is None):
            kind = "token ids" if query.text is None else "text"
            raise InvalidRequest(f"items[{place}]", f"must be {kind}, as query is", "send both as text or as token ids")
    name = "prompt_tokens" if query.text is None else "prompt_characters"
    total = sum(_size(item) + _size(query) for item in items)
    if total > limits[name]:
        unit = name.removeprefix("prompt_")
        reason = f"has, together with query in front of each, {total} {unit} in all, limit {limits[name]}"
        raise InvalidRequest("items", reason, "send less at once")
    pairs = [(item, query) if item_first else (query, item) for item in items]
    if query.text is None:
        return [Prompt(token_ids=(*(a.token_ids or ()), *(b.token_ids or ()))) for a, b in pairs]
    return [Prompt(text=f"{a.text}{b.text}") for a, b in pairs]


def _size(prompt: Prompt) -> int:
    return len(prompt.text or "") + len(prompt.token_ids or ())


_PAIRS = "needs a model that embeds or scores, and this one generates text, which scores query, items, label_token_ids"
_FIELDS = (
    MODEL,
    Field("query", Query(), "The text that all prompts share, or its token ids.", is_required=True),
    Field("items", Prompts(), "A text, a list of texts, or a list of lists of token ids. The query is joined "
          "with each of them to one prompt, with nothing between.", is_required=True),
    Field("label_token_ids", TokenIds("logprob_token_ids", 1), "The tokens whose probabilities to return.",
          is_required=True),
    Field("apply_softmax", Flag(),
          "Divide the probabilities by their sum over these tokens. Default true; false at `/v1/score`."),
    Field("item_first", Flag(), "Put the item before the query.", False),
    ADD_SPECIAL_TOKENS,
    *TRUNCATION,
    *NAMES,
    *(field for field in LABELS if field.name in ("priority", "user")),
    *(not_supported(name, "For pairs of texts.", why=_PAIRS) for name in ("text_1", "text_2")),
    not_supported("return_pooled_hidden_states", "Hidden states.", False),
    not_supported("embed_override_token_id", "Embeddings instead of tokens."),
    not_supported("query_embed_overrides", "Embeddings instead of tokens."),
    not_supported("item_embed_overrides", "Embeddings instead of tokens."),
)  # fmt: skip
_DESCRIPTION = """\
The probability of each label token right after the query and an item, by a model that generates text. `scores` has a
list for each item, in the order of `label_token_ids`; `data` has the first number of each. SGLang's path `/v1/score`
takes the same request where the model generates text. The query is computed once if it comes first. See
[the guide](../guides/embeddings.md#scores-by-a-model-that-generates-text)."""
_SCHEMAS: dict[str, Schema] = {
    "LabelScores": record(
        {
            "id": TEXT,
            "object": TEXT,
            "created": WHOLE,
            "model": TEXT,
            "scores": many(many(NUMBER)),
            "data": many(record({"index": WHOLE, "object": {"const": "score"}, "score": NUMBER})),
            "usage": {"type": "object"},
        },
        {"warnings": many(TEXT), "quire": {"type": "object"}},
    ),
}
LABEL_SCORING = GenerationEndpoint(
    name="generative_scoring",
    paths=("/generative_scoring",),
    summary="Probabilities of given tokens after texts",
    fields=_FIELDS,
    response="LabelScores",
    schemas=_SCHEMAS,
    description=_DESCRIPTION,
    generation=GenerationSettings(
        id_prefix="score",
        prompt_field="items",
        make_format=LabelFormat,
        translate=translator(softmax=True, name="list"),
        own_names={"prompt": "items", "logprob_token_ids": "label_token_ids"},
        adds_special_tokens=True,
    ),
)
_SGLANG = replace(
    LABEL_SCORING,
    generation=replace(LABEL_SCORING.generation, translate=translator(softmax=False, name="scoring")),
)


@dataclass(frozen=True, kw_only=True)
class ScoreEndpoint(PoolingEndpoint):
    """Scores pairs of texts with a pooling model, and label tokens with a model that generates text."""

    def make_handler(self, service: Service) -> Handler:
        of_pairs, of_labels = super().make_handler(service), GenerationHandler(service, _SGLANG)

        async def handle(exchange: Exchange) -> None:
            generates = service.engine().pooling is None
            await (of_labels if generates else of_pairs)(exchange)

        return handle
