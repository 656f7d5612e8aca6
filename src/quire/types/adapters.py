"""LoRA adapters: low-rank changes of a model's products, which requests choose by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

OTHER_ADAPTERS = "others"  # the name under which requests are counted that are not counted by their adapter
NO_ADAPTER = -1  # the slot of rows that run the model as it is


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may name. `digest` is a content hash: of two adapters with the same digest either may
    serve the other's requests, and blocks are cached under it."""

    name: str
    digest: str
    rank: int
    num_bytes: int  # of its matrices, in the dtype they are multiplied in
    folder: str


class AdapterPlacement(NamedTuple):
    """Before a step runs, the adapter `digest` is put into `slot` of the device. No row uses what was there."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """LoRA adapters. `placements` and `requests` count since the start of the engine, or since the adapter was loaded;
    the others are current values."""

    loaded: int = 0
    slots: int = 0  # of the device
    slots_used: int = 0  # by running requests
    waiting: int = 0  # requests that wait for a slot
    placements: int = 0  # copies of an adapter into a slot
    requests: dict[str, int] = field(default_factory=dict)  # by the name of the adapter


NO_ADAPTERS = AdapterStats()
