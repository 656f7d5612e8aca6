"""What the layers of a model keep for later tokens (keys and values, latents or states), and its division into blocks.

Layers with equal specs form a group, and all groups take blocks from one pool. A block holds `block_size` tokens; each
layer of the first group has a plane in it. Layers with a window keep the same tokens in separate window blocks, which
are freed when their tokens have left the window. If all layers have a window, there are only window blocks. All planes
have the same size: where some layers keep less per token than others, several of them share a plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

STATE_ALIGNMENT = 64  # bytes to which the state of each layer is aligned
SCALED_DTYPES = ("float8", "int8", "int4")  # cache dtypes that store scales beside keys and values
SCALE_BYTES = 4  # float8, int8: one float32 scale per head; int4: float16 scale and offset per group
ANY_NUMBER = 1 << 32  # of blocks: more than any sequence has
INT4_GROUP = 32  # elements per scale and offset of an int4 head; fewer if it does not divide the head size


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps. "full": keys and values of all tokens; "window": keys and values of the last `window`
    tokens; "latent": one vector per token, from which keys and values are computed; "state": a state of fixed size."""

    kind: Literal["full", "window", "latent", "state"]
    numbers: int = 0  # cache entries per token; see `stored_specs`
    window: int | None = None
    state_bytes: int = 0
    unit: int = 1  # the part of `numbers` that belongs to one head; a plane is a whole number of units
    is_chunked: bool = False  # the window is a chunk: a token sees the tokens of its own chunk, see `first_in_window`
    index: int = 0  # entries of the key that an indexer keeps beside a latent


def first_in_window(position: int, window: int, *, is_chunked: bool) -> int:
    """Return the first token that the token at `position` sees: the window ends with it, or texts are divided into
    chunks of `window` tokens and it sees its own."""
    return position // window * window if is_chunked else max(position - window + 1, 0)


