"""The states of recurrent layers: which slot holds whose state, and which states are kept as checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from quire.types.errors import OutOfBlocks

END_WEIGHT = 8  # a block before the end of a prompt or an answer counts as much as so many in the middle of a prompt
_SLACK = 64  # outdated heap entries that are tolerated however few checkpoints are idle


class Checkpoint:
    """A state that is kept: `slot` holds it, after the first `num_blocks` blocks of a sequence, of which `block` is the
    last. `before` is the checkpoint that a request continues from if this one is gone; None: it begins anew."""

    __slots__ = ("age", "before", "block", "idle_since", "is_end", "is_gone", "num_blocks", "slot")

    def __init__(self, block: int, slot: int, num_blocks: int, before: Checkpoint | None, *, is_end: bool) -> None:
        self.block, self.slot, self.num_blocks, self.before, self.is_end = block, slot, num_blocks, before, is_end
        self.is_gone = False
        self.idle_since = 0  # the number of the change that made it idle; 0: a sequence reads it
        self.age = 0  # StateSlots' when it became idle

    def cost(self) -> int:
        """Return how many blocks of tokens must be computed again if this checkpoint goes."""
        while self.before is not None and self.before.is_gone:
            self.before = self.before.before
        return self.num_blocks - (0 if self.before is None else self.before.num_blocks)


class StateSlots:
    """Hands out slots. A slot holds the state of a whole sequence after some number of tokens.

    A sequence writes to a slot of its own. A checkpoint is a slot that nobody writes to any more: it belongs to a block
    and holds the state after that block's last token. Checkpoints that no sequence reads are idle: one of them is
    evicted when a slot is needed. Slots are of one size, so each frees as many bytes, and the one goes that costs least
    to compute again (`Checkpoint.cost`). Those in the middle of a prompt, and ends that a later one continues, count
    less: only a prompt that parts there reads them. A score is the cost plus the age of the slots when the checkpoint
    was read last, and the age is the highest score evicted so far (GreedyDual). So what nobody reads goes in time,
    whatever it costs. O(log n); `keep` looks for the checkpoint before, block by block.
    """

    def __init__(self, num_slots: int) -> None:
        self._holders = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._left: list[int] = []  # slots that rows of the current plan read and leave
        self._checkpoints: dict[int, Checkpoint] = {}  # by block
        self._of_slot: dict[int, Checkpoint] = {}  # the same
        self._heap: list[tuple[int, int, Checkpoint]] = []  # score, idle since; outdated entries are skipped
        self._num_idle = self._changes = 0
        self._age = 0  # the highest score that was evicted
        self.version = 0  # changes whenever a checkpoint goes
        self.num_drafted = 0  # slots of states after draft tokens that are not verified yet

    def __contains__(self, block: int) -> bool:
        """Whether a block has a checkpoint."""
        return block in self._checkpoints

    @property
    def num_free(self) -> int:
        """Slots that `take` can hand out."""
        return len(self._free) + self._num_idle

    def num_spare(self, num_rows: int) -> int:
        """Return how many slots the states after draft tokens may take: those beside one for each of `num_rows` rows
        and one more, so that no row is preempted because drafts hold slots."""
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
        """Return how many sequences and checkpoints hold a slot, those that leave it in this plan included."""
        return self._holders[slot]

    def begin_plan(self) -> None:
        """Release the slots that rows of the last plan left."""
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
        """Count one holder less from the next plan on: a row of this plan reads the slot and writes to another."""
        self._left.append(slot)

    # -------------------------------------------------------------------------------------------------- checkpoints
    def keep(self, blocks: Sequence[int], count: int, slot: int, *, is_end: bool = True) -> None:
        """Make a slot the checkpoint of the last of the first `count` blocks of a sequence. The block holds it from now
        on. A block that has one keeps that."""
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
            gone.cost()  # it refers to none that is gone, so that these do not pile up
            if gone.is_end and gone.before is not None:  # a next turn continues there now
                self._weigh(gone.before, is_end=True)
            gone.is_gone = True
            del self._of_slot[gone.slot]
            self.release(gone.slot)
            self.version += 1

    def set_end(self, block: int) -> None:
        """Note that a sequence ended behind a block: its checkpoint is likely to be read again."""
        found = self._checkpoints.get(block)
        if found is not None:
            self._make_end(found)

    def move(self, block: int, other: int) -> None:
        """Give the checkpoint of a block to another block with the same tokens, if that has none."""
        if block in self._checkpoints and other not in self._checkpoints:
            moved = self._checkpoints[other] = self._checkpoints.pop(block)
            moved.block = other

    def _make_end(self, checkpoint: Checkpoint) -> None:
        """A next turn reads this one, and no longer the one before it."""
        self._weigh(checkpoint, is_end=True)
        checkpoint.cost()  # finds the one before that is left
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
        """Forget the idle checkpoint with the lowest score. Scores in the heap may be too low: a checkpoint costs more
        since one before it went."""
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
        """Take a checkpoint out of the order of eviction, if it is in it."""
        if checkpoint.idle_since:
            checkpoint.idle_since = 0
            self._num_idle -= 1
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Make the heap anew where most of its entries are outdated."""
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
