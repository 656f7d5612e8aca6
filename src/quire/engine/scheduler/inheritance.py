"""What a sequence need not compute, because another one has, and what it leaves to those that come later."""

from __future__ import annotations

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.prefixes import NO_MATCH, Match, Prefixes
from quire.engine.scheduler.accounts import num_computed
from quire.engine.scheduler.draft import PlanDraft


class Inheritance:
    """Finds what is computed of a sequence's tokens already: in the prefix cache, or where it branches off."""

    def __init__(self, prefixes: Prefixes, *, has_cache: bool, has_branches: bool = True) -> None:
        self._prefixes, self._has_cache, self._has_branches = prefixes, has_cache, has_branches
        self.num_queries = self.num_hits = 0  # prompt tokens that were looked for, and found

    def reads_cache(self, group: Group) -> bool:
        """Where prompt logprobs are asked for, every position must be computed."""
        return self._has_cache and group.request.sampling.prompt_logprobs is None

    def find(self, sequence: Sequence, limit: int) -> Match:
        """What is cached of the sequence's first `limit` tokens."""
        if not self.reads_cache(sequence.group):
            return NO_MATCH
        return self._prefixes.find(sequence.group.request.cache_salt, sequence.known, limit)

    def find_first(self, group: Group) -> Match:
        """What is cached of the tokens that the leader computes first; the last of them is always computed anew."""
        target = group.leader.num_known if len(group.live) == 1 else group.num_prompt
        return self.find(group.leader, target - 1)

    def introduce(self, draft: PlanDraft, group: Group, tick: int, now: float) -> None:
        """Tell the workers of a group's leader, or of all its samples where each finds its own prompt and more."""
        samples, found = group.live, [NO_MATCH]
        if len(samples) > 1 and all(sequence.outputs for sequence in samples):
            found = [self.find(sequence, sequence.target - 1) for sequence in samples]
            group.forked = all(match.num_tokens >= group.num_prompt for match in found)
        if not group.forked:
            samples, found = samples[:1], [self.find_first(group)]
        for sequence, match in zip(samples, found, strict=True):
            self.take(sequence, match, draft, tick)
            draft.add_row(sequence)
        group.origin = None
        if num_found := num_computed(group, tick):
            group.ledger.note("cached", now, num_found)
        if group.num_cached is None:
            group.num_cached = min(num_found, group.num_prompt)
            self.num_hits += group.num_cached
            self.num_queries += group.num_prompt if self.reads_cache(group) else 0

    def take(self, sequence: Sequence, match: Match, draft: PlanDraft, tick: int) -> None:
        """An empty table begins with what was found, or with more of the sequence that it branches off."""
        origin = sequence.group.origin
        shared = 0 if origin is None else self._num_shared(sequence.group, origin, draft, tick)
        if origin is not None and shared > match.num_tokens:
            sequence.table, sequence.computed = origin.table.fork(shared), shared
        else:
            self._prefixes.adopt(sequence.table, match)
            sequence.computed = match.num_tokens

    def leave(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """Let others find the blocks whose tokens are known and computed by the steps planned so far."""
        num_tokens = min(sequence.computed, sequence.num_known)
        salt = sequence.group.request.cache_salt
        self._prefixes.keep(sequence.table, salt, sequence.known, num_tokens, leaving=leaving)

    def _num_shared(self, group: Group, origin: Sequence, draft: PlanDraft, tick: int) -> int:
        """How many tokens a branch can take over from the sequence it branches off, if that still runs."""
        source = group.request.source
        if source is None or origin.row is None or not self._has_branches:
            return 0
        if group.request.sampling.prompt_logprobs is not None:
            return 0
        start = draft.start_of(origin.row)  # what this step computes, only later ones may read
        computed = origin.computed_at(tick) if start is None else start
        return min(source.num_tokens, computed, group.num_prompt - 1)
