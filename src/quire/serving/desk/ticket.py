"""One engine request while the edge looks after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.submission import num_sequences
from quire.serving.desk.mailbox import Delta, Mailbox
from quire.serving.desk.observer import RequestRecord
from quire.serving.outputs import SampleText, is_ranked, settled
from quire.serving.text.tokenizer import Tokenizer
from quire.types.output import Finished, SampleEnd
from quire.types.request import Submit
from quire.types.step import TokenLogprobs

# one token's logprobs and where its text begins in the answer, as JSON: a piece for each column of the format
RenderLogprobs = Callable[[TokenLogprobs, int], tuple[bytes, ...]]
TicketState = Literal["new", "queued", "submitted", "over"]


@dataclass(slots=True)
class Follower:
    """Turns one sample's tokens into text as they come. Lives on the link's thread."""

    ticket: Ticket
    index: int
    text: SampleText
    last_at: float | None = None
    held: list[Delta] = field(default_factory=list)  # not due yet
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False

    def push(self, token_id: int, entry: TokenLogprobs | None) -> Delta:
        """The news that one token is; it carries the finish if the token completed a stop string or a loop."""
        text, ticket = self.text, self.ticket
        self.token_ids.append(token_id)
        offset = text.num_characters
        new = text.push(token_id)
        columns = () if entry is None or ticket.render is None else ticket.render(entry, offset)
        choice = ticket.first_choice + self.index
        if text.stopped_by is None:
            return Delta(choice, new, (token_id,), columns)
        self.is_over = True
        reason = "repetition" if text.is_loop else "stop"
        return Delta(choice, new, (token_id,), columns, reason, text.stopped_by)

    def hold(self, delta: Delta) -> bool:
        """Keep news until they are enough for an event; whether they are now."""
        self.held.append(delta)
        return len(self.held) >= self.ticket.interval or self.text.num_tokens == 1 or self.is_over

    def release(self) -> None:
        """Hand what was kept to the client."""
        for delta in self.held:
            self.ticket.mailbox.put(delta)
        self.held.clear()


@dataclass(slots=True, eq=False)
class Ticket:
    """What was asked, who waits for it, and in the end what came of it.

    `streams`: every token is news for the mailbox; otherwise only the end is. Samples are followed token by token when
    they stream or may end by their text. Those that are ranked are read when they are known: at the end.
    """

    submit: Submit
    record: RequestRecord
    mailbox: Mailbox
    first_choice: int = 0  # the place of sample 0 among the answer's choices
    streams: bool = False
    interval: int = 1
    render: RenderLogprobs | None = None
    state: TicketState = "new"
    handle: int | None = None
    followers: list[Follower] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def n(self) -> int:
        return self.submit.sampling.n

    @property
    def num_sequences(self) -> int:
        """How many it keeps alive in the engine."""
        return num_sequences(self.submit)

    @property
    def weight(self) -> int:
        """Its prompt tokens: the waiting room's measure."""
        return len(self.submit.prompt_token_ids)

    def follow(self, tokenizer: Tokenizer, handle: int) -> list[Follower]:
        """Its followers, when the engine has accepted it."""
        self.handle = handle
        if not is_ranked(self.submit) and (self.streams or self.submit.sampling.ends_by_text):
            self.followers = [Follower(self, i, SampleText(tokenizer, self.submit)) for i in range(self.n)]
        return self.followers

    def tokens_so_far(self, index: int) -> tuple[int, ...] | None:
        """What sample `index` has generated; None where nobody follows it."""
        return tuple(self.followers[index].token_ids) if index < len(self.followers) else None

    def settle(self, finished: Finished, tokenizer: Tokenizer) -> None:
        """The engine is done with it: keep the outcome, and tell the mailbox the ends it does not know yet."""
        self.finished = finished
        if is_ranked(self.submit) and (self.streams or self.submit.sampling.ends_by_text):
            self._follow_at_last(finished, tokenizer)
        for follower in self.followers:
            end = next((end for end in finished.samples if end.index == follower.index), None)
            if follower.is_over or end is None:
                continue
            follower.is_over = True
            rest = follower.text.finish()
            if self.streams:
                follower.release()
                end = settled(end, follower.text)
                choice = self.first_choice + follower.index
                self.mailbox.put(Delta(choice, rest, (), (), end.finish_reason, end.stop_reason))

    def _follow_at_last(self, finished: Finished, tokenizer: Tokenizer) -> None:
        """Read samples that were ranked as if their tokens came now."""
        for end in finished.samples:
            follower = Follower(self, end.index, SampleText(tokenizer, self.submit))
            self.followers.append(follower)
            entries = end.logprobs or (None,) * len(end.token_ids)
            for token, entry in zip(end.token_ids, entries, strict=True):
                follower.held.append(follower.push(token, entry))
                if follower.is_over:
                    break
            if self.streams:
                follower.release()

    def ends(self) -> list[tuple[SampleEnd, SampleText | None]]:
        """Every sample as its user sees it, in order, with its text where it was followed."""
        assert self.finished is not None
        texts = {follower.index: follower.text for follower in self.followers}
        pairs = [(settled(end, texts.get(end.index)), texts.get(end.index)) for end in self.finished.samples]
        return sorted(pairs, key=lambda pair: pair[0].index)
