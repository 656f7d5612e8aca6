"""LoRA adapters in host memory, by their content hash."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from quire.runtime.adapters.reader import AdapterReader
from quire.runtime.adapters.slots import HostAdapter
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest


class AdapterStore:
    """Keeps the `capacity` most recently used adapters. Others are read from their folders again when needed. All
    methods are thread-safe."""

    def __init__(self, reader: AdapterReader, capacity: int) -> None:
        self._reader, self._capacity = reader, max(1, capacity)
        self._lock = Lock()
        self._held: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest, least recently used first
        # The folders that each known adapter was read from, by digest. The last one is tried first.
        self._folders: dict[str, dict[str, None]] = {}

    def read(self, name: str, folder: str) -> AdapterInfo:
        """Read, check and keep an adapter. Raises InvalidRequest if it does not fit the model."""
        adapter = self._reader.read(folder)
        with self._lock:
            folders = self._folders.setdefault(adapter.digest, {})
            folders.pop(folder, None)
            folders[folder] = None
            self._keep(adapter)
        return AdapterInfo(name, adapter.digest, adapter.rank, adapter.num_bytes, folder)

    def get(self, digest: str) -> HostAdapter:
        """Return an adapter. Raises InvalidRequest, for the field `model`, if it is unknown or none of its folders
        contains it any more."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
            folders = [*reversed(self._folders.get(digest, {}))]
        if not folders:
            raise InvalidRequest("model", f"the LoRA adapter {digest[:12]} is not loaded", "load it first")
        adapter = self._read_again(digest, folders)
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

    def _read_again(self, digest: str, folders: list[str]) -> HostAdapter:
        """Read an adapter from the first of `folders` that still contains it."""
        errors = []
        for folder in folders:
            try:
                adapter = self._reader.read(folder)
            except InvalidRequest as error:
                errors.append(
                    InvalidRequest("model", f"its LoRA adapter cannot be read again: {error.reason}", error.fix)
                )
                continue
            if adapter.digest == digest:
                return adapter
            reason = f"the files of the LoRA adapter {digest[:12]} have changed since it was loaded"
            errors.append(InvalidRequest("model", reason, "load it again under another name"))
        raise errors[0]

    def _keep(self, adapter: HostAdapter) -> None:
        self._held[adapter.digest] = adapter
        self._held.move_to_end(adapter.digest)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
