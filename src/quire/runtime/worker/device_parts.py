"""The objects that all steps on a GPU share."""

from __future__ import annotations

from dataclasses import dataclass

from quire.runtime.attention.triton import TritonAttention
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.device_rows import DeviceRows
from quire.runtime.worker.images import ImageRows
from quire.runtime.worker.shared_prefixes import SharedPrefixes
from quire.runtime.worker.states import RowStates


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The rows, the cache, the attention backend and further state of rows on one GPU. The batch builder and all graphs
    of a worker use the same ones."""

    rows: DeviceRows
    cache: KVCache
    attention: TritonAttention
    shared: SharedPrefixes
    states: RowStates | None = None  # of models with recurrent layers
    images: ImageRows | None = None  # of models that take images
    adapters: RowAdapters | None = None  # of engines with LoRA adapters
