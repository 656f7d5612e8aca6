"""What a replica's prefix cache probably holds, as far as the router can know: what it sent there, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from quire.serving.router.native import NativeTree, Unavailable
from quire.serving.router.prompt_keys import CHUNK_BYTES, CHUNK_ENDS, num_chunks

MAX_CAPACITY = 2**40  # bytes: so many that NativeTree counts its chunks in 32 bits
_SIZES = [end - start for start, end in pairwise(CHUNK_ENDS)]
Keys = Sequence[int]  # of the chunks of a prompt; each names its chunk and all before it


class PrefixTree:
    """An approximate prefix tree of one replica. A key names a chunk and all chunks before it, so the tree needs no
    edges: it is the set of its keys, in the order of their last use.

    A chunk is always used after those that follow it, so eviction takes leaves first, and a key that is held implies
    all before it. `match` relies on that: it searches for the end of the match in log time.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes of prompts that the tree holds at most."""
        self._keys = _open_tree()
        self.match = self._keys.match  # the number of leading chunks of some that the tree holds
        self.capacity = _bounded(capacity)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        return self._keys.num_bytes

    def insert(self, keys: Keys, held: int | None = None) -> int:
        """Hold these chunks, as those used last. Evicts what does not fit, and of a prompt larger than the tree its
        end. `held`: what `match` says of them just now, which is returned."""
        count, capacity = len(keys), self.capacity
        if CHUNK_ENDS[count] > capacity:
            count = num_chunks(capacity)
        return self._keys.insert(keys, count, held, capacity)

    def resize(self, capacity: int) -> None:
        self.capacity = _bounded(capacity)
        self._keys.insert((), 0, 0, self.capacity)

    def clear(self) -> None:
        """The replica lost its cache: it was restarted."""
        self._keys.clear()


class PythonTree:
    """Keys of chunks in the order of their last use: `NativeTree` without a compiler."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, int] = OrderedDict()  # the bytes of each chunk, least recently used first
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
        """Hold the first `count` chunks, of which it holds `held` already (None: as `match` says), then evict what is
        more than `capacity` bytes. Returns `held`."""
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
    """Return the capacity of a tree. What a replica or a setting says of a cache may be any number."""
    return min(max(capacity, CHUNK_BYTES), MAX_CAPACITY)


def _open_tree() -> NativeTree | PythonTree:
    try:
        return NativeTree(CHUNK_ENDS)
    except Unavailable:
        return PythonTree()
