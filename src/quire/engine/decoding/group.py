"""A live request in the engine: the Group, its Sequences with their states, and its Ledger."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from quire.config.vision import FEWEST_TOKENS
from quire.engine.decoding.beam import BeamSearch
from quire.engine.decoding.controller import StepController
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.kvcache.table import BlockTable
from quire.types.adapters import NO_ADAPTER
from quire.types.ledger import LedgerEntry, LedgerFields, LedgerKind, PrefixMiss, make_entries
from quire.types.output import Finished, FinishReason, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import Chunk, LogprobTable, TokenLogprobs

MAX_ENTRIES = 64  # entries of a ledger
_MERGE_FROM = 32  # from this number of entries on, consecutive chunks are merged into one
_NO_SCORE = float("-inf")
NOT_STREAMED = -1  # handle of samples that are ranked at their end, whose tokens are not streamed


class SequenceState(Enum):
    """The state of a sequence. It has a row in all states but WAITING.

    On admission it goes to PREFILL. Then it either runs ahead (STARTING, AHEAD, DRAINING) or is paced (DUE, AWAITING),
    and may change between the two at any token. Preemption takes it back to WAITING.
    """

    WAITING = auto()  # it has no row and no blocks; the blocks of `num_swapped` tokens may be in host memory
    PREFILL = auto()  # it computes known tokens: the prompt, or all tokens after a preemption
    STARTING = auto()  # a planned step samples its next token; it joins the AheadSet at the next tick
    AHEAD = auto()  # in the AheadSet: one token in each tick, which feeds the next step on the device
    DRAINING = auto()  # it has left the AheadSet, and waits for the results of its steps
    DUE = auto()  # paced: all its tokens are known, and its next step may be planned
    AWAITING = auto()  # paced: a planned step computes its next tokens; its next step is planned after their result


class Ticking(Protocol):
    """The part of an AheadSet that its sequences know."""

    tick: int

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence."""


