"""The LoRA adapters that requests may name, and the live requests that use each. EngineCore owns the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from quire.engine.adapter_fetch import AdapterFetch, ThreadedFetch
from quire.engine.decoding.group import Group
from quire.engine.executor import Executor
from quire.engine.observer import EngineObserver
from quire.engine.scheduler.adapter_slots import AdapterSlots
from quire.types.adapters import OTHER_ADAPTERS, AdapterInfo, AdapterStats
from quire.types.errors import InvalidRequest
from quire.types.request import Submit

MAX_ADAPTERS = 4_096  # names
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,256}")  # no control character or line break
_SHOWN = 16  # names in a message
_REMEMBERED = 16_384  # recent requests whose adapter is remembered, to check requests that branch from them
_COUNTED = 64  # adapters whose requests are counted separately


class AdapterTable:
    """Maps names to adapters, and counts the live requests of each digest.

    The executor keeps an adapter in host memory until no name and no live request uses it. A request keeps the adapter
    that its name meant when it was submitted. One thread calls this class; only `read` may be called by any thread
    between `begin_load` and `finish_load`.
    """

    def __init__(self, slots: AdapterSlots, executor: Executor, observer: EngineObserver) -> None:
        self._slots, self._executor, self._observer = slots, executor, observer
        self._infos: dict[str, AdapterInfo] = {}  # by name
        self._loading: Counter[str] = Counter()  # names being loaded
        self._names: Counter[str] = Counter()  # by digest: how many names it has
        self._users: Counter[str] = Counter()  # by digest: live requests
        self._unused: dict[str, None] = {}  # digests that the executor may forget once nothing is being loaded
        self._requests: Counter[str] = Counter()  # by name: requests since it was loaded
        self._used: dict[str, tuple[str, str]] = {}  # by request id: name and digest of its adapter, most recent last
        # By digest: the folder it was last read from, until the executor forgets it.
        self._known: dict[str, AdapterInfo] = {}
        self._fetching: set[str] = set()  # digests being read again
        self.fetch: AdapterFetch = ThreadedFetch(executor)
        slots.host.start_reading = self._read_again

    # ------------------------------------------------------------------------------------------------------ requests
    def resolve(self, request: Submit) -> Submit:
        """Return the request with the digest of the adapter that it names. Raises InvalidRequest if no adapter has that
        name, or if the request branches from another one that ran with different content under that name."""
        name = request.adapter
        if not name:
            return request if not request.adapter_digest else replace(request, adapter_digest="")
        if not isinstance(name, str):
            raise InvalidRequest("model", f"is {name!r}, not a text", "send a string")
        self._check_enabled("model")
        if name not in self._infos:
            raise InvalidRequest("model", f"no LoRA adapter has the name {name!r}", self._fix())
        digest = self._infos[name].digest
        if request.source is not None:
            used, before = self._used.get(request.source.request_id, (name, digest))
            if used == name and before != digest:
                reason = f"{name!r} was replaced since {request.source.request_id!r:.80} ran with it"
                raise InvalidRequest("source.adapter", reason, "send the prompt again, or load the earlier adapter")
        return replace(request, adapter_digest=digest)

    def hold(self, request: Submit) -> None:
        """Note that a request was accepted."""
        if request.adapter_digest:
            self._users[request.adapter_digest] += 1
            self._requests[request.adapter] += 1
            self._used.pop(request.request_id, None)
            self._used[request.request_id] = (request.adapter, request.adapter_digest)
            if len(self._used) > _REMEMBERED:
                del self._used[next(iter(self._used))]

    def release(self, request: Submit) -> None:
        """Note that an accepted request has ended."""
        digest = request.adapter_digest
        if digest:
            self._users[digest] -= 1
            self._forget_if_unused(digest)

    def _fix(self) -> str:
        names = [*self._infos][:_SHOWN]
        more = f" and {len(self._infos) - len(names)} more" if len(names) < len(self._infos) else ""
        return f"use one of {', '.join(map(repr, names))}{more}, or load it" if names else "load it first"

    def _check_enabled(self, field: str) -> None:
        if not len(self._slots):
            raise InvalidRequest(field, "this engine has no LoRA adapters", "start it with enable_lora")

    # ------------------------------------------------------------------------------------------- loading and unloading
    def load(self, name: str, folder: str, *, in_place: bool = False) -> AdapterInfo:
        """Read an adapter and register it under a name. Blocks until it is read. Raises InvalidRequest."""
        self.begin_load(name, in_place=in_place)
        info = None
        try:
            info = self.read(name, folder)
        finally:
            self.finish_load(name, info)
        return info

    def begin_load(self, name: str, *, in_place: bool = False) -> None:
        """Check that an adapter may be loaded under this name; `finish_load` must follow. With `in_place`, the name may
        be in use: later requests get the new adapter. Raises InvalidRequest."""
        self._check_enabled("lora_name")
        if _NAME.fullmatch(name) is None or name != name.strip():
            reason = f"{name!r:.80} is no name of an adapter"
            fix = "use 1 to 256 characters without control characters, line breaks or outer spaces"
            raise InvalidRequest("lora_name", reason, fix)
        if (name in self._infos and not in_place) or name in self._loading:
            reason = f"{name!r} is {'loaded already' if name in self._infos else 'being loaded'}"
            raise InvalidRequest("lora_name", reason, "choose another, unload it, or set load_inplace")
        if len(self._infos) + len(self._loading) >= MAX_ADAPTERS:
            raise InvalidRequest("lora_name", f"{MAX_ADAPTERS} adapters are loaded, the limit", "unload another")
        self._loading[name] += 1

    def read(self, name: str, folder: str) -> AdapterInfo:
        """Read an adapter into host memory. Blocks; any thread may call it. Raises InvalidRequest."""
        return self._executor.read_adapter(name, folder)

    def finish_load(self, name: str, info: AdapterInfo | None) -> None:
        """Register the adapter that was read under `name`; `info` is None if it could not be read."""
        del self._loading[name]
        if info is not None:
            self.add(info)
        self._forget_unused()

    def add(self, info: AdapterInfo) -> None:
        """Register an adapter that the executor has read. It replaces an adapter of the same name."""
        before = self._infos.get(info.name)
        self._infos[info.name] = info
        self._names[info.digest] += 1
        self._known[info.digest] = info
        self._slots.host.use(info.digest)
        self._observer.adapter_loaded(info)
        if before is not None:
            self._unname(before)

    def unload(self, name: str) -> AdapterInfo:
        """Remove a name. Live requests of its adapter continue. Raises InvalidRequest if there is no such name."""
        self._check_enabled("lora_name")
        info = self._infos.pop(name, None)
        if info is None:
            raise InvalidRequest("lora_name", f"no LoRA adapter has the name {name!r:.300}", self._fix())
        del self._requests[name]
        self._observer.adapter_unloaded(name)
        self._unname(info)
        return info

    def listing(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests may name, in the order in which they were loaded."""
        return tuple(self._infos.values())

    def _unname(self, info: AdapterInfo) -> None:
        self._names[info.digest] -= 1
        self._forget_if_unused(info.digest)

    def _forget_if_unused(self, digest: str) -> None:
        """Let the executor forget an adapter that no name and no live request uses. Deferred while adapters are being
        read, because one of them may be the same adapter."""
        if self._names[digest] or self._users[digest]:
            return
        if self._loading or self._fetching:
            self._unused[digest] = None
            return
        del self._names[digest], self._users[digest]
        self._known.pop(digest, None)
        self._slots.drop(digest)
        self._slots.host.forget(digest)
        self._executor.forget_adapter(digest)

    def _forget_unused(self) -> None:
        if not self._loading and not self._fetching:
            unused, self._unused = self._unused, {}
            for digest in unused:
                self._forget_if_unused(digest)

    # -------------------------------------------------------------------------------------------------- reading again
    def _read_again(self, digest: str) -> None:
        self._fetching.add(digest)
        self.fetch.start(self._known[digest])

    def take_fetched(self) -> None:
        """Note which adapters have been read again, and start to read the next. Called once per step; never blocks."""
        if not self._fetching:
            self._slots.host.fetch()
            return
        for fetched in self.fetch.take():
            self._fetching.remove(fetched.digest)
            self._slots.host.arrived(fetched.digest, was_read=fetched.was_read)
            self._observer.adapter_fetched(fetched.digest, was_read=fetched.was_read)
            if fetched.found and not fetched.was_read:
                self._unused[fetched.found] = None  # its files have changed, and no request uses the new content
        self._forget_unused()

    # ------------------------------------------------------------------------------------------------------- accounts
    def stats(self) -> AdapterStats:
        slots, counts = self._slots, dict(list(self._requests.items())[:_COUNTED])
        if len(counts) < len(self._requests):
            rest = self._requests.total() - sum(counts.values())
            counts[OTHER_ADAPTERS] = counts.get(OTHER_ADAPTERS, 0) + rest
        return AdapterStats(
            loaded=len(self._infos),
            slots=len(slots),
            slots_used=slots.num_used,
            waiting=slots.num_waiting,
            placements=slots.num_placements,
            requests=counts,
        )

    def check(self, live: Iterable[Group]) -> None:
        """Assert that names and users are counted correctly for every digest, and that nothing else is kept."""
        users = Counter(group.request.adapter_digest for group in live if group.request.adapter_digest)
        names = Counter(info.digest for info in self._infos.values())
        assert +self._users == users
        assert +self._names == names
        assert {*self._names, *self._users} == {*names, *users, *self._unused}
        assert self._requests.keys() <= self._infos.keys()
        assert self._known.keys() >= {*names, *users}
        assert all(self._slots.host.is_missing(digest) for digest in self._fetching)
