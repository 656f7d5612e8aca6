"""The side blocks (window blocks and states) of models with groups of layers in the tiers: their keys, and which of
them a sequence needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.grouped_table import KEPT_TOKENS
from quire.engine.kvcache.keys import side_key


class Side(NamedTuple):
    """A side block: `name` says which ("window 0", "state 1"), and `place` is the index in the sequence of the block
    that it belongs to."""

    place: int
    name: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a sequence can continue with blocks from the tiers: after `num_blocks` more blocks, given the side blocks
    `sides`."""

    num_blocks: int
    sides: tuple[Side, ...]


class SidesToAsk(NamedTuple):
    """Keys of side blocks to look up: those needed to continue after the last of some blocks, and others, with which a
    sequence could continue after an earlier block."""

    needed: list[bytes]
    others: list[bytes]


class SideKeys:
    """Computes the keys of side blocks. A side block's key is derived from its block's key and its name."""

    def __init__(self, pool: GroupedPool, block_size: int) -> None:
        self._pool, self._block_size, groups = pool, block_size, pool.groups
        self._kept = -(-KEPT_TOKENS // block_size) * block_size
        num_windows = 1 if groups.all_windows else groups.num_window_blocks
        self._windows = [b"window %d" % place for place in range(num_windows)]
        self._states = [b"state %d" % place for place in range(groups.blocks_per_state)] if groups.num_states else []

    def of(self, key: bytes, block: int, *, windows: bool = True) -> Iterator[tuple[bytes, int]]:
        """Yield the key and the id of every side block of a block; without `windows`, only those of its state."""
        for name, side in self._pool.sides(block):
            if windows or name in self._states:
                yield side_key(key, name), side

    def is_seen(self, index: int, num_blocks: int) -> bool:
        """Whether the token after `num_blocks` blocks sees block `index` in layers with a window."""
        return index >= self._pool.first_seen(num_blocks * self._block_size)

    def to_save(self, blocks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Return the side blocks, by key, that a sequence needs to continue after its first blocks `blocks`."""
        found: dict[bytes, int] = {}
        for index, (key, block) in enumerate(blocks.items()):
            is_last = index == len(blocks) - 1
            for name, side in self._pool.sides(block):
                if is_last if name in self._states else self.is_seen(index, len(blocks)):
                    found[side_key(key, name)] = side
        return found

    def to_ask(self, num_before: int, keys: Sequence[bytes]) -> SidesToAsk:
        """Return the side blocks to look up together with the blocks `keys`, which follow `num_before` blocks: all
        window blocks, and the states after the last block and after every 1,024 tokens, where prompts keep
        checkpoints."""
        ends = SidesToAsk([], [])
        end = num_before + len(keys)
        for index, key in enumerate(keys, num_before):
            is_last, tokens = index == end - 1, (index + 1) * self._block_size
            for name in self._windows:
                (ends.needed if self.is_seen(index, end) else ends.others).append(side_key(key, name))
            if is_last or tokens % self._kept == 0:
                (ends.needed if is_last else ends.others).extend(side_key(key, name) for name in self._states)
        return ends

    def needed(self, num_before: int, keys: Sequence[bytes], has: Callable[[bytes], bool]) -> Continuation | None:
        """Return after how many of the blocks `keys`, which follow `num_before` blocks, a sequence can continue, with
        the side blocks that it needs there; `has` is true for all of these. None: after none of the blocks."""
        count = len(keys)
        while count > 0:
            sides = [Side(num_before + count - 1, name, side_key(keys[count - 1], name)) for name in self._states]
            if not all(has(side.key) for side in sides):
                count -= 1
                continue
            first = max(self._pool.first_seen((num_before + count) * self._block_size) - num_before, 0)
            for place in range(count - 1, first - 1, -1):
                sides += [Side(num_before + place, name, side_key(keys[place], name)) for name in self._windows]
                if not all(has(side.key) for side in sides[len(sides) - len(self._windows) :]):
                    count = place  # a sequence that ends after this block needs it
                    break
            else:
                return Continuation(count, tuple(sides))
        return None
