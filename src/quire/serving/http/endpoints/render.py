"""Rendering without generating: translates a chat or completion request to the equivalent request to `/v1/generate`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.completions import COMPLETIONS
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import Field
from quire.serving.http.generation.handler import GenerationEndpoint, GenerationHandler
from quire.serving.http.generation.job import Job
from quire.serving.http.generation.settings import Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import IDS, TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag
from quire.types.extra_samplers import EXTRA_NAMES
from quire.types.request import Submit

_PLAIN = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "best_of", "rank_by",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
_BEAM = ("use_beam_search", "length_penalty", "early_stopping")
_OFFSETS = Field("return_token_offsets", Flag(),
                 "Also return where each token begins and ends in the rendered text.", False)  # fmt: skip
_DESCRIPTION = """\
Checks a request, renders and tokenizes its prompt as `{path}` would, and returns what `/v1/generate` takes: `token_ids`
and `sampling_params`, with the model's recommended values filled in. Nothing is generated and nothing is queued."""


@dataclass(frozen=True, kw_only=True)
class RenderEndpoint(Endpoint):
    """The endpoint that renders requests to the endpoint `of`."""

    of: GenerationEndpoint
    is_list: bool  # whether it returns a list, with one request per prompt

    def make_handler(self, service: Service) -> Handler:
        return RenderHandler(service, self)


class RenderHandler(GenerationHandler):
    """Prepares requests and replies with them, without submitting them."""

    def __init__(self, service: Service, endpoint: RenderEndpoint) -> None:
        settings = replace(endpoint.of.generation, translate=self._translate)
        super().__init__(service, replace(endpoint.of, name=endpoint.name, fields=endpoint.fields, generation=settings))
        self._own_translate = endpoint.of.generation.translate
        self._is_list = endpoint.is_list

    async def __call__(self, exchange: Exchange) -> None:
        with self._counted_refusals():
            job = await self._prepare(exchange, time.monotonic())
        rendered = await self._service.in_thread(self._render, job)
        await exchange.reply_json(rendered if self._is_list else rendered[0])

    def _translate(self, service: Service, given: Parameters, head: RequestHead) -> Parameters:
        """Translate the request as its own endpoint does, and ask for the rendered text."""
        return self._own_translate(service, given, head) | {"return_prompt_text": True}

    def _render(self, job: Job) -> list[dict[str, Any]]:
        given, options = job.options.parameters, job.options
        texts = [prompt.text for prompt in given["prompt"]] if "prompt" in given else [options.prompt_text]
        common = {
            "model": options.model,
            "stream": options.stream,
            "stream_options": given.get("stream_options"),
            "cache_salt": given.get("cache_salt"),
            "priority": given.get("priority", 0),
            "assistant_tokens_mask": None,
        }
        return [
            {
                "request_id": submit.request_id,
                "token_ids": submit.prompt_token_ids.tolist(),
                "token_offsets": self._offsets(given, text, submit),
                "sampling_params": self._sampling(given, submit),
                **common,
            }
            for submit, text in zip(job.submits, texts, strict=True)
        ]

    def _offsets(self, given: dict[str, Any], text: str | None, submit: Submit) -> list[tuple[int, int]] | None:
        """Return the start and end of each token in the text that was tokenized. Returns None if they were not asked
        for, there is no text, or the prompt was truncated."""
        if not given.get("return_token_offsets") or text is None:
            return None
        add_special = given.get("add_special_tokens", self._endpoint.generation.adds_special_tokens)
        ids, offsets = self._service.texts.tokenizer.encode_with_offsets(text, add_special)
        return offsets if ids == submit.prompt_token_ids.tolist() else None

    def _sampling(self, given: dict[str, Any], submit: Submit) -> dict[str, Any]:
        sampling, length = submit.sampling, self._service.engine().max_model_len
        found: dict[str, Any] = {name: getattr(sampling, name) for name in _PLAIN}
        found |= {name: list(values) for name in _LISTS if (values := getattr(sampling, name))}
        found["max_tokens"] = sampling.max_tokens or length - len(submit.prompt_token_ids)
        if sampling.logit_bias:
            found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if submit.rules.grammar:
            found["structured_outputs"] = {"grammar": submit.rules.grammar}
        if given.get("repetition_detection"):
            found["repetition_detection"] = given["repetition_detection"]
        found |= {name: given[name] for name in (*EXTRA_NAMES, *_BEAM) if name in given}
        return {name: value for name, value in found.items() if value is not None}


def _without_offsets(endpoint: GenerationEndpoint) -> tuple[Field, ...]:
    return tuple(field for field in endpoint.fields if field.name != _OFFSETS.name)


def _make(of: GenerationEndpoint, response: str, *, is_list: bool) -> RenderEndpoint:
    path = of.paths[0]
    return RenderEndpoint(
        name=f"{of.name}_render",
        paths=(f"{path}/render",),
        summary=f"Render and tokenize a request to {path}",
        fields=(*_without_offsets(of), _OFFSETS),
        response=response,
        schemas=_SCHEMAS,
        description=_DESCRIPTION.format(path=path),
        of=of,
        is_list=is_list,
    )


_SCHEMAS: dict[str, Schema] = {
    "RenderedRequest": record(
        {
            "request_id": TEXT,
            "token_ids": IDS,
            "token_offsets": or_null(many({"type": "array", "items": WHOLE})),
            "sampling_params": {"type": "object"},
            "model": TEXT,
            "stream": {"type": "boolean"},
            "stream_options": or_null({"type": "object"}),
            "cache_salt": or_null(TEXT),
            "priority": {"type": "integer"},
            "assistant_tokens_mask": {"type": "null"},
        }
    ),
    "RenderedRequests": many(ref("RenderedRequest")),
}
RENDERS: tuple[Endpoint, ...] = (
    _make(CHAT, "RenderedRequest", is_list=False),
    _make(COMPLETIONS, "RenderedRequests", is_list=True),
)
