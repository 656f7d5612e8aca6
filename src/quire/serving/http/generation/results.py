"""The answers of a request, independent of any response format: content, reasoning and calls, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.outputs import SampleText, answer_detokenizer, visible_ids
from quire.serving.text.message_reading import MessageReader, MessageReading
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought
from quire.serving.text.tokenizer import Tokenizer
from quire.types.output import SampleEnd
from quire.types.request import Submit

LogprobColumns = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments` is JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """One finished answer. If `ResponseOptions.reading` is None, `content` is all of its text."""

    request: InFlightRequest
    index: int  # among the choices of the response
    preface: str  # echoed text, which goes before the content
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: list[LogprobColumns]  # rendered columns per token; empty unless asked for
    finish_reason: str | None  # "stop", "length", "tool_calls", "repetition", ...
    stop_reason: int | str | None  # the stop string or token that ended it
    end: SampleEnd
    num_reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response. `num_reasoning` is None if answers have no marked reasoning."""

    num_prompt: int
    num_cached: int
    num_output: int
    num_reasoning: int | None


def count_usage(
    options: ResponseOptions, requests: Sequence[InFlightRequest], num_output: int, num_reasoning: int
) -> Usage:
    """Return the usage of a response that has `num_output` output tokens so far."""
    return Usage(
        sum(len(request.submit.prompt_token_ids) for request in requests),
        sum(request.finished.num_cached_tokens for request in requests if request.finished is not None),
        0 if options.drops_answer else num_output,
        num_reasoning if options.has_reasoning else None,
    )


def usage_of(options: ResponseOptions, results: Sequence[ChoiceResult], requests: Sequence[InFlightRequest]) -> Usage:
    """Return the usage of a complete response."""
    num_output = sum(len(result.end.token_ids) for result in results)
    return count_usage(options, requests, num_output, sum(result.num_reasoning_tokens for result in results))


