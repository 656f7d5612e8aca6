"""The tree of cached prefixes: exact tokens lead to the blocks that hold their keys and values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.engine.kvcache.eviction import EvictionPolicy
from quire.engine.kvcache.keys import TOKEN_BYTES, common_bytes, next_key, root_key
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.run_history import EvictedSalts, Eviction, Ghosts, Owner, Owners, remember


class Node:
    """A run of full blocks that follow each other, reached by the tokens of all runs before it and its own.

    `locks` counts the tables that hold this run, and so every run on the way to it. A root has no blocks; there is one
    for each salt.
    """

    __slots__ = (
        "blocks", "changes", "children", "end", "first_keys", "ghosts", "is_detached", "keys", "locks", "owners",
        "parent", "salt", "score", "start", "tokens", "uses",
    )  # fmt: skip

    def __init__(self, blocks: list[int], tokens: bytes, parent: Node | None, owner: Owner, salt: str) -> None:
        self.blocks, self.tokens, self.parent, self.salt = blocks, tokens, parent, salt
        self.start: int = 0 if parent is None else parent.end  # blocks from the root to this run
        self.owners = Owners(self.start, owner)
        self.end: int = self.start + len(blocks)  # and to its end
        self.locks = 0
        self.changes = 0  # how often a match that ends here may have become longer
        self.first_keys: list[bytes] = []  # the tokens of each child's first block, sorted
        self.children: list[Node] = []
        self.keys: list[bytes] = []  # content hashes of the first blocks, as far as a tier asked for them
        self.ghosts: Ghosts | None = None  # evicted runs that followed, by their first block's tokens
        self.is_detached = False  # nothing finds this run any more: it was evicted, or the tree was cleared
        self.uses = 0  # the eviction policy's own, as is `score`
        self.score = 0.0

    def child(self, first_block: bytes) -> Node | None:
        """The child whose run begins with a block of exactly these tokens."""
        keys = self.first_keys
        place = bisect_left(keys, first_block)
        return self.children[place] if place < len(keys) and keys[place] == first_block else None

    def owner_of(self, block: int) -> Owner:
        """The request that computed a block of this run, or of one on the way to it; counted from the root."""
        node = self
        while node.start > block and node.parent is not None:
            node = node.parent
        return node.owners.of(block)

    def add(self, child: Node, first_block: bytes) -> None:
        place = bisect_left(self.first_keys, first_block)
        self.first_keys.insert(place, first_block)
        self.children.insert(place, child)

    def remove(self, child: Node, first_block: bytes) -> None:
        place = bisect_left(self.first_keys, first_block)
        assert self.children[place] is child
        del self.first_keys[place], self.children[place]


class Match(NamedTuple):
    """How far a sequence's tokens agree with the tree.

    `num_blocks` whole blocks agree, the last of them in the run of `node`. Of the block `partial`, the first tokens
    agree as well: `num_tokens` in all.
    """

    node: Node | None
    num_blocks: int = 0
    num_tokens: int = 0
    partial: int | None = None
    closest: Node | None = None  # the run that has `partial`, or where none agrees further, one that goes on otherwise


NO_MATCH = Match(None)


class PrefixTree:
    """Runs of blocks by the tokens that lead to them, with the count of their holders.

    Matching is exact, token by token, within one salt. Blocks that nobody holds stay until the pool needs them; the
    eviction policy chooses which run shrinks, always from the end of a leaf. Whoever holds a run holds all runs on the
    way to it.
    """

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy, namespace: bytes = b"") -> None:
        self._pool, self._policy, self._namespace = pool, policy, namespace
        self.block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._evicted_salts = EvictedSalts()
        self._num_blocks = self._num_shared = 0
        self.now = 0.0  # when what happens now happens, on the engine's clock
        self.on_evict: Callable[[Node, int], None] | None = None  # told of a node and the index of a block to go
        pool.evict = self._evict

    def __len__(self) -> int:
        """Blocks in the tree, those included that were cut off from it while tables held them."""
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
        """How far the first `limit` of these tokens agree with the tree."""
        node = self._roots.get(salt)
        if node is None:
            return NO_MATCH
        node, num_blocks = self.descend(node, tokens, limit // self.block_size)
        find = self._after_run if num_blocks == node.end else self._within_run
        return find(node, tokens, num_blocks * self._width, limit * TOKEN_BYTES)

    def _within_run(self, node: Node, tokens: bytes, place: int, stop: int) -> Match:
        """A match that ends inside a run: perhaps it goes on for a few tokens of the run's next block."""
        num_blocks = place // self._width
        index = num_blocks - node.start
        block = node.tokens[index * self._width : (index + 1) * self._width]
        common = common_bytes(block, tokens, place, min(len(block), stop - place)) // TOKEN_BYTES
        partial = node.blocks[index] if common else None
        return Match(node, num_blocks, num_blocks * self.block_size + common, partial, node)

    def _after_run(self, node: Node, tokens: bytes, place: int, stop: int) -> Match:
        """A match that ends where a run does: perhaps a child's first block begins like the next tokens."""
        num_blocks = place // self._width
        if not node.children:
            return Match(node, num_blocks, num_blocks * self.block_size)
        wanted = tokens[place : min(place + self._width, stop)]
        position = bisect_left(node.first_keys, wanted)
        closest, most = node.children[max(position - 1, 0)], 0
        for child in node.children[max(position - 1, 0) : position + 1]:  # in sorted order the closest is a neighbour
            if child.tokens[:TOKEN_BYTES] == wanted[:TOKEN_BYTES]:
                common = common_bytes(child.tokens, wanted, 0, len(wanted))
                if common > most:
                    closest, most = child, common
        common = most // TOKEN_BYTES
        partial = closest.blocks[0] if common else None
        return Match(node, num_blocks, num_blocks * self.block_size + common, partial, closest)

    def descend(self, node: Node, tokens: bytes, num_blocks: int) -> tuple[Node, int]:
        """Go on from the end of a node's run as far as whole blocks of these tokens agree, up to `num_blocks` blocks;
        returns the last node met and how many blocks agree from the root on."""
        width, place, stop = self._width, node.end * self._width, num_blocks * self._width
        while place < stop and (child := node.child(tokens[place : place + width])) is not None:
            node, run = child, len(child.blocks) * width
            length = common_bytes(node.tokens, tokens, place, min(run, stop - place)) // width * width
            place += length
            if length < run:
                break
        return node, place // width

    def node_at(self, node: Node, num_blocks: int) -> Node:
        """The node whose run ends after `num_blocks` blocks on the way to `node`; a longer run is split there."""
        while node.start >= num_blocks and node.parent is not None:
            node = node.parent
        return node if node.end == num_blocks else self._split(node, num_blocks - node.start)

    def has(self, salt: str) -> bool:
        """Whether anything is cached, or about to be, for a salt."""
        return salt in self._roots

    def root(self, salt: str) -> Node:
        """The root of a salt's runs."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node([], b"", None, Owner(""), salt)
            node.ghosts = self._evicted_salts.take(salt)
        return node

    def path(self, node: Node) -> list[int]:
        """All blocks from the root to the end of a node's run."""
        if node.parent is None or node.parent.parent is None:
            return node.blocks.copy()
        runs = []
        while node.parent is not None:
            runs.append(node.blocks)
            node = node.parent
        return [block for run in reversed(runs) for block in run]

    def used(self, node: Node) -> None:
        """A sequence found the runs on the way to a node."""
        self._policy.used(node)

    # --------------------------------------------------------------------------------------------------- holding
    def lock(self, node: Node) -> None:
        """One more table holds this run and all on the way to it."""
        while node.parent is not None:
            node.locks += 1
            if node.locks == 1:
                self._pool.num_free -= len(node.blocks)
                self._pool.num_evictable -= len(node.blocks)
                self._policy.remove(node)
            elif node.locks == 2:
                self._num_shared += len(node.blocks)
            node = node.parent
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """One table less holds this run and all on the way to it."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._let_go(node)
            elif node.locks == 1:
                self._num_shared -= len(node.blocks)
            node = node.parent
        node.locks -= 1
        if node.locks == 0 and not node.children:
            self._drop_root(node)

    def _let_go(self, node: Node) -> None:
        """Nobody holds a run any more: it can be evicted, or if nothing could find it, it is free at once."""
        self._pool.num_free += len(node.blocks)
        if node.is_detached:
            self._num_blocks -= len(node.blocks)
            self._pool.add_free(node.blocks)
        else:
            self._pool.num_evictable += len(node.blocks)
            self._policy.add(node)

    def _drop_root(self, root: Node) -> None:
        root.is_detached = True
        if self._roots.get(root.salt) is root:
            del self._roots[root.salt]
            self._evicted_salts.keep(root.salt, root.ghosts)

    # -------------------------------------------------------------------------------------------------- growing
    def insert(self, node: Node, tokens: bytes, blocks: list[int], owner: Owner) -> Node:
        """Cache full private blocks that follow a node, which the caller alone holds from now on; returns their node.

        No child of `node` may begin with the first of them. A run that only the caller holds is extended in place,
        unless it remembers what was evicted after it.
        """
        self._pool.hand_over(blocks)
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
        """Cut the first blocks of a run off into a node of their own, which becomes the parent of the rest."""
        parent, width = node.parent, self._width
        assert parent is not None
        assert 0 < count < len(node.blocks)
        first, cut = node.tokens[:width], count * width
        head = Node(node.blocks[:count], node.tokens[:cut], parent, node.owner_of(node.start), node.salt)
        head.owners = node.owners.split(head.end)
        head.locks, head.changes, head.keys, node.keys = node.locks, node.changes, node.keys[:count], node.keys[count:]
        parent.children[bisect_left(parent.first_keys, first)] = head
        node.blocks, node.tokens, node.start, node.parent = node.blocks[count:], node.tokens[cut:], head.end, head
        node.changes += 1
        head.add(node, node.tokens[:width])
        self._policy.split(head, node)
        return head

    # ------------------------------------------------------------------------------------------------ forgetting
    def _evict(self, count: int) -> list[int]:
        """Take `count` blocks out of the tree, which nobody holds, as the policy chooses."""
        found: list[int] = []
        while len(found) < count:
            node = self._policy.victim()
            assert not node.children
            taken, width = min(count - len(found), len(node.blocks)), self._width
            left = len(node.blocks) - taken
            gone = Eviction(self.now, taken + self._forget_ghosts(node), node.owner_of(node.start + left))
            if self.on_evict is not None:
                for index in range(len(node.blocks) - 1, left - 1, -1):
                    self.on_evict(node, index)
            found += node.blocks[: left - 1 if left else None : -1]
            del node.blocks[left:], node.keys[left:]
            node.end -= taken
            if left:
                node.ghosts = remember(node.ghosts, node.tokens[left * width : (left + 1) * width], gone)
            else:
                self._remove(node, gone)
        self._num_blocks -= count
        return found

    def _remove(self, node: Node, gone: Eviction) -> None:
        """Forget a leaf that has no blocks left."""
        parent, first = node.parent, node.tokens[: self._width]
        assert parent is not None
        self._policy.evicted(node)
        parent.remove(node, first)
        node.parent, node.is_detached = None, True
        parent.ghosts = remember(parent.ghosts, first, gone)
        if not parent.children and parent.parent is None and parent.locks == 0:
            self._drop_root(parent)

    def _forget_ghosts(self, node: Node) -> int:
        """A run shrinks, and what followed its end has no place any more; returns how many blocks of itself it has lost
        before."""
        ghosts, node.ghosts = node.ghosts, None
        if not ghosts:
            return 0
        start = len(node.blocks) * self._width
        lost = ghosts.get(node.tokens[start : start + self._width])
        return 0 if lost is None else lost.num_blocks

    def clear(self) -> int:
        """Forget everything; returns how many blocks nobody held. Nothing finds what tables hold now ever again."""
        freed = 0
        for node in self.nodes():
            if node.locks == 0:
                freed += len(node.blocks)
                self._pool.add_free(node.blocks)
            node.is_detached, node.children, node.first_keys, node.ghosts = True, [], [], None
        for root in self._roots.values():
            root.is_detached, root.children, root.first_keys, root.ghosts = True, [], [], None
        self._roots.clear()
        self._evicted_salts.clear()
        self._policy.clear()
        self._num_blocks -= freed
        self._pool.num_evictable = 0
        return freed

    # ---------------------------------------------------------------------------------------------- content hashes
    def key_of(self, node: Node, index: int) -> bytes:
        """The content hash of a block: of the namespace, the salt and every token up to its end."""
        unhashed, above = [node], node.parent
        while above is not None and above.parent is not None and len(above.keys) < len(above.blocks):
            unhashed.append(above)
            above = above.parent
        key = root_key(self._namespace, node.salt) if above is None or above.parent is None else above.keys[-1]
        width = self._width
        for each in reversed(unhashed):  # a loop: a way may have more runs than a stack has room for
            keys, count = each.keys, index + 1 if each is node else len(each.blocks)
            while len(keys) < count:
                place = len(keys) * width
                keys.append(next_key(keys[-1] if keys else key, each.tokens[place : place + width]))
            key = keys[-1]
        return node.keys[index]

    def root_key(self, salt: str) -> bytes:
        """What the content hashes of a salt's blocks begin with."""
        return root_key(self._namespace, salt)

    # ------------------------------------------------------------------------------------------------- condition
    def nodes(self) -> Iterator[Node]:
        todo = [child for root in self._roots.values() for child in root.children]
        while todo:
            node = todo.pop()
            todo += node.children
            yield node

    def evictable_blocks(self) -> list[int]:
        """Cached blocks that nobody holds, those first that are evicted first."""
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
            assert parent.locks >= node.locks >= sum(child.locks for child in node.children)
            assert parent.child(node.tokens[:width]) is node
            assert node.first_keys == sorted(set(node.first_keys))
            assert (node in self._policy) == (node.locks == 0)
            found += len(node.blocks)
            evictable += len(node.blocks) if node.locks == 0 else 0
            shared += len(node.blocks) if node.locks > 1 else 0
        assert found <= self._num_blocks  # the rest is detached
        assert evictable == self._pool.num_evictable
        assert shared <= self._num_shared
        for salt, root in self._roots.items():
            assert root.salt == salt
            assert root.children or root.locks
        self._policy.check()