class Sequence:
    """One sample of a request, or one beam: its tokens, its BlockTable and its state."""

    __slots__ = (
        "ahead",
        "base",
        "controller",
        "draft",
        "event",
        "group",
        "handle",
        "index",
        "is_introduced",
        "logprob_sum",
        "logprobs",
        "num_computed",
        "num_encoded",
        "num_readable",
        "num_swapped",
        "outputs",
        "row",
        "state",
        "synced_blocks",
        "synced_tokens",
        "table",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, handle: int, table: BlockTable, controller: StepController) -> None:
        self.group, self.index, self.handle, self.table, self.controller = group, index, handle, table, controller
        self.state = SequenceState.WAITING
        self.row: int | None = None
        self.outputs: list[int] = []  # generated tokens; while STARTING, AHEAD or DRAINING the row table has them
        self.num_computed = 0  # tokens whose keys and values a planned step writes; while AHEAD, see `num_planned`
        self.num_encoded = 0  # the first tokens, whose images the workers have encoded since they know the row
        self.num_readable = 0  # tokens whose keys and values later plans may read
        self.num_swapped = 0  # WAITING: tokens whose blocks were swapped to host memory
        self.ahead: Ticking | None = None  # STARTING, AHEAD: the AheadSet
        self.event = 0  # STARTING, AHEAD: the tick at which it joins the AheadSet, or must leave it
        self.base = 0  # AHEAD: computed tokens minus tick. The tick gives their number, so no step has to count them
        self.draft: tuple[int, ...] = ()  # AWAITING: the draft tokens that the planned step verifies
        self.is_introduced = False  # the workers know its row
        self.synced_tokens = 0  # the first tokens that the workers' row holds; the others must be sent
        self.synced_blocks: int | None = None  # the first blocks, which the workers know; None: they know all
        self.logprobs: list[TokenLogprobs] = []
        self.logprob_sum = 0.0  # over its tokens, if their logprobs are computed

    @property
    def num_tokens(self) -> int:
        """The number of known tokens, prompt included. Not valid while STARTING, AHEAD or DRAINING."""
        return self.group.num_prompt + len(self.outputs)

    @property
    def prefill_target(self) -> int:
        """How many tokens PREFILL computes: all known ones. With several beams all but the last one, which they compute
        together in one step when they are due."""
        return self.num_tokens - (self.group.search is not None and len(self.group.live) > 1)

    @property
    def num_planned(self) -> int:
        """The current number of computed tokens, valid while AHEAD too."""
        ahead = self.ahead
        return self.num_computed if self.state is not SequenceState.AHEAD or ahead is None else ahead.tick + self.base

    def tokens(self) -> bytes:
        """Return all known tokens as the int32 bytes that key cached blocks."""
        prompt = self.group.prompt
        return prompt + array("i", self.outputs).tobytes() if self.outputs else prompt

    def image_begun_at(self, num_tokens: int) -> int | None:
        """Return the start of an image of which the first `num_tokens` tokens contain too few tokens to identify it by
        its key, or not all that its tokens see. A prefix hit must end before such an image. None if there is none."""
        for image in self.group.request.images:
            if image.start < num_tokens < (image.end if self.group.has_whole_images else image.start + FEWEST_TOKENS):
                return image.start
        return None

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens `start` to `stop - 1`."""
        prompt, count = self.group.request.prompt_token_ids, self.group.num_prompt
        if stop <= count:
            return tuple(prompt[start:stop])
        return (*prompt[start:], *self.outputs[max(start - count, 0) : stop - count])


class Ledger:
    """The events of one request, at most MAX_ENTRIES. The last entry is always the end; its note says how many entries
    were left out."""

    __slots__ = ("_entries", "_left_out")

    def __init__(self) -> None:
        self._entries: list[LedgerFields] = []
        self._left_out = 0

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries so far."""
        return make_entries(self._entries)

    def note(
        self, kind: LedgerKind, at: float, amount: int = 0, note: str = "", miss: PrefixMiss | None = None
    ) -> None:
        """Add an entry. Many consecutive chunks become one entry. `miss`: why no more of the prompt was found in the
        prefix cache."""
        entries = self._entries
        if len(entries) < _MERGE_FROM:
            entries.append((kind, at, amount, note, miss))
        elif kind == "chunk" and entries[-1][0] == "chunk":
            _, began, before, _, _ = entries[-1]
            entries[-1] = (kind, began, before + amount, "several chunks", None)
        elif len(entries) < MAX_ENTRIES - 1:
            entries.append((kind, at, amount, note, miss))
        else:
            self._left_out += 1

    def finish(self, at: float, amount: int, note: str) -> tuple[LedgerFields, ...]:
        """Return the fields of all entries, followed by the end."""
        if self._left_out:
            note = f"{note}; {self._left_out} entries were left out"
        return (*self._entries, ("finished", at, amount, note, None))


NO_VERSION = (0, 0)  # of a pool without windows and states


class Hit(NamedTuple):
    """The last lookup for a waiting group: the match on the device, and the state of the tree at that time."""

    match: Match  # the prefix after which the request can continue
    changes: int  # of the node of `whole`, at the time of the lookup
    plan: int  # the number of the plan for which it was looked up
    whole: Match  # as long or longer: includes cached blocks without their window blocks or states
    version: tuple[int, int]  # of the pool
    limit: int  # how many tokens were looked up

    def is_held(self, tree: PrefixTree, salt: str) -> bool:
        """Whether the tree still holds the blocks that the lookup found, and nothing was added where they ended."""
        node, num_blocks, _, _, closest = self.whole
        if node is None:
            return not tree.has(salt)
        if node.changes != self.changes or node.is_detached or node.end < num_blocks:
            return False
        return closest is None or (not closest.is_detached and closest.end > num_blocks)


