"""LoRA adapters in host memory, by their content hashes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from quire.runtime.adapters.reader import AdapterReader
from quire.runtime.adapters.slots import HostAdapter
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest


class AdapterStore:
    """Keeps the `capacity` adapters that were used last. Others are read from their folders again when they are needed.
    All methods may be called from any thread."""

    def __init__(self, reader: AdapterReader, capacity: int) -> None:
        self._reader, self._capacity = reader, max(1, capacity)
        self._lock = Lock()
        self._held: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest, the last used last
        self._folders: dict[str, str] = {}  # of all adapters that are known

    def read(self, name: str, folder: str) -> AdapterInfo:
        """Read and check an adapter, and keep it. Raises InvalidRequest if it does not fit the model."""
        adapter = self._reader.read(folder)
        with self._lock:
            self._folders[adapter.digest] = folder
            self._keep(adapter)
        return AdapterInfo(name, adapter.digest, adapter.rank, adapter.num_bytes, folder)

    def get(self, digest: str) -> HostAdapter:
        """Raises InvalidRequest for one that is not known, or whose folder holds another one by now."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
            folder = self._folders.get(digest)
        if folder is None:
            raise InvalidRequest("adapter", f"{digest[:12]} is not loaded", "load it first")
        adapter = self._reader.read(folder)
        if adapter.digest != digest:
            reason = f"the files of {digest[:12]} have changed since it was loaded"
            raise InvalidRequest("adapter", reason, "load it again under another name")
        with self._lock:
            if digest in self._folders:
                self._keep(adapter)
        return adapter

    def forget(self, digest: str) -> None:
        """Drop an adapter, if it is known."""
        with self._lock:
            self._held.pop(digest, None)
            self._folders.pop(digest, None)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def check(self) -> None:
        with self._lock:
            assert len(self._held) <= self._capacity
            assert self._held.keys() <= self._folders.keys()

    def _keep(self, adapter: HostAdapter) -> None:
        self._held[adapter.digest] = adapter
        self._held.move_to_end(adapter.digest)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
