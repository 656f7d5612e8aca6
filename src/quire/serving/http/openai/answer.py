"""A finished request as one JSON body. Runs in the text threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.serving.desk.ticket import RenderLogprobs, Ticket
from quire.serving.http.openai.job import Wishes
from quire.serving.http.openai.ledger import ledger_entries
from quire.serving.http.openai.logprobs import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    render_chat,
    render_completion,
)
from quire.serving.http.openai.message import MessageBuilder, finish_reason
from quire.serving.outputs import SampleText, answer_detokenizer, spoken_ids
from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.tokenizer import Tokenizer
from quire.types.output import SampleEnd
from quire.types.request import Submit

Column = tuple[bytes, ...]
_OBJECT = {"chat": "chat.completion", "completions": "text_completion", "fork": "text_completion"}


class AnswerBuilder:
    """Builds bodies for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = {as_ids: TokenNames(tokenizer, as_ids) for as_ids in (False, True)}

    def renderer(self, wishes: Wishes) -> RenderLogprobs:
        names = self._names[wishes.tokens_as_ids]
        return render_chat(names) if wishes.endpoint == "chat" else render_completion(names)

    def build(self, wishes: Wishes, tickets: Sequence[Ticket]) -> bytes:
        """The body of the answer. Every ticket has finished."""
        choices, num_reasoning = [], None if not wishes.has_reasoning else 0
        for ticket, preface in zip(tickets, wishes.prefaces, strict=True):
            for end, text in ticket.ends():
                choice, num_thoughts = self._choice(wishes, ticket, end, text, preface)
                choices.append(choice)
                num_reasoning = None if num_reasoning is None else num_reasoning + num_thoughts
        body: dict[str, Any] = {
            "id": wishes.answer_id,
            "object": _OBJECT[wishes.endpoint],
            "created": wishes.created,
            "model": wishes.model,
            "system_fingerprint": wishes.fingerprint,
            "choices": choices,
            "usage": usage(tickets, _num_answer_tokens(wishes, tickets), num_reasoning),
        }
        if wishes.endpoint == "chat":
            body |= self._prompt_extras(wishes, tickets[0])
            if wishes.prompt_text is not None:
                body["prompt_text"] = wishes.prompt_text
        return msgspec.json.encode(body | self.extras(wishes, tickets))

    def extras(self, wishes: Wishes, tickets: Sequence[Ticket]) -> dict[str, Any]:
        """What an answer holds beyond OpenAI's: the ledger where it was asked for, warnings where there are any."""
        found: dict[str, Any] = {}
        if wishes.warnings:
            found["warnings"] = wishes.warnings
        if wishes.explain:
            found["quire"] = {"ledger": ledger_entries(tickets, self._names[wishes.tokens_as_ids])}
        return found

    # -------------------------------------------------------------------------------------------------- choices
    def _choice(
        self, wishes: Wishes, ticket: Ticket, end: SampleEnd, text: SampleText | None, preface: str
    ) -> tuple[dict[str, Any], int]:
        """A choice of the answer, and how many of its tokens are reasoning."""
        answer, columns = self._text(wishes, ticket.submit, end, text, len(preface))
        rendered = None
        if wishes.wants_logprobs:
            if wishes.echoes_prompt:
                columns = [*self._prompt_columns(wishes, ticket), *columns]
            make = chat_logprobs if wishes.endpoint == "chat" else completion_logprobs
            rendered = msgspec.Raw(make(columns))
        choice: dict[str, Any] = {"index": ticket.first_choice + end.index}
        has_calls, num_reasoning = False, 0
        if wishes.reading is not None:
            message = MessageBuilder(wishes.reading)
            for piece, num_tokens in self._pieces(wishes, ticket.submit, end, answer):
                message.push(piece, num_tokens)
            choice["message"], has_calls = message.build(preface)
            num_reasoning = message.num_reasoning_tokens
        elif wishes.endpoint == "chat":
            choice["message"] = {"role": "assistant", "content": preface + answer, "refusal": None}
        else:
            choice["text"] = preface + answer
        reason = "length" if wishes.drops_answer else finish_reason(end.finish_reason, has_calls=has_calls)
        stop_reason = None if wishes.drops_answer else end.stop_reason
        choice |= {"logprobs": rendered, "finish_reason": reason, "stop_reason": stop_reason}
        if wishes.return_token_ids:
            choice["token_ids"] = [] if wishes.drops_answer else end.token_ids
        if end.score is not None:
            choice |= {"score": end.score, "cumulative_logprob": end.cumulative_logprob}
        if wishes.endpoint != "chat":
            choice |= self._prompt_extras(wishes, ticket)
        return choice, num_reasoning

    def _pieces(self, wishes: Wishes, submit: Submit, end: SampleEnd, answer: str) -> Iterator[tuple[str, int]]:
        """An answer to be read: with its tokens where those of its reasoning are counted."""
        if not wishes.has_reasoning:
            yield answer, 0
            return
        detokenizer, place = answer_detokenizer(self._tokenizer, submit.sampling), 0
        for token in spoken_ids(submit, end.token_ids):
            piece = detokenizer.push((token,))
            yield answer[place : place + len(piece)], 1
            place += len(piece)
        yield answer[place:], 0

    def _text(
        self, wishes: Wishes, submit: Submit, end: SampleEnd, text: SampleText | None, start: int
    ) -> tuple[str, list[Column]]:
        """The text of a sample and, where they are wanted, its rendered logprobs."""
        if wishes.drops_answer:
            return "", []
        detokenizer = answer_detokenizer(self._tokenizer, submit.sampling)
        spoken = spoken_ids(submit, end.token_ids)
        if not wishes.wants_logprobs:
            whole = text.text if text is not None else detokenizer.push(spoken) + detokenizer.finish()
            return whole, []
        render = self.renderer(wishes)
        pieces: list[str] = []
        columns, offset = [], start
        for place, entry in enumerate(end.logprobs):
            columns.append(render(entry, offset))
            if place < len(spoken):
                pieces.append(detokenizer.push((spoken[place],)))
                offset += len(pieces[-1])
        return (text.text if text is not None else "".join(pieces) + detokenizer.finish()), columns

    def _prompt_columns(self, wishes: Wishes, ticket: Ticket) -> list[Column]:
        """The echoed prompt's part of a completion's logprobs."""
        finished = ticket.finished
        entries = (finished.prompt_logprobs if finished else None) or ()
        render, names = self.renderer(wishes), self._names[wishes.tokens_as_ids]
        detokenizer = Detokenizer(self._tokenizer, ticket.submit.sampling.skip_special_tokens)
        columns: list[Column] = []
        offset = 0
        for token, entry in zip(ticket.submit.prompt_token_ids, entries, strict=True):
            if entry is None:
                key = msgspec.json.encode(names[token].key)
                columns.append((key, b"null", b"null", str(offset).encode()))
            else:
                columns.append(render(entry, offset))
            offset += len(detokenizer.push((token,)))
        return columns

    def _prompt_extras(self, wishes: Wishes, ticket: Ticket) -> dict[str, Any]:
        found: dict[str, Any] = {}
        finished = ticket.finished
        if ticket.submit.sampling.prompt_logprobs is not None and finished is not None:
            found["prompt_logprobs"] = prompt_logprobs(
                finished.prompt_logprobs or (), self._names[wishes.tokens_as_ids]
            )
        if wishes.return_token_ids:
            found["prompt_token_ids"] = ticket.submit.prompt_token_ids.tolist()
        return found


def usage(tickets: Sequence[Ticket], num_answer_tokens: int, num_reasoning: int | None) -> dict[str, Any]:
    """Tokens in and out, how many of the former were cached, and of the latter reasoning, where that is marked."""
    prompt = sum(len(ticket.submit.prompt_token_ids) for ticket in tickets)
    cached = sum(ticket.finished.num_cached_tokens for ticket in tickets if ticket.finished is not None)
    details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_answer_tokens,
        "total_tokens": prompt + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


def _num_answer_tokens(wishes: Wishes, tickets: Sequence[Ticket]) -> int:
    if wishes.drops_answer:
        return 0
    return sum(len(end.token_ids) for ticket in tickets for end, _ in ticket.ends())
