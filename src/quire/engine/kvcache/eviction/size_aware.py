"""What is cheapest to compute again first."""

from __future__ import annotations

from quire.engine.kvcache.eviction.lfu import LeastFrequent
from quire.engine.kvcache.radix import Node, PrefixTree

EVEN_CONTEXT = 16_384  # tokens of context at which attention costs as much as the rest of a layer; 10k to 30k in models


class CheapestFirst(LeastFrequent):
    """A use of a block counts as much as computing the block costs. All blocks take the same memory and the same work
    in linear layers, but attention reads all tokens before: a block deep in a long branch costs more than one near
    the root, and at equal use the short branches go first."""

    def __init__(self, tree: PrefixTree, num_blocks: int, block_size: int) -> None:
        super().__init__(tree, num_blocks)
        self._block_size = block_size

    def worth(self, node: Node) -> float:
        return 1.0 + node.depth * self._block_size / EVEN_CONTEXT
