"""An estimate of what a replica's prefix cache holds, from the prompts that the router sent it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from quire.serving.router.native import NativeTree, Unavailable
from quire.serving.router.prompt_keys import CHUNK_BYTES, CHUNK_ENDS, num_chunks

MAX_CAPACITY = 2**40  # bytes; NativeTree can then index its chunks with 32 bits
_SIZES = [end - start for start, end in pairwise(CHUNK_ENDS)]
Keys = Sequence[int]  # of the chunks of a prompt; a key identifies its chunk and all before it


class PrefixTree:
    """An approximate prefix tree of one replica. A key identifies a chunk and all chunks before it, so the tree needs
    no edges: it is an LRU-ordered set of keys.

    `insert` touches the chunks of a prompt from the last to the first. So eviction removes leaves first, and if a key
    is held, all keys before it are held. `match` relies on that: it finds the end of the match by binary search.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: most bytes of prompts that the tree holds."""
        self._keys = _open_tree()
        self.match = self._keys.match  # (keys) -> how many leading chunks the tree holds
        self.capacity = _bounded(capacity)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        return self._keys.num_bytes

    def insert(self, keys: Keys, held: int | None = None) -> int:
        """Insert these chunks as the most recently used and evict the least recently used beyond the capacity. Of a
        prompt larger than the capacity, only the beginning is inserted. `held`: the current result of `match` for these
        keys; None: compute it. Returns `held`."""
        count, capacity = len(keys), self.capacity
        if CHUNK_ENDS[count] > capacity:
            count = num_chunks(capacity)
        return self._keys.insert(keys, count, held, capacity)

    def resize(self, capacity: int) -> None:
        self.capacity = _bounded(capacity)
        self._keys.insert((), 0, 0, self.capacity)

    def clear(self) -> None:
        """Remove all keys, because the replica lost its cache."""
        self._keys.clear()


class PythonTree:
    """Does what `NativeTree` does, where the compiled code is not available."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, int] = OrderedDict()  # bytes of the chunk by key, least recently used first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._used)

    def match(self, keys: Keys) -> int:
        used = self._used
        if not keys or keys[0] not in used:
            return 0
        if keys[-1] in used:
            return len(keys)
        low, high = 1, len(keys) - 1  # the first `low` are held; the chunk at `high` is not
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in used:
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, keys: Keys, count: int, held: int | None, capacity: int) -> int:
        """Insert the first `count` chunks, of which the tree already holds the first `held` (None: compute it with
        `match`). Then evict the least recently used chunks beyond `capacity` bytes. Returns `held`."""
        used, touch = self._used, self._used.move_to_end
        held = self.match(keys) if held is None else held
        if held < count:
            for place in range(count - 1, held - 1, -1):  # OrderedDict.update takes twice as long
                used[keys[place]] = _SIZES[place]
            self.num_bytes += CHUNK_ENDS[count] - CHUNK_ENDS[held]
        for place in range(min(held, count) - 1, -1, -1):
            touch(keys[place])
        if self.num_bytes > capacity:
            self._evict(capacity)
        return held

    def clear(self) -> None:
        self._used.clear()
        self.num_bytes = 0

    def _evict(self, capacity: int) -> None:
        pop, num_bytes = self._used.popitem, self.num_bytes
        while num_bytes > capacity:
            num_bytes -= pop(False)[1]  # last=False; a keyword makes the call a third slower
        self.num_bytes = num_bytes


def _bounded(capacity: int) -> int:
    """Limit a capacity, which a replica reports or a setting gives, to [CHUNK_BYTES, MAX_CAPACITY]."""
    return min(max(capacity, CHUNK_BYTES), MAX_CAPACITY)


def _open_tree() -> NativeTree | PythonTree:
    try:
        return NativeTree(CHUNK_ENDS)
    except Unavailable:
        return PythonTree()
