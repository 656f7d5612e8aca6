"""What the layers of a model keep for later tokens, and how that is divided into blocks of equal size.

Layers with equal specs form a group. All groups take blocks of one pool: a block holds `block_size` tokens of the
layers of the first group, each in a plane. The layers with a window keep the same tokens in window blocks of their own,
which are free again when their tokens have left the window. Where all layers have a window, there are only these. All
planes are of one size: where layers keep unequally much of a token, several of those that keep less share a plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

STATE_ALIGNMENT = 64  # bytes; of the state of each layer
SCALED_DTYPES = ("float8", "int8", "int4")  # of caches whose keys and values have scales
SCALE_BYTES = 4  # float8, int8: the scale of a head in float32; int4: scale and offset of a group in float16
ANY_NUMBER = 1 << 32  # blocks: more than any sequence has
INT4_GROUP = 32  # numbers of a head that share a scale and an offset in an int4 cache; fewer where heads need it


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps. full: keys and values of all tokens; window: of the last `window` tokens; latent: one
    vector for each token, of which keys and values are made; state: a state of fixed size, whatever came before."""

    kind: Literal["full", "window", "latent", "state"]
    numbers: int = 0  # that it keeps of one token; see `stored_specs`
    window: int | None = None
    state_bytes: int = 0
    unit: int = 1  # of these numbers, those of one head: a plane is a whole number of units


