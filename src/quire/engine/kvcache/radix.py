"""The tree of kept prefixes: exact tokens lead to the block that holds their keys and values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from quire.engine.kvcache.keys import TOKEN_BYTES, frame, next_key, pack, root_key

TokensOf = Callable[[int, int], Sequence[int]]  # a sequence's known tokens from a position to another


class Node:
    """One full block, reached by the tokens of all blocks before it and its own. Never split, so never moved."""

    __slots__ = ("block", "children", "depth", "key", "keys", "name", "parent")

    def __init__(self, block: int, key: bytes, parent: Node | None) -> None:
        self.block, self.key, self.parent = block, key, parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks from the root to here
        self.keys: Sequence[bytes] = ()  # of the children, sorted; lists once there is one
        self.children: Sequence[Node] = ()
        self.name: bytes | None = None  # what the tiers call the block, once they asked

    def child(self, key: bytes) -> Node | None:
        place = bisect_left(self.keys, key)
        return self.children[place] if place < len(self.keys) and self.keys[place] == key else None

    def closest(self, key: bytes) -> tuple[Node | None, int]:
        """The child that begins like `key` for the most bytes, and how many: in sorted order it is a neighbour."""
        place = bisect_left(self.keys, key)
        best, most = None, 0
        for child in self.children[max(place - 1, 0) : place + 1]:
            if (common := _common_bytes(child.key, key)) > most:
                best, most = child, common
        return best, most

    def add(self, child: Node) -> None:
        if not isinstance(self.keys, list) or not isinstance(self.children, list):
            self.keys, self.children = [child.key], [child]
            return
        place = bisect_left(self.keys, child.key)
        self.keys.insert(place, child.key)
        self.children.insert(place, child)

    def discard(self, child: Node) -> None:
        if len(self.keys) == 1:
            self.keys = self.children = ()
            return
        place = bisect_left(self.keys, child.key)
        assert isinstance(self.keys, list)
        assert isinstance(self.children, list)
        del self.keys[place], self.children[place]


class PrefixTree:
    """Nodes by the tokens that lead to them, and by block. Knows no holders.

    Keys are the tokens themselves, and the salt, framed by its length, stands before the first block's: two prompts
    meet in a node only if salt and every token agree.
    """

    def __init__(self, block_size: int, namespace: bytes = b"") -> None:
        self._block_size, self._namespace = block_size, namespace
        self._nodes: dict[int, Node] = {}
        self.root = Node(-1, b"", None)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        """False for a node that was removed, or was there before the tree was cleared."""
        return node is self.root or self._nodes.get(node.block) is node

    def node(self, block: int) -> Node:
        """The node of a kept block."""
        return self._nodes[block]

    def root_key(self, salt: str) -> bytes:
        """What the names of a tenant's blocks begin with."""
        return root_key(self._namespace, salt)

    def key_of(self, node: Node) -> bytes:
        """What the tiers call a node's block: a digest over the namespace, the salt and every token up to its end.

        Made when it is asked for, and kept on the node and all before it.
        """
        unnamed: list[Node] = []
        while node.name is None:
            unnamed.append(node)
            assert node.parent is not None
            if node.parent.parent is None:
                break
            node = node.parent
        width, name = self._block_size * TOKEN_BYTES, node.name
        for each in reversed(unnamed):
            parent = self.root_key(_salt(each.key[:-width])) if name is None else name
            name = each.name = next_key(parent, each.key[-width:])
        assert name is not None
        return name

    def keys(self, depth: int, salt: str, tokens: Sequence[int]) -> list[bytes]:
        """What leads from a node at `depth` to the block of the first tokens, from there to the next, and so on."""
        data, width = pack(tokens), self._block_size * TOKEN_BYTES
        keys = [data[place : place + width] for place in range(0, len(data), width)]
        if depth == 0 and keys:
            keys[0] = _frame(salt) + keys[0]
        return keys

    def match(self, salt: str, tokens_of: TokensOf, limit: int) -> tuple[list[Node], int]:
        """The nodes that begin like these tokens, and how many tokens agree, at most `limit`.

        If that number ends within a block, the last node is the one whose block agrees so far.
        """
        size, node = self._block_size, self.root
        path: list[Node] = []
        for key in self._keys_ahead(salt, tokens_of, limit // size):
            child = node.child(key)
            if child is None:
                break
            path.append(child)
            node = child
        whole = len(path) * size
        rest = tokens_of(whole, min(limit, whole + size))
        if not rest or not node.children:
            return path, whole
        (key,) = self.keys(node.depth, salt, rest)
        closest, common = node.closest(key)
        num_tokens = (common - (len(key) - len(rest) * TOKEN_BYTES)) // TOKEN_BYTES
        if closest is None or num_tokens <= 0:
            return path, whole
        return [*path, closest], whole + num_tokens

    def _keys_ahead(self, salt: str, tokens_of: TokensOf, num_blocks: int) -> Iterator[bytes]:
        """The keys of a sequence's first blocks, made for ever more of them at once: most searches end early."""
        size, start, ahead = self._block_size, 0, 1
        while start < num_blocks:
            stop = min(start + ahead, num_blocks)
            yield from self.keys(start, salt, tokens_of(start * size, stop * size))
            start, ahead = stop, 4 * ahead

    def grow(self, node: Node, keys: Sequence[bytes], blocks: Sequence[int]) -> list[Node]:
        """A new child of `node` for the first block, of that one for the next, and so on; returns them. Neither the
        first child nor any of the blocks may be there yet, and keys beyond the blocks are not used."""
        nodes, grown = self._nodes, []
        for key, block in zip(keys, blocks, strict=False):
            child = nodes[block] = Node(block, key, node)
            node.add(child)
            grown.append(child)
            node = child
        return grown

    def remove(self, block: int) -> None:
        """Forget a leaf."""
        node = self._nodes.pop(block)
        if node.children or node.parent is None:
            raise ValueError(f"block {block} has {len(node.children)} blocks behind it and cannot be forgotten")
        node.parent.discard(node)

    def clear(self) -> None:
        for node in self._nodes.values():
            node.parent, node.children = None, []  # nothing is left in a ring for the garbage collector to find
        self._nodes.clear()
        self.root = Node(-1, b"", None)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def check(self) -> None:
        found, todo = 0, [self.root]
        while todo:
            node = todo.pop()
            assert list(node.keys) == [child.key for child in node.children] == sorted(set(node.keys))
            for child in node.children:
                assert child.parent is node
                assert child.depth == node.depth + 1
                assert self._nodes[child.block] is child
                assert node is self.root or len(child.key) == self._block_size * TOKEN_BYTES
            found += len(node.children)
            todo += node.children
        assert found == len(self._nodes)


@lru_cache(maxsize=256)
def _frame(salt: str) -> bytes:
    return frame(salt.encode("utf-8", "surrogatepass"))


def _salt(framed: bytes) -> str:
    return framed[len(_frame("")) :].decode("utf-8", "surrogatepass")


def _common_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])
