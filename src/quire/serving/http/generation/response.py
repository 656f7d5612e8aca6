"""A finished request as one JSON body. Runs in the text threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.generation.job import ResponseOptions
from quire.serving.http.generation.logprobs import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    render_chat,
    render_completion,
)
from quire.serving.http.generation.message import MessageBuilder, finish_reason
from quire.serving.outputs import SampleText, answer_detokenizer, spoken_ids
from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.tokenizer import Tokenizer
from quire.types.ledger import PrefixMiss
from quire.types.output import SampleEnd
from quire.types.request import Submit, TokenIds

Column = tuple[bytes, ...]
_OBJECT = {"chat": "chat.completion", "completions": "text_completion", "fork": "text_completion"}


class ResponseBuilder:
    """Builds bodies for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = {as_ids: TokenNames(tokenizer, as_ids) for as_ids in (False, True)}

    def renderer(self, options: ResponseOptions) -> RenderLogprobs:
        names = self._names[options.tokens_as_ids]
        return render_chat(names) if options.endpoint == "chat" else render_completion(names)

    def build(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        """The body of the answer. Every request has finished."""
        choices, num_reasoning = [], None if not options.has_reasoning else 0
        for request, preface in zip(requests, options.prefaces, strict=True):
            for end, text in request.ends():
                choice, num_thoughts = self._choice(options, request, end, text, preface)
                choices.append(choice)
                num_reasoning = None if num_reasoning is None else num_reasoning + num_thoughts
        body: dict[str, Any] = {
            "id": options.answer_id,
            "object": _OBJECT[options.endpoint],
            "created": options.created,
            "model": options.model,
            "system_fingerprint": options.fingerprint,
            "choices": choices,
            "usage": usage(requests, _num_answer_tokens(options, requests), num_reasoning),
        }
        if options.endpoint == "chat":
            body |= self._prompt_extras(options, requests[0])
            if options.prompt_text is not None:
                body["prompt_text"] = options.prompt_text
        return msgspec.json.encode(body | self.extras(options, requests))

    def extras(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> dict[str, Any]:
        """What an answer holds beyond OpenAI's: the ledger where it was asked for, warnings where there are any."""
        found: dict[str, Any] = {}
        if options.warnings:
            found["warnings"] = options.warnings
        if options.explain:
            found["quire"] = {"ledger": ledger_entries(requests, self._names[options.tokens_as_ids])}
        return found

    # -------------------------------------------------------------------------------------------------- choices
    def _choice(
        self, options: ResponseOptions, request: InFlightRequest, end: SampleEnd, text: SampleText | None, preface: str
    ) -> tuple[dict[str, Any], int]:
        """A choice of the answer, and how many of its tokens are reasoning."""
        answer, columns = self._text(options, request.submit, end, text, len(preface))
        rendered = None
        if options.wants_logprobs:
            if options.echoes_prompt:
                columns = [*self._prompt_columns(options, request), *columns]
            make = chat_logprobs if options.endpoint == "chat" else completion_logprobs
            rendered = msgspec.Raw(make(columns))
        choice: dict[str, Any] = {"index": request.first_choice + end.index}
        has_calls, num_reasoning = False, 0
        if options.reading is not None:
            message = MessageBuilder(options.reading)
            for piece, num_tokens in self._pieces(options, request.submit, end, answer):
                message.push(piece, num_tokens)
            choice["message"], has_calls = message.build(preface)
            num_reasoning = message.num_reasoning_tokens
        elif options.endpoint == "chat":
            choice["message"] = {"role": "assistant", "content": preface + answer, "refusal": None}
        else:
            choice["text"] = preface + answer
        reason = "length" if options.drops_answer else finish_reason(end.finish_reason, has_calls=has_calls)
        stop_reason = None if options.drops_answer else end.stop_reason
        choice |= {"logprobs": rendered, "finish_reason": reason, "stop_reason": stop_reason}
        if options.return_token_ids:
            choice["token_ids"] = [] if options.drops_answer else end.token_ids
        if end.score is not None:
            choice |= {"score": end.score, "cumulative_logprob": end.cumulative_logprob}
        if options.endpoint != "chat":
            choice |= self._prompt_extras(options, request)
        return choice, num_reasoning

    def _pieces(
        self, options: ResponseOptions, submit: Submit, end: SampleEnd, answer: str
    ) -> Iterator[tuple[str, int]]:
        """An answer to be read: with its tokens where those of its reasoning are counted."""
        if not options.has_reasoning:
            yield answer, 0
            return
        detokenizer, place = answer_detokenizer(self._tokenizer, submit.sampling), 0
        for token in spoken_ids(submit, end.token_ids):
            piece = detokenizer.push((token,))
            yield answer[place : place + len(piece)], 1
            place += len(piece)
        yield answer[place:], 0

    def _text(
        self, options: ResponseOptions, submit: Submit, end: SampleEnd, text: SampleText | None, start: int
    ) -> tuple[str, list[Column]]:
        """The text of a sample and, where they are wanted, its rendered logprobs."""
        if options.drops_answer:
            return "", []
        detokenizer = answer_detokenizer(self._tokenizer, submit.sampling)
        spoken = spoken_ids(submit, end.token_ids)
        if not options.wants_logprobs:
            whole = text.text if text is not None else detokenizer.push(spoken) + detokenizer.finish()
            return whole, []
        render = self.renderer(options)
        pieces: list[str] = []
        columns, offset = [], start
        for place, entry in enumerate(end.logprobs):
            columns.append(render(entry, offset))
            if place < len(spoken):
                pieces.append(detokenizer.push((spoken[place],)))
                offset += len(pieces[-1])
        return (text.text if text is not None else "".join(pieces) + detokenizer.finish()), columns

    def _prompt_columns(self, options: ResponseOptions, request: InFlightRequest) -> list[Column]:
        """The echoed prompt's part of a completion's logprobs."""
        finished = request.finished
        entries = (finished.prompt_logprobs if finished else None) or ()
        render, names = self.renderer(options), self._names[options.tokens_as_ids]
        detokenizer = Detokenizer(self._tokenizer, request.submit.sampling.skip_special_tokens)
        columns: list[Column] = []
        offset = 0
        for token, entry in zip(request.submit.prompt_token_ids, entries, strict=True):
            if entry is None:
                key = msgspec.json.encode(names[token].key)
                columns.append((key, b"null", b"null", str(offset).encode()))
            else:
                columns.append(render(entry, offset))
            offset += len(detokenizer.push((token,)))
        return columns

    def _prompt_extras(self, options: ResponseOptions, request: InFlightRequest) -> dict[str, Any]:
        found: dict[str, Any] = {}
        finished = request.finished
        if request.submit.sampling.prompt_logprobs is not None and finished is not None:
            found["prompt_logprobs"] = prompt_logprobs(
                finished.prompt_logprobs or (), self._names[options.tokens_as_ids]
            )
        if options.return_token_ids:
            found["prompt_token_ids"] = request.submit.prompt_token_ids.tolist()
        return found


def usage(requests: Sequence[InFlightRequest], num_answer_tokens: int, num_reasoning: int | None) -> dict[str, Any]:
    """Tokens in and out, how many of the former were cached, and of the latter reasoning, where that is marked."""
    prompt = sum(len(request.submit.prompt_token_ids) for request in requests)
    cached = sum(request.finished.num_cached_tokens for request in requests if request.finished is not None)
    details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_answer_tokens,
        "total_tokens": prompt + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


def _num_answer_tokens(options: ResponseOptions, requests: Sequence[InFlightRequest]) -> int:
    if options.drops_answer:
        return 0
    return sum(len(end.token_ids) for request in requests for end, _ in request.ends())


def ledger_entries(requests: Sequence[InFlightRequest], names: TokenNames) -> list[dict[str, Any]]:
    """What happened to a request, in milliseconds since its head was read. Several prompts are told apart."""
    entries: list[dict[str, Any]] = []
    for place, request in enumerate(requests):
        record = request.record
        which = {"prompt": place} if len(requests) > 1 else {}
        entries.append({"kind": "received", "at_ms": 0.0, "amount": 0, "note": _wait_note(record), **which})
        for entry in request.finished.ledger if request.finished is not None else ():
            at = round((entry.at - record.received_at) * 1_000, 3)
            more = {} if entry.miss is None else {"miss": _miss(entry.miss, request.submit.prompt_token_ids, names)}
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
