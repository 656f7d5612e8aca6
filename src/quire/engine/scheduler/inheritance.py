"""What a sequence need not compute, because another one has, and what it leaves to those that come later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefixes import NO_MATCH, Match, Prefixes
from quire.engine.kvcache.tiers.base import Found, Tiers, Wanted
from quire.engine.scheduler.accounts import num_computed
from quire.engine.scheduler.draft import PlanDraft
from quire.engine.scheduler.rows import RowBook
from quire.engine.scheduler.speakers import Speakers
from quire.engine.scheduler.under_way import is_under_way
from quire.types.step import Chunk
from quire.types.transfer import SlotMove

_NOTHING = Found(NO_MATCH, 0)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a sequence would find again: so many of its tokens, in blocks by name, and where their content is now."""

    num_tokens: int
    blocks: dict[bytes, int]


class Inheritance:
    """Finds what is computed of a sequence's tokens already: in the prefix cache, in the tiers behind it, or where it
    branches off. What comes from a tier is loaded, and only the next step may read it."""

    def __init__(
        self,
        pool: BlockPool,
        prefixes: Prefixes,
        tiers: Tiers,
        rows: RowBook,
        block_size: int,
        *,
        has_cache: bool,
        has_branches: bool = True,
    ) -> None:
        self._pool, self._prefixes, self._tiers, self._rows = pool, prefixes, tiers, rows
        self._block_size, self.speakers = block_size, Speakers(prefixes, rows, block_size)
        self._has_cache, self._has_branches = has_cache, has_branches
        self._arriving: dict[Group, None] = {}  # groups for which the plan in work loads blocks
        self.num_queries = self.num_hits = 0  # prompt tokens that were looked for, and found
        self.tier_hits: Counter[str] = Counter()  # those that were found in a tier

    def reads_cache(self, group: Group) -> bool:
        """Where prompt logprobs are asked for, every position must be computed."""
        return self._has_cache and group.request.sampling.prompt_logprobs is None

    # ------------------------------------------------------------------------------------------------- looking
    def find_first(self, group: Group) -> Match:
        """What the device has of the tokens that the leader computes first; the last is always computed anew."""
        return self._match(group.leader, self._leader_limit(group))

    def find_files(self, group: Group) -> list[bytes]:
        """The files that hold more of the tokens that the leader computes first."""
        if not self.reads_cache(group):
            return []
        leader, limit = group.leader, self._leader_limit(group)
        return self._tiers.find_files(self._match(leader, limit), self._wanted(leader, limit))

    def delay(self, group: Group, computing: Iterable[Group]) -> str:
        """What a waiting group had better wait for: that one of these computes what it would compute as well."""
        if not self.reads_cache(group):
            return ""
        num_cached = partial(self._num_first, group)
        return "prefix under way" if is_under_way(group, computing, num_cached, self._block_size) else ""

    def _num_first(self, group: Group) -> int:
        return self.find_first(group).num_tokens

    def limits(self, group: Group) -> dict[Sequence, int]:
        """Who is looked for when the group is let in, and how many of its tokens: all its samples where each has
        begun to speak, else its leader."""
        if len(group.live) > 1 and all(sequence.outputs for sequence in group.live):
            return {sequence: sequence.target - 1 for sequence in group.live}
        return {group.leader: self._leader_limit(group)}

    def _leader_limit(self, group: Group) -> int:
        return (group.leader.num_known if len(group.live) == 1 else group.num_prompt) - 1

    def _match(self, sequence: Sequence, limit: int) -> Match:
        if not self.reads_cache(sequence.group):
            return NO_MATCH
        salt = sequence.group.request.cache_salt
        match = self._prefixes.find(salt, sequence.known, limit)
        while match.num_tokens < limit and self.speakers.leave_at(match, sequence):
            match = self._prefixes.find(salt, sequence.known, limit)
        return match

    def _find(self, limits: Mapping[Sequence, int]) -> dict[Sequence, Found]:
        """What there is of the first tokens of each; without a cache, only what it parked itself."""
        matches = {sequence: self._match(sequence, limit) for sequence, limit in limits.items()}
        found = {}
        for sequence, match in matches.items():  # after all were matched: what that saves drives out nothing found
            limit = limits[sequence] if self.reads_cache(sequence.group) else min(limits[sequence], sequence.parked)
            found[sequence] = self._tiers.find(match, self._wanted(sequence, limit)) if limit > 0 else _NOTHING
        return found

    def _wanted(self, sequence: Sequence, limit: int) -> Wanted:
        return Wanted(self._salt(sequence.group), sequence.known, limit, sequence.parked)

    def _salt(self, group: Group) -> str:
        """Of what a group has in the tiers: only its own, where it shares nothing."""
        request = group.request
        return request.cache_salt if self.reads_cache(group) else f"{request.request_id} of {request.cache_salt}"

    # -------------------------------------------------------------------------------------------------- taking
    def introduce(self, draft: PlanDraft, group: Group, tick: int, now: float) -> bool:
        """Tell the workers of a group's leader, or of all its samples where each finds its own prompt and more.

        Returns whether it must wait a step for what is loaded.
        """
        limits = self.limits(group)
        found = self._find(limits)
        if len(found) > 1:
            group.forked = all(each.num_tokens >= group.num_prompt for each in found.values())
            if not group.forked:
                limits = {group.leader: self._leader_limit(group)}
                found = self._find(limits)
        coming = [sequence for sequence, each in found.items() if self._take(sequence, each, draft, tick)]
        self._drop_tails(limits)
        loaded: Counter[str] = Counter()
        for sequence in coming:  # after all were taken: what is loaded for one drives out nothing of another
            loaded += self._load(sequence, found[sequence], draft)
        for sequence in found:
            draft.add_row(sequence)
        group.origin = None
        if coming or any(sequence.parked for sequence in group.live):
            self._arriving[group] = None
        self._note(group, num_computed(group, tick), loaded, now)
        return bool(coming)

    def _note(self, group: Group, num_found: int, loaded: Counter[str], now: float) -> None:
        if num_found:
            parts = {"device": max(num_found - loaded.total(), 0), **loaded} if loaded else {}
            note = ", ".join(f"{tier} {count}" for tier, count in parts.items() if count)
            group.ledger.note("cached", now, num_found, note)
        if group.num_cached is None:
            group.num_cached = min(num_found, group.num_prompt)
            self.num_hits += group.num_cached
            self.num_queries += group.num_prompt if self.reads_cache(group) else 0
            self.tier_hits += loaded

    def _take(self, sequence: Sequence, found: Found, draft: PlanDraft, tick: int) -> bool:
        """An empty table begins with what the device has, or with more of the sequence that it branches off.

        Returns whether there is something to load after it, which is lost to nobody from now on.
        """
        origin = sequence.group.origin
        shared = 0 if origin is None else self._num_shared(sequence.group, origin, draft, tick)
        if origin is not None and shared > found.num_tokens:
            sequence.table, sequence.computed = origin.table.fork(shared), shared
            return False
        self._prefixes.adopt(sequence.table, found.match)
        sequence.computed = found.match.num_tokens
        for slot in reversed(found.slots):  # let go of in this order: who leads to others goes after them
            self._tiers.hold(slot)
        return bool(found.slots)

    def _drop_tails(self, limits: Mapping[Sequence, int]) -> None:
        """A block that is found in part is held beside the copy of it: where there is no room for both and for all
        that is to be computed, its tokens are computed."""
        size = self._block_size
        tails = [sequence for sequence in limits if sequence.table.num_tokens % size]
        if not tails:
            return
        missing = sum(-(-(limit + 1) // size) - each.table.num_tokens // size for each, limit in limits.items())
        if missing > self._pool.num_free:
            for sequence in tails:
                sequence.computed -= sequence.table.num_tokens % size
                sequence.table.truncate(sequence.computed)

    def _load(self, sequence: Sequence, found: Found, draft: PlanDraft) -> Counter[str]:
        """Blocks for what was found in slots, as far as there are some; returns how many tokens came from where."""
        blocks: list[int] = []
        loaded: Counter[str] = Counter()
        for slot in found.slots:
            assert slot.name is not None
            length = min(self._block_size, found.num_tokens - sequence.computed)
            if (block := draft.loading(slot.name)) is not None:
                self._pool.share(block)
            elif (block := self._fresh_block(draft)) is not None:
                draft.load(slot.name, SlotMove(block, slot.number))
                loaded[slot.read()] += length
            else:
                break
            blocks.append(block)
            sequence.computed += length
        sequence.table.extend(blocks, sequence.computed)
        return loaded

    def _fresh_block(self, draft: PlanDraft) -> int | None:
        """One that the plan in work copies nothing from: what is loaded may be there before that is done."""
        passed: list[int] = []
        fresh: int | None = None
        while fresh is None and self._pool.num_free:
            block = self._pool.take()
            if draft.copies_from(block):
                passed.append(block)
            else:
                fresh = block
        for block in passed:
            self._pool.release(block)
        return fresh

    def settle(self, chunks: Iterable[Chunk]) -> None:
        """The plan in work is made: later ones may read what it computes and loads, and need not keep what was parked
        for it."""
        for chunk in chunks:
            self.leave(self._rows.seated(chunk.row))
            for row in chunk.sample_rows:
                sequence = self._rows.seated(row)
                if row != chunk.row:
                    self.leave(sequence)
                if sequence.group.search is None:
                    self.speakers.place(sequence)
        for group in self._arriving:
            if group.running:
                for sequence in group.live:
                    if sequence.introduced:
                        self.leave(sequence)
                    if sequence.parked:
                        sequence.parked = 0
                        self._tiers.unpark(sequence)
        self._arriving.clear()

    # ------------------------------------------------------------------------------------------------- leaving
    def leave(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """Let others find the blocks whose tokens are known and computed by the steps planned so far."""
        num_tokens = min(sequence.computed, sequence.num_known)
        salt = sequence.group.request.cache_salt
        self._prefixes.keep(sequence.table, salt, sequence.known, num_tokens, leaving=leaving)

    def parcels(self, group: Group, draft: PlanDraft) -> dict[Sequence, Parcel]:
        """What those of a group that leave their blocks would find again if they were in host memory."""
        found = {}
        for sequence, limit in self.limits(group).items():
            length = min(sequence.computed, limit)
            names = self._tiers.names(self._salt(group), sequence.known, length)
            blocks = zip(names, map(draft.source_of, sequence.table.blocks), strict=False)
            found[sequence] = Parcel(length, dict(blocks))
        return found

    def _num_shared(self, group: Group, origin: Sequence, draft: PlanDraft, tick: int) -> int:
        """How many tokens a branch can take over from the sequence it branches off, if that still runs."""
        source = group.request.source
        if source is None or origin.row is None or not self._has_branches:
            return 0
        if group.request.sampling.prompt_logprobs is not None or origin.group in self._arriving:
            return 0
        start = draft.start_of(origin.row)  # what this step computes, only later ones may read
        computed = origin.computed_at(tick) if start is None else start
        return min(source.num_tokens, computed, group.num_prompt - 1)
