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

# Renders the logprobs of one token, whose text begins at a character offset, as JSON: one piece per column
RenderLogprobs = Callable[[TokenLogprobs, int], tuple[bytes, ...]]
MAX_RESTARTS = 3  # of one request; after the first one only because other requests crashed the engine
RequestState = Literal["new", "queued", "submitted", "over"]


@dataclass(slots=True)
class Follower:
    """Turns one sample's tokens into text as they come. Lives on the link's thread."""

    request: InFlightRequest
    index: int
    text: SampleText
    last_at: float | None = None
    held: list[Delta] = field(default_factory=list)  # not sent yet: see `interval`
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False
    released: int = 0  # bytes that the mailbox had got after the last release

    def push(self, token_id: int, entry: TokenLogprobs | None) -> Delta:
        """Take one token and return its delta. The delta carries the finish reason if the token completed a stop string
        or a loop."""
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
        """Hold a delta back. Returns whether enough are held for an event of the stream."""
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
        """Whether the client has not read what was released last, though it had the time of a whole interval."""
        return self.request.mailbox.taken_bytes < self.released


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """An engine request, the mailbox of its client, and in the end its result.

    With `streams` every token becomes a delta in the mailbox; otherwise the mailbox only learns of the end. Samples are
    followed token by token if they stream or may end by their text. Ranked samples are followed at the end, when the
    engine has chosen them.
    """

    submit: Submit
    record: RequestRecord
    mailbox: Mailbox
    first_choice: int = 0  # the index of sample 0 among the choices of the response
    streams: bool = False
    interval: int = 1
    render: RenderLogprobs | None = None
    make_watch: WatchMaker | None = None  # what may end a sample by its text, besides its sampling parameters
    state: RequestState = "new"
    handle: int | None = None
    followers: list[Follower] = field(default_factory=list)
    finished: Finished | None = None
    has_started: bool = False  # it has produced a token; the link's thread sets it
    num_crashes: int = 0  # of engines for which it may be to blame
    restarts: list[LedgerEntry] = field(default_factory=list)  # for its ledger
    _follower: RequestFollower | None = None  # set when the engine has accepted it

    @property
    def n(self) -> int:
        return self.submit.sampling.n

    @property
    def num_sequences(self) -> int:
        """How many sequences it has in the engine."""
        return num_sequences(self.submit)

    @property
    def weight(self) -> int:
        """Its number of prompt tokens, which the queue is bounded in."""
        return len(self.submit.prompt_token_ids)

    @property
    def can_restart(self) -> bool:
        """Whether the next engine may compute it from the start: if nothing of the answer was delivered, and if it is
        not to blame for two crashes."""
        if len(self.restarts) >= MAX_RESTARTS or self.num_crashes >= MAX_CRASHES:
            return False
        return not self.mailbox.has_delivered and self.mailbox.failure is None

    def restart(self, now: float) -> None:
        """Make it as it was before it was submitted, with another id in the engine, so that a late message about the
        first attempt is not taken for one about the second."""
        self.submit = replace(self.submit, request_id=f"{self.submit.request_id}-again")
        self.state, self.handle, self.followers, self.finished = "queued", None, [], None
        self.has_started, self._follower = False, None
        self.record.submitted_at = self.record.first_token_at = None
        self.restarts.append(LedgerEntry("resubmitted", now, note="the engine ended while it had the request"))
        self.mailbox.discard(range(self.first_choice, self.first_choice + self.n))

    def follow(self, tokenizer: Tokenizer, handle: int) -> list[Follower]:
        """Make its followers. Called when the engine has accepted the request."""
        self.handle, self._follower = handle, self._make_follower(tokenizer)
        self.followers = [Follower(self, index, text) for index, text in self._follower.texts.items()]
        return self.followers

    def tokens_so_far(self, index: int) -> tuple[int, ...] | None:
        """The tokens of sample `index` so far; None if it is not followed."""
        return tuple(self.followers[index].token_ids) if index < len(self.followers) else None

    def finish(self, finished: Finished, tokenizer: Tokenizer) -> None:
        """Keep the engine's result, and put the last deltas of streamed samples into the mailbox."""
        if self.restarts:
            finished = finished._replace(ledger=(*self.restarts, *finished.ledger))
        self.finished = finished
        if self._follower is None:  # it ended before it was accepted
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
        """Follow ranked samples as if their tokens came now."""
        request.rank(finished)
        for end in finished.samples if request.texts else ():
            follower = Follower(self, end.index, request.texts[end.index])
            self.followers.append(follower)
            for token, entry in request.replay(end):
                follower.held.append(follower.push(token, entry))
            if self.streams:
                follower.release()

    def ends(self) -> list[tuple[SampleEnd, SampleText | None]]:
        """Every sample as its user sees it, in order, with its text if it was followed."""
        assert self.finished is not None
        assert self._follower is not None
        return self._follower.ends(self.finished)
