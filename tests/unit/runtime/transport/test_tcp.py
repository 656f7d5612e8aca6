"""The KV transport over TCP: what a prefill engine put, decode engines get, if they know the token; every wait has a
deadline that names the peer, and frames of another size or kind end the connection."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.serving.server import free_port
from quire.config.parallel import NO_PARALLEL
from quire.runtime.transport import tcp_peers, tcp_store
from quire.runtime.transport.base import TransportError
from quire.runtime.transport.frames import HEAD, MAGIC
from quire.runtime.transport.sealed import SEAL_BYTES, layout_digest
from quire.runtime.transport.tcp_peers import TcpPeer, TcpPeers
from quire.runtime.transport.tcp_store import TcpStore
from quire.types.errors import ConfigError

SIZE = 100_000
ONE = NO_PARALLEL.place(0)
LAYOUT = layout_digest("00", "torch.float32", (2, 4), ONE)
TOKEN = b"secret"


def soon(seconds: float = 120.0) -> float:
    return time.monotonic() + seconds


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes((number + at) % 251 for at in range(SIZE)))


def make_store(num_blocks: int = 10, token: bytes = TOKEN, port: int = 0) -> TcpStore:
    return TcpStore("127.0.0.1", port, token, num_blocks * (SIZE + SEAL_BYTES), LAYOUT, SIZE)


def peers_of(*ports: int, token: bytes = TOKEN, layout: bytes = LAYOUT) -> TcpPeers:
    return TcpPeers([TcpPeer("127.0.0.1", port, token, layout) for port in ports])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, nobody is too slow to greet."""
    monkeypatch.setattr(tcp_store, "GREETING_SECONDS", 120.0)


@pytest.fixture
def store() -> Iterator[TcpStore]:
    made = make_store()
    yield made
    made.close()


def got(peers: TcpPeers, number: int, deadline: float | None = None) -> bytes:
    data = bytearray(SIZE)
    peers.get(key(number), memoryview(data), deadline or soon())
    return bytes(data)


def test_decode_engines_get_the_blocks_that_a_prefill_engine_puts(store: TcpStore) -> None:
    for number in range(5):
        store.put(key(number), block(number), soon())
    for _ in range(2):
        peers = peers_of(store.port)
        assert peers.has([key(3), key(9), key(0)], soon()) == {key(3), key(0)}
        assert got(peers, 3) == bytes(block(3))
        assert got(peers, 0) == bytes(block(0))
        peers.close()
    data = bytearray(SIZE)
    store.get(key(2), memoryview(data), soon())
    assert data == block(2)


def test_blocks_come_from_the_peer_that_has_them(store: TcpStore) -> None:
    other = make_store()
    store.put(key(1), block(1), soon())
    other.put(key(2), block(2), soon())
    peers = peers_of(store.port, other.port)
    assert peers.has([key(1), key(2)], soon()) == {key(1), key(2)}
    assert [got(peers, 1), got(peers, 2)] == [bytes(block(1)), bytes(block(2))]
    other.close()
    with pytest.raises(TransportError, match=f"127.0.0.1:{other.port}"):
        got(peers, 2)
    assert peers.has([key(1), key(2)], soon()) == {key(1)}  # one peer that is gone hides none of the others'
    peers.close()


def test_the_least_recently_used_blocks_make_room() -> None:
    store = make_store(num_blocks=3)
    for number in range(3):
        store.put(key(number), block(number), soon())
    peers = peers_of(store.port)
    assert peers.has([key(0)], soon()) == {key(0)}
    got(peers, 0)
    store.put(key(3), block(3), soon())
    assert peers.has([key(number) for number in range(4)], soon()) == {key(0), key(2), key(3)}
    store.put(key(4), block(4), soon())  # all were asked for: the last of the prefix goes first
    with pytest.raises(TransportError) as raised:
        got(peers, 3)
    assert raised.value.reason == "missing"
    assert got(peers, 0) == bytes(block(0))
    peers.close()
    store.close()


@pytest.mark.parametrize("token", [b"", b"Secret"])
def test_a_client_without_the_token_gets_nothing(store: TcpStore, token: bytes) -> None:
    store.put(key(1), block(1), soon())
    peers = peers_of(store.port, token=token)
    with pytest.raises(TransportError, match=f"tcp://127.0.0.1:{store.port} has another kv_token_file"):
        peers.has([key(1)], soon())
    peers.close()


