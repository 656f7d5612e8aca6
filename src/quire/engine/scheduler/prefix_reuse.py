"""What a sequence need not compute, because it is computed already, and what it publishes for those that come later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import NO_MATCH, Match, PrefixTree
from quire.engine.kvcache.tiers.base import NoTiers, TierHit, TierQuery, Tiers
from quire.engine.scheduler.accounts import num_computed
from quire.engine.scheduler.block_filler import BlockFiller
from quire.engine.scheduler.live_suffixes import LiveSuffixIndex
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefetch import FilePrefetch
from quire.engine.scheduler.prefix_misses import name_for, why_missed
from quire.engine.scheduler.publisher import Publisher
from quire.engine.scheduler.row_table import RowTable
from quire.engine.scheduler.unpublished_prefixes import UnpublishedPrefixes
from quire.types.step import Chunk

_NOTHING_LOADED: Counter[str] = Counter()


class Hit(NamedTuple):
    """What the device has of the tokens that a waiting group computes first, and the state of the tree it rests on."""

    match: Match
    changes: int  # of the match's node
    plan: int  # the plan for which generating sequences were asked for more


@dataclass(frozen=True, slots=True)
class SwapBlocks:
    """The blocks that a sequence would find again: so many of its tokens, by content hash, and where they are now."""

    num_tokens: int
    blocks: dict[bytes, int]


class PrefixReuse:
    """The one door to everything that is computed already: the prefix tree, the tiers behind it, sequences that are
    generating or computing a prompt now, and the sequence that a branch goes on from.

    `lookup` says what a waiting group would find, `attach` gives it that, `publish` lets others find what a sequence
    has computed. What comes from a tier is loaded, and only the next step may read it. `tree` is None where nothing
    is cached.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, tiers: Tiers, rows: RowTable, block_size: int) -> None:
        self._pool, self._tree, self._tiers, self._rows = pool, tree, tiers, rows
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._filler = BlockFiller(pool, tree, block_size)
        self._publisher = Publisher(pool, tree, tiers, rows, block_size)
        self._unpublished = UnpublishedPrefixes(block_size)
        self._has_tiers = not isinstance(tiers, NoTiers)
        self._loading: dict[Group, None] = {}  # groups for which the plan in work loads blocks
        self.prefetch: FilePrefetch | None = None  # where there is a disk tier
        self.shares_memory = True  # False: each sequence has memory of its own, and branches borrow nothing
        self._plan = 0  # plans made so far
        self.ready: list[Group] = []  # groups that were not ready and are now; the scheduler takes them
        self.num_queries = self.num_hits = 0  # prompt tokens that were looked for, and found
        self.tier_hits: Counter[str] = Counter()  # those that were found in a tier

    def reads_cache(self, group: Group) -> bool:
        """Whether a group may begin with cached blocks."""
        return self._tree is not None and group.reads_cache

    # ------------------------------------------------------------------------------------------------- looking up
    def lookup(self, group: Group) -> Match:
        """What the device has of the tokens that a waiting group's leader computes first; the last is always computed.

        Costs nothing while the tree has not changed where the last lookup ended.
        """
        tree, hit = self._tree, group.hit
        if tree is None or not group.reads_cache:
            return NO_MATCH
        return hit.match if hit is not None and self._is_valid(tree, group, hit) else self._look(tree, group)

    def _is_valid(self, tree: PrefixTree, group: Group, hit: Hit) -> bool:
        """Whether the tree still has what was found, and nothing more at the place where the lookup ended."""
        match = hit.match
        node, closest = match.node, match.closest
        if node is None:
            return not tree.has(group.request.cache_salt)
        if node.changes != hit.changes or node.is_detached or node.end < match.num_blocks:
            return False
        return closest is None or (not closest.is_detached and closest.end > match.num_blocks)

    def _look(self, tree: PrefixTree, group: Group) -> Match:
        match = self._match(tree, group.live[0], self._leader_limit(group))
        group.hit = Hit(match, 0 if match.node is None else match.node.changes, self._plan)
        return match

    def num_cached(self, group: Group) -> int:
        """How many of the tokens that a waiting group computes first are cached. It may miss what has been cached since
        the last lookup of less than a block, so that a queue can be ranked by it at little cost."""
        match = NO_MATCH if group.hit is None else group.hit.match
        node, count = match.node, match.num_blocks
        if node is None or node.is_detached or node.end != count:
            return self.lookup(group).num_tokens
        following = group.leader.tokens()[count * self._width : (count + 1) * self._width]
        if node.child(following) is not None or self._unpublished.has(node, following):
            return self.lookup(group).num_tokens
        return match.num_tokens

    def wait_reason(self, group: Group, now: float) -> str:
        """Why a group had better not be admitted now; "": it is ready. It is in `ready` when that is over."""
        tree = self._tree
        if tree is None or not group.reads_cache:
            return ""
        if self.prefetch is not None and self.prefetch.is_awaited(group, now):
            return "its blocks are read from disk"
        match = self.lookup(group)
        if not self._unpublished:
            return ""
        limit, tokens = self._leader_limit(group), group.leader.tokens()
        other = self._unpublished.find(match, tokens, limit)
        if other is None:
            return ""
        if self._has_more(other):
            match = self._look(tree, group)
            other = self._unpublished.find(match, tokens, limit)
        if other is None or other.group is group:
            return ""
        self._unpublished.wait(group, other, limit)
        return f"{name_for(group, other.group.request)} computes the same prefix"

    def _has_more(self, sequence: Sequence) -> bool:
        """Whether a sequence could publish blocks."""
        return sequence.num_readable // self._block_size > sequence.table.num_cached

    def _leader_limit(self, group: Group) -> int:
        return group.num_prompt - 1 + (len(group.live[0].outputs) if len(group.live) == 1 else 0)

    def _limits(self, group: Group) -> dict[Sequence, int]:
        """Which sequences are looked up when the group is admitted, and how many tokens of each: all its samples where
        each has generated something, else its leader."""
        if len(group.live) > 1 and all(sequence.outputs for sequence in group.live):
            return {sequence: sequence.target - 1 for sequence in group.live}
        return {group.leader: self._leader_limit(group)}

    def _match(self, tree: PrefixTree, sequence: Sequence, limit: int) -> Match:
        salt, tokens = sequence.group.request.cache_salt, sequence.tokens()
        match = tree.match(salt, tokens, limit)
        while match.num_tokens < limit and self._publish_at(match, tokens, limit):
            match = tree.match(salt, tokens, limit)
        return match

    def _publish_at(self, match: Match, tokens: bytes, limit: int) -> bool:
        """Publish the blocks of every running sequence that could extend a match; returns whether there were any."""
        if match.node is None or match.node.end != match.num_blocks:
            return False
        sequence = self._unpublished.find(match, tokens, limit)
        if sequence is None or not self._has_more(sequence):
            return self._publisher.publish_live(match, tokens)
        is_published = self._publisher.publish_running(sequence)
        self._unpublished.place(sequence)
        return is_published

    def _query(self, sequence: Sequence, limit: int) -> TierQuery:
        return TierQuery(self._tier_salt(sequence.group), sequence.tokens(), limit, sequence.swapped)

    def _tier_salt(self, group: Group) -> str:
        """The salt of what a group has in the tiers: its own alone, where it shares nothing."""
        request = group.request
        return request.cache_salt if self.reads_cache(group) else f"{request.request_id} of {request.cache_salt}"

    def find_files(self, group: Group) -> list[bytes]:
        """The files that hold more of the tokens that the leader computes first."""
        tree = self._tree
        if tree is None or not self.reads_cache(group):
            return []
        limit = self._leader_limit(group)
        return self._tiers.find_files(self._look(tree, group), self._query(group.leader, limit))

    # -------------------------------------------------------------------------------------------------- attaching
    def attach(self, builder: PlanBuilder, group: Group, tick: int, now: float) -> bool:
        """Begin a group's tables with what is computed already, and tell the workers of its rows: of its leader's, or
        of all its samples' where each finds its own prompt and more. Returns whether it waits a step for loads."""
        if len(group.live) == 1 and group.origin is None and not self._has_tiers:
            self._attach_one(builder, group, now)
            return False
        limits = self._limits(group)
        found = self._find(limits)
        if len(found) > 1:
            group.is_forked = all(hit.num_tokens >= group.num_prompt for _, hit in found.values())
            if not group.is_forked:
                limits = {group.leader: self._leader_limit(group)}
                found = self._find(limits)
        for sequence, (match, hit) in found.items():
            self._hold(sequence, match, hit, builder, tick)
        loaded: Counter[str] = Counter()
        waits = False
        self._filler.copy_partials(
            {sequence: match for sequence, (match, hit) in found.items() if not hit.slots}, builder
        )
        for sequence, (_, hit) in found.items():  # after all hold what they found: a load evicts nothing of another
            before = sequence.num_computed
            if hit.slots and before < hit.num_tokens:  # else it borrowed more from the sequence that it branches off
                loaded += self._filler.load(sequence, hit, builder)
                waits |= sequence.num_computed > before  # for its own loads, or for those of another group
        for sequence in found:
            builder.introduce(sequence)
        self._note(group, *found[group.leader], limits[group.leader], num_computed(group, tick), loaded, now)
        group.origin = group.hit = None
        if waits or any(sequence.swapped for sequence in group.live):
            self._loading[group] = None
        if self._tree is not None and not group.is_forked:
            self._unpublished.place(group.leader)
        return waits

    def _attach_one(self, builder: PlanBuilder, group: Group, now: float) -> None:
        """`attach` for the usual group: one sequence that finds nothing but what the device has."""
        sequence, tree, limit = group.live[0], self._tree, self._leader_limit(group)
        match = NO_MATCH
        if tree is not None and group.reads_cache:
            match = self.lookup(group)
            if group.hit is None or group.hit.plan != self._plan:
                match = self._look(tree, group)
        self._hold_blocks(sequence, match)
        if match.partial is not None:
            self._filler.copy_partials({sequence: match}, builder)
        builder.introduce(sequence)
        self._note(group, match, TierHit(0), limit, sequence.num_computed, _NOTHING_LOADED, now)
        group.hit = None
        if tree is not None:
            self._unpublished.place(sequence)

    def _find(self, limits: Mapping[Sequence, int]) -> dict[Sequence, tuple[Match, TierHit]]:
        """What the device has of the first tokens of each sequence, and what follows it in host memory: without a
        cache, only what the sequence swapped out itself."""
        tree = self._tree
        matches = {
            sequence: NO_MATCH
            if tree is None or not self.reads_cache(sequence.group)
            else self._match(tree, sequence, limit)
            for sequence, limit in limits.items()
        }
        found = {}
        for sequence, match in matches.items():  # after all were matched: what that publishes evicts nothing found
            limit = limits[sequence] if self.reads_cache(sequence.group) else min(limits[sequence], sequence.swapped)
            hit = TierHit(match.num_tokens)
            if limit > match.num_tokens:
                hit = self._tiers.find(match, self._query(sequence, limit))
            found[sequence] = match, hit
        return found

    def _hold(self, sequence: Sequence, match: Match, hit: TierHit, builder: PlanBuilder, tick: int) -> None:
        """Begin an empty table with what the device has, and with more of the sequence that it branches off. Slots that
        follow are lost to nobody from now on."""
        self._hold_blocks(sequence, match)
        table, origin = sequence.table, sequence.group.origin
        if origin is not None and self.shares_memory and origin.table.num_cached <= len(table.blocks):
            shared = self._num_shared(sequence.group, origin, builder, tick)
            if shared > max(hit.num_tokens, table.num_tokens):
                table.borrow(origin.table, shared)
        for slot in reversed(hit.slots):  # released in this order: the last block of a chain may be given away first
            self._tiers.hold(slot)
        sequence.num_computed = table.num_tokens

    def _hold_blocks(self, sequence: Sequence, match: Match) -> None:
        """Begin an empty table with the whole blocks that the device has."""
        tree, table = self._tree, sequence.table
        if tree is not None:
            salt = sequence.group.request.cache_salt
            node = tree.root(salt) if match.node is None else tree.node_at(match.node, match.num_blocks)
            table.hold(node)
            tree.used(node if match.partial is None or match.closest is None else match.closest)
        sequence.num_computed = sequence.num_readable = table.num_tokens

    def _num_shared(self, group: Group, origin: Sequence, builder: PlanBuilder, tick: int) -> int:
        """How many tokens a branch can take over from the sequence it branches off, if that still runs."""
        source = group.request.source
        if source is None or origin.row is None or origin.group in self._loading:
            return 0
        if group.request.sampling.prompt_logprobs is not None:
            return 0
        row, leader = origin.row, origin.group.leader
        if leader.row is not None and builder.introduces(row) and builder.start_of(row) is None:
            row = leader.row  # it was forked for this step, which may compute what it has
        start = builder.start_of(row)  # what this step computes, only later ones may read
        computed = origin.computed_at(tick) if start is None else start
        return min(source.num_tokens, computed, group.num_prompt - 1)

    def _note(
        self, group: Group, match: Match, hit: TierHit, limit: int, num_found: int, loaded: Counter[str], now: float
    ) -> None:
        """Write into the ledger what was found, and why no more."""
        if num_found:
            group.ledger.note("cached", now, num_found, _sources(num_found, loaded) if loaded else "")
        is_read = self.reads_cache(group)
        is_missed = is_read and num_found < limit and num_found == max(match.num_tokens, hit.num_tokens)
        if self._tree is not None and is_missed:
            group.ledger.note_miss(now, why_missed(self._tree, group, match, num_found, now))
        if group.num_cached is None:
            group.num_cached = num_found if num_found < group.num_prompt else group.num_prompt
            self.num_hits += group.num_cached
            self.num_queries += group.num_prompt if is_read else 0
            if loaded:
                self.tier_hits += loaded

    # ------------------------------------------------------------------------------------------------- publishing
    def publish_plan(self, chunks: Iterable[Chunk]) -> None:
        """The plan in work is made: later ones may read what it computes and loads."""
        if self._tree is not None:
            for chunk in chunks:
                self._note_computed(self._rows.sequence_at(chunk.row), chunk)
        for group in self._loading:
            if group.is_running:
                self.publish_group(group)
                for sequence in group.live:
                    if sequence.swapped:
                        sequence.swapped = 0
                        self._tiers.release_swapped(sequence)
        self._loading.clear()
        self._plan += 1

    def _note_computed(self, sequence: Sequence, chunk: Chunk) -> None:
        """The plan in work computes a chunk of a sequence. Groups that share blocks by forking, and engines that keep
        blocks in tiers, publish them at once; else they are published when somebody looks for them."""
        group = sequence.group
        sequence.num_readable = min(sequence.num_computed, sequence.num_tokens)
        if self._has_tiers or len(group.live) > 1 or group.search is not None:
            self.publish_group(group)
            self._unpublished.place(sequence)
        if chunk.sample_rows and group.search is None:
            for row in chunk.sample_rows:
                self._publisher.live.place(self._rows.sequence_at(row))
        if self._unpublished.is_awaited(sequence):
            is_whole = bool(chunk.sample_rows) or group.is_forked
            num_blocks = None if is_whole else sequence.num_readable // self._block_size
            self.ready += self._unpublished.wake(sequence, num_blocks)

    def publish(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """Let others find the full blocks whose tokens are known and computed by the steps planned so far.

        A sequence that is `leaving` frees its table next: it gives up copies of blocks that are cached already.
        """
        self._publisher.publish(sequence, leaving=leaving)

    def publish_group(self, group: Group, *, leaving: bool = False) -> None:
        """`publish` for all sequences of a group that the workers know: they may hold the same blocks."""
        for sequence in group.live:
            if sequence.is_introduced or leaving:
                self._publisher.publish(sequence, leaving=leaving, with_group=True)

    # ---------------------------------------------------------------------------------------------------- leaving
    def leave(self, sequence: Sequence) -> None:
        """A sequence loses its row: it generates and computes no more."""
        if self._tree is not None:
            self._publisher.live.discard(sequence)
            self.ready += self._unpublished.remove(sequence)

    def forget(self, group: Group) -> None:
        """A group waits no longer: it was admitted, or ended. Idempotent."""
        if self._tree is not None:
            self._unpublished.forget(group)
        if self.prefetch is not None:
            self.prefetch.forget(group)

    def swap_blocks(self, group: Group, builder: PlanBuilder) -> dict[Sequence, SwapBlocks]:
        """What the sequences of a preempted group would find again if it were in host memory."""
        found = {}
        for sequence, limit in self._limits(group).items():
            length = min(sequence.num_computed, limit)
            keys = self._tiers.keys(self._tier_salt(group), sequence.tokens(), length)
            blocks = zip(keys, map(builder.source_of, sequence.table.blocks), strict=False)
            found[sequence] = SwapBlocks(length, dict(blocks))
        return found

    def reset(self) -> int:
        """Forget all cached prefixes on the device; returns how many blocks that freed."""
        if self._tree is None:
            return 0
        freed = self._tree.clear()
        self._publisher.live = LiveSuffixIndex(self._block_size)
        self.ready += self._unpublished.clear()
        return freed

    def check(self) -> None:
        self._publisher.live.check()
        self._unpublished.check()
        if self._tree is not None:
            self._tree.check()


def _sources(num_found: int, loaded: Counter[str]) -> str:
    """How many of the tokens that were found came from where."""
    parts = {"device": max(num_found - loaded.total(), 0), **loaded}
    return ", ".join(f"{tier} {count}" for tier, count in parts.items() if count)