def head_bytes(dim: int, kv_dtype: str, dims: Sequence[int]) -> tuple[int, int]:
    """Bytes of the numbers and of the scales of one head of one token in a cache with scales. `dims`: of all heads of
    the model. A float8 or int8 head has one scale; heads larger than others take room for more, so that all take
    equally many bytes for a number and share planes without gaps."""
    if kv_dtype == "int4":
        return dim // 2, SCALE_BYTES * (dim // math.gcd(dim, INT4_GROUP))
    return dim, SCALE_BYTES * (dim // math.gcd(*dims))


def stored_specs(specs: Sequence[KVCacheSpec], kv_dtype: str) -> tuple[KVCacheSpec, ...]:
    """The same specs, counted in entries of the cache: numbers, or bytes where `kv_dtype` keeps scales beside them.
    Latents have no scales."""
    if kv_dtype not in SCALED_DTYPES:
        return tuple(specs)
    dims = [spec.unit // 2 for spec in specs if spec.kind in ("full", "window")]
    return tuple(_stored(spec, kv_dtype, dims) if spec.kind in ("full", "window") else spec for spec in specs)


def _stored(spec: KVCacheSpec, kv_dtype: str, dims: Sequence[int]) -> KVCacheSpec:
    unit = 2 * sum(head_bytes(spec.unit // 2, kv_dtype, dims))
    return replace(spec, numbers=spec.numbers // spec.unit * unit, unit=unit)


class Place(NamedTuple):
    """Where a layer's keys and values are: in which plane of a block, in which part of it, and of whose blocks."""

    plane: int
    table: int  # one of the layout's; see `KVLayout.sources`
    part: int = 0  # of as many as the layer's keys and values go into a plane


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The places of all layers that keep something of every token, in their order, and the layers that keep a state."""

    places: tuple[Place, ...]
    num_planes: int
    numbers: int  # of a token in a plane
    sources: tuple[int, ...] = (0,)  # of each table: 0: the blocks of rows; c: the c-th window blocks of each of these
    window: int | None = None  # the longest of the window group; None: there is no such group
    num_states: int = 0  # layers that keep a state instead
    state_bytes: int = 0  # of one of these layers

    @property
    def num_window_blocks(self) -> int:
        """That belong to each block; none, if all layers have a window and the blocks are theirs."""
        return max(self.sources)

    def blocks_per_state(self, side_bytes: int) -> int:
        """How many blocks the states of all layers take, if the keys of one block and plane take `side_bytes`."""
        per_side = -(-self.num_states // (2 * self.num_planes))
        return -(-per_side * self.state_bytes // side_bytes)


@dataclass(frozen=True, slots=True)
class KVGroups:
    """What the engine must know of groups. By default there is one group, which keeps all tokens."""

    window: int | None = None  # tokens that layers of the window group see; None: there is no such group
    num_window_blocks: int = 0  # blocks that this group takes beside each block of the layers that keep all tokens
    num_states: int = 0  # states of whole sequences that memory has room for; 0: no layer keeps a state
    blocks_per_state: int = 0  # a state takes so many blocks, which follow all others

    @property
    def is_plain(self) -> bool:
        return self.window is None and not self.num_states

    @property
    def all_windows(self) -> bool:
        """Whether all layers have a window: a block of tokens has memory only while some sequence sees it."""
        return self.window is not None and not self.num_window_blocks

    def blocks_needed(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """How many blocks a sequence of `num_blocks` blocks of tokens takes at most, window blocks included. Steps
        compute up to `max_chunk` of its tokens."""
        if self.all_windows:
            return min(num_blocks, self._most_seen(block_size, max_chunk))
        return num_blocks + self.num_window_blocks * min(num_blocks, self._most_seen(block_size, max_chunk))

    def blocks_held(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """The reverse of `blocks_needed`: how many blocks of tokens a sequence may have that takes `num_blocks`. Where
        all layers have a window, any number goes into as many as one chunk sees."""
        most_seen = self._most_seen(block_size, max_chunk)
        if self.all_windows:
            return num_blocks if num_blocks < most_seen else ANY_NUMBER
        return max(
            num_blocks - self.num_window_blocks * most_seen, min(num_blocks // (1 + self.num_window_blocks), most_seen)
        )

    def _most_seen(self, block_size: int, max_chunk: int) -> int:
        """Blocks of tokens that some token of a chunk sees through the window."""
        return 0 if self.window is None else -(-(self.window + max_chunk) // block_size) + 1


PLAIN = KVGroups()


def one_group(num_layers: int, numbers: int) -> KVLayout:
    """The layout of layers that all keep so many numbers of all tokens."""
    return KVLayout(tuple(Place(plane, 0) for plane in range(num_layers)), num_layers, numbers)


def lay_out(specs: Sequence[KVCacheSpec], *, split: bool) -> KVLayout:
    """Divide layers into groups. Without `split`, layers with a window keep all tokens, as the others do."""
    states = [spec for spec in specs if spec.kind == "state"]
    kept = [spec for spec in specs if spec.kind != "state"]
    assert kept, "a model without attention"
    state_bytes = max((-(-spec.state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for spec in states), default=0)
    layout = _split(kept) if split and can_split(specs) else _one_group(kept)
    if split and is_windowed(specs):
        layout = replace(layout, window=_longest_window(kept))
    return replace(layout, num_states=len(states), state_bytes=state_bytes)


def is_windowed(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether all layers have a window."""
    return all(spec.kind == "window" for spec in specs)


def can_split(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether a group of layers with windows saves memory: some layers keep all tokens, and the blocks of the window
    group are at least half full."""
    windows = [spec for spec in specs if spec.kind == "window"]
    full = [spec for spec in specs if spec.kind not in ("window", "state")]
    if not full or not windows:
        return False
    numbers = _plane_numbers([*full, *windows])
    num_planes = -(-len(full) // (numbers // full[0].numbers))
    return 2 * len(windows) * windows[0].numbers >= num_planes * numbers


def _plane_numbers(kept: Sequence[KVCacheSpec]) -> int:
    """The numbers of a token in a plane: as many as the layer has that keeps most, in whole heads of all layers."""
    unit = math.lcm(*(spec.unit for spec in kept))
    return -(-max(spec.numbers for spec in kept) // unit) * unit


def _one_group(kept: Sequence[KVCacheSpec]) -> KVLayout:
    """All layers keep all tokens. Those with a window read a table of their own if their heads are others: the blocks
    are the same, the plan of attention is not."""
    numbers = _plane_numbers(kept)
    full = next((spec for spec in kept if spec.kind != "window"), kept[0])
    places: list[Place] = []
    last: dict[int, Place] = {}  # of each table
    num_planes = 0
    for spec in kept:
        table = int((spec.numbers, spec.unit) != (full.numbers, full.unit))
        before = last.get(table)
        if before is not None and before.part + 1 < numbers // spec.numbers:
            place = Place(before.plane, table, before.part + 1)
        else:
            place, num_planes = Place(num_planes, table), num_planes + 1
        last[table] = place
        places.append(place)
    return KVLayout(tuple(places), num_planes, numbers, (0,) * len(last))


def _split(kept: Sequence[KVCacheSpec]) -> KVLayout:
    """Layers with a window keep their tokens in window blocks, which have the same planes as the blocks of others."""
    numbers = _plane_numbers(kept)
    of_full, of_window = (
        numbers // next(spec.numbers for spec in kept if (spec.kind == "window") is has_window)
        for has_window in (False, True)
    )
    num_planes = -(-sum(spec.kind != "window" for spec in kept) // of_full)
    places: list[Place] = []
    num_full = num_windows = 0
    for spec in kept:
        if spec.kind == "window":
            block, place = divmod(num_windows, num_planes * of_window)
            places.append(Place(place // of_window, 1 + block, place % of_window))
            num_windows += 1
        else:
            places.append(Place(num_full // of_full, 0, num_full % of_full))
            num_full += 1
    num_tables = 1 + max(place.table for place in places)
    return KVLayout(tuple(places), num_planes, numbers, tuple(range(num_tables)), _longest_window(kept))


def _longest_window(kept: Sequence[KVCacheSpec]) -> int:
    return max(spec.window for spec in kept if spec.window is not None)
