"""The block table of a sequence whose model has groups of layers. It tracks which of its blocks are in the sliding
window, and which slot holds the state of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Node, PrefixTree
from quire.engine.kvcache.table import NO_STATE, BlockTable, Move
from quire.types.errors import OutOfBlocks
from quire.types.step import BlockCopy

KEPT_TOKENS = 1_024  # tokens between two checkpoints of a prompt or an answer, which are kept
STATE_TOKENS = 16  # tokens between two further checkpoints while a sequence generates, rounded up to whole blocks
_TRAIL = 2  # how many of these further ones are kept, the last: a sequence's end may be known a few tokens late


class GroupedTable(BlockTable):
    """A BlockTable that also holds the window blocks of its last blocks, those in the sliding window, and the slot with
    the sequence's recurrent state."""

    __slots__ = ("_drafted", "_first_read", "_is_known", "_kept", "_sides", "_trail", "_trailing", "state")

    def __init__(self, pool: GroupedPool, block_size: int, tree: PrefixTree | None = None) -> None:
        super().__init__(pool, block_size, tree)
        self._sides = pool
        self._first_read = 0  # it holds the window blocks of its blocks from this index on
        self.state = NO_STATE  # the slot that holds the state after all tokens that were planned
        self._is_known = False  # the workers know this slot
        self._drafted: list[tuple[int, int, int]] = []  # (first draft token, end, slot of the state at the end)
        self._trail: list[int] = []  # blocks whose checkpoints are replaced as the sequence generates
        self._kept, self._trailing = (-(-tokens // block_size) * block_size for tokens in (KEPT_TOKENS, STATE_TOKENS))

    # ------------------------------------------------------------------------------------------------------- sharing
    def start_with(self, node: Node) -> None:
        super().start_with(node)
        self._resume()

    def borrow(self, other: BlockTable, num_tokens: int) -> None:
        self._unread()
        super().borrow(other, num_tokens)
        self._resume()

    def add_loaded(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Append private blocks that the current plan loads, with the side blocks that are needed to continue after the
        last of them. The caller enters the window blocks among them (`GroupedPool.enter_window`)."""
        self.leave_window(num_tokens)
        self.extend(blocks, num_tokens)
        self._first_read = max(self._first_read, self._sides.first_seen(num_tokens))
        self._take_state()

    @property
    def num_window_blocks(self) -> int:
        return self._sides.groups.num_window_blocks * (len(self.blocks) - self._first_read)

    @property
    def num_behind_window(self) -> int:
        return self._first_read if self._sides.groups.all_windows else 0

    def still_takes(self, num_blocks: int) -> int:
        if self._sides.groups.all_windows:
            return self._sides.with_windows(num_blocks) - (len(self.blocks) - self._first_read)
        return self._sides.with_windows(num_blocks - len(self.blocks))

    def become_pinned(self) -> None:
        """Release the state slot: running sequences may need it. Its checkpoint stays, and is evicted late."""
        self._set_state(NO_STATE)
        if self._sides.states is not None and self.blocks:
            self._sides.states.set_end(self.blocks[-1])

    def _resume(self) -> None:
        """Hold the window blocks that the next token sees, and the state after the last block. If some of these window
        blocks are missing, as after a pinned prompt, hold only those after the last missing one."""
        pool, first = self._sides, len(self.blocks)
        wanted = pool.first_seen(self.num_tokens)
        while first > wanted and pool.has_windows(self.blocks[first - 1]):
            first -= 1
        self._first_read = first
        pool.enter_window(self.blocks[first:])
        self._take_state()

    def _take_state(self) -> None:
        """Continue from the checkpoint of the last block."""
        states = self._sides.states
        if states is not None and self.blocks:
            slot = states.slot_of(self.blocks[-1])
            self._set_state(NO_STATE if slot is None else states.hold(slot))

    def _unread(self, *, at_end: bool = False) -> None:
        self._sides.leave_window(self.blocks[self._first_read :], at_end=at_end)
        self._first_read = len(self.blocks)

    def _share(self, other: BlockTable) -> None:
        assert isinstance(other, GroupedTable)
        super()._share(other)
        self._first_read = other._first_read
        self._sides.enter_window(self.blocks[self._first_read :])
        states = self._sides.states
        if states is not None:
            self._set_state(NO_STATE if other.state == NO_STATE else states.hold(other.state))

    def replace_with(self, other: BlockTable) -> int:
        self._unread()
        self._trail.clear()
        return super().replace_with(other)

    def use_cached(self, node: Node) -> None:
        """See BlockTable. Side blocks that the tree's blocks lack move to them. Only a table that is about to be freed
        does this."""
        tree = self._tree
        assert tree is not None
        pairs = enumerate(zip(self.blocks, tree.path(node), strict=False), 1)
        others = [(count, own, other) for count, (own, other) in pairs if own != other]
        if others:
            self._unread(at_end=True)
            for count, own, other in others:
                self._sides.move_sides(own, other, count)
        super().use_cached(node)

    def free(self) -> None:
        self._unread(at_end=True)
        if self._sides.states is not None:
            for block in self._trail:  # a later turn may continue there
                self._sides.states.set_end(block)
        self._forget_drafted()
        self._set_state(NO_STATE)
        self._trail.clear()
        super().free()
        self._first_read = 0

    # ------------------------------------------------------------------------------------------------------- growing
    def fill(self, num_tokens: int) -> bool:  # noqa: ARG002 - windows and states move with every token
        return False

    def append(self, num_tokens: int = 1) -> list[BlockCopy]:
        last = self.blocks[-1] if self.blocks else None
        copies = super().append(num_tokens)
        if copies:
            assert last is not None
            pool, own = self._sides, copies[0].target
            pairs = list(zip(pool.memory_blocks(last), pool.memory_blocks(own), strict=True))
            copies = [BlockCopy(*pair) for pair in pairs]
            pool.leave_window([last])
        return copies

    def leave_window(self, position: int) -> None:
        """Release the window blocks that are seen neither by the token at `position` nor by any later one."""
        first = min(self._sides.first_seen(position), len(self.blocks))
        if first > self._first_read:
            self._sides.leave_window(self.blocks[self._first_read : first])
            self._first_read = first

    def truncate(self, num_tokens: int) -> None:
        kept = max(-(-num_tokens // self._block_size), self.num_cached)
        self._sides.leave_window(self.blocks[max(kept, self._first_read) :])
        super().truncate(num_tokens)
        self._first_read = min(self._first_read, len(self.blocks))

    # -------------------------------------------------------------------------------------------------------- states
    def _set_state(self, slot: int) -> None:
        states = self._sides.states
        if states is not None and self.state != NO_STATE:
            states.release(self.state)
        self.state, self._is_known = slot, False

    def _move_to(self, slot: int) -> None:
        """Write the state to another slot from here on. The current plan still reads the previous one."""
        states = self._sides.states
        assert states is not None
        if self.state != NO_STATE:
            states.leave(self.state)
        self.state = slot

    @property
    def needs_slot(self) -> bool:
        """Whether the next token needs a new slot: no state is computed yet, or others hold the slot too."""
        states = self._sides.states
        return states is not None and (self.state == NO_STATE or states.num_holders(self.state) > 1)

    def check_slot(self) -> None:
        """Raise OutOfBlocks if the next token needs a slot for its state and none is free."""
        states = self._sides.states
        if states is not None and self.needs_slot and not states.num_free:
            raise OutOfBlocks("all states are in use")

    def plan_states(self, start: int, end: int, lasting: Collection[int], *, trails: bool) -> list[Move]:
        """Return where the state of tokens `start` to `end` is written, as (position, slot, source): from `position` on
        it is written to `slot`; `source` holds the state before.

        The source slot keeps its state as a checkpoint: at the positions in `lasting`, every KEPT_TOKENS tokens and,
        with `trails`, every STATE_TOKENS, of which only the last stay. The blocks of these tokens must exist.
        Checkpoints are made while slots are free; the first slot must be free (`check_slot`).
        """
        states = self._sides.states
        if states is None:
            return []
        moves = []
        positions = [place for place in self._boundaries(start, end) if self._is_kept(place, lasting, trails=trails)]
        if self.state != NO_STATE and start in positions and states.num_free:
            self._keep(start, lasting)
        source, is_known = self.state, self._is_known
        if self.needs_slot:
            self._move_to(states.take())
        if self.state != source or not is_known:
            moves.append((start, self.state, source))
        for position in positions:
            if position > start and states.num_free:
                self._keep(position, lasting)
                source = self.state
                self._move_to(states.take())
                moves.append((position, self.state, source))
        self._is_known = True
        return moves

    def takes_draft(self, num_rows: int) -> bool:
        states = self._sides.states
        return states is None or states.num_spare(num_rows) > 0

    def plan_draft(self, start: int, count: int, num_rows: int) -> list[Move]:
        """See BlockTable. The current slot keeps the state after the known tokens: if some draft tokens are rejected,
        the sequence continues from it. At positions of checkpoints, the state goes to one more slot."""
        states = self._sides.states
        if states is None:
            return []
        end, moves = start + count, list[Move]()
        inside = [place for place in self._boundaries(start + 1, end) if self._is_kept(place, (), trails=True)]
        begins = [start, *inside][: states.num_spare(num_rows)]
        source = self.state
        for begin, stop in zip(begins, [*begins[1:], end], strict=True):
            slot = states.take()
            self._drafted.append((begin, stop, slot))
            moves.append((begin, slot, source))
            source = slot
        states.num_drafted += len(begins)
        return moves

    def settle_draft(self, num_tokens: int, lasting: Collection[int]) -> int:
        """See BlockTable. The sequence continues from the last state that follows accepted tokens only."""
        states, drafted = self._sides.states, self._drafted
        if states is None or not drafted:
            return num_tokens
        reached = drafted[0][0]
        while drafted and drafted[0][1] <= num_tokens:
            begin, reached, slot = drafted.pop(0)
            states.num_drafted -= 1
            if self._is_kept(begin, lasting, trails=True):
                self._keep(begin, lasting)
            states.release(self.state)
            self.state = slot
        self._is_known = not drafted  # the workers have the state after all draft tokens
        self._forget_drafted()
        return reached

    def _forget_drafted(self) -> None:
        """Release the states that follow draft tokens."""
        states = self._sides.states
        if states is not None and self._drafted:
            for _, _, slot in self._drafted:
                states.release(slot)
            states.num_drafted -= len(self._drafted)
            self._drafted.clear()

    def _boundaries(self, start: int, end: int) -> range:
        """Return the positions among tokens `start` to `end` at which a block begins, except position 0."""
        size = self._block_size
        return range(max(-(-start // size), 1) * size, end, size)

    def _is_kept(self, position: int, lasting: Collection[int], *, trails: bool) -> bool:
        return position in lasting or position % self._kept == 0 or (trails and position % self._trailing == 0)

    def _keep(self, position: int, lasting: Collection[int]) -> None:
        """Keep the state after `position` tokens as the checkpoint of the block that ends there."""
        states, count = self._sides.states, position // self._block_size
        block = self.blocks[count - 1]
        assert states is not None
        states.keep(self.blocks, count, self.state, is_end=position in lasting)
        self._sides.note_gain(count, block)
        if position not in lasting and position % self._kept:
            self._trail.append(block)
            if len(self._trail) > _TRAIL:
                states.forget(self._trail.pop(0))

    def check(self, *, lags: bool = False) -> None:
        super().check(lags=lags)
        assert 0 <= self._first_read <= len(self.blocks)
        assert all(self._sides.is_read(block) for block in self.blocks[self._first_read :])
        states = self._sides.states
        assert states is None or all(states.num_holders(slot) == 1 for _, _, slot in self._drafted)


def table_type(pool: BlockPool) -> Callable[[Any, int, PrefixTree | None], BlockTable]:
    """Return the type of block table for a pool."""
    return GroupedTable if isinstance(pool, GroupedPool) else BlockTable
