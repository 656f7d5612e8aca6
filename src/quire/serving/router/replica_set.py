"""The router's replicas, which can be added and removed while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.config.router import MAX_REPLICAS, ReplicaAddress, RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.guard import is_for_admins
from quire.serving.http.key_ring import CLIENT_HEADER, KEY_HEADERS
from quire.serving.router.connections import Headers, ReplicaConnection, ReplicaFailed, ReplicaPool
from quire.serving.router.replica import Replica

logger = logging.getLogger("quire.router")

MAX_HOMES = 2**16  # stored objects whose replica is remembered
MAX_ASKED_BYTES = 16 * 2**20  # of the response to one of the router's own requests; the rest is dropped


class ReplicaSet:
    """The replicas by name, a connection pool for each, and which replica has which stored response, file or batch."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._replicas: dict[str, Replica] = {}
        self._pools: dict[str, ReplicaPool] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._up = asyncio.Event()
        for address in config.replicas:
            self.add(address)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def usable(self, tried: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that take requests and are not in `tried`."""
        takers = [one for one in self._replicas.values() if one.is_up and not one.is_draining and not one.is_removed]
        return [one for one in takers if one not in tried] if tried else takers

    def pool(self, replica: Replica) -> ReplicaPool:
        return self._pools[replica.name]

    def add(self, address: ReplicaAddress, *, is_up: bool = True) -> Replica:
        """Add a replica. Raises ApiError: 409 if the name is taken, 400 beyond MAX_REPLICAS."""
        if address.name in self._replicas:
            raise ApiError(409, f"name: {address.name} is a replica already; choose another", code="exists")
        if len(self._replicas) >= MAX_REPLICAS:
            raise ApiError(400, f"replicas: limit {MAX_REPLICAS}; remove one first", code="too_many")
        replica = Replica(address, self._config.balance)
        replica.is_up = is_up
        pool = ReplicaPool(address, self._config.waits, address.name)
        replica.on_down = pool.close
        self._replicas[address.name], self._pools[address.name] = replica, pool
        self.note_up()
        return replica

    def remove(self, replica: Replica) -> None:
        """Send the replica no more requests, and delete it once none is in flight."""
        replica.is_removed = True
        self.forget_if_done(replica)

    def forget_if_done(self, replica: Replica) -> None:
        if replica.is_removed and replica.load == 0 and self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]
            self._pools.pop(replica.name).close()
            logger.info("replica %s was removed", replica.name)

    def note_up(self) -> None:
        """Wake the requests that wait for a replica to come up."""
        self._up.set()

    async def wait_up(self, seconds: float) -> bool:
        """Wait until `note_up` is called. Returns False if that takes longer than `seconds`."""
        self._up.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------------------------------- stored objects
    def note_home(self, answer_id: str, replica: Replica) -> None:
        self._homes[answer_id] = replica.name
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def home_of(self, answer_id: str) -> Replica | None:
        name = self._homes.get(answer_id)
        return None if name is None else self._replicas.get(name)

    # ---------------------------------------------------------------------------------- requests of the router
    async def ask(
        self, replica: Replica, method: str, path: str, headers: Headers, body: bytes = b"", *, seconds: float
    ) -> tuple[int, Headers, bytes]:
        """Send a small request and return the status, headers and body of its response. Raises ReplicaFailed, after
        `seconds` at the latest. With empty `headers` the request carries the router's key for its own requests, if
        there is one. Otherwise `headers` carry the client's key, which `replica_key` replaces except on admin paths."""
        answer = _ResponseCollector()
        connection: ReplicaConnection | None = None
        try:
            async with asyncio.timeout(seconds):
                pool = self._pools[replica.name]
                connection = await pool.connect(seconds)
                address = replica.address
                lines = [b"%b: %b\r\n" % pair for pair in self._with_key(path, headers)]
                head = f"{method} {address.base_path}{path} HTTP/1.1\r\nhost: {address.authority}\r\n".encode("latin-1")
                data = (head, *lines, b"content-length: %d\r\n\r\n" % len(body), body)
                connection.send(data, answer, has_body=True)
                return await answer.whole
        except TimeoutError:
            raise ReplicaFailed(f"did not answer {path} within {seconds:g} s") from None
        finally:
            if connection is not None and not answer.is_whole:  # too late, or the client has disconnected
                connection.abort()

    def _with_key(self, path: str, headers: Headers) -> Headers:
        key = self._config.replica_key or (None if headers else self._config.own_key)
        if key is None or is_for_admins(path.partition("?")[0]):
            return headers
        kept = [pair for pair in headers if pair[0] not in KEY_HEADERS]
        own = [] if headers else [(CLIENT_HEADER, b"router")]  # a replica that separates clients echoes this header
        return [*kept, (b"authorization", b"Bearer " + key.encode()), *own]


class _ResponseCollector:
    """A `Receiver` that collects a whole response. `whole` resolves to its status, headers and body."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[tuple[int, Headers, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._headers, self._chunks, self._size = 0, Headers(), list[bytes](), 0
        self.is_whole = False  # then the connection may be in its pool again

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_ASKED_BYTES:
            self._chunks.append(data)

    def end(self) -> None:
        self.is_whole = True
        if not self.whole.done():
            self.whole.set_result((self._status, self._headers, b"".join(self._chunks)))

    def failed(self, reason: str, *, is_stale: bool = False) -> None:  # noqa: ARG002 - a receiver's signature
        if not self.whole.done():
            self.whole.set_exception(ReplicaFailed(reason))
