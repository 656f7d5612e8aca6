"""Which of the kept blocks that nobody holds is given away first: what an eviction policy decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.engine.kvcache.radix import Node, PrefixTree


class IdleOrder(Protocol):
    """The kept blocks that nobody holds. Those who come to a block hold all blocks on the way to it, and a table is
    freed tail first, so a block is never idle before the blocks behind it are; only a leaf of the tree is evicted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def add(self, block: int) -> None:
        """Its last holder has let go of it."""

    def remove(self, block: int) -> None:
        """It is held again."""

    def evict(self) -> int:
        """Take out the one that goes first; there is one. It is still in the tree, and leaves it next."""

    def clear(self) -> None: ...

    def entered(self, nodes: Sequence[Node]) -> None:
        """Held blocks were kept."""

    def used(self, nodes: Sequence[Node]) -> None:
        """A sequence found these blocks and begins with them."""

    def check(self, tree: PrefixTree) -> None: ...
