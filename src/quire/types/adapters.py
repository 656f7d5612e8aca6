"""LoRA adapters: low-rank changes of a model's products, which requests choose by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
