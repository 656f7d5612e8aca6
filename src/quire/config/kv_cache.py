"""What the layers of a model keep for later tokens, and how that is divided into blocks of equal size.

Layers with equal specs form a group. All groups take blocks of one pool: a block holds `block_size` tokens of as many
layers as the first group has (its planes). The layers with a window keep the same tokens in window blocks of their own,
which are free again when their tokens have left the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

STATE_ALIGNMENT = 64  # bytes; of the state of each layer


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps. full: keys and values of all tokens; window: of the last `window` tokens; latent: one
    vector for each token, of which keys and values are made; state: a state of fixed size, whatever came before."""

    kind: Literal["full", "window", "latent", "state"]
    numbers: int = 0  # that it keeps of one token, in the dtype of the cache
    window: int | None = None
    state_bytes: int = 0


class Place(NamedTuple):
    """Where a layer's keys and values are: in which plane of a block, and of whose blocks."""

    plane: int
    table: int  # 0: the blocks of a row's table; c: the c-th of the window blocks that belong to each of them


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The places of all layers that keep something of every token, in their order, and the layers that keep a state."""

    places: tuple[Place, ...]
    num_planes: int
    window: int | None = None  # the longest of the window group; None: there is no such group
    num_states: int = 0  # layers that keep a state instead
    state_bytes: int = 0  # of one of these layers

    @property
    def num_tables(self) -> int:
        return 1 + max(place.table for place in self.places)

    def blocks_per_state(self, side_bytes: int) -> int:
        """How many blocks the states of all layers take, if the keys of one block and plane take `side_bytes`."""
        per_side = -(-self.num_states // (2 * self.num_planes))
        return -(-per_side * self.state_bytes // side_bytes)


@dataclass(frozen=True, slots=True)
class KVGroups:
    """What the engine must know of groups. By default there is one group, which keeps all tokens."""

    window: int | None = None  # tokens that layers of the window group see; None: there is no such group
    num_window_blocks: int = 0  # blocks that this group takes for the tokens of one block
    num_states: int = 0  # states of whole sequences that memory has room for; 0: no layer keeps a state
    blocks_per_state: int = 0  # a state takes so many blocks, which follow all others

    @property
    def is_plain(self) -> bool:
        return self.window is None and not self.num_states

    def blocks_needed(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """How many blocks a sequence of `num_blocks` blocks of tokens takes at most, window blocks included. Steps
        compute up to `max_chunk` of its tokens."""
        return num_blocks + self.num_window_blocks * min(num_blocks, self._most_seen(block_size, max_chunk))

    def blocks_held(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """The reverse of `blocks_needed`: how many blocks of tokens a sequence may have that takes `num_blocks`."""
        most_seen = self._most_seen(block_size, max_chunk)
        return max(
            num_blocks - self.num_window_blocks * most_seen, min(num_blocks // (1 + self.num_window_blocks), most_seen)
        )

    def _most_seen(self, block_size: int, max_chunk: int) -> int:
        """Blocks of tokens that some token of a chunk sees through the window."""
        return 0 if self.window is None else -(-(self.window + max_chunk) // block_size) + 1


PLAIN = KVGroups()


def one_group(num_layers: int) -> KVLayout:
    """The layout of layers that all keep all tokens."""
    return KVLayout(tuple(Place(plane, 0) for plane in range(num_layers)), num_layers)


def lay_out(specs: Sequence[KVCacheSpec], *, split: bool) -> KVLayout:
    """Divide layers into groups. Without `split`, layers with a window keep all tokens, as the others do."""
    states = [spec for spec in specs if spec.kind == "state"]
    kept = [spec for spec in specs if spec.kind != "state"]
    assert kept, "a model without attention"
    state_bytes = max((-(-spec.state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for spec in states), default=0)
    if not split or not can_split(specs):
        return replace(one_group(len(kept)), num_states=len(states), state_bytes=state_bytes)
    num_planes = sum(spec.kind != "window" for spec in kept)
    places, num_full, num_windows = [], 0, 0
    for spec in kept:
        if spec.kind == "window":
            places.append(Place(num_windows % num_planes, 1 + num_windows // num_planes))
            num_windows += 1
        else:
            places.append(Place(num_full, 0))
            num_full += 1
    window = max(spec.window for spec in kept if spec.window is not None)
    return KVLayout(tuple(places), num_planes, window, len(states), state_bytes)


def can_split(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether a group of layers with windows saves memory: some layers keep all tokens, all keep equally much of one,
    and the blocks of the window group are at least half full."""
    kept = [spec for spec in specs if spec.kind != "state"]
    num_windows = sum(spec.kind == "window" for spec in kept)
    num_full = len(kept) - num_windows
    return num_full > 0 and 2 * num_windows >= num_full and len({spec.numbers for spec in kept}) == 1
