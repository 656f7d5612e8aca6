"""The engine's requests for one client's request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.serving.http.generation.admission_checks import check_admission, check_length, check_room, check_texts, cut
from quire.serving.http.generation.fork import Origin
from quire.serving.http.generation.sampling_fields import in_own_words
from quire.serving.http.request_head import GenerationEndpoint, RequestHead
from quire.serving.http.service import Service
from quire.serving.process.link import EngineReady
from quire.serving.requests import Prompt
from quire.serving.text.stop_strings import StopStrings
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams

_FIELD = {"chat": "messages", "completions": "prompt", "fork": "request_id"}


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done for each prompt of a request."""

    endpoint: GenerationEndpoint
    given: dict[str, Any]
    sampling: SamplingParams
    beam: BeamRules | None = None
    origin: Origin | None = None  # of a fork

    @property
    def count(self) -> int:
        """Sequences that live at once for one prompt."""
        return self.sampling.num_sequences if self.beam is None else self.beam.width


def make_submits(service: Service, order: Order, prompts: Sequence[Prompt], head: RequestHead) -> list[Submit]:
    """Tokenize and check. Raises InvalidRequest for what the engine would not take."""
    engine, given, sampling = service.engine(), order.given, order.sampling
    _check_count(order, len(prompts), service.limits["choices"])
    token_ids = _tokenize(service, engine, order, prompts)
    StopStrings(sampling.stops)  # refuses here what would fail later, on the link's thread
    rules = service.texts.maker(engine.eos_ids).rules(sampling, grammar="")
    salt = head.salt(given.get("cache_salt", "")) if order.origin is None else order.origin.salt
    source = None if order.origin is None else order.origin.branch
    asked = None if order.endpoint == "fork" else given.get("request_id")
    names, priority = head.engine_ids(order.endpoint, asked, len(token_ids)), given.get("priority", 0)
    submits = [
        Submit(name, pack_tokens(ids), sampling, rules, priority, salt, order.beam, source, head.principal)
        for name, ids in zip(names, token_ids, strict=True)
    ]
    try:
        check_admission(engine, submits)
    except InvalidRequest as error:
        raise in_own_words(error, given) from None
    return submits


def _check_count(order: Order, num_prompts: int, limit: int) -> None:
    if order.count * num_prompts > limit:
        reason = f"is {order.count} for {num_prompts} prompts, more than {limit} answers"
        field = "n" if order.count == order.sampling.n else "best_of"
        raise InvalidRequest(field, reason, "send fewer prompts at once")


def _tokenize(service: Service, engine: EngineReady, order: Order, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    given, field = order.given, _FIELD[order.endpoint]
    if "truncate_prompt_tokens" not in given:
        check_texts(service, field, prompts, engine.max_model_len)
    add_special = given.get("add_special_tokens", order.endpoint == "completions")
    encoded = service.texts.maker(engine.eos_ids).tokenize(prompts, add_special)
    token_ids = [cut(ids, given, order.sampling, engine) for ids in encoded]
    for place, ids in enumerate(token_ids):
        check_length(f"{field}[{place}]" if len(token_ids) > 1 else field, len(ids), engine.max_model_len)
        check_room(given, len(ids), engine.max_model_len)
    total = sum(map(len, token_ids))
    if total > service.limits["prompt_tokens"]:
        reason = f"has {total} tokens in all, limit {service.limits['prompt_tokens']}"
        raise InvalidRequest(field, reason, "send fewer at once")
    return token_ids
