"""LoRA adapters: low-rank changes of a model's weight matrices. A request chooses one by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

OTHER_ADAPTERS = "others"  # metric label of requests whose adapter has no label of its own
NO_ADAPTER = -1  # the adapter slot of rows without an adapter


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may name. `digest` is its content hash: adapters with equal digests are interchangeable,
    and the prefix cache keeps blocks by digest."""

    name: str
    digest: str
    rank: int
    num_bytes: int  # size of its matrices in the dtype of their gemms
    folder: str


class AdapterPlacement(NamedTuple):
    """Tells the workers to copy the adapter `digest` into the device's adapter slot `slot` before a step runs. No row
    uses the slot's previous content."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Statistics of LoRA adapters. `placements` counts since the start of the engine, `requests` since each adapter was
    loaded; the other fields are current values."""

    loaded: int = 0
    slots: int = 0  # adapter slots on the device
    slots_used: int = 0  # slots whose adapter a running request uses
    waiting: int = 0  # requests that wait for a slot
    placements: int = 0  # copies of an adapter into a slot
    requests: dict[str, int] = field(default_factory=dict)  # accepted requests, by adapter name


NO_ADAPTERS = AdapterStats()
