"""State slots of recurrent layers: which slot holds the state of which sequence, and which states are kept as
checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from quire.types.errors import OutOfBlocks

END_WEIGHT = 8  # weight of the cost of checkpoints at the end of a prompt or answer, relative to those in the middle
_SLACK = 64  # outdated heap entries that are always tolerated


class Checkpoint:
    """A kept state: `slot` holds the state after the first `num_blocks` blocks of a sequence, of which `block` is the
    last. `before` is the checkpoint from which a request continues if this one is gone; None: from the start."""

    __slots__ = ("age", "before", "block", "idle_since", "is_end", "is_gone", "num_blocks", "slot")

    def __init__(self, block: int, slot: int, num_blocks: int, before: Checkpoint | None, *, is_end: bool) -> None:
        self.block, self.slot, self.num_blocks, self.before, self.is_end = block, slot, num_blocks, before, is_end
        self.is_gone = False
        self.idle_since = 0  # number of the change that made it idle; 0: a sequence reads it
        self.age = 0  # the age of the StateSlots when it became idle

    def cost(self) -> int:
        """Return how many blocks of tokens must be computed again if this checkpoint is evicted."""
        while self.before is not None and self.before.is_gone:
            self.before = self.before.before
        return self.num_blocks - (0 if self.before is None else self.before.num_blocks)


class StateSlots:
    """Hands out state slots. A slot holds the recurrent state of a sequence after some number of its tokens.

    A sequence writes to its own slot. A checkpoint is a slot that nobody writes to any more: it belongs to a block and
    holds the state after that block's last token. Checkpoints that no sequence reads are idle. When a slot is needed
    and none is free, the idle checkpoint with the lowest score is evicted.

    Age: the highest score evicted so far. The score of a checkpoint is the age at the time when it became idle, plus
    its cost, the number of blocks to compute again without it (`Checkpoint.cost`). Costs of ends of prompts and answers
    count END_WEIGHT times, until a later checkpoint continues the end; checkpoints in the middle of a prompt are read
    only by prompts that diverge there. So the cheapest checkpoint is evicted first, and one that nobody reads is
    evicted in time, whatever its cost (GreedyDual). O(log n); `keep` searches for the previous checkpoint block by
    block.
    """

    def __init__(self, num_slots: int) -> None:
        self._holders = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._left: list[int] = []  # slots that rows of the current plan read for the last time
        self._checkpoints: dict[int, Checkpoint] = {}  # by block
        self._of_slot: dict[int, Checkpoint] = {}  # the same
        # (score, idle since, checkpoint); outdated entries are skipped.
        self._heap: list[tuple[int, int, Checkpoint]] = []
        self._num_idle = self._changes = 0
        self._age = 0  # the highest score that was evicted
        self.version = 0  # grows whenever a checkpoint is removed
        self.num_drafted = 0  # slots of states after draft tokens that are not verified yet

    def __contains__(self, block: int) -> bool:
        """Whether a block has a checkpoint."""
        return block in self._checkpoints

    @property
    def num_free(self) -> int:
        """Slots that `take` can hand out."""
        return len(self._free) + self._num_idle

    def num_spare(self, num_rows: int) -> int:
        """Return how many slots the states after draft tokens may take. One slot for each of `num_rows` rows and one
        more are left, so that no row is preempted because of drafts."""
        return min(self.num_free, len(self._holders) - num_rows - 1 - self.num_drafted)

    @property
    def blocks(self) -> list[int]:
        """Blocks that have a checkpoint."""
        return list(self._checkpoints)

    def slot_of(self, block: int) -> int | None:
        """Return the slot of a block's checkpoint; None: it has none."""
        checkpoint = self._checkpoints.get(block)
        return None if checkpoint is None else checkpoint.slot

    def is_held(self, slot: int) -> bool:
        return self._holders[slot] > 0

    def num_holders(self, slot: int) -> int:
        """Return how many sequences and checkpoints hold a slot, including those that leave it in this plan."""
        return self._holders[slot]

    def begin_plan(self) -> None:
        """Release the slots that rows left in the last plan."""
        for slot in self._left:
            self.release(slot)
        self._left.clear()

    def take(self) -> int:
        """Hand out a slot with one holder. Raises OutOfBlocks."""
        if not self._free and self._num_idle:
            self._evict()
        if not self._free:
            raise OutOfBlocks(f"all {len(self._holders)} states are in use")
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> int:
        """Count one more holder."""
        self._holders[slot] += 1
        if slot in self._of_slot:
            self._set_read(self._of_slot[slot])
        return slot

    def release(self, slot: int) -> None:
        """Count one holder less."""
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._free.append(slot)
        elif self._holders[slot] == 1 and slot in self._of_slot:
            self._set_idle(self._of_slot[slot])

    def leave(self, slot: int) -> None:
        """Release one holder with the next plan: a row of this plan reads the slot and writes to another one."""
        self._left.append(slot)

    # -------------------------------------------------------------------------------------------------- checkpoints
    def keep(self, blocks: Sequence[int], count: int, slot: int, *, is_end: bool = True) -> None:
        """Make a slot the checkpoint of the last of the first `count` blocks of a sequence. The block becomes a holder
        of the slot. A block that has a checkpoint already keeps that one."""
        block, known = blocks[count - 1], self._checkpoints
        if block in known or slot in self._of_slot:
            return
        earlier = next((known[blocks[place]] for place in range(count - 2, -1, -1) if blocks[place] in known), None)
        self._of_slot[slot] = known[block] = kept = Checkpoint(block, slot, count, earlier, is_end=False)
        self._holders[slot] += 1
        if is_end:
            self._make_end(kept)

    def forget(self, block: int) -> None:
        """Remove the checkpoint of a block, if it has one. Its slot is free when no sequence holds it."""
        gone = self._checkpoints.pop(block, None)
        if gone is not None:
            self._set_read(gone)
            gone.cost()  # drops references to removed checkpoints, so that these are freed
            if gone.is_end and gone.before is not None:  # the next turn now continues there
                self._weigh(gone.before, is_end=True)
            gone.is_gone = True
            del self._of_slot[gone.slot]
            self.release(gone.slot)
            self.version += 1

    def set_end(self, block: int) -> None:
        """Note that a sequence ended with this block: its checkpoint is likely to be read again."""
        found = self._checkpoints.get(block)
        if found is not None:
            self._make_end(found)

    def move(self, block: int, other: int) -> None:
        """Give the checkpoint of a block to another block with the same tokens, if that has none."""
        if block in self._checkpoints and other not in self._checkpoints:
            moved = self._checkpoints[other] = self._checkpoints.pop(block)
            moved.block = other

    def _make_end(self, checkpoint: Checkpoint) -> None:
        """Weigh this checkpoint as an end, which the next turn reads, and no longer the one before it."""
        self._weigh(checkpoint, is_end=True)
        checkpoint.cost()  # updates `before` to one that still exists
        if checkpoint.before is not None:
            self._weigh(checkpoint.before, is_end=False)

    # ------------------------------------------------------------------------------------------------------ eviction
    def _weigh(self, checkpoint: Checkpoint, *, is_end: bool) -> None:
        if checkpoint.is_end == is_end:
            return
        checkpoint.is_end = is_end
        if checkpoint.idle_since:
            self._changes += 1
            checkpoint.idle_since = self._changes
            heappush(self._heap, (self._score(checkpoint), self._changes, checkpoint))
            self._drop_outdated()

    def _evict(self) -> None:
        """Remove the idle checkpoint with the lowest score. Scores in the heap may be too low, because the cost of a
        checkpoint grows when the one before it is removed."""
        heap = self._heap
        while True:
            score, since, checkpoint = heap[0]
            if checkpoint.idle_since != since:
                heappop(heap)
            elif score < (now := self._score(checkpoint)):
                heapreplace(heap, (now, since, checkpoint))
            else:
                break
        self._age = max(self._age, score)
        self.forget(checkpoint.block)

    def _score(self, checkpoint: Checkpoint) -> int:
        return checkpoint.age + checkpoint.cost() * (END_WEIGHT if checkpoint.is_end else 1)

    def _set_idle(self, checkpoint: Checkpoint) -> None:
        self._changes += 1
        self._num_idle += 1
        checkpoint.idle_since, checkpoint.age = self._changes, self._age
        heappush(self._heap, (self._score(checkpoint), self._changes, checkpoint))
        self._drop_outdated()

    def _set_read(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the order of eviction, if it is in it."""
        if checkpoint.idle_since:
            checkpoint.idle_since = 0
            self._num_idle -= 1
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Rebuild the heap if most of its entries are outdated."""
        if len(self._heap) > 2 * self._num_idle + _SLACK:
            self._heap[:] = [entry for entry in self._heap if entry[2].idle_since == entry[1]]
            heapify(self._heap)

    def check(self) -> None:
        assert all(block == kept.block and not kept.is_gone for block, kept in self._checkpoints.items())
        assert self._of_slot == {kept.slot: kept for kept in self._checkpoints.values()}
        assert all(self._holders[slot] == 0 for slot in self._free)
        assert len(set(self._free)) == len(self._free)
        assert len(self._free) + sum(count > 0 for count in self._holders) == len(self._holders)
        idle = {kept.idle_since: kept for kept in self._checkpoints.values() if kept.idle_since}
        assert len(idle) == self._num_idle
        assert idle == {since: kept for _, since, kept in self._heap if kept.idle_since == since}
        assert len(self._heap) <= 2 * self._num_idle + _SLACK
        for kept in self._checkpoints.values():
            assert bool(kept.idle_since) == (self._holders[kept.slot] == 1)
            assert kept.cost() > 0