def head_bytes(dim: int, kv_dtype: str, dims: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the elements and of the scales that one head of one token takes in a quantized cache.

    `dims`: the head sizes of all heads of the model. A float8 or int8 head has one scale. If head sizes differ, larger
    heads reserve proportionally more bytes for scales, so that all heads take equally many bytes per element and share
    planes without gaps.
    """
    if kv_dtype == "int4":
        return dim // 2, SCALE_BYTES * (dim // math.gcd(dim, INT4_GROUP))
    return dim, SCALE_BYTES * (dim // math.gcd(*dims))


def stored_specs(specs: Sequence[KVCacheSpec], kv_dtype: str) -> tuple[KVCacheSpec, ...]:
    """Convert specs to entries of the cache: elements, or bytes if `kv_dtype` stores scales. Latents have no scales."""
    if kv_dtype not in SCALED_DTYPES:
        return tuple(specs)
    dims = [spec.unit // 2 for spec in specs if spec.kind in ("full", "window")]
    return tuple(_stored(spec, kv_dtype, dims) if spec.kind in ("full", "window") else spec for spec in specs)


def _stored(spec: KVCacheSpec, kv_dtype: str, dims: Sequence[int]) -> KVCacheSpec:
    unit = 2 * sum(head_bytes(spec.unit // 2, kv_dtype, dims))
    return replace(spec, numbers=spec.numbers // spec.unit * unit, unit=unit)


class Place(NamedTuple):
    """Where a layer's keys and values are: in which plane, through which table, and in which part of the plane."""

    plane: int
    table: int  # index of the table of the layout; see `KVLayout.sources`
    part: int = 0  # index of the part, if several layers share the plane


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The places of all layers that keep something per token, in their order, and the size of the states of the
    others."""

    places: tuple[Place, ...]
    num_planes: int
    numbers: int  # cache entries per token in a plane
    sources: tuple[int, ...] = (0,)  # of each table: 0: the rows' blocks; c: the c-th window block of each block
    window: int | None = None  # the longest window of the window group; None: no window group
    num_states: int = 0  # layers that keep a state
    chunks: tuple[int | None, ...] = ()  # of each table: tokens of the chunks that its layers see; (): no chunks
    index: int = 0  # entries of an indexer's key; these keys share planes of their own
    index_places: tuple[Place | None, ...] = ()  # of each layer's key; None: it has no indexer. (): none has one
    state_bytes: int = 0  # of one such layer

    @property
    def num_window_blocks(self) -> int:
        """Window blocks per block. 0 if no layer has a window, or if all have one: then the blocks themselves are
        window blocks."""
        return max(self.sources)

    def blocks_per_state(self, side_bytes: int) -> int:
        """Return how many blocks the states of all layers take, if the keys of one block take `side_bytes` in one
        plane."""
        per_side = -(-self.num_states // (2 * self.num_planes))
        return -(-per_side * self.state_bytes // side_bytes)


@dataclass(frozen=True, slots=True)
class KVGroups:
    """What the engine needs to know about groups of layers. By default there is one group, which keeps all tokens."""

    window: int | None = None  # tokens that layers of the window group see; None: no window group
    num_window_blocks: int = 0  # window blocks that each block has
    num_states: int = 0  # state slots (each for all layers of a sequence); 0: no layer keeps a state
    blocks_per_state: int = 0  # blocks of memory per state slot; they follow all other blocks
    is_chunked: bool = False  # windows are chunks of the text

    def first_seen(self, position: int) -> int:
        """Return the first token that the token at `position` sees in layers with a window."""
        return 0 if self.window is None else first_in_window(position, self.window, is_chunked=self.is_chunked)

    @property
    def is_plain(self) -> bool:
        return self.window is None and not self.num_states

    @property
    def all_windows(self) -> bool:
        """Whether all layers have a window: a block has memory only while some sequence sees its tokens."""
        return self.window is not None and not self.num_window_blocks

    def blocks_needed(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a sequence with `num_blocks` blocks of tokens takes, window blocks included, if
        steps compute up to `max_chunk` of its tokens."""
        if self.all_windows:
            return min(num_blocks, self._most_seen(block_size, max_chunk))
        return num_blocks + self.num_window_blocks * min(num_blocks, self._most_seen(block_size, max_chunk))

    def blocks_held(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """Return how many blocks of tokens a sequence may have if it takes `num_blocks` blocks: the inverse of
        `blocks_needed`. If all layers have a window, a sequence of any length fits into the blocks that one chunk
        sees."""
        most_seen = self._most_seen(block_size, max_chunk)
        if self.all_windows:
            return num_blocks if num_blocks < most_seen else ANY_NUMBER
        return max(
            num_blocks - self.num_window_blocks * most_seen, min(num_blocks // (1 + self.num_window_blocks), most_seen)
        )

    def _most_seen(self, block_size: int, max_chunk: int) -> int:
        """Return how many blocks of tokens the tokens of a chunk see through the window."""
        return 0 if self.window is None else -(-(self.window + max_chunk) // block_size) + 1


PLAIN = KVGroups()


def lay_out(specs: Sequence[KVCacheSpec], *, split: bool) -> KVLayout:
    """Divide layers into groups and return their layout. Without `split`, layers with a window keep all tokens, like
    the others."""
    states = [spec for spec in specs if spec.kind == "state"]
    kept = [spec for spec in specs if spec.kind != "state"]
    assert kept, "a model without attention"
    state_bytes = max((-(-spec.state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for spec in states), default=0)
    layout = _split(kept) if split and can_split(specs) else _one_group(kept)
    if split and is_windowed(specs):
        layout = replace(layout, window=_longest_window(kept))
    layout = _with_index(kept, layout)
    return replace(layout, num_states=len(states), state_bytes=state_bytes, chunks=_chunks_of(kept, layout))


def _with_index(kept: Sequence[KVCacheSpec], layout: KVLayout) -> KVLayout:
    """Return the layout with further planes for the keys of indexers, as many in each as fit."""
    index, count = max(spec.index for spec in kept), 0
    if not index:
        return layout
    places: list[Place | None] = []
    at_once = layout.numbers // index
    for spec in kept:
        plane, part = divmod(count, at_once)
        places.append(Place(layout.num_planes + plane, 0, part) if spec.index else None)
        count += spec.index > 0
    num_planes = layout.num_planes + -(-count // at_once)
    return replace(layout, num_planes=num_planes, index=index, index_places=tuple(places))


def _chunks_of(kept: Sequence[KVCacheSpec], layout: KVLayout) -> tuple[int | None, ...]:
    if not any(spec.is_chunked for spec in kept):
        return ()
    of_table = {place.table: spec.window for spec, place in zip(kept, layout.places, strict=True) if spec.is_chunked}
    return tuple(of_table.get(table) for table in range(len(layout.sources)))


def is_windowed(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether all layers have a window."""
    return all(spec.kind == "window" for spec in specs)


def can_split(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether a separate group for layers with a window saves memory: some layers keep all tokens, and the window
    blocks would be at least half full."""
    windows = [spec for spec in specs if spec.kind == "window"]
    full = [spec for spec in specs if spec.kind not in ("window", "state")]
    if not full or not windows:
        return False
    numbers = _plane_numbers([*full, *windows])
    num_planes = -(-len(full) // (numbers // full[0].numbers))
    return 2 * len(windows) * windows[0].numbers >= num_planes * numbers


def _plane_numbers(kept: Sequence[KVCacheSpec]) -> int:
    """Return the entries per token in a plane: those of the layer that keeps most, rounded up to whole heads of all
    layers."""
    unit = math.lcm(*(spec.unit for spec in kept))
    return -(-max(spec.numbers for spec in kept) // unit) * unit


def _one_group(kept: Sequence[KVCacheSpec]) -> KVLayout:
    """Return the layout in which all layers keep all tokens. Layers with a window get a separate table if their
    heads differ or their windows are chunks: the blocks are the same, but attention is planned per table."""
    numbers = _plane_numbers(kept)
    full = next((spec for spec in kept if spec.kind != "window"), kept[0])
    places: list[Place] = []
    last: dict[int, Place] = {}  # of each table
    num_planes = 0
    for spec in kept:
        table = int((spec.numbers, spec.unit, spec.is_chunked) != (full.numbers, full.unit, full.is_chunked))
        before = last.get(table)
        if before is not None and before.part + 1 < numbers // spec.numbers:
            place = Place(before.plane, table, before.part + 1)
        else:
            place, num_planes = Place(num_planes, table), num_planes + 1
        last[table] = place
        places.append(place)
    return KVLayout(tuple(places), num_planes, numbers, (0,) * len(last))


def _split(kept: Sequence[KVCacheSpec]) -> KVLayout:
    """Return the layout in which layers with a window keep their tokens in window blocks. These have the same planes as
    other blocks."""
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