class ResultReader:
    """Reads the answers of finished requests. Shared by threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def results(
        self, options: ResponseOptions, requests: Sequence[InFlightRequest], render: RenderLogprobs | None
    ) -> list[ChoiceResult]:
        """Return one result per choice, in order. `render` renders logprobs; None: they are not asked for."""
        pairs = zip(requests, options.prefaces, strict=True)
        return [
            self._result(options, request, end, text, preface, render)
            for request, preface in pairs
            for end, text in request.ends()
        ]

    def deltas(self, options: ResponseOptions, request: InFlightRequest, render: RenderLogprobs | None) -> list[Delta]:
        """Return the only answer of a finished request as the deltas of a stream, for a format that writes whole
        responses and streams with the same code."""
        ((end, text),) = request.ends()
        answer, columns = self._text(options, request.submit, end, text, render, 0)
        if not columns and not options.has_reasoning:
            return [Delta(0, answer, end.token_ids, (), end.finish_reason, end.stop_reason)]
        *pieces, rest = self._token_texts(request.submit, end, answer)
        tokens = end.token_ids[: len(pieces)]
        rendered = columns[: len(pieces)] if columns else [()] * len(pieces)
        deltas = [Delta(0, *one) for one in zip(pieces, [(token,) for token in tokens], rendered, strict=True)]
        return [*deltas, Delta(0, rest, end.token_ids[len(pieces) :], (), end.finish_reason, end.stop_reason)]

    def _result(
        self,
        options: ResponseOptions,
        request: InFlightRequest,
        end: SampleEnd,
        text: SampleText | None,
        preface: str,
        render: RenderLogprobs | None,
    ) -> ChoiceResult:
        answer, columns = self._text(options, request.submit, end, text, render, len(preface))
        content, parts, num_reasoning = answer, list[Part](), 0
        if options.reading is not None:
            reader = options.reading.reader()
            for piece, num_tokens in self._pieces(options, request.submit, end, answer):
                parts += reader.push(piece, num_tokens)
            parts += reader.finish()
            num_reasoning = reader.num_reasoning_tokens
            content = "".join(part.text for part in parts if isinstance(part, Said))
        calls = _calls(parts)
        reason = "length" if options.drops_answer else finish_reason(end.finish_reason, has_calls=bool(calls))
        return ChoiceResult(
            request=request,
            index=request.first_choice + end.index,
            preface=preface,
            content=content,
            reasoning="".join(part.text for part in parts if isinstance(part, Thought)),
            calls=calls,
            token_ids=() if options.drops_answer else end.token_ids,
            logprobs=columns,
            finish_reason=reason,
            stop_reason=None if options.drops_answer else end.stop_reason,
            end=end,
            num_reasoning_tokens=num_reasoning,
        )

    def _pieces(
        self, options: ResponseOptions, submit: Submit, end: SampleEnd, answer: str
    ) -> Iterator[tuple[str, int]]:
        """Yield an answer in pieces with their numbers of tokens: one per token if reasoning tokens are counted, else
        one."""
        if not options.has_reasoning:
            yield answer, 0
            return
        *pieces, rest = self._token_texts(submit, end, answer)
        for piece in pieces:
            yield piece, 1
        yield rest, 0

    def _token_texts(self, submit: Submit, end: SampleEnd, answer: str) -> Iterator[str]:
        """Yield the text of each token of an answer, and last the rest of the text that no token completed."""
        detokenizer, place = answer_detokenizer(self._tokenizer, submit.sampling), 0
        for token in visible_ids(submit, end.token_ids):
            piece = detokenizer.push((token,))
            yield answer[place : place + len(piece)]
            place += len(piece)
        yield answer[place:]

    def _text(
        self,
        options: ResponseOptions,
        submit: Submit,
        end: SampleEnd,
        text: SampleText | None,
        render: RenderLogprobs | None,
        start: int,
    ) -> tuple[str, list[LogprobColumns]]:
        """Return the text of a sample and its rendered logprobs, whose character offsets begin at `start`."""
        if options.drops_answer:
            return "", []
        detokenizer = answer_detokenizer(self._tokenizer, submit.sampling)
        spoken = visible_ids(submit, end.token_ids)
        if render is None:
            whole = text.text if text is not None else detokenizer.push(spoken) + detokenizer.finish()
            return whole, []
        pieces: list[str] = []
        columns, offset = [], start
        for place, entry in enumerate(end.logprobs):
            columns.append(render(entry, offset))
            if place < len(spoken):
                pieces.append(detokenizer.push((spoken[place],)))
                offset += len(pieces[-1])
        return (text.text if text is not None else "".join(pieces) + detokenizer.finish()), columns


class StreamReader:
    """Splits the deltas of streamed choices into parts: content, reasoning and calls."""

    def __init__(self, reading: MessageReading) -> None:
        self._reading = reading
        self._readers: dict[int, MessageReader] = {}  # by choice
        self._with_calls: set[int] = set()

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(reader.num_reasoning_tokens for reader in self._readers.values())

    def parts(self, choice: int, deltas: Sequence[Delta]) -> list[Part]:
        """Return the parts that new deltas of one choice complete. Parts of a call carry the index of the call."""
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = self._reading.reader()
        parts = [part for delta in deltas for part in reader.push(delta.text, len(delta.token_ids))]
        if deltas[-1].finish_reason is not None:
            parts += reader.finish()
        if any(isinstance(part, CallBegun) for part in parts):
            self._with_calls.add(choice)
        return parts

    def finish_reason(self, choice: int, reason: str | None) -> str | None:
        """Return why a choice ended, given the engine's finish reason."""
        return finish_reason(reason, has_calls=choice in self._with_calls)


def finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """Return "tool_calls" if the model stopped after tool calls, else the engine's finish reason."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def _calls(parts: Sequence[Part]) -> tuple[ToolCall, ...]:
    begun = {part.index: part for part in parts if isinstance(part, CallBegun)}
    arguments: dict[int, list[str]] = {index: [] for index in begun}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    return tuple(ToolCall(call.call_id, call.name, "".join(arguments[index])) for index, call in begun.items())