@dataclass(slots=True, eq=False)
class Group:
    """A live request and its sequences, which are admitted, preempted and failed together."""

    request: Submit
    ordinal: int  # number in the order of arrival
    limit: int  # the number of tokens a sequence may reach, prompt included
    seed: int
    handle: int  # handle of its first sample
    sampling: SamplingParams  # for the workers: the request's, with logprobs added if samples are ranked
    search: BeamSearch | None = None  # the beam search, whose beams the sequences are
    origin: Sequence | None = None  # until it is admitted: the sequence of another group that it branches from
    live: list[Sequence] = field(default_factory=list)
    ended: list[SampleEnd] = field(default_factory=list)
    is_forked: bool = False  # the prompt was computed and forked: its sequences have separate block tables
    is_running: bool = False
    num_spare: int = 0  # rows that are reserved for further beams
    num_preemptions: int = 0
    prompt_logprobs: list[LogprobTable] = field(default_factory=list)  # in the order of their steps
    pooled: bytes = b""  # float32 results of a pooling request
    ledger: Ledger = field(default_factory=Ledger)
    arrival: float = 0.0  # when it was submitted, on the engine's clock
    queued_step: int = 0  # number of plans made when it last joined the queue
    wait_reason: str = ""  # why it was last not admitted
    has_token: bool = False  # a generated token has come back
    num_cached: int | None = None  # prompt tokens that its first admission found in the prefix cache
    hit: Hit | None = None  # the last prefix lookup, while it waits
    slot: int = NO_ADAPTER  # adapter slot, while it runs
    micro_batch: int = 0  # its micro-batch, while it runs
    slot_wait_since: float | None = None  # when it began to wait for an adapter slot
    # Its chunks until the first token comes from the adapter slot: their blocks are not shared before. None: they are.
    held_chunks: list[tuple[Sequence, Chunk]] | None = None
    has_whole_images: bool = False  # a prefix hit ends inside no image of its prompt, because tokens see all of it
    num_known: int = 0  # the first tokens, which other requests had too: the state after them is kept
    num_prompt: int = field(init=False)
    num_reusable: int = field(init=False)  # the first tokens, which may come from the prefix cache
    prompt_limit: int = field(init=False)  # the same within the prompt, whose last token is always computed
    reads_cache: bool = field(init=False)  # False: it needs a result of every position
    is_ranked: bool = field(init=False)  # its samples are ranked at their end, and not streamed (best_of, beam search)
    cache_root: str = field(init=False)  # of its request
    # Its prompt as int32 bytes, with image tokens replaced by their keys: slices are cache keys, compared by memcmp.
    prompt: bytes = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = len(request.prompt_token_ids)
        pooling, sampling = request.pooling, request.sampling
        self.num_reusable = self.limit
        if pooling is not None and pooling.kind != "last":
            self.num_reusable = 0
        elif sampling.prompt_logprobs is not None:  # a token's logprob comes from the position before it
            self.num_reusable = max((sampling.prompt_logprobs_start or 0) - 1, 0)
        self.prompt_limit = min(self.num_prompt - 1, self.num_reusable)
        self.reads_cache = self.num_reusable > 0
        self.cache_root = request.cache_root if request.cache_salt or request.adapter_digest else ""
        best_of = sampling.best_of
        self.is_ranked = self.search is not None or (best_of is not None and best_of > sampling.n)
        self.prompt = request.key_tokens if request.images else request.prompt_token_ids.tobytes()

    @property
    def leader(self) -> Sequence:
        """The first live sequence, which computes the prompt for all."""
        return self.live[0]

    @property
    def num_candidates(self) -> int:
        """How many of the most likely next tokens the workers report per sample."""
        return 0 if self.search is None else self.search.num_candidates

    @property
    def num_beams_to_come(self) -> int:
        """How many beams the search may still add."""
        return 0 if self.search is None else self.search.width - len(self.live)

    def end(self, sequence: Sequence, outputs: list[int], reason: FinishReason, stop_reason: int | str | None) -> None:
        """Move a sequence from the live ones to the ended samples."""
        self.live.remove(sequence)
        total = sequence.logprob_sum if self.sampling.logprobs is not None else None
        logprobs = tuple(sequence.logprobs)
        fields = (sequence.index, tuple(outputs), reason, stop_reason, logprobs, total, None)
        self.ended.append(tuple.__new__(SampleEnd, fields))  # SampleEnd() takes longer

    def finish_message(self, at: float, error: str | None = None, invalid_field: str = "") -> Finished:
        """Return the terminal message of the request, made at time `at`. `error` and `invalid_field` are those of its
        Fault."""
        sampling, samples = self.request.sampling, tuple(self.ended)
        entries = None
        if sampling.prompt_logprobs is not None:
            start = min(max(sampling.prompt_logprobs_start or 0, 1), self.num_prompt)
            entries = join_tables(self.prompt_logprobs, start, self.num_prompt)
        if len(samples) == 1 and not self.is_ranked:
            num_outputs = len(samples[0].token_ids)
            reason: str = samples[0].finish_reason
        else:
            samples = self._in_order(samples)
            num_outputs = sum([len(sample.token_ids) for sample in samples])
            reason = ", ".join(dict.fromkeys([sample.finish_reason for sample in samples]))
        events = self.ledger.finish(at, num_outputs, reason if error is None else "error")
        fields = (
            self.request.request_id,
            samples,
            entries,
            error,
            self.num_cached or 0,
            self.num_preemptions,
            events,
            invalid_field,
            self.pooled,
        )
        return tuple.__new__(Finished, fields)  # likewise

    def _in_order(self, samples: tuple[SampleEnd, ...]) -> tuple[SampleEnd, ...]:
        """Return the samples by their indices. Samples of best_of are ranked, and only the best are returned."""
        samples, sampling = tuple(sorted(samples, key=lambda sample: sample.index)), self.request.sampling
        if self.search is not None or not self.is_ranked:
            return samples
        if self.sampling is not sampling:  # logprobs were only for ranking
            samples = tuple(sample._replace(logprobs=()) for sample in samples)
        return rank(samples, sampling.n, sampling.rank_by)


