"""One engine request from its submission to its end, and the followers that turn its tokens into text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.engine.submission import num_sequences
from quire.serving.dispatch.mailbox import Delta, Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.dispatch.quarantine import MAX_CRASHES
from quire.serving.outputs import RequestFollower, SampleText, WatchMaker, cut_at_stop
from quire.serving.text.tokenizer import Tokenizer
from quire.types.ledger import LedgerEntry
from quire.types.output import Finished, SampleEnd
from quire.types.request import Submit
from quire.types.step import TokenLogprobs

# Renders the logprobs of one token as JSON, one piece per column. Takes the character offset of its text in the answer.
RenderLogprobs = Callable[[TokenLogprobs, int], tuple[bytes, ...]]
MAX_RESTARTS = 3  # of one request. A request that is suspected of MAX_CRASHES crashes is not restarted.
RequestState = Literal["new", "queued", "submitted", "over"]


@dataclass(slots=True)
class Follower:
    """Turns the tokens of one sample into text as they arrive. Used by the link's thread only."""

    request: InFlightRequest
    index: int
    text: SampleText
    last_at: float | None = None
    held: list[Delta] = field(default_factory=list)  # deltas not yet in the mailbox: see `InFlightRequest.interval`
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False
    released: int = 0  # `Mailbox.put_bytes` after the last release

    def push(self, token_id: int, entry: TokenLogprobs | None) -> Delta:
        """Take one token and return its delta. If the token completes a stop string or a repetition loop, the delta has
        a finish reason and `is_over` is set."""
        text, request = self.text, self.request
        self.token_ids.append(token_id)
        offset = text.num_characters
        new = text.push(token_id)
        columns = () if entry is None or request.render is None else request.render(entry, offset)
        choice = request.first_choice + self.index
        if text.stopped_by is None:
            return Delta(choice, new, (token_id,), columns)
        self.is_over = True
        reason = "repetition" if text.is_loop else "stop"
        return Delta(choice, new, (token_id,), columns, reason, text.stopped_by)

    def hold(self, delta: Delta) -> bool:
        """Add a delta to the held ones. Returns whether they should be released: `interval` of them are held, this is
        the first token, or the sample is over."""
        self.held.append(delta)
        return len(self.held) >= self.request.interval or self.text.num_tokens == 1 or self.is_over

    def release(self) -> None:
        """Put the held deltas into the mailbox."""
        for delta in self.held:
            self.request.mailbox.put(delta)
        self.held.clear()
        self.released = self.request.mailbox.put_bytes

    @property
    def is_unread(self) -> bool:
        """Whether the handler has not taken all deltas of the last release, although a whole interval has passed
        since."""
        return self.request.mailbox.taken_bytes < self.released


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """An engine request, the mailbox of its client, and once it has finished, its result.

    If `streams`, every token becomes a delta in the mailbox; otherwise the mailbox is only woken at the end. Samples
    are followed token by token if they stream or if their text may end them. Ranked samples are followed at the end,
    after the engine has chosen them.
    """

    submit: Submit
    record: RequestRecord
    mailbox: Mailbox
    first_choice: int = 0  # the index of sample 0 among the choices of the response
    streams: bool = False
    interval: int = 1  # tokens per event of a stream
    render: RenderLogprobs | None = None
    make_watch: WatchMaker | None = None  # makes a watch that may end a sample by its text, besides stop strings
    state: RequestState = "new"
    handle: int | None = None  # of its first sample; set when the engine has accepted the request
    followers: list[Follower] = field(default_factory=list)
    finished: Finished | None = None
    has_started: bool = False  # whether it has produced a token; set by the link's thread
    num_crashes: int = 0  # engine crashes that this request may have caused
    restarts: list[LedgerEntry] = field(default_factory=list)  # entries to put before the engine's ledger
    _follower: RequestFollower | None = None  # set when the engine has accepted it

    @property
    def n(self) -> int:
        return self.submit.sampling.n

    @property
    def num_sequences(self) -> int:
        """How many sequences the request has in the engine."""
        return num_sequences(self.submit)

    @property
    def weight(self) -> int:
        """Number of prompt tokens, in which the queue is bounded."""
        return len(self.submit.prompt_token_ids)

    @property
    def can_restart(self) -> bool:
        """Whether the next engine may compute this request from the start: nothing of its response was delivered, it
        has not failed, and it was restarted and suspected of crashes too few times to be given up."""
        if len(self.restarts) >= MAX_RESTARTS or self.num_crashes >= MAX_CRASHES:
            return False
        return not self.mailbox.has_delivered and self.mailbox.failure is None

    def restart(self, now: float) -> None:
        """Reset the request to its state before submission. It gets another engine request id, so that a late message
        about the first attempt is not taken for one about the second."""
        self.submit = replace(self.submit, request_id=f"{self.submit.request_id}-again")
        self.state, self.handle, self.followers, self.finished = "queued", None, [], None
        self.has_started, self._follower = False, None
        self.record.submitted_at = self.record.first_token_at = None
        self.restarts.append(LedgerEntry("resubmitted", now, note="the engine ended while it had the request"))
        self.mailbox.discard(range(self.first_choice, self.first_choice + self.n))

    def follow(self, tokenizer: Tokenizer, handle: int) -> list[Follower]:
        """Create its followers and return them. Called when the engine has accepted the request."""
        self.handle, self._follower = handle, self._make_follower(tokenizer)
        self.followers = [Follower(self, index, text) for index, text in self._follower.texts.items()]
        return self.followers

    def tokens_so_far(self, index: int) -> tuple[int, ...] | None:
        """Return the tokens of sample `index` so far, or None if that sample is not followed."""
        return tuple(self.followers[index].token_ids) if index < len(self.followers) else None

    def finish(self, finished: Finished, tokenizer: Tokenizer) -> None:
        """Store the engine's result. If the request streams, also put the last deltas of its samples into the
        mailbox."""
        if self.restarts:
            finished = finished._replace(events=(*self.restarts, *finished.events))
        self.finished = finished
        if self._follower is None:  # the request ended before the engine accepted it
            self._follower = self._make_follower(tokenizer)
        if self._follower.is_ranked:
            self._follow_ranked(self._follower, finished)
        for follower in self.followers:
            end = next((end for end in finished.samples if end.index == follower.index), None)
            if follower.is_over or end is None:
                continue
            follower.is_over = True
            rest = follower.text.finish()
            if self.streams:
                follower.release()
                end = cut_at_stop(end, follower.text)
                choice = self.first_choice + follower.index
                self.mailbox.put(Delta(choice, rest, (), (), end.finish_reason, end.stop_reason))

    def _make_follower(self, tokenizer: Tokenizer) -> RequestFollower:
        return RequestFollower(self.submit, tokenizer, wants_all=self.streams, make_watch=self.make_watch)

    def _follow_ranked(self, request: RequestFollower, finished: Finished) -> None:
        """Follow the ranked samples of a finished request, as if their tokens arrived now."""
        request.rank(finished)
        for end in finished.samples if request.texts else ():
            follower = Follower(self, end.index, request.texts[end.index])
            self.followers.append(follower)
            for token, entry in request.replay(end):
                follower.held.append(follower.push(token, entry))
            if self.streams:
                follower.release()

    def ends(self) -> list[tuple[SampleEnd, SampleText | None]]:
        """Return the end of every sample that the client gets, in order, with its text if the sample was followed."""
        assert self.finished is not None
        assert self._follower is not None
        return self._follower.ends(self.finished)
