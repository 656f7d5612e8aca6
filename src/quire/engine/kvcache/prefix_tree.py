"""The prefix cache on the device: a radix tree from token prefixes to the KV blocks that hold them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.engine.kvcache.eviction import EvictionPolicy
from quire.engine.kvcache.keys import TOKEN_BYTES, common_bytes, next_key, root_key
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.run_history import EvictedSalts, Eviction, Ghosts, Owner, Owners, remember


class Node:
    """A node of the tree: a run of consecutive full blocks. The path from the root to it spells the tokens that precede
    and fill these blocks.

    `locks` counts the block tables that hold this run; a table that holds a run holds all runs above it. There is one
    root for each salt, and it has no blocks.
    """

    __slots__ = (
        "blocks", "changes", "children", "end", "first_blocks", "ghosts", "is_detached", "keys", "locks", "owners",
        "parent", "salt", "score", "start", "tokens", "uses",
    )  # fmt: skip

    def __init__(self, blocks: list[int], tokens: bytes, parent: Node | None, owner: Owner, salt: str) -> None:
        self.blocks, self.tokens, self.parent, self.salt = blocks, tokens, parent, salt
        self.start: int = 0 if parent is None else parent.end  # the number of blocks above this run
        self.owners = Owners(owner)
        self.end: int = self.start + len(blocks)  # `start` plus the blocks of this run
        self.locks = 0
        self.changes = 0  # grows whenever a match that ended at this node may have become longer
        self.children: dict[bytes, Node] = {}  # by the tokens of each child's first block
        self.first_blocks: dict[bytes, list[bytes]] = {}  # the same tokens, by their first token, sorted
        self.keys: list[bytes] = []  # content hashes of the first blocks; computed when a tier asks for them
        self.ghosts: Ghosts | None = None  # evicted runs that followed this one, by the tokens of their first block
        self.is_detached = False  # no lookup finds this run any more: it was evicted, or the tree was cleared
        self.uses = 0  # `uses` and `score` belong to the eviction policy
        self.score = 0.0

    def child(self, first_block: bytes) -> Node | None:
        """Return the child whose first block has exactly these tokens."""
        return self.children.get(first_block)

    def owner_of(self, block: int) -> Owner:
        """Return the request that computed a block of this run, or of a run above it. Blocks count from the root."""
        node = self
        while node.start > block and node.parent is not None:
            node = node.parent
        return node.owners.of(block)

    def add(self, child: Node, first_block: bytes) -> None:
        insort(self.first_blocks.setdefault(first_block[:TOKEN_BYTES], []), first_block)
        self.children[first_block] = child

    def remove(self, child: Node, first_block: bytes) -> None:
        assert self.children[first_block] is child
        similar = self.first_blocks[first_block[:TOKEN_BYTES]]
        del similar[bisect_left(similar, first_block)], self.children[first_block]
        if not similar:
            del self.first_blocks[first_block[:TOKEN_BYTES]]


class Match(NamedTuple):
    """The longest cached prefix of some tokens: `num_blocks` whole blocks, the last of them in the run of `node`.

    If `partial` is set, the first tokens of that block match too, so that `num_tokens` match in all, and `closest` is
    its run. Otherwise `closest` may be a run that continues the match with other tokens; it tells whose prompt differs.
    """

    node: Node | None
    num_blocks: int = 0
    num_tokens: int = 0
    partial: int | None = None
    closest: Node | None = None


NO_MATCH = Match(None)
_new_match = tuple.__new__  # with all five fields; takes a third of the time of Match()


class PrefixTree:
    """The runs of cached blocks, and the number of tables that hold each run.

    Matching compares tokens, not hashes, and stays within one salt. Blocks without a holder stay cached until the pool
    needs them. Then the eviction policy chooses a leaf, and the tree evicts blocks from its end.
    """

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy, namespace: bytes = b"") -> None:
        self.pool, self._policy, self.namespace = pool, policy, namespace
        self.block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._evicted_salts = EvictedSalts()
        self._num_blocks = self._num_shared = 0
        self.now = 0.0  # seconds on the engine's clock; the scheduler sets it for each plan
        self.used = policy.used  # notes for the eviction policy that a sequence uses all runs up to a node
        self.on_evict: Callable[[Node, int], None] | None = None  # called with a node and the index of a block
        pool.evict = self._evict

    def __len__(self) -> int:
        """Cached blocks, including those of detached runs that tables still hold."""
        return self._num_blocks

    @property
    def num_shared(self) -> int:
        """Blocks in the tree that more than one table holds."""
        return self._num_shared

    @property
    def policy_name(self) -> str:
        return self._policy.name

    # ------------------------------------------------------------------------------------------------- matching
    def match(self, salt: str, tokens: bytes, limit: int) -> Match:
        """Return the longest cached prefix of the first `limit` tokens."""
        node = self._roots.get(salt)
        if node is None:
            return NO_MATCH
        node, num_blocks = self.descend(node, tokens, limit // self.block_size)
        find = self._after_run if num_blocks == node.end else self._within_run
        return find(node, tokens, num_blocks * self._width, limit * TOKEN_BYTES)

    def _within_run(self, node: Node, tokens: bytes, place: int, stop: int) -> Match:
        """Extend a match that ends inside a run by the matching first tokens of the run's next block."""
        num_blocks = place // self._width
        index = num_blocks - node.start
        block = node.tokens[index * self._width : (index + 1) * self._width]
        common = common_bytes(block, tokens, place, min(len(block), stop - place)) // TOKEN_BYTES
        partial = node.blocks[index] if common else None
        return Match(node, num_blocks, num_blocks * self.block_size + common, partial, node)

    def _after_run(self, node: Node, tokens: bytes, place: int, stop: int) -> Match:
        """Extend a match that ends at the end of a run by the first block of the child that has most tokens in common
        with it."""
        num_blocks = place // self._width
        if not node.children:
            return _new_match(Match, (node, num_blocks, num_blocks * self.block_size, None, None))
        wanted = tokens[place : min(place + self._width, stop)]
        similar = node.first_blocks.get(wanted[:TOKEN_BYTES])
        if similar is None:
            closest = next(reversed(node.children.values()))  # the most recently added child, which is evicted last
            return _new_match(Match, (node, num_blocks, num_blocks * self.block_size, None, closest))
        position = bisect_left(similar, wanted)
        before = position - 1 if position else 0
        nearest, most = wanted, 0
        for block in similar[before : position + 1]:  # in sorted order, the closest block is a neighbour
            if (common := common_bytes(block, wanted, 0, len(wanted))) > most:
                nearest, most = block, common
        closest, num_tokens = node.children[nearest], num_blocks * self.block_size + most // TOKEN_BYTES
        return _new_match(Match, (node, num_blocks, num_tokens, closest.blocks[0], closest))

    def descend(self, node: Node, tokens: bytes, num_blocks: int) -> tuple[Node, int]:
        """Match whole blocks from the end of `node` on, up to `num_blocks` blocks from the root. Returns the last node
        of the match and the number of matching blocks from the root."""
        width, place, stop = self._width, node.end * self._width, num_blocks * self._width
        while place < stop and (child := node.children.get(tokens[place : place + width])) is not None:
            node, run = child, child.tokens
            length = len(child.blocks) * width
            if len(run) == length and tokens.startswith(run, place):  # the whole run, as usual
                place += length
                if place > stop:
                    place = stop
                continue
            common = common_bytes(run, tokens, place, min(length, stop - place)) // width * width
            place += common
            if common < length:
                break
        return node, place // width

    def node_at(self, node: Node, num_blocks: int) -> Node:
        """Return the node on the path to `node` that ends after `num_blocks` blocks; split the run if it is longer."""
        while node.start >= num_blocks and node.parent is not None:
            node = node.parent
        return node if node.end == num_blocks else self._split(node, num_blocks - node.start)

    def has(self, salt: str) -> bool:
        """Whether the salt has a root: blocks of it are cached, or a sequence holds its root."""
        return salt in self._roots

    def root(self, salt: str) -> Node:
        """Return the root of a salt; make it if there is none."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node([], b"", None, Owner(""), salt)
            node.ghosts = self._evicted_salts.take(salt)
        return node

    def path(self, node: Node) -> list[int]:
        """Return all blocks from the root to the end of a node."""
        if node.parent is None or node.parent.parent is None:
            return node.blocks.copy()
        runs = []
        while node.parent is not None:
            runs.append(node.blocks)
            node = node.parent
        return [block for run in reversed(runs) for block in run]

    # --------------------------------------------------------------------------------------------------- holding
    def lock(self, node: Node) -> None:
        """Count one more table that holds this run and all runs above it."""
        while node.parent is not None:
            node.locks += 1
            if node.locks == 1:
                self.pool.note_evictable(-len(node.blocks))
                self._policy.remove(node)
            elif node.locks == 2:
                self._num_shared += len(node.blocks)
            node = node.parent
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Count one table less that holds this run and all runs above it. A run without holders can be evicted."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._make_evictable(node)
            elif node.locks == 1:
                self._num_shared -= len(node.blocks)
            node = node.parent
        node.locks -= 1
        if node.locks == 0 and not node.children:
            self._drop_root(node)

    def _make_evictable(self, node: Node) -> None:
        """Pass a run without holders to the eviction policy. The blocks of a detached run are freed at once."""
        self.pool.note_evictable(len(node.blocks))
        if node.is_detached:
            self._num_blocks -= len(node.blocks)
            self.pool.add_free(node.blocks)
        else:
            self._policy.add(node)

    def _drop_root(self, root: Node) -> None:
        root.is_detached = True
        if self._roots.get(root.salt) is root:
            del self._roots[root.salt]
            self._evicted_salts.keep(root.salt, root.ghosts)

    # -------------------------------------------------------------------------------------------------- growing
    def insert(self, node: Node, tokens: bytes, blocks: list[int], owner: Owner) -> Node:
        """Add full private blocks after a node. The caller must be their only holder. Returns their node.

        No child of `node` may begin with the same block. A leaf that only the caller holds is extended in place, unless
        it remembers evicted runs.
        """
        self.pool.hand_over(blocks)
        self._num_blocks += len(blocks)
        node.changes += 1
        if node.locks == 1 and not node.children and not node.ghosts and node.parent is not None:
            node.tokens = node.tokens[: len(node.blocks) * self._width] + tokens
            node.owners.extend(node.end, owner)
            node.blocks += blocks
            node.end += len(blocks)
            self._policy.entered(node, is_new=False)
            return node
        child = Node(blocks, tokens, node, owner, node.salt)
        child.locks = 1
        node.add(child, tokens[: self._width])
        if node.ghosts is not None:
            node.ghosts.pop(tokens[: self._width], None)
        self._policy.entered(child, is_new=True)
        return child

    def _split(self, node: Node, count: int) -> Node:
        """Split a run after `count` blocks. Returns a new node with the first blocks, the parent of the rest."""
        parent, width = node.parent, self._width
        assert parent is not None
        assert 0 < count < len(node.blocks)
        first, cut = node.tokens[:width], count * width
        head = Node(node.blocks[:count], node.tokens[:cut], parent, node.owner_of(node.start), node.salt)
        head.owners = node.owners.split(head.end)
        head.locks, head.changes, head.keys, node.keys = node.locks, node.changes, node.keys[:count], node.keys[count:]
        parent.children[first] = head
        node.blocks, node.tokens, node.start, node.parent = node.blocks[count:], node.tokens[cut:], head.end, head
        node.changes += 1
        head.add(node, node.tokens[:width])
        self._policy.split(head, node)
        return head

    # ------------------------------------------------------------------------------------------------ forgetting
    def _evict(self, count: int) -> list[int]:
        """Evict `count` blocks from the leaves that the eviction policy chooses. The pool calls this."""
        found: list[int] = []
        while len(found) < count:
            node = self._policy.victim()
            assert not node.children
            taken, width = min(count - len(found), len(node.blocks)), self._width
            left = len(node.blocks) - taken
            eviction = Eviction(self.now, taken + self._forget_ghosts(node), node.owner_of(node.start + left))
            if self.on_evict is not None:
                for index in range(len(node.blocks) - 1, left - 1, -1):
                    self.on_evict(node, index)
            found += node.blocks[: left - 1 if left else None : -1]
            del node.blocks[left:], node.keys[left:]
            node.end -= taken
            if left:
                node.ghosts = remember(node.ghosts, node.tokens[left * width : (left + 1) * width], eviction)
            else:
                self._remove(node, eviction)
        self._num_blocks -= count
        return found

    def _remove(self, node: Node, eviction: Eviction) -> None:
        """Remove a leaf that has no blocks left."""
        parent, first = node.parent, node.tokens[: self._width]
        assert parent is not None
        self._policy.evicted(node)
        parent.remove(node, first)
        node.parent, node.is_detached = None, True
        parent.ghosts = remember(parent.ghosts, first, eviction)
        if not parent.children and parent.parent is None and parent.locks == 0:
            self._drop_root(parent)

    def _forget_ghosts(self, node: Node) -> int:
        """Forget the evicted runs that followed a run which is now shrinking. Returns how many blocks had been evicted
        from the end of the run itself."""
        ghosts, node.ghosts = node.ghosts, None
        if not ghosts:
            return 0
        start = len(node.blocks) * self._width
        lost = ghosts.get(node.tokens[start : start + self._width])
        return 0 if lost is None else lost.num_blocks

    def clear(self) -> int:
        """Empty the tree. Returns how many blocks of memory became free. Runs that tables still hold are detached, so
        no lookup finds them."""
        freed, before = 0, self.pool.num_reusable
        for node in self.nodes():
            if node.locks == 0:
                freed += len(node.blocks)
                self.pool.add_free(node.blocks)
            node.is_detached, node.children, node.first_blocks, node.ghosts = True, {}, {}, None
        for root in self._roots.values():
            root.is_detached, root.children, root.first_blocks, root.ghosts = True, {}, {}, None
        self._roots.clear()
        self._evicted_salts.clear()
        self._policy.clear()
        self._num_blocks -= freed
        return before - self.pool.num_reusable

    # ---------------------------------------------------------------------------------------------- content hashes
    def key_of(self, node: Node, index: int) -> bytes:
        """Return the content hash of a block, over the namespace, the salt and all tokens up to its end."""
        unhashed, above = [node], node.parent
        while above is not None and above.parent is not None and len(above.keys) < len(above.blocks):
            unhashed.append(above)
            above = above.parent
        key = root_key(self.namespace, node.salt) if above is None or above.parent is None else above.keys[-1]
        width = self._width
        for each in reversed(unhashed):  # iterative, because a path may be too long for recursion
            keys, count = each.keys, index + 1 if each is node else len(each.blocks)
            while len(keys) < count:
                place = len(keys) * width
                keys.append(next_key(keys[-1] if keys else key, each.tokens[place : place + width]))
            key = keys[-1]
        return node.keys[index]

    def root_key(self, salt: str) -> bytes:
        """Return the hash that precedes the first block of a salt."""
        return root_key(self.namespace, salt)

    # ------------------------------------------------------------------------------------------------- condition
    def nodes(self) -> Iterator[Node]:
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def evictable_blocks(self) -> list[int]:
        """Return the cached blocks without holders, approximately in the order of eviction."""
        return [block for node in self._policy for block in reversed(node.blocks)]

    def check(self) -> None:
        found = evictable = shared = 0
        for node in self.nodes():
            parent, width = node.parent, self._width
            assert parent is not None
            assert node.blocks
            assert len(node.tokens) >= len(node.blocks) * width
            assert node.start == parent.end
            assert node.end == node.start + len(node.blocks)
            assert not node.is_detached
            assert parent.locks >= node.locks >= sum(child.locks for child in node.children.values())
            assert parent.child(node.tokens[:width]) is node
            listed = [block for token in sorted(node.first_blocks) for block in node.first_blocks[token]]
            assert sorted(node.children) == listed
            assert (node in self._policy) == (node.locks == 0)
            found += len(node.blocks)
            evictable += len(node.blocks) if node.locks == 0 else 0
            shared += len(node.blocks) if node.locks > 1 else 0
        assert found <= self._num_blocks  # the other blocks are detached
        assert evictable == self.pool.num_evictable
        assert shared <= self._num_shared
        for salt, root in self._roots.items():
            assert root.salt == salt
            assert root.children or root.locks
        self._policy.check()