def join_tables(tables: list[LogprobTable], start: int, end: int) -> LogprobTable:
    """Join tables into one for the prompt tokens `start` to `end` (exclusive). Tokens that were computed again after a
    preemption count once."""
    width, count = max((table.width for table in tables), default=1), max(end - start, 0)
    ids = np.zeros((count, width), dtype=np.int32)
    values = np.zeros((count, width), dtype=np.float32)
    ranks = np.zeros(count, dtype=np.int32)
    for table in tables:
        places = slice(table.start - start, table.start - start + len(table.ranks))
        ids[places] = table.token_ids.reshape(-1, width)
        values[places] = table.logprobs.reshape(-1, width)
        ranks[places] = table.ranks
    return LogprobTable(start, ids.reshape(-1), values.reshape(-1), ranks)


def rank(samples: Iterable[SampleEnd], n: int, rank_by: str) -> tuple[SampleEnd, ...]:
    """Return the n best samples of best_of by the mean or the sum of their logprobs, best first, with new indices.

    Aborted and failed samples come last; equal ones keep their order.
    """
    scored = [sample._replace(score=_score(sample, rank_by)) for sample in samples]
    scored.sort(key=lambda sample: (sample.finish_reason in ("abort", "error"), -_order(sample)))
    return tuple(sample._replace(index=place) for place, sample in enumerate(scored[:n]))


def _score(sample: SampleEnd, rank_by: str) -> float | None:
    total, count = sample.cumulative_logprob, len(sample.token_ids)
    if total is None or count == 0:
        return None
    return total / count if rank_by == "mean" else total


def _order(sample: SampleEnd) -> float:
    return _NO_SCORE if sample.score is None else sample.score
