"""Prefix reuse: looks up what is already computed for a waiting group (prefix tree, host and disk tiers, running
sequences), attaches it on admission, and publishes computed blocks for later requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.engine.decoding.group import NO_VERSION, Group, Hit, Sequence
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import NO_MATCH, Match, PrefixTree
from quire.engine.kvcache.run_history import name_for, sources_of, why_missed
from quire.engine.kvcache.tiers.base import NoTiers, RemoteLookup, SwapBlocks, TierHit, TierQuery, Tiers
from quire.engine.scheduler.accounts import num_computed
from quire.engine.scheduler.block_filler import make_filler
from quire.engine.scheduler.kept_hits import cut_again_for, cut_for, outside_images, tokens_outside_images
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefetch import FilePrefetch
from quire.engine.scheduler.publishing import LiveSuffixIndex, Publisher
from quire.engine.scheduler.row_table import RowTable
from quire.types.step import Chunk

_NOTHING_LOADED: Counter[str] = Counter()
_make = tuple.__new__  # with all fields of a NamedTuple; takes a third of the time of its own constructor


class PrefixReuse:
    """Prefix caching: finds and shares tokens that are computed already, in the prefix tree, in the tiers behind it, in
    running sequences, and in the sequence that a branch continues.

    `lookup` returns the prefix cache hit of a waiting group, `attach` gives the group those blocks on admission, and
    `publish_group` puts the blocks of sequences into the tree for others. Blocks of a tier are loaded; only the next
    step may read them. `tree` is None if the prefix cache is off.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, tiers: Tiers, rows: RowTable, block_size: int) -> None:
        self._pool, self._tree, self._tiers, self._rows = pool, tree, tiers, rows
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._cut = cut_for if isinstance(pool, GroupedPool) else None
        self._filler = make_filler(pool, tree, block_size)
        self._publisher = Publisher(pool, tree, tiers, rows, block_size)
        self._in_progress, self.publish_last = self._publisher.in_progress, self._publisher.publish_last
        self._has_tiers = not isinstance(tiers, NoTiers)
        self._loading: dict[Group, None] = {}  # groups for which the current plan loads blocks
        self.prefetch: FilePrefetch | None = None  # None without a disk tier and without other engines
        self.shares_memory = True  # False: sequences reserve separate memory, so branches share no blocks
        self._plan = 0  # plans made so far
        self.ready: list[Group] = []  # deferred groups that are ready now; the scheduler resumes them
        self.num_queries = self.num_hits = 0  # prompt tokens that were looked up, and found
        self.tier_hits: Counter[str] = Counter()  # prompt tokens that were found in a tier

    def reads_cache(self, group: Group) -> bool:
        """Whether a group may use cached blocks."""
        return self._tree is not None and group.reads_cache

    # ------------------------------------------------------------------------------------------------- looking up
    def lookup(self, group: Group) -> Match:
        """Return the prefix hit on the device for a waiting group's leader. The last token is always computed.

        Returns the match of the last lookup if the tree has not changed where that match ended, cut back where side
        blocks have changed since.
        """
        tree, hit = self._tree, group.hit
        if tree is None or not group.reads_cache:
            return NO_MATCH
        if hit is None or not hit.is_held(tree, group.cache_root):
            return self._look(tree, group).match
        if self._cut is not None and hit.version != self._pool.version:
            hit = group.hit = hit._replace(match=cut_again_for(tree, hit, group.live[0]), version=self._pool.version)
        return hit.match

    def _look(self, tree: PrefixTree, group: Group) -> Hit:
        leader = group.live[0]
        limit = self._leader_limit(group) if leader.outputs else group.prompt_limit
        match = whole = self._match(tree, leader, limit)
        version = NO_VERSION
        if self._cut is not None:
            match, version = self._cut(tree, whole, leader), self._pool.version
        node, num_blocks, _, _, _ = whole
        changes = 0 if node is None else node.changes
        group.hit = hit = _make(Hit, (match, changes, self._plan, whole, version, limit))
        group.num_known = num_blocks * self._block_size
        return hit

    def num_cached(self, group: Group) -> int:
        """Return how many of a waiting group's first tokens are cached. It may miss less than a block that was cached
        since the last lookup, so that policies can rank a queue by it at low cost."""
        match = NO_MATCH if group.hit is None else group.hit.match
        node, count = match.node, match.num_blocks
        if group.hit is not None and count < group.hit.whole.num_blocks:
            return match.num_tokens  # it was cut back: the side blocks after it are probably still missing
        if node is None or node.is_detached or node.end != count:
            return self.lookup(group).num_tokens
        following = group.leader.tokens()[count * self._width : (count + 1) * self._width]
        if node.child(following) is not None or self._in_progress.has(node, following):
            return self.lookup(group).num_tokens
        return match.num_tokens

    def wait_if_pending(self, group: Group, now: float) -> str:
        """Make a group wait if another sequence computes its prefix (an identical prompt, or one with the same
        beginning), or its files are being read. Returns why; "" if it may be admitted. `ready` names it later."""
        tree = self._tree
        if tree is None or not group.reads_cache:
            return ""
        if self.prefetch is not None and self.prefetch.awaits_files(group, now):
            return self.prefetch.reason
        before = group.hit
        self.lookup(group)
        is_made_now = group.hit is not before and self._cut is None and not group.request.images
        if is_made_now and self._publisher.next_owner is None:
            return ""
        if not self._in_progress or group.hit is None:
            return ""
        limit, tokens = self._leader_limit(group), group.leader.tokens()
        other = self._in_progress.find(group.hit.whole, tokens, limit)
        if other is not None and self._publisher.has_more(other):
            self._look(tree, group)
            other = self._in_progress.find(group.hit.whole, tokens, limit)
        if other is None or other.group is group or self._publisher.has_more(other):
            return ""  # `other` cannot publish what it computed, because others hold its blocks
        self._in_progress.wait(group, other, limit)
        return f"{name_for(group.request, other.group.request)} computes the same prefix"

    def _leader_limit(self, group: Group) -> int:
        outputs = group.live[0].outputs
        if not outputs or len(group.live) > 1:
            return group.prompt_limit
        return min(group.num_prompt - 1 + len(outputs), group.num_reusable)

    def _limits(self, group: Group) -> dict[Sequence, int]:
        """Return which sequences are looked up when the group is admitted, and how many tokens of each at most: all
        samples if each has generated tokens (the group was preempted), otherwise the leader."""
        if len(group.live) > 1 and all(sequence.outputs for sequence in group.live):
            return {sequence: min(sequence.prefill_target - 1, group.num_reusable) for sequence in group.live}
        return {group.leader: self._leader_limit(group)}

    def _match(self, tree: PrefixTree, sequence: Sequence, limit: int) -> Match:
        publisher, group = self._publisher, sequence.group
        salt, tokens = group.cache_root, sequence.tokens() if sequence.outputs else group.prompt
        match, publisher.next_owner = tree.match(salt, tokens, limit), None
        while match.num_tokens < limit and publisher.publish_at(match, tokens, limit):
            match = tree.match(salt, tokens, limit)
        return outside_images(sequence, match, tree.match, salt, tokens) if group.request.images else match

    def _query(self, sequence: Sequence, limit: int) -> TierQuery:
        return TierQuery(self._tier_salt(sequence.group), sequence.tokens(), limit, sequence.num_swapped)

    def _tier_salt(self, group: Group) -> str:
        """Return the salt of a group's blocks in the tiers. A group that does not read the cache gets a unique one."""
        request = group.request
        return request.cache_root if self.reads_cache(group) else f"{request.request_id} of {request.cache_root}"

    def find_files(self, group: Group, num_blocks: int | None = None) -> list[bytes]:
        """Return the files that extend the leader's prefix hit, at most `num_blocks` blocks beyond it."""
        tree = self._tree
        if tree is None or not self.reads_cache(group):
            return []
        match, limit = self._look(tree, group).match, self._leader_limit(group)
        if num_blocks is not None:
            limit = min(limit, (match.num_blocks + num_blocks) * self._block_size)
        return self._tiers.find_files(match, self._query(group.leader, limit))

    def ask(self, group: Group) -> RemoteLookup | None:
        """Ask other engines for the blocks of the leader's prefix that they have; None if nothing is asked."""
        if self._tree is None or not self.reads_cache(group):
            return None
        query = self._query(group.leader, self._leader_limit(group))
        return self._tiers.ask(self._look(self._tree, group).match, query, awaits=group.request.prefilled)

    # -------------------------------------------------------------------------------------------------- attaching
    def attach(self, builder: PlanBuilder, group: Group, now: float) -> bool:
        """Attach the prefix cache hit to a group being admitted: fill its tables, and introduce its rows to the workers
        (the leader's, or those of all samples if each finds at least the prompt). Returns whether the group must wait a
        step for loads from a tier."""
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
            self._fill_table(sequence, match, hit, builder)
        loaded, waits = Counter[str](), False
        partials = {sequence: match for sequence, (match, hit) in found.items() if not hit.has_loads}
        self._filler.copy_partials(partials, builder)
        for sequence, (_, hit) in found.items():  # after all blocks are held: a load must not evict another's hit
            before = sequence.num_computed
            if hit.has_loads and before < hit.num_tokens:  # otherwise it borrowed more from its branch origin
                loaded += self._filler.load(sequence, hit, builder)
                waits |= sequence.num_computed > before  # its own loads, or loads of another group in this plan
        for sequence, (match, _) in found.items():
            self._tiers.on_hit(match)
            builder.introduce(sequence)
        match, hit = found[group.leader]
        num_cached, limit = max(match.num_tokens, hit.num_tokens), limits[group.leader]
        self._note(group, match, num_cached, limit, num_computed(group), loaded, now)
        group.origin = group.hit = None
        if waits or any(sequence.num_swapped for sequence in group.live):
            self._loading[group] = None
        if self._tree is not None and not group.is_forked:
            self._in_progress.enter(group.leader)
        return waits

    def _attach_one(self, builder: PlanBuilder, group: Group, now: float) -> None:
        """`attach` for a group of one sequence, without tiers and branches."""
        sequence, tree, match, limit = group.live[0], self._tree, NO_MATCH, 0
        if tree is not None and group.reads_cache:
            hit = group.hit  # of this plan, as usual: the tree still holds what `wait_if_pending` has just looked up
            if hit is None or hit.plan != self._plan:
                hit = self._look(tree, group)
            match, _, _, _, _, limit = hit
        self._fill_from_tree(sequence, match)
        _, _, num_tokens, partial, _ = match
        if partial is not None:
            self._filler.copy_partials({sequence: match}, builder)
        builder.introduce(sequence)
        self._note(group, match, num_tokens, limit, sequence.num_computed, _NOTHING_LOADED, now)
        group.hit = None
        if tree is not None:
            self._in_progress.enter(sequence)

    def _find(self, limits: Mapping[Sequence, int]) -> dict[Sequence, tuple[Match, TierHit]]:
        """Return for each sequence the match on the device and the blocks in host memory that follow it. Without a
        prefix cache, these are only the blocks that the sequence swapped out."""
        tree = self._tree
        matches = {
            sequence: NO_MATCH
            if tree is None or not self.reads_cache(sequence.group)
            else self._match(tree, sequence, limit)
            for sequence, limit in limits.items()
        }
        if self._cut is not None and tree is not None:
            matches = {sequence: self._cut(tree, match, sequence) for sequence, match in matches.items()}
        found = {}
        for sequence, match in matches.items():  # after all matches: publishing for them may change the tiers
            limit, hit = limits[sequence], TierHit(match.num_tokens)
            limit = limit if self.reads_cache(sequence.group) else min(limit, sequence.num_swapped)
            if limit > match.num_tokens:
                hit = self._tiers.find(match, self._query(sequence, limit))
                while (inside := sequence.image_begun_at(hit.num_tokens)) is not None:
                    hit = self._tiers.find(match, self._query(sequence, max(inside, match.num_tokens)))
            found[sequence] = match, hit
        return found

    def _fill_table(self, sequence: Sequence, match: Match, hit: TierHit, builder: PlanBuilder) -> None:
        """Fill an empty table with the match on the device, and with blocks of the sequence from which it branches.
        Hold the host slots that follow, so that they are not evicted while the plan is made."""
        self._fill_from_tree(sequence, match)
        table, origin = sequence.table, sequence.group.origin
        if origin is not None and self.shares_memory and origin.table.num_cached <= len(table.blocks):
            blocks, resumable = origin.table.blocks, self._pool.resumable_tokens
            most = resumable(blocks, self._num_shared(sequence.group, origin, builder))
            shared = tokens_outside_images(sequence, most, lambda count: resumable(blocks, count))
            if shared > max(hit.num_tokens, table.num_tokens):
                table.borrow(origin.table, shared)
        for slot in (*reversed(hit.slots), *(side.slot for side in hit.sides)):  # the last of a chain is evicted first
            self._tiers.keep_for_plan(slot)
        sequence.num_computed = table.num_tokens

    def _fill_from_tree(self, sequence: Sequence, match: Match) -> None:
        """Fill an empty table with the whole blocks of a match in the prefix tree."""
        tree, table = self._tree, sequence.table
        if tree is not None:
            node, num_blocks, _, partial, closest = match
            if node is None:
                node = tree.root(sequence.group.cache_root)
            elif node.end != num_blocks:
                node = tree.node_at(node, num_blocks)
            table.start_with(node)
            tree.used(node if partial is None or closest is None else closest)
        sequence.num_computed = sequence.num_readable = table.num_tokens

    def _num_shared(self, group: Group, origin: Sequence, builder: PlanBuilder) -> int:
        """Return how many tokens a branch can share with the running sequence from which it branches."""
        source = group.request.source
        if source is None or origin.row is None or origin.group in self._loading:
            return 0
        if group.request.sampling.prompt_logprobs is not None or origin.group.held_chunks is not None:
            return 0
        row, leader = origin.row, origin.group.leader
        if leader.row is not None and builder.introduces(row) and builder.start_of(row) is None:
            row = leader.row  # it forks in this plan, which may compute its blocks in the leader's row
        start = builder.start_of(row)  # only later steps may read what this step computes
        computed = origin.num_planned if start is None else start
        return min(source.num_tokens, computed, group.num_prompt - 1)

    def _note(
        self, group: Group, match: Match, num_cached: int, limit: int, num_found: int, loaded: Counter[str], now: float
    ) -> None:
        """Count the tokens found, and note in the ledger how many were found and why no more. `num_cached`: how many
        the cache and its tiers have."""
        if num_found:
            group.ledger.note("cached", now, num_found, sources_of(num_found, loaded) if loaded else "")
        tree = self._tree if group.reads_cache else None
        if tree is not None and num_found < limit and num_found == num_cached:
            miss = why_missed(tree, match, group.request, group.live[0].tokens, num_found, now)
            group.ledger.note("missed", now, num_found + 1, "", miss)
        if group.num_cached is None:
            group.num_cached = num_hits = num_found if num_found < group.num_prompt else group.num_prompt
            self.num_hits += num_hits
            self.num_queries += 0 if tree is None else group.num_prompt
            if loaded:
                self.tier_hits += loaded

    # ------------------------------------------------------------------------------------------------- publishing
    def plan_completed(self, chunks: Iterable[Chunk]) -> None:
        """Note that the current plan is complete: later plans may read the blocks that it computes and loads.
        Publish the blocks that are not published lazily."""
        if self._tree is not None:
            before = None  # the chunks of a group are consecutive, and the first one publishes for all
            sequences = self._rows.sequences
            for chunk in chunks:
                sequence = sequences[chunk[0]]
                assert sequence is not None
                group = sequence.group
                if group.held_chunks is None:
                    self.note_computed(sequence, chunk, publishes=group is not before)
                    before = group
                else:
                    group.held_chunks.append((sequence, chunk))
        for group in self._loading:
            if group.is_running:
                self.publish_group(group)
                for sequence in group.live:
                    if sequence.num_swapped:
                        sequence.num_swapped = 0
                        self._tiers.release_swapped(sequence)
        self._loading.clear()
        self._plan += 1

    def note_computed(self, sequence: Sequence, chunk: Chunk, *, publishes: bool = True) -> None:
        """Note that a plan computes a chunk of a sequence. Groups of several sequences, and engines with tiers, publish
        all their blocks at once (`publishes`). Others publish them when a lookup could use them (lazy publishing)."""
        group, (row, _, _, sample_rows, _) = sequence.group, chunk
        known = group.num_prompt + len(sequence.outputs)
        sequence.num_readable = sequence.num_computed if sequence.num_computed < known else known
        if self._has_tiers or len(group.live) > 1 or group.search is not None:
            if publishes:
                self.publish_group(group)
            self._in_progress.enter(sequence)
        if sample_rows == (row,) and group.search is None:
            self._publisher.live.enter(sequence)
        elif sample_rows and group.search is None:
            for each in sample_rows:
                self._publisher.live.enter(self._rows.sequence_at(each))
        if sequence in self._in_progress.waiting:
            is_whole = bool(sample_rows) or group.is_forked
            num_blocks = None if is_whole else sequence.num_readable // self._block_size
            self.ready += self._in_progress.wake(sequence, num_blocks)

    def publish_group(self, group: Group, *, leaving: bool = False) -> None:
        """Publish the full blocks of all introduced sequences of a group, which may share blocks, as far as their
        tokens are known and computed by the plans so far. `leaving`: their tables are freed next."""
        for sequence in group.live:
            if sequence.is_introduced or leaving:
                self._publisher.publish(sequence, leaving=leaving, with_group=True)

    # ---------------------------------------------------------------------------------------------------- leaving
    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that loses its row from the indexes of unpublished blocks."""
        if self._tree is not None:
            self._publisher.live.discard(sequence)
            self.ready += self._in_progress.remove(sequence)

    def forget(self, group: Group) -> None:
        """Forget a group that was admitted or has ended. Idempotent."""
        if self._tree is not None:
            self._in_progress.forget(group)
        if self.prefetch is not None:
            self.prefetch.forget(group)

    def swap_blocks(self, group: Group, builder: PlanBuilder) -> dict[Sequence, SwapBlocks]:
        """Return the blocks that a preempted group could swap to host memory and find again."""
        found = {}
        for sequence, limit in self._limits(group).items():
            length = self._pool.resumable_tokens(sequence.table.blocks, min(sequence.num_computed, limit))
            keys = self._tiers.keys(self._tier_salt(group), sequence.tokens(), length)
            blocks = self._tiers.to_save(dict(zip(keys, sequence.table.blocks, strict=False)))
            found[sequence] = SwapBlocks(length, {key: builder.source_of(block) for key, block in blocks.items()})
        return found

    def reset(self) -> int:
        """Empty the prefix cache on the device. Returns how many blocks became free."""
        if self._tree is None:
            return 0
        self._publisher.live = LiveSuffixIndex(self._block_size)
        self.ready += self._in_progress.clear()
        return self._tree.clear()

    def check(self) -> None:
        self._publisher.live.check()
        self._in_progress.check()
        if self._tree is not None:
            self._tree.check()