def test_a_client_that_skips_the_greeting_gets_nothing(store: TcpStore) -> None:
    store.put(key(1), block(1), soon())
    with socket.create_connection(("127.0.0.1", store.port), 60) as sock:
        sock.sendall(HEAD.pack(MAGIC, 4, 32) + key(1))
        assert sock.recv(100) == b""


def test_a_block_of_another_model_is_refused(store: TcpStore) -> None:
    store.put(key(1), block(1), soon())
    peers = peers_of(store.port, layout=layout_digest("01", "torch.float32", (2, 4), ONE))
    assert peers.has([key(1)], soon()) == {key(1)}
    with pytest.raises(TransportError, match="another key, model, layout") as raised:
        got(peers, 1)
    assert raised.value.reason == "corrupt"
    peers.close()


def test_a_block_that_was_changed_in_transit_is_refused(store: TcpStore) -> None:
    store.put(key(1), block(1), soon())
    seal, data = store._blocks[key(1)]
    store._blocks[key(1)] = seal, data[:-1] + b"x"
    peers = peers_of(store.port)
    peers.has([key(1)], soon())
    with pytest.raises(TransportError, match="checksum"):
        got(peers, 1)
    store._blocks[key(1)] = seal, data[:-1]
    with pytest.raises(TransportError, match="wrong size"):
        got(peers, 1)
    store._blocks[key(1)] = seal, data
    assert got(peers, 1) == bytes(block(1))
    peers.close()


def test_a_silent_peer_times_out_and_is_not_called_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_peers, "_LEAST_PAUSE", 600.0)
    monkeypatch.setattr(tcp_peers, "_MOST_PAUSE", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        peers = peers_of(port)
        with pytest.raises(TransportError, match=f"tcp://127.0.0.1:{port} did not answer in time") as raised:
            peers.has([key(1)], soon(0.05))
        assert raised.value.reason == "timeout"
        with pytest.raises(TransportError, match="failed recently and is not retried yet"):
            peers.has([key(1)], soon(3600))
        peers.close()


def test_a_peer_that_restarts_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_peers, "_LEAST_PAUSE", 0.0)
    store = make_store(port=free_port())
    peers = peers_of(store.port)
    store.put(key(1), block(1), soon())
    assert peers.has([key(1)], soon()) == {key(1)}
    store.close()
    with pytest.raises(TransportError):
        peers.has([key(1)], soon())
    again = make_store(port=store.port)
    again.put(key(2), block(2), soon())
    assert peers.has([key(1), key(2)], soon()) == {key(2)}
    assert got(peers, 2) == bytes(block(2))
    peers.close()
    again.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b" " * 100,
        HEAD.pack(MAGIC, 0, 2**60),  # longer than any greeting
        HEAD.pack(MAGIC, 0, 5) + b"short",
        struct.pack("<4sBQ", b"QKT9", 0, 32) + bytes(32),
    ],
)
def test_invalid_frames_end_only_their_connection(store: TcpStore, frame: bytes) -> None:
    store.put(key(1), block(1), soon())
    with socket.create_connection(("127.0.0.1", store.port), 60) as sock:
        sock.sendall(frame)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    peers = peers_of(store.port)
    assert peers.has([key(1)], soon()) == {key(1)}
    peers.close()


def test_a_store_accepts_connections_again_after_too_many_open_files(
    store: TcpStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(key(1), block(1), soon())
    waiting = socket.socket()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        waiting.connect(("127.0.0.1", store.port))
        until = soon()
        while "could not take a connection" not in caplog.text and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    waiting.close()
    assert "Too many open files" in caplog.text
    peers = peers_of(store.port)
    assert peers.has([key(1)], soon()) == {key(1)}
    peers.close()


def test_blocks_that_were_looked_up_are_evicted_after_others() -> None:
    store = make_store(num_blocks=3)
    for number in range(3):
        store.put(key(number), block(number), soon())
    assert store.has([key(0), key(9)], soon()) == {key(0)}
    store.put(key(3), block(3), soon())
    assert store.has([key(number) for number in range(4)], soon()) == {key(0), key(2), key(3)}
    store.close()


def test_an_address_in_use_is_refused(store: TcpStore) -> None:
    with pytest.raises(ConfigError, match=f"kv_transport: cannot listen on tcp://127.0.0.1:{store.port}"):
        make_store(port=store.port)
