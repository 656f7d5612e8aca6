"""The actor of one rank in a Ray cluster."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.environment import set_variables
from quire.config.parallel import RankPlace
from quire.runtime.executor.channel import Channel, Kind
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.rank import RankServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TOKEN_BYTES = 32
PURPOSES = ("control", "calls", "life", "beats")
HELLO = struct.Struct("<HB32s")  # rank, purpose, proof
_LIFE_SECONDS = 0.05
_SIOCGIFADDR = 0x8915


def sign(token: bytes, nonce: bytes, rank: int, purpose: int) -> bytes:
    """Return the proof that a connection knows the token. The token itself is never sent."""
    return hmac.digest(token, nonce + struct.pack("<HB", rank, purpose), "sha256")


class RankActor:
    """The actor of one rank; the launcher registers it with Ray. `run` never returns: the process ends with it."""

    def describe(self) -> tuple[int, str, str]:
        """Return the process id, the address of its node, and the node's id."""
        import ray

        return os.getpid(), ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def open_store(self, num_ranks: int) -> tuple[str, int]:
        """Open the store in which the ranks meet, on rank 0. Returns its address."""
        from torch._C._distributed_c10d import TCPStore

        _, node, _ = self.describe()
        self._store: Any = TCPStore(node, 0, num_ranks, True, wait_for_workers=False)
        return node, self._store.port

    def run(self, engine: tuple[str, int], token: bytes, rank: int, store: tuple[str, int]) -> None:
        _, node, _ = self.describe()
        if (interface := interface_of(node)) is not None:
            set_variables(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
        control, calls, life, beats = (connect(engine, token, rank, purpose) for purpose in range(len(PURPOSES)))
        page = LifePage(bytearray(PAGE_BYTES))

        def make_store(place: RankPlace) -> Store:
            from torch._C._distributed_c10d import TCPStore

            if place.rank == 0:
                found: Store = self._store
                return found
            return TCPStore(store[0], store[1], place.config.num_ranks, False)

        def end(code: int) -> NoReturn:
            with contextlib.suppress(OSError):
                life.send(Kind.LIFE, page.copy_bytes())  # contains the last message
            os._exit(code)

        threading.Thread(target=_tell, args=(life, page), name="quire-ray-life", daemon=True).start()
        RankServer(control, calls, page, make_store, end, beats.fileno()).run()


def _tell(life: Channel, page: LifePage) -> None:
    """Send the status page regularly until the engine is gone."""
    pause = threading.Event()
    with contextlib.suppress(OSError):
        while not pause.wait(_LIFE_SECONDS):
            life.send(Kind.LIFE, page.copy_bytes())


def connect(engine: tuple[str, int], token: bytes, rank: int, purpose: int) -> Channel:
    """Open a connection to the engine's process, and answer its challenge."""
    connection = socket.create_connection(engine, timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = b""
    while len(nonce) < TOKEN_BYTES:
        data = connection.recv(TOKEN_BYTES - len(nonce))
        if not data:
            raise ConnectionError("the engine hung up")
        nonce += data
    connection.sendall(HELLO.pack(rank, purpose, sign(token, nonce, rank, purpose)))
    connection.settimeout(None)
    return Channel(connection)


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address, or None if there is none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
