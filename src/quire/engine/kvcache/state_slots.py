"""The states of recurrent layers: which slot holds whose state, and which states are kept as checkpoints."""

from __future__ import annotations

from collections import OrderedDict

from quire.types.errors import OutOfBlocks


class StateSlots:
    """Hands out slots. A slot holds the state of a whole sequence after some number of tokens.

    A sequence writes to a slot of its own. A checkpoint is a slot that nobody writes to any more: it belongs to a block
    and holds the state after that block's last token. Checkpoints that no sequence reads are evicted when a slot is
    needed: those in the middle of prompts first, then those where a prompt or an answer ended, the least recently used
    first.
    """

    def __init__(self, num_slots: int) -> None:
        self._holders = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._left: list[int] = []  # slots that rows of the current plan read and leave
        self._checkpoints: dict[int, int] = {}  # block -> slot
        self._block_of: dict[int, int] = {}  # slot -> block; the inverse
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks whose checkpoint nobody reads; oldest use first
        self._idle_ends: OrderedDict[int, None] = OrderedDict()  # likewise, of those in `_ends`
        self._ends: set[int] = set()  # blocks at the end of a prompt or an answer
        self.version = 0  # changes whenever a checkpoint goes
        self.num_drafted = 0  # slots of states after draft tokens that are not verified yet

    def __contains__(self, block: int) -> bool:
        """Whether a block has a checkpoint."""
        return block in self._checkpoints

    @property
    def num_free(self) -> int:
        """Slots that `take` can hand out."""
        return len(self._free) + len(self._idle) + len(self._idle_ends)

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
        return self._checkpoints.get(block)

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
        if not self._free and (idle := self._idle or self._idle_ends):
            self.forget(next(iter(idle)))
        if not self._free:
            raise OutOfBlocks(f"all {len(self._holders)} states are in use")
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> int:
        """Count one more holder."""
        self._holders[slot] += 1
        if slot in self._block_of:
            self._forget_idle(self._block_of[slot])
        return slot

    def release(self, slot: int) -> None:
        """Count one holder less."""
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._free.append(slot)
        elif self._holders[slot] == 1 and slot in self._block_of:
            self._make_idle(self._block_of[slot])

    def leave(self, slot: int) -> None:
        """Count one holder less from the next plan on: a row of this plan reads the slot and writes to another."""
        self._left.append(slot)

    # -------------------------------------------------------------------------------------------------- checkpoints
    def keep(self, block: int, slot: int, *, is_end: bool = True) -> None:
        """Make a slot the checkpoint of a block, which holds it from now on. A block that has one keeps that."""
        if block in self._checkpoints or slot in self._block_of:
            return
        if is_end:
            self._ends.add(block)
        self._checkpoints[block] = slot
        self._block_of[slot] = block
        self._holders[slot] += 1

    def forget(self, block: int) -> None:
        """Remove the checkpoint of a block, if it has one. Its slot is free when no sequence holds it."""
        if block in self._checkpoints:
            self._forget_idle(block)
            slot = self._checkpoints[block]
            del self._checkpoints[block], self._block_of[slot]
            self._ends.discard(block)
            self.release(slot)
            self.version += 1

    def set_end(self, block: int) -> None:
        """Note that a sequence ended behind a block: its checkpoint is likely to be read again."""
        if block in self._checkpoints:
            self._ends.add(block)
            if block in self._idle:
                del self._idle[block]
                self._make_idle(block)

    def move(self, block: int, other: int) -> None:
        """Give the checkpoint of a block to another block with the same tokens, if that has none."""
        slot = self._checkpoints.get(block)
        if slot is not None and other not in self._checkpoints:
            del self._checkpoints[block]
            self._checkpoints[other], self._block_of[slot] = slot, other
            if block in self._ends:
                self._ends.remove(block)
                self._ends.add(other)
            if self._forget_idle(block):
                self._make_idle(other)

    def _make_idle(self, block: int) -> None:
        (self._idle_ends if block in self._ends else self._idle)[block] = None

    def _forget_idle(self, block: int) -> bool:
        """Take a checkpoint out of the order of eviction. Returns whether it was in it."""
        for idle in (self._idle, self._idle_ends):
            if block in idle:
                del idle[block]
                return True
        return False

    def check(self) -> None:
        assert self._block_of == {slot: block for block, slot in self._checkpoints.items()}
        assert all(self._holders[slot] == 0 for slot in self._free)
        assert len(set(self._free)) == len(self._free)
        assert len(self._free) + sum(count > 0 for count in self._holders) == len(self._holders)
        assert self._ends <= self._checkpoints.keys()
        assert self._idle_ends.keys() <= self._ends
        assert not self._idle.keys() & self._ends
        for block in (*self._idle, *self._idle_ends):
            assert self._holders[self._checkpoints[block]] == 1
