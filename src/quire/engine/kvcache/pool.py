"""The physical blocks and who counts as holding them."""

from __future__ import annotations

from quire.types.errors import OutOfBlocks


class BlockPool:
    """Hands out physical block ids and counts their holders. Knows nothing of tokens.

    What was freed last goes out first: its memory is warm, and memory that was never needed stays untouched.
    """

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_shared = 0

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders) - len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one holder."""
        return self._num_shared

    def take(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"kv cache: all {len(self._holders)} blocks are in use")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        holders = self._holders[block]
        if holders == 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._num_shared += holders == 1
        self._holders[block] = holders + 1
        return block

    def release(self, block: int) -> None:
        holders = self._holders[block] - 1
        if holders < 0:
            raise ValueError(f"block {block} was released more often than it was held")
        self._holders[block] = holders
        if holders == 0:
            self._free.append(block)
        elif holders == 1:
            self._num_shared -= 1

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def holders(self, block: int) -> int:
        return self._holders[block]

    def all_holders(self) -> tuple[int, ...]:
        """The number of holders of every block, by its id."""
        return tuple(self._holders)

    def check(self) -> None:
        assert sorted(self._free) == [block for block, count in enumerate(self._holders) if count == 0]
        assert min(self._holders, default=0) >= 0
        assert self._num_shared == sum(count > 1 for count in self._holders)
